"""From candidate rows to packs: planned, compiled, audited, and written with one file of binaries for all. No GPU is
needed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks.tuning.space import Problem, Row, Space
from liger_aot.ops.registry import module
from liger_aot_build.audit import Audited, audit
from liger_aot_build.build import make_plans
from liger_aot_build.compile import try_variants
from liger_aot_build.declaration import Kernel, declared_ops, holds, read_declaration
from liger_aot_build.errors import AuditError, BuildError, ProfileError
from liger_aot_build.pack import write_op
from liger_aot_build.plan import (
    KernelPlan,
    Plan,
    Variant,
    check_row,
    combinations,
    dispatch_key,
    make_variant,
    resolved,
)
from liger_aot_build.profile import Profile, read_row


@dataclass(frozen=True)
class Target:
    """The kernel to tune, with the plans of its op and of the ops whose kernels that op launches."""

    kernel: Kernel
    op: str
    profile: Profile
    plans: tuple[Plan, ...]


@dataclass(frozen=True)
class Candidate:
    """A row with its binaries by dispatch key (``tables``), or the reason why it has none (``refused``)."""

    row: Row
    tables: Mapping[str, str]
    refused: str | None = None


def target(arch: str, kernel: str) -> Target:
    """BuildError where no op declares the kernel."""
    declared = {k: op for op in declared_ops() for k in read_declaration(op).kernels}
    if kernel not in declared:
        raise BuildError(f"unknown kernel {kernel!r}: there are {', '.join(declared)}")
    op = declared[kernel]
    profile, plans = make_plans(arch, (op, *module(op).OP.uses))
    return Target(plans[0].kernels[kernel].kernel, op, profile, tuple(plans))


def rows(space: Space, problem: Problem, of: Target) -> list[Row]:
    """The problem's candidates, each once, and the row that the profile has now."""
    found = [*space.rows(problem), *_now(problem, of)]
    return [row for i, row in enumerate(found) if row not in found[:i]]


def _now(problem: Problem, of: Target) -> list[Row]:
    """The profile's present rows for the largest size that is timed."""
    plan, when = of.plans[0].kernels[of.kernel.name], {"dtype": problem.dtypes[:1], **problem.when}
    found: list[Row] = []
    for key, entries in plan.tables.items():
        few = () if problem.most_rows is None else plan.few.get(key, ())
        of_few = [(bound, name) for bound, most, name in few if (problem.most_rows or 0) <= most]
        held = (name for bound, name in (*of_few, *entries) if bound is None or max(problem.sizes) <= bound)
        if (name := next(held, None)) is None:
            continue  # absent at this size
        v = plan.variants[name]
        if key.endswith("/aligned") and holds(when, v.axes):
            usual = {**v.form.defaults, **of.kernel.decided(v.axes)}
            given = {k.lower(): value for k, value in v.constants.items() if value != usual.get(k)}
            aligned = {} if problem.most_rows is None else {"aligned": True}
            found.append({"form": v.form.name, **aligned, **given, **v.options, **v.host})
    return found


def variants(row: Row, problem: Problem, of: Target, where: str) -> tuple[Variant, ...]:
    """The row's binaries, one for each choice of axes that it serves. ProfileError where it names what the kernel or
    the chip does not have."""
    when = {axis: list(values) for axis, values in problem.when.items()}
    raw = {**row, **when, "max_n": max(problem.sizes), "dtype": list(problem.dtypes)}
    read = resolved(of.kernel, read_row(where, raw, of.profile.arch))
    check_row(of.kernel, read, of.profile)
    requires = of.kernel.forms[read.form].requires
    return tuple(
        make_variant(of.op, of.kernel, read, axes, True)
        for axes in combinations(of.kernel)
        if all(holds(when, {**axes, "aligned": True}) for when in (read.when, requires))
    )


def prepare(
    of: Target, problem: Problem, candidates: Sequence[Row], folder: Path, workers: int | None = None
) -> list[Candidate]:
    """Compile and audit all candidates and write ``folder``: a file of binaries for each op, and for each candidate
    that passes a folder of manifests, named by its number."""
    made = [_planned(row, problem, of, f"candidate {i + 1}") for i, row in enumerate(candidates)]
    every = [v for p in of.plans for v in p.variants] + [v for m in made if not isinstance(m, str) for v in m]
    audited = _audited(every, of.profile, workers)
    for variant in (v for p in of.plans for v in p.variants if v.kernel != of.kernel.name):
        if isinstance(refused := audited[variant.name], str):
            raise BuildError(f"{variant.where}, a kernel that {of.kernel.name} needs beside it: {refused}")
    found = [_candidate(row, one, audited) for row, one in zip(candidates, made, strict=True)]
    _write(of, found, audited, made, folder)
    return found


def _planned(row: Row, problem: Problem, of: Target, where: str) -> tuple[Variant, ...] | str:
    try:
        return variants(row, problem, of, where)
    except ProfileError as error:
        return str(error)


def _candidate(row: Row, made: tuple[Variant, ...] | str, audited: Mapping[str, Audited | str]) -> Candidate:
    if isinstance(made, str):
        return Candidate(row, {}, made)
    refused = next((r for v in made if isinstance(r := audited[v.name], str)), None)
    return Candidate(row, {} if refused else {dispatch_key(v.axes, v.aligned): v.name for v in made}, refused)


def _audited(every: Iterable[Variant], profile: Profile, workers: int | None) -> dict[str, Audited | str]:
    """Audited binaries by name; a string where one did not compile or the audit refused it."""
    wanted = list({v.name: v for v in every}.values())
    compiled = dict(try_variants(wanted, profile, workers=workers))
    found: dict[str, Audited | str] = {}
    for variant in wanted:
        binary = compiled[variant.name]
        try:
            found[variant.name] = binary if isinstance(binary, str) else audit(variant, binary, profile.arch)
        except AuditError as error:
            found[variant.name] = str(error)
    return found


def _write(
    of: Target,
    candidates: Sequence[Candidate],
    audited: Mapping[str, Audited | str],
    made: Sequence[tuple[Variant, ...] | str],
    folder: Path,
) -> None:
    good = {name: one for name, one in audited.items() if not isinstance(one, str)}
    wanted = {v.name: v for m in made if not isinstance(m, str) for v in m if v.name in good}
    for plan in of.plans:
        kernels = dict(plan.kernels)
        if plan.op == of.op:
            # The kernel's own rows are among the candidates: the profile's tables of it are not needed.
            name = of.kernel.name
            tables = {f"{i}": ((None, variant),) for i, variant in enumerate(wanted)}
            kernels[name] = KernelPlan(of.kernel, tables, wanted, {}, {})
        folder.mkdir(parents=True, exist_ok=True)
        text = write_op(folder, Plan(plan.op, plan.arch, kernels), good)
        for i, candidate in enumerate(candidates):
            if not candidate.refused:
                (folder / str(i)).mkdir(exist_ok=True)
                own = _with_tables(text, of.kernel.name, candidate.tables) if plan.op == of.op else text
                (folder / str(i) / f"{plan.op}.json").write_bytes(own)


def _with_tables(manifest: bytes, kernel: str, tables: Mapping[str, str]) -> bytes:
    """An op's manifest in which every call of the kernel goes to these binaries, whatever its size."""
    raw: dict[str, Any] = json.loads(manifest)
    raw["kernels"][kernel]["tables"] = {key: [[None, name]] for key, name in tables.items()}
    return json.dumps(raw).encode()


def digest(manifest: Path) -> str:
    return sha256(manifest.read_bytes()).hexdigest()
