"""The README's sections whose figures are records of ops: RMSNorm, the other ops, the losses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log2
from pathlib import Path

from . import records, summary
from .markdown import link, made_in, made_on, table
from .providers import COPY, NAMES, label
from .records import Measurement, Run

COLUMNS = ("liger_aot", "quack", "torch_compile", "liger", "torch")
HOST_ROWS = (
    ("host_forward", "forward, us"),
    ("host_forward_backward", "forward and backward, us"),
    ("cold_total", "first result in a fresh process, ms"),
)
# One or two points of each op: the pages of docs/ops have them all.
CHOSEN = (
    ("layernorm", "1024"),
    ("layernorm", "8192"),
    ("fused_add_rmsnorm", "8192"),
    ("modulated_rmsnorm", "32x4096x4096"),
    ("groupnorm", "64x1280x16x16"),
    ("groupnorm", "channels_last 32x320x64x64"),
    ("rope", "4x8192x32x8x128"),
    ("swiglu", "11008"),
    ("geglu", "11008"),
    ("relu_squared", "11008"),
    ("softmax", "1024"),
    ("softmax", "11008"),
    ("softmax", "262144"),
    ("sparsemax", "1024"),
    ("dyt", "8192"),
    ("poly_norm", "16384"),
    ("embedding", "32768x128256x4096"),
)
LOSSES = ("cross_entropy", "selective_log_softmax", "kl_div", "jsd", "tvd")


def rmsnorm(results: Path) -> str:
    run = records.read(results / "rmsnorm.json")
    copy = sorted(m.bandwidth_gb_s or 0 for m in run.measurements if m.provider == COPY)
    parts = [
        "### RMSNorm",
        f"One {made_in(run)}, {'' if run.again else 'all in one run '}of `python -m benchmarks rmsnorm`. Every record "
        f"is in {link(results / 'rmsnorm.json')}; the fractions are of a device-to-device copy of as many bytes, timed "
        f"in turn with each case (about {copy[len(copy) // 2]:.0f} GB/s).",
    ]
    for direction, note in (("forward", ""), ("backward", ", every launch counted")):
        found = run.select(direction=direction, dtype="bfloat16")
        if not found:
            continue
        elements = round(log2(found[0].shape[0] * found[0].shape[1]))
        parts.append(
            f"{direction.capitalize()}, bf16, 2^{elements} elements{note}, fraction of the copy:\n\n"
            + _by_provider("n", list(dict.fromkeys(m.point for m in found)), found)
        )
    if host := _host(run):
        parts.append(
            "A 4 x 4096 call on the host, and the time from import to the first result in a process where torch and "
            f"CUDA are up (Liger and torch.compile with empty caches):\n\n{host}"
        )
    own = {m.direction: m.host_us for m in run.measurements if m.host_us is not None}
    if {"host_forward_out", "host_empty_like"} <= set(own):
        parts.append(
            f"With `out=` a call takes {own['host_forward_out']:.1f} us; `torch.empty_like` alone takes "
            f"{own['host_empty_like']:.1f} on that machine."
        )
    return "\n\n".join([*parts, _ahead([run])])


def other_ops(results: Path) -> str:
    runs = _runs(results, dict.fromkeys(op for op, _ in CHOSEN))
    return "\n\n".join(
        [
            "### The other ops",
            f"{_sources(runs)}, bf16, fraction of the copy. [The ops' pages](docs/index.md) have every point and a "
            "plot; `python -m benchmarks summary benchmarks/results/h200/*.json` prints them.",
            _both_ways(runs, [point for point in CHOSEN if point[0] in runs], "backward"),
            _ahead(runs.values()),
        ]
    )


def losses(results: Path) -> str:
    runs = _runs(results, LOSSES)
    points = [
        (op, point) for op, run in runs.items() for point in dict.fromkeys(m.point for m in _device(run))
    ]
    return "\n\n".join(
        [
            "### Cross entropy and divergences",
            f"{_sources(runs)}, bf16, fraction of the copy of as many bytes. A step is the loss and its gradient; "
            "`inplace` writes it over the logits, as Liger always does.",
            _both_ways(runs, points, "step"),
            _ahead(runs.values()),
        ]
    )


def _runs(results: Path, ops: Iterable[str]) -> dict[str, Run]:
    """Of the ops that have results; FileNotFoundError where none has."""
    runs = {op: records.read(path) for op in ops if (path := results / f"{op}.json").exists()}
    if not runs:
        raise FileNotFoundError(results)
    return runs


def _sources(runs: dict[str, Run]) -> str:
    """Each way the runs were made, one after the other where there are several."""
    seen = (one for run in runs.values() for one in run.environments("forward", "backward"))
    made = dict.fromkeys(made_on(vars(one)) for one in seen)
    return f"Runs of `python -m benchmarks` on one {'; on one '.join(made)}"


def _device(run: Run) -> list[Measurement]:
    return [m for m in run.measurements if m.direction in ("forward", "backward") and m.dtype == "bfloat16"]


def _fraction(m: Measurement | None) -> str:
    if m is None:
        return "-"
    return "fails" if m.fraction is None else f"{m.fraction:.2f}"


def _by_provider(corner: str, points: Sequence[str], found: Sequence[Measurement]) -> str:
    """A row a provider, a column a point."""
    at = {(m.provider, m.point): m for m in found}
    present = [name for name in COLUMNS if any(m.provider == name for m in found)]
    rows = [[label(name), *(_fraction(at.get((name, point))) for point in points)] for name in present]
    return table([corner, *points], rows)


def _both_ways(runs: dict[str, Run], points: Sequence[tuple[str, str]], second: str) -> str:
    """A row a point, forward and backward of ours and of two peers."""
    names = ("liger_aot", "liger", "torch_compile")
    rows = []
    for op, point in points:
        at = {(m.direction, m.provider): m for m in _device(runs[op]) if m.point == point}
        cells = [_fraction(at.get((way, name))) for way in ("forward", "backward") for name in names]
        rows.append([f"`{op}` {point}", *cells])
    columns = [
        f"{way}: ours" if i == 0 else peer for way in ("forward", second) for i, peer in enumerate(_PEERS)
    ]
    return table(["op, point", *columns], rows)


_PEERS = ("ours", "Liger", "torch.compile")


def _host(run: Run) -> str:
    at = {(m.direction, m.provider): m for m in run.measurements if m.status == "ok"}
    present = [name for name in COLUMNS if any((way, name) in at for way, _ in HOST_ROWS)]
    rows = [
        [title, *(_number(at.get((way, name))) for name in present)]
        for way, title in HOST_ROWS
        if any((way, name) in at for name in present)
    ]
    return table(["", *map(label, present)], rows) if rows else ""


def _number(m: Measurement | None) -> str:
    if m is None:
        return "-"
    value = m.host_us if m.host_us is not None else m.median_ms or 0.0
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _ahead(runs: Iterable[Run]) -> str:
    """Where a peer takes less time than ours by more than the margin."""
    found = []
    for run in runs:
        at = {
            (m.direction, m.point, m.provider): m.median_ms for m in _device(run) if m.median_ms is not None
        }
        for (direction, point, provider), ours in at.items():
            if provider != NAMES[0]:
                continue
            peers = {name: at[direction, point, name] for name in NAMES[1:] if (direction, point, name) in at}
            best = min(peers, key=peers.__getitem__, default=None)
            if best is not None and peers[best] * summary.MARGIN < ours:
                found.append(f"`{run.op}` {direction} {point} ({_short(best)}, {ours / peers[best]:.2f})")
    margin = f"more than {(summary.MARGIN - 1) * 100:.0f}%"
    return f"A peer is ahead by {margin}: {', '.join(found) or 'nowhere'}."


def _short(provider: str) -> str:
    """Its label without what stands in brackets."""
    return label(provider).partition(" (")[0]
