"""What the tuner writes into a profile: winners take the place of the rows they beat, all else stays as it was."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.tuning.rows_text import Winner, write_rows
from liger_aot_build.errors import ProfileError
from liger_aot_build.paths import PROFILES
from liger_aot_build.profile import read_profile

PROFILE = """# a chip

[kernel.other]
provenance = "elsewhere"
rows = [{ form = "tile", block = 1, num_warps = 1 }]

[kernel.norm]
provenance = "derived"
rows = [
  { max_n = 64, form = "tile", aligned = false, block = 64, num_warps = 1 },
  { max_n = 64, form = "tile", block = 64, num_warps = 2 }, # old
  { max_n = 128, form = "tile", dtype = "fp32", block = 128, num_warps = 2 }, # stays
  { form = "long", block = 64, num_warps = 4 },
]

[kernel.last]
rows = []
"""


def written(tmp_path: Path, *winners: Winner) -> list[str]:
    path = tmp_path / "chip.toml"
    path.write_text(PROFILE)
    write_rows(path, "norm", winners, "measured")
    text = path.read_text()
    before, _, rest = text.partition("[kernel.norm]\n")
    assert PROFILE.startswith(before) and rest.endswith("[kernel.last]\nrows = []\n")
    assert '"""\nmeasured"""' in rest
    return [line.strip() for line in rest.splitlines() if line.startswith("  {")]


def test_a_winner_of_all_dtypes_replaces_the_row(tmp_path: Path) -> None:
    winner = Winner(
        64, {"dtype": ("bf16", "fp16", "fp32")}, {"form": "row", "block": 64, "num_warps": 8}, "0.99 at 64"
    )
    rows = written(tmp_path, winner)
    assert rows == [
        '{ max_n = 64, form = "tile", aligned = false, block = 64, num_warps = 1 },',
        '{ max_n = 64, form = "row", dtype = ["bf16", "fp16", "fp32"], block = 64, num_warps = 8 }, # 0.99 at 64',
        '{ max_n = 128, form = "tile", dtype = "fp32", block = 128, num_warps = 2 }, # stays',
        '{ form = "long", block = 64, num_warps = 4 },',
    ]


def test_a_row_keeps_the_dtypes_that_no_winner_holds(tmp_path: Path) -> None:
    rows = written(
        tmp_path,
        Winner(64, {"dtype": ("bf16", "fp16")}, {"form": "row", "exact": True, "num_warps": 8}, "0.9"),
    )
    assert rows[1:3] == [
        '{ max_n = 64, form = "row", dtype = ["bf16", "fp16"], exact = true, num_warps = 8 }, # 0.9',
        '{ max_n = 64, form = "tile", block = 64, num_warps = 2, dtype = ["fp32"] },',
    ]


def test_a_new_bound_is_put_in_order(tmp_path: Path) -> None:
    rows = written(
        tmp_path,
        Winner(96, {"dtype": ("bf16",)}, {"form": "row", "num_warps": 8}, "0.9"),
        Winner(None, {"dtype": ("bf16",)}, {"form": "x"}, "1"),
    )
    assert [row.split(",")[0] for row in rows] == [
        "{ max_n = 64", "{ max_n = 64", "{ max_n = 96", "{ max_n = 128", '{ form = "x"', '{ form = "long"',
    ]  # fmt: skip


def test_rows_of_other_axes_stay(tmp_path: Path) -> None:
    """A winner for one value of an axis replaces the row for that value, and stands before a row for all."""
    path = tmp_path / "chip.toml"
    text = "\n".join(f'  {{ dim = {dim}, mask = "full", form = "x", num_warps = 4 }},' for dim in (64, 96))
    path.write_text(
        f'[kernel.norm]\nprovenance = "p"\nrows = [\n{text}\n  {{ form = "all", num_warps = 4 }},\n]\n'
    )
    when = {"dtype": ("bf16", "fp16", "fp32"), "dim": (96,), "mask": ("full",)}
    write_rows(path, "norm", [Winner(None, when, {"form": "y", "num_warps": 8}, "0.9")], "measured")
    assert [line.strip() for line in path.read_text().splitlines() if line.startswith("  {")] == [
        '{ form = "y", dtype = ["bf16", "fp16", "fp32"], dim = 96, mask = "full", num_warps = 8 }, # 0.9',
        '{ dim = 64, mask = "full", form = "x", num_warps = 4 },',
        '{ form = "all", num_warps = 4 },',
    ]


def test_a_table_of_another_profile(tmp_path: Path) -> None:
    """A profile that extends another gets a table of its own; the rows that nobody measured are those that it had."""
    for name in ("sm80", "sm89"):
        shutil.copy(PROFILES / f"{name}.toml", tmp_path)
    path, before = tmp_path / "sm89.toml", read_profile("sm89", tmp_path)
    other = (tmp_path / "sm80.toml").read_text()
    winner = Winner(None, {"dtype": ("bf16",)}, {"form": "flat", "block": 4096, "num_warps": 8}, "0.99 at 64")
    kernels = (
        "relu_squared_forward",
        "groupnorm_forward",
        "mhc_coefficients_project",
        "flash_decoding_combine",
    )
    for kernel in kernels:
        write_rows(path, kernel, [winner] if kernel == kernels[0] else (), "measured")
    after = read_profile("sm89", tmp_path)
    assert (tmp_path / "sm80.toml").read_text() == other
    for kernel in kernels:
        table = before.table(kernel)
        assert after.table(kernel).provenance == "measured"
        rows = [replace(row, where="") for row in after.table(kernel).rows]
        kept = [replace(row, where="") for row in table.rows]
        if kernel == kernels[0]:
            assert rows[0].constants == {"BLOCK": 4096} and rows[0].when == {"dtype": ("bf16",)}
            assert [row.constants for row in rows[1:]] == [row.constants for row in kept]
        else:
            assert sorted(map(repr, rows)) == sorted(map(repr, kept)), kernel


def test_a_missing_table(tmp_path: Path) -> None:
    path = tmp_path / "chip.toml"
    path.write_text(PROFILE)
    with pytest.raises(ProfileError, match=r"chip.toml: table \[kernel.none\] is missing"):
        write_rows(path, "none", (), "measured")
    with pytest.raises(ProfileError, match="rows must stand one a line"):
        write_rows(path, "other", (), "measured")
    assert path.read_text() == PROFILE


def test_rows_for_few_rows_stand_first(tmp_path: Path) -> None:
    """Beside the row for any number of rows with the same bound, which stays; a later winner replaces its own."""
    all_of = {"dtype": ("bf16", "fp16", "fp32")}

    def winner(most_rows: int, warps: int) -> Winner:
        numbers = {"form": "row", "block": 64, "num_warps": warps}
        return Winner(64, all_of, numbers, "0.9", most_rows)

    rows = written(tmp_path, winner(256, 4), winner(16, 1))
    assert [row.split(", form")[0] for row in rows[:2]] == [
        "{ most_rows = 16, max_n = 64",
        "{ most_rows = 256, max_n = 64",
    ]
    assert '{ max_n = 64, form = "tile", block = 64, num_warps = 2 },' in [r.partition(" #")[0] for r in rows]
    write_rows(tmp_path / "chip.toml", "norm", [winner(16, 2)], "measured")
    text = (tmp_path / "chip.toml").read_text()
    assert (
        text.count("most_rows = 16") == text.count("most_rows = 256") == 1
        and "num_warps = 2 }, # 0.9" in text
    )
