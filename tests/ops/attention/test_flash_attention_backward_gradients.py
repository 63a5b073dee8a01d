"""Gradients of attention's backward by warp groups against float64: the device code as Python, the host's launches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import liger_aot
from liger_aot.ops.attention.flash_attention_backward import FlashAttentionBackward
from liger_aot.runtime.manifest import Pack
from tests.harness.drivers import bound_op
from tests.harness.planned_packs import tables_of
from tests.harness.test_warp_group_interpreter import Dense
from tests.harness.tolerances import REFERENCE
from tests.ops.attention.attention_cases import FP16, Problem
from tests.ops.attention.attention_gradients import gradient_errors
from tests.ops.attention.test_flash_attention_backward_groups import BACKWARD, DIMS


@pytest.fixture(scope="module")
def pack() -> Pack:
    return tables_of("sm90")


DENSE = (
    Problem(1, 2, 1, 300, 300, 64),
    Problem(2, 2, 1, 130, 333, 64, FP16, "bhsd", causal=True, sinks=True),
    Problem(1, 1, 1, 300, 130, 96, causal=True),
    Problem(1, 4, 2, 200, 300, 128, FP16),
    Problem(1, 2, 1, 260, 260, 104, causal=True),
    Problem(1, 1, 1, 150, 200, 192, window=(None, 20)),
    Problem(1, 2, 1, 130, 70, 256, FP16),
    # in order, query heads take turns
    Problem(1, 4, 1, 200, 260, 64, FP16, "bhsd", causal=True),
    Problem(2, 3, 1, 260, 130, 192, causal=True),
)
# Windows that are smaller than a block, that end at an edge of one or a row beside it (a block's last row alone does
# not see a group's first key; a tile's last key alone is seen by a block of rows), and that are almost as long as the
# sequence; rows that see no key and keys that no row sees.
WINDOWS = (
    Problem(1, 2, 1, 300, 300, 64, window=(40, 0)),
    Problem(1, 2, 1, 300, 300, 64, FP16, causal=True, window=(128, None)),
    Problem(2, 2, 1, 300, 300, 64, window=(190, 0), sinks=True),
    Problem(1, 1, 1, 300, 300, 64, window=(129, 0)),
    Problem(1, 1, 1, 257, 300, 64, window=(64, 63)),
    Problem(1, 1, 1, 200, 500, 64, window=(50, 0)),  # keys that no row sees: two tiles and a part
    Problem(1, 1, 1, 500, 200, 64, window=(50, 0)),  # rows that see none
    Problem(1, 1, 1, 400, 90, 64, window=(50, None)),
    Problem(1, 1, 1, 200, 333, 64, window=(0, 0)),
    Problem(1, 1, 1, 300, 300, 64, window=(298, 0)),
    Problem(1, 2, 1, 1, 300, 64, window=(30, 0)),
    Problem(1, 4, 2, 250, 300, 96, FP16, "bhsd", window=(70, 3)),
    Problem(1, 2, 1, 250, 300, 96, window=(48, None)),
    Problem(1, 2, 1, 300, 300, 128, window=(126, 0)),
    Problem(1, 1, 1, 300, 300, 128, window=(65, 0)),
    Problem(1, 2, 1, 260, 380, 104, FP16, "bhsd", window=(100, 20)),
    Problem(1, 2, 1, 150, 400, 128, window=(63, 0)),
    Problem(1, 2, 1, 260, 260, 192, window=(126, 0)),
    Problem(1, 2, 1, 130, 300, 200, FP16, window=(64, 10)),
    Problem(1, 1, 1, 300, 300, 256, window=(65, None)),
)
CAPPED = (
    Problem(1, 2, 1, 200, 260, 256, window=(70, 0), softcap=2.0, sinks=True),
    Problem(1, 2, 1, 150, 100, 256, causal=True, softcap=2.0),
    Problem(1, 1, 1, 70, 200, 216, FP16, "bhsd", softcap=50.0, scale=0.5),
)


ALL = (*DENSE, *WINDOWS, *CAPPED)


def width_of(problem: Problem) -> int:
    return next(width for width in DIMS if problem.dim <= width)


def kind_of(problem: Problem) -> str:
    causal = problem.causal or problem.window is not None
    return "_capped" if problem in CAPPED else "_local" if problem in WINDOWS else "_causal" if causal else ""


def cases() -> Iterator[Any]:
    """The first of each kernel, and the others, which are slow."""
    seen = set()
    for problem, deterministic in [(p, True) for p in ALL] + [(p, False) for p in ALL[::3]]:
        kernel = width_of(problem), kind_of(problem), deterministic
        yield pytest.param(problem, deterministic, marks=[pytest.mark.slow] if kernel in seen else [])
        seen.add(kernel)


@pytest.mark.interpreter
@pytest.mark.parametrize(("problem", "deterministic"), list(cases()), ids=str)
def test_gradients(pack: Pack, problem: Problem, deterministic: bool, request: pytest.FixtureRequest) -> None:
    """Memory holds NaN until it is written in the deterministic calls alone: torch has no other way to fill it."""
    if deterministic:
        request.getfixturevalue("poisoned")
    q, k, v, sinks = problem.tensors()
    keywords = {key: value for key, value in problem.keywords(sinks).items() if key != "return_lse"}
    o, lse = liger_aot.load("flash_attention")(q, k, v, **keywords, return_lse=True)
    do = torch.randn(o.shape).to(o.dtype)
    op = bound_op(FlashAttentionBackward, pack, Dense)
    found = op(do, q, k, v, o, lse, deterministic=deterministic, **keywords)
    loaded = {name.partition("-")[0] for name in op._own.of(torch.empty(1), "q")._loaded}
    kernel = f"{BACKWARD}_groups_{width_of(problem)}{kind_of(problem)}"
    assert f"{kernel}{'_ordered' if deterministic else ''}" in loaded
    worst = gradient_errors(found, (q, k, v, sinks), do, None, problem, REFERENCE, approximate=False)
    assert max(worst.values()) <= 1, worst
