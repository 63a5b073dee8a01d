"""Modules over the ops: torch.nn's names, arguments, parameters and state_dict keys where it has the module, else
Liger-Kernel's.

The former are subclasses of torch.nn's modules, so initialisation, ``extra_repr``, ``isinstance`` and checkpoints work
as before: only ``forward`` is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from liger_aot.errors import ArgumentError
from liger_aot.ops.losses._linear import BUDGET
from liger_aot.ops.registry import load

Shape = int | Sequence[int]
Where = torch.device | str | None


class RMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` on ``liger_aot.load("rmsnorm")``.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as torch.nn.RMSNorm; ``eps=None`` is the machine
            epsilon of x's dtype.
        offset: added to the weight (1.0 for Gemma).
        casting_mode: "none", as torch, rounds once; "llama" and "gemma" as the op says.
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Where = None,
        dtype: torch.dtype | None = None,
        *,
        offset: float = 0.0,
        casting_mode: str = "none",
    ) -> None:
        super().__init__(_list(normalized_shape), eps, elementwise_affine, device, dtype)
        self.offset, self.casting_mode = offset, casting_mode
        self._op = load("rmsnorm")

    def forward(self, x: Tensor) -> Tensor:
        """x (*, *normalized_shape), normalised over those last dimensions; the same shape."""
        rows = _rows("x", x, self.normalized_shape)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        y: Tensor = self._op(
            rows, _flat(self.weight), eps=eps, offset=self.offset, casting_mode=self.casting_mode
        )
        return y.view(x.shape)


class FusedAddRMSNorm(RMSNorm):
    """The residual addition and the norm after it in one pass: ``liger_aot.load("fused_add_rmsnorm")``.

    Arguments as ``RMSNorm``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._op = load("fused_add_rmsnorm")

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """(norm(x + residual), x + residual), each of x's shape."""
        shape = self.normalized_shape
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        y, added = self._op(
            _rows("x", x, shape),
            _rows("residual", residual, shape),
            _flat(self.weight),
            eps=eps,
            offset=self.offset,
            casting_mode=self.casting_mode,
        )
        return y.view(x.shape), added.view(x.shape)


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` on ``liger_aot.load("layernorm")``; arguments as torch's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._op = load("layernorm")

    def forward(self, x: Tensor) -> Tensor:
        """x (*, *normalized_shape), normalised over those last dimensions; the same shape."""
        rows = _rows("x", x, self.normalized_shape)
        y: Tensor = self._op(rows, _flat(self.weight), _flat(self.bias), eps=self.eps)
        return y.view(x.shape)


class GroupNorm(nn.GroupNorm):
    """``torch.nn.GroupNorm`` on ``liger_aot.load("groupnorm")``; arguments as torch's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._op = load("groupnorm")

    def forward(self, x: Tensor) -> Tensor:
        """x (N, C, *), contiguous or channels-last; the same shape and memory format."""
        y: Tensor = self._op(x, self.num_groups, self.weight, self.bias, eps=self.eps)
        return y


class Embedding(nn.Embedding):
    """``torch.nn.Embedding`` on ``liger_aot.load("embedding")``; arguments as torch's.

    Raises:
        ArgumentError: ``max_norm``, ``scale_grad_by_freq`` or ``sparse`` is asked for.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, value, allowed in (
            ("max_norm", self.max_norm, None),
            ("scale_grad_by_freq", self.scale_grad_by_freq, False),
            ("sparse", self.sparse, False),
        ):
            if value != allowed:
                raise ArgumentError(f"liger_aot.nn.Embedding: {name} must be {allowed}, got {value!r}")
        self._op = load("embedding")

    def forward(self, input: Tensor) -> Tensor:  # torch's name for the indices
        """indices of any shape to (*shape, embedding_dim)."""
        y: Tensor = self._op(input, self.weight, padding_idx=self.padding_idx)
        return y


class SwiGLU(nn.Module):
    """silu(gate) * up: ``liger_aot.load("swiglu")``. Without ``up``, gate is packed: its last dimension holds both."""

    def __init__(self) -> None:
        super().__init__()
        self._op = load("swiglu")

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        y: Tensor = self._op(gate, up)
        return y


class GEGLU(nn.Module):
    """gelu(gate) * up: ``liger_aot.load("geglu")``. Without ``up``, gate is packed: its last dimension holds both.

    Args:
        approximate: "tanh" or, for the exact error function, "none", as torch.nn.GELU.
    """

    def __init__(self, approximate: str = "tanh") -> None:
        super().__init__()
        self.approximate = approximate
        self._op = load("geglu")

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        y: Tensor = self._op(gate, up, approximate=self.approximate)
        return y

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class ReLUSquared(nn.Module):
    """relu(x)^2: ``liger_aot.load("relu_squared")``."""

    def __init__(self) -> None:
        super().__init__()
        self._op = load("relu_squared")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self._op(x)
        return y


class _OverDimension(nn.Module):
    """An op over the last dimension, applied over ``dim``: any other dimension is copied there first."""

    op: str

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim
        self._op = load(self.op)

    def forward(self, x: Tensor) -> Tensor:
        return self._apply_op(x.movedim(self.dim, -1)).movedim(-1, self.dim)

    def _apply_op(self, x: Tensor) -> Tensor:
        y: Tensor = self._op(x)
        return y

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class Softmax(_OverDimension):
    """``torch.nn.Softmax`` on ``liger_aot.load("softmax")``, of x / temperature."""

    op = "softmax"

    def __init__(self, dim: int = -1, temperature: float = 1.0) -> None:
        super().__init__(dim)
        self.temperature = temperature

    def _apply_op(self, x: Tensor) -> Tensor:
        y: Tensor = self._op(x, temperature=self.temperature)
        return y

    def extra_repr(self) -> str:
        return f"dim={self.dim}, temperature={self.temperature}"


class LogSoftmax(_OverDimension):
    """``torch.nn.LogSoftmax`` on ``liger_aot.load("log_softmax")``."""

    op = "log_softmax"


class Sparsemax(_OverDimension):
    """Sparsemax, a softmax with exact zeros: ``liger_aot.load("sparsemax")``."""

    op = "sparsemax"


class ModulatedRMSNorm(RMSNorm):
    """RMSNorm with a scale and a shift per group of tokens (AdaLN): ``liger_aot.load("modulated_rmsnorm")``.

    Arguments as ``RMSNorm``, but over one dimension, and without a weight by default.
    """

    def __init__(
        self,
        normalized_shape: int,
        eps: float | None = 1e-6,
        elementwise_affine: bool = False,
        device: Where = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self._op = load("modulated_rmsnorm")

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """x (..., tokens, n), scale and shift as the op takes them; x's shape."""
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        y: Tensor = self._op(x, scale, shift, self.weight, eps=eps)
        return y


class DyT(nn.Module):
    """Dynamic tanh, weight * tanh(alpha * x) + bias, which replaces a norm: ``liger_aot.load("dyt")``.

    Args:
        normalized_shape: the last dimension.
        alpha_init_value: of the learned scalar.
        elementwise_affine, bias, device, dtype: as torch.nn.LayerNorm.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int,
        alpha_init_value: float = 0.5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Where = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.normalized_shape, self.alpha_init_value = normalized_shape, alpha_init_value
        self.alpha = nn.Parameter(torch.empty(1, device=device, dtype=dtype))
        for name, wanted in (("weight", elementwise_affine), ("bias", elementwise_affine and bias)):
            value = (
                nn.Parameter(torch.empty(normalized_shape, device=device, dtype=dtype)) if wanted else None
            )
            self.register_parameter(name, value)
        self.reset_parameters()
        self._op = load("dyt")

    def reset_parameters(self) -> None:
        nn.init.constant_(self.alpha, self.alpha_init_value)
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., normalized_shape); the same shape."""
        y: Tensor = self._op(x, self.alpha, self.weight, self.bias)
        return y

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, alpha_init_value={self.alpha_init_value}"


class PolyNorm(nn.Module):
    """A polynomial of three normalised powers, which replaces an activation: ``liger_aot.load("poly_norm")``.

    Args:
        eps: added to the means of squares.
        device, dtype: of the parameters: weight (3,), initially 1/3, and bias (1,), initially 0.
    """

    def __init__(self, eps: float = 1e-6, device: Where = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.full((3,), 1 / 3, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))
        self._op = load("poly_norm")

    def forward(self, x: Tensor) -> Tensor:
        """x (..., n); the same shape."""
        y: Tensor = self._op(x, self.weight, self.bias, eps=self.eps)
        return y

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


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
    """Cross entropy of a linear layer, whose weight ``forward`` takes:
    ``liger_aot.load("fused_linear_cross_entropy")``.

    Args:
        class_weight: (vocabulary,) or None; a buffer that is not saved in checkpoints.
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
        eps: targets below it count as eps in the logarithm.
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
        ignore_index: rows with this label are ignored.
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
        ignore_index: rows with this label are ignored.
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
    """``JSD`` of two linear layers, whose weights ``forward`` takes: ``liger_aot.load("fused_linear_jsd")``.

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


class TiledMLP(nn.Module):
    """Another module, such as an MLP, applied to some tokens after the other: what it computes in between exists for
    one part of them at a time. The backward computes it again.

    Args:
        mlp: takes (..., tokens, k) and treats each token by itself. Its parameters are named ``mlp.``... here.
        shards: how many parts, of one size but for the last; by default as many as give k tokens each, rounded up.

    Source:
        The tiled MLP of DeepSpeed (Bekman et al., Arctic Long Sequence Training, 2025) and Liger Kernel.
    """

    def __init__(self, mlp: nn.Module, shards: int | None = None) -> None:
        super().__init__()
        if shards is not None and (type(shards) is not int or shards < 1):
            raise ArgumentError(
                f"liger_aot.nn.TiledMLP: shards must be an int from 1 on, or None; got {shards!r}"
            )
        self.mlp, self.shards = mlp, shards

    def forward(self, x: Tensor) -> Tensor:
        """x (..., tokens, k); what ``mlp`` gives for it."""
        shards = self.shards or -(-x.shape[-2] // x.shape[-1])
        if shards <= 1:
            y: Tensor = self.mlp(x)
            return y
        parts = x.chunk(shards, -2)
        if torch.is_grad_enabled():
            return torch.cat([checkpoint(self.mlp, part, use_reentrant=False) for part in parts], -2)
        return torch.cat([self.mlp(part) for part in parts], -2)

    def extra_repr(self) -> str:
        return f"shards={self.shards}"


def _list(shape: Shape) -> list[int]:
    return [shape] if isinstance(shape, int) else list(shape)


def _rows(name: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``x`` with its last dimensions, which must be ``shape``, flattened into one."""
    if tuple(x.shape[x.dim() - len(shape) :]) != tuple(shape):
        raise ArgumentError(f"{name} must end in the normalized shape {tuple(shape)}, got {tuple(x.shape)}")
    return x if len(shape) == 1 else x.reshape(*x.shape[: x.dim() - len(shape)], prod(shape))


def _flat(parameter: Tensor | None) -> Tensor | None:
    return parameter if parameter is None or parameter.dim() == 1 else parameter.view(-1)
