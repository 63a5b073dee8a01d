"""Attention residuals: a softmax over the depth of the network in place of the residual sum, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.arguments import FROM_ZERO, Schema
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.op import Problem, check_same_device, check_tensor
from liger_aot.runtime.grid import persistent
from liger_aot.runtime.layout import FP32, rows_of

NARROW, WIDE = 1, 2  # kinds of csrc_triton/norms/norm_vectors.py: of v's dtype, float32 where v is not


class AttentionResiduals(DifferentiableOp):
    """``attention_residuals(v, query, norm, eps=1e-6) -> Tensor``: AttnRes, what a layer reads of the results of
    earlier blocks: y = sum over i of alpha_i * v_i, alpha = softmax over i of
    query . (norm * v_i / sqrt(mean(v_i^2) + eps)).

    Differentiable in v, query and norm; works under torch.compile and, after ``preload``, in CUDA graphs. CPU tensors
    take the plain-torch reference. Computed in float32, rounded once; the backward takes sum over i of
    alpha_i * dalpha_i from y as it was rounded. The gradients of query and norm are summed in a fixed order.

    Args:
        v: (blocks, ..., n) bfloat16, float16 or float32: of each earlier block the result, for all tokens. Rows may be
            any distance apart; other layouts are copied.
        query: (n,) of v's dtype or float32, contiguous: the layer's pseudo-query.
        norm: (n,) of query's dtype, contiguous: the RMSNorm's weight.
        eps: added to the mean square.

    Returns:
        a contiguous (..., n) tensor of v's dtype.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: shapes, devices or layouts do not fit; no block.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Moonshot AI, Attention Residuals (2026).
    """

    name = "attention_residuals"
    tensors = ("v", "query", "norm")
    settings = Schema({"float eps": FROM_ZERO})
    results = 3  # y, alpha and 1 / rms by token and block

    def __call__(self, v: Tensor, query: Tensor, norm: Tensor, *, eps: float = 1e-6) -> Tensor:
        y: Tensor = self.differentiable((v, query, norm), (eps,))
        return y

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        v, query, norm = tensors
        check_tensor(self.name, "v", v)
        if v.dim() < 2 or not v.shape[0]:
            raise ArgumentError(
                f"attention_residuals: v must be (blocks, ..., n) of at least one block, got shape {tuple(v.shape)}"
            )
        for name, value in (("query", query), ("norm", norm)):
            check_tensor(self.name, name, value)
            check_same_device(self.name, name, value, "v", v)
            if value.dim() != 1 or value.shape[0] != v.shape[-1] or not value.is_contiguous():
                raise ArgumentError(
                    f"attention_residuals: {name} must be contiguous of shape ({v.shape[-1]},), the last dimension of "
                    f"v; got shape {tuple(value.shape)} with strides {value.stride()}"
                )
        if query.dtype != v.dtype and query.dtype != torch.float32:
            raise ArgumentTypeError(
                f"attention_residuals: query must be of v's dtype {v.dtype} or float32, got {query.dtype}"
            )
        if norm.dtype != query.dtype:
            raise ArgumentTypeError(
                f"attention_residuals: norm must be of query's dtype {query.dtype}, got {norm.dtype}"
            )

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        v, query, norm = tensors
        in_v, in_query, in_norm = rows_of(v), rows_of(query), rows_of(norm)
        on = None if in_v is None else self._own.find(in_v[1], in_v[2])
        if on is None or in_v is None or in_query is None or in_norm is None or v.dim() < 2:
            return self.prepare_forward(tensors, settings, keep, out)
        v_at, rows, n, v_stride = in_v[0], in_v[5], in_v[6], in_v[7]
        kind = NARROW if in_query[3:5] == in_v[3:5] else WIDE
        if (
            not rows * n
            or in_query[1:7] != in_norm[1:7]
            or in_query[1:3] != in_v[1:3]
            or in_query[5:7] != (1, n)
            or (kind == WIDE and in_query[3:5] != FP32)
            or not query.dim() == norm.dim() == 1
        ):
            return self.prepare_forward(tensors, settings, keep, out)
        blocks = v.shape[0]
        tokens = rows // blocks
        y = v.new_empty(v.shape[1:])
        y_at, device = y.data_ptr(), on.device
        key = (v.dtype, not (v_at | y_at | in_query[0] | in_norm[0] | v_stride | n) & 15)
        loaded = on.kernels["attention_residuals_forward"](key, n)
        alpha = rstd = None
        if keep or loaded.variant.form == "long":  # it has the scores there
            alpha = v.new_empty((tokens, blocks), dtype=torch.float32)
        if keep:
            rstd = v.new_empty((tokens, blocks), dtype=torch.float32)
        loaded.launch(
            device, on.stream(device), tokens, 1, 1,
            y_at, None if alpha is None else alpha.data_ptr(), None if rstd is None else rstd.data_ptr(),
            v_at, in_query[0], in_norm[0], v_stride, tokens, blocks, n, kind, settings[0], keep,
        )  # fmt: skip
        return y, alpha, rstd

    def saved(self, tensors: Tensors, results: Tensors) -> Tensors:
        return *tensors, *results

    def run_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        (dy,), (v, query, norm, y, alpha, rstd) = grads, saved
        in_dy, in_v, in_y = rows_of(dy), rows_of(v), rows_of(y)
        on = None if in_v is None else self._own.find(in_v[1], in_v[2])
        if (
            on is None
            or in_v is None
            or in_dy is None
            or in_y is None
            or not in_v[5] * in_v[6]
            or not any(needed)
        ):
            return self.prepare_backward(grads, saved, settings, needed)
        v_at, rows, n, v_stride = in_v[0], in_v[5], in_v[6], in_v[7]
        need_dv, need_dquery, need_dnorm = needed
        need_sums = need_dquery or need_dnorm
        dv = torch.empty_like(v, memory_format=torch.contiguous_format) if need_dv else None
        dv_at, query_at, norm_at = 0 if dv is None else dv.data_ptr(), query.data_ptr(), norm.data_ptr()
        aligned = (
            not (v_at | dv_at | query_at | norm_at | in_dy[0] | in_dy[7] | in_y[0] | in_y[7] | v_stride | n)
            & 15
        )
        loaded = on.kernels["attention_residuals_backward"]((v.dtype, aligned), n)
        blocks, device = v.shape[0], on.device
        tokens, stream = rows // blocks, on.stream(device)
        programs, _, _ = persistent(on, loaded, tokens)
        partials = v.new_empty((programs, n), dtype=torch.float32) if need_sums else None
        partials_at = None if partials is None else partials.data_ptr()
        loaded.launch(
            device, stream, programs, 1, 1,
            dv_at, partials_at, in_dy[0], in_y[0], alpha.data_ptr(), rstd.data_ptr(), v_at, query_at, norm_at,
            in_dy[7], in_y[7], v_stride, tokens, blocks, n, NARROW if query.dtype == v.dtype else WIDE,
            need_dv, need_sums,
        )  # fmt: skip
        if partials is None:
            return dv, None, None
        dquery, dnorm = torch.empty_like(query), torch.empty_like(norm)
        second = on.kernels["attention_residuals_sums"]((query.dtype, not n & 15), n)
        second.launch(
            device, stream, -(-n // second.block), 1, 1,
            dquery.data_ptr(), dnorm.data_ptr(), query_at, norm_at, partials_at, programs, n,
        )  # fmt: skip
        return dv, dquery if need_dquery else None, dnorm if need_dnorm else None

    @staticmethod
    def reference(v: Tensor, query: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(v.dtype, torch.float32)
        vw, blocks, n = v.to(dtype), v.shape[0], v.shape[-1]
        rstd = torch.rsqrt(vw.square().sum(-1) / max(n, 1) + eps)
        alpha = ((vw * (query.to(dtype) * norm.to(dtype))).sum(-1) * rstd).softmax(0)
        y = (alpha.unsqueeze(-1) * vw).sum(0)
        return y.to(v.dtype), alpha.reshape(blocks, -1).t(), rstd.reshape(blocks, -1).t()

    @staticmethod
    def reference_backward(grads: Tensors, saved: Tensors, eps: float) -> Tensors:
        (dy,), (v, query, norm, y, alpha, rstd) = grads, saved
        dtype = torch.promote_types(v.dtype, torch.float32)
        vw, dyw, weight, w = v.to(dtype), dy.to(dtype), query.to(dtype), norm.to(dtype)
        alpha, rstd = (t.to(dtype).t().reshape(v.shape[:-1]) for t in (alpha, rstd))
        delta = (dyw * y.to(dtype)).sum(-1)
        dscore = alpha * ((vw * dyw).sum(-1) - delta) * rstd
        dot = (vw * (weight * w)).sum(-1)
        slope = dscore * rstd.square() * dot / max(v.shape[-1], 1)
        dv = alpha.unsqueeze(-1) * dyw + dscore.unsqueeze(-1) * (weight * w) - slope.unsqueeze(-1) * vw
        sums = (dscore.unsqueeze(-1) * vw).flatten(0, -2).sum(0)
        return dv.to(v.dtype), (sums * w).to(query.dtype), (sums * weight).to(norm.dtype)

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        n, aligned = shape[-1], shape[-1] % 16 == 0
        return (
            Problem("attention_residuals_forward", (dtype,), aligned, n),
            Problem("attention_residuals_backward", (dtype,), aligned, n),
            Problem("attention_residuals_sums", ((dtypes or {}).get("query", dtype),), aligned, n),
        )


OP = AttentionResiduals
