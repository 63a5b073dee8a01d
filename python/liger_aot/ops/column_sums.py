"""Second level of a two-level column sum; the norms' backward launches it after their own kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError
from liger_aot.op import Op, Problem, check_tensor
from liger_aot.runtime import DTYPE_NAMES


class ColumnSums(Op):
    """``column_sums(partials, dtype=torch.float32) -> Tensor``: the sum over rows, in a fixed order, cast once.

    Args:
        partials: (parts, n) fp32, contiguous.
        dtype: of the result: bfloat16, float16 or float32.

    Returns:
        (n,) tensor. Deterministic: the same partials give the same bits.

    Raises:
        ArgumentTypeError: ``partials`` is no fp32 tensor, or ``dtype`` is not one of the three.
        ArgumentError: ``partials`` is not 2-D and contiguous.
    """

    name = "column_sums"

    def __call__(self, partials: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        self._check(partials, dtype)
        on = self._own.of(partials, "partials")
        if on is None:
            return reference(partials, dtype)
        parts, n = partials.shape
        out = torch.empty(n, dtype=dtype, device=partials.device)
        if n == 0:
            return out
        out_ptr, partials_ptr = out.data_ptr(), partials.data_ptr()
        loaded = on.kernel("column_sums")((dtype, not (out_ptr | partials_ptr | n) & 15), n)
        blocks = -(-n // loaded.numbers["block"])
        loaded.launch(on.device, on.stream(on.device), blocks, 1, 1, out_ptr, partials_ptr, parts, n)
        return out

    def _check(self, partials: Tensor, dtype: torch.dtype) -> None:
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

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        return (Problem("column_sums", ((dtypes or {}).get("out", dtype),), shape[-1] % 16 == 0, shape[-1]),)


def reference(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """The same in plain torch."""
    return partials.sum(0).to(dtype)


OP = ColumnSums
