"""Liger's divergences, with its names, arguments and results, on the ops.

Dtypes are Liger's: a loss of JSD has the input's, the others float32. Targets and teachers are detached, as no gradient
goes to them; a target of another dtype than the input is compared in the wider of the two.
"""

from __future__ import annotations

from math import log
from typing import Any

import torch
from torch import Tensor

from liger_aot.liger.common import Function, gradients_of
from liger_aot.ops.registry import load

LN_2 = log(2)
_jsd, _linear_jsd, _kl_div, _tvd = load("jsd"), load("fused_linear_jsd"), load("kl_div"), load("tvd")
_linear_kl, _ce_tvd = load("fused_linear_kl_div"), load("cross_entropy_tvd")


def _of_one_dtype(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider dtype, the target detached."""
    dtype = torch.promote_types(x.dtype, target.dtype)
    return x.to(dtype), target.detach().to(dtype)


class LigerJSDFunction(Function):
    @staticmethod
    def call(
        _input: Tensor,
        target: Tensor,
        shift_labels: Tensor | None = None,
        beta: float = 0.5,
        ignore_index: int = -100,
        jsd_impl: str | None = None,
        jsd_mode: str | None = None,
    ) -> Tensor:
        x, target = _of_one_dtype(_input, target)
        loss: Tensor = _jsd(x, target, shift_labels, beta=beta, ignore_index=ignore_index)
        return loss.to(_input.dtype)


def jsd_forward(
    _input: Tensor, target: Tensor, shift_labels: Tensor | None, beta: float, ignore_index: int, has_label: bool,
    jsd_impl: str | None = None, jsd_mode: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The loss and its gradient."""
    x = _input.detach().requires_grad_()
    with torch.enable_grad():
        loss = LigerJSDFunction.call(x, target, shift_labels if has_label else None, beta, ignore_index)
    (dx,) = gradients_of(loss, (x,))
    assert dx is not None
    return loss.detach(), dx


def jsd_backward(dX: Tensor, grad_output: Tensor) -> Tensor:
    return dX * grad_output


class LigerFusedLinearJSDFunction(Function):
    @staticmethod
    def call(
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        shift_labels: Tensor | None = None,
        jsd_beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None,
        jsd_impl: str | None = None,
        jsd_mode: str | None = None,
    ) -> Tensor:
        loss: Tensor = _linear_jsd(
            student_input,
            student_weight,
            teacher_input.detach(),
            teacher_weight.detach(),
            shift_labels,
            jsd_beta=jsd_beta,
            ignore_index=ignore_index,
            temperature=temperature,
            weight_grad_dtype=accum_dtype,
        )
        return loss


def fused_linear_jsd_forward(
    student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
    shift_labels: Tensor | None, jsd_beta: float, ignore_index: int, has_label: bool, temperature: float,
    jsd_impl: str | None = None, jsd_mode: str | None = None, accum_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The loss and the gradients of the student's input and, where that requires one, weight."""
    x = student_input.detach().requires_grad_()
    w = student_weight.detach().requires_grad_(student_weight.requires_grad)
    with torch.enable_grad():
        loss = LigerFusedLinearJSDFunction.call(
            x, w, teacher_input, teacher_weight, shift_labels if has_label else None, jsd_beta, ignore_index,
            temperature, accum_dtype,
        )  # fmt: skip
    dx, dw = gradients_of(loss, (x, w))
    return loss.detach(), dx, dw


def fused_linear_jsd_backward(
    grad_output: Tensor, grad_input: Tensor, grad_weight: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    return grad_input.mul_(grad_output), None if grad_weight is None else grad_weight.mul_(grad_output)


class LigerKLDivLossFunction(Function):
    @staticmethod
    def call(
        y_pred: Tensor,
        y_true: Tensor,
        reduction: str = "batchmean",
        log_target: bool = False,
        eps: float = 1e-10,
    ) -> Tensor:
        y_pred, y_true = _of_one_dtype(y_pred, y_true)
        loss: Tensor = _kl_div(y_pred, y_true, reduction=reduction, log_target=log_target, eps=eps)
        return loss


class LigerTVDLossFunction(Function):
    @staticmethod
    def call(
        p: Tensor,
        q: Tensor,
        shift_labels: Tensor | None = None,
        reduction: str = "batchmean",
        ignore_index: int = -100,
    ) -> Tensor:
        p, q = _of_one_dtype(p, q)
        loss: Tensor = _tvd(p, q, shift_labels, reduction=reduction, ignore_index=ignore_index)
        return loss


class LigerFusedLinearKLDivFunction(Function):
    @staticmethod
    def call(
        student_input: Tensor,
        student_weight: Tensor,
        target: Tensor,
        shift_labels: Tensor | None = None,
        reduction: str = "batchmean",
        ignore_index: int = -100,
        temperature: float = 1.0,
        eps: float = 1e-10,
        accum_dtype: torch.dtype | None = None,
    ) -> Tensor:
        if reduction not in ("batchmean", "mean", "sum"):
            raise ValueError(f"reduction must be one of ('batchmean', 'mean', 'sum'), got {reduction!r}")
        if target.dtype not in (student_input.dtype, torch.float32):
            target = target.float()
        loss: Tensor = _linear_kl(
            student_input,
            student_weight,
            target,
            shift_labels,
            reduction=reduction,
            ignore_index=ignore_index,
            temperature=temperature,
            eps=eps,
            weight_grad_dtype=accum_dtype,
        )
        return loss


def fused_linear_kl_div_forward(
    student_input: Tensor, student_weight: Tensor, target: Tensor, shift_labels: Tensor | None, reduction: str,
    ignore_index: int, has_label: bool, temperature: float, eps: float, accum_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The loss and the gradients of the student's input and, where that requires one, weight."""
    x = student_input.detach().requires_grad_()
    w = student_weight.detach().requires_grad_(student_weight.requires_grad)
    with torch.enable_grad():
        loss = LigerFusedLinearKLDivFunction.call(
            x, w, target, shift_labels if has_label else None, reduction, ignore_index, temperature, eps, accum_dtype
        )  # fmt: skip
    dx, dw = gradients_of(loss, (x, w))
    return loss.detach(), dx, dw


def fused_linear_kl_div_backward(
    grad_output: Tensor, grad_input: Tensor, grad_weight: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    return grad_input.mul_(grad_output), None if grad_weight is None else grad_weight.mul_(grad_output)


class LigerFusedCETVDFunction(Function):
    @staticmethod
    def call(
        student_logits: Tensor, teacher_logits: Tensor, target: Tensor, ignore_index: int = -100
    ) -> tuple[Tensor, Tensor]:
        """Liger's errors, which are ValueErrors as all of this package's arguments' are."""
        if student_logits.ndim != 2:
            raise ValueError(f"student_logits must be 2D (BT, V). Got {student_logits.ndim}D.")
        if student_logits.shape != teacher_logits.shape:
            raise ValueError(
                "student_logits and teacher_logits must have the same shape. Got "
                f"{tuple(student_logits.shape)} and {tuple(teacher_logits.shape)}."
            )
        if target.shape != student_logits.shape[:1]:
            raise ValueError(
                f"target must have shape ({student_logits.shape[0]},). Got {tuple(target.shape)}."
            )
        x, teacher = _of_one_dtype(student_logits, teacher_logits)
        found: tuple[Tensor, Tensor] = _ce_tvd(x, teacher, target, ignore_index=ignore_index)
        return found


def fused_ce_tvd_forward(
    student_logits: Tensor, teacher_logits: Tensor, target: Tensor, ignore_index: int
) -> tuple[Tensor, ...]:
    """Cross entropy, distance, the student's and the teacher's log-sum-exps, and what the backward needs beside them;
    the last three are not set where the target is ignored."""
    x, teacher = _of_one_dtype(student_logits, teacher_logits)
    with torch.no_grad():
        ce, tvd, sums = _ce_tvd.run_forward((x, teacher, target), (ignore_index,), True, None)
        return ce, tvd, *(sums[:, i] + sums[:, i + 1] * LN_2 for i in (0, 2)), sums[:, 4].contiguous()


def fused_ce_tvd_backward(
    grad_ce: Tensor, grad_tvd: Tensor, student_logits: Tensor, teacher_logits: Tensor, target: Tensor,
    student_lse: Tensor, teacher_lse: Tensor, sigma: Tensor, ignore_index: int,
) -> Tensor:  # fmt: skip
    x, teacher = _of_one_dtype(student_logits, teacher_logits)
    zero = torch.zeros_like(sigma)
    sums = torch.stack((student_lse, zero, teacher_lse, zero, sigma), 1)
    grads = grad_ce.float(), grad_tvd.float()
    with torch.no_grad():
        needed = (True, False, False)
        gradient: Tensor = _ce_tvd.run_backward(grads, (x, teacher, target, sums), (ignore_index,), needed)[0]
        return gradient.to(student_logits.dtype)


NAMES: dict[str, tuple[Any, str]] = {  # Liger's name -> its replacement, and the op that this calls
    "LigerJSDFunction": (LigerJSDFunction, "jsd"),
    "jsd_forward": (jsd_forward, "jsd"),
    "jsd_backward": (jsd_backward, "jsd"),
    "LigerFusedLinearJSDFunction": (LigerFusedLinearJSDFunction, "fused_linear_jsd"),
    "fused_linear_jsd_forward": (fused_linear_jsd_forward, "fused_linear_jsd"),
    "fused_linear_jsd_backward": (fused_linear_jsd_backward, "fused_linear_jsd"),
    "LigerKLDivLossFunction": (LigerKLDivLossFunction, "kl_div"),
    "LigerTVDLossFunction": (LigerTVDLossFunction, "tvd"),
    "LigerFusedLinearKLDivFunction": (LigerFusedLinearKLDivFunction, "fused_linear_kl_div"),
    "fused_linear_kl_div_forward": (fused_linear_kl_div_forward, "fused_linear_kl_div"),
    "fused_linear_kl_div_backward": (fused_linear_kl_div_backward, "fused_linear_kl_div"),
    "LigerFusedCETVDFunction": (LigerFusedCETVDFunction, "cross_entropy_tvd"),
    "fused_ce_tvd_forward": (fused_ce_tvd_forward, "cross_entropy_tvd"),
    "fused_ce_tvd_backward": (fused_ce_tvd_backward, "cross_entropy_tvd"),
}
