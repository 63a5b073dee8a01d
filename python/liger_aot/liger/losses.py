"""Liger's losses, with its names, arguments and results, on the ops.

A mean over no targets is 0, as Liger's is. Dtypes are Liger's: cross entropy's losses have the logits'; those of the
fused linear cross entropy are float32, but for its z-loss, which has the input's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, IndexOutOfRange
from liger_aot.liger.common import Function, gradients_of
from liger_aot.liger.fallback import theirs
from liger_aot.ops import guards
from liger_aot.ops.registry import load

_cross_entropy, _selective, _linear, _vocab = (
    load("cross_entropy"),
    load("selective_log_softmax"),
    load("fused_linear_cross_entropy"),
    load("vocab_parallel_cross_entropy"),
)

Losses = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]

# Autograd functions whose backward does not read their result: logits that come from them may be overwritten.
_UNREAD = frozenset(
    f"{name}Backward0"
    for name in ("Addmm", "Mm", "Bmm", "Linear", "UnsafeView", "View", "ReshapeAlias", "Clone", "ToCopy")
)


class TargetOutOfBounds(IndexOutOfRange, AssertionError):
    """Liger's is an AssertionError, which callers may catch."""


def _asserting(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, whose error for a target out of range is TargetOutOfBounds."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except IndexOutOfRange as error:
            raise TargetOutOfBounds(f"{error}: it is out of bounds") from error

    return call


class LigerCrossEntropyFunction(Function):
    """The gradient overwrites the logits, as in Liger, unless another backward might read them."""

    @staticmethod
    @_asserting
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
    if not logits.requires_grad or not logits.is_contiguous():
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


@_asserting
def cross_entropy_forward(
    _input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, lse_square_scale: float,
    label_smoothing: float, reduction: str, softcap: float | None, return_z_loss: bool,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]:  # fmt: skip
    """Logits that require a gradient are overwritten with it."""
    wanted = (return_z_loss, return_token_accuracy, return_predicted_tokens)
    _input, target, weight = tensors = guards.plain((_input, target, weight))
    settings = (
        ignore_index,
        float(label_smoothing),
        float(lse_square_scale),
        float(softcap or 0.0),
        reduction,
        *wanted,
    )
    with torch.no_grad():
        _cross_entropy.check_all(tensors, settings)
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
    """``grad_output`` is a number or one a row, of any dtype: the losses have the logits', the kernel reads float32."""
    count = _input.numel() // max(_input.shape[-1], 1)
    if grad_output.numel() not in (1, count):
        raise ArgumentError(
            f"cross_entropy: grad_output must hold one number or {count}, one a row; got {tuple(grad_output.shape)}"
        )
    grad = grad_output.to(_input.device, torch.float32)
    _cross_entropy.rescale(_input, grad.reshape(() if grad.numel() == 1 else _input.shape[:-1]))
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
        found: Tensor = _selective(logits[:, :-1], input_ids[:, -tokens:], temperature=temperature)
    return found if mask is None else torch.where(mask[:, -tokens:].bool(), found, 0.0)


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
    "LigerVocabParallelCEFunction": (LigerVocabParallelCEFunction, "vocab_parallel_cross_entropy"),
}
