"""The binary readers against real compiler output, what the vendors' own tools say of it, and damage."""

from __future__ import annotations

import ctypes
import random
import re
import struct
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from liger_aot_build import elf
from liger_aot_build.binary import BinaryFacts, inspect
from liger_aot_build.cubin import Cubin, KernelParameter
from liger_aot_build.elf import BinaryFormatError, Elf
from liger_aot_build.hsaco import CodeObject

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

NVIDIA_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90a": GPUTarget("cuda", 90, 32),
    "sm_100a": GPUTarget("cuda", 100, 32),
    "sm_120a": GPUTarget("cuda", 120, 32),
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "gfx1100": GPUTarget("hip", "gfx1100", 32),
    "gfx1201": GPUTarget("hip", "gfx1201", 32),
}
NVIDIA, AMD = ("sm_80", "sm_90a", "sm_100a", "sm_120a"), ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
CDNA = ("gfx90a", "gfx942", "gfx950")
E_FLAGS = 48  # where an ELF64 header keeps them


@triton.jit
def row_kernel(x, y, stride, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    v = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(v * v, axis=0) / n + eps)
    tl.store(y + row * stride + columns, (v * scale).to(y.dtype.element_ty), mask=inside)


@triton.jit
def product_kernel(a, b, c, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tile = i[:, None] * BLOCK + i[None, :]
    tl.store(c + tile, tl.dot(tl.load(a + tile), tl.load(b + tile)))


class RowArguments(ctypes.Structure):
    """The C struct whose natural layout row_kernel's parameters must have."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("n", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("global_scratch", ctypes.c_void_p),
        ("profile_scratch", ctypes.c_void_p),
    )


ROW_LAYOUT = tuple(
    (getattr(RowArguments, name).offset, getattr(RowArguments, name).size)
    for name, _ in RowArguments._fields_
)


@dataclass(frozen=True)
class Built:
    image: bytes
    assembly: str
    facts: BinaryFacts


class Compiler:
    """Compiles a kernel once for each architecture and set of options."""

    def __init__(self) -> None:
        self._built: dict[tuple[object, ...], Built] = {}

    def row(self, arch: str, block: int, **options: int) -> Built:
        signature = {"x": "*bf16", "y": "*bf16", "stride": "i64", "n": "i32", "eps": "fp32"}
        return self._compile(row_kernel, signature, block, arch, options)

    def product(self, arch: str) -> Built:
        signature = {"a": "*fp16", "b": "*fp16", "c": "*fp32"}
        return self._compile(product_kernel, signature, 128, arch, {"num_warps": 4})

    def spilling(self, arch: str) -> Built:
        # 64 registers on all: CDNA's 512 in eighths; RDNA has too many for that, but not for 512 elements a thread
        limit = {"maxnreg": 64} if arch in NVIDIA else {"waves_per_eu": 8} if arch in CDNA else {}
        return self.row(arch, 8192, num_warps=1, **limit)

    def _compile(self, kernel, signature, block: int, arch: str, options: dict[str, int]) -> Built:
        key = (kernel.fn.__name__, block, arch, *sorted(options.items()))
        if key not in self._built:
            source = ASTSource(kernel, {**signature, "BLOCK": "constexpr"}, {(len(signature),): block}, {})
            asm = triton.compile(source, target=TARGETS[arch], options=options).asm
            image = asm["cubin" if arch in NVIDIA else "hsaco"]
            text = asm["ptx" if arch in NVIDIA else "amdgcn"]
            self._built[key] = Built(image, text, inspect(image))
        return self._built[key]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiler]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        patch.setenv("TRITON_DISABLE_LINE_INFO", "1")
        yield Compiler()


def tool_output(tool: str, image: bytes, folder: Path, *flags: str) -> str:
    path = folder / "kernel.cubin"
    path.write_bytes(image)
    command = [NVIDIA_TOOLS / tool, *flags, path]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("num_warps", (1, 4, 16))
@pytest.mark.parametrize("arch", TARGETS)
def test_row_kernel(compiler: Compiler, arch: str, num_warps: int) -> None:
    facts = compiler.row(arch, 1024, num_warps=num_warps).facts
    wave_size = 64 if arch in CDNA else 32
    assert (facts.kind, facts.arch) == ("hsaco" if arch in AMD else "cubin", arch)
    assert facts.kernel == "row_kernel"
    assert facts.format_version == (5 if arch in AMD else 8 if arch in ("sm_100a", "sm_120a") else 7)
    assert (facts.wave_size, facts.max_threads) == (wave_size, wave_size * num_warps)
    assert facts.parameters == ROW_LAYOUT
    assert facts.parameter_bytes == ctypes.sizeof(RowArguments)
    assert (facts.spilled_registers, facts.local_bytes, facts.static_shared) == (0, 0, 0)
    assert 8 <= facts.registers <= 255
    assert (facts.scalar_registers > 0) == (arch in AMD)


@pytest.mark.parametrize("arch", AMD)
def test_more_threads_than_a_workgroup_takes(compiler: Compiler, arch: str) -> None:
    """32 waves of 64 compile without a word, into a kernel that says it is for 1024 threads."""
    assert compiler.row(arch, 4096, num_warps=32).facts.max_threads == 1024


@pytest.mark.parametrize("arch", TARGETS)
def test_spills_show(compiler: Compiler, arch: str, tmp_path: Path) -> None:
    built = compiler.spilling(arch)
    assert built.facts.registers == (64 if arch in NVIDIA or arch in CDNA else 256)
    assert built.facts.local_bytes > 0
    assert (built.facts.spilled_registers > 0) == (arch in AMD)
    if arch in NVIDIA:
        assert re.search(r"\b(STL|LDL)\b", tool_output("nvdisasm", built.image, tmp_path, "-c"))
        kept = compiler.row(arch, 1024, num_warps=4)
        assert not re.search(r"\b(STL|LDL)\b", tool_output("nvdisasm", kept.image, tmp_path, "-c"))


@pytest.mark.parametrize("case", ("row", "spilling", "product"))
@pytest.mark.parametrize("arch", NVIDIA)
def test_resources_are_those_of_cuobjdump(compiler: Compiler, arch: str, case: str, tmp_path: Path) -> None:
    built = compiler.row(arch, 1024, num_warps=4) if case == "row" else getattr(compiler, case)(arch)
    usage = tool_output("cuobjdump", built.image, tmp_path, "--dump-resource-usage")
    said = {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    assert built.facts.registers == said["REG"]
    assert built.facts.local_bytes == said["STACK"] + said["LOCAL"]
    # It counts the KiB that is the system's, which a kernel has from sm_90 on where it has shared memory at all.
    assert said["SHARED"] - built.facts.static_shared in ((0,) if arch == "sm_80" else (0, 1024))


@pytest.mark.parametrize("arch", NVIDIA)
def test_attributes_are_those_of_cuobjdump(compiler: Compiler, arch: str, tmp_path: Path) -> None:
    image = compiler.row(arch, 1024, num_warps=4).image
    kernel = Cubin(image).kernels["row_kernel"]
    said = tool_output("cuobjdump", image, tmp_path, "-elf")
    assert f"abi={Cubin(image).abi_version}, sm={arch.removeprefix('sm_')}," in said.lower()
    parameters = re.findall(r"Ordinal\s*: (\w+)\s+Offset\s*: (\w+)\s+Size\s*: (\w+)", said)
    numbers = [[int(number, 16) for number in parameter] for parameter in parameters]
    assert kernel.parameters == tuple(KernelParameter(*number) for number in sorted(numbers))
    assert re.search(rf"EIATTR_CBANK_PARAM_SIZE\s.*\s.*Value:\s+{kernel.parameter_bytes:#x}\s", said)
    assert re.search(r"EIATTR_REQNTID\s.*\s.*Value:\s+0x80 0x1 0x1\s", said)
    assert kernel.required_threads == (128, 1, 1)


PTX = """
.version {version}
.target {arch}
.address_size 64
.visible .entry bounded(.param .u64 x, .param .u32 n, .param .align 16 .b8 block[48])
.maxntid 128, 2
{{
  .shared .align 4 .b8 tile[512]; .local .align 4 .b8 buffer[32];
  .reg .u64 a, l, i; .reg .u32 t;
  ld.param.u64 a, [x]; mov.u32 t, %tid.x; mul.wide.u32 i, t, 4;
  mov.u64 l, buffer; add.u64 l, l, i;
  st.local.u32 [l], t; membar.cta; ld.local.u32 t, [l+8];
  st.shared.u32 [tile+4], t;
  bar.sync 0; bar.sync 3, 64;
  ld.shared.u32 t, [tile+8]; st.global.u32 [a], t; ret;
}}
.visible .entry empty() {{ ret; }}
"""


@pytest.fixture(
    params=(
        "sm_80",
        "sm_90",
        "sm_90a",
        "sm_100",
        "sm_100a",
        "sm_100f",
        "sm_103f",
        "sm_120",
        "sm_120f",
        "sm_121a",
    )
)
def handwritten(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Cubin, str]:
    """The architecture, the cubin of PTX for it, and what ptxas says of it."""
    source, out = tmp_path / "handwritten.ptx", tmp_path / "handwritten.cubin"
    later = len(request.param.rstrip("af")) > len("sm_90")
    source.write_text(PTX.format(arch=request.param, version="8.8" if later else "8.6"))
    command = [
        NVIDIA_TOOLS / ("ptxas-blackwell" if later else "ptxas"),
        "-v",
        f"-arch={request.param}",
        source,
        "-o",
        out,
    ]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return request.param, Cubin(out.read_bytes()), said


def test_declared_resources_of_a_cubin(handwritten: tuple[str, Cubin, str]) -> None:
    arch, cubin, said = handwritten
    assert cubin.arch == arch
    assert sorted(cubin.kernels) == ["bounded", "empty"]
    kernel = cubin.kernels["bounded"]
    assert (kernel.max_threads, kernel.required_threads) == ((128, 2, 1), None)
    assert kernel.parameters == tuple(KernelParameter(*it) for it in ((0, 0, 8), (1, 8, 4), (2, 16, 48)))
    assert kernel.parameter_bytes == 64
    assert kernel.stack_bytes == int(re.search(r"([1-9]\d*) bytes stack frame", said)[1])
    assert kernel.barriers == 4 and "used 4 barriers" in said
    assert kernel.static_shared_bytes == 512 and "512 bytes smem" in said
    empty = cubin.kernels["empty"]
    assert (empty.parameters, empty.parameter_bytes, empty.barriers, empty.stack_bytes) == ((), 0, 0, 0)
    assert (empty.max_threads, empty.required_threads) == (None, None)


def test_facts_are_of_one_kernel(handwritten: tuple[str, Cubin, str]) -> None:
    with pytest.raises(BinaryFormatError, match="2 kernels instead of one"):
        inspect(handwritten[1].elf.image)


def test_other_cubin_abi_is_refused(compiler: Compiler) -> None:
    image = bytearray(compiler.row("sm_90a", 1024, num_warps=4).image)
    image[7:9] = 65, 8  # as CUDA 13 writes them
    with pytest.raises(BinaryFormatError, match="of ELF ABI 8; supported are sm_100 to sm_255"):
        inspect(bytes(image))
    image[8] = 9
    with pytest.raises(
        BinaryFormatError, match="OS ABI 65 and ELF ABI 9; supported are 51 and 7 or 65 and 8"
    ):
        inspect(bytes(image))


@pytest.mark.parametrize("case", ("spilling", "product"))
@pytest.mark.parametrize("arch", AMD)
def test_resources_are_those_of_the_assembly(compiler: Compiler, arch: str, case: str) -> None:
    built = getattr(compiler, case)(arch)
    facts = built.facts

    def said(key: str) -> int:
        return int(re.search(rf"\s{re.escape(key)}:?\s+(\d+)\n", built.assembly)[1])

    assert facts.registers == said(".vgpr_count") == said(".amdhsa_next_free_vgpr")
    has_accumulators = arch in CDNA
    assert facts.accumulator_registers == (said(".agpr_count") if has_accumulators else 0)
    assert (facts.accumulator_registers > 0) == (case == "product" and has_accumulators)
    mnemonics = re.findall(r"^\s+v_(mfma|wmma)_", built.assembly, re.MULTILINE)
    assert dict(facts.matrix) == {name.upper(): count for name, count in Counter(mnemonics).items()}
    assert bool(facts.matrix) == (case == "product")
    assert facts.wave_size == (64 if has_accumulators else 32) == said(".wavefront_size")
    assert facts.scalar_registers == said(".sgpr_count")
    assert facts.spilled_registers == said(".vgpr_spill_count") + said(".sgpr_spill_count")
    assert facts.local_bytes == said(".amdhsa_private_segment_fixed_size")
    kernel = CodeObject(built.image).kernels[facts.kernel]
    assert kernel.kernarg_bytes == said(".amdhsa_kernarg_size")
    if has_accumulators:
        assert kernel.kernarg_preload & 0x7F == said(".amdhsa_user_sgpr_kernarg_preload_length")
    assert facts.registers <= facts.granted_registers < facts.registers + kernel.chip.register_granule + 8


@pytest.mark.parametrize("waves", (1, 2, 4))
def test_registers_granted_past_those_in_use(compiler: Compiler, waves: int) -> None:
    """waves_per_eu keeps further waves off by taking registers: the code still uses as many as before."""
    free = compiler.row("gfx942", 1024, num_warps=4)
    few = compiler.row("gfx942", 1024, num_warps=4, waves_per_eu=waves)
    granted = CodeObject(few.image).kernels["row_kernel"].granted_vectors
    assert few.facts.registers == free.facts.registers
    assert few.facts.granted_registers == granted > 512 // (waves + 1) >= free.facts.registers


# Code objects


def test_loaded_image(compiler: Compiler) -> None:
    code = CodeObject(compiler.row("gfx942", 1024, num_warps=4).image)
    kernel = code.kernels["row_kernel"]
    assert (code.arch, code.xnack, code.sramecc, code.code_object_version) == ("gfx942", "any", "any", 5)
    assert code.read(kernel.entry_address, kernel.code_size)[-4:] != bytes(4)
    (offset,) = struct.unpack("<q", code.read(kernel.descriptor_address + 16, 8))
    assert kernel.descriptor_address + offset == kernel.entry_address
    for address, content, size in code.segments:
        assert code.read(address, size) == content + bytes(size - len(content))
        with pytest.raises(BinaryFormatError, match="no loadable segment"):
            code.read(address, size + 1)
    # And so read() filled up with zeros.
    assert any(size > len(content) for _, content, size in code.segments)
    assert [argument[".size"] for argument in kernel.metadata[".args"]] == [size for _, size in ROW_LAYOUT]


@pytest.mark.parametrize(
    ("flags", "xnack", "sramecc", "arch"),
    (
        (0x000, "unsupported", "unsupported", "gfx942"),
        (0x600, "off", "any", "gfx942:xnack-"),
        (0xB00, "on", "off", "gfx942:sramecc-:xnack+"),
        (0xD00, "any", "on", "gfx942:sramecc+"),
    ),
)
def test_features(compiler: Compiler, flags: int, xnack: str, sramecc: str, arch: str) -> None:
    image = bytearray(compiler.row("gfx942", 1024, num_warps=4).image)
    struct.pack_into("<I", image, E_FLAGS, flags | 0x4C)
    code = CodeObject(bytes(image))
    assert (code.xnack, code.sramecc, inspect(bytes(image)).arch) == (xnack, sramecc, arch)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    (
        (E_FLAGS, b"\x3f", r"target is 'amdgcn-amd-amdhsa--gfx942', the ELF flags say gfx90a"),
        (E_FLAGS, b"\x30", r"machine 0x30 is not supported"),
        (8, b"\x07", r"ABI version 7"),
        (7, b"\x00", r"not an AMD HSA code object"),
        (18, b"\x3e", r"neither cubin nor hsaco: ELF machine 62"),
        (0, b"MZ", r"not an ELF file"),
        (4, b"\x01", r"not a little-endian ELF64"),
        (40, b"\xff\xff\xff\xff\xff\xff\xff\x7f", r"section header 0 at offset 0x7f.* ends past"),
    ),
)
def test_damage_is_named(compiler: Compiler, offset: int, value: bytes, message: str) -> None:
    image = bytearray(compiler.row("gfx942", 1024, num_warps=4).image)
    image[offset : offset + len(value)] = value
    with pytest.raises(BinaryFormatError, match=message):
        inspect(bytes(image))


@pytest.mark.parametrize(
    ("field", "size", "change", "message"),
    (
        (0, 4, lambda old: old + 1, "group_segment_fixed_size is 0 in the metadata, 1 in the descriptor"),
        (8, 4, lambda old: old + 1, "kernarg_segment_size is 48"),
        (12, 1, lambda old: old + 1, "reserved bytes"),
        (16, 8, lambda old: old + 1, "its descriptor enters at"),
        (48, 4, lambda old: old & ~0x3F, "registers with 0 accumulators in the metadata, 8 with"),
        (48, 4, lambda old: old & ~0x3C0, r"\d+ scalar registers in the metadata, 8 in the descriptor"),
    ),
)
def test_descriptor_must_agree(
    compiler: Compiler, field: int, size: int, change: Callable[[int], int], message: str
) -> None:
    image = bytearray(compiler.row("gfx942", 1024, num_warps=16).image)
    descriptor = next(section for section in Elf(image).sections if section.name == ".rodata").offset + field
    old = int.from_bytes(image[descriptor : descriptor + size], "little")
    image[descriptor : descriptor + size] = change(old).to_bytes(size, "little")
    with pytest.raises(BinaryFormatError, match=message):
        inspect(bytes(image))


@pytest.mark.parametrize(
    ("field", "change", "message"),
    (
        (56, lambda old: old & ~0x400, r"\.wavefront_size is 32 in the metadata, 64 in the descriptor"),
        (48, lambda old: old & ~(1 << 29), r"for one compute unit \(CU mode\)"),
        (48, lambda old: old & ~0x3F, "registers with 0 accumulators in the metadata, 24 with"),
    ),
)
def test_rdna_descriptor_must_agree(
    compiler: Compiler, field: int, change: Callable[[int], int], message: str
) -> None:
    image = bytearray(compiler.row("gfx1100", 1024, num_warps=1).image)
    descriptor = next(section for section in Elf(image).sections if section.name == ".rodata").offset + field
    old = int.from_bytes(image[descriptor : descriptor + 4], "little")
    image[descriptor : descriptor + 4] = change(old).to_bytes(4, "little")
    with pytest.raises(BinaryFormatError, match=message):
        inspect(bytes(image))


# Damage at large


@pytest.mark.parametrize("arch", TARGETS)
def test_every_truncation_is_refused(compiler: Compiler, arch: str) -> None:
    image = compiler.row(arch, 1024, num_warps=4).image
    for length in range(0, len(image), 5):
        with pytest.raises(BinaryFormatError):
            inspect(image[:length])


@pytest.mark.parametrize("arch", TARGETS)
def test_flipped_bytes_give_facts_or_an_error(compiler: Compiler, arch: str) -> None:
    """Any other exception fails. One to three bytes outside the machine code change at a time."""
    image = compiler.row(arch, 1024, num_warps=4).image
    code = [section for section in Elf(image).sections if section.name.startswith(".text")]
    in_code = {place for section in code for place in range(section.offset, section.offset + section.size)}
    places = [place for place in range(len(image)) if place not in in_code]
    source = random.Random(arch)
    refused = 0
    for _ in range(3000):
        damaged = bytearray(image)
        for place in source.sample(places, source.randint(1, 3)):
            damaged[place] = source.choice((0, 1, 0x7F, 0x80, 0xFF, source.randrange(256)))
        try:
            assert isinstance(inspect(bytes(damaged)), BinaryFacts)
        except BinaryFormatError:
            refused += 1
    assert 300 < refused < 3000


@pytest.mark.parametrize("prefix", (b"", b"\x7fELF", b"\x7fELF\x02\x01\x01"))
def test_noise_is_refused(prefix: bytes) -> None:
    source = random.Random(len(prefix))
    for _ in range(1000):
        with pytest.raises(BinaryFormatError):
            inspect(prefix + source.randbytes(source.randrange(400)))


def test_sections_and_symbols(compiler: Compiler) -> None:
    file = Elf(compiler.row("gfx90a", 1024, num_warps=4).image)
    text = file.section(".text")
    assert text is not None and file.section(".absent") is None
    assert len(file.data(text)) == text.size
    symbols = {symbol.name: symbol for symbol in file.symbols(elf.SHT_DYNSYM)}
    assert symbols["row_kernel"].type == elf.STT_FUNC and symbols["row_kernel"].value == text.address
    assert symbols["row_kernel.kd"].type == elf.STT_OBJECT and symbols["row_kernel.kd"].size == 64
    assert [(note.owner, note.type) for note in file.notes()] == [("AMDGPU", 32)]
