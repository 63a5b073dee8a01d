"""GroupNorm's gradients of channels-last images by programs that hold parts in shared memory (Gluon, Hopper): see
``held_parts`` for the walk, ``groupnorm_held`` for lines and groups.

x and dy are read once. What a program adds up for the gradients of weight and bias stays in registers, over all its
images, and is stored once: a row of PARTIALS a program.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_triton.groupnorm_held import (
    half_sum,
    halves_of,
    members_of,
    of_halves,
    of_members,
    other_sum,
    vector_of,
    zeros_of,
)
from csrc_triton.held_parts import walk_parts, words_layout
from csrc_triton.norm_ring import lines_layout
from csrc_triton.packed import even, odd, pair_up


@gluon.jit
def statistics(STATS, unit, n_units, vector, groups, channels):
    """(mean, 1 / sqrt(var + eps)) of a line's two groups, of an image or of the last one: no mask, for which the loads
    would be waited for."""
    first = gl.minimum(vector * 8 // channels, groups - 1)
    second = gl.minimum(first + 1, groups - 1)
    STATS += gl.minimum(unit, n_units - 1) * groups * 2
    return gl.load(STATS + first * 2), gl.load(STATS + first * 2 + 1), gl.load(STATS + second * 2), gl.load(STATS + second * 2 + 1)  # fmt: skip


@gluon.jit
def prepare(given, GROUPS: gl.constexpr, MEMBERS: gl.constexpr, LINES: gl.constexpr):
    W, w_kind, STATS, n_units, groups, channels, spatial, row, rows, vector, count, teams = given
    here, inside = halves_of(vector, channels)
    members = members_of(count, rows, groups * channels // 8, groups, channels, GROUPS, MEMBERS)
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, lines_layout(gl.num_warps())))[None, :]
    w = vector_of(W, vector[:, None] * 8 + word * 2, (row < rows)[:, None], w_kind, 1.0)
    return STATS, n_units, groups, channels, spatial, vector, inside, members, w, teams


@gluon.jit
def begin(tiles, given, LINES: gl.constexpr, dtype: gl.constexpr):
    zeros = zeros_of(LINES)
    return zeros, zeros, zeros, zeros


@gluon.jit
def include(sums, tiles, live, given, dtype: gl.constexpr):
    """Sums of dy * x and of dy of each channel of a line; what is not there is 0. x is of 16 bits: fp32 has room for a
    mean 2^8 deviations away."""
    x, dy = tiles
    low, high = even(dy, dtype), odd(dy, dtype)
    return sums[0] + low * even(x, dtype), sums[1] + high * odd(x, dtype), sums[2] + low, sums[3] + high


@gluon.jit
def fold(sums, carried, unit, there, given, GROUPS: gl.constexpr, MEMBERS: gl.constexpr, dtype: gl.constexpr):
    """Of a part, each group's sums of w * dy * normalised x and of w * dy; each channel's, without w, are carried."""
    STATS, n_units, groups, channels, spatial, vector, inside, members, w, teams = given
    dw, db, stats = carried
    new_dw, new_db, along, offset = (), (), (), ()
    for i in gl.static_range(2):
        mean = gl.where(inside[i], stats[0][:, None], stats[2][:, None])
        rstd = gl.where(inside[i], stats[1][:, None], stats[3][:, None])
        more = (sums[i] - mean * sums[2 + i]) * rstd
        new_dw += (dw[i] + gl.where(there, more, 0.0),)
        new_db += (db[i] + gl.where(there, sums[2 + i], 0.0),)
        along += (w[i] * more,)
        offset += (w[i] * sums[2 + i],)
    first = half_sum(along, inside), half_sum(offset, inside)
    second = other_sum(along, inside), other_sum(offset, inside)
    alongs, offsets, counts = of_members(first, second, members, GROUPS, MEMBERS)
    along = gl.sum(gl.where(counts > 0.0, alongs, 0.0), 1)
    offset = gl.sum(gl.where(counts > 0.0, offsets, 0.0), 1)
    return along, offset, (new_dw, new_db, statistics(STATS, unit + teams, n_units, vector, groups, channels))


@gluon.jit
def weigh(words, firsts, part, given):
    return words


@gluon.jit
def settle(totals, unit, there, given):
    """What dy and x are multiplied by, and what is added, for dx."""
    STATS, n_units, groups, channels, spatial, vector, inside, members, w, teams = given
    GROUPS: gl.constexpr = totals[0].shape[0]
    group = gl.arange(0, GROUPS, layout=gl.SliceLayout(0, words_layout(GROUPS, gl.num_warps())))
    at = STATS + (gl.minimum(unit, n_units - 1) * groups + gl.minimum(group, groups - 1)) * 2
    mean, rstd = gl.load(at), gl.load(at + 1)
    part = 1.0 / (spatial.to(gl.float32) * channels)
    slope = totals[0] * part * rstd * rstd
    level = totals[1] * part * rstd - mean * slope
    slopes, levels = of_halves(slope, level, vector, groups, channels)
    rstds, _ = of_halves(rstd, rstd, vector, groups, channels)
    low = w[0] * gl.where(inside[0], rstds[0], rstds[1])
    return low, w[1] * gl.where(inside[1], rstds[0], rstds[1]), slopes, levels


@gluon.jit
def finish(tiles, settled, tile, given, dtype: gl.constexpr):
    STATS, n_units, groups, channels, spatial, vector, inside, members, w, teams = given
    x, dy = tiles
    low, high, slopes, levels = settled
    slope, level = gl.where(inside[0], slopes[0], slopes[1]), gl.where(inside[0], levels[0], levels[1])
    low = low * even(dy, dtype) - (even(x, dtype) * slope + level)
    slope, level = gl.where(inside[1], slopes[0], slopes[1]), gl.where(inside[1], levels[0], levels[1])
    high = high * odd(dy, dtype) - (odd(x, dtype) * slope + level)
    return pair_up(low, high, dtype)


@gluon.jit
def store_sums(PARTIALS, sums, row, rows, vectors, channel, store):
    """The sums of a tile's rows, (even, odd) channels."""
    line = gl.arange(0, sums[0].shape[0], layout=gl.SliceLayout(1, lines_layout(gl.num_warps())))
    left, low, high = rows, sums[0], sums[1]
    while left > 1:
        half = (left + 1) // 2
        at = gl.minimum(line + half * vectors, sums[0].shape[0] - 1)[:, None] + channel * 0
        live = (row < left - half)[:, None]
        low += gl.where(live, gl.gather(low, at, 0), 0.0)
        high += gl.where(live, gl.gather(high, at, 0), 0.0)
        left = half
    mask = (row == 0)[:, None] & (store != 0)
    gl.store(PARTIALS + channel, low, mask=mask)
    gl.store(PARTIALS + channel + 1, high, mask=mask)


@gluon.jit
def walk_image_gradients(
    DX, DY, X, W, STATS, PARTIALS, WORDS, n_units, groups, channels, n_cols, spatial, length, split, columns, db_column,
    w_kind, store_dx, store_dw, store_db,
    SPLIT: gl.constexpr, GROUPS: gl.constexpr, MEMBERS: gl.constexpr, LINES: gl.constexpr, SLOTS: gl.constexpr,
    AHEAD: gl.constexpr,
):  # fmt: skip
    """Channels-last images, in parts of ``length`` places. PARTIALS[programs, columns]."""
    vectors = n_cols // 8
    rows = LINES // vectors
    line = gl.arange(0, LINES, layout=gl.SliceLayout(1, lines_layout(gl.num_warps())))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, lines_layout(gl.num_warps())))[None, :]
    row = line // vectors
    vector = line - row * vectors
    start = gl.program_id(0) % split * length
    count = gl.minimum(length, spatial - start)
    at = gl.cast(start, gl.int64) * n_cols
    team, teams = gl.program_id(0) // split, gl.num_programs(0) // split
    given = W, w_kind, STATS, n_units, groups, channels, spatial, row, rows, vector, count, teams
    zeros = zeros_of(LINES)
    stats = statistics(STATS, team, n_units, vector, groups, channels)
    dw, db, _ = walk_parts(
        DX + at, (X + at, DY + at), WORDS, n_units, gl.cast(spatial, gl.int64) * (n_cols // 2), rows * (n_cols // 2),
        split, row, rows, count, store_dx != 0, given, ((zeros, zeros), (zeros, zeros), stats),
        prepare, begin, include, fold, weigh, settle, finish, SPLIT, GROUPS, MEMBERS, LINES, SLOTS, AHEAD,
    )  # fmt: skip
    PARTIALS += gl.program_id(0).to(gl.int64) * columns
    channel = vector[:, None] * 8 + word * 2
    store_sums(PARTIALS, dw, row, rows, vectors, channel, store_dw)
    store_sums(PARTIALS + db_column, db, row, rows, vectors, channel, store_db)
