"""``liger-aot pack``: what its options say, what it prints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from liger_aot.errors import ArgumentError
from liger_aot.triton import recording
from liger_aot.triton.recording import Part
from liger_aot.triton.targets import device, target
from liger_aot_build.errors import BuildError
from liger_aot_build.triton_packs.build import Result, Settings, build, check_triton
from liger_aot_build.triton_packs.pack import check_name, check_version, packages, write_pack_wheel

SHOWN = 8  # lines of one kind


def run(options: argparse.Namespace) -> int:
    """Run the command; its exit code: 1 where a recorded kernel is in no pack."""
    parts = recording.read(Path(options.recording))
    try:
        if options.check:
            from liger_aot_build.triton_packs.check import check

            return check(parts, options.name)
        return _build(parts, options)
    except BuildError as error:
        raise ArgumentError(str(error)) from None


def _build(parts: Sequence[Part], options: argparse.Namespace) -> int:
    if not options.name:
        raise ArgumentError("--name is needed: what the pack is to be called")
    name = check_name(options.name)
    archs = options.arch.split(",") if options.arch else [part.target.profile for part in parts]
    targets = list(dict.fromkeys(target(arch.strip()) for arch in archs))
    for of in targets:
        device(of)
    check_triton(parts)
    settings = Settings(tuple(options.package or ()), options.main, options.jobs)
    left = 0
    for of in targets:
        result = build(parts, of, settings)
        version = check_version(options.version) if options.version else _version(result)
        print(*_said(result, parts), sep="\n")
        if not result.built:
            print(f"{of.profile}: nothing to pack", file=sys.stderr)
            left += 1
            continue
        wheel = write_pack_wheel(result, name, version, Path(options.out))
        binaries = sum(len(built.image) for _, built in result.built)
        kilobytes = wheel.stat().st_size / 1000
        print(
            f"{of.profile}: {wheel}: {kilobytes:.0f} KB, {kilobytes / len(result.built):.1f} KB a binary"
            f" ({binaries / 1000 / len(result.built):.1f} KB unpacked)"
        )
        left += bool(result.left_out)
    return int(left > 0)


def _version(result: Result) -> str:
    """That of the package with most of the kernels."""
    first = next(iter(packages(result)), None)
    return first.version if first else "0"


def _said(result: Result, parts: Sequence[Part]) -> list[str]:
    """What was built and what was not."""
    of, on = result.target.profile, result.recorded.target.profile
    functions = {job.noted.variant.function for job, _ in result.built}
    variants = {built.name for _, built in result.built}
    lines = [f"{of}: {len(functions)} functions, {len(variants)} variants, {len(result.built)} binaries"]
    if on != of:
        lines.append(f"{of}: recorded on {on}: tuners' choices and launch options are those of {on}")
    if result.choices and not all(choice.timed for choice in result.choices):
        lines.append(f"{of}: tuners' choices were not timed: each is the first of its configurations")
    assumed = sorted({name for _, built in result.built for name in built.globals_set})
    if assumed:
        lines.append(f"{of}: globals set as they were recorded: {', '.join(assumed)}")
    seen: dict[tuple[str, str], int] = {}
    for one in result.left_out:
        seen[one.function, one.why] = seen.get((one.function, one.why), 0) + 1
    lines += [
        f"{of}: left out: {function} ({count} variants): {why}" for (function, why), count in seen.items()
    ]
    for part in parts:
        if part is result.recorded:
            lines += [f"{of}: was not recorded: {function}: {why}" for function, why in part.refused[:SHOWN]]
    return lines
