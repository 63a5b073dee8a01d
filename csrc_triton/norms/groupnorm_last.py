"""GroupNorm of channels-last images: a program's part of several groups that lie beside each other.

A tile is ROWS rows, each of as many places as BLOCK lanes hold of ``width`` channels. What loops add up stays with its
lane and is brought from lanes to channels and to groups once, at the end of a part; where a thread has all of a lane's
rows, loops do not wait for each other. A group wider than BLOCK channels comes alone, in several steps.
"""

import triton
import triton.language as tl

from csrc_triton.norms.norm_vectors import load_vector


@triton.jit
def lanes_of(width, BLOCK: tl.constexpr):
    """(places in a tile's row, each lane's place and channel); lanes past the last place are not in use."""
    lane = tl.arange(0, BLOCK)
    place = lane // width
    return tl.maximum(BLOCK // width, 1), place, lane - place * width


@triton.jit
def tile_of(places, place, channel, step, n_cols, count, ROWS: tl.constexpr):
    """(offsets in memory from a tile's first place, places from there on; ``count`` of lanes that are not in use)."""
    row = tl.arange(0, ROWS)[:, None] * places
    offset = place * n_cols + channel + step
    return row * n_cols + offset[None, :], row + tl.where(place < places, place, count)[None, :]


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
def to_channels(values, places, width, BLOCK: tl.constexpr):
    """Sums over the places of a row: [BLOCK] values of lanes to [BLOCK] values of channels, 0 past them."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for place in range(places):
        total += pick(values, place * width + lane, lane < width, BLOCK)
    return total


@triton.jit
def to_groups(values, places, width, channels, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of [BLOCK] values of lanes over each group."""
    total = tl.zeros([GROUPS], tl.float32)
    group = tl.arange(0, GROUPS)[:, None] * channels
    channels = tl.minimum(channels, width)
    members = places * channels
    for first in range(0, members, BLOCK // GROUPS):
        member = first + tl.arange(0, BLOCK // GROUPS)[None, :]
        place = member // channels
        channel = group + member - place * channels
        at = place * width + channel
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
    """(mean, sum of squared deviations) of each group over ``count`` places.

    Sums are of what elements differ from their channel's first one, see ``moments``."""
    mean = tl.zeros([GROUPS], tl.float32)
    deviation = tl.zeros([GROUPS], tl.float32)
    held = 0  # channels of each group that the two are of
    for step in range(0, width, BLOCK):
        columns = tl.minimum(width - step, BLOCK)
        places, place, channel = lanes_of(columns, BLOCK)
        pivot = tl.load(X + step + channel)
        raw = pivot[None, :]
        pivot = pivot.to(tl.float32)
        at, places_at = tile_of(places, place, channel, step, n_cols, count, ROWS)
        sums = tl.zeros([BLOCK], tl.float32)
        squares = tl.zeros([BLOCK], tl.float32)
        for begin in range(0, count, places * ROWS):
            x = load_tile(X + begin * n_cols, at, begin + places_at < count, raw, "evict_last")
            apart = x - pivot[None, :]
            sums += tl.sum(apart, 0)
            squares += tl.sum(apart * apart, 0)
        size = tl.maximum(count - place + (places - 1), 0) // places  # of a lane
        size = tl.where(place < places, size.to(tl.float32), 0.0)
        here = tl.minimum(channels, columns)
        step_mean = to_groups(pivot * size + sums, places, columns, channels, GROUPS, BLOCK) / (here * count)
        apart = pivot - tl.gather(step_mean, tl.minimum(channel // channels, GROUPS - 1), 0)
        apart = squares + apart * (2.0 * sums + apart * size)
        step_deviation = to_groups(apart, places, columns, channels, GROUPS, BLOCK)
        shift = step_mean - mean
        share = here.to(tl.float32) / (held + here)
        mean += shift * share
        deviation += step_deviation + count * shift * shift * held * share
        held += here
    return mean, deviation


@triton.jit
def scale_last(
    Y, X, W, B, column, mean, rstd, width, channels, n_cols, count, w_kind, b_kind,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The second read, what was read last first. ``column`` is the part's first channel."""
    lane = tl.arange(0, BLOCK)
    for step in range(0, width, BLOCK):
        columns = tl.minimum(width - step, BLOCK)
        places, place, channel = lanes_of(columns, BLOCK)
        w = load_vector(W, step + lane, lane < columns, w_kind, column) + (w_kind == 0)
        w = to_lanes(w * of_channels(rstd, channels, GROUPS, BLOCK), channel)[None, :]
        b = load_vector(B, step + lane, lane < columns, b_kind, column)
        b = to_lanes(b, channel)[None, :]
        center = to_lanes(of_channels(mean, channels, GROUPS, BLOCK), channel)[None, :]
        at, places_at = tile_of(places, place, channel, step, n_cols, count, ROWS)
        tiles = tl.cdiv(count, places * ROWS)
        for i in range(tiles):
            begin = (tiles - 1 - i) * (places * ROWS)
            mask = begin + places_at < count
            x = load_tile(X + begin * n_cols, at, mask, 0.0, "evict_first")
            y = ((x - center) * w + b).to(Y.dtype.element_ty)
            tl.store(Y + begin * n_cols + at, y, mask=mask, eviction_policy="evict_first")


@triton.jit
def part_sums(
    X, DY, W, column, PARTIALS, mean, rstd, width, channels, n_cols, count, db_column, w_kind, store_dw, store_db,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Each group's sums of w * dy * normalised x and of w * dy; each channel's, without w, are stored. ``column`` is
    the part's first channel, where PARTIALS starts."""
    lane = tl.arange(0, BLOCK)
    along = tl.zeros([GROUPS], tl.float32)
    offset = tl.zeros([GROUPS], tl.float32)
    for step in range(0, width, BLOCK):
        columns = tl.minimum(width - step, BLOCK)
        places, place, channel = lanes_of(columns, BLOCK)
        center = to_lanes(of_channels(mean, channels, GROUPS, BLOCK), channel)[None, :]
        at, places_at = tile_of(places, place, channel, step, n_cols, count, ROWS)
        dots = tl.zeros([BLOCK], tl.float32)
        sums = tl.zeros([BLOCK], tl.float32)
        for begin in range(0, count, places * ROWS):
            mask = begin + places_at < count
            x = load_tile(X + begin * n_cols, at, mask, 0.0, "evict_last")
            dy = load_tile(DY + begin * n_cols, at, mask, 0.0, "evict_last")
            dots += tl.sum(dy * (x - center), 0)
            sums += tl.sum(dy, 0)
        dw = to_channels(dots, places, columns, BLOCK) * of_channels(rstd, channels, GROUPS, BLOCK)
        db = to_channels(sums, places, columns, BLOCK)
        live = lane < columns
        tl.store(PARTIALS + step + lane, dw, mask=live & (store_dw != 0))
        tl.store(PARTIALS + db_column + step + lane, db, mask=live & (store_db != 0))
        w = load_vector(W, step + lane, live, w_kind, column) + (w_kind == 0)
        along += to_groups(w * dw, 1, columns, channels, GROUPS, BLOCK)
        offset += to_groups(w * db, 1, columns, channels, GROUPS, BLOCK)
    return along, offset


@triton.jit
def finish_last(
    DX, X, DY, W, column, mean, rstd, along, offset, width, channels, n_cols, count, w_kind,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The second read: dx, from each group's means of the two sums."""
    lane = tl.arange(0, BLOCK)
    slope = rstd * rstd * along
    level = offset * rstd - mean * slope
    for step in range(0, width, BLOCK):
        columns = tl.minimum(width - step, BLOCK)
        places, place, channel = lanes_of(columns, BLOCK)
        w = load_vector(W, step + lane, lane < columns, w_kind, column) + (w_kind == 0)
        w = to_lanes(w * of_channels(rstd, channels, GROUPS, BLOCK), channel)[None, :]
        slopes = to_lanes(of_channels(slope, channels, GROUPS, BLOCK), channel)[None, :]
        levels = to_lanes(of_channels(level, channels, GROUPS, BLOCK), channel)[None, :]
        at, places_at = tile_of(places, place, channel, step, n_cols, count, ROWS)
        tiles = tl.cdiv(count, places * ROWS)
        for i in range(tiles):
            begin = (tiles - 1 - i) * (places * ROWS)
            mask = begin + places_at < count
            x = load_tile(X + begin * n_cols, at, mask, 0.0, "evict_first")
            dy = load_tile(DY + begin * n_cols, at, mask, 0.0, "evict_first")
            dx = (dy * w - (x * slopes + levels)).to(DX.dtype.element_ty)
            tl.store(DX + begin * n_cols + at, dx, mask=mask, eviction_policy="evict_first")
