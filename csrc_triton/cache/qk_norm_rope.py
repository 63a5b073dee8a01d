"""qk_norm_rope: RMSNorm of each head of q and k and their rotary embedding, in place on packed q, k and v; and the
result's k, with v, into their slots of a cache. Without weights (null) heads are not normalised.

Zhang and Sennrich, Root Mean Square Layer Normalization (2019); Su et al., RoFormer (2021); vLLM's fused_qk_norm_rope.
"""

import triton
import triton.language as tl

from csrc_triton.cache.slots import (
    CACHES,
    PLACES,
    SCALES,
    STRIDES,
    Layout,
    code_of,
    divide_by,
    found_scale,
    given_scale,
    place_of,
    row_in,
    slots_of,
    store_row,
)
from csrc_triton.common.pdl_begin import begin
from csrc_triton.rope.rope import table_rows

WEIGHTS = {"Q_WEIGHT": "*dtype", "K_WEIGHT": "*dtype"}
COLUMNS = {"qkv_token": "i64", "q_head": "i64", "k_first": "i64", "v_first": "i64", "table_row": "i64"}

DECLARATION = {
    "op": "qk_norm_rope",
    "kernels": {
        "qk_norm_rope": {
            "arguments": {
                "QKV": "*dtype", **CACHES, **SCALES, **WEIGHTS, "TABLE": "*table", "IDS": "*i32", "SLOTS": "*i32",
                "FLAG": "*i64", **STRIDES, **COLUMNS, "half": "i32", "dim": "i32", **PLACES, "id_words": "i32",
                "n_table": "i32", "slot_tokens": "i32", "q_heads": "i32", "kv_heads": "i32", "rows": "i32",
                "programs": "i32", "eps": "fp32", "offset": "fp32",
            },
            "axes": {
                "dtype": ["bf16", "fp16"], "table": ["dtype", "fp32"], "interleaved": [False, True],
                "cache": ["dtype", "fp8e4nv", "fp8e4b8"],
            },
            "aligned": ["QKV", *CACHES, *WEIGHTS, "TABLE", *STRIDES, *COLUMNS, "half", "dim"],
            "forms": {
                "tile": {
                    "function": "norm_and_rotate",
                    "constants": ["INTERLEAVED", "ROWS", "HALF", "PDL"],
                    "defaults": {"PDL": 0},
                    "pdl": "PDL",
                }
            },
        },
    },
}  # fmt: skip


@triton.jit
def pairs(values, ROWS: tl.constexpr, HALF: tl.constexpr):
    """Even and odd columns of rows."""
    return tl.split(values.reshape(ROWS, HALF, 2))


@triton.jit
def load_pairs(X, at, half, inside, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr):
    """The first and second columns of the pairs of rows at ``at``, in fp32; zeros where there are none."""
    if INTERLEAVED:
        cols = tl.arange(0, 2 * HALF)
        x = tl.load(
            X + at[:, None] + cols[None, :], mask=inside[:, None] & (cols < 2 * half)[None, :], other=0.0
        )
        a, b = pairs(x, ROWS, HALF)
    else:
        cols = tl.arange(0, HALF)
        mask = inside[:, None] & (cols < half)[None, :]
        a = tl.load(X + at[:, None] + cols[None, :], mask=mask, other=0.0)
        b = tl.load(X + (at + half)[:, None] + cols[None, :], mask=mask, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def store_pairs(
    TO, at, a, b, half, inside, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr
):
    """What ``load_pairs`` loads, in TO's dtype."""
    if INTERLEAVED:
        cols = tl.arange(0, 2 * HALF)
        mask = inside[:, None] & (cols < 2 * half)[None, :]
        tl.store(TO + at[:, None] + cols[None, :], tl.join(a, b).reshape(ROWS, 2 * HALF), mask=mask)
    else:
        cols = tl.arange(0, HALF)
        mask = inside[:, None] & (cols < half)[None, :]
        tl.store(TO + at[:, None] + cols[None, :], a, mask=mask)
        tl.store(TO + (at + half)[:, None] + cols[None, :], b, mask=mask)


@triton.jit
def weights_of(W, cols, mask, has_weights, offset):
    """(row, column) of the weights that begin at ``W``; 1 without weights, where ``offset`` is 0. A row's own are
    loaded even where all rows have the same: a thread then holds what it multiplies by, and nothing is exchanged."""
    mask = (mask & has_weights)[None, :]
    return tl.load(W[:, None] + cols[None, :], mask=mask, other=1.0).to(tl.float32) + offset


@triton.jit
def load_rest(X, W, at, first, dim, inside, rstd, has_weights, offset, HALF: tl.constexpr):
    """Columns from ``first`` on, normalised."""
    cols = first + tl.arange(0, HALF)
    x = tl.load(X + at[:, None] + cols[None, :], mask=inside[:, None] & (cols < dim)[None, :], other=0.0)
    w = weights_of(W, cols, cols < dim, has_weights, offset)
    return (x.to(tl.float32) * rstd[:, None] * w).to(x.dtype), cols


@triton.jit
def norm_and_rotate(
    QKV, KEY_CACHE, VALUE_CACHE, K_SCALE, V_SCALE, Q_WEIGHT, K_WEIGHT, TABLE, IDS, SLOTS, FLAG,
    cache_page, cache_row, cache_head, qkv_token, q_head, k_first, v_first, table_row, half, dim,
    scale_page, scale_row, scale_head, slot_words, slots, page_size, dynamic, id_words, n_table, slot_tokens,
    q_heads, kv_heads, rows, programs, eps, offset,
    INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row is one head of one token: of q or k in the first ``programs`` programs, of v, which is only stored in the
    cache, in those after them. ``slot_tokens``: the tokens that have a slot, 0 without a cache."""
    to = Layout(cache_page, cache_row, cache_head, scale_page, scale_row, scale_head, dynamic)
    program = tl.program_id(0)
    if program < programs:
        heads = q_heads + kv_heads
        inside = program * ROWS + tl.arange(0, ROWS) < rows
        first_token = divide_by(program * ROWS, heads)
        first_head = program * ROWS - first_token * heads
        head = first_head + tl.arange(0, ROWS)
        tokens = (head >= heads).to(tl.int32)  # begun since the first row
        if heads < ROWS:
            tokens = divide_by(head, heads)
        token = first_token + tokens
        head -= tokens * heads
        is_k = head >= q_heads
        k_head = tl.maximum(head - q_heads, 0)
        has_slot = inside & is_k & (token < slot_tokens)
        at = token.to(tl.int64) * qkv_token + tl.where(is_k, k_first + k_head * dim, head * q_head)
        slot_words = begin(slot_words, PDL)
        low, high = slots_of(SLOTS, token, has_slot, slot_words)
        a, b = load_pairs(QKV, at, half, inside, INTERLEAVED, ROWS, HALF)
        angles, known = table_rows(IDS, token, inside, n_table, id_words)
        angles *= table_row
        cols = tl.arange(0, HALF)
        table_mask = known[:, None] & (cols < half)[None, :]
        cos = tl.load(TABLE + angles[:, None] + cols[None, :], mask=table_mask, other=float("nan"))
        sin = tl.load(TABLE + (angles + half)[:, None] + cols[None, :], mask=table_mask, other=float("nan"))
        cos = cos.to(tl.float32)
        sin = sin.to(tl.float32)
        has_weights = Q_WEIGHT.to(tl.int64) != 0
        W = tl.where(is_k, K_WEIGHT, Q_WEIGHT)
        if INTERLEAVED:
            both = tl.arange(0, 2 * HALF)
            w_a, w_b = pairs(weights_of(W, both, both < 2 * half, has_weights, offset), ROWS, HALF)
        else:
            w_a = weights_of(W, cols, cols < half, has_weights, offset)
            w_b = weights_of(W + half, cols, cols < half, has_weights, offset)
        squares = tl.sum(a * a + b * b, 1)
        for first in range(2 * half, dim, HALF):
            rest = first + cols
            mask = inside[:, None] & (rest < dim)[None, :]
            x = tl.load(QKV + at[:, None] + rest[None, :], mask=mask, other=0.0).to(tl.float32)
            squares += tl.sum(x * x, 1)
        # All that follows comes from the whole row's sum: nothing is overwritten that is still to be read.
        rstd = tl.where(has_weights, tl.rsqrt(squares / dim + eps), 1.0)
        a = a * rstd[:, None] * w_a
        b = b * rstd[:, None] * w_b
        y_a = (a * cos - b * sin).to(QKV.dtype.element_ty)
        y_b = (b * cos + a * sin).to(QKV.dtype.element_ty)
        if (slot_tokens > 0) & (first_head + ROWS > q_heads):  # some row may be k's
            place = place_of(low, high, FLAG, has_slot, slots, page_size)
            cache_at = row_in(place, k_head, cache_page, cache_row, cache_head)
            dtype: tl.constexpr = KEY_CACHE.dtype.element_ty
            s = squares
            if dtype.is_fp8():
                if dynamic != 0:
                    absmax = tl.maximum(tl.abs(y_a.to(tl.float32)), tl.abs(y_b.to(tl.float32)))
                    absmax = tl.max(tl.where((cols < half)[None, :], absmax, 0.0), 1)
                    for first in range(2 * half, dim, HALF):
                        x, _ = load_rest(QKV, W, at, first, dim, inside, rstd, has_weights, offset, HALF)
                        absmax = tl.maximum(absmax, tl.max(tl.abs(x.to(tl.float32)), 1))
                    s = found_scale(K_SCALE, place, k_head, place.known, absmax, to, dtype)
                else:
                    s = given_scale(K_SCALE, place, k_head, place.known, to)
            for first in range(2 * half, dim, HALF):
                x, rest = load_rest(QKV, W, at, first, dim, inside, rstd, has_weights, offset, HALF)
                mask = place.known[:, None] & (rest < dim)[None, :]
                tl.store(KEY_CACHE + cache_at[:, None] + rest[None, :], in_cache(x, s, dtype), mask=mask)
            c_a = in_cache(y_a, s, dtype)
            c_b = in_cache(y_b, s, dtype)
            store_pairs(KEY_CACHE, cache_at, c_a, c_b, half, place.known, INTERLEAVED, ROWS, HALF)
        for first in range(2 * half, dim, HALF):
            x, rest = load_rest(QKV, W, at, first, dim, inside, rstd, has_weights, offset, HALF)
            tl.store(QKV + at[:, None] + rest[None, :], x, mask=inside[:, None] & (rest < dim)[None, :])
        store_pairs(QKV, at, y_a, y_b, half, inside, INTERLEAVED, ROWS, HALF)
    else:
        cache_values(
            QKV + v_first, VALUE_CACHE, V_SCALE, SLOTS, FLAG, program - programs, qkv_token, kv_heads, slot_tokens,
            slot_words, slots, page_size, dim, to, ROWS, 2 * HALF, PDL,
        )  # fmt: skip


@triton.jit
def cache_values(
    V, VALUE_CACHE, V_SCALE, SLOTS, FLAG, program, v_token, kv_heads, slot_tokens, slot_words, slots, page_size, dim,
    to, ROWS: tl.constexpr, D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Heads of v into the cache."""
    row = program * ROWS + tl.arange(0, ROWS)
    token = divide_by(row, kv_heads)
    head = row - token * kv_heads
    inside = token < slot_tokens
    cols = tl.arange(0, D)
    at = token.to(tl.int64) * v_token + head * dim
    slot_words = begin(slot_words, PDL)
    low, high = slots_of(SLOTS, token, inside, slot_words)
    v = tl.load(V + at[:, None] + cols[None, :], mask=inside[:, None] & (cols < dim)[None, :], other=0.0)
    place = place_of(low, high, FLAG, inside, slots, page_size)
    mask = place.known[:, None] & (cols < dim)[None, :]
    store_row(VALUE_CACHE, V_SCALE, v, place, head, cols, mask, to)


@triton.jit
def in_cache(x, s, dtype: tl.constexpr):
    """Rows as a cache holds them; ``s``: their scales, where it holds codes."""
    if dtype.is_fp8():
        return code_of(x.to(tl.float32), s, dtype)
    else:
        return x
