"""What the stand-in driver shows of faults, shown by a real one: captures, forks, ten thousand loads, the end."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap

import pytest
import torch

import liger_aot
from liger_aot.errors import NotLoaded
from liger_aot.ops.activations.relu_squared import ReLUSquared
from tests.harness.children import environment
from tests.harness.op_gpu_tests import installed
from tests.runtime.test_loader_lifetime import in_child, reference_works

pytestmark = pytest.mark.gpu
LOADS = 10_000


def test_capture_before_preload() -> None:
    """A clear error, from which the stream, the op and the next capture recover."""
    op, x = ReLUSquared(), torch.randn(1 << 16, device="cuda")  # with nothing loaded
    expected = torch.relu(x).square()
    graph, y = torch.cuda.CUDAGraph(), torch.zeros_like(x)
    with pytest.raises(NotLoaded, match=r"preload\(\) before"), torch.cuda.graph(graph):
        y.add_(1)
        op(x)
    torch.cuda.synchronize()
    assert torch.equal(op(x), expected)
    op.preload()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = op(x)
    graph.replay()
    assert torch.equal(y, expected)


def test_fork_after_load() -> None:
    """The child uses the CPU, as a DataLoader's workers do; the parent's GPU goes on."""
    op, x = liger_aot.load("relu_squared"), torch.randn(1 << 16, device="cuda")
    before = op(x)
    for _ in range(3):
        assert in_child(reference_works) == "True"
    assert torch.equal(op(x), before) and torch.equal(
        op(x.half()), torch.relu(x.half()).float().square().half()
    )


@pytest.mark.slow
def test_ten_thousand_loads_leave_nothing() -> None:
    """Of the GPU's memory and of the process's: a binary that stayed would be some 10 KB each time."""

    def cycle(times: int) -> tuple[int, int]:
        for _ in range(times):
            ReLUSquared().preload()
        gc.collect()
        torch.cuda.synchronize()
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return torch.cuda.mem_get_info()[0], resident

    free, resident = cycle(50)
    left, now = cycle(-(-LOADS // len(installed().op("relu_squared").variants)))
    assert free - left < 16 << 20, f"{free - left} bytes of the GPU's memory are gone"
    assert now - resident < 32 << 20, f"the process has grown by {now - resident} bytes"


def test_the_interpreter_ends_cleanly() -> None:
    """With loaded ops in a module, in sys and in a cycle, and work of theirs under way."""
    script = textwrap.dedent(
        """
        import sys, threading
        import torch
        from liger_aot import load
        from liger_aot.ops.activations.relu_squared import ReLUSquared
        x = torch.randn(1 << 28, device="cuda")
        op = load("relu_squared")
        class Cycle: pass
        cycle = Cycle()
        cycle.itself, cycle.op, sys.kept = cycle, ReLUSquared(), ReLUSquared()
        def work():
            for _ in range(20):
                for each in (op, cycle.op, sys.kept):
                    each(x)
        thread = threading.Thread(target=work)
        thread.start()
        work()
        """
    )
    command = [sys.executable, "-X", "dev", "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
