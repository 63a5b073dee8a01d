"""Compiling and auditing: one real kernel an architecture, every refusal, the cache, the same bytes in any folder."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from liger_aot_build.audit import Audited, _resident, audit, parameter_layout, report
from liger_aot_build.binary import inspect
from liger_aot_build.build import Tree, build_packs
from liger_aot_build.compile import Compiled, compile_all, compile_here, sources
from liger_aot_build.declaration import read_declaration
from liger_aot_build.errors import AuditError, BuildError, CompileError
from liger_aot_build.instructions import sass_instructions
from liger_aot_build.paths import KERNELS, ROOT
from liger_aot_build.plan import Variant, plan
from liger_aot_build.profile import Profile, read_profile
from tests.harness.planned_packs import compile_variants
from tests.liger_aot_build.small_op import hardware, write_profile

ARCHS = ("sm80", "sm90", "gfx90a", "gfx942", "gfx1100")
ROW = 'form = "tile", block = 32, parts = 8, num_warps = 1'
SPILLING = 'form = "tile", block = 64, parts = 256, num_warps = 1'


def one_variant(folder: Path, arch: str, row: str = ROW, text: str | None = None) -> tuple[Variant, Profile]:
    """column_sums to bf16, aligned, with the launch numbers of ``row``."""
    table = f'[kernel.column_sums]\nprovenance = "made up for a test"\nrows = [{{ {row} }}]\n'
    profile = read_profile(arch, write_profile(folder, arch, (text or hardware(arch)) + table))
    variants = plan(read_declaration("column_sums"), profile).variants
    return next(v for v in variants if v.aligned and v.axes == {"out": "bf16"}), profile


def compile_one(variant: Variant, profile: Profile, cache: Path) -> Compiled:
    return compile_variants([variant], profile, cache=cache)[variant.name]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Variant, Profile, Compiled]]:
    """The small kernel of every architecture."""
    folder = tmp_path_factory.mktemp("made")
    found = {}
    for arch in ARCHS:
        variant, profile = one_variant(folder, arch)
        found[arch] = variant, profile, compile_one(variant, profile, folder / "cache")
    return found


Made = Mapping[str, tuple[Variant, Profile, Compiled]]


@pytest.mark.parametrize("arch", ARCHS)
def test_a_kernel_of_each_architecture(made: Made, arch: str) -> None:
    variant, profile, compiled = made[arch]
    audited = audit(variant, compiled, profile.arch)
    assert audited.facts.arch == profile.arch.machine
    assert audited.facts.kernel == compiled.symbol == "column_sums"
    assert audited.threads == profile.arch.warp_size
    assert audited.facts.parameters == ((0, 8), (8, 8), (16, 4), (20, 4), (24, 8), (32, 8))
    assert audited.facts.local_bytes == 0
    assert 1 <= audited.resident <= profile.arch.blocks_per_multiprocessor
    assert variant.name in report([audited])


def changed(
    made: Made, arch: str, variant: Mapping[str, Any] = {}, compiled: Mapping[str, Any] = {}
) -> Audited:
    """Audit the kernel of ``arch`` as if its plan or what Triton says of it were another."""
    good, profile, binary = made[arch]
    return audit(replace(good, **variant), replace(binary, **compiled), profile.arch)


def test_the_machine_code_of_another_architecture(made: Made) -> None:
    for arch, other, found, expected in (
        ("sm90", "sm80", "sm_80", "sm_90a"),
        ("sm80", "sm90", "sm_90a", "sm_80"),
        ("gfx942", "gfx90a", "gfx90a", "gfx942"),
    ):
        with pytest.raises(
            AuditError, match=f"^{arch}: column_sums.*: machine code for {found}, expected {expected}$"
        ):
            changed(made, arch, compiled={"image": made[other][2].image})


def test_a_wave_of_another_width(made: Made) -> None:
    with pytest.raises(AuditError, match="waves of 64 lanes, expected 32"):
        changed(made, "sm90", compiled={"image": made["gfx942"][2].image})


@pytest.mark.parametrize("arch", ARCHS)
def test_damaged_images(made: Made, arch: str) -> None:
    image = made[arch][2].image
    for damaged in (b"", b"not an ELF file", image[:64], image[: len(image) // 2]):
        with pytest.raises(AuditError, match=f"^{arch}: column_sums-tile-bf16-aligned"):
            changed(made, arch, compiled={"image": damaged})


@pytest.mark.parametrize("arch", ARCHS)
def test_another_parameter_layout(made: Made, arch: str) -> None:
    arguments = made[arch][0].arguments
    for wrong in ({**arguments, "n_cols": "i64"}, {"OUT": "*bf16"}, {**arguments, "eps": "fp32"}):
        with pytest.raises(AuditError, match=r"parameters \(offset, size\) .*\(20, 4\).*, expected"):
            changed(made, arch, variant={"arguments": wrong})


@pytest.mark.parametrize("arch", ARCHS)
def test_more_threads_than_the_binary_allows(made: Made, arch: str) -> None:
    """The binary states its bound: one warp on CUDA, 256 threads or more on AMD."""
    with pytest.raises(AuditError, match=r"(1024|2048) threads a block, allowed are (32|64|256)$"):
        changed(made, arch, compiled={"num_warps": 32})


def test_more_threads_than_the_chip_has(made: Made) -> None:
    variant, profile, compiled = made["sm90"]
    with pytest.raises(AuditError, match="32 threads a block, allowed are 16"):
        audit(variant, compiled, replace(profile.arch, threads_per_block=16))


def test_more_registers_than_the_chip_has(made: Made) -> None:
    variant, profile, compiled = made["gfx90a"]
    with pytest.raises(AuditError, match=r"\d+ registers a thread, gfx90a has 4"):
        audit(variant, compiled, replace(profile.arch, registers_per_thread=4))


def test_more_shared_memory_than_the_chip_has(made: Made) -> None:
    with pytest.raises(AuditError, match="70000 bytes of shared memory, a block has 65536"):
        changed(made, "gfx942", compiled={"shared": 70000})


@pytest.mark.parametrize(
    ("compiled", "message"),
    [
        ({"symbol": "column_sum"}, "holds kernel column_sums, expected column_sum"),
        ({"num_ctas": 2}, "asks for clusters of 2 blocks"),
        ({"scratch": 128}, "asks for 128 bytes of global scratch"),
    ],
)
def test_what_the_launcher_does_not_do(made: Made, compiled: dict[str, Any], message: str) -> None:
    with pytest.raises(AuditError, match=message):
        changed(made, "sm90", compiled=compiled)


@pytest.mark.parametrize("arch", ARCHS)
def test_cooperative_programs_must_all_be_resident(made: Made, arch: str) -> None:
    variant = made[arch][0]
    waiting = {"form": replace(variant.form, cooperative="PARTS")}
    resident = changed(made, arch).resident
    assert (
        changed(made, arch, {**waiting, "host": {"programs_per_multiprocessor": resident}}).resident
        == resident
    )
    with pytest.raises(
        AuditError, match=f"cooperative with {resident + 1} programs a multiprocessor, {resident} are"
    ):
        changed(made, arch, {**waiting, "host": {"programs_per_multiprocessor": resident + 1}})
    assert changed(made, arch, {"host": {"programs_per_multiprocessor": resident + 1}}).resident == resident


def test_a_kernel_that_follows_must_wait_and_no_other_may(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = {"form": replace(made["sm90"][0].form, pdl="PARTS")}
    with pytest.raises(AuditError, match=r"must wait for the kernel before it .*, and does not"):
        changed(made, "sm90", waits)
    waiting = replace(inspect(made["sm90"][2].image), before_wait=0)
    monkeypatch.setattr("liger_aot_build.audit.inspect", lambda image: waiting)
    assert changed(made, "sm90", waits).facts.before_wait == 0
    with pytest.raises(AuditError, match=r"must not wait for the kernel before it .*, and does$"):
        changed(made, "sm90")
    waiting = replace(waiting, before_wait=2)
    with pytest.raises(AuditError, match=r"2 accesses to global memory before it waits .*; 0 are declared"):
        changed(made, "sm90", waits)
    waits["form"] = replace(waits["form"], loads_before_wait=2)
    assert changed(made, "sm90", waits).facts.before_wait == 2


def test_accesses_before_the_wait() -> None:
    """By the opcodes that nvdisasm prints as S2R, LDG, STG, UTMALDG and ACQBULK."""
    other, load, store, bulk, wait = (
        opcode.to_bytes(2, "little") + bytes(14) for opcode in (0x7919, 0x7981, 0x3986, 0x75B4, 0x782E)
    )
    for code, found in (
        ((other, load, store), None),
        ((other, wait, load, store), 0),
        ((load, other, bulk, wait, store, wait), 2),
        ((store, wait), 1),
    ):
        assert sass_instructions(b"".join(code))[2] == found


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942"])
def test_waves_that_registers_keep_off(tmp_path: Path, made: Made, arch: str) -> None:
    """waves_per_eu has each wave take registers that it does not use: they count, and the promise is held to."""
    variant, profile = one_variant(tmp_path, arch, f"{ROW}, waves_per_eu = 1")
    audited = audit(variant, compile_one(variant, profile, tmp_path / "cache"), profile.arch)
    assert audited.facts.registers <= 256 < audited.facts.granted_registers
    assert audited.resident == 4 < changed(made, arch).resident, "one wave a SIMD"
    with pytest.raises(AuditError, match="waves_per_eu = 2, 1 fit beside each other"):
        audit(replace(variant, options={"waves_per_eu": 2}), audited.compiled, profile.arch)


def test_waves_that_scalar_registers_keep_off(made: Made) -> None:
    _, profile, compiled = made["gfx942"]
    facts = replace(inspect(compiled.image), granted_registers=8, granted_scalars=112)
    assert _resident(facts, 64, replace(compiled, shared=0), profile.arch) == 4 * (800 // 112)


def test_blocks_that_shared_memory_keeps_off(made: Made) -> None:
    """A block of RDNA has at most half of a workgroup processor's; CUDA keeps a KiB of each block's."""
    for arch, shared, blocks in (
        ("gfx942", 65536, 1),
        ("gfx942", 32768, 2),
        ("gfx942", 32769, 1),
        ("gfx1100", 65536, 2),
        ("sm80", 166912, 1),
        ("sm80", 82944, 2),
        ("sm80", 82945, 1),
    ):
        _, profile, compiled = made[arch]
        facts = replace(inspect(compiled.image), static_shared=0)
        given = replace(compiled, shared=shared)
        assert _resident(facts, profile.arch.warp_size, given, profile.arch) == blocks, (arch, shared)


def test_every_problem_is_told_at_once(made: Made) -> None:
    with pytest.raises(AuditError) as caught:
        changed(made, "sm90", compiled={"scratch": 8, "num_ctas": 2, "shared": 1 << 20})
    assert str(caught.value).count(";") == 3, "clusters, scratch, shared memory, nothing resident"


@pytest.mark.parametrize(
    "arch", ["sm90", "gfx942", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm80", "gfx90a"))]
)
def test_spills_are_refused_without_a_reason(tmp_path: Path, arch: str) -> None:
    variant, profile = one_variant(tmp_path, arch, SPILLING)
    compiled = compile_one(variant, profile, tmp_path / "cache")
    where = rf"{variant.name} \({arch}.toml: \[kernel.column_sums\] row 1\)"
    with pytest.raises(
        AuditError, match=rf"^{arch}: {where}: spills: \d+ registers, [1-9]\d* bytes of local"
    ):
        audit(variant, compiled, profile.arch)
    allowed = replace(variant, form=replace(variant.form, may_spill="a test wants it"))
    assert audit(allowed, compiled, profile.arch).facts.local_bytes > 0


@pytest.mark.parametrize("arch", ["sm90", "gfx942"])
def test_a_kernel_that_does_not_compile(tmp_path: Path, arch: str) -> None:
    """Its name, the target and the compiler's reason; nothing is left in the cache."""
    variant, profile = one_variant(tmp_path, arch, 'form = "tile", block = 33, parts = 8, num_warps = 1')
    target = {"sm90": "cuda 90, warp size 32", "gfx942": "hip gfx942, warp size 64"}[arch]
    with pytest.raises(CompileError, match=rf"(?s)^{re.escape(variant.name)} \({target}\): .*power of 2"):
        compile_one(variant, profile, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize(("arch", "backend"), [("sm90", "cuda"), ("gfx942", "hip")])
def test_unknown_options_are_refused(tmp_path: Path, arch: str, backend: str) -> None:
    """Triton drops them without a word."""
    text = hardware(arch).replace("enable_fp_fusion", "enable_fp_fussion")
    variant, profile = one_variant(tmp_path, arch, text=text)
    with pytest.raises(CompileError, match=f"has no option 'enable_fp_fussion' for {backend}"):
        compile_one(variant, profile, tmp_path / "cache")


def test_an_option_of_the_other_backend_is_refused(tmp_path: Path) -> None:
    variant, profile = one_variant(tmp_path, "sm90", f"{ROW}, waves_per_eu = 2")
    with pytest.raises(CompileError, match="has no option 'waves_per_eu' for cuda"):
        compile_one(variant, profile, tmp_path / "cache")


def test_another_triton_is_refused(tmp_path: Path) -> None:
    variant, profile = one_variant(tmp_path, "sm90", text=hardware("sm90").replace('"3.6.0"', '"3.5.1"'))
    with pytest.raises(
        BuildError, match=r"sm90.toml: tuned for triton 3.5.1, found 3.6.0: pip install triton==3.5.1"
    ):
        compile_one(variant, profile, tmp_path / "cache")


def test_the_cache_gives_the_same_without_triton(tmp_path: Path) -> None:
    variant, profile = one_variant(tmp_path, "gfx942")
    first = compile_one(variant, profile, tmp_path / "cache")
    code = f"""
import sys
from pathlib import Path
sys.modules["triton"] = None  # an import of it would fail
from tests.liger_aot_build.test_compile_audit import compile_one, one_variant
again = compile_one(*one_variant(Path({str(tmp_path)!r}), "gfx942"), Path({str(tmp_path / "cache")!r}))
sys.stdout.buffer.write(again.image)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert done.stdout == first.image


def test_the_cache_knows_what_decides_the_bytes(tmp_path: Path) -> None:
    """Numbers and options make another entry; the name of a variant does not."""
    cache = tmp_path / "cache"
    variant, profile = one_variant(tmp_path, "gfx942")
    compile_one(variant, profile, cache)
    assert compile_one(replace(variant, name="renamed"), profile, cache).variant == "renamed"
    assert len(list(cache.iterdir())) == 1
    compile_one(replace(variant, constants={"BLOCK": 64, "PARTS": 8}), profile, cache)
    compile_one(replace(variant, options={"num_warps": 2}), profile, cache)
    compile_one(replace(variant, hinted=()), profile, cache)
    assert len(list(cache.iterdir())) == 4


def test_conversions_of_one_target_a_process(tmp_path: Path) -> None:
    """gfx950 has instructions for fp8 that gfx1201 lacks: whichever is compiled first, in a build of both and in one
    process, each has its own."""
    work = []
    for arch in ("gfx1201", "gfx950"):
        profile = read_profile(arch)
        variants = plan(read_declaration("write_kv_cache"), profile).variants
        work.append((next(v for v in variants if "bf16-fp8e4nv-aligned" in v.name), profile))
    built = compile_all(work, cache=tmp_path / "build", workers=1, progress=False)
    assert ["v_cvt_scalef32_pk_fp8_f32" in one.assembly for one in built] == [False, True]
    here = [compile_here(*one, cache=tmp_path / "here") for one in reversed(work)]
    assert [one.image for one in reversed(here)] == [one.image for one in built]


def test_shared_device_code_counts_as_source() -> None:
    """An edit to a file that an op imports makes its cache entries stale."""
    assert {p.name for p in sources("rmsnorm")} >= {"rmsnorm.py", "exchange.py", "bf16x2.py"}
    assert sources("column_sums") == (KERNELS / "norms" / "column_sums.py",)


def test_a_failed_build_leaves_the_old_pack(tmp_path: Path) -> None:
    table = '[kernel.column_sums]\nprovenance = "made up for a test"\nrows = [{ %s }]\n'
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    shutil.copy(KERNELS / "norms" / "column_sums.py", kernels)
    tree = Tree(tmp_path / "profiles", kernels, tmp_path / "packs", tmp_path / "cache")
    write_profile(tree.profiles, "gfx942", hardware("gfx942") + table % ROW)
    build_packs(("gfx942",), tree=tree, workers=1, progress=False)
    before = folder_bytes(tree.packs)
    write_profile(tree.profiles, "gfx942", hardware("gfx942") + table % SPILLING)
    with pytest.raises(AuditError, match="spills"):
        build_packs(("gfx942",), tree=tree, workers=1, progress=False)
    assert folder_bytes(tree.packs) == before


@pytest.mark.parametrize("arch", [pytest.param("sm90", marks=pytest.mark.slow), "gfx942"])
def test_the_same_bytes_in_any_folder(arch: str, tmp_path: Path) -> None:
    """Two copies of the tree, two builds from nothing."""
    packs = []
    for name in ("here", "a longer path/there"):
        root = tmp_path / name
        for part in ("arch_profiles", "liger_aot_build", "csrc_triton", "python/liger_aot"):
            shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        command = [
            sys.executable,
            "-m",
            "liger_aot_build",
            "build",
            "--arch",
            arch,
            "--kernel",
            "column_sums",
        ]
        done = subprocess.run(
            [*command, "--workers", "1", "--quiet"], cwd=root, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        packs.append(folder_bytes(root / "build" / "packs"))
    assert packs[0] == packs[1]
    assert {path.split("/")[0] for path in packs[0]} == {arch}


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Every file under ``folder`` by its path inside it."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_parameter_layout() -> None:
    """Natural alignment, then Triton's two scratch pointers."""
    assert parameter_layout(["*bf16", "i32", "i64", "fp32"]) == (
        (0, 8),
        (8, 4),
        (16, 8),
        (24, 4),
        (32, 8),
        (40, 8),
    )
    assert parameter_layout([]) == ((0, 8), (8, 8))
