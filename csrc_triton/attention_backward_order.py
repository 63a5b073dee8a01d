"""dQ in a fixed order, where a call asks for it: who adds next to a block of rows. See ``attention_backward_groups``.

The blocks of keys of a head add to a block of rows one after the other, in the order of their programs. A number in
memory, for each block of rows, is that of the program whose turn it is. One warp of each program reads it, lets the
consumer groups add, and passes the turn on: the groups themselves never wait for memory, only for their program's turn.

No program waits for ever. It waits, for one block of rows at a time, for the program before it, and only where that one
sees the rows, too. Both are of one head of K and walk their rows in the same order, and the one before was started
before: a GPU starts programs in the order of their numbers. So the first program of a head waits for nobody and ends;
each next one meets only turns that are passed on sooner or later.

The order is such that waits are few. Without a bound all programs begin with the first rows, where each waits for the
one before. So several heads take turns to start programs (``tile_of_keys``), and a head's start one after the other.
With a bound a program begins at its diagonal. There the last keys go first: the first to add to a row is the program
that sees it first, and at any moment each one adds to other rows. (With the first keys first most would wait.)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from csrc_triton.attention_backward_groups import next_rows
from csrc_triton.attention_groups import barriers


@aggregate
class Order:
    """Barriers between the ordering warp and the groups, a phase for each block of rows."""

    turn: gl.shared_memory_descriptor  # is the program's
    added: gl.shared_memory_descriptor  # all groups have

    @gluon.constexpr_function
    def __init__(self, turn, added):
        self.turn, self.added = turn, added


@gluon.jit
def order_barriers(groups: gl.constexpr):
    return Order(barriers(1, 1), barriers(1, groups))


@gluon.jit
def begin_turn(ordered, i, order):
    """A group, before it adds to the i-th block of rows."""
    if ordered:
        mbarrier.wait(order.turn.index(0), i & 1)


@gluon.jit
def end_turn(ordered, order):
    """A group, after it has added to a block of rows."""
    if ordered:
        gl.thread_barrier()  # of the group
        mbarrier.arrive(order.added.index(0), count=1)


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
def keep_order(z, tile, TURNS, order, heads, padded):
    """The ordering warp. TURNS are [batch, heads, padded / BLOCK_M], zeros before the launch; null: no order."""
    if TURNS.to(gl.int64) != 0:
        head = tile.head
        row = tile.row
        for i in range(tile.steps):
            block = (tile.batch * heads + head) * (padded // z.BLOCK_M) + row // z.BLOCK_M
            at = (TURNS + block).to(gl.int64)
            mine = gl.where(row < tile.alone, 0, tile.turn)
            gl.inline_asm_elementwise(AWAIT, "=&r,l,r", [at, mine], gl.int32, False, 1)
            mbarrier.arrive(order.turn.index(0), count=1)
            mbarrier.wait(order.added.index(0), i & 1)
            gl.inline_asm_elementwise(PASS_ON, "=r,l,r", [at, tile.turn + 1], gl.int32, False, 1)
            head, row = next_rows(head, row, tile, z)
