"""The walk of programs that hold a part of a unit each, and share what they find in it (Gluon, Hopper).

A unit is what must be read whole before any of it can be written, and too long for one program: an image of
GroupNorm's. What bounds it, at 132 multiprocessors and 4.3 TB/s of reads and writes: 32 bytes a nanosecond each; reads,
half of them, are under way for 1.2 to 1.5 us: 24 KB at every moment. To read units twice costs a half more.

So a team of ``split`` programs takes a unit. Each copies its part to shared memory and includes it in its sums, hands
these to the others and waits for theirs (the launch is cooperative), and finishes what it still holds. Tiles are of
FOLD blocks of LINES lines of 16 bytes, two 16-bit elements to an int32, and go through a ring of SLOTS tiles, AHEAD of
them under way. With every tile that is finished, one of the next unit is included; a part's last ``slack`` tiles wait
for as many of the next part, while the exchange takes place. Every thread reads back what it copied itself; the
compiler puts two barriers about a tile all the same, which is why a tile may be of several blocks.

What it falls short by (H200: 32 images of 320x64x64 take 56 us, a copy 43): to bring a part's sums together takes 0.5
to 1 us (2.3 with 64 MEMBERS), to exchange them 2 us, 1.2 us more for every PARTS above the first, and ``slack`` covers
3 us of these. So warps of their own talk to the other programs: left to the warps that stream, it took a quarter more.
Two programs a multiprocessor, with rings of half the size, were slower.

Lines of a block are in ``rows`` rows, of which the ones from ``count`` on are past the part's end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from csrc_triton.common.exchange import (
    barrier_arrive,
    barrier_passed,
    pack_word,
    post_two,
    unpack_word,
    wait_for_words,
)
from csrc_triton.common.pipeline import (
    add_two,
    copy_tile,
    next_stage,
    read_tiles,
    tile_offsets,
    vector_layout,
)


@gluon.constexpr_function
def words_layout(groups, warps):
    """The layout of the words [parts, groups] of a unit."""
    lanes = min(32, groups)
    return gl.BlockedLayout([1, 1], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def table_layout(members, warps):
    """The layout of a table [groups, members]: four neighbours a thread. Parts' sums have its rows'."""
    across = min(32, members // 4)
    return gl.BlockedLayout([1, 4], [32 // across, across], [warps, 1], [1, 0])


@gluon.jit
def live_lines(block, lines):
    """Which lines of a part's block are there. ``lines`` are (row, rows, count)."""
    return (lines[0] < lines[1]) & (lines[0] + block * lines[1] < lines[2])


@gluon.jit
def copy_part(rings, slot, ins, at, there, tile, lines, block_words):
    """Start to copy a tile of each input."""
    FOLD: gl.constexpr = len(rings)
    for f in gl.static_range(FOLD):
        mask = (live_lines(tile * FOLD + f, lines) & there)[:, None]
        for i in gl.static_range(len(ins)):
            copy_tile(rings[f][i], slot, ins[i] + (at + f * block_words), mask)
    async_copy.commit_group()


@gluon.jit
def tile_in(rings, slot, layout: gl.constexpr):
    """The blocks of a tile, of each input."""
    blocks = ()
    for f in gl.static_range(len(rings)):
        blocks += (read_tiles(rings[f], slot, layout),)
    return blocks


@gluon.jit
def include_tile(sums, blocks, tile, lines, given, dtype: gl.constexpr, include: gl.constexpr):
    FOLD: gl.constexpr = len(blocks)
    for f in gl.static_range(FOLD):
        sums = include(sums, blocks[f], live_lines(tile * FOLD + f, lines)[:, None], given, dtype)
    return sums


@gluon.jit
def finish_tile(
    out, blocks, settled, tile, lines, store, block_words, given, dtype: gl.constexpr, finish: gl.constexpr
):
    FOLD: gl.constexpr = len(blocks)
    for f in gl.static_range(FOLD):
        mask = (live_lines(tile * FOLD + f, lines) & store)[:, None]
        gl.store(out + f * block_words, finish(blocks[f], settled, given, dtype), mask=mask)


@gluon.jit
def next_tile(unit, tile, at, tiles, teams, tile_words, jump):
    """Of the unit under way or of the team's next one: which, and where."""
    last = tile == tiles - 1
    return (
        gl.where(last, unit + teams, unit),
        gl.where(last, 0, tile + 1),
        at + gl.where(last, jump, tile_words),
    )


@gluon.jit
def exchanged(WORDS, unit, split, own, given, weigh: gl.constexpr, PARTS: gl.constexpr, GROUPS: gl.constexpr):
    """What all parts of a unit posted, weighed and added up, and the first of this part's ``own`` values, [GROUPS]."""
    layout: gl.constexpr = words_layout(GROUPS, gl.num_warps())
    group = gl.arange(0, GROUPS, layout=gl.SliceLayout(0, layout))
    part = gl.arange(0, PARTS, layout=gl.SliceLayout(1, layout))
    a = gl.zeros([PARTS, GROUPS], gl.float32, layout)
    b = a
    WORDS += gl.cast(unit, gl.int64) * split * GROUPS + group[None, :]
    PACK: gl.constexpr = 4 if 128 * gl.num_warps() <= PARTS * GROUPS else 1
    own = gl.convert_layout(own, gl.SliceLayout(0, layout))
    for begin in range(0, split, PARTS):
        words = wait_for_words(WORDS + gl.minimum(begin + part, split - 1)[:, None] * GROUPS, PACK)
        more_a, more_b = weigh(unpack_word(words), own[None, :], begin + part, given)
        live = (begin + part < split)[:, None]
        a += gl.where(live, more_a, 0.0)
        b += gl.where(live, more_b, 0.0)
    a, b = gl.reduce((a, b), 0, add_two)
    return a, b, own


@gluon.jit
def meeting(LINES: gl.constexpr):
    """Where the warps that stream and those that talk meet: two words a line, and barriers for either direction."""
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    first = gl.allocate_shared_memory(gl.int64, [LINES], shared)
    second = gl.allocate_shared_memory(gl.int64, [LINES], shared)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    mbarrier.init(full.index(1), count=1)
    return first, second, full


@gluon.jit
def leave(place, first, second, barrier: gl.constexpr):
    """Two pairs of values a line, for the other side."""
    place[0].store(pack_word(first[0], first[1]))
    place[1].store(pack_word(second[0], second[1]))
    gl.thread_barrier()
    mbarrier.arrive(place[2].index(barrier), count=1)


@gluon.jit
def take(place, LINES: gl.constexpr):
    """The two pairs of values a line."""
    layout: gl.constexpr = gl.SliceLayout(1, vector_layout(gl.num_warps()))
    return unpack_word(place[0].load(layout)), unpack_word(place[1].load(layout))


@gluon.jit
def talk_parts(
    place, WORDS, n_units, split, given,
    gather: gl.constexpr, weigh: gl.constexpr, conclude: gl.constexpr,
    PARTS: gl.constexpr, GROUPS: gl.constexpr, MEMBERS: gl.constexpr, LINES: gl.constexpr,
):  # fmt: skip
    """The warps that hand a part's sums to the other programs, while others stream: see ``stream_parts``. WORDS holds a
    barrier's counter in its first word and room for [n_units, split, GROUPS] from its third on.

    ``gather(first, second, given, GROUPS, MEMBERS)`` makes two values a group of the two pairs a line, for all parts to
    have; ``weigh(words, own, part, given)``, of what they have and of the first value of this one's, two to add up;
    ``conclude(totals, unit, given)``, of these sums and of that value, two pairs a line."""
    sums_layout: gl.constexpr = gl.SliceLayout(1, table_layout(MEMBERS, gl.num_warps()))
    team, teams = gl.program_id(0) // split, gl.num_programs(0) // split
    part = gl.program_id(0) % split
    counter = WORDS.to(gl.pointer_type(gl.int32), bitcast=True)
    group = gl.arange(0, GROUPS, layout=sums_layout)
    WORDS += 2
    for unit in range(team, n_units, teams):
        words = WORDS + (gl.cast(unit, gl.int64) * split + part) * GROUPS + group
        gl.store(words, gl.zeros([GROUPS], gl.int64, sums_layout))
    gl.thread_barrier()
    before = barrier_arrive(counter, gl.num_programs(0))
    waiting = True
    turn = 0
    for unit in range(team, n_units, teams):
        mbarrier.wait(place[2].index(0), turn)
        first, second = take(place, LINES)
        a, b = gather(first, second, given, GROUPS, MEMBERS)
        post_two(WORDS + (gl.cast(unit, gl.int64) * split + part) * GROUPS + group, a, b, True)
        while waiting:
            waiting = not barrier_passed(counter, before)
        totals = exchanged(WORDS, unit, split, a, given, weigh, PARTS, GROUPS)
        first, second = conclude(totals, unit, given)
        leave(place, first, second, 1)
        turn = turn ^ 1


@gluon.jit
def stream_parts(
    place, rings, OUT, ins, n_units, unit_words, block_words, split, row, rows, count, store, given, carried,
    begin: gl.constexpr, include: gl.constexpr, fold: gl.constexpr, settle: gl.constexpr, finish: gl.constexpr,
    LINES: gl.constexpr, SLOTS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Units team, team + teams, ..., of ``unit_words`` int32 each. OUT and ``ins`` point to the part in unit 0.

    What is computed, where all get what is ``given``: ``begin(blocks, given, LINES, dtype)`` makes sums of nothing, of
    the first block of each input; ``include(sums, blocks, live, given, dtype)`` adds a block's lines; ``fold(sums,
    carried, unit, there, given, dtype)`` makes of a part's sums two pairs of values a line, and of what is ``carried``
    from unit to unit, whatever it is, the next. ``talk_parts`` makes two other pairs of these, of which ``settle(first,
    second, unit, carried, given)`` makes what ``finish(blocks, settled, given, dtype)`` takes for the words of a
    block of OUT. A unit that is not ``there`` counts for nothing. What is carried in the end is returned."""
    dtype: gl.constexpr = OUT.dtype.element_ty
    layout: gl.constexpr = vector_layout(gl.num_warps())
    at = tile_offsets(LINES, layout)
    out = OUT.to(gl.pointer_type(gl.int32), bitcast=True) + at
    sources = ()
    for i in gl.static_range(len(ins)):
        sources += (ins[i].to(gl.pointer_type(gl.int32), bitcast=True) + at,)
    ins = sources
    team, teams = gl.program_id(0) // split, gl.num_programs(0) // split
    FOLD: gl.constexpr = len(rings)
    lines = row, rows, count
    tiles = (count + rows * FOLD - 1) // (rows * FOLD)
    slack = gl.minimum(tiles, SLOTS - AHEAD - tiles)
    slots = tiles + slack + AHEAD
    ask_unit, ask_tile, ask_at = team, team * 0, gl.cast(team, gl.int64) * unit_words
    block_words = gl.cast(block_words, gl.int64)
    tile_words = FOLD * block_words
    jump = teams * unit_words - (tiles - 1) * tile_words
    for i in range(AHEAD):
        copy_part(rings, i, ins, ask_at, ask_unit < n_units, ask_tile, lines, block_words)
        ask_unit, ask_tile, ask_at = next_tile(ask_unit, ask_tile, ask_at, tiles, teams, tile_words, jump)
    slot = team * 0
    free = slot + AHEAD
    async_copy.wait_group(AHEAD - 1)
    sums = begin(read_tiles(rings[0], slot, layout), given, LINES, dtype)
    for i in range(tiles):
        async_copy.wait_group(AHEAD - 1)
        new = tile_in(rings, slot, layout)
        sums = include_tile(sums, new, i, lines, given, dtype, include)
        copy_part(rings, free, ins, ask_at, ask_unit < n_units, ask_tile, lines, block_words)
        ask_unit, ask_tile, ask_at = next_tile(ask_unit, ask_tile, ask_at, tiles, teams, tile_words, jump)
        slot, free = next_stage(slot, slots), next_stage(free, slots)
    out_at = ask_at
    zeros = gl.zeros([LINES], gl.float32, gl.SliceLayout(1, layout))
    settled = settle((zeros, zeros), (zeros, zeros), team, carried, given)
    turn = 0
    for last in range(team - teams, n_units, teams):
        # All of ``unit`` is included, and all but ``slack`` tiles of ``last``, which may be none, are finished.
        unit = last + teams
        there = unit < n_units
        first, second, carried = fold(sums, carried, unit, there, given, dtype)
        if there:
            leave(place, first, second, 0)
        async_copy.wait_group(AHEAD - 1)
        sums = begin(read_tiles(rings[0], slot, layout), given, LINES, dtype)
        for i in range(slack):
            async_copy.wait_group(AHEAD - 1)
            new, old = tile_in(rings, slot, layout), tile_in(rings, free, layout)
            copy_part(rings, free, ins, ask_at, ask_unit < n_units, ask_tile, lines, block_words)
            ask_unit, ask_tile, ask_at = next_tile(ask_unit, ask_tile, ask_at, tiles, teams, tile_words, jump)
            tile = tiles - slack + i
            live = (last >= 0) & store
            finish_tile(out + out_at, old, settled, tile, lines, live, block_words, given, dtype, finish)
            out_at += tile_words
            sums = include_tile(sums, new, i, lines, given, dtype, include)
            slot, free = next_stage(slot, slots), next_stage(free, slots)
        if there:
            mbarrier.wait(place[2].index(1), turn)
        first, second = take(place, LINES)
        settled = settle(first, second, unit, carried, given)
        out_at = gl.cast(unit, gl.int64) * unit_words
        for i in range(tiles - slack):
            async_copy.wait_group(AHEAD - 1)
            new, old = tile_in(rings, slot, layout), tile_in(rings, free, layout)
            copy_part(rings, free, ins, ask_at, ask_unit < n_units, ask_tile, lines, block_words)
            ask_unit, ask_tile, ask_at = next_tile(ask_unit, ask_tile, ask_at, tiles, teams, tile_words, jump)
            live = there & store
            finish_tile(out + out_at, old, settled, i, lines, live, block_words, given, dtype, finish)
            out_at += tile_words
            sums = include_tile(sums, new, slack + i, lines, given, dtype, include)
            slot, free = next_stage(slot, slots), next_stage(free, slots)
        turn = turn ^ 1
    async_copy.wait_group(0)
    return carried


@gluon.jit
def rings_for(count: gl.constexpr, SLOTS: gl.constexpr, LINES: gl.constexpr, FOLD: gl.constexpr):
    """Rings of tiles of FOLD blocks, one a block for each of so many inputs."""
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    rings = ()
    for _ in gl.static_range(FOLD):
        of_inputs = ()
        for _ in gl.static_range(count):
            of_inputs += (gl.allocate_shared_memory(gl.int32, [SLOTS, LINES, 4], shared),)
        rings += (of_inputs,)
    return rings
