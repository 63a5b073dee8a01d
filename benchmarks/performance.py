"""The tables of figures in README.md and docs/performance.md, from the files of results alone: `python -m benchmarks
performance`.

A section stands between two markers, with its heading and with where it was measured. It shows every GPU that has a
folder of results with the section's file. A section without results is left empty, so that results which come later
need this command and nothing else.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import records, tables
from benchmarks.environment import ROOT
from benchmarks.markdown import Gpu, gpus, link, made_again, made_in, made_on, table, table_by_gpu
from benchmarks.providers import COPY, NAMES, label, short_label
from benchmarks.records import Measurement, Run

PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md")
MARKED = re.compile(r"(<!-- measured: ([\w ]+) -->\n)(.*?)(<!-- /measured -->)", re.DOTALL)


def write(*, check: bool = False) -> list[Path]:
    """Put the sections into the pages; returns the pages that were not up to date.

    Args:
        check: write nothing.

    Raises:
        ValueError: a marker names no section, or a file of results contradicts itself.
    """
    stale = []
    for page in PAGES:
        before = page.read_text()
        after = rendered(before, gpus(), page.parent)
        if after != before:
            stale.append(page)
            if not check:
                page.write_text(after)
    return stale


def rendered(text: str, found: Sequence[Gpu], start: Path) -> str:
    """``text``, of a page in the folder ``start``, with what stands between its markers made anew."""

    def fresh(match: re.Match[str]) -> str:
        opening, name, _, closing = match.groups()
        section = body(name, found, start)
        return f"{opening}\n{section}\n\n{closing}" if section else f"{opening}{closing}"

    return MARKED.sub(fresh, text)


def body(name: str, found: Sequence[Gpu], start: Path) -> str:
    """A section for a page in the folder ``start``; "" where no GPU has results for it."""
    if name not in SECTIONS:
        raise ValueError(f"no section {name!r}: there are {', '.join(SECTIONS)}")
    return SECTIONS[name](found, start)


# ---- The ops' records: RMSNorm, the other ops, the losses ----

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
    ("mhc_coefficients", "8192x4x2048"),
    ("mhc_pre", "8192x4x2048"),
    ("mhc_post", "8192x4x2048"),
    ("attention_residuals", "8x8192x4096"),
    ("neighborhood_attention", "2x16x4096x64"),
    ("grpo_loss", "4x1024x128256"),
    ("cross_entropy_tvd", "128256"),
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
            if best is not None and peers[best] * tables.MARGIN < ours:
                where = f" on the {gpu.name}" if several else ""
                factor = f"{short_label(best)}, {ours / peers[best]:.2f} times as fast"
                found.append(f"`{op}` {direction} {point}{where} ({factor})")
    margin = f"more than {(tables.MARGIN - 1) * 100:.0f}%"
    return f"A peer is ahead by {margin}: {', '.join(found) or 'nowhere'}."


# ---- Files of their own kinds (results/GPU/steps): attention, decoding, fused linear losses, training ----

LABELS = {
    "products": "products, ms",
    "liger_aot": "liger-aot",
    "liger_aot, float32 dW": "with fp32 dW",
    "liger_aot_attention": "liger-aot, its attention too",
    "liger_on_aot": "Liger's code on liger-aot",
    "cudnn": "cuDNN",
    "flash_attention_2": "FlashAttention-2",
    "torch": "torch",
    "torch_compile": "torch.compile",
    "transformers": "Transformers",
    "transformers_on_aot": "Transformers on liger-aot's attention",
    "liger": "Liger (Triton JIT)",
    "liger, float32 dW": "Liger, fp32 dW",
}


class LinearLoss(NamedTuple):
    """A section of a loss of linear layers: its file, heading, command, and how many products bound it."""

    record: str
    title: str
    command: str
    products: str


LINEAR_LOSSES = {
    "fused linear cross entropy": LinearLoss(
        "fused_linear_cross_entropy", "Fused linear cross entropy", "losses.linear cross_entropy", "three"
    ),
    "fused linear jsd": LinearLoss(
        "fused_linear_jsd", "Fused linear Jensen-Shannon divergence", "losses.linear jsd", "four"
    ),
    "fused linear log probs": LinearLoss(
        "fused_linear_log_probs",
        "Fused linear log-probabilities and entropies",
        "losses.linear log_probs",
        "four",
    ),
    "fused linear preference loss": LinearLoss(
        "fused_linear_preference_loss",
        "Fused linear preference loss: DPO",
        "post_training.linear dpo",
        "four",
    ),
    "fused linear orpo": LinearLoss(
        "fused_linear_preference_loss_orpo",
        "Fused linear preference loss: ORPO",
        "post_training.linear orpo",
        "three",
    ),
    "fused linear kto": LinearLoss(
        "fused_linear_preference_loss_kto",
        "Fused linear preference loss: KTO",
        "post_training.linear kto",
        "four",
    ),
    "fused linear grpo loss": LinearLoss(
        "fused_linear_grpo_loss", "Fused linear GRPO loss", "post_training.linear grpo", "four"
    ),
    "fused linear distillation": LinearLoss(
        "fused_linear_distillation_loss",
        "Fused linear distillation",
        "post_training.linear distillation",
        "four",
    ),
    "fused linear kl div": LinearLoss(
        "fused_linear_kl_div", "Fused linear KL divergence", "post_training.linear kl_div", "three"
    ),
}
GIB = 1 << 30

OURS_BY_NAME = NAMES[0]

Result = Mapping[str, Any]  # of one provider at one point


@dataclass(frozen=True)
class Steps:
    """What one GPU's file of a benchmark holds."""

    gpu: Gpu
    path: Path
    data: Mapping[str, Any]

    @property
    def environment(self) -> Mapping[str, Any]:
        """Files without a part of that name have what they know of it beside the figures."""
        found: Mapping[str, Any] = self.data.get("environment", self.data)
        return found


def steps(gpus: Sequence[Gpu], name: str) -> list[Steps]:
    """A benchmark's files, of the GPUs that have one."""
    paths = {gpu: gpu.folder / "steps" / f"{name}.json" for gpu in gpus}
    return [Steps(gpu, path, json.loads(path.read_text())) for gpu, path in paths.items() if path.exists()]


def attention_forward(gpus: Sequence[Gpu], start: Path) -> str:
    return _attention(gpus, start, "forward")


def attention_backward(gpus: Sequence[Gpu], start: Path) -> str:
    return _attention(gpus, start, "backward")


def tflops(one: Steps, direction: str) -> dict[tuple[int, bool, int], Mapping[str, float]]:
    """By head dimension, mask and length, then provider. A row with other fields is of another problem."""
    plain = [row for row in one.data[direction] if set(row) == {"dim", "causal", "length", "tflops"}]
    return {(row["dim"], row["causal"], row["length"]): row["tflops"] for row in plain}


def _attention(gpus: Sequence[Gpu], start: Path, direction: str) -> str:
    found = steps(gpus, f"attention_{direction}")
    if not found:
        return ""
    measured = {one.gpu: tflops(one, direction) for one in found}
    points = sorted({point for own in measured.values() for point in own})
    kinds = sorted({(causal, length) for _, causal, length in points})

    def cell(gpu: Gpu, dim: int, causal: bool, length: int) -> str:
        at = measured[gpu].get((dim, causal, length), {})
        if not at:
            return "-"
        return " / ".join(f"{at[name]:.0f}" if name in at else "-" for name in ("liger_aot", "cudnn"))

    rows = [
        [str(dim), gpu.name, *(cell(gpu, dim, *kind) for kind in kinds)]
        for dim in sorted({dim for dim, _, _ in points})
        for gpu, own in measured.items()
        if any(dim == at for at, _, _ in own)
    ]
    columns = [f"{'causal' if causal else 'full'} {length}" for causal, length in kinds]
    flag = "" if direction == "forward" else " --backward"
    return "\n\n".join(
        [
            f"### Attention {direction}",
            f"{_source(found, start, f'attention.attention{flag}')} In bf16, {found[0].data['tokens']} tokens "
            "a batch and 2048 columns in all heads: TFLOP/s of liger-aot / of cuDNN through torch SDPA, by head "
            "dimension, mask and sequence length:",
            table_by_gpu(["dim", "GPU", *columns], rows),
            *(_against_peers(one, measured[one.gpu]) for one in found),
        ]
    )


def _against_peers(one: Steps, found: Mapping[tuple[int, bool, int], Mapping[str, float]]) -> str:
    """Where cuDNN is ahead at all, and how fast FlashAttention-2 is."""
    ratios = {at: t["cudnn"] / t["liger_aot"] for at, t in found.items() if {"cudnn", "liger_aot"} <= set(t)}
    names = [
        f"{'causal' if causal else 'full'} {length} at {dim} ({ratio:.2f})"
        for (dim, causal, length), ratio in sorted(ratios.items())
        if ratio > 1
    ]
    ahead = f"{', namely ' if names else ''}{', '.join(names)}"
    other = [t["flash_attention_2"] for t in found.values() if "flash_attention_2" in t]
    others = f" FlashAttention-2 through SDPA reaches {min(other):.0f} to {max(other):.0f}." if other else ""
    return f"On the {one.gpu.name} cuDNN is ahead in {len(names)} of {len(ratios)} cases{ahead}.{others}"


def decoding(gpus: Sequence[Gpu], start: Path) -> str:
    found = steps(gpus, "flash_decoding_points")
    if not found:
        return ""
    at = {
        (tuple(r["point"].items()), one.gpu, r["provider"]): r for one in found for r in one.data["results"]
    }
    names = _present(at)
    rows = []
    for key, gpu in _places(at):
        point = dict(key)
        sizes = [f"{point['heads']}/{point['kv_heads']}", point["dim"], point["tokens"], point["page"] or "-"]
        cells = [_cell(at, key, gpu, name, lambda r: f"{r['of_copy']:.2f}") for name in names]
        shortest = point.get("shortest", 0)  # which earlier records have not
        cached = f"{shortest} to {point['cached']}" if shortest else point["cached"]
        rows.append([str(x) for x in (point["batch"], cached, *sizes, gpu.name, *cells)])
    header = ["batch", "cached", "heads", "dim", "tokens", "page", "GPU", *(LABELS[name] for name in names)]
    return "\n\n".join(
        [
            "### Decoding",
            f"{_source(found, start, 'decoding.decoding')} In bf16: bytes of keys and values read a second, "
            "as a fraction of the bytes a second that a copy reads and writes in the same rounds. The peers are torch "
            "SDPA over the same contiguous cache.",
            table_by_gpu(header, rows),
        ]
    )


@dataclass(frozen=True)
class ByCount:
    """Microseconds of ours and of the fastest peer, with a column for each value of a field of the points."""

    record: str
    title: str
    module: str
    about: str
    rows: tuple[str, ...]  # the fields whose values head a row
    columns: str
    peers: Mapping[str, str]  # a peer's name in the record: in words
    heads: Mapping[str, str]  # of the rows' fields, where it is not the name

    @property
    def letters(self) -> Mapping[str, str]:
        """What stands behind a peer's figure: nothing where there is one peer."""
        several = len(self.peers) > 1
        return {name: " " + words.split("(")[1][0] if several else "" for name, words in self.peers.items()}


LIGER, VLLM = {"liger": "Liger (l)"}, {"vllm": "vLLM's CUDA kernel (v)"}
BY_COUNT: dict[str, ByCount] = {
    "few rows": ByCount(
        "few_rows",
        "Few rows",
        "few_rows",
        "bf16, by the number of rows. Gated activations: columns of the result. fused_add_rmsnorm and rope in place; "
        "rope: heads of 128, 8 of k.",
        ("kind", "columns"),
        "rows",
        {**VLLM, "torch_compile": "torch.compile (t)", **LIGER},
        {"kind": "op"},
    ),
    "quantization": ByCount(
        "quantization",
        "Quantisation to fp8",
        "quantization.quantization",
        "bf16 to e4m3, by the number of rows; a scale per tensor (given), per token or per group of 128 columns. Gated "
        "activations: columns of the result.",
        ("kind", "scheme", "columns"),
        "rows",
        VLLM,
        {"kind": "op", "scheme": "scale per"},
    ),
    "cache": ByCount(
        "cache",
        "Caches of keys and values",
        "cache.cache",
        "bf16, heads of 128, by the number of tokens. vLLM's are two kernels where ours is one: the norms and the "
        "rotary embedding, and the writing.",
        ("kind", "q_heads", "kv_heads"),
        "tokens",
        VLLM,
        {"kind": "op", "q_heads": "heads of q", "kv_heads": "heads of k"},
    ),
    "paged attention": ByCount(
        "flash_attention_paged_points",
        "Attention to a paged cache",
        "attention.paged",
        "bf16, 32 heads of 128 and 8 of keys, causal, by the page size: so many sequences x queries on keys that are "
        "there before.",
        ("name",),
        "page",
        {"fa3": "FlashAttention-3 in vLLM's build"},
        {"name": "sequences and queries"},
    ),
    "sampling": ByCount(
        "sampling",
        "Sampling",
        "sampling.sampling",
        "float32 logits, by the number of rows. Flat: normally distributed logits; peaked: a few columns have most of "
        "the probability.",
        ("task", "kind", "columns"),
        "rows",
        {
            "torch": "torch, by a sort (t)",
            "vllm": "vLLM's Triton kernels (v)",
            "flashinfer": "FlashInfer (f)",
        },
        {"kind": "rows are"},
    ),
}


def by_count(gpus: Sequence[Gpu], start: Path, of: ByCount) -> str:
    found = steps(gpus, of.record)
    if not found:
        return ""
    us: dict[tuple[tuple[str, ...], Gpu], dict[int, dict[str, float]]] = {}
    for one in found:
        for r in one.data["results"]:
            at = r["point"]
            points = us.setdefault((tuple(str(at[name]) for name in of.rows), one.gpu), {})
            if r["us"] is not None:
                points.setdefault(at[of.columns], {})[r["provider"]] = r["us"]
    counts = sorted({count for points in us.values() for count in points})
    table = [
        [*heads, gpu.name, *(_beside_the_best(points.get(count, {}), of) for count in counts)]
        for (heads, gpu), points in us.items()
    ]
    *others, last = of.peers.values()
    names = f"the fastest of {', '.join(others)} and {last}" if others else last.removesuffix(" (v)")
    return "\n\n".join(
        [
            f"### {of.title}",
            f"{_source(found, start, of.module)} Microseconds a call in a CUDA graph: ours / {names}, as far as each "
            f"has the op and was measured there; {of.about} A peer is ahead by more than "
            f"{(tables.MARGIN - 1) * 100:.0f}% at "
            + ", ".join(_behind(us, one.gpu, of) for one in found)
            + ".",
            table_by_gpu(
                [of.heads.get(name, name) for name in of.rows] + ["GPU", *map(str, counts)],
                sorted(table, key=lambda row: row[0]),
            ),
        ]
    )


def _peers(us: Mapping[str, float], of: ByCount) -> dict[str, float]:
    return {name: us[name] for name in of.peers if name in us}


def _beside_the_best(us: Mapping[str, float], of: ByCount) -> str:
    if OURS_BY_NAME not in us:
        return "-"
    peers = _peers(us, of)
    best = min(peers, key=peers.__getitem__, default=None)
    return f"{us[OURS_BY_NAME]:.2f}" + ("" if best is None else f" / {peers[best]:.2f}{of.letters[best]}")


def _behind(
    us: Mapping[tuple[tuple[str, ...], Gpu], Mapping[int, Mapping[str, float]]], gpu: Gpu, of: ByCount
) -> str:
    """In how many points a peer is more than 3% faster."""
    points = [
        p
        for (_, on), by in us.items()
        if on == gpu
        for p in by.values()
        if OURS_BY_NAME in p and _peers(p, of)
    ]
    behind = [p for p in points if min(_peers(p, of).values()) * tables.MARGIN < p[OURS_BY_NAME]]
    return f"{len(behind)} of {len(points)} points on the {gpu.name}"


def _fused_linear(gpus: Sequence[Gpu], start: Path, loss: LinearLoss) -> str:
    found = steps(gpus, f"{loss.record}_steps")
    if not found:
        return ""
    at = {(tuple(r["shape"]), one.gpu, r["provider"]): r for one in found for r in one.data["results"]}
    names = _present(at)

    def text(r: Result) -> str:
        if r["provider"] == "products":
            return f"{r['median_ms']:.1f}"
        return f"{r['of_products']:.2f}, {r['peak_gib']:.2f} GiB"

    rows = [
        [" x ".join(map(str, shape)), gpu.name, *(_cell(at, shape, gpu, name, text) for name in names)]
        for shape, gpu in _places(at)
    ]
    return "\n\n".join(
        [
            f"### {loss.title}",
            f"{_source(found, start, loss.command)} In bf16, forward and backward: time as a multiple "
            f"of the {loss.products} matrix products alone in the same run, and peak memory, gradients included.",
            table_by_gpu(["tokens x hidden x vocabulary", "GPU", *(LABELS[name] for name in names)], rows),
        ]
    )


def experts(gpus: Sequence[Gpu], start: Path) -> str:
    found = steps(gpus, "experts")
    if not found:
        return ""
    at = {
        ((r["model"], r["tokens"], r["direction"]), one.gpu, r["provider"]): r
        for one in found
        for r in one.data["results"]
    }
    names = _present(at)
    rows = [
        [
            f"{point[0]}, {point[1]} tokens, {point[2]}",
            gpu.name,
            *(_cell(at, point, gpu, name, lambda r: f"{r['median_ms']:.2f}") for name in names),
        ]
        for point, gpu in _places(at)
    ]
    return "\n\n".join(
        [
            "### Mixture of experts",
            f"{_source(found, start, 'moe.experts')} In bf16, milliseconds, indices uniform. qwen3: 128 "
            "experts of 2048 x 768, top 8; gpt-oss: 32 of 2880 x 2880, top 4; mixtral: 8 of 4096 x 14336, top 2. The "
            "products are torch's "
            "grouped ones alone, on rows that lie sorted; torch is what Transformers' `grouped_mm` does.",
            table_by_gpu(["", "GPU", *(LABELS[name] for name in names)], rows),
        ]
    )


def training(gpus: Sequence[Gpu], start: Path) -> str:
    """Whole steps of models and, where they were measured, the first ones of a process."""
    found = steps(gpus, "training")
    if not found:
        return ""
    at = {
        (tuple(r["point"].values()), one.gpu, r["provider"]): r for one in found for r in one.data["results"]
    }
    names = _present(at)

    def text(r: Result) -> str:
        memory = f", {r['peak_bytes'] / GIB:.1f} GiB" if r["peak_bytes"] else ""
        return f"{r['tokens_per_second']:.0f}{memory}"

    rows = []
    for key, gpu in _places(at):
        model, batch, tokens, optimizer = key
        cells = [_cell(at, key, gpu, name, text) for name in names]
        rows.append([f"{model} {batch} x {tokens}, {optimizer}", gpu.name, *cells])
    parts = [
        "### Training",
        f"{_source(found, start, 'models.training')} In bf16, random weights: tokens per second, and the "
        "peak memory of a step.",
        table_by_gpu(["model, batch x tokens", "GPU", *(LABELS[name] for name in names)], rows),
    ]
    return "\n\n".join([*parts, *_first_step(gpus, start)])


def _first_step(gpus: Sequence[Gpu], start: Path) -> list[str]:
    found = steps(gpus, "first_step")
    if not found:
        return []
    at = {(r["goal"], one.gpu, r["provider"]): r for one in found for r in one.data["results"]}
    names = _present(at)
    rows = [
        [f"to the first {goal}", gpu.name, *(_cell(at, goal, gpu, name, _seconds) for name in names)]
        for goal, gpu in _places(at)
    ]
    return [
        f"{_source(found, start, 'models.first_step')} Seconds in a fresh process with empty compile caches, "
        f"{found[0].data['model']}, from when torch is imported and the GPU has a context. In brackets: without the "
        "import of Transformers and the making of the model, which every column needs.",
        table_by_gpu(["", "GPU", *(LABELS[name] for name in names)], rows),
    ]


def _seconds(r: Result) -> str:
    return f"{r['total']:.2f} ({sum(r['phases'][-2:]):.2f})"


def serving(gpus: Sequence[Gpu], start: Path) -> str:
    """The example's server beside Transformers' continuous batching."""
    found = steps(gpus, "serve")
    if not found:
        return ""
    at = _served(found)
    names, facts = _present(at), found[0].data

    def text(r: Result) -> str:
        return f"{r['tokens_per_second']:.0f}, {r['first_ms']:.0f} / {r['next_ms']:.1f}"

    rows = [
        [dtype, str(count), gpu.name, *(_cell(at, (dtype, count), gpu, name, text) for name in names)]
        for (dtype, count), gpu in _places(at)
    ]
    prompt, answer = (f"{fewest} to {most}" for fewest, most in (facts["prompt"], facts["answer"]))
    return "\n\n".join(
        [
            "### Serving",
            f"{_source(found, start, 'models.serve')} {facts['model']} with random weights, served by "
            f"`examples/serve.py`: prompts of {prompt} tokens, answers of {answer}, as many users as sequences, each "
            "of whom asks again. Tokens a second, and the medians of the milliseconds to a request's first token / to "
            "each next one. Transformers' continuous batching answers the same requests, attending with torch's SDPA "
            "or with liger-aot, by CUDA graphs.",
            table_by_gpu(["products", "sequences", "GPU", *(LABELS[name] for name in names)], rows),
        ]
    )


def serving_steps(gpus: Sequence[Gpu], start: Path) -> str:
    """What the decoding steps of the example's server are made of."""
    found = steps(gpus, "serve")
    own = {
        (point, gpu): r["steps"]
        for (point, gpu, name), r in _served(found).items()
        if name == OURS_BY_NAME and r["steps"]
    }
    lengths = sorted({int(length) for by in own.values() for length in by})
    if not lengths:
        return ""
    rows = [
        [*map(str, point), gpu.name, *(_made_of(own[point, gpu].get(str(length))) for length in lengths)]
        for point, gpu in _places((point, gpu, "") for point, gpu in own)
    ]
    return "\n\n".join(
        [
            "### A step of the server",
            f"{_source(found, start, 'models.serve')} Milliseconds of a step in which every sequence grows by a token, "
            "and of these, by the sequences' length, what is attention / neither attention nor matrix products. "
            "Products and attention are timed alone, as graphs of their own.",
            table_by_gpu(["products", "sequences", "GPU", *map(str, lengths)], rows),
        ]
    )


def _served(found: Sequence[Steps]) -> dict[tuple[tuple[str, int], Gpu, str], Result]:
    return {
        ((r["point"]["dtype"], r["point"]["sequences"]), one.gpu, r["provider"]): r
        for one in found
        for r in one.data["results"]
    }


def _made_of(step: Mapping[str, float] | None) -> str:
    if step is None:
        return "-"
    rest = step["whole"] - step["products"] - step["attention"]
    return f"{step['whole']:.2f}, {step['attention'] / step['whole']:.1%} / {rest / step['whole']:.1%}"


def server(gpus: Sequence[Gpu], start: Path) -> str:
    """README's sentence about the server: bf16."""
    parts = []
    for one in steps(gpus, "serve"):
        ours = {
            r["point"]["sequences"]: r
            for r in one.data["results"]
            if r["provider"] == OURS_BY_NAME and r["point"]["dtype"] == "bf16" and r["steps"]
        }
        if not ours:
            continue
        few, many = min(ours), max(ours)
        length = min(map(int, ours[many]["steps"]))
        shares = []
        for count in (few, many):
            step = ours[count]["steps"][str(length)]
            attention = step["attention"] / step["whole"]
            shares.append(f"{1 - step['products'] / step['whole']:.0%} (attention {attention:.0%})")
        rates = [ours[count]["tokens_per_second"] for count in (few, many)]
        parts.append(
            f"On an {one.gpu.name} it serves {one.data['model']}'s shapes at {rates[0]:.0f} tokens a second for "
            f"{few} sequence{'s' if few > 1 else ''} and {rates[1]:,.0f} for {many} (bf16). With {length} "
            f"tokens a sequence, everything but the matrix products takes {shares[0]} of a step for {few} and "
            f"{shares[1]} for {many}: [all figures]({os.path.relpath(PAGES[1], start)}#serving)."
        )
    return " ".join(parts)


def _source(found: Sequence[Steps], start: Path, module: str) -> str:
    """A sentence: what measured it, where, and the files."""
    on = ", and on ".join(
        f"{made_on(one.environment)}{made_again(one.data.get('again', {}))}: {link(one.path, start)}"
        for one in found
    )
    return f"Measured by `python -m benchmarks.{module}` on {on}."


def _places(found: Iterable[tuple[Any, Gpu, str]]) -> list[tuple[Any, Gpu]]:
    """The points, each with the GPUs that have it, in the files' order."""
    every = dict.fromkeys((point, gpu) for point, gpu, _ in found)
    points = list(dict.fromkeys(point for point, _ in every))
    return sorted(every, key=lambda place: points.index(place[0]))


def _present(found: Iterable[tuple[Any, Gpu, str]]) -> list[str]:
    """The providers that any record is of, in the order of the columns."""
    providers = {provider for *_, provider in found}
    return [name for name in LABELS if name in providers]


def _cell(
    found: Mapping[tuple[Any, Gpu, str], Result],
    at: Any,
    gpu: Gpu,
    provider: str,
    text: Callable[[Result], str],
) -> str:
    r = found.get((at, gpu, provider))
    if r is None:
        return "-"
    return "fails" if r["failed"] else text(r)


# ---- The README's table: a line for each kind of op, ours beside the best peer ----

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
    ours = " / ".join(_shown(figures[OURS]) for figures in directions)
    values = [_shown(figures[name]) if name else "-" for figures, name in zip(directions, peers, strict=True)]
    if len(set(peers)) == 1:
        return [ours, f"{' / '.join(values)} {peers[0]}".strip()]
    return [ours, " / ".join(f"{value} {name}".strip() for value, name in zip(values, peers, strict=True))]


def _shown(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _op_figures(gpu: Gpu, op: str, points: Sequence[tuple[str, str]]) -> list[Figures]:
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
    return partial(_op_figures, op=op, points=[("forward", point), ("backward", point)])


def _attention_figures(gpu: Gpu) -> list[Figures]:
    """TFLOP/s, forward and backward."""
    found: list[Figures] = []
    for direction in ("forward", "backward"):
        files = steps([gpu], f"attention_{direction}")
        measured = tflops(files[0], direction).get((128, True, 8192), {}) if files else {}
        found.append({LABELS[name]: value for name, value in measured.items()})
    return found


def _decoding_figures(gpu: Gpu, batch: int, cached: int) -> list[Figures]:
    """GB/s of keys and values, one token a sequence, 64 query heads to 8 heads of keys."""
    usual = {"batch": batch, "cached": cached, "page": 0, "dim": 128, "heads": 64, "kv_heads": 8, "tokens": 1}
    return [
        {
            "SDPA" if r["provider"] == "torch" else LABELS[r["provider"]]: r["gigabytes_per_second"]
            for r in one.data["results"]
            if r["point"].items() >= usual.items() and not r["point"].get("shortest") and not r["failed"]
            if r["provider"] != COPY
        }
        for one in steps([gpu], "flash_decoding_points")
    ]


def _linear_figures(gpu: Gpu) -> list[Figures]:
    """Milliseconds of a step with dW in the weight's dtype."""
    return [
        {
            short_label(r["provider"]): r["median_ms"]
            for r in one.data["results"]
            if r["shape"] == [8192, 4096, 128256] and not r["failed"] and r["provider"] in NAMES
        }
        for one in steps([gpu], "fused_linear_cross_entropy_steps")
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
    Row(
        "Fused linear cross entropy, 8192 x 4096 x 128256: loss and gradients, ms",
        _linear_figures,
        lower=True,
    ),
    Row(
        "Attention, head dimension 128, causal, 8192 tokens: forward / backward, TFLOP/s", _attention_figures
    ),
    Row(
        "Decoding, 1 sequence of 32768 cached tokens, GB/s", partial(_decoding_figures, batch=1, cached=32768)
    ),
    Row(
        "Decoding, 32 sequences of 32768 cached tokens, GB/s",
        partial(_decoding_figures, batch=32, cached=32768),
    ),
    Row("First RMSNorm in a fresh process, compile caches empty, ms", _first_call, lower=True),
)


SECTIONS: dict[str, Callable[[Sequence[Gpu], Path], str]] = {
    "headline": headline,
    "rmsnorm": rmsnorm,
    "attention forward": attention_forward,
    "attention backward": attention_backward,
    "decoding": decoding,
    **{name: partial(by_count, of=of) for name, of in BY_COUNT.items()},
    "other ops": other_ops,
    "losses": losses,
    **{name: partial(_fused_linear, loss=loss) for name, loss in LINEAR_LOSSES.items()},
    "experts": experts,
    "training": training,
    "serving": serving,
    "serving steps": serving_steps,
    "server": server,
}
