"""Profiles: the real ones hold together, and every mistake is named with its file, table and row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from liger_aot_build.errors import ProfileError
from liger_aot_build.profile import Profile, code_objects, profile_names, read_profile, row_keys
from tests.liger_aot_build.small_op import TABLE, edited, hardware, write_profile


@pytest.mark.parametrize("arch", profile_names())
def test_real_profiles(arch: str) -> None:
    profile = read_profile(arch)
    assert profile.arch.name == arch
    assert profile.arch.backend == ("hip" if arch.startswith("gfx") else "cuda")
    assert profile.arch.warp_size == (64 if arch.startswith("gfx9") else 32)
    assert profile.arch.shared_per_block <= profile.arch.shared_per_multiprocessor
    assert set(profile.tolerance.roundoffs) == {"bf16", "fp16", "fp32"}


def test_the_four_architectures_are_there() -> None:
    assert {"sm80", "sm90", "gfx90a", "gfx942"} <= set(profile_names())


def test_rows_are_split_into_their_parts(tmp_path: Path) -> None:
    text = f"""{hardware("gfx942")}
[kernel.k]
provenance = " a test "
rows = [
  {{ max_n = 512, form = "tile", dtype = ["bf16", "fp16"], aligned = true, rows = 2, repack = true, num_warps = 4, \
waves_per_eu = 2, programs_per_multiprocessor = 3 }},
]
"""
    table = read_profile("gfx942", write_profile(tmp_path, "gfx942", text)).table("k")
    (found,) = table.rows
    assert table.provenance == "a test"
    assert (found.max_n, found.form) == (512, "tile")
    assert found.when == {"dtype": ("bf16", "fp16"), "aligned": (True,)}
    assert found.constants == {"ROWS": 2, "REPACK": True}
    assert found.options == {"num_warps": 4, "waves_per_eu": 2}
    assert found.host == {"programs_per_multiprocessor": 3}
    assert found.where == "gfx942.toml: [kernel.k] row 1"


def test_the_hash_is_of_the_text(tmp_path: Path) -> None:
    text = hardware("sm90") + TABLE
    one = read_profile("sm90", write_profile(tmp_path / "one", "sm90", text))
    same = read_profile("sm90", write_profile(tmp_path / "same", "sm90", text))
    other = read_profile("sm90", write_profile(tmp_path / "other", "sm90", text + "# a remark\n"))
    assert one.sha256 == same.sha256 != other.sha256


EXTENDING = """
extends = "gfx942"

[arch]
name = "gfx950"
target = "gfx950"
machine = "gfx950"
serves = ["gfx950"]
shared_per_block = 163840

[code_object]
elf_machine = 0x4F
"""


def extending(folder: Path, text: str, base: str = TABLE) -> Profile:
    write_profile(folder, "gfx942", hardware("gfx942") + base)
    return read_profile("gfx950", write_profile(folder, "gfx950", text))


def test_a_profile_that_extends_another(tmp_path: Path) -> None:
    """It has the other's words where it gives none; nothing of the other's was measured on it."""
    measured = TABLE.replace("made up for a test", "NVIDIA H200, yesterday")
    profile = extending(tmp_path, EXTENDING, measured)
    base = read_profile("gfx942", tmp_path)
    assert profile.arch == replace(
        base.arch,
        name="gfx950",
        target="gfx950",
        machine="gfx950",
        serves=("gfx950",),
        shared_per_block=163840,
    )
    assert (profile.toolchain, profile.tolerance) == (base.toolchain, base.tolerance)
    assert profile.table("scale").rows == base.table("scale").rows
    assert profile.table("scale").provenance == "derived, not measured: the gfx942 rows"
    own = '[kernel.scale]\nprovenance = "here"\nrows = [{ form = "long", block = 64, num_warps = 1 }]\n'
    (row,) = extending(tmp_path, EXTENDING + own).table("scale").rows
    assert (row.constants, row.where) == ({"BLOCK": 64}, "gfx950.toml: [kernel.scale] row 1")


def test_the_hash_is_of_both_texts(tmp_path: Path) -> None:
    one = extending(tmp_path, EXTENDING).sha256
    assert extending(tmp_path, EXTENDING + "# a remark\n").sha256 != one
    assert extending(tmp_path, EXTENDING, TABLE + "# a remark\n").sha256 != one
    assert extending(tmp_path, EXTENDING).sha256 == one


CHANGES = """
[kernel.scale]
provenance = "here"
changes = [{ of = { form = "long" }, num_warps = 2, block = 32 }]
"""


def test_changes_of_single_rows(tmp_path: Path) -> None:
    """The rows with the keys in ``of`` get the others; all else is the other profile's."""
    profile = extending(tmp_path, EXTENDING + CHANGES)
    table, before = profile.table("scale"), read_profile("gfx942", tmp_path).table("scale").rows
    assert table.provenance == "here" and len(table.rows) == len(before)
    for row, old in zip(table.rows, before, strict=True):
        if old.form == "long":
            assert row.constants == {**old.constants, "BLOCK": 32} and row.options == {
                **old.options,
                "num_warps": 2,
            }
            assert row.where == "gfx950.toml: [kernel.scale] change 1"
            assert (row.max_n, row.when, row.host) == (old.max_n, old.when, old.host)
        else:
            assert row == old
    assert any(row.form == "long" for row in before) and row_keys(before[0])["form"] == before[0].form


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({'"long"': '"wide"'}, r"\[kernel.scale\] change 1: no row has \{'form': 'wide'\}"),
        (
            {", num_warps = 2, block = 32": ""},
            r"change 1: expected \{ of = \{ keys of rows \}, and what they get \}",
        ),
        ({"of = { form": "form = { of"}, r"change 1: expected \{ of = "),
        ({"num_warps = 2": "num_warps = 3"}, r"change 1: num_warps must be a power of two, found 3"),
        (
            {'[{ of = { form = "long" }, num_warps = 2, block = 32 }]': "[]"},
            "changes must be a list of at least one",
        ),
        ({"provenance": "rows = []\nprovenance"}, "unknown key 'rows'; known are changes, provenance"),
        (
            {"kernel.scale": "kernel.other"},
            r"\[kernel.other\]: changes: there is no table of another profile",
        ),
    ],
)
def test_changes_of_nothing(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        extending(tmp_path, EXTENDING + edited(CHANGES, changes))


def test_tables_that_are_not_taken_over(tmp_path: Path) -> None:
    """Of kernels that the chip can't have: ``without`` names them."""
    without = edited(EXTENDING, {'extends = "gfx942"': 'extends = "gfx942"\nwithout = ["scale"]'})
    assert "scale" not in extending(tmp_path, without).tables
    for wrong in ('"scales"', '"scale", "scale"'):
        with pytest.raises(
            ProfileError, match=r"gfx950.toml: without: 'scales?' is no table that it would take over"
        ):
            extending(tmp_path, edited(without, {'"scale"': wrong}))
    own = '[kernel.scale]\nprovenance = "here"\nrows = [{ form = "long", block = 64, num_warps = 1 }]\n'
    with pytest.raises(ProfileError, match=r"gfx950.toml: without: 'scale' is no table"):
        extending(tmp_path, without + own)
    alone = f'without = ["scale"]\n{hardware("gfx942")}{TABLE}'
    with pytest.raises(ProfileError, match=r"gfx942.toml: without: 'scale' is no table"):
        read_profile("gfx942", write_profile(tmp_path / "alone", "gfx942", alone))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({'"gfx942"': '"gfx950"'}, "gfx950.toml: extends must name another profile, found 'gfx950'"),
        ({'"gfx942"': '"gfx9"'}, "gfx950.toml: extends must name another profile, found 'gfx9'"),
        ({'"gfx942"': "3"}, "gfx950.toml: extends must name another profile, found 3"),
        ({"shared_per_block": "shared"}, r"gfx950.toml: \[arch\]: unknown key 'shared'"),
    ],
)
def test_what_extends_nothing(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        extending(tmp_path, edited(EXTENDING, changes))


def test_a_chain_of_profiles(tmp_path: Path) -> None:
    """Each has what the one before it has; the nearest word counts, and all texts are in the hash."""
    second = extending(tmp_path, EXTENDING)
    third = edited(
        EXTENDING, {'"gfx942"': '"gfx950"', 'name = "gfx950"': 'name = "gfx951"', "163840": "65536"}
    )
    found = read_profile("gfx951", write_profile(tmp_path, "gfx951", third))
    assert found.arch == replace(second.arch, name="gfx951", shared_per_block=65536)
    assert found.tables == second.tables
    write_profile(tmp_path, "gfx942", hardware("gfx942") + TABLE + "# a remark\n")
    assert read_profile("gfx951", tmp_path).sha256 != found.sha256


def test_a_chip_of_a_new_profile_is_read(tmp_path: Path) -> None:
    """What its binaries mean comes from the profile alone; what it does not say is the other's."""
    extending(tmp_path, edited(EXTENDING, {"0x4F": "0x50\nshared_granule = 1280"}))
    found = code_objects(tmp_path)
    assert {number: name for number, (name, _) in found.items()} == {0x4C: "gfx942", 0x50: "gfx950"}
    assert found[0x50][1] == replace(found[0x4C][1], elf_machine=0x50, shared_granule=1280)
    assert found[0x50][1] == read_profile("gfx950", tmp_path).code_object


def test_chips_are_told_apart(tmp_path: Path) -> None:
    extending(tmp_path, edited(EXTENDING, {"0x4F": "0x4C"}))
    with pytest.raises(ProfileError, match=r"gfx950.toml: \[code_object\]: elf_machine 0x4c is gfx942's"):
        code_objects(tmp_path)
    with pytest.raises(ProfileError, match=r"gfx950.toml: \[code_object\]: 'elf_machine' is missing"):
        extending(tmp_path, edited(EXTENDING, {"elf_machine = 0x4F": "shared_granule = 512"}))
    with pytest.raises(ProfileError, match=r"shared_granule must be a positive integer, found 0"):
        extending(tmp_path, edited(EXTENDING, {"0x4F": "0x4F\nshared_granule = 0"}))
    text = hardware("sm80") + "[code_object]\nelf_machine = 1\n[kernel]\n"
    with pytest.raises(
        ProfileError, match=r"sm80.toml: \[code_object\]: it is of AMD chips, the backend is cuda"
    ):
        read_profile("sm80", write_profile(tmp_path, "sm80", text))


def test_a_circle_of_profiles(tmp_path: Path) -> None:
    extending(tmp_path, EXTENDING)
    circle = edited(EXTENDING, {'"gfx942"': '"gfx950"', 'name = "gfx950"': 'name = "gfx942"'})
    message = "gfx950.toml: extends 'gfx942', which extends gfx950 itself: gfx942 > gfx950 > gfx942"
    with pytest.raises(ProfileError, match=message):
        read_profile("gfx942", write_profile(tmp_path, "gfx942", circle))


WAVE_TABLE = """
[kernel.k]
provenance = "derived, not measured: a test"
rows = [
  { max_n = 512, form = "tile", num_warps = 1, waves_per_eu = 2, programs_per_multiprocessor = 3 },
  { form = "tile", block = 64, num_warps = 16 },
]
"""


def test_rows_for_another_warp_size_keep_their_threads(tmp_path: Path) -> None:
    narrow = edited(EXTENDING, {"shared_per_block": "warp_size = 32\nshared_per_block"})
    profile = extending(tmp_path, narrow, WAVE_TABLE)
    base = read_profile("gfx942", tmp_path)
    for before, after in zip(base.table("k").rows, profile.table("k").rows, strict=True):
        assert after.options["num_warps"] * 32 == before.options["num_warps"] * 64
        assert after == replace(before, options={"num_warps": after.options["num_warps"]})
    said = "derived, not measured: a test; the same threads in warps of 32, not 64"
    assert profile.table("k").provenance == said
    wide = edited(narrow, {'"gfx942"': '"gfx950"', 'name = "gfx950"': 'name = "gfx951"', "= 32": "= 128"})
    again = read_profile("gfx951", write_profile(tmp_path, "gfx951", wide)).table("k").rows
    assert [row.options["num_warps"] for row in again] == [1, 8], "one warp at least"


def test_more_threads_than_another_chip_takes(tmp_path: Path) -> None:
    small = edited(
        EXTENDING, {"shared_per_block": "warp_size = 32\nthreads_per_block = 512\nshared_per_block"}
    )
    message = (
        r"gfx942.toml: \[kernel.k\] row 2: 1024 threads, gfx950 takes 512 a block: give it a table of its own"
    )
    with pytest.raises(ProfileError, match=message):
        extending(tmp_path, small, WAVE_TABLE)


# what is wrong: (what to replace in the text, the message)
ROW = "max_n = 512, form = "
MISTAKES = {
    "alignment": ({ROW: f'aligned = "none", {ROW}'}, r'aligned must be true, false or "any", found \'none\''),
    "no TOML": ({"[arch]": "[arch"}, r"gfx942.toml: .*line"),
    "unknown table": ({"[tolerance]": "[extra]\n[tolerance]"}, "gfx942.toml: unknown key 'extra'"),
    "missing table": ({"[kernel.scale]": "[tolerance.scale]"}, "gfx942.toml: 'kernel' is missing"),
    "arch is no table": ({"[arch]": "arch = 1\n[tolerances]"}, "gfx942.toml: unknown key 'tolerances'"),
    "another name": ({'name = "gfx942"': 'name = "gfx940"'}, r"gfx942.toml: \[arch\]: name is 'gfx940'"),
    "unknown fact": (
        {"warp_size": "wave_width = 64\nwarp_size"},
        r"gfx942.toml: \[arch\]: unknown key 'wave_width'; known are .*warp_size",
    ),
    "missing fact": ({"warp_size = 64\n": ""}, r"gfx942.toml: \[arch\]: 'warp_size' is missing"),
    "fact of a wrong type": (
        {"warp_size = 64": 'warp_size = "64"'},
        r"gfx942.toml: \[arch\]: warp_size must be a positive integer, found '64'",
    ),
    "fact is zero": (
        {"threads_per_block = 1024": "threads_per_block = 0"},
        r"gfx942.toml: \[arch\]: threads_per_block must be a positive integer, found 0",
    ),
    "fact is neither true nor false": (
        {"pdl = false": "pdl = 0"},
        r"gfx942.toml: \[arch\]: pdl must be true or false, found 0",
    ),
    "machine is no string": (
        {'machine = "gfx942"': "machine = 942"},
        r"gfx942.toml: \[arch\]: machine must be a string, found 942",
    ),
    "unknown backend": (
        {'backend = "hip"': 'backend = "rocm"'},
        r"gfx942.toml: \[arch\]: backend must be one of cuda, hip, found 'rocm'",
    ),
    "serves nothing": (
        {'serves = ["gfx942"]': "serves = []"},
        r"gfx942.toml: \[arch\]: serves must be a list of strings",
    ),
    "serves no list": (
        {'serves = ["gfx942"]': 'serves = "gfx942"'},
        r"gfx942.toml: \[arch\]: serves must be a list of strings",
    ),
    "no Triton": ({'triton = "3.6.0"\n': ""}, r"gfx942.toml: \[toolchain\]: 'triton' is missing"),
    "Triton is no string": (
        {'triton = "3.6.0"': "triton = 3.6"},
        r"gfx942.toml: \[toolchain\]: triton must be a string, found 3.6",
    ),
    "options are no table": (
        {"options = { enable_fp_fusion = true }": "options = 3"},
        r"gfx942.toml: \[toolchain\]: options: expected a table, found 3",
    ),
    "no reason for the tolerance": (
        {"why =": "because ="},
        r"gfx942.toml: \[tolerance\]: unknown key 'because'",
    ),
    "tolerance of an unknown dtype": (
        {"bf16 = ": "bf17 = "},
        r"gfx942.toml: \[tolerance\]: unknown key 'bf17'",
    ),
    "negative tolerance": (
        {"bf16 = ": "bf16 = -"},
        r"gfx942.toml: \[tolerance\]: bf16 must be a positive float, found -1.05",
    ),
    "tolerance of an integer": (
        {"fp32 = 32.0": "fp32 = 32"},
        r"gfx942.toml: \[tolerance\]: fp32 must be a positive float, found 32",
    ),
    "a dtype without tolerance": ({"fp32 = 32.0\n": ""}, r"gfx942.toml: \[tolerance\]: 'fp32' is missing"),
    "kernel is no table": (
        {"[kernel.scale]": "[kernel]\nscale = 1\n[kernel.other]"},
        r"\[kernel.scale\]: expected a",
    ),
    "no provenance": (
        {'provenance = "made up for a test"\n': ""},
        r"gfx942.toml: \[kernel.scale\]: 'provenance' is missing",
    ),
    "empty provenance": (
        {"made up for a test": " "},
        r"gfx942.toml: \[kernel.scale\]: provenance must say where the numbers were measured",
    ),
    "unknown key of a table": (
        {"rows = [": "notes = 1\nrows = ["},
        r"gfx942.toml: \[kernel.scale\]: unknown key 'notes'",
    ),
    "no row": (
        {"rows = [": "rows = []\n[kernel.other]\nrows = ["},
        r"\[kernel.scale\]: rows must be a list of at",
    ),
    "a row is no table": (
        {"rows = [": "rows = [ 7,"},
        r"gfx942.toml: \[kernel.scale\] row 1: expected a table",
    ),
    "no form": ({'form = "long", ': ""}, r"gfx942.toml: \[kernel.scale\] row 4: 'form' is missing"),
    "no warps": (
        {"rows = 2, block = 512, num_warps = 4": "rows = 2, block = 512"},
        r"gfx942.toml: \[kernel.scale\] row 1: 'num_warps' is missing",
    ),
    "three warps": (
        {"stages = 2, num_warps = 8": "stages = 2, num_warps = 3"},
        r"gfx942.toml: \[kernel.scale\] row 2: num_warps must be a power of two, found 3",
    ),
    "32 waves of 64 lanes": (
        {"block = 1024, num_warps = 8": "block = 1024, num_warps = 32"},
        r"gfx942.toml: \[kernel.scale\] row 4: 32 warps of 64 lanes are 2048 threads; gfx942 takes 1024 a block",
    ),
    "warps as text": (
        {"block = 512, num_warps = 4": 'block = 512, num_warps = "4"'},
        r"gfx942.toml: \[kernel.scale\] row 1: num_warps must be a positive integer, found '4'",
    ),
    "no programs": (
        {"programs_per_multiprocessor = 2": "programs_per_multiprocessor = 0"},
        r"gfx942.toml: \[kernel.scale\] row 2: programs_per_multiprocessor must be a positive integer, found 0",
    ),
    "most_rows is none": (
        {ROW: "most_rows = 0, max_n = 512, form = "},
        r"gfx942.toml: \[kernel.scale\] row 1: most_rows must be a positive integer, found 0",
    ),
    "max_n is a bool": (
        {ROW: "max_n = true, form = "},
        r"gfx942.toml: \[kernel.scale\] row 1: max_n must be a positive integer, found True",
    ),
    "max_n is negative": (
        {ROW: "max_n = -1, form = "},
        r"gfx942.toml: \[kernel.scale\] row 1: max_n must be a positive integer, found -1",
    ),
    "block is a float": (
        {"block = 512": "block = 512.0"},
        r"gfx942.toml: \[kernel.scale\] row 1: block: unexpected value 512.0",
    ),
    "block is negative": (
        {"block = 512": "block = -512"},
        r"gfx942.toml: \[kernel.scale\] row 1: block: unexpected value -512",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name: str, tmp_path: Path) -> None:
    changes, message = MISTAKES[name]
    write_profile(tmp_path, "gfx942", edited(hardware("gfx942") + TABLE, changes))
    with pytest.raises(ProfileError, match=message):
        read_profile("gfx942", tmp_path)


def test_the_text_without_a_mistake_is_read(tmp_path: Path) -> None:
    """Else the tests above could pass for another reason."""
    write_profile(tmp_path, "gfx942", hardware("gfx942") + TABLE)
    assert len(read_profile("gfx942", tmp_path).table("scale").rows) == 4


def test_unknown_names(tmp_path: Path) -> None:
    write_profile(tmp_path, "sm90", hardware("sm90") + TABLE)
    with pytest.raises(ProfileError, match="no architecture 'sm91': there are sm90"):
        read_profile("sm91", tmp_path)
    with pytest.raises(ProfileError, match=r"sm90.toml: table \[kernel.softmax\] is missing"):
        read_profile("sm90", tmp_path).table("softmax")
