"""One op's kernels on one device: dispatch tables bound to loaded binaries.

A ``Driver`` has one verb, ``load``; what it returns has the other, ``launch``. The GPU driver is the C launcher; tests
bring drivers that run the same host code on Triton's interpreter or execute the binaries in software.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from liger_aot.errors import (
    ArgumentTypeError,
    DriverError,
    NotBuilt,
    NotLoaded,
    PackDamaged,
    PackNotFound,
    UnsupportedDevice,
)
from liger_aot.runtime.layout import CPU, CUDA, ROCM
from liger_aot.runtime.locks import new_lock
from liger_aot.runtime.manifest import OpManifest, Variant
from liger_aot.runtime.remembered import remember
from liger_aot.runtime.workspaces import StreamWorkspace

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
CODE_NAMES = {torch.float8_e4m3fn: "fp8e4nv", torch.float8_e4m3fnuz: "fp8e4b8", torch.int8: "i8"}
_NAMES = {**DTYPE_NAMES, **CODE_NAMES}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_BOOLS = {"true": True, "false": False}


class Launchable(Protocol):
    """A binary on its device."""

    def launch(self, device: int, stream: int, x: int, y: int, z: int, /, *arguments: Any) -> None: ...

    def prepare(self, device: int, /) -> None: ...


class Driver(Protocol):
    """What turns a variant into something that can be launched."""

    def load(self, variant: Variant) -> Launchable: ...

    def stream(self, device: int) -> int: ...


class Loaded:
    """A variant that is ready to launch, with its launch numbers as attributes the hot path reads."""

    __slots__ = (
        "block",
        "contiguous",
        "kernel",
        "launch",
        "numbers",
        "parts",
        "persistent",
        "rows",
        "variant",
        "writes_sums",
    )

    def __init__(self, variant: Variant, kernel: Launchable) -> None:
        self.variant = variant
        self.kernel = kernel
        self.launch = kernel.launch
        self.numbers = variant.numbers
        self.rows = variant.numbers.get("rows", 1)
        self.block = variant.numbers.get("block", 1)
        self.parts = variant.numbers.get("parts", 0)  # at most so many programs share a row
        self.contiguous = variant.contiguous
        self.persistent = "programs_per_multiprocessor" in variant.numbers  # so many programs share the rows
        # A lone program can write the final sums itself.
        self.writes_sums = "rows_for_one_cta" in variant.numbers


class KernelOn:
    """One kernel on one device: (dtypes, aligned) and a size choose the variant."""

    def __init__(self, name: str, manifest: OpManifest, load: Callable[[str], Loaded]) -> None:
        self.name = name
        self._manifest = manifest
        self._load = load
        # (*key, n) or (*key, n, rows) -> what was found before.
        self.recent: dict[tuple[Any, ...], Loaded] = {}
        self._few = {_table_key(key): entries for key, entries in manifest.kernels[name].few.items()}
        # From so many rows on a problem is one of many rows, which ``for_rows`` does not tell apart.
        self.many_rows = 1 + max(
            (rows for entries in self._few.values() for _, rows, _ in entries), default=0
        )
        self._not_built = {_table_key(key): key for key in manifest.kernels[name].absent}
        self._kernel = manifest.kernels[name]
        self._tables: dict[tuple[Any, ...], tuple[list[int], list[str], list[Loaded | None]]] = {}
        for key, entries in manifest.kernels[name].tables.items():
            bounds = [bound for bound, _ in entries if bound is not None]
            names = [variant for _, variant in entries]
            found: list[Loaded | None] = [None] * len(names)
            self._tables[_table_key(key)] = (bounds, names, found)

    def __call__(self, key: tuple[Any, ...], n: int) -> Loaded:
        """The variant for a problem of size ``n``; ``key`` holds the axes' values (torch dtypes, integers, bools,
        words) and whether all is aligned."""
        known = self.recent.get((*key, n))
        if known is not None:
            return known
        try:
            bounds, names, found = self._tables[key]
        except KeyError:
            self.check_built(key, n)
            raise ArgumentTypeError(self._refusal(key)) from None
        i = bisect_left(bounds, n)
        if i == len(found):  # only where something is absent
            self.check_built(key, n)
        loaded = found[i]
        if loaded is None:
            loaded = found[i] = self._load(names[i])
        return remember(self.recent, (*key, n), loaded)

    def for_rows(self, key: tuple[Any, ...], n: int, rows: int) -> Loaded:
        """As a call, for a problem of ``rows`` rows: some binaries are for few. ``recent`` has it as (*key, n, rows),
        with ``many_rows`` for all that are above."""
        rows = min(rows, self.many_rows)
        known = self.recent.get((*key, n, rows))
        if known is not None:
            return known
        for bound, most, name in self._few.get(key, ()):
            if rows <= most and (bound is None or n <= bound):
                return remember(self.recent, (*key, n, rows), self._load(name))
        return remember(self.recent, (*key, n, rows), self(key, n))

    def numbers(self, key: tuple[Any, ...], n: int) -> Mapping[str, int]:
        """The launch numbers of a call's variant, which is not loaded for that."""
        bounds, names, _ = self._tables[key]
        return self._manifest.variant(names[bisect_left(bounds, n)]).numbers

    def check_built(self, key: tuple[Any, ...], n: int) -> None:
        """NotBuilt where the architecture does without a binary for a problem of size ``n``; loads none."""
        if key in self._not_built:
            bounds, names, _ = self._tables.get(key, ([], [], []))
            if bisect_left(bounds, n) == len(names):
                raise NotBuilt(self._kernel.not_built(self._not_built[key])) from None

    def serves(self, key: tuple[Any, ...]) -> bool:
        """Whether there are binaries for these values of the axes: an optional kernel may have them for some alone."""
        return key in self._tables

    def _refusal(self, key: tuple[Any, ...]) -> str:
        allowed = ", ".join(sorted(map(key_text, self._tables)))
        return f"{self.name} is not built for {key_text(key)}; it is for {allowed}"


def key_text(key: tuple[Any, ...]) -> str:
    """A dispatch key as packs write it: "bf16/64/causal/aligned"."""
    *axes, aligned = key
    return "/".join((*map(_axis_text, axes), "aligned" if aligned else "generic"))


def _table_key(text: str) -> tuple[Any, ...]:
    *axes, alignment = text.split("/")
    return *map(_axis_value, axes), alignment == "aligned"


def _axis_text(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return _NAMES.get(value) or str(value).removeprefix("torch.")
    return str(value).lower() if isinstance(value, bool) else str(value)


def _axis_value(text: str) -> Any:
    """What a dispatch key's word means: a dtype, an integer, a bool or the word itself."""
    if text.isdecimal():
        return int(text)
    return _BOOLS[text] if text in _BOOLS else _DTYPES.get(text, text)


class OpOn:
    """One op on one device. Binaries load on first use, once, whatever the threads."""

    def __init__(self, manifest: OpManifest, driver: Driver, device: int, multiprocessors: int) -> None:
        self.device = device
        self.multiprocessors = multiprocessors
        self._manifest = manifest
        self._driver = driver
        self._lock = new_lock()
        self._loaded: dict[str, Loaded] = {}
        self.kernels = {name: KernelOn(name, manifest, self._load) for name in manifest.kernels}
        self.stream = driver.stream
        self.tensor_map: Callable[..., Any] | None = getattr(driver, "tensor_map", None)  # CUDA's alone
        self.plans: dict[Any, Any] = {}  # what the op's host code worked out for a problem: see ``remember``
        self.workspaces: dict[str, StreamWorkspace] = {}

    def preload(self) -> None:
        """Load every binary onto the device, so that no later call loads one."""
        for name in self._manifest.variants:
            self._load(name).kernel.prepare(self.device)

    def workspace(self, name: str, device: torch.device) -> StreamWorkspace:
        """Memory that launches leave for the next, as long as the op is bound: captured graphs use it."""
        return self.workspaces.get(name) or self.workspaces.setdefault(name, StreamWorkspace(device))

    def _load(self, name: str) -> Loaded:
        with self._lock:
            if name not in self._loaded:
                variant = self._manifest.variant(name)
                self._loaded[name] = Loaded(variant, self._driver.load(variant))
            return self._loaded[name]


class GPUDriver:
    """Binaries on real GPUs, through the C launcher."""

    def __init__(self, shared_per_block: int) -> None:
        from liger_aot.runtime.devices import driver

        self._driver = driver()
        self._shared_per_block = shared_per_block
        self.stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self.tensor_map = self._driver.tensor_map
        self._capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing

    def load(self, variant: Variant) -> Launchable:
        if self._capturing():
            raise NotLoaded(
                f"{variant.name} is not loaded, and nothing can be while a CUDA graph is captured: call the op's "
                "preload() before the capture, or the op itself with these dtypes and sizes"
            )
        if variant.shared > self._shared_per_block:
            raise PackNotFound(
                f"{variant.name} needs {variant.shared} bytes of shared memory a block, this GPU gives "
                f"{self._shared_per_block}: a pack built for it is needed"
            )
        image = variant.read()
        try:
            kernel: Launchable = self._driver.load(
                image,
                variant.symbol,
                threads=variant.threads,
                shared=variant.shared,
                signature=variant.signature,
                cooperative=variant.cooperative,
                pdl=variant.pdl,
            )
        except DriverError as error:
            message = (
                f"{variant.blob.path}: {variant.name}: {error}; liger-aot doctor compares the driver with "
                "what packs need"
            )
            raise DriverError(message, call=error.call, code=error.code, name=error.name) from None
        except ValueError as error:  # the binary is for other arguments than the manifest says
            raise PackDamaged(variant.blob.path, f"{variant.name}: {error}") from None
        return kernel


class Runtimes:
    """One op on every device of the process, bound on first use. Nothing is bound to the CPU but by tests: it takes
    the reference.

    Args:
        op: its name.
        bound: what is bound already, by GPU index, or -1 for the CPU.
    """

    def __init__(self, op: str, bound: Mapping[int, OpOn] | None = None) -> None:
        self.op = op
        self.bound: dict[int, OpOn] = dict(bound or {})
        self._lock = new_lock()

    def find(self, kind: int, index: int) -> OpOn | None:
        """The op on a device (a DLPack type and index) it was bound to before; None says nothing: ask ``of``."""
        return self.bound.get(index if kind == CUDA or kind == ROCM else -kind)  # noqa: SIM109 (faster)

    def on(self, index: int) -> OpOn:
        """The op on ``cuda:index``; PackNotFound when no installed pack serves that GPU."""
        return self.bound.get(index) or self._bind(index)

    def of(self, tensor: torch.Tensor, argument: str) -> OpOn | None:
        """The op where ``tensor`` lies; None means the reference."""
        if tensor.is_cuda:
            return self.on(tensor.get_device())
        if tensor.device.type not in ("cpu", "meta"):
            raise UnsupportedDevice(
                f"{self.op}: {argument} is on {tensor.device}; there are binaries for CUDA and ROCm GPUs, and a "
                "reference for the CPU"
            )
        return self.bound.get(-CPU)

    def _bind(self, index: int) -> OpOn:
        from liger_aot.runtime.devices import gpu
        from liger_aot.runtime.packs import pack_for

        with self._lock:
            bound = self.bound.get(index)
            if bound is None:
                found = gpu(index)
                pack = pack_for(found.device)
                if self.op not in pack.ops:
                    raise PackNotFound(f"pack {pack.arch} carries no {self.op}; it has {', '.join(pack.ops)}")
                bound = OpOn(
                    pack.op(self.op), GPUDriver(found.shared_per_block), index, found.multiprocessors
                )
                self.bound[index] = bound
            return bound
