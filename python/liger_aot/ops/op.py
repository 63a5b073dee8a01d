"""What every op has: its runtimes, preload, and the checks and arithmetic that ops share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from liger_aot.errors import ArgumentError, ArgumentTypeError, UnsupportedDevice
from liger_aot.runtime.dispatch import DTYPE_NAMES, Runtimes
from liger_aot.runtime.layout import Rows, overlap, rows_of

# Exact types: subclasses (fake, distributed, quantised tensors) may hold their data elsewhere, or nowhere.
PLAIN = frozenset((Tensor, torch.nn.Parameter))
PLAIN_OR_NONE = frozenset((Tensor, torch.nn.Parameter, type(None)))


class Problem:
    """One kernel's dispatch for a call, by its axes' values (dtypes, integers, bools, words), alignment, size and rows,
    where those count: what ``explain`` looks up without a GPU. ``split``: the kernel that ``with_split_rows`` asks
    first."""

    __slots__ = ("aligned", "axes", "kernel", "n", "rows", "split")

    def __init__(
        self,
        kernel: str,
        axes: tuple[Any, ...],
        aligned: bool,
        n: int,
        rows: int | None = None,
        split: str | None = None,
    ) -> None:
        self.kernel, self.axes, self.aligned, self.n, self.rows = kernel, axes, aligned, n, rows
        self.split = split


class Op:
    """A callable op. Subclasses add ``__call__`` and the raw, non-differentiable functions behind it.

    Args:
        runtimes: the op's kernels by device; by default those of the installed packs.
    """

    name: ClassVar[str]
    uses: ClassVar[tuple[str, ...]] = ()  # other ops that this one launches

    def __init__(self, runtimes: Mapping[str, Runtimes] | None = None) -> None:
        names = (self.name, *self.uses)
        self._runtimes = dict(runtimes) if runtimes is not None else {n: Runtimes(n) for n in names}
        self._own = self._runtimes[self.name]

    def __repr__(self) -> str:
        return f"<liger_aot op {self.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """An op holds binaries on devices: a pickle or deep copy of a module that has one means the process's own."""
        from liger_aot.ops.registry import load

        return load, (self.name,)

    def preload(self, device: torch.device | int | str | None = None) -> None:
        """Load every binary of the op onto ``device`` (default: torch's current GPU), before a CUDA graph capture or a
        first request. Nothing to do on the CPU.

        Raises:
            PackNotFound: no installed pack serves the device.
            UnsupportedDevice: the device is neither a GPU nor the CPU.
        """
        where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        if where.type == "cpu":
            return
        if where.type != "cuda":
            raise UnsupportedDevice(f"{self.name}.preload: device {where} is neither a GPU nor the CPU")
        index = torch.cuda.current_device() if where.index is None else where.index
        for runtimes in self._runtimes.values():
            runtimes.on(index).preload()

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        """The kernels that a call with contiguous, aligned tensors of ``shape`` would run.

        Args:
            shape: the first argument's shape.
            dtype: its dtype.
            dtypes: dtypes of further arguments by name, where they differ from ``dtype``.
        """
        raise NotImplementedError


def check_tensor(op: str, argument: str, value: Any) -> None:
    """ArgumentTypeError unless ``value`` is a tensor of a dtype that binaries are built for."""
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(f"{op}: {argument} must be a torch.Tensor, got {type(value).__name__}")
    if value.is_nested:
        raise ArgumentTypeError(f"{op}: {argument} must be a dense tensor, got a nested one")
    if value.dtype not in DTYPE_NAMES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in DTYPE_NAMES)
        got = str(value.dtype).removeprefix("torch.")
        raise ArgumentTypeError(f"{op}: {argument} must be {allowed}, got {got}")


def check_same_device(op: str, argument: str, value: Tensor, first: str, like: Tensor) -> None:
    if value.device != like.device:
        raise ArgumentError(
            f"{op}: {argument} is on {value.device}, {first} on {like.device}: both must be on one"
        )


def check_rows(op: str, argument: str, value: Any) -> None:
    """Raise unless ``value`` is a tensor of rows: of a dtype that binaries are built for, and no scalar."""
    check_tensor(op, argument, value)
    if value.dim() == 0:
        raise ArgumentError(f"{op}: {argument} must have at least one dimension, got a scalar")


def check_vector_dtype(op: str, argument: str, value: Tensor, x: Tensor) -> None:
    """Of what is scaled or shifted by: a tensor on x's device, of its dtype or float32."""
    check_tensor(op, argument, value)
    check_same_device(op, argument, value, "x", x)
    if value.dtype != x.dtype and value.dtype != torch.float32:
        raise ArgumentTypeError(
            f"{op}: {argument} must be of x's dtype {x.dtype} or float32, got {value.dtype}"
        )


def check_vector(op: str, argument: str, value: Tensor, x: Tensor, n: int, of: str) -> None:
    """Raise unless ``value`` holds n elements of x's dtype or float32, where x is; ``of`` says what n is."""
    check_vector_dtype(op, argument, value, x)
    if value.dim() != 1 or value.shape[0] != n or not value.is_contiguous():
        raise ArgumentError(
            f"{op}: {argument} must be contiguous of shape ({n},), {of}; got shape {tuple(value.shape)} with strides "
            f"{value.stride()}"
        )


@contextmanager
def plain_torch(differentiable: bool = False) -> Iterator[None]:
    """Around a reference: autocast changes no dtype in it, and autograd follows where that is asked for."""
    with torch.set_grad_enabled(differentiable), torch._C._DisableAutocast():
        yield


def autocast_dtype(t: Tensor) -> torch.dtype | None:
    """What autocast makes of the input of a matrix product where t is; None where it is off. There is none on meta."""
    kind = t.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def written(*tensors: Tensor) -> None:
    """Tell autograd of what a kernel writes in place: who saved it for a backward must learn of it, under no_grad, too.
    Those of inference mode have no version to count."""
    for t in tensors:
        increment_version(t)


def as_rows(op: str, argument: str, x: Tensor) -> Tensor:
    """``x``, or a contiguous copy where its rows don't lie evenly; ArgumentTypeError for what has no memory to read."""
    if rows_of(x) is None and rows_of(x := x.resolve_neg().contiguous()) is None:
        raise ArgumentTypeError(
            f"{op}: {argument} is a {type(x).__name__} that has no memory of its own to read"
        )
    return x


def check_out(op: str, out: Tensor, x: Tensor, **others: Tensor | None) -> Rows:
    """out's memory, once it is known to be what a kernel may write while it reads ``x`` and ``others``."""
    check_tensor(op, "out", out)
    check_same_device(op, "out", out, "x", x)
    if out.dtype != x.dtype or out.dim() == 0 or out.shape[-1] != x.shape[-1] or out.numel() != x.numel():
        raise ArgumentError(
            f"{op}: out must be of x's dtype {x.dtype} with as many rows as {tuple(x.shape)}; "
            f"got {tuple(out.shape)}, {out.dtype}"
        )
    for argument, value in (("x", x), *others.items()):
        if value is not None and overlap(out, value):
            raise ArgumentError(f"{op}: out overlaps {argument}; it may be x itself or memory of its own")
    check_writable_rows(op, "out", out)
    return rows_of(out)  # type: ignore[return-value]


def check_writable_rows(op: str, argument: str, x: Tensor) -> None:
    """ArgumentError unless ``x`` is rows that a kernel may write, no two of which share an element."""
    rows = rows_of(x)
    if rows is None or (rows[5] > 1 and rows[7] < rows[6]):
        what = "is lazily negated" if x.is_neg() else f"has strides {x.stride()}"
        raise ArgumentError(
            f"{op}: {argument} {what}: what is written must be contiguous rows, evenly spaced and without overlap"
        )
