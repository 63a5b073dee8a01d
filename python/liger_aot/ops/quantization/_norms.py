"""The norms with 8-bit codes as their result: what their host sides share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from liger_aot.errors import ArgumentTypeError
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.op import check_vector
from liger_aot.ops.quantization._codes import QuantizingOp, Scheme, address
from liger_aot.runtime.layout import Rows, rows_of


class NormQuantize(QuantizingOp):
    """Base of the three. Their tensors are x, where ``adds`` a residual, and the vectors; then the scales."""

    adds: ClassVar[bool] = False

    def scalars(self, settings: tuple[Any, ...], vectors: Tensors) -> tuple[Any, ...]:
        """The kernel's arguments between n and has_bound."""
        raise NotImplementedError

    def parts(self, tensors: Tensors) -> tuple[Tensors, Tensors]:
        """Rows (x, and a residual), and vectors."""
        first = 2 if self.adds else 1
        return tensors[:first], tensors[first:-2]

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        x, names = tensors[0], [name.rstrip("?") for name in self.tensors]
        self.check_source("x", x)
        _, vectors = self.parts(tensors)
        for name, vector in zip(names[-2 - len(vectors) :], vectors, strict=False):
            if vector is not None:
                check_vector(self.name, name, vector, x, x.shape[-1], "the last dimension of x")
                if vector.dtype != x.dtype:
                    raise ArgumentTypeError(
                        f"{self.name}: {name} must be of x's dtype {x.dtype}, got {vector.dtype}"
                    )
        self.check_scheme(tensors, settings)

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        sources, vectors = self.parts(tensors)
        scale, scale_ub = tensors[-2:]
        x, in_x = sources[0], rows_of(sources[0])
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        if keep or on is None or in_x is None or not in_x[5] * in_x[6]:
            return self.prepare_forward(tensors, settings, keep, out)
        _, _, _, _, _, rows, n, x_stride = in_x
        vectors_at = _addresses(vectors, in_x)
        if vectors_at is None or not self.fits(tensors, settings, n):
            return self.prepare_forward(tensors, settings, keep, out)
        asked = Scheme(*settings[:5])
        at, strides, added = [in_x[0]], [x_stride], None
        if self.adds:
            in_r = rows_of(sources[1])
            if in_r is None or in_r[1:7] != in_x[1:7] or sources[1].shape != x.shape:
                return self.prepare_forward(tensors, settings, keep, out)
            added = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out[0]
            sum_stride = n if out is None else in_r[7]
            at, strides = [added.data_ptr(), in_x[0], in_r[0]], [sum_stride, x_stride, in_r[7]]
        made = self.make(x, asked, n, scale is not None)
        q_at, places = made.codes.data_ptr(), n
        for place in (q_at, *at, *vectors_at, *strides):
            places |= place
        dtype, device = x.dtype, on.device
        key = (dtype, asked.codes, asked.word, not places & 15)
        loaded = self.find(on.kernels[self.name], key, n, rows)
        given = scale if scale is not None else scale_ub
        loaded.launch(
            device, on.stream(device), rows, 1, 1,
            q_at, made.scales.data_ptr(), *at, *vectors_at, address(given), *strides, made.row, made.step, n,
            *self.scalars(settings, vectors), given is not None, asked.ue8m0,
        )  # fmt: skip
        return (made.codes, made.scales) if added is None else (made.codes, made.scales, added)


def _addresses(vectors: Tensors, in_x: Rows) -> list[int] | None:
    """0 for one that is not there; None where one is no vector beside x."""
    found = []
    for vector in vectors:
        in_v = None if vector is None else rows_of(vector)
        if vector is not None and (
            in_v is None or in_v[1:5] != in_x[1:5] or in_v[6] != in_x[6] or vector.dim() != 1
        ):
            return None
        found.append(0 if in_v is None else in_v[0])
    return found
