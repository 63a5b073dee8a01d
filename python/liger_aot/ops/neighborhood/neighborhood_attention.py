"""Attention of each position of a sequence to its neighbours alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.arguments import ABOVE_ZERO, Allowed, Schema
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.op import Problem, check_same_device, check_tensor
from liger_aot.runtime.dispatch import OpOn

LARGEST_DIM = 256
LARGEST_LENGTH = 1 << 30  # positions, and steps times dilation, are 32-bit numbers
LOG2_E = math.log2(math.e)


class NeighborhoodAttention(DifferentiableOp):
    """``neighborhood_attention(q, k, v, *, reach, dilation=1, scale=None) -> Tensor``: softmax(q k^T scale) v where the
    query at position i sees the keys at i + step * dilation, step from -reach to reach, that there are.

    At the ends of a sequence a query sees fewer keys. Computed in float32 without tensor cores, in time and memory that
    grow with length * reach and with length: for few neighbours, any dilation, and float32. With dilation 1 and 16-bit
    tensors ``flash_attention(window=(reach, reach))`` is the faster the wider the window.

    Differentiable in q, k and v; works under torch.compile and, after ``preload``, in CUDA graphs. CPU tensors take the
    plain-torch reference, which holds all scores.

    Args:
        q, k, v: (..., length, dim) bfloat16, float16 or float32, of one shape and dtype, dim from 1 to 256. What is not
            contiguous is copied.
        reach: steps to either side, from 0 on.
        dilation: positions a step, from 1 on.
        scale: of the scores, above 0. Default 1 / sqrt(dim).

    Returns:
        a contiguous tensor of q's shape and dtype.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: a shape, device or setting is not allowed.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Hassani et al., Neighborhood Attention Transformer (2022) and Generalized Neighborhood Attention (2025), in one
        dimension. Their windows move inwards at the ends of a sequence; these are cut off, as Liger Kernel's are.
    """

    name = "neighborhood_attention"
    tensors = ("q", "k", "v")
    settings = Schema(
        {
            "int reach": Allowed(least=0, most=LARGEST_LENGTH),
            "int dilation": Allowed(least=1, most=LARGEST_LENGTH),
            "float scale": ABOVE_ZERO,
        }
    )
    results = 2  # and the log-sum-exp of each query's scores, in units of log(2)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, reach: int, dilation: int = 1, scale: float | None = None
    ) -> Tensor:
        if scale is None:
            check_tensor(self.name, "q", q)
            scale = 1.0 / math.sqrt(q.shape[-1]) if q.dim() and q.shape[-1] else 1.0
        y: Tensor = self.differentiable((q, k, v), (reach, dilation, scale))
        return y

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        q = tensors[0]
        for name, t in zip(self.tensors, tensors, strict=True):
            check_tensor(self.name, name, t)
            check_same_device(self.name, name, t, "q", q)
            if t.dtype != q.dtype:
                raise ArgumentTypeError(f"{self.name}: {name} must be of q's dtype {q.dtype}, got {t.dtype}")
            if t.shape != q.shape:
                raise ArgumentError(
                    f"{self.name}: {name} must be of q's shape {tuple(q.shape)}, got {tuple(t.shape)}"
                )
        if q.dim() < 2 or not 1 <= q.shape[-1] <= LARGEST_DIM:
            raise ArgumentError(
                f"{self.name}: q must be of shape (..., length, dim) with dim from 1 to {LARGEST_DIM}; got "
                f"{tuple(q.shape)}"
            )
        if q.shape[-2] > LARGEST_LENGTH:
            raise ArgumentError(
                f"{self.name}: q must have at most {LARGEST_LENGTH} positions, got {q.shape[-2]}"
            )

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        self.check(tensors, settings)
        if self.on_reference(tensors):
            return self.by_reference(tensors, settings)
        q, k, v = (t.contiguous() for t in tensors)
        on = self._own.of(q, "q")
        assert on is not None
        y, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
        launch(on, "forward", (y, lse, q, k, v), settings)
        return y, lse

    def saved(self, tensors: Tensors, results: Tensors) -> Tensors:
        return *tensors, *results

    def run_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        if self.on_reference(saved):
            found = self.gradients_by_reference(grads, saved, settings)
        else:
            *operands, lse = saved
            q, k, v, y = (t.contiguous() for t in operands)
            on = self._own.of(q, "q")
            assert on is not None
            found = tuple(torch.empty_like(q) for _ in range(3))
            launch(on, "backward", (*found, grads[0].contiguous(), q, k, v, y, lse), settings)
        return tuple(g if need else None for g, need in zip(found, needed, strict=True))

    @staticmethod
    def reference(
        q: Tensor, k: Tensor, v: Tensor, reach: int, dilation: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = masked_scores(q.to(wide), k.to(wide), reach, dilation, scale)
        return (scores.softmax(-1) @ v.to(wide)).to(q.dtype), scores.logsumexp(-1) * LOG2_E

    @staticmethod
    def reference_backward(
        grads: Tensors, saved: Tensors, reach: int, dilation: int, scale: float
    ) -> Tensors:
        wide = torch.promote_types(saved[0].dtype, torch.float32)
        q, k, v, y, lse = (t.to(wide) for t in saved)
        dy = grads[0].to(wide)
        p = (masked_scores(q, k, reach, dilation, scale) - lse.unsqueeze(-1) / LOG2_E).exp()
        ds = p * (dy @ v.transpose(-1, -2) - (dy * y).sum(-1, keepdim=True)) * scale
        dtype = saved[0].dtype
        found = ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dy
        return tuple(g.to(dtype) for g in found)

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        dim = shape[-1]
        return tuple(
            Problem(f"{self.name}_{way}", (dtype,), dim % 16 == 0, dim) for way in ("forward", "backward")
        )


def masked_scores(q: Tensor, k: Tensor, reach: int, dilation: int, scale: float) -> Tensor:
    at = torch.arange(q.shape[-2], device=q.device)
    apart = at - at[:, None]
    seen = (apart.abs() <= reach * dilation) & (apart % dilation == 0)
    return torch.where(seen, q @ k.transpose(-1, -2) * scale, -math.inf)


def launch(on: OpOn, way: str, tensors: tuple[Tensor, ...], settings: tuple[Any, ...]) -> None:
    """Forward or backward of contiguous tensors, of which the one before the last is like q."""
    like = tensors[-2]
    length, dim = like.shape[-2:]
    reach, dilation, scale = settings
    ats = [t.data_ptr() for t in tensors]
    aligned = not (dim & 15 or any(at & 15 for at in ats))
    loaded = on.kernels[f"neighborhood_attention_{way}"]((like.dtype, aligned), dim)
    blocks = -(-length // loaded.numbers["rows"])
    sequences = like.numel() // (length * dim)
    reach = min(reach, (length - 1) // dilation)
    device = on.device
    loaded.launch(
        device, on.stream(device), sequences * blocks, 1, 1, *ats, length, dim, blocks, reach, min(dilation, length),
        scale,
    )  # fmt: skip


OP = NeighborhoodAttention
