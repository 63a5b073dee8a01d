"""A driver for Triton that compiles nothing: it loads and launches through the C launcher.

Triton's own compiles one C module for loading binaries and, in 3.6, one for each signature. All else is inherited, so
that what a version's driver answers, this one answers too.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from triton.backends.amd.driver import HIPDriver
from triton.backends.driver import GPUDriver
from triton.backends.nvidia.driver import CudaDriver
from triton.tools.tensor_descriptor import TensorDescriptor

from liger_aot.runtime import devices
from liger_aot.triton import launcher

# Of a tensor descriptor that is taken apart: whether what lies outside reads as NaN, and (3.7 on) rounding to tf32.
FLAGS = 2 if "round_f32_to_tf32" in TensorDescriptor.__dataclass_fields__ else 1


class Utils:
    """What Triton asks of its ``utils`` module, and what programs ask of it through Triton."""

    def __init__(self) -> None:
        self._loaded: list[Any] = []  # for as long as the process: a graph may hold launches of any of them

    def load_binary(
        self, name: str, image: bytes, shared: int, device: int
    ) -> tuple[Any, int, int, int, int]:
        """(module, function, registers, spilled words, most threads a block)."""
        binary = devices.driver().binary(image, name, shared=shared)
        function, registers, local_bytes, most_threads = binary.prepare(device)
        self._loaded.append(binary)
        return binary, function, registers, local_bytes // 4, most_threads

    def unload_module(self, module: Any) -> None:
        """Nothing: a captured graph may still launch it."""

    def get_device_properties(self, device: int) -> dict[str, Any]:
        return _properties(device)


@lru_cache(maxsize=64)
def _properties(device: int) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(device)
    properties = {
        "max_shared_mem": devices.gpu(device).shared_per_block,
        "max_num_regs": getattr(found, "regs_per_multiprocessor", 65536),
        "multiprocessor_count": found.multi_processor_count,
        "warpSize": found.warp_size,
        "sm_clock_rate": getattr(found, "clock_rate", 0),
        "mem_clock_rate": getattr(found, "memory_clock_rate", 0),
        "mem_bus_width": getattr(found, "memory_bus_width", 0),
    }
    if torch.version.hip:
        properties |= {"arch": found.gcnArchName, "cooperativeLaunch": 1}
    return properties


class _Common(GPUDriver):  # type: ignore[misc]
    """What both vendors' drivers share; first among the bases, so that neither vendor's ``__init__`` runs."""

    def __init__(self) -> None:
        GPUDriver.__init__(self)
        self.utils = Utils()
        self.launcher_cls = self._launcher

    def _launcher(self, source: Any, metadata: Any) -> Any:
        signature = source.signature
        names = getattr(getattr(source, "fn", None), "arg_names", None) or [str(name) for name in signature]
        return launcher.make(devices.driver(), self.get_current_device(), signature, names, metadata, FLAGS)


class CudaPackDriver(_Common, CudaDriver):  # type: ignore[misc]
    pass


class HipPackDriver(_Common, HIPDriver):  # type: ignore[misc]
    pass


def pack_driver() -> GPUDriver:
    """The driver for this torch's GPUs."""
    return HipPackDriver() if devices.backend() == "hip" else CudaPackDriver()
