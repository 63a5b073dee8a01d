"""merge_attention_states: attention to two sets of keys, from the attention to each and its log-sum-exp.

Milakov and Gimelshein, Online normalizer calculation for softmax (2018); vLLM's merge_attn_states.
"""

import triton
import triton.language as tl

from csrc_triton.common.pdl_begin import almost_done, begin
from csrc_triton.decoding.split_kv import divide

STATES = {"OUT_A": "*dtype", "OUT_B": "*dtype"}
OF_OUTS = {
    "a_batch": "i64", "a_token": "i64", "a_head": "i64", "b_batch": "i64", "b_token": "i64", "b_head": "i64",
}  # fmt: skip

DECLARATION = {
    "op": "merge_attention_states",
    "kernels": {
        "merge_attention_states": {
            "arguments": {
                "OUT": "*dtype", "LSE": "*fp32", **STATES, "LSE_A": "*fp32", "LSE_B": "*fp32", **OF_OUTS,
                "lse_a_batch": "i64", "lse_a_head": "i64", "lse_a_token": "i64", "lse_b_batch": "i64",
                "lse_b_head": "i64", "lse_b_token": "i64", "tokens": "i32", "heads": "i32", "dim": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["OUT", *STATES, *OF_OUTS, "dim"],
            "forms": {
                "tile": {
                    "function": "merge",
                    "constants": ["ROWS", "BLOCK", "PDL"],
                    "defaults": {"PDL": 0},
                    "pdl": "PDL",
                },
                "heads": {
                    "function": "merge_heads",
                    "constants": ["ROWS", "HEADS", "BLOCK", "EARLY", "PDL"],
                    "covers": "BLOCK",
                    "defaults": {"EARLY": 0, "PDL": 0},
                    "pdl": "PDL",
                },
            },
        },
    },
}  # fmt: skip


@triton.jit
def merge(
    OUT, LSE, OUT_A, OUT_B, LSE_A, LSE_B, a_batch, a_token, a_head, b_batch, b_token, b_head,
    lse_a_batch, lse_a_head, lse_a_token, lse_b_batch, lse_b_head, lse_b_token, tokens, heads, dim,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS tokens of one head, whose log-sum-exps lie together; columns come BLOCK at a time. Programs that follow each
    other have the same tokens' heads."""
    blocks = tl.cdiv(tokens, ROWS)  # of a batch
    block = divide(tl.program_id(0), heads)
    head = (tl.program_id(0) - block * heads).to(tl.int64)
    batch = divide(block, blocks)
    token = (block - batch * blocks) * ROWS + tl.arange(0, ROWS)
    batch = batch.to(tl.int64)
    inside = token < tokens
    row = (batch * tokens + token) * heads + head
    token = token.to(tl.int64)
    begin(heads, PDL)
    lse_a = lse_of(LSE_A + (batch * lse_a_batch + head * lse_a_head) + token * lse_a_token, inside)
    lse_b = lse_of(LSE_B + (batch * lse_b_batch + head * lse_b_head) + token * lse_b_token, inside)
    weight_a, weight_b, by, lse = weights_of(lse_a, lse_b)
    tl.store(LSE + (batch * heads + head) * tokens + token, lse, mask=inside)
    weight_a *= by
    weight_b *= by
    at_a = OUT_A + (batch * a_batch + head * a_head) + token * a_token
    at_b = OUT_B + (batch * b_batch + head * b_head) + token * b_token
    at = row * dim
    for first in range(0, dim, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        in_row = (cols < dim)[None, :]
        mask = inside[:, None] & in_row
        x = tl.load(at_a[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        y = tl.load(at_b[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        # What has no weight may be anything. It is read all the same: no load waits for a weight.
        x = tl.where((weight_a != 0.0)[:, None], x, 0.0)
        y = tl.where((weight_b != 0.0)[:, None], y, 0.0)
        out = x * weight_a[:, None] + y * weight_b[:, None]
        tl.store(OUT + at[:, None] + cols[None, :], out.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def merge_heads(
    OUT, LSE, OUT_A, OUT_B, LSE_A, LSE_B, a_batch, a_token, a_head, b_batch, b_token, b_head,
    lse_a_batch, lse_a_head, lse_a_token, lse_b_batch, lse_b_head, lse_b_token, tokens, heads, dim,
    ROWS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS tokens' HEADS heads, which lie together in memory, of at most BLOCK columns. Programs that follow each other
    have the same tokens' heads."""
    parts = tl.cdiv(heads, HEADS)
    blocks = tl.cdiv(tokens, ROWS)  # of a batch
    block = divide(tl.program_id(0), parts)
    part = tl.program_id(0) - block * parts
    batch = divide(block, blocks)
    i = tl.arange(0, ROWS * HEADS)
    token = (block - batch * blocks) * ROWS + i // HEADS
    head = part * HEADS + i % HEADS
    inside = (token < tokens) & (head < heads)
    batch = batch.to(tl.int64)
    row = (batch * tokens + token) * heads + head
    token = token.to(tl.int64)
    head = head.to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = inside[:, None] & (cols < dim)[None, :]
    at_a = OUT_A + (batch * a_batch + head * a_head + token * a_token)
    at_b = OUT_B + (batch * b_batch + head * b_head + token * b_token)
    begin(heads, PDL, EARLY)
    # What has no weight may be anything. It is read all the same: no load waits for a weight.
    x = tl.load(at_a[:, None] + cols[None, :], mask=mask, other=0.0)
    y = tl.load(at_b[:, None] + cols[None, :], mask=mask, other=0.0)
    lse_a = lse_of(LSE_A + (batch * lse_a_batch + head * lse_a_head + token * lse_a_token), inside)
    lse_b = lse_of(LSE_B + (batch * lse_b_batch + head * lse_b_head + token * lse_b_token), inside)
    weight_a, weight_b, by, lse = weights_of(lse_a, lse_b)
    tl.store(LSE + (batch * heads + head) * tokens + token, lse, mask=inside)
    almost_done(PDL, EARLY)
    weight_a *= by
    weight_b *= by
    x = tl.where((weight_a != 0.0)[:, None], x.to(tl.float32), 0.0)
    y = tl.where((weight_b != 0.0)[:, None], y.to(tl.float32), 0.0)
    out = x * weight_a[:, None] + y * weight_b[:, None]
    tl.store(OUT + (row * dim)[:, None] + cols[None, :], out.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def lse_of(at, inside):
    """Positive infinity, which some kernels give a row without keys, is negative, as in vLLM."""
    lse = tl.load(at, mask=inside, other=0.0)
    return tl.where(lse == float("inf"), float("-inf"), lse)


@triton.jit
def weights_of(lse_a, lse_b):
    """(the weights of both states, what makes them add up to 1, their log-sum-exp together)"""
    top = tl.maximum(lse_a, lse_b, propagate_nan=tl.PropagateNan.ALL)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight_a = tl.exp(lse_a - top)
    weight_b = tl.exp(lse_b - top)
    total = weight_a + weight_b
    by = tl.where(total == 0.0, 0.0, 1.0 / total)
    return weight_a, weight_b, by, top + tl.log(total)  # without keys -inf
