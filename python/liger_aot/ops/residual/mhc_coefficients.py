"""mHC: the weights by which a layer reads, mixes and writes a token's streams, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.arguments import ANY, FROM_ZERO, Allowed, Schema
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.norms import column_sums
from liger_aot.ops.op import Problem, check_same_device, check_tensor
from liger_aot.ops.residual._streams import check_streams, wide
from liger_aot.runtime.dispatch import OpOn, Runtimes
from liger_aot.runtime.grid import persistent
from liger_aot.runtime.layout import FP32, rows_of

# By streams: the columns of a row of products, a power of two above streams * (streams + 2), as the device code has it.
WIDTHS = {2: 16, 4: 32, 8: 128}
LEAST_COLUMNS = 64  # of a program that shares tokens' columns with others
ALPHAS = 16  # columns of a row of partial sums behind those of the bias, and of a program that adds them up


class MHCCoefficients(DifferentiableOp):
    """``mhc_coefficients(x, phi, bias, alpha_pre, alpha_post, alpha_res, ...) -> (h_pre, h_post, h_res)``: the weights
    of manifold-constrained hyper-connections, for each token from all of its streams.

    With z = flattened x @ phi / sqrt(mean(x^2) + eps), of streams * (streams + 2) columns:
    h_pre = sigmoid(alpha_pre * z + bias) + pre_eps, h_post = post_scale * sigmoid(alpha_post * z + bias), and h_res the
    doubly stochastic matrix that Sinkhorn-Knopp makes of exp(alpha_res * z + bias): columns in that order, h_res row by
    row (row: the stream that is written).

    Sinkhorn-Knopp: the softmax of each row plus sinkhorn_eps, its columns divided by their sums; then in each further
    iteration rows and columns divided by their sums, to each of which sinkhorn_eps is added.

    Differentiable in all six; works under torch.compile and, after ``preload``, in CUDA graphs. CPU tensors take the
    plain-torch reference. Products are summed in float32: of bfloat16 or float16 x and phi exact, in float32 on NVIDIA
    GPUs as three products of TF32. In the backward of bfloat16 x and phi the gradient of z is rounded to bfloat16.
    The gradients of phi, bias and alphas are summed in a fixed order.

    Args:
        x: (..., streams, channels) bfloat16, float16 or float32, of 2, 4 or 8 streams. Contiguous, or it is copied.
        phi: (streams * channels, streams * (streams + 2)) of x's dtype or float32, contiguous.
        bias: (streams * (streams + 2),) float32, contiguous.
        alpha_pre, alpha_post, alpha_res: one float32 element each.
        iterations: of Sinkhorn-Knopp, from 1 on.
        eps: added to the mean square.
        pre_eps: added to h_pre.
        sinkhorn_eps: added to the softmax and to the sums.
        post_scale: h_post's largest value.

    Returns:
        h_pre and h_post of shape (..., streams), h_res of shape (..., streams, streams); float32, contiguous.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: shapes, devices or layouts do not fit; another number of streams; a setting is out of range.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Xie et al., mHC: Manifold-Constrained Hyper-Connections (2025), equations 14 to 19.
    """

    name = "mhc_coefficients"
    uses = ("column_sums",)
    tensors = ("x", "phi", "bias", "alpha_pre", "alpha_post", "alpha_res")
    settings = Schema(
        {
            "int iterations": Allowed(least=1, most=(1 << 20) - 1),
            "float eps": FROM_ZERO,
            "float pre_eps": ANY,
            "float sinkhorn_eps": FROM_ZERO,
            "float post_scale": ANY,
        }
    )
    outputs = 3
    results = 5  # and the scaled product, 1 / rms

    def __init__(self, runtimes: Mapping[str, Runtimes] | None = None) -> None:
        super().__init__(runtimes)
        self._column_sums = self._runtimes["column_sums"]

    def __call__(
        self,
        x: Tensor,
        phi: Tensor,
        bias: Tensor,
        alpha_pre: Tensor,
        alpha_post: Tensor,
        alpha_res: Tensor,
        *,
        iterations: int = 20,
        eps: float = 1e-6,
        pre_eps: float = 0.0,
        sinkhorn_eps: float = 1e-6,
        post_scale: float = 2.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = self.differentiable(
            (x, phi, bias, alpha_pre, alpha_post, alpha_res),
            (iterations, eps, pre_eps, sinkhorn_eps, post_scale),
        )
        return found

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        x, phi, bias, *alphas = tensors
        check_streams(self.name, x)
        streams, n = x.shape[-2], x.shape[-2] * x.shape[-1]
        width = streams * (streams + 2)
        check_tensor(self.name, "phi", phi)
        check_same_device(self.name, "phi", phi, "x", x)
        if phi.dtype != x.dtype and phi.dtype != torch.float32:
            raise ArgumentTypeError(
                f"mhc_coefficients: phi must be of x's dtype {x.dtype} or float32, got {phi.dtype}"
            )
        if tuple(phi.shape) != (n, width) or not phi.is_contiguous():
            raise ArgumentError(
                f"mhc_coefficients: phi must be contiguous of shape {(n, width)}, streams * channels by streams * "
                f"(streams + 2); got shape {tuple(phi.shape)} with strides {phi.stride()}"
            )
        for name, value in (("bias", bias), *zip(self.tensors[3:], alphas, strict=True)):
            check_tensor(self.name, name, value)
            check_same_device(self.name, name, value, "x", x)
            if value.dtype != torch.float32:
                raise ArgumentTypeError(f"mhc_coefficients: {name} must be float32, got {value.dtype}")
        if tuple(bias.shape) != (width,) or not bias.is_contiguous():
            raise ArgumentError(
                f"mhc_coefficients: bias must be contiguous of shape ({width},), got shape {tuple(bias.shape)} with "
                f"strides {bias.stride()}"
            )
        for name, value in zip(self.tensors[3:], alphas, strict=True):
            if value.numel() != 1:
                raise ArgumentError(
                    f"mhc_coefficients: {name} must have one element, got shape {tuple(value.shape)}"
                )

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        x, phi, *others = tensors
        in_x, in_phi = rows_of(x), rows_of(phi)
        in_others = [rows_of(t) for t in others]
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        if on is None or in_x is None or in_phi is None or x.dim() < 2 or not in_x[5] * in_x[6]:
            return self.prepare_forward(tensors, settings, keep, out)
        streams, place = x.shape[-2], in_x[1:3]
        width, n, tokens = streams * (streams + 2), streams * in_x[6], in_x[5] // streams
        fits = in_phi[1:3] == place and in_phi[5:] == (n, width, width) and in_x[7] == in_x[6]
        sizes = width, 1, 1, 1
        for found, t, size in zip(in_others, others, sizes, strict=True):
            fits = fits and found is not None and found[1:7] == (*place, *FP32, 1, size) and t.dim() == 1
        if not fits or streams not in WIDTHS or (phi.dtype != x.dtype and phi.dtype != torch.float32):
            return self.prepare_forward(tensors, settings, keep, out)
        bias_at, pre_at, post_at, res_at = (t.data_ptr() for t in others)
        iterations, eps, pre_eps, sinkhorn_eps, post_scale = settings
        x_at, phi_at, device, outer = in_x[0], in_phi[0], on.device, x.shape[:-2]
        stream = on.stream(device)
        key = (x.dtype, phi.dtype, streams, not (x_at | phi_at | n) & 15)
        loaded = on.kernels["mhc_coefficients_project"](key, n)
        tiles = -(-tokens // loaded.rows)
        parts = loaded.numbers["programs_per_multiprocessor"] * on.multiprocessors // tiles
        parts = max(1, min(parts, -(-n // LEAST_COLUMNS)))
        z = x.new_empty((parts, tokens, WIDTHS[streams]), dtype=torch.float32)
        loaded.launch(device, stream, tiles * parts, 1, 1, z.data_ptr(), x_at, phi_at, tokens, n, parts)
        h_pre = x.new_empty((*outer, streams), dtype=torch.float32)
        h_post = torch.empty_like(h_pre)
        h_res = x.new_empty((*outer, streams, streams), dtype=torch.float32)
        mix = x.new_empty((tokens, width), dtype=torch.float32) if keep else None
        rstd = x.new_empty(tokens, dtype=torch.float32) if keep else None
        second = on.kernels["mhc_coefficients_balance"]((streams, True), n)
        second.launch(
            device, stream, -(-tokens // second.rows), 1, 1,
            h_pre.data_ptr(), h_post.data_ptr(), h_res.data_ptr(), None if mix is None else mix.data_ptr(),
            None if rstd is None else rstd.data_ptr(), z.data_ptr(), bias_at, pre_at, post_at, res_at,
            tokens, n, parts, iterations, eps, pre_eps, sinkhorn_eps, post_scale, keep,
        )  # fmt: skip
        return h_pre, h_post, h_res, mix, rstd

    def prepare_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        self.check(tensors, settings)
        x, phi, bias, *alphas = tensors
        ready = (x.contiguous(), phi, bias, *(t.reshape(1) for t in alphas))
        return super().prepare_forward(ready, settings, keep, out)

    def saved(self, tensors: Tensors, results: Tensors) -> Tensors:
        return *tensors, *results[3:]

    def run_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        x, phi, bias, *alphas, mix, rstd = saved
        in_x = rows_of(x)
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        if on is None or in_x is None or not in_x[5] * in_x[6] or not any(needed):
            return self.prepare_backward(grads, saved, settings, needed)
        grads = tuple(None if g is None else g.contiguous() for g in grads)
        x = x.contiguous()
        streams, n, tokens = x.shape[-2], phi.shape[0], mix.shape[0]
        device = on.device
        stream = on.stream(device)
        wide = WIDTHS[streams] + ALPHAS
        dz_dtype = torch.bfloat16 if x.dtype == phi.dtype == torch.bfloat16 else torch.float32
        first = on.kernels["mhc_coefficients_balance_backward"]((dz_dtype, streams, True), n)
        programs, _, _ = persistent(on, first, tokens)
        dz = x.new_empty((tokens, WIDTHS[streams]), dtype=dz_dtype)
        factor = torch.empty_like(rstd)
        partials = torch.empty((programs, wide), dtype=torch.float32, device=x.device)
        scales = torch.empty(
            programs * first.rows * settings[0] * 2 * streams, dtype=torch.float32, device=x.device
        )
        first.launch(
            device, stream, programs, 1, 1,
            dz.data_ptr(), factor.data_ptr(), partials.data_ptr(), scales.data_ptr(),
            *(None if g is None else g.data_ptr() for g in grads),
            mix.data_ptr(), rstd.data_ptr(), bias.data_ptr(), *(t.data_ptr() for t in alphas),
            tokens, n, settings[0], settings[3], settings[4], *(g is not None for g in grads),
        )  # fmt: skip
        need_dx, need_dphi, *need_others = needed
        dx, dphi = self._project_backward(on, x, phi, dz, factor, need_dx, need_dphi)
        others: list[Tensor | None] = [None] * 4
        if any(need_others):
            found = tuple(torch.empty_like(t) for t in (bias, *alphas))
            last = on.kernels["mhc_coefficients_sums"]((streams, True), n)
            last.launch(
                device,
                stream,
                wide // ALPHAS,
                1,
                1,
                *(t.data_ptr() for t in found),
                partials.data_ptr(),
                programs,
            )
            others = [t if need else None for t, need in zip(found, need_others, strict=True)]
        return dx, dphi, *others

    def _project_backward(
        self, on: OpOn, x: Tensor, phi: Tensor, dz: Tensor, factor: Tensor, need_dx: bool, need_dphi: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of x and phi from that of their product."""
        if not (need_dx or need_dphi):
            return None, None
        (n, width), tokens = phi.shape, dz.shape[0]
        dx = torch.empty_like(x) if need_dx else None
        x_at, phi_at, dx_at = x.data_ptr(), phi.data_ptr(), 0 if dx is None else dx.data_ptr()
        dz_at = dz.data_ptr()
        key = (x.dtype, phi.dtype, dz.dtype, x.shape[-2], not (x_at | phi_at | dx_at | dz_at | n) & 15)
        loaded = on.kernels["mhc_coefficients_project_backward"](key, n)
        blocks = -(-n // loaded.block)
        groups = loaded.numbers["programs_per_multiprocessor"] * on.multiprocessors // blocks
        groups = max(1, min(groups, -(-tokens // loaded.rows)))
        partials = phi.new_empty((groups, n * width), dtype=torch.float32) if need_dphi else None
        device = on.device
        loaded.launch(
            device, on.stream(device), groups * blocks, 1, 1,
            dx_at, None if partials is None else partials.data_ptr(), dz_at, factor.data_ptr(), x_at, phi_at,
            tokens, n, blocks, need_dx, need_dphi,
        )  # fmt: skip
        if partials is None:
            return dx, None
        dphi = torch.empty_like(phi)
        sums = self._column_sums.bound.get(device) or self._column_sums.on(device)
        column_sums.launch(sums, dphi, partials, groups, n * width)
        return dx, dphi

    @staticmethod
    def reference(
        x: Tensor, phi: Tensor, bias: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor,
        iterations: int, eps: float, pre_eps: float, sinkhorn_eps: float, post_scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        streams, outer = x.shape[-2], x.shape[:-2]
        flat = wide(x).reshape(outer.numel(), streams * x.shape[-1])
        rstd = torch.rsqrt(flat.square().sum(-1) / max(flat.shape[-1], 1) + eps)
        mix = flat @ phi.to(flat.dtype) * rstd.unsqueeze(-1)
        pre, post, res = _logits(mix, wide(bias), (alpha_pre, alpha_post, alpha_res), streams)
        h_res = _sinkhorn(res, iterations, sinkhorn_eps)[-1][1]
        out = bias.dtype  # float32, or float64 where all is
        return (
            (torch.sigmoid(pre) + pre_eps).reshape(*outer, streams).to(out),
            (torch.sigmoid(post) * post_scale).reshape(*outer, streams).to(out),
            h_res.reshape(*outer, streams, streams).to(out),
            mix.to(out),
            rstd.to(out),
        )

    @staticmethod
    def reference_backward(
        grads: Tensors, saved: Tensors, iterations: int, eps: float, pre_eps: float, sinkhorn_eps: float,
        post_scale: float,
    ) -> Tensors:  # fmt: skip
        x, phi, bias, *alphas, mix, rstd = saved
        streams = x.shape[-2]
        flat = wide(x).reshape(x.shape[:-2].numel(), streams * x.shape[-1])
        dtype = flat.dtype
        mix, rstd = mix.to(dtype), rstd.to(dtype)
        pre, post, res = _logits(mix, wide(bias), alphas, streams)
        given = []
        for g, logits in zip(grads, (pre, post, res), strict=True):
            given.append(torch.zeros_like(logits) if g is None else g.to(dtype).reshape(logits.shape))
        dh_pre, dh_post, g = given
        dpre = dh_pre * torch.sigmoid(pre) * torch.sigmoid(-pre)
        dpost = dh_post * post_scale * torch.sigmoid(post) * torch.sigmoid(-post)
        for divided, result, divisors, dim in reversed(_sinkhorn(res, iterations, sinkhorn_eps)):
            dot = (g * (result if divided else result - sinkhorn_eps)).sum(dim, keepdim=True)
            g = (g - dot) / divisors if divided else (result - sinkhorn_eps) * (g - dot)
        parts = dpre, dpost, g.flatten(1)
        dbias = torch.cat(parts, -1)
        widths = (streams, streams, streams * streams)
        mixes = mix.split(widths, -1)
        dalphas = [(d * m).sum() for d, m in zip(parts, mixes, strict=True)]
        scaled = [d * a.reshape(()).to(dtype) for d, a in zip(parts, alphas, strict=True)]
        dmix = torch.cat(scaled, -1)
        dz = dmix * rstd.unsqueeze(-1)
        factor = -(dmix * mix).sum(-1) * rstd.square() / max(flat.shape[-1], 1)
        dx = dz @ phi.to(dtype).t() + factor.unsqueeze(-1) * flat
        dphi = flat.t() @ dz
        return (
            dx.reshape(x.shape).to(x.dtype),
            dphi.to(phi.dtype),
            dbias.sum(0).to(bias.dtype),
            *(d.reshape(a.shape).to(a.dtype) for d, a in zip(dalphas, alphas, strict=True)),
        )

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        streams, n = shape[-2], shape[-2] * shape[-1]
        phi = (dtypes or {}).get("phi", dtype)
        dz = torch.bfloat16 if dtype == phi == torch.bfloat16 else torch.float32
        aligned = n % 16 == 0
        return (
            Problem("mhc_coefficients_project", (dtype, phi, streams), aligned, n),
            Problem("mhc_coefficients_balance", (streams,), True, n),
            Problem("mhc_coefficients_balance_backward", (dz, streams), True, n),
            Problem("mhc_coefficients_sums", (streams,), True, n),
            Problem("mhc_coefficients_project_backward", (dtype, phi, dz, streams), aligned, n),
        )


def _logits(
    mix: Tensor, bias: Tensor, alphas: Sequence[Tensor], streams: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of h_pre, h_post and, as matrices, h_res."""
    widths = (streams, streams, streams * streams)
    parts = zip(mix.split(widths, -1), alphas, bias.split(widths), strict=True)
    pre, post, res = (m * wide(a).reshape(()) + b for m, a, b in parts)
    return pre, post, res.unflatten(-1, (streams, streams))


def _sinkhorn(logits: Tensor, iterations: int, eps: float) -> list[tuple[bool, Tensor, Tensor, int]]:
    """The steps of Sinkhorn-Knopp: whether it is a division, not the softmax; its result; what it divided by; the
    dimension summed over."""
    matrix = logits.softmax(-1) + eps
    steps = [(False, matrix, matrix, -1)]
    for dim in (-2, *((-1, -2) * (iterations - 1))):
        divisors = matrix.sum(dim, keepdim=True) + eps
        matrix = matrix / divisors
        steps.append((True, matrix, divisors, dim))
    return steps


OP = MHCCoefficients
