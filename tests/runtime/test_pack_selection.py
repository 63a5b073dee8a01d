"""Which of the packs a GPU takes, what it says where none is for it, and what reaches the driver."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import liger_aot
from liger_aot.doctor import examine
from liger_aot.errors import DriverNotFound, PackDamaged, PackNotFound, UnknownOp
from liger_aot.ops.norms.column_sums import ColumnSums
from liger_aot.runtime import devices, packs
from liger_aot.runtime.dispatch import Runtimes
from liger_aot.runtime.packs import Device, pack_for
from liger_aot_build.profile import profile_names, read_profile
from tests.harness.pack_edits import count_binaries, cut, edit, flip, need_shared, read_all
from tests.harness.stand_in import StandIn

pytest_plugins = (
    "tests.harness.launcher_fixtures",
    "tests.harness.pack_fixtures",
    "tests.harness.stand_in_gpu",
)

H200 = Device("cuda", "9.0", "NVIDIA H200")
A100 = Device("cuda", "8.0", "NVIDIA A100")
L4 = Device("cuda", "8.9", "NVIDIA L4")


def test_a_damaged_pack_leaves_the_others_at_work(copies: Callable[..., Path]) -> None:
    root = copies("gfx942", "sm80", "sm90")
    cut(root / "sm80" / "manifest.json")
    assert liger_aot.archs() == ("gfx942", "sm90")
    assert read_all(pack_for(H200)) and read_all(pack_for(Device("hip", "gfx942", "AMD Instinct MI300X")))
    with pytest.raises(PackDamaged, match=r"sm80/manifest\.json: not JSON"):
        pack_for(A100)


def test_the_most_specific_pack_wins(copies: Callable[..., Path]) -> None:
    root = copies("sm80")
    shutil.copytree(root / "sm80", root / "sm89")
    edit(root / "sm89" / "manifest.json", lambda m: m.update(arch="sm89", serves=["8.9"]))
    assert (pack_for(L4).arch, pack_for(A100).arch) == ("sm89", "sm80")
    flip(root / "sm89" / "manifest.json", 0)
    packs.installed.cache_clear()
    with pytest.raises(PackDamaged, match=r"sm89/manifest\.json"):
        pack_for(L4)  # not sm80's in silence
    assert pack_for(A100).arch == "sm80"


def test_what_each_gpu_takes() -> None:
    """Of all profiles, the one that names a GPU earliest: its own, or the one before it of its major version."""
    serves = {name: read_profile(name).arch.serves for name in profile_names()}
    for target, wanted in {
        "8.0": "sm80",
        "8.6": "sm80",
        "8.9": "sm89",
        "9.0": "sm90",
        "10.0": "sm100",
        "10.3": "sm100",
        "12.0": "sm120",
        "12.1": "sm120",
    }.items():
        assert min((s.index(target), name) for name, s in serves.items() if target in s)[1] == wanted


def test_of_two_roots_the_first_counts(
    copies: Callable[..., Path], install: Callable[..., None], tmp_path: Path
) -> None:
    root = copies("sm80", "sm90")
    shutil.copytree(root / "sm80", tmp_path / "first" / "sm80")
    shutil.copytree(root / "sm80", tmp_path / "first" / ".sm80.new")  # a build that is under way
    shutil.copytree(root / "sm80", tmp_path / "first" / "__pycache__")
    (tmp_path / "first" / "README").write_text("no pack")
    install(tmp_path / "first", tmp_path / "nowhere", root)
    assert [p.folder for p in packs.installed_packs()] == [tmp_path / "first" / "sm80", root / "sm90"]


def test_packs_are_found_in_the_namespace_package(
    copies: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As wheels install them: one wheel an architecture, maybe in two places of the import path."""
    root = copies("sm80", "sm90")
    monkeypatch.delenv(packs.OVERRIDE)
    for arch in ("sm80", "sm90"):
        site = tmp_path / f"site-{arch}"
        (site / packs.NAMESPACE).mkdir(parents=True)
        (root / arch).rename(site / packs.NAMESPACE / arch)
        monkeypatch.syspath_prepend(str(site))
    packs.installed.cache_clear()
    assert {"sm80", "sm90"} <= set(liger_aot.archs())
    assert pack_for(H200).folder == tmp_path / "site-sm90" / packs.NAMESPACE / "sm90"


def test_the_folder_beside_liger_aot_comes_first(
    copies: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before whatever the import path brings, and each architecture once, with a word about the other."""
    root = copies("sm80", "sm90")
    monkeypatch.delenv(packs.OVERRIDE)
    site, before = tmp_path / "site", tmp_path / "before"
    for folder in (site, before):
        shutil.copytree(root, folder / packs.NAMESPACE)
    shutil.rmtree(site / packs.NAMESPACE / "sm90")
    (before / packs.NAMESPACE / "__init__.py").write_text("raise AssertionError('nothing of it is run')")
    (site / "liger_aot").mkdir()
    assert Path(packs.__file__).parents[1] == Path(liger_aot.__file__).parent
    monkeypatch.setattr(packs, "__file__", str(site / "liger_aot" / "runtime" / "packs.py"))
    monkeypatch.syspath_prepend(str(before))
    packs.installed.cache_clear()
    chosen = [site / packs.NAMESPACE / "sm80", before / packs.NAMESPACE / "sm90"]
    assert [pack.folder for pack in packs.installed_packs() if pack.arch in ("sm80", "sm90")] == chosen
    hidden = before / packs.NAMESPACE / "sm80"
    assert (hidden, chosen[0]) in packs.hidden_folders()
    said = f"sm80: {hidden} is not used: {chosen[0]} comes first"
    assert said in [line for section in examine().sections for line in section.lines]


@pytest.mark.parametrize("entry", ["", ".", "absolute", "link"])
def test_the_current_directory_brings_no_packs(
    copies: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, entry: str
) -> None:
    """``python -c`` and ``python -m`` put it first on the import path."""
    root = copies("sm80")
    monkeypatch.delenv(packs.OVERRIDE)
    here = tmp_path / "here"
    shutil.copytree(root, here / packs.NAMESPACE)
    (tmp_path / "link").symlink_to(here)
    monkeypatch.chdir(here)
    monkeypatch.setattr(
        "sys.path", [{"absolute": str(here), "link": str(tmp_path / "link")}.get(entry, entry)]
    )
    packs.installed.cache_clear()
    assert here / packs.NAMESPACE not in packs.pack_roots() and packs.installed_packs() == ()
    monkeypatch.chdir(tmp_path)
    packs.installed.cache_clear()
    assert bool(packs.installed_packs()) is (entry in ("absolute", "link")), (
        "elsewhere, it is a folder as any"
    )


def test_a_current_directory_that_is_gone(
    copies: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = copies("sm80")
    monkeypatch.delenv(packs.OVERRIDE)
    root.rename(tmp_path / packs.NAMESPACE)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr("sys.path", ["", "\0", str(tmp_path)])
    packs.installed.cache_clear()
    assert [pack.arch for pack in packs.installed_packs()][-1:] == ["sm80"]


def test_one_folder_by_two_names_counts_once(
    copies: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As lib and lib64 of a virtual environment."""
    root = copies("sm80")
    monkeypatch.delenv(packs.OVERRIDE)
    (tmp_path / "lib").mkdir()
    root.rename(tmp_path / "lib" / packs.NAMESPACE)
    (tmp_path / "lib64").symlink_to(tmp_path / "lib")
    monkeypatch.setattr("sys.path", [str(tmp_path / name) for name in ("lib", "lib64")])
    assert packs.pack_folders()[-1] == tmp_path / "lib" / packs.NAMESPACE / "sm80"
    assert packs.hidden_folders() == ()


# ---- GPUs without a pack ----


@pytest.mark.parametrize(
    ("device", "messages"),
    [
        (
            Device("cuda", "7.5", "NVIDIA T4"),
            [
                "NVIDIA T4 (compute capability 7.5)",
                f"liger-aot is built for {', '.join(profile_names())}; add a profile",
            ],
        ),
        (
            Device("hip", "gfx1030", "AMD Radeon RX 6900"),
            ["AMD Radeon RX 6900 (gfx1030)", f"{', '.join(profile_names())}; add a profile"],
        ),
        (
            H200,
            [
                "H200 (compute capability 9.0)",
                '"liger-aot[sm90]==',
                "--no-index",
                "LIGER_AOT_ARCHS=sm90 pip install .",
            ],
        ),
        (Device("hip", "gfx90a", "AMD MI250X"), ["(gfx90a)", '"liger-aot[gfx90a]==', "gfx90a pip install ."]),
        (Device("hip", "8.0", "impossible"), ["no installed pack serves impossible (8.0)"]),
    ],
)
def test_a_gpu_without_a_pack(copies: Callable[..., Path], device: Device, messages: list[str]) -> None:
    copies("sm80")
    with pytest.raises(PackNotFound) as caught:
        pack_for(device)
    for message in [*messages, "installed are sm80 (for 8.0, 8.6, 8.7, 8.9)"]:
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("extras", "target", "wanted"),
    [
        (["sm80", "sm90", "all"], "8.9", "liger-aot[sm80]"),  # the last before it of its major version
        (["sm80", "sm86", "sm89", "all"], "8.7", "liger-aot[sm86]"),
        (["sm80", "sm90", "all"], "10.0", "liger-aot is built for sm80, sm90; add a profile"),
        (["sm100", "all"], "10.3", "liger-aot[sm100]"),
        (None, "8.9", "add a profile to build for another GPU"),  # not installed, as in a source tree
    ],
)
def test_what_is_released(
    copies: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    extras: list[str] | None,
    target: str,
    wanted: str,
) -> None:
    """The extras of liger-aot say which wheels there are: no list of architectures stands in the code."""
    released = None if extras is None else tuple(sorted(set(extras) - {"all"}))
    monkeypatch.setattr(packs, "released_archs", lambda: released)
    copies("gfx942")
    with pytest.raises(PackNotFound, match=re.escape(wanted)):
        pack_for(Device("cuda", target, "a GPU"))


def test_the_extras_are_the_profiles() -> None:
    assert packs.released_archs() == profile_names()


def test_no_pack_at_all(
    install: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "nowhere")
    with pytest.raises(
        PackNotFound, match=r"none is installed in LIGER_AOT_PACKS=.*nowhere\. With the wheels"
    ):
        pack_for(A100)
    monkeypatch.delenv(packs.OVERRIDE)
    monkeypatch.setattr(packs, "NAMESPACE", "liger_aot_packs_of_nobody")
    packs.installed.cache_clear()
    with pytest.raises(PackNotFound, match=r"serves NVIDIA A100 .*: none is installed\. With the wheels"):
        pack_for(A100)


def test_an_unknown_op() -> None:
    for name in ("nothing", "", "__init__", "../loader", "rmsnorm.py"):
        with pytest.raises(UnknownOp, match=r"there are attention_residuals, column_sums, .*rmsnorm"):
            liger_aot.load(name)


# ---- Down to the launcher, on a stand-in for the driver ----


def test_preload_reaches_the_driver(stand_in_gpu: Path, stand_in: StandIn) -> None:
    before = stand_in.live_libraries
    op = ColumnSums()
    op.preload(0)
    binaries = count_binaries(stand_in_gpu, "column_sums")
    assert stand_in.live_libraries == before + binaries
    op.preload(0)
    assert stand_in.live_libraries == before + binaries, "each binary once"


def test_a_damaged_binary_stops_at_itself(stand_in_gpu: Path, stand_in: StandIn) -> None:
    path = stand_in_gpu / "column_sums.bin"
    original = path.read_bytes()
    flip(path, -1)
    op = ColumnSums()
    with pytest.raises(PackDamaged, match=rf"{path.name}: column_sums-\S+: sha256 is"):
        op.preload(0)
    assert stand_in.calls("cuLaunchKernel") == []
    path.write_bytes(original)
    op.preload(0)  # what failed is tried again


def test_an_op_that_the_pack_does_not_carry(stand_in_gpu: Path) -> None:
    with pytest.raises(PackNotFound, match="pack sm80 carries no rmsnorm; it has column_sums"):
        Runtimes("rmsnorm").on(0)


def test_a_binary_that_needs_more_shared_memory_than_there_is(
    stand_in_gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "gpu", lambda index: devices.GPU(index, L4, 58, 16))
    need_shared(stand_in_gpu / "column_sums.json", 1024)
    packs.installed.cache_clear()
    with pytest.raises(PackNotFound, match="needs 1024 bytes of shared memory a block, this GPU gives 16"):
        ColumnSums().preload(0)


def test_no_driver(sm80: Path, native: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing = str(tmp_path / "libcuda.so.1")
    with pytest.raises(DriverNotFound, match="cannot use the cuda driver library"):
        native.Driver("cuda", missing)
    monkeypatch.setattr(devices, "gpu", lambda index: devices.GPU(index, A100, 108, 166912))
    monkeypatch.setattr(devices, "driver", lambda: native.Driver("cuda", missing))
    op = ColumnSums()
    with pytest.raises(DriverNotFound, match="cannot open shared object file"):
        op.preload(0)
    assert torch.equal(op(torch.ones(3, 4)), torch.full((4,), 3.0)), "the CPU's reference needs none"
