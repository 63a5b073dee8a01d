"""mHC, what a layer reads: the sum of a token's streams by its weights, y[c] = sum over s of h_pre[s] * x[s, c].

Xie et al., mHC: Manifold-Constrained Hyper-Connections (2025), equation 3.
"""

import triton
import triton.language as tl

from csrc_triton.residual.streams import load_streams, stacked

DECLARATION = {
    "op": "mhc_pre",
    "kernels": {
        "mhc_pre_forward": {
            "arguments": {
                "Y": "*dtype",
                "X": "*dtype",
                "H": "*fp32",
                "x_stride": "i64",
                "n_cols": "i32",
                "blocks": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"], "streams": [2, 4, 8]},
            "aligned": ["Y", "X", "x_stride", "n_cols"],
            "forms": {"row": {"function": "forward", "constants": ["STREAMS", "BLOCK"]}},
        },
        "mhc_pre_backward": {
            "arguments": {
                "DX": "*dtype",
                "DH": "*fp32",
                "DY": "*dtype",
                "X": "*dtype",
                "H": "*fp32",
                "dy_stride": "i64",
                "x_stride": "i64",
                "n_cols": "i32",
                "store_dx": "i32",
                "store_dh": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"], "streams": [2, 4, 8]},
            "aligned": ["DX", "DY", "X", "dy_stride", "x_stride", "n_cols"],
            "forms": {
                "row": {"function": "backward", "constants": ["STREAMS", "BLOCK", "STAGES"], "staged": ["X"]}
            },
        },
    },
}


@triton.jit
def forward(Y, X, H, x_stride, n_cols, blocks, STREAMS: tl.constexpr, BLOCK: tl.constexpr):
    """A block of a token's columns a program, ``blocks`` programs side by side."""
    program = tl.program_id(0)
    token = (program // blocks).to(tl.int64)
    cols = program % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n_cols
    xs = load_streams(X, token * STREAMS, x_stride, cols, mask, STREAMS)
    y = tl.zeros([BLOCK], tl.float32)
    for s in tl.static_range(STREAMS):
        h = tl.load(H + token * STREAMS + s)
        y += h * xs[s].to(tl.float32)
    tl.store(Y + token * n_cols + cols, y.to(Y.dtype.element_ty), mask=mask)


@triton.jit
def backward(
    DX, DH, DY, X, H, dy_stride, x_stride, n_cols, store_dx, store_dh,
    STREAMS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A token a program, in blocks of columns, the next blocks' loads in flight; the streams' sums cross the program
    together at the end."""
    token = tl.program_id(0).to(tl.int64)
    row = token * STREAMS
    dots = tl.zeros([BLOCK, STREAMS], tl.float32)
    for first in tl.range(0, n_cols, BLOCK, num_stages=STAGES):
        cols = first + tl.arange(0, BLOCK)
        mask = cols < n_cols
        dy = tl.load(DY + token * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
        xs = load_streams(X, row, x_stride, cols, mask & (store_dh != 0), STREAMS)
        products = ()
        for i in tl.static_range(STREAMS):
            h = tl.load(H + row + i)
            dx = (h * dy).to(DX.dtype.element_ty)
            tl.store(DX + (row + i) * n_cols + cols, dx, mask=mask & (store_dx != 0))
            products += (dy * xs[i].to(tl.float32),)
        dots += stacked(products, STREAMS)
    tl.store(DH + row + tl.arange(0, STREAMS), tl.sum(dots, 0), mask=store_dh != 0)
