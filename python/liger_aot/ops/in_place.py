"""Ops for inference that write some of their arguments and return them: caches, packed projections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.forward_only import ForwardOnlyOp
from liger_aot.ops.op import plain_torch
from liger_aot.ops.torch_library import register

Dims = list[tuple[int, int]]  # size and stride


class InPlaceOp(ForwardOnlyOp):
    """Base of ops that write arguments.

    torch.library knows such an op as one that writes: torch.compile copies none of what it writes. A subclass's
    ``run_forward`` gets the tensors that it writes as ``out`` and returns them.
    """

    writes: ClassVar[tuple[str, ...]]  # the names of the arguments that may be written
    no_gradient = "what is written in place here has none"
    contiguous = False

    def __init_subclass__(cls) -> None:
        cls.outputs = cls.results = len(cls.writes)

    @staticmethod
    def write_in_torch(*arguments: Any) -> None:
        """What the kernels do, in plain torch, from the tensors and the settings."""
        raise NotImplementedError

    def overwritten(self, tensors: Tensors) -> Tensors:
        """Of the arguments, those that a call writes."""
        found = zip(self.tensors, tensors, strict=True)
        return tuple(t for name, t in found if name.rstrip("?") in self.writes and t is not None)

    def write(self, tensors: Tensors, settings: tuple[Any, ...]) -> Tensors:
        """A call: the arguments that it wrote."""
        results: Tensors = self.differentiable(tensors, settings, self.overwritten(tensors))
        return results if isinstance(results, tuple) else (results,)

    def prepare_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        self.check(tensors, settings)
        if not self.on_reference(tensors):
            return self.run_forward(tensors, settings, keep, out)  # the device is bound now
        if not tensors[0].is_meta:  # there is nothing to write, and what is written depends on values
            with plain_torch():
                self.write_in_torch(*tensors, *settings)
        return self.overwritten(tensors)

    def through_library(
        self, tensors: Tensors, settings: tuple[Any, ...], out: Sequence[Tensor] | None
    ) -> Any:
        self.check_no_gradient(tensors, settings, out)
        register(self.name)
        self.check_all(tensors, settings)
        getattr(torch.ops.liger_aot, self.name)(*tensors, *settings)
        return self._given(tensors, out)

    def in_torch(self, tensors: Tensors, settings: tuple[Any, ...], out: Sequence[Tensor] | None) -> Any:
        self.check_no_gradient(tensors, settings, out)
        self.check_all(tensors, settings)
        with plain_torch(differentiable=torch.is_grad_enabled()):
            self.write_in_torch(*tensors, *settings)
        return self._given(tensors, out)

    def _given(self, results: Tensors, out: Sequence[Tensor] | None) -> Any:
        found = tuple(results if out is None else out)
        return found[0] if self.outputs == 1 else found


def check_writable(op: str, argument: str, x: Tensor) -> None:
    """ArgumentError where two elements of x share memory."""
    end = 0
    for size, stride in sorted(_dims(x), key=lambda dim: dim[1]):
        if stride <= end:
            raise ArgumentError(
                f"{op}: {argument} has strides {x.stride()}: elements share memory, which can't be overwritten"
            )
        end += (size - 1) * stride


def share_an_element(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have memory in common. Exact for two of the same shape, strides and dtype whose own elements
    share none; else whether the ranges of their addresses meet. Those on meta have none."""
    if (
        not a.numel()
        or not b.numel()
        or a.is_meta
        or b.is_meta
        or a.data_ptr() >= end_of(b)
        or b.data_ptr() >= end_of(a)
    ):
        return False
    if a.shape != b.shape or a.dtype != b.dtype or a.stride() != b.stride():
        return True
    distance, rest = divmod(b.data_ptr() - a.data_ptr(), a.element_size())
    return bool(rest) or _reaches(distance, sorted(_dims(a), key=lambda dim: -dim[1]))


def end_of(x: Tensor) -> int:
    """The address after x's last element."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr() + (last + 1) * x.element_size() if x.numel() else x.data_ptr()


def _dims(x: Tensor) -> Dims:
    return [dim for dim in zip(x.shape, x.stride(), strict=True) if dim[0] > 1]


def _reaches(distance: int, dims: Dims) -> bool:
    """Whether two elements of a tensor, whose dimensions are given from the largest stride on, are so far apart."""
    if not dims:
        return distance == 0
    (size, stride), *inner = dims
    steps = distance // stride
    return any(abs(n) < size and _reaches(distance - n * stride, inner) for n in (steps, steps + 1))
