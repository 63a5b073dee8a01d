"""The producer warp of attention's forward by warp groups, and the board on which it says what comes next. See
``attention_groups``."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from csrc_triton.attention.attention_groups import Ring, barriers, fetch


@gluon.jit
def board_ring(readers: gl.constexpr, z):
    """Where the producer writes the next tile, two deep: its number and, with TOLD, what ``Work.tile`` says of it."""
    notes: gl.constexpr = 8 if z.TOLD else 2
    numbers = gl.allocate_shared_memory(gl.int32, [notes, 1], mbarrier.MBarrierLayout())
    return Ring(numbers, numbers, barriers(2, 1), barriers(2, readers))


@gluon.jit
def wait_free(to, n, z):
    mbarrier.wait(to.free.index(n % z.STAGES), ((n // z.STAGES) & 1) ^ 1)


@gluon.jit
def write_note(value, at, board):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    board.first.index(at).store(gl.full([1], 0, gl.int32, one) + value)


@gluon.jit
def read_note(at, board):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(board.first.index(at).load(one), 0)


@gluon.jit
def announce(t, i, work, board, z):
    """Tell the consumers which tile is their i-th."""
    mbarrier.wait(board.free.index(i & 1), ((i >> 1) & 1) ^ 1)
    if z.TOLD:
        m, batch, head = work.tile(gl.minimum(t, work.tiles - 1), z)
        at = (i & 1) * 4
        write_note(t, at, board)
        write_note(m, at + 1, board)
        write_note(batch, at + 2, board)
        write_note(head, at + 3, board)
    else:
        write_note(t, i & 1, board)
    mbarrier.arrive(board.full.index(i & 1), count=1)


@gluon.jit
def announced(i, board, z):
    """The i-th tile's number and, with TOLD, tile of the head, batch and head."""
    mbarrier.wait(board.full.index(i & 1), (i >> 1) & 1)
    if z.TOLD:
        at = (i & 1) * 4
        t, m = read_note(at, board), read_note(at + 1, board)
        batch, head = read_note(at + 2, board), read_note(at + 3, board)
    else:
        t = read_note(i & 1, board)
        m, batch, head = t, t, t
    mbarrier.arrive(board.free.index(i & 1), count=1)
    return t, m, batch, head


@gluon.jit
def take_tile(i, work, board, COUNT, z):
    """The next tile's number, which the consumers' i-th is."""
    t = gl.atomic_add(COUNT, 1) + gl.num_programs(0)
    announce(t, i, work, board, z)
    return t


@gluon.jit
def produce(z, work, Q, K, V, q, k, v, board, COUNT):
    """The producer warp: takes tiles from the counter, tells the consumers on the board, fills the rings.

    A tile that is taken before the blocks of another one waits for them, however long they take, and at the end others
    are idle. With LATE it is taken behind them, while the consumers have a ring of blocks left; where tiles are short
    that is too late.
    """
    b = 0  # blocks of keys so far; with ONE_RING tiles of keys and values
    i = 0  # tiles so far
    t = gl.program_id(0)
    announce(t, 0, work, board, z)
    while t < work.tiles:
        m, batch, head = work.tile(t, z)
        if not z.LATE:
            t = take_tile(i + 1, work, board, COUNT, z)
        row = m * (64 * z.GROUPS)
        first, last = work.blocks(row, row + 64 * z.GROUPS, z)
        for j in range(last - first):
            key = (last - 1 - j) * z.BLOCK_N
            slot = b % z.STAGES
            phase = ((b // z.STAGES) & 1) ^ 1
            mbarrier.wait(k.free.index(slot), phase)
            fetch(K, batch, head // work.ratio, key, k, slot, z)
            if j == 0:
                for g in gl.static_range(z.GROUPS):
                    mbarrier.wait(q.free.index(g), (i & 1) ^ 1)
                    fetch(Q, batch, head, row + g * 64, q, g, z)
            if z.ONE_RING:
                if j > 0:
                    b += 1
                    wait_free(v, b, z)
                    fetch(V, batch, head // work.ratio, key + z.BLOCK_N, v, b % z.STAGES, z)
            else:
                mbarrier.wait(v.free.index(slot), phase)
                fetch(V, batch, head // work.ratio, key, v, slot, z)
            b += 1
        if z.ONE_RING:
            wait_free(v, b, z)
            fetch(V, batch, head // work.ratio, first * z.BLOCK_N, v, b % z.STAGES, z)
            b += 1
        i += 1
        if z.LATE:
            t = take_tile(i, work, board, COUNT, z)
    if gl.atomic_add(COUNT + 1, 1) == gl.num_programs(0) - 1:  # the last one out: zeros for the next launch
        gl.store(COUNT, 0)
        gl.store(COUNT + 1, 0)
