"""Launches the same kernels through Triton's own driver and through ours, both on the stand-in: python -m, with the
stand-in library, the launcher and "cuda" or "hip"; prints what the driver saw of each as JSON.

Triton's driver and launchers are compiled for it, with the machine's compiler. A process of its own: a library that
passes for libcuda stays loaded.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from liger_aot.runtime import devices
from liger_aot.triton import packs, seams
from liger_aot.triton.kernel import PackedKernel
from tests.harness.stand_in import StandIn, import_launcher
from tests.harness.triton_stand_in import H200, MI300, fake_gpu, wanted, write_pack
from tests.triton_packs import run_kernels as kernels

MAPS = [
    {"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [4, 32], "fp4_padded": False},
    {"swizzle": 1, "elem_size": 4, "elem_type": 7, "block_size": [4, 16], "fp4_padded": True},
]


def launches(backend: str) -> list[tuple[str, Callable[[], Any], dict[str, Any]]]:
    x, y, z = (torch.zeros(64) for _ in range(3))
    a, b = torch.zeros(8, 64, dtype=torch.float16), torch.zeros(16, 32)
    integers = (5, 300, 1 << 20, -(1 << 40), 200, 60_000, 4_000_000_000, (1 << 64) - 1)

    def described() -> None:
        first = TensorDescriptor(a, [8, 64], [64, 1], [4, 32], padding="nan")
        second = TensorDescriptor(b, [16, 32], [32, 1], [4, 32])
        kernels.of_descriptors[(4,)](first, 12, second)

    def typed() -> None:
        kernels.every_type[(1,)](x, *integers, 0.1, 0.7, 0.1, 1e300, True, None, 1, WORD="word")

    found = [
        ("plain", lambda: kernels.add[(3, 2)](x, y, z, 60, BLOCK=32, num_warps=8), {"num_warps": 8}),
        ("shared", lambda: kernels.add[(3,)](x, y, None, 60, BLOCK=64), {"shared": 70_000}),
        ("cooperative", lambda: kernels.add[(3,)](x, y, z, 60, BLOCK=8), {"cooperative": True}),
        ("types", typed, {}),
        ("tuples", lambda: kernels.tuples[(1,)](kernels.Pair(x, 5), (3.5, (7, 1 << 40), 1), 9), {}),
        ("function", lambda: kernels.apply[(1, 1, 9)](x, kernels.double, 3), {}),
        ("descriptors", described, {}),
    ]
    if backend == "cuda":
        found += [
            ("clusters", lambda: kernels.add[(3, 2)](x, y, z, 60, BLOCK=32, num_ctas=4), {"num_ctas": 4}),
            ("sixteen", lambda: kernels.add[(3, 2)](x, y, z, 60, BLOCK=32, num_ctas=16), {"num_ctas": 16}),
            ("pdl", lambda: kernels.add[(3, 2)](x, y, z, 61, BLOCK=32), {"pdl": True}),
            ("maps", described, {"maps": MAPS, "words": "2i2"}),
        ]
    return found


class Kept:
    """A pack of one launch, and what of it a driver saw."""

    def __init__(self, folder: Path, backend: str, launch: Callable[[], Any], more: dict[str, Any]) -> None:
        self.launch = launch
        forget()
        miss = wanted(launch)
        arch = "sm90" if backend == "cuda" else "gfx942"
        self.pack = packs.TritonPack(write_pack(folder, [(miss, {"symbol": "kernel", **more})], arch=arch))

    def find(self, miss: seams.Miss) -> Any:
        function = self.pack.function(self.pack.functions[0])
        assert function is not None
        return PackedKernel(miss, self.pack, next(iter(function.all_binaries())))

    def run(self, stand_in: StandIn) -> dict[str, Any]:
        forget()
        stand_in.reset()
        seams.on_miss(self.find)
        try:
            self.launch()
        finally:
            seams.no_longer_on_miss(self.find)
        (record,) = stand_in.launches()
        return {**asdict(record), "parameters": record.parameters.hex()}


def forget() -> None:
    for fn in vars(kernels).values():
        if isinstance(fn, triton.JITFunction):
            fn.device_caches.clear()


def start(library: str, launcher: str, backend: str) -> tuple[StandIn, Any]:
    """The stand-in as this process's GPU driver, and Triton's own driver on it."""
    device = H200 if backend == "cuda" else MI300
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)  # from now on what is opened as libcuda.so.1
    stand_in = StandIn(Path(library))
    native = import_launcher(Path(launcher))
    for where, name, value in fake_gpu(stand_in, device):
        setattr(where, name, value)
    devices.driver = lru_cache(lambda: native.Driver(backend, library))
    if backend == "cuda":
        triton.knobs.nvidia.libcuda_path = str(Path(library).parent)
        from triton.backends.nvidia.driver import CudaDriver as Own
    else:
        triton.knobs.amd.libhip_path = library
        from triton.backends.amd.driver import HIPDriver as Own
    from triton.runtime import driver

    from liger_aot.triton.driver import Utils

    own = Own()
    own.utils.get_device_properties = Utils().get_device_properties
    driver.set_active(own)
    return stand_in, own


def main() -> None:
    library, launcher, backend, folder = sys.argv[1:]
    stand_in, own = start(library, launcher, backend)
    from triton.runtime import driver

    from liger_aot.triton.driver import pack_driver

    ours = pack_driver()
    seen = {}
    for name, launch, more in launches(backend):
        kept = Kept(Path(folder) / name, backend, launch, more)
        both = []
        for active in (own, ours):
            driver.set_active(active)
            both.append(kept.run(stand_in))
        seen[name] = both
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
