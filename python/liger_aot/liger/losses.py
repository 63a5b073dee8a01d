"""Liger's losses, with its names, arguments and results, on the ops.

A mean over no targets is 0, as Liger's is. Dtypes are Liger's: cross entropy's losses have the logits'; those of the
fused linear cross entropy are float32, but for its z-loss, which has the input's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling

from liger_aot.errors import ArgumentError
from liger_aot.liger.common import Function, gradients_of
from liger_aot.liger.fallback import theirs
from liger_aot.ops.post_training.policy_loss import NORMALIZED
from liger_aot.ops.registry import load
from liger_aot.ops.token_mask import KINDS

_cross_entropy, _selective, _linear, _vocab, _grpo = (
    load("cross_entropy"),
    load("selective_log_softmax"),
    load("fused_linear_cross_entropy"),
    load("vocab_parallel_cross_entropy"),
    load("grpo_loss"),
)

Losses = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]

# Autograd functions whose backward does not read their result: logits that come from them may be overwritten.
_UNREAD = frozenset(
    f"{name}Backward0"
    for name in ("Addmm", "Mm", "Bmm", "Linear", "UnsafeView", "View", "ReshapeAlias", "Clone", "ToCopy")
)


class LigerCrossEntropyFunction(Function):
    """The gradient overwrites the logits, as in Liger, unless another backward might read them."""

    @staticmethod
    def call(
        _input: Tensor,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> Losses:
        found = _cross_entropy(
            _input,
            target,
            weight,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            lse_square_scale=lse_square_scale,
            softcap=softcap,
            reduction=reduction,
            return_z_loss=return_z_loss,
            return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
            inplace_grad=_may_be_overwritten(_input),
        )
        wanted = (return_z_loss, return_token_accuracy, return_predicted_tokens)
        return _optional_results(found, wanted, reduction, target, ignore_index, (_input.dtype, _input.dtype))


def _may_be_overwritten(logits: Tensor) -> bool:
    if is_compiling() or not logits.requires_grad or not logits.is_contiguous():
        return False
    base = logits._base if logits._is_view() else logits
    makers = (logits.grad_fn, None if base is None else base.grad_fn)
    return all(maker is not None and maker.name() in _UNREAD for maker in makers)


def _optional_results(
    found: Any,
    wanted: tuple[bool, bool, bool],
    reduction: str,
    target: Tensor,
    ignore_index: int,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> Losses:
    """(loss, z-loss, accuracy, predicted tokens), None where not wanted for; the first two of ``dtypes``."""
    loss, *others = found if isinstance(found, tuple) else (found,)
    rest = iter(others)
    z_loss, accuracy, predicted = (next(rest) if want else None for want in wanted)
    if reduction == "mean":
        any_target = (target != ignore_index).any()
        loss, z_loss = (
            None if t is None else torch.where(any_target, t, t.new_zeros(())) for t in (loss, z_loss)
        )
    z_loss = None if z_loss is None else z_loss.to(dtypes[1])
    return loss.to(dtypes[0]), z_loss, accuracy, predicted


def cross_entropy_forward(
    _input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, lse_square_scale: float,
    label_smoothing: float, reduction: str, softcap: float | None, return_z_loss: bool,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]:  # fmt: skip
    """Logits that require a gradient are overwritten with it."""
    wanted = (return_z_loss, return_token_accuracy, return_predicted_tokens)
    tensors = (_input, target, weight)
    settings = (
        ignore_index,
        float(label_smoothing),
        float(lse_square_scale),
        float(softcap or 0.0),
        reduction,
        *wanted,
    )
    with torch.no_grad():
        _cross_entropy.check(tensors, settings)
        if _input.requires_grad:
            contiguous = _input.detach().contiguous()
            results = _cross_entropy.overwrite((contiguous, target, weight), settings)
        else:
            contiguous = _input
            results = _cross_entropy.run_forward(tensors, settings, False, None)
        found = tuple(r for r, ask in zip(results[:4], (True, *wanted), strict=True) if ask)
        dtypes = (_input.dtype, _input.dtype)
        return *_optional_results(found, wanted, reduction, target, ignore_index, dtypes), contiguous


def cross_entropy_backward(_input: Tensor, grad_output: Tensor) -> Tensor:
    _cross_entropy.rescale(_input, grad_output)
    return _input


class LigerFusedLinearCrossEntropyFunction(Function):
    """The op chooses the chunks' size: ``ce_impl``, ``ce_mode`` and ``chunk_mem_const`` are ignored."""

    supports_inner_impl_dispatch = False

    @staticmethod
    def call(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        ce_impl: str | None = None,
        ce_mode: str | None = None,
        chunk_mem_const: int = 1,
    ) -> Losses:
        found = _linear(
            _input,
            weight,
            target,
            bias,
            class_weight=ce_weight,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            lse_square_scale=lse_square_scale,
            softcap=softcap,
            reduction=reduction,
            weight_grad_dtype=accum_dtype,
            use_token_scaling=use_token_scaling,
            return_z_loss=return_z_loss,
            return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens,
        )
        wanted = (return_z_loss, return_token_accuracy, return_predicted_tokens)
        return _optional_results(
            found, wanted, reduction, target, ignore_index, (torch.float32, _input.dtype)
        )


def fused_linear_cross_entropy_forward(
    _input: Tensor, weight: Tensor, target: Tensor, ce_weight: Tensor | None = None, bias: Tensor | None = None,
    ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
    softcap: float | None = None, return_z_loss: bool = False, accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    ce_impl: str | None = None, ce_mode: str | None = None, token_grad_output: Tensor | None = None,
    compute_gradients: bool | None = None, weight_requires_grad: bool | None = None, chunk_mem_const: int = 1,
) -> tuple[Any, ...]:  # fmt: skip
    """(loss, z-loss, accuracy, predicted tokens, gradients of _input, weight and bias)."""
    compute = _input.requires_grad if compute_gradients is None else compute_gradients
    of_weight = compute and (weight.requires_grad if weight_requires_grad is None else weight_requires_grad)
    x, w = _input.detach().requires_grad_(compute), weight.detach().requires_grad_(of_weight)
    b = None if bias is None else bias.detach().requires_grad_(compute)
    with torch.enable_grad():
        outputs = LigerFusedLinearCrossEntropyFunction.call(
            x, w, target, b, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap,
            return_z_loss, accum_dtype, use_token_scaling, return_token_accuracy, return_predicted_tokens,
        )  # fmt: skip
    gradients = gradients_of(outputs[0], (x, w, b), token_grad_output)
    if gradients[0] is None:
        gradients = (torch.zeros_like(_input), *gradients[1:])
    return *(None if t is None else t.detach() for t in outputs), *gradients


def fused_linear_cross_entropy_backward(
    grad_output: Tensor, grad_input: Tensor, grad_weight: Tensor | None, grad_bias: Tensor | None
) -> tuple[Tensor | None, ...]:
    return tuple(None if g is None else g.mul_(grad_output) for g in (grad_input, grad_weight, grad_bias))


class LigerVocabParallelCEFunction(Function):
    """Label smoothing averaged over each rank's own part ("partition") stays Liger's."""

    @staticmethod
    def call(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        tp_group: Any,
        ignore_index: int | None,
        label_smoothing: float,
        label_smoothing_formula: str,
        label_smoothing_mode: str,
    ) -> Tensor:
        ranks = tp_group.size() if tp_group is not None and hasattr(tp_group, "size") else 1
        if label_smoothing > 0 and label_smoothing_mode != "global" and ranks > 1:
            loss_by_liger: Tensor = theirs["LigerVocabParallelCEFunction"].apply(
                vocab_parallel_logits, target, tp_group, ignore_index, label_smoothing, label_smoothing_formula,
                label_smoothing_mode,
            )  # fmt: skip
            return loss_by_liger
        vocabulary = vocab_parallel_logits.shape[-1] * ranks
        if label_smoothing > 0 and label_smoothing_formula == "megatron":
            label_smoothing *= vocabulary / (vocabulary - 1)
        options: dict[str, Any] = {
            "ignore_index": -100 if ignore_index is None else ignore_index,
            "label_smoothing": label_smoothing,
            "reduction": "none",
        }
        loss: Tensor = (
            _vocab(vocab_parallel_logits, target, group=tp_group, **options)
            if ranks > 1
            else _cross_entropy(vocab_parallel_logits, target, **options)
        )
        return loss


def fused_selective_log_softmax(
    logits: Tensor, input_ids: Tensor, temperature: float = 0.9, mask: Tensor | None = None
) -> Tensor:
    """The log-probabilities of the last tokens of ``input_ids`` by the logits before each, 0 where ``mask`` is 0.

    Args:
        logits: (batch, tokens + 1, vocabulary): those after the last token are not read.
        input_ids, mask: (batch, at least tokens).

    Returns:
        float32 (batch, tokens), without a gradient.
    """
    tokens = logits.shape[1] - 1
    with torch.no_grad():
        found: Tensor = _selective(
            logits,
            input_ids[:, -tokens:],
            None if mask is None else _token_mask(mask[:, -tokens:]),
            temperature=temperature,
            drop_last=True,
        )
    return found


def _token_mask(mask: Tensor) -> Tensor:
    """The mask in a dtype that the ops take."""
    return mask if mask.dtype in KINDS else mask != 0


class GrpoLossFunction(Function):
    """Gradients are the loss's own, also where Liger's leave something out: a delta below 1 + eps_high, and before
    0.8.5, at the sequence level, masks and the corrected divergence. The gradient overwrites the logits unless another
    backward might read them."""

    @staticmethod
    def call(
        logits: Tensor,
        old_logp: Tensor | None,
        ref_logp: Tensor | None,
        completion_ids: Tensor,
        advantages: Tensor,
        completion_mask: Tensor | None,
        temperature: float,
        beta: float,
        eps_low: float,
        eps_high: float,
        inplace: bool,
        loss_type: str = "grpo",
        max_completion_length: int | None = None,
        reduce: bool = True,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        vllm_is_ratio: Tensor | None = None,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        num_items_in_batch: float | Tensor | None = None,
        phi_seq: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        if importance_sampling_level == "sequence" and loss_type in ("cispo", "sapo", "vespo"):
            raise ArgumentError(
                f"Sequence-level importance sampling is not supported for loss_type={loss_type!r}. Use "
                "importance_sampling_level='token' instead."
            )
        if loss_type == "vespo" and phi_seq is None:
            raise ArgumentError(
                "loss_type='vespo' requires phi_seq pre-computed (use the triton_grpo_loss wrapper)."
            )
        mask = None if completion_mask is None else _token_mask(completion_mask)
        normalizer = None
        if reduce and loss_type in NORMALIZED:
            normalizer = _tokens_of_all_ranks(completion_ids, mask, num_items_in_batch)
        found: tuple[Tensor, Tensor | None, Tensor] = _grpo(
            logits,
            _single(old_logp),
            _single(ref_logp),
            completion_ids,
            _single(advantages),
            mask,
            _single(vllm_is_ratio),
            temperature=temperature,
            inplace_grad=bool(inplace) and _may_be_overwritten(logits),
            loss_type=loss_type,
            importance_sampling_level=importance_sampling_level,
            reduction="mean" if reduce else "none",
            beta=beta,
            eps_low=eps_low,
            eps_high=eps_high,
            delta=delta,
            use_bias_correction_kl=use_bias_correction_kl,
            max_completion_length=max_completion_length,
            normalizer=normalizer,
            sequence_weight=None if loss_type != "vespo" else _single(phi_seq),
            sapo_temperature_pos=sapo_temperature_pos,
            sapo_temperature_neg=sapo_temperature_neg,
        )
        return found


def _single(t: Tensor | None) -> Tensor | None:
    return t.float() if isinstance(t, Tensor) and t.dtype == torch.float64 else t


def _tokens_of_all_ranks(
    completion_ids: Tensor, mask: Tensor | None, given: float | Tensor | None
) -> Tensor | None:
    """What DAPO's mean divides by on each rank: the tokens of the whole batch over the ranks. On a single rank, None
    for those of the mask."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    ranks = dist.get_world_size() if several else 1
    if isinstance(given, Tensor):
        return given.to(device=completion_ids.device, dtype=torch.float32).reshape(()) / ranks
    if given is not None:
        return torch.full((), float(given) / ranks, device=completion_ids.device)
    if not several:
        return None
    tokens = torch.ones_like(completion_ids) if mask is None else mask != 0
    total = tokens.sum(dtype=torch.float32)
    dist.all_reduce(total)
    return total / ranks


NAMES: dict[str, tuple[Any, str]] = {  # Liger's name -> what stands for it, and the op behind that
    "LigerCrossEntropyFunction": (LigerCrossEntropyFunction, "cross_entropy"),
    "cross_entropy_forward": (cross_entropy_forward, "cross_entropy"),
    "cross_entropy_backward": (cross_entropy_backward, "cross_entropy"),
    "LigerFusedLinearCrossEntropyFunction": (
        LigerFusedLinearCrossEntropyFunction,
        "fused_linear_cross_entropy",
    ),
    "fused_linear_cross_entropy_forward": (fused_linear_cross_entropy_forward, "fused_linear_cross_entropy"),
    "fused_linear_cross_entropy_backward": (
        fused_linear_cross_entropy_backward,
        "fused_linear_cross_entropy",
    ),
    "fused_selective_log_softmax": (fused_selective_log_softmax, "selective_log_softmax"),
    "GrpoLossFunction": (GrpoLossFunction, "grpo_loss"),
    "LigerVocabParallelCEFunction": (LigerVocabParallelCEFunction, "vocab_parallel_cross_entropy"),
}
