"""What the programs of a team tell each other in GroupNorm, and both directions for groups that are one run of
memory."""

import triton
import triton.language as tl

from csrc_triton.common.exchange import high_value, poll, post
from csrc_triton.norms.layernorm_long import block_moments
from csrc_triton.norms.moments import merge
from csrc_triton.norms.norm_vectors import load_vector


@triton.jit
def swap(WORDS, launch, unit, a, b, part, split, SPLIT: tl.constexpr, GROUPS: tl.constexpr):
    """Hand a and b [GROUPS] to the other programs of the team and wait for theirs: [SPLIT, GROUPS] each, in the order
    of the parts, 0 past ``split``. WORDS[n_units, 2, split, GROUPS] hold zeros or what other launches left."""
    WORDS += tl.cast(unit, tl.int64) * 2 * split * GROUPS
    group = tl.arange(0, GROUPS)
    post(WORDS + part * GROUPS + group, a, launch)
    post(WORDS + (split + part) * GROUPS + group, b, launch)
    lane = tl.arange(0, triton.next_power_of_2(SPLIT))
    at = WORDS + tl.minimum(lane, split - 1)[:, None] * GROUPS + group[None, :]
    first = tl.zeros([triton.next_power_of_2(SPLIT), GROUPS], tl.int64)
    second = first
    while unposted(first, second, launch):
        first = poll(at)
        second = poll(at + split * GROUPS)
    live = (lane < split)[:, None]
    return tl.where(live, high_value(first), 0.0), tl.where(live, high_value(second), 0.0)


@triton.jit
def unposted(first, second, launch):
    """True while any word is missing."""
    return tl.max(tl.max((first.to(tl.int32) ^ launch) | (second.to(tl.int32) ^ launch), 1), 0) != 0


@triton.jit
def team_moments(
    WORDS, launch, unit, mean, deviation, part, split, length, size, channels, SPLIT: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    """(mean, sum of squared deviations) [GROUPS] of all parts: each is of ``length`` of the ``size`` places (but
    for the last) of every one of ``channels``."""
    if split > 1:
        means, deviations = swap(WORDS, launch, unit, mean, deviation, part, split, SPLIT, GROUPS)
        lane = tl.arange(0, triton.next_power_of_2(SPLIT))
        places = tl.maximum(tl.minimum(length, size - lane.to(tl.int64) * length), 0)
        counts = places.to(tl.float32) * channels
        mean, deviation = merge(means, deviations, counts[:, None], size.to(tl.float32) * channels)
    return mean, deviation


@triton.jit
def team_sums(WORDS, launch, unit, a, b, part, split, SPLIT: tl.constexpr, GROUPS: tl.constexpr):
    """a and b [GROUPS], added up over the parts."""
    if split > 1:
        all_a, all_b = swap(WORDS, launch, unit, a, b, part, split, SPLIT, GROUPS)
        a = tl.sum(all_a, 0)
        b = tl.sum(all_b, 0)
    return a, b


@triton.jit
def reciprocal(spatial):
    """What ``channels_of`` multiplies by to divide by ``spatial`` (more than 1)."""
    return ((1 << 32) // spatial.to(tl.int64) + 1).to(tl.uint32)


@triton.jit
def channels_of(place, spatial, magic, BLOCK: tl.constexpr):
    """How many channels of ``spatial`` elements are over at ``place``, less than spatial + BLOCK."""
    # Two channels at most, or place * spatial < 2^32, so that the division is exact.
    divided = tl.umulhi(place.to(tl.uint32), magic).to(tl.int32)
    return tl.where(spatial >= BLOCK, (place >= spatial).to(tl.int32), divided)


@triton.jit
def line_vectors(W, B, channel, mask, w_kind, b_kind):
    """Weight and bias of lines of one channel each."""
    w = load_vector(W, channel, mask, w_kind) + (w_kind == 0)
    return w, load_vector(B, channel, mask, b_kind)


@triton.jit
def scale_part(
    Y, X, W, B, channel, offset, count, blocks, mean, rstd, spatial, w_kind, b_kind,
    BLOCK: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """The second read of a part, what was read last first: normalise, scale by the channel, store. The channel is
    looked up once for FOLD neighbours, which are of one. ``offset`` elements of the first channel are before the
    part."""
    line = tl.arange(0, BLOCK // FOLD) * FOLD
    at = line[:, None] + tl.arange(0, FOLD)[None, :]
    magic = reciprocal(spatial)
    step = BLOCK // spatial
    step_offset = BLOCK % spatial
    begin = (blocks - 1) * BLOCK
    channel += (offset + begin) // spatial
    offset = (offset + begin) % spatial
    for _ in range(blocks):
        mask = begin + line < count
        x = tl.load(X + begin + at, mask=mask[:, None], other=0.0, eviction_policy="evict_first").to(
            tl.float32
        )
        here = channel + channels_of(offset + line, spatial, magic, BLOCK)
        w, b = line_vectors(W, B, here, mask, w_kind, b_kind)
        y = (x - mean) * (rstd * w)[:, None] + b[:, None]
        tl.store(Y + begin + at, y.to(Y.dtype.element_ty), mask=mask[:, None], eviction_policy="evict_first")
        begin -= BLOCK
        channel -= step
        offset -= step_offset
        borrow = (offset < 0).to(tl.int32)
        channel -= borrow
        offset += borrow * spatial


@triton.jit
def scale_group(
    unit, Y, X, W, B, STATS, WORDS, launch, n_units, groups, channels, spatial, size, length, split, eps, w_kind,
    b_kind,
    store_stats, SPLIT: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """A program's part of a group."""
    part = tl.program_id(0) % split
    start = part.to(tl.int64) * length
    count = tl.minimum(length, size - start).to(tl.int32)
    at = tl.cast(unit, tl.int64) * size + start
    if BLOCKS > 0:
        blocks = BLOCKS
    else:
        blocks = tl.cdiv(count, BLOCK)
    mean, deviation = block_moments(X + at, count, blocks, BLOCK, FOLD)
    if SPLIT > 1:
        one = tl.zeros([1], tl.float32)
        all_mean, all_deviation = team_moments(
            WORDS, launch, unit, one + mean, one + deviation, part, split, length, size, 1, SPLIT, 1
        )
        mean = tl.sum(all_mean, 0)
        deviation = tl.sum(all_deviation, 0)
    rstd = tl.rsqrt(deviation / size + eps)
    if (store_stats != 0) & (part == 0):
        tl.store(STATS + unit * 2, mean)
        tl.store(STATS + unit * 2 + 1, rstd)
    channel = unit % groups * channels + (start // spatial).to(tl.int32)
    offset = (start % spatial).to(tl.int32)
    scale_part(
        Y + at, X + at, W, B, channel, offset, count, blocks, mean, rstd, spatial, w_kind, b_kind, BLOCK, FOLD
    )  # fmt: skip


@triton.jit
def walk_groups(
    Y, X, W, B, STATS, WORDS, launch, n_units, groups, channels, spatial, size, length, split, eps, w_kind, b_kind,
    store_stats, SPLIT: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    if SPLIT > 1:
        for unit in range(tl.program_id(0) // split, n_units, tl.num_programs(0) // split):
            scale_group(
                unit, Y, X, W, B, STATS, WORDS, launch, n_units, groups, channels, spatial, size, length, split, eps,
                w_kind, b_kind, store_stats, SPLIT, BLOCK, BLOCKS, FOLD,
            )  # fmt: skip
    else:
        scale_group(
            tl.program_id(0), Y, X, W, B, STATS, WORDS, launch, n_units, groups, channels, spatial, size, length,
            split, eps, w_kind, b_kind, store_stats, SPLIT, BLOCK, BLOCKS, FOLD,
        )  # fmt: skip


@triton.jit
def whole_of(
    Y, X, W, B, STATS, groups, channels, spatial, size, eps, w_kind, b_kind, store_stats, BLOCK: tl.constexpr
):  # fmt: skip
    fold: tl.constexpr = 128 // X.dtype.element_ty.primitive_bitwidth
    unit = tl.program_id(0)
    line = tl.arange(0, BLOCK // fold) * fold
    at = unit.to(tl.int64) * size
    Y += at
    X += at
    at = line[:, None] + tl.arange(0, fold)[None, :]
    mask = line < size
    x = tl.load(X + at, mask=mask[:, None], other=0.0).to(tl.float32)
    channel = unit % groups * channels + channels_of(line, spatial, reciprocal(spatial), BLOCK)
    w, b = line_vectors(W, B, channel, mask, w_kind, b_kind)
    mean = tl.sum(tl.sum(x, 1), 0) / size
    apart = tl.where(mask[:, None], x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(tl.sum(apart * apart, 1), 0) / size + eps)
    if store_stats != 0:
        tl.store(STATS + unit * 2, mean)
        tl.store(STATS + unit * 2 + 1, rstd)
    y = apart * (rstd * w)[:, None] + b[:, None]
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=mask[:, None])


@triton.jit
def add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def group_gradients(
    unit, DX, DY, X, W, STATS, PARTIALS, WORDS, launch, n_units, groups, channels, spatial, length, split, columns,
    db_column, w_kind, store_dx, store_dw, store_db,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """A program's part of a group."""
    part = tl.program_id(0) % split
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK)
    start = part * length
    count = tl.minimum(length, spatial - start)
    n = spatial.to(tl.float32) * channels
    at = row[:, None] * spatial + lane[None, :]
    mean = tl.load(STATS + unit * 2)
    rstd = tl.load(STATS + unit * 2 + 1)
    first_channel = unit % groups * channels
    part_at = tl.cast(unit, tl.int64) * channels * spatial + start
    sums_at = PARTIALS + (unit // groups * split + part).to(tl.int64) * columns + first_channel
    alongs = tl.zeros([ROWS], tl.float32)
    offsets = tl.zeros([ROWS], tl.float32)
    for channel in range(0, channels, ROWS):
        in_rows = channel + row < channels
        dots = tl.zeros([ROWS, BLOCK // FOLD], tl.float32)
        sums = tl.zeros([ROWS, BLOCK // FOLD], tl.float32)
        for begin in range(0, count, BLOCK):
            mask = in_rows[:, None] & (begin + lane < count)[None, :]
            tile = part_at + channel * spatial + begin
            x = tl.load(X + tile + at, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
            dy = tl.load(DY + tile + at, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
            dots += tl.sum(tl.reshape(dy * (x - mean), [ROWS, BLOCK // FOLD, FOLD]), 2)
            sums += tl.sum(tl.reshape(dy, [ROWS, BLOCK // FOLD, FOLD]), 2)
        dw, db = tl.reduce((dots, sums), 1, add_both)
        dw *= rstd
        rows = channel + row
        tl.store(sums_at + rows, dw, mask=in_rows & (store_dw != 0))
        tl.store(sums_at + db_column + rows, db, mask=in_rows & (store_db != 0))
        w = load_vector(W, rows, in_rows, w_kind, first_channel) + (w_kind == 0)
        alongs += w * dw
        offsets += w * db
    along, offset = tl.reduce((alongs, offsets), 0, add_both)
    if SPLIT > 1:
        one = tl.zeros([1], tl.float32)
        all_along, all_offset = team_sums(
            WORDS, launch, unit, one + along, one + offset, part, split, SPLIT, 1
        )
        along = tl.sum(all_along, 0)
        offset = tl.sum(all_offset, 0)
    if store_dx != 0:
        slope = along / n * rstd * rstd
        level = offset / n * rstd - mean * slope
        blocks = tl.cdiv(count, BLOCK)
        steps = tl.cdiv(channels, ROWS)
        for step in range(steps):
            channel = (steps - 1 - step) * ROWS
            in_rows = channel + row < channels
            w = load_vector(W, channel + row, in_rows, w_kind, first_channel) + (w_kind == 0)
            w = (rstd * w)[:, None]
            for i in range(blocks):
                begin = (blocks - 1 - i) * BLOCK
                mask = in_rows[:, None] & (begin + lane < count)[None, :]
                tile = part_at + channel * spatial + begin
                x = tl.load(X + tile + at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
                dy = tl.load(DY + tile + at, mask=mask, other=0.0, eviction_policy="evict_first").to(
                    tl.float32
                )
                dx = (w * dy - (x * slope + level)).to(DX.dtype.element_ty)
                tl.store(DX + tile + at, dx, mask=mask, eviction_policy="evict_first")


@triton.jit
def walk_gradients(
    DX, DY, X, W, STATS, PARTIALS, WORDS, launch, n_units, groups, channels, spatial, length, split, columns, db_column,
    w_kind, store_dx, store_dw, store_db,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    if SPLIT > 1:
        for unit in range(tl.program_id(0) // split, n_units, tl.num_programs(0) // split):
            group_gradients(
                unit, DX, DY, X, W, STATS, PARTIALS, WORDS, launch, n_units, groups, channels, spatial, length,
                split, columns, db_column, w_kind, store_dx, store_dw, store_db, SPLIT, ROWS, BLOCK, FOLD,
            )  # fmt: skip
    else:
        group_gradients(
            tl.program_id(0), DX, DY, X, W, STATS, PARTIALS, WORDS, launch, n_units, groups, channels, spatial,
            length, split, columns, db_column, w_kind, store_dx, store_dw, store_db, SPLIT, ROWS, BLOCK,
            FOLD,
        )  # fmt: skip
