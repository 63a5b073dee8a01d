"""GPUs as torch sees them, and the driver library that serves them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from liger_aot.errors import DriverNotFound
from liger_aot.runtime.packs import Device

CUDA_LIBRARY = "libcuda.so.1"
HIP_LIBRARY = "libamdhip64.so"


class GPU:
    """The GPU that torch calls ``cuda:<ordinal>``; ``shared_per_block`` is what a block may opt in to, in bytes."""

    __slots__ = ("device", "multiprocessors", "ordinal", "shared_per_block")

    def __init__(self, ordinal: int, device: Device, multiprocessors: int, shared_per_block: int) -> None:
        self.ordinal, self.device = ordinal, device
        self.multiprocessors, self.shared_per_block = multiprocessors, shared_per_block


def backend() -> str:
    """The backend of the installed torch; a CPU build counts as cuda, which then has no GPU."""
    return "hip" if torch.version.hip else "cuda"


@lru_cache(maxsize=64)
def gpu(index: int) -> GPU:
    """The GPU that torch calls ``cuda:index``."""
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        # features such as ":sramecc+:xnack-" don't choose the binary
        target = properties.gcnArchName.partition(":")[0]
    else:
        target = f"{properties.major}.{properties.minor}"
    shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return GPU(index, Device(backend(), target, properties.name), properties.multi_processor_count, shared)


@lru_cache(maxsize=1)
def driver() -> Any:
    """The launcher, opened on the driver library that torch uses."""
    from liger_aot._launch import Driver

    if backend() == "hip":
        return Driver("hip", _mapped(HIP_LIBRARY))
    return Driver("cuda", CUDA_LIBRARY)


def _mapped(library: str) -> str:
    """The path of a library that this process has loaded already: a second copy would not know torch's memory.

    Its file is named as the library, or that and a version ("libamdhip64.so.6"). A path that is not absolute is never
    taken: the driver would be whatever lies in the current directory.
    """
    replaced = False
    for line in Path("/proc/self/maps").read_text(errors="surrogateescape").split("\n"):
        path = line.split(maxsplit=5)[-1] if line else ""  # the sixth field, which may hold spaces
        name = path.removesuffix(" (deleted)").rpartition("/")[2]
        if not path.startswith("/") or not name.startswith(library):
            continue
        if name.removeprefix(library).strip(".0123456789"):
            continue
        if not path.endswith(" (deleted)"):
            return path
        replaced = True
    if replaced:
        raise DriverNotFound(
            f"{library} was replaced on disk after torch had loaded it: start this process anew"
        )
    raise DriverNotFound(f"torch has not loaded {library}: is this torch a ROCm build?")
