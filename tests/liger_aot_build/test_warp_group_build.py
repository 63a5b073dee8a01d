"""Warp-specialised kernels through the build: declaration, plan, compile, audit, pack, and how they are loaded."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from liger_aot.errors import PackDamaged
from liger_aot.runtime.manifest import Pack, TensorMaps
from liger_aot_build.audit import audit, parameter_layout
from liger_aot_build.binary import inspect
from liger_aot_build.compile import Compiled
from liger_aot_build.declaration import read_declaration, tiles_of
from liger_aot_build.errors import AuditError, DeclarationError, ProfileError
from liger_aot_build.plan import Plan, Variant, plan
from liger_aot_build.profile import read_profile
from tests.conftest import built_pack
from tests.harness.pack_edits import edit
from tests.harness.planned_packs import compile_variants
from tests.liger_aot_build.small_op import DECLARATION, TABLE, edited, hardware, write_op, write_profile

ARCHS = ("sm80", "sm90", "gfx90a", "gfx942")
OP = "flash_attention"
FORWARD, TILES = "flash_attention_forward", "flash_attention_forward_tiles"


def planned(arch: str) -> Plan:
    return plan(read_declaration(OP), read_profile(arch))


# ---- Declaration and plan ----


def test_what_is_declared() -> None:
    kernels = read_declaration(OP).kernels
    forward, tiles = kernels[FORWARD], kernels[TILES]
    assert forward.signature() == "4444ppplff" + 11 * "i"
    assert (forward.language, tiles.language) == ("gluon", "triton")
    assert all(k.optional and k.always_aligned and k.matrix for k in kernels.values())
    assert "4" not in tiles.signature()


def test_tiles() -> None:
    assert tiles_of("dtype[1, ROWS, 64]") == ("dtype", ("1", "ROWS", "64"))
    for other in (
        "*dtype",
        "i32",
        "dtype[]",
        "dtype[4]",
        "dtype[1, 2, 3, 4, 5, 6]",
        "*dtype[1, 2]",
        "dtype[1,2]",
    ):
        assert tiles_of(other) is None


MISTAKES = {
    "an unknown axis": ({'"Y": "*dtype"': '"Y": "kind[1, 64]"'}, r"argument Y: unknown type 'kind\[1, 64\]'"),
    "an unknown constant": ({'"*weight"': '"weight[ROWS, 64]"'}, "form staged: 'ROWS' is none of its constants"),
    "an unknown language": ({'"axes"': '"language": "cuda", "axes"'}, "language must be one of triton, gluon"),
    "an unknown language of a form": ({'"function"': '"language": "c", "function"'}, "one of triton, gluon, found 'c'"),
    "like nothing": ({'"axes"': '"like": "other", "axes"'}, "kernel scale: like: no kernel 'other' before it"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(tmp_path: Path, name: str) -> None:
    changes, message = MISTAKES[name]
    with pytest.raises(DeclarationError, match=message):
        read_declaration("scale", write_op(tmp_path, edited(DECLARATION, changes)))


def test_each_architecture_has_its_own_kernels() -> None:
    for arch in ARCHS:
        (kernel,) = planned(arch).kernels.values()
        assert kernel.kernel.name == (FORWARD if arch == "sm90" else TILES)
        masks = ("/full", "/causal", "/local") if arch == "sm90" else ("",)
        assert set(kernel.tables) == {
            f"{dtype}/{dim}{mask}/aligned"
            for dtype in ("bf16", "fp16")
            for dim in (64, 96, 128, 192, 256)
            for mask in masks
        }


def test_a_kernel_that_is_not_optional_must_have_a_table(tmp_path: Path) -> None:
    profile = read_profile(
        "sm90", write_profile(tmp_path, "sm90", hardware("sm90") + TABLE.replace("scale", "other"))
    )
    with pytest.raises(ProfileError, match=r"table \[kernel.scale\] is missing"):
        plan(read_declaration("scale", write_op(tmp_path)), profile)
    assert not plan(read_declaration(OP), profile).kernels


def test_sizes_of_tiles_are_filled_in() -> None:
    variants = [v for v in planned("sm90").variants if v.axes["dtype"] == "fp16"]
    for variant in variants:
        box, block_n = variant.constants["BOX"], variant.constants["BLOCK_N"]
        assert variant.arguments["Q"] == f"tensordesc<fp16[1, 1, 64, {box}]>"
        assert variant.arguments["K"] == f"tensordesc<fp16[1, 1, {block_n}, {box}]>"
        assert variant.constants["MASK"] == ("full", "causal", "local").index(str(variant.axes["mask"]))
        assert variant.language == "gluon"
    assert len(variants) == 18


# ---- Compile and audit ----

Built = tuple[Variant, Compiled]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Built]:
    """The causal forward over many keys of head dimension 64 with three warp groups, of 128 with two, and gfx942's."""
    cache = tmp_path_factory.mktemp("cache")
    made = {}
    for arch, dim, name in (("sm90", 64, "three"), ("sm90", 128, "two"), ("gfx942", 64, "amd")):
        axes = {"dtype": "bf16", "head_dim": dim, **({"mask": "causal"} if arch == "sm90" else {})}
        *_, variant = (v for v in planned(arch).variants if v.axes == axes)
        profile = read_profile(arch)
        compiled = compile_variants([variant], profile, cache=cache)
        made[name] = variant, compiled[variant.name]
    return made


@pytest.mark.parametrize(("name", "groups", "budget"), [("three", 3, 160), ("two", 2, 240)])
def test_what_was_baked(built: Mapping[str, Built], name: str, groups: int, budget: int) -> None:
    variant, compiled = built[name]
    audited = audit(variant, compiled, read_profile("sm90").arch)
    assert audited.threads == 128 * (groups + 1) and audited.facts.max_threads == audited.threads
    assert {budget, 24} <= set(audited.facts.register_budgets)
    assert audited.facts.matrix["HGMMA"] > 0 and "HMMA" not in audited.facts.matrix
    assert audited.facts.local_bytes == 0 and audited.resident == 1
    assert [m["box"] for m in compiled.maps] == [
        [1, 1, 64, 64],
        [1, 1, 128, 64],
        [1, 1, 128, 64],
        [1, 1, 64, 64],
    ]
    assert {m["swizzle"] for m in compiled.maps} == {3}


def test_instructions_are_those_of_nvdisasm(built: Mapping[str, Built], tmp_path: Path) -> None:
    import triton

    compiled = built["three"][1]
    (tmp_path / "kernel.cubin").write_bytes(compiled.image)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    command = [tool, "-c", tmp_path / "kernel.cubin"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    facts = inspect(compiled.image)
    assert facts.matrix == {"HGMMA": len(re.findall(r"\bHGMMA\.", text))}
    budgets = {int(n, 16) for n in re.findall(r"USETMAXREG\.[\w.]+ (?:\w+, )?(0x\w+)", text)}
    assert facts.register_budgets == tuple(sorted(budgets))


def test_matrix_instructions_are_those_of_the_assembly(built: Mapping[str, Built]) -> None:
    compiled = built["amd"][1]
    assert inspect(compiled.image).matrix == {
        "MFMA": len(re.findall(r"^\s+v_mfma_", compiled.assembly, re.M))
    }


def refused(built: Built, arch: str = "sm90", variant: dict[str, Any] | None = None, **compiled: Any) -> str:
    """What the audit says of a binary as if its plan or what Triton says of it were another."""
    profile = read_profile(arch)
    with pytest.raises(AuditError) as caught:
        audit(replace(built[0], **(variant or {})), replace(built[1], **compiled), profile.arch)
    return str(caught.value)


def test_broken_promises(built: Mapping[str, Built]) -> None:
    three, two, amd = built["three"], built["two"], built["amd"]
    constants = three[0].constants
    assert "16 warps, 2 warp groups and a producer are 12" in refused(
        three, variant={"constants": {**constants, "WARP_GROUPS": 2}}
    )
    assert re.search(
        r"change to \(.*\) registers a thread, never to 240",
        refused(three, variant={"constants": {**constants, "REGISTERS": 240}}),
    )
    assert "3 tensor maps, expected 4" in refused(three, maps=three[1].maps[:3])
    shorter = {k: v for k, v in three[0].arguments.items() if k != "Y"}
    assert "parameters (offset, size)" in refused(three, variant={"arguments": shorter})
    assert "holds kernel" in refused(two, symbol="another")
    arch = replace(read_profile("gfx942").arch, matrix="HGMMA")
    with pytest.raises(AuditError, match=r"has no HGMMA instruction, but \{'MFMA': "):
        audit(*amd, arch)
    audit(replace(amd[0], matrix=False), amd[1], arch)


def test_parameters_of_a_tensor_map() -> None:
    """64-byte alignment counts from the start of the constant bank; sizes and strides follow the map."""
    maps = ("tensordesc<bf16[1, 64]>", "i32", "tensordesc<bf16[64, 64]>")
    assert parameter_layout(maps, 0x210) == (
        (48, 128), (176, 4), (180, 4), (184, 8), (192, 8), (200, 4), (240, 128), (368, 4), (372, 4), (376, 8),
        (384, 8), (392, 8), (400, 8),
    )  # fmt: skip


# ---- Pack and manifest ----


@pytest.mark.slow  # every binary of the op
def test_the_manifest_says_how_to_encode_maps() -> None:
    manifest = built_pack("sm90").op(OP)
    for name in manifest.variants:
        variant = manifest.variant(name)
        box = variant.numbers["box"]
        assert list(variant.maps) == ["Q", "K", "V", "Y"]
        assert variant.maps["K"].box == (1, 1, variant.numbers["block_n"], box)
        assert variant.maps["Q"] == variant.maps["Y"] == TensorMaps((1, 1, 64, box), {64: 3, 32: 2}[box])
    for arch in ("sm80", "gfx90a", "gfx942"):
        other = built_pack(arch).op(OP)
        assert all(not other.variant(name).maps for name in other.variants)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda maps: maps.pop("Q"), r"maps is \{"),
        (lambda maps: maps.update(Z=maps["Q"]), r"maps is \{"),
        (lambda maps: maps["Q"].update(box=[1, 1, 64]), r"maps.Q.box is \[1, 1, 64\]"),
        (lambda maps: maps["Q"].update(box=[1, 1, 64, 0]), r"maps.Q.box is \[1, 1, 64, 0\]"),
        (lambda maps: maps["Q"].update(box=[1, 1, 64, "64"]), "maps.Q.box is"),
        (lambda maps: maps["Q"].update(swizzle=-1), "maps.Q.swizzle is -1"),
        (lambda maps: maps["Q"].pop("swizzle"), "maps.Q.swizzle is None"),
    ],
)
def test_damaged_maps(tmp_path: Path, change: Any, message: str) -> None:
    folder = tmp_path / "sm90"
    folder.mkdir()
    for file in ("manifest.json", f"{OP}.json"):
        shutil.copy(built_pack("sm90").folder / file, folder)
    name = Pack(folder).op(OP).variants[0]
    edit(folder / f"{OP}.json", lambda document: change(document["variants"][name]["maps"]))
    with pytest.raises(PackDamaged, match=message):
        Pack(folder).op(OP).variant(name)
