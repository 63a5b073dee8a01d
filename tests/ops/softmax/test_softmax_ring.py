"""Softmax and log-softmax of rows that one program holds: the kernels that copy ahead, in a ring of a few blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness.op_tests import BF16, DTYPES, FP16, FP32, Case, OpTests, Way
from tests.harness.own_tables import AGAIN, HELD, LENGTHS, LONGER, way_with, with_rings
from tests.ops.softmax import (  # not their classes: those would be collected once more
    test_log_softmax,
    test_softmax,
)
from tests.ops.softmax.softmax_rows import check_special_rows

# On the interpreter, whose NumPy warns of differences to -inf
pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered"),
]

TABLES = """
[kernel.OP_forward]
provenance = "made up for a test"
rows = [
  { form = "long", aligned = false, block = 64, keep = 64, across = true, num_warps = 4 },
  { form = "pipeline", block = 64, in_registers = 2, num_warps = 4, programs_per_multiprocessor = 1, NUMBERS },
  { form = "long", block = 64, keep = 64, num_warps = 4 },
]
[kernel.OP_backward]
provenance = "made up for a test"
rows = [
  { form = "long", aligned = false, block = 64, num_warps = 4 },
  { form = "pipeline", block = 64, in_registers = 2, num_warps = 4, programs_per_multiprocessor = 1, NUMBERS },
  { form = "long", block = 64, num_warps = 4 },
]
"""
# Programs, of which there are two, have one row each, one of them alone, or three and four.
ROWS = (1, 2, 7)


def of_rings(tests: OpTests, folder: Path, numbers: str = HELD, ahead: int = 2) -> Way:
    """The op with rings of these numbers; "long" ones where they don't reach, and where anything is not aligned."""
    tables = with_rings(TABLES.replace("OP", tests.op_class.name), numbers, ahead)
    return way_with(tests.op_class, folder, tables)


@pytest.fixture(
    params=[test_softmax.TestSoftmax, test_log_softmax.TestLogSoftmax], ids=["softmax", "log_softmax"]
)
def tests(request: pytest.FixtureRequest, poisoned: None) -> OpTests:
    made: OpTests = request.param()
    return made


@pytest.mark.parametrize(
    "ahead", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("numbers", [HELD, AGAIN], ids=["held", "again"])
def test_rows_of_every_length(tests: OpTests, numbers: str, ahead: int, tmp_path: Path) -> None:
    way = of_rings(tests, tmp_path / "pack", numbers, ahead)
    for seed, n in enumerate(LENGTHS if numbers is HELD else LENGTHS[::3] + LONGER):
        case = Case((ROWS[(seed + ahead) % 3], n), DTYPES[seed % 3], gap=16 * (n % 3))
        tests.check(way.op, case, way.allowed, seed=seed)
    assert {name.split("-")[1] for name in way.loaded()} == {"pipeline"}


def test_kept_blocks_added_up_in_turns(tests: OpTests, tmp_path: Path) -> None:
    way = of_rings(tests, tmp_path / "pack", HELD + ", interleave = 2")
    for seed, n in enumerate(LENGTHS[::2]):
        tests.check(way.op, Case((ROWS[seed % 3], n), DTYPES[seed % 3]), way.allowed, seed=seed)
    assert {name.split("-")[1] for name in way.loaded()} == {"pipeline"}


@pytest.mark.parametrize(
    "numbers,n,dtype",
    [(HELD, 16, BF16), (HELD, 208, BF16), (HELD, 320, FP16), (HELD, 320, FP32), (AGAIN, 656, BF16)],
)
def test_special_rows(tests: OpTests, numbers: str, n: int, dtype: torch.dtype, tmp_path: Path) -> None:
    way = of_rings(tests, tmp_path / "pack", numbers)
    check_special_rows(tests, way, n, dtype)
    assert {name.split("-")[1] for name in way.loaded()} == {"pipeline"}


def test_temperatures(tmp_path: Path, poisoned: None) -> None:
    tests = test_softmax.TestSoftmax()
    way = of_rings(tests, tmp_path / "pack")
    for dtype in DTYPES:
        for temperature, size in ((0.1, 2.0), (3.0, 2.0), (1e4, 1e4), (1.0, 300.0)):
            case = Case((5, 272), dtype, temperature=temperature, size=size)
            tests.check(way.op, case, way.allowed)


def test_other_rows_take_other_forms(tests: OpTests, tmp_path: Path) -> None:
    way = of_rings(tests, tmp_path / "pack")
    for case in (Case((3, 80), BF16, shift=1), Case((3, 81), BF16), Case((3, 336), BF16)):
        tests.check(way.op, case, way.allowed)
    assert {name.split("-")[1] for name in way.loaded()} == {"long"}
