"""dQ in a fixed order, where a call asks for it: who adds next to a block of rows. See ``attention_backward_groups``.

The blocks of keys of a head add to a block of rows one after the other, in the order of their programs. A number in
memory, for each block of rows, is that of the program whose turn it is. A warp of each program, or several that take
every so manieth block, reads it, lets the consumer groups add, and passes the turn on: the groups themselves never wait
for memory, only for their program's turn.

No program waits for ever. It waits, for one block of rows at a time, for the program before it, and only where that one
sees the rows, too. Both are of one head of K and walk their rows in the same order, and the one before was started
before: a GPU starts programs in the order of their numbers. So the first program of a head waits for nobody and ends;
each next one meets only turns that are passed on sooner or later.

The order is such that waits are few. Without a bound all programs begin with the first rows, where each waits for the
one before. So several heads take turns to start programs (``tile_in_order``), and a head's start one after the other.
With a bound a program begins at its diagonal. There the last keys go first: the first to add to a row is the program
that sees it first, and at any moment each one adds to other rows. (With the first keys first most would wait.) But
the longest programs end last then. Where more than two query heads share a head of K, these take turns instead, the
last rows first: a program follows the one before at a small distance, whatever rows that sees beyond its own, and the
first keys, the longest, go first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from csrc_triton.attention.attention_backward_groups import first_row, next_rows, noted, tile_at, write_note
from csrc_triton.attention.pipeline import mbarriers
from csrc_triton.attention.tile_scheduler import CAUSAL, swizzled_tile


@aggregate
class Order:
    """Barriers between the ordering warps and the groups, a pair a warp: a phase for each block of rows it keeps."""

    turn: gl.shared_memory_descriptor  # is the program's
    added: gl.shared_memory_descriptor  # all groups have
    walk: gl.shared_memory_descriptor  # see ``next_step``; ``turn`` again but in causal kernels
    inner: gl.tensor  # how many query heads take turns, the last rows first; 0: none

    @gluon.constexpr_function
    def __init__(self, turn, added, walk, inner):
        self.turn, self.added, self.walk, self.inner = turn, added, walk, inner


@gluon.jit
def order_of(tile, padded, groups: gl.constexpr, warps: gl.constexpr, z):
    turn = mbarriers(warps, 1)
    inner = inner_heads(tile.steps // (tile.rows // z.BLOCK_M), z)
    walk = turn
    if z.BOUNDED == CAUSAL:
        walk = write_walk(tile, padded, inner, z)
    return Order(turn, mbarriers(warps, groups), walk, inner)


@gluon.jit
def inner_heads(ratio, z):
    """``Order.inner`` where ``ratio`` query heads share a head of K."""
    inner = ratio * 0
    if z.BOUNDED == CAUSAL:
        inner = gl.where(ratio > 2, ratio, 0)
    return inner


@gluon.jit
def tile_in_order(tiles_a_head, section, kv_heads, ratio, len_q, right, z, left=None):
    """This program's tile: ``section`` heads of K at a time take turns. The last keys come first where there is a
    bound and query heads don't take turns."""
    both, number = swizzled_tile(tiles_a_head, section)
    if z.BOUNDED:
        number = gl.where(inner_heads(ratio, z) > 0, number, tiles_a_head - 1 - number)
    return tile_at(both, number, kv_heads, ratio, len_q, right, z, left)


# What the consumers need to follow ``next_rows``, in shared memory: held in registers over the loop, it would make them
# spill. From the start of its rows, the first block of a head and, of a step to the next block and of each COUNT-th
# step, how far it goes among a head's rows and in DQ32.
START, COUNT, STEP, STEP_TO, TURN, TURN_TO = (gl.constexpr(i) for i in range(6))


@gluon.jit
def write_walk(tile, padded, inner, z):
    walk = gl.allocate_shared_memory(gl.int32, [6, 1], mbarrier.MBarrierLayout())
    taking = inner > 0
    back = z.BLOCK_M - tile.rows
    write_note(walk, START, gl.where(taking, -back, 0))
    write_note(walk, COUNT, gl.where(taking, inner, tile.rows // z.BLOCK_M))
    write_note(walk, STEP, gl.where(taking, 0, z.BLOCK_M))
    write_note(walk, STEP_TO, gl.where(taking, padded, z.BLOCK_M))
    write_note(walk, TURN, gl.where(taking, -z.BLOCK_M, back))
    write_note(walk, TURN_TO, gl.where(taking, (1 - inner) * padded - z.BLOCK_M, padded + back))
    return walk


@gluon.jit
def next_step(at, c, order):
    """Behind a block that starts ``at`` rows after the first of its head, the c-th since a turn: the next one's, and
    how many rows of DQ32 lie between them."""
    walk = order.walk
    c += 1
    over = c == noted(walk, COUNT)
    at += gl.where(over, noted(walk, TURN), noted(walk, STEP))
    return at, gl.where(over, 0, c), gl.where(over, noted(walk, TURN_TO), noted(walk, STEP_TO))


@gluon.jit
def begin_turn(i, order):
    """A group, before it adds to the i-th block of rows."""
    warps: gl.constexpr = order.turn.shape[0]
    mbarrier.wait(order.turn.index(i % warps), (i // warps) & 1)


@gluon.jit
def end_turn(i, order):
    """A group, after it has added to the i-th block of rows."""
    gl.thread_barrier()  # of the group
    mbarrier.arrive(order.added.index(i % order.turn.shape[0]), count=1)


# All lanes of the warp do the same. Release and acquire order what the groups have added, too, as their barriers lie
# between.
AWAIT = gl.constexpr("""{
.reg .pred other;
again:
ld.acquire.gpu.global.s32 $0, [$1];
setp.ne.s32 other, $0, $2;
@other bra again;
}""")
PASS_ON = gl.constexpr("st.release.gpu.global.s32 [$1], $2; mov.b32 $0, $2;")


@gluon.jit
def keep_order(z, tile, TURNS, order, tiles_a_head, heads, padded, right, w: gl.constexpr):
    """Ordering warp w. TURNS are [batch, heads, padded / BLOCK_M], zeros before the launch."""
    warps: gl.constexpr = order.turn.shape[0]
    turn = tile.key // z.BLOCK_N
    alone = 0  # rows before it are not seen by the programs before, which have later keys
    if z.BOUNDED:
        turn = tiles_a_head - 1 - turn
        alone = gl.maximum(tile.key + z.BLOCK_N - right + 1, 0) // z.BLOCK_M * z.BLOCK_M
    if z.BOUNDED == CAUSAL:  # where query heads take turns, the programs before see all its rows
        turn = gl.where(order.inner > 0, tile.key // z.BLOCK_N, turn)
        alone = gl.where(order.inner > 0, 0, alone)
    head = tile.head
    row = first_row(tile, z, order)
    for _ in gl.static_range(w):
        head, row = next_rows(head, row, tile, z, order)
    for i in range(w, tile.steps, warps):
        block = (tile.batch * heads + head) * (padded // z.BLOCK_M) + row // z.BLOCK_M
        at = (TURNS + block).to(gl.int64)
        mine = gl.where(row < alone, 0, turn)
        gl.inline_asm_elementwise(AWAIT, "=&r,l,r", [at, mine], gl.int32, False, 1)
        mbarrier.arrive(order.turn.index(w), count=1)
        mbarrier.wait(order.added.index(w), (i // warps) & 1)
        gl.inline_asm_elementwise(PASS_ON, "=r,l,r", [at, turn + 1], gl.int32, False, 1)
        for _ in gl.static_range(warps):
            head, row = next_rows(head, row, tile, z, order)
