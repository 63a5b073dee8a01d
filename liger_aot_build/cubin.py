"""Read an NVIDIA cubin: its architecture, and what each of its kernels takes.

NVIDIA documents neither the ELF flags nor the attributes in the `.nv.info` sections. The layouts here were
found by comparing cubins of ptxas 12.8 and 12.9 with what `cuobjdump -elf` and `ptxas -v` print of them; the
e_flags agree with LLVM's BinaryFormat/ELF.h. ptxas 12 writes ELF ABI 7 for machines up to sm_90a and ELF ABI 8 for
sm_100 and later: other e_flags, the same attributes. ptxas 13 (Triton 3.9 from sm_90 on) writes ELF ABI 8 for all, and
its e_flags do not tell sm_90a from sm_90: there the note of the tool's options must. Registers, shared memory and
parameters of ptxas 13.4's cubins for sm_90a and sm_100a were compared with `cuobjdump -res-usage` and the PTX.
"""

from __future__ import annotations

import re
import struct
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from liger_aot_build import elf
from liger_aot_build.elf import BinaryFormatError, Elf, Section, Symbol, unpack_at

EM_CUDA = 190
_STO_CUDA_ENTRY = 0x10
# From sm_90 on, a kernel's section of static shared memory starts with 1 KiB that is the system's. Neither
# what ptxas -v prints nor the 227 KiB that a block may ask for counts it.
_RESERVED_SHARED_SINCE = 90
_RESERVED_SHARED_BYTES = 1024
_BARRIERS_SHIFT, _BARRIERS_MASK = 20, 0x7F  # in sh_flags of a kernel's code section

# Attribute formats (EIFMT) and the attributes (EIATTR) that are read.
_EIFMT_NVAL, _EIFMT_BVAL, _EIFMT_HVAL, _EIFMT_SVAL = 1, 2, 3, 4
_EIATTR_MAX_THREADS = 0x05
_EIATTR_PARAM_CBANK = 0x0A
_EIATTR_REQNTID = 0x10
_EIATTR_FRAME_SIZE = 0x11
_EIATTR_MIN_STACK_SIZE = 0x12
_EIATTR_KPARAM_INFO = 0x17
_EIATTR_CBANK_PARAM_SIZE = 0x19
_EIATTR_REGCOUNT = 0x2F
_EIATTR_NUM_BARRIERS = 0x4C  # ELF ABI 8; ABI 7 has them in the flags of the code's section

_ATTRIBUTE = struct.Struct("<BBH")  # format, attribute, its value or the length of what follows
_OF_FUNCTION = struct.Struct("<II")  # symbol index, value
_PARAM_CBANK = struct.Struct("<IHH")  # symbol index, offset in the constant bank, size
_KPARAM_INFO = struct.Struct("<IHHI")  # index, ordinal, offset, and a word with the size in bits 31:18
_KPARAM_SIZE_SHIFT = 18
_THREADS = struct.Struct("<III")

Attributes = Mapping[int, list[bytes]]


@dataclass(frozen=True)
class _Abi:
    """Where the e_flags of an ELF ABI say what machine a cubin is for."""

    os_abi: int
    sm_shift: int  # to 8 bits with the compute capability, major * 10 + minor
    accelerated: int  # the bit of the architecture-specific target: sm_90a, sm_100a
    first_sm: int
    last_sm: int


_ABIS = {7: _Abi(51, 0, 0x800, 0, 90), 8: _Abi(65, 8, 0x8, 100, 255)}
# ELF ABI 8: family-specific code (sm_100f) has the e_flags of code for every machine of its major version (sm_100), as
# it may run on several; of ptxas 13, sm_90a and sm_100a have those of sm_90 and sm_100, too. Only the note that names
# the tool's options tells them apart.
_NAMED = re.compile(rb"-arch sm_(\d+)([af]?)(?![\w-])")
_TOOL_NOTE = ".note.nv.tkinfo"


@dataclass(frozen=True)
class KernelParameter:
    """Offset and size in bytes of one parameter in the kernel's parameter block."""

    ordinal: int
    offset: int
    size: int


@dataclass(frozen=True)
class CubinKernel:
    """What one kernel takes. Registers, stack and local bytes are per thread, shared bytes per block.

    `stack_bytes` counts the kernel and all it calls; spilled registers live there, so it is never zero where
    one is spilled. `local_bytes` is local memory outside the stack. `static_shared_bytes` leaves out what the
    system reserves. `required_threads` and `max_threads` are (x, y, z) of a block, None where not declared.
    `parameter_offset` is where the parameter block starts in the constant bank, which alignments over 16
    bytes count from.
    """

    name: str
    registers: int
    stack_bytes: int
    local_bytes: int
    static_shared_bytes: int
    parameters: tuple[KernelParameter, ...]
    parameter_bytes: int
    parameter_offset: int
    code: bytes
    required_threads: tuple[int, int, int] | None
    max_threads: tuple[int, int, int] | None
    barriers: int


class Cubin:
    """A linked cubin, checked when it is made; raises BinaryFormatError.

    `arch` is "sm_80", "sm_90a", "sm_100f", ...; `abi_version` is the ELF ABI version, which decides the oldest driver.
    """

    def __init__(self, image: bytes) -> None:
        self.elf = Elf(image)
        if self.elf.machine != EM_CUDA or self.elf.type != elf.ET_EXEC:
            raise BinaryFormatError(
                f"not a linked cubin: ELF machine {self.elf.machine}, type {self.elf.type}"
            )
        self.abi_version = self.elf.abi_version
        abi = _ABIS.get(self.abi_version)
        if abi is None or self.elf.os_abi != abi.os_abi:
            known = " or ".join(f"{one.os_abi} and {version}" for version, one in _ABIS.items())
            raise BinaryFormatError(
                f"cubin with OS ABI {self.elf.os_abi} and ELF ABI {self.abi_version}; supported are "
                f"{known} (CUDA 12)"
            )
        self._sm = self.elf.flags >> abi.sm_shift & 0xFF
        named = self._named()
        if not abi.first_sm <= self._sm <= abi.last_sm and named is None:
            raise BinaryFormatError(
                f"cubin for sm_{self._sm} of ELF ABI {self.abi_version}; supported are sm_{abi.first_sm} to "
                f"sm_{abi.last_sm} (CUDA 12)"
            )
        said = "a" if self.elf.flags & abi.accelerated else ""
        self.arch = f"sm_{self._sm}{said if named is None else named}"
        symbols = self.elf.symbols()
        self._by_function = self._function_attributes(len(symbols))
        self.kernels = self._kernels(symbols)

    def _named(self) -> str | None:
        """The suffix of the machine that the tool was told: "a", "f" or none. Nothing where no note says it of the
        machine of the e_flags."""
        note = self.elf.section(_TOOL_NOTE)
        found = _NAMED.search(self.elf.data(note)) if note else None
        return found[2].decode() if found and int(found[1]) == self._sm else None

    def _kernels(self, symbols: tuple[Symbol, ...]) -> Mapping[str, CubinKernel]:
        kernels: dict[str, CubinKernel] = {}
        for index, symbol in enumerate(symbols):
            if symbol.type != elf.STT_FUNC or not symbol.other & _STO_CUDA_ENTRY:
                continue
            if symbol.name in kernels:
                raise BinaryFormatError(f"there are two kernels {symbol.name!r}")
            kernels[symbol.name] = self._kernel(index, symbol)
        return kernels

    def _kernel(self, index: int, symbol: Symbol) -> CubinKernel:
        name = symbol.name
        code = self._section(f".text.{name}")
        if self.elf.sections.index(code) != symbol.section_index or symbol.value + symbol.size > code.size:
            raise BinaryFormatError(f"kernel {name!r}: its symbol does not lie in section {code.name!r}")
        info = self._section(f".nv.info.{name}")
        if info.info != symbol.section_index:
            raise BinaryFormatError(f"section {info.name!r} is about section {info.info}")
        attributes = _attributes(self.elf.data(info), info.name)
        parameter_bytes, parameter_offset = self._parameter_block(name, attributes)
        local = self.elf.section(f".nv.local.{name}")
        stack = max(
            self._of_function(_EIATTR_FRAME_SIZE, index, name),
            self._of_function(_EIATTR_MIN_STACK_SIZE, index, name),
        )
        return CubinKernel(
            name=name,
            registers=self._of_function(_EIATTR_REGCOUNT, index, name),
            stack_bytes=stack,
            local_bytes=local.size if local else 0,
            static_shared_bytes=self._static_shared(name),
            parameters=_parameters(attributes, parameter_bytes, name),
            parameter_bytes=parameter_bytes,
            parameter_offset=parameter_offset,
            code=self.elf.data(code),
            required_threads=_threads(attributes, _EIATTR_REQNTID, name),
            max_threads=_threads(attributes, _EIATTR_MAX_THREADS, name),
            barriers=_barriers(attributes, name) or code.flags >> _BARRIERS_SHIFT & _BARRIERS_MASK,
        )

    def _section(self, name: str) -> Section:
        section = self.elf.section(name)
        if section is None:
            raise BinaryFormatError(f"there is no section {name!r}")
        return section

    def _function_attributes(self, symbol_count: int) -> Mapping[tuple[int, int], int]:
        """What `.nv.info` says of functions, by attribute and symbol index."""
        info = self._section(".nv.info")
        values: dict[tuple[int, int], int] = {}
        attributes = _attributes(self.elf.data(info), info.name)
        for attribute in (_EIATTR_REGCOUNT, _EIATTR_FRAME_SIZE, _EIATTR_MIN_STACK_SIZE):
            for payload in attributes[attribute]:
                function, value = _unpack(_OF_FUNCTION, payload, f"attribute {attribute:#x} of {info.name!r}")
                if function >= symbol_count or (attribute, function) in values:
                    raise BinaryFormatError(
                        f"{info.name!r}: attribute {attribute:#x} of function {function} is repeated or past "
                        f"the {symbol_count} symbols"
                    )
                values[attribute, function] = value
        return values

    def _of_function(self, attribute: int, index: int, name: str) -> int:
        try:
            return self._by_function[attribute, index]
        except KeyError:
            raise BinaryFormatError(f"kernel {name!r}: attribute {attribute:#x} is missing") from None

    def _static_shared(self, name: str) -> int:
        section = self.elf.section(f".nv.shared.{name}")
        if section is None or self._sm < _RESERVED_SHARED_SINCE:
            return section.size if section else 0
        if section.size < _RESERVED_SHARED_BYTES:
            raise BinaryFormatError(f"kernel {name!r}: {section.size} bytes of shared memory in all")
        return section.size - _RESERVED_SHARED_BYTES

    def _parameter_block(self, name: str, attributes: Attributes) -> tuple[int, int]:
        """Size and offset of the parameter block; the size is said by two attributes and by constant bank 0."""
        if _EIATTR_CBANK_PARAM_SIZE not in attributes and _EIATTR_PARAM_CBANK not in attributes:
            return 0, 0  # a kernel without parameters
        size = int.from_bytes(_single(attributes, _EIATTR_CBANK_PARAM_SIZE, name), "little")
        block = _single(attributes, _EIATTR_PARAM_CBANK, name)
        _, offset, same_size = _unpack(_PARAM_CBANK, block, f"parameter block of {name!r}")
        bank = self._section(f".nv.constant0.{name}").size
        if size != same_size or offset + size != bank:
            raise BinaryFormatError(
                f"kernel {name!r}: its parameter block is {size} or {same_size} bytes at {offset:#x} of a "
                f"constant bank of {bank} bytes"
            )
        return size, offset


def _attributes(data: bytes, where: str) -> Attributes:
    """The values of an attribute stream by attribute, in file order."""
    attributes: defaultdict[int, list[bytes]] = defaultdict(list)
    offset = 0
    while offset < len(data):
        kind, attribute, value = unpack_at(_ATTRIBUTE, data, offset, f"attribute of {where!r}")
        offset += _ATTRIBUTE.size
        if kind == _EIFMT_SVAL:
            if offset + value > len(data):
                raise BinaryFormatError(
                    f"{where!r}: attribute {attribute:#x} at {offset:#x} ends past its end"
                )
            payload = data[offset : offset + value]
            offset += value
        elif kind in (_EIFMT_NVAL, _EIFMT_BVAL, _EIFMT_HVAL):
            payload = value.to_bytes(2, "little")[: kind - _EIFMT_NVAL]
        else:
            raise BinaryFormatError(f"{where!r}: attribute {attribute:#x} has the unknown format {kind}")
        attributes[attribute].append(payload)
    return attributes


def _unpack(layout: struct.Struct, payload: bytes, what: str) -> tuple[int, ...]:
    if len(payload) != layout.size:
        raise BinaryFormatError(f"{what}: {len(payload)} bytes instead of {layout.size}")
    return layout.unpack(payload)


def _single(attributes: Attributes, attribute: int, name: str) -> bytes:
    values = attributes[attribute]
    if len(values) != 1:
        raise BinaryFormatError(f"kernel {name!r}: attribute {attribute:#x} is there {len(values)} times")
    return values[0]


def _threads(attributes: Attributes, attribute: int, name: str) -> tuple[int, int, int] | None:
    if attribute not in attributes:
        return None
    x, y, z = _unpack(_THREADS, _single(attributes, attribute, name), f"threads of {name!r}")
    return x, y, z


def _barriers(attributes: Attributes, name: str) -> int:
    if _EIATTR_NUM_BARRIERS not in attributes:
        return 0
    return int.from_bytes(_single(attributes, _EIATTR_NUM_BARRIERS, name), "little")


def _parameters(attributes: Attributes, block_bytes: int, name: str) -> tuple[KernelParameter, ...]:
    """The kernel's parameters in order, which the stream gives last to first."""
    parameters = []
    for payload in attributes[_EIATTR_KPARAM_INFO]:
        _, ordinal, offset, packed = _unpack(_KPARAM_INFO, payload, f"parameter of {name!r}")
        parameters.append(KernelParameter(ordinal, offset, packed >> _KPARAM_SIZE_SHIFT))
    parameters.sort(key=lambda parameter: parameter.ordinal)
    if [parameter.ordinal for parameter in parameters] != list(range(len(parameters))):
        raise BinaryFormatError(f"kernel {name!r}: its parameters are not numbered from 0 on: {parameters}")
    if block_bytes and not parameters:
        raise BinaryFormatError(f"kernel {name!r}: {block_bytes} bytes of parameters that are not described")
    return tuple(parameters)
