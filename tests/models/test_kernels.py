"""Layers for Hugging Face's ``kernels`` in Transformers' own modules."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="Transformers is not installed: make venv installs it")

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
        (kernels.RMSNorm, modeling_llama.LlamaRMSNorm),
        (kernels.RMSNormZeroCentered, modeling_qwen3_5.Qwen3_5RMSNorm),
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
    layer = kernels.RotaryPosEmb()
    torch.testing.assert_close(layer(q, k, *tables), of.apply_rotary_pos_emb(q, k, *tables))
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    torch.testing.assert_close(layer(q, k, *tables, 2), of.apply_rotary_pos_emb(q, k, *tables, 2))


def test_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(liger_aot.errors.PatchError, match="pip install kernels"):
        kernels.register()


def test_a_model_with_kernels() -> None:
    """A process of its own: the mapping is Transformers' and the process's."""
    pytest.importorskip("kernels", reason="kernels is not installed: pip install kernels")
    code = """
import json, torch, liger_aot.kernels
from tests.models.transformers_cases import assert_close, batch, step, tiny
liger_aot.kernels.register(devices=("cpu",))
model, inputs = tiny("llama"), batch("llama")
plain = step(model, inputs)
model.train().set_use_kernels(True)
assert_close(step(model, inputs), plain)
from transformers.models.llama import modeling_llama
modules = [*model.named_modules(), ("rotary", modeling_llama.apply_rotary_pos_emb)]
ours = [n for n, m in modules if "liger_aot" in getattr(m.forward, "__module__", "")]
explained = torch._dynamo.explain(model)(**inputs)
print(json.dumps([ours, explained.graph_count]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ours, graphs = json.loads(done.stdout.splitlines()[-1])
    assert len([name for name in ours if name.endswith("norm")]) == 5
    assert "rotary" in ours and graphs == 1
