"""Forms of norms at small blocks: rows of one block, of several, of part of one; more rows than programs, and fewer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.op_tests import BF16, DTYPES, FP16, FP32, Case, OpTests
from tests.harness.own_tables import check_form, way_of
from tests.ops.norms import (
    test_dyt,
    test_fused_add_rmsnorm,
    test_layernorm,
    test_modulated_rmsnorm,
    test_rmsnorm,
)

# On the interpreter, whose NumPy warns of differences to -inf
pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered"),
]

LENGTHS = (16, 64, 80, 208, 256)
GRID = "programs_per_multiprocessor = 1"
SIZES = pytest.mark.parametrize(("blocks", "stages"), [(2, 2), (3, 3), (4, 2)])
IN_FLIGHT = pytest.mark.parametrize("in_flight", [1, 3, 4])


def pipeline(blocks: int, stages: int, more: str = "") -> str:
    """A table's row for rows of that many blocks of 32 pairs."""
    sizes = f"max_n = {64 * blocks}, blocks = {blocks}, block = 32, stages = {stages}, num_warps = 4"
    return f'{{ form = "pipeline", {sizes}, {GRID} {more} }}'


def backward(blocks: int, stages: int) -> str:
    long = f'form = "long", rows = 1, block = 64, num_warps = 4, {GRID}'
    return f"{{ aligned = false, {long} }}, {pipeline(blocks, stages)}, {{ {long} }}"


@SIZES
@pytest.mark.parametrize(
    "tests",
    [
        test_rmsnorm.TestRMSNorm(),
        test_fused_add_rmsnorm.TestFusedAddRMSNorm(),
        test_layernorm.TestLayerNorm(),
    ],
    ids=lambda tests: tests.op_class.name,
)
def test_pipeline(tests: OpTests, blocks: int, stages: int, tmp_path: Path) -> None:
    way = way_of(tests, tmp_path, **{f"{tests.op_class.name}_backward": backward(blocks, stages)})
    n = 64 * blocks
    check_form(
        tests,
        way,
        "pipeline",
        Case((9, n), BF16, weight=BF16),
        Case((3, n - 16), FP16, weight=None),
        Case((17, 16), FP16, weight=FP16, bias=None),
        Case((5, n - 48), FP16, weight=FP16, gap=16),
    )


@SIZES
def test_pipeline_of_modulated_rmsnorm(blocks: int, stages: int, tmp_path: Path) -> None:
    tests = test_modulated_rmsnorm.TestModulatedRMSNorm()
    forward = f"""
      {{ form = "long", aligned = false, wide = true, block = 64, num_warps = 4 }},
      {pipeline(blocks, stages, ", max_part_rows = 3, min_group_rows = 4")},
      {{ form = "long", block = 64, num_warps = 4 }},
    """
    tables = {"forward": forward, "backward": backward(blocks, stages)}
    way = way_of(tests, tmp_path, **{f"modulated_rmsnorm_{k}": t for k, t in tables.items()})
    n = 64 * blocks
    check_form(
        tests,
        way,
        "pipeline",
        Case((2, 9, n), BF16, scale=(2,), weight=BF16),
        Case((2, 4, n - 16), FP16, scale=(2,), vectors=FP32, shifted=False, casting_mode="gemma"),
        Case((3, 5, 16), BF16, scale=(3,), weight=FP32, offset=1.0),
        Case((31, n - 48), FP16, scale=(1,), gap=16),
    )


@pytest.mark.parametrize(("block", "blocks"), [(64, 4), (128, 2), (256, 1)])
def test_persistent_rows_of_fused_add_rmsnorm(block: int, blocks: int, tmp_path: Path) -> None:
    tests = test_fused_add_rmsnorm.TestFusedAddRMSNorm()
    sizes = f'max_n = 256, dtype = ["bf16", "fp16"], block = {block}, blocks = {blocks}, num_warps = 4'
    rows = f"""
      {{ form = "long", aligned = false, block = 64, num_warps = 4 }},
      {{ form = "persistent", {sizes}, {GRID} }},
      {{ form = "long", block = 64, num_warps = 4 }},
    """
    way = way_of(tests, tmp_path, fused_add_rmsnorm_forward=rows)
    check_form(
        tests,
        way,
        "persistent",
        Case((9, 256), BF16, weight=BF16),
        Case((3, 240), FP16, weight=None, casting_mode="none"),
        Case((17, 16), FP16, weight=FP16, casting_mode="gemma", offset=1.0),
        Case((5, 208), BF16, weight=FP32, gap=16),
        Case((1, 64), BF16, weight=BF16),
    )


def test_rows_of_dyt(tmp_path: Path) -> None:
    tests = test_dyt.TestDyT()
    way = way_of(tests, tmp_path, dyt_forward='{ form = "rows", rows = 3, block = 64, num_warps = 4 }')
    cases = [
        Case((1 + 3 * i, n), DTYPES[i % 3], weight=FP32 if i % 2 else DTYPES[i % 3])
        for i, n in enumerate((*LENGTHS, 37))
    ]
    check_form(tests, way, "rows", *cases)


@IN_FLIGHT
def test_prefetched_rows_of_layernorm(in_flight: int, tmp_path: Path) -> None:
    tests = test_layernorm.TestLayerNorm()
    rows = f"""
      {{ form = "long", aligned = false, block = 64, num_warps = 4 }},
      {{ max_n = 256, form = "prefetched", block = 64, blocks = 4, in_flight = {in_flight}, num_warps = 4 }},
      {{ form = "long", block = 64, num_warps = 4 }},
    """
    way = way_of(tests, tmp_path, layernorm_forward=rows)
    cases = [Case((3, n), DTYPES[i % 3], offset=30.0 * i) for i, n in enumerate(LENGTHS)]
    without = [
        Case((2, 80), BF16, weight=None),
        Case((2, 80), FP16, bias=None),
        Case((2, 80), FP16, wide=True),
    ]
    check_form(tests, way, "prefetched", *cases, *without)


@IN_FLIGHT
def test_prefetched_rows_of_modulated_rmsnorm(in_flight: int, tmp_path: Path) -> None:
    tests = test_modulated_rmsnorm.TestModulatedRMSNorm()
    rows = f"""
      {{ form = "long", aligned = false, wide = true, block = 64, num_warps = 4 }},
      {{ max_n = 256, form = "prefetched", block = 64, blocks = 4, in_flight = {in_flight}, num_warps = 4 }},
      {{ form = "long", block = 64, num_warps = 4 }},
    """
    way = way_of(tests, tmp_path, modulated_rmsnorm_forward=rows)
    cases = [
        Case((2, 5, 16), BF16, scale=(2,), weight=BF16),
        Case((2, 5, 128), FP16, scale=(2,), shifted=False, casting_mode="gemma"),
        Case((3, 4, 144), FP32, scale=(3,), weight=FP32, offset=1.0),
        Case((9, 256), BF16, scale=(9,), gap=16),
        Case((3, 4, 80), BF16, scale=(3,), vectors=FP32, weight=FP32),
        Case((3, 4, 272), BF16, scale=(3,)),
    ]
    check_form(tests, way, "prefetched", *cases)
