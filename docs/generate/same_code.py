"""How much of the code for GPUs that no test runs on is the code of those that ran it.

    python -m docs.generate.same_code [WORKERS [FILE]]

compares the kernels of each pair of PAIRS that have the same launch numbers, and writes docs/same_code.json. It takes
half an hour of one core, and no GPU.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT
from liger_aot_build.build import make_plans
from liger_aot_build.compile import job_of
from liger_aot_build.compiler import Job, compile_job, start_worker

FILE = ROOT / "docs" / "same_code.json"
# An architecture, the one that its kernels are compared with, and the stage of compilation whose result is compared:
# PTX, or TTGIR where LLVM makes other PTX for a later chip (packed float32 arithmetic, for one).
PAIRS = (("sm89", "sm80", "ptx"), ("sm120", "sm89", "ttgir"), ("sm100", "sm90", "ttgir"))
_VALUE = r"%[\w.-]*\w"  # a value's name, such as %c-1_i32
Counts = dict[str, list[int]]  # op -> binaries, and those that are the same


class _Enough(Exception):
    """What is wanted of a compilation is there."""


def text_at(stage: str, job: Job) -> str:
    """What Triton makes of a job at a stage, made comparable; compiling ends there."""
    from triton import knobs

    found = []

    def inspected(backend: Any, stages: dict[str, Any], *_: Any) -> None:
        make = stages[stage]

        def made(source: Any, metadata: Any) -> Any:
            found.append(str(make(source, metadata)))
            raise _Enough

        stages[stage] = made

    knobs.runtime.add_stages_inspection_hook = inspected
    message = compile_job(job)
    if not found:
        raise RuntimeError(message)
    return (without_names if stage == "ttgir" else without_machine)(found[0])


def without_machine(text: str) -> str:
    """PTX but for the lines that name the machine."""
    return re.sub(r"^\.(version|target) .*$", "", text, flags=re.MULTILINE)


def without_names(text: str) -> str:
    """TTGIR but for the machine, the names of values and layouts, and where constants stand: the passes for later chips
    give those another order."""
    layouts: dict[str, str] = {}
    values: dict[str, str] = {}

    def layout(match: re.Match[str]) -> str:
        return layouts.get(match[0], match[0])

    def value(match: re.Match[str]) -> str:
        return values.setdefault(match[0], f"%{len(values)}")

    kept = []
    for line in re.sub(r" loc\([^()]*(\([^()]*\))?[^()]*\)|ttg.target = \S+", "", text).splitlines():
        if match := re.fullmatch(r"(#\w+) = (.*)", line):
            layouts[match[1]] = re.sub(r"#[a-z]\w*", layout, match[2])
        elif match := re.fullmatch(rf"\s*({_VALUE}) = (arith\.constant .*)", line):
            values[match[1]] = re.sub(r"#[a-z]\w*", layout, match[2])
        else:
            kept.append(re.sub(_VALUE, value, re.sub(r"#[a-z]\w*", layout, line)))
    return "\n".join(kept)


def equal(stage: str, first: Job, second: Job) -> bool:
    return text_at(stage, first) == text_at(stage, second)


def pairs(arch: str, other: str) -> Iterator[tuple[str, Job, Job | None]]:
    """Each variant's op and job, and the job of the other architecture that has the same launch numbers."""
    (profile, plans), (others, other_plans) = make_plans(arch), make_plans(other)
    there = {v.name: v for plan in other_plans for v in plan.variants}
    for plan in plans:
        for variant in plan.variants:
            like = there.get(variant.name)
            yield variant.op, job_of(variant, profile), job_of(like, others) if like else None


def counted(arch: str, other: str, stage: str, pool: ProcessPoolExecutor) -> Counts:
    work = list(pairs(arch, other))
    futures = [pool.submit(equal, stage, job, like) if like else None for _, job, like in work]
    counts: Counts = {}
    for (op, _, _), future in zip(work, futures, strict=True):
        binaries, same = counts.get(op, (0, 0))
        counts[op] = [binaries + 1, same + (future is not None and future.result())]
    return counts


def read(path: Path = FILE) -> dict[str, Counts]:
    """By "arch other stage"; those that were compared."""
    found: dict[str, Counts] = json.loads(path.read_text()) if path.exists() else {}
    return found


def text_of(counts: Mapping[str, Counts]) -> str:
    parts = []
    for name, ops in counts.items():
        lines = ",\n".join(f'    "{op}": {json.dumps(ops[op])}' for op in sorted(ops))
        parts.append(f'  "{name}": {{\n{lines}\n  }}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    workers = int(given[0]) if given else os.cpu_count()
    path = Path(given[1]) if given[1:] else FILE
    with (
        tempfile.TemporaryDirectory() as scratch,
        ProcessPoolExecutor(workers, get_context("spawn"), start_worker, (scratch,)) as pool,
    ):
        counts = {" ".join(pair): counted(*pair, pool) for pair in PAIRS}
    path.write_text(text_of(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
