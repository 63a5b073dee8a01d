"""GroupNorm's gradients of channels-last images by programs that hold parts in shared memory (Gluon, Hopper): see
``held_parts`` for the walk, ``groupnorm_held`` for lines and groups.

x and dy are read once. What a program adds up for the gradients of weight and bias stays in registers, over all its
images, and is stored once: a row of PARTIALS a program.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_triton.common.bf16x2 import even, odd, pack
from csrc_triton.common.pipeline import vector_layout
from csrc_triton.norms.groupnorm_held import (
    half_sum,
    halves_of,
    members_of,
    of_halves,
    of_members,
    other_sum,
    places_in,
    vector_of,
    zeros_of,
)
from csrc_triton.norms.held_parts import meeting, rings_for, stream_parts, talk_parts, words_layout


@gluon.jit
def statistics(STATS, unit, n_units, vector, groups, channels):
    """(mean, 1 / sqrt(var + eps)) of a line's two groups, of an image or of the last one: no mask, for which the loads
    would be waited for."""
    first = gl.minimum(vector * 8 // channels, groups - 1)
    second = gl.minimum(first + 1, groups - 1)
    STATS += gl.minimum(unit, n_units - 1) * groups * 2
    first = gl.load(STATS + first * 2), gl.load(STATS + first * 2 + 1)
    return first, (gl.load(STATS + second * 2), gl.load(STATS + second * 2 + 1))


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
def fold(sums, carried, unit, there, given, dtype: gl.constexpr):
    """Sums of w * dy * normalised x and of w * dy of a line's channels of its first group, and of those of its second;
    each channel's, without w, are carried, and the statistics of the unit and of the next one."""
    STATS, n_units, groups, channels, vector, inside, w, teams = given
    dw, db, _, stats = carried
    first, second = stats
    new_dw, new_db, along, offset = (), (), (), ()
    for i in gl.static_range(2):
        mean = gl.where(inside[i], first[0][:, None], second[0][:, None])
        more = (sums[i] - mean * sums[2 + i]) * gl.where(inside[i], first[1][:, None], second[1][:, None])
        new_dw += (dw[i] + gl.where(there, more, 0.0),)
        new_db += (db[i] + gl.where(there, sums[2 + i], 0.0),)
        along += (w[i] * more,)
        offset += (w[i] * sums[2 + i],)
    after = statistics(STATS, unit + teams, n_units, vector, groups, channels)
    of_first = half_sum(along, inside), half_sum(offset, inside)
    return of_first, (other_sum(along, inside), other_sum(offset, inside)), (new_dw, new_db, stats, after)


@gluon.jit
def gather(first, second, given, GROUPS: gl.constexpr, MEMBERS: gl.constexpr):
    alongs, offsets, _ = of_members(first, second, given[0], GROUPS, MEMBERS)
    return gl.sum(alongs, 1), gl.sum(offsets, 1)


@gluon.jit
def weigh(words, own, part, given):
    return words


@gluon.jit
def conclude(totals, unit, given):
    """(slope, level) of the line in x that dx has beside w * dy / deviation."""
    _members, vector, STATS, groups, channels, spatial = given
    GROUPS: gl.constexpr = totals[0].shape[0]
    group = gl.arange(0, GROUPS, layout=gl.SliceLayout(0, words_layout(GROUPS, gl.num_warps())))
    at = STATS + (unit * groups + gl.minimum(group, groups - 1)) * 2
    mean, rstd = gl.load(at), gl.load(at + 1)
    part = 1.0 / (spatial.to(gl.float32) * channels)
    slope = totals[0] * part * rstd * rstd
    return of_halves(slope, totals[1] * part * rstd - mean * slope, vector, groups, channels)


@gluon.jit
def settle(first, second, unit, carried, given):
    _STATS, _n_units, _groups, _channels, _vector, inside, w, _teams = given
    of_first, of_second = carried[2]
    scale = ()
    for i in gl.static_range(2):
        scale += (w[i] * gl.where(inside[i], of_first[1][:, None], of_second[1][:, None]),)
    return scale, first, second


@gluon.jit
def finish(tiles, settled, given, dtype: gl.constexpr):
    inside = given[5]
    x, dy = tiles
    scale, first, second = settled
    slope = gl.where(inside[0], first[0][:, None], second[0][:, None])
    level = gl.where(inside[0], first[1][:, None], second[1][:, None])
    low = scale[0] * even(dy, dtype) - (even(x, dtype) * slope + level)
    slope = gl.where(inside[1], first[0][:, None], second[0][:, None])
    level = gl.where(inside[1], first[1][:, None], second[1][:, None])
    return pack(low, scale[1] * odd(dy, dtype) - (odd(x, dtype) * slope + level), dtype)


@gluon.jit
def store_sums(PARTIALS, sums, row, rows, vectors, channel, store):
    """The sums of a block's rows, (even, odd) channels."""
    line = gl.arange(0, sums[0].shape[0], layout=gl.SliceLayout(1, vector_layout(gl.num_warps())))
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
def stream(
    place, rings, DX, DY, X, W, STATS, PARTIALS, n_units, groups, channels, n_cols, spatial, length, split, columns,
    db_column, w_kind, store_dx, store_dw, store_db,
    LINES: gl.constexpr, SLOTS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    start, count, rows, row, vector = places_in(n_cols, spatial, length, split, LINES)
    at = gl.cast(start, gl.int64) * n_cols
    _, inside = halves_of(vector, channels)
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, vector_layout(gl.num_warps())))[None, :]
    channel = vector[:, None] * 8 + word * 2
    w = vector_of(W, channel, (row < rows)[:, None], w_kind, 1.0)
    team, teams = gl.program_id(0) // split, gl.num_programs(0) // split
    stats = statistics(STATS, team, n_units, vector, groups, channels)
    zeros = zeros_of(LINES)
    dw, db, _, _ = stream_parts(
        place, rings, DX + at, (X + at, DY + at), n_units, gl.cast(spatial, gl.int64) * (n_cols // 2),
        rows * (n_cols // 2), split, row, rows, count, store_dx != 0,
        (STATS, n_units, groups, channels, vector, inside, w, teams), ((zeros, zeros), (zeros, zeros), stats, stats),
        begin, include, fold, settle, finish, LINES, SLOTS, AHEAD,
    )  # fmt: skip
    PARTIALS += gl.program_id(0).to(gl.int64) * columns
    store_sums(PARTIALS, dw, row, rows, n_cols // 8, channel, store_dw)
    store_sums(PARTIALS + db_column, db, row, rows, n_cols // 8, channel, store_db)


@gluon.jit
def talk(
    place, STATS, WORDS, n_units, groups, channels, n_cols, spatial, length, split,
    PARTS: gl.constexpr, GROUPS: gl.constexpr, MEMBERS: gl.constexpr, LINES: gl.constexpr,
):  # fmt: skip
    _, count, rows, _, vector = places_in(n_cols, spatial, length, split, LINES)
    members = members_of(count, rows, n_cols // 8, groups, channels, GROUPS, MEMBERS)
    given = members, vector, STATS, groups, channels, spatial
    talk_parts(place, WORDS, n_units, split, given, gather, weigh, conclude, PARTS, GROUPS, MEMBERS, LINES)


@gluon.jit
def walk_image_gradients(
    DX, DY, X, W, STATS, PARTIALS, WORDS, n_units, groups, channels, n_cols, spatial, length, split, columns, db_column,
    w_kind, store_dx, store_dw, store_db,
    PARTS: gl.constexpr, GROUPS: gl.constexpr, MEMBERS: gl.constexpr, LINES: gl.constexpr, FOLD: gl.constexpr,
    SLOTS: gl.constexpr, AHEAD: gl.constexpr, TALKERS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Channels-last images, in parts of ``length`` places. PARTIALS[programs, columns]."""
    rings = rings_for(2, SLOTS, LINES, FOLD)
    place = meeting(LINES)
    gl.warp_specialize(
        [
            (stream, (place, rings, DX, DY, X, W, STATS, PARTIALS, n_units, groups, channels, n_cols, spatial, length,
                      split, columns, db_column, w_kind, store_dx, store_dw, store_db, LINES, SLOTS, AHEAD)),
            (talk, (place, STATS, WORDS, n_units, groups, channels, n_cols, spatial, length, split,
                    PARTS, GROUPS, MEMBERS, LINES)),
        ],
        [TALKERS],
        [REGISTERS],
    )  # fmt: skip
