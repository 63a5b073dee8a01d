"""The native launcher over time: threads, leaks, the end of the interpreter, and what one launch costs."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.harness.children import environment, in_child
from tests.harness.stand_in import StandIn, image

pytest_plugins = ("tests.harness.launcher_fixtures",)


def load(driver: Any, signature: str) -> Any:
    return driver.load(image(f"kernel={signature}"), "kernel", threads=128, shared=0, signature=signature)


# ---- Threads ----


def test_sixteen_threads_launch_a_fresh_kernel_at_once(driver: Any, stand_in: StandIn) -> None:
    threads, launches = 16, 200
    kernel = load(driver, "ilpf")
    prepared = {"cuda": "cuKernelGetFunction", "hip": "hipModuleGetFunction"}[driver.backend]
    start = threading.Barrier(threads + 1)

    def work(thread: int) -> None:
        start.wait()
        for i in range(launches):
            kernel.launch((thread + i) % 2, thread, i + 1, 1, 1, thread, -i, 2**40 + i, thread / 2)

    stand_in.hold(prepared)  # the first to come blocks in the driver, so that the others wait for it
    with ThreadPoolExecutor(threads) as pool:
        done = pool.map(work, range(threads))
        start.wait()
        time.sleep(0.1)
        stand_in.hold(None)
        list(done)

    seen = Counter((launch.stream, launch.grid[0] - 1) for launch in stand_in.launches())
    assert seen == Counter((thread, i) for thread in range(threads) for i in range(launches))
    for launch in stand_in.launches():
        thread, i = launch.stream, launch.grid[0] - 1
        assert launch.device == (thread + i) % 2
        assert launch.unpack("ilpf") == (thread, -i, 2**40 + i, thread / 2, 0, 0)
    assert sorted(stand_in.calls(prepared)) == [f"{prepared}@0", f"{prepared}@1"]


# ---- Subinterpreters ----

WORK = """
import importlib.machinery, importlib.util
try:
    loader = importlib.machinery.ExtensionFileLoader("liger_aot._launch", LAUNCHER)
    native = importlib.util.module_from_spec(importlib.util.spec_from_loader("liger_aot._launch", loader))
    loader.exec_module(native)
except ImportError as error:
    print("refused:", error)
else:
    kernel = native.Driver("cuda", DRIVER).load(IMAGE, "kernel", threads=32, shared=0, signature="ip")
    for i in range(100):
        kernel.launch(0, 0, 1, 1, 1, i, None)
    try:
        kernel.launch(0, 0, 1, 1, 1, "x", None)
    except TypeError:
        print("served")
"""
SUBINTERPRETERS = """
import gc
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
exec(work)
for _ in range(3):
    one = interpreters.create()
    interpreters.run_string(one, work)
    interpreters.destroy(one)
gc.collect()
exec(work)
"""


def test_a_subinterpreter_is_served_or_refused(launcher_path: Path, stand_in: StandIn) -> None:
    """With an interpreter lock of its own (Python 3.12 and later) it is refused the module by Python. Before, that
    works there with types of its own, and outside after it has ended."""
    given = f"LAUNCHER, DRIVER, IMAGE = {str(launcher_path)!r}, {stand_in.path!r}, {image('kernel=ip')!r}"
    code = f"work = {given + WORK!r}{SUBINTERPRETERS}"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, *inside, last = done.stdout.splitlines()
    assert first == last == "served" and len(inside) == 3
    for line in inside:
        if sys.version_info < (3, 12):
            assert line == "served"
        else:
            assert line.startswith("refused: ") and "subinterpreter" in line


# ---- Forks ----


def test_a_fork_leaves_the_driver_alone(driver: Any, stand_in: StandIn) -> None:
    """Whatever the child asks of what its parent had opened is refused before a mutex or the driver is touched: another
    thread of the parent is inside both at the fork. The child frees all of it and gives nothing back."""
    kernel, other = load(driver, "i"), load(driver, "i")
    kernel.prepare(0)
    held = {"cuda": "cuKernelGetFunction", "hip": "hipModuleGetFunction"}[driver.backend]
    stand_in.hold(held)
    before = stand_in.calls(held)
    with ThreadPoolExecutor(1) as pool:
        preparing = pool.submit(other.prepare, 1)
        while stand_in.calls(held) == before and not preparing.done():
            time.sleep(0.001)
        known = (stand_in.calls(), stand_in.live_libraries, stand_in.launch_count)
        for attempt in (
            lambda: kernel.launch(0, 0, 1, 1, 1, 1),
            lambda: kernel.prepare(1),
            lambda: other.prepare(1),
            lambda: load(driver, "i"),
        ):
            said = in_child(attempt)
            assert said.startswith(
                f"ForkedProcess: this process was forked from one that had opened the {driver.backend}"
            )
            assert "spawn" in said

        def free() -> bool:
            nonlocal kernel
            kernel = None
            gc.collect()
            return (stand_in.calls(), stand_in.live_libraries, stand_in.launch_count) == known

        assert in_child(free) == "True"
        stand_in.hold(None)
        preparing.result()
    other.launch(1, 0, 1, 1, 1, 7)
    assert stand_in.launch_count == 1, "the parent goes on"


def test_a_driver_that_is_opened_after_the_fork(native: Any, stand_in: StandIn) -> None:
    """It is the child's own, in a grandchild no longer."""

    def child() -> str:
        driver = native.Driver("cuda", stand_in.path)
        load(driver, "i").launch(0, 0, 1, 1, 1, 5)
        return f"{stand_in.launch_count} {in_child(lambda: load(driver, 'i')).partition(':')[0]}"

    assert in_child(child) == "1 ForkedProcess"


@pytest.mark.parametrize("blocking", ["launch", "prepare"])
def test_other_threads_run_while_the_driver_blocks(driver: Any, stand_in: StandIn, blocking: str) -> None:
    kernel = load(driver, "i")
    calls = {
        "launch": {"cuda": "cuLaunchKernel", "hip": "hipModuleLaunchKernel"},
        "prepare": {"cuda": "cuKernelGetFunction", "hip": "hipModuleLoadData"},
    }
    held = calls[blocking][driver.backend]
    stand_in.hold(held)
    worker = threading.Thread(target=kernel.launch, args=(0, 0, 1, 1, 1, 1))
    worker.start()
    deadline = time.monotonic() + 4
    while not stand_in.calls(held):
        assert time.monotonic() < deadline, "the driver was never asked"
        time.sleep(0.001)
    assert worker.is_alive() and stand_in.launch_count == 0
    stand_in.hold(None)
    worker.join(timeout=4)
    assert not worker.is_alive() and stand_in.launch_count == 1


# ---- Leaks ----


def blocks_grown(action: Any, times: int) -> int:
    """How many memory blocks of Python's are left over after doing something many times: the least of three tries.
    Other threads of the process, as those of pytest-xdist, may keep some meanwhile; what the action loses it loses in
    each."""
    for _ in range(500):
        action()

    def grown() -> int:
        gc.collect()
        before = sys.getallocatedblocks()
        for _ in range(times):
            action()
        gc.collect()
        return sys.getallocatedblocks() - before

    return min(grown() for _ in range(3))


class MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2: ten sizes, of which the eighth is the bytes in use."""

    _fields_ = (("before", ctypes.c_size_t * 7), ("in_use", ctypes.c_size_t), ("after", ctypes.c_size_t * 2))


def heap_bytes() -> int:
    """What C code has allocated and not freed; 0 where the C library cannot tell (before glibc 2.33)."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = MallInfo
    return int(mallinfo().in_use)


def test_ten_thousand_loads_leave_nothing(driver: Any, stand_in: StandIn) -> None:
    stand_in.log_calls(False)
    before = stand_in.live_libraries

    def cycle() -> None:
        kernel = load(driver, "pp")
        kernel.prepare(0)
        kernel.prepare(1)

    references = sys.getrefcount(driver), sys.getrefcount(type(driver))
    cycle()
    heap = heap_bytes()
    assert blocks_grown(cycle, 10_000) < 100
    assert heap_bytes() - heap < 10_000 * 8
    assert stand_in.live_libraries == before
    assert (sys.getrefcount(driver), sys.getrefcount(type(driver))) == references


def test_failed_loads_leave_nothing(driver: Any, stand_in: StandIn) -> None:
    stand_in.log_calls(False)
    before = stand_in.live_libraries

    def refused(data: bytes, name: str, signature: str) -> None:
        try:
            driver.load(data, name, threads=32, shared=0, signature=signature).prepare(1)
        except (RuntimeError, ValueError):
            return
        raise AssertionError("nothing was refused")

    assert blocks_grown(lambda: refused(b"damaged", "kernel", "p"), 2000) < 100
    assert blocks_grown(lambda: refused(image("kernel=p"), "other", "p"), 2000) < 100
    assert blocks_grown(lambda: refused(image("kernel=p"), "kernel", "x"), 2000) < 100
    assert stand_in.live_libraries == before


def test_launches_leave_nothing(driver: Any, stand_in: StandIn) -> None:
    stand_in.log_calls(False)
    kernel = load(driver, "pilf")

    def refused() -> None:
        try:
            kernel.launch(0, 0, 1, 1, 1, 2**40, 2**20, 2**50, "no float")
        except TypeError:
            return
        raise AssertionError("nothing was refused")

    assert blocks_grown(lambda: kernel.launch(1, 2**40, 2**20, 1, 1, 2**40, 2**20, 2**50, 0.5), 10_000) < 100
    assert blocks_grown(refused, 2000) < 100


def test_a_driver_gives_its_contexts_back(native: Any, stand_in: StandIn) -> None:
    before = stand_in.retained(1)
    for count in (1, 2):
        driver = native.Driver("cuda", stand_in.path)
        kernels = [load(driver, "i") for _ in range(3)]
        for kernel in kernels:
            kernel.prepare(1)
        assert stand_in.retained(1) == before + 1, f"driver {count} holds one context for its three kernels"
        del driver, kernel, kernels
        assert stand_in.retained(1) == before


def test_the_image_is_kept_for_as_long_as_a_driver_may_read_it(driver: Any) -> None:
    data = image("kernel=i")
    before = sys.getrefcount(data)
    kernel = driver.load(data, "kernel", threads=32, shared=0, signature="i")
    assert sys.getrefcount(data) - before == {"cuda": 0, "hip": 1}[driver.backend]  # CUDA has a copy
    del kernel
    assert sys.getrefcount(data) == before


# ---- Unloading ----


@pytest.mark.parametrize(("code", "reported"), [(4, False), (1, True)])
def test_a_failed_unload_is_reported_unless_the_driver_is_gone(
    driver: Any, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, code: int, reported: bool
) -> None:
    told: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: told.append(unraisable.exc_value))
    kernel = load(driver, "i")
    kernel.prepare(0)
    call = {"cuda": "cuLibraryUnload", "hip": "hipModuleUnload"}[driver.backend]
    stand_in.fail(call, code)
    del kernel
    assert [f"{call} failed with 1" in str(error) for error in told] == ([True] if reported else [])


def test_unloading_keeps_an_exception_on_its_way(driver: Any, stand_in: StandIn) -> None:
    def fail() -> None:
        kernel = load(driver, "i")
        kernel.prepare(0)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        fail()
    gc.collect()  # what other tests left
    before = stand_in.live_libraries
    caught.value.__traceback__ = None
    del caught
    gc.collect()
    assert stand_in.live_libraries == before - 1


@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_the_interpreter_ends_cleanly_with_live_kernels(
    launcher_path: Path, stand_in: StandIn, backend: str
) -> None:
    script = textwrap.dedent(
        """
        import sys, threading
        from pathlib import Path
        from tests.harness.stand_in import image, import_launcher
        driver = import_launcher(Path(sys.argv[1])).Driver(sys.argv[3], sys.argv[2])
        def load():
            kernel = driver.load(image("kernel=i"), "kernel", threads=32, shared=0, signature="i")
            kernel.launch(1, 0, 1, 1, 1, 7)
            return kernel
        in_module, freed = load(), load()
        sys.kept_in_sys = load()
        class Cycle: pass
        cycle = Cycle()
        cycle.itself, cycle.kernel = cycle, load()
        del freed, cycle
        threading.Thread(target=lambda: [load() for _ in range(3)]).start()
        def run_for_ever(kernel=load()):
            while True:
                kernel.launch(1, 0, 1, 1, 1, 7)
        threading.Thread(target=run_for_ever, daemon=True).start()
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(launcher_path), stand_in.path, backend],
        capture_output=True,
        text=True,
        env=environment(STAND_IN_REPORT="1", PYTHONDEVMODE="1"),
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    # What was freed is unloaded; what lives to the end is left to the driver, which may be gone by then.
    assert done.stdout == "live libraries 4\n"


# ---- Cost ----


def test_the_cost_of_a_launch(driver: Any, stand_in: StandIn) -> None:
    """A loaded kernel's launch asks the driver for what is current and the launch, and leaves nothing in memory."""
    kernel = load(driver, "pppppiillf")
    arguments = (*(0x7F00_0000_0000 + i * 4096 for i in range(5)), 4096, 4096, 1, 2**33, 1e-6)
    kernel.launch(0, 0, 4096, 1, 1, *arguments)
    before = len(stand_in.calls())
    kernel.launch(0, 0, 4096, 1, 1, *arguments)
    asked = [line.split("@")[0] for line in stand_in.calls()[before:]]
    assert asked in (["cuCtxGetDevice", "cuLaunchKernel"], ["hipGetDevice", "hipModuleLaunchKernel"])
    stand_in.log_calls(False)
    count, blocks = stand_in.launch_count, sys.getallocatedblocks()
    for _ in range(10_000):
        kernel.launch(0, 0, 4096, 1, 1, *arguments)
    assert stand_in.launch_count == count + 10_000 and sys.getallocatedblocks() - blocks < 100
