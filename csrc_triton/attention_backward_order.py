"""dQ in a fixed order: who adds next to a block of rows, where a call asks for it. See ``attention_backward_groups``.

Blocks of keys of a head add to a block of rows one after the other, in the order of their programs. A number in memory
says, for each block of rows, how many programs have added or never will; a warp of each block reads it, lets the
consumer groups add, and counts on. The groups meet memory's latency nowhere: they wait for a barrier of their block, one
block of rows after they have multiplied.

No block waits for ever. It waits, on one block of rows at a time, for the program before its own (of the same head, so
that program started earlier: blocks start in the order of their numbers), and only while that one sees the rows, too,
which it then walks in the same order. So of all blocks on the GPU the first of its head waits for nobody and ends; by
induction each next one does.

The order is chosen so that waits are rare. Without a bound all begin with the first rows: the second block starts to
add when the first has, and so on, but once. With a bound a block begins at its diagonal, and what sees a row last is
what sees it first: the last keys go first, so that at each moment each block adds to other rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from csrc_triton.attention_backward_groups import GROUPS, KEYS, next_rows
from csrc_triton.attention_groups import barriers


@aggregate
class Order:
    """Barriers between the ordering warp and the groups, one phase a block of rows."""

    turn: gl.shared_memory_descriptor  # it is the block's
    added: gl.shared_memory_descriptor  # by both groups

    @gluon.constexpr_function
    def __init__(self, turn, added):
        self.turn, self.added = turn, added


@gluon.jit
def order_barriers():
    return Order(barriers(1, 1), barriers(1, GROUPS))


# All lanes of the ordering warp do the same. What the groups added before they arrived at ``added`` comes before what
# is published here, for all who read it: release and acquire take along what was seen at a barrier.
AWAIT = gl.constexpr("""{
.reg .pred other;
again:
ld.acquire.gpu.global.s32 $0, [$1];
setp.ne.s32 other, $0, $2;
@other bra again;
}""")
PUBLISH = gl.constexpr("st.release.gpu.global.s32 [$1], $2; mov.b32 $0, $2;")


@gluon.jit
def keep_order(z, tile, TURNS, order, heads, padded, right):
    """The ordering warp. TURNS are [batch, heads, padded / BLOCK_M] numbers, zeros before the launch, or null."""
    if TURNS.to(gl.int64) != 0:
        after = 0  # rows before it are not seen by the program before
        if z.BOUNDED:
            after = gl.maximum(tile.key + GROUPS * KEYS - right + 1, 0) // z.BLOCK_M * z.BLOCK_M
        head = tile.head
        row = tile.row
        for i in range(tile.steps):
            of = (tile.batch * heads + head) * (padded // z.BLOCK_M) + row // z.BLOCK_M
            counter = (TURNS + of).to(gl.int64)
            before = gl.where(row < after, 0, tile.turn)
            gl.inline_asm_elementwise(AWAIT, "=&r,l,r", [counter, before], gl.int32, False, 1)
            mbarrier.arrive(order.turn.index(0), count=1)
            mbarrier.wait(order.added.index(0), i & 1)
            gl.inline_asm_elementwise(PUBLISH, "=r,l,r", [counter, tile.turn + 1], gl.int32, False, 1)
            head, row = next_rows(head, row, tile, z)
