"""Softmax and log-softmax of long rows: the form that copies ahead through shared memory, at small blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness.op_tests import BF16, DTYPES, FP16, FP32, Case, OpTests, Way
from tests.harness.own_tables import LENGTHS, LONGER, REREAD, WHOLE, way_of, with_pipeline
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

TABLE = """
  { form = "long", aligned = false, block = 64, num_warps = 4 },
  { form = "pipeline", block = 64, num_warps = 4, programs_per_multiprocessor = 1, NUMBERS },
  { form = "long", block = 64, num_warps = 4 },
"""
# Programs, of which there are two, have one row each, one of them alone, or three and four.
ROWS = (1, 2, 7)
BOTH = pytest.mark.parametrize("numbers", [WHOLE, REREAD], ids=["whole", "reread"])


def piped(tests: OpTests, folder: Path, numbers: str = WHOLE, prefetch: int = 2) -> Way:
    """The op with pipelines of these numbers; "long" where they don't reach, and where anything is not aligned. The
    backward's is for rows of any length; log-softmax has none."""
    table, name = with_pipeline(TABLE, numbers, prefetch), tests.op_class.name
    tables = {f"{name}_forward": table.replace("block = 64, num", "block = 64, unaligned = true, num", 1)}
    if name == "softmax":
        for old, new in (("stages = 3", "stages = 4"), (", whole = false", ""), (", interleave = 2", "")):
            table = table.replace(old, new)
        tables["softmax_backward"] = table
    return way_of(tests, folder, **tables)


def forms(way: Way) -> set[str]:
    """Those that were used, of the kernels that have a pipeline."""
    mine = ("softmax_", "log_softmax_forward")
    return {name.split("-")[1] for name in way.loaded() if name.startswith(mine)}


@pytest.fixture(
    params=[test_softmax.TestSoftmax, test_log_softmax.TestLogSoftmax], ids=["softmax", "log_softmax"]
)
def tests(request: pytest.FixtureRequest, poisoned: None) -> OpTests:
    made: OpTests = request.param()
    return made


@pytest.mark.parametrize(
    "prefetch", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
@BOTH
def test_rows_of_every_length(tests: OpTests, numbers: str, prefetch: int, tmp_path: Path) -> None:
    way = piped(tests, tmp_path, numbers, prefetch)
    for seed, n in enumerate(LENGTHS if numbers is WHOLE else LENGTHS[::3] + LONGER):
        case = Case((ROWS[(seed + prefetch) % 3], n), DTYPES[seed % 3], gap=16 * (n % 3))
        tests.check(way.op, case, way.allowed, seed=seed)
    assert forms(way) == {"pipeline"}


@BOTH
def test_interleaved_blocks(numbers: str, tmp_path: Path, poisoned: None) -> None:
    """Blocks in registers, accumulated in parts between those in shared memory."""
    tests = test_softmax.TestSoftmax()
    way = piped(tests, tmp_path, numbers + ", interleave = 2")
    for seed, n in enumerate(LENGTHS[::2] if numbers is WHOLE else LONGER[::2]):
        tests.check(way.op, Case((ROWS[seed % 3], n), DTYPES[seed % 3]), way.allowed, seed=seed)
    assert forms(way) == {"pipeline"}


@pytest.mark.parametrize(
    "numbers,n,dtype",
    [(WHOLE, 16, BF16), (WHOLE, 208, BF16), (WHOLE, 320, FP16), (WHOLE, 320, FP32), (REREAD, 656, BF16)],
)
def test_special_rows(tests: OpTests, numbers: str, n: int, dtype: torch.dtype, tmp_path: Path) -> None:
    way = piped(tests, tmp_path, numbers)
    check_special_rows(tests, way, n, dtype)
    assert forms(way) == {"pipeline"}


def test_temperatures(tmp_path: Path, poisoned: None) -> None:
    tests = test_softmax.TestSoftmax()
    way = piped(tests, tmp_path)
    for dtype in DTYPES:
        for temperature, size in ((0.1, 2.0), (3.0, 2.0), (1e4, 1e4), (1.0, 300.0)):
            case = Case((5, 272), dtype, temperature=temperature, size=size)
            tests.check(way.op, case, way.allowed)


def test_other_rows_take_other_forms(tests: OpTests, tmp_path: Path) -> None:
    way = piped(tests, tmp_path)
    for case in (Case((3, 80), BF16, shift=1), Case((3, 81), BF16), Case((3, 336), BF16)):
        tests.check(way.op, case, way.allowed)
    assert forms(way) == {"long"}
