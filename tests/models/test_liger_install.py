"""``import liger_aot.liger``: Liger's own patches of models run on our ops and nothing is compiled."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("liger_kernel", reason="liger-kernel is not installed: make venv installs it")

import liger_aot.liger
from liger_aot.errors import LeftAlone
from liger_aot.liger.functions import COVERED
from tests.harness.children import ROOT, environment

MODELS = [
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "granite", "glm4",
    "nemotron", "qwen2_vl", "qwen2_5_vl",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    liger_aot.liger.install()
    yield
    liger_aot.liger.install()


def run(*arguments: str, **more: str) -> str:
    """What a fresh Python prints last."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment(**more),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("order", "mode"),
    [
        ("before", "instance"),
        *(
            pytest.param(*both, marks=pytest.mark.slow)
            for both in (("after", "instance"), ("before", "class"), ("after", "class"))
        ),
    ],
)
def test_models_that_liger_patched(order: str, mode: str) -> None:
    """Mixtral's experts have no op: they still go to Triton, and that shows."""
    pytest.importorskip("transformers", reason="Transformers is not installed: make venv installs it")
    found = json.loads(run("-m", "tests.models.liger_models", order, mode, "cpu", *MODELS, "mixtral"))
    assert found.keys() == {"mixtral"}, found
    assert "Triton compiles" in found["mixtral"] and "fused_moe" in found["mixtral"]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["instance", "class"])
def test_models_that_liger_patched_on_a_gpu(mode: str) -> None:
    pytest.importorskip("transformers", reason="Transformers is not installed: make venv installs it")
    assert json.loads(run("-m", "tests.models.liger_models", "before", mode, "cuda", *MODELS)) == {}


def test_status() -> None:
    status = liger_aot.liger.status()
    assert status.ours == {name: op for name, (_, op) in COVERED.items()}
    assert set(status.ours.values()) <= set(liger_aot.ops())
    assert {"LigerFusedMoEFunction", "GrpoLossFunction", "fused_linear_kl_div_forward"} <= set(status.jit)
    assert "LigerTiledMLPFunction" in status.others
    assert not set(status.ours) & {*status.jit, *status.others}
    lines = str(status).splitlines()
    assert lines[0] == f"liger_kernel {status.version}"
    assert any(line.split() == ["LigerRMSNormFunction", "liger-aot", "rmsnorm"] for line in lines)
    assert any(line.split() == ["LigerFusedMoEFunction", "Triton", "JIT"] for line in lines)


def test_everywhere_and_back() -> None:
    import liger_kernel.ops
    import liger_kernel.ops.rope
    import liger_kernel.transformers.functional as functional
    from liger_kernel.backends import dispatch

    places = (liger_kernel.ops, liger_kernel.ops.rope, sys.modules["liger_kernel.ops.backends._triton.rope"])
    ours = COVERED["LigerRopeFunction"][0]
    assert all(place.LigerRopeFunction is ours for place in places)
    assert functional.LigerRMSNormFunction is COVERED["LigerRMSNormFunction"][0]
    registry = sys.modules["liger_kernel.backends.registry"]
    assert ("rope", "liger_aot") in registry._REGISTRY and callable(dispatch)

    liger_aot.liger.uninstall()
    assert all(place.LigerRopeFunction is not ours for place in places)
    assert all(place.LigerRopeFunction.__module__ == "liger_kernel.ops.rope" for place in places)
    assert liger_aot.liger.status().ours == {}
    assert ("rope", "liger_aot") not in registry._REGISTRY
    liger_aot.liger.install()
    liger_aot.liger.install()
    assert all(place.LigerRopeFunction is ours for place in places)


def test_dispatch_takes_ours_first() -> None:
    from liger_kernel.backends import available_impls

    for op in ("rms_norm", "rope", "swiglu", "cross_entropy"):
        assert available_impls(op)[0] == "liger_aot"


def test_by_ligers_own_variable() -> None:
    """LIGER_KERNEL_IMPL names us, in Liger's registry of functions and in its dispatcher."""
    code = """
import liger_aot.liger, torch
from liger_kernel.functional import rms_norm
from liger_kernel.ops.backends.registry import IMPL_REGISTRY
assert "liger_aot" in IMPL_REGISTRY
x, w = torch.randn(3, 8), torch.randn(8)
assert torch.equal(rms_norm(x, w), liger_aot.load("rmsnorm")(x, w))
print("done")
"""
    assert run("-c", code, LIGER_KERNEL_IMPL="liger_aot") == "done"


def test_names_that_moved() -> None:
    import liger_kernel.ops
    import liger_kernel.ops.softmax

    liger_aot.liger.uninstall()
    modules = [
        m
        for n, m in sys.modules.items()
        if n.startswith("liger_kernel") and "LigerSoftmaxFunction" in vars(m)
    ]
    before = {m: vars(m).pop("LigerSoftmaxFunction") for m in modules}
    try:
        with pytest.warns(LeftAlone, match="has no LigerSoftmaxFunction: nothing is replaced"):
            liger_aot.liger.install()
        assert liger_kernel.ops.LigerRMSNormFunction is COVERED["LigerRMSNormFunction"][0]
    finally:
        for module, value in before.items():
            module.LigerSoftmaxFunction = value  # type: ignore[attr-defined]


def test_without_liger() -> None:
    code = """
import importlib.util
import liger_aot
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "liger_kernel" else find(name, *a)
try:
    import liger_aot.liger
except liger_aot.errors.PatchError as error:
    print(error)
"""
    assert "liger_kernel isn't installed: pip install liger-kernel" in run("-c", code)
