"""``experts_implementation="liger_aot"``: what reaches the op, and what runs as Transformers' grouped product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.models import experts
from liger_aot.models.attention import NAME
from tests.models.transformers_cases import assert_close, batch, step, tiny, transformers


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The shapes that ``fused_moe`` was given."""
    seen: list[tuple[Any, ...]] = []
    op = liger_aot.load("fused_moe")

    def recorded(*tensors: Tensor) -> Tensor:
        seen.append(tuple(tuple(t.shape) for t in tensors))
        y: Tensor = op(*tensors)
        return y

    monkeypatch.setattr(experts, "load", lambda name: recorded)
    return seen


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_as_grouped_mm(name: str, calls: list[tuple[Any, ...]]) -> None:
    """A step gives the same loss and gradients."""
    inputs = batch(name)
    want = step(tiny(name), inputs)
    assert not calls
    liger_aot.register_experts()
    model = tiny(name)
    model.set_experts_implementation(NAME)
    assert_close(step(model, inputs), want)
    assert len(calls) >= 2 and all(len(shapes) == 5 and shapes[0][0] == shapes[3][0] for shapes in calls)


def test_apply_sets_it_and_restore_takes_it_back(calls: list[tuple[Any, ...]]) -> None:
    inputs, model = batch("mixtral"), tiny("mixtral")
    before = model.config._experts_implementation
    assert before == experts.OTHERS
    want = step(model, inputs)
    liger_aot.apply(model)
    assert_close(step(model, inputs), want)
    assert model.config._experts_implementation == NAME and calls
    liger_aot.restore(model)
    assert model.config._experts_implementation == before
    count = len(calls)
    step(model, inputs)
    assert len(calls) == count


def test_an_implementation_that_was_asked_for_stays() -> None:
    model = tiny("mixtral")
    model.set_experts_implementation("eager")
    liger_aot.apply(model)
    assert model.config._experts_implementation == "eager"


def experts_module(**different: Any) -> Any:
    config = transformers.MixtralConfig(
        hidden_size=16, intermediate_size=24, num_local_experts=4, hidden_act="silu"
    )
    config._experts_implementation = NAME
    liger_aot.register_experts()
    module = transformers.models.mixtral.modeling_mixtral.MixtralExperts(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    for name, value in different.items():
        setattr(module, name, value)
    return module


def routed() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(5, 16), torch.tensor([[0, 1], [3, 2], [1, 0], [2, 2], [0, 3]]), torch.rand(5, 2)


def test_indices_of_another_rank(calls: list[tuple[Any, ...]]) -> None:
    """One past the last expert adds nothing, as in Transformers' expert parallelism."""
    module, (x, indices, weights) = experts_module(), routed()
    other = indices.clone()
    other[:, 1] = 4
    y = module(x, other, weights)
    torch.testing.assert_close(y, module(x, indices[:, :1], weights[:, :1]))
    assert len(calls) == 2


@pytest.mark.parametrize(
    "different",
    [{"act_fn": torch.nn.GELU()}, {"is_concatenated": False}],
    ids=["another activation", "interleaved"],
)
def test_what_the_op_is_not_for(different: dict[str, Any], calls: list[tuple[Any, ...]]) -> None:
    """It runs as ``grouped_mm``."""
    module = experts_module(**different)
    x = routed()
    y = module(*x)
    torch.testing.assert_close(
        y, transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS[experts.OTHERS](module, *x)
    )
    assert not calls


def test_autocast_and_other_dtypes(calls: list[tuple[Any, ...]]) -> None:
    module, (x, indices, weights) = experts_module(), routed()
    with torch.autocast("cpu", torch.bfloat16):
        module(x, indices, weights)
    assert not calls
    module.to(torch.bfloat16)(x.bfloat16(), indices, weights.bfloat16())
    assert len(calls) == 1
