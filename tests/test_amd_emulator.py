"""The AMD emulator's front door: the disassembler, launching, and what a launch refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import triton
import triton.language as tl

from tests.amd_emulator import EmulatorError, Memory, Program, missing_tool
from tests.amd_emulator.decode import TOOL_VARIABLE, Instruction, disassemble, parse
from tests.amd_emulator.mutation import overwrite
from tests.amd_emulator.operand import Operand
from tests.amd_emulator.scalar import BARRIER, END
from tests.amd_emulator.triton_kernel import TritonKernel, compile_kernel

needs_tool = pytest.mark.skipif(bool(missing_tool()), reason=str(missing_tool()))
ARCH = "gfx942"
N = 256


# ---- the disassembler and its text


def test_a_tool_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOOL_VARIABLE, "no-such-objdump")
    reason = missing_tool()
    assert reason and "no-such-objdump is not installed" in reason and TOOL_VARIABLE in reason
    with pytest.raises(EmulatorError, match="no-such-objdump"):
        disassemble(b"", ARCH)


@pytest.mark.parametrize(
    ("version", "targets", "message"),
    [
        ("14.0.6", "amdgcn", "older than LLVM 17"),
        ("19.1.7", "x86", "without the AMDGPU target"),
        ("", "", "older"),
    ],
)
def test_a_tool_that_is_no_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, targets: str, message: str
) -> None:
    tool = tmp_path / f"objdump-{version}"
    tool.write_text(f"#!/bin/sh\necho 'LLVM version {version}'\necho '    {targets} - a target'\n")
    tool.chmod(0o755)
    monkeypatch.setenv(TOOL_VARIABLE, str(tool))
    assert message in str(missing_tool())


@needs_tool
def test_damaged_objects_are_refused() -> None:
    with pytest.raises(EmulatorError, match="objdump"):
        disassemble(b"not an object", ARCH)


def test_parsing_an_instruction() -> None:
    line = "v_mov_b32_dpp v1, v2 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0x5 bound_ctrl:1"
    instruction = parse(line, 0x100, (1, 2))
    assert (instruction.name, instruction.base_name) == ("v_mov_b32_dpp", "v_mov_b32")
    assert instruction.operands == ("v1", "v2") and instruction.size == 8
    assert instruction.modifiers["quad_perm"] == "[1,0,3,2]" and instruction.integer("bank_mask") == 5
    assert parse("buffer_inv sc1").modifiers == {"sc1": ""}
    assert parse("s_mov_b32 s0, scc").operands == ("s0", "scc")
    assert parse('ds_swizzle_b32 v0, v1 offset:swizzle(BITMASK_PERM,"0p0ii")').operands == ("v0", "v1")
    assert parse("v_pk_fma_f32 v[0:1], v[2:3], 1.0, v[4:5] op_sel:[0,1]").bits("op_sel", 0, 3) == (0, 1, 0)
    with pytest.raises(EmulatorError, match="modifier offset"):
        parse("v_mov_b32_e32 v0, v1 offset:4").allow("clamp")
    with pytest.raises(EmulatorError, match="2 operands instead of 3"):
        Instruction("v_nop", ("v0", "v1")).expect(3)


@pytest.mark.parametrize(
    ("text", "kind", "register", "count"),
    [
        ("v7", "vector", 7, 1),
        ("v[4:7]", "vector", 4, 4),
        ("a[2:3]", "vector", 258, 2),
        ("s[8:9]", "scalar", 8, 2),
        ("vcc", "scalar", 106, 2),
        ("exec_hi", "scalar", 127, 1),
        ("m0", "scalar", 124, 1),
        ("off", "off", 0, 1),
    ],
)
def test_register_operands(text: str, kind: str, register: int, count: int) -> None:
    operand = Operand.parse(text)
    assert (operand.kind, operand.register, operand.count) == (kind, register, count)


@pytest.mark.parametrize(
    ("text", "name", "bits"),
    [
        ("-1", "i32", 0xFFFFFFFF),
        ("-1", "b64", 0xFFFFFFFF_FFFFFFFF),
        ("64", "f32", 64),
        ("1.0", "f32", 0x3F800000),
        ("1.0", "f16", 0x3C00),
        ("-4.0", "f64", 0xC0100000_00000000),
        ("0.15915494", "f32", 0x3E22F983),
        ("0.15915494309189532", "f64", 0x3FC45F306DC9C882),
        ("0x40080000", "f64", 0x40080000_00000000),
        ("0xfffffff0", "b64", 0xFFFFFFF0),
        ("0xfffffff0", "i64", 0xFFFFFFFF_FFFFFFF0),
    ],
)
def test_constants(text: str, name: str, bits: int) -> None:
    assert Operand.parse(text).constant_bits(name) == bits


def test_operand_modifiers() -> None:
    operand = Operand.parse("-|v3|")
    assert operand.negate and operand.absolute and operand.unmodified() == Operand.parse("v3")
    assert Operand.parse("sext(v3)").sign_extend and Operand.parse("neg(0x10)").negate
    assert Operand.parse("abs(s4)").absolute and Operand.parse("-1.0") == Operand("float", value=-1.0)
    with pytest.raises(EmulatorError, match="unknown operand"):
        Operand.parse("ttmp3")


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
    preloaded = program.descriptor.entry_address + 256  # skip what loads arguments on older devices
    found = [i for i in program.instructions if wanted(i) and i.address >= preloaded]
    chosen = found[-1 if last else 0]
    words = [word, *[0xBF800000] * (len(chosen.words) - 1)]
    return Program(overwrite(kernel.image, chosen, words), kernel.arch, kernel.name)


@needs_tool
def test_a_kernel_runs(kernel: TritonKernel, rows: tuple[np.ndarray, np.ndarray]) -> None:
    x, exact = rows
    y = np.zeros_like(x)
    executed = launch(kernel, y, x)
    np.testing.assert_array_equal(y, exact)
    assert executed % 8 == 0 and executed > 100  # 2 programs of 4 waves, all alike
    assert launch(kernel, y[:1], x[:1], rows=1) == executed // 2


@needs_tool
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


@needs_tool
def test_an_array_that_is_too_small(kernel: TritonKernel, rows: tuple[np.ndarray, np.ndarray]) -> None:
    x, _ = rows
    y = np.zeros(2 * N - 1, np.float32)
    with pytest.raises(
        EmulatorError, match=r"workgroup \(1, 0, 0\), wave \d, 0x\w+ \w+_store\w* .* of argument 0"
    ):
        launch(kernel, y, x)


@needs_tool
def test_a_missing_barrier_is_noticed(kernel: TritonKernel, rows: tuple[np.ndarray, np.ndarray]) -> None:
    x, _ = rows
    program = patched(kernel, lambda i: i.name == "s_barrier", 0xBF800000, last=True)
    with pytest.raises(EmulatorError, match=r"ds_read\w* .*: LDS read of byte \d+"):
        launch(kernel, np.zeros_like(x), x, program)


@needs_tool
@pytest.mark.parametrize(
    ("word", "message"),
    [
        (0xBF900001, r"0x\w+ s_sendmsg .*: unknown"),
        (0xBF92_0002, r"s_trap 2: unknown scalar instruction"),
        (0xBF82_7FFF, r"s_branch 32767: jump to 0x\w+, where no instruction starts"),
        (0xBF82_FFFF, r"s_branch 65535: too many instructions"),
        (0x7E02_02EC, r"<unknown>|unknown operand|unknown instruction"),
    ],
)
def test_instructions_without_meaning(
    kernel: TritonKernel, rows: tuple[np.ndarray, np.ndarray], word: int, message: str
) -> None:
    x, _ = rows
    program = patched(kernel, lambda i: i.name == "s_waitcnt", word)
    with pytest.raises(EmulatorError, match=message):
        kernel.run((2,), np.zeros_like(x), x, N, program=program, max_instructions=10_000)


@needs_tool
def test_waves_that_end_while_others_wait(kernel: TritonKernel, rows: tuple[np.ndarray, np.ndarray]) -> None:
    x, _ = rows
    program = kernel.program()
    program._steps = [lambda wave: END if wave.index == 2 else BARRIER] * len(program._steps)
    with pytest.raises(EmulatorError, match=r"workgroup \(0, 0, 0\): 1 waves ended while others wait"):
        launch(kernel, np.zeros_like(x), x, program)


@needs_tool
def test_registers_that_are_not_allocated(kernel: TritonKernel, rows: tuple[np.ndarray, np.ndarray]) -> None:
    x, _ = rows
    program = patched(kernel, lambda i: i.name == "s_waitcnt", 0x7E000280 | 250 << 17)  # v_mov_b32 v250, 0
    with pytest.raises(EmulatorError, match=r"v250, but \d+ v registers are allocated"):
        launch(kernel, np.zeros_like(x), x, program)


@needs_tool
def test_code_without_an_end(kernel: TritonKernel, rows: tuple[np.ndarray, np.ndarray]) -> None:
    x, _ = rows
    program = kernel.program()
    program._steps[:-1] = [lambda wave: None] * (len(program._steps) - 1)
    with pytest.raises(EmulatorError, match="ran past the end of the code"):
        launch(kernel, np.zeros_like(x), x, program)


@needs_tool
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
