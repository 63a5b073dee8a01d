"""The weights of hyper-connections on every driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.residual.mhc_coefficients import MHCCoefficients
from tests.conftest import built_pack
from tests.harness.drivers import EmulatorDriver, bound_op
from tests.harness.op_gpu_tests import installed
from tests.harness.op_tests import BF16, FP16, FP32, Case, Draw, Exact, OpTests, Results
from tests.harness.tolerances import REFERENCE, UNIT_ROUNDOFF
from tests.ops.residual.stream_cases import fp32_of, with_streams

X, PHI, BIAS, ONE = torch.ones(3, 2, 8), torch.ones(16, 8), torch.ones(8), torch.ones(1)


class TestMHCCoefficients(OpTests):
    """Options of a case: ``phi``, its dtype if not x's; ``scalar``, whether the alphas have no dimension."""

    op_class = MHCCoefficients
    names = ("h_pre", "h_post", "h_res")
    relaid = ("x",)
    dimensions = (3, 4)
    longest_emulated = 600
    defaults: Mapping[str, Any] = {
        "iterations": 3,
        "eps": 1e-6,
        "pre_eps": 0.0,
        "sinkhorn_eps": 1e-6,
        "post_scale": 2.0,
    }
    cases = (
        Case((3, 4, 48), BF16),
        Case((5, 2, 40), BF16, phi=FP32, iterations=20),
        Case((5, 4, 36), BF16, phi=FP32),
        Case((300, 4, 20), BF16),
        Case((2, 3, 4, 16), FP32, iterations=1, scalar=True),
        Case((33, 2, 9), FP16, eps=0.1),
        Case((2, 8, 6), BF16, pre_eps=1e-4),
        Case((3, 8, 4), FP32, post_scale=1.0),
        Case((4, 2, 33), FP16, phi=FP32, sinkhorn_eps=1e-3),
        Case((4, 65), BF16, shift=3),
        Case((3, 4, 16), BF16, gap=16, scalar=True),
        Case((1, 2, 1), FP32, iterations=2),
    )
    empty = (Case((0, 4, 16), BF16), Case((2, 2, 0), FP32))
    large = (
        Case((8192, 4, 512), BF16, iterations=20),
        Case((4096, 4, 2048), BF16, iterations=20),
        Case((2049, 4, 4096), BF16, iterations=20),
        Case((2048, 4, 7168), BF16, phi=FP32, iterations=20),
        Case((4000, 2, 1024), FP16, iterations=20),
        Case((1000, 8, 1024), BF16, iterations=20),
        Case((1000, 8, 257), BF16, phi=FP32, iterations=20),
        Case((2000, 4, 1000), FP32, iterations=20),
    )
    beyond = (Case(((1 << 31) // 16384 + 64, 4, 4096), BF16),)
    bad: Mapping[str, Any] = {
        "three streams": (
            (torch.ones(3, 3, 8), PHI, BIAS, ONE, ONE, ONE),
            {},
            ArgumentError,
            r"x must have 2, 4 or 8 streams.*got shape \(3, 3, 8\)",
        ),
        "phi's shape": (
            (X, PHI[:8], BIAS, ONE, ONE, ONE),
            {},
            ArgumentError,
            r"phi must be contiguous of shape \(16, 8\).*got shape \(8, 8\)",
        ),
        "phi transposed": (
            (X, torch.ones(8, 16).t(), BIAS, ONE, ONE, ONE),
            {},
            ArgumentError,
            r"strides \(1, 16\)",
        ),
        "phi's dtype": (
            (X.bfloat16(), PHI.half(), BIAS, ONE, ONE, ONE),
            {},
            ArgumentTypeError,
            "phi must be of x's dtype torch.bfloat16 or float32, got torch.float16",
        ),
        "bias' shape": (
            (X, PHI, BIAS[:7], ONE, ONE, ONE),
            {},
            ArgumentError,
            r"bias must be.*\(8,\), got shape \(7,\)",
        ),
        "bias' dtype": ((X, PHI, BIAS.half(), ONE, ONE, ONE), {}, ArgumentTypeError, "bias must be float32"),
        "an alpha of two": (
            (X, PHI, BIAS, ONE, torch.ones(2), ONE),
            {},
            ArgumentError,
            r"alpha_post must have one element, got shape \(2,\)",
        ),
        "an alpha's dtype": (
            (X, PHI, BIAS, ONE, ONE, ONE.half()),
            {},
            ArgumentTypeError,
            "alpha_res must be float32",
        ),
        "no iteration": (
            (X, PHI, BIAS, ONE, ONE, ONE),
            {"iterations": 0},
            ArgumentError,
            "iterations must be from 1 to",
        ),
        "eps": ((X, PHI, BIAS, ONE, ONE, ONE), {"eps": -1.0}, ArgumentError, "eps must be at least 0"),
        "integers": (
            (X.int(), PHI, BIAS, ONE, ONE, ONE),
            {},
            ArgumentTypeError,
            "x must be bfloat16.*got int32",
        ),
    }

    def tensors(self, case: Case, draw: Draw) -> Tensors:
        """Logits of about 1: sigmoids and softmaxes that are not saturated."""
        streams, n = case.shape[-2], case.shape[-2] * case.shape[-1]
        width, wide = streams * (streams + 2), fp32_of(case)
        phi = draw.dense(n, width, dtype=torch.promote_types(case.get("phi", case.dtype), case.dtype))
        alphas = (draw.uniform(0.5, 1.5, *(() if case.get("scalar") else (1,))).to(wide) for _ in range(3))
        return draw.rows(*case.shape), phi.mul_(max(n, 1) ** -0.5), draw.dense(width, dtype=wide), *alphas

    def formula(
        self, x: Tensor, phi: Tensor, bias: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor,
        iterations: int, eps: float, pre_eps: float, sinkhorn_eps: float, post_scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        streams = x.shape[-2]
        flat = x.flatten(-2)
        mix = flat / torch.sqrt((flat * flat).mean(-1, keepdim=True) + eps) @ phi
        pre = alpha_pre * mix[..., :streams] + bias[:streams]
        post = alpha_post * mix[..., streams : 2 * streams] + bias[streams : 2 * streams]
        res = alpha_res * mix[..., 2 * streams :] + bias[2 * streams :]
        h = torch.softmax(res.unflatten(-1, (streams, streams)), -1) + sinkhorn_eps
        h = h / (h.sum(-2, keepdim=True) + sinkhorn_eps)
        for _ in range(iterations - 1):
            h = h / (h.sum(-1, keepdim=True) + sinkhorn_eps)
            h = h / (h.sum(-2, keepdim=True) + sinkhorn_eps)
        return 1 / (1 + torch.exp(-pre)) + pre_eps, post_scale / (1 + torch.exp(-post)), h

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        """From the sums of the terms that make the logits. Sinkhorn-Knopp changes the logarithms of its result by at
        most four times the largest change of its logits; its gradient stays below four times the largest that it was
        given, and what it is multiplied by changes with the logits as much as the result."""
        x, phi, bias, *alphas = exact.inputs.values()
        h_pre, h_post, h_res, mix, rstd = exact.results
        settings = exact.settings
        streams, tokens = x.shape[-2], mix.shape[0]
        widths = (streams, streams, streams * streams)
        flat = x.reshape(tokens, streams * x.shape[-1]).abs()
        mixes = flat @ phi.abs() * rstd.unsqueeze(-1)
        pairs = zip(mixes.split(widths, -1), alphas, bias.split(widths), strict=True)
        pre, post, res = (m * a.reshape(()).abs() + b.abs() for m, a, b in pairs)
        most = res.amax(-1, keepdim=True) if tokens else res[..., :1]
        slope_pre, slope_post = (
            (h * (1 - h)).reshape(tokens, streams)
            for h in (h_pre - settings["pre_eps"], h_post / settings["post_scale"])
        )
        found: dict[str, Any] = {
            "h_pre": h_pre.abs() + (slope_pre * pre).reshape(h_pre.shape),
            "h_post": h_post.abs() + settings["post_scale"] * (slope_post * post).reshape(h_post.shape),
            "h_res": h_res * (1 + 4 * most).reshape(*x.shape[:-2], 1, 1),
        }
        dh_pre, dh_post, dh_res = (
            torch.zeros_like(h) if g is None else g.abs()
            for g, h in zip(exact.grads, exact.results[:3], strict=True)
        )
        logits = mix[:, 2 * streams :] * alphas[2].reshape(()) + bias[2 * streams :]
        p = logits.unflatten(-1, (streams, streams)).softmax(-1)
        columns = (p / p.sum(-2, keepdim=True)).flatten(1)
        largest = dh_res.reshape(tokens, widths[2]).amax(-1, keepdim=True) if tokens else columns[..., :1]
        parts = (
            dh_pre.reshape(tokens, streams) * slope_pre * (1 + pre),
            dh_post.reshape(tokens, streams) * settings["post_scale"] * slope_post * (1 + post),
            columns * largest * 4 * (1 + 4 * most),
        )
        found["dbias"] = torch.cat(parts, -1).sum(0)
        for name, d, m, a in zip(("pre", "post", "res"), parts, mixes.split(widths, -1), alphas, strict=True):
            found[f"dalpha_{name}"] = (d * m).sum().reshape(a.shape)
        dmix = torch.cat([d * a.reshape(()).abs() for d, a in zip(parts, alphas, strict=True)], -1)
        factor = (dmix * mixes).sum(-1) * rstd.square() / max(flat.shape[-1], 1)
        # Of bfloat16 x and phi the backward rounds the product's gradient: so many roundoffs of float32 are one.
        dz = dmix * rstd.unsqueeze(-1)
        rounding = UNIT_ROUNDOFF[BF16] / (REFERENCE["fp32"] * UNIT_ROUNDOFF[FP32])
        narrow = dz * (1 + rounding)
        found["dx"] = (narrow @ phi.abs().t() + factor.unsqueeze(-1) * flat).reshape(x.shape)
        found["dphi"] = flat.t() @ narrow
        return {name: {"magnitude": value} for name, value in found.items()}

    @pytest.mark.gpu
    def test_past_two_to_the_31(self, beyond_case: Case) -> None:
        """Offsets past 2^31 elements: the last tokens' results are right. How many programs share a token's columns
        depends on how many tokens there are, and with it the last bits."""
        op = self.loaded_op()
        tensors, settings, grads = self.draw(beyond_case, 0, "cuda")
        assert tensors[0].numel() > 1 << 31
        got = self.run(op, tensors, settings, grads, needed=("x",))
        tails = Results(tuple(y[-96:] for y in got.outputs), {"x": got.gradients["x"][-96:]})
        few, few_grads = (tensors[0][-96:], *tensors[1:]), tuple(dy[-96:] for dy in grads)
        exact = self.exact(few, settings, few_grads)
        self.compare(tails, exact, few, installed().tolerance, f"the last tokens of {beyond_case}")

    def table_case(
        self, kernel: str, dtypes: Mapping[str, Any], n: int, aligned: bool, rows: int
    ) -> Case | None:
        streams = int(dtypes["streams"])
        channels = max(1, n // streams)
        channels = -(-channels // 16) * 16 if aligned else channels | 1
        dtype = dtypes.get("dtype", dtypes.get("dz", BF16))
        return Case((rows, streams, channels), dtype, phi=dtypes.get("weight", dtype))

    def fit(self, case: Case, choose: Callable[[Sequence[Any]], Any]) -> Case:
        if case.shape[-1] > 1000:  # products of a small number of long rows
            case = case.but(shape=(*case.shape[:-1], case.shape[-1] // 8))
        return with_streams(case, choose)


@pytest.mark.parametrize("streams", [2, 4, 8])
def test_the_result_is_doubly_stochastic(streams: int) -> None:
    op = liger_aot.load("mhc_coefficients")
    width = streams * (streams + 2)
    x, phi = torch.randn(5, streams, 16), torch.randn(16 * streams, width)
    one = torch.ones(())
    _, _, h_res = op(x, phi * (16 * streams) ** -0.5, torch.randn(width), one, one, one, iterations=200)
    for dim in (-1, -2):
        torch.testing.assert_close(h_res.sum(dim), torch.ones(5, streams), atol=1e-4, rtol=0)


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942"])
@pytest.mark.parametrize("streams", [2, 8])
def test_subnormal_weights(arch: str, streams: int) -> None:
    """gfx90a's matrix instructions read subnormal float16 numbers as zeros; large alphas make them count."""
    channels, width = 16, streams * (streams + 2)
    x = torch.randn(3, streams, channels).half()
    phi = (torch.randn(streams * channels, width) * 2e-5).clamp(-6e-5, 6e-5).half()
    assert 0 < phi.abs().max() < torch.finfo(FP16).tiny
    bias, alpha = torch.zeros(width), torch.full((1,), 1e4)
    op = bound_op(MHCCoefficients, built_pack(arch), EmulatorDriver)
    found = op(x, phi, bias, alpha, alpha, alpha)
    wanted = liger_aot.load("mhc_coefficients")(x.float(), phi.float(), bias, alpha, alpha, alpha)
    # Logits are 1e4 times sums of up to 128 products below 6e-5 * 4 in float32: 3e1 * 128 * 2^-24 off at most; the
    # results' slopes are 2 and less.
    for y, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(y, exact, atol=5e-4, rtol=1e-3)
