"""Layers for Hugging Face's ``kernels`` in Transformers' own modules."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="Transformers is not installed: make venv installs it")

from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.qwen3_5 import modeling_qwen3_5

import liger_aot
from liger_aot import kernels
from tests.harness.children import ROOT, environment


@pytest.mark.parametrize("layer", kernels.LAYERS.values(), ids=lambda layer: layer.__name__)
def test_layers_have_no_state(layer: type[nn.Module]) -> None:
    """As ``kernels`` demands it of what it puts into others' modules."""
    assert layer.__init__ is nn.Module.__init__
    members = {name for name, _ in inspect.getmembers(layer)} - {
        name for name, _ in inspect.getmembers(nn.Module)
    }
    assert members == {"has_backward", "can_torch_compile"}


@pytest.mark.parametrize(
    ("layer", "cls"),
    [
        (kernels.layers.RMSNorm, modeling_llama.LlamaRMSNorm),
        (kernels.layers.RMSNormZeroCentered, modeling_qwen3_5.Qwen3_5RMSNorm),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_norms(layer: type[nn.Module], cls: type[nn.Module], compiled: bool) -> None:
    torch.manual_seed(0)
    module = cls(16, eps=1e-3)
    nn.init.normal_(module.weight)
    x = torch.randn(3, 5, 16, requires_grad=True)
    want = module(x)
    gradients = torch.autograd.grad(want.square().sum(), (x, module.weight))
    module.forward = MethodType(layer.forward, module)  # as kernels does it
    call = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    got = call(x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got.square().sum(), (x, module.weight)), gradients)


@pytest.mark.parametrize("of", [modeling_llama, modeling_gpt_oss])
def test_rotary(of: Any) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16)
    angles = torch.randn(1, 5, 8)
    angles = angles if of is modeling_gpt_oss else torch.cat((angles, angles), -1)
    tables = angles.cos(), angles.sin()
    layer = kernels.layers.RotaryPosEmb()
    torch.testing.assert_close(layer(q, k, *tables), of.apply_rotary_pos_emb(q, k, *tables))
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    torch.testing.assert_close(layer(q, k, *tables, 2), of.apply_rotary_pos_emb(q, k, *tables, 2))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("layer", "activation"),
    [
        (kernels.layers.SwiGLUMLP, "silu"),
        (kernels.layers.GeGLUMLP, "gelu_pytorch_tanh"),
        (kernels.layers.GeGLUMLP, "gelu"),
    ],
)
def test_mlps(layer: type[nn.Module], activation: str, compiled: bool) -> None:
    torch.manual_seed(0)
    config = modeling_llama.LlamaConfig(
        hidden_size=16, num_attention_heads=2, intermediate_size=24, hidden_act=activation
    )
    module, x = modeling_llama.LlamaMLP(config), torch.randn(3, 5, 16, requires_grad=True)
    inputs = (x, *module.parameters())
    want = module(x)
    gradients = torch.autograd.grad(want.square().sum(), inputs)
    module.forward = MethodType(layer.forward, module)
    got = (torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module)(x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got.square().sum(), inputs), gradients)


def test_the_loss() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 7, 30, requires_grad=True), torch.randint(30, (2, 7))
    labels[0, 2:4] = -100
    ours = kernels.layers.ForCausalLMLoss()
    for options in ({}, {"num_items_in_batch": torch.tensor(9)}, {"shift_labels": labels, "labels": None}):
        given: dict[str, Any] = {"logits": logits, "labels": labels, "vocab_size": 30} | options
        losses = [loss(**given) for loss in (ours, ForCausalLMLoss)]
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in losses))
    with pytest.raises(liger_aot.errors.ArgumentError, match="labels or shift_labels must be given"):
        ours(logits, None, 30)


def test_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says which versions Transformers takes."""
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(liger_aot.errors.PatchError, match=r"pip install 'kernels>=[\d.]+,<[\d.]+'"):
        kernels.register()


def run(code: str, **variables: str) -> Any:
    """What a process of its own prints last."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment() | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@DEVICES
def test_a_model_with_kernels(device: str) -> None:
    """A process of its own: the mapping is Transformers' and the process's."""
    pytest.importorskip("kernels", reason="kernels is not installed: pip install kernels")
    ours, graphs = run(
        f"device = {device!r}"
        """
import json, torch, liger_aot.kernels
from tests.models.transformers_cases import assert_close, batch, step, tiny
from transformers.integrations.hub_kernels import get_kernel_mapping_transformers
get_kernel_mapping_transformers().pop("SiLU")  # for CUDA it would come from the Hub
liger_aot.kernels.register(devices=(device,))
model, inputs = tiny("llama").to(device), {k: v.to(device) for k, v in batch("llama").items()}
plain = step(model, inputs)
model.train().set_use_kernels(True)
assert_close(step(model, inputs), plain)
from transformers.models.llama import modeling_llama
modules = [*model.named_modules(), ("rotary", modeling_llama.apply_rotary_pos_emb)]
ours = [n for n, m in modules if "liger_aot" in getattr(m.forward, "__module__", "")]
explained = torch._dynamo.explain(model)(**inputs)
print(json.dumps([ours, explained.graph_count]))
"""
    )
    assert len([name for name in ours if name.endswith("norm")]) == 5
    assert "rotary" in ours and graphs == 1


@DEVICES
def test_a_local_repository(device: str) -> None:
    """By ``kernels``' own loader, as KernelConfig(use_local_kernel=True) asks it, in training and inference."""
    pytest.importorskip("kernels", reason="kernels is not installed: pip install kernels")
    found = run(
        f"device = {device!r}"
        """
import json, torch, liger_aot.kernels
from pathlib import Path
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping
from tests.models.transformers_cases import assert_close, batch, step, tiny
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.integrations import use_kernel_forward_from_hub
use_kernel_forward_from_hub("SwiGLUMLP")(LlamaMLP)
ours = []
for mode in (Mode.TRAINING, Mode.INFERENCE, Mode.TRAINING | Mode.TORCH_COMPILE):
    model, inputs = tiny("llama").to(device), {k: v.to(device) for k, v in batch("llama").items()}
    plain = step(model, inputs)
    mapping = {
        name: {device: LocalLayerRepository(Path(liger_aot.kernels.PATH), layer_name=layer)}
        for name, layer in (("RMSNorm", "LigerRMSNorm"), ("SwiGLUMLP", "LigerSwiGLUMLP"))
    }
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(model, mode=mode, device=device)
    assert_close(step(model, inputs), plain)
    ours.append(sum("liger_aot" in m.forward.__module__ for m in model.modules()))
print(json.dumps(ours))
"""
    )
    assert found == [5 + 2] * 3  # norms and MLPs of two layers


def test_metadata() -> None:
    metadata = json.loads((Path(kernels.PATH) / "metadata.json").read_text())
    assert set(metadata) == {"name", "id", "version", "license", "python-depends", "backend"}


def test_in_the_place_of_transformers_repositories() -> None:
    """LOCAL_KERNELS is enough for ``use_kernels=True``: what Transformers' mapping names for CUDA is here, but for a
    linear layer. ``kernels`` asks the Hub for a version first, which it has not to find here."""
    pytest.importorskip("kernels", reason="kernels is not installed: pip install kernels")
    repositories = ("liger-kernels", "rotary")
    found = run(
        """
import json
from kernels.layer import layer
from transformers.integrations.hub_kernels import get_kernel_mapping_transformers
layer.select_revision_or_version = lambda repo_id, revision, version: "main"
modules = {}
for name, devices in get_kernel_mapping_transformers().items():
    at = devices.get("cuda", {})
    for repository in at.values() if isinstance(at, dict) else (at,):
        if "liger-kernels" in str(repository) or "community/rotary" in str(repository):
            try:
                modules[name] = repository.load().__module__
            except ValueError as error:
                modules[name] = str(error)
print(json.dumps(modules))
""",
        LOCAL_KERNELS=":".join(f"kernels-community/{name}={kernels.PATH}" for name in repositories),
    )
    assert "not found" in found.pop("Linear")
    assert set(found.values()) == {"liger_aot.kernels.layers"}
    assert {"RMSNorm", "SwiGLUMLP", "GeGLUMLP", "rotary_pos_emb", "ForCausalLMLoss"} <= set(found)


def test_in_the_place_of_flash_attn() -> None:
    """Transformers takes flash-attn's functions from a local repository, and with them pads, packs and generates."""
    pytest.importorskip("kernels", reason="kernels is not installed: pip install kernels")
    repositories = ("flash-attn2", "vllm-flash-attn3")  # gpt-oss asks for the latter
    found = run(
        """
import json, torch
from tests.models.transformers_cases import tiny
ids = torch.randint(3, 110, (2, 9), generator=torch.Generator().manual_seed(0))
mask = torch.ones_like(ids)
mask[0, :4] = 0
positions = torch.cat((torch.arange(4), torch.arange(5)))[None]
same = []
for name in ("llama", "mistral", "gpt_oss"):
    models = [tiny(name, attn_implementation=a).eval() for a in ("eager", "flash_attention_2")]
    tokens = [m.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False) for m in models]
    same.append(torch.equal(*tokens))
    parts = torch.cat([models[0](part).logits for part in ids[:1].split((4, 5), 1)], 1)
    packed = models[1](ids[:1], position_ids=positions, use_cache=False).logits
    same.append(torch.allclose(packed, parts, atol=1e-5))
from transformers import modeling_flash_attention_utils as used
print(json.dumps([same, used._flash_varlen_fn.__module__]))
""",
        LOCAL_KERNELS=":".join(f"kernels-community/{name}={kernels.PATH}" for name in repositories),
    )
    assert found == [[True] * 6, "liger_aot.flash_attn"]
