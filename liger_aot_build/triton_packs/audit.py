"""What a binary of any project's kernel must be, read back from its own bytes, before it enters a pack.

The same readers and limits as for this project's kernels. Two things differ: such a kernel may spill, as it does where
it is compiled in place, and its clusters and scratch memory are launched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from liger_aot_build.audit import MAP_ALIGNMENT, MAP_BYTES, problems_of_any_kernel
from liger_aot_build.binary import BinaryFacts, inspect
from liger_aot_build.elf import BinaryFormatError
from liger_aot_build.errors import AuditError, ProfileError
from liger_aot_build.profile import Arch, read_profile
from liger_aot_build.ptx import races

_BYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "u1": 1, "u8": 1, "u16": 2, "u32": 4, "u64": 8}
_BYTES |= {"fp16": 2, "bf16": 2, "fp32": 4, "f32": 4, "fp64": 8}
_DESCRIPTOR = re.compile(r"tensordesc(?:_im2col)?<(\w+)\[([^\]]*)\]")


def known_arch(name: str) -> Arch | None:
    """The limits of an architecture that has a profile."""
    try:
        return read_profile(name).arch
    except ProfileError:
        return None


def audit(
    image: bytes,
    assembly: str,
    metadata: Mapping[str, Any],
    parameters: Sequence[str],
    arch: Arch | None,
    machine: str,
) -> BinaryFacts:
    """Read a binary back; AuditError says every way in which a launch of it would go wrong."""
    try:
        facts = inspect(image)
    except BinaryFormatError as error:
        raise AuditError(str(error)) from None
    warp = facts.wave_size
    threads = metadata["num_warps"] * warp
    problems: list[str] = []
    if arch is not None:
        if facts.arch == f"{machine}a":  # Triton's own, where our kernels are built for a family of machines
            arch = replace(arch, machine=facts.arch)
        problems += problems_of_any_kernel(facts, metadata["name"], threads, metadata["shared"], arch)
    elif facts.arch.rstrip("af") != machine:
        problems.append(f"machine code for {facts.arch}, expected {machine}")
    flags = 1 if metadata["triton_version"].startswith("3.6.") else 2
    expected = tuple(_layout(parameters, metadata.get("tensordesc_meta"), flags, facts.parameter_offset))
    if facts.parameters[: len(expected)] != expected or not _only_pointers(facts.parameters[len(expected) :]):
        problems.append(
            f"parameters (offset, size) {facts.parameters}, expected {expected} and pointers to scratch"
        )
    if facts.kind == "cubin" and (found := races(assembly).overwritten):
        lines = ", ".join(map(str, found))
        problems.append(
            f"overwrites shared memory that a wgmma still reads (PTX lines {lines}): Triton's issue 6691, results may"
            " be wrong"
        )
    if problems:
        raise AuditError("; ".join(problems))
    return facts


def _layout(
    types: Sequence[str], maps: Sequence[Any] | None, flags: int, base: int
) -> Iterator[tuple[int, int]]:
    """(offset, size) of each parameter at its natural alignment. A descriptor without hardware has ``flags``: how it
    is padded, and since Triton 3.7 whether it rounds to tf32."""
    end, described = base, 0
    for kind in types:
        meta = None
        if kind.startswith("tensordesc"):
            meta = maps[described] if maps else None
            described += 1
        for size, alignment in _parts(kind, meta, flags):
            start = -(-end // alignment) * alignment
            yield start - base, size
            end = start + size


def _parts(kind: str, meta: Any, flags: int) -> Iterator[tuple[int, int]]:
    """(size, alignment) of what an argument of this type becomes."""
    if match := _DESCRIPTOR.match(kind):
        rank = len(match[2].split(","))
        if meta is None:  # no hardware descriptor: a pointer, the shape, the strides, the flags
            yield 8, 8
            yield from ((8, 8),) * (2 * rank)
            yield from ((1, 1),) * flags
        else:
            yield MAP_BYTES, MAP_ALIGNMENT
        yield from ((4, 4),) * rank
        yield from ((8, 8),) * rank
    elif kind.startswith("*"):
        yield 8, 8
    elif kind in _BYTES:
        yield _BYTES[kind], _BYTES[kind]
    else:
        raise AuditError(f"an argument of type {kind}, which the launcher can't pass")


def _only_pointers(rest: Sequence[tuple[int, int]]) -> bool:
    """Triton appends pointers to global and profile scratch."""
    return len(rest) == 2 and all(size == 8 for _, size in rest)
