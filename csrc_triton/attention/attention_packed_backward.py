"""Attention backward by warp groups over packed sequences: ``attention_backward_groups``, a block of a sequence's keys
at a time.

- Tensor maps are those of the packed forward (``flash_attention_varlen``), so that a sequence ends where a map does:
  rows and keys behind it arrive as zeros and are not written. As there, what is wholly behind a sequence is never asked
  for: a group without keys gets the last key instead, whose probabilities are masked, and stores nothing.
- Sums of rows and dQ have rows of their own: a sequence's start at a multiple of UNIT, which no other one's reach
  (``padded_start``). So whole blocks of rows can be read and added, and where they lie follows from where the sequence
  starts alone.
- A sequence without queries leaves its keys gradients of zero; so do the keys behind the last one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.language.core import _aggregate as aggregate

from csrc_triton.attention.attention_backward_groups import KEYS
from csrc_triton.attention.varlen import find, padded_start, span


@aggregate
class PackedKeyTile:
    """As ``KeyTile``, of a sequence; there may be no rows. Rows count as the sums have them."""

    batch: gl.tensor  # of the sums: 0
    kv_head: gl.tensor
    head: gl.tensor
    last_head: gl.tensor
    key: gl.tensor  # of the sequence's; at its end where the tile has none
    last_key: gl.tensor
    row: gl.tensor
    rows: gl.tensor
    steps: gl.tensor
    place_q: gl.tensor  # of tensor maps, and what a row and a key are past theirs
    past_q: gl.tensor
    place_k: gl.tensor
    past_k: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, batch, kv_head, head, last_head, key, last_key, row, rows, steps, place_q, past_q, place_k,
        past_k,
    ):  # fmt: skip
        self.batch, self.kv_head, self.head, self.last_head = batch, kv_head, head, last_head
        self.key, self.last_key = key, last_key
        self.row, self.rows, self.steps = row, rows, steps
        self.place_q, self.past_q, self.place_k, self.past_k = place_q, past_q, place_k, past_k

    @gluon.jit
    def keys_at(self, g: gl.constexpr):
        return self.place_k, self.past_k + gl.minimum(self.key + g * KEYS, self.last_key)

    @gluon.jit
    def rows_at(self, head, row):
        # the block behind the last one, which nobody uses, is of the last head
        return self.place_q, gl.minimum(head, self.last_head), self.past_q + row


@gluon.jit
def packed_tile(
    CU_SEQLENS_Q, CU_SEQLENS_K, tiles_a_head, ratio, section, sequences, tokens_q, tokens_k, right, z
):
    """This program's tile, the keys of its sequence, and the bound: row r of the sums sees those before r + it. Heads
    of K take turns, ``section`` at a time, so that the longest tiles of the last one do not start late."""
    group = gl.program_id(0) // (section * tiles_a_head)
    place = gl.program_id(0) - group * (section * tiles_a_head)
    number = place // section
    kv_head = group * section + place - number * section
    sequence, start_k, len_k, key = find(CU_SEQLENS_K, number, sequences, tokens_k, z.BLOCK_N)
    start_q, len_q = span(CU_SEQLENS_Q, sequence, sequences, tokens_q)
    key = gl.where((key < 0) | (key > len_k), len_k, key)
    right += len_k - len_q
    first = gl.maximum(key - right + 1, 0) // z.BLOCK_M
    blocks = gl.maximum((len_q + z.BLOCK_M - 1) // z.BLOCK_M - first, 0)
    blocks = gl.where(key < len_k, blocks, 0)
    start = padded_start(start_q, sequence)
    tile = PackedKeyTile(
        start * 0, kv_head, kv_head * ratio, kv_head * ratio + ratio - 1, key, len_k - 1, start + first * z.BLOCK_M,
        blocks * z.BLOCK_M, ratio * blocks, start_q + len_q, tokens_q - len_q - start, start_k + len_k,
        tokens_k - len_k,
    )  # fmt: skip
    return tile, len_k, right - start


@gluon.jit
def put_zeros(of, tile, len_k, z):
    """The gradients of keys that no row sees."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    zeros = gl.allocate_shared_memory(of.dtype, of.block_shape, of.layout)
    zeros.reshape([KEYS, z.BOX]).store(gl.zeros([KEYS, z.BOX], of.dtype, layout))
    fence_async_shared()
    for g in gl.static_range(z.BLOCK_N // KEYS):
        if tile.key + g * KEYS < len_k:
            place, key = tile.keys_at(g)
            for c in gl.static_range((z.D1 + z.D2) // z.BOX):
                tma.async_copy_shared_to_global(of, [place, tile.kv_head, key, c * z.BOX], zeros)
    tma.store_wait(0)
