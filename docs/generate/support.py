"""The support matrix: what the plans hold, and what docs/executed.toml says has run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks import markdown
from benchmarks.environment import ROOT
from docs.generate import facts, same_code, wheels

if sys.version_info >= (3, 11):
    import tomllib
else:
    from setuptools.compat.py310 import tomllib

EXECUTED = ROOT / "docs" / "executed.toml"
PAGE = ROOT / "docs" / "support.md"
AUDITED = "audited"
STATES = {
    "ran": "the architecture's own binaries ran on a GPU of that architecture",
    "PTX ran": "the kernels' PTX ran on an NVIDIA H200, through the driver's JIT; their cubins have not run",
    "emulated": "the binaries ran instruction by instruction in an emulator; nothing is known of their speed",
    AUDITED: "every binary was read back and checked against the plan and the chip's limits; the op's own have not run",
}


@dataclass(frozen=True)
class Run:
    name: str
    arch: str
    state: str
    what: str
    date: str


@dataclass(frozen=True)
class Executed:
    runs: Mapping[str, Run]
    ops: Mapping[str, tuple[Run, ...]]


def read(path: Path = EXECUTED) -> Executed:
    """ValueError says where the file contradicts itself or the plans."""
    raw = tomllib.loads(path.read_text())
    runs = {name: Run(name, **body) for name, body in raw["runs"].items()}
    for run in runs.values():
        if run.state not in STATES:
            raise ValueError(f"{path.name}: {run.name}: state {run.state!r} is none of {', '.join(STATES)}")
        if run.arch not in facts.ARCHS:
            raise ValueError(f"{path.name}: {run.name}: there is no architecture {run.arch!r}")
    ops: dict[str, tuple[Run, ...]] = dict.fromkeys(facts.ops(), ())
    for op, names in raw["ops"].items():
        if unknown := [name for name in names if name not in runs]:
            raise ValueError(f"{path.name}: {op}: there is no run {unknown[0]!r}")
        ops[op] = tuple(runs[name] for name in names)
        archs = [run.arch for run in ops[op]]
        if len(set(archs)) < len(archs):
            raise ValueError(f"{path.name}: {op}: two runs of one architecture")
        if without := [arch for arch in archs if arch not in facts.archs(op)]:
            raise ValueError(f"{path.name}: {op}: ran on {without[0]}, which has no binaries of it")
    return Executed(runs, ops)


def page(executed: Executed) -> str:
    notes = {name: i + 1 for i, name in enumerate(executed.runs)}

    def cell(op: str, arch: str) -> str:
        if arch not in facts.archs(op):
            return "-"
        run = next((run for run in executed.ops[op] if run.arch == arch), None)
        return AUDITED if run is None else f"{run.state} ({notes[run.name]})"

    rows = [[f"[{op}](ops/{op}.md)", *(cell(op, arch) for arch in facts.ARCHS)] for op in executed.ops]
    counts = [
        [f"[{op}](ops/{op}.md)", *(str(facts.binaries(op, arch)) for arch in facts.ARCHS)]
        for op in executed.ops
    ]
    sizes = wheels.read()
    totals = ["all", *(str(sum(facts.binaries(op, arch) for op in executed.ops)) for arch in facts.ARCHS)]
    return (
        "\n\n".join(
            [
                "# What has run where",
                "Each op on each architecture that has binaries of it. All binaries are compiled and audited; what was "
                "executed is recorded in [executed.toml](executed.toml).",
                "\n".join(f"- **{state}**: {meaning}." for state, meaning in STATES.items()),
                markdown.table(["op", *facts.ARCHS], rows),
                "\n".join(
                    f"{i}. {executed.runs[name].date}: {executed.runs[name].what}."
                    for name, i in notes.items()
                ),
                "On the CPU every op runs its plain-torch reference; every test run covers that.",
                "## GPUs",
                markdown.table(
                    ["architecture", "serves", "fp8", "Triton", "device wheel"],
                    [
                        [
                            arch,
                            _serves(arch),
                            _fp8(arch),
                            facts.planned(arch).profile.toolchain.triton,
                            _size(sizes.get(arch)),
                        ]
                        for arch in facts.ARCHS
                    ],
                ),
                "## What architectures do without",
                _absent(),
                *_same_code(),
                "## Binaries",
                markdown.table(["op", *facts.ARCHS], [*counts, totals]),
            ]
        )
        + "\n"
    )


def _same_code() -> list[str]:
    """How much of the code that has not run is the code of what has."""
    pairs = same_code.read()
    if not pairs:
        return []
    names = [f"{arch} as {other}: {stage.upper()}" for arch, other, stage in map(str.split, pairs)]
    rows = [
        [f"[{op}](ops/{op}.md)", *(_same(ops.get(op)) for ops in pairs.values())]
        for op in sorted({op for ops in pairs.values() for op in ops})
    ]
    totals = [[sum(column) for column in zip(*ops.values(), strict=True)] for ops in pairs.values()]
    return [
        "## The same code as what ran",
        "Of an architecture's binaries, how many have the same PTX as another architecture's with the same launch "
        "numbers (but for the machine's name), or the same TTGIR: Triton's last form of a kernel before LLVM (but for "
        "the names of values and the places of constants). sm80's PTX and sm90's binaries ran on an H200. The others "
        "differ in their launch numbers, in matrix instructions, in programmatic dependent launch or fp8, or in the "
        "order of operations. An op that is not here has changed since it was compared.",
        markdown.table(["op", *names], [*rows, ["all", *map(_same, totals)]]),
    ]


def _same(counts: list[int] | None) -> str:
    return "-" if counts is None else f"{counts[1]} of {counts[0]}"


def _fp8(arch: str) -> str:
    return {"fp8e4nv": "e4m3", "fp8e4b8": "e4m3fnuz"}.get(facts.planned(arch).profile.arch.fp8, "-")


def _size(size: wheels.Size | None) -> str:
    """A wheel's size when it was last measured; the number of binaries dates it."""
    return f"{size['bytes'] / 1e6:.1f} MB, {size['binaries']} binaries" if size else "-"


def _absent() -> str:
    """The rows of profiles that say that something is absent, what they hold for, and what to use instead."""
    rows: list[list[str]] = []
    for arch in facts.ARCHS:
        for op, plan in facts.planned(arch).ops.items():
            for name, kernel in plan.kernels.items():
                bounds = {
                    key: kernel.tables[key][-1][0] if key in kernel.tables else 0 for key in kernel.absent
                }
                every = len(set(bounds.values())) == 1 and not kernel.tables.keys() - bounds.keys()
                for key, why in list(kernel.absent.items())[: 1 if every else None]:
                    values = "" if every else f" {key}"
                    past = f" past n = {bounds[key]}" if bounds[key] else ""
                    rows.append([arch, f"[{op}](ops/{op}.md)", f"{name}{values}{past}", why])
    if not rows:
        return "Every architecture has binaries for every call of the ops above."
    header = ["architecture", "op", "kernel, values of its axes, sizes", "why, and what to use instead"]
    said = "Such a call raises `liger_aot.errors.NotBuilt` with these words."
    return f"{said}\n\n{markdown.table(header, _merged(rows))}"


def _merged(rows: list[list[str]]) -> list[list[str]]:
    """Rows of one reason as one."""
    merged: dict[tuple[str, str, str], list[str]] = {}
    for arch, op, what, why in rows:
        merged.setdefault((arch, op, why), []).append(what)
    return [[arch, op, ", ".join(whats), why] for (arch, op, why), whats in merged.items()]


def _serves(arch: str) -> str:
    profile = facts.planned(arch).profile
    prefix = "CC " if profile.arch.backend == "cuda" else ""
    return ", ".join(f"{prefix}{one}" for one in profile.arch.serves)
