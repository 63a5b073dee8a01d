"""Every binary of the AMD packs, as the loader reads it: against the manifest, the profile and the kernel descriptor.

The audit looks at what was compiled, before it is packed; this at what lies in the pack.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from liger_aot.runtime.manifest import Pack, Variant
from liger_aot_build.audit import parameter_layout
from liger_aot_build.binary import inspect
from liger_aot_build.declaration import read_declaration
from liger_aot_build.hsaco import CodeObject
from liger_aot_build.plan import plan
from liger_aot_build.profile import read_profile
from tests.conftest import built_pack
from tests.emulator.amd_emulator.architecture import architecture
from tests.harness import executed

SIMDS, SCALARS = 4, 800  # of a compute unit, on RDNA of a pair; scalar registers of a SIMD on CDNA


def binaries(pack: Pack, all_of_a_form: bool) -> Iterator[tuple[str, Variant]]:
    """Every binary, or the first of each form of each kernel."""
    for op in pack.ops:
        manifest, seen = pack.op(op), set()
        for name in manifest.variants:
            kernel, form, *_ = name.split("-")
            if all_of_a_form or (kernel, form) not in seen:
                seen.add((kernel, form))
                yield op, manifest.variant(name)


@pytest.mark.parametrize(
    ("arch", "all_of_a_form"),
    [
        *(pytest.param(arch, False, id=f"a binary a form of {arch}") for arch in executed.ARCHS),
        *(
            pytest.param(arch, True, id=f"every binary of {arch}", marks=pytest.mark.slow)
            for arch in executed.ARCHS
        ),
        *(
            pytest.param(arch, False, id=f"a binary a form of {arch}", marks=pytest.mark.slow)
            for arch in executed.BY_FORM
        ),
    ],
)
def test_binaries_are_what_their_manifest_says(arch: str, all_of_a_form: bool) -> None:
    pack, profile = built_pack(arch), read_profile(arch)
    planned = {op: {v.name: v for v in plan(read_declaration(op), profile).variants} for op in pack.ops}
    assert {op: {*pack.op(op).variants} for op in pack.ops} == {op: {*names} for op, names in planned.items()}
    for op, variant in binaries(pack, all_of_a_form):
        where, wanted = f"{arch} {op} {variant.name}", planned[op][variant.name]
        code = CodeObject(variant.read())
        (kernel,) = code.kernels.values()
        facts = inspect(variant.read())
        assert (code.arch, code.code_object_version) == (arch, pack.binary_version), where
        rdna, lanes = architecture(arch).rdna, profile.arch.warp_size
        assert (code.xnack, code.sramecc) == (("unsupported",) * 2 if rdna else ("any", "any")), (
            f"{where}: asks for a feature that the pack does not name"
        )
        assert kernel.name == variant.symbol, where
        # Arguments: the launcher's letters, in the order of the declaration, where it puts them.
        types = ["*i8" if t[0] == "*" else t for t in wanted.arguments.values()]
        letters = "".join({"*i8": "p", "i32": "i", "i64": "l", "fp32": "f"}[t] for t in types)
        assert variant.signature == letters, where
        assert facts.parameters == parameter_layout(types), where
        hidden = [a for a in kernel.metadata[".args"] if a[".value_kind"].startswith("hidden_")]
        assert facts.parameter_bytes <= kernel.kernarg_bytes <= facts.parameter_bytes + 256 * bool(hidden), (
            where
        )
        count, first = kernel.kernarg_preload & 0x7F, kernel.kernarg_preload >> 7
        assert 4 * (count + first) <= kernel.kernarg_bytes, where
        # Threads, registers, LDS and how many waves a SIMD holds of it.
        assert variant.threads == facts.max_threads == lanes * variant.num_warps <= 1024, where
        assert variant.registers == facts.registers <= facts.granted_registers, where
        assert facts.registers <= 256 if rdna else facts.granted_registers <= 512, where
        assert facts.accumulator_registers <= 256 and facts.registers - facts.accumulator_registers <= 256, (
            where
        )
        assert rdna or facts.scalar_registers <= facts.granted_scalars <= 112, where
        assert variant.local_bytes == facts.local_bytes == facts.spilled_registers == 0, where
        used = kernel.group_segment_bytes + variant.shared
        assert used <= architecture(arch).local_bytes == profile.arch.shared_per_block, where
        vectors = profile.arch.registers_per_multiprocessor // (SIMDS * lanes)
        most = profile.arch.threads_per_multiprocessor // (SIMDS * lanes)
        waves = min(vectors // facts.granted_registers, most)
        if not rdna:
            waves = min(waves, SCALARS // facts.granted_scalars)
        lds = profile.arch.shared_per_multiprocessor
        blocks = waves * SIMDS // variant.num_warps
        if rdna and variant.num_warps > 1:
            blocks = min(blocks, profile.arch.blocks_per_multiprocessor)
        assert variant.resident == min(blocks, lds // used if used else blocks), where
        assert waves >= wanted.options.get("waves_per_eu", 1), where
        assert variant.resident >= (
            variant.numbers["programs_per_multiprocessor"] if variant.cooperative else 1
        ), where
        instruction = "WMMA" if rdna else "MFMA"
        assert instruction in facts.matrix or not wanted.matrix, (
            f"{where}: a matrix kernel without {instruction}"
        )
