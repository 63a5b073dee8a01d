"""write_kv_cache: keys and values of new tokens into their slots of a cache.

Kwon et al., PagedAttention (2023); vLLM's reshape_and_cache_flash.
"""

import triton
import triton.language as tl

from csrc_triton.cache.slots import (
    CACHES,
    PLACES,
    SCALES,
    STRIDES,
    Layout,
    divide_by,
    place_of,
    slots_of,
    store_row,
)
from csrc_triton.common.pdl_begin import begin

TENSORS = {"KEY": "*dtype", "VALUE": "*dtype"}
OF_TOKENS = {"key_token": "i64", "key_head": "i64", "value_token": "i64", "value_head": "i64"}

DECLARATION = {
    "op": "write_kv_cache",
    "kernels": {
        "write_kv_cache": {
            "arguments": {
                **CACHES, **SCALES, **TENSORS, "SLOTS": "*i32", "FLAG": "*i64", **STRIDES, **OF_TOKENS,
                **PLACES, "rows": "i32", "heads": "i32", "dim": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16"], "cache": ["dtype", "fp8e4nv", "fp8e4b8"]},
            "aligned": [*CACHES, *TENSORS, *STRIDES, *OF_TOKENS, "dim"],
            "forms": {
                "tile": {
                    "function": "write",
                    "constants": ["ROWS", "D", "PDL"],
                    "defaults": {"PDL": 0},
                    "pdl": "PDL",
                }
            },
        },
    },
}  # fmt: skip


@triton.jit
def write(
    KEY_CACHE, VALUE_CACHE, K_SCALE, V_SCALE, KEY, VALUE, SLOTS, FLAG, cache_page, cache_row, cache_head,
    key_token, key_head, value_token, value_head, scale_page, scale_row, scale_head, slot_words, slots,
    page_size, dynamic, rows, heads, dim,
    ROWS: tl.constexpr, D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row is one head of one token, of both."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    token = divide_by(row, heads)
    head = row - token * heads
    cols = tl.arange(0, D)
    k_at = token.to(tl.int64) * key_token + head * key_head
    v_at = token.to(tl.int64) * value_token + head * value_head
    slot_words = begin(slot_words, PDL)
    low, high = slots_of(SLOTS, token, inside, slot_words)
    read = inside[:, None] & (cols < dim)[None, :]  # whatever the slot: it is not waited for
    k = tl.load(KEY + k_at[:, None] + cols[None, :], mask=read, other=0.0)
    v = tl.load(VALUE + v_at[:, None] + cols[None, :], mask=read, other=0.0)
    place = place_of(low, high, FLAG, inside, slots, page_size)
    to = Layout(cache_page, cache_row, cache_head, scale_page, scale_row, scale_head, dynamic)
    mask = place.known[:, None] & (cols < dim)[None, :]
    store_row(KEY_CACHE, K_SCALE, k, place, head, cols, mask, to)
    store_row(VALUE_CACHE, V_SCALE, v, place, head, cols, mask, to)
