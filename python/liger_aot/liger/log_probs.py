"""Liger's scaled cross entropy, the per-token loss and entropy of RL trainers, on ``fused_linear_log_probs``.

Liger's ``LigerFusedLinearScaledCrossEntropyFunction`` and its tensor-parallel form choose an implementation by device;
what stands here is what they choose from, so their own checks of arguments stay.

A target out of range is found without waiting for a GPU: its loss is NaN and the next call raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_aot.liger.common import Function
from liger_aot.ops.registry import load

_log_probs = load("fused_linear_log_probs")


class _FusedLinearPPOFallbackFunction(Function):
    """The negative log-probabilities (rows,) float32 and, where asked for, the entropies in the input's dtype and the
    log-probabilities (rows, k) float32 of the selected tokens, 0 in ignored rows."""

    @staticmethod
    def call(
        hidden_states: Tensor,
        vocab_weights: Tensor,
        input_ids: Tensor,
        temperature: float,
        ignore_index: int,
        return_entropy: bool,
        selected_token_ids: Tensor | None = None,
    ) -> Any:
        log_probs, entropy, lse = _log_probs(
            hidden_states, vocab_weights, input_ids, temperature=float(temperature), ignore_index=ignore_index,
            return_entropy=True, return_lse=True,
        )  # fmt: skip
        outputs = [-log_probs]
        if return_entropy:
            outputs.append(entropy.to(hidden_states.dtype))
        if selected_token_ids is not None:
            scores = (hidden_states @ vocab_weights[selected_token_ids].t()).float() / temperature
            counts = (input_ids != ignore_index).unsqueeze(-1)
            outputs.append(torch.where(counts, scores - lse.unsqueeze(-1), 0.0))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


class LigerFusedScaledCrossEntropySM90Function(Function):
    """The same on Hopper. ``m_tiles_per_cluster`` is without effect, as it is in Liger."""

    @staticmethod
    def call(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        temperature: float = 1.0,
        ignore_index: int = -100,
        m_tiles_per_cluster: int = 1,
        return_entropy: bool = False,
        selected_token_ids: Tensor | None = None,
    ) -> Any:
        arguments = (_input, weight, target, temperature, ignore_index, return_entropy, selected_token_ids)
        return _FusedLinearPPOFallbackFunction.apply(*arguments)  # type: ignore[no-untyped-call]


class _TensorParallelFusedLinearPPOFallbackFunction(Function):
    """Each rank holds as many rows of the weight; see ``group`` of the op. Both results are float32, as Liger's."""

    @staticmethod
    def call(
        hidden_states: Tensor,
        vocab_weights: Tensor,
        input_ids: Tensor,
        temperature: float,
        ignore_index: int,
        return_entropy: bool,
        process_group: Any,
    ) -> Any:
        log_probs, entropy = _log_probs(
            hidden_states, vocab_weights, input_ids, temperature=float(temperature), ignore_index=ignore_index,
            return_entropy=True, group=process_group,
        )  # fmt: skip
        return (-log_probs, entropy) if return_entropy else -log_probs


def _load_sm90_function() -> type[LigerFusedScaledCrossEntropySM90Function]:
    return LigerFusedScaledCrossEntropySM90Function


def _load_native_tp_function() -> None:
    """None: ours is at the place of the other one."""


OP = "fused_linear_log_probs"
NAMES: dict[str, tuple[Any, str]] = {  # Liger's name -> what stands for it, and the op behind that
    "_FusedLinearPPOFallbackFunction": (_FusedLinearPPOFallbackFunction, OP),
    "_TensorParallelFusedLinearPPOFallbackFunction": (
        _TensorParallelFusedLinearPPOFallbackFunction,
        OP,
    ),
    "_load_sm90_function": (_load_sm90_function, OP),
    "_load_native_tp_function": (_load_native_tp_function, OP),
}
