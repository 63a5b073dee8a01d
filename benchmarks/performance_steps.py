"""The sections whose figures are in files of their own kinds (results/GPU/steps): attention, decoding, fused linear
losses, training."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.markdown import Gpu, link, made_on, table_by_gpu

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
    "liger": "Liger (Triton JIT)",
    "liger, float32 dW": "Liger, fp32 dW",
}
TITLES = {
    "fused_linear_cross_entropy": "Fused linear cross entropy",
    "fused_linear_jsd": "Fused linear Jensen-Shannon divergence",
}
GIB = 1 << 30

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
            f"{_source(found, start, f'attention{flag}')} In bf16, {found[0].data['tokens']} tokens "
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
        rows.append([str(x) for x in (point["batch"], point["cached"], *sizes, gpu.name, *cells)])
    header = ["batch", "cached", "heads", "dim", "tokens", "page", "GPU", *(LABELS[name] for name in names)]
    return "\n\n".join(
        [
            "### Decoding",
            f"{_source(found, start, 'decoding')} In bf16: bytes of keys and values read a second, "
            "as a fraction of the bytes a second that a copy reads and writes in the same rounds. The peers are torch "
            "SDPA over the same contiguous cache.",
            table_by_gpu(header, rows),
        ]
    )


def fused_linear_cross_entropy(gpus: Sequence[Gpu], start: Path) -> str:
    return _fused_linear(gpus, start, "fused_linear_cross_entropy", "linear_losses", "three")


def fused_linear_jsd(gpus: Sequence[Gpu], start: Path) -> str:
    return _fused_linear(gpus, start, "fused_linear_jsd", "linear_jsd", "four")


def _fused_linear(gpus: Sequence[Gpu], start: Path, op: str, module: str, products: str) -> str:
    found = steps(gpus, f"{op}_steps")
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
            f"### {TITLES[op]}",
            f"{_source(found, start, f'{module}')} In bf16, forward and backward: time as a multiple "
            f"of the {products} matrix products alone in the same run, and peak memory, gradients included.",
            table_by_gpu(["tokens x hidden x vocabulary", "GPU", *(LABELS[name] for name in names)], rows),
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
        f"{_source(found, start, 'training')} In bf16, random weights: tokens per second, and the "
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
        f"{_source(found, start, 'first_step')} Seconds in a fresh process with empty compile caches, "
        f"{found[0].data['model']}, from when torch is imported and the GPU has a context. In brackets: without the "
        "import of Transformers and the making of the model, which every column needs.",
        table_by_gpu(["", "GPU", *(LABELS[name] for name in names)], rows),
    ]


def _seconds(r: Result) -> str:
    return f"{r['total']:.2f} ({sum(r['phases'][-2:]):.2f})"


def _source(found: Sequence[Steps], start: Path, module: str) -> str:
    """A sentence: what measured it, where, and the files."""
    on = ", and on ".join(f"{made_on(one.environment)}: {link(one.path, start)}" for one in found)
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
