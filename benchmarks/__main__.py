"""The command line: `python -m benchmarks OP ...` measures ops on this machine's GPU, and
`python -m benchmarks plot FILE ...` draws kept results again."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from .providers import NAMES

SECTIONS = ("forward", "backward", "host", "cold")


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit status (2 for a wrong call or a machine that cannot run it)."""
    if arguments[:1] == ["plot"]:
        return _plot(arguments[1:])
    return _measure(arguments)


def _plot(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks plot", description="Draw kept results again.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a run's JSON")
    files = parser.parse_args(arguments).files
    from .plot import plot

    for file in files:
        try:
            written = plot(file)
        except (OSError, ValueError, ImportError) as error:
            parser.error(str(error))
        print("\n".join(str(path) for path in written))
    return 0


def _measure(arguments: Sequence[str]) -> int:
    from . import entry

    parser = argparse.ArgumentParser("python -m benchmarks", description="Measure ops on this GPU.")
    parser.add_argument("ops", nargs="+", metavar="OP", help=f"one of: {', '.join(entry.names())}")
    parser.add_argument("--out", type=Path, help="folder of the results (default: benchmarks/results/GPU)")
    parser.add_argument("--quick", action="store_true", help="few points and few samples")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="this part (may be repeated)")
    parser.add_argument("--providers", default=",".join(NAMES), help="comma-separated (default: %(default)s)")
    parser.add_argument("--commit", help="the commit measured, where the tree has no history")
    options = parser.parse_args(arguments)
    providers = options.providers.split(",")
    unknown = [name for name in options.ops if name not in entry.names()]
    if unknown:
        parser.error(f"no benchmark for {', '.join(unknown)}: there is one for {', '.join(entry.names())}")
    strangers = [name for name in providers if name not in NAMES]
    if strangers:
        parser.error(f"no provider {', '.join(strangers)}: there are {', '.join(NAMES)}")

    import torch

    if not torch.cuda.is_available():
        parser.error("a GPU is needed, and torch sees none here (plot needs none)")
    from . import session

    command = shlex.join(["python", "-m", "benchmarks", *arguments])
    for op in options.ops:
        session.measure(
            op,
            sections=options.only or SECTIONS,
            providers=providers,
            quick=options.quick,
            results=options.out,
            command=command,
            commit=options.commit,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
