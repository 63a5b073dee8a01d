"""What ``attention_trial`` tries out of the packed backward by warp groups: the check of a case, what is timed. Cases
are the packed forward's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from liger_aot.ops.attention.flash_attention import FlashAttention
from liger_aot.ops.attention.flash_attention_backward import FlashAttentionBackward
from liger_aot.ops.attention.flash_attention_varlen import FlashAttentionVarlen
from liger_aot.ops.attention.flash_attention_varlen_backward import FlashAttentionVarlenBackward
from liger_aot.runtime.dispatch import Runtimes
from tests.ops.attention.attention_cases import BF16
from tests.ops.attention.attention_gradients import gradient_errors
from tests.ops.attention.varlen_cases import Problem, SinkSums

Gradients = tuple[Tensor, ...]


def check(
    op: Any,
    tiles: Any,
    on: Any,
    kernel: str,
    problem: Problem,
    allowed: Mapping[str, float],
    seed: int,
    device: str = "cuda",
) -> dict[str, Any]:
    """One case: errors against float64 as fractions of what is allowed, zeros behind the last sequence, the same bits
    of dK and dV again and beside NaN, dQ again and the tiles' gradients within roundings."""
    q, k, v, cu_q, cu_k, sinks = problem.tensors(seed, device)
    o, lse = (
        t.contiguous()
        for t in FlashAttentionVarlen.reference(q, k, v, cu_q, cu_k, sinks, *problem.settings())
    )
    do, dlse = torch.randn_like(o), torch.randn_like(lse) if seed % 2 else None
    end_q, end_k = sum(problem.lengths_q), sum(problem.lengths_k)
    for t, end in ((q, end_q), (do, end_q), (o, end_q), (k, end_k), (v, end_k)):
        t[end:] = math.nan
    keywords = {key: value for key, value in problem.keywords(sinks).items() if key != "return_lse"}

    def run(call: Any, *tensors: Tensor) -> Gradients:
        held = [torch.full((t.numel() * 2,), math.nan, device=device) for t in (q, k, v, lse)]
        del held  # what is never written shows
        found: Gradients = call(*tensors, lse, cu_q, cu_k, *problem.longest(), dlse=dlse, **keywords)
        return found

    given = do, q, k, v, o
    first, again, others = run(op, *given), run(op, *given), run(tiles, *given)
    wrong = []
    if not any(name.startswith(f"{kernel}-") for name in on._loaded):
        wrong.append(f"{', '.join(on._loaded)} were launched")
    worst = _worst(problem, first, (q, k, v, sinks), do, dlse, allowed, device == "cuda")
    if not max(worst.values(), default=0.0) <= 1:
        wrong.append(f"errors {worst}")
    if first[0][end_q:].any() or first[1][end_k:].any() or first[2][end_k:].any():
        wrong.append("what is behind the last sequence is not zeros")
    unit = 2.0**-8 if problem.dtype == BF16 else 2.0**-11
    for what, found in (
        ("from run to run", again),
        ("beside NaN", _beside_nan(problem, run, op, given, first)),
    ):
        apart = [distance(a, b) for a, b in zip(found[:3], first[:3], strict=True)]
        if apart[1] or apart[2] or not apart[0] <= unit:
            wrong.append(f"dq, dk and dv differ {what} by {apart}")
    away = [distance(a, b) for a, b in zip(first[:3], others[:3], strict=True)]
    if not max(away) <= 4 * unit:  # P, dS and the result are rounded, each in both
        wrong.append(f"gradients of the tiles differ by {away}")
    return {"wrong": "; ".join(wrong), "worst": worst, "tiles": away}


def distance(a: Tensor, b: Tensor) -> float:
    """The norm of the difference over b's; 0 where both are 0."""
    difference, size = float((a.double() - b.double()).norm()), float(b.double().norm())
    return 0.0 if difference == 0 else difference / size if size else math.inf


def _worst(
    problem: Problem,
    found: Gradients,
    tensors: tuple[Any, ...],
    do: Tensor,
    dlse: Tensor | None,
    allowed: Mapping[str, float],
    approximate: bool,
) -> dict[str, float]:
    """Of all sequences, the largest errors as fractions of what is allowed."""
    q, k, v, sinks = tensors
    sums, worst = SinkSums(sinks), dict[str, float]()
    for one, rows, keys in problem.pieces():
        if not one.len_q:
            idle = bool(found[1][keys].any() or found[2][keys].any())
            worst["keys without queries"] = max(worst.get("keys without queries", 0.0), 2.0 * idle)
            continue
        errors = gradient_errors(
            (found[0][rows][None], found[1][keys][None], found[2][keys][None]),
            (q[rows][None], k[keys][None], v[keys][None], sinks), do[rows][None],
            None if dlse is None else dlse[None, :, rows], one, allowed, approximate=approximate, sums=sums,
        )  # fmt: skip
        worst = {name: max(worst.get(name, 0.0), errors.get(name, 0.0)) for name in {**worst, **errors}}
    if sinks is not None:
        worst["dsinks"] = sums.worst(found[3])
    return worst


def _beside_nan(
    problem: Problem, run: Callable[..., Gradients], op: Any, given: tuple[Tensor, ...], first: Gradients
) -> Gradients:
    """Gradients of every second sequence where all others hold NaN, then of the rest; what no sequence has as in
    ``first``."""
    merged = tuple(t.clone() for t in first[:3])
    pieces = [(rows, keys) for _, rows, keys in problem.pieces()]
    for kept in (pieces[::2], pieces[1::2]):
        tensors = tuple(torch.full_like(t, math.nan) for t in given)
        for rows, keys in kept:
            for t, of, own in zip(tensors, given, (rows, rows, keys, keys, rows), strict=True):
                t[own] = of[own]
        found = run(op, *tensors)
        for rows, keys in kept:
            for to, g, own in zip(merged, found, (rows, keys, keys), strict=False):
                to[own] = g[own]
    return merged


def bound(folder: Any) -> tuple[Any, Any, Any]:
    """The packed backward of a pack, the same without kernels by warp groups, and what the first launches."""
    from benchmarks.attention.attention_trial import bound as bind

    def packed(by_groups: bool) -> tuple[Any, Any]:
        _, own = bind(FlashAttentionVarlenBackward, folder, by_groups)
        _, dense = bind(FlashAttentionBackward, folder)  # keeps the plans: one for each
        named = {FlashAttentionVarlenBackward.name: own, FlashAttentionBackward.name: dense}
        return FlashAttentionVarlenBackward(
            {name: Runtimes(name, {0: on}) for name, on in named.items()}
        ), own

    (op, on), (tiles, _) = packed(True), packed(False)
    return op, tiles, on


def others(folder: Any) -> tuple[Any, Any, Any]:
    """What ``runs`` takes beside the packs: the dense backward, and the forwards of both, of one pack."""
    from benchmarks.attention.attention_trial import bound as bind

    return tuple(bind(c, folder)[0] for c in (FlashAttentionBackward, FlashAttention, FlashAttentionVarlen))  # type: ignore[return-value]


def runs(
    packs: Mapping[int, tuple[Any, Any]],
    beside: tuple[Any, Any, Any],
    dim: int,
    length: int,
    causal: bool,
    device: str = "cuda",
) -> tuple[dict[str, Callable[[], Gradients]], dict[str, float]]:
    """As ``attention_trial_packed.runs``, of gradients."""
    from benchmarks.attention.attention import TOKENS, WIDTH, _backward
    from benchmarks.attention.attention_forms import PEER, _peer_packed, flops, uneven

    dense, dense_forward, forward = beside
    lengths, even = uneven(length, TOKENS), [length] * (TOKENS // length)
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    packed = (starts, starts, max(lengths), max(lengths))
    heads = WIDTH // dim
    q, k, v, do = (torch.randn((sum(lengths), heads, dim), device=device, dtype=BF16) for _ in range(4))
    a, b, c, da = (torch.randn((len(even), length, heads, dim), device=device, dtype=BF16) for _ in range(4))
    with torch.no_grad():
        o, lse = forward(q, k, v, *packed, causal=causal, return_lse=True)
        oa, lse_a = dense_forward(a, b, c, causal=causal, return_lse=True)

    def ours(op: Any) -> Callable[[], Gradients]:
        return lambda: op(do, q, k, v, o, lse, *packed, causal=causal)[:3]

    leaves = (q.detach(), k.detach(), v.detach())
    found = {
        "tiles": ours(next(tiles for _, tiles in packs.values())),
        **{str(n): ours(op) for n, (op, _) in packs.items()},
        PEER: _backward(_peer_packed(*leaves, packed, causal), leaves, do),
        "dense": lambda: dense(da, a, b, c, oa, lse_a, causal=causal)[:3],
    }
    cost = flops(lengths, heads, dim, causal, True)
    return found, {**dict.fromkeys(found, cost), "dense": flops(even, heads, dim, causal, True)}
