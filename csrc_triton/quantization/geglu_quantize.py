"""GeGLU with 8-bit codes as its result: geglu and quantize in one pass."""

import triton
import triton.language as tl

from csrc_triton.activations.elementwise import block_of
from csrc_triton.common.pdl_begin import begin
from csrc_triton.quantization.rows import AXES, BY_TOKEN, SCHEMES
from csrc_triton.quantization.values import FORMS, value_long, value_row, value_tile

DECLARATION = {
    "op": "geglu_quantize",
    "kernels": {
        "geglu_quantize": {
            "arguments": {
                "Q": "*out", "S": "*fp32", "GATE": "*dtype", "UP": "*dtype", "GIVEN": "*fp32", "gate_stride": "i64",
                "up_stride": "i64", "s_row": "i64", "s_step": "i64", "n": "i64", "blocks": "i32", "has_bound": "i32",
                "powers": "i32", "exact": "i32",
            },
            "axes": AXES,
            "excluded": BY_TOKEN,
            "gives": {"scheme": SCHEMES},
            "aligned": ["Q", "GATE", "UP", "gate_stride", "up_stride", "n"],
            "forms": FORMS,
        },
    },
}  # fmt: skip


@triton.jit
def row(
    Q, S, GATE, UP, GIVEN, gate_stride, up_stride, s_row, s_step, n, blocks, has_bound, powers, exact,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See ``value_row``."""
    at = tl.program_id(0).to(tl.int64)
    Q += at * n
    S += at * s_row
    GATE += at * gate_stride
    UP += at * up_stride
    has_bound = begin(has_bound, PDL)  # no address needs it
    value_row(
        Q, S, GATE, UP, (exact,), GIVEN, n,
        has_bound, powers, True, BLOCK, BLOCKS, PDL,
    )  # fmt: skip


@triton.jit
def long(
    Q, S, GATE, UP, GIVEN, gate_stride, up_stride, s_row, s_step, n, blocks, has_bound, powers, exact,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See ``value_long``."""
    at = tl.program_id(0).to(tl.int64)
    Q += at * n
    S += at * s_row
    GATE += at * gate_stride
    UP += at * up_stride
    has_bound = begin(has_bound, PDL)  # no address needs it
    value_long(
        Q, S, GATE, UP, (exact,), GIVEN, n,
        has_bound, powers, True, BLOCK, PDL,
    )  # fmt: skip


@triton.jit
def tile(
    Q, S, GATE, UP, GIVEN, gate_stride, up_stride, s_row, s_step, n, blocks, has_bound, powers, exact,
    STATIC: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See ``value_tile``."""
    at, first, _, _ = block_of(n, blocks, BLOCK)
    group = first // (GROUP if GROUP > 0 else BLOCK)
    Q += at * n + first
    S += at * s_row + group * s_step
    GATE += at * gate_stride + first
    UP += at * up_stride + first
    has_bound = begin(has_bound, PDL)  # no address needs it
    value_tile(
        Q, S, GATE,
        UP, (exact,), GIVEN, s_step, n - first, has_bound, powers, True,
        STATIC, GROUP, BLOCK, PDL,
    )  # fmt: skip
