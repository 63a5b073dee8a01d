"""What the audit asks of one compiled kernel, the same for cubin and hsaco."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TypeVar

from liger_aot_build import cubin, hsaco
from liger_aot_build.cubin import Cubin, CubinKernel
from liger_aot_build.elf import BinaryFormatError, Elf
from liger_aot_build.hsaco import CodeObject, KernelDescriptor, accumulator_registers, metadata_field
from liger_aot_build.instructions import amd_matrix_instructions, sass_instructions

_CUDA_WARP_SIZE = 32
_CUDA_MAX_THREADS = 1024  # a block of a kernel that declares no bound, every compute capability since 2.0
_REGISTER_GRANULE = 8  # a thread, every compute capability since 3.0
_SHARED_GRANULE, _SHARED_RESERVED = 128, 1024  # a block, every compute capability since 8.0
_SCALAR_GRANULE = 16  # a wave, GFX9

T = TypeVar("T")


@dataclass(frozen=True)
class BinaryFacts:
    """The facts of a binary that holds one kernel.

    `kind` is "cubin" or "hsaco". `arch` is "sm_80", "sm_90a", "gfx90a", "gfx942", with ":sramecc+" or
    ":xnack-" behind it where the code needs a feature set one way. `format_version` is the ELF ABI version
    (cubin) or the code object version (hsaco).

    `registers` are the vector registers per thread that the code uses, accumulator registers included;
    `scalar_registers` are per wave, zero on CUDA. `granted_registers` and `granted_scalars` are those that others on
    the multiprocessor do without: whole granules, on AMD as many more as `waves_per_eu` asks for. `local_bytes` is
    stack or scratch per thread, not zero if registers are spilled to memory. On CUDA nothing else tells of that:
    `spilled_registers` is zero there.
    `static_shared` is in bytes per block or workgroup and leaves dynamic shared memory out; blocks are given shared
    memory by multiples of `shared_granule`, and what the system keeps of each block's, `shared_reserved`.

    `parameters` are (offset, size) in bytes of what the caller passes, `parameter_bytes` is the length of the
    block that holds them, `parameter_offset` where alignments over 16 bytes see that block start.

    `matrix` counts the matrix instructions by name (HMMA, HGMMA, MFMA, WMMA), `register_budgets` are the registers a
    thread that warps change to while they run (sm_90). `before_wait`: how many accesses to global memory stand before
    its wait for the kernel launched before it (sm_90 and later); None where it does not wait.
    """

    kind: str
    arch: str
    kernel: str
    format_version: int
    registers: int
    accumulator_registers: int
    scalar_registers: int
    granted_registers: int
    granted_scalars: int
    spilled_registers: int
    local_bytes: int
    static_shared: int
    shared_granule: int
    shared_reserved: int
    max_threads: int
    wave_size: int
    parameters: tuple[tuple[int, int], ...]
    parameter_bytes: int
    parameter_offset: int
    matrix: Mapping[str, int]
    register_budgets: tuple[int, ...]
    before_wait: int | None


def inspect(image: bytes) -> BinaryFacts:
    """Read a cubin or hsaco of exactly one kernel. Raises BinaryFormatError for anything else."""
    machine = Elf(image).machine
    if machine == cubin.EM_CUDA:
        facts = _cubin_facts(Cubin(image))
    elif machine == hsaco.EM_AMDGPU:
        facts = _hsaco_facts(CodeObject(image))
    else:
        raise BinaryFormatError(f"neither cubin nor hsaco: ELF machine {machine}")
    end = 0
    for offset, size in facts.parameters:
        if offset < end or size == 0 or offset + size > facts.parameter_bytes:
            raise BinaryFormatError(
                f"kernel {facts.kernel!r}: the parameter of {size} bytes at {offset} overlaps another, is "
                f"empty or ends past the {facts.parameter_bytes} bytes of its block"
            )
        end = offset + size
    return facts


def _cubin_facts(binary: Cubin) -> BinaryFacts:
    kernel: CubinKernel = _single(list(binary.kernels.values()))
    matrix, budgets, before_wait = sass_instructions(kernel.code)
    return BinaryFacts(
        kind="cubin",
        arch=binary.arch,
        kernel=kernel.name,
        format_version=binary.abi_version,
        registers=kernel.registers,
        accumulator_registers=0,
        scalar_registers=0,
        granted_registers=_granules(kernel.registers, _REGISTER_GRANULE),
        granted_scalars=0,
        # ptxas prints what it spilled but does not store it; it shows in local_bytes, where it goes.
        spilled_registers=0,
        local_bytes=kernel.stack_bytes + kernel.local_bytes,
        static_shared=kernel.static_shared_bytes,
        shared_granule=_SHARED_GRANULE,
        shared_reserved=_SHARED_RESERVED,
        max_threads=prod(kernel.required_threads or kernel.max_threads or (_CUDA_MAX_THREADS,)),
        wave_size=_CUDA_WARP_SIZE,
        parameters=tuple((parameter.offset, parameter.size) for parameter in kernel.parameters),
        parameter_bytes=kernel.parameter_bytes,
        parameter_offset=kernel.parameter_offset,
        matrix=matrix,
        register_budgets=budgets,
        before_wait=before_wait,
    )


def _hsaco_facts(binary: CodeObject) -> BinaryFacts:
    kernel: KernelDescriptor = _single(list(binary.kernels.values()))

    def count(key: str) -> int:
        return metadata_field(kernel.metadata, key, int, kernel.name)

    if metadata_field(kernel.metadata, ".uses_dynamic_stack", bool, kernel.name):
        raise BinaryFormatError(f"kernel {kernel.name!r}: its stack grows at run time")
    parameters = tuple(
        (
            metadata_field(argument, ".offset", int, kernel.name),
            metadata_field(argument, ".size", int, kernel.name),
        )
        for argument in metadata_field(kernel.metadata, ".args", list, kernel.name)
        if not metadata_field(argument, ".value_kind", str, kernel.name).startswith("hidden_")
    )
    parameter_bytes = max((offset + size for offset, size in parameters), default=0)
    if parameter_bytes > kernel.kernarg_bytes:
        raise BinaryFormatError(
            f"kernel {kernel.name!r}: its arguments end at {parameter_bytes} of {kernel.kernarg_bytes} bytes"
        )
    settings = {"on": "+", "off": "-"}
    features = (("sramecc", binary.sramecc), ("xnack", binary.xnack))  # in the order of a target id
    return BinaryFacts(
        kind="hsaco",
        arch=binary.arch + "".join(f":{name}{settings[it]}" for name, it in features if it in settings),
        kernel=kernel.name,
        format_version=binary.code_object_version,
        registers=count(".vgpr_count"),
        accumulator_registers=accumulator_registers(kernel),
        scalar_registers=count(".sgpr_count"),
        granted_registers=kernel.granted_vectors,
        granted_scalars=_granules(kernel.named_scalars, _SCALAR_GRANULE) if kernel.chip.accumulators else 0,
        spilled_registers=count(".vgpr_spill_count") + count(".sgpr_spill_count"),
        local_bytes=kernel.private_segment_bytes,
        static_shared=kernel.group_segment_bytes,
        shared_granule=kernel.chip.shared_granule,
        shared_reserved=0,
        max_threads=count(".max_flat_workgroup_size"),
        wave_size=kernel.wave_size,
        parameters=parameters,
        parameter_bytes=parameter_bytes,
        parameter_offset=0,
        matrix=amd_matrix_instructions(_text(binary), binary.arch),
        register_budgets=(),
        before_wait=None,
    )


def _granules(count: int, granule: int) -> int:
    return max(1, -(-count // granule)) * granule


def _text(binary: CodeObject) -> bytes:
    section = binary.elf.section(".text")
    return binary.elf.data(section) if section else b""


def _single(kernels: list[T]) -> T:
    if len(kernels) != 1:
        raise BinaryFormatError(f"the binary holds {len(kernels)} kernels instead of one")
    return kernels[0]
