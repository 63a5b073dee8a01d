"""How far a result may lie off its fp64 reference: the profile's count of unit roundoffs, times their size."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

# Half the distance of 1.0 to the next number: the largest relative error of one rounding.
UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
# Absolute error of a rounding among the subnormals; bf16 and fp32 may be flushed to zero below their least normal.
LEAST = {torch.bfloat16: 2.0**-126, torch.float16: 2.0**-25, torch.float32: 2.0**-126}
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# Of the plain-torch references on the CPU: fp32 sums in another order, one rounding at the end.
REFERENCE = {"bf16": 1.05, "fp16": 1.05, "fp32": 32.0}


def worst(
    got: Tensor,
    exact: Tensor,
    allowed: Mapping[str, float],
    *,
    roundings: int = 1,
    magnitude: Tensor | None = None,
    scale: Tensor | float = 1.0,
    largest: Tensor | None = None,
) -> float:
    """The largest error of ``got`` as a fraction of what is allowed; NaN counts as infinite. Past the greatest number
    of got's dtype an infinity is right.

    Args:
        got: the result.
        exact: its reference in float64.
        allowed: unit roundoffs by dtype name, from the profile.
        roundings: to got's dtype on the way.
        magnitude: sum of the absolute values of the terms that were added in fp32; default ``exact.abs()``.
        scale: what an intermediate that was rounded to got's dtype was multiplied by: its subnormals' errors grow.
        largest: how large the intermediates that were rounded to got's dtype may be: where that is past its greatest
            number, what is not finite is right.
    """
    assert got.shape == exact.shape and exact.dtype == torch.float64
    if not got.numel():
        return 0.0
    size = exact.abs()
    terms = size if magnitude is None else magnitude
    limit = (
        allowed[NAMES[got.dtype]] * roundings * UNIT_ROUNDOFF[got.dtype] * size
        + allowed["fp32"] * UNIT_ROUNDOFF[torch.float32] * terms
        + LEAST[got.dtype] * scale
    )
    ratio = (got.double() - exact).abs() / limit
    past = got.isinf() & (got.sign() == exact.sign()) & (size + limit > torch.finfo(got.dtype).max)
    if largest is not None:
        past |= ~got.isfinite() & (largest > torch.finfo(got.dtype).max)
    ratio = torch.where(past, 0.0, ratio)
    return float(torch.where(torch.isnan(ratio), torch.inf, ratio).max())
