"""The sections whose figures are records of ops: RMSNorm, the other ops, the losses."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from math import log2
from pathlib import Path

from benchmarks import records, summary
from benchmarks.markdown import ROOT, Gpu, link, made_in, made_on, table_by_gpu
from benchmarks.providers import COPY, NAMES, label, short_label
from benchmarks.records import Measurement, Run

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

Runs = Mapping[tuple[str, Gpu], Run]  # by op and GPU


def rmsnorm(gpus: Sequence[Gpu], start: Path) -> str:
    runs = _runs(gpus, ["rmsnorm"])
    if not runs:
        return ""
    sources = [
        f"- {made_in(run)}: {link(gpu.folder / 'rmsnorm.json', start)}, copy {copy_rate(run):.0f} GB/s"
        for (_, gpu), run in runs.items()
    ]
    parts = [
        "### RMSNorm",
        "Measured by `python -m benchmarks rmsnorm`, bf16. Fractions are of a device-to-device copy of as many bytes, "
        "timed in turn with each case.",
        "\n".join(sources),
    ]
    for direction, note in (("forward", ""), ("backward", ", all launches counted")):
        found = {gpu: run.select(direction=direction, dtype="bfloat16") for (_, gpu), run in runs.items()}
        every = [m for own in found.values() for m in own]
        if every:
            elements = round(log2(every[0].shape[0] * every[0].shape[1]))
            parts.append(
                f"{direction.capitalize()}, 2^{elements} elements{note}, by row length, fraction of the copy:\n\n"
                + _by_provider(list(dict.fromkeys(m.point for m in every)), found)
            )
    if host := _host(runs):
        parts.append(
            "Host time of a 4 x 4096 call, and the time from import to the first result in a process where torch and "
            f"CUDA are already up (Liger and torch.compile with empty caches):\n\n{host}"
        )
    for (_, gpu), run in runs.items():
        own = {m.direction: m.host_us for m in run.measurements if m.host_us is not None}
        if {"host_forward_out", "host_empty_like"} <= set(own):
            parts.append(
                f"On the host of the {gpu.name}, a call with `out=` takes {own['host_forward_out']:.1f} us; "
                f"`torch.empty_like` alone takes {own['host_empty_like']:.1f} us."
            )
    return "\n\n".join([*parts, _ahead(runs)])


def other_ops(gpus: Sequence[Gpu], start: Path) -> str:
    runs = _runs(gpus, dict.fromkeys(op for op, _ in CHOSEN))
    if not runs:
        return ""
    return "\n\n".join(
        [
            "### Other ops",
            f"{_sources(runs)}, bf16, fraction of the copy. [The ops' pages]({_pages(start)}) have every point and a "
            "plot.",
            _both_ways(runs, CHOSEN, "backward"),
            _ahead(runs),
        ]
    )


def losses(gpus: Sequence[Gpu], start: Path) -> str:
    runs = _runs(gpus, LOSSES)
    if not runs:
        return ""
    points = dict.fromkeys((op, m.point) for (op, _), run in runs.items() for m in _device(run))
    return "\n\n".join(
        [
            "### Cross entropy and divergences",
            f"{_sources(runs)}, bf16, fraction of the copy of as many bytes. A step is the loss and its gradient; "
            "`inplace` writes the gradient over the logits, as Liger always does.",
            _both_ways(runs, list(points), "step"),
            _ahead(runs),
        ]
    )


def copy_rate(run: Run) -> float:
    """GB/s of the copy, the median of all points."""
    rates = sorted(m.bandwidth_gb_s or 0 for m in run.measurements if m.provider == COPY)
    return rates[len(rates) // 2] if rates else 0.0


def _pages(start: Path) -> str:
    return os.path.relpath(ROOT / "docs" / "index.md", start)


def _runs(gpus: Sequence[Gpu], ops: Iterable[str]) -> dict[tuple[str, Gpu], Run]:
    """Those that have results, by op and then GPU."""
    files = {(op, gpu): gpu.folder / f"{op}.json" for op in ops for gpu in gpus}
    return {key: records.read(path) for key, path in files.items() if path.exists()}


def _sources(runs: Runs) -> str:
    seen = [vars(one) for run in runs.values() for one in run.environments("forward", "backward")]
    return f"Measured by `python -m benchmarks` on {made_on(*seen)}"


def _device(run: Run) -> list[Measurement]:
    return [m for m in run.measurements if m.direction in ("forward", "backward") and m.dtype == "bfloat16"]


def _fraction(m: Measurement | None) -> str:
    if m is None:
        return "-"
    return "fails" if m.fraction is None else f"{m.fraction:.2f}"


def _by_provider(points: Sequence[str], found: Mapping[Gpu, Sequence[Measurement]]) -> str:
    """A row a provider and GPU, a column a point."""
    rows = []
    for gpu, own in found.items():
        at = {(m.provider, m.point): m for m in own}
        present = [name for name in COLUMNS if any(m.provider == name for m in own)]
        rows += [
            [label(name), gpu.name, *(_fraction(at.get((name, point))) for point in points)]
            for name in present
        ]
    return table_by_gpu(["", "GPU", *points], rows)


def _both_ways(runs: Runs, points: Sequence[tuple[str, str]], second: str) -> str:
    """A row a point and GPU, forward and backward of ours and of two peers."""
    names = ("liger_aot", "liger", "torch_compile")
    rows = []
    for op, point in points:
        for gpu in (gpu for other, gpu in runs if other == op):
            at = {(m.direction, m.provider): m for m in _device(runs[op, gpu]) if m.point == point}
            cells = [_fraction(at.get((way, name))) for way in ("forward", "backward") for name in names]
            if at:
                rows.append([f"`{op}` {point}", gpu.name, *cells])
    columns = [
        f"{way}: {short_label(name)}" if name == NAMES[0] else short_label(name)
        for way in ("forward", second)
        for name in names
    ]
    return table_by_gpu(["op, point", "GPU", *columns], rows)


def _host(runs: Runs) -> str:
    measured = {gpu: [m for m in run.measurements if m.status == "ok"] for (_, gpu), run in runs.items()}
    at = {(m.direction, gpu, m.provider): m for gpu, own in measured.items() for m in own}
    present = [
        name for name in COLUMNS if any((way, gpu, name) in at for way, _ in HOST_ROWS for gpu in measured)
    ]
    rows = [
        [title, gpu.name, *(_number(at.get((way, gpu, name))) for name in present)]
        for way, title in HOST_ROWS
        for gpu in measured
        if any((way, gpu, name) in at for name in present)
    ]
    return table_by_gpu(["", "GPU", *map(label, present)], rows) if rows else ""


def _number(m: Measurement | None) -> str:
    if m is None:
        return "-"
    value = m.host_us if m.host_us is not None else m.median_ms or 0.0
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _ahead(runs: Runs) -> str:
    """Where a peer takes less time than ours by more than the margin."""
    several = len({gpu for _, gpu in runs}) > 1
    found = []
    for (op, gpu), run in runs.items():
        at = {
            (m.direction, m.point, m.provider): m.median_ms for m in _device(run) if m.median_ms is not None
        }
        for (direction, point, provider), ours in at.items():
            if provider != NAMES[0]:
                continue
            peers = {name: at[direction, point, name] for name in NAMES[1:] if (direction, point, name) in at}
            best = min(peers, key=peers.__getitem__, default=None)
            if best is not None and peers[best] * summary.MARGIN < ours:
                where = f" on the {gpu.name}" if several else ""
                factor = f"{short_label(best)}, {ours / peers[best]:.2f} times as fast"
                found.append(f"`{op}` {direction} {point}{where} ({factor})")
    margin = f"more than {(summary.MARGIN - 1) * 100:.0f}%"
    return f"A peer is ahead by {margin}: {', '.join(found) or 'nowhere'}."
