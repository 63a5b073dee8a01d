"""GroupNorm of channels-last images that programs hold in shared memory (Gluon, Hopper); see ``groupnorm.forward_held``.

What bounds it, at 132 multiprocessors and 4.3 TB/s of reads and writes: 32 bytes a nanosecond each, half of them reads,
whose latency of 1.2 to 1.5 us takes 24 KB under way at every moment. Seven instructions an element, twice read from
shared memory, are a quarter of the schedulers' time. Read from memory twice, as ``groupnorm_last`` does, x costs a half
more.

A team of ``split`` programs takes an image. Each copies a part of its places, whole rows of channels and so one run of
memory, to shared memory, finds the moments of each group, hands them to the others and waits for theirs (the launch is
cooperative), and normalises what it still holds. Tiles are of LINES lines of 16 bytes, of as many places as fit. They go
through a ring of SLOTS tiles, AHEAD of them under way. A tile of the next image is included in the sums with every tile
that is finished; a part's first ``slack`` tiles wait for as many of the next part, while the exchange takes place. Every
thread reads back what it copied itself, and a line is of the same channels in every tile: what is added up, and what
scales it, stays in its thread's registers.

Eight channels a line are of two groups at most: groups are of four channels, or of seven or more.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from csrc_triton.exchange import arrive, arrived, poll
from csrc_triton.norm_ring import lines_layout
from csrc_triton.norm_vectors import load_vector
from csrc_triton.packed import even, odd, pair_up


@gluon.jit
def ask(ring, slot, X, image, n_images, image_words, tile, row, rows, count, tile_words):
    """Begin to copy a tile."""
    mask = (row < rows) & (row + tile * rows < count) & (image < n_images)
    pointers = X + (gl.cast(image, gl.int64) * image_words + tile * tile_words)
    async_copy.async_copy_global_to_shared(ring.index(slot), pointers, mask=mask[:, None])
    async_copy.commit_group()


@gluon.jit
def include(sums, pivot, x, live, dtype: gl.constexpr):
    """Add what a tile's lines, of those that are ``live``, differ from the pivots."""
    x = gl.where(live, x, pivot)
    low = even(x, dtype) - even(pivot, dtype)
    high = odd(x, dtype) - odd(pivot, dtype)
    return sums[0] + low, sums[1] + high, sums[2] + low * low, sums[3] + high * high


@gluon.jit
def first_of(x, word, inside):
    """For the channels of a line pivots, close to what they are: its first channel's first place for those ``inside``
    that one's group, its last channel's for the others."""
    first = gl.sum(gl.where(word == 0, x & 0xFFFF, 0), 1)[:, None]
    last = gl.sum(gl.where(word == 3, (x >> 16) & 0xFFFF, 0), 1)[:, None]
    return gl.where(inside[0], first, last) | (gl.where(inside[1], first, last) << 16)


@gluon.jit
def line_moments(sums, pivot, n, inside):
    """(mean, sum of squared deviations) of the n elements of a line that are ``inside`` a group."""
    zeros = gl.zeros_like(sums[0])
    total = gl.sum(gl.where(inside[0], sums[0], zeros) + gl.where(inside[1], sums[1], zeros), 1)
    squares = gl.sum(gl.where(inside[0], sums[2], zeros) + gl.where(inside[1], sums[3], zeros), 1)
    mean = total / gl.maximum(n, 1.0)
    return pivot + mean, gl.maximum(squares - total * mean, 0.0)


@gluon.jit
def add_both(a, b, c, d):
    return a + c, b + d


@gluon.jit
def merge_more(mean, deviation, held, means, deviations, counts, axis: gl.constexpr):
    """The moments of ``held`` elements, merged with those of others along ``axis``; see ``moments``."""
    here, totals = gl.reduce((counts, means * counts), axis, add_both)
    here_mean = totals / gl.maximum(here, 1.0)
    apart = means - gl.expand_dims(here_mean, axis)
    both = held + here
    share = here / gl.maximum(both, 1.0)
    shift = here_mean - mean
    more = gl.sum(deviations + counts * apart * apart, axis)
    return mean + shift * share, deviation + more + shift * shift * held * share, both


@gluon.jit
def places_of(count, row, rows):
    """How many places of a part are in row ``row`` of its tiles."""
    return gl.maximum(count - row + (rows - 1), 0) // rows


@gluon.constexpr_function
def table_layout(members, warps):
    """The layout of a table of groups and of ``members`` of each."""
    return gl.BlockedLayout([1, 4], [128 // members, members // 4], [warps, 1], [1, 0])


@gluon.jit
def members_of(
    count, rows, vectors, groups, channels, GROUPS: gl.constexpr, MEMBERS: gl.constexpr
):  # fmt: skip
    """Which lines of a tile have channels of a group: of each, in a table [GROUPS, MEMBERS], three things in an int32:
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
def group_moments(
    sums, pivot, word, n_first, n_second, members, in_first, in_second, dtype: gl.constexpr,
    GROUPS: gl.constexpr, MEMBERS: gl.constexpr,
):  # fmt: skip
    """(mean, sum of squared deviations) of each group over a part, [GROUPS] each."""
    table: gl.constexpr = table_layout(MEMBERS, gl.num_warps())
    pivot_first = gl.sum(gl.where(word == 0, even(pivot, dtype), 0.0), 1)
    pivot_second = gl.sum(gl.where(word == 3, odd(pivot, dtype), 0.0), 1)
    first_mean, first_deviation = line_moments(sums, pivot_first, n_first, in_first)
    second_mean, second_deviation = line_moments(sums, pivot_second, n_second, in_second)
    at = members & 4095
    is_first = (members & 4096) != 0
    n = (members >> 13).to(gl.float32)
    means = gl.where(is_first, gl.gather(first_mean, at, 0), gl.gather(second_mean, at, 0))
    deviations = gl.where(is_first, gl.gather(first_deviation, at, 0), gl.gather(second_deviation, at, 0))
    deviations = gl.where(n > 0.0, deviations, 0.0)
    means = gl.convert_layout(means.reshape([GROUPS, MEMBERS]), table)
    deviations = gl.convert_layout(deviations.reshape([GROUPS, MEMBERS]), table)
    n = gl.convert_layout(n.reshape([GROUPS, MEMBERS]), table)
    held, totals = gl.reduce((n, means * n), 1, add_both)
    mean = totals / gl.maximum(held, 1.0)
    apart = means - mean[:, None]
    return mean, gl.sum(deviations + n * apart * apart, 1)


@gluon.jit
def post_both(pointers, a, b, mask):
    """Publish two fp32 values in one 64-bit word, the first with its last bit set: never 0."""
    high = (a.to(gl.uint32, bitcast=True) | 1).to(gl.int64) << 32
    gl.store(pointers, high | b.to(gl.uint32, bitcast=True).to(gl.int64), mask=mask)


@gluon.jit
def image_moments(
    WORDS, image, split, length, spatial, channels, PARTS: gl.constexpr, GROUPS: gl.constexpr, layout: gl.constexpr
):
    """(mean, sum of squared deviations) of each group of an image, once all parts are posted."""
    group = gl.arange(0, GROUPS, layout=gl.SliceLayout(0, layout))
    part = gl.arange(0, PARTS, layout=gl.SliceLayout(1, layout))
    WORDS += gl.cast(image, gl.int64) * split * GROUPS + group[None, :]
    mean = gl.zeros([GROUPS], gl.float32, gl.SliceLayout(0, layout))
    deviation, held = mean, mean
    for begin in range(0, split, PARTS):
        at = WORDS + gl.minimum(begin + part, split - 1)[:, None] * GROUPS
        words = gl.full([PARTS, GROUPS], 0, gl.int64, layout)
        while gl.min(gl.min((words != 0).to(gl.int32), 1), 0) == 0:
            words = poll(at)
        means = ((words >> 32) & 0xFFFFFFFF).to(gl.uint32).to(gl.float32, bitcast=True)
        deviations = (words & 0xFFFFFFFF).to(gl.uint32).to(gl.float32, bitcast=True)
        places = gl.maximum(gl.minimum(length, spatial - (begin + part) * length), 0)
        live = (begin + part < split)[:, None]
        counts = gl.where(live, (places.to(gl.float32) * channels)[:, None], gl.zeros([PARTS, GROUPS], gl.float32, layout))
        deviations = gl.where(live, deviations, 0.0)
        mean, deviation, held = merge_more(mean, deviation, held, means, deviations, counts, 0)
    return mean, deviation


@gluon.jit
def vector_of(V, channel, mask, kind, missing):
    """Weight or bias of a line's (even, odd) channels."""
    low = load_vector(V, channel, mask, kind) + gl.where(kind == 0, missing, 0.0)
    return low, load_vector(V, channel + 1, mask, kind) + gl.where(kind == 0, missing, 0.0)


@gluon.jit
def lines_of(mean, rstd, w, b, vector, inside, groups, channels):
    """What an image's lines are scaled by and shifted by, (even, odd) channels each."""
    first = gl.minimum(vector * 8 // channels, groups - 1)
    second = gl.minimum(first + 1, groups - 1)
    first_mean, first_rstd = gl.gather(mean, first, 0)[:, None], gl.gather(rstd, first, 0)[:, None]
    second_mean, second_rstd = gl.gather(mean, second, 0)[:, None], gl.gather(rstd, second, 0)[:, None]
    scale, shift = (), ()
    for i in gl.static_range(2):
        scale += (w[i] * gl.where(inside[i], first_rstd, second_rstd),)
        shift += (b[i] - gl.where(inside[i], first_mean, second_mean) * scale[i],)
    return scale, shift


@gluon.jit
def finish(Y, x, scale, shift, mask, dtype: gl.constexpr):
    low = even(x, dtype) * scale[0] + shift[0]
    high = odd(x, dtype) * scale[1] + shift[1]
    gl.store(Y, pair_up(low, high, dtype), mask=mask)


@gluon.jit
def nothing(LINES: gl.constexpr, layout: gl.constexpr):
    zeros = gl.zeros([LINES, 4], gl.float32, layout)
    return zeros, zeros, zeros, zeros


@gluon.jit
def walk_held(
    Y, X, W, B, STATS, WORDS, n_images, groups, channels, n_cols, spatial, length, split, eps, w_kind, b_kind,
    store_stats,
    SPLIT: gl.constexpr, GROUPS: gl.constexpr, MEMBERS: gl.constexpr, LINES: gl.constexpr, SLOTS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Images team, team + teams, ... in parts of ``length`` places. WORDS holds a barrier's counter in its first word
    and room for [n_images, split, GROUPS] words from its third on."""
    dtype: gl.constexpr = X.dtype.element_ty
    pairs: gl.constexpr = gl.pointer_type(gl.int32)
    layout: gl.constexpr = lines_layout(gl.num_warps())
    columns: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
    table: gl.constexpr = gl.SliceLayout(1, table_layout(MEMBERS, gl.num_warps()))
    PARTS: gl.constexpr = min(SPLIT, 64)
    ring = gl.allocate_shared_memory(gl.int32, [SLOTS, LINES, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    line = gl.arange(0, LINES, layout=gl.SliceLayout(1, layout))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, layout))[None, :]
    at = line[:, None] * 4 + word
    vectors = n_cols // 8
    rows = LINES // vectors
    row = line // vectors
    vector = line - row * vectors
    tile_words = rows * (n_cols // 2)
    image_words = gl.cast(spatial, gl.int64) * (n_cols // 2)
    teams = gl.num_programs(0) // split
    team = gl.program_id(0) // split
    part = gl.program_id(0) % split
    start = part * length
    count = gl.minimum(length, spatial - start)
    tiles = (count + rows - 1) // rows
    X = X.to(pairs, bitcast=True) + (gl.cast(start, gl.int64) * (n_cols // 2) + at)
    Y = Y.to(pairs, bitcast=True) + (gl.cast(start, gl.int64) * (n_cols // 2) + at)
    slack = gl.minimum(tiles, SLOTS - AHEAD - tiles)
    slots = tiles + slack + AHEAD
    channel = vector[:, None] * 8 + word * 2
    in_use = (row < rows)[:, None]
    w = vector_of(W, channel, in_use, w_kind, 1.0)
    b = vector_of(B, channel, in_use, b_kind, 0.0)
    here = gl.minimum((vector * 8 // channels + 1) * channels - vector * 8, 8)[:, None]  # channels of the first group
    in_first = (word * 2 < here, word * 2 + 1 < here)
    in_second = (word * 2 >= here, word * 2 + 1 >= here)
    size = gl.where(row < rows, places_of(count, row, rows), 0)
    here = gl.minimum((vector * 8 // channels + 1) * channels - vector * 8, 8)
    n_first = (size * here).to(gl.float32)
    n_second = (size * (8 - here)).to(gl.float32)
    members = members_of(count, rows, vectors, groups, channels, GROUPS, MEMBERS)
    group = gl.arange(0, GROUPS, layout=table)
    counter = WORDS.to(gl.pointer_type(gl.int32), bitcast=True)
    WORDS += 2
    for image in range(team, n_images, teams):
        words = WORDS + (gl.cast(image, gl.int64) * split + part) * GROUPS + group
        gl.store(words, gl.zeros([GROUPS], gl.int64, table))
    gl.thread_barrier()
    before = arrive(counter, gl.num_programs(0))
    waiting = True
    ask_image, ask_tile = team, team * 0
    for i in range(AHEAD):
        ask(ring, i, X, ask_image, n_images, image_words, ask_tile, row, rows, count, tile_words)
        ask_tile += 1
        ask_image = gl.where(ask_tile < tiles, ask_image, ask_image + teams)
        ask_tile = gl.where(ask_tile < tiles, ask_tile, 0)
    slot = team * 0
    free = slot + AHEAD
    async_copy.wait_group(AHEAD - 1)
    pivot = first_of(ring.index(slot).load(layout), word, in_first)
    sums = nothing(LINES, layout)
    scale, shift = w, b
    # Before the first image only: there is nothing to finish.
    for i in range(tiles):
        async_copy.wait_group(AHEAD - 1)
        live = ((row < rows) & (row + i * rows < count))[:, None]
        sums = include(sums, pivot, ring.index(slot).load(layout), live, dtype)
        ask(ring, free, X, ask_image, n_images, image_words, ask_tile, row, rows, count, tile_words)
        slot = gl.where(slot < slots - 1, slot + 1, 0)
        free = gl.where(free < slots - 1, free + 1, 0)
        ask_tile += 1
        ask_image = gl.where(ask_tile < tiles, ask_image, ask_image + teams)
        ask_tile = gl.where(ask_tile < tiles, ask_tile, 0)
    for last in range(team - teams, n_images, teams):
        # ``last``: the image being finished; its first tiles - slack tiles are.
        image = last + teams
        there = image < n_images
        mean, deviation = group_moments(
            sums, pivot, word, n_first, n_second, members, in_first, in_second, dtype, GROUPS, MEMBERS
        )
        words = WORDS + (gl.cast(image, gl.int64) * split + part) * GROUPS + group
        post_both(words, mean, deviation, there)
        async_copy.wait_group(AHEAD - 1)
        pivot = first_of(ring.index(slot).load(layout), word, in_first)
        sums = nothing(LINES, layout)
        for i in range(slack):
            async_copy.wait_group(AHEAD - 1)
            x = ring.index(slot).load(layout)
            done = ring.index(free).load(layout)
            ask(ring, free, X, ask_image, n_images, image_words, ask_tile, row, rows, count, tile_words)
            tile = tiles - slack + i
            mask = ((row < rows) & (row + tile * rows < count) & (last >= 0))[:, None]
            finish(Y + gl.cast(last, gl.int64) * image_words + tile * tile_words, done, scale, shift, mask, dtype)
            live = ((row < rows) & (row + i * rows < count))[:, None]
            sums = include(sums, pivot, x, live, dtype)
            slot = gl.where(slot < slots - 1, slot + 1, 0)
            free = gl.where(free < slots - 1, free + 1, 0)
            ask_tile += 1
            ask_image = gl.where(ask_tile < tiles, ask_image, ask_image + teams)
            ask_tile = gl.where(ask_tile < tiles, ask_tile, 0)
        while waiting:
            waiting = not arrived(counter, before)
        known = gl.where(there, image, team)
        mean, deviation = image_moments(WORDS, known, split, length, spatial, channels, PARTS, GROUPS, columns)
        rstd = gl.rsqrt(deviation / (spatial.to(gl.float32) * channels) + eps)
        column = gl.arange(0, GROUPS, layout=gl.SliceLayout(0, columns))
        stats = STATS + (image * groups + column) * 2
        first_part = there & (column < groups) & (store_stats != 0) & (part == 0)
        gl.store(stats, mean, mask=first_part)
        gl.store(stats + 1, rstd, mask=first_part)
        scale, shift = lines_of(mean, rstd, w, b, vector, in_first, groups, channels)
        for i in range(tiles - slack):
            async_copy.wait_group(AHEAD - 1)
            x = ring.index(slot).load(layout)
            done = ring.index(free).load(layout)
            ask(ring, free, X, ask_image, n_images, image_words, ask_tile, row, rows, count, tile_words)
            mask = ((row + i * rows < count) & (row < rows) & there)[:, None]
            finish(Y + gl.cast(image, gl.int64) * image_words + i * tile_words, done, scale, shift, mask, dtype)
            live = ((row < rows) & (row + (slack + i) * rows < count))[:, None]
            sums = include(sums, pivot, x, live, dtype)
            slot = gl.where(slot < slots - 1, slot + 1, 0)
            free = gl.where(free < slots - 1, free + 1, 0)
            ask_tile += 1
            ask_image = gl.where(ask_tile < tiles, ask_image, ask_image + teams)
            ask_tile = gl.where(ask_tile < tiles, ask_tile, 0)
    async_copy.wait_group(0)
