"""LayerNorm with 8-bit codes as its result: layernorm and quantize in one pass. Ba, Kiros and Hinton (2016)."""

import triton
import triton.language as tl

from csrc_triton.common.pdl_begin import begin
from csrc_triton.quantization.rows import AXES, BY_TOKEN, NORM_FORMS, SCHEMES, norm_long, norm_row

DECLARATION = {
    "op": "layernorm_quantize",
    "kernels": {
        "layernorm_quantize": {
            "arguments": {
                "Q": "*out", "S": "*fp32", "X": "*dtype", "W": "*dtype", "B": "*dtype", "GIVEN": "*fp32",
                "x_stride": "i64", "s_row": "i64", "s_step": "i64", "n": "i32", "eps": "fp32",
                "offset": "fp32", "w_kind": "i32", "b_kind": "i32", "has_bound": "i32", "powers": "i32",
            },
            "axes": AXES,
            "excluded": BY_TOKEN,
            "gives": {"scheme": SCHEMES},
            "aligned": [
                "Q", "X", "W", "B", "x_stride", "n",
            ],
            "forms": NORM_FORMS,
        },
    },
}  # fmt: skip


@triton.jit
def row(
    Q, S, X, W, B, GIVEN, x_stride, s_row, s_step, n, eps, offset, w_kind, b_kind, has_bound, powers,
    STATIC: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See ``norm_row``."""
    at = tl.program_id(0).to(tl.int64)
    Q += at * n
    S += at * s_row
    X += at * x_stride
    powers = begin(powers, PDL)  # no address needs it
    norm_row(
        Q, S, None, X, None, W, B, GIVEN, s_step, n, eps, offset,
        w_kind, b_kind, 0, has_bound, powers, True, STATIC, GROUP, BLOCK, BLOCKS, PDL,
    )  # fmt: skip


@triton.jit
def long(
    Q, S, X, W, B, GIVEN, x_stride, s_row, s_step, n, eps, offset, w_kind, b_kind, has_bound, powers,
    STATIC: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See ``norm_long``."""
    at = tl.program_id(0).to(tl.int64)
    Q += at * n
    S += at * s_row
    X += at * x_stride
    powers = begin(powers, PDL)  # no address needs it
    norm_long(
        Q, S, None, X, None, W, B, GIVEN, s_step, n, eps, offset,
        w_kind, b_kind, 0, has_bound, powers, True, STATIC, GROUP, BLOCK, PDL,
    )  # fmt: skip
