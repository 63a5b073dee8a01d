"""A linear layer's results by chunks of rows: how many rows, the products, and the layer's gradients.

The products are cuBLAS's or hipBLAS's, by torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError

# Bytes of the buffer that one chunk's logits lie in. On one NVIDIA H200, 8192 x 4096 x 128256 in bf16, forward and
# backward took 1.09 of the three products' time with 2^28 bytes, 1.05 with 2^29 and 1.07 (noise of 0.02) with 2^30.
BUDGET = 1 << 29
TILE_ROWS = 128  # of a matrix product's tile: chunks are multiples of it
TILE_COLUMNS = 64  # rows of the buffer begin at multiples of so many elements: products of any width are fast


def chunk_rows(op: str, rows: int, row_bytes: int, budget: int) -> int:
    """Rows a chunk: as few chunks as the budget allows, of one size.

    Args:
        row_bytes: what one row takes of the budget.
        budget: bytes.

    Raises:
        ArgumentError: the budget does not hold one row.
    """
    most = budget // row_bytes
    if most < 1:
        raise ArgumentError(
            f"{op}: chunk_bytes must hold one row of the logits, {row_bytes} bytes; got {budget}"
        )
    each = -(-rows // -(-rows // most))
    tiles = -(-each // TILE_ROWS) * TILE_ROWS
    return min(tiles if tiles <= most else each, rows)


def chunk_buffer(x: Tensor, rows: int, n: int) -> Tensor:
    """(rows, n) uninitialised memory of x's dtype and device, whose rows begin at aligned addresses."""
    return x.new_empty((rows, padded(n)))[:, :n]


def padded(n: int) -> int:
    """Elements from one row of ``chunk_buffer`` to the next."""
    return -(-n // TILE_COLUMNS) * TILE_COLUMNS


def project(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """out (rows, n) = x (rows, k) @ weight (n, k)^T + bias, all of one dtype."""
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def accumulate(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total = a @ b the first time, then total += a @ b, added in float32 and rounded to total's dtype."""
    if total.dtype == a.dtype:
        if first:
            torch.mm(a, b, out=total)
        else:
            torch.addmm(total, a, b, out=total)
    elif total.is_cuda:
        if first:
            torch.ops.aten.mm.dtype_out(a, b, total.dtype, out=total)
        else:
            torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        found = a.to(total.dtype) @ b.to(total.dtype)
        total.copy_(found) if first else total.add_(found)


class LinearGradients:
    """Gradients of one linear layer, y = x @ weight^T + bias, from those of y by chunks of rows.

    Args:
        x: (rows, k), contiguous rows.
        weight: (n, k) of x's dtype.
        bias: (n,) or None.
        wanted: whether there is to be a gradient of x, of the weight, of the bias. What isn't wanted costs nothing.
        weight_dtype: of the weight's gradient: x's, which rounds the sum once a chunk, or float32.
    """

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wanted: Sequence[bool],
        weight_dtype: torch.dtype | None = None,
    ) -> None:
        self._x, self._weight = x, weight
        want_x, want_weight, want_bias = wanted
        self.x = torch.empty(x.shape, dtype=x.dtype, device=x.device) if want_x else None
        self.weight = (
            torch.empty(weight.shape, dtype=weight_dtype or x.dtype, device=x.device) if want_weight else None
        )
        self.bias = (
            torch.zeros(weight.shape[0], dtype=torch.float32, device=x.device)
            if want_bias and bias is not None
            else None
        )

    def add(self, first: int, gradient: Tensor) -> None:
        """Take in ``gradient`` (m, n) of y's rows from ``first`` on; the first chunk's ``first`` is 0."""
        last = first + gradient.shape[0]
        if self.x is not None:
            torch.mm(gradient, self._weight, out=self.x[first:last])
        if self.weight is not None:
            accumulate(self.weight, gradient.t(), self._x[first:last], first == 0)
        if self.bias is not None:
            self.bias.add_(gradient.sum(0, dtype=torch.float32))

    def shaped(
        self, input: Tensor, bias: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of ``input``, whose rows x are, of the weight and of ``bias``, in its dtype; None for what
        isn't wanted."""
        d_input = None if self.x is None else self.x.view(input.shape)
        return d_input, self.weight, None if self.bias is None or bias is None else self.bias.to(bias.dtype)


def contiguous_rows(x: Tensor) -> Tensor:
    """x (..., n) as (rows, n) whose rows are contiguous; a copy where they are not, or don't lie evenly."""
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return rows if rows.shape[-1] == 1 or rows.stride(-1) == 1 else rows.contiguous()


def autocast(*tensors: Any) -> tuple[Any, ...]:
    """The input of a linear layer and its weights as torch.nn.functional.linear takes them under autocast; those in
    float32 stay, as their gradients are to be."""
    input = tensors[0]
    if not isinstance(input, Tensor) or not torch.is_autocast_enabled(input.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(input.device.type)
    rest = (t if not isinstance(t, Tensor) or t.dtype == torch.float32 else t.to(dtype) for t in tensors[1:])
    return (input.to(dtype), *rest)


def check_linear(op: str, name: str, x: Tensor, weight: Any, bias: Any) -> None:
    """Raise unless ``weight`` is (n, k) and ``bias`` (n,) or None, of x's dtype or float32, for rows of k elements on
    x's device; ``name`` is x's."""
    for argument, value in (("weight", weight), ("bias", bias)):
        if value is None and argument == "bias":
            continue
        if not isinstance(value, Tensor):
            raise ArgumentTypeError(f"{op}: {argument} must be a torch.Tensor, got {type(value).__name__}")
        if hasattr(value, "device_mesh"):
            raise ArgumentTypeError(
                f"{op}: {argument} is a DTensor: under FSDP2 call this inside the forward of the module that holds it; "
                "for a vocabulary cut over ranks there is vocab_parallel_linear_cross_entropy"
            )
        if value.device != x.device:
            raise ArgumentError(
                f"{op}: {argument} is on {value.device}, {name} on {x.device}: both must be on one"
            )
        if value.dtype not in (x.dtype, torch.float32):
            raise ArgumentTypeError(
                f"{op}: {argument} must be of {name}'s dtype {x.dtype} or float32, got {value.dtype}"
            )
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ArgumentError(
            f"{op}: weight must be of shape (vocabulary, {x.shape[-1]}), as {name} {tuple(x.shape)} asks; got "
            f"{tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ArgumentError(
            f"{op}: bias must be of shape ({weight.shape[0]},), weight's rows; got {tuple(bias.shape)}"
        )


def check_weight_grad_dtype(op: str, dtype: torch.dtype | None, weight: Tensor) -> None:
    if dtype not in (None, weight.dtype, torch.float32):
        raise ArgumentTypeError(
            f"{op}: weight_grad_dtype must be None, torch.float32 or weight's dtype {weight.dtype}; got {dtype}"
        )
