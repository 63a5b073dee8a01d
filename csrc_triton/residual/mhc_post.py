"""mHC, what a layer leaves: a token's streams mixed by a matrix, and the layer's result added to each by a weight,
y[o, c] = sum over i of h_res[o, i] * x[i, c] + h_post[o] * f[c].

Xie et al., mHC: Manifold-Constrained Hyper-Connections (2025), equation 3.
"""

import triton
import triton.language as tl

from csrc_triton.residual.streams import load_streams, stacked, sums_by_eight

DECLARATION = {
    "op": "mhc_post",
    "kernels": {
        "mhc_post_forward": {
            "arguments": {
                "Y": "*dtype",
                "X": "*dtype",
                "F": "*dtype",
                "H_POST": "*fp32",
                "H_RES": "*fp32",
                "x_stride": "i64",
                "f_stride": "i64",
                "n_cols": "i32",
                "blocks": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"], "streams": [2, 4, 8]},
            "aligned": ["Y", "X", "F", "x_stride", "f_stride", "n_cols"],
            "forms": {"row": {"function": "forward", "constants": ["STREAMS", "BLOCK"]}},
        },
        "mhc_post_backward": {
            "arguments": {
                "DX": "*dtype",
                "DF": "*dtype",
                "DH_POST": "*fp32",
                "DH_RES": "*fp32",
                "DY": "*dtype",
                "X": "*dtype",
                "F": "*dtype",
                "H_POST": "*fp32",
                "H_RES": "*fp32",
                "dy_stride": "i64",
                "x_stride": "i64",
                "f_stride": "i64",
                "n_cols": "i32",
                "store_dx": "i32",
                "store_df": "i32",
                "store_dh_post": "i32",
                "store_dh_res": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"], "streams": [2, 4, 8]},
            "gives": {"streams": {2: {"SUMS": 8}, 4: {"SUMS": 32}, 8: {"SUMS": 128}}},
            "aligned": ["DX", "DF", "DY", "X", "F", "dy_stride", "x_stride", "f_stride", "n_cols"],
            "forms": {"row": {"function": "backward", "constants": ["STREAMS", "SUMS", "BLOCK"]}},
        },
    },
}


@triton.jit
def forward(
    Y, X, F, H_POST, H_RES, x_stride, f_stride, n_cols, blocks,
    STREAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of a token's columns a program, ``blocks`` programs side by side."""
    program = tl.program_id(0)
    token = (program // blocks).to(tl.int64)
    row = token * STREAMS
    cols = program % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols
    xs = load_streams(X, row, x_stride, cols, mask, STREAMS)
    f = tl.load(F + token * f_stride + cols, mask=mask, other=0.0).to(tl.float32)
    for o in tl.static_range(STREAMS):
        y = f * tl.load(H_POST + row + o)
        for i in tl.static_range(STREAMS):
            h = tl.load(H_RES + (row + o) * STREAMS + i)
            y += h * xs[i].to(tl.float32)
        tl.store(Y + (row + o) * n_cols + cols, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def backward(
    DX, DF, DH_POST, DH_RES, DY, X, F, H_POST, H_RES, dy_stride, x_stride, f_stride, n_cols,
    store_dx, store_df, store_dh_post, store_dh_res,
    STREAMS: tl.constexpr, SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A token a program, in blocks of columns. The dot products of all pairs of streams, then those with f, are SUMS
    columns of one tensor, which a thread adds up alone until the end; those past them are zeros."""
    token = tl.program_id(0).to(tl.int64)
    row = token * STREAMS
    sums = tl.zeros([BLOCK // 8, SUMS], tl.float32)
    for first in range(0, n_cols, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        mask = cols < n_cols
        dys = load_streams(DY, row, dy_stride, cols, mask, STREAMS)
        xs = load_streams(X, row, x_stride, cols, mask & (store_dh_res != 0), STREAMS)
        f = tl.load(F + token * f_stride + cols, mask=mask & (store_dh_post != 0), other=0.0).to(tl.float32)
        df = tl.zeros([BLOCK], tl.float32)
        for o in tl.static_range(STREAMS):
            df += dys[o].to(tl.float32) * tl.load(H_POST + row + o)
        tl.store(DF + token * n_cols + cols, df.to(DF.dtype.element_ty), mask=mask & (store_df != 0))
        for i in tl.static_range(STREAMS):
            dx = tl.zeros([BLOCK], tl.float32)
            for o in tl.static_range(STREAMS):
                h = tl.load(H_RES + (row + o) * STREAMS + i)
                dx += h * dys[o].to(tl.float32)
            tl.store(DX + (row + i) * n_cols + cols, dx.to(DX.dtype.element_ty), mask=mask & (store_dx != 0))
        products = ()
        for o in tl.static_range(STREAMS):
            for i in tl.static_range(STREAMS):
                products += (sums_by_eight(dys[o].to(tl.float32) * xs[i].to(tl.float32)),)
        for o in tl.static_range(STREAMS):
            products += (sums_by_eight(dys[o].to(tl.float32) * f),)
        for _ in tl.static_range(SUMS - STREAMS * (STREAMS + 1)):
            products += (tl.zeros([BLOCK // 8], tl.float32),)
        sums += stacked(products, SUMS)
    total = tl.sum(sums, 0)
    at = tl.arange(0, SUMS)
    pairs = STREAMS * STREAMS
    tl.store(DH_RES + row * STREAMS + at, total, mask=(at < pairs) & (store_dh_res != 0))
    of_post = (at >= pairs) & (at < pairs + STREAMS) & (store_dh_post != 0)
    tl.store(DH_POST + row + at - pairs, total, mask=of_post)
