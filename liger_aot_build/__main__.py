"""python -m liger_aot_build plan|build|audit|wheel"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from liger_aot_build.audit import report
from liger_aot_build.build import Tree, build_packs, compile_and_audit, make_plans
from liger_aot_build.detect import parse_archs
from liger_aot_build.errors import BuildError
from liger_aot_build.paths import CACHE, KERNELS, PACKS, PROFILES
from liger_aot_build.plan import Plan
from liger_aot_build.release import write_records
from liger_aot_build.variants import write_variants
from liger_aot_build.wheel import build_device_wheels, build_host_wheel, build_wheel, parse_ops


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        run: int = options.run(options)
        return run
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m liger_aot_build",
        description="Compile Liger's kernels ahead of time. No GPU is needed.",
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--arch", default="all", help="comma list of architectures, 'all' or 'none' (default: all)"
    )
    common.add_argument(
        "--kernel",
        default="",
        metavar="OPS",
        help="comma list of ops, built with those that they launch (default: every one)",
    )
    common.add_argument("--profiles", type=Path, default=PROFILES, help="folder of profiles")
    common.add_argument("--cache", type=Path, default=CACHE, help="folder of compiled kernels to reuse")
    common.add_argument("--packs", type=Path, default=PACKS, help="folder to write packs to")
    common.add_argument("--workers", type=int, help="compiler processes (default: one a core)")
    common.add_argument("--quiet", action="store_true", help="no progress bar")
    commands = parser.add_subparsers(required=True, metavar="command")

    command = commands.add_parser("plan", parents=[common], help="print what would be compiled")
    command.set_defaults(run=_plan)
    command = commands.add_parser("build", parents=[common], help="compile, audit and pack")
    command.set_defaults(run=_build)
    command = commands.add_parser(
        "audit", parents=[common], help="compile and print the audit's table; write no pack"
    )
    command.add_argument("--assembly", type=Path, metavar="DIR", help="also write PTX or AMD assembly there")
    command.set_defaults(run=_audit)
    command = commands.add_parser(
        "wheel", parents=[common], help="build the wheel with these architectures' packs"
    )
    parts = command.add_mutually_exclusive_group()
    parts.add_argument(
        "--split", action="store_true", help="host wheel, a device wheel an architecture, checksums and SBOM"
    )
    command.add_argument(
        "--variants",
        action="store_true",
        help="with --split: wheel variants (PEP 825) too, in a folder of their own",
    )
    parts.add_argument("--device", action="store_true", help="the device wheels of --split alone")
    command.add_argument(
        "--out", type=Path, default=Path("dist"), help="folder for the wheels (default: dist)"
    )
    command.set_defaults(run=_wheel)
    return parser


def _tree(options: argparse.Namespace) -> Tree:
    return Tree(options.profiles, KERNELS, options.packs, options.cache)


def _ops(options: argparse.Namespace) -> tuple[str, ...]:
    """Those asked for, with the ops that they launch; none: all."""
    return parse_ops(options.kernel) if options.kernel else ()


def _plan(options: argparse.Namespace) -> int:
    tree = _tree(options)
    for arch in parse_archs(options.arch, tree.profiles):
        _, plans = make_plans(arch, _ops(options), tree)
        for plan in plans:
            print(describe(plan))
    return 0


def describe(plan: Plan) -> str:
    """A plan as text: every dispatch table, then the count of binaries."""
    lines = [f"{plan.arch} {plan.op}: {len(plan.variants)} binaries"]
    for name, kernel in plan.kernels.items():
        for key, entries in kernel.tables.items():
            lines.append(f"  {name} {key}")
            rows = [(bound, f", up to {most} rows", v) for bound, most, v in kernel.few.get(key, ())]
            for bound, few, variant in (*rows, *((bound, "", v) for bound, v in entries)):
                shown = variant.removeprefix(f"{name}-").replace("-" + key.replace("/", "-"), "")
                lines.append(f"    n <= {bound}{few}: {shown}" if bound else f"    any n{few}: {shown}")
        for key, why in kernel.absent.items():
            past = f" past n = {kernel.tables[key][-1][0]}" if key in kernel.tables else ""
            lines.append(f"  {name} {key}{past}: absent: {why}")
    return "\n".join(lines)


def _build(options: argparse.Namespace) -> int:
    tree, archs = _tree(options), parse_archs(options.arch, _tree(options).profiles)
    built = build_packs(archs, _ops(options), tree, workers=options.workers, progress=not options.quiet)
    for arch, audited in built.items():
        size = sum(len(a.compiled.image) for a in audited.values())
        print(f"{arch}: {len(audited)} binaries, {size / 1e6:.2f} MB, audited, in {tree.packs / arch}")
    return 0


def _audit(options: argparse.Namespace) -> int:
    tree = _tree(options)
    planned = [make_plans(arch, _ops(options), tree) for arch in parse_archs(options.arch, tree.profiles)]
    found = compile_and_audit(planned, tree, workers=options.workers, progress=not options.quiet)
    for (profile, _), audited in zip(planned, found, strict=True):
        arch = profile.arch.name
        print(f"{arch}:\n{report(audited.values())}")
        if options.assembly:
            suffix = "ptx" if profile.arch.backend == "cuda" else "s"
            folder = options.assembly / arch
            folder.mkdir(parents=True, exist_ok=True)
            for name, one in audited.items():
                (folder / f"{name}.{suffix}").write_text(one.compiled.assembly)
    return 0


def _wheel(options: argparse.Namespace) -> int:
    archs = parse_archs(options.arch, options.profiles)
    if not options.split and not options.device:
        build_wheel(archs, options.out, _ops(options))
        return 0
    if options.variants and not options.split:
        raise BuildError("--variants needs --split: they are made of the host wheel")
    tree, progress = _tree(options), not options.quiet
    build_device_wheels(archs, options.out, _ops(options), tree, workers=options.workers, progress=progress)
    if options.split:
        host = build_host_wheel(options.out)
        write_records(options.out)
        if options.variants:
            write_variants(host, [tree.packs / arch for arch in archs], options.out / "variants")
    for path in sorted(options.out.rglob("*")):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
