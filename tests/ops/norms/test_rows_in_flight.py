"""Forms whose loads are all under way before the first value is used, at small blocks: rows of one block, of several,
of part of one; more rows than a program takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.op_tests import BF16, DTYPES, FP16, FP32, Case
from tests.harness.own_tables import check_form, way_of
from tests.ops.norms import test_dyt, test_layernorm, test_modulated_rmsnorm

# On the interpreter, whose NumPy warns of differences to -inf
pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered"),
]

LENGTHS = (16, 64, 80, 208, 256)


def test_rows_of_dyt(tmp_path: Path) -> None:
    tests = test_dyt.TestDyT()
    way = way_of(tests, tmp_path, dyt_forward='{ form = "rows", rows = 3, block = 64, num_warps = 4 }')
    cases = [
        Case((1 + 3 * i, n), DTYPES[i % 3], weight=FP32 if i % 2 else DTYPES[i % 3])
        for i, n in enumerate((*LENGTHS, 37))
    ]
    check_form(tests, way, "rows", *cases)


@pytest.mark.parametrize("together", [1, 3, 4])
def test_held_rows_of_layernorm(together: int, tmp_path: Path) -> None:
    tests = test_layernorm.TestLayerNorm()
    rows = f"""
      {{ form = "long", aligned = false, block = 64, num_warps = 4 }},
      {{ max_n = 256, form = "held", block = 64, blocks = 4, together = {together}, num_warps = 4 }},
      {{ form = "long", block = 64, num_warps = 4 }},
    """
    way = way_of(tests, tmp_path, layernorm_forward=rows)
    cases = [Case((3, n), DTYPES[i % 3], offset=30.0 * i) for i, n in enumerate(LENGTHS)]
    without = [
        Case((2, 80), BF16, weight=None),
        Case((2, 80), FP16, bias=None),
        Case((2, 80), FP16, wide=True),
    ]
    check_form(tests, way, "held", *cases, *without)


@pytest.mark.parametrize("together", [1, 3, 4])
def test_held_rows_of_modulated_rmsnorm(together: int, tmp_path: Path) -> None:
    tests = test_modulated_rmsnorm.TestModulatedRMSNorm()
    rows = f"""
      {{ form = "any", aligned = false, block = 64, num_warps = 4 }},
      {{ max_n = 256, form = "held", block = 64, blocks = 4, together = {together}, num_warps = 4 }},
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
    check_form(tests, way, "held", *cases)
