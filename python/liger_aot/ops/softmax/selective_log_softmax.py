"""Log-probabilities of chosen tokens from logits, forward and backward, without the log-softmax of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import e, log2
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.arguments import ABOVE_ZERO, Schema
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.op import Problem, as_rows, check_rows, check_same_device
from liger_aot.runtime import device_errors
from liger_aot.runtime.layout import rows_of

LOG2_E = log2(e)


class SelectiveLogSoftmax(DifferentiableOp):
    """``selective_log_softmax(logits, index, *, temperature=1.0) -> Tensor``: log_softmax(logits / temperature) at the
    columns ``index`` of each row, as reinforcement learning from human feedback needs it.

    Differentiable in logits; works under torch.compile and, after ``preload``, in CUDA graphs. CPU
    tensors take the plain-torch reference. Computed in float32: the forward reads the logits once and keeps two numbers
    a row, the backward reads them once more.

    Args:
        logits: (..., n) bfloat16, float16 or float32. Rows may have any stride; other layouts are copied.
        index: (...) or (..., k) int64 or int32 in [0, n): one or k columns of each row, in any order and more than
            once.
        temperature: above 0.

    Returns:
        float32, contiguous, of index's shape.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: a shape, device or temperature does not fit, or an index is outside of a row. On a GPU that is
            found without waiting for it: the result is NaN there, the next call raises, and with LIGER_AOT_DEBUG=1 the
            call itself.
        PackNotFound: no installed pack serves the GPU.

    Source:
        The function of that name in Hugging Face's TRL.
    """

    name = "selective_log_softmax"
    tensors = ("logits", "index")
    settings = Schema({"float temperature": ABOVE_ZERO})
    results = 2  # and the greatest logit and log2 of the sum of powers relative to it, of each row

    def __call__(self, logits: Tensor, index: Tensor, *, temperature: float = 1.0) -> Tensor:
        chosen: Tensor = self.differentiable((logits, index), (temperature,))
        return chosen

    def preload(self, device: torch.device | int | str | None = None) -> None:
        super().preload(device)
        device_errors.flag(self.name)  # no CUDA graph may allocate it

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        logits, index = tensors
        check_rows(self.name, "logits", logits)
        if not isinstance(index, Tensor):
            raise ArgumentTypeError(
                f"selective_log_softmax: index must be a torch.Tensor, got {type(index).__name__}"
            )
        if index.dtype not in (torch.int64, torch.int32):
            raise ArgumentTypeError(f"selective_log_softmax: index must be int64 or int32, got {index.dtype}")
        check_same_device(self.name, "index", index, "logits", logits)
        rows = logits.shape[:-1]
        if index.shape != rows and (index.dim() != logits.dim() or index.shape[:-1] != rows):
            raise ArgumentError(
                f"selective_log_softmax: index must be of shape {tuple(rows)} or that and one more dimension, as "
                f"logits {tuple(logits.shape)} asks; got {tuple(index.shape)}"
            )

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        logits, index = tensors
        in_x = rows_of(logits)
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        if (
            on is None
            or in_x is None
            or not isinstance(index, Tensor)
            or index.dtype not in (torch.int64, torch.int32)
            or index.device != logits.device
            or not index.is_contiguous()
            or not index.numel()
            or not in_x[6]
            or (index.shape != logits.shape[:-1] and index.shape[:-1] != logits.shape[:-1])
        ):
            return self.prepare_forward(tensors, settings, keep, out)
        device_errors.raise_if_any(self.name)
        x_at, _, _, _, _, rows, n, x_stride = in_x
        made = logits.new_empty(index.shape, dtype=torch.float32)
        statistics = logits.new_empty((rows, 2), dtype=torch.float32)
        key, kernel = (
            (logits.dtype, not (x_at | x_stride | n) & 15),
            on.kernels["selective_log_softmax_forward"],
        )
        loaded = kernel.recent.get((*key, n)) or kernel(key, n)
        device = on.device
        loaded.launch(
            device, on.stream(device), rows, 1, 1,
            made.data_ptr(), statistics.data_ptr(), x_at, index.data_ptr(), device_errors.flag(self.name), x_stride, n,
            index.numel() // rows, index.element_size() // 4, LOG2_E / settings[0],
            1 / settings[0],
        )  # fmt: skip
        device_errors.check_now(self.name, device)
        return made, statistics

    def prepare_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        self.check(tensors, settings)
        logits, index = tensors
        if not self.on_reference(tensors):
            ready = as_rows(self.name, "logits", logits), index.contiguous()
            return self.run_forward(ready, settings, keep, out)
        if index.device.type == "cpu" and index.numel():
            low, high = (int(v) for v in index.aminmax())
            if low < 0 or high >= logits.shape[-1]:
                raise ArgumentError(
                    f"selective_log_softmax: index must be in [0, {logits.shape[-1]}), the columns of logits; got "
                    f"{low if low < 0 else high}"
                )
        return super().prepare_forward(tensors, settings, keep, out)

    def on_reference(self, tensors: Tensors) -> bool:
        return super().on_reference(tensors) or not tensors[1].numel()

    def saved(self, tensors: Tensors, results: Tensors) -> Tensors:
        return *tensors, results[1]

    def run_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        (dy,), (logits, index, statistics) = grads, saved
        in_x = rows_of(logits)
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        if on is None or in_x is None or not index.numel() or not in_x[6]:
            return self.prepare_backward(grads, saved, settings, needed)
        x_at, _, _, _, _, rows, n, x_stride = in_x
        dy, index = dy.contiguous(), index.contiguous()
        dx = torch.empty_like(logits, memory_format=torch.contiguous_format)
        dx_at = dx.data_ptr()
        aligned = not (dx_at | x_at | x_stride | n) & 15
        loaded = on.kernels["selective_log_softmax_backward"]((logits.dtype, aligned), n)
        blocks = -(-(n if aligned else n + 15) // loaded.block)  # blocks of odd rows may begin before them
        device = on.device
        loaded.launch(
            device, on.stream(device), rows * blocks, 1, 1,
            dx_at, dy.data_ptr(), x_at, index.data_ptr(), statistics.data_ptr(), x_stride, n, blocks,
            index.numel() // rows, index.element_size() // 4, LOG2_E / settings[0],
            1 / settings[0],
        )  # fmt: skip
        return dx, None

    def prepare_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        if self.on_reference(saved):
            return self.gradients_by_reference(grads, saved, settings)
        logits, *rest = saved
        return self.run_backward(grads, (as_rows(self.name, "logits", logits), *rest), settings, needed)

    @staticmethod
    def reference(logits: Tensor, index: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        x, columns, known = _wide(logits), *_columns(logits, index)
        if not x.shape[-1]:
            return x.new_full(index.shape, torch.nan), x.new_zeros((x.shape[:-1].numel(), 2))
        scaled = x / temperature
        greatest = x.amax(-1, keepdim=True)
        total = (scaled - greatest / temperature).exp().sum(-1, keepdim=True)
        chosen = (x.gather(-1, columns) - greatest) / temperature - total.log()
        statistics = torch.cat((greatest, total.log2()), -1).reshape(-1, 2)
        return torch.where(known, chosen, torch.nan).view(index.shape), statistics

    @staticmethod
    def reference_backward(grads: Tensors, saved: Tensors, temperature: float) -> Tensors:
        (dy,), (logits, index, statistics) = grads, saved
        x, columns, known = _wide(logits), *_columns(logits, index)
        if not x.numel():
            return torch.zeros_like(logits), None
        weights = torch.where(known, dy.reshape(columns.shape).to(x.dtype), 0)
        greatest, total = statistics.to(x.dtype).view(*x.shape[:-1], 2).split(1, -1)
        powers = ((x - greatest) * (LOG2_E / temperature) - total).exp2()
        dx = -powers * weights.sum(-1, keepdim=True)
        return (dx.scatter_add(-1, columns, weights) / temperature).to(logits.dtype), None

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        n = shape[-1]
        ways = ("forward", "backward")
        return tuple(Problem(f"selective_log_softmax_{way}", (dtype,), n % 16 == 0, n) for way in ways)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _columns(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """(..., k) columns that are in the row, and whether they were."""
    columns = index.long() if index.dim() == logits.dim() else index.long().unsqueeze(-1)
    known = (columns >= 0) & (columns < logits.shape[-1])
    return torch.where(known, columns, 0), known


OP = SelectiveLogSoftmax
