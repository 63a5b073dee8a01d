"""Log-probabilities of chosen tokens from logits, forward and backward, without the log-softmax of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import e, log2
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.arguments import ABOVE_ZERO, ANY, Schema, check_flag
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.op import Problem, as_rows, check_rows, check_same_device, written
from liger_aot.ops.token_mask import KINDS, check_token_mask, mask_kind
from liger_aot.runtime import device_errors
from liger_aot.runtime.layout import rows_of

LOG2_E = log2(e)


class SelectiveLogSoftmax(DifferentiableOp):
    """``selective_log_softmax(logits, index, mask=None, *, temperature=1.0, drop_last=False, inplace_grad=False) ->
    Tensor``: log_softmax(logits / temperature) at the columns ``index`` of each row, as reinforcement learning from
    human feedback needs it.

    Differentiable in logits; works under torch.compile and, after ``preload``, in CUDA graphs. CPU
    tensors take the plain-torch reference. Computed in float32: the forward reads the logits once and keeps two numbers
    a row, the backward reads them once more.

    Args:
        logits: (..., n) bfloat16, float16 or float32. Rows may have any stride; other layouts are copied.
        index: (...) or (..., k) int64 or int32 in [0, n): one or k columns of each row, in any order and more than
            once. Where the mask is zero it may be anything.
        mask: (...) bool, int8, uint8, int32, int64 or float32: where it is zero the result is 0, the row of logits is
            not read and its gradient is zero.
        temperature: above 0.
        drop_last: logits are (..., L + 1, n), index and mask (..., L): the last row of logits, which predicts what
            comes after the last token, is not read, and its gradient is zero. The others are not copied.
        inplace_grad: the backward writes the gradient over the logits, which saves as much memory again. Then they
            count as modified in place: a backward that needs their values raises. A leaf that requires a gradient is
            refused. Where the logits are not contiguous or the gradient itself is differentiated, and under
            torch.compile, it changes nothing.

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
    tensors = ("logits", "index", "mask?")
    settings = Schema({"float temperature": ABOVE_ZERO, "bool drop_last": ANY, "bool inplace_grad": ANY})
    results = 2  # and the greatest logit and log2 of the sum of powers relative to it, of each row

    def __call__(
        self,
        logits: Tensor,
        index: Tensor,
        mask: Tensor | None = None,
        *,
        temperature: float = 1.0,
        drop_last: bool = False,
        inplace_grad: bool = False,
    ) -> Tensor:
        if (
            inplace_grad is not False
            and check_flag(self.called, "inplace_grad", inplace_grad)
            and not is_compiling()
        ):
            _check_overwritten(self.called, logits)
        chosen: Tensor = self.differentiable((logits, index, mask), (temperature, drop_last, inplace_grad))
        return chosen

    def preload(self, device: torch.device | int | str | None = None) -> None:
        super().preload(device)
        device_errors.flag(self.called)  # no CUDA graph may allocate it

    def through_library(
        self, tensors: Tensors, settings: tuple[Any, ...], out: Sequence[Tensor] | None
    ) -> Any:
        """What is registered with torch.library gives no memory of its arguments away."""
        return super().through_library(tensors, (*settings[:2], False), out)

    def backward_in_torch(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        return super().backward_in_torch(grads, saved, (*settings[:2], False), needed)

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        logits, index, mask = tensors
        said = self.tensors[1]
        check_rows(self.called, "logits", logits)
        if not isinstance(index, Tensor):
            raise ArgumentTypeError(
                f"{self.called}: {said} must be a torch.Tensor, got {type(index).__name__}"
            )
        if index.dtype not in (torch.int64, torch.int32):
            raise ArgumentTypeError(f"{self.called}: {said} must be int64 or int32, got {index.dtype}")
        check_same_device(self.called, said, index, "logits", logits)
        drop_last = settings[1]
        if drop_last and (logits.dim() < 2 or not logits.shape[-2]):
            raise ArgumentError(
                f"{self.called}: with drop_last logits must be (..., L + 1, n), one row more than tokens; got "
                f"{tuple(logits.shape)}"
            )
        rows = _rows(logits, drop_last)
        if index.shape != rows and (index.dim() != logits.dim() or index.shape[:-1] != rows):
            raise ArgumentError(
                f"{self.called}: {said} must be of shape {tuple(rows)} or that and one more dimension, as "
                f"logits {tuple(logits.shape)} asks; got {tuple(index.shape)}"
            )
        if mask is not None:
            check_token_mask(self.called, mask, rows, "logits", logits)

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        logits, index, mask = tensors
        temperature, drop_last, _ = settings
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
            or (drop_last and logits.dim() < 2)
        ):
            return self.prepare_forward(tensors, settings, keep, out)
        x_at, _, _, _, _, x_rows, n, x_stride = in_x
        positions, x_positions = _positions(logits, drop_last)
        shape = _rows(logits, drop_last)
        if (index.shape != shape and index.shape[:-1] != shape) or (
            mask is not None
            and (
                not isinstance(mask, Tensor)
                or mask.dtype not in KINDS
                or mask.device != logits.device
                or mask.shape != shape
                or not mask.is_contiguous()
            )
        ):
            return self.prepare_forward(tensors, settings, keep, out)
        device_errors.raise_if_any(self.called)
        rows = x_rows // x_positions * positions
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
            made.data_ptr(), statistics.data_ptr(), x_at, index.data_ptr(), device_errors.flag(self.called),
            None if mask is None else mask.data_ptr(), x_stride, n, index.numel() // rows, index.element_size() // 4,
            mask_kind(mask), positions, x_positions, LOG2_E / temperature, 1 / temperature,
        )  # fmt: skip
        device_errors.check_now(self.called, device)
        return made, statistics

    def prepare_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        self.check(tensors, settings)
        logits, index, mask = tensors
        if not self.on_reference(tensors):
            ready = (
                as_rows(self.called, "logits", logits),
                index.contiguous(),
                None if mask is None else mask.contiguous(),
            )
            return self.run_forward(ready, settings, keep, out)
        if index.device.type == "cpu" and index.numel():
            if mask is not None:
                index = _left_out(index, mask == 0)
            low, high = (int(v) for v in index.aminmax())
            if low < 0 or high >= logits.shape[-1]:
                raise ArgumentError(
                    f"{self.called}: {self.tensors[1]} must be in [0, {logits.shape[-1]}), the columns of logits; got "
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
        (dy,), (logits, index, mask, statistics) = grads, saved
        temperature, drop_last, inplace_grad = settings
        in_x = rows_of(logits)
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        if on is None or in_x is None or not index.numel() or not in_x[6]:
            return self.prepare_backward(grads, saved, settings, needed)
        x_at, _, _, _, _, rows, n, x_stride = in_x
        positions, x_positions = _positions(logits, drop_last)
        dy, index = dy.contiguous(), index.contiguous()
        mask = None if mask is None else mask.contiguous()
        over = inplace_grad and logits.is_contiguous()
        dx = logits.detach() if over else torch.empty_like(logits, memory_format=torch.contiguous_format)
        dx_at = dx.data_ptr()
        aligned = not (dx_at | x_at | x_stride | n) & 15
        loaded = on.kernels["selective_log_softmax_backward"]((logits.dtype, aligned), n)
        width = n if aligned else n + 15  # blocks of odd rows may begin before them
        parts = -(-width // (loaded.block * loaded.numbers["steps"]))
        device = on.device
        loaded.launch(
            device, on.stream(device), rows * parts, 1, 1,
            dx_at, dy.data_ptr(), x_at, index.data_ptr(), statistics.data_ptr(),
            None if mask is None else mask.data_ptr(), x_stride, n, parts,
            index.numel() // (rows // x_positions * positions), index.element_size() // 4, mask_kind(mask), positions,
            x_positions, LOG2_E / temperature, 1 / temperature,
        )  # fmt: skip
        if over:
            written(logits)
        return dx, None, None

    def prepare_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        if self.on_reference(saved):
            found = self.gradients_by_reference(grads, saved, settings)
            logits = saved[0]
            over = settings[2] and logits.is_contiguous()
            return (logits.detach().copy_(found[0]), None, None) if over else found
        logits, *rest = saved
        return self.run_backward(grads, (as_rows(self.called, "logits", logits), *rest), settings, needed)

    @staticmethod
    def reference(
        logits: Tensor,
        index: Tensor,
        mask: Tensor | None,
        temperature: float,
        drop_last: bool,
        inplace_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        x, columns, known = _wide(logits, drop_last), *_columns(logits, index)
        if not x.shape[-1]:
            return x.new_full(index.shape, torch.nan), x.new_zeros((x.shape[:-1].numel(), 2))
        scaled = x / temperature
        greatest = x.amax(-1, keepdim=True)
        total = (scaled - greatest / temperature).exp().sum(-1, keepdim=True)
        chosen = (x.gather(-1, columns) - greatest) / temperature - total.log()
        statistics = torch.cat((greatest, total.log2()), -1)
        chosen = torch.where(known, chosen, torch.nan).view(index.shape)
        if mask is not None:
            chosen, statistics = _left_out(chosen, mask == 0), _left_out(statistics, mask == 0)
        return chosen, statistics.reshape(-1, 2)

    @staticmethod
    def reference_backward(
        grads: Tensors, saved: Tensors, temperature: float, drop_last: bool, inplace_grad: bool
    ) -> Tensors:
        (dy,), (logits, index, mask, statistics) = grads, saved
        x, columns, known = _wide(logits, drop_last), *_columns(logits, index)
        if not x.numel():
            return torch.zeros_like(logits), None, None
        weights = torch.where(known, dy.reshape(columns.shape).to(x.dtype), 0)
        greatest, total = statistics.to(x.dtype).view(*x.shape[:-1], 2).split(1, -1)
        powers = ((x - greatest) * (LOG2_E / temperature) - total).exp2()
        dx = -powers * weights.sum(-1, keepdim=True)
        dx = (dx.scatter_add(-1, columns, weights) / temperature).to(logits.dtype)
        if mask is not None:
            dx = _left_out(dx, mask == 0)
        return torch.nn.functional.pad(dx, (0, 0, 0, 1)) if drop_last else dx, None, None

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        n = shape[-1]
        ways = ("forward", "backward")
        return tuple(Problem(f"selective_log_softmax_{way}", (dtype,), n % 16 == 0, n) for way in ways)


def _rows(logits: Tensor, drop_last: bool) -> torch.Size:
    """The shape of the tokens that the rows of logits are for."""
    rows = logits.shape[:-1]
    return torch.Size((*rows[:-1], rows[-1] - 1)) if drop_last else rows


def _positions(logits: Tensor, drop_last: bool) -> tuple[int, int]:
    """(rows of a sequence that have a token, all of them); without ``drop_last`` each row is its own."""
    return (logits.shape[-2] - 1, logits.shape[-2]) if drop_last else (1, 1)


def _check_overwritten(op: str, logits: Any) -> None:
    if isinstance(logits, Tensor) and logits.requires_grad and torch.is_grad_enabled():
        base = logits._base if logits._is_view() else None
        if logits.is_leaf or (base is not None and base.is_leaf and base.requires_grad):
            raise ArgumentError(
                f"{op}: logits is a leaf that requires a gradient, or a view of one: its value can't be overwritten; "
                "use inplace_grad=False"
            )


def _wide(logits: Tensor, drop_last: bool) -> Tensor:
    """The rows that have tokens, in float32 or float64."""
    used = logits[..., :-1, :] if drop_last else logits
    return used.to(torch.promote_types(logits.dtype, torch.float32))


def _left_out(x: Tensor, where: Tensor) -> Tensor:
    """``x`` with zeros for tokens that do not count."""
    return torch.where(where if where.dim() == x.dim() else where.unsqueeze(-1), 0, x)


def _columns(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """(..., k) columns that are in the row, and whether they were."""
    columns = index.long() if index.dim() == logits.dim() else index.long().unsqueeze(-1)
    known = (columns >= 0) & (columns < logits.shape[-1])
    return torch.where(known, columns, 0), known


OP = SelectiveLogSoftmax
