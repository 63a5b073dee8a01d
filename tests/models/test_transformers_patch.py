"""``liger_aot.patch``: all models of a family."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import pytest
import torch

import liger_aot
from liger_aot.errors import PatchError
from liger_aot.models import FAMILIES
from tests.models.transformers_cases import (
    CONFIGS,
    assert_close,
    assert_same,
    batch,
    changed_modules,
    step,
    tiny,
)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    for name in FAMILIES:
        liger_aot.restore(name)


# A norm of each kind, experts, two towers; the others are as ``apply``'s tests have them.
QUICK = ("llama", "gemma2", "mixtral", "nemotron", "qwen2_5_vl")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in CONFIGS]
)
def test_same_numbers_and_back(name: str) -> None:
    family = name.removesuffix("_text")
    before, inputs = tiny(name), batch(name)
    module = import_module(FAMILIES[family].module)
    contents = {k: (v, getattr(v, "forward", None)) for k, v in vars(module).items()}
    plain = step(before, inputs)
    liger_aot.patch(family)
    for model in (before, tiny(name)):  # made before and after
        ours = step(model, inputs)
        assert_close(ours, plain)
        assert ours.output.logits is None and changed_modules(model) == []
    liger_aot.restore(family)
    assert {k: (v, getattr(v, "forward", None)) for k, v in vars(module).items()} == contents
    assert_same(step(before, inputs), plain)


def test_twice_with_other_parts() -> None:
    from transformers.models.llama import modeling_llama as llama

    norm, mlp = llama.LlamaRMSNorm.forward, llama.LlamaMLP.forward
    liger_aot.patch("llama")
    liger_aot.patch("llama", mlp=False)
    assert llama.LlamaRMSNorm.forward is not norm and llama.LlamaMLP.forward is mlp
    liger_aot.restore("llama")
    assert llama.LlamaRMSNorm.forward is norm


def test_names_of_families() -> None:
    liger_aot.patch("Qwen2.5")
    with pytest.raises(PatchError, match="patched already"):
        liger_aot.apply(tiny("qwen2"))
    liger_aot.restore("qwen2")
    liger_aot.apply(tiny("qwen2"))


def test_torchs_layer_norm_is_left_to_others() -> None:
    from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen

    plain = torch.nn.LayerNorm.forward
    liger_aot.patch("qwen2_vl")
    assert torch.nn.LayerNorm.forward is plain and qwen.LayerNorm is not torch.nn.LayerNorm
    assert isinstance(tiny("qwen2_vl").model.visual.blocks[0].norm1, torch.nn.LayerNorm)
    liger_aot.restore("qwen2_vl")
    assert qwen.LayerNorm is torch.nn.LayerNorm


def test_one_family_of_two() -> None:
    other, inputs = tiny("mistral"), batch("mistral")
    plain = step(other, inputs)
    liger_aot.patch("llama")
    assert_same(step(other, inputs), plain)


def test_an_activation_without_an_op_runs_as_before() -> None:
    model, inputs = tiny("llama", hidden_act="mish"), batch("llama")
    plain = step(model, inputs)
    liger_aot.patch("llama")
    assert_close(step(model, inputs), plain)
