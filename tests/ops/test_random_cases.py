"""Random problems of every op against float64: shapes, dtypes, strides, offsets, alignment, settings, which gradients.

All runs have the same; LIGER_AOT_SEED=new draws others, and the report's header says by which seed. What fails is made
as small as it gets and printed as it would stand among the op's cases. An op has LIGER_AOT_RANDOM_CASES problems;
by default as many as CASES says.
"""

from __future__ import annotations

import os

import pytest

from tests.conftest import seed_of_run
from tests.harness.all_ops import entries
from tests.harness.random_cases import check_random

CASES = {"interpreter": 100, "gpu": 1000}

# NumPy's, on the interpreter: ops mean to divide by zero, and to overflow
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:(overflow|underflow|invalid value|divide by zero) encountered"),
]


def check(name: str, ways: tuple[str, ...], kind: str, record: pytest.FixtureRequest) -> None:
    cases = int(os.environ.get("LIGER_AOT_RANDOM_CASES") or CASES[kind])
    check_random(entries()[name], ways, large=kind == "gpu", first_seed=seed_of_run(), cases=cases)
    record.node.user_properties.append(("summary", f"{name}: {cases} random cases, seed {seed_of_run()}"))


@pytest.mark.interpreter
@pytest.mark.parametrize("name", entries())
def test_on_the_interpreter(name: str, request: pytest.FixtureRequest) -> None:
    """Few rows, the tables of two architectures."""
    check(name, ("interpreter sm90", "interpreter gfx942"), "interpreter", request)


@pytest.mark.gpu
@pytest.mark.parametrize("name", entries())
def test_on_a_gpu(name: str, request: pytest.FixtureRequest) -> None:
    check(name, ("gpu",), "gpu", request)
