"""What the divergences launch beside their own kernels: a count of labels, and a sum of partial sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError
from liger_aot.ops.guards import check_plain, needs_gradient, no_gradient
from liger_aot.ops.op import Op, Problem, check_tensor


class DivergenceSums(Op):
    """``divergence_sums(partials) -> Tensor``: the sum of a float32 vector, in a fixed order.

    Args:
        partials: (parts,) float32, contiguous.

    Returns:
        () float32. Deterministic: the same partials give the same bits.

    Raises:
        ArgumentTypeError: ``partials`` is no tensor of a supported dtype.
        ArgumentError: ``partials`` is not float32, 1-D and contiguous, or a gradient is needed.

    Source:
        The definition: torch's ``partials.sum()``.
    """

    name = "divergence_sums"

    def __call__(self, partials: Tensor) -> Tensor:
        check_plain(self.name, partials=partials)
        check_tensor(self.name, "partials", partials)
        if partials.dtype != torch.float32 or partials.dim() != 1 or not partials.is_contiguous():
            raise ArgumentError(
                f"divergence_sums: partials must be float32, 1-D and contiguous; got {partials.dtype} of shape "
                f"{tuple(partials.shape)} with strides {partials.stride()}"
            )
        if torch.is_grad_enabled() and needs_gradient((partials,)):
            raise no_gradient(self.name, "its sum has none", "torch's sum")
        on = self._own.of(partials, "partials")
        if on is None or not partials.numel():
            return reference(partials)
        out, at, parts = partials.new_empty(()), partials.data_ptr(), partials.shape[0]
        loaded = on.kernels["divergence_total"]((not at & 15,), parts)
        device = on.device
        loaded.launch(device, on.stream(device), 1, 1, 1, out.data_ptr(), at, None, parts, 1.0)
        return out

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        return tuple(Problem(f"divergence_{way}", (), True, shape[0]) for way in ("count", "total"))


def reference(partials: Tensor) -> Tensor:
    """The same in plain torch."""
    return partials.sum()


OP = DivergenceSums
