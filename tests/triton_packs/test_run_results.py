"""A project's kernels, recorded for one GPU, built for another and run from its pack: results against torch, computed
by the AMD binaries themselves on the emulator."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
import triton
from triton.compiler import ASTSource
from triton.runtime import driver

import liger_aot.triton
from liger_aot.triton.kernel import PackedKernel
from liger_aot.triton.packs import NAMESPACE, OVERRIDE
from tests.triton_packs.conftest import Packed
from tests.triton_packs.project import kernels, program

pytest_plugins = (
    "tests.harness.launcher_fixtures",
    "tests.harness.triton_fixtures",
    "tests.harness.triton_emulator",
)


@pytest.fixture
def project(triton_emulator: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The project as a process has it that sees the GPU: a module of it looks at that when it is imported."""
    with monkeypatch.context() as seen:
        seen.setattr(torch.cuda, "is_available", lambda: True)
        importlib.reload(kernels)
    yield triton_emulator
    monkeypatch.undo()
    importlib.reload(kernels)


def test_the_whole_project(
    project: Any, gfx942: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ZipFile(gfx942.wheel) as files:
        files.extractall(tmp_path)
    monkeypatch.setenv(OVERRIDE, str(tmp_path / NAMESPACE))
    liger_aot.triton.use("small")
    n = 1000
    # it asks for clusters, which Triton refuses for this GPU
    monkeypatch.setattr(kernels, "needs_clusters", {(4,): lambda *args, **kwargs: None})
    made = program.launch_all(n, device="cpu")
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(1024, generator=generator)[:n] for _ in range(2))
    expected = {
        "add": x + 0.5 * y,
        "add half": (x.half().float() + 0.5 * y.half().float()).half(),
        "add from 1": (x[1:] + 2.0 * y[: n - 1]),
        "square": x * x * 0.1,
        "negate": -x * 2.0,
        "pair": x * 2,
        "by gpu": x * 0.25 + 3.0,  # as the module chooses on an MI300
        "tuned": x + 1,
        "cube": x * x * x,
        "fourth": x * x * x * x,
    }
    for name, wanted in expected.items():
        # one rounding where the product is fused with the sum, two where not
        slack = 2.0**-10 if wanted.dtype == torch.float16 else 2.0**-22
        torch.testing.assert_close(made[name][: len(wanted)], wanted, rtol=slack, atol=slack, msg=name)
        assert not made[name][len(wanted) :].any(), name
    # the sum of 1000 values, in another order: at most n roundings of the sum of absolute values
    bound = float(x.abs().double().sum()) * n * 2.0**-24
    assert abs(float(made["total"][0]) - float(x.double().sum())) <= bound
    assert torch.equal(made["copied"][:n], y)
    status = liger_aot.triton.status()
    assert status.packs == ("small for gfx942",) and not status.missed
    assert len(project.executed) == 12


@pytest.mark.parametrize("missing", ["warn", "compile"])
def test_what_the_pack_lacks_is_compiled_and_runs(
    project: Any, gfx942: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """By Triton, for this GPU, without a compiler on PATH; what the pack has still comes from there."""
    with ZipFile(gfx942.wheel) as files:
        files.extractall(tmp_path)
    monkeypatch.setenv(OVERRIDE, str(tmp_path / NAMESPACE))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "/nonexistent")
    liger_aot.triton.use("small", missing=missing)
    x, y = torch.randn(1024), torch.randn(1024)
    made, packed = torch.zeros(1024), torch.zeros(1024)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            kernels.add[(2,)](x, y, made, 1000, 0.5, BLOCK=512)
        kernels.add[(4,)](x, y, packed, 1000, 0.5, BLOCK=256)
    told = [str(one.message) for one in said if issubclass(one.category, RuntimeWarning)]
    status = liger_aot.triton.status()
    assert len(status.missed) == 1
    assert "BLOCK is the constant 512, in the pack the constant 256" in status.missed[0]
    assert told == ([f"{status.missed[0]}. Triton compiles it now"] if missing == "warn" else [])
    assert status.loaded == 1 and project.executed == ["add"] * 3
    assert torch.equal(made, packed) and made.any()
    kernel = kernels.add[(4,)](x, y, packed, 1000, 0.5, BLOCK=256)
    compiled = kernels.add[(2,)](x, y, made, 1000, 0.5, BLOCK=512)
    assert isinstance(kernel, PackedKernel) and not isinstance(compiled, PackedKernel)


def test_a_kernel_that_is_compiled_by_other_means(
    project: Any, gfx942: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile's Inductor calls ``triton.compile`` itself and launches what it gets: no pack is asked, "error"
    refuses nothing, and the launch goes through our driver."""
    with ZipFile(gfx942.wheel) as files:
        files.extractall(tmp_path)
    monkeypatch.setenv(OVERRIDE, str(tmp_path / NAMESPACE))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    liger_aot.triton.use("small", missing="error")
    names = kernels.add.arg_names
    signature = dict.fromkeys(names[:3], "*fp32") | {names[3]: "i32", names[4]: "fp32", names[5]: "constexpr"}
    source = ASTSource(kernels.add, signature, {(5,): 128}, {})
    compiled = triton.compile(source, target=driver.active.get_current_target())
    compiled._init_handles()
    x, y, made = torch.randn(1024), torch.randn(1024), torch.zeros(1024)
    for tensor in (x, y, made):
        tensor.data_ptr()  # by which the emulator knows what may be touched
    compiled.run(
        8,
        1,
        1,
        4096,
        compiled.function,
        compiled.packed_metadata,
        None,
        None,
        None,
        x,
        y,
        made,
        1000,
        0.5,
        128,
    )
    torch.testing.assert_close(made[:1000], (x + 0.5 * y)[:1000], rtol=2.0**-22, atol=2.0**-22)
    status = liger_aot.triton.status()
    assert (status.loaded, status.missed, project.executed) == (0, (), ["add"])
