"""Residual addition, RMSNorm and quantisation in one pass: fused_add_rmsnorm and quantize."""

import triton
import triton.language as tl

from csrc_triton.common.pdl_begin import begin
from csrc_triton.quantization.rows import AXES, BY_TOKEN, NORM_FORMS, SCHEMES, norm_long, norm_row

DECLARATION = {
    "op": "fused_add_rmsnorm_quantize",
    "kernels": {
        "fused_add_rmsnorm_quantize": {
            "arguments": {
                "Q": "*out", "S": "*fp32", "SUM": "*dtype", "X": "*dtype", "RESIDUAL": "*dtype",
                "W": "*dtype", "GIVEN": "*fp32", "sum_stride": "i64", "x_stride": "i64",
                "residual_stride": "i64", "s_row": "i64", "s_step": "i64", "n": "i32", "eps": "fp32",
                "offset": "fp32", "w_kind": "i32", "round_first": "i32", "has_bound": "i32", "powers": "i32",
            },
            "axes": AXES,
            "excluded": BY_TOKEN,
            "gives": {"scheme": SCHEMES},
            "aligned": [
                "Q", "SUM", "X", "RESIDUAL", "W", "sum_stride", "x_stride", "residual_stride", "n",
            ],
            "forms": NORM_FORMS,
        },
    },
}  # fmt: skip


@triton.jit
def row(
    Q, S, SUM, X, RESIDUAL, W, GIVEN, sum_stride, x_stride, residual_stride, s_row, s_step, n, eps, offset,
    w_kind, round_first, has_bound, powers,
    STATIC: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See ``norm_row``."""
    at = tl.program_id(0).to(tl.int64)
    Q += at * n
    S += at * s_row
    SUM += at * sum_stride
    X += at * x_stride
    RESIDUAL += at * residual_stride
    powers = begin(powers, PDL)  # no address needs it
    norm_row(
        Q, S, SUM, X,
        RESIDUAL, W, None, GIVEN, s_step, n, eps, offset, w_kind, 0, round_first,
        has_bound, powers, False, STATIC, GROUP, BLOCK, BLOCKS, PDL,
    )  # fmt: skip


@triton.jit
def long(
    Q, S, SUM, X, RESIDUAL, W, GIVEN, sum_stride, x_stride, residual_stride, s_row, s_step, n, eps, offset,
    w_kind, round_first, has_bound, powers,
    STATIC: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See ``norm_long``."""
    at = tl.program_id(0).to(tl.int64)
    Q += at * n
    S += at * s_row
    SUM += at * sum_stride
    X += at * x_stride
    RESIDUAL += at * residual_stride
    powers = begin(powers, PDL)  # no address needs it
    norm_long(
        Q, S, SUM, X,
        RESIDUAL, W, None, GIVEN, s_step, n, eps, offset, w_kind, 0, round_first,
        has_bound, powers, False, STATIC, GROUP, BLOCK, PDL,
    )  # fmt: skip
