"""GroupNorm of channels-last images by programs that hold parts of them in shared memory (Gluon, Hopper): see
``held_parts`` for the walk.

A part is of some places, whole rows of channels and so one run of memory, a block of as many places as fit. A line is
of the same channels in every block, so that what is added up, and what scales it, stays in its thread's registers.
Eight channels a line are of two groups at most: groups are of four channels, or of seven or more.

Statistics are as in ``moments``; a line's pivots are its own elements.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_triton.common.bf16x2 import even, odd, pack
from csrc_triton.common.exchange import pack_word, unpack_word
from csrc_triton.common.pipeline import add_two, vector_layout
from csrc_triton.norms.held_parts import (
    meeting,
    rings_for,
    stream_parts,
    table_layout,
    talk_parts,
    words_layout,
)
from csrc_triton.norms.norm_vectors import load_vector


@gluon.jit
def zeros_of(LINES: gl.constexpr):
    return gl.zeros([LINES, 4], gl.float32, vector_layout(gl.num_warps()))


@gluon.jit
def moments_of(total, squares, pivot, n):
    """(mean, sum of squared deviations) of n elements from sums of what they differ from the pivot."""
    apart = total / gl.maximum(n, 1.0)
    return pivot + apart, gl.maximum(squares - total * apart, 0.0)


@gluon.jit
def merge_along(means, deviations, counts, axis: gl.constexpr):
    """(mean, sum of squared deviations, count) along an axis; see ``moments``."""
    held, totals = gl.reduce((counts, means * counts), axis, add_two)
    mean = totals / gl.maximum(held, 1.0)
    apart = means - gl.expand_dims(mean, axis)
    return mean, gl.sum(deviations + counts * apart * apart, axis), held


@gluon.jit
def weigh_moments(words, own, n):
    """What parts of n elements, whose moments are in ``words``, add to the sum of all from this part's own mean, and to
    that of their squares. A mean over many elements is a good pivot."""
    apart = words[0] - own
    return n * apart, words[1] + n * apart * apart


@gluon.jit
def all_moments(totals, n):
    """(mean, variance) of n elements from sums of ``weigh_moments``."""
    apart = totals[0] / n
    return totals[2] + apart, gl.maximum(totals[1] - totals[0] * apart, 0.0) / n


@gluon.jit
def vector_of(V, channel, mask, kind, missing):
    """Weight or bias of a line's (even, odd) channels."""
    low = load_vector(V, channel, mask, kind) + gl.where(kind == 0, missing, 0.0)
    return low, load_vector(V, channel + 1, mask, kind) + gl.where(kind == 0, missing, 0.0)


@gluon.jit
def places_of(count, row, rows):
    """How many places of a part are in row ``row`` of its tiles."""
    return gl.maximum(count - row + (rows - 1), 0) // rows


@gluon.jit
def halves_of(vector, channels):
    """Of each line, the channels of its first group, and which (even, odd) ones they are."""
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, vector_layout(gl.num_warps())))[None, :]
    here = gl.minimum((vector * 8 // channels + 1) * channels - vector * 8, 8)
    return here, (word * 2 < here[:, None], word * 2 + 1 < here[:, None])


@gluon.jit
def half_sum(values, inside):
    """The sum of a line's (even, odd) values that are ``inside``."""
    return gl.sum(gl.where(inside[0], values[0], 0.0) + gl.where(inside[1], values[1], 0.0), 1)


@gluon.jit
def other_sum(values, inside):
    return gl.sum(gl.where(inside[0], 0.0, values[0]) + gl.where(inside[1], 0.0, values[1]), 1)


@gluon.jit
def members_of(count, rows, vectors, groups, channels, GROUPS: gl.constexpr, MEMBERS: gl.constexpr):
    """Which lines of a block have channels of a group: of each, in a table [GROUPS, MEMBERS], three things in an int32:
    the line; whether the group is the one of the line's first channel; how many elements a part has of them."""
    item = gl.arange(0, GROUPS * MEMBERS, layout=gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
    group = item // MEMBERS
    first_vector = group * channels // 8
    across = ((group + 1) * channels - 1) // 8 + 1 - first_vector  # lines of a place
    row = item % MEMBERS // across
    vector = first_vector + item % MEMBERS - row * across
    group_of_first = vector * 8 // channels
    is_first = group_of_first == group
    n = gl.minimum((group_of_first + 1) * channels - vector * 8, 8)
    n = gl.where(is_first, n, 8 - n) * places_of(count, row, rows)
    live = (row < rows) & (group < groups)
    return gl.where(live, (n * 2 + is_first.to(gl.int32)) * 4096 + row * vectors + vector, 0)


@gluon.jit
def of_members(first, second, members, GROUPS: gl.constexpr, MEMBERS: gl.constexpr):
    """The two values that lines have of their first group, and of their second, in the table of groups, with counts:
    zeros where there is no member."""
    table: gl.constexpr = table_layout(MEMBERS, gl.num_warps())
    at = members & 4095
    first = gl.gather(pack_word(first[0], first[1]), at, 0)
    second = gl.gather(pack_word(second[0], second[1]), at, 0)
    counts = (members >> 13).to(gl.float32).reshape([GROUPS, MEMBERS])
    words = gl.where((members & 4096) != 0, first, second)
    a, b = unpack_word(gl.where(members >= 8192, words, 0).reshape([GROUPS, MEMBERS]))
    return gl.convert_layout(a, table), gl.convert_layout(b, table), gl.convert_layout(counts, table)


@gluon.jit
def of_halves(a, b, vector, groups, channels):
    """Two values a group, each for a line's first group and for its second."""
    values = pack_word(a, b)
    first = gl.minimum(vector * 8 // channels, groups - 1)
    second = unpack_word(gl.gather(values, gl.minimum(first + 1, groups - 1), 0))
    first = unpack_word(gl.gather(values, first, 0))
    return first, second


@gluon.jit
def store_statistics(STATS, mean, rstd, unit, groups, there):
    """Of a unit's groups."""
    group = gl.arange(0, mean.shape[0], layout=gl.SliceLayout(0, words_layout(mean.shape[0], gl.num_warps())))
    at = STATS + (unit * groups + group) * 2
    mask = (group < groups) & there
    gl.store(at, mean, mask=mask)
    gl.store(at + 1, rstd, mask=mask)


@gluon.jit
def begin_last(tiles, given, LINES: gl.constexpr, dtype: gl.constexpr):
    """Pivots for the channels of a line: its first channel's first place for those of the first group, its last
    channel's for the others."""
    inside = given[1]
    x = tiles[0]
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, vector_layout(gl.num_warps())))[None, :]
    first = gl.sum(gl.where(word == 0, x & 0xFFFF, 0), 1)[:, None]
    last = gl.sum(gl.where(word == 3, (x >> 16) & 0xFFFF, 0), 1)[:, None]
    pivot = gl.where(inside[0], first, last) | (gl.where(inside[1], first, last) << 16)
    zeros = zeros_of(LINES)
    return pivot, zeros, zeros, zeros, zeros


@gluon.jit
def include_apart(sums, tiles, live, given, dtype: gl.constexpr):
    """Add what a block differs from the pivots."""
    pivot = sums[0]
    x = gl.where(live, tiles[0], pivot)
    low = even(x, dtype) - even(pivot, dtype)
    high = odd(x, dtype) - odd(pivot, dtype)
    return pivot, sums[1] + low, sums[2] + high, sums[3] + low * low, sums[4] + high * high


@gluon.jit
def fold_last(sums, carried, unit, there, given, dtype: gl.constexpr):
    """(mean, sum of squared deviations) of a line's channels of its first group, and of those of its second."""
    _vector, inside, n_first, n_second, _w, _b = given
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, vector_layout(gl.num_warps())))[None, :]
    pivot = gl.sum(gl.where(word == 0, even(sums[0], dtype), 0.0), 1)
    total, squares = half_sum((sums[1], sums[2]), inside), half_sum((sums[3], sums[4]), inside)
    first = moments_of(total, squares, pivot, n_first)
    pivot = gl.sum(gl.where(word == 3, odd(sums[0], dtype), 0.0), 1)
    total, squares = other_sum((sums[1], sums[2]), inside), other_sum((sums[3], sums[4]), inside)
    return first, moments_of(total, squares, pivot, n_second), carried


@gluon.jit
def gather_last(first, second, given, GROUPS: gl.constexpr, MEMBERS: gl.constexpr):
    means, deviations, counts = of_members(first, second, given[0], GROUPS, MEMBERS)
    mean, deviation, _ = merge_along(means, deviations, counts, 1)
    return mean, deviation


@gluon.jit
def weigh_last(words, own, part, given):
    _members, _vector, _STATS, _groups, channels, spatial, length, _eps, _store = given
    places = gl.maximum(gl.minimum(length, spatial - part * length), 0)
    return weigh_moments(words, own, (places.to(gl.float32) * channels)[:, None])


@gluon.jit
def conclude_last(totals, unit, given):
    """(mean, 1 / sqrt(var + eps)) of a line's first group, and of its second."""
    _members, vector, STATS, groups, channels, spatial, _length, eps, store = given
    mean, variance = all_moments(totals, spatial.to(gl.float32) * channels)
    rstd = gl.rsqrt(variance + eps)
    store_statistics(STATS, mean, rstd, unit, groups, store)
    return of_halves(mean, rstd, vector, groups, channels)


@gluon.jit
def settle_last(first, second, unit, carried, given):
    """What the (even, odd) channels of a line are multiplied by, and what is added."""
    _vector, inside, _n_first, _n_second, w, b = given
    scale, shift = (), ()
    for i in gl.static_range(2):
        mean = gl.where(inside[i], first[0][:, None], second[0][:, None])
        scale += (w[i] * gl.where(inside[i], first[1][:, None], second[1][:, None]),)
        shift += (b[i] - mean * scale[i],)
    return scale[0], scale[1], shift[0], shift[1]


@gluon.jit
def finish_last(tiles, settled, given, dtype: gl.constexpr):
    low = even(tiles[0], dtype) * settled[0] + settled[2]
    high = odd(tiles[0], dtype) * settled[1] + settled[3]
    return pack(low, high, dtype)


@gluon.jit
def places_in(n_cols, spatial, length, split, LINES: gl.constexpr):
    """Of a part of an image: its first place, how many it has; of a block: rows, each line's row and place in it."""
    vectors = n_cols // 8
    line = gl.arange(0, LINES, layout=gl.SliceLayout(1, vector_layout(gl.num_warps())))
    start = gl.program_id(0) % split * length
    row = line // vectors
    return start, gl.minimum(length, spatial - start), LINES // vectors, row, line - row * vectors


@gluon.jit
def stream_images(
    place, rings, Y, X, W, B, n_images, channels, n_cols, spatial, length, split, w_kind, b_kind,
    LINES: gl.constexpr, SLOTS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    start, count, rows, row, vector = places_in(n_cols, spatial, length, split, LINES)
    at = gl.cast(start, gl.int64) * n_cols
    here, inside = halves_of(vector, channels)
    size = gl.where(row < rows, places_of(count, row, rows), 0)
    n_first, n_second = (size * here).to(gl.float32), (size * (8 - here)).to(gl.float32)
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, vector_layout(gl.num_warps())))[None, :]
    channel = vector[:, None] * 8 + word * 2
    w = vector_of(W, channel, (row < rows)[:, None], w_kind, 1.0)
    b = vector_of(B, channel, (row < rows)[:, None], b_kind, 0.0)
    stream_parts(
        place, rings, Y + at, (X + at,), n_images, gl.cast(spatial, gl.int64) * (n_cols // 2), rows * (n_cols // 2),
        split, row, rows, count, True, (vector, inside, n_first, n_second, w, b), (),
        begin_last, include_apart, fold_last, settle_last, finish_last, LINES, SLOTS, AHEAD,
    )  # fmt: skip


@gluon.jit
def talk_of_images(
    place, STATS, WORDS, n_images, groups, channels, n_cols, spatial, length, split, eps, store_stats,
    PARTS: gl.constexpr, GROUPS: gl.constexpr, MEMBERS: gl.constexpr, LINES: gl.constexpr,
):  # fmt: skip
    start, count, rows, _, vector = places_in(n_cols, spatial, length, split, LINES)
    members = members_of(count, rows, n_cols // 8, groups, channels, GROUPS, MEMBERS)
    store = (store_stats != 0) & (start == 0)
    given = members, vector, STATS, groups, channels, spatial, length, eps, store
    talk_parts(
        place,
        WORDS,
        n_images,
        split,
        given,
        gather_last,
        weigh_last,
        conclude_last,
        PARTS,
        GROUPS,
        MEMBERS,
        LINES,
    )


@gluon.jit
def walk_images(
    Y, X, W, B, STATS, WORDS, n_images, groups, channels, n_cols, spatial, length, split, eps, w_kind, b_kind,
    store_stats,
    PARTS: gl.constexpr, GROUPS: gl.constexpr, MEMBERS: gl.constexpr, LINES: gl.constexpr, FOLD: gl.constexpr,
    SLOTS: gl.constexpr, AHEAD: gl.constexpr, TALKERS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Channels-last images, in parts of ``length`` places."""
    rings = rings_for(1, SLOTS, LINES, FOLD)
    place = meeting(LINES)
    gl.warp_specialize(
        [
            (stream_images, (place, rings, Y, X, W, B, n_images, channels, n_cols, spatial, length, split, w_kind,
                             b_kind, LINES, SLOTS, AHEAD)),
            (talk_of_images, (place, STATS, WORDS, n_images, groups, channels, n_cols, spatial, length, split, eps,
                              store_stats, PARTS, GROUPS, MEMBERS, LINES)),
        ],
        [TALKERS],
        [REGISTERS],
    )  # fmt: skip
