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
    if arguments[:1] == ["performance"]:
        return _performance(arguments[1:])
    if arguments[:1] in (["plot"], ["summary"]):
        return _kept(*arguments)
    return _measure(arguments)


def _kept(what: str, *arguments: str) -> int:
    """Of files: draw them again, or compare ours in them with the best peer."""
    parser = argparse.ArgumentParser(f"python -m benchmarks {what}")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a run's JSON")
    files = parser.parse_args(arguments).files
    from benchmarks import plot, records, tables

    try:
        if what == "summary":
            print(tables.compare([records.read(file) for file in files]))
        else:
            print("\n".join(str(path) for file in files for path in plot.plot(file)))
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))
    return 0


def _performance(arguments: Sequence[str]) -> int:
    from benchmarks import performance
    from benchmarks.environment import ROOT

    about = "Put the tables of figures into README.md and docs/performance.md, between their markers."
    parser = argparse.ArgumentParser("python -m benchmarks performance", description=about)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; 1 where a page is not up to date"
    )
    options = parser.parse_args(arguments)
    try:
        stale = performance.write(check=options.check)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for page in stale:
        print(page.relative_to(ROOT))
    return int(options.check and bool(stale))


def _measure(arguments: Sequence[str]) -> int:
    from benchmarks import op_entry, runner, tables

    known = op_entry.modules()
    parser = argparse.ArgumentParser("python -m benchmarks", description="Measure ops on this GPU.")
    add = parser.add_argument
    add("ops", nargs="+", metavar="OP", help=f"all, or: {', '.join(known)}")
    add("--out", type=Path, help="folder of the results (default: benchmarks/results/GPU)")
    add("--effort", choices=runner.EFFORTS, default="full", help="of points and samples (default: full)")
    add("--only", action="append", choices=SECTIONS, help="this part (may be repeated)")
    named = "this point of the device figures, as the tables call it: 4096, 'packed 11008' (may be repeated)"
    add("--point", action="append", default=[], help=named)
    add("--providers", default=",".join(NAMES), help="comma-separated (default: %(default)s)")
    add("--commit", help="the commit measured, where the tree has no history")
    options = parser.parse_args(arguments)
    providers = options.providers.split(",")
    ops = known if options.ops == ["all"] else options.ops
    if unknown := [name for name in ops if name not in known]:
        parser.error(f"no benchmark for {', '.join(unknown)}: there is one for {', '.join(known)}")
    if strangers := [name for name in providers if name not in NAMES]:
        parser.error(f"no provider {', '.join(strangers)}: there are {', '.join(NAMES)}")
    for name in ops if options.point else ():
        points = list(dict.fromkeys(case.point for case in op_entry.load(name).cases()))
        if not set(points) & set(options.point):
            parser.error(
                f"{name} has none of the points {', '.join(options.point)}: it has {', '.join(points)}"
            )

    import torch

    if not torch.cuda.is_available():
        parser.error("a GPU is needed, and torch sees none here (plot needs none)")
    runs = [
        runner.measure_op(
            op,
            sections=options.only,
            providers=providers,
            effort=options.effort,
            points=options.point,
            results=options.out,
            command=shlex.join(["python", "-m", "benchmarks", *arguments]),
            commit=options.commit,
        )
        for op in ops
    ]
    print(f"\n{tables.compare(runs)}")
    return int(any(run.select(provider=NAMES[0], status="error") for run in runs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
