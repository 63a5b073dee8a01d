"""The vocabulary-parallel losses against those of the whole vocabulary: gloo on the CPU and on one GPU, NCCL on two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from liger_aot import load
from liger_aot.errors import ArgumentError, ArgumentTypeError
from tests.conftest import built_pack
from tests.emulator.emulated_cases import AMD
from tests.harness.drivers import EmulatorDriver, bound_op
from tests.harness.op_gpu_tests import PTX, PTX_ARCH, lowered_from_ptx
from tests.harness.process_groups import in_group
from tests.ops.losses.linear_loss_cases import (
    BF16,
    FP16,
    FP32,
    Drawn,
    LinearCase,
    draw,
    formula,
    worst_linear,
)

NAMES = ("vocab_parallel_cross_entropy", "vocab_parallel_linear_cross_entropy")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"reduction": "sum"},
    {"reduction": "none", "label_smoothing": 0.1},
    {"lse_square_scale": 0.01, "softcap": 3.0},
    {"use_token_scaling": True, "ignore_index": 3},
    {"use_token_scaling": True, "softcap": 3.0, "label_smoothing": 0.2},
)
needs_two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs two GPUs, there are {torch.cuda.device_count()}"
)


def cut(vocabulary: int, world: int, even: bool) -> list[int]:
    """The first column of each rank, and the end."""
    if even:
        return [vocabulary * r // world for r in range(world + 1)]
    return [0, *(vocabulary * r // world + 1 for r in range(1, world)), vocabulary]


def everywhere_the_same(value: Tensor) -> None:
    """Every rank has the same bits."""
    value = value.detach().contiguous()
    all_of_them = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, value)
    assert all(torch.equal(value, other) for other in all_of_them)


def compare(rank: int, device: torch.device, arch: str = "") -> None:
    """Args:
    arch: whose binaries the emulator runs, or whose PTX the GPU; none is plain torch, or the GPU's own binaries.
    """
    world, gpu = dist.get_world_size(), device.type == "cuda"
    dtypes = (FP32, BF16, FP16)
    ops: Any = [load(name) for name in NAMES]
    if gpu and arch:
        ops = [lowered_from_ptx(type(op)) for op in ops]
    elif arch:
        ops = [bound_op(type(op), built_pack(arch), EmulatorDriver) for op in ops]
    for i, keywords in enumerate(OPTIONS):
        for even in (False,) if arch and not gpu else (True, False):
            # 37 columns more than a kernel's block on a GPU; shards of several sizes where they are not even
            vocabulary = world * (1040 if gpu else 20) if even else world * (1040 if gpu else 20) + 1
            case = LinearCase(
                11, 16, vocabulary, dtypes[i % 3], bias=i % 2 == 1, chunks=3, keywords=keywords,
                index=torch.int32 if i % 2 else torch.int64,
            )  # fmt: skip
            check_case(rank, device, ops, case, cut(vocabulary, world, even), even)


def check_case(
    rank: int, device: torch.device, ops: Any, case: LinearCase, firsts: list[int], even: bool
) -> None:
    drawn = draw(case, 5, "cpu")
    start, end = firsts[rank], firsts[rank + 1]
    shard: dict[str, Any] = {} if even else {"vocab_start": start, "vocabulary": case.vocabulary}
    grad = (
        torch.rand(case.rows if case.get("reduction", "mean") == "none" else (), generator=_generator()) + 0.5
    )
    exact = formula(drawn, grad)
    target = drawn.target.to(device)

    x = drawn.input.to(device).requires_grad_()
    w = drawn.weight[start:end].to(device).requires_grad_()
    b = None if drawn.bias is None else drawn.bias[start:end].to(device).requires_grad_()
    of_logits, op = ops
    widest = -(-case.vocabulary // dist.get_world_size())
    budget = -(-case.rows // case.chunks) * (-(-widest // 64) * 64) * case.dtype.itemsize
    loss, z_loss = op(x, w, target, b, chunk_bytes=budget, return_z_loss=True, **shard, **drawn.keywords)
    everywhere_the_same(loss)
    for repeat in range(2):  # the second computes all again
        x.grad = w.grad = None
        loss.backward(grad.to(device), retain_graph=not repeat)
        assert x.grad is not None and w.grad is not None
        everywhere_the_same(x.grad)
        whole = {"weight": torch.zeros(case.vocabulary, case.k, dtype=torch.float64)}
        whole["weight"][:start], whole["weight"][end:] = (
            exact.gradients["weight"][:start],
            exact.gradients["weight"][end:],
        )
        whole["weight"][start:end] = w.grad.cpu().double()
        found = {"input": x.grad.cpu(), **whole}
        # The ranks' parts of input's gradient are rounded before they are added up: one rounding more a rank.
        worst = worst_linear(case, drawn, exact, loss.cpu(), found, slack=2.0 + dist.get_world_size())
        assert max(worst.values()) <= 1, f"{case} on rank {rank}: {worst}"
    torch.testing.assert_close(z_loss.cpu().double(), exact.z_loss, rtol=0.03, atol=1e-6)

    logits = exact.logits[:, start:end].to(case.dtype).to(device).requires_grad_()
    loss = of_logits(logits, target, **shard, **drawn.keywords)
    everywhere_the_same(loss)
    worst = worst_linear(case, drawn, exact, loss.cpu(), {})
    assert worst["loss"] <= 1, f"{case} on rank {rank}: {worst}"
    for repeat in range(2):
        logits.grad = None
        loss.backward(grad.to(device), retain_graph=not repeat)
        assert logits.grad is not None and logits.grad.dtype == case.dtype
        rounded = Drawn(
            exact.logits.to(case.dtype), torch.eye(case.vocabulary), drawn.target, None, drawn.keywords
        )
        wanted = formula(rounded, grad).gradients["input"][:, start:end]
        eps = torch.finfo(case.dtype).eps
        tiny = 2.0**-24 if case.dtype == FP16 else 1e-30
        torch.testing.assert_close(
            logits.grad.cpu().double(), wanted, rtol=eps + 1e-4, atol=1e-5 * float(wanted.abs().max()) + tiny
        )


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_shards_on_the_cpu(world: int) -> None:
    in_group(compare, world)


@pytest.mark.parametrize("arch", AMD)
def test_shards_on_amd_binaries(arch: str) -> None:
    built_pack(arch)  # skips where there is none
    in_group(compare, 2, arch)


def compiled(rank: int, device: torch.device) -> None:
    """torch.compile keeps the collectives in one graph."""
    drawn = draw(LinearCase(9, 16, 40), 0, "cpu")
    half = slice(20 * rank, 20 * rank + 20)
    linear, plain = (load(f"vocab_parallel_{name}cross_entropy") for name in ("linear_", ""))
    for call in (
        lambda x, w: linear(x * 2, w, drawn.target),
        lambda x, w: plain((x * 2) @ w.t(), drawn.target, label_smoothing=0.1),
    ):
        x, w = drawn.input.detach().requires_grad_(), drawn.weight[half].detach().requires_grad_()
        torch.compiler.reset()
        got = torch.compile(call, backend="aot_eager")(x, w)
        wanted = call(x, w)
        torch.testing.assert_close(got, wanted)
        grads = (torch.autograd.grad(loss, (x, w)) for loss in (got, wanted))
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b)


def test_compile() -> None:
    in_group(compiled, 2)


def refused(rank: int, device: torch.device) -> None:
    x, w, t = torch.ones(4, 8), torch.ones(6, 8), torch.tensor([0, 5, 2, -100])
    linear = load("vocab_parallel_linear_cross_entropy")
    plain = load("vocab_parallel_cross_entropy")
    for arguments, keywords, error, text in (
        ((x, w, t), {"group": "world"}, ArgumentTypeError, "group must be a torch.distributed.ProcessGroup"),
        ((x, w, t), {"vocab_start": 0}, ArgumentError, "vocab_start and vocabulary must be given together"),
        (
            (x, w, t),
            {"vocab_start": 7, "vocabulary": 12},
            ArgumentError,
            "vocab_start 7 .* within vocabulary 12",
        ),
        ((x, w, t + 1), {}, ArgumentError, r"target must be in \[0, 6\)"),
        ((x, w, t.float()), {}, ArgumentTypeError, "target must be int64 or int32"),
        ((x, w, t), {"reduction": "mode"}, ArgumentError, "reduction must be one of"),
        ((x, w, t), {"chunk_bytes": 3}, ArgumentError, "chunk_bytes must hold one row"),
        ((x, w[0], t), {}, ArgumentTypeError, "weight must be a matrix"),
    ):
        with pytest.raises(error, match=f"vocab_parallel_linear_cross_entropy: .*{text}"):
            linear(*arguments, **keywords)
        if "chunk_bytes" in keywords or arguments[1].dim() != 2:
            continue
        with pytest.raises(error, match=f"vocab_parallel_cross_entropy: .*{text}"):
            plain(torch.ones(4, 6), *arguments[2:], **keywords)


def test_bad_input() -> None:
    in_group(refused, 1)


@pytest.mark.parametrize("name", NAMES)
def test_no_group(name: str) -> None:
    arguments = (torch.ones(4, 8), torch.ones(6, 8)) if "linear" in name else (torch.ones(4, 6),)
    with pytest.raises(ArgumentError, match=f"{name}: group needs torch.distributed"):
        load(name)(*arguments, torch.zeros(4, dtype=torch.int64))


@pytest.mark.gpu
@needs_two_gpus
def test_shards_on_two_gpus() -> None:
    in_group(compare, 2, backend="nccl")


@pytest.mark.gpu
@pytest.mark.parametrize("binaries", ["", PTX])
def test_shards_on_one_gpu(binaries: str) -> None:
    in_group(compare, 2, PTX_ARCH if binaries else "", device="cuda:0")


@pytest.mark.gpu
def test_one_gpu_is_a_group_too() -> None:
    in_group(compare, 1, backend="nccl")
