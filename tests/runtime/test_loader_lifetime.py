"""Ops over the life of a process, down to the stand-in driver: threads, fork, captures, ten thousand loads, the end."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import liger_aot
from liger_aot.errors import DriverError, NotLoaded, PackDamaged
from liger_aot.ops.norms.column_sums import ColumnSums, launch
from liger_aot.runtime import packs
from liger_aot.runtime.dispatch import Runtimes
from liger_aot.runtime.manifest import Pack
from liger_aot_build.stored import compressed
from tests.harness.children import environment, in_child
from tests.harness.pack_edits import count_binaries, replace_binaries
from tests.harness.stand_in import StandIn, image

pytest_plugins = (
    "tests.harness.launcher_fixtures",
    "tests.harness.pack_fixtures",
    "tests.harness.stand_in_gpu",
)
pytestmark = pytest.mark.usefixtures("stand_in_gpu")

N = 64


def run(runtimes: Runtimes, dtype: torch.dtype = torch.float32) -> None:
    """One launch as the op makes it; the stand-in records it and computes nothing."""
    launch(runtimes.on(0), torch.empty(N, dtype=dtype), torch.ones(4, N), 4, N)


# ---- Threads ----


def test_sixteen_threads_bind_and_load_at_once(stand_in: StandIn) -> None:
    """Each binary is read and loaded once, whoever comes first; all launches arrive."""
    threads, launches = 16, 50
    runtimes = Runtimes("column_sums")
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    start = threading.Barrier(threads)
    # The first to come blocks in the driver, so that the others wait for it.
    stand_in.hold("cuLibraryLoadData")

    def work(thread: int) -> Any:
        start.wait()
        for i in range(launches):
            run(runtimes, dtypes[(thread + i) % 3])
        return runtimes.on(0)

    with ThreadPoolExecutor(threads) as pool:
        results = pool.map(work, range(threads))
        time.sleep(0.1)
        stand_in.hold(None)
        bound = list(results)
    assert len({id(on) for on in bound}) == 1
    assert len(stand_in.calls("cuLibraryLoadData")) == 3, "one binary a dtype"
    assert stand_in.launch_count == threads * launches


# ---- Fork ----


def reference_works() -> str:
    x = torch.randn(3, 8)
    ones = torch.ones(8)
    y = liger_aot.load("rmsnorm")(x, ones, eps=1e-6)
    return str(torch.allclose(y, x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()))


def test_fork_after_load(stand_in: StandIn) -> None:
    """As a DataLoader's workers: the child uses the CPU and leaves the driver alone, which is no longer its own."""
    runtimes = Runtimes("column_sums")
    run(runtimes)
    before, launched = stand_in.calls(), stand_in.launch_count

    def child() -> str:
        return f"{reference_works()} {stand_in.calls() == before}"

    for _ in range(3):
        assert in_child(child) == "True True"
    run(runtimes)
    run(runtimes, torch.bfloat16)
    assert stand_in.launch_count == launched + 2, (
        "the parent goes on, with what is loaded and with what is not"
    )


def test_fork_while_another_thread_loads(stand_in: StandIn) -> None:
    """Locks of the loader and the launcher are held at the fork by a thread that the child has not: it waits for none.
    Its work on the CPU goes on; a GPU is refused to it, as no driver works in a fork."""
    runtimes, op = Runtimes("column_sums"), ColumnSums()
    stand_in.hold("cuLibraryLoadData")
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(run, runtimes)
        while not stand_in.calls("cuLibraryLoadData") and not loading.done():
            time.sleep(0.001)
        assert not loading.done(), loading.exception()
        assert in_child(reference_works) == "True"
        for attempt in (lambda: run(runtimes), lambda: run(Runtimes("column_sums")), lambda: op.preload(0)):
            assert in_child(attempt).startswith(
                "ForkedProcess: this process was forked from one that had opened"
            )
        assert in_child(lambda: (gc.collect(), liger_aot.archs())).endswith("('sm80',))")
        stand_in.hold(None)
        loading.result()
    assert stand_in.launch_count == 1


# ---- CUDA graph capture ----


def test_capture_before_preload(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clear error instead of a broken capture, from which the op recovers."""
    capturing = True
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: capturing, raising=False)
    op, runtimes = ColumnSums(), Runtimes("column_sums")
    for attempt in (lambda: run(runtimes), lambda: op.preload(0)):
        with pytest.raises(
            NotLoaded, match=r"column_sums-.* is not loaded, .* call the op's preload\(\) before"
        ):
            attempt()
    assert stand_in.calls("cuLibraryLoadData", "cuLaunchKernel") == []
    capturing = False
    runtimes.on(0).preload()
    capturing = True
    run(runtimes)
    assert stand_in.launch_count == 1, "what is loaded can be captured"


# ---- A binary that the driver refuses ----


def test_a_binary_of_another_architecture(stand_in_gpu: Path) -> None:
    """Its hash fits, the driver says no: the error names file and binary, and another dtype's binary still loads."""
    name = min(Pack(stand_in_gpu).op("column_sums").variants)
    replace_binaries(stand_in_gpu, "column_sums", {name: compressed(b"\x7fHSA column_sums=ppii")})
    packs.installed.cache_clear()
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_IMAGE") as caught:
        ColumnSums().preload(0)
    assert f"{stand_in_gpu / 'column_sums.bin'}: {name}: " in str(caught.value)
    assert "liger-aot doctor" in str(caught.value)
    assert (caught.value.call, caught.value.code) == ("cuLibraryLoadData", 200)
    assert name.split("-")[2] == "bf16"
    run(Runtimes("column_sums"))


def test_a_binary_for_other_arguments(stand_in_gpu: Path, stand_in: StandIn) -> None:
    """Its hash fits and the driver takes it: what it is launched with is not what it reads."""
    name = min(Pack(stand_in_gpu).op("column_sums").variants)
    replace_binaries(stand_in_gpu, "column_sums", {name: compressed(image("column_sums=ppil"))})
    packs.installed.cache_clear()
    with pytest.raises(
        PackDamaged, match=rf'{name}: signature "ppii": parameter 4 of kernel column_sums has 8 bytes'
    ):
        ColumnSums().preload(0)
    assert stand_in.launch_count == 0


# ---- Leaks and the end ----


@pytest.mark.slow
def test_ten_thousand_loads_through_an_op_leave_nothing(stand_in: StandIn, stand_in_gpu: Path) -> None:
    stand_in.log_calls(False)
    binaries = count_binaries(stand_in_gpu, "column_sums")

    def cycle(times: int) -> None:
        for _ in range(times):
            ColumnSums().preload(0)
        gc.collect()

    cycle(50)
    libraries, contexts = stand_in.live_libraries, stand_in.retained(0)
    blocks, files = sys.getallocatedblocks(), len(os.listdir("/proc/self/fd"))
    cycle(-(-10_000 // binaries))
    assert sys.getallocatedblocks() - blocks < 500
    assert len(os.listdir("/proc/self/fd")) == files
    assert (stand_in.live_libraries, stand_in.retained(0)) == (libraries, contexts)


def test_the_interpreter_ends_cleanly_with_loaded_ops(
    stand_in_gpu: Path, stand_in: StandIn, launcher_path: Path
) -> None:
    """Loaded ops live in a cache to the end, some in use by a thread: no crash, no message, nothing asked too late."""
    script = textwrap.dedent(
        """
        import sys, threading
        from pathlib import Path
        import torch
        from liger_aot.runtime import devices
        from liger_aot import load
        from liger_aot.ops.norms.column_sums import launch
        from liger_aot.runtime.packs import Device
        from tests.harness.stand_in import import_launcher
        driver = import_launcher(Path(sys.argv[1])).Driver("cuda", sys.argv[2])
        devices.gpu = lambda index: devices.GPU(index, Device("cuda", "8.0", "A100"), 108, 166912)
        devices.driver = lambda: driver
        torch._C._cuda_getCurrentRawStream = lambda device: 0
        torch._C._cuda_isCurrentStreamCapturing = lambda: False
        op = load("column_sums")
        op.preload(0)
        on = op._own.on(0)
        out, partials = torch.empty(64), torch.ones(4, 64)
        def for_ever():  # allocates nothing: a thread that the end meets inside torch's C++ aborts the process
            while True:
                launch(on, out, partials, 4, 64)
        threading.Thread(target=for_ever, daemon=True).start()
        """
    )
    found = environment(LIGER_AOT_PACKS=str(stand_in_gpu.parent))
    command = [sys.executable, "-c", script, str(launcher_path), stand_in.path]
    done = subprocess.run(command, capture_output=True, text=True, env=found, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
