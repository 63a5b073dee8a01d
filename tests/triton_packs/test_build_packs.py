"""Packs that are built from a recording, on a machine without a GPU: what they hold, what their binaries compute, and
what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from liger_aot.triton import recording as recordings
from liger_aot.triton.recording import Part
from liger_aot.triton.targets import target
from liger_aot_build.binary import inspect
from liger_aot_build.errors import BuildError
from liger_aot_build.paths import ROOT
from liger_aot_build.triton_packs.build import nearest
from liger_aot_build.triton_packs.find import Finder, NotFound
from liger_aot_build.triton_packs.pack import check_name
from tests.emulator.amd_emulator.triton_kernel import TritonKernel
from tests.triton_packs.conftest import Packed, liger_aot, pack, record

N, BLOCK = 1000, 256
KERNELS = "tests.triton_packs.project.kernels"


# -- what is in a pack ------------------------------------------------------------------------------------------------
def test_the_manifest(sm90: Packed, recording: Path) -> None:
    manifest = sm90.manifest
    assert (manifest["format"], manifest["kind"], manifest["name"]) == (1, "triton", "small")
    assert (manifest["arch"], manifest["backend"], manifest["serves"]) == ("sm90", "cuda", ["9.0"])
    assert manifest["toolchain"]["triton"] == recordings.read(recording)[0].triton
    assert manifest["recorded_on"] == ["cuda-90"] and manifest["left_out"] == []
    assert sum(entry["variants"] for entry in manifest["functions"].values()) == 13
    for entry in manifest["functions"].values():
        data = sm90.files[f"{sm90.folder}/{entry['file']}.json"]
        assert sha256(data).hexdigest() == entry["sha256"]


def test_variants_are_those_recorded(sm90: Packed, recording: Path) -> None:
    """On the architecture that was recorded, by the same names."""
    (part,) = recordings.read(recording)
    held = {
        variant
        for function in sm90.manifest["functions"]
        for variant in sm90.function(function.rpartition(":")[2])["variants"]
    }
    assert held == {noted.variant.name for noted in part.variants}


def test_files_of_binaries_have_no_gaps(sm90: Packed, gfx942: Packed) -> None:
    for packed in (sm90, gfx942):
        for name in packed.manifest["functions"]:
            function = packed.function(name.rpartition(":")[2])
            ranges = sorted((e["offset"], e["length"]) for es in function["variants"].values() for e in es)
            end = 0
            for offset, length in ranges:
                assert offset == end
                end += length
            assert end == len(function["bin"])


def test_launch_facts_are_the_binarys(sm90: Packed, gfx942: Packed) -> None:
    for packed, machine, warp in ((sm90, "sm_90a", 32), (gfx942, "gfx942", 64)):
        for name in packed.manifest["functions"]:
            for entry in packed.entries(name.rpartition(":")[2]):
                facts = inspect(entry["image"])
                assert facts.arch.startswith(machine) and facts.kernel == entry["symbol"]
                assert entry["threads"] == entry["num_warps"] * warp <= facts.max_threads
                assert entry["registers"] == facts.registers


def test_what_launches_differ_in(sm90: Packed) -> None:
    """Parameters after specialisation, tensor maps, clusters, warps that a call gave."""
    (pair,), (copied,) = sm90.entries("pair"), sm90.entries("copied")
    assert pair["parameters"] == ["*fp32", "*fp32", "i32"]
    assert copied["parameters"] == ["tensordesc<fp32[256]>", "*fp32", "i32"] and copied["maps"]
    (clustered,) = sm90.entries("needs_clusters")
    assert clustered["num_ctas"] == 2 and clustered["given"] == {"num_ctas": 2}
    assert {e["num_warps"] for e in sm90.entries("add")} == {4, 8}
    assert all(e["scratch"] == {"global": [0, 1], "profile": [0, 1]} for e in sm90.entries("add"))


def test_what_triton_says_of_a_kernel_is_kept(sm90: Packed) -> None:
    """For launches and for tools that look at kernel.metadata; nothing of the machine that built it."""
    function = sm90.function("add")
    for entries in function["variants"].values():
        said = function["metadata"] | entries[0]["metadata"]
        assert said["name"] == "add" and said["num_warps"] == entries[0]["num_warps"]
        assert said["shared"] == entries[0]["shared"] and "extern_libs" not in said
    text = b"".join(data for name, data in sm90.files.items() if name.endswith(".json"))
    assert str(Path.home()).encode() not in text and str(Path(__file__).parents[2]).encode() not in text


def test_a_tuners_choice_is_in_the_pack(sm90: Packed) -> None:
    (tuner,) = sm90.function("tuned")["tuners"]
    assert tuner["keys"] == ["n"]
    (winner,) = tuner["winners"]
    assert winner["key"] == [1000, "torch.float32", "torch.float32"] and winner["on"] == "cuda-90"
    assert winner["text"].startswith("BLOCK: 128, num_warps: 1") and not winner["timed"]
    assert "were not timed" in sm90.said


def test_functions_of_one_name(sm90: Packed) -> None:
    """Made by a factory: each by its own key."""
    function = sm90.function("made.<locals>.raised")
    assert len(function["cache_keys"]) == len(function["variants"]) == 2


def test_what_a_function_is_told_by(sm90: Packed) -> None:
    for name in sm90.manifest["functions"]:
        function = sm90.function(name.rpartition(":")[2])
        places, table = function["source_of"], function["sources"]
        assert len(places) == len(function["cache_keys"]) and None not in places, name
        assert len(set(places)) == len(places), "two keys of one source"
        for place, source in enumerate(table):
            assert all(isinstance(said, str) or said < place for said in source["names"].values())
            assert "__liger_aot_main__" not in json.dumps(source)


def test_the_wheel(sm90: Packed) -> None:
    info = "small_sm90-1.0.dist-info"
    assert sm90.wheel.name == "small_sm90-1.0-py3-none-any.whl"
    assert sm90.files[f"{info}/entry_points.txt"].decode() == (
        "[liger_aot.triton_packs]\nsmall.sm90 = liger_aot_triton_packs.small.sm90\n"
    )
    assert b"Name: small-sm90\n" in sm90.files[f"{info}/METADATA"]
    assert b"Requires-Dist: liger-aot\n" in sm90.files[f"{info}/METADATA"]
    recorded = sm90.files[f"{info}/RECORD"].decode()
    assert all(name in recorded for name in sm90.files)


def test_the_page_reads_every_binary(gfx942: Packed, tmp_path: Path) -> None:
    """docs/triton-pack-format.md: its code, and the names of all fields that there are."""
    page = (ROOT / "docs" / "triton-pack-format.md").read_text()
    code: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], code)
    for name, data in gfx942.files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    said: set[str] = set(gfx942.manifest)
    for function in gfx942.manifest["functions"]:
        read = code["read_function"](tmp_path / gfx942.folder, function)
        said |= read.keys() - {"path"}
        for variant, entries in read["variants"].items():
            for place, entry in enumerate(entries):
                assert inspect(code["read_binary"](read, variant, place)).kernel == entry["symbol"]
                said |= entry.keys()
    assert [name for name in sorted(said) if f"`{name}`" not in page] == []


@pytest.mark.slow
def test_the_same_bytes_from_the_same_recording(sm90: Packed, recording: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(recording, tmp_path / "recording"))
    assert pack(copy, "sm90").wheel.read_bytes() == sm90.wheel.read_bytes()


# -- another architecture than the recorded one -----------------------------------------------------------------------
def test_what_can_not_be_built_is_left_out_and_said(gfx942: Packed) -> None:
    assert f"{KERNELS}:needs_clusters" not in gfx942.manifest["functions"]
    (left,) = gfx942.manifest["left_out"]
    assert left["function"] == f"{KERNELS}:needs_clusters" and "num_ctas" in left["why"]
    assert "recorded on sm90" in gfx942.said and "left out" in gfx942.said


def test_keys_differ_where_modules_look_at_the_gpu(sm90: Packed, gfx942: Packed) -> None:
    for name in gfx942.manifest["functions"]:
        short = name.rpartition(":")[2]
        same = sm90.function(short)["cache_keys"] == gfx942.function(short)["cache_keys"]
        assert same == (short != "by_gpu")


def test_two_binaries_where_the_size_of_tensors_is_not_recorded(gfx942: Packed) -> None:
    """AMD's compiler may take tensors to be smaller than 2 GiB; another takes any. The narrower goes before."""
    for name in ("add", "by_gpu", "total"):
        for entries in gfx942.function(name)["variants"].values():
            narrow, any_size = entries
            assert narrow["ranged"] and not any_size["ranged"]
            said = [a for _, found in narrow["attrs"] for a in found]
            assert said.count(["tt.pointer_range", 32]) == len(narrow["ranged"])
    assert len(gfx942.entries("pair")) == 1  # pointers in a tuple


# -- results: the AMD binaries, executed in software ------------------------------------------------------------------
def programs(packed: Packed, name: str) -> Iterator[tuple[dict[str, Any], TritonKernel]]:
    for entry in packed.entries(name):
        yield (
            entry,
            TritonKernel(
                entry["image"], packed.manifest["arch"], entry["symbol"], entry["num_warps"], entry["shared"]
            ),
        )


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(1024).astype(np.float32)


def grid(entry: dict[str, Any]) -> tuple[int]:
    block = next(value for path, value in entry["constants"] if type(value) is int and value > 1)
    return (-(-N // block),)


def test_add(gfx942: Packed, x: np.ndarray) -> None:
    """Pointers, a size, a float; float16 and float32; aligned or not."""
    y = x[::-1].copy()
    for entry, kernel in programs(gfx942, "add"):
        dtype = np.float16 if entry["parameters"][0] == "*fp16" else np.float32
        out = np.zeros(1024, dtype)
        a, b = x.astype(dtype), y.astype(dtype)
        kernel.run(grid(entry), a, b, out, N, 0.5)
        # exact products, one addition in float32 (fused or not), one rounding
        want = (a.astype(np.float64) + 0.5 * b.astype(np.float64)).astype(np.float32).astype(dtype)
        assert np.array_equal(out[:N], want[:N]) and not out[N:].any()


def test_a_function_and_a_float_as_constants(gfx942: Packed, x: np.ndarray) -> None:
    seen = set()
    for entry, kernel in programs(gfx942, "mapped"):
        function = entry["constants"][0][1]["function"][1]
        scale = np.float32(float.fromhex(entry["constants"][1][1]["float"]))
        out = np.zeros(1024, np.float32)
        kernel.run(grid(entry), x, out, N)
        want = (x * x if function == "square" else -x) * scale
        assert np.array_equal(out[:N], want[:N])
        seen.add((function, float(scale)))
    assert {function for function, _ in seen} == {"square", "negate"}


def test_a_tuple(gfx942: Packed, x: np.ndarray) -> None:
    for entry, kernel in programs(gfx942, "pair"):
        out = np.zeros(1024, np.float32)
        kernel.run(grid(entry), x, out, N)
        assert np.array_equal(out[:N], 2 * x[:N])


def test_globals_are_what_this_gpu_makes_of_them(gfx942: Packed, x: np.ndarray) -> None:
    """The module has 0.5 and 2 on Hopper, where it was recorded; 0.25 and 3 elsewhere."""
    for entry, kernel in programs(gfx942, "by_gpu"):
        out = np.zeros(1024, np.float32)
        kernel.run(grid(entry), x, out, N)
        exact = x.astype(np.float64) * 0.25 + 3
        assert np.array_equal(out[:N], exact.astype(np.float32)[:N])


def test_a_heuristics_block(gfx942: Packed, x: np.ndarray) -> None:
    for _, kernel in programs(gfx942, "total"):
        out = np.zeros(1, np.float32)
        kernel.run((1,), x, out, N)
        exact = x[:N].astype(np.float64)
        # a tree of 10 additions over the block, each rounded
        assert abs(float(out[0]) - exact.sum()) <= 10 * 2.0**-24 * np.abs(exact).sum()


def test_a_tuners_kernel(gfx942: Packed, x: np.ndarray) -> None:
    for entry, kernel in programs(gfx942, "tuned"):
        out = np.zeros(1024, np.float32)
        kernel.run(grid(entry), x, out, N)
        assert np.array_equal(out[:N], (x + np.float32(1))[:N])


def test_a_tensor_descriptor(gfx942: Packed, x: np.ndarray) -> None:
    """AMD has none in hardware here: a pointer, a size and a stride, twice, and how it is padded."""
    for entry, kernel in programs(gfx942, "copied"):
        assert entry["maps"] is None
        out = np.zeros(1024, np.float32)
        kernel.run((4,), x, N, 1, 0, N, 1, out, N)
        assert np.array_equal(out[:N], x[:N]) and not out[N:].any()


def test_functions_of_a_factory(gfx942: Packed, x: np.ndarray) -> None:
    found = []
    for entry, kernel in programs(gfx942, "made.<locals>.raised"):
        out = np.zeros(1024, np.float32)
        kernel.run(grid(entry), x, out, N)
        found.append(bytes(out[:N]))
    cube = x * x * x
    assert {bytes(cube[:N]), bytes((cube * x)[:N])} == set(found)


# -- refusals ---------------------------------------------------------------------------------------------------------
PROJECT = """
import torch, triton
import triton.language as tl

SCALE = tl.constexpr({scale})

@triton.jit
def times(X, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(X + at, tl.load(X + at, mask=at < n) * SCALE, mask=at < n)

@triton.jit
def doubled(X, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(X + at, tl.load(X + at, mask=at < n) * 2, mask=at < n)

@triton.jit
def tripled(X, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(X + at, tl.load(X + at, mask=at < n) * 3, mask=at < n)
"""
PROGRAM = """
import torch
import their_kernels as k
x = torch.ones(64, device="cuda")
k.times[(1,)](x, 64, BLOCK=64)
k.doubled[(1,)](x, 64, BLOCK=64)
k.tripled[(1,)](x, 64, BLOCK=64)
"""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project beside its recording."""
    folder = tmp_path_factory.mktemp("theirs")
    (folder / "their_kernels.py").write_text(PROJECT.format(scale="2.0"))
    (folder / "program.py").write_text(PROGRAM)
    record(folder, "program.py")
    return folder


def changed(theirs: Path, to: Path, text: str) -> Path:
    shutil.copytree(theirs, to, dirs_exist_ok=True)
    (to / "their_kernels.py").write_text(text)
    return to / "recording"


def test_what_is_not_as_it_was_recorded(theirs: Path, tmp_path: Path) -> None:
    """A function whose source changed is refused by name. A global that is another here, as where a module asks the
    GPU for it, is given its recorded value, which the function's key proves. The rest is built as ever."""
    text = PROJECT.format(scale="4.0").replace("* 3", "* 5")
    built = pack(changed(theirs, tmp_path, text), "sm90", code=1)
    assert [*built.manifest["functions"]] == ["their_kernels:doubled", "their_kernels:times"]
    (left,) = built.manifest["left_out"]
    assert left["function"] == "their_kernels:tripled" and "is not what was recorded" in left["why"]
    assert "globals set as they were recorded: SCALE" in built.said


@pytest.mark.slow
def test_a_global_that_nothing_proves_for_another_architecture(theirs: Path, tmp_path: Path) -> None:
    recording = changed(theirs, tmp_path, PROJECT.format(scale="4.0"))
    other = pack(recording, "sm80", code=1)
    (left,) = other.manifest["left_out"]
    assert (
        left["function"] == "their_kernels:times"
        and "SCALE" in left["why"]
        and "record on sm80" in left["why"]
    )


def test_only_packages_that_may_be_imported() -> None:
    """``--package``: a recording names modules, and to import one runs it."""
    finder = Finder(["elsewhere"])
    for module in ("their_kernels", "os", "subprocess"):
        with pytest.raises(NotFound, match=r"none of the packages that may be imported \(elsewhere\)"):
            finder.find(module, "times", "")
    for module in ("../x", "", "a b", "/etc/passwd"):
        with pytest.raises(NotFound, match="is no module"):
            Finder().module(module)
    with pytest.raises(NotFound, match="name its file with --main"):
        Finder().module("__main__")


def test_is_a_pack_complete(sm90: Packed, recording: Path, tmp_path: Path) -> None:
    """For CI: 0 where the installed packs hold all that was recorded."""
    missing = liger_aot(tmp_path, "pack", "--check", recording, code=1)
    assert "sm90: 0 of 13 variants (no pack is installed)" in missing.stdout
    assert f"missing: {KERNELS}:add (3 variants)" in missing.stdout
    for name, data in sm90.files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    done = liger_aot(tmp_path, "pack", "--check", recording)
    assert "sm90: 13 of 13 variants (small)" in done.stdout and "missing" not in done.stdout


def test_names_that_are_none(recording: Path) -> None:
    for wrong in ("Small", "../x", "a-b", "1a", ""):
        with pytest.raises(BuildError, match="--name"):
            check_name(wrong)
    done = liger_aot(recording.parent, "pack", recording, "--name", "a", "--arch", "sm9x", code=1)
    assert "must be one such as sm90 or gfx942, got 'sm9x'" in done.stderr


IN_THE_PROGRAM = """
import torch, triton
import triton.language as tl

@triton.jit
def half(X, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(X + at, tl.load(X + at, mask=at < n) * 0.5, mask=at < n)

if __name__ == "__main__":
    half[(1,)](torch.ones(64, device="cuda"), 64, BLOCK=64)
"""


@pytest.mark.slow
def test_kernels_of_the_program_itself(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(IN_THE_PROGRAM)
    recording = record(tmp_path, "program.py")
    assert "--main" in pack(recording, "sm90", code=1).said
    built = pack(recording, "sm90", "--main", tmp_path / "program.py")
    assert [*built.manifest["functions"]] == ["__main__:half"]
    (part,) = recordings.read(recording)
    assert {*built.function("half")["variants"]} == {noted.variant.name for noted in part.variants}


@pytest.mark.parametrize(
    ("arch", "recorded", "taken"),
    [
        ("sm90", "sm80 sm90 gfx942", "sm90"),
        ("sm89", "sm80 sm90", "sm80"),  # what sm90's programs ask for may not be there
        ("sm100", "sm80 sm90 gfx942", "sm90"),
        ("sm75", "sm80 sm90 gfx942", "sm80"),
        ("gfx90a", "sm90 gfx942 gfx1100", "gfx942"),
        ("gfx1201", "gfx942 gfx1100", "gfx1100"),
        ("gfx950", "sm80 sm90", "sm90"),
    ],
)
def test_the_recording_that_is_built_from(arch: str, recorded: str, taken: str) -> None:
    parts = [Part(target(name), "3.6.0", "", False, {}, (), (), ()) for name in recorded.split()]
    assert nearest(parts, target(arch)).target.profile == taken
