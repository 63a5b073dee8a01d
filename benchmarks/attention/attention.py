"""Attention on this machine's GPU: TFLOP/s of ours beside cuDNN and FlashAttention-2, through torch SDPA.

    python -m benchmarks.attention.attention
    python -m benchmarks.attention.attention --backward --dims 128 --lengths 2048,8192
    python -m benchmarks.attention.attention --packs two=DIR,three=DIR --out DIR    # ours alone, of several packs

16384 tokens a batch and 2048 / dim heads, as FlashAttention's papers have it; bf16. FLOPs are 4 batch heads length^2
dim, half of that causal; of the backward 2.5 times as many, whoever computes more. Providers take turns and results are
medians of rounds: single runs drift with the card's clocks. Every result is compared with the others' before it is
timed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import liger_aot
from benchmarks.environment import folder_name, observe
from benchmarks.session import RESULTS

TOKENS, WIDTH = 16384, 2048
DIMS = (64, 96, 128, 192, 256)
LENGTHS = (512, 2048, 8192, 16384)
BACKWARD_FLOPS = 2.5  # of the forward's: five matrix products to its two
TOLERANCE = 2.0**-6  # of the norm of the difference of two bf16 results
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash_attention_2": SDPBackend.FLASH_ATTENTION}
Run = Callable[[], tuple[Tensor, ...]]


def providers(dim: int, length: int, causal: bool, names: Sequence[str], backward: bool) -> dict[str, Run]:
    """What each provider calls, on one set of tensors in (batch, length, heads, dim): its output, or the gradients of
    a forward that ran before."""
    shape = (TOKENS // length, length, WIDTH // dim, dim)
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    op = liger_aot.load("flash_attention")

    def ours() -> Tensor:
        o: Tensor = op(q, k, v, causal=causal)
        return o

    def peer(backend: SDPBackend) -> Callable[[], Tensor]:
        def run() -> Tensor:
            transposed = [t.transpose(1, 2) for t in (q, k, v)]
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*transposed, is_causal=causal).transpose(1, 2)

        return run

    forwards = {"liger_aot": ours, **{name: peer(PEERS[name]) for name in PEERS if name in names}}
    return {
        name: _backward(run, (q, k, v), do) if backward else _forward(run) for name, run in forwards.items()
    }


def _forward(forward: Callable[[], Tensor]) -> Run:
    return lambda: (forward(),)


def _backward(forward: Callable[[], Tensor], leaves: tuple[Tensor, ...], do: Tensor) -> Run:
    """The gradients of one forward, which the first call runs."""
    kept: list[Tensor] = []

    def run() -> tuple[Tensor, ...]:
        if not kept:
            for leaf in leaves:
                leaf.requires_grad_()
            kept.append(forward())
        return torch.autograd.grad(kept[0], leaves, do, retain_graph=True)

    return run


def milliseconds(run: Run, count: int) -> float:
    """Of one call, on the device: the mean of ``count`` that follow each other."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / count


def measure(
    dim: int, length: int, causal: bool, names: Sequence[str], rounds: int, backward: bool
) -> dict[str, float]:
    """TFLOP/s by provider; those that fail are left out."""
    runs = providers(dim, length, causal, names, backward)
    tried = {name: _tried(name, run) for name, run in runs.items()}
    results = {name: found for name, found in tried.items() if found is not None}
    runs = {name: runs[name] for name in results}
    ours = results["liger_aot"]
    for name, other in results.items():
        difference = max(float((a - b).norm() / b.norm()) for a, b in zip(other, ours, strict=True))
        if not difference < TOLERANCE:
            raise SystemExit(f"dim {dim}, length {length}: ours and {name} differ by {difference:.1e}")
    flops = 4 * (TOKENS // length) * (WIDTH // dim) * length**2 * dim / (2 if causal else 1)
    flops *= BACKWARD_FLOPS if backward else 1
    count = max(3, round(20e-3 * 600e12 / flops))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            time.sleep(0.03)  # back to back, the card runs into its power limit
            times[name].append(milliseconds(run, count))
    return {name: flops / statistics.median(t) / 1e9 for name, t in times.items()}


def _tried(name: str, run: Run) -> tuple[Tensor, ...] | None:
    """The result; None, and a word, where a peer does not have the case."""
    try:
        return tuple(t.float() for t in run())
    except RuntimeError as error:
        if name == "liger_aot":
            raise
        print(f"  {name}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.attention.attention", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--dims", default=",".join(map(str, DIMS)))
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--backward", action="store_true", help="the gradients instead of the forward")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--providers", default=",".join(PEERS), help="beside ours (default: %(default)s)")
    parser.add_argument(
        "--packs", default="", metavar="NAME=DIR,...", help="ours alone, of each of these packs"
    )
    parser.add_argument(
        "--out", type=Path, help="folder of the results (default: benchmarks/results/GPU/steps)"
    )
    parser.add_argument("--commit", help="the commit measured, where the tree has no history")
    options = parser.parse_args(arguments)
    if options.packs:
        if options.out is None:
            parser.error(
                "--packs needs --out, a folder: each pack's results come into a folder of its name there"
            )
        return _each_pack(options)
    rows = []
    for dim in map(int, options.dims.split(",")):
        for causal in (False, True):
            for length in map(int, options.lengths.split(",")):
                found = measure(
                    dim, length, causal, options.providers.split(","), options.rounds, options.backward
                )
                rows.append({"dim": dim, "length": length, "causal": causal, "tflops": found})
                shown = ", ".join(f"{name} {value:.0f}" for name, value in found.items())
                print(f"dim {dim}, length {length}, {'causal' if causal else 'full'}: {shown}", flush=True)
    keep("attention", "attention_backward" if options.backward else "attention_forward", rows, options)
    return 0


def keep(module: str, name: str, rows: Sequence[object], options: argparse.Namespace) -> None:
    """Write a run's rows as ``name``.json into ``options.out`` or the GPU's own folder."""
    direction = "backward" if options.backward else "forward"
    command = shlex.join(["python", "-m", f"benchmarks.{module}", *sys.argv[1:]])
    where = observe(torch.device("cuda"), command=command, commit=options.commit, absent={})
    content = {"environment": asdict(where), "tokens": TOKENS, "dtype": "bfloat16", direction: rows}
    folder = options.out or RESULTS / folder_name(where.gpu) / "steps"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.json"
    file.write_text(json.dumps(content, indent=1) + "\n")
    print(file)


def _each_pack(options: argparse.Namespace) -> int:
    """A process for each pack: which one is installed is decided once."""
    for entry in options.packs.split(","):
        name, _, folder = entry.partition("=")
        print(f"{name}:", flush=True)
        again = ["--dims", options.dims, "--lengths", options.lengths, "--rounds", str(options.rounds)]
        again += ["--backward"] if options.backward else []
        out = ["--out", str(options.out / name)]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.attention.attention", *again, "--providers", "none", *out],
            env={**os.environ, "LIGER_AOT_PACKS": folder},
        )
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
