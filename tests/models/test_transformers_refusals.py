"""What ``apply`` and ``patch`` refuse and what they leave alone: never half a model."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError, LeftAlone, PatchError
from liger_aot.models import FAMILIES
from tests.models.transformers_cases import (
    assert_close,
    batch,
    changed_modules,
    replaced,
    step,
    tiny,
    transformers,
)


def assert_unchanged(model: nn.Module) -> None:
    assert changed_modules(model) == [] and "_liger_aot_record" not in vars(model)


def test_no_model() -> None:
    with pytest.raises(ArgumentTypeError, match=r"model must be a torch\.nn\.Module, got dict"):
        liger_aot.apply({})  # type: ignore[type-var]


def test_unknown_family() -> None:
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50)
    model = transformers.GPT2LMHeadModel(config)
    with pytest.raises(ArgumentError, match=r"GPT2LMHeadModel is of no family.*llama"):
        liger_aot.apply(model)
    with pytest.raises(ArgumentError, match=r"no family 'gpt2': there are .*llama"):
        liger_aot.patch("gpt2")
    assert_unchanged(model)


MOVED = [  # family, owner in its module or "" for the module, what moved away, what the error says
    ("llama", "", "LlamaRMSNorm", "there is no class LlamaRMSNorm"),
    ("llama", "", "LlamaMLP", "there is no class LlamaMLP"),
    ("llama", "", "apply_rotary_pos_emb", "there is no function apply_rotary_pos_emb"),
    ("llama", "", "LlamaAttention", "there is no class LlamaAttention"),
    ("mixtral", "MixtralExperts", "_apply_gate", "MixtralExperts has no method _apply_gate"),
]


@pytest.mark.parametrize(("family", "owner", "name", "says"), MOVED)
def test_a_name_that_moved(family: str, owner: str, name: str, says: str) -> None:
    model, inputs = tiny(family), batch(family)
    plain = step(model, inputs)
    module = import_module(FAMILIES[family].module)
    with replaced(getattr(module, owner) if owner else module, name, None):
        for change in (lambda: liger_aot.apply(model), lambda: liger_aot.patch(family)):
            with pytest.raises(PatchError, match=rf"{says}.*Nothing was changed"):
                change()
    assert_unchanged(model)
    assert torch.equal(step(model, inputs).logits, plain.logits)


def test_other_signatures() -> None:
    from transformers.models.llama import modeling_llama as llama

    def turned(q: Any, k: Any, freqs: Any) -> Any:
        return q, k

    def inline(self: Any, hidden_states: Any, **kwargs: Any) -> Any:
        return hidden_states, None

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Any) -> Any:
            return x

    cases = (
        (llama, "apply_rotary_pos_emb", turned, "doesn't take q, k, cos, sin"),
        (llama.LlamaAttention, "forward", inline, "doesn't call apply_rotary_pos_emb"),
        (llama, "LlamaRMSNorm", Norm, "LlamaRMSNorm has no variance_epsilon, weight"),
        (llama.LlamaForCausalLM, "forward", inline, "uses no lm_head and loss_function"),
    )
    for owner, name, value, says in cases:
        with replaced(owner, name, value), pytest.raises(PatchError, match=says):
            liger_aot.patch("llama")


def test_a_moved_activation() -> None:
    from transformers import activations

    from liger_aot.models import modules

    modules.gates.cache_clear()
    with replaced(activations, "SiLUActivation", None), pytest.raises(PatchError, match="SiLUActivation"):
        liger_aot.patch("llama")


def test_an_error_while_it_changes_takes_all_back() -> None:
    from liger_aot.models.record import Change, Record

    class Frozen:
        __slots__ = ()
        __dict__: dict[str, Any] = {}

    one = nn.Linear(2, 2)
    record = Record((Change(one, "forward", lambda x: x), Change(Frozen(), "forward", None)))
    with pytest.raises(AttributeError):
        record.make()
    assert "forward" not in vars(one)


class OtherNorm(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def test_modules_that_others_replaced() -> None:
    model, inputs = tiny("llama"), batch("llama")
    layer = model.model.layers[1]
    layer.input_layernorm = OtherNorm(layer.input_layernorm)
    plain = step(model, inputs)
    with pytest.warns(LeftAlone, match=r"layers\.1\.input_layernorm is .*OtherNorm, no LlamaRMSNorm"):
        liger_aot.apply(model)
    assert "model.layers.1.input_layernorm" not in changed_modules(model)
    assert "model.layers.1.post_attention_layernorm" in changed_modules(model)
    assert_close(step(model, inputs), plain)


def test_all_of_a_kind_that_others_replaced() -> None:
    model = tiny("llama")
    for layer in model.model.layers:
        layer.mlp = nn.Identity()
    with pytest.warns(LeftAlone, match="the model has no LlamaMLP"):
        liger_aot.apply(model)


def test_a_forward_of_somebody_else() -> None:
    model = tiny("llama")
    mlp = model.model.layers[0].mlp
    mlp.forward = MethodType(lambda self, x: x, mlp)
    with pytest.warns(
        LeftAlone, match=r"layers\.0\.mlp has a forward of tests\.models\.test_transformers_refusals"
    ):
        liger_aot.apply(model)
    assert mlp.forward(3) == 3
    liger_aot.restore(model)
    assert mlp.forward(3) == 3


def test_a_change_after_ours_is_left_alone() -> None:
    model = liger_aot.apply(tiny("llama"))
    mlp = model.model.layers[0].mlp
    mlp.forward = MethodType(lambda self, x: x, mlp)
    with pytest.warns(LeftAlone, match="was replaced by others since"):
        liger_aot.restore(model)
    assert mlp.forward(3) == 3
    assert not {"model.norm", "", "model.layers.1.mlp"} & set(changed_modules(model))


def test_accelerates_hooks_stay_around_ours() -> None:
    """Where accelerate has moved a module's forward to _old_forward, that is what is replaced."""
    model, inputs = tiny("llama"), batch("llama")
    plain, calls = step(model, inputs), []
    mlp = model.model.layers[0].mlp
    mlp._hf_hook, mlp._old_forward = object(), mlp.forward

    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return self._old_forward(*args, **kwargs)

    mlp.forward = MethodType(hooked, mlp)
    liger_aot.apply(model)
    assert "model.layers.0.mlp" in changed_modules(model)
    assert_close(step(model, inputs), plain)
    assert len(calls) == 2
    liger_aot.restore(model)
    assert mlp._old_forward.__func__ is type(mlp).forward


def test_unknown_activation() -> None:
    model, inputs = tiny("llama", hidden_act="mish"), batch("llama")
    plain = step(model, inputs)
    with pytest.warns(
        LeftAlone, match=r"layers\.0\.mlp has the activation .*Mish.*, for which there is no op"
    ):
        liger_aot.apply(model)
    assert_close(step(model, inputs), plain)


class QuantisedLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1.0


def test_quantised_linears() -> None:
    """In an MLP they are called; a head's weight can't be read."""
    model, inputs = tiny("llama"), batch("llama")
    for module in list(model.modules()):
        for _, child in list(module.named_children()):
            if type(child) is nn.Linear:
                child.__class__ = QuantisedLinear
    plain = step(model, inputs)
    with pytest.warns(LeftAlone, match=r"computes its loss as before: its lm_head is .*QuantisedLinear"):
        liger_aot.apply(model)
    assert "model.layers.0.mlp" in changed_modules(model)
    ours = step(model, inputs)
    assert_close(ours, plain)
    assert ours.output.logits is not None


def test_a_head_that_hooks_look_at() -> None:
    """Before apply and after: they see the logits."""
    model, inputs, seen = tiny("llama").train(), batch("llama"), []
    hook = model.lm_head.register_forward_hook(lambda _m, _i, out: seen.append(out.shape))
    with pytest.warns(LeftAlone, match="tensor-parallel or hooked"):
        liger_aot.apply(model)
    hook.remove()
    liger_aot.apply(model)
    assert model(**inputs).logits is None and seen == []
    model.lm_head.register_forward_hook(lambda _m, _i, out: seen.append(out.shape))
    assert model(**inputs).logits is not None and seen == [(2, 17, 120)]


def _tensor_parallel(rank: int, device: torch.device) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    model, inputs = tiny("llama"), batch("llama")
    plain = step(model, inputs)
    norm, head = model.model.layers[0].input_layernorm, model.lm_head
    norm.weight = nn.Parameter(distribute_tensor(norm.weight.detach(), mesh, [Replicate()]))
    head.weight = nn.Parameter(distribute_tensor(head.weight.detach(), mesh, [Shard(0)]))
    with pytest.warns(LeftAlone) as told:
        liger_aot.apply(model)
    text = str(told[0].message)
    assert "layers.0.input_layernorm has a DTensor as weight (tensor-parallel or quantised)" in text
    assert "computes its loss as before" in text
    assert not {"", "model.layers.0.input_layernorm"} & set(changed_modules(model))

    model = liger_aot.apply(tiny("llama"))  # sharded later: as it was
    norm = model.model.norm
    norm.weight = nn.Parameter(distribute_tensor(norm.weight.detach(), mesh, [Replicate()]))
    x = distribute_tensor(torch.randn(3, 64), mesh, [Replicate()])
    assert torch.equal(norm(x).to_local(), type(norm).forward(norm, x).to_local())

    for early in (False, True):  # FSDP2 before and after apply
        model = tiny("llama")
        if early:
            liger_aot.apply(model)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if not early:
            liger_aot.apply(model)
        assert {"", "model.norm", "model.layers.0.input_layernorm"} <= set(changed_modules(model))
        model.train()
        output = model(**inputs)
        output.loss.backward()
        assert output.logits is None
        torch.testing.assert_close(output.loss.detach(), plain.loss)
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad.full_tensor(), plain.gradients[name], atol=1e-5, rtol=1e-4)

    model = liger_aot.apply(tiny("llama")).train()
    parallel = nn.parallel.DistributedDataParallel(model)
    parallel(**{k: v[rank : rank + 1] for k, v in inputs.items()}).loss.backward()
    alone = liger_aot.apply(tiny("llama")).train()
    sum(alone(**{k: v[r : r + 1] for k, v in inputs.items()}).loss / 2 for r in range(2)).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, alone.get_parameter(name).grad, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_tensor_parallel_fsdp2_and_ddp() -> None:
    from tests.harness.process_groups import in_group

    in_group(_tensor_parallel, 2)


def test_without_transformers() -> None:
    code = """
import sys
sys.modules["transformers"] = None
import liger_aot
for change in (lambda: liger_aot.patch("llama"), liger_aot.register_attention):
    try:
        change()
    except liger_aot.errors.PatchError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert "transformers.models.llama.modeling_llama can't be imported" in first
    assert "attention interface" in second


def test_importing_is_cheap() -> None:
    code = """
import sys, liger_aot
assert not {"torch", "transformers", "liger_aot.models"} & set(sys.modules)
liger_aot.apply
assert "liger_aot.models" in sys.modules and "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
