"""Liger's norms, with its names, arguments and results, on the ops.

``in_place`` and ``row_mode`` are accepted and ignored: gradients are new tensors.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from liger_aot.liger.common import (
    CASTING_MODES,
    Function,
    casting_name,
    checked_backward,
    checked_forward,
    launch_numbers,
    rows,
    statistics,
    whole,
)
from liger_aot.models.fitting import fitting
from liger_aot.ops.registry import load

_rmsnorm, _added, _modulated = load("rmsnorm"), load("fused_add_rmsnorm"), load("modulated_rmsnorm")
_layernorm, _groupnorm, _poly_norm, _dyt = (
    load("layernorm"),
    load("groupnorm"),
    load("poly_norm"),
    load("dyt"),
)


class LigerRMSNormFunction(Function):
    @staticmethod
    def call(
        X: Tensor,
        W: Tensor | None,
        eps: float,
        offset: float = 0.0,
        casting_mode: str | int = "llama",
        in_place: bool = True,
        row_mode: bool | None = None,
    ) -> Tensor:
        X = whole(X)
        y: Tensor = _rmsnorm(
            X, fitting(W, X), eps=eps, offset=offset, casting_mode=casting_name(casting_mode)
        )
        return y


def rms_norm_forward(
    X: Tensor, W: Tensor | None, eps: float, offset: float, casting_mode: str | int, row_mode: bool | None
) -> tuple[Tensor, Tensor, Tensor, int, int, int]:
    name = casting_name(casting_mode)
    y, rstd = checked_forward(_rmsnorm, (X, fitting(W, X)), (eps, offset, name))
    return y, rows(X), rstd, *launch_numbers(X.shape[-1]), CASTING_MODES[name]


def rms_norm_backward(
    dY: Tensor, X: Tensor, W: Tensor | None, RSTD: Tensor, offset: float, casting_mode: str | int, BLOCK_SIZE: int,
    num_warps: int, in_place: bool, row_mode: bool | None, needs_dw: bool | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    weight = fitting(W, X)
    settings = (0.0, offset, casting_name(casting_mode))
    needed = (True, W is not None and needs_dw is not False)
    tensors = (X.view(dY.shape), weight)
    saved = (*tensors, _rstd("rmsnorm", RSTD, X))
    dx, dw = checked_backward(_rmsnorm, (dY,), tensors, saved, settings, needed)
    return dx, None if dw is None or W is None else dw.to(W.dtype)


class LigerFusedAddRMSNormFunction(Function):
    @staticmethod
    def call(
        X: Tensor,
        R: Tensor,
        W: Tensor,
        eps: float,
        offset: float = 0.0,
        casting_mode: str | int = "llama",
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor]:
        both: tuple[Tensor, Tensor] = _added(
            X, R, fitting(W, X), eps=eps, offset=offset, casting_mode=casting_name(casting_mode)
        )
        return both


def fused_add_rms_norm_forward(
    X: Tensor, R: Tensor, W: Tensor, eps: float, offset: float, casting_mode: str | int
) -> tuple[Tensor, Tensor, Tensor, int, int, int, int]:
    name = casting_name(casting_mode)
    y, added, rstd = checked_forward(_added, (X, R, fitting(W, X)), (eps, offset, name))
    return y, added, rstd, *launch_numbers(X.shape[-1]), 2, CASTING_MODES[name]


def fused_add_rms_norm_backward(
    dY: Tensor, dS_out: Tensor | None, S: Tensor, W: Tensor, RSTD: Tensor, offset: float, casting_mode: str | int,
    BLOCK_SIZE: int, num_warps: int, num_stages: int, in_place: bool, needs_dw: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    needed = (True, True, needs_dw is not False)
    settings = (0.0, offset, casting_name(casting_mode))
    shaped = None if dS_out is None else dS_out.view(dY.shape)
    x, weight = S.view(dY.shape), fitting(W, S)
    saved = (x, weight, _rstd("fused_add_rmsnorm", RSTD, S))
    dx, _, dw = checked_backward(_added, (dY, shaped), (x, x, weight), saved, settings, needed)
    return dx, dx, None if dw is None else dw.to(W.dtype)


class LigerModulatedRMSNormFunction(Function):
    @staticmethod
    def call(
        X: Tensor,
        W: Tensor | None,
        scale: Tensor,
        shift: Tensor | None,
        eps: float,
        offset: float = 0.0,
        casting_mode: str | int = "llama",
        in_place: bool = True,
    ) -> Tensor:
        X = whole(X)
        groups, each = _groups(X, scale)
        y: Tensor = _modulated(
            X,
            fitting(scale, X).reshape(groups, -1),  # type: ignore[union-attr]
            None if shift is None else shift.to(scale.dtype).reshape(groups, -1),
            fitting(W, X),
            eps=eps,
            offset=offset,
            casting_mode=casting_name(casting_mode),
            tokens_per_group=each,
        )
        return y


def _groups(x: Tensor, scale: Tensor) -> tuple[int, int]:
    """How many groups of tokens scale has rows for, and how many tokens are in each."""
    n = x.shape[-1]
    groups = max(scale.numel() // n, 1)
    return groups, x.numel() // n // groups


def modulated_rms_norm_forward(
    X: Tensor, W: Tensor | None, scale: Tensor, shift: Tensor | None, eps: float, offset: float, casting_mode: str | int
) -> tuple[Tensor, Tensor, int, int, int, int]:  # fmt: skip
    name = casting_name(casting_mode)
    groups, each = _groups(X, scale)
    tensors = (
        X,
        scale.reshape(groups, -1),
        None if shift is None else shift.reshape(groups, -1),
        fitting(W, X),
    )
    y, rstd = checked_forward(_modulated, tensors, (eps, offset, name, each))
    return y, rstd, *launch_numbers(X.shape[-1]), CASTING_MODES[name], each


def modulated_rms_norm_backward(
    dY: Tensor, X: Tensor, W: Tensor | None, scale: Tensor, shift: Tensor | None, RSTD: Tensor, offset: float,
    casting_mode: str | int, BLOCK_SIZE: int, num_warps: int, rows_per_modulation: int, in_place: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    groups, each = _groups(X, scale)
    flat = None if shift is None else shift.reshape(groups, -1)
    tensors = (X.view(dY.shape), scale.reshape(groups, -1), flat, fitting(W, X))
    saved = (*tensors, _rstd("modulated_rmsnorm", RSTD, X))
    settings = (0.0, offset, casting_name(casting_mode), each)
    needed = (True, True, shift is not None, W is not None)
    dx, dscale, dshift, dw = checked_backward(_modulated, (dY,), tensors, saved, settings, needed)
    return (
        dx,
        None if dw is None or W is None else dw.to(W.dtype),
        dscale.view(scale.shape),
        None if dshift is None or shift is None else dshift.view(shift.shape),
    )


class LigerLayerNormFunction(Function):
    @staticmethod
    def call(X: Tensor, W: Tensor, B: Tensor | None, eps: float) -> Tensor:
        X = whole(X)
        y: Tensor = _layernorm(X, *_alike(X, W, B), eps=eps)
        return y


def _alike(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias of one dtype that fits x."""
    weight, bias = fitting(weight, x), fitting(bias, x)
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        return weight.float(), bias.float()
    return weight, bias


def layer_norm_forward(
    X: Tensor, W: Tensor, B: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
    y, stats = checked_forward(_layernorm, (X, *_alike(X, W, B)), (eps,))
    mean, rstd = stats.unbind(-1)
    return y, rows(X), mean, rstd, *launch_numbers(X.shape[-1])


def layer_norm_backward(
    dY: Tensor, X: Tensor, W: Tensor, B: Tensor | None, Mean: Tensor, RSTD: Tensor, needs_dw: bool | None = None,
    needs_db: bool | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    weight, bias = _alike(X, W, B)
    tensors = (X.view(dY.shape), weight, bias)
    saved = (*tensors[:2], bias if weight is None else None, _stats("layernorm", Mean, RSTD, X, _rows_of(X)))
    needed = (True, needs_dw is not False, B is not None and needs_db is not False)
    dx, dw, db = checked_backward(_layernorm, (dY,), tensors, saved, (0.0,), needed)
    return dx, None if dw is None else dw.to(W.dtype), None if db is None or B is None else db.to(B.dtype)


def _stats(op: str, mean: Tensor, rstd: Tensor, x: Tensor, numbers: int) -> Tensor:
    """[rows, 2] float32: mean and 1 / standard deviation of each row or group of x, as the ops save them."""
    from torch import stack

    pair = (("Mean", mean), ("RSTD", rstd))
    return stack([statistics(op, name, t, x, numbers).view(-1) for name, t in pair], -1)


def _rows_of(x: Tensor) -> int:
    return x.numel() // max(x.shape[-1], 1)


def _rstd(op: str, rstd: Tensor, x: Tensor, each: int = 1) -> Tensor:
    """float32, ``each`` for a row of x."""
    return statistics(op, "RSTD", rstd, x, _rows_of(x) * each)


class LigerGroupNormFunction(Function):
    @staticmethod
    def call(
        X: Tensor,
        affine_scaling_weight: Tensor,
        affine_shifting_bias: Tensor,
        num_channels: int,
        num_groups: int,
        eps: float,
    ) -> Tensor:
        y: Tensor = _groupnorm(
            X, num_groups, *_alike(X, affine_scaling_weight, affine_shifting_bias), eps=eps
        )
        return y


def group_norm_forward(
    X: Tensor, num_channels: int, num_groups: int, W: Tensor, B: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    X = X.contiguous()
    y, stats = checked_forward(_groupnorm, (X, *_alike(X, W, B)), (num_groups, eps, False))
    mean, rstd = (s.view(X.shape[0], num_groups) for s in stats.unbind(-1))
    return y, X, mean, rstd, launch_numbers(X[0].numel() // num_groups)[0]


def group_norm_backward(
    dY: Tensor, X: Tensor, W: Tensor, B: Tensor, Mean: Tensor, RSTD: Tensor, num_channels: int, num_groups: int
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tensors = (X.contiguous(), *_alike(X, W, B))
    saved = (*tensors[:2], None, _stats("groupnorm", Mean, RSTD, X, len(X) * num_groups))
    settings = (num_groups, 0.0, False)
    dx, dw, db = checked_backward(
        _groupnorm, (dY.contiguous(),), tensors, saved, settings, (True, True, True)
    )
    return dx, dw.to(W.dtype), db.to(B.dtype)


class LigerPolyNormFunction(Function):
    @staticmethod
    def call(X: Tensor, W: Tensor, B: Tensor, eps: float = 1e-6, in_place: bool = True) -> Tensor:
        y: Tensor = _poly_norm(X, *_alike(X, W, B), eps=eps)
        return y


def poly_norm_forward(
    X: Tensor, W: Tensor, B: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor, int, int]:
    y, rstd = checked_forward(_poly_norm, (X, *_alike(X, W, B)), (eps,))
    return y, rows(X), rstd, *launch_numbers(X.shape[-1])


def poly_norm_backward(
    dY: Tensor, X: Tensor, W: Tensor, RSTD: Tensor, BLOCK_SIZE: int, num_warps: int, in_place: bool
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    weight = fitting(W, X)
    assert weight is not None
    tensors = (X.view(dY.shape), weight, weight.new_zeros(1))
    saved = (*tensors, _rstd("poly_norm", RSTD, X, each=3))
    dx, dw, db = checked_backward(_poly_norm, (dY,), tensors, saved, (0.0,), (True, True, True))
    return dx, dw.to(W.dtype), db.to(W.dtype).reshape(())


class LigerDyTFunction(Function):
    @staticmethod
    def call(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
        y: Tensor = _dyt(x, *(fitting(t, x) for t in (alpha, gamma, beta)))
        return y


NAMES: dict[str, tuple[Any, str]] = {  # Liger's name -> its replacement, and the op that this calls
    "LigerRMSNormFunction": (LigerRMSNormFunction, "rmsnorm"),
    "rms_norm_forward": (rms_norm_forward, "rmsnorm"),
    "rms_norm_backward": (rms_norm_backward, "rmsnorm"),
    "LigerFusedAddRMSNormFunction": (LigerFusedAddRMSNormFunction, "fused_add_rmsnorm"),
    "fused_add_rms_norm_forward": (fused_add_rms_norm_forward, "fused_add_rmsnorm"),
    "fused_add_rms_norm_backward": (fused_add_rms_norm_backward, "fused_add_rmsnorm"),
    "LigerModulatedRMSNormFunction": (LigerModulatedRMSNormFunction, "modulated_rmsnorm"),
    "modulated_rms_norm_forward": (modulated_rms_norm_forward, "modulated_rmsnorm"),
    "modulated_rms_norm_backward": (modulated_rms_norm_backward, "modulated_rmsnorm"),
    "LigerLayerNormFunction": (LigerLayerNormFunction, "layernorm"),
    "layer_norm_forward": (layer_norm_forward, "layernorm"),
    "layer_norm_backward": (layer_norm_backward, "layernorm"),
    "LigerGroupNormFunction": (LigerGroupNormFunction, "groupnorm"),
    "group_norm_forward": (group_norm_forward, "groupnorm"),
    "group_norm_backward": (group_norm_backward, "groupnorm"),
    "LigerPolyNormFunction": (LigerPolyNormFunction, "poly_norm"),
    "poly_norm_forward": (poly_norm_forward, "poly_norm"),
    "poly_norm_backward": (poly_norm_backward, "poly_norm"),
    "LigerDyTFunction": (LigerDyTFunction, "dyt"),
}
