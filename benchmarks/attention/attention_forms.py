"""Attention's forms beside each other on this machine's GPU: dense, grouped queries, packed uneven sequences.

    python -m benchmarks.attention.attention_forms
    python -m benchmarks.attention.attention_forms --backward

Each form has the FLOPs of dense attention of 16384 tokens a batch and 2048 / dim heads; bf16. ``gqa`` has 8 query heads
a head of keys, where dim leaves a multiple of 8 heads. ``varlen`` has uneven sequences whose squares add up to the
same: of every two of one length, 1.4 and 0.2 times that; a single one becomes 0.8 and 0.6 of it. Forms and providers
take turns, and results are medians of rounds. FlashAttention-2 is torch's (SDPA, varlen_attn).
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

import liger_aot
from benchmarks.attention.attention import (
    BACKWARD_FLOPS,
    DIMS,
    LENGTHS,
    PEERS,
    TOKENS,
    TOLERANCE,
    WIDTH,
    Run,
    _backward,
    _forward,
    _tried,
    keep,
    milliseconds,
)

FORMS = ("dense", "gqa", "varlen")
GROUP = 8
PEER = "flash_attention_2"


def uneven(length: int, tokens: int = TOKENS) -> list[int]:
    """Lengths of sequences with the FLOPs of ``tokens`` in sequences of ``length``."""
    pairs, one = divmod(tokens // length, 2)
    parts = (1.4, 0.2) * pairs + (0.8, 0.6) * one
    return [round(length * part) for part in parts]


def flops(lengths: Sequence[int], heads: int, dim: int, causal: bool, backward: bool) -> float:
    of_all = 4 * heads * dim * sum(n * n for n in lengths) / (2 if causal else 1)
    return of_all * (BACKWARD_FLOPS if backward else 1)


def providers(
    form: str, dim: int, length: int, causal: bool, backward: bool, device: str = "cuda", tokens: int = TOKENS
) -> tuple[dict[str, Run], float]:
    """What each provider calls, and its FLOPs."""
    heads = WIDTH // dim
    kv_heads = heads // GROUP if form == "gqa" else heads
    lengths = uneven(length, tokens) if form == "varlen" else [length] * (tokens // length)
    outer = (sum(lengths),) if form == "varlen" else (len(lengths), length)
    q, k, v, do = (
        torch.randn((*outer, h, dim), device=device, dtype=torch.bfloat16)
        for h in (heads, kv_heads, kv_heads, heads)
    )
    if form == "varlen":
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        packed = (starts, starts, max(lengths), max(lengths))
        forwards = {
            "liger_aot": _ours_packed(q, k, v, packed, causal),
            PEER: _peer_packed(q, k, v, packed, causal),
        }
    else:
        forwards = {"liger_aot": _ours(q, k, v, causal), PEER: _peer(q, k, v, causal)}
    runs = {name: _backward(f, (q, k, v), do) if backward else _forward(f) for name, f in forwards.items()}
    return runs, flops(lengths, heads, dim, causal, backward)


def _ours(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Callable[[], Tensor]:
    op = liger_aot.load("flash_attention")
    return lambda: op(q, k, v, causal=causal)  # type: ignore[no-any-return]


def _ours_packed(
    q: Tensor, k: Tensor, v: Tensor, packed: tuple[Tensor, Tensor, int, int], causal: bool
) -> Callable[[], Tensor]:
    op = liger_aot.load("flash_attention_varlen")
    return lambda: op(q, k, v, *packed, causal=causal)  # type: ignore[no-any-return]


def _peer(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Callable[[], Tensor]:
    def run() -> Tensor:
        transposed = [t.transpose(1, 2) for t in (q, k, v)]
        with sdpa_kernel(PEERS[PEER]):
            grouped = q.shape[2] != k.shape[2]
            o = F.scaled_dot_product_attention(*transposed, is_causal=causal, enable_gqa=grouped)
        return o.transpose(1, 2)

    return run


def _peer_packed(
    q: Tensor, k: Tensor, v: Tensor, packed: tuple[Tensor, Tensor, int, int], causal: bool
) -> Callable[[], Tensor]:
    def run() -> Tensor:
        try:
            from torch.nn.attention.varlen import varlen_attn
        except ImportError:
            raise RuntimeError("this torch has no varlen_attn") from None
        if "is_causal" in inspect.signature(varlen_attn).parameters:  # torch 2.10
            masked: Tensor = varlen_attn(q, k, v, *packed, is_causal=causal)
        else:
            masked = varlen_attn(q, k, v, *packed, window_size=(-1, 0 if causal else -1))
        return masked

    return run


def measure(dim: int, length: int, causal: bool, backward: bool, rounds: int) -> dict[str, float]:
    """TFLOP/s by form and provider, those that fail left out."""
    runs: dict[str, tuple[Run, float]] = {}
    for form in FORMS:
        if form == "gqa" and WIDTH // dim % GROUP:
            continue
        found, cost = providers(form, dim, length, causal, backward)
        results = {name: _tried(name, run) for name, run in found.items()}
        ours, theirs = results["liger_aot"], results[PEER]
        assert ours is not None
        if theirs is not None:
            worst = max(float((a - b).norm() / b.norm()) for a, b in zip(theirs, ours, strict=True))
            if not worst < TOLERANCE:
                raise SystemExit(f"{form}, dim {dim}, length {length}: ours and {PEER} differ by {worst:.1e}")
        runs |= {f"{form} {name}": (found[name], cost) for name in results if results[name] is not None}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, (run, cost) in runs.items():
            time.sleep(0.03)  # back to back, the card runs into its power limit
            times[name].append(milliseconds(run, max(3, round(20e-3 * 600e12 / cost))))
    return {name: runs[name][1] / statistics.median(t) / 1e9 for name, t in times.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.attention.attention_forms", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--dims", default=",".join(map(str, DIMS)))
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--backward", action="store_true", help="the gradients instead of the forward")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--out", type=Path, help="folder of the results (default: benchmarks/results/GPU/steps)"
    )
    parser.add_argument("--commit", help="the commit measured, where the tree has no history")
    options = parser.parse_args(arguments)
    rows = []
    for dim in map(int, options.dims.split(",")):
        for causal in (False, True):
            for length in map(int, options.lengths.split(",")):
                found = measure(dim, length, causal, options.backward, options.rounds)
                rows.append({"dim": dim, "length": length, "causal": causal, "tflops": found})
                shown = ", ".join(f"{name} {value:.0f}" for name, value in found.items())
                print(f"dim {dim}, length {length}, {'causal' if causal else 'full'}: {shown}", flush=True)
    name = "attention_forms_backward" if options.backward else "attention_forms"
    keep("attention_forms", name, rows, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
