"""A block of attention's backward by two warp groups: its shared memory, and which warps do what. See
``attention_backward_groups``."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from csrc_triton.attention_backward_consumer import DS_SLOTS, consume
from csrc_triton.attention_backward_groups import produce, sums_ring, tile_ring, write_notes
from csrc_triton.attention_backward_order import keep_order, order_barriers
from csrc_triton.attention_groups import barriers


@gluon.jit
def by_groups(
    Q, K, V, DY, DK, DV, LSE2, DELTA, DQ32, TURNS, tile, scale, tiles_a_head, heads, padded, len_k, right,
    REGISTERS: gl.constexpr, z, left=None,
):  # fmt: skip
    """A block of 128 keys, whose ``tile`` it is: as ``backward_groups``. TURNS are None where there is no order."""
    notes = write_notes(tile, right, len_k, left)
    k = tile_ring(K, 2, 1, z)
    v = tile_ring(V, 2, 1, z)
    q = tile_ring(Q, z.Q_STAGES, z.Q_STAGES, z)
    dy = tile_ring(DY, z.DY_STAGES, z.DY_STAGES, z)
    ds = gl.allocate_shared_memory(Q.dtype, [2 * DS_SLOTS, 64, z.BLOCK_M], gl.NVMMASharedLayout(128, 16, 2))
    lse = sums_ring(LSE2, z.Q_STAGES)
    delta = sums_ring(DELTA, z.DY_STAGES)
    ds_full = barriers(DS_SLOTS, 2)
    # the tuples stay literal: through a variable, constants would turn into run-time values
    if TURNS is None:
        fence_async_shared()
        gl.warp_specialize(
            [
                (consume, (z, tile, notes, DK, DV, DQ32, k, v, q, dy, lse, delta, ds, ds_full, None, padded, heads,
                           scale, 0)),
                (consume, (z, tile, notes, DK, DV, DQ32, k, v, q, dy, lse, delta, ds, ds_full, None, padded, heads,
                           scale, 1)),
                (produce, (z, tile, Q, K, V, DY, LSE2, DELTA, k, v, q, dy, lse, delta)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
    else:
        order = order_barriers(2, 1)
        fence_async_shared()
        gl.warp_specialize(
            [
                (consume, (z, tile, notes, DK, DV, DQ32, k, v, q, dy, lse, delta, ds, ds_full, order, padded, heads,
                           scale, 0)),
                (consume, (z, tile, notes, DK, DV, DQ32, k, v, q, dy, lse, delta, ds, ds_full, order, padded, heads,
                           scale, 1)),
                (produce, (z, tile, Q, K, V, DY, LSE2, DELTA, k, v, q, dy, lse, delta)),
                (keep_order, (z, tile, TURNS, order, tiles_a_head, heads, padded, right, 0)),
            ],
            [4, 1, 1],
            [REGISTERS, 24, 24],
        )  # fmt: skip
