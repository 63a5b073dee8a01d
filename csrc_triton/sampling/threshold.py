"""The threshold of top-k, top-p and min-p, without a sort.

What is kept of a row are the first columns in the order of (greatest value, lowest column): those above a threshold,
and those that equal it, up to a column. The threshold is found among the ordered bits of float32. Each step counts
columns, or adds up their masses, above three pivots between the bounds known so far. Masses are integers (``mass_of``):
their sums don't depend on their order.

Where top-p alone decides, ``bracket.py`` has left the columns among which the threshold is; of a small top-k,
``ranks.py`` compares the few columns that matter. In other rows, and where these do not find it, a step reads only the
groups of 32 columns in which a column may lie between the bounds. ``groups`` left the greatest value of each group: the
k-th greatest of those is a lower bound for the k-th greatest value. The list of the groups that are left is in memory
until they fit in one tile, which is then held in registers.
"""

import triton
import triton.language as tl

from csrc_triton.sampling.bracket import BOUNDS, COUNT, HELD, HIGHEST, NOT_BRACKETED, SUMS
from csrc_triton.sampling.generator import LOG2_E, column_of, in_order, mass_of, ordered
from csrc_triton.sampling.logits import ALL_KEPT, GROUP, LOWEST, load_logits
from csrc_triton.sampling.ranks import (
    FEW,
    NO_KEY,
    NO_WORD,
    RANKED,
    keys_of_sets,
    last_kept,
    least_of_greatest,
    least_probable,
)

NO_GROUP = tl.constexpr(1 << 20)  # its columns are past the last: no mask of groups is needed


@triton.jit
def pivots_of(low, high):
    """Three keys between two bounds: those of the values a third of the way from each, and the middle one. Values lie
    evenly, which keys don't; keys halve what infinite bounds leave."""
    a, b = in_order(low), in_order(high)
    by = (b - a) * 0.33333334
    first = a + by
    second = b - by
    last = tl.maximum(high - 1, low + 1)
    p = ordered(tl.where(first == first, first, 0.0) + 0.0)
    q = ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)
    r = ordered(tl.where(second == second, second, 0.0) + 0.0)
    return tl.minimum(tl.maximum(p, low + 1), last), q, tl.minimum(tl.maximum(r, low + 1), last)


@triton.jit
def pivots_near(low, high, share):
    """Three keys between two bounds: those of the values a little below and above where the threshold is if sums grow
    evenly, and the middle one."""
    a, b = in_order(low), in_order(high)
    by = b - a
    first = a + by * tl.maximum(share - 0.0625, 0.0)
    second = a + by * tl.minimum(share + 0.0625, 1.0)
    last = tl.maximum(high - 1, low + 1)
    p = ordered(tl.where(first == first, first, 0.0) + 0.0)
    q = ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)
    r = ordered(tl.where(second == second, second, 0.0) + 0.0)
    return tl.minimum(tl.maximum(p, low + 1), last), q, tl.minimum(tl.maximum(r, low + 1), last)


@triton.jit
def narrowed(low, high, reached, above, pivot, found, needed):
    """The bounds of the threshold's key, once ``found``, the sum from ``pivot`` on, is known. From ``low`` on the sum
    is ``reached``, at least ``needed``; from ``high`` on it is ``above``, which is less."""
    raises = (found >= needed) & (pivot > low)
    lowers = (found < needed) & (pivot < high)
    low, reached = tl.where(raises, pivot, low), tl.where(raises, found, reached)
    return low, tl.where(lowers, pivot, high), reached, tl.where(lowers, found, above)


@triton.jit
def narrowed_by_three(low, high, reached, above, p, q, r, a, b, c, needed):
    """``narrowed`` by three pivots; a, b, c are the sums from each of them up to ``high``."""
    base = above
    low, high, reached, above = narrowed(low, high, reached, above, p, base + a, needed)
    low, high, reached, above = narrowed(low, high, reached, above, q, base + b, needed)
    return narrowed(low, high, reached, above, r, base + c, needed)


@triton.jit
def combine_step(a, b, c, least, greatest, d, e, f, other_least, other_greatest):
    return a + d, b + e, c + f, tl.minimum(least, other_least), tl.maximum(greatest, other_greatest)


@triton.jit
def in_float32(total):
    """A sum of masses, or of columns, as a float32."""
    total = total.to(tl.int64)
    return (total >> 24).to(tl.int32).to(tl.float32) * 16777216.0 + (total & 0xFFFFFF).to(tl.int32).to(
        tl.float32
    )


@triton.jit
def search_registers(key, value, low, high, reached, above, needed, enough):
    """Narrow the bounds by columns in registers, until one key is left, or no more than ``enough`` is reached. Values
    are int32, sums may be int64: registers are scarce."""
    while (low + 1 < high) & (reached > enough):
        share = in_float32(reached - needed) / in_float32(reached - above)
        p, q, r = pivots_near(low, high, share)
        inside = (key >= low) & (key < high)
        a, b, c, least, greatest = tl.reduce(
            (
                tl.where(inside & (key >= p), value, 0).to(reached.dtype),
                tl.where(inside & (key >= q), value, 0).to(reached.dtype),
                tl.where(inside & (key >= r), value, 0).to(reached.dtype),
                tl.where(inside, key, 0x7FFFFFFF), tl.where(inside, key, NO_KEY),
            ), None, combine_step,
        )  # fmt: skip
        low, high, reached, above = narrowed_by_three(low, high, reached, above, p, q, r, a, b, c, needed)
        low = tl.maximum(low, least)  # there is none below it
        high = tl.minimum(high, greatest + 1)
    return low, reached, above


@triton.jit
def keys_of_groups(GREATEST, groups, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """The greatest key of each group of WIDTH columns. GREATEST is of ``groups`` groups of GROUP."""
    first = tl.arange(0, GROUPS) * (WIDTH // GROUP)
    greatest = tl.full([GROUPS], -float("inf"), tl.float32)
    for i in tl.static_range(WIDTH // GROUP):
        more = tl.load(GREATEST + (first + i), mask=first + i < groups, other=-float("inf"))
        greatest = tl.maximum(greatest, more)
    return tl.where(first < groups, ordered(greatest), NO_KEY)


@triton.jit
def list_groups(LIST, GREATEST, groups, low, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Write the numbers of the groups whose greatest key is at least ``low``; return how many there are."""
    listed = (keys_of_groups(GREATEST, groups, GROUPS, WIDTH) >= low).to(tl.int32)
    tl.debug_barrier()  # the list before is read by other threads
    tl.store(LIST + (tl.cumsum(listed, 0) - 1), tl.arange(0, GROUPS), mask=listed != 0)
    tl.debug_barrier()
    return tl.sum(listed, 0)


@triton.jit
def tile_of(LIST, X, n, first, active, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """(group numbers, columns, keys, values) of a tile of listed groups. Past the last group or column the key is none
    of a number's."""
    at = first + tl.arange(0, TILE)
    group = tl.load(LIST + at, mask=at < active, other=NO_GROUP)
    cols = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = load_logits(X, cols, cols < n)
    return group, cols, tl.where(cols < n, ordered(x), NO_KEY), x


@triton.jit
def value_of(x, greatest, scale, MASSES: tl.constexpr):
    """What a column adds to a sum: its mass, or 1."""
    if MASSES:
        return mass_of(x, greatest, scale).to(tl.int64)
    else:
        return tl.full(x.shape, 1, tl.int32)


@triton.jit
def step_of_list(
    LIST, X, n, active, low, high, p, q, r, greatest, scale,
    MASSES: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(sums from three pivots up to ``high``, groups that have a column between the bounds: the list is of those)"""
    dtype: tl.constexpr = tl.int64 if MASSES else tl.int32
    a = tl.zeros([TILE, WIDTH], dtype)
    b = tl.zeros([TILE, WIDTH], dtype)
    c = tl.zeros([TILE, WIDTH], dtype)
    left = 0
    for first in range(0, active, TILE):
        group, _cols, key, x = tile_of(LIST, X, n, first, active, TILE, WIDTH)
        value = value_of(x, greatest, scale, MASSES)
        inside = (key >= low) & (key < high)
        a += tl.where(inside & (key >= p), value, 0)
        b += tl.where(inside & (key >= q), value, 0)
        c += tl.where(inside & (key >= r), value, 0)
        # of keys: LLVM makes of flags an integer of 4 bits a group, by way of local memory
        listed = (tl.max(tl.where(inside, key, NO_KEY), 1) != NO_KEY).to(tl.int32)
        at = left + tl.cumsum(listed, 0) - 1
        tl.debug_barrier()  # all have read this part of the list, over which the next line may write
        tl.store(LIST + at, group, mask=listed != 0)
        left += tl.sum(listed, 0)
    tl.debug_barrier()
    return tl.sum(a), tl.sum(b), tl.sum(c), left


@triton.jit
def search_list(
    LIST, X, n, active, low, high, greatest, scale, wanted, share,
    MASSES: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(low, reached, above, needed, active): the greatest key from which on the sum is at least what is needed, unless
    all that is listed, from ``low`` on, is less. ``wanted`` columns are needed, or a share of the mass."""
    dtype: tl.constexpr = tl.int64 if MASSES else tl.int32
    above = tl.full([], 0, dtype)
    reached = tl.full([], 1, dtype)  # of the first step, which finds out
    needed = tl.full([], 0, dtype)
    enough = tl.full([], 0, dtype)
    while (needed == 0) | ((low + 1 < high) & (reached > enough) & (active > TILE)):
        p, q, r = pivots_of(low, high)
        p = tl.where(needed == 0, low, p)
        a, b, c, active = step_of_list(
            LIST, X, n, active, low, high, p, q, r, greatest, scale, MASSES, TILE, WIDTH
        )
        if needed == 0:
            reached = a
            if MASSES:
                needed = tl.maximum(tl.ceil(share.to(tl.float64) * a.to(tl.float64)).to(tl.int64), 1)
            else:
                needed = wanted
                enough = wanted  # which columns these are is all that is asked: not the last of them
        if reached > enough:
            low, high, reached, above = narrowed_by_three(low, high, reached, above, p, q, r, a, b, c, needed)
    if (low + 1 < high) & (reached > enough):
        _group, _cols, key, x = tile_of(LIST, X, n, 0, active, TILE, WIDTH)
        value = value_of(x, greatest, scale, MASSES)
        low, reached, above = search_registers(key, value, low, high, reached, above, needed, enough)
    return low, reached, above, needed, active


@triton.jit
def ties_needed(rest, mass):
    """How many times ``mass`` are at least ``rest``, by float32 and three corrections of a quotient below 2^18: ptxas
    calls a function for a division of 64-bit integers, which takes local memory."""
    quotient = in_float32(rest) / mass.to(tl.int32).to(tl.float32)
    ties = tl.maximum(quotient.to(tl.int32) - 1, 0).to(tl.int64)
    ties += (ties * mass < rest).to(tl.int64)
    ties += (ties * mass < rest).to(tl.int64)
    return ties + (ties * mass < rest).to(tl.int64)


@triton.jit
def last_tie(LIST, X, n, active, key_of_tie, wanted, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """The column of the ``wanted``-th of those with this key."""
    before = 0
    column = ALL_KEPT
    for first in range(0, active, TILE):
        _group, cols, key, _x = tile_of(LIST, X, n, first, active, TILE, WIDTH)
        tie = (key == key_of_tie).to(tl.int32)
        in_group = tl.cumsum(tie, 1)
        of_group = tl.max(in_group, 1)
        rank = (before + tl.cumsum(of_group, 0) - of_group)[:, None] + in_group
        column = tl.minimum(column, tl.min(tl.where((tie != 0) & (rank == wanted), cols, ALL_KEPT)))
        before += tl.sum(of_group, 0)
    return column


@triton.jit
def bound_of_groups(key, high, known, wanted, TILE: tl.constexpr):
    """A key that at least ``wanted`` of the ``known`` groups' greatest keys reach, and few more."""
    low = tl.full([], LOWEST, tl.int32)
    if wanted < known:
        value = tl.full(key.shape, 1, tl.int32)
        enough = tl.maximum(wanted + (wanted >> 2), TILE // 2)
        low, _reached, _above = search_registers(key, value, low, high, known, wanted * 0, wanted, enough)
    return low


@triton.jit
def greatest_columns(
    LIST, GREATEST, X, n, wanted, groups, GROUPS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """How many groups are listed: all that hold one of the ``wanted`` greatest columns."""
    key = keys_of_groups(GREATEST, groups, GROUPS, WIDTH)
    known = tl.cdiv(groups, WIDTH // GROUP)
    low = bound_of_groups(key, tl.max(key, 0) + 1, known, wanted, TILE)
    return list_groups(LIST, GREATEST, groups, low, GROUPS, WIDTH)


@triton.jit
def search_collected(WORDS, held, greatest, scale, share, n, COLUMNS: tl.constexpr):
    """(1 if the threshold is among the ``held`` columns that ``collect`` wrote down, COLUMNS at most, its key, the last
    column that is kept of those that equal it)."""
    total = tl.load(WORDS + 1)
    above = tl.load(WORDS + 2)
    needed = tl.maximum(tl.ceil(share.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
    i = tl.arange(0, COLUMNS)
    word = tl.load(WORDS + SUMS + i, mask=i < held, other=NO_WORD)
    key = (word >> 32).to(tl.int32)  # none's is NO_KEY
    value = tl.where(key != NO_KEY, mass_of(in_order(key), greatest, scale), 0)
    reached = above + tl.sum(value.to(tl.int64), 0)
    found = tl.full([], 0, tl.int32)
    low = tl.full([], LOWEST, tl.int32)
    limit = tl.full([], ALL_KEPT, tl.int32)
    if (above < needed) & (needed <= reached):
        found = tl.full([], 1, tl.int32)
        least = tl.min(tl.where(key != NO_KEY, key, 0x7FFFFFFF), 0)
        low, reached, above = search_registers(
            key, value, least, tl.max(key, 0) + 1, reached, above, needed, needed * 0
        )
        mass = tl.maximum(mass_of(in_order(low), greatest, scale), 1).to(tl.int64)
        ties = ties_needed(needed - above, mass)
        if above + ties * mass < reached:
            wanted = ties.to(tl.int32)
            one = (key == low).to(tl.int32)
            word = tl.load(WORDS + SUMS + i, mask=one != 0, other=0)
            column = tl.where(one != 0, -column_of(word).to(tl.int32), NO_KEY)
            count = tl.sum(one, 0)
            zero = tl.full([], 0, tl.int32)
            last, _count, _above = search_registers(
                column, one, zero - n, zero + 1, count, zero, wanted, wanted
            )
            limit = -last
    return found, low, limit


@triton.jit
def write_columns(
    WORDS, LIST, GREATEST, X, n, low, groups, GROUPS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Write down the columns whose key is at least ``low``; return how many there are, or more than RANKED where they
    are more."""
    active = list_groups(LIST, GREATEST, groups, low, GROUPS, WIDTH)
    count = active
    if active <= RANKED:
        count = active * 0
        for first in range(0, active, TILE):
            _group, cols, key, _x = tile_of(LIST, X, n, first, active, TILE, WIDTH)
            key = tl.reshape(key, [TILE * WIDTH])
            reached = (key >= low).to(tl.int32)
            place = count + tl.cumsum(reached, 0) - 1
            word = (key.to(tl.int64) << 32) | (0x7FFFFFFF - tl.reshape(cols, [TILE * WIDTH])).to(tl.int64)
            tl.store(WORDS + place, word, mask=(reached != 0) & (place < RANKED))
            count += tl.sum(reached, 0)
        tl.debug_barrier()
    return count


@triton.jit
def rank_columns(
    WORDS, GREATEST, X, n, wanted, share, least_share, scale, groups, collected,
    GROUPS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(how many columns are written down, the key of the last that is kept, its column): those that are as great as
    the ``wanted`` greatest. 0 if they are too many. ``collect`` has written them down, if ``collected`` is not 0."""
    LIST = (GREATEST + groups).to(tl.pointer_type(tl.int32), bitcast=True)
    COLUMNS = WORDS + SUMS
    found = tl.full([], 0, tl.int32)
    low = tl.full([], LOWEST, tl.int32)
    limit = tl.full([], ALL_KEPT, tl.int32)
    count = tl.load(WORDS).to(tl.int32)
    greatest = tl.load(WORDS + HIGHEST).to(tl.int32).to(tl.float32, bitcast=True)
    few = tl.load(COLUMNS + tl.arange(0, FEW))  # before their number is known
    if collected == 0:
        sets = keys_of_sets(GREATEST, groups)
        greatest = in_order(tl.max(sets, 0))
        count = tl.full([], 0, tl.int32)
        if greatest > -float("inf"):
            least = least_of_greatest(sets, greatest, wanted, least_share, scale)
            count = write_columns(COLUMNS, LIST, GREATEST, X, n, least, groups, GROUPS, TILE, WIDTH)
        few = tl.load(COLUMNS + tl.arange(0, FEW))
    if count > 0:
        if count <= FEW:
            low, limit = last_kept(COLUMNS, few, count, wanted, share, greatest, scale, FEW)
            found = count
        elif count <= RANKED:
            own = tl.load(COLUMNS + tl.arange(0, RANKED))
            low, limit = last_kept(COLUMNS, own, count, wanted, share, greatest, scale, RANKED // 16)
            found = count
    return found, low, limit


@triton.jit
def search(
    GREATEST, X, n, wanted, share, least_share, scale, groups,
    GROUPS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(the key of the last column that is kept, its column), by a search of the row."""
    LIST = (GREATEST + groups).to(tl.pointer_type(tl.int32), bitcast=True)
    low = tl.full([], LOWEST, tl.int32)
    limit = tl.full([], ALL_KEPT, tl.int32)
    key = keys_of_groups(GREATEST, groups, GROUPS, WIDTH)
    highest = tl.max(key, 0)
    greatest = in_order(highest)
    if greatest > -float("inf"):
        high = highest + 1
        nearest = low
        if least_share > 0.0:
            nearest = least_probable(greatest, scale, tl.minimum(least_share, 1.0))
        if wanted < n:
            known = tl.cdiv(groups, WIDTH // GROUP)
            low = bound_of_groups(key, high, known, wanted, TILE)
            active = list_groups(LIST, GREATEST, groups, tl.maximum(low, nearest), GROUPS, WIDTH)
            low, _count, _count_above, _wanted, _active = search_list(
                LIST, X, n, active, tl.maximum(low, nearest), high, greatest, scale, wanted, share, False, TILE, WIDTH
            )  # fmt: skip
        low = tl.maximum(low, nearest)
        if share < 1.0:
            far = greatest - 32.0 / scale  # below it masses are 0
            low = tl.maximum(low, ordered(tl.where(far == far, far, -float("inf")) + 0.0))
            active = list_groups(LIST, GREATEST, groups, low, GROUPS, WIDTH)
            low, reached, above, needed, active = search_list(
                LIST, X, n, active, low, high, greatest, scale, wanted, share, True, TILE, WIDTH
            )  # fmt: skip
            mass = tl.maximum(mass_of(in_order(low), greatest, scale), 1).to(tl.int64)
            ties = ties_needed(needed - above, mass)
            if above + ties * mass < reached:
                limit = last_tie(LIST, X, n, active, low, ties.to(tl.int32), TILE, WIDTH)
    return low, limit


@triton.jit
def find_threshold(
    LAST, GREATEST, WORDS, X, n, wanted, share, least_share, temperature, at, groups, row_words, collected,
    GROUPS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the last column that is kept of row ``at``, in the order of (greatest logit, lowest column), as ``packed``
    has it. GREATEST, WORDS and X are the row's own, and there is room for a list of groups after GREATEST; ``bracket``
    and ``collect`` have written to WORDS if those are more than HELD, ``collect`` of a small top-k if ``collected`` is
    not 0."""
    low = tl.full([], LOWEST, tl.int32)
    limit = tl.full([], ALL_KEPT, tl.int32)
    ranked = tl.full([], 0, tl.int32)
    if temperature > 0.0:
        scale = tl.div_rn(LOG2_E, temperature)
        found = tl.full([], 0, tl.int32)
        if wanted <= RANKED // 2:
            ranked, low, limit = rank_columns(
                WORDS, GREATEST, X, n, wanted, share, least_share, scale, groups, collected, GROUPS, TILE, WIDTH
            )  # fmt: skip
            found = ranked
        elif row_words > HELD:  # noqa: SIM102 (what is loaded is there only then)
            if tl.load(WORDS + BOUNDS) != NOT_BRACKETED:
                held = tl.load(WORDS).to(tl.int32)
                greatest = tl.load(WORDS + HIGHEST).to(tl.int32).to(tl.float32, bitcast=True)
                if held <= HELD // 2:  # as a rule; by HELD alone one row of top-p takes 6 us longer (H200)
                    found, low, limit = search_collected(WORDS, held, greatest, scale, share, n, HELD // 2)
                elif held <= HELD:
                    found, low, limit = search_collected(WORDS, held, greatest, scale, share, n, HELD)
        if found == 0:
            low, limit = search(
                GREATEST, X, n, wanted, share, least_share, scale, groups, GROUPS, TILE, WIDTH
            )
    tl.store(WORDS + COUNT, ranked.to(tl.int64))
    tl.store(LAST + at, (low.to(tl.int64) << 32) | (0x7FFFFFFF - limit).to(tl.int64))
