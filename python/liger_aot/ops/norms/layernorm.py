"""LayerNorm over the last dimension, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentTypeError
from liger_aot.ops.arguments import FROM_ZERO, Schema
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.norms import column_sums
from liger_aot.ops.norms._vectors import ABSENT, ANY_LENGTH, NARROW, WIDE, weight_and_bias
from liger_aot.ops.op import Problem, check_rows, check_vector
from liger_aot.runtime.dispatch import Loaded, OpOn, Runtimes
from liger_aot.runtime.grid import persistent
from liger_aot.runtime.layout import CUDA, ROCM, rows_of
from liger_aot.runtime.remembered import remember


class LayerNorm(DifferentiableOp):
    """``layernorm(x, weight=None, bias=None, *, eps=1e-5) -> Tensor``:
    (x - mean(x)) / sqrt(var(x) + eps) * weight + bias along the last dimension.

    Differentiable in all three; works under torch.compile and, after ``preload``, in CUDA graphs. CPU tensors take the
    plain-torch reference. Statistics are float32 and stable: the variance is never a difference of large sums.

    Args:
        x: (..., n) bfloat16, float16 or float32. Rows may have any stride; a last dimension that is not contiguous, or
            rows that no single stride spans, are copied first; so are, in the backward of the longest rows, rows with
            gaps between them.
        weight: (n,) of x's dtype or float32, or None.
        bias: (n,) of x's dtype or float32, the weight's where there is one, or None.
        eps: added to the variance, which is that of the row itself (divided by n).

    Returns:
        a contiguous tensor of x's shape and dtype. The gradients of weight and bias are summed in float32 over all rows
        in a fixed order and rounded once; where both are needed they share one buffer.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: the weight's or the bias's shape, device or layout does not fit.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Ba, Kiros and Hinton, Layer Normalization (2016).
    """

    name = "layernorm"
    uses = ("column_sums",)
    tensors = ("x", "weight?", "bias?")
    settings = Schema({"float eps": FROM_ZERO})
    results = 2  # y, and mean and 1 / sqrt(var + eps) of each row

    def __init__(self, runtimes: Mapping[str, Runtimes] | None = None) -> None:
        super().__init__(runtimes)
        self._column_sums = self._runtimes["column_sums"]

    def __call__(
        self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
    ) -> Tensor:
        y: Tensor = self.differentiable((x, weight, bias), (eps,))
        return y

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        x, weight, bias = tensors
        check_rows(self.name, "x", x)
        for name, vector in (("weight", weight), ("bias", bias)):
            if vector is not None:
                check_vector(self.name, name, vector, x, x.shape[-1], "the last dimension of x")
        if weight is not None and bias is not None and bias.dtype != weight.dtype:
            raise ArgumentTypeError(
                f"{self.name}: bias must be of weight's dtype {weight.dtype}, got {bias.dtype}"
            )

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        x, weight, bias = tensors
        in_x = rows_of(x)
        if in_x is None:
            return self.prepare_forward(tensors, settings, keep, out)
        x_at, kind, index, _, _, rows, n, x_stride = in_x
        on = self._own.bound.get(index if kind == CUDA or kind == ROCM else -kind)  # noqa: SIM109 (faster)
        vectors = weight_and_bias(in_x, n, weight, bias)
        if on is None or vectors is None or not rows * n:
            return self.prepare_forward(tensors, settings, keep, out)
        w_at, b_at, w_kind, b_kind = vectors
        if w_kind | b_kind == NARROW | WIDE:  # one of each
            return self.prepare_forward(tensors, settings, keep, out)
        y = (
            torch.empty_like(x)
            if x_stride == n
            else torch.empty_like(x, memory_format=torch.contiguous_format)
        )
        stats = x.new_empty((rows, 2), dtype=torch.float32) if keep else None
        y_at, dtype = y.data_ptr(), x.dtype
        kernel = on.kernels["layernorm_forward"]
        aligned = not (x_at | y_at | w_at | b_at | x_stride | n) & 15
        few = kernel.many_rows
        if rows < few:
            few = rows
        loaded = kernel.recent.get((dtype, aligned, n, few)) or kernel.for_rows((dtype, aligned), n, rows)
        if WIDE in (w_kind, b_kind) and "rows" not in loaded.numbers:
            loaded = kernel((dtype, aligned), ANY_LENGTH)  # it and form tile alone take them
        device = on.device
        loaded.launch(
            device, on.stream(device), -(-rows // loaded.rows), 1, 1,
            y_at, x_at, w_at, b_at, None if stats is None else stats.data_ptr(), n, x_stride, rows, n, settings[0],
            w_kind, b_kind, keep,
        )  # fmt: skip
        return y, stats

    def saved(self, tensors: Tensors, results: Tensors) -> Tensors:
        x, weight, bias = tensors
        # The bias is not read; its dtype is that of the gradient, where there is no weight.
        return x, weight, bias if weight is None else None, results[1]

    def run_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        (dy,), (x, weight, bias, stats) = grads, saved
        in_x, in_dy = rows_of(x), rows_of(dy)
        if in_x is None or in_dy is None or not any(needed):
            return self.prepare_backward(grads, saved, settings, needed)
        x_at, kind, index, _, _, rows, n, x_stride = in_x
        on = self._own.bound.get(index if kind == CUDA or kind == ROCM else -kind)  # noqa: SIM109 (faster)
        if on is None or not rows * n:
            return self.prepare_backward(grads, saved, settings, needed)
        need_dx, need_dw, need_db = needed
        dy_at, dy_stride, dtype = in_dy[0], in_dy[7], x.dtype
        like = weight if weight is not None else bias
        w_at = w_kind = ABSENT
        if weight is not None:
            w_at, w_kind = weight.data_ptr(), NARROW if weight.dtype == dtype else WIDE
        kernel = on.kernels["layernorm_backward"]
        aligned = not (x_at | dy_at | w_at | x_stride | dy_stride | n) & 15
        loaded = kernel.recent.get((dtype, aligned, n)) or kernel((dtype, aligned), n)
        if loaded.contiguous:  # bf16x2: contiguous rows, and a weight of their dtype
            if w_kind == WIDE:
                loaded = kernel((dtype, aligned), ANY_LENGTH)
            elif not x_stride == dy_stride == n:
                contiguous = dy.contiguous(), (x.contiguous(), weight, bias, stats)
                return self.run_backward(contiguous[:1], contiguous[1], settings, needed)
        programs, groups, split = _programs(on, loaded, rows, n)
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_dx else None
        sums = partials = words = None
        db_column = (n + 15) & -16 if need_dw else 0  # aligned, as the halves of one buffer
        width = db_column + (n if need_db else 0)
        if width:
            partials = x.new_empty(groups * width, dtype=torch.float32)
            sums = x.new_empty(width, dtype=like.dtype)
        if split > 1:
            words = x.new_zeros((rows, split), dtype=torch.int64)
        device = on.device
        loaded.launch(
            device, on.stream(device), programs, 1, 1,
            None if dx is None else dx.data_ptr(), dy_at, x_at, w_at, stats.data_ptr(),
            None if partials is None else partials.data_ptr(), None if words is None else words.data_ptr(),
            n, dy_stride, x_stride, rows, n, width, db_column, w_kind, need_dx, need_dw, need_db,
        )  # fmt: skip
        if sums is None or partials is None:
            return dx, None, None
        column_sums.launch(
            self._column_sums.find(kind, index) or self._column_sums.on(index), sums, partials, groups, width
        )
        return dx, sums[:n] if need_dw else None, sums[db_column : db_column + n] if need_db else None

    @staticmethod
    def reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = wide.mean(-1, keepdim=True)
        centered = wide - mean
        rstd = torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
        y = centered * rstd
        if weight is not None:
            y = y * weight.to(wide.dtype)
        if bias is not None:
            y = y + bias.to(wide.dtype)
        return y.to(x.dtype), torch.cat((mean, rstd), -1).reshape(-1, 2)

    @staticmethod
    def reference_backward(grads: Tensors, saved: Tensors, eps: float) -> Tensors:
        (dy,), (x, weight, bias, stats) = grads, saved
        wide = torch.promote_types(x.dtype, torch.float32)
        mean, rstd = stats.to(wide).reshape(*x.shape[:-1], 2).split(1, -1)
        x_hat = (x.to(wide) - mean) * rstd
        dyw = dy.to(wide)
        scaled = dyw if weight is None else dyw * weight.to(wide)
        along = (scaled * x_hat).mean(-1, keepdim=True)
        dx = ((scaled - x_hat * along - scaled.mean(-1, keepdim=True)) * rstd).to(x.dtype)
        like = weight if weight is not None else bias
        if like is None:
            return dx, None, None
        rows = tuple(range(x.dim() - 1))
        dweight = None if weight is None else _sum(dyw * x_hat, rows).to(like.dtype)
        return dx, dweight, _sum(dyw, rows).to(like.dtype)

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        n = shape[-1]
        return (
            Problem("layernorm_forward", (dtype,), n % 16 == 0, n, prod(shape[:-1])),
            Problem("layernorm_backward", (dtype,), n % 16 == 0, n),
        )


def _programs(on: OpOn, loaded: Loaded, rows: int, n: int) -> tuple[int, int, int]:
    """(programs, groups of them that go over the same rows, programs a group): a row is split between as many programs
    as it fills, two elements to each of a program's lanes."""
    if "splits" not in loaded.numbers:
        return persistent(on, loaded, rows)
    known: tuple[int, int, int] | None = on.plans.get((loaded, rows, n))
    if known is None:
        split = -(-n // (2 * loaded.block))
        resident = loaded.numbers["programs_per_multiprocessor"] * on.multiprocessors
        groups = max(1, min(resident // split, rows))
        known = remember(on.plans, (loaded, rows, n), (groups * split, groups, split))
    return known


def _sum(terms: Tensor, rows: tuple[int, ...]) -> Tensor:
    return terms.sum(rows) if rows else terms


OP = LayerNorm
