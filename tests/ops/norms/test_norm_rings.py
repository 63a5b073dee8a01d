"""Norms whose rows pass through shared memory, at small blocks: rows of one piece, of several, of part of one; more
rows than a program has places for, and fewer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.op_tests import BF16, FP16, FP32, Case, OpTests
from tests.harness.own_tables import check_form as check
from tests.harness.own_tables import way_of
from tests.ops.norms import rmsnorm_cases, test_fused_add_rmsnorm, test_layernorm, test_modulated_rmsnorm
from tests.ops.norms.test_rmsnorm import RMSNorm

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered"),
]

GRID = "programs_per_multiprocessor = 1"
SIZES = pytest.mark.parametrize(("pieces", "stages"), [(2, 2), (3, 3), (4, 2)])


class OfRMSNorm(OpTests):
    op_class = RMSNorm


def rings(pieces: int, stages: int, more: str = "") -> str:
    """A table's row for rows of that many pieces of 64 columns."""
    sizes = f"max_n = {64 * pieces}, pieces = {pieces}, block = 32, stages = {stages}, num_warps = 4"
    return f'{{ form = "pipeline", {sizes}, {GRID} {more} }}'


def backward(pieces: int, stages: int) -> str:
    long = f'form = "long", rows = 1, block = 64, num_warps = 4, {GRID}'
    return f"{{ aligned = false, {long} }}, {rings(pieces, stages)}, {{ {long} }}"


@SIZES
def test_of_squares(pieces: int, stages: int, tmp_path: Path) -> None:
    way = way_of(OfRMSNorm(), tmp_path, rmsnorm_backward=backward(pieces, stages))
    n = 64 * pieces
    cases = (
        rmsnorm_cases.Case(9, n, BF16, BF16, offset=1.0),
        rmsnorm_cases.Case(3, n - 16, FP16, FP32),
        rmsnorm_cases.Case(17, 16, BF16),
        rmsnorm_cases.Case(5, n - 48, FP16, FP16, gap=16),
    )
    for seed, case in enumerate(cases):
        rmsnorm_cases.check(way.op, case, way.allowed, seed)
    assert {name for name in way.loaded() if "backward-pipeline-" in name}


@SIZES
@pytest.mark.parametrize(
    "tests", [test_fused_add_rmsnorm.TestFusedAddRMSNorm(), test_layernorm.TestLayerNorm()]
)
def test_of_sums_and_means(tests: OpTests, pieces: int, stages: int, tmp_path: Path) -> None:
    way = way_of(tests, tmp_path, **{f"{tests.op_class.name}_backward": backward(pieces, stages)})
    n = 64 * pieces
    check(
        tests,
        way,
        "pipeline",
        Case((9, n), BF16, weight=BF16),
        Case((3, n - 16), FP16, weight=None),
        Case((17, 16), FP16, weight=FP16, bias=None),
        Case((5, n - 48), FP16, weight=FP16, gap=16),
    )


@SIZES
def test_modulated(pieces: int, stages: int, tmp_path: Path) -> None:
    tests = test_modulated_rmsnorm.TestModulatedRMSNorm()
    forward = f"""
      {{ form = "any", aligned = false, block = 64, num_warps = 4 }},
      {rings(pieces, stages, ", run = 3")},
      {{ form = "long", block = 64, num_warps = 4 }},
    """
    tables = {"forward": forward, "backward": backward(pieces, stages)}
    way = way_of(tests, tmp_path, **{f"modulated_rmsnorm_{k}": t for k, t in tables.items()})
    n = 64 * pieces
    check(
        tests,
        way,
        "pipeline",
        Case((2, 9, n), BF16, scale=(2,), weight=BF16),
        Case((2, 4, n - 16), FP16, scale=(2,), vectors=FP32, shifted=False, casting_mode="gemma"),
        Case((3, 5, 16), BF16, scale=(3,), weight=FP32, offset=1.0),
        Case((31, n - 48), FP16, scale=(1,), gap=16),
    )
