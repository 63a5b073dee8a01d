"""What only a GPU shows of an op: large tensors, graphs, streams, threads, devices. ``op_tests`` has the rest."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import LigerAOTError
from liger_aot.ops.differentiable import DifferentiableOp
from liger_aot.ops.op import Op
from liger_aot.runtime.devices import driver, gpu
from liger_aot.runtime.dispatch import GPUDriver, Launchable, OpOn, Runtimes
from liger_aot.runtime.manifest import Pack, Variant
from liger_aot.runtime.packs import pack_for
from tests.conftest import built_pack
from tests.harness.drivers import as_of_many_rows
from tests.harness.op_cases import OpCases, Results, same

# A folder of one architecture's PTX, of its name (``python -m liger_aot_build audit --arch sm89 --assembly build/ptx``
# makes build/ptx/sm89). A GPU takes PTX of its compute capability and lower ones, but not of other sm_90a, sm_100f and
# the like.
PTX_FOLDER = os.environ.get("LIGER_AOT_PTX")
PTX_ARCH = Path(PTX_FOLDER).name if PTX_FOLDER else ""
needs_ptx = pytest.mark.skipif(not PTX_FOLDER, reason="LIGER_AOT_PTX names no folder of PTX")
PTX = pytest.param("PTX", marks=[pytest.mark.gpu, needs_ptx])
AnyOp = TypeVar("AnyOp", bound=Op)
REPEATS = 10
THREADS = 16


def installed() -> Pack:
    return pack_for(gpu(0).device)


class PtxDriver(GPUDriver):
    """A pack's PTX through the driver's own compiler: the way to run an architecture's lowering on a later GPU."""

    def load(self, variant: Variant) -> Launchable:
        assert PTX_FOLDER is not None
        text = (Path(PTX_FOLDER) / f"{variant.name}.ptx").read_bytes()
        kernel: Launchable = driver().load(
            text, variant.symbol, threads=variant.threads, shared=variant.shared, signature=variant.signature
        )
        return kernel


def lowered_from_ptx(op_class: type[AnyOp]) -> AnyOp:
    """The op with the PTX of LIGER_AOT_PTX, launched as that architecture's pack says."""
    return on_first_gpu(op_class, built_pack(PTX_ARCH), PtxDriver)


def on_first_gpu(op_class: type[AnyOp], pack: Pack, driver_class: type[GPUDriver]) -> AnyOp:
    """The op with the first GPU bound to a driver of that class."""
    here = gpu(0)
    runtimes = {}
    for name in (op_class.name, *op_class.uses):
        on = OpOn(pack.op(name), driver_class(here.shared_per_block), 0, here.multiprocessors)
        runtimes[name] = Runtimes(name, {0: on})
    return op_class(runtimes)


def assert_same(got: Results, wanted: Results, label: Any) -> None:
    """To the bit."""
    for i, (y, expected) in enumerate(zip(got.outputs, wanted.outputs, strict=True)):
        assert torch.equal(y, expected), f"{label}: output {i}"
    for name, gradient in got.gradients.items():
        assert same(gradient, wanted.gradients[name]), f"{label}: gradient of {name}"


class OpGPUTests(OpCases):
    """Part of ``OpTests``."""

    def loaded_op(self) -> DifferentiableOp:
        op: DifferentiableOp = liger_aot.load(self.op_class.name)
        return op

    def check_compiled(self, device: str, **options: Any) -> None:
        """torch.compile gives one graph with the eager call's bits, forward and backward, for other shapes too."""
        op, call, case = self.loaded_op(), self.call, self.cases[0]

        def doubled(op: DifferentiableOp, leaves: Any, settings: tuple[Any, ...]) -> Any:
            return call(
                op, tuple(t * 2 if t is not None and t.requires_grad else t for t in leaves), settings
            )

        torch.compiler.reset()
        compiled = torch.compile(doubled, fullgraph=True, **options)
        for seed, longer in enumerate((0, 1, 2)):
            case = case.but(shape=(case.shape[0] + longer, *case.shape[1:]))
            tensors, settings, grads = self.draw(case, seed, device)
            expected = self.run(op, tensors, settings, grads, call=doubled)
            assert_same(self.run(op, tensors, settings, grads, call=compiled), expected, case)
            with torch.no_grad():
                outputs = compiled(op, tensors, settings)
                plain = doubled(op, tensors, settings)
            outputs, plain = ((o,) if isinstance(o, Tensor) else o for o in (outputs, plain))
            assert all(torch.equal(a, b) for a, b in zip(outputs, plain, strict=True))

    @pytest.mark.gpu
    @pytest.mark.usefixtures("poisoned")
    def test_large(self, large_case: Any) -> None:
        self.check(self.loaded_op(), large_case, installed().tolerance, device="cuda")

    @pytest.mark.gpu
    def test_past_two_to_the_31(self, beyond_case: Any) -> None:
        """Offsets past 2^31 elements: the last rows are those of a call with them alone, and right."""
        op, case = self.loaded_op(), beyond_case
        tensors, settings, grads = self.draw(case, 0, "cuda")
        got = self.run(op, tensors, settings, grads)
        last = [None if t is None else self.tail(case, t) for t in tensors]
        few = tuple(t if tail is None else tail.clone() for t, tail in zip(tensors, last, strict=True))
        few_grads = tuple(self.tail(case, dy).clone() for dy in grads)
        with as_of_many_rows(op):  # few rows have binaries of their own, which add in another order
            wanted = self.run(op, few, settings, few_grads)
        assert max(t.numel() for t in (*got.outputs, *tensors) if t is not None) > 1 << 31
        of_rows: set[str] = {n for n, tail in zip(self.tensor_names(), last, strict=True) if tail is not None}
        tails = Results(
            tuple(self.tail(case, y) for y in got.outputs),
            {name: self.tail(case, g) for name, g in got.gradients.items() if name in of_rows},
        )
        assert_same(tails, wanted, case)
        exact = self.exact(few, settings, few_grads, wanted)
        self.compare(wanted, exact, few, installed().tolerance, f"the last rows of {case}")

    @pytest.mark.gpu
    def test_results_repeat_to_the_bit(self) -> None:
        op = self.loaded_op()
        for case in (*self.cases, *self.large):
            drawn = self.draw(case, 0, "cuda")
            first = self.run(op, *drawn)
            for _ in range(REPEATS):
                assert_same(self.run(op, *drawn), first, case)

    @pytest.mark.gpu
    def test_cuda_graph(self) -> None:
        """Forward and backward captured once and replayed with other values."""
        op = self.loaded_op()
        op.preload()
        for case in (self.cases[0], *self.large[:2]):
            tensors, settings, grads = self.draw(case, 0, "cuda")
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.run(op, tensors, settings, grads)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = self.run(op, tensors, settings, grads)
            for seed in range(1, 4):
                others, _, other_grads = self.draw(case, seed, "cuda")
                for to, new in zip((*tensors, *grads), (*others, *other_grads), strict=True):
                    if to is not None:
                        to.copy_(new)
                graph.replay()
                assert_same(captured, self.run(op, others, settings, other_grads), f"{case}, replay {seed}")

    @pytest.mark.gpu
    def test_compile(self) -> None:
        self.check_compiled("cuda")

    @pytest.mark.gpu
    def test_streams_and_threads(self) -> None:
        case = self.large[0] if self.large else self.cases[0]
        drawn = self.draw(case, 0, "cuda")
        expected = self.run(self.loaded_op(), *drawn)
        torch.cuda.synchronize()

        def work(thread: int) -> None:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                fresh = self.op_class()  # loads its own binaries, concurrently with the others
                for _ in range(REPEATS):
                    assert_same(self.run(fresh, *drawn), expected, f"thread {thread}")
            stream.synchronize()

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(work, range(THREADS)))

    @pytest.mark.gpu
    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
    def test_another_gpu_than_the_current_one(self) -> None:
        op = self.loaded_op()
        try:
            for current, where in ((0, 1), (1, 0)):
                torch.cuda.set_device(current)
                for seed, case in enumerate(self.cases):
                    self.check(op, case, installed().tolerance, seed=seed, device=f"cuda:{where}")
                assert torch.cuda.current_device() == current
        finally:
            torch.cuda.set_device(0)

    @pytest.mark.gpu
    def test_mixed_devices(self) -> None:
        op = self.loaded_op()
        tensors, settings, _ = self.draw(self.cases[0], 0, "cuda")
        for i, (name, t) in enumerate(zip(self.tensor_names(), tensors, strict=True)):
            if i and t is not None:
                with pytest.raises(LigerAOTError, match=rf"{op.name}: {name} is on cpu"):
                    self.call(op, (*tensors[:i], t.cpu(), *tensors[i + 1 :]), settings)
