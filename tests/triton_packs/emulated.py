"""Calls of another project's kernels, from packs of AMD binaries that the emulator executes:

    python -m tests.triton_packs.emulated PROJECT record                 # under `liger-aot record --target gfx942`
    python -m tests.triton_packs.emulated PROJECT gfx942 FOLDER OUT      # from the packs in FOLDER; JSON into OUT

In a process of its own: torch answers as if the GPU were there, as it does for a recording, and tensors lie on the CPU.
A third or fifth argument names some of the project's calls.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections import Counter
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.triton_packs.projects.calls import Call, Outcome, outcome, run


def chosen(project: str, names: str) -> list[Call]:
    """The calls of a project; those that begin with one of ``names``."""
    calls: list[Call] = importlib.import_module(f"tests.triton_packs.projects.{project}").calls()
    return [call for call in calls if not names or call.name.split()[0] in names.split(",")]


def record(project: str, names: str) -> None:
    """Every call, for the recorder: no kernel runs, so that results mean nothing."""
    for call in chosen(project, names):
        try:
            run(call)
        except Exception as error:  # noqa: PERF203 (the others are recorded all the same)
            print(f"{call.name}: {type(error).__name__}: {error}"[:300], file=sys.stderr)


class Executed:
    """What the emulator executed: each kernel that Triton launched, and those that it refused."""

    def __init__(self) -> None:
        from triton.runtime.jit import JITFunction

        self.launched: Counter[str] = Counter()
        self.refused: dict[str, str] = {}
        self.binaries: set[str] = set()
        plain = JITFunction.run

        def noted(fn: Any, *arguments: Any, **named: Any) -> Any:
            name = f"{fn.fn.__module__}:{fn.fn.__qualname__}"
            try:
                kernel = plain(fn, *arguments, **named)
            except Exception as error:
                self.refused.setdefault(name, f"{type(error).__name__}: {error}"[:300])
                raise
            self.launched[name] += 1
            self.binaries.add(kernel.hash)
            return kernel

        JITFunction.run = noted


def emulate(project: str, arch: str, names: str) -> dict[str, Any]:
    """Run the calls, and what came of each."""
    with TemporaryDirectory() as folder:
        driver = stand_in_gpu(arch, Path(folder))
        import liger_aot.triton

        liger_aot.triton.use(missing="error")
        executed = Executed()
        outcomes: dict[str, Outcome] = {}
        slack = {}
        for call in chosen(project, names):
            outcomes[call.name], slack[call.name] = outcome(call), call.slack
    status = liger_aot.triton.status()
    return {
        "calls": {name: [made.far, made.what, made.failed, slack[name]] for name, made in outcomes.items()},
        "launched": dict(executed.launched),
        "binaries": len(executed.binaries),
        "refused": executed.refused,
        "instructions": driver.instructions,
        "missed": status.missed,
        "packs": status.packs,
    }


def stand_in_gpu(arch: str, folder: Path) -> Any:
    """A GPU of ``arch`` whose launches the emulator executes, for torch and Triton, from now on; its driver."""
    import torch

    from liger_aot.runtime import devices
    from liger_aot.runtime.packs import Device
    from liger_aot.triton import stand_ins
    from liger_aot.triton.targets import device, target
    from tests.harness.stand_in import StandIn, build_launcher, build_stand_in, import_launcher
    from tests.harness.triton_emulator import EmulatedDriver

    of = target(arch)
    chip = device(of)
    stand_ins.stand_in(of)
    stand_ins._on_the_cpu()
    torch._C._cuda_getCurrentRawStream = lambda index: 4096
    stand_in = StandIn(build_stand_in(folder))
    native = import_launcher(build_launcher(folder))
    found = devices.GPU(0, Device("hip", arch, chip.name), chip.multiprocessors, chip.shared)
    devices.gpu = lambda index: found
    driver = EmulatedDriver(native.Driver("hip", stand_in.path), stand_in, arch)
    devices.driver = lru_cache(lambda: driver)
    return driver


if __name__ == "__main__":
    project, arch, *rest = sys.argv[1:]
    if arch == "record":
        record(project, "".join(rest))
    else:
        from liger_aot.triton.packs import OVERRIDE

        os.environ[OVERRIDE] = rest[0]
        Path(rest[1]).write_text(json.dumps(emulate(project, arch, "".join(rest[2:])), indent=1))
