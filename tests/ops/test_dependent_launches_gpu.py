"""Kernels that start before the kernel before them has ended (programmatic dependent launch), one after the other, read
what that one wrote: ours, torch's, and weights that were written just before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot

pytestmark = pytest.mark.gpu
ROUNDS = 20


def steps(x: Tensor, residual: Tensor, weight: Tensor, after: Callable[[], Any]) -> list[Tensor]:
    """Results of ops that each need the one before; ``after`` runs after each launch."""
    load, n = liger_aot.load, x.shape[-1]
    made: list[Tensor] = []

    def kept(*results: Tensor) -> Tensor:
        made.extend(results)
        after()
        return results[0]

    def rotated(t: Tensor) -> Tensor:
        angles = kept(t[:, :128] * 0.01)
        heads = t.view(1, t.shape[0], n // 128, 128)
        q, k = load("rope")(heads, heads[:, :, :2], angles.cos(), angles.sin(), layout="bshd")
        return kept(q.reshape(t.shape), k)

    for i in range(3):
        w = kept(weight * (i + 1))  # torch's kernel, whose result is read at once
        x = kept(load("rmsnorm")(x, w))
        x = kept(load("layernorm")(x, load("softmax")(w)))
        x = kept(*load("fused_add_rmsnorm")(x, residual, w))
        x = kept(load("swiglu")(torch.cat((x, x), -1)))
        x = kept(load("geglu")(x, x))
        x = rotated(x)
        x = kept(load("softmax")(x) + x)
    return made


@pytest.mark.parametrize(
    ("rows", "n"),
    [
        *((rows, n) for rows in (1, 7, 300) for n in (1024, 2944, 4096, 8192, 32768)),
        *((1100, n) for n in (4096, 8192)),  # fused_add_rmsnorm's programs walk the rows
    ],
)
def test_each_waits_for_the_one_before(rows: int, n: int) -> None:
    def drawn(seed: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator("cuda").manual_seed(seed)
        shapes = (rows, n), (rows, n), (n,)
        x, residual, weight = (
            torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(generator=generator)
            for shape in shapes
        )
        return x, residual, weight

    given = drawn(0)
    steps(*given, torch.cuda.synchronize)  # binaries are loaded
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.cuda.graph(graph, stream=side):
        in_graph = steps(*given, lambda: None)
    for seed in range(ROUNDS):
        fresh = drawn(seed)
        wanted = steps(*fresh, torch.cuda.synchronize)
        eager = steps(*fresh, lambda: None)
        for t, value in zip(given, fresh, strict=True):
            t.copy_(value)
        graph.replay()
        for one, of_graph, alone in zip(eager, in_graph, wanted, strict=True):
            assert torch.equal(one, alone), "without a wait of the host's"
            assert torch.equal(of_graph, alone), "in a graph"


@pytest.mark.parametrize("rows", [1, 300])
def test_a_join_of_two_streams_is_waited_for(rows: int) -> None:
    """In a graph, an op whose arguments come from two streams, one of them a copy."""
    n = 4096
    x, w = torch.randn(rows, n, device="cuda").bfloat16(), torch.randn(n, device="cuda").bfloat16()
    held = torch.zeros_like(w)
    op = liger_aot.load("rmsnorm")
    op(x, w)
    torch.cuda.synchronize()
    main, other = torch.cuda.Stream(), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=main):
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            held.copy_(w)
        y = op(x, x[0])
        torch.cuda.current_stream().wait_stream(other)
        z = op(y, held)
    for i in range(ROUNDS):
        w.normal_()
        x.normal_()
        held.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(z, op(op(x, x[0]), w)), i
