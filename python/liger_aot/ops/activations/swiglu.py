"""SwiGLU: silu(gate) * up, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_aot.ops.activations._gated import GatedActivation, halves
from liger_aot.ops.differentiable import Tensors


class SwiGLU(GatedActivation):
    """``swiglu(gate, up=None) -> Tensor``: silu(gate) * up, where silu(a) = a * sigmoid(a).

    Differentiable in both; works under torch.compile and, after ``preload``, in CUDA graphs. CPU tensors take the
    plain-torch reference. Computed in float32, rounded once.

    Args:
        gate: (..., n) bfloat16, float16 or float32; without ``up`` (..., 2n), its first half the gate and its second
            half up: a packed projection's result, read in place. Rows may have any stride; other layouts are copied.
        up: of gate's shape, dtype and device, with strides of its own; or None.

    Returns:
        a contiguous tensor (..., n) of gate's dtype. The arguments are not written to.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: shapes, dtypes or devices differ; a packed last dimension is odd.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Shazeer, GLU Variants Improve Transformer (2020).
    """

    name = "swiglu"

    def __call__(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        y: Tensor = self.differentiable((gate, up))
        return y

    @staticmethod
    def reference(gate: Tensor, up: Tensor | None = None) -> tuple[Tensor]:
        first, second = halves(gate, up)
        wide = torch.promote_types(gate.dtype, torch.float32)
        return ((torch.nn.functional.silu(first.to(wide)) * second.to(wide)).to(gate.dtype),)

    @staticmethod
    def reference_backward(grads: Tensors, saved: Tensors) -> Tensors:
        (dy,), (gate, up) = grads, saved
        wide = torch.promote_types(gate.dtype, torch.float32)
        a, b = (t.to(wide) for t in halves(gate, up))
        dy = dy.to(wide)
        sigmoid = torch.sigmoid(a)
        silu = a * sigmoid
        da = (dy * b * (silu * (1 - sigmoid) + sigmoid)).to(gate.dtype)
        db = (dy * silu).to(gate.dtype)
        return (da, db) if up is not None else (torch.cat((da, db), -1), None)


OP = SwiGLU
