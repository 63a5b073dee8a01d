"""Liger's fused mixture of experts, with its name, arguments and result, on the op."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from liger_aot.liger.common import Function
from liger_aot.ops.registry import load

_fused_moe = load("fused_moe")


class LigerFusedMoEFunction(Function):
    """What ``LigerExperts`` calls. Nothing is timed at the first call, and nothing waits for the device."""

    @staticmethod
    def call(
        x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        y: Tensor = _fused_moe(x, gate_up_proj, down_proj, top_k_index, top_k_weights)
        return y


NAMES: dict[str, tuple[Any, str]] = {"LigerFusedMoEFunction": (LigerFusedMoEFunction, "fused_moe")}
