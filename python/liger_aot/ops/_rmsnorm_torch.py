"""RMSNorm as torch.library knows it: imported when torch.compile, torch.export or a tensor subclass first needs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_aot.loader import load
from liger_aot.torch_library import define


def _library_forward(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str, store_rstd: bool
) -> tuple[Tensor, Tensor]:
    y, rstd = load("rmsnorm").forward(
        x, weight, eps=eps, offset=offset, casting_mode=casting_mode, store_rstd=store_rstd
    )
    return y, x.new_empty(0, dtype=torch.float32) if rstd is None else rstd


def _fake_forward(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str, store_rstd: bool
) -> tuple[Tensor, Tensor]:
    rows = x.shape[:-1].numel() if store_rstd else 0
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), x.new_empty(rows, dtype=torch.float32)


def _library_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[Tensor, Tensor]:
    dx, dweight = load("rmsnorm").backward(
        dy, x, weight, rstd, offset=offset, need_dx=need_dx, need_dweight=need_dweight
    )
    return x.new_empty(0) if dx is None else dx, x.new_empty(0) if dweight is None else dweight


def _fake_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[Tensor, Tensor]:
    dx = torch.empty(x.shape if need_dx else 0, dtype=x.dtype, device=x.device)
    return dx, x.new_empty(0) if weight is None or not need_dweight else torch.empty_like(weight)


def _library_out(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str, out: Tensor
) -> None:
    load("rmsnorm").forward(
        x, weight, eps=eps, offset=offset, casting_mode=casting_mode, out=out, store_rstd=False
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, offset, _, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.offset = offset
    ctx.mark_non_differentiable(output[1])


def _autograd_backward(ctx: Any, dy: Tensor, _: Any) -> Any:
    x, weight, rstd = ctx.saved_tensors
    need_dx, need_dweight = ctx.needs_input_grad[:2]
    dx, dweight = torch.ops.liger_aot.rmsnorm_backward(dy, x, weight, rstd, ctx.offset, need_dx, need_dweight)
    return dx if need_dx else None, dweight if need_dweight else None, None, None, None, None


define(
    "rmsnorm_forward(Tensor x, Tensor? weight, float eps, float offset, str casting_mode, bool store_rstd)"
    " -> (Tensor, Tensor)",
    _library_forward,
    _fake_forward,
    backward=_autograd_backward,
    setup_context=_setup_context,
)
define(
    "rmsnorm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, float offset, bool need_dx,"
    " bool need_dweight) -> (Tensor, Tensor)",
    _library_backward,
    _fake_backward,
)
define(
    "rmsnorm_out(Tensor x, Tensor? weight, float eps, float offset, str casting_mode, Tensor(a!) out) -> ()",
    _library_out,
    lambda x, weight, eps, offset, casting_mode, out: None,
)
