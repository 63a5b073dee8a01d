"""The AMD emulator's front door: launching, and what a launch refuses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import triton
import triton.language as tl

from tests.emulator.amd_emulator import EmulatorError, Memory, Program
from tests.emulator.amd_emulator.decode import decode
from tests.emulator.amd_emulator.instruction import Instruction
from tests.emulator.amd_emulator.mutation import overwrite
from tests.emulator.amd_emulator.scalar import BARRIER, END
from tests.emulator.amd_emulator.triton_kernel import TritonKernel, compile_kernel

ARCH = "gfx942"
N = 256


# ---- launching


@triton.jit
def reversed_sum(Y, X, n, BLOCK: tl.constexpr):
    """Every element minus the row's sum, in reverse order: the sum passes through LDS."""
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(X + row * n + cols, mask=cols < n, other=0.0)
    tl.store(Y + row * n + (n - 1 - cols), x - tl.sum(x, 0), mask=cols < n)


@pytest.fixture(scope="module")
def kernel() -> TritonKernel:
    types = {"Y": "*fp32", "X": "*fp32", "n": "i32"}
    return compile_kernel(reversed_sum, ARCH, types, {"BLOCK": N})


@pytest.fixture
def rows() -> tuple[np.ndarray, np.ndarray]:
    x = np.arange(2 * N, dtype=np.float32).reshape(2, N)
    return x, (x - x.sum(1, keepdims=True))[:, ::-1]


def launch(
    kernel: TritonKernel, y: np.ndarray, x: np.ndarray, program: Program | None = None, rows: int = 2
) -> int:
    return kernel.run((rows,), y, x, N, program=program)


def patched(
    kernel: TritonKernel, wanted: Callable[[Instruction], bool], word: int, last: bool = False
) -> Program:
    """The kernel with the first (or last) instruction that is wanted overwritten; its second word is s_nop."""
    program = kernel.program()
    start = program.descriptor.entry_address
    # Skip what loads arguments on older devices.
    preloaded, end = start + 256, start + program.descriptor.code_size
    code = [decode(words, at, kernel.arch) for at, words in program.code if preloaded <= at < end]
    found = [instruction for instruction in code if wanted(instruction)]
    chosen = found[-1 if last else 0]
    words = [word, *[0xBF800000] * (len(chosen.words) - 1)]
    return Program(overwrite(kernel.image, chosen, words), kernel.arch, kernel.name)


def test_a_kernel_runs(kernel: TritonKernel, rows: tuple[np.ndarray, np.ndarray]) -> None:
    x, exact = rows
    y = np.zeros_like(x)
    executed = launch(kernel, y, x)
    np.testing.assert_array_equal(y, exact)
    assert executed % 8 == 0 and executed > 100  # 2 programs of 4 waves, all alike
    assert launch(kernel, y[:1], x[:1], rows=1) == executed // 2


def test_outputs_need_no_values_and_inputs_do(
    kernel: TritonKernel, rows: tuple[np.ndarray, np.ndarray]
) -> None:
    x, exact = rows
    for initialised in ((False, True), (True, False)):
        memory, y = Memory(), np.zeros_like(x)
        addresses = [
            memory.add(a, n, initialised=i) for a, n, i in zip((y, x), "yx", initialised, strict=True)
        ]
        arguments = ((2, 1, 1), [*addresses, N], 256, kernel.shared)
        if initialised[1]:
            kernel.program().launch(memory, *arguments)
            np.testing.assert_array_equal(y, exact)
        else:
            with pytest.raises(
                EmulatorError, match=r"workgroup \(0, 0, 0\), wave 0, 0x\w+ \w+_load\w* .* of x, which"
            ):
                kernel.program().launch(memory, *arguments)


def test_an_array_that_is_too_small(kernel: TritonKernel, rows: tuple[np.ndarray, np.ndarray]) -> None:
    x, _ = rows
    y = np.zeros(2 * N - 1, np.float32)
    with pytest.raises(
        EmulatorError, match=r"workgroup \(1, 0, 0\), wave \d, 0x\w+ \w+_store\w* .* of argument 0"
    ):
        launch(kernel, y, x)


def test_a_missing_barrier_is_noticed(kernel: TritonKernel, rows: tuple[np.ndarray, np.ndarray]) -> None:
    x, _ = rows
    program = patched(kernel, lambda i: i.name == "s_barrier", 0xBF800000, last=True)
    with pytest.raises(EmulatorError, match=r"ds_read\w* .*: LDS read of byte \d+"):
        launch(kernel, np.zeros_like(x), x, program)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (0xBF900001, r"wave 0: 0xbf900001 at 0x\w+: unknown instruction: SOPP opcode 0x10"),
        (0xBF92_0002, r"0xbf920002 at 0x\w+: unknown instruction: SOPP opcode 0x12"),
        (0xBF82_7FFF, r"s_branch 32767: jump to 0x\w+, where no instruction starts"),
        (0xBF82_FFFF, r"s_branch 65535: too many instructions"),
        (0x7E02_02EC, r"0x7e0202ec at 0x\w+: unknown operand 0xec"),
    ],
)
def test_instructions_without_meaning(
    kernel: TritonKernel, rows: tuple[np.ndarray, np.ndarray], word: int, message: str
) -> None:
    x, _ = rows
    program = patched(kernel, lambda i: i.name == "s_waitcnt", word)
    with pytest.raises(EmulatorError, match=message):
        kernel.run((2,), np.zeros_like(x), x, N, program=program, max_instructions=10_000)


def test_waves_that_end_while_others_wait(kernel: TritonKernel, rows: tuple[np.ndarray, np.ndarray]) -> None:
    x, _ = rows
    program = kernel.program()
    program._steps = [lambda wave: END if wave.index == 2 else BARRIER] * len(program._steps)
    with pytest.raises(EmulatorError, match=r"workgroup \(0, 0, 0\): 1 waves ended while others wait"):
        launch(kernel, np.zeros_like(x), x, program)


def test_registers_that_are_not_allocated(kernel: TritonKernel, rows: tuple[np.ndarray, np.ndarray]) -> None:
    x, _ = rows
    program = patched(kernel, lambda i: i.name == "s_waitcnt", 0x7E000280 | 250 << 17)  # v_mov_b32 v250, 0
    with pytest.raises(EmulatorError, match=r"v250, but \d+ v registers are allocated"):
        launch(kernel, np.zeros_like(x), x, program)


def test_code_without_an_end(kernel: TritonKernel, rows: tuple[np.ndarray, np.ndarray]) -> None:
    x, _ = rows
    program = kernel.program()
    program._steps[:-1] = [lambda wave: None] * (len(program._steps) - 1)
    with pytest.raises(EmulatorError, match="ran past the end of the code"):
        launch(kernel, np.zeros_like(x), x, program)


def test_impossible_launches(kernel: TritonKernel, rows: tuple[np.ndarray, np.ndarray]) -> None:
    x, _ = rows
    memory = Memory()
    address = memory.add(x, "x")
    program = kernel.program()
    for threads in (0, 100, 2048):
        with pytest.raises(EmulatorError, match=f"{threads} work-items"):
            program.launch(memory, (1, 1, 1), [address, address, N], threads, 0)
    with pytest.raises(EmulatorError, match="65540 bytes of LDS"):
        program.launch(memory, (1, 1, 1), [address, address, N], 256, 65540)
    with pytest.raises(EmulatorError, match="arguments too many"):
        program.launch(memory, (1, 1, 1), [0] * 20, 256, 64)
    with pytest.raises(EmulatorError, match="8 bytes instead of 4"):
        program.launch(memory, (1, 1, 1), [address, address, bytes(8)], 256, 64)
    with pytest.raises(EmulatorError, match="is for gfx942, not gfx90a"):
        Program(kernel.image, "gfx90a", kernel.name)
    with pytest.raises(EmulatorError, match=r"read of 4 bytes at 0x0|read of \d+ bytes at 0x0"):
        program.launch(memory, (1, 1, 1), [address, 0, N], 256, kernel.shared)
