"""Modules over the ops, with the names, arguments, parameters and state_dict keys of torch.nn where it has the module.

They are subclasses of torch.nn's own, so initialisation, ``extra_repr``, ``isinstance`` and checkpoints stay as they
are; only ``forward`` is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from liger_aot.errors import ArgumentError
from liger_aot.loss_modules import JSD as JSD
from liger_aot.loss_modules import CrossEntropyLoss as CrossEntropyLoss
from liger_aot.loss_modules import FusedLinearCrossEntropyLoss as FusedLinearCrossEntropyLoss
from liger_aot.loss_modules import FusedLinearJSD as FusedLinearJSD
from liger_aot.loss_modules import KLDivLoss as KLDivLoss
from liger_aot.loss_modules import TVDLoss as TVDLoss
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
    """silu(gate) * up: ``liger_aot.load("swiglu")``. With one argument it holds both halves of the last dimension."""

    def __init__(self) -> None:
        super().__init__()
        self._op = load("swiglu")

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        y: Tensor = self._op(gate, up)
        return y


class GEGLU(nn.Module):
    """gelu(gate) * up: ``liger_aot.load("geglu")``. With one argument it holds both halves of the last dimension.

    Args:
        approximate: "tanh", or "none" for the exact error function, in torch.nn.GELU's words.
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
    """An op over the last dimension, applied over ``dim``; another one than the last is moved there by a copy."""

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
    """The sparse sibling of softmax: ``liger_aot.load("sparsemax")``."""

    op = "sparsemax"


class ModulatedRMSNorm(RMSNorm):
    """RMSNorm with a scale and a shift per group of tokens (AdaLN): ``liger_aot.load("modulated_rmsnorm")``.

    Arguments as ``RMSNorm``, but no weight by default, and one dimension.
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
    """Dynamic tanh, weight * tanh(alpha * x) + bias, in a norm's place: ``liger_aot.load("dyt")``.

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
    """A polynomial of three normalised powers, in an activation's place: ``liger_aot.load("poly_norm")``.

    Args:
        eps: added to the means of squares.
        device, dtype: of the parameters weight (3,) and bias (1,), which begin at 1/3 and 0.
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


def _list(shape: Shape) -> list[int]:
    return [shape] if isinstance(shape, int) else list(shape)


def _rows(name: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``x`` with its last dimensions, which must be ``shape``, as one."""
    if tuple(x.shape[x.dim() - len(shape) :]) != tuple(shape):
        raise ArgumentError(f"{name} must end in the normalized shape {tuple(shape)}, got {tuple(x.shape)}")
    return x if len(shape) == 1 else x.reshape(*x.shape[: x.dim() - len(shape)], prod(shape))


def _flat(parameter: Tensor | None) -> Tensor | None:
    return parameter if parameter is None or parameter.dim() == 1 else parameter.view(-1)
