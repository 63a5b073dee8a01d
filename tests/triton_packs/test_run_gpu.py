"""A project's kernels from its pack on a GPU: the same bits as Triton compiles in place, also where the first launch is
captured into a CUDA graph."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
import triton

import liger_aot.triton
from liger_aot.errors import KernelNotInPack
from liger_aot.triton.packs import NAMESPACE, OVERRIDE
from tests.triton_packs.conftest import Packed
from tests.triton_packs.project import kernels, made_in_calls, program

pytestmark = pytest.mark.gpu


@pytest.fixture
def packed(sm90: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The project's pack in use, and no kernel of it in the process."""
    if torch.version.hip or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"the pack is for sm90, this is {torch.cuda.get_device_name()}")
    with ZipFile(sm90.wheel) as files:
        files.extractall(tmp_path)
    monkeypatch.setenv(OVERRIDE, str(tmp_path / NAMESPACE))
    forget()
    yield
    liger_aot.triton.stop()
    forget()


def forget() -> None:
    importlib.reload(kernels)  # as a process has it that sees this GPU; its functions are new ones


def test_results_are_those_compiled_in_place(packed: None) -> None:
    compiled = program.launch_all(1000)
    forget()
    liger_aot.triton.use("small", missing="error")
    from_pack = program.launch_all(1000)
    torch.cuda.synchronize()
    assert liger_aot.triton.status().loaded >= 13
    for name, wanted in compiled.items():
        assert torch.equal(from_pack[name], wanted), name


def test_the_first_launch_is_captured(packed: None) -> None:
    """Loading a binary is no part of a graph: the thread may do it while it captures."""
    liger_aot.triton.use("small", missing="error")
    x, y = torch.randn(1024, device="cuda"), torch.randn(1024, device="cuda")
    out = torch.zeros(1024, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.add[(4,)](x, y, out, 1000, 0.5, BLOCK=256)
    assert not out.any()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out[:1000], (x + 0.5 * y)[:1000])
    x.mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out[:1000], (x + 0.5 * y)[:1000])


def test_a_cpu_tensor_and_a_miss(packed: None) -> None:
    liger_aot.triton.use("small", missing="error")
    x = torch.randn(1024, device="cuda")
    with pytest.raises(ValueError, match=r"argument Y: .*cannot be accessed from Triton \(cpu tensor\?\)"):
        kernels.add[(4,)](x, torch.randn(1024), x, 1000, 0.5, BLOCK=256)
    pinned = torch.randn(1024).pin_memory()  # which kernels do reach
    out = torch.zeros(1024, device="cuda")
    kernels.add[(4,)](x, pinned, out, 1000, 0.5, BLOCK=256)
    torch.cuda.synchronize()
    assert torch.equal(out[:1000], (x + 0.5 * pinned.cuda())[:1000])
    with pytest.raises(KernelNotInPack, match="BLOCK is the constant 512, in the pack the constant 256"):
        kernels.add[(4,)](x, x, x, 1000, 0.5, BLOCK=512)


def test_a_stream_and_another_thread(packed: None) -> None:
    import threading

    liger_aot.triton.use("small", missing="error")
    x, out = torch.randn(1024, device="cuda"), torch.zeros(1024, device="cuda")
    torch.cuda.synchronize()
    failed: list[BaseException] = []

    def launch() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                kernels.pair[(4,)]((x, out), 1000, BLOCK=256)
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=launch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and torch.equal(out[:1000], x[:1000] * 2)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_in_a_compiled_function(packed: None, backend: str) -> None:
    """torch.compile's own wrapper of Triton kernels launches them as the program would."""
    liger_aot.triton.use("small", missing="error")

    @torch.compile(backend=backend)
    def twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        kernels.add[(4,)](x, y, out, 1000, 0.5, BLOCK=256)
        return out

    x, y = torch.randn(1024, device="cuda"), torch.randn(1024, device="cuda")
    expected = x + 0.5 * y
    assert torch.equal(twice(x, y)[:1000], expected[:1000])
    assert triton.runtime.driver.active.__class__.__name__ == "CudaPackDriver"


def test_what_inductor_compiles(packed: None) -> None:
    """Inductor makes source of a graph, kernels of the program's own included, and compiles it: no pack is asked. A
    custom op is left as it is: its kernel comes from the pack."""
    liger_aot.triton.use("small", missing="error")
    before = liger_aot.triton.status().loaded

    @torch.library.custom_op("liger_aot_tests::add", mutates_args=())
    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        kernels.add[(4,)](x, y, out, 1000, 0.5, BLOCK=256)
        return out

    @add.register_fake
    def _(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    @torch.compile
    def compiled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        kernels.add[(4,)](x, y, out, 1000, 0.5, BLOCK=256)
        return out.sin() + 1

    @torch.compile
    def left(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return add(x, y).sin() + 1

    x, y = torch.randn(1024, device="cuda"), torch.randn(1024, device="cuda")
    wanted = torch.zeros(1024, device="cuda")
    wanted[:1000] = (x + 0.5 * y)[:1000]
    wanted = wanted.sin() + 1
    torch.testing.assert_close(compiled(x, y), wanted)
    assert liger_aot.triton.status().loaded == before
    torch.testing.assert_close(left(x, y), wanted)
    assert liger_aot.triton.status().loaded == before + 1
    assert not liger_aot.triton.status().missed


def test_launches_like_one_before(packed: None) -> None:
    """A call of another alignment is another call, also after many of the same."""
    liger_aot.triton.use("small", missing="error")
    for n in (1000, 999, 1000, 999):
        x, y = torch.randn(1025, device="cuda"), torch.randn(1025, device="cuda")
        out = torch.zeros(1024, device="cuda")
        kernels.add[(4,)](x, y, out, n, 0.5, BLOCK=256)
        assert torch.equal(out[:n], (x + 0.5 * y)[:n]) and not out[n:].any()
    with pytest.raises(KernelNotInPack, match="n is i32 divisible by 16, in the pack i32"):
        kernels.add[(4,)](x, y, out, 992, 0.5, BLOCK=256)


def test_kernels_that_are_made_when_functions_are_called(
    packed: None, made_in_calls_sm90: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made anew each time: the bits of those compiled in place, each binary loaded once, also into a CUDA graph. In
    place without Triton's cache, which takes kernels over two dtypes for one."""
    with ZipFile(made_in_calls_sm90.wheel) as files:
        files.extractall(tmp_path / "made")
    monkeypatch.setenv(OVERRIDE, str(tmp_path / "made" / NAMESPACE))
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    compiled = made_in_calls.launch_all(1000, objects=False)
    torch.cuda.synchronize()
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0))[:1000]
    liger_aot.triton.use("small", missing="error")
    for _ in range(3):
        from_pack = made_in_calls.launch_all(1000, objects=False)
        torch.cuda.synchronize()
        assert liger_aot.triton.status().loaded == 7
        for name, wanted in compiled.items():
            assert torch.equal(from_pack[name], wanted), name
            # one rounding where product and sum are fused, two where not
            right = made_in_calls.expected(name, x)
            torch.testing.assert_close(wanted[:1000].cpu(), right, rtol=2.0**-22, atol=2.0**-22, msg=name)
    given, out = x.cuda(), torch.zeros(1024, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made_in_calls.rounded(given, out, 1000, made_in_calls.tl.bfloat16)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, compiled["cast bf16"])
    with pytest.raises(KernelNotInPack, match=r"it reads BY, which is 3.0, was"):
        made_in_calls.Scale(3.0)(given, out, 1000)
