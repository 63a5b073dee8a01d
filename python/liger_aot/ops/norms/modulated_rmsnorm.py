"""RMSNorm with a scale and a shift per group of tokens (AdaLN), forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError
from liger_aot.ops.arguments import Allowed, Schema
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.norms import column_sums
from liger_aot.ops.norms._vectors import ABSENT, ANY_LENGTH, NARROW, WIDE, kind_of
from liger_aot.ops.norms.rmsnorm import NORM_SETTINGS, ROUND_FIRST, check_norm
from liger_aot.ops.op import Problem, check_rows, check_vector_dtype
from liger_aot.runtime.dispatch import Loaded, OpOn, Runtimes
from liger_aot.runtime.grid import persistent
from liger_aot.runtime.layout import Rows, rows_of
from liger_aot.runtime.remembered import REMEMBERED, remember

MOST_WAVES = 8  # of programs that one after another take a multiprocessor's place
PART_COST = 4  # rows that a part's start and its two rows of fp32 sums cost as much as


class ModulatedRMSNorm(DifferentiableOp):
    """``modulated_rmsnorm(x, scale, shift=None, weight=None, *, eps=1e-6, offset=0.0, casting_mode="llama",
    tokens_per_group=None) -> Tensor``: rmsnorm(x) * (1 + scale) + shift, scale and shift of each token's group.

    A group is tokens that follow each other in x: an image of a batch, a frame of a video, one token. Differentiable in
    x, scale, shift and weight; gradients of scale and shift are summed in float32 in a fixed order. Works under
    torch.compile and, after ``preload``, in CUDA graphs. CPU tensors take the plain-torch reference. Computed in
    float32 and rounded once, but for what ``casting_mode`` says.

    Args:
        x: (..., n) bfloat16, float16 or float32. Rows may have any stride; other layouts are copied first.
        scale: (..., n) of x's dtype or float32, a row a group: its leading dimensions are x's first ones, with ones
            behind them or not: for x (batch, tokens, n) one of (n,), (batch, n), (batch, 1, n), (batch, tokens, n).
            They may be flattened into one, and for x (tokens, n) a scale (groups, n) may have any number of groups
            that divides the tokens. Rows of any stride (a chunk of a wider projection) are read in place.
        shift: of scale's dtype with as many groups, or None.
        weight: (n,) of x's dtype or float32, or None.
        eps: added to the mean of squares.
        offset: added to the weight; without effect where there is no weight.
        casting_mode: "llama" rounds x / rms to x's dtype before all else is applied, "gemma" and "none" round once, at
            the end.
        tokens_per_group: allows groups of so many tokens whatever the dimensions of x and scale are; their product
            must be x's number of tokens.

    Returns:
        a contiguous tensor of x's shape and dtype.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: shape, device or layout of scale, shift or weight does not fit; casting_mode is unknown.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Peebles and Xie, Scalable Diffusion Models with Transformers (2022). The casting modes are those of
        Liger-Kernel.
    """

    name = "modulated_rmsnorm"
    uses = ("column_sums",)
    tensors = ("x", "scale", "shift?", "weight?")
    settings = Schema({**NORM_SETTINGS, "int? tokens_per_group": Allowed(least=1)})
    results = 2  # y, rstd

    def __init__(self, runtimes: Mapping[str, Runtimes] | None = None) -> None:
        super().__init__(runtimes)
        self._column_sums = self._runtimes["column_sums"]

    def __call__(
        self,
        x: Tensor,
        scale: Tensor,
        shift: Tensor | None = None,
        weight: Tensor | None = None,
        *,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        tokens_per_group: int | None = None,
    ) -> Tensor:
        settings = (eps, offset, casting_mode, tokens_per_group)
        y: Tensor = self.differentiable((x, scale, shift, weight), settings)
        return y

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        x, scale, shift, weight = tensors
        check_rows(self.name, "x", x)
        check_vector_dtype(self.name, "scale", scale, x)
        self._check_groups("scale", scale, x, settings[3])
        if shift is not None:
            check_vector_dtype(self.name, "shift", shift, x)
            self._check_groups("shift", shift, x, settings[3])
            if shift.dtype != scale.dtype or prod(shift.shape[:-1]) != prod(scale.shape[:-1]):
                raise ArgumentError(
                    f"{self.name}: shift must be of scale's dtype {scale.dtype} with as many rows as "
                    f"{tuple(scale.shape)}; got {tuple(shift.shape)}, {shift.dtype}"
                )
        check_norm(self.name, x, weight)

    def _check_groups(self, argument: str, value: Tensor, x: Tensor, tokens_per_group: int | None) -> None:
        if value.dim() == 0 or value.shape[-1] != x.shape[-1]:
            raise ArgumentError(
                f"{self.name}: {argument} must have x's last dimension {x.shape[-1]}; got {tuple(value.shape)}"
            )
        if rows_per_group(x.shape, value.shape, tokens_per_group) is None:
            wanted = (
                "the first dimensions of x, then ones or nothing"
                if tokens_per_group is None
                else f"a product of {prod(x.shape[:-1])} tokens / {tokens_per_group}"
            )
            raise ArgumentError(
                f"{self.name}: {argument} has shape {tuple(value.shape)} for x {tuple(x.shape)}: its leading "
                f"dimensions must be {wanted}"
            )

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        x, scale, shift, weight = tensors
        eps, offset, casting_mode, tokens_per_group = settings
        in_x, in_scale = rows_of(x), rows_of(scale)
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        if on is None or in_x is None or in_scale is None:
            return self.prepare_forward(tensors, settings, keep, out)
        x_at, _, _, _, _, rows, n, x_stride = in_x
        scale_at, scale_stride, scale_kind = in_scale[0], in_scale[7], kind_of(in_scale, in_x)
        in_group = _rows_per_group(x.shape, scale.shape, tokens_per_group)
        fits = in_scale[6] == n and scale_kind is not None and in_group is not None
        shift_at, shift_stride, shift_kind = 0, n, ABSENT
        if shift is not None:
            if (in_shift := rows_of(shift)) is None or in_shift[1:7] != in_scale[1:7]:
                fits = False
            else:
                shift_at, shift_stride, shift_kind = in_shift[0], in_shift[7], scale_kind or ABSENT
        w_at = 0
        weight_kind: int | None = ABSENT
        if weight is None:
            offset = 1.0  # as a weight of zeros
        elif (in_w := rows_of(weight)) is None or in_w[6] != n or weight.dim() != 1:
            fits = False
        else:
            w_at, weight_kind = in_w[0], kind_of(in_w, in_x)
        if not fits or in_group is None or weight_kind is None or not rows * n:
            return self.prepare_forward(tensors, settings, keep, out)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        y_at, dtype, device = y.data_ptr(), x.dtype, on.device
        rstd = x.new_empty(rows, dtype=torch.float32) if keep else None
        kernel = on.kernels["modulated_rmsnorm_forward"]
        places = y_at | x_at | scale_at | shift_at | w_at
        strides = x_stride | scale_stride | shift_stride
        aligned = not (places | strides | n) & 15
        loaded = kernel.recent.get((dtype, aligned, n)) or kernel((dtype, aligned), n)
        if in_group < loaded.numbers.get("min_group_rows", 0):  # rather row by row
            loaded = kernel((dtype, aligned), ANY_LENGTH)
        groups, in_part, parts = rows, 1, 1
        if "stages" in loaded.numbers:
            groups = in_scale[5]
            in_part, parts = _parts(on, loaded, groups, in_group)
        elif aligned and WIDE in (scale_kind, weight_kind):
            # row by row, aligned variants are for vectors of x's dtype alone
            loaded = kernel((dtype, False), n)
        loaded.launch(
            device, on.stream(device), groups * parts, 1, 1,
            y_at, x_at, scale_at, shift_at, w_at, None if rstd is None else rstd.data_ptr(),
            n, x_stride, scale_stride, shift_stride, rows, n, in_group, in_part, parts, eps, offset,
            scale_kind, shift_kind, weight_kind, ROUND_FIRST[casting_mode], keep,
        )  # fmt: skip
        return y, rstd

    def saved(self, tensors: Tensors, results: Tensors) -> Tensors:
        return *tensors, results[1]

    def run_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        (dy,), (x, scale, shift, weight, rstd) = grads, saved
        in_x, in_dy, in_scale = rows_of(x), rows_of(dy), rows_of(scale)
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        if on is None or in_x is None or in_dy is None or in_scale is None or not dy.numel():
            return self.prepare_backward(grads, saved, settings, needed)
        arguments = zip((x, scale, shift, weight), needed, strict=True)
        made = tuple(
            torch.empty_like(t, memory_format=torch.contiguous_format) if need else None
            for t, need in arguments
        )
        by = self._by_token if in_scale[5] == in_x[5] else self._by_group
        by(on, in_x, in_dy, in_scale, weight, rstd, settings[1], x.dtype, made)
        return made

    def _by_group(
        self, on: OpOn, in_x: Rows, in_dy: Rows, in_scale: Rows, weight: Tensor | None, rstd: Tensor, offset: float,
        dtype: torch.dtype, made: Tensors,
    ) -> None:  # fmt: skip
        """Two levels: sums of parts of the groups, then their sums."""
        dx, dscale, dshift, dweight = made
        x_at, _, _, _, _, rows, n, x_stride = in_x
        dy_at, dy_stride, scale_at, groups, scale_stride = (
            in_dy[0],
            in_dy[7],
            in_scale[0],
            in_scale[5],
            in_scale[7],
        )
        in_group, scale_kind = rows // groups, kind_of(in_scale, in_x)
        w_at, weight_kind, offset = _weight(weight, offset, dtype)
        dx_at = 0 if dx is None else dx.data_ptr()
        kernel = on.kernels["modulated_rmsnorm_backward"]
        strides = x_stride | dy_stride | scale_stride
        aligned = not (x_at | dy_at | dx_at | scale_at | w_at | strides | n) & 15
        loaded = kernel.recent.get((dtype, aligned, n)) or kernel((dtype, aligned), n)
        in_part, parts = _parts(on, loaded, groups, in_group)
        normal = plain = None
        if dscale is not None or dweight is not None:
            normal = rstd.new_empty(groups * parts * n)
        if dshift is not None:
            plain = rstd.new_empty(groups * parts * n)
        normal_at = 0 if normal is None else normal.data_ptr()
        plain_at = 0 if plain is None else plain.data_ptr()
        device = on.device
        loaded.launch(
            device, on.stream(device), groups * parts, 1, 1,
            dx_at, dy_at, x_at, scale_at, w_at, rstd.data_ptr(), normal_at, plain_at,
            n, dy_stride, x_stride, scale_stride, n, in_group, in_part, parts, offset, scale_kind, weight_kind,
            dx is not None, normal is not None, plain is not None,
        )  # fmt: skip
        if normal is None and plain is None:
            return
        dscale_at = 0 if dscale is None else dscale.data_ptr()
        dshift_at = 0 if dshift is None else dshift.data_ptr()
        dw_at = 0 if dweight is None else dweight.data_ptr()
        places = dscale_at | dshift_at | dw_at | normal_at | plain_at | scale_at | w_at
        aligned = not (places | scale_stride | n) & 15
        loaded = on.kernels["modulated_rmsnorm_sums"]((dtype, aligned), n)
        jobs = groups * ((dscale is not None) + (dshift is not None)) + (dweight is not None)
        loaded.launch(
            device, on.stream(device), jobs * -(-n // loaded.block), 1, 1,
            dscale_at, dshift_at, dw_at, normal_at, plain_at, scale_at, w_at, scale_stride, n, groups, parts, offset,
            scale_kind, weight_kind, ABSENT if dscale is None else scale_kind, ABSENT if dshift is None else scale_kind,
            ABSENT if dweight is None else weight_kind,
        )  # fmt: skip

    def _by_token(
        self, on: OpOn, in_x: Rows, in_dy: Rows, in_scale: Rows, weight: Tensor | None, rstd: Tensor, offset: float,
        dtype: torch.dtype, made: Tensors,
    ) -> None:  # fmt: skip
        """Groups of one row: only dweight is a sum."""
        dx, dscale, dshift, dweight = made
        x_at, kind, index, _, _, rows, n, x_stride = in_x
        dy_at, dy_stride, scale_at, scale_stride = in_dy[0], in_dy[7], in_scale[0], in_scale[7]
        scale_kind = kind_of(in_scale, in_x)
        w_at, weight_kind, offset = _weight(weight, offset, dtype)
        dx_at, dscale_at, dshift_at = (0 if t is None else t.data_ptr() for t in made[:3])
        kernel = on.kernels["modulated_rmsnorm_backward_tokens"]
        places = dx_at | dscale_at | dshift_at | x_at | dy_at | scale_at | w_at
        strides = x_stride | dy_stride | scale_stride
        # aligned variants are for vectors of x's dtype alone
        aligned = WIDE not in (scale_kind, weight_kind) and not (places | strides | n) & 15
        loaded = kernel.recent.get((dtype, aligned, n)) or kernel((dtype, aligned), n)
        programs, _, _ = persistent(on, loaded, rows)
        partials = None if dweight is None else rstd.new_empty(programs * n)
        device = on.device
        loaded.launch(
            device, on.stream(device), programs, 1, 1,
            dx_at, dscale_at, dshift_at, dy_at, x_at, scale_at, w_at, rstd.data_ptr(),
            None if partials is None else partials.data_ptr(), n, dy_stride, x_stride, scale_stride, rows, n, offset,
            scale_kind, weight_kind, dx is not None, ABSENT if dscale is None else scale_kind,
            ABSENT if dshift is None else scale_kind, partials is not None,
        )  # fmt: skip
        if partials is not None:
            sums = self._column_sums.find(kind, index) or self._column_sums.on(index)
            column_sums.launch(sums, dweight, partials, programs, n)

    @staticmethod
    def reference(
        x: Tensor, scale: Tensor, shift: Tensor | None, weight: Tensor | None, eps: float, offset: float,
        casting_mode: str, tokens_per_group: int | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        y = wide * rstd
        if ROUND_FIRST[casting_mode]:
            y = y.to(x.dtype).to(wide.dtype)
        if weight is not None:
            y = y * (offset + weight.to(wide.dtype))
        y = _grouped(y, scale) * (1 + _by_groups(scale, wide.dtype))
        if shift is not None:
            y = y + _by_groups(shift, wide.dtype)
        return y.reshape(x.shape).to(x.dtype), rstd.reshape(-1)

    @staticmethod
    def reference_backward(
        grads: Tensors,
        saved: Tensors,
        eps: float,
        offset: float,
        casting_mode: str,
        tokens_per_group: int | None,
    ) -> Tensors:
        (dy,), (x, scale, shift, weight, rstd) = grads, saved
        wide = torch.promote_types(x.dtype, torch.float32)
        dyw, rstd = _grouped(dy.to(wide), scale), rstd.to(wide).reshape(*x.shape[:-1], 1)
        normal = x.to(wide) * rstd
        w = torch.ones_like(normal[..., :1]) if weight is None else offset + weight.to(wide)
        dscale = (dyw * _grouped(normal * w, scale)).sum(1).reshape(scale.shape).to(scale.dtype)
        dshift = None if shift is None else dyw.sum(1).reshape(shift.shape).to(shift.dtype)
        g = (dyw * (1 + _by_groups(scale, wide))).reshape(x.shape)
        dweight = None
        if weight is not None:
            dweight = torch.atleast_2d(g * normal).flatten(0, -2).sum(0).to(weight.dtype)
        dx = (g * w - normal * (g * w * normal).mean(-1, keepdim=True)) * rstd
        return dx.to(x.dtype), dscale, dshift, dweight

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        n = shape[-1]
        return tuple(
            Problem(f"{self.name}_{kernel}", (dtype,), n % 16 == 0, n)
            for kernel in ("forward", "backward", "sums")
        )


def rows_per_group(x: Sequence[int], scale: Sequence[int], tokens_per_group: int | None = None) -> int | None:
    """How many of x's rows share one row of scale, by the shapes; None where they don't fit."""
    leading, groups, rows = x[:-1], prod(scale[:-1]), prod(x[:-1])
    if tokens_per_group is not None:
        return tokens_per_group if groups * tokens_per_group == rows else None
    first = [d for i, d in enumerate(scale[:-1]) if any(later != 1 for later in scale[i:-1])]
    matches = list(leading[: len(first)]) == first
    flattened = len(first) == 1 and groups in [prod(leading[:i]) for i in range(len(leading) + 1)]
    divides = len(leading) == len(first) == 1 and groups and rows % groups == 0
    if not (matches or flattened or divides):
        return None
    return rows // groups if groups else 0


_rows_per_group = lru_cache(maxsize=REMEMBERED)(rows_per_group)


def parts_of(groups: int, rows: int, resident: int) -> tuple[int, int]:
    """(rows a part, parts a group): how to divide groups of so many rows among programs, ``resident`` of which run at
    once and the others after them, in the least time. No part is empty."""
    best = (0, 0, 0)
    for waves in range(1, MOST_WAVES + 1):
        in_part = -(-rows // max(1, min(rows, waves * resident // groups)))
        parts = -(-rows // in_part)
        cost = -(-groups * parts // resident) * (in_part + PART_COST)
        if not best[0] or cost < best[0]:
            best = (cost, in_part, parts)
    return best[1:]


def _parts(on: OpOn, loaded: Loaded, groups: int, rows: int) -> tuple[int, int]:
    """``parts_of``, remembered."""
    known: tuple[int, int] | None = on.plans.get((loaded, groups, rows))
    if known is None:
        resident = loaded.numbers["programs_per_multiprocessor"] * on.multiprocessors
        in_part = min(parts_of(groups, rows, resident)[0], loaded.numbers.get("max_part_rows", rows))
        known = remember(on.plans, (loaded, groups, rows), (in_part, -(-rows // in_part)))
    return known


def _weight(weight: Tensor | None, offset: float, dtype: torch.dtype) -> tuple[int, int, float]:
    """Address, kind and offset as the kernels take them: no weight is one of zeros with offset 1."""
    if weight is None:
        return 0, ABSENT, 1.0
    return weight.data_ptr(), NARROW if weight.dtype == dtype else WIDE, offset


def _grouped(x: Tensor, scale: Tensor) -> Tensor:
    """x as (groups, rows, n)."""
    groups, rows = prod(scale.shape[:-1]), prod(x.shape[:-1])
    return x.reshape(groups, rows // groups if groups else 0, x.shape[-1])


def _by_groups(vectors: Tensor, dtype: torch.dtype) -> Tensor:
    """Scale or shift as (groups, 1, n)."""
    return vectors.to(dtype).reshape(prod(vectors.shape[:-1]), 1, vectors.shape[-1])


OP = ModulatedRMSNorm
