"""One kernel of a code object, and launching it over a grid."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from liger_aot_build.elf import PF_X, PT_LOAD
from liger_aot_build.hsaco import CodeObject, KernelDescriptor

from . import matrix, memory_access, scalar, vector
from .architecture import Architecture, architecture
from .decode import decode, split
from .errors import EmulatorError
from .instruction import Instruction
from .local_memory import LocalMemory
from .memory import Memory
from .scalar import END, Step
from .wave import LANE, MASK32, POISON, TRAPS, Wave

MAX_THREADS = 1024
_PRELOAD_SKIP = 256  # bytes of code that load what a device with kernarg preload already has in registers
# Fields of rsrc1: 32-bit and 16/64-bit rounding to nearest, denormals kept, NaN clamps to 0, IEEE NaNs.
_FLOAT_MODE, _EXPECTED_FLOAT_MODE = 0xFF << 12, 0xF0 << 12
_DX10_CLAMP = 1 << 21  # but RDNA 4, where it is always so
# Trap registers in which RDNA 4 gives a workgroup's position: x, and y with z in the upper half
_TRAP_X, _TRAP_YZ = TRAPS + 9, TRAPS + 7


class WorkGroup:
    """What the waves of a workgroup share."""

    def __init__(self, memory: Memory, code_address: int, local_bytes: int) -> None:
        self.memory = memory
        self.code_address = code_address
        self.local = LocalMemory(local_bytes)


class Program:
    """The kernel named `kernel` of the code object `image`, which must be for `arch`."""

    def __init__(self, image: bytes, arch: str, kernel: str) -> None:
        code = CodeObject(image)
        if code.arch != arch:
            raise EmulatorError(f"the code object is for {code.arch}, not {arch}")
        self.arch = arch
        self._architecture: Architecture = architecture(arch)
        self.descriptor: KernelDescriptor = code.kernels[kernel]
        self._check_descriptor()
        self._image = bytearray(max(address + size for address, _, size in code.segments))
        for address, data, _ in code.segments:
            self._image[address : address + len(data)] = data
        # The address and the words of each instruction
        self.code = [
            place
            for segment in code.elf.segments
            if segment.type == PT_LOAD and segment.flags & PF_X
            for place in split(code.read(segment.address, segment.memory_size), segment.address, arch)
        ]
        self._index_of = {address: i for i, (address, _) in enumerate(self.code)}
        # Instructions are decoded and translated when they are first reached.
        self.reached: list[Instruction] = []
        self._steps: list[Step] = [self._translation(i) for i in range(len(self.code))]
        self._steps.append(_past_the_end)
        self._registers = _allocated_registers(self.descriptor)

    def _check_descriptor(self) -> None:
        descriptor = self.descriptor
        if descriptor.private_segment_bytes:
            raise EmulatorError(f"{descriptor.name} uses scratch memory, which is not implemented")
        if descriptor.wave_size != self._architecture.lanes:
            raise EmulatorError(f"{descriptor.name} has waves of {descriptor.wave_size} lanes")
        clamps = descriptor.rsrc1 & _DX10_CLAMP or self._architecture.ids_in_traps
        if descriptor.rsrc1 & _FLOAT_MODE != _EXPECTED_FLOAT_MODE or not clamps:
            raise EmulatorError(f"{descriptor.name} asks for a floating-point mode that is not implemented")

    def _translation(self, index: int) -> Step:
        def translate_and_run(wave: Wave) -> int | None:
            instruction = self.instruction(index)
            self._check_registers(instruction)
            step = self._steps[index] = build_step(instruction)
            self.reached.append(instruction)
            return step(wave)

        return translate_and_run

    def instruction(self, index: int) -> Instruction:
        """The instruction at a place of the code, in address order."""
        address, words = self.code[index]
        return decode(words, address, self.arch)

    def _check_registers(self, instruction: Instruction) -> None:
        if instruction.other is not None:
            self._check_registers(instruction.other)
        for operand in instruction.operands:
            file, first = operand.register_file()
            if file and first + operand.count > self._registers[file]:
                raise EmulatorError(f"{operand}, but {self._registers[file]} {file} registers are allocated")

    def launch(
        self,
        memory: Memory,
        grid: tuple[int, int, int],
        arguments: Sequence[int | float | bytes],
        threads: int,
        shared: int,
        max_instructions: int = 50_000_000,
    ) -> int:
        """Run the kernel; returns the number of instructions that its waves executed.

        `arguments` are in kernarg order, pointers being addresses from `memory`; those left out at the end,
        Triton's scratch pointers, are null. `threads` is the block size in work-items, a multiple of the lanes of a
        wave;        `shared` the bytes of dynamic LDS. Workgroups run one after the other, so they can't wait for each
        other. Raises EmulatorError, for more than `max_instructions` too.
        """
        descriptor = self.descriptor
        lanes, most_local = self._architecture.lanes, self._architecture.local_bytes
        if threads % lanes or not 0 < threads <= MAX_THREADS:
            raise EmulatorError(f"a block of {threads} work-items is not possible")
        local_bytes = descriptor.group_segment_bytes + shared
        if local_bytes > most_local:
            raise EmulatorError(f"{local_bytes} bytes of LDS, a workgroup has {most_local}")
        kernarg = pack_arguments(descriptor, arguments, grid, threads)
        executed = 0
        with (
            np.errstate(all="ignore"),
            memory.holding(bytes(self._image), "the code object") as code_address,
            memory.holding(kernarg, "the kernel's arguments") as kernarg_address,
        ):
            registers, entry = self._user_registers(kernarg_address, kernarg)
            for z, y, x in np.ndindex(grid[::-1]):
                group = WorkGroup(memory, code_address, local_bytes)
                waves = [self._wave(group, i, registers, (x, y, z), entry) for i in range(threads // lanes)]
                executed += self._run(group, waves, (x, y, z), max_instructions - executed)
        return executed

    def _user_registers(self, kernarg_address: int, kernarg: bytes) -> tuple[list[int], int]:
        """The scalar registers that the packet processor sets, in the order of LLVM's AMDGPU usage guide, and
        the index of the first instruction. What the emulator can't give is poison."""
        # Private segment buffer, dispatch and queue pointers, kernarg, dispatch id, scratch, scratch size.
        sizes = (4, 2, 2, 2, 2, 2, 1)
        registers: list[int] = []
        for bit, size in enumerate(sizes):
            if self.descriptor.properties >> bit & 1:
                is_kernarg = bit == 3
                registers += (
                    [kernarg_address & MASK32, kernarg_address >> 32] if is_kernarg else [POISON] * size
                )
        count, first = self.descriptor.kernarg_preload & 0x7F, self.descriptor.kernarg_preload >> 7
        entry = self.descriptor.entry_address
        if count:
            registers += struct.unpack_from(f"<{count}I", kernarg + bytes(4 * count), 4 * first)
            entry += _PRELOAD_SKIP
        return registers, self._index(entry)

    def _wave(
        self, group: WorkGroup, index: int, registers: list[int], position: tuple[int, int, int], entry: int
    ) -> Wave:
        lanes = self._architecture.lanes
        wave = Wave(group, index, lanes)
        wave.pc = entry
        wave.vectors[0] = LANE[:lanes] + lanes * index
        wave.scalars[: len(registers)] = registers
        if self._architecture.ids_in_traps:
            x, y, z = position
            wave.scalars[_TRAP_X], wave.scalars[_TRAP_YZ] = x, y | z << 16
            return wave
        next_register = max(len(registers), self.descriptor.rsrc2 >> 1 & 0x1F)
        for bit, coordinate in zip((7, 8, 9), position, strict=True):
            if self.descriptor.rsrc2 >> bit & 1:
                wave.scalars[next_register] = coordinate
                next_register += 1
        return wave

    def _index(self, address: int) -> int:
        if address not in self._index_of:
            raise EmulatorError(f"jump to {address:#x}, where no instruction starts")
        return self._index_of[address]

    def _run(self, group: WorkGroup, waves: list[Wave], position: tuple[int, int, int], limit: int) -> int:
        """Run each wave to the next barrier or to its end, until all have ended."""
        executed = 0
        while running := [wave for wave in waves if not wave.done]:
            for wave in running:
                executed += self._advance(wave, position, limit - executed)
            ended = sum(wave.done for wave in running)
            if 0 < ended < len(running):
                raise EmulatorError(
                    f"workgroup {position}: {ended} waves ended while others wait at a barrier"
                )
            group.local.barrier()
        return executed

    def _advance(self, wave: Wave, position: tuple[int, int, int], limit: int) -> int:
        steps, pc, executed = self._steps, wave.pc, 0
        try:
            while True:
                executed += 1
                target = steps[pc](wave)
                if target is None:
                    pc += 1
                elif target >= 0:
                    pc = self._index(target)
                    if executed > limit:
                        raise EmulatorError("too many instructions: an endless loop?")
                else:
                    wave.pc, wave.done = pc + 1, target == END
                    return executed
        except EmulatorError as error:
            where = f"workgroup {position}, wave {wave.index}"
            raise EmulatorError(f"{where}{self._at(pc)}: {error}") from error

    def _at(self, pc: int) -> str:
        """Where an instruction is and what it is, for an error; one that can't be decoded says so itself."""
        if pc == len(self.code):
            return ""
        try:
            instruction = self.instruction(pc)
        except EmulatorError:
            return ""
        return f", {instruction.address:#x} {instruction}"


_FAMILIES: dict[str, Callable[[Instruction], Step]] = {
    "s": scalar.build,
    "v": vector.build,
    "global": memory_access.build,
    "flat": memory_access.build,
    "buffer": memory_access.build,
    "ds": memory_access.build_local,
}


def build_step(instruction: Instruction) -> Step:
    """The closure that executes an instruction; EmulatorError if it is not implemented."""
    if instruction.other is not None:
        return _both(instruction, instruction.other)
    if instruction.name.startswith(("v_mfma_", "v_wmma_")):
        return matrix.build(instruction)
    family = instruction.name.partition("_")[0]
    if family not in _FAMILIES:
        raise EmulatorError("unknown instruction")
    return _FAMILIES[family](instruction)


def _both(instruction: Instruction, other: Instruction) -> Step:
    """Two operations that read all their sources before either writes its result."""
    first, second = build_step(replace(instruction, other=None)), build_step(other)
    result = instruction.operands[0].register

    def step(wave: Wave) -> None:
        before = wave.vectors[result].copy()
        first(wave)
        after = wave.vectors[result].copy()
        wave.vectors[result] = before
        second(wave)
        wave.vectors[result] = after

    return step


def _past_the_end(wave: Wave) -> int | None:
    raise EmulatorError("ran past the end of the code")


def _allocated_registers(descriptor: KernelDescriptor) -> dict[str, int]:
    """Vector, accumulation and scalar registers of a wave."""
    vectors, accumulators = descriptor.granted_vectors, descriptor.accumulators_from
    return {"v": accumulators, "a": max(vectors - accumulators, 0), "s": descriptor.named_scalars}


def pack_arguments(
    descriptor: KernelDescriptor,
    arguments: Sequence[int | float | bytes],
    grid: tuple[int, int, int],
    threads: int,
) -> bytes:
    """The kernarg segment, by the offsets and sizes in the metadata; missing ones at the end are 0.

    The runtime appends hidden arguments, of which those that describe the launch are filled in. What is left,
    for instance the address of the host's printf buffer, is poison.
    """
    launch = {"hidden_grid_dims": 3}
    for axis, blocks, size in zip("xyz", grid, (threads, 1, 1), strict=True):
        launch |= {f"hidden_block_count_{axis}": blocks, f"hidden_group_size_{axis}": size}
        launch |= {f"hidden_remainder_{axis}": 0, f"hidden_global_offset_{axis}": 0}
    words = -(-descriptor.kernarg_bytes // 4)
    packed = bytearray(struct.pack(f"<{words}I", *[POISON] * words)[: descriptor.kernarg_bytes])
    given = list(arguments)
    for field in descriptor.metadata.get(".args", ()):
        start, size, kind = field[".offset"], field[".size"], field[".value_kind"]
        if not kind.startswith("hidden_"):
            value: int | float | bytes = given.pop(0) if given else 0
        elif kind in launch:
            value = launch[kind]
        else:
            continue
        packed[start : start + size] = _argument_bytes(
            value, size, f"{kind} at byte {start} of {descriptor.name}"
        )
    if given:
        raise EmulatorError(f"{descriptor.name} has {len(given)} arguments too many")
    return bytes(packed)


def _argument_bytes(value: int | float | bytes, size: int, what: str) -> bytes:
    if isinstance(value, float):
        return struct.pack({2: "<e", 4: "<f", 8: "<d"}[size], value)
    data = value if isinstance(value, bytes) else int(value).to_bytes(size, "little", signed=value < 0)
    if len(data) != size:
        raise EmulatorError(f"{what}: {len(data)} bytes instead of {size}")
    return data
