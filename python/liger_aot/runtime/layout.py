"""How a tensor lies in memory, as kernels take it: rows of contiguous elements, a fixed distance apart."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

# address, DLPack device type and index, DLPack dtype code and bits, rows, columns, row stride in elements
Rows = tuple[int, int, int, int, int, int, int, int]

CPU, CUDA, ROCM = 1, 2, 10
FP32 = (2, 32)  # DLPack's dtype code and bits
NEEDS_GRADIENT, OTHER_SETTINGS, INDIRECT = 1, 2, 4  # what ``traits`` answers
_DTYPE = {torch.float16: (2, 16), torch.float32: FP32, torch.bfloat16: (4, 16)}


def python_rows(x: Tensor) -> Rows | None:
    """``_launch.tensor_rows`` for a torch without the exchange API that it reads."""
    code_bits = _DTYPE.get(x.dtype)
    if x.is_neg():
        return None
    if x.dim() == 0 or code_bits is None or x.device.type not in ("cpu", "cuda") or not x.is_contiguous():
        stride = None if code_bits is None or x.dim() == 0 else _row_stride(x)
        if stride is None or code_bits is None:
            return None
    else:
        stride = x.shape[-1]
    n = x.shape[-1]
    kind = CPU if x.device.type == "cpu" else ROCM if torch.version.hip else CUDA
    index = x.get_device() if kind != CPU else 0
    return x.data_ptr(), kind, index, *code_bits, x.shape[:-1].numel(), n, stride


def _row_stride(x: Tensor) -> int | None:
    """The one stride that spans all rows, or None. Dimensions of size 1 don't count."""
    if x.device.type not in ("cpu", "cuda") or (x.shape[-1] > 1 and x.stride(-1) != 1):
        return None
    outer = [(size, stride) for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size != 1]
    if not outer or not x.numel():
        return x.shape[-1]
    if any(a[1] != b[0] * b[1] for a, b in pairwise(outer)):
        return None
    return outer[-1][1]


def python_traits(
    tensors: tuple[Any, ...], settings: tuple[Any, ...] = (), known: tuple[Any, ...] = ()
) -> int:
    """``_launch.traits`` for a torch without the exchange API that it reads."""
    same = len(settings) == len(known) and all(a is b for a, b in zip(settings, known, strict=True))
    found = 0 if same else OTHER_SETTINGS
    for t in tensors:
        if t is None:
            continue
        if (
            type(t) not in (Tensor, torch.nn.Parameter)
            or t.layout != torch.strided
            or t.is_nested
            or t.is_quantized
        ):
            return INDIRECT
        if t.device.type == "meta" or t.is_neg() or torch._C._functorch.is_functorch_wrapped_tensor(t):
            return INDIRECT
        if torch._is_functional_tensor(t) or (t.numel() and not t.data_ptr()):
            return INDIRECT
        found |= t.requires_grad
    return found


def python_layouts(tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """``_launch.layouts`` of tensors or a torch that it can't read."""
    key = tuple(None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors)
    return key, *(0 if t is None else t.data_ptr() for t in tensors)


def _choose() -> tuple[
    Callable[[Tensor], Rows | None],
    Callable[..., int],
    Callable[[tuple[Any, ...]], tuple[Any, ...] | None],
]:
    try:
        from liger_aot._launch import layouts, tensor_rows, traits
    except ImportError:  # the source tree, not built: the CPU reference works all the same
        return python_rows, python_traits, lambda tensors: None
    if tensor_rows(torch.empty(1)) is None:
        return python_rows, python_traits, layouts
    return tensor_rows, traits, layouts


# ``_layouts`` says None where it can't look.
rows_of, traits, _layouts = _choose()


def layouts_of(tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """(key, *addresses): what ``_launch.layouts`` gives, or as much in Python."""
    return _layouts(tensors) or python_layouts(tensors)


def disjoint(out: Rows, x: Rows, weight: Rows | None) -> bool:
    """Whether out's memory ends before x and the weight begin or starts after they end. False says nothing: ask
    ``overlap``."""
    out_at, x_at, last, n, size = out[0], x[0], x[5] - 1, x[6], x[4] >> 3
    out_end = out_at + (last * out[7] + n) * size
    if weight is not None and out_at < weight[0] + n * (weight[4] >> 3) and weight[0] < out_end:
        return False
    return out_at >= x_at + (last * x[7] + n) * size or x_at >= out_end


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share an element or may: the ranges of their addresses meet, unless they are columns that
    lie beside each other in one buffer, or exactly the same elements."""
    if not a.numel() or not b.numel() or a.data_ptr() >= _end(b) or b.data_ptr() >= _end(a):
        return False
    if (
        a.data_ptr() == b.data_ptr()
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.dtype == b.dtype
    ):
        return False
    rows_a, rows_b = rows_of(a), rows_of(b)
    if rows_a is None or rows_b is None or rows_a[7] != rows_b[7] or a.dtype != b.dtype:
        return True
    stride = rows_a[7]
    distance = ((rows_b[0] - rows_a[0]) // a.element_size()) % stride
    return distance < rows_a[6] or distance + rows_b[6] > stride


def _end(x: Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr() + (last + 1) * x.element_size()
