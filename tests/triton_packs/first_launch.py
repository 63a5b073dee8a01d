"""What the first launch of a kernel from a pack costs the host: python -m tests.triton_packs.first_launch [FOLDER].

Records and builds, without a GPU, a kernel of twenty lines and, if it is installed, flash-linear-attention's chunked
gated delta rule (forward, 1 x 2048 x 8 x 128: six kernels of up to 290 lines). Launches each once, in fresh processes
on the stand-in driver, and prints milliseconds of CPU time, the median of the processes'. The pack is the one that a
GPU would get; only what the driver is handed is an image that the stand-in can load. FOLDER keeps the recording and
the pack, and they are taken again from there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

import torch
import triton
import triton.language as tl

from tests.harness.children import environment

MODULE = "tests.triton_packs.first_launch"
PROCESSES = 5


@triton.jit
def fill(Y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + at, 1.0, mask=at < n)


@triton.jit
def softmax_rows(Y, X, y_stride, x_stride, columns, scale, BLOCK: tl.constexpr):
    """Twenty lines: softmax of rows that are longer than a block."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        inside = start + at < columns
        x = tl.load(X + row * x_stride + start + at, mask=inside, other=float("-inf")).to(tl.float32)
        x *= scale
        higher = tl.maximum(highest, x)
        total = total * tl.exp(highest - higher) + tl.exp(x - higher)
        highest = higher
    top = tl.max(highest, 0)
    total = tl.sum(total * tl.exp(highest - top), 0)
    for start in range(0, columns, BLOCK):
        inside = start + at < columns
        x = tl.load(X + row * x_stride + start + at, mask=inside, other=float("-inf")).to(tl.float32)
        tl.store(Y + row * y_stride + start + at, tl.exp(x * scale - top) / total, mask=inside)


def rows() -> None:
    x = torch.zeros(4, 3000, device="cuda")
    softmax_rows[(4,)](torch.empty_like(x), x, 3000, 3000, 3000, 1.0, BLOCK=1024)


def gated_delta_rule() -> None:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v = (torch.zeros(1, 2048, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    gate = torch.zeros(1, 2048, 8, device="cuda")
    with torch.no_grad():
        chunk_gated_delta_rule(q, k, v, gate, gate.bfloat16(), use_qk_l2norm_in_kernel=True)


def calls() -> dict[str, Callable[[], None]]:
    found = {"softmax of rows": rows}
    if find_spec("fla") is not None:
        found["gated delta rule"] = gated_delta_rule
    return found


def record() -> None:
    """What ``liger-aot record`` runs."""
    fill[(1,)](torch.zeros(4, device="cuda"), 4, BLOCK=4)
    for call in calls().values():
        call()


def measure(library: str, launcher: str, project: str) -> None:
    """In a process of its own, in which packs are in use: each kernel's first launch and the call's, milliseconds."""
    from functools import lru_cache

    from liger_aot.runtime import devices
    from liger_aot.triton import stand_ins
    from liger_aot.triton.packs import Binary
    from liger_aot.triton.targets import target
    from tests.harness.stand_in import StandIn, image, import_launcher
    from tests.harness.triton_stand_in import H200, fake_gpu, letters

    stand_ins.stand_in(target("sm90"))
    stand_in = StandIn(Path(library))
    stand_in.set_current(0)
    native = import_launcher(Path(launcher))
    for where, name, value in fake_gpu(stand_in, H200):
        setattr(where, name, value)
    devices.driver = lru_cache(lambda: native.Driver("cuda", library))
    stand_ins._on_the_cpu()
    read = Binary.read

    def loadable(self: Binary) -> bytes:
        read(self)
        return image(f"{self.metadata['name']}={letters([kind for _, kind in self.signature])}")

    Binary.read = loadable  # type: ignore[method-assign]
    call = calls()[project]
    import liger_aot.triton

    liger_aot.triton.use(missing="error")
    if find_spec("fla") is not None:  # which asks Triton's driver what the GPU is
        import fla.ops.gated_delta_rule  # noqa: F401
    fill[(1,)](torch.zeros(4, device="cuda"), 4, BLOCK=4)  # what a process does once is done
    kernels = _timed()
    begun = time.thread_time()
    call()
    whole = (time.thread_time() - begun) * 1e3
    begun = time.thread_time()
    call()
    again = (time.thread_time() - begun) * 1e3
    print(json.dumps({"kernels": kernels, "whole": whole, "again": again}))


def _timed() -> dict[str, float]:
    """Will have each kernel's first launch, with what @triton.autotune and @triton.heuristics do around it."""
    from triton.runtime.autotuner import Autotuner, Heuristics

    from liger_aot.triton.seams import unwrapped

    kernels: dict[str, float] = {}
    inside = []

    def timed(plain: Any) -> Any:
        def run(self: Any, *arguments: Any, **named: Any) -> Any:
            if inside:
                return plain(self, *arguments, **named)
            inside.append(self)
            begun = time.thread_time()
            kernel = plain(self, *arguments, **named)
            kernels.setdefault(unwrapped(self).fn.__name__, (time.thread_time() - begun) * 1e3)
            inside.clear()
            return kernel

        return run

    for kind in (triton.JITFunction, Autotuner, Heuristics):
        kind.run = timed(kind.run)
    return kernels


def made(folder: Path) -> Path:
    """The packs, in ``folder``."""
    from liger_aot.triton.packs import NAMESPACE
    from tests.triton_packs.conftest import liger_aot
    from tests.triton_packs.conftest import record as recorded

    site = folder / "site"
    if not site.exists():
        recording = folder / "recording"
        if not recording.exists():
            recorded(
                folder, "-c", f"import {MODULE} as m; m.record()"
            )  # __main__ has no kernel that a build finds
        out = folder / "dist"
        liger_aot(folder, "pack", recording, "--arch", "sm90", "--name", "first", "--jobs", "1", "--out", out)
        (wheel,) = out.glob("*.whl")
        with ZipFile(wheel) as files:
            files.extractall(site)
    return site / NAMESPACE


def main(folder: Path) -> None:
    from tests.harness.stand_in import build_launcher, build_stand_in

    packs = made(folder)
    library, launcher = build_stand_in(folder, name="libcuda.so.1"), build_launcher(folder)
    variables = environment(LIGER_AOT_TRITON_PACKS=str(packs), OMP_NUM_THREADS="1")
    for project in calls():
        measured = f"import {MODULE} as m; m.measure({str(library)!r}, {str(launcher)!r}, {project!r})"
        command = [sys.executable, "-c", measured]
        said = []
        for _ in range(PROCESSES):
            done = subprocess.run(command, env=variables, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr)
            said.append(json.loads(done.stdout))
        print(f"{project}: {len(said[0]['kernels'])} kernels, ms of the first launch")
        for name in said[0]["kernels"]:
            print(f"  {name:48}{median(one['kernels'][name] for one in said):8.2f}")
        total = median(sum(one["kernels"].values()) for one in said)
        whole, again = (median(one[key] for one in said) for key in ("whole", "again"))
        print(f"  together {total:.1f}; the first call {whole:.1f}, the second {again:.1f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        main(Path(sys.argv[1]))
    else:
        with TemporaryDirectory() as made_here:
            main(Path(made_here))
