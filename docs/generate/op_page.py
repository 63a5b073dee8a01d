"""The page of one op: what it takes, what it is built for, how fast it was."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import liger_aot
from benchmarks import markdown, performance, records, tables
from benchmarks.environment import ROOT
from benchmarks.markdown import FIRST, Gpu, link, made_in
from benchmarks.providers import COPY, label
from benchmarks.records import Run
from docs.generate import docstring, facts
from docs.generate.chart import svg
from liger_aot.ops.registry import families, names
from liger_aot_build.declaration import op_path
from liger_aot_build.plan import ALIGNMENT

FOLDER = ROOT / "docs" / "ops"
# Sections of docs/performance.md that are of an op.
STEPS = {
    "flash_attention": ("attention forward", "attention backward"),
    "flash_attention_backward": ("attention backward",),
    "flash_decoding": ("decoding",),
    "fused_linear_cross_entropy": ("fused linear cross entropy",),
    "fused_linear_distillation_loss": ("fused linear distillation",),
    "fused_linear_grpo_loss": ("fused linear grpo loss",),
    "fused_linear_jsd": ("fused linear jsd",),
    "fused_linear_kl_div": ("fused linear kl div",),
    "fused_linear_preference_loss": ("fused linear preference loss",),
}


def described(op: str) -> docstring.Docstring:
    return docstring.read(type(liger_aot.load(op)))


def pages(op: str, gpus: Sequence[Gpu]) -> dict[Path, str]:
    """The page of the op ``op`` and a chart for each GPU that has results of it."""
    kind, told = type(liger_aot.load(op)), described(op)
    parts = [
        f"# {op}",
        f"`{op}`: {told.summary}",
        f'```python\n{op} = liger_aot.load("{op}")\n{_call(op, kind)}\n```',
        _overview(op, kind, told),
        "## Arguments",
        _list(told.arguments),
        "## Returns",
        told.returns,
        "## Errors",
        _list(told.errors),
        "## Source",
        told.source,
        "## Binaries",
        _binaries(op),
    ]
    made: dict[Path, str] = {}
    speed = []
    for gpu in gpus:
        if (file := gpu.folder / f"{op}.json").exists():
            run, chart = records.read(file), _chart(op, gpu)
            made[chart] = svg(run)
            speed.append(_measured(op, run, file, chart))
    speed += [text for section in STEPS.get(op, ()) if (text := performance.body(section, gpus, FOLDER))]
    if speed:
        parts += ["## Speed", *speed]
    return {FOLDER / f"{op}.md": "\n\n".join(parts) + "\n", **made}


def _call(op: str, kind: type[Any]) -> str:
    """The call with its types, a line where it fits."""
    signature = inspect.signature(kind.__call__)
    shown = [_parameter(p) for name, p in signature.parameters.items() if name != "self"]
    first_keyword = next(
        (i for i, p in enumerate(list(signature.parameters.values())[1:]) if p.kind is p.KEYWORD_ONLY), None
    )
    if first_keyword is not None:
        shown.insert(first_keyword, "*")
    line = f"{op}({', '.join(shown)}) -> {signature.return_annotation}"
    if len(line) <= 100:
        return line
    body = "".join(f"    {one},\n" for one in shown)
    return f"{op}(\n{body}) -> {signature.return_annotation}"


def _parameter(p: inspect.Parameter) -> str:
    default = "" if p.default is p.empty else f" = {_quoted(p.default)}"
    return f"{p.name}: {p.annotation}{default}"


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _overview(op: str, kind: type[Any], told: docstring.Docstring) -> str:
    parameters = inspect.signature(kind.__call__).parameters
    tests = [path for path in (ROOT / "tests" / "ops").rglob(f"test_{op}*.py") if _tests(path, op)]
    code = [
        path
        for path in (
            ROOT / "python" / "liger_aot" / "ops" / families()[op] / f"{op}.py",
            op_path(op),
            *sorted(tests),
        )
        if path.exists()
    ]
    rows = [
        ["dtypes", facts.dtypes(op, *kind.uses)],
        ["gradient", f"of {told.differentiable}" if told.differentiable else "none"],
        ["in place", _in_place(kind, parameters)],
        ["architectures", f"{', '.join(facts.archs(op))}; [what has run where](../support.md){_limits(op)}"],
        ["also launches", ", ".join(f"[{other}]({other}.md)" for other in kind.uses) or "-"],
        ["files", ", ".join(link(path, FOLDER) for path in code)],
    ]
    return markdown.table(["", ""], rows)


def _limits(op: str) -> str:
    lacking = facts.lacking(op)
    page = "../support.md#what-architectures-do-without"
    return f"; [not for all calls]({page}) on {', '.join(lacking)}" if lacking else ""


def _in_place(kind: type[Any], parameters: Iterable[str]) -> str:
    """What the op writes of its arguments, and when."""
    if always := [f"`{name}`" for name in getattr(kind, "writes", ())]:
        return f"always: {', '.join(always)}, as the arguments say"
    asked = [f"`{name}`" for name in parameters if name == "out" or name.startswith("inplace")]
    return f"with {', '.join(asked)}" if asked else "no"


def _tests(path: Path, op: str) -> bool:
    """Whether a file of tests is of this op and not of one whose name begins with its name."""
    others = [o for o in names() if o != op and o.startswith(op)]
    return not any(path.stem.startswith(f"test_{other}") for other in others)


def _list(items: tuple[tuple[str, str], ...]) -> str:
    return "\n".join(f"- `{names}`: {text}" for names, text in items)


def _binaries(op: str) -> str:
    kernels = facts.kernels(op)
    if not kernels:
        return "It has none of its own: it launches those of the ops above."
    rows = []
    for name, by_arch in kernels.items():
        cells = [
            f"{len(by_arch[arch].variants)}: {facts.numbers(facts.planned(arch).profile, name)}"
            if arch in by_arch
            else "-"
            for arch in facts.ARCHS
        ]
        rows.append([f"`{name}`", facts.combinations(by_arch), facts.alignment(by_arch), *cells])
    totals = ["all", "", "", *(str(facts.binaries(op, arch)) for arch in facts.ARCHS)]
    header = ["kernel", "dtypes", "variants", *facts.ARCHS]
    note = (
        "Number of binaries of each kernel, and whether its launch numbers are measured or derived. The aligned "
        f"variant assumes that pointers are divisible by {ALIGNMENT} bytes, and strides and sizes by {ALIGNMENT} "
        "elements. Calls for which that holds take it; all others take the generic variant, where there is one."
    )
    return "\n\n".join([note, markdown.table(header, [*rows, totals]), *_bounds(op)])


def _bounds(op: str) -> list[str]:
    """The sizes that the launch tables distinguish."""
    lines = []
    for name, by_arch in facts.kernels(op).items():
        told: dict[str, list[str]] = {}
        for arch, plan in by_arch.items():
            told.setdefault(facts.bounds(plan), []).append(arch)
        if list(told) != ["any"]:
            each = "; ".join(f"{', '.join(archs)}: {bounds}" for bounds, archs in told.items())
            lines.append(f"- `{name}`: {each}")
    return ["Sizes n at which another binary takes over:\n\n" + "\n".join(lines)] if lines else []


def _chart(op: str, gpu: Gpu) -> Path:
    return FOLDER / (f"{op}.svg" if gpu.folder.name == FIRST else f"{op}-{gpu.folder.name}.svg")


def _measured(op: str, run: Run, file: Path, chart: Path) -> str:
    made = made_in(run)
    parts = [
        f"{made[0].upper()}{made[1:]}; every record is in {link(file, FOLDER)}. Fractions are of a copy of as many "
        "bytes, timed in turn with each case.",
        f"![{op} against its peers]({chart.name})",
    ]
    for title, (header, *rows) in tables.tables(run):
        labels = [name if name in ("", "n", f"{COPY} GB/s") else label(name) for name in header]
        parts.append(f"`{op}`{title}:\n\n{markdown.table(labels, rows)}")
    return "\n\n".join(parts)
