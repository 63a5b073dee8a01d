"""Tensor-parallel and sequence-parallel plans of Transformers, and FSDP2, under ``apply``, ``patch`` and
``liger_aot.liger``, on two processes: what one process with the plain model finds."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import liger_aot
from liger_aot.errors import ArgumentTypeError, LeftAlone
from tests.harness.process_groups import in_group
from tests.models.transformers_cases import batch, tiny

pytest.importorskip(
    "transformers.distributed.tensor_parallel", reason="this Transformers has no plans on DTensors"
)


def parallel(model: Any, device: torch.device, more: dict[str, str]) -> Any:
    """``model`` over both processes by its own plan and what is more."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    model.tp_plan = {**model.tp_plan, **more}
    return apply_tensor_parallelism(model, init_device_mesh(device.type, (2,), mesh_dim_names=("tp",)))


def whole(t: torch.Tensor | None) -> torch.Tensor | None:
    found: torch.Tensor | None = t.full_tensor() if hasattr(t, "full_tensor") else t
    return found


def assert_step(model: Any, like: Any, device: torch.device, name: str) -> None:
    """Loss, logits and gradients."""
    inputs = {k: v.to(device) for k, v in batch(name).items()}
    losses = []
    for one in (model, like):
        out = one.train()(**inputs)
        out.loss.backward()
        losses.append(out.loss.detach())
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    for (n, a), (_, b) in zip(model.named_parameters(), like.named_parameters(), strict=True):
        got, want = whole(a.grad), whole(b.grad)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5, msg=n)
    with torch.no_grad():
        logits = [one.eval()(inputs["input_ids"]).logits for one in (model, like)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def tensor_parallel(rank: int, device: torch.device, names: list[str]) -> None:
    for name in names:
        model = parallel(tiny(name).to(device), device, {})
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            liger_aot.apply(model)
        assert not [str(w.message) for w in found if w.category is LeftAlone]
        inputs = {k: v.to(device) for k, v in batch(name).items()}
        assert model.train()(**inputs).logits is None  # the loss is of each rank's part of the vocabulary
        accuracy = model(**inputs, return_token_accuracy=True).token_accuracy  # of all logits
        assert 0 <= accuracy <= 1
        assert_step(model, tiny(name).to(device), device, name)
        own = vars(model.model.layers[0].input_layernorm)["forward"]
        assert own.__module__.startswith("liger_aot.")


SEQUENCE = {"model.layers.*.input_layernorm": "sequence_parallel", "model.norm": "sequence_parallel"}


def sequence_parallel(rank: int, device: torch.device) -> None:
    """Transformers gives such norms' forwards DTensors. It takes those that it finds: patch first."""
    like = parallel(tiny("llama").to(device), device, SEQUENCE)
    calls = []
    liger_aot.patch("llama")
    from liger_aot.models import modules, shards

    def counted(*arguments: Any) -> Any:
        y = shards.by_shards(*arguments)
        calls.append(y is not None)
        return y

    modules.by_shards = counted  # type: ignore[assignment]
    model = parallel(tiny("llama").to(device), device, SEQUENCE)
    liger_aot.restore("llama")
    assert_step(model, like, device, "llama")
    assert len(calls) == 2 * 3 and all(calls)  # two forwards with two layers' and the last norm
    left = parallel(tiny("llama").to(device), device, SEQUENCE)
    with pytest.warns(LeftAlone, match="has a forward of transformers.distributed.tensor_parallel"):
        liger_aot.apply(left)


def liger(rank: int, device: torch.device) -> None:
    importlib.import_module("liger_aot.liger")
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    inputs = {k: v.to(device) for k, v in batch("llama").items()}
    model = parallel(tiny("llama").to(device), device, {})
    _apply_liger_kernel_to_instance(model=model)
    with pytest.raises(ArgumentTypeError, match="vocab_parallel_linear_cross_entropy"):
        model.train()(**inputs)
    model = parallel(tiny("llama").to(device), device, {})
    _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False)
    assert_step(model, tiny("llama").to(device), device, "llama")


def fully_sharded(rank: int, device: torch.device) -> None:
    """Three steps of FSDP2 with Liger's modules, in which a unit's forward finds its parameters whole."""
    importlib.import_module("liger_aot.liger")
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from torch.distributed.fsdp import fully_shard

    alone, model = tiny("llama").to(device), tiny("llama").to(device)
    _apply_liger_kernel_to_instance(model=model)
    mesh = init_device_mesh(device.type, (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ids = batch("llama")["input_ids"].to(device)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        alone.train()(input_ids=ids, labels=ids).loss.backward()
        own = ids.tensor_split(2)[rank]
        model.train()(input_ids=own, labels=own).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    for (name, a), b in zip(alone.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(whole(b), a, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("names", [["llama", "qwen3"], ["qwen3_moe", "deepseek_v3"]], ids="-".join)
def test_tensor_parallel(names: list[str]) -> None:
    in_group(tensor_parallel, 2, names)


@pytest.mark.slow
def test_sequence_parallel_norms() -> None:
    in_group(sequence_parallel, 2)


@pytest.mark.slow
@pytest.mark.parametrize("work", [liger, fully_sharded])
def test_with_liger(work: Any) -> None:
    """Under tensor parallelism its fused loss is refused, as a sharded head has not all of the vocabulary."""
    pytest.importorskip("liger_kernel", reason="Liger-Kernel is not installed: make venv installs it")
    in_group(work, 2)


TWO = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs two GPUs, there are {torch.cuda.device_count()}"
)


@TWO
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("work", "arguments"),
    [
        (tensor_parallel, (["llama", "qwen3", "qwen3_moe", "deepseek_v3"],)),
        (sequence_parallel, ()),
        (liger, ()),
        (fully_sharded, ()),
    ],
)
def test_two_gpus(work: Any, arguments: tuple[Any, ...]) -> None:
    in_group(work, 2, *arguments, backend="nccl")
