"""GroupNorm over groups of channels, forward and backward, for channels-first and channels-last images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.arguments import ANY, FROM_ZERO, Allowed, Schema
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.norms import column_sums
from liger_aot.ops.norms._groupnorm_plan import Shape, find, workspace
from liger_aot.ops.norms._vectors import weight_and_bias
from liger_aot.ops.op import Problem, check_tensor, check_vector
from liger_aot.runtime.dispatch import Runtimes
from liger_aot.runtime.layout import Rows, rows_of


class GroupNorm(DifferentiableOp):
    """``groupnorm(x, num_groups, weight=None, bias=None, *, eps=1e-5) -> Tensor``:
    (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, where mean and var are of a group of channels.

    Differentiable in x, weight and bias; works under torch.compile and, after ``preload``, in CUDA graphs. CPU tensors
    take the plain-torch reference. Statistics are float32 and stable: the variance is never a difference of large sums.
    The arguments' order is that of torch.nn.functional.group_norm.

    Args:
        x: (N, C, ...) bfloat16, float16 or float32, with any number of spatial dimensions. Contiguous and channels-last
            memory is read in place; other layouts are copied.
        num_groups: into which C divides.
        weight: (C,) of x's dtype or float32, or None.
        bias: (C,) of x's dtype or float32, the weight's where there is one, or None.
        eps: added to the variance, which is that of the group itself (divided by its size).

    Returns:
        a tensor of x's shape and dtype, channels-last where x is, else contiguous. The gradients of weight and bias are
        summed in float32 in a fixed order and rounded once; where both are needed they share one buffer.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: x has fewer than two dimensions; num_groups does not divide C; an image is of 2^31 elements or
            more; the weight's or the bias's shape, device or layout does not fit.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Wu and He, Group Normalization (2018).
    """

    name = "groupnorm"
    uses = ("column_sums",)
    tensors = ("x", "weight?", "bias?")
    settings = Schema({"int num_groups": Allowed(least=1), "float eps": FROM_ZERO, "bool channels_last": ANY})
    results = 2  # y, and mean and 1 / sqrt(var + eps) of each group of each image

    def __init__(self, runtimes: Mapping[str, Runtimes] | None = None) -> None:
        super().__init__(runtimes)
        self._column_sums = self._runtimes["column_sums"]

    def __call__(
        self,
        x: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        eps: float = 1e-5,
    ) -> Tensor:
        # Inside, channels-last images are contiguous tensors whose last dimension is that of the channels.
        y: Tensor
        if isinstance(x, Tensor) and x.dim() > 2 and not x.is_contiguous():
            last = x.movedim(1, -1)
            if last.is_contiguous():
                y = self.differentiable((last, weight, bias), (num_groups, eps, True))
                return y.movedim(-1, 1)
        y = self.differentiable((x, weight, bias), (num_groups, eps, False))
        return y

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        x, weight, bias = tensors
        num_groups, _, channels_last = settings
        check_tensor(self.name, "x", x)
        if x.dim() < 2:
            raise ArgumentError(
                f"{self.name}: x must have a batch and a channel dimension, got shape {tuple(x.shape)}"
            )
        channels = x.shape[-1 if channels_last else 1]
        if channels % num_groups:
            raise ArgumentError(
                f"{self.name}: num_groups must divide the {channels} channels of x, got {num_groups}"
            )
        if x.numel() and x[0].numel() >= 1 << 31:
            raise ArgumentError(
                f"{self.name}: an image of x may have 2^31 - 1 elements at most, got {x[0].numel()}"
            )
        for name, vector in (("weight", weight), ("bias", bias)):
            if vector is not None:
                check_vector(self.name, name, vector, x, channels, "the channels of x")
        if weight is not None and bias is not None and bias.dtype != weight.dtype:
            raise ArgumentTypeError(
                f"{self.name}: bias must be of weight's dtype {weight.dtype}, got {bias.dtype}"
            )

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        x, weight, bias = tensors
        num_groups, eps, channels_last = settings
        in_x = rows_of(x)
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        if on is None or in_x is None or x.dim() < 2:
            return self.prepare_forward(tensors, settings, keep, out)
        channels = x.shape[-1 if channels_last else 1]
        elements = in_x[5] * in_x[6]
        vectors = weight_and_bias(in_x, channels, weight, bias)
        if vectors is None or not elements or channels % num_groups:
            return self.prepare_forward(tensors, settings, keep, out)
        images = x.shape[0]
        if in_x[7] != in_x[6] or elements >= images << 31:
            self.check(tensors, settings)
            x, in_x = _without_gaps(x, in_x)
        y = torch.empty_like(x)
        shape = Shape(images, channels, num_groups, elements // (images * channels), channels_last)
        stats = x.new_empty((images * num_groups, 2), dtype=torch.float32) if keep else None
        x_at, y_at, (w_at, b_at, w_kind, b_kind) = in_x[0], y.data_ptr(), vectors
        addresses = x_at | y_at | w_at | b_at
        loaded, plan = find(on, "forward", x.dtype, addresses, shape)
        stream = on.stream(on.device)
        words, launch = workspace(on, stream, loaded, plan, x)
        loaded.launch(
            on.device, stream, plan.programs, 1, 1,
            y_at, x_at, w_at, b_at, None if stats is None else stats.data_ptr(),
            None if words is None else words.data_ptr(), launch, *plan.forward, plan.length, plan.splits, eps,
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
        num_groups, _, channels_last = settings
        in_x, in_dy = rows_of(x), rows_of(dy)
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        if on is None or in_x is None or in_dy is None or not x.numel() or not any(needed):
            return self.prepare_backward(grads, saved, settings, needed)
        x, in_x = _without_gaps(x, in_x)
        dy, in_dy = _without_gaps(dy, in_dy)
        need_dx, need_dw, need_db = needed
        images, channels = x.shape[0], x.shape[-1 if channels_last else 1]
        shape = Shape(images, channels, num_groups, in_x[5] * in_x[6] // (images * channels), channels_last)
        like = weight if weight is not None else bias
        dx = torch.empty_like(x) if need_dx else None
        w_at = w_kind = 0
        if weight is not None:
            w_at, w_kind = weight.data_ptr(), 1 if weight.dtype == x.dtype else 2
        loaded, plan = find(on, "backward", x.dtype, in_x[0] | in_dy[0] | w_at, shape)
        stream = on.stream(on.device)
        words, launch = workspace(on, stream, loaded, plan, x)
        db_column = (channels + 15) & -16 if need_dw else 0  # aligned, as the halves of one buffer
        columns = db_column + (channels if need_db else 0)
        sums = partials = None
        if columns:
            partials = x.new_empty((plan.sums, columns), dtype=torch.float32)
            sums = x.new_empty(columns, dtype=like.dtype)
        loaded.launch(
            on.device, stream, plan.programs, 1, 1,
            None if dx is None else dx.data_ptr(), in_dy[0], in_x[0], w_at, stats.data_ptr(),
            None if partials is None else partials.data_ptr(), None if words is None else words.data_ptr(),
            launch, *plan.backward, plan.length, plan.splits, columns, db_column,
            w_kind, need_dx, need_dw, need_db,
        )  # fmt: skip
        if sums is None or partials is None:
            return dx, None, None
        column_sums.launch(
            self._column_sums.find(in_x[1], in_x[2]) or self._column_sums.on(in_x[2]),
            sums,
            partials,
            plan.sums,
            columns,
        )
        dweight = sums[:channels] if need_dw else None
        return dx, dweight, sums[db_column : db_column + channels] if need_db else None

    @staticmethod
    def reference(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        num_groups: int,
        eps: float,
        channels_last: bool,
    ) -> tuple[Tensor, Tensor]:
        groups = _grouped(x, num_groups, channels_last)
        mean = groups.mean((2, 3), keepdim=True)
        centered = groups - mean
        rstd = torch.rsqrt(centered.square().mean((2, 3), keepdim=True) + eps)
        y = centered * rstd
        if weight is not None:
            y = y * weight.to(groups.dtype).reshape(num_groups, -1, 1)
        if bias is not None:
            y = y + bias.to(groups.dtype).reshape(num_groups, -1, 1)
        return _ungrouped(y, x, channels_last), torch.cat((mean, rstd), -1).reshape(-1, 2)

    @staticmethod
    def reference_backward(
        grads: Tensors, saved: Tensors, num_groups: int, eps: float, channels_last: bool
    ) -> Tensors:
        (dy,), (x, weight, bias, stats) = grads, saved
        groups, dyg = (_grouped(t, num_groups, channels_last) for t in (x, dy))
        mean, rstd = stats.to(groups.dtype).reshape(x.shape[0], num_groups, 1, 2).split(1, -1)
        normal = (groups - mean) * rstd
        scaled = dyg if weight is None else dyg * weight.to(groups.dtype).reshape(num_groups, -1, 1)
        dot = (scaled * normal).mean((2, 3), keepdim=True)
        dx = (scaled - normal * dot - scaled.mean((2, 3), keepdim=True)) * rstd
        dx = _ungrouped(dx, x, channels_last)
        like = weight if weight is not None else bias
        if like is None:
            return dx, None, None
        dweight = None if weight is None else (dyg * normal).sum((0, 3)).reshape(-1).to(like.dtype)
        return dx, dweight, dyg.sum((0, 3)).reshape(-1).to(like.dtype)

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        """Of channels-first images, with 32 groups where they divide the channels, else one."""
        channels = shape[1]
        groups = 1 if channels % 32 else 32
        found = Shape(shape[0], channels, groups, torch.Size(shape[2:]).numel(), False)
        return tuple(
            Problem(found.kernel(direction), (dtype,), found.aligned(channels), found.n(direction))
            for direction in ("forward", "backward")
        )


def _without_gaps(x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
    """x, or a copy of it that has no gaps between its rows, and the rows."""
    if rows[7] == rows[6]:
        return x, rows
    x = x.contiguous()
    found = rows_of(x)
    assert found is not None  # a contiguous tensor has rows
    return x, found


def _grouped(x: Tensor, num_groups: int, channels_last: bool) -> Tensor:
    """(N, groups, channels a group, positions), in float32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if channels_last:
        wide = wide.movedim(-1, 1)
    channels = wide.shape[1]
    return wide.reshape(wide.shape[0], num_groups, channels // num_groups, wide.shape[2:].numel())


def _ungrouped(groups: Tensor, x: Tensor, channels_last: bool) -> Tensor:
    """``_grouped`` undone, as x is."""
    if channels_last:
        channels_first = (x.shape[0], x.shape[-1], *x.shape[1:-1])
        return groups.reshape(channels_first).movedim(1, -1).contiguous().to(x.dtype)
    return groups.reshape(x.shape).to(x.dtype)


OP = GroupNorm
