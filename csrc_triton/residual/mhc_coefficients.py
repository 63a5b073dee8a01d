"""mHC, the weights of a token's streams: h_pre, h_post and the doubly stochastic h_res, from all of its streams.

``project``: the token's streams, one row of n_cols = streams * channels, times phi, and their sum of squares. The
product has few columns, streams * (streams + 2), so it is limited by reading x: x is read once. ``parts`` programs may
share the columns; each leaves its sums in a row of WIDTH numbers, of which the one behind the product's is the sum of
squares.

``balance``: parts added up, divided by the root of the mean square, scaled and shifted; sigmoids; Sinkhorn-Knopp.
Sinkhorn-Knopp is done in its scaling form: h_res = u P v with the vectors u and v alone changing.

Backward: ``balance_backward`` goes back to the product, dz, with the vectors u and v of each iteration computed again;
``project_backward`` reads x once for dx and dphi.

Xie et al., mHC: Manifold-Constrained Hyper-Connections (2025), equations 14 to 19.
"""

import triton
import triton.language as tl

from csrc_triton.common.bf16x2 import bf16_parts, repack
from csrc_triton.common.rounded_product import rounded_product
from csrc_triton.residual.mhc_projection import (  # noqa: F401  named by DECLARATION
    project_backward_pipeline,
    project_pipeline,
)

DECLARATION = {
    "op": "mhc_coefficients",
    "uses": ["column_sums"],
    "kernels": {
        "mhc_coefficients_project": {
            "arguments": {
                "Z": "*fp32",
                "X": "*dtype",
                "PHI": "*weight",
                "n_tokens": "i64",
                "n_cols": "i32",
                "parts": "i32",
            },
            "axes": {
                "dtype": ["bf16", "fp16", "fp32"],
                "weight": ["dtype", "fp32"],
                "streams": [2, 4, 8],
            },
            "gives": {"streams": {2: {"WIDTH": 16}, 4: {"WIDTH": 32}, 8: {"WIDTH": 128}}},
            "aligned": ["X", "PHI", "n_cols"],
            "forms": {
                "tile": {
                    "function": "project",
                    "constants": [
                        "ROWS",
                        "BLOCK",
                        "STAGES",
                        "TF32",
                        "REPACK",
                        "FP16_FLUSHES",
                        "STREAMS",
                        "WIDTH",
                    ],
                    "defaults": {"TF32": 0, "REPACK": 0},
                    "staged": ["X"],
                },
                "pipeline": {
                    "language": "gluon",
                    "function": "project_pipeline",
                    "constants": ["ROWS", "STAGES", "WIDTH"],
                    "requires": {"dtype": ["bf16", "fp16"], "streams": [4], "aligned": [True]},
                },
            },
        },
        "mhc_coefficients_balance": {
            "arguments": {
                "H_PRE": "*fp32",
                "H_POST": "*fp32",
                "H_RES": "*fp32",
                "MIX": "*fp32",
                "RSTD": "*fp32",
                "Z": "*fp32",
                "BIAS": "*fp32",
                "ALPHA_PRE": "*fp32",
                "ALPHA_POST": "*fp32",
                "ALPHA_RES": "*fp32",
                "n_tokens": "i64",
                "n_cols": "i32",
                "parts": "i32",
                "iterations": "i32",
                "eps": "fp32",
                "pre_eps": "fp32",
                "sinkhorn_eps": "fp32",
                "post_scale": "fp32",
                "store_mix": "i32",
            },
            "axes": {"streams": [2, 4, 8]},
            "gives": {"streams": {2: {"WIDTH": 16}, 4: {"WIDTH": 32}, 8: {"WIDTH": 128}}},
            "aligned": [],
            "forms": {
                "tile": {
                    "function": "balance",
                    "constants": ["ROWS", "STREAMS", "WIDTH"],
                }
            },
        },
        "mhc_coefficients_balance_backward": {
            "arguments": {
                "DZ": "*dz",
                "FACTOR": "*fp32",
                "PARTIALS": "*fp32",
                "SCALES": "*fp32",
                "DH_PRE": "*fp32",
                "DH_POST": "*fp32",
                "DH_RES": "*fp32",
                "MIX": "*fp32",
                "RSTD": "*fp32",
                "BIAS": "*fp32",
                "ALPHA_PRE": "*fp32",
                "ALPHA_POST": "*fp32",
                "ALPHA_RES": "*fp32",
                "n_tokens": "i64",
                "n_cols": "i32",
                "iterations": "i32",
                "sinkhorn_eps": "fp32",
                "post_scale": "fp32",
                "has_pre": "i32",
                "has_post": "i32",
                "has_res": "i32",
            },
            "axes": {"dz": ["bf16", "fp32"], "streams": [2, 4, 8]},
            "gives": {"streams": {2: {"WIDTH": 16}, 4: {"WIDTH": 32}, 8: {"WIDTH": 128}}},
            "aligned": [],
            "forms": {
                "tile": {
                    "function": "balance_backward",
                    "constants": ["ROWS", "STREAMS", "WIDTH"],
                }
            },
        },
        "mhc_coefficients_sums": {
            "arguments": {
                "DBIAS": "*fp32",
                "DALPHA_PRE": "*fp32",
                "DALPHA_POST": "*fp32",
                "DALPHA_RES": "*fp32",
                "PARTIALS": "*fp32",
                "parts": "i32",
            },
            "axes": {"streams": [2, 4, 8]},
            "gives": {"streams": {2: {"WIDTH": 16}, 4: {"WIDTH": 32}, 8: {"WIDTH": 128}}},
            "aligned": [],
            "forms": {"tile": {"function": "sums", "constants": ["PARTS", "STREAMS", "WIDTH"]}},
        },
        "mhc_coefficients_project_backward": {
            "arguments": {
                "DX": "*dtype",
                "PARTIALS": "*fp32",
                "DZ": "*dz",
                "FACTOR": "*fp32",
                "X": "*dtype",
                "PHI": "*weight",
                "n_tokens": "i64",
                "n_cols": "i32",
                "blocks": "i32",
                "store_dx": "i32",
                "store_dphi": "i32",
            },
            "axes": {
                "dtype": ["bf16", "fp16", "fp32"],
                "weight": ["dtype", "fp32"],
                "dz": ["bf16", "fp32"],
                "streams": [2, 4, 8],
            },
            "excluded": [
                {"dtype": ["fp16", "fp32"], "dz": ["bf16"]},
                {"weight": ["fp32"], "dz": ["bf16"]},
                {"dtype": ["bf16"], "weight": ["bf16"], "dz": ["fp32"]},
            ],
            "gives": {"streams": {2: {"WIDTH": 16}, 4: {"WIDTH": 32}, 8: {"WIDTH": 128}}},
            "aligned": ["DX", "DZ", "X", "PHI", "n_cols"],
            "forms": {
                "tile": {
                    "function": "project_backward",
                    "constants": ["ROWS", "BLOCK", "STAGES", "TF32", "REPACK", "STREAMS", "WIDTH"],
                    "defaults": {"TF32": 0, "REPACK": 0},
                    "staged": ["X"],
                },
                "pipeline": {
                    "language": "gluon",
                    "function": "project_backward_pipeline",
                    "constants": ["ROWS", "BLOCK", "STAGES"],
                    "requires": {"dz": ["bf16"], "streams": [4], "aligned": [True]},
                },
            },
        },
    },
}


@triton.jit
def product(a, b, acc, TF32: tl.constexpr):
    """acc + a @ b. 16-bit operands of one dtype as they are; fp32 beside bfloat16 in three parts; others in fp32, as
    three products of tf32 or, where TF32 is 0, by the matrix instruction for fp32."""
    if a.dtype == b.dtype and a.dtype != tl.float32:
        return tl.dot(a, b, acc)
    elif b.dtype == tl.bfloat16:
        high, middle, low = bf16_parts(a)
        return tl.dot(high, b, tl.dot(middle, b, tl.dot(low, b, acc)))
    elif a.dtype == tl.bfloat16:
        high, middle, low = bf16_parts(b)
        return tl.dot(a, high, tl.dot(a, middle, tl.dot(a, low, acc)))
    elif TF32 != 0:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="tf32x3")
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")


@triton.jit
def as_operand(x, REPACK: tl.constexpr):
    """A tile that is used by itself, too, for a product. Triton keeps such a tile in shared memory without swizzle, as
    the other use reads it, and the product's reads meet in one bank: with REPACK (PTX only) it passes through registers
    into a tile of its own."""
    if REPACK != 0:
        return repack(x)
    else:
        return x


@triton.jit
def project(
    Z, X, PHI, n_tokens, n_cols, parts,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, TF32: tl.constexpr, REPACK: tl.constexpr,
    FP16_FLUSHES: tl.constexpr, STREAMS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """ROWS tokens a program, every ``parts``-th block of their columns. Of a narrow product the tokens are the columns:
    the matrix unit takes tiles of few rows. Where float16's matrix instructions read subnormal numbers as zeros
    (FP16_FLUSHES), float16 is multiplied in float32."""
    program = tl.program_id(0)
    part = program % parts
    tokens = (program // parts).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_tokens = (tokens < n_tokens)[:, None]
    width: tl.constexpr = STREAMS * (STREAMS + 2)
    at = tl.arange(0, WIDTH)
    in_width = (at < width)[None, :]
    if WIDTH <= 32:
        z = tl.zeros([WIDTH, ROWS], tl.float32)
    else:
        z = tl.zeros([ROWS, WIDTH], tl.float32)
    squares = tl.zeros([ROWS, BLOCK // 8], tl.float32)
    for step in tl.range(part, tl.cdiv(n_cols, BLOCK), parts, num_stages=STAGES):
        cols = step * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(
            X + tokens[:, None] * n_cols + cols[None, :], mask=in_tokens & (cols < n_cols)[None, :], other=0.0
        )
        phi = tl.load(
            PHI + cols[:, None] * width + at[None, :], mask=(cols < n_cols)[:, None] & in_width, other=0.0
        )
        operand = as_operand(x, REPACK)
        if FP16_FLUSHES and x.dtype == tl.float16:
            operand = operand.to(tl.float32)
            phi = phi.to(tl.float32)
        if WIDTH <= 32:
            z = product(tl.trans(phi), tl.trans(operand), z, TF32)
        else:
            z = product(operand, phi, z, TF32)
        wide = x.to(tl.float32)
        squares += tl.sum(tl.reshape(rounded_product(wide, wide), [ROWS, BLOCK // 8, 8]), 2)
    if WIDTH <= 32:
        z = tl.trans(z)
    row = (part * n_tokens + tokens) * WIDTH
    tl.store(Z + row[:, None] + at[None, :], z, mask=in_tokens & in_width)
    tl.store(Z + row + width, tl.sum(squares, 1), mask=tokens < n_tokens)


@triton.jit
def scaled(matrix, u, v):
    return matrix * u[:, :, None] * v[:, None, :]


@triton.jit
def softmax_rows(logits):
    """Of [ROWS, STREAMS, STREAMS]."""
    e = tl.exp(logits - tl.max(logits, 2)[:, :, None])
    return e / tl.sum(e, 2)[:, :, None]


@triton.jit
def first_scales(matrix, sinkhorn_eps):
    """u and v of Sinkhorn-Knopp's first step, whose rows the softmax has divided."""
    columns = tl.sum(matrix, 1)
    return tl.full(columns.shape, 1.0, tl.float32), 1.0 / (columns + sinkhorn_eps)


@triton.jit
def next_scales(matrix, u, v, sinkhorn_eps):
    """Rows divided by their sums, then columns."""
    u = u / (u * tl.sum(rounded_product(matrix, v[:, None, :]), 2) + sinkhorn_eps)
    return u, v / (v * tl.sum(rounded_product(matrix, u[:, :, None]), 1) + sinkhorn_eps)


@triton.jit
def mix_of(Z, rstd, tokens, n_tokens, parts, at, WIDTH: tl.constexpr):
    """The product's columns ``at``, all parts added up, over the root mean square."""
    mask = tokens < n_tokens
    total = tl.load(Z + tokens * WIDTH + at, mask=mask, other=0.0)
    for part in range(1, parts):
        total += tl.load(Z + (part * n_tokens + tokens) * WIDTH + at, mask=mask, other=0.0)
    return total * rstd


@triton.jit
def balance(
    H_PRE, H_POST, H_RES, MIX, RSTD, Z, BIAS, ALPHA_PRE, ALPHA_POST, ALPHA_RES, n_tokens, n_cols, parts, iterations,
    eps, pre_eps, sinkhorn_eps, post_scale, store_mix,
    ROWS: tl.constexpr, STREAMS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """ROWS tokens a program."""
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    width: tl.constexpr = STREAMS * (STREAMS + 2)
    mean = mix_of(Z, 1.0, tokens, n_tokens, parts, width, WIDTH) / n_cols.to(tl.float32)
    rstd = tl.rsqrt(mean + eps)
    tl.store(RSTD + tokens, rstd, mask=(tokens < n_tokens) & (store_mix != 0))

    at_2d, s = tokens[:, None], tl.arange(0, STREAMS)[None, :]
    pre = mix_of(Z, rstd[:, None], at_2d, n_tokens, parts, s, WIDTH)
    post = mix_of(Z, rstd[:, None], at_2d, n_tokens, parts, s + STREAMS, WIDTH)
    mask = at_2d < n_tokens
    tl.store(MIX + at_2d * width + s, pre, mask=mask & (store_mix != 0))
    tl.store(MIX + at_2d * width + s + STREAMS, post, mask=mask & (store_mix != 0))
    pre = pre * tl.load(ALPHA_PRE) + tl.load(BIAS + s)
    post = post * tl.load(ALPHA_POST) + tl.load(BIAS + s + STREAMS)
    tl.store(H_PRE + at_2d * STREAMS + s, tl.sigmoid(pre) + pre_eps, mask=mask)
    tl.store(H_POST + at_2d * STREAMS + s, tl.sigmoid(post) * post_scale, mask=mask)

    at_3d = tokens[:, None, None]
    at = tl.arange(0, STREAMS)[None, :, None] * STREAMS + tl.arange(0, STREAMS)[None, None, :]
    res = mix_of(Z, rstd[:, None, None], at_3d, n_tokens, parts, at + 2 * STREAMS, WIDTH)
    mask = at_3d < n_tokens
    tl.store(MIX + at_3d * width + at + 2 * STREAMS, res, mask=mask & (store_mix != 0))
    res = res * tl.load(ALPHA_RES) + tl.load(BIAS + at + 2 * STREAMS)
    matrix = softmax_rows(res) + sinkhorn_eps
    u, v = first_scales(matrix, sinkhorn_eps)
    for _ in range(1, iterations):
        u, v = next_scales(matrix, u, v, sinkhorn_eps)
    tl.store(H_RES + at_3d * STREAMS * STREAMS + at, scaled(matrix, u, v), mask=mask)


@triton.jit
def logits_of(MIX, BIAS, alpha, tokens, n_tokens, at, STREAMS: tl.constexpr):
    """(mix, logits) at the columns ``at`` of the tokens' rows."""
    mix = tl.load(MIX + tokens * (STREAMS * (STREAMS + 2)) + at, mask=tokens < n_tokens, other=0.0)
    return mix, mix * alpha + tl.load(BIAS + at)


@triton.jit
def balance_backward(
    DZ, FACTOR, PARTIALS, SCALES, DH_PRE, DH_POST, DH_RES, MIX, RSTD, BIAS, ALPHA_PRE, ALPHA_POST, ALPHA_RES,
    n_tokens, n_cols, iterations, sinkhorn_eps, post_scale, has_pre, has_post, has_res,
    ROWS: tl.constexpr, STREAMS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Persistent programs, ROWS tokens a step. Stores dz, and in FACTOR what dx has of x itself; a row of WIDTH + 16
    PARTIALS has a program's sums: dbias, and from WIDTH on the three dalpha. SCALES holds u and v of every iteration
    for the tokens of a program's step."""
    program = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, STREAMS)[None, :]
    at = tl.arange(0, STREAMS)[None, :, None] * STREAMS + tl.arange(0, STREAMS)[None, None, :]
    alpha_pre, alpha_post, alpha_res = tl.load(ALPHA_PRE), tl.load(ALPHA_POST), tl.load(ALPHA_RES)
    dbias_pre = tl.zeros([ROWS, STREAMS], tl.float32)
    dbias_post = tl.zeros([ROWS, STREAMS], tl.float32)
    dbias_res = tl.zeros([ROWS, STREAMS, STREAMS], tl.float32)
    dalpha_pre = tl.zeros([ROWS, STREAMS], tl.float32)
    dalpha_post = tl.zeros([ROWS, STREAMS], tl.float32)
    dalpha_res = tl.zeros([ROWS, STREAMS, STREAMS], tl.float32)
    scales = SCALES + (program * ROWS + tl.arange(0, ROWS))[:, None] * iterations * (2 * STREAMS) + s
    for step in range(program, tl.cdiv(n_tokens, ROWS), tl.num_programs(0)):
        tokens = step * ROWS + tl.arange(0, ROWS)
        rstd = tl.load(RSTD + tokens, mask=tokens < n_tokens, other=0.0)

        at_2d, in_2d = tokens[:, None], tokens[:, None] < n_tokens
        mix_pre, pre = logits_of(MIX, BIAS, alpha_pre, at_2d, n_tokens, s, STREAMS)
        dpre = tl.load(DH_PRE + at_2d * STREAMS + s, mask=in_2d & (has_pre != 0), other=0.0)
        dpre *= tl.sigmoid(pre) * tl.sigmoid(-pre)
        mix_post, post = logits_of(MIX, BIAS, alpha_post, at_2d, n_tokens, s + STREAMS, STREAMS)
        dpost = tl.load(DH_POST + at_2d * STREAMS + s, mask=in_2d & (has_post != 0), other=0.0)
        dpost *= post_scale * tl.sigmoid(post) * tl.sigmoid(-post)

        at_3d, in_3d = tokens[:, None, None], tokens[:, None, None] < n_tokens
        mix_res, res = logits_of(MIX, BIAS, alpha_res, at_3d, n_tokens, at + 2 * STREAMS, STREAMS)
        p = softmax_rows(res)
        matrix = p + sinkhorn_eps
        u, v = first_scales(matrix, sinkhorn_eps)
        tl.store(scales, u)
        tl.store(scales + STREAMS, v)
        for t in range(1, iterations):
            u, v = next_scales(matrix, u, v, sinkhorn_eps)
            tl.store(scales + t * (2 * STREAMS), u)
            tl.store(scales + t * (2 * STREAMS) + STREAMS, v)
        tl.debug_barrier()  # a thread may read what another has stored
        g = tl.load(DH_RES + at_3d * STREAMS * STREAMS + at, mask=in_3d & (has_res != 0), other=0.0)
        for back in range(1, iterations):
            now = scales + (iterations - back) * (2 * STREAMS)
            u, v = tl.load(now), tl.load(now + STREAMS)
            u_before, v_before = tl.load(now - 2 * STREAMS), tl.load(now - STREAMS)
            # Columns, then rows: the gradient loses its mean, weighted by the result, and is divided as the matrix was.
            lost = tl.sum(rounded_product(g, scaled(matrix, u, v)), 1)
            g = (g - lost[:, None, :]) * (v / v_before)[:, None, :]
            lost = tl.sum(rounded_product(g, scaled(matrix, u, v_before)), 2)
            g = (g - lost[:, :, None]) * (u / u_before)[:, :, None]
        v = tl.load(scales + STREAMS)
        g = (g - tl.sum(rounded_product(g * matrix, v[:, None, :]), 1)[:, None, :]) * v[:, None, :]
        dres = p * (g - tl.sum(rounded_product(g, p), 2)[:, :, None])

        total = tl.sum(rounded_product(dpre, mix_pre), 1) * alpha_pre
        total += tl.sum(rounded_product(dpost, mix_post), 1) * alpha_post
        total += tl.sum(tl.sum(rounded_product(dres, mix_res), 2), 1) * alpha_res
        tl.store(FACTOR + tokens, -total * rstd * rstd / n_cols.to(tl.float32), mask=tokens < n_tokens)
        dz = DZ + at_2d * WIDTH + s
        tl.store(dz, (dpre * alpha_pre * rstd[:, None]).to(DZ.dtype.element_ty), mask=in_2d)
        tl.store(dz + STREAMS, (dpost * alpha_post * rstd[:, None]).to(DZ.dtype.element_ty), mask=in_2d)
        dz_res = (dres * alpha_res * rstd[:, None, None]).to(DZ.dtype.element_ty)
        tl.store(DZ + at_3d * WIDTH + at + 2 * STREAMS, dz_res, mask=in_3d)
        dbias_pre += dpre
        dbias_post += dpost
        dbias_res += dres
        dalpha_pre += dpre * mix_pre
        dalpha_post += dpost * mix_post
        dalpha_res += dres * mix_res
        tl.debug_barrier()  # the next step's scales lie where these do
    partials = PARTIALS + program * (WIDTH + 16)
    s = tl.arange(0, STREAMS)
    tl.store(partials + s, tl.sum(dbias_pre, 0))
    tl.store(partials + STREAMS + s, tl.sum(dbias_post, 0))
    at = s[:, None] * STREAMS + s[None, :]
    tl.store(partials + 2 * STREAMS + at, tl.sum(dbias_res, 0))
    tl.store(partials + WIDTH, tl.sum(tl.sum(dalpha_pre, 1), 0))
    tl.store(partials + WIDTH + 1, tl.sum(tl.sum(dalpha_post, 1), 0))
    tl.store(partials + WIDTH + 2, tl.sum(tl.sum(tl.sum(dalpha_res, 2), 1), 0))


@triton.jit
def sums(
    DBIAS, DALPHA_PRE, DALPHA_POST, DALPHA_RES, PARTIALS, parts,
    PARTS: tl.constexpr, STREAMS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The programs' sums added up: 16 columns a program; the last one has those of the alphas, from WIDTH on."""
    cols = tl.program_id(0) * 16 + tl.arange(0, 16)
    part = tl.arange(0, PARTS)
    total = tl.zeros([PARTS, 16], tl.float32)
    written = (cols < STREAMS * (STREAMS + 2)) | ((cols >= WIDTH) & (cols < WIDTH + 3))
    for first in range(0, parts, PARTS):
        rows = (first + part)[:, None]
        at = PARTIALS + rows * (WIDTH + 16) + cols[None, :]
        total += tl.load(at, mask=(rows < parts) & written[None, :], other=0.0)
    found = tl.sum(total, 0)
    tl.store(DBIAS + cols, found, mask=cols < STREAMS * (STREAMS + 2))
    tl.store(DALPHA_PRE + cols - WIDTH, found, mask=cols == WIDTH)
    tl.store(DALPHA_POST + cols - (WIDTH + 1), found, mask=cols == WIDTH + 1)
    tl.store(DALPHA_RES + cols - (WIDTH + 2), found, mask=cols == WIDTH + 2)


@triton.jit
def project_backward(
    DX, PARTIALS, DZ, FACTOR, X, PHI, n_tokens, n_cols, blocks, store_dx, store_dphi,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, TF32: tl.constexpr, REPACK: tl.constexpr,
    STREAMS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Persistent programs: ``blocks`` side by side have the columns, the groups of them ROWS tokens a step. A group's
    part of dphi is a row of PARTIALS. ROWS is below 64, so that both products run on the matrix unit that reads
    registers: the other would have to find x and dz in shared memory while they are used elsewhere."""
    program = tl.program_id(0)
    group = (program // blocks).to(tl.int64)
    cols = program % blocks * BLOCK + tl.arange(0, BLOCK)
    in_cols = (cols < n_cols)[None, :]
    width: tl.constexpr = STREAMS * (STREAMS + 2)
    at = tl.arange(0, WIDTH)
    mask = (at < width)[:, None] & in_cols
    phi = tl.load(PHI + cols[None, :] * width + at[:, None], mask=mask, other=0.0)
    dphi = tl.zeros([WIDTH, BLOCK], tl.float32)
    for step in tl.range(group, tl.cdiv(n_tokens, ROWS), tl.num_programs(0) // blocks, num_stages=STAGES):
        tokens = step * ROWS + tl.arange(0, ROWS)
        in_tokens = tokens < n_tokens
        in_tile = in_tokens[:, None] & in_cols
        x = tl.load(X + tokens[:, None] * n_cols + cols[None, :], mask=in_tile, other=0.0)
        dz = tl.load(
            DZ + tokens[:, None] * WIDTH + at[None, :],
            mask=in_tokens[:, None] & (at < width)[None, :],
            other=0.0,
        )
        factor = tl.load(FACTOR + tokens, mask=in_tokens, other=0.0)
        dx = product(dz, phi, factor[:, None] * x.to(tl.float32), TF32)
        at_x = DX + tokens[:, None] * n_cols + cols[None, :]
        tl.store(at_x, dx.to(DX.dtype.element_ty), mask=in_tile & (store_dx != 0))
        if WIDTH <= 32:
            dphi = product(tl.trans(dz), as_operand(x, REPACK), dphi, TF32)
        else:
            dphi += tl.trans(
                product(tl.trans(as_operand(x, REPACK)), dz, tl.zeros([BLOCK, WIDTH], tl.float32), TF32)
            )
    out = PARTIALS + group * n_cols * width + cols[None, :] * width + at[:, None]
    tl.store(out, dphi, mask=mask & (store_dphi != 0))
