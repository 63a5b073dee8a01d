"""GeGLU: gelu(gate) * up, forward and backward."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from liger_aot.ops.activations._gated import GatedActivation, halves
from liger_aot.ops.arguments import ANY, Allowed, Schema
from liger_aot.ops.differentiable import Tensors

EXACT = {"tanh": False, "none": True}
APPROXIMATE = Allowed(among=EXACT)


class GeGLU(GatedActivation):
    """``geglu(gate, up=None, *, approximate="tanh") -> Tensor``: gelu(gate) * up.

    Differentiable in both; works under torch.compile and, after ``preload``, in CUDA graphs. CPU tensors take the
    plain-torch reference. Computed in float32, rounded once.

    Args:
        gate: (..., n) bfloat16, float16 or float32; without ``up`` (..., 2n), its first half the gate and its second
            half up: a packed projection's result, read in place. Rows may have any stride; other layouts are copied.
        up: of gate's shape, dtype and device, with strides of its own; or None.
        approximate: "tanh", a * (1 + tanh(sqrt(2 / pi) * (a + 0.044715 * a^3))) / 2, or "none",
            a * (1 + erf(a / sqrt(2))) / 2: as in torch.nn.functional.gelu.

    Returns:
        a contiguous tensor (..., n) of gate's dtype. The arguments are not written to.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: shapes, dtypes or devices differ; a packed last dimension is odd; approximate is unknown.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Hendrycks and Gimpel, Gaussian Error Linear Units (2016); Shazeer, GLU Variants Improve Transformer
        (2020).
    """

    name = "geglu"
    settings = Schema({"bool exact": ANY})

    def __call__(self, gate: Tensor, up: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
        exact = EXACT.get(approximate) if type(approximate) is str else None
        if exact is None:
            APPROXIMATE.checked(self.name, "str approximate", approximate)
        y: Tensor = self.differentiable((gate, up), (exact,))
        return y

    @staticmethod
    def reference(gate: Tensor, up: Tensor | None, exact: bool) -> tuple[Tensor]:
        first, second = halves(gate, up)
        wide = torch.promote_types(gate.dtype, torch.float32)
        a = first.to(wide)
        return ((a * _gelu(a, exact)[0] * second.to(wide)).to(gate.dtype),)

    @staticmethod
    def reference_backward(grads: Tensors, saved: Tensors, exact: bool) -> Tensors:
        (dy,), (gate, up) = grads, saved
        wide = torch.promote_types(gate.dtype, torch.float32)
        a, b = (t.to(wide) for t in halves(gate, up))
        dy = dy.to(wide)
        phi, slope = _gelu(a, exact)
        da, db = (dy * b * slope).to(gate.dtype), (dy * (a * phi)).to(gate.dtype)
        return (da, db) if up is not None else (torch.cat((da, db), -1), None)


def _gelu(a: Tensor, exact: bool) -> tuple[Tensor, Tensor]:
    """gelu(a) / a and the derivative of gelu, without cancellation where a is far below zero."""
    if exact:
        phi = torch.special.erfc(a * -math.sqrt(0.5)) / 2
        return phi, phi + a * torch.exp(-a.square() / 2) * math.sqrt(0.5 / math.pi)
    square = a.square().clamp(max=1e4)  # phi is 0 or 1 for long; an infinite square would give 0 * inf
    c = 2 * math.sqrt(2 / math.pi)
    twice_u = a * (c + c * 0.044715 * square)
    phi = torch.sigmoid(twice_u)
    return phi, phi + a * phi * torch.sigmoid(-twice_u) * (c + 3 * c * 0.044715 * square)


OP = GeGLU
