"""A program with no line for packs: python -m, with the stand-in library, the launcher and what it is to do. Prints
what the driver saw; fails where something is imported too early, a process is started or a file is written."""

from __future__ import annotations

import sys

if True:  # as the interpreter does at its start, by liger_aot.pth
    import _liger_aot_startup  # noqa: F401

assert not {"torch", "triton", "liger_aot"} & set(sys.modules)
import triton  # noqa: E402

assert not {"torch", "liger_aot"} & set(sys.modules), "imported before a kernel is launched"

import json  # noqa: E402
import os  # noqa: E402
import subprocess  # noqa: E402
from functools import lru_cache  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, NoReturn  # noqa: E402

import torch  # noqa: E402

import liger_aot.triton  # noqa: E402
from liger_aot.runtime import devices  # noqa: E402
from tests.harness.stand_in import StandIn, import_launcher  # noqa: E402
from tests.harness.triton_stand_in import H200, fake_gpu  # noqa: E402
from tests.triton_packs import run_kernels as kernels  # noqa: E402


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: no process, and no file that is written."""
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "os.mkdir"):
        _fail(event, arguments)
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & writing:
        _fail(event, arguments)


def _fail(*what: Any) -> NoReturn:
    raise AssertionError(f"done while a kernel was launched: {what}")


def main() -> None:
    library, launcher, action = sys.argv[1:]
    stand_in = StandIn(Path(library))
    stand_in.set_current(0)
    native = import_launcher(Path(launcher))
    for where, name, value in fake_gpu(stand_in, H200):
        setattr(where, name, value)
    devices.driver = lru_cache(lambda: native.Driver("cuda", library))  # type: ignore[assignment]
    assert liger_aot.triton.status().missing is None
    x, y, z = (torch.zeros(64) for _ in range(3))
    sys.addaudithook(refuse)
    if action == "all":  # a tuner first: nothing has asked Triton's driver anything yet
        kernels.tuned[(1,)](x, 64)
    kernels.add[(3, 2)](x, y, z, 60, BLOCK=32)
    if action == "all":
        child = os.fork()
        if child == 0:
            try:
                kernels.add[(3, 2)](x, y, z, 60, BLOCK=32)
            except liger_aot.LigerAOTError as error:
                os._exit(7 if type(error).__name__ == "ForkedProcess" else 1)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    print(json.dumps([record.name for record in stand_in.launches()]))


if __name__ == "__main__":
    assert triton.__version__ and subprocess
    main()
