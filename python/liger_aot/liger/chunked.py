"""Liger's chunked losses (``liger_kernel.chunked_loss``), with its names, arguments and results, on the ops.

Its modules (``LigerFusedLinearDPOLoss`` ...) are Liger's own: they call these functions. What is left without effect:
``compiled``, as nothing compiles, and ``chunk_size``, as the ops choose it. Results are Liger's: float32, and only the
loss has a gradient.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from liger_aot.liger.common import Function
from liger_aot.ops.registry import load

_preference, _grpo, _distillation = (
    load("fused_linear_preference_loss"),
    load("fused_linear_grpo_loss"),
    load("fused_linear_distillation_loss"),
)
PREFIX = "chunked_loss."  # of these names in ``fallback.theirs``: Liger has two that are called JSD
Results = tuple[Tensor, tuple[Tensor, ...]]


def _pairs(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    *reference: Tensor | None,
    compute_nll_loss: bool,
    alpha: float = 1.0,
    **settings: Any,
) -> Results:
    """(loss, (log-probabilities of chosen and of rejected sequences, mean logits of both, likelihood, rewards of
    both))."""
    found = _preference(
        _input, weight, target, bias, *reference, nll_weight=alpha if compute_nll_loss else 0.0, **settings
    )
    half = target.shape[0] // 2
    logits = found.logits_mean.view(2, half).mean(1)
    nll = found.nll_loss if compute_nll_loss else torch.zeros_like(found.nll_loss)
    aux = (found.logps[:half], found.logps[half:], logits[0], logits[1], nll)
    return found.loss, (*aux, found.rewards[:half], found.rewards[half:])


class LigerFusedLinearDPOFunction(Function):
    prefix = PREFIX

    @staticmethod
    def call(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        ignore_index: int = -100,
        beta: float = 0.1,
        compute_nll_loss: bool = False,
        compiled: bool = True,
        use_ref_model: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        loss_type: str = "sigmoid",
        label_smoothing: float = 0.0,
        discopop_tau: float = 0.05,
        alpha: float = 1.0,
    ) -> Results:
        if loss_type == "ipo":
            raise NotImplementedError("loss_type='ipo' is not yet supported by Liger's DPO")
        reference = (ref_input, ref_weight, ref_bias) if use_ref_model else (None, None, None)
        smoothed = loss_type in ("exo_pair", "robust")
        return _pairs(
            _input, weight, target, bias, *reference, compute_nll_loss=compute_nll_loss, alpha=alpha,
            ignore_index=ignore_index, beta=beta, average_log_prob=average_log_prob, loss_type=loss_type,
            label_smoothing=label_smoothing if smoothed else 0.0, discopop_tau=discopop_tau,
        )  # fmt: skip


class LigerFusedLinearCPOFunction(Function):
    prefix = PREFIX

    @staticmethod
    def call(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
    ) -> Results:
        return _pairs(
            _input, weight, target, bias, compute_nll_loss=compute_nll_loss, alpha=alpha, ignore_index=ignore_index,
            beta=beta, label_smoothing=label_smoothing, average_log_prob=average_log_prob,
        )  # fmt: skip


class LigerFusedLinearSimPOFunction(Function):
    prefix = PREFIX

    @staticmethod
    def call(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = False,
        compiled: bool = True,
        gamma: float = 0.5,
        chunk_size: int = 1,
    ) -> Results:
        return _pairs(
            _input, weight, target, bias, compute_nll_loss=compute_nll_loss, alpha=alpha, ignore_index=ignore_index,
            beta=beta, label_smoothing=label_smoothing, margin=gamma, average_log_prob=True,
        )  # fmt: skip


class LigerFusedLinearORPOFunction(Function):
    prefix = PREFIX

    @staticmethod
    def call(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ignore_index: int = -100,
        beta: float = 0.1,
        compute_nll_loss: bool = True,
        nll_target: Tensor | None = None,
        compiled: bool = True,
        chunk_size: int = 1,
    ) -> Results:
        loss, aux = _pairs(
            _input, weight, target, bias, compute_nll_loss=compute_nll_loss, ignore_index=ignore_index, beta=beta,
            nll_target=nll_target if compute_nll_loss else None, average_log_prob=True, loss_type="odds_ratio",
        )  # fmt: skip
        with torch.no_grad():
            odds = (logps - (-torch.expm1(logps)).log() for logps in aux[:2])
            log_odds = torch.sub(*odds)
            ratio = torch.nn.functional.logsigmoid(log_odds).mean()
            return loss, (*aux, ratio, log_odds.mean())


class LigerFusedLinearKTOFunction(Function):
    prefix = PREFIX

    @staticmethod
    def call(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        preference_labels: Tensor,
        bias: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        kl: Tensor | None = None,
        ignore_index: int = -100,
        beta: float = 0.1,
        compiled: bool = True,
        use_ref_model: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
    ) -> Results:
        """(loss, sums over the chosen and the rejected sequences: their log-probabilities, logits and rewards)."""
        reference = (ref_input, ref_weight, ref_bias) if use_ref_model else (None, None, None)
        chosen = preference_labels.bool()
        found = _preference(
            _input, weight, target, bias, *reference, preference_labels=chosen, kl=kl, loss_type="kto", beta=beta,
            ignore_index=ignore_index, average_log_prob=average_log_prob,
        )  # fmt: skip
        with torch.no_grad():
            logits = found.logits_mean * (target.shape[1] * weight.shape[0])
            of_each = torch.stack((found.logps, logits, found.rewards))
            sums = torch.where(torch.stack((chosen, ~chosen)).unsqueeze(1), of_each, 0).sum(-1)  # (2, 3)
            return found.loss, sums.t().reshape(-1).unbind(0)


class LigerFusedLinearGRPOFunction(Function):
    prefix = PREFIX

    @staticmethod
    def call(
        _input: Tensor,
        weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        beta: float = 0.04,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        vllm_is_ratio: Tensor | None = None,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
        num_items_in_batch: Tensor | float | None = None,
    ) -> Results:
        """(loss, (divergence from the reference where beta is not 0, the share of clipped tokens))."""
        _check_grpo(loss_type, importance_sampling_level, max_completion_length)
        if use_ref_model and ref_per_token_logps is None and ref_input is None:
            raise AssertionError(
                "If use_ref_model is True, ref_per_token_logps or ref_input must be provided"
            )
        if use_ref_model and ref_per_token_logps is not None and ref_input is not None:
            warnings.warn(
                "Both ref_per_token_logps and ref_input are provided. Using ref_per_token_logps.",
                stacklevel=3,
            )
        computed = use_ref_model and ref_per_token_logps is None
        gate: dict[str, float] = {}
        if loss_type == "sapo":
            gate = {
                "sapo_temperature_pos": float(sapo_temperature_pos),
                "sapo_temperature_neg": float(sapo_temperature_neg),
            }
        normalizer = None
        if loss_type in ("dapo", "cispo", "vespo"):
            normalizer = _normalizer(attention_mask, num_items_in_batch)
        found = _grpo(
            _input, weight, selected_token_ids, advantages, attention_mask != 0, bias,
            ref_per_token_logps if use_ref_model else None, old_per_token_logps,
            *((ref_input, ref_weight, ref_bias) if computed else (None, None, None)), vllm_is_ratio, normalizer,
            loss_type=loss_type, importance_sampling_level=importance_sampling_level, beta=beta,
            epsilon_low=epsilon_low, epsilon_high=epsilon_high, delta=delta, temperature=float(temperature),
            max_completion_length=max_completion_length if loss_type == "dr_grpo" else None,
            use_bias_correction_kl=use_bias_correction_kl, vespo_k_pos=vespo_k_pos, vespo_lambda_pos=vespo_lambda_pos,
            vespo_k_neg=vespo_k_neg, vespo_lambda_neg=vespo_lambda_neg, **gate,
        )  # fmt: skip
        return found.loss, (found.kl, found.clip_ratio) if beta else (found.clip_ratio,)


def _check_grpo(loss_type: str, level: str, max_completion_length: int | None) -> None:
    """Liger's errors."""
    if level == "sequence" and loss_type in ("cispo", "sapo", "vespo"):
        raise ValueError(
            f"Sequence-level importance sampling is not supported for loss_type='{loss_type}'. Use "
            "importance_sampling_level='token' instead."
        )
    if loss_type == "dr_grpo" and max_completion_length is None:
        raise AssertionError("max_completion_length must be provided for loss_type 'dr_grpo'")


def _normalizer(mask: Tensor, items: Tensor | float | None) -> Tensor | None:
    """What the token-level losses divide by: an equal share, for each process, of the counted tokens of all. None is
    those of this process."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    ranks = torch.distributed.get_world_size() if distributed else 1
    if isinstance(items, Tensor):
        return items.detach().to(mask.device, torch.float32).reshape(()) / ranks
    if items is not None:
        return torch.full((), float(items) / ranks, dtype=torch.float32, device=mask.device)
    if ranks == 1:
        return None
    count = (mask != 0).sum(dtype=torch.float32)
    torch.distributed.all_reduce(count)
    return count / ranks


def _distilled(
    soft_loss: str,
    tensors: tuple[Tensor | None, ...],
    weights: tuple[float, float],
    factor: float,
    returned: bool,
    **settings: Any,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    hard, soft = weights
    found = _distillation(
        *tensors, soft_loss=soft_loss, weight_hard_loss=hard, weight_soft_loss=soft * factor, **settings
    )
    loss: Tensor = found.loss
    return (loss, found.soft_loss * factor, found.hard_loss) if returned else loss


class LigerFusedLinearJSDFunction(Function):
    prefix = PREFIX

    @staticmethod
    def call(
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        true_labels: Tensor,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        tensors = (
            student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias,
        )  # fmt: skip
        weights = (weight_hard_loss, weight_soft_loss)
        return _distilled(
            "jsd", tensors, weights, 1.0, return_soft_hard_loss, beta=beta, ignore_index=ignore_index,
            temperature=temperature,
        )  # fmt: skip


class LigerFusedLinearCosineSimilarityFunction(Function):
    prefix = PREFIX

    @staticmethod
    def call(
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        true_labels: Tensor,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
        weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5,
        beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        compiled: bool = True,
        chunk_size: int = 1024,
        return_soft_hard_loss: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """``beta`` is what the soft loss is multiplied by."""
        tensors = (
            student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias,
        )  # fmt: skip
        weights = (weight_hard_loss, weight_soft_loss)
        return _distilled(
            "cosine", tensors, weights, beta, return_soft_hard_loss, ignore_index=ignore_index, temperature=temperature
        )  # fmt: skip


_FUNCTIONS: dict[
    str, tuple[type[Function], str]
] = {  # a word of Liger's functional -> what stands for it, and the op
    "dpo": (LigerFusedLinearDPOFunction, "fused_linear_preference_loss"),
    "cpo": (LigerFusedLinearCPOFunction, "fused_linear_preference_loss"),
    "simpo": (LigerFusedLinearSimPOFunction, "fused_linear_preference_loss"),
    "orpo": (LigerFusedLinearORPOFunction, "fused_linear_preference_loss"),
    "kto": (LigerFusedLinearKTOFunction, "fused_linear_preference_loss"),
    "grpo": (LigerFusedLinearGRPOFunction, "fused_linear_grpo_loss"),
    "jsd": (LigerFusedLinearJSDFunction, "fused_linear_distillation_loss"),
    "cosine": (LigerFusedLinearCosineSimilarityFunction, "fused_linear_distillation_loss"),
}
NAMES: dict[str, tuple[Any, str]] = {  # Liger's name -> what stands for it, and the op behind that
    name: row
    for word, (function, op) in _FUNCTIONS.items()
    for name, row in (
        (function.__name__, (function, op)),
        (f"liger_fused_linear_{word}", (function.apply, op)),
    )
}
