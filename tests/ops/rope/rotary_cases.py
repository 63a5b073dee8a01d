"""What the tests of the rotary ops share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.harness.op_cases import Case, Draw, Exact


def q_and_k(case: Case, draw: Draw, layout: str) -> list[Tensor]:
    """q of the case's shape, and k of ``k`` heads (default 2); ``transposed`` as models do it: heads from one
    projection, then moved before the sequence."""
    heads = 1 if layout == "bhsd" else 2
    made = []
    for count in (case.shape[heads], case.get("k", 2)):
        shape = list(case.shape)
        shape[heads] = count
        if case.get("transposed"):
            made.append(draw.rows(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2))
        else:
            made.append(draw.rows(*shape))
    return made


def magnitudes(exact: Exact, rotated: Callable[[Tensor, int], Tensor]) -> Mapping[str, Mapping[str, Any]]:
    """Each result is a sum of two products, which may cancel: without signs, one of the two rotations adds them.

    Args:
        rotated: a tensor by the tables' absolute values, the sines' times 1 or -1.
    """
    given = {"q_out": exact.inputs["q"], "k_out": exact.inputs["k"]}
    given |= dict(zip(("dq", "dk"), exact.grads, strict=True))
    return {
        name: {"magnitude": torch.maximum(rotated(x.abs(), 1), rotated(x.abs(), -1))}
        for name, x in given.items()
        if x is not None
    }


def by_complex_numbers(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The first columns of x, taken as complex numbers, times cos + i sin; the others as they are."""
    half = cos.shape[-1]
    of_pairs: Sequence[int] = (half, 2) if interleaved else (2, half)
    real, imaginary = x[..., : 2 * half].unflatten(-1, of_pairs).unbind(-1 if interleaved else -2)
    y = torch.complex(real, imaginary) * torch.complex(cos, sin)
    turned = torch.stack((y.real, y.imag), -1 if interleaved else -2).flatten(-2)
    return torch.cat((turned, x[..., 2 * half :]), -1)
