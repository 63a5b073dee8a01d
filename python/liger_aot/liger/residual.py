"""Liger's hyper-connections and attention residuals, with its names, arguments and results, on the ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_aot.liger.common import Function
from liger_aot.models.fitting import fitting
from liger_aot.ops.registry import load

_coefficients, _pre, _post = load("mhc_coefficients"), load("mhc_pre"), load("mhc_post")
_attention_residuals = load("attention_residuals")


class LigerMHCCoeffsFunction(Function):
    """The gradient of phi is of its dtype, as Liger's; x in float32 needs ``allow_fp32``, as Liger's does."""

    @staticmethod
    def call(
        x: Tensor, phi: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor, allow_fp32: bool,
        tmax: int, rms_eps: float, pre_eps: float, sinkhorn_eps: float, post_mult: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        assert allow_fp32 or x.dtype != torch.float32, "x should be BF16/FP16 (set allow_fp32=True for FP32)"
        found: tuple[Tensor, Tensor, Tensor] = _coefficients(
            x,
            fitting(phi.contiguous(), x),
            b.float().contiguous(),
            *(a.float() for a in (alpha_pre, alpha_post, alpha_res)),
            iterations=tmax,
            eps=rms_eps,
            pre_eps=pre_eps,
            sinkhorn_eps=sinkhorn_eps,
            post_scale=post_mult,
        )
        return found


class LigerMHCPreFunction(Function):
    @staticmethod
    def call(x: Tensor, h_pre: Tensor) -> Tensor:
        y: Tensor = _pre(x, h_pre.reshape(x.shape[:-1]).float())
        return y


class LigerMHCPostResFunction(Function):
    """Of x's dtype; where the layer's result has another, computed in float32."""

    @staticmethod
    def call(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        streams, dtype = x.shape[-2], x.dtype
        f = f_out.reshape(*x.shape[:-2], x.shape[-1])
        weights = h_post.reshape(x.shape[:-1]).float(), h_res.reshape(*x.shape[:-1], streams).float()
        if f.dtype == dtype:
            y: Tensor = _post(x, f, *weights)
            return y
        wide: Tensor = _post(x.float(), f.float(), *weights)
        return wide.to(dtype)


def _alike(v: Tensor, query: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    """Both of v's dtype or float32, and of the same."""
    if query.dtype == norm.dtype == v.dtype:
        return query.contiguous(), norm.contiguous()
    return query.float().contiguous(), norm.float().contiguous()


class LigerAttnResFunction(Function):
    @staticmethod
    def call(V_stacked: Tensor, w_query: Tensor, w_norm: Tensor, eps: float) -> Tensor:
        y: Tensor = _attention_residuals(V_stacked, *_alike(V_stacked, w_query, w_norm), eps=eps)
        return y


def attn_res_forward(
    blocks: Any, w_query: Tensor, w_norm: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(h, the stacked blocks with all tokens in one dimension, their weights, 1 / rms)."""
    v = torch.stack(blocks) if isinstance(blocks, (list, tuple)) else blocks
    stacked = v.reshape(v.shape[0], -1, v.shape[-1]).contiguous()
    tensors = (stacked, *_alike(v, w_query, w_norm))
    y, alpha, rstd = _attention_residuals.run_forward(tensors, (eps,), True, None)
    return y.view(v.shape[1:]), stacked, alpha, rstd


def attn_res_backward(
    dh: Tensor, V_3d: Tensor, w_query: Tensor, w_norm: Tensor, Alpha: Tensor, RSTD: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    weights = _alike(V_3d, w_query, w_norm)
    y, _, _ = _attention_residuals.run_forward((V_3d, *weights), (eps,), False, None)
    dv, dquery, dnorm = _attention_residuals.run_backward(
        (dh.reshape(y.shape),), (V_3d, *weights, y, Alpha, RSTD), (eps,), (True, True, True)
    )
    return dv, dquery.to(w_query.dtype), dnorm.to(w_norm.dtype)


NAMES: dict[str, tuple[Any, str]] = {  # Liger's name -> its replacement, and the op that this calls
    "LigerMHCCoeffsFunction": (LigerMHCCoeffsFunction, "mhc_coefficients"),
    "LigerMHCPreFunction": (LigerMHCPreFunction, "mhc_pre"),
    "LigerMHCPostResFunction": (LigerMHCPostResFunction, "mhc_post"),
    "LigerAttnResFunction": (LigerAttnResFunction, "attention_residuals"),
    "attn_res_forward": (attn_res_forward, "attention_residuals"),
    "attn_res_backward": (attn_res_backward, "attention_residuals"),
}
