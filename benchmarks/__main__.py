"""The command line: `python -m benchmarks OP ...` measures ops on this machine's GPU (`all`: every one),
`python -m benchmarks plot FILE ...` draws kept results again, `python -m benchmarks summary FILE ...` compares ours in
them with the best peer, `python -m benchmarks performance` writes the tables of README.md and docs/performance.md."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.providers import NAMES

SECTIONS = ("forward", "backward", "host", "cold")


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit status: 1 where ours failed somewhere, 2 for a wrong call or a machine
    that cannot run it."""
    if arguments[:1] == ["plot"]:
        return _plot(arguments[1:])
    if arguments[:1] == ["summary"]:
        return _summary(arguments[1:])
    if arguments[:1] == ["performance"]:
        return _performance(arguments[1:])
    return _measure(arguments)


def _plot(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks plot", description="Draw kept results again.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a run's JSON")
    files = parser.parse_args(arguments).files
    from benchmarks.plot import plot

    for file in files:
        try:
            written = plot(file)
        except (OSError, ValueError, ImportError) as error:
            parser.error(str(error))
        print("\n".join(str(path) for path in written))
    return 0


def _summary(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks summary", description="Ours against the best peer."
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a run's JSON")
    files = parser.parse_args(arguments).files
    from benchmarks import records, tables

    try:
        print(tables.compare([records.read(file) for file in files]))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


def _performance(arguments: Sequence[str]) -> int:
    from benchmarks import markdown, performance

    parser = argparse.ArgumentParser(
        "python -m benchmarks performance",
        description="Put the tables of figures into README.md and docs/performance.md, between their markers.",
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; 1 where a page is not up to date"
    )
    options = parser.parse_args(arguments)
    try:
        stale = performance.write(check=options.check)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for page in stale:
        print(page.relative_to(markdown.ROOT))
    return int(options.check and bool(stale))


def _measure(arguments: Sequence[str]) -> int:
    from benchmarks import op_entry, runner

    parser = argparse.ArgumentParser("python -m benchmarks", description="Measure ops on this GPU.")
    parser.add_argument("ops", nargs="+", metavar="OP", help=f"all, or: {', '.join(op_entry.modules())}")
    parser.add_argument("--out", type=Path, help="folder of the results (default: benchmarks/results/GPU)")
    parser.add_argument(
        "--effort", choices=runner.EFFORTS, default="full", help="of points and samples (default: full)"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=SECTIONS,
        help="this part (may be repeated)",
    )
    parser.add_argument(
        "--point",
        action="append",
        default=[],
        help="this point of the device figures, as the tables call it: 4096, 'packed 11008' (may be repeated)",
    )
    parser.add_argument("--providers", default=",".join(NAMES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--commit", help="the commit measured, where the tree has no history")
    options = parser.parse_args(arguments)
    providers = options.providers.split(",")
    ops = op_entry.modules() if options.ops == ["all"] else options.ops
    unknown = [name for name in ops if name not in op_entry.modules()]
    if unknown:
        parser.error(
            f"no benchmark for {', '.join(unknown)}: there is one for {', '.join(op_entry.modules())}"
        )
    strangers = [name for name in providers if name not in NAMES]
    if strangers:
        parser.error(f"no provider {', '.join(strangers)}: there are {', '.join(NAMES)}")
    for name in ops if options.point else ():
        known = list(dict.fromkeys(case.point for case in op_entry.load(name).cases()))
        if not set(known) & set(options.point):
            parser.error(
                f"{name} has none of the points {', '.join(options.point)}: it has {', '.join(known)}"
            )

    import torch

    if not torch.cuda.is_available():
        parser.error("a GPU is needed, and torch sees none here (plot needs none)")
    from benchmarks import tables

    command = shlex.join(["python", "-m", "benchmarks", *arguments])
    runs = [
        runner.measure_op(
            op,
            sections=options.only,
            providers=providers,
            effort=options.effort,
            points=options.point,
            results=options.out,
            command=command,
            commit=options.commit,
        )
        for op in ops
    ]
    print(f"\n{tables.compare(runs)}")
    return int(any(run.select(provider=NAMES[0], status="error") for run in runs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
