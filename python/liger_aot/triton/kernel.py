"""A kernel of a pack as Triton knows compiled ones."""

from __future__ import annotations

from collections import namedtuple
from functools import cached_property, lru_cache
from pathlib import Path
from threading import RLock
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import AsmDict, CompiledKernel

from liger_aot.errors import PackDamaged
from liger_aot.triton.packs import Binary, TritonPack
from liger_aot.triton.seams import Miss
from liger_aot.triton.sources import Kept, check_kept


class PackedKernel(CompiledKernel):  # type: ignore[misc]
    """What ``triton.compile`` would have returned. Its one stage is the binary: a pack keeps no IR."""

    def __init__(self, miss: Miss, pack: TritonPack, binary: Binary, kept: Kept | None = None) -> None:
        backend = miss.fn.device_caches[miss.device][3]
        target = GPUTarget(pack.target["backend"], pack.target["arch"], pack.target["warp_size"])
        fields = {**binary.metadata, "target": target, "hash": binary.identity}
        try:
            self.metadata = _metadata_type(tuple(sorted(fields)))(**fields)
            self.packed_metadata = backend.pack_metadata(self.metadata)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PackDamaged(binary.blob.path, f"{binary.identity}: its metadata: {error}") from None
        # GluonJITFunction has another class for its source
        self.src = miss.fn.ASTSource(miss.fn, miss.signature, miss.constants, miss.attrs)
        self.hash = binary.identity
        self.name = self.metadata.name
        self.metadata_group: dict[str, Path] = {}
        self.asm = _Stages(backend.binary_ext, binary)
        self.module = None
        self._module_pid = None
        self.function = None
        self._run = None
        self.kept = kept or []  # globals that the kernel was made with
        self._loading = RLock()

    @property
    def kernel(self) -> bytes:
        """The binary, read anew: the driver keeps a copy of its own."""
        image: bytes = self.asm[self.asm.extension]
        return image

    def _init_handles(self) -> None:
        """Load it, once: of two threads the second waits, where Triton's own launches a function that is not there."""
        with self._loading:
            if self.function is None:
                try:
                    super()._init_handles()
                except BaseException:
                    self.module = self.function = None
                    raise

    def launch_metadata(self, grid: Any, stream: int, *args: Any) -> Any:
        """What hooks are called with; nothing where there is none, for which Triton makes it all the same. Triton asks
        for it before each launch, and compares globals shortly before, if it has hashed the function's source."""
        if self.kept:
            check_kept(self.kept)
        runtime = knobs.runtime
        if _is_empty(runtime.launch_enter_hook) and _is_empty(runtime.launch_exit_hook):
            return None
        return super().launch_metadata(grid, stream, *args)

    # In the instance from the first launch on, where Triton's own asks a property each time.
    @cached_property
    def run(self) -> Any:
        with self._loading:
            if self.function is None:
                self._init_handles()
            return self._run


def _is_empty(hook: Any) -> bool:
    return hook is None or getattr(hook, "calls", True) == []


class _Stages(AsmDict):  # type: ignore[misc]
    """``kernel.asm``: reads the binary from the pack for whoever asks for it, and keeps none."""

    def __init__(self, extension: str, binary: Binary) -> None:
        super().__init__()
        self.extension, self._binary = extension, binary

    def __missing__(self, key: str) -> Any:
        if key == self.extension:
            return self._binary.read()
        return super().__missing__(key)


@lru_cache(maxsize=64)
def _metadata_type(names: tuple[str, ...]) -> Any:
    """Making one takes a third of a millisecond; the kernels of a pack have the same fields."""
    return namedtuple("KernelMetadata", names)
