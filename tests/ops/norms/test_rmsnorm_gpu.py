"""RMSNorm's installed binaries on the GPU: every row of the tables, large shapes, graphs, streams, threads, compile."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.norms.rmsnorm import RMSNorm, reference
from liger_aot.runtime.devices import driver, gpu
from liger_aot.runtime.dispatch import GPUDriver, Launchable, OpOn, Runtimes
from liger_aot.runtime.manifest import Pack, Variant
from liger_aot.runtime.packs import pack_for
from tests.ops.norms.rmsnorm_cases import BF16, DTYPES, EDGES, FP32, Case, check, table_cases

pytestmark = pytest.mark.gpu
# PTX of the sm80 pack (python -m build_tools audit --assembly) and the pack itself: both are built for this purpose.
SM80_PTX = os.environ.get("LIGER_AOT_SM80_PTX")


OP: RMSNorm = liger_aot.load("rmsnorm")


def op() -> RMSNorm:
    return OP


def installed() -> Pack:
    return pack_for(gpu(0).device)


@pytest.mark.usefixtures("poisoned")
def test_every_row_of_the_tables() -> None:
    pack = installed()
    for seed, case in enumerate(EDGES + table_cases(pack.op("rmsnorm"), 1 << 30, rows=700)):
        check(op(), case, pack.tolerance, seed)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [128, 4096, 5120, 11008, 16384, 18944, 32768, 131072, 300_001])
def test_large(n: int, dtype: torch.dtype) -> None:
    rows = (1 << 26) // n
    for weight, mode, offset in ((dtype, "llama", 0.0), (FP32, "gemma", 1.0)):
        check(op(), Case(rows, n, dtype, weight, mode, offset), installed().tolerance, n)


@pytest.mark.parametrize("n", [4096, 32768])
def test_past_two_to_the_31(n: int) -> None:
    """Offsets past 2^31 elements, forward and backward; the last rows are compared with fp64."""
    rows = (1 << 31) // n + 64
    x = torch.randn(rows, n, dtype=BF16, device="cuda")
    dy = torch.randn(rows, n, dtype=BF16, device="cuda")
    weight = torch.randn(n, dtype=BF16, device="cuda")
    y, rstd = op().forward(x, weight)
    dx, _ = op().backward(dy, x, weight, rstd)
    tail = slice(rows - 96, rows)
    assert rstd is not None and dx is not None
    y_tail, rstd_tail = op().forward(x[tail].clone(), weight)
    dx_tail, _ = op().backward(dy[tail].clone(), x[tail].clone(), weight, rstd_tail)
    assert torch.equal(y[tail], y_tail) and torch.equal(rstd[tail], rstd_tail)
    assert torch.equal(dx[tail], dx_tail)
    exact, _ = reference(x[tail].double(), weight.double())
    assert ((y_tail.double() - exact).abs() <= 2.1 * 2**-8 * exact.abs() + 1e-30).all()


def test_results_repeat_to_the_bit() -> None:
    for n in (512, 4096, 16384, 32768):
        x, dy = (torch.randn(2048, n, dtype=BF16, device="cuda") for _ in range(2))
        weight = torch.randn(n, dtype=BF16, device="cuda")
        y, rstd = op().forward(x, weight)
        first = op().backward(dy, x, weight, rstd)
        for _ in range(20):
            again = op().backward(dy, x, weight, rstd)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert torch.equal(y, op().forward(x, weight)[0])


def test_gradients_through_autograd() -> None:
    x = torch.randn(4, 33, 5120, dtype=BF16, device="cuda", requires_grad=True)
    weight = torch.randn(5120, dtype=BF16, device="cuda", requires_grad=True)
    dy = torch.randn_like(x)
    got = torch.autograd.grad(op()(x, weight), (x, weight), dy)
    wide = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    exact = torch.autograd.grad(reference(*wide)[0], wide, dy.double())
    for value, wanted in zip(got, exact, strict=True):
        assert (value.double() - wanted).norm() / wanted.norm() < 2**-8


def test_layouts() -> None:
    weight = torch.randn(256, dtype=BF16, device="cuda")
    x = torch.randn(6, 10, 256, dtype=BF16, device="cuda")
    expected = op()(x, weight)
    for view in (
        x.transpose(0, 1).contiguous().transpose(0, 1),
        torch.cat([x, x], -1)[..., :256],
        torch.cat([x, x], -1)[..., 1:257].copy_(x),
        x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    ):
        assert torch.equal(op()(view, weight), expected)
    out = torch.full((6, 10, 512), torch.nan, dtype=BF16, device="cuda")
    op()(x, weight, out=out[..., :256])
    assert torch.equal(out[..., :256], expected) and out[..., 256:].isnan().all()
    inplace = x.clone()
    op()(inplace, weight, out=inplace)
    assert torch.equal(inplace, expected)
    with pytest.raises(ArgumentError, match="evenly spaced"):
        op()(x, weight, out=torch.empty(256, 6, 10, dtype=BF16, device="cuda").permute(1, 2, 0))


def test_in_place_on_rows_read_twice() -> None:
    for n in (16384, 131072):
        x = torch.randn(300, n, dtype=BF16, device="cuda")
        expected = op()(x)
        assert torch.equal(op()(x, out=x), expected)


def test_cuda_graph() -> None:
    op().preload()
    for n in (4096, 32768):
        x, dy = (torch.randn(512, n, dtype=BF16, device="cuda") for _ in range(2))
        weight = torch.randn(n, dtype=BF16, device="cuda")
        op().forward(x, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, rstd = op().forward(x, weight)
            dx, dweight = op().backward(dy, x, weight, rstd)
        for _ in range(3):
            x.normal_()
            dy.normal_()
            graph.replay()
            wanted_y, wanted_rstd = op().forward(x, weight)
            wanted = op().backward(dy, x, weight, wanted_rstd)
            assert torch.equal(y, wanted_y)
            assert torch.equal(dx, wanted[0]) and torch.equal(dweight, wanted[1])


def test_compile() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(1024, dtype=BF16))
            self.linear = torch.nn.Linear(1024, 1024, dtype=BF16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(OP(x, self.weight, eps=1e-5))

    block = Block().cuda()
    x = torch.randn(8, 64, 1024, dtype=BF16, device="cuda", requires_grad=True)
    compiled = torch.compile(block, fullgraph=True)
    for run in (block, compiled):
        for p in (x, *block.parameters()):
            p.grad = None
        run(x).float().square().sum().backward()
        grads = [p.grad.clone() for p in (x, *block.parameters())]
        if run is block:
            expected = grads
    for value, wanted in zip(grads, expected, strict=True):
        assert (value.double() - wanted.double()).norm() / wanted.double().norm() < 2**-7
    with torch.no_grad():
        assert torch.allclose(compiled(x).float(), block(x).float(), rtol=2**-6, atol=2**-6)


def test_streams_and_threads() -> None:
    x = torch.randn(2048, 4096, dtype=BF16, device="cuda")
    weight = torch.randn(4096, dtype=BF16, device="cuda")
    expected = op()(x, weight)
    torch.cuda.synchronize()

    def work(_: int) -> bool:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            fresh = RMSNorm()  # loads its own binaries, concurrently with the others
            same = all(torch.equal(fresh(x, weight), expected) for _ in range(20))
        stream.synchronize()
        return same

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(16)))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("n", [1000, 4096, 32768])
def test_another_gpu_than_the_current_one(n: int) -> None:
    for current, where in ((0, 1), (1, 0)):
        torch.cuda.set_device(current)
        x = torch.randn(300, n, dtype=BF16, device=f"cuda:{where}", requires_grad=True)
        weight = torch.randn(n, dtype=BF16, device=f"cuda:{where}", requires_grad=True)
        y = op()(x, weight)
        got = (y, *torch.autograd.grad(y, (x, weight), torch.ones_like(y)))
        wide = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
        exact = reference(*wide)[0]
        wanted = (exact, *torch.autograd.grad(exact, wide, torch.ones_like(exact)))
        for value, reference_value in zip(got, wanted, strict=True):
            assert (
                value.detach().double() - reference_value.detach()
            ).norm() / reference_value.norm() < 2**-7
        assert torch.cuda.current_device() == current and y.get_device() == where
    torch.cuda.set_device(0)


def test_bad_input() -> None:
    x = torch.randn(2, 64, device="cuda")
    with pytest.raises(ArgumentError, match="weight is on cpu, x on cuda:0"):
        op()(x, torch.ones(64))
    with pytest.raises(ArgumentTypeError, match="float64"):
        op()(x.double())
    with pytest.raises(ArgumentError, match="out is on cpu"):
        op()(x, out=torch.empty(2, 64))
    assert op()(x[:0]).shape == (0, 64) and op()(x[:, :0]).shape == (2, 0)


class PtxDriver(GPUDriver):
    """The sm80 pack's PTX through the driver's own compiler: the way to run its lowering on a later GPU."""

    def load(self, variant: Variant) -> Launchable:
        assert SM80_PTX is not None
        text = (Path(SM80_PTX) / f"{variant.name}.ptx").read_bytes()
        kernel: Any = driver().load(
            text, variant.symbol, threads=variant.threads, shared=variant.shared, signature=variant.signature
        )
        return kernel


@pytest.mark.skipif(not SM80_PTX, reason="LIGER_AOT_SM80_PTX names no folder of PTX")
@pytest.mark.usefixtures("poisoned")
def test_sm80_ptx() -> None:
    from tests.conftest import built_pack

    pack = built_pack("sm80")
    here = gpu(0)
    runtimes = {
        name: Runtimes(
            name,
            {0: OpOn(pack.op(name), PtxDriver(here.shared_per_block), 0, here.multiprocessors)},
        )
        for name in ("rmsnorm", "column_sums")
    }
    lowered = RMSNorm(runtimes)
    for seed, case in enumerate(EDGES + table_cases(pack.op("rmsnorm"), 1 << 30, rows=100)):
        check(lowered, case, pack.tolerance, seed)
