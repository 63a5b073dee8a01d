"""`python -m benchmarks.tuning --arch sm90 --kernel rmsnorm_forward --write`: measure a kernel's candidate rows on this
machine's GPU, and write the winners into the profile, with where they come from.

Candidates are the kernel's search space (benchmarks/tuning/spaces) and the profile's present row. One counts only if
its binaries pass the audit for every dtype of the row, and its results are right.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.tuning import trial, tuner
from benchmarks.tuning.candidates import rows, target
from benchmarks.tuning.rows_text import Winner, write_rows
from benchmarks.tuning.spaces import SPACES
from liger_aot_build.errors import BuildError
from liger_aot_build.profile import read_profile


def main(arguments: Sequence[str] | None = None) -> int:
    """1 where a problem has no winner, 2 for a wrong call."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.tuning", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--arch", required=True, help="the profile; this machine's GPU must be one it serves")
    parser.add_argument(
        "--kernel", required=True, help="kernels whose tables to tune, commas between, or all"
    )
    parser.add_argument(
        "--n", type=int, action="append", help="only problems timed at this n (may be repeated)"
    )
    parser.add_argument("--elements", type=int, default=1 << 27, help="of a problem (default: 2^27)")
    parser.add_argument(
        "--seconds", type=float, default=trial.LIMIT, help="a trial may take (default: %(default)s)"
    )
    parser.add_argument("--report", type=Path, help="write every measurement there, as JSON")
    parser.add_argument("--write", action="store_true", help="write the winners into the profile")
    parser.add_argument(
        "--list", action="store_true", help="print the candidates and measure nothing; needs no GPU"
    )
    parser.add_argument("--workers", type=int, help="compiler processes (default: one a core)")
    options = parser.parse_args(arguments)
    try:
        kernels = _kernels(options)
        if not options.list:
            _check_gpu(options.arch)
    except BuildError as error:
        parser.error(str(error))
    return max([_tried(kernel, options) for kernel in kernels])


def _kernels(options: argparse.Namespace) -> list[str]:
    """Those asked for; all: every one that has a search space, and a table in the profile."""
    tables = read_profile(options.arch).tables
    if options.kernel == "all":
        return [kernel for kernel in SPACES if kernel in tables]
    kernels: list[str] = options.kernel.split(",")
    if strangers := [kernel for kernel in kernels if kernel not in SPACES]:
        raise BuildError(
            f"no search space for {', '.join(strangers)}: there are those of {', '.join(SPACES)}"
        )
    return kernels


def _tried(kernel: str, options: argparse.Namespace) -> int:
    """One kernel's exit status: what is wrong with it does not keep the others from their turn."""
    try:
        return _tune(kernel, options)
    except BuildError as error:
        print(f"{kernel}: {error}", file=sys.stderr, flush=True)
        return 1


def _check_gpu(arch: str) -> None:
    import torch

    from liger_aot.runtime.devices import gpu

    if not torch.cuda.is_available():
        raise BuildError("the tuner measures on a GPU, and torch sees none here (--list needs none)")
    here, serves = gpu(0).device, read_profile(arch).arch.serves
    if here.target not in serves:
        raise BuildError(f"profile {arch} serves {', '.join(serves)}, this GPU is {here}")


def _tune(kernel: str, options: argparse.Namespace) -> int:
    of, space = target(options.arch, kernel), SPACES[kernel]
    problems = [p for p in space.problems if not options.n or {*p.sizes} & {*options.n}]
    if options.list:
        for problem in problems:
            print(f"{kernel} {problem}:")
            print("\n".join(f"  {dict(row)}" for row in rows(space, problem, of)))
        return 0

    def attempt(folder: Path, jobs: Sequence[trial.Job]) -> Any:
        return trial.supervised(
            trial.worker(options.arch, kernel, folder, options.elements), jobs, options.seconds
        )

    winners: list[Winner] = []
    reports: list[dict[str, Any]] = []
    for problem, measured, found in tuner.tune(kernel, of, attempt, problems, options.workers):
        reports.append({"kernel": kernel, **tuner.report(problem, measured)})
        if options.report:
            kept = json.loads(options.report.read_text()) if options.report.exists() else []
            others = [one for one in kept if one["kernel"] != kernel]
            options.report.write_text(json.dumps([*others, *reports], indent=1) + "\n")
        if isinstance(found, Winner):
            winners.append(found)
            print(f"{kernel} {problem}: {found.comment}: {dict(found.candidate)}", flush=True)
        else:
            print(f"{kernel} {found}", flush=True)
    if options.write and winners:
        write_rows(of.profile.path, kernel, winners, provenance(options.elements))
        print(f"written to {of.profile.path}")
    return int(len(winners) < len(problems))


def provenance(elements: int) -> str:
    import torch
    import triton

    return (
        f"{torch.cuda.get_device_name()}, triton {triton.__version__}, {date.today()}: python -m benchmarks.tuning, "
        f"{elements} elements, fraction of the copy of as many bytes in the same run, or TFLOP/s; rows with no comment "
        "were not part of it"
    )


if __name__ == "__main__":
    sys.exit(main())
