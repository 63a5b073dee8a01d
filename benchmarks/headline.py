"""The README's table of figures: one line for each kind of op, ours beside the best peer, for each GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import performance_steps, records
from benchmarks.markdown import Gpu, table
from benchmarks.performance_ops import copy_rate
from benchmarks.performance_steps import LABELS
from benchmarks.providers import COPY, NAMES, short_label

Figures = Mapping[str, float]  # by the provider's name in the table
OURS = short_label(NAMES[0])


@dataclass(frozen=True)
class Row:
    """``figures`` gives those of one GPU, of each direction that the title names; empty ones where there are none."""

    title: str
    figures: Callable[[Gpu], list[Figures]]
    lower: bool = False  # is better


def headline(gpus: Sequence[Gpu], start: Path) -> str:
    cells = {(row.title, gpu): _cells(row, row.figures(gpu)) for row in ROWS for gpu in gpus}
    shown = [gpu for gpu in gpus if any(cells[row.title, gpu] for row in ROWS)]
    titles = [row.title for row in ROWS if any(cells[row.title, gpu] for gpu in shown)]
    if not shown:
        return ""
    header = ["", *(name for gpu in shown for name in (f"{gpu.name}: {OURS}", "best peer"))]
    rows = [[title, *(cell for gpu in shown for cell in cells[title, gpu] or ["-", "-"])] for title in titles]
    copies = [f"{rate:.0f} GB/s on the {gpu.name}" for gpu in shown if (rate := _copy(gpu))]
    limit = f" A device-to-device copy reaches {' and '.join(copies)}." if copies else ""
    eager = [f"{ms:.1f} ms on the {gpu.name}" for gpu in shown if (ms := _cold(gpu).get("torch"))]
    without = (
        f" The last row leaves out torch eager, which compiles nothing: {' and '.join(eager)}."
        if eager
        else ""
    )
    return f"{table(header, rows)}\n\nAll in bf16.{limit}{without}"


def _cells(row: Row, directions: Sequence[Figures]) -> list[str]:
    """Ours, and the best peer with its name; nothing where ours is not there."""
    if not directions or not all(OURS in figures for figures in directions):
        return []
    best = min if row.lower else max
    peers = [
        best((name for name in figures if name != OURS), key=figures.__getitem__, default="")
        for figures in directions
    ]
    ours = " / ".join(_number(figures[OURS]) for figures in directions)
    values = [
        _number(figures[name]) if name else "-" for figures, name in zip(directions, peers, strict=True)
    ]
    if len(set(peers)) == 1:
        return [ours, f"{' / '.join(values)} {peers[0]}".strip()]
    return [ours, " / ".join(f"{value} {name}".strip() for value, name in zip(values, peers, strict=True))]


def _number(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _op(gpu: Gpu, op: str, points: Sequence[tuple[str, str]]) -> list[Figures]:
    """GB/s at each (direction, point)."""
    path = gpu.folder / f"{op}.json"
    if not path.exists():
        return []
    found = [m for m in records.read(path).measurements if m.dtype == "bfloat16" and m.provider != COPY]
    return [
        {
            short_label(m.provider): m.bandwidth_gb_s
            for m in found
            if (m.direction, m.point) == at and m.bandwidth_gb_s
        }
        for at in points
    ]


def _both(op: str, point: str) -> Callable[[Gpu], list[Figures]]:
    return partial(_op, op=op, points=[("forward", point), ("backward", point)])


def _attention(gpu: Gpu) -> list[Figures]:
    """TFLOP/s, forward and backward."""
    found: list[Figures] = []
    for direction in ("forward", "backward"):
        files = performance_steps.steps([gpu], f"attention_{direction}")
        measured = performance_steps.tflops(files[0], direction).get((128, True, 8192), {}) if files else {}
        found.append({LABELS[name]: value for name, value in measured.items()})
    return found


def _decoding(gpu: Gpu, batch: int, cached: int) -> list[Figures]:
    """GB/s of keys and values, one token a sequence, 64 query heads to 8 heads of keys."""
    usual = {"batch": batch, "cached": cached, "page": 0, "dim": 128, "heads": 64, "kv_heads": 8, "tokens": 1}
    return [
        {
            "SDPA" if r["provider"] == "torch" else LABELS[r["provider"]]: r["gigabytes_per_second"]
            for r in one.data["results"]
            if r["point"] == usual and not r["failed"] and r["provider"] != COPY
        }
        for one in performance_steps.steps([gpu], "flash_decoding_points")
    ]


def _linear(gpu: Gpu) -> list[Figures]:
    """Milliseconds of a step with dW in the weight's dtype."""
    return [
        {
            short_label(r["provider"]): r["median_ms"]
            for r in one.data["results"]
            if r["shape"] == [8192, 4096, 128256] and not r["failed"] and r["provider"] in NAMES
        }
        for one in performance_steps.steps([gpu], "fused_linear_cross_entropy_steps")
    ]


def _first_call(gpu: Gpu) -> list[Figures]:
    return [{short_label(name): ms for name, ms in _cold(gpu).items() if name != "torch"}]


def _cold(gpu: Gpu) -> Figures:
    """Milliseconds from import to the result, by provider."""
    path = gpu.folder / "rmsnorm.json"
    cold = records.read(path).select(direction="cold_total", status="ok") if path.exists() else []
    return {m.provider: m.median_ms for m in cold if m.median_ms}


def _copy(gpu: Gpu) -> float:
    path = gpu.folder / "rmsnorm.json"
    return copy_rate(records.read(path)) if path.exists() else 0.0


ROWS = (
    Row("RMSNorm, rows of 4096: forward / backward, GB/s", _both("rmsnorm", "4096")),
    Row("RMSNorm with residual, rows of 8192: forward / backward, GB/s", _both("fused_add_rmsnorm", "8192")),
    Row("LayerNorm, rows of 8192: forward / backward, GB/s", _both("layernorm", "8192")),
    Row("SwiGLU, rows of 11008: forward / backward, GB/s", _both("swiglu", "11008")),
    Row("Softmax, rows of 262144: forward / backward, GB/s", _both("softmax", "262144")),
    Row("Cross entropy, vocabulary 262144: loss / loss and gradient, GB/s", _both("cross_entropy", "262144")),
    Row("Fused linear cross entropy, 8192 x 4096 x 128256: loss and gradients, ms", _linear, lower=True),
    Row("Attention, head dimension 128, causal, 8192 tokens: forward / backward, TFLOP/s", _attention),
    Row("Decoding, 1 sequence of 32768 cached tokens, GB/s", partial(_decoding, batch=1, cached=32768)),
    Row("Decoding, 32 sequences of 32768 cached tokens, GB/s", partial(_decoding, batch=32, cached=32768)),
    Row("First RMSNorm in a fresh process, compile caches empty, ms", _first_call, lower=True),
)
