"""Measure candidate rows on this machine's GPU and write the winners, with where they come from, into the profile.

Candidates come from a TOML file of problems:

    [[problem]]
    max_n = 4096                # the bound of the row that wins; left out: any length
    n = [3072, 4096]            # where candidates are measured; the least fraction of the copy counts
    dtypes = ["bf16", "fp16"]   # the row's filter; the first is measured
    candidates = [{ form = "row", block = 4096, stages = [2, 3], num_warps = [4, 8] }]

They lie under arch_profiles/candidates, one file a kernel. A list of numbers is tried in every combination. Every
candidate's results are compared with fp64 before it is timed: num_warps must not change the answer. A candidate counts
only if its binaries pass the audit for every dtype of the row.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from hashlib import sha256
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from build_tools.audit import Audited, audit
from build_tools.build import make_plans
from build_tools.compile import try_variants
from build_tools.declaration import declared_ops, holds, read_declaration
from build_tools.errors import AuditError, BuildError, ProfileError
from build_tools.plan import (
    KernelPlan,
    Plan,
    Variant,
    check_row,
    combinations,
    dispatch_key,
    make_variant,
)
from build_tools.profile import Profile, read_row
from build_tools.rows_text import Winner, write_rows

if sys.version_info >= (3, 11):
    import tomllib
else:
    from setuptools.compat.py310 import tomllib

UNIT_ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}
ROUNDINGS = 2  # a result may pass through the dtype once on its way


@dataclass(frozen=True)
class Problem:
    max_n: int | None
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    candidates: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Measured:
    """One candidate at one size: fraction of the copy's bandwidth, or why it was left out."""

    candidate: Mapping[str, Any]
    n: int
    dtype: str
    milliseconds: float | None = None
    fraction: float | None = None
    error: float | None = None
    refused: str | None = None


def tune(options: argparse.Namespace) -> int:
    """The command. Needs a GPU that the profile serves, torch, and an installed or source liger_aot."""
    report: dict[str, list[Any]] = {}
    for kernel in options.kernel.split(","):
        folder = options.candidates
        file = folder / f"{options.arch}-{kernel}.toml" if folder.is_dir() else folder
        measured = _tune_kernel(kernel, file, options)
        report[kernel] = [asdict(one) for one in measured]
        if options.report:
            options.report.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _tune_kernel(kernel: str, candidates: Path, options: argparse.Namespace) -> list[Measured]:
    op = _owner(kernel)
    from liger_aot.ops.registry import module

    uses = module(op).OP.uses
    profile, plans = make_plans(options.arch, (op, *uses))
    problems = read_problems(candidates)
    session = _Session(kernel, plans, profile, options.elements, options.workers)
    results: list[Measured] = []
    winners: list[Winner] = []
    for problem in problems:
        measured = session.measure(problem)
        results += measured
        winner = best(problem, measured)
        winners.append(winner)
        print(
            f"{kernel} n <= {problem.max_n or 'any'} {'/'.join(problem.dtypes)}: {winner.comment}: "
            f"{dict(winner.candidate)}",
            flush=True,
        )
    if options.write:
        import torch
        import triton

        provenance = (
            f"{torch.cuda.get_device_name()}, triton {triton.__version__}, {date.today()}: python -m build_tools tune, "
            f"{options.elements} elements, fraction of the copy of as many bytes in the same run; "
            "rows with no comment were not part of it"
        )
        write_rows(profile.path, kernel, winners, provenance)
        print(f"written to {profile.path}")
    return results


def read_problems(path: Path) -> tuple[Problem, ...]:
    """The problems of a candidates file; ProfileError names what is wrong in it."""
    problems = []
    for i, raw in enumerate(tomllib.loads(path.read_text()).get("problem", [])):
        where = f"{path.name}: problem {i + 1}"
        if unknown := set(raw) - {"max_n", "n", "dtypes", "candidates"}:
            raise ProfileError(f"{where}: unknown key {sorted(unknown)[0]!r}")
        if not raw.get("n") or not raw.get("dtypes") or not raw.get("candidates"):
            raise ProfileError(f"{where}: needs n, dtypes and candidates")
        candidates = tuple(one for entry in raw["candidates"] for one in _expand(entry))
        problems.append(Problem(raw.get("max_n"), tuple(raw["n"]), tuple(raw["dtypes"]), candidates))
    if not problems:
        raise ProfileError(f"{path.name}: no [[problem]]")
    return tuple(problems)


def best(problem: Problem, measured: Sequence[Measured]) -> Winner:
    """The candidate whose least fraction over the problem's sizes is greatest."""
    scores: dict[str, list[float]] = {}
    for one in measured:
        scores.setdefault(json.dumps(one.candidate), []).append(one.fraction or 0.0)
    least = {key: min(values) for key, values in scores.items()}
    winner = max(least, key=lambda key: least[key])
    if not least[winner]:
        reasons = {m.refused for m in measured}
        raise BuildError(f"n <= {problem.max_n}: no candidate ran: {'; '.join(map(str, reasons))}")
    ran = [value for value in least.values() if value]
    sizes = ", ".join(f"{f:.3f} at {n}" for n, f in zip(problem.sizes, scores[winner], strict=True))
    comment = f"{sizes}; worst of {len(ran)} {min(ran):.3f}"
    return Winner(problem.max_n, problem.dtypes, json.loads(winner), comment)


def _expand(entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    lists = [value if isinstance(value, list) else [value] for value in entry.values()]
    for values in product(*lists):
        yield dict(zip(entry, values, strict=True))


def _owner(kernel: str) -> str:
    """The op that declares a kernel."""
    declared = {k: op for op in declared_ops() for k in read_declaration(op).kernels}
    if kernel not in declared:
        raise BuildError(f"unknown kernel {kernel!r}: there are {', '.join(declared)}")
    return declared[kernel]


class _Session:
    """Candidates of one kernel, compiled here and run through the op's own host code."""

    def __init__(
        self,
        kernel: str,
        plans: Sequence[Plan],
        profile: Profile,
        elements: int,
        workers: int | None,
    ) -> None:
        import torch

        if not torch.cuda.is_available():
            raise BuildError("tune measures on a GPU, and there is none here")
        from benchmarks.entry import load as load_benchmark
        from liger_aot.runtime.devices import gpu

        here = gpu(0).device
        if here.target not in profile.arch.serves:
            raise BuildError(
                f"profile {profile.arch.name} serves {', '.join(profile.arch.serves)}, this GPU is {here}"
            )
        self._kernel_name, self._op, self._profile, self._plans = kernel, plans[0].op, profile, plans
        self._kernel: KernelPlan = plans[0].kernels[kernel]
        self._elements, self._workers = elements, workers
        self._entry = load_benchmark(self._op)
        self._base = self._make(v for p in plans for v in p.variants)
        for variant in (v for p in plans for v in p.variants if v.kernel != kernel):
            if isinstance(refused := self._base[variant.name], str):
                raise BuildError(f"{variant.where}, a kernel that {kernel} needs beside it: {refused}")

    def measure(self, problem: Problem) -> list[Measured]:
        made = [
            (c, self._variants(c, problem, f"candidate {i + 1}")) for i, c in enumerate(problem.candidates)
        ]
        audited = self._make(v for _, found in made if not isinstance(found, str) for v in found)
        results = []
        for n in problem.sizes:
            run = _Runner(self._entry, self._kernel_name, n, problem.dtypes[0], self._elements)
            for candidate, variants in made:
                if isinstance(variants, str):
                    results.append(Measured(candidate, n, run.dtype, refused=variants))
                    continue
                ones = [audited[v.name] for v in variants]
                if refusals := [one for one in ones if isinstance(one, str)]:
                    results.append(Measured(candidate, n, run.dtype, refused=refusals[0]))
                    continue
                results.append(self._time(run, candidate, ones[0]))
        return results

    def _time(self, run: _Runner, candidate: Mapping[str, Any], audited: Audited) -> Measured:
        with TemporaryDirectory() as folder:
            op = _bind(
                self._op, self._plans, {**self._base, audited.variant.name: audited}, audited, Path(folder)
            )
            allowed = self._profile.tolerance.roundoffs[run.dtype] * UNIT_ROUNDOFF[run.dtype] * ROUNDINGS
            try:
                error = run.error(op)
            except Exception as problem:  # a launch that the GPU refuses is a result, too
                return Measured(candidate, run.n, run.dtype, refused=f"{type(problem).__name__}: {problem}")
            if not error <= allowed:
                return Measured(
                    candidate, run.n, run.dtype, error=error, refused=f"error {error:.2e} > {allowed:.2e}"
                )
            milliseconds, fraction = run.time(op)
        return Measured(candidate, run.n, run.dtype, milliseconds, fraction, error)

    def _variants(
        self, candidate: Mapping[str, Any], problem: Problem, where: str
    ) -> tuple[Variant, ...] | str:
        """The candidate at every choice of dtypes that its row would serve, the measured one first."""
        kernel = self._kernel.kernel
        try:
            row = read_row(
                where,
                {**candidate, "max_n": max(problem.sizes), "dtype": list(problem.dtypes)},
                self._profile.arch,
            )
            check_row(kernel, row, self._profile)
        except ProfileError as error:
            return str(error)
        first = next(iter(kernel.axes))
        choices = [
            axes
            for axes in combinations(kernel)
            if axes[first] in problem.dtypes
            and holds(row.when, {**axes, "aligned": True})
            and holds(kernel.forms[row.form].requires, {**axes, "aligned": True})
        ]
        choices.sort(key=lambda axes: list(axes.values()) != [problem.dtypes[0]] * len(axes))
        return tuple(make_variant(self._op, kernel, row, axes, True) for axes in choices)

    def _make(self, variants: Iterator[Variant]) -> dict[str, Any]:
        """Audited binaries by name; a string where the audit refused one."""
        wanted = list({v.name: v for v in variants}.values())
        compiled = dict(try_variants(wanted, self._profile, workers=self._workers))
        made: dict[str, Any] = {}
        for variant in wanted:
            binary = compiled[variant.name]
            try:
                made[variant.name] = (
                    binary if isinstance(binary, str) else audit(variant, binary, self._profile.arch)
                )
            except AuditError as error:
                made[variant.name] = str(error)
        return made


class _Runner:
    """One size's inputs on the GPU, and the copy that it is compared with."""

    def __init__(self, entry: Any, kernel: str, n: int, dtype: str, elements: int) -> None:
        import torch

        from benchmarks.ceiling import copy_calls

        names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
        device = torch.device("cuda")
        self.n, self.dtype = n, dtype
        self._work = entry.workload(kernel, n, names[dtype], elements, device, n)
        self._reference = self._work.reference()
        self._copy = copy_calls(self._work.bytes, device, 1, 0)

    def error(self, op: Any) -> float:
        from benchmarks.workload import largest_error, poisoned

        with poisoned():
            found = self._work.select(self._work.run(op))
        return largest_error(found, self._reference)

    def time(self, op: Any) -> tuple[float, float]:
        """Median milliseconds, and the fraction of the copy of as many bytes timed around it."""
        from benchmarks.measure import Call, summarize, time_interleaved

        calls = {"copy": self._copy, "op": [Call(lambda: self._work.run(op))]}
        samples = time_interleaved(calls, rounds=2, min_ms=4.0)
        mine, copy = summarize(samples["op"]).median_ms, summarize(samples["copy"]).median_ms
        return mine, copy / mine


def _bind(
    op: str, plans: Sequence[Plan], audited: Mapping[str, Audited], chosen: Audited, folder: Path
) -> Any:
    """The op on this GPU, with every dispatch of the chosen variant's kernel and dtypes going to it."""
    from liger_aot.runtime.devices import gpu
    from liger_aot.runtime.dispatch import GPUDriver, OpOn, Runtimes

    key = dispatch_key(chosen.variant.axes, chosen.variant.aligned)
    here = gpu(0)
    runtimes = {}
    for plan in plans:
        manifest = _manifest(plan, audited, folder, chosen if plan.op == op else None, key)
        bound = OpOn(manifest, GPUDriver(here.shared_per_block), 0, here.multiprocessors)
        runtimes[plan.op] = Runtimes(plan.op, {0: bound})
    from liger_aot.ops.registry import module

    op_class = module(op).OP
    return op_class(runtimes)


def _manifest(
    plan: Plan, audited: Mapping[str, Audited], folder: Path, chosen: Audited | None, key: str
) -> Any:
    from build_tools.pack import write_op
    from liger_aot.runtime.manifest import OpManifest

    kernels = dict(plan.kernels)
    if chosen is not None:
        kernel = kernels[chosen.variant.kernel]
        tables = {key: ((None, chosen.variant.name),)}
        kernels[chosen.variant.kernel] = KernelPlan(
            kernel.kernel, tables, {chosen.variant.name: chosen.variant}
        )
    changed = Plan(plan.op, plan.arch, kernels)
    text = write_op(folder, changed, audited)
    return OpManifest(folder / f"{plan.op}.json", folder / f"{plan.op}.bin", sha256(text).hexdigest())
