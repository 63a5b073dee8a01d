"""What the ops with 8-bit results share: their settings, checks, the memory of codes and scales, the reference.

The rules of scales and codes are those of csrc_triton/quantization/codes.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError, PackNotFound
from liger_aot.ops.arguments import ANY, Allowed
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.forward_only import ForwardOnlyOp
from liger_aot.ops.op import Problem, as_rows, check_rows, check_same_device
from liger_aot.runtime.devices import gpu
from liger_aot.runtime.dispatch import CODE_NAMES, KernelOn, Loaded, Runtimes
from liger_aot.runtime.packs import pack_for
from liger_aot.runtime.remembered import remember

E4M3, E4M3FNUZ, INT8 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.int8
LARGEST = {E4M3: 448.0, E4M3FNUZ: 224.0, INT8: 127.0}
SCHEMES = ("tensor", "token", "group")
LAYOUTS = ("row_major", "column_major", "tma_aligned")
GROUPS = (64, 128)
FLOOR = 1e-10  # of the absmax of a group or tensor, and of a row in int8
FLOOR_OF_ROWS = 1 / 512  # of a row in fp8
TMA = 4  # scales: 16 bytes, to which TMA wants the distance of columns rounded up
# What every op has, in this order, before its own settings.
COMMON = {
    "str scheme": Allowed(among=SCHEMES),
    "ScalarType? dtype": ANY,
    "int group_size": ANY,
    "str scale_layout": Allowed(among=LAYOUTS),
    "bool ue8m0": ANY,
}


class Scheme(NamedTuple):
    """The settings that all ops have."""

    scheme: str
    dtype: torch.dtype | None
    group_size: int
    scale_layout: str
    ue8m0: bool

    @property
    def codes(self) -> torch.dtype:
        """The codes' dtype: by default the GPU's 8-bit float."""
        return self.dtype or (_rocm_fp8() if torch.version.hip else E4M3)

    @property
    def word(self) -> str:
        """The scheme as the kernels' axis has it."""
        return f"group{self.group_size}" if self.scheme == "group" else self.scheme


def _rocm_fp8() -> torch.dtype:
    """The 8-bit float of the current GPU, as its pack says: CDNA 3 has another than what came after it."""
    return _fp8_of(torch.cuda.current_device()) if torch.cuda.is_available() else E4M3


@lru_cache(maxsize=64)
def _fp8_of(index: int) -> torch.dtype:
    try:
        fp8 = pack_for(gpu(index).device).fp8
    except PackNotFound:  # the reference on the CPU needs none
        return E4M3
    return E4M3FNUZ if fp8 == CODE_NAMES[E4M3FNUZ] else E4M3


class Made(NamedTuple):
    """Memory for results."""

    codes: Tensor
    scales: Tensor
    row: int  # from one row's scales to the next, in elements
    step: int  # from one group's scale to the next


class QuantizingOp(ForwardOnlyOp):
    """Base of the ops of this family.

    A subclass's first tensor is x, its last two are ``scale?`` and ``scale_ub?``; its settings begin with ``COMMON``.
    """

    no_gradient = "codes have none"
    outputs = 2
    results = 2  # codes, scales
    contiguous = False  # scales may lie by columns
    dynamic_tensor = False  # whether it can find the scale of a whole tensor itself
    source_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)

    def __init__(self, runtimes: Mapping[str, Runtimes] | None = None) -> None:
        super().__init__(runtimes)
        self._fitting: dict[Any, bool] = {}  # settings, with what they must fit, that passed ``check``

    def quantized(
        self, tensors: Tensors, settings: tuple[Any, ...], out: Sequence[Tensor] | None = None
    ) -> Any:
        """The outputs; a given scale in the place of the scales."""
        results = self.differentiable(tensors, settings, out)
        scale = tensors[-2]
        return results if scale is None else (results[0], scale, *results[2:])

    def columns(self, tensors: Tensors) -> int:
        """How long a row of codes is."""
        n: int = tensors[0].shape[-1]
        return n

    def check_source(self, argument: str, x: Any) -> None:
        check_rows(self.name, argument, x)
        if x.dtype not in self.source_dtypes:
            allowed = ", ".join(str(d).removeprefix("torch.") for d in self.source_dtypes)
            raise ArgumentTypeError(f"{self.name}: {argument} must be {allowed}, got {_said(x.dtype)}")

    def check_scheme(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        """Raise unless the common settings fit each other, the length of a row and the scales that are given."""
        asked, n = Scheme(*settings[:5]), self.columns(tensors)
        scale, scale_ub = tensors[-2:]
        name, scheme = self.name, asked.scheme
        if asked.dtype not in (None, *LARGEST):
            allowed = ", ".join(map(_said, LARGEST))
            raise ArgumentTypeError(f"{name}: dtype must be {allowed} or None, got {_said(asked.dtype)}")
        if asked.dtype == INT8 and scheme != "token":
            raise ArgumentError(f"{name}: dtype int8 is for scheme 'token', got {scheme!r}")
        if asked.group_size not in GROUPS:
            raise ArgumentError(f"{name}: group_size must be 64 or 128, got {asked.group_size}")
        if scheme == "group" and n % asked.group_size:
            raise ArgumentError(f"{name}: rows of {n} are no whole groups of {asked.group_size}")
        if asked.scale_layout != "row_major" and scheme != "group":
            raise ArgumentError(
                f"{name}: scale_layout {asked.scale_layout!r} is for scheme 'group', got {scheme!r}"
            )
        if asked.ue8m0 and (scheme == "tensor" or asked.dtype == INT8):
            raise ArgumentError(
                f"{name}: ue8m0 is for fp8 scales of tokens and groups, got {scheme!r}, {asked.dtype}"
            )
        for argument, value in (("scale", scale), ("scale_ub", scale_ub)):
            if value is not None:
                _check_scalar(name, argument, value, tensors[0])
        if scale is not None and scheme != "tensor":
            raise ArgumentError(f"{name}: scale is for scheme 'tensor'; {scheme!r} makes its own")
        if scale_ub is not None and scheme == "tensor":
            raise ArgumentError(f"{name}: scale_ub is for schemes 'token' and 'group', got 'tensor'")
        if scale is None and scheme == "tensor" and not self.dynamic_tensor:
            raise ArgumentError(
                f"{name}: scheme 'tensor' needs a scale: the largest value is known only after the last row"
            )

    def fits(self, tensors: Tensors, settings: tuple[Any, ...], n: int) -> bool:
        """Whether a call like this one passed ``check`` before, and its scales are what a kernel reads."""
        x, *_, scale, scale_ub = tensors
        if (settings, n, x.dtype, scale is None, scale_ub is None) not in self._fitting:
            return False
        return (scale is None or _readable(scale, x)) and (scale_ub is None or _readable(scale_ub, x))

    def prepare_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        self.check(tensors, settings)
        *sources, scale, scale_ub = tensors
        if self.on_reference(tensors):
            results = self.by_reference(tensors, settings)
            return results if out is None else (*results[:2], out[0].copy_(results[2]))
        names = [name.rstrip("?") for name in self.tensors]
        ready = [
            t if t is None else as_rows(self.name, name, t) for name, t in zip(names, sources, strict=False)
        ]
        ready += [t if t is None else t.reshape(1) for t in (scale, scale_ub)]
        call = settings, self.columns(tensors), sources[0].dtype, scale is None, scale_ub is None
        remember(self._fitting, call, True)
        return self.run_forward(tuple(ready), settings, keep, out)

    def make(self, x: Tensor, asked: Scheme, n: int, given: bool) -> Made:
        """Memory for codes of x's shape, with rows of n, and their scales."""
        lead = x.shape[:-1]
        codes = x.new_empty((*lead, n), dtype=asked.codes)
        if asked.scheme == "tensor":
            return Made(codes, x.new_empty(0 if given else 1, dtype=torch.float32), 0, 0)
        if asked.scheme == "token":
            return Made(codes, x.new_empty((*lead, 1), dtype=torch.float32), 1, 0)
        shape = (*lead, n // asked.group_size)
        if asked.scale_layout == "row_major":
            return Made(codes, x.new_empty(shape, dtype=torch.float32), shape[-1], 1)
        strides = column_strides(shape, asked.scale_layout)
        return Made(codes, x.new_empty_strided(shape, strides, dtype=torch.float32), 1, strides[-1])

    def find(self, kernel: KernelOn, key: tuple[Any, ...], n: int, rows: int) -> Loaded:
        """The variant for a call; ArgumentTypeError names what the GPU lacks."""
        try:
            return kernel.for_rows(key, n, rows)
        except ArgumentTypeError:
            raise self._lacking(key[1]) from None

    def _lacking(self, dtype: torch.dtype) -> ArgumentTypeError:
        return ArgumentTypeError(
            f"{self.name}: this GPU does not convert to {_said(dtype)}: float8_e4m3fnuz is gfx942's alone, and older "
            "GPUs have no fp8; all have int8 with scheme 'token'"
        )

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        """With the scale of a row, ``dtypes`` may name that of the codes: ``out``."""
        out = (dtypes or {}).get("out", INT8)
        n = shape[-1]
        return (Problem(self.name, (dtype, out, "token"), n % 16 == 0, n, prod(shape[:-1])),)


def column_strides(shape: Sequence[int], layout: str) -> tuple[int, ...]:
    """Strides of scales that lie by columns: rows follow each other, TMA's columns begin at multiples of 16 bytes."""
    strides, rows = [], 1
    for size in reversed(shape[:-1]):
        strides.append(rows)
        rows *= size
    return (*reversed(strides), -(-rows // TMA) * TMA if layout == "tma_aligned" else rows)


def address(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def _readable(scalar: Any, x: Tensor) -> bool:
    """Whether a scale is one float32 element beside x."""
    return (
        isinstance(scalar, Tensor)
        and scalar.dtype == torch.float32
        and scalar.numel() == 1
        and scalar.device == x.device
    )


def quantized_reference(
    y: Tensor, scale: Tensor | None, scale_ub: Tensor | None, settings: Sequence[Any]
) -> tuple[Tensor, Tensor]:
    """Codes and scales of y, in plain torch: the division and its rounding are those of the kernels, to the bit."""
    asked = Scheme(*settings[:5])
    dtype, values = asked.codes, y.float()
    largest = LARGEST[dtype]
    if asked.scheme == "tensor":
        made = y.new_empty(0, dtype=torch.float32)
        if scale is None:
            scale = made = divided(absmax(values.reshape(1, -1)).clamp(min=FLOOR), largest)
        return encoded(values * (1.0 / scale.reshape(())), dtype), made
    shape = (
        (y.shape[-1] // asked.group_size, asked.group_size) if asked.scheme == "group" else (1, y.shape[-1])
    )
    grouped = values.unflatten(-1, shape)
    top = absmax(grouped)
    if scale_ub is not None:
        top = torch.minimum(top, scale_ub.reshape(()))
    s = divided(top.clamp(min=FLOOR_OF_ROWS if asked.scheme == "token" and dtype != INT8 else FLOOR), largest)
    if asked.ue8m0:
        s = ((s.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    codes = encoded((grouped / s.unsqueeze(-1)).reshape(y.shape), dtype)
    if asked.scale_layout != "row_major":
        laid = s.new_empty_strided(s.shape, column_strides(s.shape, asked.scale_layout))
        s = laid.copy_(s)
    return codes, s


def divided(top: Tensor, largest: float) -> Tensor:
    """top / largest, correctly rounded. On a GPU torch multiplies by the rounded 1 / largest where that is a number and
    not a tensor there: with 448 every second result is one unit in the last place off."""
    return top / torch.full_like(top, largest)


def absmax(values: Tensor) -> Tensor:
    """The greatest magnitude along the last dimension, NaN left out."""
    if not values.shape[-1]:
        return values.new_zeros(values.shape[:-1])
    return torch.where(values.isnan(), 0.0, values.abs()).amax(-1)


def encoded(q: Tensor, dtype: torch.dtype) -> Tensor:
    q = q.clamp(-LARGEST[dtype], LARGEST[dtype])
    return torch.where(q.isnan(), 0.0, q).round().to(dtype) if dtype == INT8 else q.to(dtype)


def _check_scalar(op: str, argument: str, value: Any, x: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(f"{op}: {argument} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype != torch.float32 or value.layout != torch.strided or value.is_nested:
        raise ArgumentTypeError(f"{op}: {argument} must be a dense float32 tensor, got {_said(value.dtype)}")
    check_same_device(op, argument, value, "x", x)
    if value.numel() != 1:
        raise ArgumentError(f"{op}: {argument} must have one element, got shape {tuple(value.shape)}")


def _said(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
