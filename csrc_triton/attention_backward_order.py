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
that sees it first, and at any moment each one adds to other rows. (With the first keys first most would wait.)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from csrc_triton.attention_backward_groups import next_rows, tile_at
from csrc_triton.attention_groups import barriers
from csrc_triton.attention_turns import in_turns


@aggregate
class Order:
    """Barriers between the ordering warps and the groups, a pair a warp: a phase for each block of rows it keeps."""

    turn: gl.shared_memory_descriptor  # is the program's
    added: gl.shared_memory_descriptor  # all groups have

    @gluon.constexpr_function
    def __init__(self, turn, added):
        self.turn, self.added = turn, added


@gluon.jit
def order_barriers(groups: gl.constexpr, warps: gl.constexpr):
    return Order(barriers(warps, 1), barriers(warps, groups))


@gluon.jit
def tile_in_order(tiles_a_head, section, kv_heads, ratio, len_q, right, z, left=None):
    """This program's tile: ``section`` heads of K at a time take turns. The last keys come first where there is a
    bound."""
    both, number = in_turns(tiles_a_head, section)
    if z.BOUNDED:
        number = tiles_a_head - 1 - number
    return tile_at(both, number, kv_heads, ratio, len_q, right, z, left)


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
    head = tile.head
    row = tile.row
    for _ in gl.static_range(w):
        head, row = next_rows(head, row, tile, z)
    for i in range(w, tile.steps, warps):
        block = (tile.batch * heads + head) * (padded // z.BLOCK_M) + row // z.BLOCK_M
        at = (TURNS + block).to(gl.int64)
        mine = gl.where(row < alone, 0, turn)
        gl.inline_asm_elementwise(AWAIT, "=&r,l,r", [at, mine], gl.int32, False, 1)
        mbarrier.arrive(order.turn.index(w), count=1)
        mbarrier.wait(order.added.index(w), (i // warps) & 1)
        gl.inline_asm_elementwise(PASS_ON, "=r,l,r", [at, turn + 1], gl.int32, False, 1)
        for _ in gl.static_range(warps):
            head, row = next_rows(head, row, tile, z)
