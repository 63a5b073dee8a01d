"""Residual addition and RMSNorm in one pass, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from liger_aot.errors import ArgumentError
from liger_aot.ops.arguments import check_flag
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.norms import column_sums
from liger_aot.ops.norms._vectors import ABSENT, ANY_LENGTH, WIDE, kind_of
from liger_aot.ops.norms.rmsnorm import NORM_SETTINGS, ROUND_FIRST, RMSNorm, check_norm
from liger_aot.ops.op import Problem, check_rows, check_same_device, check_tensor, written
from liger_aot.runtime.dispatch import Runtimes
from liger_aot.runtime.grid import persistent, programs_of
from liger_aot.runtime.layout import Rows, disjoint, overlap, rows_of


class FusedAddRMSNorm(DifferentiableOp):
    """``fused_add_rmsnorm(x, residual, weight=None, *, eps=1e-6, offset=0.0, casting_mode="llama", inplace=False)
    -> (Tensor, Tensor)``: (y, sum), where sum = x + residual and y = rmsnorm(sum).

    sum is rounded to x's dtype, and y computed from the rounded sum: as from two calls. Differentiable in ``x``,
    ``residual`` and ``weight``; a result that nothing is computed from costs the backward nothing. Works under
    torch.compile and, after ``preload``, in CUDA graphs. CPU tensors take the plain-torch reference.

    Args:
        x: (..., n) bfloat16, float16 or float32. Rows may have any stride; other layouts are copied first; so are, in
            the backward of the longest rows, rows with gaps between them.
        residual: of x's shape, dtype and device, with strides of its own.
        weight: (n,) of x's dtype or float32, or None.
        eps: added to the mean of squares.
        offset: added to the weight (1.0 for Gemma); without effect where there is no weight.
        casting_mode: "llama" rounds sum / rms to x's dtype before the weight is applied, "gemma" and "none" round once,
            at the end. Statistics are float32 in all of them.
        inplace: write y over ``x`` and sum over ``residual``, and return those. Their rows must be contiguous, evenly
            spaced and without overlap. With gradients neither may be a leaf that requires one or a view, and sum must
            not be overwritten before the backward has read it, which a second such call on it would do.

    Returns:
        y and sum, contiguous tensors of x's shape and dtype; or ``x`` and ``residual``.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: shape, device or layout of residual or weight does not fit; casting_mode is unknown; ``inplace``
            is asked for where it can't be met. Nothing was written then.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Zhang and Sennrich, Root Mean Square Layer Normalization (2019). The casting modes are those of
        Liger-Kernel.
    """

    name = "fused_add_rmsnorm"
    uses = ("column_sums",)
    tensors = ("x", "residual", "weight?")
    settings = NORM_SETTINGS
    outputs = 2
    results = 3  # y, sum, rstd
    overwrites = ("x", "residual")
    same_gradient: ClassVar[Mapping[str, str]] = {"residual": "x"}

    def __init__(self, runtimes: Mapping[str, Runtimes] | None = None) -> None:
        super().__init__(runtimes)
        self._column_sums = self._runtimes["column_sums"]

    def __call__(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None = None,
        *,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        inplace: bool = False,
    ) -> tuple[Tensor, Tensor]:
        tensors, settings = (x, residual, weight), (eps, offset, casting_mode)
        out = None
        if inplace is not False and check_flag(self.name, "inplace", inplace):
            out = (x, residual)
            if torch.is_grad_enabled() and not is_compiling():
                self.check(tensors, settings)
                _check_no_views(tensors)
        results: tuple[Tensor, Tensor] = self.differentiable(tensors, settings, out)
        return results

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        x, residual, weight = tensors
        check_rows(self.name, "x", x)
        check_tensor(self.name, "residual", residual)
        check_same_device(self.name, "residual", residual, "x", x)
        if residual.shape != x.shape or residual.dtype != x.dtype:
            raise ArgumentError(
                f"{self.name}: residual must be of x's shape {tuple(x.shape)} and dtype {x.dtype}; got "
                f"{tuple(residual.shape)}, {residual.dtype}"
            )
        check_norm(self.name, x, weight)

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        x, residual, weight = tensors
        eps, offset, casting_mode = settings
        in_x, in_residual, in_w = rows_of(x), rows_of(residual), None
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        if on is None or in_x is None or in_residual is None:
            return self.prepare_forward(tensors, settings, keep, out)
        fits = in_residual[1:7] == in_x[1:7] and x.shape == residual.shape
        w_at = 0
        kind: int | None = ABSENT
        if weight is None:
            offset = 1.0  # as a weight of zeros
        elif (in_w := rows_of(weight)) is None or in_w[6] != in_x[6] or weight.dim() != 1:
            fits = False
        else:
            w_at, kind = in_w[0], kind_of(in_w, in_x)
        x_at, _, _, _, _, rows, n, x_stride = in_x
        residual_at, residual_stride = in_residual[0], in_residual[7]
        if not fits or kind is None or not rows * n:
            return self.prepare_forward(tensors, settings, keep, out)
        if out is None:
            y = torch.empty_like(x, memory_format=torch.contiguous_format)
            added = torch.empty_like(x, memory_format=torch.contiguous_format)
            y_at, sum_at, y_stride, sum_stride = y.data_ptr(), added.data_ptr(), n, n
        else:
            if not (_disjoint(in_x, in_residual, in_w) and x_stride >= n and residual_stride >= n):
                _check_in_place(x, residual, weight)
            y, added = out
            y_at, sum_at, y_stride, sum_stride = x_at, residual_at, x_stride, residual_stride
        rstd = x.new_empty(rows, dtype=torch.float32) if keep else None
        kernel = on.kernels["fused_add_rmsnorm_forward"]
        places = y_at | sum_at | x_at | residual_at | w_at
        aligned = not (places | y_stride | sum_stride | x_stride | residual_stride | n) & 15
        dtype, device = x.dtype, on.device
        few = kernel.many_rows
        if rows < few:
            few = rows
        loaded = kernel.recent.get((dtype, aligned, n, few)) or kernel.for_rows((dtype, aligned), n, rows)
        loaded.launch(
            device, on.stream(device), programs_of(on, loaded, rows), 1, 1,
            y_at, sum_at, x_at, residual_at, w_at, None if rstd is None else rstd.data_ptr(),
            y_stride, sum_stride, x_stride, residual_stride, rows, n, eps, offset, kind, ROUND_FIRST[casting_mode],
            keep,
        )  # fmt: skip
        if out is not None:
            written(x, residual)
        return y, added, rstd

    def prepare_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        self.check(tensors, settings)
        if out is not None:
            _check_in_place(*tensors)
        return super().prepare_forward(tensors, settings, keep, out)

    def saved(self, tensors: Tensors, results: Tensors) -> Tensors:
        return results[1], tensors[2], results[2]

    def run_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        """x and residual get one tensor for their gradients, as torch's own addition gives: autograd adds in place
        only to what nobody else holds."""
        (dy, dsum), (added, weight, rstd) = grads, saved
        need_x, need_residual, need_w = needed
        need_dx = need_x or need_residual
        if dy is None:
            return dsum if need_x else None, dsum if need_residual else None, None
        in_sum, in_dy = rows_of(added), rows_of(dy)
        in_dsum = None if dsum is None or not need_dx else rows_of(dsum)
        readable = in_dy is not None and (in_dsum is not None or dsum is None or not need_dx)
        on = None if in_sum is None else self._own.find(in_sum[1], in_sum[2])
        if on is None or in_sum is None or in_dy is None or not readable or not dy.numel():
            return self.prepare_backward(grads, saved, settings, needed)
        sum_at, _, _, _, _, rows, n, sum_stride = in_sum
        dy_at, dy_stride = in_dy[0], in_dy[7]
        dsum_at, dsum_stride = (0, n) if in_dsum is None else (in_dsum[0], in_dsum[7])
        dx = dweight = partials = words = None
        dx_at = w_at = dw_at = 0
        if need_dx:
            dx = torch.empty_like(added, memory_format=torch.contiguous_format)
            dx_at = dx.data_ptr()
        offset = settings[1]
        kind: int | None = ABSENT
        if weight is None:
            offset = 1.0
        else:
            w_at, kind = weight.data_ptr(), kind_of(rows_of(weight), in_sum)  # type: ignore[arg-type]
            if need_w:
                dweight = torch.empty_like(weight)
                dw_at = dweight.data_ptr()
        kernel = on.kernels["fused_add_rmsnorm_backward"]
        strides = sum_stride | dy_stride | dsum_stride
        aligned = not (sum_at | dy_at | dsum_at | dx_at | w_at | dw_at | strides | n) & 15
        dtype, device = added.dtype, on.device
        loaded = kernel.recent.get((dtype, aligned, n)) or kernel((dtype, aligned), n)
        if loaded.contiguous:  # bf16x2: contiguous rows, and a weight of their dtype
            if kind == WIDE:
                loaded = kernel((dtype, aligned), ANY_LENGTH)
            elif not sum_stride == dy_stride == dsum_stride == n:
                contiguous = dy.contiguous(), None if dsum is None else dsum.contiguous()
                return self.run_backward(contiguous, (added.contiguous(), weight, rstd), settings, needed)
        programs, groups, split = persistent(on, loaded, rows)
        two_levels = need_w and (groups > 1 or not loaded.writes_sums)
        if two_levels:
            partials = dy.new_empty((groups, n), dtype=torch.float32)
        if split > 1:
            words = dy.new_zeros((rows, split), dtype=torch.int64)
        loaded.launch(
            device, on.stream(device), programs, 1, 1,
            dx_at, dy_at, dsum_at, sum_at, w_at, rstd.data_ptr(), dw_at,
            None if partials is None else partials.data_ptr(), None if words is None else words.data_ptr(),
            n, dy_stride, dsum_stride, sum_stride, rows, n, offset, kind, in_dsum is not None, need_dx, two_levels,
            need_w and not two_levels,
        )  # fmt: skip
        if partials is not None and dweight is not None:
            sums = self._column_sums.find(in_sum[1], in_sum[2]) or self._column_sums.on(in_sum[2])
            column_sums.launch(sums, dweight, partials, groups, n)
        return dx if need_x else None, dx if need_residual else None, dweight

    def followed(self, saved: Tensors, settings: tuple[Any, ...]) -> Tensors:
        """The sum is an output; 1 / rms is of the sum."""
        added, weight, _ = saved
        return added, weight, RMSNorm.reference(added, None, *settings)[1]

    @staticmethod
    def reference(
        x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting_mode: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        added = x + residual
        y, rstd = RMSNorm.reference(added, weight, eps, offset, casting_mode)
        return y, added, rstd

    @staticmethod
    def reference_backward(
        grads: Tensors, saved: Tensors, eps: float, offset: float, casting_mode: str
    ) -> Tensors:
        (dy, dsum), (added, weight, rstd) = grads, saved
        if dy is None:
            return dsum, dsum, None
        wide = torch.promote_types(added.dtype, torch.float32)
        h, dh = torch.atleast_2d(added.to(wide)), torch.atleast_2d(dy.to(wide))
        dx, dweight = RMSNorm.reference_backward((dh,), (h, weight, rstd), eps, offset, casting_mode)
        dx = dx.view(added.shape)
        if dsum is not None:
            dx = dx + dsum.to(wide)
        dx = dx.to(added.dtype)
        return dx, dx, dweight

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        n = shape[-1]
        return (
            Problem(f"{self.name}_forward", (dtype,), n % 16 == 0, n, prod(shape[:-1])),
            Problem(f"{self.name}_backward", (dtype,), n % 16 == 0, n),
        )


def _disjoint(x: Rows, residual: Rows, weight: Rows | None) -> bool:
    return disjoint(x, residual, weight) and disjoint(residual, x, weight)


def _check_in_place(x: Tensor, residual: Tensor, weight: Tensor | None) -> None:
    """ArgumentError unless x and residual are rows that can be written while the other arguments are read."""
    op = FusedAddRMSNorm.name
    for argument, t in (("x", x), ("residual", residual)):
        rows = rows_of(t)
        if t.numel() and (rows is None or (rows[5] > 1 and rows[7] < rows[6])):
            raise ArgumentError(
                f"{op}: inplace writes {argument}, whose strides are {t.stride()}: its rows must be contiguous, evenly "
                "spaced and without overlap"
            )
        if weight is not None and overlap(t, weight):
            raise ArgumentError(f"{op}: inplace writes {argument}, which overlaps weight")
    if x.numel() and (x.data_ptr() == residual.data_ptr() or overlap(x, residual)):
        raise ArgumentError(f"{op}: inplace writes x and residual, which overlap")


def _check_no_views(tensors: Tensors) -> None:
    """ArgumentError where autograd can't follow: a function of two results may not overwrite a view."""
    if any(t is not None and t.requires_grad for t in tensors):
        for argument, t in zip(("x", "residual"), tensors, strict=False):
            if t._is_view():
                raise ArgumentError(
                    f"{FusedAddRMSNorm.name}: {argument} is a view: with gradients it can't be overwritten; use "
                    "inplace=False"
                )


OP = FusedAddRMSNorm
