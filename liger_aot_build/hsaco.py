"""Read an AMD GPU code object (hsaco): its target, its kernels, its loadable bytes.

Layouts and constants: LLVM's "User Guide for AMDGPU Backend", sections ELF Code Object, Code Object Metadata
and Kernel Descriptor. What the file says twice, in a kernel's descriptor and in its metadata, has to agree.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeVar

from liger_aot_build import elf, msgpack
from liger_aot_build.elf import BinaryFormatError, Elf, Segment, Symbol
from liger_aot_build.profile import CodeObject as Chip
from liger_aot_build.profile import code_objects

EM_AMDGPU = 224
_OS_ABI_HSA = 64
_NT_AMDGPU_METADATA = 32
_CODE_OBJECT_VERSIONS = {2: 4, 3: 5, 4: 6}  # by e_ident[EI_ABIVERSION]
_WAVE32 = 1 << 10  # of the descriptor's properties
_WGP_MODE = 1 << 29  # of rsrc1: a workgroup runs on a pair of compute units
_FEATURE = ("unsupported", "any", "off", "on")  # two bits of e_flags a feature
_ENTRY_ALIGNMENT = 256
# A loader allocates what a file asks for. Kernels take kilobytes; more than this is damage.
_MAX_LOADED_BYTES = 256 << 20

# group, private, kernarg bytes; entry offset; rsrc3, rsrc1, rsrc2, properties, kernarg preload. The gaps are
# reserved. The offset is signed: the code may lie before the descriptor.
_DESCRIPTOR = struct.Struct("<3I4xq20x3I2H4x")

T = TypeVar("T")

_chips = cache(code_objects)

# Of every wave, vcc and those of the trap handler included, where they are not given by eights.
_SCALARS = 128


@dataclass(frozen=True)
class KernelDescriptor:
    """One kernel of a code object. Addresses are relative to where the code object is loaded, sizes in bytes.

    `group_segment_bytes` is static LDS per workgroup, `private_segment_bytes` scratch per work-item.
    `kernarg_preload` is the raw field: length in dwords in bits 6:0, offset in dwords in bits 15:7.
    `metadata` is the kernel's map in the NT_AMDGPU_METADATA note.
    """

    name: str
    chip: Chip
    descriptor_address: int
    entry_address: int
    code_size: int
    group_segment_bytes: int
    private_segment_bytes: int
    kernarg_bytes: int
    rsrc1: int
    rsrc2: int
    rsrc3: int
    properties: int
    kernarg_preload: int
    metadata: Mapping[str, Any]

    @property
    def granted_vectors(self) -> int:
        """Vector registers a work-item that a wave is given, accumulators included: whole granules of eights,
        rsrc1[5:0], less one. More than are used where waves_per_eu asks for no more waves than that."""
        granule = self.chip.register_granule
        return -(-8 * ((self.rsrc1 & 0x3F) + 1) // granule) * granule

    @property
    def accumulators_from(self) -> int:
        """Where among them accumulators begin: fours, rsrc3[5:0], less one. Past all where there are none."""
        return 4 * ((self.rsrc3 & 0x3F) + 1) if self.chip.accumulators else self.granted_vectors

    @property
    def named_scalars(self) -> int:
        """Scalar registers that the code may name: eights, rsrc1[9:6], less one, or those that every wave has."""
        return 8 * ((self.rsrc1 >> 6 & 0xF) + 1) if self.chip.accumulators else _SCALARS

    @property
    def wave_size(self) -> int:
        return 32 if self.properties & _WAVE32 else 64


class CodeObject:
    """A loadable AMD code object, checked when it is made; raises BinaryFormatError.

    `arch` is "gfx90a", "gfx942", ...; `xnack` and `sramecc` are "any", "on", "off" or "unsupported";
    `segments` are (address, bytes in the file, size in memory), ascending, memory past the bytes being zero.
    """

    def __init__(self, image: bytes) -> None:
        self.elf = Elf(image)
        if self.elf.machine != EM_AMDGPU or self.elf.os_abi != _OS_ABI_HSA or self.elf.type != elf.ET_DYN:
            raise BinaryFormatError(
                f"not an AMD HSA code object: ELF machine {self.elf.machine}, OS ABI {self.elf.os_abi}, "
                f"type {self.elf.type}"
            )
        if self.elf.abi_version not in _CODE_OBJECT_VERSIONS:
            raise BinaryFormatError(f"code object ABI version {self.elf.abi_version} is not supported")
        self.code_object_version = _CODE_OBJECT_VERSIONS[self.elf.abi_version]
        machine = self.elf.flags & 0xFF
        if machine not in _chips():
            known = ", ".join(f"{name} ({number:#x})" for number, (name, _) in _chips().items())
            raise BinaryFormatError(f"AMD GPU machine {machine:#x} is not supported; supported are {known}")
        self.arch, self.chip = _chips()[machine]
        self.xnack = _FEATURE[self.elf.flags >> 8 & 3]
        self.sramecc = _FEATURE[self.elf.flags >> 10 & 3]
        self._loadable = _loadable(self.elf)
        self.segments = tuple(
            (segment.address, self._file_bytes(segment), segment.memory_size) for segment in self._loadable
        )
        for section in self.elf.sections:
            if section.type in (elf.SHT_REL, elf.SHT_RELA) and section.size:
                raise BinaryFormatError(f"section {section.name!r}: relocations are not supported")
        self.metadata = self._metadata()
        self.kernels = self._kernels()

    def read(self, address: int, size: int) -> bytes:
        """`size` bytes at `address` of the loaded code object, which one segment must hold."""
        segment = self._segment_of(address, size, "read")
        start = address - segment.address
        content = self._file_bytes(segment)[start : start + size]
        return content + bytes(size - len(content))

    def _file_bytes(self, segment: Segment) -> bytes:
        return self.elf.image[segment.offset : segment.offset + segment.file_size]

    def _segment_of(self, address: int, size: int, what: str) -> Segment:
        for segment in self._loadable:
            start = address - segment.address
            if start >= 0 and size >= 0 and start + size <= segment.memory_size:
                return segment
        raise BinaryFormatError(f"{what}: {size} bytes at {address:#x} are in no loadable segment")

    def _metadata(self) -> Mapping[str, Any]:
        notes = [
            note for note in self.elf.notes() if (note.owner, note.type) == ("AMDGPU", _NT_AMDGPU_METADATA)
        ]
        if len(notes) != 1:
            raise BinaryFormatError(f"there are {len(notes)} AMDGPU metadata notes instead of one")
        metadata: Mapping[str, Any] = msgpack.decode(notes[0].description)
        target = metadata_field(metadata, "amdhsa.target", str, "metadata")
        # "amdgcn-amd-amdhsa--gfx942:sramecc+:xnack-"; of Triton 3.9's LLVM "amdgpu9.42-amd-amdhsa-unknown-gfx942"
        if target.partition(":")[0].rpartition("-")[2] != self.arch:
            raise BinaryFormatError(f"the metadata's target is {target!r}, the ELF flags say {self.arch}")
        return metadata

    @cached_property
    def _symbols(self) -> Mapping[tuple[str, int], Symbol]:
        """By name and type, of the dynamic symbol table, which is the one that loaders read."""
        return {(symbol.name, symbol.type): symbol for symbol in self.elf.symbols(elf.SHT_DYNSYM)}

    def _symbol(self, name: str, kind: int) -> Symbol:
        try:
            return self._symbols[name, kind]
        except KeyError:
            raise BinaryFormatError(f"there is no dynamic symbol {name!r} of type {kind}") from None

    def _kernels(self) -> Mapping[str, KernelDescriptor]:
        kernels: dict[str, KernelDescriptor] = {}
        for metadata in metadata_field(self.metadata, "amdhsa.kernels", list, "metadata"):
            kernel = self._kernel(metadata)
            if kernel.name in kernels:
                raise BinaryFormatError(f"there are two kernels {kernel.name!r}")
            kernels[kernel.name] = kernel
        return kernels

    def _kernel(self, metadata: Any) -> KernelDescriptor:
        name = metadata_field(metadata, ".name", str, "kernel metadata")
        address = self._symbol(metadata_field(metadata, ".symbol", str, name), elf.STT_OBJECT).value
        raw = self.read(address, _DESCRIPTOR.size)
        fields = _DESCRIPTOR.unpack(raw)
        group, private, kernarg, entry_offset, rsrc3, rsrc1, rsrc2, properties, preload = fields
        if raw != _DESCRIPTOR.pack(*fields):
            raise BinaryFormatError(f"kernel {name!r}: reserved bytes of its descriptor are not zero")
        for key, value in (
            (".group_segment_fixed_size", group),
            (".private_segment_fixed_size", private),
            (".kernarg_segment_size", kernarg),
        ):
            if metadata_field(metadata, key, int, name) != value:
                raise BinaryFormatError(
                    f"kernel {name!r}: {key} is {metadata[key]} in the metadata, {value} in the descriptor"
                )
        code = self._symbol(name, elf.STT_FUNC)
        entry = address + entry_offset
        if entry != code.value or entry % _ENTRY_ALIGNMENT:
            raise BinaryFormatError(
                f"kernel {name!r}: its descriptor enters at {entry:#x}, its code is at {code.value:#x}, "
                f"{_ENTRY_ALIGNMENT}-byte alignment expected"
            )
        if not self._segment_of(entry, code.size, f"code of {name!r}").flags & elf.PF_X:
            raise BinaryFormatError(f"kernel {name!r}: its code at {entry:#x} is not executable")
        kernel = KernelDescriptor(
            name=name,
            chip=self.chip,
            descriptor_address=address,
            entry_address=entry,
            code_size=code.size,
            group_segment_bytes=group,
            private_segment_bytes=private,
            kernarg_bytes=kernarg,
            rsrc1=rsrc1,
            rsrc2=rsrc2,
            rsrc3=rsrc3,
            properties=properties,
            kernarg_preload=preload,
            metadata=metadata,
        )
        _check_registers(kernel)
        return kernel


def metadata_field(mapping: Any, key: str, kind: type[T], where: str) -> T:
    """`mapping[key]` of that exact type, integers being no less than zero; `where` is for the error."""
    value = mapping.get(key) if isinstance(mapping, dict) else None
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        raise BinaryFormatError(f"{where}: {key} is {value!r}, expected {kind.__name__}")
    return value


def accumulator_registers(kernel: KernelDescriptor) -> int:
    """The metadata's count, which chips without accumulators do not give."""
    if not kernel.chip.accumulators:
        return 0
    return metadata_field(kernel.metadata, ".agpr_count", int, kernel.name)


def _check_registers(kernel: KernelDescriptor) -> None:
    """The hardware's fields of waves and registers against the metadata."""
    wave = metadata_field(kernel.metadata, ".wavefront_size", int, kernel.name)
    if wave != kernel.wave_size:
        raise BinaryFormatError(
            f"kernel {kernel.name!r}: .wavefront_size is {wave} in the metadata, {kernel.wave_size} in the descriptor"
        )
    if not kernel.chip.accumulators and not kernel.rsrc1 & _WGP_MODE:
        raise BinaryFormatError(
            f"kernel {kernel.name!r}: for one compute unit (CU mode): limits are those of a pair (WGP mode)"
        )
    used = metadata_field(kernel.metadata, ".vgpr_count", int, kernel.name)
    accumulators = accumulator_registers(kernel)
    scalars = metadata_field(kernel.metadata, ".sgpr_count", int, kernel.name)
    granted, first = kernel.granted_vectors, kernel.accumulators_from
    if used > granted or (kernel.chip.accumulators and not first - 4 < max(used - accumulators, 1) <= first):
        raise BinaryFormatError(
            f"kernel {kernel.name!r}: {used} registers with {accumulators} accumulators in the metadata, {granted} "
            f"with accumulators from {first} on in the descriptor"
        )
    if scalars > kernel.named_scalars:
        raise BinaryFormatError(
            f"kernel {kernel.name!r}: {scalars} scalar registers in the metadata, {kernel.named_scalars} in the "
            "descriptor"
        )


def _loadable(file: Elf) -> tuple[Segment, ...]:
    """The segments to load, ascending and apart."""
    segments = sorted(
        (segment for segment in file.segments if segment.type == elf.PT_LOAD and segment.memory_size),
        key=lambda segment: segment.address,
    )
    end = 0
    for segment in segments:
        if segment.address < end:
            raise BinaryFormatError(f"loadable segments overlap at {segment.address:#x}")
        end = segment.address + segment.memory_size
    if end > _MAX_LOADED_BYTES:
        raise BinaryFormatError(f"the code object asks for {end} bytes of memory")
    return tuple(segments)
