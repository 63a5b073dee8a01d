"""GroupNorm on any architecture: a short group in registers, any other read twice, the second time from its end, where
it is the likeliest to be in a cache still.

Where there are fewer groups than the GPU holds CTAs, or a group is too long for the caches, ``n_splits`` CTAs share it:
each reduces its part, and they exchange the results in the same launch, which is cooperative. CTAs are persistent then.
Words of the exchange are tagged with ``launch``, a number that no earlier launch had: so nobody need zero them, which
would cost 0.02 of the copy. The exchange is PTX: AMD has no split.

Statistics are fp32 and never a difference of large sums (``moments``). Wu and He, Group Normalization (2018).
"""

import triton
import triton.language as tl
from triton.language.core import _aggregate as aggregate

from csrc_triton.common.exchange import high_value, poll, post
from csrc_triton.norms.moments import block_moments, merge
from csrc_triton.norms.norm_vectors import load_vector

# ---- what both layouts need ------------------------------------------------------------------------------------------


@aggregate
class Split:
    """How CTAs share a unit of work, a group or several, and where they exchange what they find."""

    WORKSPACE: tl.tensor  # [n_units, 2, n_splits, groups] words: zeros, or what earlier launches left
    launch: tl.tensor
    n_splits: tl.tensor
    length: tl.tensor  # of a part
    MAX_SPLITS: tl.constexpr

    @triton.constexpr_function
    def __init__(self, WORKSPACE, launch, n_splits, length, MAX_SPLITS):
        self.WORKSPACE, self.launch = WORKSPACE, launch
        self.n_splits, self.length = n_splits, length
        self.MAX_SPLITS = tl.constexpr(MAX_SPLITS)


@aggregate
class Affine:
    """Weight and bias, by ``norm_vectors``."""

    W: tl.tensor
    B: tl.tensor
    w_kind: tl.tensor
    b_kind: tl.tensor

    @triton.constexpr_function
    def __init__(self, W, B, w_kind, b_kind):
        self.W, self.B, self.w_kind, self.b_kind = W, B, w_kind, b_kind


@aggregate
class Gradients:
    """Where the gradients go, and which are wanted."""

    DX: tl.tensor
    PARTIALS: tl.tensor  # [parts, columns]: dweight's columns, and dbias' from ``db_column`` on
    columns: tl.tensor
    db_column: tl.tensor
    store_dx: tl.tensor
    store_dw: tl.tensor
    store_db: tl.tensor

    @triton.constexpr_function
    def __init__(self, DX, PARTIALS, columns, db_column, store_dx, store_dw, store_db):
        self.DX, self.PARTIALS, self.columns, self.db_column = DX, PARTIALS, columns, db_column
        self.store_dx, self.store_dw, self.store_db = store_dx, store_dw, store_db


@triton.jit
def exchange(unit, split, a, b, s, GROUPS: tl.constexpr):
    """Post a and b [GROUPS] of one split for the other CTAs of the unit and wait for theirs: [MAX_SPLITS, GROUPS] each,
    in the order of the splits, 0 from ``n_splits`` on."""
    words = s.WORKSPACE + tl.cast(unit, tl.int64) * 2 * s.n_splits * GROUPS
    group = tl.arange(0, GROUPS)
    post(words + split * GROUPS + group, a, s.launch)
    post(words + (s.n_splits + split) * GROUPS + group, b, s.launch)
    splits = tl.arange(0, triton.next_power_of_2(s.MAX_SPLITS))
    at = words + tl.minimum(splits, s.n_splits - 1)[:, None] * GROUPS + group[None, :]
    first = tl.zeros([triton.next_power_of_2(s.MAX_SPLITS), GROUPS], tl.int64)
    second = first
    while not_posted(first, second, s.launch):
        first = poll(at)
        second = poll(at + s.n_splits * GROUPS)
    live = (splits < s.n_splits)[:, None]
    return tl.where(live, high_value(first), 0.0), tl.where(live, high_value(second), 0.0)


@triton.jit
def not_posted(first, second, launch):
    """Whether any word has another tag than this launch's."""
    return tl.max(tl.max((first.to(tl.int32) ^ launch) | (second.to(tl.int32) ^ launch), 1), 0) != 0


@triton.jit
def combined_moments(unit, split, mean, deviation, size, channels, s, GROUPS: tl.constexpr):
    """(mean, sum of squared deviations) [GROUPS] of all parts: each is of ``length`` of the ``size`` positions (the
    last one of the rest) of every one of ``channels``."""
    if s.n_splits > 1:
        means, deviations = exchange(unit, split, mean, deviation, s, GROUPS)
        splits = tl.arange(0, triton.next_power_of_2(s.MAX_SPLITS))
        positions = tl.maximum(tl.minimum(s.length, size - splits.to(tl.int64) * s.length), 0)
        counts = positions.to(tl.float32) * channels
        mean, deviation = merge(means, deviations, counts[:, None], size.to(tl.float32) * channels)
    return mean, deviation


@triton.jit
def combined_sums(unit, split, a, b, s, GROUPS: tl.constexpr):
    """a and b [GROUPS], added up over the parts."""
    if s.n_splits > 1:
        all_a, all_b = exchange(unit, split, a, b, s, GROUPS)
        a = tl.sum(all_a, 0)
        b = tl.sum(all_b, 0)
    return a, b


# ---- channels first: a group is one run of memory --------------------------------------------------------------------


@triton.constexpr_function
def vector_of(dtype, unaligned):
    """Elements that one load takes."""
    return 1 if unaligned else 128 // dtype.primitive_bitwidth


@triton.jit
def reciprocal(spatial):
    """What ``channels_of`` multiplies by to divide by ``spatial`` (more than 1)."""
    return ((1 << 32) // spatial.to(tl.int64) + 1).to(tl.uint32)


@triton.jit
def channels_of(position, spatial, magic, BLOCK: tl.constexpr):
    """How many channels of ``spatial`` elements end before ``position``, which is less than spatial + BLOCK."""
    # Two channels at most, or position * spatial < 2^32, so that the division is exact.
    divided = tl.umulhi(position.to(tl.uint32), magic).to(tl.int32)
    return tl.where(spatial >= BLOCK, (position >= spatial).to(tl.int32), divided)


@triton.jit
def load_affine(affine, channel, mask):
    """Weight and bias of lines of one channel each."""
    w = load_vector(affine.W, channel, mask, affine.w_kind) + (affine.w_kind == 0)
    return w, load_vector(affine.B, channel, mask, affine.b_kind)


@triton.jit
def forward_in_registers(
    Y, X, W, B, STATS, WORKSPACE, launch, n_units, groups, channels, spatial, size, length, n_splits, eps, w_kind,
    b_kind, store_stats,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A group a CTA, of at most BLOCK elements: read once."""
    vector: tl.constexpr = vector_of(X.dtype.element_ty, False)
    unit = tl.program_id(0)
    line = tl.arange(0, BLOCK // vector) * vector
    at = unit.to(tl.int64) * size
    Y += at
    X += at
    at = line[:, None] + tl.arange(0, vector)[None, :]
    mask = line < size
    x = tl.load(X + at, mask=mask[:, None], other=0.0).to(tl.float32)
    channel = unit % groups * channels + channels_of(line, spatial, reciprocal(spatial), BLOCK)
    w, b = load_affine(Affine(W, B, w_kind, b_kind), channel, mask)
    mean = tl.sum(tl.sum(x, 1), 0) / size
    centered = tl.where(mask[:, None], x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(tl.sum(centered * centered, 1), 0) / size + eps)
    if store_stats != 0:
        tl.store(STATS + unit * 2, mean)
        tl.store(STATS + unit * 2 + 1, rstd)
    y = centered * (rstd * w)[:, None] + b[:, None]
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=mask[:, None])


@triton.jit
def write_part(
    Y, X, affine, channel, offset, count, blocks, mean, rstd, spatial, BLOCK: tl.constexpr, VECTOR: tl.constexpr
):  # fmt: skip
    """The second read of a part. ``offset`` elements of its first channel, ``channel``, are before the part. VECTOR
    neighbours are of one channel, which is looked up once."""
    line = tl.arange(0, BLOCK // VECTOR) * VECTOR
    at = line[:, None] + tl.arange(0, VECTOR)[None, :]
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
        w, b = load_affine(affine, here, mask)
        y = (x - mean) * (rstd * w)[:, None] + b[:, None]
        tl.store(Y + begin + at, y.to(Y.dtype.element_ty), mask=mask[:, None], eviction_policy="evict_first")
        begin -= BLOCK
        channel -= step
        offset -= step_offset
        borrow = (offset < 0).to(tl.int32)
        channel -= borrow
        offset += borrow * spatial


@triton.jit
def forward_group(
    unit, Y, X, affine, STATS, groups, channels, spatial, size, eps, store_stats, s,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """A CTA's part of a group."""
    split = tl.program_id(0) % s.n_splits
    start = split.to(tl.int64) * s.length
    count = tl.minimum(s.length, size - start).to(tl.int32)
    at = tl.cast(unit, tl.int64) * size + start
    if BLOCKS > 0:
        blocks = BLOCKS
    else:
        blocks = tl.cdiv(count, BLOCK)
    mean, deviation = block_moments(X + at, count, blocks, BLOCK, VECTOR)
    if s.MAX_SPLITS > 1:
        one = tl.zeros([1], tl.float32)
        all_mean, all_deviation = combined_moments(unit, split, one + mean, one + deviation, size, 1, s, 1)
        mean = tl.sum(all_mean, 0)
        deviation = tl.sum(all_deviation, 0)
    rstd = tl.rsqrt(deviation / size + eps)
    if (store_stats != 0) & (split == 0):
        tl.store(STATS + unit * 2, mean)
        tl.store(STATS + unit * 2 + 1, rstd)
    channel = unit % groups * channels + (start // spatial).to(tl.int32)
    offset = (start % spatial).to(tl.int32)
    write_part(Y + at, X + at, affine, channel, offset, count, blocks, mean, rstd, spatial, BLOCK, VECTOR)


@triton.jit
def forward_two_pass(
    Y, X, W, B, STATS, WORKSPACE, launch, n_units, groups, channels, spatial, size, length, n_splits, eps, w_kind,
    b_kind, store_stats,
    MAX_SPLITS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, UNALIGNED: tl.constexpr,
):  # fmt: skip
    """Groups of ``size`` elements, in parts of ``length``. The 16 bytes of one load are of one channel; UNALIGNED
    elements are loaded one by one."""
    s = Split(WORKSPACE, launch, n_splits, length, MAX_SPLITS)
    affine = Affine(W, B, w_kind, b_kind)
    vector: tl.constexpr = vector_of(X.dtype.element_ty, UNALIGNED)
    if MAX_SPLITS > 1:
        for unit in range(tl.program_id(0) // n_splits, n_units, tl.num_programs(0) // n_splits):
            forward_group(
                unit, Y, X, affine, STATS, groups, channels, spatial, size, eps, store_stats, s, BLOCK, BLOCKS, vector
            )  # fmt: skip
    else:
        forward_group(
            tl.program_id(0), Y, X, affine, STATS, groups, channels, spatial, size, eps, store_stats, s, BLOCK, BLOCKS,
            vector,
        )  # fmt: skip


@triton.jit
def add_two(a, b, c, d):
    """The combine function of a reduction of two sums at once."""
    return a + c, b + d


@triton.jit
def backward_group(
    unit, out, DY, X, W, STATS, groups, channels, spatial, w_kind, s,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """A CTA's part of a group: of each channel the same positions. Tiles are ROWS channels by BLOCK positions."""
    split = tl.program_id(0) % s.n_splits
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK)
    start = split * s.length
    count = tl.minimum(s.length, spatial - start)
    n = spatial.to(tl.float32) * channels
    at = row[:, None] * spatial + lane[None, :]
    mean = tl.load(STATS + unit * 2)
    rstd = tl.load(STATS + unit * 2 + 1)
    first_channel = unit % groups * channels
    part_at = tl.cast(unit, tl.int64) * channels * spatial + start
    sums_at = out.PARTIALS + (unit // groups * s.n_splits + split).to(tl.int64) * out.columns + first_channel
    row_dots = tl.zeros([ROWS], tl.float32)
    row_totals = tl.zeros([ROWS], tl.float32)
    for channel in range(0, channels, ROWS):
        in_rows = channel + row < channels
        dots = tl.zeros([ROWS, BLOCK // VECTOR], tl.float32)
        sums = tl.zeros([ROWS, BLOCK // VECTOR], tl.float32)
        for begin in range(0, count, BLOCK):
            mask = in_rows[:, None] & (begin + lane < count)[None, :]
            tile = part_at + channel * spatial + begin
            x = tl.load(X + tile + at, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
            dy = tl.load(DY + tile + at, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
            dots += tl.sum(tl.reshape(dy * (x - mean), [ROWS, BLOCK // VECTOR, VECTOR]), 2)
            sums += tl.sum(tl.reshape(dy, [ROWS, BLOCK // VECTOR, VECTOR]), 2)
        dw, db = tl.reduce((dots, sums), 1, add_two)
        dw *= rstd
        rows = channel + row
        tl.store(sums_at + rows, dw, mask=in_rows & (out.store_dw != 0))
        tl.store(sums_at + out.db_column + rows, db, mask=in_rows & (out.store_db != 0))
        w = load_vector(W, rows, in_rows, w_kind, first_channel) + (w_kind == 0)
        row_dots += w * dw
        row_totals += w * db
    dot, total = tl.reduce((row_dots, row_totals), 0, add_two)
    if s.MAX_SPLITS > 1:
        one = tl.zeros([1], tl.float32)
        all_dots, all_totals = combined_sums(unit, split, one + dot, one + total, s, 1)
        dot = tl.sum(all_dots, 0)
        total = tl.sum(all_totals, 0)
    if out.store_dx != 0:
        slope = dot / n * rstd * rstd
        level = total / n * rstd - mean * slope
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
                dx = (w * dy - (x * slope + level)).to(out.DX.dtype.element_ty)
                tl.store(out.DX + tile + at, dx, mask=mask, eviction_policy="evict_first")


@triton.jit
def backward_two_pass(
    DX, DY, X, W, STATS, PARTIALS, WORKSPACE, launch, n_units, groups, channels, spatial, length, n_splits, columns,
    db_column, w_kind, store_dx, store_dw, store_db,
    MAX_SPLITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, UNALIGNED: tl.constexpr,
):  # fmt: skip
    """Groups of channels that are runs of ``spatial`` elements, in parts of ``length`` of every channel.
    PARTIALS[images * n_splits, columns] gets each channel's sums over a part."""
    s = Split(WORKSPACE, launch, n_splits, length, MAX_SPLITS)
    out = Gradients(DX, PARTIALS, columns, db_column, store_dx, store_dw, store_db)
    vector: tl.constexpr = vector_of(X.dtype.element_ty, UNALIGNED)
    if MAX_SPLITS > 1:
        for unit in range(tl.program_id(0) // n_splits, n_units, tl.num_programs(0) // n_splits):
            backward_group(
                unit, out, DY, X, W, STATS, groups, channels, spatial, w_kind, s, ROWS, BLOCK, vector
            )
    else:
        backward_group(
            tl.program_id(0), out, DY, X, W, STATS, groups, channels, spatial, w_kind, s, ROWS, BLOCK, vector
        )


# ---- channels last: several groups that lie beside each other --------------------------------------------------------
# A tile is ROWS rows, each of as many positions of ``width`` channels as BLOCK lanes hold. What the loops add up stays
# in its lane, and is reduced from lanes to channels and to groups once, at the end of a part; where a thread has all of
# a lane's rows, the loops need no shuffles. A group wider than BLOCK channels comes alone, in several steps.


@aggregate
class Columns:
    """How the BLOCK lanes of a tile divide up ``width`` columns of an image."""

    width: tl.tensor
    positions: tl.tensor  # of a row of the tile
    position: tl.tensor  # each lane's; at ``positions`` and above, lanes are not in use
    channel: tl.tensor  # each lane's

    @triton.constexpr_function
    def __init__(self, width, positions, position, channel):
        self.width, self.positions, self.position, self.channel = width, positions, position, channel


@triton.jit
def columns_of(width, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    position = lane // width
    return Columns(width, tl.maximum(BLOCK // width, 1), position, lane - position * width)


@triton.jit
def tile_of(lanes, step, n_cols, count, ROWS: tl.constexpr):
    """(offsets in memory from a tile's first position, positions from there on; ``count`` of lanes not in use)."""
    row = tl.arange(0, ROWS)[:, None] * lanes.positions
    offset = lanes.position * n_cols + lanes.channel + step
    at = row * n_cols + offset[None, :]
    return at, row + tl.where(lanes.position < lanes.positions, lanes.position, count)[None, :]


@triton.jit
def to_lanes(values, channel):
    """[BLOCK] values of channels at each lane. The maximum keeps addresses from being a negative sum and an offset,
    which LLVM makes of them else."""
    return tl.gather(values, tl.maximum(channel, 0), 0)


@triton.jit
def pick(values, at, inside, SHAPE: tl.constexpr):
    """values[at], 0 where it is not ``inside``; all have SHAPE elements."""
    picked = tl.gather(values, tl.reshape(tl.where(inside, at, 0), [SHAPE]), 0)
    return tl.where(inside, tl.reshape(picked, at.shape), 0.0)


@triton.jit
def to_channels(values, lanes, BLOCK: tl.constexpr):
    """Sums over the positions of a row: [BLOCK] values of lanes to [BLOCK] values of channels, 0 past them."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for position in range(lanes.positions):
        total += pick(values, position * lanes.width + lane, lane < lanes.width, BLOCK)
    return total


@triton.jit
def to_groups(values, positions, width, channels, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of [BLOCK] values of lanes over each group."""
    total = tl.zeros([GROUPS], tl.float32)
    group = tl.arange(0, GROUPS)[:, None] * channels
    channels = tl.minimum(channels, width)
    members = positions * channels
    for first in range(0, members, BLOCK // GROUPS):
        member = first + tl.arange(0, BLOCK // GROUPS)[None, :]
        position = member // channels
        channel = group + member - position * channels
        at = position * width + channel
        inside = (member < members) & (channel < width)
        total += tl.sum(pick(values, at, inside, BLOCK), 1)
    return total


@triton.jit
def of_channels(values, channels, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """[GROUPS] values at each of BLOCK channels."""
    return tl.gather(values, tl.minimum(tl.arange(0, BLOCK) // channels, GROUPS - 1), 0)


@triton.jit
def load_tile(P, at, mask, other, EVICT: tl.constexpr):
    return tl.load(P + at, mask=mask, other=other, eviction_policy=EVICT).to(tl.float32)


@triton.jit
def part_moments(
    X, width, channels, n_cols, count, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr
):
    """(mean, sum of squared deviations) of each group over ``count`` positions.

    Sums are of the differences of elements from their channel's first one, see ``moments``."""
    mean = tl.zeros([GROUPS], tl.float32)
    deviation = tl.zeros([GROUPS], tl.float32)
    done = 0  # channels of each group that the two are of
    for step in range(0, width, BLOCK):
        lanes = columns_of(tl.minimum(width - step, BLOCK), BLOCK)
        positions = lanes.positions
        pivot = tl.load(X + step + lanes.channel)
        raw = pivot[None, :]
        pivot = pivot.to(tl.float32)
        at, positions_at = tile_of(lanes, step, n_cols, count, ROWS)
        sums = tl.zeros([BLOCK], tl.float32)
        squares = tl.zeros([BLOCK], tl.float32)
        for begin in range(0, count, positions * ROWS):
            x = load_tile(X + begin * n_cols, at, begin + positions_at < count, raw, "evict_last")
            centered = x - pivot[None, :]
            sums += tl.sum(centered, 0)
            squares += tl.sum(centered * centered, 0)
        size = tl.maximum(count - lanes.position + (positions - 1), 0) // positions  # of a lane
        size = tl.where(lanes.position < positions, size.to(tl.float32), 0.0)
        here = tl.minimum(channels, lanes.width)
        total = to_groups(pivot * size + sums, positions, lanes.width, channels, GROUPS, BLOCK)
        step_mean = total / (here * count)
        centered = pivot - tl.gather(step_mean, tl.minimum(lanes.channel // channels, GROUPS - 1), 0)
        centered = squares + centered * (2.0 * sums + centered * size)
        step_deviation = to_groups(centered, positions, lanes.width, channels, GROUPS, BLOCK)
        shift = step_mean - mean
        fraction = here.to(tl.float32) / (done + here)
        mean += shift * fraction
        deviation += step_deviation + count * shift * shift * done * fraction
        done += here
    return mean, deviation


@triton.jit
def write_tiles(
    Y, X, affine, column, mean, rstd, width, channels, n_cols, count,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The forward's second read of a part. ``column`` is the part's first channel."""
    lane = tl.arange(0, BLOCK)
    for step in range(0, width, BLOCK):
        lanes = columns_of(tl.minimum(width - step, BLOCK), BLOCK)
        w = load_vector(affine.W, step + lane, lane < lanes.width, affine.w_kind, column) + (
            affine.w_kind == 0
        )
        w = to_lanes(w * of_channels(rstd, channels, GROUPS, BLOCK), lanes.channel)[None, :]
        b = load_vector(affine.B, step + lane, lane < lanes.width, affine.b_kind, column)
        b = to_lanes(b, lanes.channel)[None, :]
        center = to_lanes(of_channels(mean, channels, GROUPS, BLOCK), lanes.channel)[None, :]
        at, positions_at = tile_of(lanes, step, n_cols, count, ROWS)
        tiles = tl.cdiv(count, lanes.positions * ROWS)
        for i in range(tiles):
            begin = (tiles - 1 - i) * (lanes.positions * ROWS)
            mask = begin + positions_at < count
            x = load_tile(X + begin * n_cols, at, mask, 0.0, "evict_first")
            y = ((x - center) * w + b).to(Y.dtype.element_ty)
            tl.store(Y + begin * n_cols + at, y, mask=mask, eviction_policy="evict_first")


@triton.jit
def forward_columns(
    unit, Y, X, affine, STATS, units, groups, channels, width, n_cols, spatial, eps, store_stats, s,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """A CTA's part of a unit."""
    split = tl.program_id(0) % s.n_splits
    group = tl.arange(0, GROUPS)
    start = split * s.length
    count = tl.minimum(s.length, spatial - start)
    image = unit // units
    column = unit % units * width
    at = (tl.cast(image, tl.int64) * spatial + start) * n_cols + column
    mean, deviation = part_moments(X + at, width, channels, n_cols, count, ROWS, BLOCK, GROUPS)
    if s.MAX_SPLITS > 1:
        mean, deviation = combined_moments(unit, split, mean, deviation, spatial, channels, s, GROUPS)
    rstd = tl.rsqrt(deviation / (spatial.to(tl.float32) * channels) + eps)
    stats = STATS + (image * groups + column // channels + group) * 2
    live = (group * channels < width) & (store_stats != 0) & (split == 0)
    tl.store(stats, mean, mask=live)
    tl.store(stats + 1, rstd, mask=live)
    write_tiles(
        Y + at, X + at, affine, column, mean, rstd, width, channels, n_cols, count, ROWS, BLOCK, GROUPS
    )


@triton.jit
def forward_channels_last(
    Y, X, W, B, STATS, WORKSPACE, launch, n_units, units, groups, channels, width, n_cols, spatial, length, n_splits,
    eps, w_kind, b_kind, store_stats,
    MAX_SPLITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """``units`` an image, each of the groups of ``width`` columns, in parts of ``length`` positions."""
    s = Split(WORKSPACE, launch, n_splits, length, MAX_SPLITS)
    affine = Affine(W, B, w_kind, b_kind)
    if MAX_SPLITS > 1:
        for unit in range(tl.program_id(0) // n_splits, n_units, tl.num_programs(0) // n_splits):
            forward_columns(
                unit, Y, X, affine, STATS, units, groups, channels, width, n_cols, spatial, eps, store_stats, s,
                ROWS, BLOCK, GROUPS,
            )  # fmt: skip
    else:
        forward_columns(
            tl.program_id(0), Y, X, affine, STATS, units, groups, channels, width, n_cols, spatial, eps, store_stats, s,
            ROWS, BLOCK, GROUPS,
        )  # fmt: skip


@triton.jit
def part_sums(
    X, DY, W, column, out, PARTIALS, mean, rstd, width, channels, n_cols, count, w_kind,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Each group's sums of w * dy * normalised x and of w * dy; each channel's, without w, are stored. ``column`` is
    the part's first channel, where PARTIALS starts."""
    lane = tl.arange(0, BLOCK)
    dot = tl.zeros([GROUPS], tl.float32)
    total = tl.zeros([GROUPS], tl.float32)
    for step in range(0, width, BLOCK):
        lanes = columns_of(tl.minimum(width - step, BLOCK), BLOCK)
        center = to_lanes(of_channels(mean, channels, GROUPS, BLOCK), lanes.channel)[None, :]
        at, positions_at = tile_of(lanes, step, n_cols, count, ROWS)
        dots = tl.zeros([BLOCK], tl.float32)
        sums = tl.zeros([BLOCK], tl.float32)
        for begin in range(0, count, lanes.positions * ROWS):
            mask = begin + positions_at < count
            x = load_tile(X + begin * n_cols, at, mask, 0.0, "evict_last")
            dy = load_tile(DY + begin * n_cols, at, mask, 0.0, "evict_last")
            dots += tl.sum(dy * (x - center), 0)
            sums += tl.sum(dy, 0)
        dw = to_channels(dots, lanes, BLOCK) * of_channels(rstd, channels, GROUPS, BLOCK)
        db = to_channels(sums, lanes, BLOCK)
        live = lane < lanes.width
        tl.store(PARTIALS + step + lane, dw, mask=live & (out.store_dw != 0))
        tl.store(PARTIALS + out.db_column + step + lane, db, mask=live & (out.store_db != 0))
        w = load_vector(W, step + lane, live, w_kind, column) + (w_kind == 0)
        dot += to_groups(w * dw, 1, lanes.width, channels, GROUPS, BLOCK)
        total += to_groups(w * db, 1, lanes.width, channels, GROUPS, BLOCK)
    return dot, total


@triton.jit
def write_dx_tiles(
    DX, X, DY, W, column, mean, rstd, dot, total, width, channels, n_cols, count, w_kind,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The backward's second read of a part: dx, from each group's means of the two sums."""
    lane = tl.arange(0, BLOCK)
    slope = rstd * rstd * dot
    level = total * rstd - mean * slope
    for step in range(0, width, BLOCK):
        lanes = columns_of(tl.minimum(width - step, BLOCK), BLOCK)
        w = load_vector(W, step + lane, lane < lanes.width, w_kind, column) + (w_kind == 0)
        w = to_lanes(w * of_channels(rstd, channels, GROUPS, BLOCK), lanes.channel)[None, :]
        slopes = to_lanes(of_channels(slope, channels, GROUPS, BLOCK), lanes.channel)[None, :]
        levels = to_lanes(of_channels(level, channels, GROUPS, BLOCK), lanes.channel)[None, :]
        at, positions_at = tile_of(lanes, step, n_cols, count, ROWS)
        tiles = tl.cdiv(count, lanes.positions * ROWS)
        for i in range(tiles):
            begin = (tiles - 1 - i) * (lanes.positions * ROWS)
            mask = begin + positions_at < count
            x = load_tile(X + begin * n_cols, at, mask, 0.0, "evict_first")
            dy = load_tile(DY + begin * n_cols, at, mask, 0.0, "evict_first")
            dx = (dy * w - (x * slopes + levels)).to(DX.dtype.element_ty)
            tl.store(DX + begin * n_cols + at, dx, mask=mask, eviction_policy="evict_first")


@triton.jit
def backward_columns(
    unit, out, DY, X, W, STATS, units, groups, channels, width, n_cols, spatial, w_kind, s,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """A CTA's part of a unit."""
    split = tl.program_id(0) % s.n_splits
    group = tl.arange(0, GROUPS)
    start = split * s.length
    count = tl.minimum(s.length, spatial - start)
    n = spatial.to(tl.float32) * channels
    image = unit // units
    column = unit % units * width
    at = (tl.cast(image, tl.int64) * spatial + start) * n_cols + column
    stats = STATS + (image * groups + column // channels + group) * 2
    live = group * channels < width
    mean = tl.load(stats, mask=live, other=0.0)
    rstd = tl.load(stats + 1, mask=live, other=0.0)
    sums_at = out.PARTIALS + (image * s.n_splits + split).to(tl.int64) * out.columns + column
    dot, total = part_sums(
        X + at, DY + at, W, column, out, sums_at, mean, rstd, width, channels, n_cols, count, w_kind,
        ROWS, BLOCK, GROUPS,
    )  # fmt: skip
    if s.MAX_SPLITS > 1:
        dot, total = combined_sums(unit, split, dot, total, s, GROUPS)
    if out.store_dx != 0:
        write_dx_tiles(
            out.DX + at, X + at, DY + at, W, column, mean, rstd, dot / n, total / n, width, channels, n_cols, count,
            w_kind, ROWS, BLOCK, GROUPS,
        )  # fmt: skip


@triton.jit
def backward_channels_last(
    DX, DY, X, W, STATS, PARTIALS, WORKSPACE, launch, n_units, units, groups, channels, width, n_cols, spatial, length,
    n_splits, columns, db_column, w_kind, store_dx, store_dw, store_db,
    MAX_SPLITS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Units and parts as in ``forward_channels_last``, partials as in ``backward_two_pass``."""
    s = Split(WORKSPACE, launch, n_splits, length, MAX_SPLITS)
    out = Gradients(DX, PARTIALS, columns, db_column, store_dx, store_dw, store_db)
    if MAX_SPLITS > 1:
        for unit in range(tl.program_id(0) // n_splits, n_units, tl.num_programs(0) // n_splits):
            backward_columns(
                unit, out, DY, X, W, STATS, units, groups, channels, width, n_cols, spatial, w_kind, s,
                ROWS, BLOCK, GROUPS,
            )  # fmt: skip
    else:
        backward_columns(
            tl.program_id(0), out, DY, X, W, STATS, units, groups, channels, width, n_cols, spatial, w_kind, s,
            ROWS, BLOCK, GROUPS,
        )  # fmt: skip
