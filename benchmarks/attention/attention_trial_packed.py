"""What ``attention_trial`` tries out of the packed forward by warp groups: cases, their check, what is timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError
from liger_aot.ops.attention.flash_attention import FlashAttention
from liger_aot.ops.attention.flash_attention_varlen import FlashAttentionVarlen
from liger_aot.runtime import device_errors
from tests.ops.attention.attention_cases import BF16, FP16, errors
from tests.ops.attention.varlen_cases import Problem

NARROWER = {64: 40, 96: 72, 128: 104, 192: 160, 256: 208}  # head dimensions that the same kernels serve
LENGTHS = (1, 700, 0, 64, 3, 129, 300, 192)
SHORT = 1024  # keys: a kernel for short sequences is for these at least


def cases(width: int) -> list[Problem]:
    """What a kernel must get right, the simplest first."""
    return [
        Problem(1, 1, (128,), (128,), width),
        Problem(1, 1, (512,), (512,), width, causal=True),
        Problem(2, 2, (384, 256), (384, 256), width, FP16),
        Problem(2, 1, (300, 77), (300, 77), width, causal=True, behind=(70, 100)),
        Problem(4, 2, LENGTHS, LENGTHS, width, behind=(300, 20)),
        Problem(4, 1, LENGTHS, (300, 700, 5, 0, 64, 200, 128, 1), width, FP16, causal=True, sinks=True),
        Problem(4, 4, LENGTHS, (0, 64, 5, 0, 3000, 1, 127, 129), width, sinks=True, behind=(5, 0)),
        Problem(2, 2, LENGTHS, LENGTHS[::-1], NARROWER[width], causal=True, window=(None, 20)),
        Problem(1, 1, (5,) * 1000, (7,) * 1000, width, causal=True),
        Problem(2, 1, (0,) * 300 + (40,) + (0,) * 300, (0,) * 300 + (50,) + (0,) * 300, width),
        Problem(1, 1, (300,), (8192,), width, FP16),  # many times around every ring
        Problem(8, 2, (2048, 3000, 17), (2048, 3000, 400), width, causal=True),
    ]


def cases_of(kernel: str) -> list[Problem]:
    """Those of its width that the host gives to a kernel of the forward."""
    width, _, kind = kernel.partition("_groups_")[2].partition("_")
    longest = SHORT if kind == "short" else math.inf
    return [
        p for p in cases(int(width))
        if (p.causal or p.window is not None) == (kind != "full") and max(p.lengths_k) <= longest
    ]  # fmt: skip


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
    """One case: errors against float64 as fractions of what is allowed, the same bits again and beside NaN, the tiles'
    results within roundings, a report of starts that are wrong."""
    q, k, v, cu_q, cu_k, sinks = problem.tensors(seed, device)
    end_q, end_k = sum(problem.lengths_q), sum(problem.lengths_k)
    q[end_q:], k[end_k:], v[end_k:] = math.nan, math.nan, math.nan
    keywords = problem.keywords(sinks)

    def run(call: Any, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        held = [torch.full((t.numel() * 2,), math.nan, device=device) for t in tensors]
        del held  # what is never written shows
        found: tuple[Tensor, Tensor] = call(*tensors, cu_q, cu_k, *problem.longest(), **keywords)
        return found

    o, lse = run(op, q, k, v)
    wrong = []
    if not any(name.startswith(f"{kernel}-") for name in on._loaded):
        wrong.append(f"{', '.join(on._loaded)} were launched")
    worst = (0.0, 0.0)
    pieces = [(one, rows, keys) for one, rows, keys in problem.pieces() if one.len_q]
    if len(pieces) > 100:  # many that are alike
        pieces = [*pieces[:20], *pieces[-20:]]
    for one, rows, keys in pieces:
        own = q[rows][None], k[keys][None], v[keys][None], sinks
        found = errors(o[rows][None], lse[None, :, rows], own, one, allowed, approximate=device == "cuda")
        worst = max(worst[0], found[0]), max(worst[1], found[1])
    if not max(worst) <= 1:
        wrong.append(f"errors of o and lse {worst}")
    if o[end_q:].any() or not torch.isneginf(lse[:, end_q:]).all():
        wrong.append("what is behind the last sequence is not zeros and -inf")
    again = run(op, q, k, v)
    if not (torch.equal(again[0], o) and torch.equal(again[1], lse)):
        wrong.append("results differ from run to run")
    unit = 2.0**-8 if problem.dtype == BF16 else 2.0**-11
    other = run(tiles, q, k, v)[0]
    apart = float((other.double() - o.double()).norm()) / max(float(other.double().norm()), unit)
    if not apart <= 4 * unit:  # P and the result are rounded, in both
        wrong.append(f"the tiles' o differs by {apart:.1e}")
    if not _beside_nan(problem, run, op, (q, k, v), (o, lse)):
        wrong.append("a sequence's results depend on what lies beside it")
    if not _reported(op, (q, k, v, cu_q, cu_k, sinks), problem, keywords):
        wrong.append("starts past the tokens were not reported")
    return {"wrong": "; ".join(wrong), "worst": worst, "tiles": apart}


def _beside_nan(
    problem: Problem,
    run: Callable[..., Any],
    op: Any,
    tensors: tuple[Tensor, ...],
    wanted: tuple[Tensor, ...],
) -> bool:
    """Whether every second sequence keeps its bits where all others hold NaN; then the rest."""
    same = True
    pieces = [(rows, keys) for one, rows, keys in problem.pieces() if one.len_q]
    for kept in (pieces[::2], pieces[1::2]):
        q, k, v = (torch.full_like(t, math.nan) for t in tensors)
        for rows, keys in kept:
            for t, of, own in zip((q, k, v), tensors, (rows, keys, keys), strict=True):
                t[own] = of[own]
        o, lse = run(op, q, k, v)
        for rows, _ in kept:
            same = same and torch.equal(o[rows], wanted[0][rows])
            same = same and torch.equal(lse[:, rows], wanted[1][:, rows])
    return same


def _reported(op: Any, tensors: tuple[Any, ...], problem: Problem, keywords: Mapping[str, Any]) -> bool:
    """Whether the call after one whose last sequence ends past the tokens raises; nothing else may go wrong."""
    q, k, v, cu_q, cu_k, _ = tensors
    if not problem.lengths_q:
        return True
    past = cu_k.clone()
    past[-1] = k.shape[0] + 1000
    longest = problem.longest()[0], k.shape[0] + 1000
    try:
        op(q, k, v, cu_q, past, *longest, **keywords)
        if q.is_cuda:
            torch.cuda.synchronize()
        device_errors.raise_if_any("flash_attention_varlen")
    except ArgumentError:
        return True
    return False


def bound(folder: Any) -> tuple[Any, Any, Any]:
    """The packed op of a pack, the same without kernels by warp groups, and what the first launches."""
    from benchmarks.attention.attention_trial import bound as bind

    op, on = bind(FlashAttentionVarlen, folder)
    tiles, other = bind(FlashAttentionVarlen, folder)
    other.kernels = {name: kernel for name, kernel in other.kernels.items() if "_groups" not in name}
    return op, tiles, on


def runs(
    packs: Mapping[int, tuple[Any, Any]],
    dense: Any,
    dim: int,
    length: int,
    causal: bool,
    device: str = "cuda",
) -> tuple[dict[str, Callable[[], tuple[Tensor, ...]]], dict[str, float]]:
    """What is timed, and the FLOPs of each: uneven sequences by every pack's kernel, the tiles and FlashAttention-2,
    and the dense form of sequences of one length.

    Args:
        packs: (the op, the op without warp groups) by number.
    """
    from benchmarks.attention.attention import TOKENS, WIDTH
    from benchmarks.attention.attention_forms import PEER, _peer_packed, flops, uneven

    lengths, even = uneven(length, TOKENS), [length] * (TOKENS // length)
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    packed = (starts, starts, max(lengths), max(lengths))
    heads = WIDTH // dim
    q, k, v = (torch.randn((sum(lengths), heads, dim), device=device, dtype=BF16) for _ in range(3))
    a, b, c = (torch.randn((len(even), length, heads, dim), device=device, dtype=BF16) for _ in range(3))
    ours = {str(n): (lambda op=op: (op(q, k, v, *packed, causal=causal),)) for n, (op, _) in packs.items()}
    tiles = next(tiles for _, tiles in packs.values())
    peer = _peer_packed(q, k, v, packed, causal)
    found = {
        "tiles": lambda: (tiles(q, k, v, *packed, causal=causal),),
        **ours,
        PEER: lambda: (peer(),),
        "dense": lambda: (dense(a, b, c, causal=causal),),
    }
    cost = flops(lengths, heads, dim, causal, False)
    return found, {**dict.fromkeys(found, cost), "dense": flops(even, heads, dim, causal, False)}


def others(folder: Any) -> FlashAttention:
    from benchmarks.attention.attention_trial import bound as bind

    op: FlashAttention = bind(FlashAttention, folder)[0]
    return op
