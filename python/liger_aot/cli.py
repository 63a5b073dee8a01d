"""``liger-aot``: what is installed, what a call would run, and whether all is as it was built."""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from liger_aot._version import __version__
from liger_aot.errors import ArgumentError, LigerAOTError, PackNotFound, printable

if TYPE_CHECKING:
    from liger_aot.runtime.manifest import Pack


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. Errors are one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a path or a GPU's name may not fit the terminal's encoding
            stream.reconfigure(errors="backslashreplace")
    try:
        options = _parser().parse_args(arguments)
        code: int = options.run(options)
    except LigerAOTError as error:
        print("error:", printable(" ".join(str(error).split())), file=sys.stderr)
        return 1
    return code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="liger-aot", description="Liger's Triton kernels, compiled ahead of time.")
    parser.add_argument("--version", action="version", version=f"liger-aot {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    text = "ops, the binaries that each installed architecture has of them, and packs of Triton kernels"
    command = commands.add_parser("list", help=text, description=f"List {text}.")
    command.set_defaults(run=_list)

    text = "which binaries a call takes, and why"
    command = commands.add_parser("explain", help=text, description=f"Say {text}. Needs no GPU.")
    command.add_argument(
        "op", metavar="OP", help="an op that 'liger-aot list' shows, or a Triton kernel: MODULE:FUNCTION"
    )
    command.add_argument("--shape", type=_shape, help="an op's first argument's, such as 8192,4096")
    command.add_argument("--dtype", help="an op's first argument's: bf16, fp16 or fp32")
    command.add_argument(
        "--dtypes", type=_dtypes, help="of further arguments, where they differ, such as weight=fp32"
    )
    command.add_argument("--arch", help="an installed architecture such as sm90; default: all of them")
    command.set_defaults(run=_explain)

    text = "torch, the GPU driver, the packs, and which pack each GPU takes"
    command = commands.add_parser(
        "doctor",
        help=text,
        description=f"Report {text}. Exit code 0 if every GPU has a pack, or there is no GPU; else 1.",
    )
    command.set_defaults(run=_doctor)

    text = "every file of the installed packs against its sha256"
    command = commands.add_parser(
        "verify", help=text, description=f"Check {text}. Exit code 0 if all are as they were built; else 1."
    )
    command.set_defaults(run=_verify)

    text = "which Triton kernels a program launches, so that they can be built into packs"
    command = commands.add_parser("record", help=text, description=f"Note {text}.")
    command.add_argument("--out", metavar="DIR", help="the recording's folder; it may hold another run's")
    command.add_argument(
        "--target",
        metavar="ARCH",
        help="such as sm90: no GPU is needed, no kernel runs, tensors are the CPU's",
    )
    command.add_argument("--report", metavar="DIR", help="say what a recording holds")
    command.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    command.set_defaults(run=_record)

    text = "a recording's kernels into wheels, one an architecture"
    command = commands.add_parser("pack", help=text, description=f"Compile {text}. Needs no GPU.")
    _pack_arguments(command)
    command.set_defaults(run=_pack)
    return parser


def _pack_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("recording", metavar="RECORDING", help="a folder that 'liger-aot record' wrote")
    command.add_argument(
        "--arch", metavar="ARCH,...", help="such as sm80,sm90,gfx942; default: those recorded on"
    )
    command.add_argument("--name", help="the pack's name: lower-case letters, digits and _")
    command.add_argument("--out", metavar="DIR", default="dist", help="where the wheels go; default: dist")
    command.add_argument(
        "--version", help="the wheels'; default: that of the package with most of the kernels"
    )
    command.add_argument(
        "--main", metavar="FILE", help="the program, where kernels are in the program itself"
    )
    command.add_argument(
        "--package",
        action="append",
        metavar="MODULE",
        help="import kernels from this package alone; repeatable",
    )
    command.add_argument("--jobs", type=int, help="compiler processes; default: one a core")
    command.add_argument(
        "--check", action="store_true", help="only say whether installed packs hold all of it"
    )


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of sizes such as 8192,4096") from None


def _dtypes(text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(name and equals and dtype for name, equals, dtype in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is no list such as weight=fp32")
    return {name: dtype for name, _, dtype in pairs}


def _record(options: argparse.Namespace) -> int:
    from liger_aot.triton.report import report

    if options.report:
        print("\n".join(map(printable, report(Path(options.report)).splitlines())))
        return 0
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not options.out or not command:
        raise ArgumentError("record needs --out DIR and a command after --, or --report DIR")
    environment = {**os.environ, "LIGER_AOT_RECORD": os.path.abspath(options.out)}
    environment.pop("LIGER_AOT_RECORD_TARGET", None)
    if options.target:
        from liger_aot.triton.targets import device, target

        device(target(options.target))
        environment["LIGER_AOT_RECORD_TARGET"] = options.target
    try:
        code = subprocess.run(command, env=environment).returncode
    except OSError as error:
        raise ArgumentError(f"can't run {command[0]}: {error.strerror}") from None
    if not Path(options.out, "recording.json").exists():
        raise ArgumentError(
            f"nothing was recorded: {command[0]} (exit code {code}) launched no Triton kernel, or is no Python that "
            "reads the liger_aot.pth of this environment"
        )
    print("\n".join(map(printable, report(Path(options.out)).splitlines())), file=sys.stderr)
    return code


def _pack(options: argparse.Namespace) -> int:
    from liger_aot_build.triton_packs.command import run

    code: int = run(options)
    return code


def _list(options: argparse.Namespace) -> int:
    from liger_aot.explanation import columns
    from liger_aot.ops.registry import names as ops
    from liger_aot.runtime.packs import describe, hidden_folders, installed
    from liger_aot.triton.inspection import table
    from liger_aot.triton.packs import installed as installed_kernels

    found = installed()
    damaged = list(found.unusable.values())
    rows = [[op, *(_binaries(pack, op, damaged) for pack in found.packs)] for op in ops()]
    print(columns([["op", *(pack.arch for pack in found.packs)], *rows]))
    if not found.packs:
        print(printable(f"No binaries: {describe()}. On the CPU, ops run their plain-torch reference."))
    kernels = installed_kernels()
    if kernels.packs:
        print(f"\nTriton kernels:\n{columns(table(kernels.packs))}")
    damaged += kernels.unusable.values()
    for folder, first in hidden_folders():
        print(printable(f"not used: {folder}: {first} comes first"), file=sys.stderr)
    if damaged:
        more = f" (and {len(damaged) - 1} more: see liger-aot verify)" if len(damaged) > 1 else ""
        raise PackNotFound(damaged[0] + more)
    return 0


def _binaries(pack: Pack, op: str, damaged: list[str]) -> str:
    """How many of ``op`` are in ``pack``; what keeps them from being read is added to ``damaged``."""
    if op not in pack.ops:
        return "-"
    try:
        return str(len(pack.op(op).variants))
    except LigerAOTError as error:
        damaged.append(str(error))
        return "damaged"


def _explain(options: argparse.Namespace) -> int:
    from liger_aot.explanation import explain, table
    from liger_aot.runtime.packs import installed

    if ":" in options.op:
        from liger_aot.triton.inspection import explain as explain_kernel

        print(*map(printable, explain_kernel(options.op, options.arch).splitlines()), sep="\n")
        return 0
    if missing := [f"--{name}" for name in ("shape", "dtype") if getattr(options, name) is None]:
        raise ArgumentError(
            f"the following arguments are required: {', '.join(missing)}; see liger-aot explain --help"
        )
    choices = explain(
        options.op, arch=options.arch, shape=options.shape, dtype=options.dtype, dtypes=options.dtypes
    )
    print(table(choices), *(printable(str(choice)) for choice in choices), sep="\n")
    if options.arch is None:
        for problem in installed().unusable.values():
            print("left out:", printable(problem), file=sys.stderr)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from liger_aot.doctor import examine

    report = examine()
    print(report)
    return 0 if report.healthy else 1


def _verify(options: argparse.Namespace) -> int:
    from liger_aot.runtime.packs import describe, hidden_folders, pack_folders
    from liger_aot.verify import triton_pack_folders, verify

    folders = pack_folders()
    kernels = triton_pack_folders()
    if not folders and not kernels:
        raise PackNotFound(f"nothing to verify: {describe()}")
    report = verify()
    for fault in report.faults:
        print(printable(str(fault)))
    for folder, files in report.unrecorded.items():
        print(printable(f"{folder}: no wheel's RECORD covers its {files} files, which vouch for themselves"))
    for folder, first in hidden_folders():
        print(printable(f"{folder}: not verified, as it is not used: {first} comes first"))
    if report.faults:
        raise PackNotFound(
            f"{len(report.faults)} files are not as they were built; reinstall the packages that hold them"
        )
    names = [folder.name for folder in folders] + [
        f"{folder.parent.name} {folder.name}" for folder in kernels
    ]
    print("as they were built:", printable(", ".join(names)))
    return 0
