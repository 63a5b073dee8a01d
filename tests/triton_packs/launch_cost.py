"""What a launch costs the host, through Triton's own driver and through ours: python -m tests.triton_packs.launch_cost,
with "hip" behind it for AMD GPUs.

Both run on the stand-in driver, which does next to nothing, so that what is left is Triton's Python, the launcher and
what it asks of the driver. Triton's driver is compiled for it with the machine's compiler. Prints microseconds of CPU
time a launch, the best of several rounds.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from triton.runtime.jit import JITCallable

import liger_aot.triton
from liger_aot.triton import packs, seams
from tests.harness.stand_in import build_launcher, build_stand_in
from tests.triton_packs import run_kernels as kernels
from tests.triton_packs.run_like_triton import Kept, forget, launches, start

ROUNDS, LAUNCHES = 7, 3000
LIBRARIES = {"cuda": "libcuda.so.1", "hip": "libamdhip64.so"}
MEASURED = ("plain", "types", "descriptors")


def cost(launch: Callable[[], Any]) -> float:
    """Microseconds a launch."""
    best = float("inf")
    for _ in range(ROUNDS):
        begun = time.process_time()
        for _ in range(LAUNCHES):
            launch()
        best = min(best, time.process_time() - begun)
    return best / LAUNCHES * 1e6


def main(folder: Path, backend: str) -> None:
    library = build_stand_in(folder, name=LIBRARIES[backend])
    stand_in, own = start(str(library), str(build_launcher(folder)), backend)
    from triton.runtime import driver

    found = {
        name: (launch, Kept(folder / name, backend, launch, more)) for name, launch, more in launches(backend)
    }
    stand_in.log_calls(False)
    costs: dict[str, list[float]] = {name: [] for name in MEASURED}
    for name in MEASURED:  # before packs are used, which wraps Triton's run
        launch, kept = found[name]
        driver.set_active(own)
        _forget()
        seams.on_miss(kept.find)
        costs[name].append(cost(launch))
        if name == "plain":
            launcher = [_launcher_alone()]
        seams.no_longer_on_miss(kept.find)
    for name in ("tuples", *MEASURED):
        os.environ[packs.OVERRIDE] = str(folder / name)
        packs._opened.cache_clear()
        liger_aot.triton.use()
        _forget()
        launch, _ = found[name]
        begun = time.process_time()
        launch()
        first = (time.process_time() - begun) * 1e6
        if name in MEASURED:  # what a process does once, the other has done
            costs[name] += [cost(launch), first]
        if name == "plain":
            launcher.append(_launcher_alone())
    print(f"{'microseconds':14}{'Triton':>10}{'a pack':>10}{'first launch from a pack':>28}")
    for name, (by_triton, by_pack, first) in costs.items():
        print(f"{name:14}{by_triton:10.2f}{by_pack:10.2f}{first:28.0f}")
        if name == "plain":
            print(f"{'its launcher':14}{launcher[0]:10.2f}{launcher[1]:10.2f}")


def _forget() -> None:
    """As in a process that has launched nothing: Triton's hashes of sources, too."""
    forget()
    for fn in vars(kernels).values():
        if isinstance(fn, JITCallable):
            fn.hash = None


def _launcher_alone() -> float:
    """Of the kernel that was launched last: what JITFunction.run calls in the end."""
    (kernel,) = kernels.add.device_caches[0][0].values()
    x, y, z = (torch.zeros(64) for _ in range(3))
    run, function, packed = kernel.run, kernel.function, kernel.packed_metadata
    return cost(lambda: run(3, 2, 1, 0, function, packed, None, None, None, x, y, z, 60, 32))


if __name__ == "__main__":
    with TemporaryDirectory() as made:
        main(Path(made), *(sys.argv[1:] or ["cuda"]))
