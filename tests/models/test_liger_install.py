"""``import liger_aot.liger``: Liger's own patches of models run on our ops and nothing is compiled."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("liger_kernel", reason="liger-kernel is not installed: make venv installs it")

import liger_aot.liger
from liger_aot.errors import ArgumentError, LeftAlone, PackNotFound, PatchError
from liger_aot.liger import chunked
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
    """Mixtral's experts among them."""
    pytest.importorskip("transformers", reason="Transformers is not installed: make venv installs it")
    found = json.loads(run("-m", "tests.models.liger_models", order, mode, "cpu", *MODELS, "mixtral"))
    assert found == {}


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["instance", "class"])
def test_models_that_liger_patched_on_a_gpu(mode: str) -> None:
    pytest.importorskip("transformers", reason="Transformers is not installed: make venv installs it")
    assert json.loads(run("-m", "tests.models.liger_models", "before", mode, "cuda", *MODELS)) == {}


def test_status() -> None:
    status = liger_aot.liger.status()
    of_chunks = {name: op for name, op in status.ours.items() if name.startswith(chunked.PREFIX)}
    assert of_chunks == {f"{chunked.PREFIX}{name}": op for name, (_, op) in chunked.NAMES.items()}
    plain = {name.rpartition(".")[2]: op for name, op in status.ours.items() if name not in of_chunks}
    chosen_from = {
        f"LigerFusedLinearScaledCrossEntropy{tp}Function": "fused_linear_log_probs" for tp in ("", "TP")
    }
    named = {name: op for name, (_, op) in COVERED.items() if not name.startswith("_")}
    assert plain == named | chosen_from
    assert set(status.ours.values()) <= {*liger_aot.ops(), "torch"}
    assert {"kl_div.kldiv_forward_triton", "mlp.gemm_swiglu"} <= set(status.jit)  # of submodules
    assert status.inductor == ()
    assert "LigerTiledMLPFunction" in status.others
    assert not set(status.ours) & {*status.jit, *status.others}
    assert status.languages == {} and status.without_pack == ()
    lines = str(status).splitlines()
    assert lines[0] == f"liger_kernel {status.version}"
    assert any(line.split() == ["LigerRMSNormFunction", "liger-aot", "rmsnorm"] for line in lines)
    assert any(line.split() == ["experimental.mm_int8int2.matmul", "torch"] for line in lines)
    line = ["chunked_loss.LigerFusedLinearDPOFunction", "liger-aot", "fused_linear_preference_loss"]
    assert any(found.split() == line for found in lines)


def test_status_of_other_languages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGER_KERNEL_IMPL_ROPE", "nvidia-cutedsl")
    status = liger_aot.liger.status()
    assert status.languages == {"rope": "nvidia-cutedsl"}
    assert "dispatch('rope')" in str(status)


def test_status_of_names_imported_before() -> None:
    import liger_kernel.ops

    liger_aot.liger.uninstall()
    module = ModuleType("a_users_module")
    module.Softmax = liger_kernel.ops.LigerSoftmaxFunction  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    try:
        liger_aot.liger.install()
        assert liger_aot.liger.status().elsewhere == ("a_users_module.Softmax",)
    finally:
        del sys.modules[module.__name__]


class Kernel:
    """What Triton's launches look like to ``watch_launches``."""

    __module__ = "liger_kernel.ops.grpo_loss"
    __name__ = "_grpo_loss_fwd_kernel"

    def run(self, *args: Any, **kwargs: Any) -> str:
        return "launched"


def test_the_first_launch_that_compiles_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.jit import JITFunction

    liger_aot.liger.uninstall()
    monkeypatch.setattr(JITFunction, "run", Kernel.run)
    monkeypatch.delenv("LIGER_AOT_JIT", raising=False)
    liger_aot.liger.install()
    launch = JITFunction.run
    with pytest.warns(
        LeftAlone, match=r"Triton compiles liger_kernel\.ops\.grpo_loss\._grpo_loss_fwd_kernel: no op"
    ):
        assert launch(Kernel()) == "launched"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert launch(Kernel()) == "launched"  # said once
        other = Kernel()
        other.__module__ = "somebody"
        monkeypatch.setenv("LIGER_AOT_JIT", "error")
        assert launch(other) == "launched"
    with pytest.raises(PatchError, match=r"would compile liger_kernel.*LIGER_AOT_JIT=error forbids it"):
        launch(Kernel())
    monkeypatch.setenv("LIGER_AOT_JIT", "never")
    with pytest.raises(ArgumentError, match="LIGER_AOT_JIT must be warn or error, got 'never'"):
        launch(Kernel())
    liger_aot.liger.uninstall()
    assert JITFunction.run is Kernel.run


def test_a_gpu_without_a_pack_keeps_ligers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is needed: the first tensor counts as being on one."""
    from liger_aot.liger import fallback

    class Own:
        @staticmethod
        def apply(x: Any, scale: float = 1.0) -> Any:
            return "theirs", x, scale

    def ours(x: Any, scale: float = 1.0) -> Any:
        raise PackNotFound("no installed pack serves it")

    call = fallback.served("Own", ours)
    monkeypatch.setitem(fallback.theirs, "Own", Own)
    monkeypatch.setattr(fallback, "_gpu_of", lambda args: args[0] if args[0] >= 0 else None)
    monkeypatch.setattr(fallback, "unserved", set())
    with pytest.warns(LeftAlone, match="Liger's own functions run on cuda:1, .*no installed pack serves it"):
        assert call(1, scale=2.0) == ("theirs", 1, 2.0)
    assert liger_aot.liger.status().without_pack == ("cuda:1",)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert call(1) == ("theirs", 1, 1.0) and call(2) == ("theirs", 2, 1.0)  # said once
    with pytest.raises(PackNotFound):
        call(-1)  # a tensor on the CPU: another error is behind it


@pytest.mark.parametrize("served", [True, False])
def test_a_compiled_graph_knows_whether_there_is_a_pack(
    monkeypatch: pytest.MonkeyPatch, served: bool
) -> None:
    """It has nothing to fall back on once it runs. No GPU is needed: the tensor counts as being on one."""
    from liger_aot.liger import fallback

    class Own:
        @staticmethod
        def apply(x: torch.Tensor) -> torch.Tensor:
            return x * 2

    def pack_for(device: str) -> None:
        if not served:
            raise PackNotFound("no installed pack serves it")

    monkeypatch.setitem(fallback.theirs, "Own", Own)
    monkeypatch.setattr(fallback, "_gpu_of", lambda args: 0)
    monkeypatch.setattr(fallback, "gpu", lambda index: SimpleNamespace(device="a device"))
    monkeypatch.setattr(fallback, "pack_for", pack_for)
    monkeypatch.setattr(fallback, "unserved", set())
    call = fallback.served("Own", lambda x: x * 3)
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got = compiled(torch.ones(2))
    assert got.tolist() == ([3.0, 3.0] if served else [2.0, 2.0])
    assert sum(issubclass(w.category, LeftAlone) for w in said) == (0 if served else 1)
    torch._dynamo.reset()


def test_one_graph_of_a_llama() -> None:
    """Liger's dispatcher is hidden from torch.compile: ours is not."""
    pytest.importorskip("transformers", reason="Transformers is not installed: make venv installs it")
    code = """
import torch, liger_aot.liger
from liger_kernel.transformers import apply_liger_kernel_to_llama
from tests.models.transformers_cases import batch, step, tiny
model, inputs = tiny("llama"), batch("llama")
plain = step(model, inputs)
apply_liger_kernel_to_llama(model=model)
model.train().zero_grad()
output = torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs)
output.loss.backward()
torch.testing.assert_close(output.loss.detach(), plain.loss)
for name, p in model.named_parameters():
    torch.testing.assert_close(p.grad, plain.gradients[name], msg=name)
explained = torch._dynamo.explain(model)(**inputs)
print(explained.graph_count, explained.graph_break_count)
"""
    assert run("-c", code) == "1 0"


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
