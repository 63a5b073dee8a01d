"""Liger-Kernel's own functions, which run its own Triton kernels, in float32."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import liger_aot
import liger_aot.liger
from liger_aot.liger import fallback
from liger_aot.triton.recorder import TARGET
from tests.models.liger_cases import CASES, Case, randn
from tests.triton_packs.projects.calls import Call

# Sums of at most a few hundred products of rounded values, an exponential or a root between: 2^-24 for each rounding,
# of which there are at most a few dozens.
SLACK = 2.0**-18
# Where Liger leaves tl.dot to its default, tf32: both factors are cut to 11 significant bits, some of them twice.
TF32 = 2.0**-8
_BY_TF32 = ("LigerMHCCoeffsFunction", "LigerFusedMoEFunction", "LigerFusedNeighborhoodAttentionFunction")
_BY_TF32 += ("LigerMLPFunction",)

_OWN = dict(fallback.theirs)
liger_aot.liger.uninstall()  # the cases' module puts liger-aot's functions in the place of these


# Where Liger's own takes less than what stands for it here: a bias that is a number; matrices of 16 columns or more.
_ARGUMENTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "LigerPolyNormFunction": lambda: (randn(7, 24), randn(3), randn(), 1e-6, False),
    "LigerFusedNeighborhoodAttentionFunction": lambda: (*(randn(1, 2, 40, 32) for _ in range(3)), 5, 2),
}
_ONCE = "LigerFusedNeighborhoodAttentionFunction"  # the cases differ by what is replaced
_LOSS_ALONE = (
    "LigerCrossEntropyFunction",
    "LigerFusedLinearCrossEntropyFunction",
)  # has a gradient, z-loss has none


def _theirs(case: Case) -> Callable[..., Any]:
    own: Any = _OWN[case.name]
    return lambda *arguments: own.apply(*arguments)


def _plain(case: Case) -> Callable[..., Any]:
    """A case's plain torch; two of them call the one op that they have no short form of, which takes no float64."""

    def plain(*arguments: Any) -> Any:
        with patch.object(liger_aot, "load", {"sparsemax": _sparsemax}.__getitem__):
            return case.plain(*arguments)

    return plain


def _sparsemax(x: Tensor) -> Tensor:
    """Over the last dimension: what is left of x above a threshold, such that it sums to 1."""
    ordered = x.sort(-1, descending=True).values
    over = (ordered.cumsum(-1) - 1) / torch.arange(1, x.shape[-1] + 1, dtype=x.dtype)
    count = (ordered > over).sum(-1, keepdim=True)
    return (x - over.gather(-1, count - 1)).clamp(min=0)


def calls() -> list[Call]:
    if os.environ.get(TARGET):
        _route_while_recording()
    made: list[Call] = []
    for number, case in enumerate(CASES):
        if case.name == _ONCE and CASES[number - 1].name == _ONCE:
            continue
        made.append(
            Call(
                f"{case.name.removeprefix('Liger').removesuffix('Function')} {number}",
                _ARGUMENTS.get(case.name, case.arguments),
                _theirs(case),
                _plain(case),
                TF32 if case.name in _BY_TF32 else SLACK,
                1 if case.name in _LOSS_ALONE else None,
            )
        )
    return made


def _route_while_recording() -> None:
    """The mixture of experts reads on the host how many tiles a kernel counted, and launches none where there are none:
    while no kernel runs, one."""
    from liger_kernel.ops import fused_moe

    route = fused_moe.compute_routing_metadata

    def routed(*arguments: Any, **named: Any) -> Any:
        with patch.object(torch.Tensor, "item", lambda tensor: 1):
            return route(*arguments, **named)

    fused_moe.compute_routing_metadata = routed
