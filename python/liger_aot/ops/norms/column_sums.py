"""Second level of a two-level column sum; the norms' backward launches it after their own kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError
from liger_aot.ops.guards import check_plain, needs_gradient, no_gradient
from liger_aot.ops.op import Op, Problem, check_tensor
from liger_aot.runtime.dispatch import DTYPE_NAMES, OpOn


class ColumnSums(Op):
    """``column_sums(partials, dtype=torch.float32) -> Tensor``: the sum over rows, in a fixed order, cast once.

    Args:
        partials: (parts, n) fp32, contiguous.
        dtype: of the result: bfloat16, float16 or float32.

    Returns:
        (n,) tensor. Deterministic: the same partials give the same bits.

    Raises:
        ArgumentTypeError: ``partials`` is no tensor of a supported dtype.
        ArgumentError: ``partials`` is not fp32, 2-D and contiguous, ``dtype`` is not one of the three, or a gradient is
            needed.

    Source:
        The definition: torch's ``partials.sum(0)``.
    """

    name = "column_sums"

    def __call__(self, partials: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        self._check(partials, dtype)
        on = self._own.of(partials, "partials")
        if on is None or not partials.numel():
            return reference(partials, dtype)
        out = torch.empty(partials.shape[1], dtype=dtype, device=partials.device)
        launch(on, out, partials, *partials.shape)
        return out

    def _check(self, partials: Tensor, dtype: torch.dtype) -> None:
        check_plain(self.name, partials=partials)
        check_tensor(self.name, "partials", partials)
        if partials.dtype != torch.float32 or dtype not in DTYPE_NAMES:
            raise ArgumentError(
                f"column_sums: partials must be float32 and dtype one of bfloat16, float16, float32; "
                f"got {partials.dtype} and {dtype}"
            )
        if partials.dim() != 2 or not partials.is_contiguous():
            raise ArgumentError(
                f"column_sums: partials must be 2-D and contiguous, got shape {tuple(partials.shape)} "
                f"with strides {partials.stride()}"
            )
        if torch.is_grad_enabled() and needs_gradient((partials,)):
            raise no_gradient(self.name, "its sums have none", "torch's sum")

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        return (Problem("column_sums", ((dtypes or {}).get("out", dtype),), shape[-1] % 16 == 0, shape[-1]),)


def launch(on: OpOn, out: Tensor, partials: Tensor, parts: int, n: int) -> None:
    """out[n] = the column sums of partials[parts, n], unchecked."""
    out_at, partials_at = out.data_ptr(), partials.data_ptr()
    loaded = on.kernels["column_sums"]((out.dtype, not (out_at | partials_at | n) & 15), n)
    device = on.device
    loaded.launch(device, on.stream(device), -(-n // loaded.block), 1, 1, out_at, partials_at, parts, n)


def reference(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """The same in plain torch."""
    return partials.sum(0).to(dtype)


OP = ColumnSums
