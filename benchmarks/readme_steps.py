"""The README's sections whose figures are whole steps, in files of their own kinds: attention, decoding, fused linear
cross entropy, training."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from .markdown import link, made_on, table

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


def attention_forward(results: Path) -> str:
    return _attention(results, "forward")


def attention_backward(results: Path) -> str:
    return _attention(results, "backward")


def _attention(results: Path, direction: str) -> str:
    data, path = _steps(results, f"attention_{direction}.json")
    # A row with more to it is of another problem.
    plain = [row for row in data[direction] if set(row) == {"dim", "causal", "length", "tflops"}]
    found = {(row["dim"], row["causal"], row["length"]): row["tflops"] for row in plain}
    kinds = list(dict.fromkeys((causal, length) for _, causal, length in sorted(found)))

    def cell(dim: int, causal: bool, length: int) -> str:
        at = found.get((dim, causal, length), {})
        return " / ".join(f"{at[name]:.0f}" if name in at else "-" for name in ("liger_aot", "cudnn"))

    columns = [f"{'causal' if causal else 'full'} {length}" for causal, length in kinds]
    rows = [[str(dim), *(cell(dim, *kind) for kind in kinds)] for dim in sorted({dim for dim, _, _ in found})]
    at_2 = [row["tflops"]["flash_attention_2"] for row in plain if "flash_attention_2" in row["tflops"]]
    flag = "" if direction == "forward" else " --backward"
    others = f" FlashAttention-2 through SDPA reaches {min(at_2):.0f} to {max(at_2):.0f}." if at_2 else ""
    small = data.get("host_us_a_small_call")
    host = f" A small call takes {small:.0f} us on the host." if small else ""
    return "\n\n".join(
        [
            f"### Attention {direction}",
            f"One run on one {made_on(_environment(data))}, bf16, {data['tokens']} tokens a batch and 2048 columns in "
            "all heads: TFLOP/s of ours / of cuDNN through torch SDPA, by head dimension and length. All of it is in "
            f"{link(path)}; `python -m benchmarks.attention{flag}` measures it.",
            table(["dim", *columns], rows),
            _behind(found) + others + host,
        ]
    )


def _behind(found: Mapping[tuple[int, bool, int], Mapping[str, float]]) -> str:
    """Where cuDNN is ahead at all."""
    ratios = {at: t["cudnn"] / t["liger_aot"] for at, t in found.items() if {"cudnn", "liger_aot"} <= set(t)}
    names = [
        f"{'causal' if causal else 'full'} {length} at {dim} ({ratio:.2f})"
        for (dim, causal, length), ratio in sorted(ratios.items())
        if ratio > 1
    ]
    return f"cuDNN is ahead in {len(names)} of {len(ratios)} cases{': ' if names else ''}{', '.join(names)}."


def decoding(results: Path) -> str:
    data, path = _steps(results, "flash_decoding_points.json")
    found = {(tuple(r["point"].items()), r["provider"]): r for r in data["results"]}
    names = _present(found)
    rows = []
    for at in dict.fromkeys(point for point, _ in found):
        point = dict(at)
        sizes = [f"{point['heads']}/{point['kv_heads']}", point["dim"], point["tokens"], point["page"] or "-"]
        cells = [_cell(found, at, name, lambda r: f"{r['of_copy']:.2f}") for name in names]
        rows.append([str(x) for x in (point["batch"], point["cached"], *sizes, *cells)])
    header = ["batch", "cached", "heads", "dim", "tokens", "page", *(LABELS[name] for name in names)]
    return "\n\n".join(
        [
            "### Decoding",
            f"One {made_on(_environment(data))}, one run of `python -m benchmarks.decoding`, bf16: bytes of keys and "
            "values a second as a fraction of a copy's (read and written) in the same rounds; the peers are torch SDPA "
            f"over the same contiguous cache. Every record is in {link(path)}.",
            table(header, rows),
        ]
    )


def fused_linear_cross_entropy(results: Path) -> str:
    return _fused_linear(results, "fused_linear_cross_entropy", "linear_losses", "three")


def fused_linear_jsd(results: Path) -> str:
    return _fused_linear(results, "fused_linear_jsd", "linear_jsd", "four")


def _fused_linear(results: Path, op: str, module: str, products: str) -> str:
    data, path = _steps(results, f"{op}_steps.json")
    found = {(tuple(r["shape"]), r["provider"]): r for r in data["results"]}
    names = _present(found)

    def text(r: Result) -> str:
        if r["provider"] == "products":
            return f"{r['median_ms']:.1f}"
        return f"{r['of_products']:.2f}, {r['peak_gib']:.2f} GiB"

    rows = [
        [" x ".join(map(str, shape)), *(_cell(found, shape, name, text) for name in names)]
        for shape in dict.fromkeys(shape for shape, _ in found)
    ]
    return "\n\n".join(
        [
            f"### {TITLES[op]}",
            f"Forward and backward, bf16, on one {made_on(_environment(data))}, one run of `python -m "
            f"benchmarks.{module}`; time as a multiple of the {products} matrix products alone in that run, and peak "
            f"memory with the gradients. Every record is in {link(path)}.",
            table(["tokens x hidden x vocabulary", *(LABELS[name] for name in names)], rows),
        ]
    )


def training(results: Path) -> str:
    """Whole steps of models and, where they were measured, the first ones of a process."""
    data, path = _steps(results, "training.json")
    found = {(tuple(r["point"].values()), r["provider"]): r for r in data["results"]}
    names = _present(found)

    def text(r: Result) -> str:
        memory = f", {r['peak_bytes'] / GIB:.1f} GiB" if r["peak_bytes"] else ""
        return f"{r['tokens_per_second']:.0f}{memory}"

    rows = []
    for at in dict.fromkeys(point for point, _ in found):
        model, batch, tokens, optimizer = at
        rows.append(
            [f"{model} {batch} x {tokens}, {optimizer}", *(_cell(found, at, name, text) for name in names)]
        )
    parts = [
        "### Training",
        f"One {made_on(_environment(data))}, one run of `python -m benchmarks.training`, bf16, random weights: tokens "
        f"per second and the most memory that a step holds. Every record is in {link(path)}.",
        table(["model, batch x tokens", *(LABELS[name] for name in names)], rows),
    ]
    try:
        return "\n\n".join([*parts, _first_step(results)])
    except FileNotFoundError:
        return "\n\n".join(parts)


def _first_step(results: Path) -> str:
    data, path = _steps(results, "first_step.json")
    found = {(r["goal"], r["provider"]): r for r in data["results"]}
    names = _present(found)
    rows = [
        [f"to the first {goal}", *(_cell(found, goal, name, _seconds) for name in names)]
        for goal in dict.fromkeys(goal for goal, _ in found)
    ]
    return (
        f"Seconds in a fresh process with empty compile caches, {data['model']}, from when torch is imported and the "
        f"GPU has a context; in brackets without what is the same for all, the import of Transformers and the making "
        f"of the model ({link(path)}):\n\n{table(['', *(LABELS[name] for name in names)], rows)}"
    )


def _seconds(r: Result) -> str:
    return f"{r['total']:.2f} ({sum(r['phases'][-2:]):.2f})"


def _steps(results: Path, name: str) -> tuple[dict[str, Any], Path]:
    path = results / "steps" / name
    data: dict[str, Any] = json.loads(path.read_text())
    return data, path


def _present(found: Iterable[tuple[Any, str]]) -> list[str]:
    """The providers that any record is of, in the order of the columns."""
    providers = {provider for _, provider in found}
    return [name for name in LABELS if name in providers]


def _cell(
    found: Mapping[tuple[Any, str], Result], at: Any, provider: str, text: Callable[[Result], str]
) -> str:
    r = found.get((at, provider))
    if r is None:
        return "-"
    return "fails" if r["failed"] else text(r)


def _environment(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Files without a part of that name have what they know of it beside the figures."""
    environment: Mapping[str, Any] = data.get("environment", data)
    return environment
