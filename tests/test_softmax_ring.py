"""Softmax and log-softmax of rows that one program holds: the kernels that copy ahead, in a ring of a few blocks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from build_tools.declaration import read_declaration
from build_tools.plan import plan
from build_tools.profile import read_profile
from liger_aot.manifest import Pack
from tests import test_log_softmax, test_softmax  # not their classes: those would be collected once more
from tests.conftest import built_pack
from tests.drivers import InterpreterDriver, bound_op
from tests.op_tests import BF16, DTYPES, FP16, FP32, Case, OpTests, Way
from tests.pack_edits import add_kernels, edit
from tests.small_op import hardware, write_profile
from tests.softmax_rows import check_special_rows

# On the interpreter, whose NumPy warns of differences to -inf
pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered"),
]

RING = 'form = "ring", block = 64, slots = 3, ahead = AHEAD, kept = 2'
TABLES = f"""
[kernel.OP_forward]
provenance = "made up for a test"
rows = [
  {{ form = "long", aligned = false, block = 64, keep = 64, across = true, num_warps = 4 }},
  {{ max_n = 320, {RING}, num_warps = 4, programs_per_multiprocessor = 1 }},
  {{ form = "long", block = 64, keep = 64, num_warps = 4 }},
]
[kernel.OP_backward]
provenance = "made up for a test"
rows = [
  {{ form = "long", aligned = false, block = 64, num_warps = 4 }},
  {{ max_n = 320, {RING}, num_warps = 4, programs_per_multiprocessor = 1 }},
  {{ form = "long", block = 64, num_warps = 4 }},
]
"""
# No block in the ring, one, as many as it has slots; last blocks with one line, and whole ones. Of two programs, with
# rows enough that each has none left over, or one.
LENGTHS = (16, 64, 80, 128, 144, 192, 208, 256, 304, 320)
ROWS = (1, 2, 7)


def of_rings(tests: OpTests, folder: Path, ahead: int) -> Way:
    """The op with rows of up to 320 columns in rings; "long" ones beyond, and where anything is not aligned."""
    built, name = built_pack("sm90"), tests.op_class.name
    folder.mkdir()
    for file in ("manifest.json", f"{name}.json"):
        shutil.copy(built.folder / file, folder / file)
    text = hardware("sm90") + TABLES.replace("OP", name).replace("AHEAD", str(ahead))
    profile = read_profile("sm90", write_profile(folder / "profiles", "sm90", text))
    edit(folder / f"{name}.json", lambda document: document["kernels"].clear())
    add_kernels(folder / f"{name}.json", plan(read_declaration(name), profile))
    allowed = {**built.tolerance, "bf16": built.tolerance["bf16"] * 2}  # as in op_tests.made
    return Way(bound_op(tests.op_class, Pack(folder), InterpreterDriver), "cpu", allowed)


@pytest.fixture(
    params=[test_softmax.TestSoftmax, test_log_softmax.TestLogSoftmax], ids=["softmax", "log_softmax"]
)
def tests(request: pytest.FixtureRequest, poisoned: None) -> OpTests:
    made: OpTests = request.param()
    return made


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_rows_of_every_length(tests: OpTests, ahead: int, tmp_path: Path) -> None:
    way = of_rings(tests, tmp_path / "pack", ahead)
    for seed, n in enumerate(LENGTHS):
        dtype = DTYPES[seed % 3]
        tests.check(
            way.op, Case((ROWS[(seed + ahead) % 3], n), dtype, gap=16 * (n % 3)), way.allowed, seed=seed
        )
    assert {name.split("-")[1] for name in way.loaded()} == {"ring"}


@pytest.mark.parametrize("n,dtype", [(16, BF16), (208, BF16), (320, FP16), (320, FP32)])
def test_special_rows(tests: OpTests, n: int, dtype: torch.dtype, tmp_path: Path) -> None:
    way = of_rings(tests, tmp_path / "pack", 2)
    check_special_rows(tests, way, n, dtype)
    assert {name.split("-")[1] for name in way.loaded()} == {"ring"}


def test_temperatures(tmp_path: Path, poisoned: None) -> None:
    tests = test_softmax.TestSoftmax()
    way = of_rings(tests, tmp_path / "pack", 2)
    for dtype in DTYPES:
        for temperature, size in ((0.1, 2.0), (3.0, 2.0), (1e4, 1e4), (1.0, 300.0)):
            case = Case((5, 272), dtype, temperature=temperature, size=size)
            tests.check(way.op, case, way.allowed)


def test_other_rows_take_other_forms(tests: OpTests, tmp_path: Path) -> None:
    way = of_rings(tests, tmp_path / "pack", 2)
    for case in (Case((3, 80), BF16, shift=1), Case((3, 81), BF16), Case((3, 336), BF16)):
        tests.check(way.op, case, way.allowed)
    assert {name.split("-")[1] for name in way.loaded()} == {"long"}
