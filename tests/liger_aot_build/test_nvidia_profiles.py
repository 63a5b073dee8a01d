"""Binaries of the NVIDIA profiles that no machine of ours runs, one of attention, a matrix product and a norm each,
compiled and audited; and what is theirs alone: family-specific machines, tensor memory."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from liger_aot_build.audit import Audited, audit
from liger_aot_build.binary import inspect
from liger_aot_build.build import compiler
from liger_aot_build.compile import compile_here
from liger_aot_build.compiler import Compiled
from liger_aot_build.declaration import read_declaration
from liger_aot_build.errors import AuditError
from liger_aot_build.plan import Variant, plan
from liger_aot_build.profile import read_profile
from liger_aot_build.ptx import tensor_memory

triton = pytest.importorskip("triton")

ARCHS = ("sm89", "sm100", "sm120")
MATRIX = {"sm89": "HMMA", "sm100": "UTCHMMA", "sm120": "HMMA"}
# op, kernel, values of its axes
KERNELS = {
    "attention": ("flash_attention", "flash_attention_forward_tiles", {"dtype": "bf16", "head_dim": 64}),
    "product": ("fused_moe", "fused_moe_down", {"dtype": "bf16"}),
    "norm": ("rmsnorm", "rmsnorm_forward", {"dtype": "bf16", "weight": "bf16"}),
}
Built = tuple[Variant, Compiled]


def built(arch: str, which: str) -> Built:
    op, kernel, axes = KERNELS[which]
    profile = read_profile(arch)
    variants = plan(read_declaration(op), profile).kernels[kernel].variants.values()
    found = [v for v in variants if v.aligned and axes.items() <= v.axes.items()]
    variant = max(found, key=lambda v: v.constants.get("BLOCK_M", 0))  # tcgen05 and wgmma want 64 rows
    return variant, compile_here(variant, profile)


def disassembled(image: bytes, folder: Path) -> str:
    (folder / "kernel.cubin").write_bytes(image)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    command = [tool, "-c", folder / "kernel.cubin"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("which", KERNELS)
@pytest.mark.parametrize("arch", ARCHS)
def test_a_binary_of_each_kind(arch: str, which: str, tmp_path: Path) -> None:
    variant, compiled = built(arch, which)
    profile = read_profile(arch)
    audited = audit(variant, compiled, profile.arch)
    assert audited.facts.arch == profile.arch.machine and audited.facts.local_bytes == 0
    assert f".target {profile.arch.machine}\n" in compiled.assembly
    text = disassembled(compiled.image, tmp_path)
    counts = {name: len(re.findall(rf"\b{name}\b", text)) for name in ("HMMA", "HGMMA", "UTCHMMA")}
    assert dict(audited.facts.matrix) == {name: count for name, count in counts.items() if count}
    assert list(audited.facts.matrix) == ([] if which == "norm" else [MATRIX[arch]])


def test_what_assembles() -> None:
    assert [compiler(read_profile(arch)) for arch in ARCHS] == ["ptxas 12.8", "ptxas 12.9", "ptxas 12.9"]


def test_one_binary_for_a_family() -> None:
    """Assembled for sm_100a, Triton's own choice, a norm's machine code is the same; the e_flags keep it from sm_103.
    (Attention's differs in 10 of 63,872 bytes.)"""
    for arch, which in (("sm100", "norm"), ("sm120", "norm")):
        profile = read_profile(arch)
        own = replace(profile, arch=replace(profile.arch, machine=f"sm_{profile.arch.target}a"))
        variant, family = built(arch, which)
        alone = compile_here(variant, own)
        assert inspect(alone.image).arch == own.arch.machine
        kernels = [machine_code(one) for one in (family, alone)]
        assert kernels[0] == kernels[1]
        with pytest.raises(
            AuditError, match=f"machine code for {own.arch.machine}, expected {profile.arch.machine}"
        ):
            audit(variant, alone, profile.arch)


def machine_code(compiled: Compiled) -> bytes:
    from liger_aot_build.cubin import Cubin

    (kernel,) = Cubin(compiled.image).kernels.values()
    return kernel.code


def test_tensor_memory() -> None:
    variant, compiled = built("sm100", "attention")
    arch = read_profile("sm100").arch
    columns, freed = tensor_memory(compiled.assembly)
    assert columns in (32, 64, 128, 256, 512) and freed == {columns}
    assert tensor_memory(built("sm100", "norm")[1].assembly) == (0, frozenset())
    audited: Audited = audit(variant, compiled, arch)
    assert audited.resident <= 512 // columns

    def refused(text: str) -> str:
        with pytest.raises(AuditError) as caught:
            audit(variant, replace(compiled, assembly=text), arch)
        return str(caught.value)

    lines = compiled.assembly.splitlines()
    allocates, frees = (re.compile(rf"\btcgen05\.{name}\.") for name in ("alloc", "dealloc"))
    assert "multiplies in tensor memory, and allocates none" in refused(
        "\n".join(line for line in lines if not allocates.search(line))
    )
    assert f"allocates {columns} columns of tensor memory, and frees none" in refused(
        "\n".join(line for line in lines if not frees.search(line))
    )
    more = "\n".join(
        line.replace(f", {columns};", ", 1024;") if allocates.search(line) else line for line in lines
    )
    assert "1024 columns of tensor memory; a power of 2 from 32 to 512 is allowed" in refused(more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "kernel"),
    [
        ("rmsnorm", "rmsnorm_forward"),
        ("softmax", "softmax_forward"),
        ("rope", "rope"),
        ("swiglu", "swiglu_backward"),
    ],
)
def test_sm89_is_sm80_in_plain_kernels(op: str, kernel: str) -> None:
    """The same numbers give the same PTX but for the line that names the machine: what sm80 showed on a GPU holds."""
    texts = []
    for arch in ("sm80", "sm89"):
        profile = read_profile(arch)
        variants = plan(read_declaration(op), profile).kernels[kernel].variants.values()
        variant = next(v for v in variants if v.aligned and "bf16" in v.axes.values())
        text = compile_here(variant, profile).assembly
        assert text.count(f".target {profile.arch.machine}\n") == 1
        texts.append((variant.name, text.replace(f".target {profile.arch.machine}\n", "")))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("arch", "instruction"),
    [("sm80", None), ("sm89", "asm"), ("sm90", "Triton"), ("sm100", "Triton"), ("sm120", "Triton")],
)
def test_codes_are_rounded_once(arch: str, instruction: str | None) -> None:
    """To e4m3 by one instruction from fp32 on each chip that has one: on 8.9 Triton's own conversion goes by way of
    fp16, and kernels have theirs."""
    profile = read_profile(arch)
    variants = plan(read_declaration("quantize"), profile).kernels["quantize"].variants
    found = [v for name, v in variants.items() if "fp8e4nv-token-aligned" in name]
    assert bool(found) == (instruction is not None)
    for variant in found[:1]:
        text = compile_here(variant, profile).assembly
        assert "cvt.rn.satfinite.e4m3x2.f32" in text and "e4m3x2.f16x2" not in text
        assert ("{low, high}" in text) == (instruction == "asm")
