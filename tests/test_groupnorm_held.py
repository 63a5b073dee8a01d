"""GroupNorm of channels-last images that programs hold, a part each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import test_groupnorm
from tests.op_tests import BF16, FP16, Case
from tests.own_tables import way_with

pytestmark = pytest.mark.interpreter

HELD = (
    'max_n = 1000000, form = "held", dtype = ["bf16", "fp16"], split = 8, lines = 32, slots = 9, ahead = 2, '
    "talkers = 4, registers = 24, num_warps = 4, programs_per_multiprocessor = 3"
)
LAST = f"""
rows = [
  {{ aligned = false, form = "last", rows = 4, block = 64, groups = 2, num_warps = 4 }},
  {{ {HELD}, groups = 4, members = 64 }},
  {{ form = "last", rows = 4, block = 64, groups = 2, num_warps = 4 }},
]
"""
TABLES = f"""
[kernel.groupnorm_forward]
provenance = "made up for a test"
rows = [
  {{ aligned = false, form = "any", block = 64, num_warps = 4 }},
  {{ {HELD} }},
  {{ form = "first", block = 64, num_warps = 4 }},
]
[kernel.groupnorm_forward_last]
provenance = "made up for a test"
{LAST}
[kernel.groupnorm_backward_last]
provenance = "made up for a test"
{LAST}
"""

CASES = (
    Case((1, 16, 4, 4), BF16, channels_last=True),
    Case((1, 32, 25, 4), FP16, channels_last=True, num_groups=4, wide=True),
    Case((5, 32, 10, 3), BF16, channels_last=True, num_groups=4, offset=300.0),
    Case((7, 48, 10, 4), FP16, channels_last=True, num_groups=4, weight=None),
    Case((3, 80, 11, 2), BF16, channels_last=True, num_groups=2, bias=None, wide=True),
    Case((13, 16, 3, 3), FP16, channels_last=True, num_groups=4),
    Case((2, 256, 17, 1), BF16, channels_last=True, num_groups=1),
    Case((1, 16, 1, 1), BF16, channels_last=True),
    Case((1, 2, 8, 4), BF16),
    Case((3, 6, 16, 10), FP16, wide=True),
    Case((5, 4, 16, 20), BF16, offset=300.0, weight=None),
    Case((1, 3, 16, 25), FP16, num_groups=1, bias=None),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_held(case: Case, poisoned: None, tmp_path: Path) -> None:
    tests = test_groupnorm.TestGroupNorm()
    way = way_with(tests.op_class, tmp_path / "pack", TABLES)
    tests.check(way.op, case, way.allowed)
    ways = ("forward_last", "backward_last") if case.get("channels_last") else ("forward",)
    for kernel in ways:
        assert any(name.startswith(f"groupnorm_{kernel}-held-") for name in way.loaded()), kernel
