"""How the kernels of RMSNorm's relatives are told of an optional vector."""

from __future__ import annotations

from liger_aot.runtime.layout import FP32, Rows

# What a kernel is told of an optional vector: csrc_triton/norms/norm_vectors.py.
ABSENT, NARROW, WIDE = 0, 1, 2


def kind_of(vector: Rows, x: Rows) -> int | None:
    """NARROW or WIDE where a vector lies on x's device and is of its dtype or float32, else None."""
    if vector[1:3] != x[1:3]:
        return None
    if vector[3:5] == x[3:5]:
        return NARROW
    return WIDE if vector[3:5] == FP32 else None
