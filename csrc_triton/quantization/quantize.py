"""quantize: a tensor as 8-bit codes and scales.

One dynamic scale for a whole tensor takes two launches: ``absmax`` leaves a maximum for each of its programs, which
every program of the second then reduces.
"""

import triton
import triton.language as tl

from csrc_triton.activations.elementwise import block_of
from csrc_triton.common.pdl_begin import begin
from csrc_triton.quantization.codes import FLOOR_OF_GROUPS, encode, largest_of, scale_of
from csrc_triton.quantization.rows import AXES, BY_TOKEN, SCHEMES
from csrc_triton.quantization.values import FORMS, value_long, value_row, value_tile

DTYPES = ["bf16", "fp16", "fp32"]
FP8 = ["fp8e4nv", "fp8e4b8"]
DECLARATION = {
    "op": "quantize",
    "kernels": {
        "quantize": {
            "arguments": {
                "Q": "*out", "S": "*fp32", "X": "*dtype", "GIVEN": "*fp32", "x_stride": "i64", "s_row": "i64",
                "s_step": "i64", "n": "i64", "blocks": "i32", "has_bound": "i32", "powers": "i32",
            },
            "axes": {**AXES, "dtype": DTYPES},
            "excluded": BY_TOKEN,
            "gives": {"scheme": SCHEMES},
            "aligned": ["Q", "X", "x_stride", "n"],
            "forms": FORMS,
        },
        "quantize_absmax": {
            "arguments": {
                "PARTS": "*fp32", "X": "*dtype", "x_stride": "i64", "n": "i64", "blocks": "i32", "tiles": "i64",
            },
            "axes": {"dtype": DTYPES, "out": FP8},  # for those that have none there is no second launch
            "aligned": ["X", "x_stride", "n"],
            "forms": {
                "persistent": {
                    "function": "absmax", "constants": ["BLOCK", "PDL"], "defaults": {"PDL": 0}, "pdl": "PDL",
                },
            },
        },
        "quantize_by_parts": {
            "arguments": {
                "Q": "*out", "S": "*fp32", "X": "*dtype", "PARTS": "*fp32", "x_stride": "i64", "n": "i64",
                "blocks": "i32", "parts": "i32",
            },
            "axes": {"dtype": DTYPES, "out": FP8},
            "aligned": ["Q", "X", "x_stride", "n"],
            "forms": {
                "tile": {
                    "function": "by_parts", "constants": ["BLOCK", "PDL"], "defaults": {"PDL": 0}, "pdl": "PDL",
                },
            },
        },
    },
}  # fmt: skip


@triton.jit
def row(
    Q, S, X, GIVEN, x_stride, s_row, s_step, n, blocks, has_bound, powers,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See ``value_row``."""
    at = tl.program_id(0).to(tl.int64)
    Q += at * n
    S += at * s_row
    X += at * x_stride
    has_bound = begin(has_bound, PDL)  # no address needs it
    value_row(
        Q, S, X, None, (), GIVEN, n, has_bound, powers, False, BLOCK, BLOCKS,
        PDL,
    )  # fmt: skip


@triton.jit
def long(
    Q,
    S,
    X,
    GIVEN,
    x_stride,
    s_row,
    s_step,
    n,
    blocks,
    has_bound,
    powers,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """See ``value_long``."""
    at = tl.program_id(0).to(tl.int64)
    Q += at * n
    S += at * s_row
    X += at * x_stride
    has_bound = begin(has_bound, PDL)  # no address needs it
    value_long(
        Q, S, X, None, (), GIVEN, n, has_bound, powers, False, BLOCK, PDL
    )  # fmt: skip


@triton.jit
def tile(
    Q, S, X, GIVEN, x_stride, s_row, s_step, n, blocks, has_bound, powers,
    STATIC: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See ``value_tile``."""
    at, first, _, _ = block_of(n, blocks, BLOCK)
    group = first // (GROUP if GROUP > 0 else BLOCK)
    Q += at * n + first
    S += at * s_row + group * s_step
    X += at * x_stride + first
    has_bound = begin(has_bound, PDL)  # no address needs it
    value_tile(
        Q, S, X, None, (), GIVEN, s_step,
        n - first, has_bound, powers, False, STATIC, GROUP, BLOCK, PDL,
    )  # fmt: skip


@triton.jit
def absmax(PARTS, X, x_stride, n, blocks, tiles, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The greatest absolute value of every so many-th tile of BLOCK columns, of ``blocks`` a row."""
    blocks = begin(blocks, PDL)
    cols = tl.arange(0, BLOCK)
    greatest = tl.zeros([BLOCK], tl.float32)
    for i in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        row = i // blocks
        first = (i - row * blocks) * BLOCK
        x = tl.load(X + (row * x_stride + first) + cols, mask=cols < n - first, other=0.0).to(tl.float32)
        greatest = tl.maximum(greatest, tl.abs(x))
    tl.store(PARTS + tl.program_id(0), tl.max(greatest, 0))


@triton.jit
def by_parts(Q, S, X, PARTS, x_stride, n, blocks, parts, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Codes by the scale that the greatest of ``parts`` values gives, which the first program stores."""
    dtype: tl.constexpr = Q.dtype.element_ty
    at, first, cols, mask = block_of(n, blocks, BLOCK)
    X += at * x_stride + first
    Q += at * n + first
    parts = begin(parts, PDL)  # no address needs it
    x = tl.load(X + cols, mask=mask, other=0.0).to(tl.float32)
    greatest = tl.zeros([BLOCK], tl.float32)
    for i in range(0, parts, BLOCK):
        greatest = tl.maximum(greatest, tl.load(PARTS + i + cols, mask=i + cols < parts, other=0.0))
    s = scale_of(tl.max(greatest, 0), float("inf"), 0, FLOOR_OF_GROUPS, largest_of(dtype))
    if tl.program_id(0) == 0:
        tl.store(S, s)
    tl.store(Q + cols, encode(x * tl.div_rn(1.0, s), dtype), mask=mask)
