"""Attention residuals (AttnRes): what a layer reads is a softmax over the depth of the results of earlier blocks,
y = sum over i of softmax_i(query . (norm * v_i / rms(v_i))) v_i.

Block i of a token is row i * n_tokens + token of V. The softmax is online: v is read once. The backward takes
sum over i of alpha_i dalpha_i as dy . y, as attention does, and reads v once, too. dquery and dnorm are both made of
the sum over tokens and blocks of dscore * v / rms(v), which is added up in two levels.

Moonshot AI, Attention Residuals (2026).
"""

import triton
import triton.language as tl

from csrc_triton.norms.norm_vectors import add_in_memory, load_vector

DECLARATION = {
    "op": "attention_residuals",
    "kernels": {
        "attention_residuals_forward": {
            "arguments": {
                "Y": "*dtype",
                "ALPHA": "*fp32",
                "RSTD": "*fp32",
                "V": "*dtype",
                "QUERY": "*dtype",
                "NORM": "*dtype",
                "v_stride": "i64",
                "n_tokens": "i64",
                "blocks": "i32",
                "n_cols": "i32",
                "kind": "i32",
                "eps": "fp32",
                "store_alpha": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["Y", "V", "QUERY", "NORM", "v_stride", "n_cols"],
            "forms": {
                "row": {
                    "function": "forward_row",
                    "constants": ["BLOCK", "STAGES"],
                    "covers": "BLOCK",
                    "staged": ["V"],
                },
                "long": {"function": "forward_long", "constants": ["BLOCK"]},
            },
        },
        "attention_residuals_backward": {
            "arguments": {
                "DV": "*dtype",
                "PARTIALS": "*fp32",
                "DY": "*dtype",
                "Y": "*dtype",
                "ALPHA": "*fp32",
                "RSTD": "*fp32",
                "V": "*dtype",
                "QUERY": "*dtype",
                "NORM": "*dtype",
                "dy_stride": "i64",
                "y_stride": "i64",
                "v_stride": "i64",
                "n_tokens": "i64",
                "blocks": "i32",
                "n_cols": "i32",
                "kind": "i32",
                "store_dv": "i32",
                "store_sums": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": [
                "DV", "PARTIALS", "DY", "Y", "V", "QUERY", "NORM", "dy_stride", "y_stride", "v_stride", "n_cols",
            ],
            "forms": {
                "row": {
                    "function": "backward_row",
                    "constants": ["BLOCK", "STAGES"],
                    "covers": "BLOCK",
                    "staged": ["V"],
                },
                "long": {"function": "backward_long", "constants": ["BLOCK"]},
            },
        },
        "attention_residuals_sums": {
            "arguments": {
                "DQUERY": "*weight",
                "DNORM": "*weight",
                "QUERY": "*weight",
                "NORM": "*weight",
                "PARTIALS": "*fp32",
                "parts": "i32",
                "n_cols": "i32",
            },
            "axes": {"weight": ["bf16", "fp16", "fp32"]},
            "aligned": [],
            "forms": {"tile": {"function": "sums", "constants": ["BLOCK", "PARTS"]}},
        },
    },
}  # fmt: skip


@triton.jit
def two_sums(a, b):
    """Side by side in one tensor they cross the warps together."""
    return tl.split(tl.sum(tl.join(a, b), 0))


@triton.jit
def forward_row(
    Y, ALPHA, RSTD, V, QUERY, NORM, v_stride, n_tokens, blocks, n_cols, kind, eps, store_alpha,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A token a program, a block of the depth a step, the next steps' loads in flight."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    query = load_vector(QUERY, cols, mask, kind) * load_vector(NORM, cols, mask, kind)
    n = n_cols.to(tl.float32)
    y = tl.zeros([BLOCK], tl.float32)
    top, total = float("-inf"), 0.0
    alphas = ALPHA + token * blocks
    for i in tl.range(0, blocks, num_stages=STAGES):
        v = tl.load(V + (i * n_tokens + token) * v_stride + cols, mask=mask, other=0.0).to(tl.float32)
        squares, dot = two_sums(v * v, query * v)
        rstd = tl.rsqrt(squares / n + eps)
        score = dot * rstd
        new_top = tl.maximum(top, score)
        before, weight = tl.exp(top - new_top), tl.exp(score - new_top)
        y = y * before + weight * v
        total = total * before + weight
        top = new_top
        tl.store(alphas + i, score, mask=store_alpha != 0)
        tl.store(RSTD + token * blocks + i, rstd, mask=store_alpha != 0)
    tl.store(Y + token * n_cols + cols, (y / total).to(Y.dtype.element_ty), mask=mask)
    finish_alphas(alphas, blocks, top, total, store_alpha)


@triton.jit
def finish_alphas(alphas, blocks, top, total, store_alpha):
    """Scores in memory become the softmax's weights."""
    if store_alpha != 0:
        tl.debug_barrier()
        for first in range(0, blocks, 32):
            i = first + tl.arange(0, 32)
            score = tl.load(alphas + i, mask=i < blocks, other=0.0)
            tl.store(alphas + i, tl.exp(score - top) / total, mask=i < blocks)


@triton.jit
def forward_long(
    Y, ALPHA, RSTD, V, QUERY, NORM, v_stride, n_tokens, blocks, n_cols, kind, eps, store_alpha, BLOCK: tl.constexpr
):  # fmt: skip
    """``forward_row`` for rows of any length: the scores first, through ALPHA, then y block by block of columns."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    n = n_cols.to(tl.float32)
    alphas = ALPHA + token * blocks
    top, total = float("-inf"), 0.0
    for i in range(blocks):
        at = V + (i * n_tokens + token) * v_stride
        squares = tl.zeros([BLOCK], tl.float32)
        products = tl.zeros([BLOCK], tl.float32)
        for first in range(0, n_cols, BLOCK):
            cols = first + block
            mask = cols < n_cols
            v = tl.load(at + cols, mask=mask, other=0.0).to(tl.float32)
            squares += v * v
            products += v * load_vector(QUERY, cols, mask, kind) * load_vector(NORM, cols, mask, kind)
        square, dot = two_sums(squares, products)
        rstd = tl.rsqrt(square / n + eps)
        score = dot * rstd
        new_top = tl.maximum(top, score)
        total = total * tl.exp(top - new_top) + tl.exp(score - new_top)
        top = new_top
        tl.store(alphas + i, score)
        tl.store(RSTD + token * blocks + i, rstd, mask=store_alpha != 0)
    finish_alphas(alphas, blocks, top, total, 1)
    tl.debug_barrier()
    for first in range(0, n_cols, BLOCK):
        cols = first + block
        mask = cols < n_cols
        y = tl.zeros([BLOCK], tl.float32)
        for i in range(blocks):
            v = tl.load(V + (i * n_tokens + token) * v_stride + cols, mask=mask, other=0.0).to(tl.float32)
            y += tl.load(alphas + i) * v
        tl.store(Y + token * n_cols + cols, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def backward_row(
    DV, PARTIALS, DY, Y, ALPHA, RSTD, V, QUERY, NORM, dy_stride, y_stride, v_stride, n_tokens, blocks, n_cols, kind,
    store_dv, store_sums,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Persistent programs, a token and a block of the depth a step."""
    program = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    query = load_vector(QUERY, cols, mask, kind) * load_vector(NORM, cols, mask, kind)
    n = n_cols.to(tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for token in range(program, n_tokens, tl.num_programs(0)):
        dy = tl.load(DY + token * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(Y + token * y_stride + cols, mask=mask, other=0.0).to(tl.float32)
        delta = tl.sum(dy * y, 0)
        for i in tl.range(0, blocks, num_stages=STAGES):
            row = i * n_tokens + token
            v = tl.load(V + row * v_stride + cols, mask=mask, other=0.0).to(tl.float32)
            alpha = tl.load(ALPHA + token * blocks + i)
            rstd = tl.load(RSTD + token * blocks + i)
            dalpha, dot = two_sums(dy * v, query * v)
            dscore = alpha * (dalpha - delta) * rstd
            dv = alpha * dy + dscore * (query - (rstd * rstd * dot / n) * v)
            tl.store(DV + row * n_cols + cols, dv.to(DV.dtype.element_ty), mask=mask & (store_dv != 0))
            sums += dscore * v
    tl.store(PARTIALS + program * n_cols + cols, sums, mask=mask & (store_sums != 0))


@triton.jit
def backward_long(
    DV, PARTIALS, DY, Y, ALPHA, RSTD, V, QUERY, NORM, dy_stride, y_stride, v_stride, n_tokens, blocks, n_cols, kind,
    store_dv, store_sums,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``backward_row`` for rows of any length, read twice; the sums are added to in memory."""
    program = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    n = n_cols.to(tl.float32)
    for token in range(program, n_tokens, tl.num_programs(0)):
        deltas = tl.zeros([BLOCK], tl.float32)
        for first in range(0, n_cols, BLOCK):
            cols = first + block
            dy = tl.load(DY + token * dy_stride + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
            deltas += dy * tl.load(Y + token * y_stride + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        delta = tl.sum(deltas, 0)
        for i in range(blocks):
            row = i * n_tokens + token
            dalphas = tl.zeros([BLOCK], tl.float32)
            dots = tl.zeros([BLOCK], tl.float32)
            for first in range(0, n_cols, BLOCK):
                cols = first + block
                mask = cols < n_cols
                v = tl.load(V + row * v_stride + cols, mask=mask, other=0.0).to(tl.float32)
                dalphas += v * tl.load(DY + token * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
                dots += v * load_vector(QUERY, cols, mask, kind) * load_vector(NORM, cols, mask, kind)
            dalpha, dot = two_sums(dalphas, dots)
            alpha, rstd = tl.load(ALPHA + token * blocks + i), tl.load(RSTD + token * blocks + i)
            dscore = alpha * (dalpha - delta) * rstd
            slope = rstd * rstd * dot / n
            for first in range(0, n_cols, BLOCK):
                cols = first + block
                mask = cols < n_cols
                v = tl.load(V + row * v_stride + cols, mask=mask, other=0.0).to(tl.float32)
                dy = tl.load(DY + token * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
                query = load_vector(QUERY, cols, mask, kind) * load_vector(NORM, cols, mask, kind)
                dv = alpha * dy + dscore * (query - slope * v)
                tl.store(DV + row * n_cols + cols, dv.to(DV.dtype.element_ty), mask=mask & (store_dv != 0))
                is_first = (token == program) & (i == 0)
                sums = PARTIALS + program * n_cols + cols
                add_in_memory(sums, dscore * v, mask & (store_sums != 0), is_first)


@triton.jit
def sums(DQUERY, DNORM, QUERY, NORM, PARTIALS, parts, n_cols, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """The column sums of PARTIALS[parts, n_cols] times norm and times query."""
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_row = cols < n_cols
    part = tl.arange(0, PARTS)
    total = tl.zeros([PARTS, BLOCK], tl.float32)
    for first in range(0, parts, PARTS):
        rows = (first + part).to(tl.int64)
        at = PARTIALS + rows[:, None] * n_cols + cols[None, :]
        total += tl.load(at, mask=(rows < parts)[:, None] & in_row[None, :], other=0.0)
    sums = tl.sum(total, 0)
    query = tl.load(QUERY + cols, mask=in_row, other=0.0).to(tl.float32)
    norm = tl.load(NORM + cols, mask=in_row, other=0.0).to(tl.float32)
    tl.store(DQUERY + cols, (sums * norm).to(DQUERY.dtype.element_ty), mask=in_row)
    tl.store(DNORM + cols, (sums * query).to(DNORM.dtype.element_ty), mask=in_row)
