"""Optional vectors of the norms (weight, bias, scale, shift) as kernels take them: an address and a kind."""

from __future__ import annotations

from torch import Tensor

from liger_aot.runtime.layout import FP32, Rows, rows_of

# Kinds of csrc_triton/norms/norm_vectors.py: there is none, it is of x's dtype, it is float32 where x is not.
ABSENT, NARROW, WIDE = 0, 1, 2
# A size that only the last row of a table holds, the one for any length. Where others take no WIDE vector, it does.
ANY_LENGTH = (1 << 31) - 1


def kind_of(vector: Rows, x: Rows) -> int | None:
    """NARROW or WIDE where a vector lies on x's device and is of its dtype or float32, else None."""
    if vector[1:3] != x[1:3]:
        return None
    if vector[3:5] == x[3:5]:
        return NARROW
    return WIDE if vector[3:5] == FP32 else None


def weight_and_bias(
    x: Rows, n: int, weight: Tensor | None, bias: Tensor | None
) -> tuple[int, int, int, int] | None:
    """The addresses of weight and bias, and their kinds. None where they are not vectors of n elements that fit x."""
    w_at = b_at = w_kind = b_kind = ABSENT
    if weight is not None:
        in_w = rows_of(weight)
        if in_w is None or in_w[6] != n or in_w[1:3] != x[1:3] or weight.dim() != 1:
            return None
        w_at, w_kind = in_w[0], NARROW if in_w[3:5] == x[3:5] else WIDE
        if w_kind == WIDE and in_w[3:5] != FP32:
            return None
    if bias is not None:
        in_b = rows_of(bias)
        if in_b is None or in_b[6] != n or in_b[1:3] != x[1:3] or bias.dim() != 1:
            return None
        b_at, b_kind = in_b[0], NARROW if in_b[3:5] == x[3:5] else WIDE
        if b_kind == WIDE and in_b[3:5] != FP32:
            return None
    return w_at, b_at, w_kind, b_kind
