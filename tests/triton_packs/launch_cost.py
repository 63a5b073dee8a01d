"""What a launch costs the host, through Triton's own driver and through ours: python -m tests.triton_packs.launch_cost.

Both run on the stand-in driver, which does next to nothing, so that what is left is Triton's Python, the launcher and
what it asks of the driver. Triton's driver is compiled for it with the machine's compiler. Prints microseconds of CPU
time a launch, the best of several rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from liger_aot.triton import seams
from tests.harness.stand_in import build_launcher, build_stand_in
from tests.triton_packs import run_kernels as kernels
from tests.triton_packs.run_like_triton import Kept, forget, launches, start

ROUNDS, LAUNCHES = 7, 3000


def cost(launch: Callable[[], Any]) -> float:
    """Microseconds a launch."""
    best = float("inf")
    for _ in range(ROUNDS):
        begun = time.process_time()
        for _ in range(LAUNCHES):
            launch()
        best = min(best, time.process_time() - begun)
    return best / LAUNCHES * 1e6


def main(folder: Path) -> None:
    stand_in, own = start(
        str(build_stand_in(folder, name="libcuda.so.1")), str(build_launcher(folder)), "cuda"
    )
    from triton.runtime import driver

    from liger_aot.triton.driver import pack_driver

    print(f"{'microseconds':14}{'Triton':>10}{'a pack':>10}{'first launch from a pack':>28}")
    for name, launch, more in launches("cuda"):
        if name not in ("plain", "types", "descriptors"):
            continue
        kept = Kept(folder / name, "cuda", launch, more)
        costs, first = [], 0.0
        for active in (own, pack_driver()):
            driver.set_active(active)
            forget()
            stand_in.reset()
            stand_in.log_calls(False)
            seams.on_miss(kept.find)
            begun = time.process_time()
            launch()
            first = (time.process_time() - begun) * 1e6
            costs.append(cost(launch))
            seams.no_longer_on_miss(kept.find)
            if name == "plain":
                costs.append(_launcher_alone())
        print(f"{name:14}{costs[0]:10.2f}{costs[-1 - (name == 'plain')]:10.2f}{first:28.0f}")
        if name == "plain":
            print(f"{'its launcher':14}{costs[1]:10.2f}{costs[3]:10.2f}")


def _launcher_alone() -> float:
    """Of the kernel that was launched last: what JITFunction.run calls in the end."""
    (kernel,) = kernels.add.device_caches[0][0].values()
    x, y, z = (torch.zeros(64) for _ in range(3))
    run, function, packed = kernel.run, kernel.function, kernel.packed_metadata
    return cost(lambda: run(3, 2, 1, 0, function, packed, None, None, None, x, y, z, 60, 32))


if __name__ == "__main__":
    with TemporaryDirectory() as made:
        main(Path(made))
