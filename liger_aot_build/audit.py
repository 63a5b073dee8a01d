"""No binary enters a pack unless it is what the plan, the profile and the manifest say it is.

Every fact here is read back from the binary's own bytes; what Triton claims is only compared with them. The exceptions
are races on shared memory, which machine code may hide, and the columns of tensor memory, which are in its registers:
there the PTX that it was made from is judged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from liger_aot_build.binary import BinaryFacts, inspect
from liger_aot_build.compiler import Compiled
from liger_aot_build.elf import BinaryFormatError
from liger_aot_build.errors import AuditError
from liger_aot_build.plan import Variant
from liger_aot_build.profile import Arch
from liger_aot_build.ptx import races, tensor_memory

BYTES = {"i32": 4, "fp32": 4, "i64": 8}
MAP_BYTES, MAP_ALIGNMENT = 128, 64  # a tensor map; Triton appends its sizes (i32) and strides (i64)
GROUP_WARPS = 4  # of a warp group; the producer of a kernel with WARP_GROUPS consumer groups has one more
SCHEDULERS = 4  # of a multiprocessor, each with a quarter of its registers
# Scalar registers of a SIMD, GFX9; LLVM counts the same but for waves of 97 to 100: 8 fit, here 7.
SCALARS = 800
# Of a multiprocessor with tcgen05 (PTX ISA): one allocation is a power of 2 of them from 32 on. A block
# that finds too few left waits until another frees its own.
TENSOR_MEMORY_COLUMNS = 512
TENSOR_MEMORY = ("UTCHMMA",)  # the matrix instructions that write to it
SCRATCH_POINTERS = 2  # Triton appends global and profile scratch to every kernel's parameters


@dataclass(frozen=True)
class Audited:
    """A variant, its binary, what the binary says of itself, and how many of it a multiprocessor holds at once."""

    variant: Variant
    compiled: Compiled
    facts: BinaryFacts
    threads: int
    resident: int


def audit(variant: Variant, compiled: Compiled, arch: Arch) -> Audited:
    """Read the binary back; AuditError says every way in which it breaks the profile."""
    try:
        facts = inspect(compiled.image)
    except BinaryFormatError as error:
        raise AuditError(f"{arch.name}: {variant.name} ({variant.where}): {error}") from None
    threads = compiled.num_warps * arch.warp_size
    audited = Audited(variant, compiled, facts, threads, _resident(facts, threads, compiled, arch))
    if problems := list(_problems(audited, arch)):
        raise AuditError(f"{arch.name}: {variant.name} ({variant.where}): {'; '.join(problems)}")
    return audited


def parameter_layout(types: Iterable[str], base: int = 0) -> tuple[tuple[int, int], ...]:
    """(offset, size) of each parameter, naturally aligned, the scratch pointers last. ``base`` is where the block that
    holds them starts."""
    layout: list[tuple[int, int]] = []
    end = base
    for size, alignment in (part for kind in (*types, *("*i8",) * SCRATCH_POINTERS) for part in _parts(kind)):
        start = -(-end // alignment) * alignment
        layout.append((start - base, size))
        end = start + size
    return tuple(layout)


def _parts(kind: str) -> Iterator[tuple[int, int]]:
    """(size, alignment) of each parameter that an argument of this Triton type becomes."""
    if match := re.fullmatch(r"tensordesc<\w+\[(.*)\]>", kind):
        rank = len(match[1].split(","))
        yield MAP_BYTES, MAP_ALIGNMENT
        yield from ((4, 4),) * rank
        yield from ((8, 8),) * rank
    else:
        size = 8 if kind.startswith("*") else BYTES[kind]
        yield size, size


def report(audited: Iterable[Audited]) -> str:
    """The audit's table, one line a binary."""
    titles = f"{'bytes':>7} {'threads':>7} {'regs':>5} {'local':>5} {'shared':>7} {'params':>6} {'res.':>4}"
    lines = [
        f"{a.variant.name:<78} {len(a.compiled.image):>7} {a.threads:>7} {a.facts.registers:>5} "
        f"{a.facts.local_bytes:>5} {a.compiled.shared:>7} {a.facts.parameter_bytes:>6} {a.resident:>4}"
        for a in audited
    ]
    return "\n".join([f"{'binary':<78} {titles}", *lines])


def _resident(facts: BinaryFacts, threads: int, compiled: Compiled, arch: Arch) -> int:
    """Blocks that fit on one multiprocessor by threads, registers, shared and tensor memory."""
    fits = [
        arch.blocks_per_multiprocessor,
        arch.threads_per_multiprocessor // threads,
        _warps_a_scheduler(facts, arch) * SCHEDULERS // (threads // arch.warp_size),
    ]
    if used := compiled.shared + facts.static_shared:
        given = -(-(used + facts.shared_reserved) // facts.shared_granule) * facts.shared_granule
        fits.append(arch.shared_per_multiprocessor // given)
    if columns := tensor_memory(compiled.assembly)[0]:
        fits.append(TENSOR_MEMORY_COLUMNS // columns)
    return min(fits)


def _warps_a_scheduler(facts: BinaryFacts, arch: Arch) -> int:
    """Warps (waves a SIMD) whose registers fit: warps don't straddle schedulers."""
    vectors = arch.registers_per_multiprocessor // SCHEDULERS // (facts.granted_registers * arch.warp_size)
    return min(vectors, SCALARS // facts.granted_scalars) if facts.granted_scalars else vectors


def problems_of_any_kernel(
    facts: BinaryFacts, symbol: str, threads: int, shared: int, arch: Arch
) -> Iterator[str]:
    """What no binary may be that ``arch`` is to run, whosever kernel it is; ``shared`` is dynamic, in bytes."""
    if facts.arch != arch.machine:
        yield f"machine code for {facts.arch}, expected {arch.machine}"
    if facts.kernel != symbol:
        yield f"holds kernel {facts.kernel}, expected {symbol}"
    if facts.wave_size != arch.warp_size:
        yield f"waves of {facts.wave_size} lanes, expected {arch.warp_size}"
    if threads > arch.threads_per_block or threads > facts.max_threads:
        allowed = min(arch.threads_per_block, facts.max_threads)
        yield f"{threads} threads a block, allowed are {allowed}"
    if facts.registers > arch.registers_per_thread:
        yield f"{facts.registers} registers a thread, {arch.name} has {arch.registers_per_thread}"
    if shared + facts.static_shared > arch.shared_per_block:
        yield f"{shared + facts.static_shared} bytes of shared memory, a block has {arch.shared_per_block}"


def _problems(audited: Audited, arch: Arch) -> Iterator[str]:
    variant, compiled, facts = audited.variant, audited.compiled, audited.facts
    yield from problems_of_any_kernel(facts, compiled.symbol, audited.threads, compiled.shared, arch)
    if compiled.num_ctas != 1:
        yield f"asks for clusters of {compiled.num_ctas} blocks, which the launcher does not make"
    if compiled.scratch:
        yield f"asks for {compiled.scratch} bytes of global scratch, which the launcher does not give"
    if (facts.local_bytes or facts.spilled_registers) and not variant.form.may_spill:
        yield f"spills: {facts.spilled_registers} registers, {facts.local_bytes} bytes of local memory a thread"
    yield from _promises(audited, arch)
    if arch.backend == "cuda":
        yield from _races(audited)
        yield from _tensor_memory(audited)
    expected = parameter_layout(variant.arguments.values(), facts.parameter_offset)
    if facts.parameters != expected:
        yield f"parameters (offset, size) {facts.parameters}, expected {expected}"
    if audited.resident < 1:
        yield "not one block fits on a multiprocessor"
    wanted = variant.host.get("programs_per_multiprocessor", 1)
    if variant.cooperative and audited.resident < wanted:
        yield f"cooperative with {wanted} programs a multiprocessor, {audited.resident} are resident at once"


def _races(audited: Audited) -> Iterator[str]:
    """Miscompiled loops with tl.dot, which ptx.py explains."""
    found = races(audited.compiled.assembly)
    for lines, what in (
        (
            found.overwritten,
            "overwrites shared memory that a wgmma still reads: use the loaded tile in tl.dot alone",
        ),
        # In Gluon the program may choose a buffer by what no compiler knows, and orders its own accesses.
        (
            () if audited.variant.language == "gluon" else found.unknown,
            "has addresses that can't be checked for races",
        ),
    ):
        if lines:
            yield f"{what} (PTX line{'s' * (len(lines) > 1)} {', '.join(map(str, lines))})"


def _tensor_memory(audited: Audited) -> Iterator[str]:
    """What a block must do with tensor memory: allocate before it multiplies, free all of it before it ends."""
    columns, freed = tensor_memory(audited.compiled.assembly)
    if not columns:
        if any(name in audited.facts.matrix for name in TENSOR_MEMORY):
            yield "multiplies in tensor memory, and allocates none"
    elif columns > TENSOR_MEMORY_COLUMNS or columns < 32 or columns & (columns - 1):
        yield f"{columns} columns of tensor memory; a power of 2 from 32 to {TENSOR_MEMORY_COLUMNS} is allowed"
    elif freed != {columns}:
        yield f"allocates {columns} columns of tensor memory, and frees {', '.join(map(str, sorted(freed))) or 'none'}"


def _promises(audited: Audited, arch: Arch) -> Iterator[str]:
    """What the declaration and the profile's row promise of the machine code and a binary may lack."""
    variant, compiled, facts = audited.variant, audited.compiled, audited.facts
    if variant.matrix and not facts.matrix.get(arch.matrix):
        yield f"has no {arch.matrix} instruction, but {dict(facts.matrix) or 'no matrix instruction'}"
    groups = variant.constants.get("WARP_GROUPS")
    if groups is not None and compiled.num_warps != (wanted := GROUP_WARPS * (groups + 1)):
        yield f"{compiled.num_warps} warps, {groups} warp groups and a producer are {wanted}"
    budget = variant.constants.get("REGISTERS")
    if budget is not None and budget not in facts.register_budgets:
        yield f"warps change to {facts.register_budgets} registers a thread, never to {budget}"
    before, allowed = facts.before_wait, variant.form.loads_before_wait
    if variant.pdl != (before is not None):
        must, does = ("must", "does not") if variant.pdl else ("must not", "does")
        yield f"{must} wait for the kernel before it (griddepcontrol.wait), and {does}"
    elif before is not None and before > allowed:
        yield f"{before} accesses to global memory before it waits for the kernel before it; {allowed} are declared"
    waves, fit = variant.options.get("waves_per_eu", 0), _warps_a_scheduler(facts, arch)
    if waves > fit:
        yield f"waves_per_eu = {waves}, {fit} fit beside each other"
    maps = [kind for kind in variant.arguments.values() if kind.startswith("tensordesc<")]
    if len(maps) != len(compiled.maps):
        yield f"{len(compiled.maps)} tensor maps, expected {len(maps)}"
