"""Parameters and tables as the ops take them beside an input."""

from __future__ import annotations

from torch import Tensor, float32


def fitting(parameter: Tensor | None, x: Tensor) -> Tensor | None:
    """As an op takes it beside x: of x's dtype or float32."""
    if parameter is None or parameter.dtype == x.dtype or parameter.dtype == float32:
        return parameter
    return parameter.float()
