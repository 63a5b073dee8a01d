"""The emulator's decoder: each opcode that it knows, operands and modifiers, and what it refuses."""

from __future__ import annotations

import re
import subprocess

import pytest

from liger_aot_build.elf import PF_X, PT_LOAD
from liger_aot_build.hsaco import CodeObject
from tests.conftest import built_pack
from tests.emulator.amd_emulator import EmulatorError
from tests.emulator.amd_emulator.decode import decode, split
from tests.emulator.amd_emulator.encodings import ARCHS, assembled, encodings, llvm_tool
from tests.emulator.amd_emulator.instruction import Instruction
from tests.emulator.amd_emulator.opcodes import ENCODINGS, forms
from tests.emulator.amd_emulator.operand import Operand
from tests.emulator.amd_emulator.wave import FIRST_ACCUMULATOR, VCC
from tests.harness import executed

ARCH = "gfx942"
# What LLVM writes in words where this decoder has a number: what waits and hints are for, the patterns of ds_swizzle
_NUMBERS = re.compile(
    r"^(s_waitcnt|s_waitcnt_\w+|s_wait_\w+|s_delay_alu|s_sendmsg|s_clause|s_set_inst_\w+|s_barrier_wait|s_nop) .*"
    r"|^(ds_swizzle_b32 .*) offset:.*"
)


def read(line: str, arch: str = ARCH) -> Instruction:
    return decode(assembled(line, arch), 0x100, arch)


def plain(printed: str) -> str:
    return _NUMBERS.sub(r"\1\2", re.sub(r"\s+", " ", printed))


# Operands and numbers of known instructions that are refused when they are decoded
_REFUSED = ("src_shared_base",)


@pytest.mark.parametrize("arch", ARCHS)
def test_reads_what_llvm_assembled(arch: str) -> None:
    """Every line of encodings.txt, as LLVM's disassembler prints it; what the tables leave out is refused."""
    known = {form.name for encoding in ENCODINGS for form in forms(encoding, arch).values()}
    for (of, line), encoding in encodings().items():
        if of != arch:
            continue
        name = re.sub(r"_(e32|e64|dpp|e64_dpp|sdwa)$", "", encoding.printed.split()[0])
        if name not in known or any(word in line for word in _REFUSED):
            with pytest.raises(EmulatorError, match=f"^{encoding.words[0]:#010x}.* at 0x40: unknown"):
                decode(encoding.words, 0x40, arch)
            continue
        assert plain(str(decode(encoding.words, 0, arch))) == plain(encoding.printed), line


@pytest.mark.parametrize("arch", ARCHS)
def test_every_opcode_has_a_line(arch: str) -> None:
    lines = [e.words for (of, _), e in encodings().items() if of == arch and decodes(e.words, arch)]
    decoded = [decode(words, 0, arch) for words in lines]
    read = {i.name for i in decoded} | {i.other.name for i in decoded if i.other}
    for encoding in ENCODINGS:
        for form in forms(encoding, arch).values():
            suffix = ("_e64" if encoding == "VOP3" else "_e32") if form.suffixed else ""
            assert form.name + suffix in read, f"{encoding} {form.name}{suffix}: no line in encodings.txt"


def decodes(words: tuple[int, ...], arch: str) -> bool:
    try:
        decode(words, 0, arch)
    except EmulatorError:
        return False
    return True


def test_operands() -> None:
    instruction = read("v_mfma_f32_32x32x8_f16 a[0:15], v[2:3], a[4:5], 0")
    assert instruction.operands == (
        Operand("vector", FIRST_ACCUMULATOR, 16),
        Operand("vector", 2, 2),
        Operand("vector", FIRST_ACCUMULATOR + 4, 2),
        Operand("integer", value=0),
    )
    assert (instruction.address, instruction.size) == (0x100, 8)
    assert read("s_mov_b64 vcc, -1").operands == (Operand("scalar", VCC, 2), Operand("integer", value=-1))
    assert read("v_mov_b32_e32 v0, src_scc").operands[1].kind == "scc"
    negated = read("v_mul_f32_e64 v0, -|v1|, s3 mul:4").operands[1]
    assert negated.negate and negated.absolute and negated.unmodified() == Operand("vector", 1)
    assert read("buffer_load_dword v0, off, s[8:11], 0").operands[1].kind == "off"


def test_modifiers() -> None:
    instruction = read("v_add_f32_dpp v0, -v1, |v2| quad_perm:[0,1,2,3] row_mask:0xa bank_mask:0xf")
    assert (instruction.name, instruction.base_name) == ("v_add_f32_dpp", "v_add_f32")
    assert instruction.modifiers == {"quad_perm": (0, 1, 2, 3), "row_mask": 10, "bank_mask": 15}
    assert instruction.integer("row_mask") == 10 and instruction.integer("offset", 7) == 7
    assert read("v_fma_f16 v0, v1, v2, v3 op_sel:[1,0,0,1]").bits("op_sel", 0, 4) == (1, 0, 0, 1)
    assert read("global_load_dword v0, v[2:3], off sc0 nt sc1").modifiers == dict.fromkeys(
        ("sc0", "nt", "sc1")
    )
    with pytest.raises(EmulatorError, match="modifier clamp"):
        read("v_mul_f32_e64 v0, v1, v2 clamp mul:2").allow("mul")
    with pytest.raises(EmulatorError, match="2 operands instead of 3"):
        Instruction("v_nop", (Operand("off"), Operand("off"))).expect(3)


@pytest.mark.parametrize(
    ("operand", "name", "bits"),
    [
        (Operand("integer", value=-1), "i32", 0xFFFFFFFF),
        (Operand("integer", value=-1), "b64", 0xFFFFFFFF_FFFFFFFF),
        (Operand("integer", value=64), "f32", 64),
        (Operand("float", value=1.0), "f32", 0x3F800000),
        (Operand("float", value=1.0), "f16", 0x3C00),
        (Operand("float", value=-4.0), "f64", 0xC0100000_00000000),
        (Operand("float", value=0.15915494309189532), "f32", 0x3E22F983),
        (Operand("float", value=0.15915494309189532), "f64", 0x3FC45F306DC9C882),
        (Operand("integer", value=0x40080000, literal=True), "f64", 0x40080000_00000000),
        (Operand("integer", value=0xFFFFFFF0, literal=True), "b64", 0xFFFFFFF0),
        (Operand("integer", value=0xFFFFFFF0, literal=True), "i64", 0xFFFFFFFF_FFFFFFF0),
    ],
)
def test_constants(operand: Operand, name: str, bits: int) -> None:
    assert operand.constant_bits(name) == bits


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((0xBF900001,), "unknown instruction: SOPP opcode 0x10"),  # s_sendmsg
        ((0xFC000000, 0), "unknown encoding"),
        ((0xDC004000, 0), "unknown encoding"),  # scratch_
        ((0x7E0002EC,), "unknown operand 0xec"),
        ((0x7E000266,), "unknown operand 0x66"),  # flat_scratch_lo
        ((0xBE800103,), "unknown operand 0x3 of 2 registers"),  # s_mov_b64 of an odd pair
        ((0xD1CC00FF, 0x04020500), "unknown operand v255 of 2 registers"),
        ((0x7E0002FA, 0xFF011001), "unknown DPP control"),
        ((0x7E0402F9, 0x00060701), "unknown SDWA selection 7"),
        ((0xD3CC0000, 0x02020400), "unknown operand 0x0"),  # a scalar as a matrix
        ((0x7E0004F9, 0), "unknown encoding"),  # v_readfirstlane has no SDWA
        ((0xD1010000, 0x04020501), "unknown encoding: more than 2 sources"),  # v_add_f32_e64
    ],
)
def test_what_is_unknown_is_refused(words: tuple[int, ...], message: str) -> None:
    with pytest.raises(EmulatorError, match=rf"{words[0]:#010x}.* at 0x1f4: {message}"):
        decode(words, 0x1F4, ARCH)


def test_the_length_does_not_depend_on_the_opcode() -> None:
    lines = [
        "v_mov_b32_e32 v0, 0xdeadbeef",
        "s_trap 2",
        "v_mfma_f32_16x16x32_fp8_fp8 v[0:3], v[4:5], v[6:7], 0",
    ]
    lines += ["s_cmp_eq_u32 0x10000, s0", "v_fmaak_f32 v0, v1, v2, 0x3f9d70a4", "s_memtime s[6:7]", "s_nop 3"]
    wanted = [assembled(line, ARCH) for line in lines]
    code = b"".join(word.to_bytes(4, "little") for words in wanted for word in words)
    assert [words for _, words in split(code, 0, ARCH)] == wanted
    assert [address for address, _ in split(code, 0x200, ARCH)][:3] == [0x200, 0x208, 0x20C]
    assert [*split(code[:4], 0, ARCH)] == [(0, wanted[0][:1])]  # cut off within an instruction
    with pytest.raises(EmulatorError, match="unknown"):
        decode(wanted[0][:1], 0, ARCH)


@pytest.mark.slow
@pytest.mark.skipif(not llvm_tool("llvm-objdump"), reason="no llvm-objdump of LLVM 22 or newer is on PATH")
@pytest.mark.parametrize("arch", (*executed.ARCHS, *executed.BY_FORM))
def test_reads_the_packs_as_llvm_does(arch: str) -> None:
    """Every instruction of the largest binary of each kernel form, or of the first one where no test needs all."""
    pack = built_pack(arch)
    largest: dict[tuple[str, ...], bytes] = {}
    for op in pack.ops:
        manifest = pack.op(op)
        for name in manifest.variants:
            form = (op, *name.split("-")[:2])
            if arch in executed.ARCHS or form not in largest:
                largest[form] = max(manifest.variant(name).read(), largest.get(form, b""), key=len)
    line = re.compile(r"\s+(?P<text>\S.*?)\s*// (?P<address>[0-9A-F]{12}): (?P<words>[0-9A-F ]+)")
    for form, image in largest.items():
        command = [str(llvm_tool("llvm-objdump")), "-d", f"--mcpu={arch}", "-"]
        shown = subprocess.run(command, input=image, capture_output=True, check=True).stdout.decode()
        wanted = [
            match for row in shown.splitlines() if (match := line.fullmatch(re.sub(r" <\S+>$", "", row)))
        ]
        code = CodeObject(image)
        (text,) = [s for s in code.elf.segments if s.type == PT_LOAD and s.flags & PF_X]
        found = [*split(code.read(text.address, text.memory_size), text.address, arch)]
        assert len(wanted) > 10, form
        for match, (address, words) in zip(wanted, found, strict=False):
            assert (int(match["address"], 16), f"{' '.join(f'{w:08X}' for w in words)}") == (
                address,
                match["words"],
            )
            assert plain(str(decode(words, address, arch))) == plain(match["text"]), form
