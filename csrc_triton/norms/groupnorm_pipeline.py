"""GroupNorm of 16-bit elements by persistent CTAs whose copies run ahead (Gluon, Hopper): memory is read once.

**Channels first.** A group is one run of memory. It is copied to shared memory with ``cp.async`` and then held in
registers, two elements in each, while the copies of the next STAGES groups are in flight. So 16 warps keep a
multiprocessor busy. What is copied together, 16 bytes, is of one channel.

**Channels last.** A group is strided, and an image is too large for one CTA. What bounds the kernel, at 132
multiprocessors and 4.3 TB/s of reads and writes, is 32 bytes a nanosecond each; reads, half of them, have a latency of
1.2 to 1.5 us, so 24 KB must be in flight at every moment. To read images twice costs half as much again.

So ``n_splits`` CTAs share an image. Each accumulates the statistics of its part from shared memory, exchanges them with
the other CTAs (the launch is cooperative), and writes the part, which it still holds. The pipeline has STAGES tiles,
PREFETCH of them in flight; a tile is BLOCKS blocks of LINES lines of 16 bytes, of eight channels each. While a tile is
written, one of the next image is accumulated. The last ``overlap`` tiles of a part wait for as many of the next part:
this hides the exchange. Every thread reads back what it copied itself; the compiler still puts two barriers about each
tile, which is why a tile may have several blocks.

H200: 32 images of 320x64x64 take 56 us, a copy 43. To reduce the sums of a part takes 0.5 to 1 us (2.3 with 64
LINES_PER_GROUP), to exchange them 2 us and 1.2 us more for every SPLITS_PER_READ above the first; ``overlap`` hides
3 us of these. The kernel is warp specialised: where the streaming warps exchanged the sums themselves, it took a
quarter longer. Two CTAs a multiprocessor, with half the stages, were slower.

A block is a run of memory of ``positions`` whole positions. A line is of the same channels in every block, so that its
sums and its coefficients stay in the registers of one thread. A line is of two groups at most: a group has four
channels, or seven or more. Statistics are as in ``moments``; a line's pivots are its own elements.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from csrc_triton.common.bf16x2 import even, odd, pack
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
    allocate_tiles,
    copy_tile,
    next_stage,
    read_tiles,
    tile_offsets,
    vector_layout,
)
from csrc_triton.norms.groupnorm_two_pass import Affine, Gradients, reciprocal
from csrc_triton.norms.norm_vectors import load_vector

# ---- channels first ----------------------------------------------------------------------------------------------


@gluon.jit
def copy_group(buffers, stage, X, at, size, valid, LINES: gl.constexpr):
    """Start to copy a group; zeros if it is not ``valid``."""
    for i in gl.static_range(len(buffers)):
        mask = (at < size - i * LINES * 4) & valid
        copy_tile(buffers[i], stage, X + i * LINES * 4, mask)
    async_copy.commit_group()


@gluon.jit
def forward_pipeline(
    Y, X, W, B, STATS, WORKSPACE, launch, n_units, groups, channels, spatial, size, length, n_splits, eps, w_kind,
    b_kind, store_stats,
    BLOCKS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Groups program_id, program_id + programs, ..., each in BLOCKS blocks of BLOCK elements."""
    LINES: gl.constexpr = BLOCK // 8
    dtype: gl.constexpr = X.dtype.element_ty
    words: gl.constexpr = gl.pointer_type(gl.int32)
    layout: gl.constexpr = vector_layout(gl.num_warps())
    line = gl.arange(0, LINES, layout=gl.SliceLayout(1, layout))
    at = line[:, None] * 4 + gl.arange(0, 4, layout=gl.SliceLayout(0, layout))[None, :]
    X = X.to(words, bitcast=True) + at
    Y = Y.to(words, bitcast=True) + at
    n = size.to(gl.int32)
    half = n // 2
    part = 1.0 / n
    magic = reciprocal(spatial)
    step = gl.num_programs(0)
    zero = n_units >> 31  # unknown to the compiler, which would keep fp32 copies of what is in registers
    buffers = allocate_tiles(BLOCKS, gl.int32, STAGES, LINES)
    first = gl.program_id(0)
    for i in gl.static_range(STAGES):
        unit = first + i * step
        copy_group(buffers, i, X + gl.cast(unit, gl.int64) * half, at, half, unit < n_units, LINES)
    stage = 0
    for unit in range(first, n_units, step):
        async_copy.wait_group(STAGES - 1)
        xs = read_tiles(buffers, stage, layout)
        later = unit + STAGES * step
        copy_group(buffers, stage, X + gl.cast(later, gl.int64) * half, at, half, later < n_units, LINES)
        stage = next_stage(stage, STAGES)
        sums = gl.zeros([LINES, 4], gl.float32, layout)
        for i in gl.static_range(BLOCKS):
            sums += even(xs[i], dtype) + odd(xs[i], dtype)
        mean = gl.sum(gl.sum(sums, 1), 0) * part
        squares = gl.zeros([LINES, 4], gl.float32, layout)
        for i in gl.static_range(BLOCKS):
            inside = at < half - i * LINES * 4
            x = xs[i] ^ zero
            low = gl.where(inside, even(x, dtype) - mean, 0.0)
            high = gl.where(inside, odd(x, dtype) - mean, 0.0)
            squares += low * low
            squares += high * high
        rstd = gl.rsqrt(gl.sum(gl.sum(squares, 1), 0) * part + eps)
        if store_stats != 0:
            gl.store(STATS + unit * 2, mean)
            gl.store(STATS + unit * 2 + 1, rstd)
        first_channel = unit % groups * channels
        out = Y + gl.cast(unit, gl.int64) * half
        for i in gl.static_range(BLOCKS):
            position = (i * LINES + line) * 8
            channel = first_channel + gl.umulhi(position.to(gl.uint32), magic).to(gl.int32)
            live = position < n
            w = gl.where(w_kind == 0, 1.0, load_vector(W, channel, live, w_kind)) * rstd
            b = load_vector(B, channel, live, b_kind) - mean * w
            x = xs[i] ^ (zero * 2)
            low = even(x, dtype) * w[:, None] + b[:, None]
            high = odd(x, dtype) * w[:, None] + b[:, None]
            gl.store(out + i * LINES * 4, pack(low, high, dtype), mask=at < half - i * LINES * 4)
    async_copy.wait_group(0)


@gluon.constexpr_function
def channels_layout(words, warps):
    """The layout of a block of channels of ``words`` words: four neighbours a thread, the warps along a channel
    first."""
    along = max(1, min(warps, words // 128))
    return gl.BlockedLayout([1, 4], [1, 32], [warps // along, along], [1, 0])


@gluon.jit
def copy_channels(xs, dys, stage, X, DY, mask, row, channels, half, ROWS: gl.constexpr):
    """Start to copy x and dy of a group; zeros past its last channel."""
    for i in gl.static_range(len(xs)):
        live = mask & (row < channels - i * ROWS)[:, None]
        copy_tile(xs[i], stage, X + i * ROWS * half, live)
        copy_tile(dys[i], stage, DY + i * ROWS * half, live)
    async_copy.commit_group()


@gluon.jit
def backward_pipeline(
    DX, DY, X, W, STATS, PARTIALS, WORKSPACE, launch, n_units, groups, channels, spatial, length, n_splits, columns,
    db_column, w_kind, store_dx, store_dw, store_db,
    BLOCKS: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Groups as in ``forward_pipeline``, in BLOCKS blocks of ROWS channels of at most BLOCK elements."""
    dtype: gl.constexpr = X.dtype.element_ty
    words: gl.constexpr = gl.pointer_type(gl.int32)
    layout: gl.constexpr = channels_layout(BLOCK // 2, gl.num_warps())
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    half = spatial // 2
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    word = gl.arange(0, BLOCK // 2, layout=gl.SliceLayout(0, layout))
    in_row = (word < half)[None, :]
    at = row[:, None] * half + word[None, :]
    X = X.to(words, bitcast=True) + at
    DY = DY.to(words, bitcast=True) + at
    DX = DX.to(words, bitcast=True) + at
    size = gl.cast(channels, gl.int64) * half
    part = 1.0 / (spatial.to(gl.float32) * channels)
    step = gl.num_programs(0)
    zero = n_units >> 31  # unknown to the compiler, which would keep fp32 copies of what is in registers
    x_buffers, dy_buffers = (), ()
    for _ in gl.static_range(BLOCKS):
        x_buffers += (gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, BLOCK // 2], shared),)
        dy_buffers += (gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, BLOCK // 2], shared),)
    first = gl.program_id(0)
    for i in gl.static_range(STAGES):
        unit = first + i * step
        live = in_row & (unit < n_units)
        copy_channels(
            x_buffers, dy_buffers, i, X + unit * size, DY + unit * size, live, row, channels, half, ROWS
        )
    stage = 0
    mean = gl.load(STATS + first * 2)
    rstd = gl.load(STATS + first * 2 + 1)
    for unit in range(first, n_units, step):
        next_unit = gl.minimum(unit + step, n_units - 1)
        next_mean = gl.load(STATS + next_unit * 2)
        next_rstd = gl.load(STATS + next_unit * 2 + 1)
        async_copy.wait_group(STAGES - 1)
        xs, dys = (), ()
        for i in gl.static_range(BLOCKS):
            xs += (x_buffers[i].index(stage).load(layout),)
            dys += (dy_buffers[i].index(stage).load(layout),)
        later = unit + STAGES * step
        live = in_row & (later < n_units)
        copy_channels(
            x_buffers, dy_buffers, stage, X + later * size, DY + later * size, live, row, channels, half, ROWS
        )
        stage = next_stage(stage, STAGES)
        first_channel = unit % groups * channels
        sums = PARTIALS + gl.cast(unit // groups, gl.int64) * columns + first_channel
        row_dots = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
        row_totals = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
        ws = ()
        for i in gl.static_range(BLOCKS):
            channel = i * ROWS + row
            in_rows = channel < channels
            low = even(dys[i], dtype)
            high = odd(dys[i], dtype)
            dots = low * (even(xs[i], dtype) - mean) + high * (odd(xs[i], dtype) - mean)
            dw, db = gl.reduce((dots, low + high), 1, add_two)
            dw *= rstd
            gl.store(sums + channel, dw, mask=in_rows & (store_dw != 0))
            gl.store(sums + db_column + channel, db, mask=in_rows & (store_db != 0))
            w = gl.where(w_kind == 0, 1.0, load_vector(W, first_channel + channel, in_rows, w_kind))
            row_dots += w * dw
            row_totals += w * db
            ws += (w * rstd,)
        dot, total = gl.reduce((row_dots, row_totals), 0, add_two)
        slope = dot * part * rstd * rstd
        level = total * part * rstd - mean * slope
        out = DX + unit * size
        for i in gl.static_range(BLOCKS):
            w = ws[i][:, None]
            x, dy = xs[i] ^ zero, dys[i] ^ zero
            low = w * even(dy, dtype) - (even(x, dtype) * slope + level)
            high = w * odd(dy, dtype) - (odd(x, dtype) * slope + level)
            mask = in_row & (row < channels - i * ROWS)[:, None] & (store_dx != 0)
            gl.store(out + i * ROWS * half, pack(low, high, dtype), mask=mask)
        mean, rstd = next_mean, next_rstd
    async_copy.wait_group(0)


# ---- channels last: an image in parts, for either direction ----------------------------------------------------------


@gluon.constexpr_function
def exchange_layout(groups, warps):
    """The layout of the words [splits, groups] that the CTAs of an image exchange."""
    lanes = min(32, groups)
    return gl.BlockedLayout([1, 1], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def table_layout(lines_per_group, warps):
    """The layout of a table [groups, lines of a group]: four neighbours a thread."""
    across = min(32, lines_per_group // 4)
    return gl.BlockedLayout([1, 4], [32 // across, across], [warps, 1], [1, 0])


@aggregate
class Images:
    """Channels-last images, and how CTAs share them."""

    n: gl.tensor
    groups: gl.tensor  # of an image
    channels: gl.tensor  # of a group
    n_cols: gl.tensor  # channels of an image
    spatial: gl.tensor  # positions of an image
    length: gl.tensor  # positions of a part
    n_splits: gl.tensor

    @gluon.constexpr_function
    def __init__(self, n, groups, channels, n_cols, spatial, length, n_splits):
        self.n, self.groups, self.channels, self.n_cols = n, groups, channels, n_cols
        self.spatial, self.length, self.n_splits = spatial, length, n_splits


@aggregate
class Part:
    """A CTA's part of an image. Lines from ``count`` positions on are past its end."""

    start: gl.tensor  # its first position
    count: gl.tensor  # of positions
    positions: gl.tensor  # of a block
    position: gl.tensor  # each line's, in its block; at ``positions`` and above, of lines not in use
    vector: gl.tensor  # which eight channels of a position each line holds

    @gluon.constexpr_function
    def __init__(self, start, count, positions, position, vector):
        self.start, self.count, self.positions = start, count, positions
        self.position, self.vector = position, vector


@gluon.jit
def part_of(images, LINES: gl.constexpr):
    """This CTA's part."""
    vectors = images.n_cols // 8
    line = gl.arange(0, LINES, layout=gl.SliceLayout(1, vector_layout(gl.num_warps())))
    start = gl.program_id(0) % images.n_splits * images.length
    position = line // vectors
    return Part(
        start,
        gl.minimum(images.length, images.spatial - start),
        LINES // vectors,
        position,
        line - position * vectors,
    )


@aggregate
class ImageFunctions:
    """What the two directions compute. All functions of the streaming warps get ``args``; ``dtype`` is that of x.

    - ``init(tiles, args, LINES, dtype)``: the accumulators, given the first block of each input.
    - ``accumulate(sums, tiles, live, args, dtype)``: the accumulators with the ``live`` lines of a block added.
    - ``reduce(sums, state, image, valid, args, dtype)``: two pairs of values a line, of its first and of its second
      group, and the next ``state``, which goes from image to image. An image that is not ``valid`` counts for nothing.
    - ``coefficients(first, second, image, state, args)``: what ``epilogue`` takes, from the two pairs a line that the
      exchange warps return.
    - ``epilogue(tiles, coefficients, args, dtype)``: the words of a block of the output.

    Those of the exchange warps get ``args`` of their own:

    - ``gather(first, second, args, GROUPS, LINES_PER_GROUP)``: two values a group, of the two pairs a line.
    - ``terms(values, own, split, args)``: what a CTA's values add to the totals; ``own`` is the first one of this CTA.
    - ``finalise(totals, image, args)``: two pairs a line, of the totals and ``own``.
    """

    init: gl.constexpr
    accumulate: gl.constexpr
    reduce: gl.constexpr
    coefficients: gl.constexpr
    epilogue: gl.constexpr
    gather: gl.constexpr
    terms: gl.constexpr
    finalise: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, init, accumulate, reduce, coefficients, epilogue, gather, terms, finalise):
        self.init, self.accumulate, self.reduce = (
            gl.constexpr(init),
            gl.constexpr(accumulate),
            gl.constexpr(reduce),
        )
        self.coefficients, self.epilogue = gl.constexpr(coefficients), gl.constexpr(epilogue)
        self.gather, self.terms, self.finalise = (
            gl.constexpr(gather),
            gl.constexpr(terms),
            gl.constexpr(finalise),
        )


@aggregate
class ImageSizes:
    """The constants of the channels-last pipeline."""

    LINES: gl.constexpr  # of a block
    STAGES: gl.constexpr
    PREFETCH: gl.constexpr
    GROUPS: gl.constexpr  # of an image, at most
    LINES_PER_GROUP: gl.constexpr  # lines of a block that a group has channels in, at most
    SPLITS_PER_READ: gl.constexpr  # splits whose words are read together

    @gluon.constexpr_function
    def __init__(self, LINES, STAGES, PREFETCH, GROUPS, LINES_PER_GROUP, SPLITS_PER_READ):
        self.LINES, self.STAGES, self.PREFETCH = (
            gl.constexpr(LINES),
            gl.constexpr(STAGES),
            gl.constexpr(PREFETCH),
        )
        self.GROUPS, self.LINES_PER_GROUP = gl.constexpr(GROUPS), gl.constexpr(LINES_PER_GROUP)
        self.SPLITS_PER_READ = gl.constexpr(SPLITS_PER_READ)


@gluon.jit
def live_lines(part, block):
    """Which lines of a block are of the part."""
    return (part.position < part.positions) & (part.position + block * part.positions < part.count)


@gluon.jit
def copy_blocks(buffers, stage, ins, at, valid, tile, part, block_words):
    """Start to copy the blocks of a tile, of each input."""
    BLOCKS: gl.constexpr = len(buffers)
    for k in gl.static_range(BLOCKS):
        mask = (live_lines(part, tile * BLOCKS + k) & valid)[:, None]
        for i in gl.static_range(len(ins)):
            copy_tile(buffers[k][i], stage, ins[i] + (at + k * block_words), mask)
    async_copy.commit_group()


@gluon.jit
def read_blocks(buffers, stage, layout: gl.constexpr):
    """The blocks of a tile, of each input."""
    blocks = ()
    for k in gl.static_range(len(buffers)):
        blocks += (read_tiles(buffers[k], stage, layout),)
    return blocks


@gluon.jit
def accumulate_tile(sums, blocks, tile, part, args, dtype: gl.constexpr, f):
    BLOCKS: gl.constexpr = len(blocks)
    for k in gl.static_range(BLOCKS):
        sums = f.accumulate(sums, blocks[k], live_lines(part, tile * BLOCKS + k)[:, None], args, dtype)
    return sums


@gluon.jit
def write_tile(out, blocks, coefficients, tile, part, store, block_words, args, dtype: gl.constexpr, f):
    BLOCKS: gl.constexpr = len(blocks)
    for k in gl.static_range(BLOCKS):
        mask = (live_lines(part, tile * BLOCKS + k) & store)[:, None]
        gl.store(out + k * block_words, f.epilogue(blocks[k], coefficients, args, dtype), mask=mask)


@gluon.jit
def next_tile(image, tile, at, tiles, image_step, tile_words, jump):
    """The tile after this one, of the same image or of the CTA's next one, and its offset."""
    last = tile == tiles - 1
    return (
        gl.where(last, image + image_step, image),
        gl.where(last, 0, tile + 1),
        at + gl.where(last, jump, tile_words),
    )


@gluon.jit
def new_handoff(LINES: gl.constexpr):
    """Shared memory in which the streaming and the exchange warps leave two pairs of values a line for each other, and
    two barriers: phases of the first end when the streaming warps have stored, of the second when the others have."""
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    first = gl.allocate_shared_memory(gl.int64, [LINES], shared)
    second = gl.allocate_shared_memory(gl.int64, [LINES], shared)
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(barriers.index(0), count=1)
    mbarrier.init(barriers.index(1), count=1)
    return first, second, barriers


@gluon.jit
def hand_over(handoff, first, second, barrier: gl.constexpr):
    """Store two pairs of values a line."""
    first_values, second_values, barriers = handoff
    first_values.store(pack_word(first[0], first[1]))
    second_values.store(pack_word(second[0], second[1]))
    gl.thread_barrier()
    mbarrier.arrive(barriers.index(barrier), count=1)


@gluon.jit
def take_over(handoff):
    """Load the two pairs of values a line."""
    layout: gl.constexpr = gl.SliceLayout(1, vector_layout(gl.num_warps()))
    first_values, second_values, _ = handoff
    return unpack_word(first_values.load(layout)), unpack_word(second_values.load(layout))


@gluon.jit
def totals_of(WORKSPACE, image, n_splits, own, args, f, z):
    """The totals of the terms of all CTAs of an image, and ``own``, the first of the values of this one: [GROUPS]."""
    layout: gl.constexpr = exchange_layout(z.GROUPS, gl.num_warps())
    group = gl.arange(0, z.GROUPS, layout=gl.SliceLayout(0, layout))
    split = gl.arange(0, z.SPLITS_PER_READ, layout=gl.SliceLayout(1, layout))
    a = gl.zeros([z.SPLITS_PER_READ, z.GROUPS], gl.float32, layout)
    b = a
    WORKSPACE += gl.cast(image, gl.int64) * n_splits * z.GROUPS + group[None, :]
    PACK: gl.constexpr = 4 if 128 * gl.num_warps() <= z.SPLITS_PER_READ * z.GROUPS else 1
    own = gl.convert_layout(own, gl.SliceLayout(0, layout))
    for begin in range(0, n_splits, z.SPLITS_PER_READ):
        at = WORKSPACE + gl.minimum(begin + split, n_splits - 1)[:, None] * z.GROUPS
        more_a, more_b = f.terms(unpack_word(wait_for_words(at, PACK)), own[None, :], begin + split, args)
        live = (begin + split < n_splits)[:, None]
        a += gl.where(live, more_a, 0.0)
        b += gl.where(live, more_b, 0.0)
    a, b = gl.reduce((a, b), 0, add_two)
    return a, b, own


@gluon.jit
def exchange_images(handoff, WORKSPACE, images, args, f, z):
    """The exchange warps: they reduce a part's values from lines to groups, exchange them with the other CTAs of the
    image and return the result to the lines, while the other warps stream.

    WORKSPACE has the counter of a grid barrier in its first word, and room for [n_images, n_splits, GROUPS] from its
    third on."""
    sums_layout: gl.constexpr = gl.SliceLayout(1, table_layout(z.LINES_PER_GROUP, gl.num_warps()))
    first_image, image_step = gl.program_id(0) // images.n_splits, gl.num_programs(0) // images.n_splits
    split = gl.program_id(0) % images.n_splits
    counter = WORKSPACE.to(gl.pointer_type(gl.int32), bitcast=True)
    group = gl.arange(0, z.GROUPS, layout=sums_layout)
    WORKSPACE += 2
    for image in range(first_image, images.n, image_step):
        words = WORKSPACE + (gl.cast(image, gl.int64) * images.n_splits + split) * z.GROUPS + group
        gl.store(words, gl.zeros([z.GROUPS], gl.int64, sums_layout))
    gl.thread_barrier()
    before = barrier_arrive(counter, gl.num_programs(0))
    _, _, barriers = handoff
    waiting = True
    phase = 0
    for image in range(first_image, images.n, image_step):
        mbarrier.wait(barriers.index(0), phase)
        first, second = take_over(handoff)
        a, b = f.gather(first, second, args, z.GROUPS, z.LINES_PER_GROUP)
        post_two(
            WORKSPACE + (gl.cast(image, gl.int64) * images.n_splits + split) * z.GROUPS + group, a, b, True
        )
        while waiting:
            waiting = not barrier_passed(counter, before)
        totals = totals_of(WORKSPACE, image, images.n_splits, a, args, f, z)
        first, second = f.finalise(totals, image, args)
        hand_over(handoff, first, second, 1)
        phase = phase ^ 1


@gluon.jit
def stream_images(handoff, buffers, OUT, ins, part, images, store, args, state, f, z):
    """The streaming warps. OUT and ``ins`` point to the part in image 0; every ``image_step``-th image is this CTA's.

    Returns the state after the last image."""
    image_words = gl.cast(images.spatial, gl.int64) * (images.n_cols // 2)
    block_words = part.positions * (images.n_cols // 2)
    dtype: gl.constexpr = OUT.dtype.element_ty
    layout: gl.constexpr = vector_layout(gl.num_warps())
    offsets = tile_offsets(z.LINES, layout)
    out = OUT.to(gl.pointer_type(gl.int32), bitcast=True) + offsets
    sources = ()
    for i in gl.static_range(len(ins)):
        sources += (ins[i].to(gl.pointer_type(gl.int32), bitcast=True) + offsets,)
    ins = sources
    first_image, image_step = gl.program_id(0) // images.n_splits, gl.num_programs(0) // images.n_splits
    BLOCKS: gl.constexpr = len(buffers)
    tiles = (part.count + part.positions * BLOCKS - 1) // (part.positions * BLOCKS)
    overlap = gl.minimum(tiles, z.STAGES - z.PREFETCH - tiles)
    stages = tiles + overlap + z.PREFETCH
    copy_image, copy_index = first_image, first_image * 0
    copy_at = gl.cast(first_image, gl.int64) * image_words
    block_words = gl.cast(block_words, gl.int64)
    tile_words = BLOCKS * block_words
    jump = image_step * image_words - (tiles - 1) * tile_words
    for i in range(z.PREFETCH):
        copy_blocks(buffers, i, ins, copy_at, copy_image < images.n, copy_index, part, block_words)
        copy_image, copy_index, copy_at = next_tile(
            copy_image, copy_index, copy_at, tiles, image_step, tile_words, jump
        )
    stage = first_image * 0
    copy_stage = stage + z.PREFETCH  # also the stage of the oldest tile that is not written yet
    async_copy.wait_group(z.PREFETCH - 1)
    sums = f.init(read_tiles(buffers[0], stage, layout), args, z.LINES, dtype)
    for i in range(tiles):
        async_copy.wait_group(z.PREFETCH - 1)
        new = read_blocks(buffers, stage, layout)
        sums = accumulate_tile(sums, new, i, part, args, dtype, f)
        copy_blocks(buffers, copy_stage, ins, copy_at, copy_image < images.n, copy_index, part, block_words)
        copy_image, copy_index, copy_at = next_tile(
            copy_image, copy_index, copy_at, tiles, image_step, tile_words, jump
        )
        stage, copy_stage = next_stage(stage, stages), next_stage(copy_stage, stages)
    out_at = copy_at
    zeros = gl.zeros([z.LINES], gl.float32, gl.SliceLayout(1, layout))
    coefficients = f.coefficients((zeros, zeros), (zeros, zeros), first_image, state, args)
    _, _, barriers = handoff
    phase = 0
    for last in range(first_image - image_step, images.n, image_step):
        # All of ``image`` is accumulated; all but ``overlap`` tiles of ``last``, which may be none, are written.
        image = last + image_step
        valid = image < images.n
        first, second, state = f.reduce(sums, state, image, valid, args, dtype)
        if valid:
            hand_over(handoff, first, second, 0)
        async_copy.wait_group(z.PREFETCH - 1)
        sums = f.init(read_tiles(buffers[0], stage, layout), args, z.LINES, dtype)
        for i in range(overlap):
            async_copy.wait_group(z.PREFETCH - 1)
            new, old = read_blocks(buffers, stage, layout), read_blocks(buffers, copy_stage, layout)
            copy_blocks(
                buffers, copy_stage, ins, copy_at, copy_image < images.n, copy_index, part, block_words
            )
            copy_image, copy_index, copy_at = next_tile(
                copy_image, copy_index, copy_at, tiles, image_step, tile_words, jump
            )
            tile = tiles - overlap + i
            live = (last >= 0) & store
            write_tile(out + out_at, old, coefficients, tile, part, live, block_words, args, dtype, f)
            out_at += tile_words
            sums = accumulate_tile(sums, new, i, part, args, dtype, f)
            stage, copy_stage = next_stage(stage, stages), next_stage(copy_stage, stages)
        if valid:
            mbarrier.wait(barriers.index(1), phase)
        first, second = take_over(handoff)
        coefficients = f.coefficients(first, second, image, state, args)
        out_at = gl.cast(image, gl.int64) * image_words
        for i in range(tiles - overlap):
            async_copy.wait_group(z.PREFETCH - 1)
            new, old = read_blocks(buffers, stage, layout), read_blocks(buffers, copy_stage, layout)
            copy_blocks(
                buffers, copy_stage, ins, copy_at, copy_image < images.n, copy_index, part, block_words
            )
            copy_image, copy_index, copy_at = next_tile(
                copy_image, copy_index, copy_at, tiles, image_step, tile_words, jump
            )
            live = valid & store
            write_tile(out + out_at, old, coefficients, i, part, live, block_words, args, dtype, f)
            out_at += tile_words
            sums = accumulate_tile(sums, new, overlap + i, part, args, dtype, f)
            stage, copy_stage = next_stage(stage, stages), next_stage(copy_stage, stages)
        phase = phase ^ 1
    async_copy.wait_group(0)
    return state


@gluon.jit
def allocate_blocks(inputs: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, LINES: gl.constexpr):
    """Shared memory for STAGES tiles: of each of BLOCKS blocks, a buffer for each input."""
    buffers = ()
    for _ in gl.static_range(BLOCKS):
        buffers += (allocate_tiles(inputs, gl.int32, STAGES, LINES),)
    return buffers


# ---- channels last: lines and groups ---------------------------------------------------------------------------------


@gluon.jit
def line_zeros(LINES: gl.constexpr):
    return gl.zeros([LINES, 4], gl.float32, vector_layout(gl.num_warps()))


@gluon.jit
def line_word():
    """The number of each word of a line."""
    return gl.arange(0, 4, layout=gl.SliceLayout(0, vector_layout(gl.num_warps())))[None, :]


@gluon.jit
def vector_pair(V, channel, mask, kind, missing):
    """Weight or bias of a line's (even, odd) channels."""
    low = load_vector(V, channel, mask, kind) + gl.where(kind == 0, missing, 0.0)
    return low, load_vector(V, channel + 1, mask, kind) + gl.where(kind == 0, missing, 0.0)


@gluon.jit
def positions_at(count, position, positions):
    """How many of a part's positions stand at ``position`` in their blocks."""
    return gl.maximum(count - position + (positions - 1), 0) // positions


@gluon.jit
def first_group_of(vector, channels):
    """Of each line, how many channels are of its first group, and which (even, odd) ones they are."""
    word = line_word()
    n = gl.minimum((vector * 8 // channels + 1) * channels - vector * 8, 8)
    return n, (word * 2 < n[:, None], word * 2 + 1 < n[:, None])


@gluon.jit
def first_sum(values, in_first):
    """The sum of a line's (even, odd) values that are of its first group."""
    return gl.sum(gl.where(in_first[0], values[0], 0.0) + gl.where(in_first[1], values[1], 0.0), 1)


@gluon.jit
def second_sum(values, in_first):
    return gl.sum(gl.where(in_first[0], 0.0, values[0]) + gl.where(in_first[1], 0.0, values[1]), 1)


@gluon.jit
def line_table(part, images, GROUPS: gl.constexpr, LINES_PER_GROUP: gl.constexpr):
    """Which lines of a block have channels of a group: a table [GROUPS, LINES_PER_GROUP] of int32 that hold the line
    (bits 0 to 11), whether the group is its first (bit 12), and how many elements of the part these channels have."""
    item = gl.arange(0, GROUPS * LINES_PER_GROUP, layout=gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
    group = item // LINES_PER_GROUP
    first_vector = group * images.channels // 8
    across = ((group + 1) * images.channels - 1) // 8 + 1 - first_vector  # lines of a position
    position = item % LINES_PER_GROUP // across
    vector = first_vector + item % LINES_PER_GROUP - position * across
    group_of_first = vector * 8 // images.channels
    is_first = group_of_first == group
    n = gl.minimum((group_of_first + 1) * images.channels - vector * 8, 8)
    n = gl.where(is_first, n, 8 - n) * positions_at(part.count, position, part.positions)
    live = (position < part.positions) & (group < images.groups)
    return gl.where(
        live, (n * 2 + is_first.to(gl.int32)) * 4096 + position * (images.n_cols // 8) + vector, 0
    )


@gluon.jit
def by_group(first, second, table, GROUPS: gl.constexpr, LINES_PER_GROUP: gl.constexpr):
    """The two values that lines have of their first group, and of their second, in the order of ``line_table``, and the
    numbers of elements; zeros where a group has no more lines."""
    layout: gl.constexpr = table_layout(LINES_PER_GROUP, gl.num_warps())
    line = table & 4095
    first = gl.gather(pack_word(first[0], first[1]), line, 0)
    second = gl.gather(pack_word(second[0], second[1]), line, 0)
    counts = (table >> 13).to(gl.float32).reshape([GROUPS, LINES_PER_GROUP])
    words = gl.where((table & 4096) != 0, first, second)
    a, b = unpack_word(gl.where(table >= 8192, words, 0).reshape([GROUPS, LINES_PER_GROUP]))
    return gl.convert_layout(a, layout), gl.convert_layout(b, layout), gl.convert_layout(counts, layout)


@gluon.jit
def by_line(a, b, vector, images):
    """Two values a group, each for a line's first group and for its second."""
    values = pack_word(a, b)
    first = gl.minimum(vector * 8 // images.channels, images.groups - 1)
    second = unpack_word(gl.gather(values, gl.minimum(first + 1, images.groups - 1), 0))
    first = unpack_word(gl.gather(values, first, 0))
    return first, second


# ---- channels last: forward ------------------------------------------------------------------------------------------


@gluon.jit
def store_statistics(STATS, mean, rstd, image, groups, store):
    """Of an image's groups."""
    layout: gl.constexpr = exchange_layout(mean.shape[0], gl.num_warps())
    group = gl.arange(0, mean.shape[0], layout=gl.SliceLayout(0, layout))
    at = STATS + (image * groups + group) * 2
    mask = (group < groups) & store
    gl.store(at, mean, mask=mask)
    gl.store(at + 1, rstd, mask=mask)


@gluon.jit
def moments_of(total, squares, pivot, n):
    """(mean, sum of squared deviations) of n elements, from sums of their differences from the pivot."""
    shift = total / gl.maximum(n, 1.0)
    return pivot + shift, gl.maximum(squares - total * shift, 0.0)


@gluon.jit
def init_moments(tiles, args, LINES: gl.constexpr, dtype: gl.constexpr):
    """Pivots for the channels of a line: its first channel's first element for those of the first group, its last
    channel's for the others."""
    in_first = args[1]
    x = tiles[0]
    word = line_word()
    first = gl.sum(gl.where(word == 0, x & 0xFFFF, 0), 1)[:, None]
    last = gl.sum(gl.where(word == 3, (x >> 16) & 0xFFFF, 0), 1)[:, None]
    pivot = gl.where(in_first[0], first, last) | (gl.where(in_first[1], first, last) << 16)
    zeros = line_zeros(LINES)
    return pivot, zeros, zeros, zeros, zeros


@gluon.jit
def accumulate_moments(sums, tiles, live, args, dtype: gl.constexpr):
    """Sums of the differences from the pivots, and of their squares."""
    pivot = sums[0]
    x = gl.where(live, tiles[0], pivot)
    low = even(x, dtype) - even(pivot, dtype)
    high = odd(x, dtype) - odd(pivot, dtype)
    return pivot, sums[1] + low, sums[2] + high, sums[3] + low * low, sums[4] + high * high


@gluon.jit
def reduce_moments(sums, state, image, valid, args, dtype: gl.constexpr):
    """(mean, sum of squared deviations) of a line's channels of its first group, and of those of its second."""
    _vector, in_first, n_first, n_second, _w, _b = args
    word = line_word()
    pivot = gl.sum(gl.where(word == 0, even(sums[0], dtype), 0.0), 1)
    total, squares = first_sum((sums[1], sums[2]), in_first), first_sum((sums[3], sums[4]), in_first)
    first = moments_of(total, squares, pivot, n_first)
    pivot = gl.sum(gl.where(word == 3, odd(sums[0], dtype), 0.0), 1)
    total, squares = second_sum((sums[1], sums[2]), in_first), second_sum((sums[3], sums[4]), in_first)
    return first, moments_of(total, squares, pivot, n_second), state


@gluon.jit
def gather_moments(first, second, args, GROUPS: gl.constexpr, LINES_PER_GROUP: gl.constexpr):
    means, deviations, counts = by_group(first, second, args[0], GROUPS, LINES_PER_GROUP)
    n, totals = gl.reduce((counts, means * counts), 1, add_two)
    mean = totals / gl.maximum(n, 1.0)
    centered = means - gl.expand_dims(mean, 1)
    return mean, gl.sum(deviations + counts * centered * centered, 1)


@gluon.jit
def moment_terms(values, own, split, args):
    """What a part with these moments adds to the sums of differences from this CTA's own mean, and of their squares. A
    mean of many elements is a good pivot."""
    _table, _vector, _STATS, images, _eps, _store = args
    positions = gl.maximum(gl.minimum(images.length, images.spatial - split * images.length), 0)
    n = (positions.to(gl.float32) * images.channels)[:, None]
    centered = values[0] - own
    return n * centered, values[1] + n * centered * centered


@gluon.jit
def finalise_statistics(totals, image, args):
    """(mean, 1 / sqrt(var + eps)) of a line's first group, and of its second."""
    _table, vector, STATS, images, eps, store = args
    n = images.spatial.to(gl.float32) * images.channels
    shift = totals[0] / n
    mean, variance = totals[2] + shift, gl.maximum(totals[1] - totals[0] * shift, 0.0) / n
    rstd = gl.rsqrt(variance + eps)
    store_statistics(STATS, mean, rstd, image, images.groups, store)
    return by_line(mean, rstd, vector, images)


@gluon.jit
def scale_and_shift(first, second, image, state, args):
    """What the (even, odd) channels of a line are multiplied by, and what is added."""
    _vector, in_first, _n_first, _n_second, w, b = args
    scale, shift = (), ()
    for i in gl.static_range(2):
        mean = gl.where(in_first[i], first[0][:, None], second[0][:, None])
        scale += (w[i] * gl.where(in_first[i], first[1][:, None], second[1][:, None]),)
        shift += (b[i] - mean * scale[i],)
    return scale[0], scale[1], shift[0], shift[1]


@gluon.jit
def write_y(tiles, coefficients, args, dtype: gl.constexpr):
    low = even(tiles[0], dtype) * coefficients[0] + coefficients[2]
    high = odd(tiles[0], dtype) * coefficients[1] + coefficients[3]
    return pack(low, high, dtype)


@gluon.jit
def stream_forward(handoff, buffers, Y, X, affine, images, f, z):
    part = part_of(images, z.LINES)
    at = gl.cast(part.start, gl.int64) * images.n_cols
    n, in_first = first_group_of(part.vector, images.channels)
    in_use = part.position < part.positions
    size = gl.where(in_use, positions_at(part.count, part.position, part.positions), 0)
    n_first, n_second = (size * n).to(gl.float32), (size * (8 - n)).to(gl.float32)
    channel = part.vector[:, None] * 8 + line_word() * 2
    w = vector_pair(affine.W, channel, in_use[:, None], affine.w_kind, 1.0)
    b = vector_pair(affine.B, channel, in_use[:, None], affine.b_kind, 0.0)
    args = part.vector, in_first, n_first, n_second, w, b
    stream_images(handoff, buffers, Y + at, (X + at,), part, images, True, args, (), f, z)


@gluon.jit
def exchange_forward(handoff, STATS, WORKSPACE, images, eps, store_stats, f, z):
    part = part_of(images, z.LINES)
    table = line_table(part, images, z.GROUPS, z.LINES_PER_GROUP)
    store = (store_stats != 0) & (part.start == 0)
    exchange_images(handoff, WORKSPACE, images, (table, part.vector, STATS, images, eps, store), f, z)


@gluon.jit
def forward_channels_last_pipeline(
    Y, X, W, B, STATS, WORKSPACE, launch, n_units, units, groups, channels, width, n_cols, spatial, length, n_splits,
    eps, w_kind, b_kind, store_stats,
    MAX_SPLITS: gl.constexpr, LINES: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, PREFETCH: gl.constexpr,
    GROUPS: gl.constexpr, LINES_PER_GROUP: gl.constexpr, SPLITS_PER_READ: gl.constexpr, EXCHANGE_WARPS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Units are images, in parts of ``length`` positions. REGISTERS are those of a thread of the exchange warps."""
    f = ImageFunctions(
        init_moments, accumulate_moments, reduce_moments, scale_and_shift, write_y,
        gather_moments, moment_terms, finalise_statistics,
    )  # fmt: skip
    images = Images(n_units, groups, channels, n_cols, spatial, length, n_splits)
    z = ImageSizes(LINES, STAGES, PREFETCH, GROUPS, LINES_PER_GROUP, SPLITS_PER_READ)
    buffers = allocate_blocks(1, BLOCKS, STAGES, LINES)
    handoff = new_handoff(LINES)
    gl.warp_specialize(
        [
            (stream_forward, (handoff, buffers, Y, X, Affine(W, B, w_kind, b_kind), images, f, z)),
            (exchange_forward, (handoff, STATS, WORKSPACE, images, eps, store_stats, f, z)),
        ],
        [EXCHANGE_WARPS],
        [REGISTERS],
    )  # fmt: skip


# ---- channels last: backward -----------------------------------------------------------------------------------------
# The sums for the gradients of weight and bias stay in registers over all of a CTA's images, and are stored once.


@gluon.jit
def statistics(STATS, image, images, vector):
    """(mean, 1 / sqrt(var + eps)) of a line's two groups, of an image or of the last one: no mask, for which the loads
    would be waited for."""
    first = gl.minimum(vector * 8 // images.channels, images.groups - 1)
    second = gl.minimum(first + 1, images.groups - 1)
    STATS += gl.minimum(image, images.n - 1) * images.groups * 2
    first = gl.load(STATS + first * 2), gl.load(STATS + first * 2 + 1)
    return first, (gl.load(STATS + second * 2), gl.load(STATS + second * 2 + 1))


@gluon.jit
def init_sums(tiles, args, LINES: gl.constexpr, dtype: gl.constexpr):
    zeros = line_zeros(LINES)
    return zeros, zeros, zeros, zeros


@gluon.jit
def accumulate_sums(sums, tiles, live, args, dtype: gl.constexpr):
    """Sums of dy * x and of dy of each channel of a line; copies put 0 where a line is not live. x is of 16 bits: fp32
    has room for a mean 2^8 deviations away."""
    x, dy = tiles
    low, high = even(dy, dtype), odd(dy, dtype)
    return sums[0] + low * even(x, dtype), sums[1] + high * odd(x, dtype), sums[2] + low, sums[3] + high


@gluon.jit
def reduce_sums(sums, state, image, valid, args, dtype: gl.constexpr):
    """Sums of w * dy * normalised x and of w * dy of a line's channels of its first group, and of those of its second.
    The state is each channel's sums without w, and the statistics of this image and of the next one."""
    STATS, images, vector, in_first, w, image_step = args
    dw, db, _, stats = state
    first, second = stats
    new_dw, new_db, dot, total = (), (), (), ()
    for i in gl.static_range(2):
        mean = gl.where(in_first[i], first[0][:, None], second[0][:, None])
        more = (sums[i] - mean * sums[2 + i]) * gl.where(in_first[i], first[1][:, None], second[1][:, None])
        new_dw += (dw[i] + gl.where(valid, more, 0.0),)
        new_db += (db[i] + gl.where(valid, sums[2 + i], 0.0),)
        dot += (w[i] * more,)
        total += (w[i] * sums[2 + i],)
    after = statistics(STATS, image + image_step, images, vector)
    of_first = first_sum(dot, in_first), first_sum(total, in_first)
    return (
        of_first,
        (second_sum(dot, in_first), second_sum(total, in_first)),
        (new_dw, new_db, stats, after),
    )


@gluon.jit
def gather_sums(first, second, args, GROUPS: gl.constexpr, LINES_PER_GROUP: gl.constexpr):
    dots, totals, _ = by_group(first, second, args[0], GROUPS, LINES_PER_GROUP)
    return gl.sum(dots, 1), gl.sum(totals, 1)


@gluon.jit
def sum_terms(values, own, split, args):
    return values


@gluon.jit
def finalise_sums(totals, image, args):
    """(slope, level) of the line in x that dx has beside w * dy / deviation."""
    _table, vector, STATS, images = args
    GROUPS: gl.constexpr = totals[0].shape[0]
    group = gl.arange(0, GROUPS, layout=gl.SliceLayout(0, exchange_layout(GROUPS, gl.num_warps())))
    at = STATS + (image * images.groups + gl.minimum(group, images.groups - 1)) * 2
    mean, rstd = gl.load(at), gl.load(at + 1)
    part = 1.0 / (images.spatial.to(gl.float32) * images.channels)
    slope = totals[0] * part * rstd * rstd
    return by_line(slope, totals[1] * part * rstd - mean * slope, vector, images)


@gluon.jit
def dx_coefficients(first, second, image, state, args):
    _STATS, _images, _vector, in_first, w, _image_step = args
    of_first, of_second = state[2]
    scale = ()
    for i in gl.static_range(2):
        scale += (w[i] * gl.where(in_first[i], of_first[1][:, None], of_second[1][:, None]),)
    return scale, first, second


@gluon.jit
def write_dx(tiles, coefficients, args, dtype: gl.constexpr):
    _STATS, _images, _vector, in_first, _w, _image_step = args
    x, dy = tiles
    scale, first, second = coefficients
    slope = gl.where(in_first[0], first[0][:, None], second[0][:, None])
    level = gl.where(in_first[0], first[1][:, None], second[1][:, None])
    low = scale[0] * even(dy, dtype) - (even(x, dtype) * slope + level)
    slope = gl.where(in_first[1], first[0][:, None], second[0][:, None])
    level = gl.where(in_first[1], first[1][:, None], second[1][:, None])
    return pack(low, scale[1] * odd(dy, dtype) - (odd(x, dtype) * slope + level), dtype)


@gluon.jit
def store_partials(PARTIALS, sums, part, vectors, channel, store):
    """The (even, odd) channels' sums, added up over a block's positions."""
    line = gl.arange(0, sums[0].shape[0], layout=gl.SliceLayout(1, vector_layout(gl.num_warps())))
    left, low, high = part.positions, sums[0], sums[1]
    while left > 1:
        half = (left + 1) // 2
        at = gl.minimum(line + half * vectors, sums[0].shape[0] - 1)[:, None] + channel * 0
        live = (part.position < left - half)[:, None]
        low += gl.where(live, gl.gather(low, at, 0), 0.0)
        high += gl.where(live, gl.gather(high, at, 0), 0.0)
        left = half
    mask = (part.position == 0)[:, None] & (store != 0)
    gl.store(PARTIALS + channel, low, mask=mask)
    gl.store(PARTIALS + channel + 1, high, mask=mask)


@gluon.jit
def stream_backward(handoff, buffers, out, DY, X, W, STATS, images, w_kind, f, z):
    part = part_of(images, z.LINES)
    at = gl.cast(part.start, gl.int64) * images.n_cols
    _, in_first = first_group_of(part.vector, images.channels)
    channel = part.vector[:, None] * 8 + line_word() * 2
    w = vector_pair(W, channel, (part.position < part.positions)[:, None], w_kind, 1.0)
    first_image, image_step = gl.program_id(0) // images.n_splits, gl.num_programs(0) // images.n_splits
    stats = statistics(STATS, first_image, images, part.vector)
    zeros = line_zeros(z.LINES)
    dw, db, _, _ = stream_images(
        handoff, buffers, out.DX + at, (X + at, DY + at), part, images, out.store_dx != 0,
        (STATS, images, part.vector, in_first, w, image_step), ((zeros, zeros), (zeros, zeros), stats, stats), f, z,
    )  # fmt: skip
    PARTIALS = out.PARTIALS + gl.program_id(0).to(gl.int64) * out.columns
    store_partials(PARTIALS, dw, part, images.n_cols // 8, channel, out.store_dw)
    store_partials(PARTIALS + out.db_column, db, part, images.n_cols // 8, channel, out.store_db)


@gluon.jit
def exchange_backward(handoff, STATS, WORKSPACE, images, f, z):
    part = part_of(images, z.LINES)
    table = line_table(part, images, z.GROUPS, z.LINES_PER_GROUP)
    exchange_images(handoff, WORKSPACE, images, (table, part.vector, STATS, images), f, z)


@gluon.jit
def backward_channels_last_pipeline(
    DX, DY, X, W, STATS, PARTIALS, WORKSPACE, launch, n_units, units, groups, channels, width, n_cols, spatial, length,
    n_splits, columns, db_column, w_kind, store_dx, store_dw, store_db,
    MAX_SPLITS: gl.constexpr, LINES: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, PREFETCH: gl.constexpr,
    GROUPS: gl.constexpr, LINES_PER_GROUP: gl.constexpr, SPLITS_PER_READ: gl.constexpr, EXCHANGE_WARPS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Units and parts as in ``forward_channels_last_pipeline``; PARTIALS[programs, columns]."""
    f = ImageFunctions(
        init_sums,
        accumulate_sums,
        reduce_sums,
        dx_coefficients,
        write_dx,
        gather_sums,
        sum_terms,
        finalise_sums,
    )
    images = Images(n_units, groups, channels, n_cols, spatial, length, n_splits)
    z = ImageSizes(LINES, STAGES, PREFETCH, GROUPS, LINES_PER_GROUP, SPLITS_PER_READ)
    out = Gradients(DX, PARTIALS, columns, db_column, store_dx, store_dw, store_db)
    buffers = allocate_blocks(2, BLOCKS, STAGES, LINES)
    handoff = new_handoff(LINES)
    gl.warp_specialize(
        [
            (stream_backward, (handoff, buffers, out, DY, X, W, STATS, images, w_kind, f, z)),
            (exchange_backward, (handoff, STATS, WORKSPACE, images, f, z)),
        ],
        [EXCHANGE_WARPS],
        [REGISTERS],
    )  # fmt: skip
