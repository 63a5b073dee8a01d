"""Modules of the losses, which ``liger_aot.nn`` hands out. Names and arguments are torch.nn's where it has the module,
else Liger-Kernel's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from liger_aot.ops.losses._chunks import BUDGET
from liger_aot.ops.registry import load


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """``torch.nn.CrossEntropyLoss`` on ``liger_aot.load("cross_entropy")``, with the classes in the last dimension.

    Args:
        weight, ignore_index, reduction, label_smoothing: as torch.nn.CrossEntropyLoss.
        lse_square_scale, softcap, inplace_grad: as the op says.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        lse_square_scale: float = 0.0,
        softcap: float | None = None,
        inplace_grad: bool = False,
    ) -> None:
        super().__init__(
            weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
        self.lse_square_scale, self.softcap, self.inplace_grad = lse_square_scale, softcap, inplace_grad
        self._op = load("cross_entropy")

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """input (..., classes), target (...) int64 or int32; a float32 scalar, or target's shape for "none"."""
        loss: Tensor = self._op(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            lse_square_scale=self.lse_square_scale,
            softcap=self.softcap,
            reduction=self.reduction,
            inplace_grad=self.inplace_grad,
        )
        return loss


class FusedLinearCrossEntropyLoss(nn.Module):
    """Cross entropy of a linear layer whose weight it is given, as Liger's:
    ``liger_aot.load("fused_linear_cross_entropy")``.

    Args:
        class_weight: (vocabulary,) or None; a buffer that no checkpoint holds.
        ignore_index, label_smoothing, lse_square_scale, softcap, reduction, chunk_bytes, weight_grad_dtype,
            use_token_scaling, return_z_loss, return_token_accuracy, return_predicted_tokens: as the op's.
    """

    class_weight: Tensor | None

    def __init__(self, class_weight: Tensor | None = None, **options: Any) -> None:
        super().__init__()
        self.register_buffer("class_weight", class_weight, persistent=False)
        self.options = options
        self._op = load("fused_linear_cross_entropy")

    def forward(self, weight: Tensor, input: Tensor, target: Tensor, bias: Tensor | None = None) -> Any:
        """weight (vocabulary, k), input (..., k), target (...); the op's result."""
        return self._op(input, weight, target, bias, class_weight=self.class_weight, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class KLDivLoss(nn.KLDivLoss):
    """``torch.nn.KLDivLoss`` on ``liger_aot.load("kl_div")``.

    Args:
        reduction, log_target: as torch.nn.KLDivLoss.
        eps: the least target that a logarithm is taken of.
    """

    def __init__(self, reduction: str = "mean", log_target: bool = False, *, eps: float = 1e-10) -> None:
        super().__init__(reduction=reduction, log_target=log_target)
        self.eps = eps
        self._op = load("kl_div")

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Both (..., n); a float32 scalar, or input's shape for "none"."""
        loss: Tensor = self._op(
            input, target, reduction=self.reduction, log_target=self.log_target, eps=self.eps
        )
        return loss


class JSD(nn.Module):
    """Generalised Jensen-Shannon divergence: ``liger_aot.load("jsd")``.

    Args:
        beta: the teacher's weight, from 0 to 1.
        ignore_index: the label of rows that do not count.
    """

    def __init__(self, beta: float = 0.5, ignore_index: int = -100) -> None:
        super().__init__()
        self.beta, self.ignore_index = beta, ignore_index
        self._op = load("jsd")

    def forward(self, log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        """The student's and the teacher's log-probabilities (..., n), labels (...); a float32 scalar."""
        loss: Tensor = self._op(log_q, log_p, shift_labels, beta=self.beta, ignore_index=self.ignore_index)
        return loss

    def extra_repr(self) -> str:
        return f"beta={self.beta}, ignore_index={self.ignore_index}"


class TVDLoss(nn.Module):
    """Total variation distance: ``liger_aot.load("tvd")``.

    Args:
        reduction: "batchmean", "mean", "sum" or "none".
        ignore_index: the label of rows that do not count.
    """

    def __init__(self, reduction: str = "batchmean", ignore_index: int = -100) -> None:
        super().__init__()
        self.reduction, self.ignore_index = reduction, ignore_index
        self._op = load("tvd")

    def forward(self, p: Tensor, q: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        """The student's and the teacher's probabilities (..., n), labels (...); a float32 scalar, or p's shape for
        "none"."""
        loss: Tensor = self._op(p, q, shift_labels, reduction=self.reduction, ignore_index=self.ignore_index)
        return loss

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, ignore_index={self.ignore_index}"


class FusedLinearJSD(nn.Module):
    """``JSD`` of two linear layers whose weights it is given: ``liger_aot.load("fused_linear_jsd")``.

    Args:
        jsd_beta, ignore_index, temperature, chunk_bytes, weight_grad_dtype: as the op's.
    """

    def __init__(
        self,
        jsd_beta: float = 0.5,
        ignore_index: int = -100,
        temperature: float = 1.0,
        *,
        chunk_bytes: int = BUDGET,
        weight_grad_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.jsd_beta, self.ignore_index, self.temperature = jsd_beta, ignore_index, temperature
        self.chunk_bytes, self.weight_grad_dtype = chunk_bytes, weight_grad_dtype
        self._op = load("fused_linear_jsd")

    def forward(
        self,
        student_input: Tensor,
        student_weight: Tensor,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        shift_labels: Tensor | None = None,
        student_bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Tensor:
        """Inputs (..., k) and (..., j), weights (vocabulary, k) and (vocabulary, j), labels (...), biases
        (vocabulary,); a float32 scalar."""
        loss: Tensor = self._op(
            student_input,
            student_weight,
            teacher_input,
            teacher_weight,
            shift_labels,
            student_bias,
            teacher_bias,
            jsd_beta=self.jsd_beta,
            ignore_index=self.ignore_index,
            temperature=self.temperature,
            chunk_bytes=self.chunk_bytes,
            weight_grad_dtype=self.weight_grad_dtype,
        )
        return loss

    def extra_repr(self) -> str:
        return f"jsd_beta={self.jsd_beta}, ignore_index={self.ignore_index}, temperature={self.temperature}"
