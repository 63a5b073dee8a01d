"""mHC, the weights of the streams of tokens (tokens, streams, channels): a product with few columns, sigmoids and 20
iterations of Sinkhorn-Knopp. "fp32 phi": the matrix in float32, as models keep it."""

from __future__ import annotations

from torch import Tensor

from benchmarks.op_entry import Function, OpEntry, Random, both
from benchmarks.residual.mhc_pre import SHAPES
from benchmarks.workload import Case

ITERATIONS, EPS = 20, 1e-6
WIDE = "fp32 phi"


class MHCCoefficients(OpEntry):
    op = "mhc_coefficients"
    points = (*both(SHAPES), *both([(8192, 4, 4096)], WIDE))
    kernels = (
        ("mhc_coefficients_project", "forward", ""),
        ("mhc_coefficients_balance", "forward", ""),
        ("mhc_coefficients_balance_backward", "backward", ""),
        ("mhc_coefficients_project_backward", "backward", ""),
    )
    shared = (1, 2, 3, 4, 5)
    small = (4, 4, 1024)

    def inputs(self, case: Case, random: Random) -> tuple[Tensor, ...]:
        _, streams, channels = case.shape
        width = streams * (streams + 2)
        phi = random.normal(streams * channels, width) * (streams * channels) ** -0.5
        alphas = (random.near(1, 1).float().reshape(()) for _ in range(3))
        wide = phi.float() if case.variant == WIDE else phi
        return random.normal(*case.shape), wide, random.near(0, width).float(), *alphas

    def eager(self, variant: str) -> Function:
        return _coefficients

    def liger(self, variant: str) -> Function:
        from liger_kernel.ops.mhc import LigerMHCCoeffsFunction

        return lambda *tensors: LigerMHCCoeffsFunction.apply(*tensors, False, ITERATIONS, EPS, 0.0, EPS, 2.0)

    def tuned_shape(self, kernel: str, n: int, elements: int) -> tuple[int, ...]:
        return elements // n, 4, n // 4


def _coefficients(
    x: Tensor, phi: Tensor, bias: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor
) -> tuple[Tensor, ...]:
    streams, flat = x.shape[-2], x.flatten(-2)
    wide = flat.float()
    z = (flat @ phi if phi.dtype == x.dtype else wide @ phi).float()
    z = z * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()
    widths = (streams, streams, streams * streams)
    alphas = alpha_pre, alpha_post, alpha_res
    parts = zip(z.split(widths, -1), alphas, bias.split(widths), strict=True)
    pre, post, res = (part * alpha + b for part, alpha, b in parts)
    h = res.unflatten(-1, (streams, streams)).softmax(-1) + EPS
    for dim in (-2, *((-1, -2) * (ITERATIONS - 1))):
        h = h / (h.sum(dim, keepdim=True) + EPS)
    return pre.sigmoid(), 2 * post.sigmoid(), h


ENTRY = MHCCoefficients()
