"""Tensor-parallel and sequence-parallel plans of Transformers, FSDP2 and DDP, under ``apply``, ``patch`` and
``liger_aot.liger``, on two processes: what one process with the plain model finds. In float32 to what its sums keep, in
bfloat16 as near to float32 as the plain model's."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import liger_aot
from liger_aot.errors import ArgumentTypeError, LeftAlone
from tests.harness.process_groups import in_group
from tests.models.transformers_cases import batch, sized, tiny

pytest.importorskip(
    "transformers.distributed.tensor_parallel", reason="this Transformers has no plans on DTensors"
)


def parallel(model: Any, device: torch.device, more: dict[str, str]) -> Any:
    """``model`` over both processes by its own plan and what is more."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    model.tp_plan = {**model.tp_plan, **more}
    return apply_tensor_parallelism(model, init_device_mesh(device.type, (2,), mesh_dim_names=("tp",)))


def whole(t: torch.Tensor | None) -> torch.Tensor | None:
    """What both processes hold together. Of several matrices in one (an expert's gate and up) each is split by itself,
    which torch 2.11 can't put together again: "unable to be interpreted into a corresponding shard_order"."""
    if not isinstance(t, DTensor):
        return t
    (placement,) = t.placements
    matrices = getattr(placement, "split_factor", 1)
    if matrices == 1:
        found: torch.Tensor = t.full_tensor()
        return found
    local = t.to_local().contiguous()
    shards = [torch.empty_like(local) for _ in range(t.device_mesh.size())]
    dist.all_gather(shards, local, group=t.device_mesh.get_group())
    pieces = [shard.chunk(matrices, placement.dim) for shard in shards]
    return torch.cat([of_rank[i] for i in range(matrices) for of_rank in pieces], placement.dim)


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


# ---- bfloat16 ----

# Of gradients' errors, ours to the plain model's. What two ranks add up was rounded in each of them, by errors whose
# squares add up to those of one rounding, and is rounded again: sqrt(2). Other orders of sums take 1.1.
OF_ALL = 1.1 * 2**0.5
# Of one parameter's, which may follow few roundings. A gradient that one rank lacks is off by more than half of itself;
# the plain model's are off by 1/16 at most.
OF_ONE = 4.0
SIZES = {"vocab_size": 512, "intermediate_size": 512}
# Each token has all experts: no rounding decides between two. Liger's patch wants experts in every layer.
OF_EXPERTS = {
    "moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 4, "mlp_only_layers": [],
}  # fmt: skip


def models(name: str, device: torch.device) -> tuple[Any, Any, Any]:
    """(ours to be, plain, exact) of the same weights; the last in float32."""
    config = SIZES | (OF_EXPERTS if "moe" in name else {})
    plain = sized(name, **config).to(device)
    return copy.deepcopy(plain), plain, copy.deepcopy(plain).float()


Found = tuple[float, dict[str, torch.Tensor]]


def found_by(run: Any, model: Any, inputs: dict[str, torch.Tensor], averaged: bool = False) -> Found:
    """Loss and whole gradients of ``model`` by a call of ``run``; the loss is ``averaged`` over ranks."""
    loss = run.train()(**inputs).loss
    loss.backward()
    loss = loss.detach().float()
    if averaged:
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    gradients = {}
    for name, p in model.named_parameters():
        gradient = whole(p.grad)
        assert gradient is not None, name
        gradients[name] = gradient.double()
    return float(loss), gradients


def assert_as_near(ours: Found, plain: Found, exact: Found) -> None:
    """To float32, as the plain model's loss and gradients are in bfloat16 without ranks."""
    assert abs(ours[0] - exact[0]) <= 2**-8 * exact[0]
    off, whose = {}, {"ours": ours[1], "plain": plain[1]}
    for who, gradients in whose.items():
        assert gradients.keys() == exact[1].keys()
        off[who] = torch.stack([(gradients[name] - g).norm() for name, g in exact[1].items()])
    size = torch.stack([g.norm() for g in exact[1].values()])
    assert (size > 0).all() and (off["plain"] <= size / 16).all(), dict(
        zip(exact[1], (off["plain"] / size).tolist(), strict=True)
    )
    ratios = dict(zip(exact[1], (off["ours"] / off["plain"]).tolist(), strict=True))
    assert max(ratios.values()) <= OF_ONE, ratios
    assert float(off["ours"].norm()) <= OF_ALL * float(off["plain"].norm()), ratios


def by_apply(model: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", LeftAlone)
        return liger_aot.apply(model, attention=True)


def by_liger(model: Any, **options: bool) -> Any:
    importlib.import_module("liger_aot.liger")
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model, **options)
    return model


def by_liger_with_logits(model: Any) -> Any:
    """Its fused loss is refused where the head is sharded: see ``liger``."""
    return by_liger(model, fused_linear_cross_entropy=False)


def tensor_parallel_bf16(
    rank: int, device: torch.device, adopt: Callable[[Any], Any], names: list[str]
) -> None:
    for name in names:
        ours, plain, exact = models(name, device)
        if adopt is by_apply:
            ours = adopt(parallel(ours, device, {}))
        else:  # first, as where a model is loaded after Liger's patch, which would take the plan off the experts
            ours = parallel(adopt(ours), device, {})
        inputs = {k: v.to(device) for k, v in batch(name).items()}
        assert_as_near(*(found_by(model, model, inputs) for model in (ours, plain, exact)))


def sequence_parallel_bf16(rank: int, device: torch.device) -> None:
    """Beside plain models with the same plan: it has each rank's rows in the gradients of norms."""
    ours, plain, exact = models("llama", device)
    plain, exact = (parallel(model, device, SEQUENCE) for model in (plain, exact))
    liger_aot.patch("llama")
    ours = parallel(ours, device, SEQUENCE)
    liger_aot.restore("llama")
    inputs = {k: v.to(device) for k, v in batch("llama").items()}
    assert_as_near(*(found_by(model, model, inputs) for model in (ours, plain, exact)))


def data_parallel_bf16(
    rank: int, device: torch.device, adopt: Callable[[Any], Any], names: list[str]
) -> None:
    """DDP of bfloat16 parameters; FSDP2 of float32 ones, with bfloat16 ones gathered for a unit's forward."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name in names:
        ours, plain, exact = models(name, device)
        wide = copy.deepcopy(exact)
        ids = batch(name)["input_ids"].to(device)
        inputs = {"input_ids": ids, "labels": ids}
        own = {key: t.tensor_split(2)[rank] for key, t in inputs.items()}
        expected = [found_by(model, model, inputs) for model in (plain, exact)]
        adopt(ours)
        assert_as_near(
            found_by(nn.parallel.DistributedDataParallel(ours), ours, own, averaged=True), *expected
        )
        adopt(wide)
        for layer in wide.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(wide, mesh=mesh, mp_policy=policy)
        assert_as_near(found_by(wide, wide, own, averaged=True), *expected)


NAMES = ["llama", "qwen3", "qwen3_moe"]
BF16: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (tensor_parallel_bf16, (by_apply, NAMES)),
    (tensor_parallel_bf16, (by_liger_with_logits, NAMES)),
    (sequence_parallel_bf16, ()),
    (data_parallel_bf16, (by_apply, NAMES)),
    (data_parallel_bf16, (by_liger, NAMES)),
)
in_bf16 = pytest.mark.parametrize(
    ("work", "arguments"),
    BF16,
    ids=["-".join(getattr(part, "__name__", "") for part in (work, *rest[:1])) for work, rest in BF16],
)


def needs_liger(arguments: tuple[Any, ...]) -> None:
    if {by_liger, by_liger_with_logits} & {a for a in arguments if callable(a)}:
        pytest.importorskip("liger_kernel", reason="Liger-Kernel is not installed: make venv installs it")


@pytest.mark.slow
@in_bf16
def test_bf16(work: Any, arguments: tuple[Any, ...]) -> None:
    needs_liger(arguments)
    in_group(work, 2, *arguments)


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
    if work in (liger, fully_sharded):
        needs_liger((by_liger,))
    in_group(work, 2, *arguments, backend="nccl")


@TWO
@pytest.mark.gpu
@in_bf16
def test_bf16_on_two_gpus(work: Any, arguments: tuple[Any, ...]) -> None:
    needs_liger(arguments)
    in_group(work, 2, *arguments, backend="nccl")
