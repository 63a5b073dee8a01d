"""Attention on this machine's GPU: TFLOP/s of ours beside torch's cuDNN and FlashAttention-2 (SDPA, varlen_attn).

    python -m benchmarks.attention.attention
    python -m benchmarks.attention.attention --backward --dims 128 --lengths 2048,8192
    python -m benchmarks.attention.attention --forms     # dense, grouped queries, varlen, beside FlashAttention-2

16384 tokens a batch and 2048 / dim heads, as FlashAttention's papers have it; bf16. FLOPs are 4 batch heads length^2
dim, half of that causal; of the backward 2.5 times as many, whoever computes more. ``gqa`` has 8 query heads a head of
keys, where dim leaves a multiple of 8 heads. ``varlen`` has uneven sequences whose squares add up to the same: of every
two of one length, 1.4 and 0.2 times that; a single one becomes 0.8 and 0.6 of it. Forms and providers take turns, and
results are medians of rounds: single runs drift with the card's clocks. Every result is compared with ours before it is
timed.
"""

from __future__ import annotations

import inspect
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import liger_aot
from benchmarks.steps import Command

TOKENS, WIDTH = 16384, 2048
DIMS = (64, 96, 128, 192, 256)
LENGTHS = (512, 2048, 8192, 16384)
FORMS = ("dense", "gqa", "varlen")
GROUP = 8  # query heads a head of keys, of gqa
BACKWARD_FLOPS = 2.5  # of the forward's: five matrix products to its two
TOLERANCE = 2.0**-6  # of the norm of the difference of two bf16 results
OURS, FLASH = "liger_aot", "flash_attention_2"
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, FLASH: SDPBackend.FLASH_ATTENTION}
Run = Callable[[], tuple[Tensor, ...]]


def uneven(length: int, tokens: int = TOKENS) -> list[int]:
    """Lengths of sequences with the FLOPs of ``tokens`` in sequences of ``length``."""
    pairs, one = divmod(tokens // length, 2)
    parts = (1.4, 0.2) * pairs + (0.8, 0.6) * one
    return [round(length * part) for part in parts]


def flops(lengths: Sequence[int], heads: int, dim: int, causal: bool, backward: bool) -> float:
    of_all = 4 * heads * dim * sum(n * n for n in lengths) / (2 if causal else 1)
    return of_all * (BACKWARD_FLOPS if backward else 1)


def providers(
    form: str,
    dim: int,
    length: int,
    causal: bool,
    backward: bool,
    names: Sequence[str] = (FLASH,),
    device: str = "cuda",
    tokens: int = TOKENS,
) -> tuple[dict[str, Run], float]:
    """A function for ours and for each peer named, on the same tensors, (batch, length, heads, dim), and the FLOPs of
    one call. It returns the output, or the gradients of a forward that ran before."""
    heads = WIDTH // dim
    kv_heads = heads // GROUP if form == "gqa" else heads
    varlen = form == "varlen"
    lengths = uneven(length, tokens) if varlen else [length] * (tokens // length)
    outer = (sum(lengths),) if varlen else (len(lengths), length)
    q, k, v, do = (
        torch.randn((*outer, h, dim), device=device, dtype=torch.bfloat16)
        for h in (heads, kv_heads, kv_heads, heads)
    )
    starts: tuple[Any, ...] = ()
    if varlen:
        cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        starts = (cu, cu, max(lengths), max(lengths))
    op = liger_aot.load("flash_attention_varlen" if varlen else "flash_attention")
    forwards: dict[str, Callable[[], Tensor]] = {OURS: partial(op, q, k, v, *starts, causal=causal)}
    for name in names:
        if not varlen:
            forwards[name] = partial(_sdpa, PEERS[name], q, k, v, causal)
        elif name == FLASH:
            forwards[name] = partial(_varlen_attn, q, k, v, starts, causal)
    runs = {name: _backward(f, (q, k, v), do) if backward else _forward(f) for name, f in forwards.items()}
    return runs, flops(lengths, heads, dim, causal, backward)


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    grouped, transposed = q.shape[2] != k.shape[2], [t.transpose(1, 2) for t in (q, k, v)]
    with sdpa_kernel(backend):
        o: Tensor = F.scaled_dot_product_attention(*transposed, is_causal=causal, enable_gqa=grouped)  # type: ignore[misc, arg-type]
    return o.transpose(1, 2)


def _varlen_attn(q: Tensor, k: Tensor, v: Tensor, starts: tuple[Any, ...], causal: bool) -> Tensor:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        raise RuntimeError("this torch has no varlen_attn") from None
    older = "is_causal" in inspect.signature(varlen_attn).parameters  # torch 2.10
    mask: dict[str, Any] = {"is_causal": causal} if older else {"window_size": (-1, 0 if causal else -1)}
    o: Any = varlen_attn(q, k, v, *starts, **mask)
    return o  # type: ignore[no-any-return]


def _forward(forward: Callable[[], Tensor]) -> Run:
    return lambda: (forward(),)


def _backward(forward: Callable[[], Tensor], leaves: tuple[Tensor, ...], do: Tensor) -> Run:
    """The gradients of one forward, which the first call runs."""
    outputs: list[Tensor] = []

    def run() -> tuple[Tensor, ...]:
        if not outputs:
            for leaf in leaves:
                leaf.requires_grad_()
            outputs.append(forward())
        return torch.autograd.grad(outputs[0], leaves, do, retain_graph=True)

    return run


def milliseconds(run: Run, count: int) -> float:
    """Device time of one call: the mean of ``count`` calls in a row."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / count


def measure(
    forms: Sequence[str],
    dim: int,
    length: int,
    causal: bool,
    backward: bool,
    names: Sequence[str],
    rounds: int,
) -> dict[str, float]:
    """TFLOP/s by provider, or by form and provider where there are several forms. Providers that fail are left out."""
    runs: dict[str, tuple[Run, float]] = {}
    for form in forms:
        if form == "gqa" and WIDTH // dim % GROUP:
            continue
        found, cost = providers(form, dim, length, causal, backward, names)
        results = {name: result for name, run in found.items() if (result := _tried(name, run)) is not None}
        for name, other in results.items():
            worst = max(float((a - b).norm() / b.norm()) for a, b in zip(other, results[OURS], strict=True))
            if not worst < TOLERANCE:
                raise SystemExit(f"{form}, dim {dim}, length {length}: ours and {name} differ by {worst:.1e}")
        runs |= {f"{form} {name}" if len(forms) > 1 else name: (found[name], cost) for name in results}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, (run, cost) in runs.items():
            time.sleep(0.03)  # back to back, the card runs into its power limit
            times[name].append(milliseconds(run, max(3, round(20e-3 * 600e12 / cost))))
    return {name: runs[name][1] / statistics.median(t) / 1e9 for name, t in times.items()}


def _tried(name: str, run: Run) -> tuple[Tensor, ...] | None:
    """The result, or None where a peer does not support the case; the reason goes to stderr."""
    try:
        return tuple(t.float() for t in run())
    except RuntimeError as error:
        if name == OURS:
            raise
        print(f"  {name}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None


def main(arguments: Sequence[str]) -> int:
    command = Command("benchmarks.attention.attention", __doc__, PEERS)
    add = command.parser.add_argument
    add("--dims", default=",".join(map(str, DIMS)))
    add("--lengths", default=",".join(map(str, LENGTHS)))
    add("--backward", action="store_true", help="the gradients instead of the forward")
    add("--forms", action="store_true", help="dense, gqa and varlen beside each other and FlashAttention-2")
    add("--rounds", type=int, default=5)
    options = command.read(arguments)
    forms, names = (FORMS, (FLASH,)) if options.forms else (FORMS[:1], options.providers)
    direction = "backward" if options.backward else "forward"
    forms_file = "attention_forms_backward" if options.backward else "attention_forms"
    file = command.file(forms_file if options.forms else f"attention_{direction}")
    rows = []
    for dim in map(int, options.dims.split(",")):
        for causal in (False, True):
            for length in map(int, options.lengths.split(",")):
                found = measure(forms, dim, length, causal, options.backward, names, options.rounds)
                rows.append({"dim": dim, "length": length, "causal": causal, "tflops": found})
                shown = ", ".join(f"{name} {value:.0f}" for name, value in found.items())
                print(f"dim {dim}, length {length}, {'causal' if causal else 'full'}: {shown}", flush=True)
                file.keep(tokens=TOKENS, dtype="bfloat16", **{direction: rows})
    print(file.path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
