"""Checks of one varlen problem: results and gradients against fp64, a second run, and plain Triton."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError
from liger_aot.ops.attention.flash_attention_varlen import FlashAttentionVarlen
from liger_aot.runtime import device_errors
from tests.ops.attention.attention_cases import BF16, errors
from tests.ops.attention.attention_gradients import gradient_errors
from tests.ops.attention.varlen_cases import Problem, SinkSums

Gradients = tuple[Tensor, ...]


def check_results(
    op: Any,
    tiles: Any,
    on: Any,
    kernel: str,
    problem: Problem,
    allowed: Mapping[str, float],
    seed: int,
) -> dict[str, Any]:
    """One case: errors against float64 as fractions of what is allowed, the same bits again and beside NaN, the tiles'
    results within roundings, a report of starts that are wrong."""
    q, k, v, cu_q, cu_k, sinks = problem.tensors(seed)
    end_q, end_k = sum(problem.lengths_q), sum(problem.lengths_k)
    q[end_q:], k[end_k:], v[end_k:] = math.nan, math.nan, math.nan
    keywords = problem.keywords(sinks)

    def run(call: Any, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        held = [torch.full((t.numel() * 2,), math.nan) for t in tensors]
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
        found = errors(o[rows][None], lse[None, :, rows], own, one, allowed, approximate=False)
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
        device_errors.raise_if_any("flash_attention_varlen")
    except ArgumentError:
        return True
    return False


def check_gradients(
    op: Any,
    tiles: Any,
    on: Any,
    kernel: str,
    problem: Problem,
    allowed: Mapping[str, float],
    seed: int,
) -> dict[str, Any]:
    """One case: errors against float64 as fractions of what is allowed, zeros behind the last sequence, the same bits
    of dK and dV again and beside NaN, dQ again and the tiles' gradients within roundings."""
    q, k, v, cu_q, cu_k, sinks = problem.tensors(seed)
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
        held = [torch.full((t.numel() * 2,), math.nan) for t in (q, k, v, lse)]
        del held  # what is never written shows
        found: Gradients = call(*tensors, lse, cu_q, cu_k, *problem.longest(), dlse=dlse, **keywords)
        return found

    given = do, q, k, v, o
    first, again, others = run(op, *given), run(op, *given), run(tiles, *given)
    wrong = []
    if not any(name.startswith(f"{kernel}-") for name in on._loaded):
        wrong.append(f"{', '.join(on._loaded)} were launched")
    worst = _worst(problem, first, (q, k, v, sinks), do, dlse, allowed)
    if not max(worst.values(), default=0.0) <= 1:
        wrong.append(f"errors {worst}")
    if first[0][end_q:].any() or first[1][end_k:].any() or first[2][end_k:].any():
        wrong.append("what is behind the last sequence is not zeros")
    unit = 2.0**-8 if problem.dtype == BF16 else 2.0**-11
    for what, found in (
        ("from run to run", again),
        ("beside NaN", _gradients_beside_nan(problem, run, op, given, first)),
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
            None if dlse is None else dlse[None, :, rows], one, allowed, approximate=False, sums=sums,
        )  # fmt: skip
        worst = {name: max(worst.get(name, 0.0), errors.get(name, 0.0)) for name in {**worst, **errors}}
    if sinks is not None:
        worst["dsinks"] = sums.worst(found[3])
    return worst


def _gradients_beside_nan(
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
