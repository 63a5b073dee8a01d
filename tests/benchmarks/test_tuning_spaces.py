"""The tuner's search spaces name only what the kernels' declarations have, and make candidates that sm90 can plan."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest

from benchmarks.tuning.candidates import Target, rows, target, variants
from benchmarks.tuning.space import Problem, Space, grid, power, warps
from benchmarks.tuning.spaces import SPACES
from liger_aot_build.declaration import declared_ops, read_declaration
from liger_aot_build.errors import BuildError, ProfileError

ARCH = "sm90"
MOST = 400  # candidates of a problem: an afternoon's
DECLARED = {kernel: op for op in declared_ops() for kernel in read_declaration(op).kernels}


@cache
def target_of_op(op: str) -> Target:
    return target(ARCH, next(kernel for kernel in SPACES if DECLARED[kernel] == op))


def target_of(kernel: str) -> Target:
    of = target_of_op(DECLARED[kernel])
    return replace(of, kernel=of.plans[0].kernels[kernel].kernel)


def planned(kernel: str, problem: Problem, of: Target) -> int:
    """How many binaries a problem's candidates are; ProfileError names what a candidate asks for that is not there."""
    found = [variants(row, problem, of, f"{kernel}, {problem}") for row in rows(SPACES[kernel], problem, of)]
    return len({v.name for made in found for v in made})


@pytest.mark.parametrize("kernel", SPACES)
def test_candidates_fit_the_declaration(kernel: str) -> None:
    of = target_of(kernel)
    assert SPACES[kernel].problems
    for problem in SPACES[kernel].problems:
        found = list(SPACES[kernel].rows(problem))
        assert 1 <= len(found) <= MOST, problem
        assert len({json.dumps(row, sort_keys=True) for row in found}) == len(found), problem
        assert planned(kernel, problem, of) >= len(found), problem
        assert not set(problem.when) - set(of.kernel.axes)
    # The rows of a table: one for each bound and choice of axes.
    keys = [(p.max_n, p.most_rows, p.dtypes, *p.when.items()) for p in SPACES[kernel].problems]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("kernel", [kernel for kernel, space in SPACES.items() if space.without])
def test_kernels_that_are_taken_away_are_there(kernel: str) -> None:
    beside = read_declaration(DECLARED[kernel]).kernels
    for beginning in SPACES[kernel].without:
        assert any(name.startswith(beginning) and name != kernel for name in beside), beginning


def test_every_op_of_more_than_helpers_has_spaces() -> None:
    """The others' launch numbers follow from those of the ops that they are made of; policy_loss reads a few KB; those
    of ops with 8-bit results, and around a cache, depend on the number of rows, those of ops that sample also on how
    flat a row is: the tuner varies neither."""
    assert set(SPACES) <= set(DECLARED)
    without = set(DECLARED.values()) - {DECLARED[kernel] for kernel in SPACES}
    assert {op for op in without if not op.endswith("quantize")} == {
        "column_sums",
        "cross_entropy_tvd",
        "divergence_sums",
        "flash_attention_paged",
        "fused_linear_cross_entropy",
        "fused_linear_distillation_loss",
        "fused_linear_jsd",
        "fused_linear_kl_div",
        "fused_linear_log_probs",
        "merge_attention_states",
        "neighborhood_attention",
        "policy_loss",
        "qk_norm_rope",
        "rejection_sample",
        "sample",
        "top_k_top_p_mask",
        "vocab_parallel_cross_entropy",
        "vocab_parallel_linear_cross_entropy",
        "write_kv_cache",
    }


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"form": "tiles"}, "unknown form 'tiles'"),
        ({"stagess": 2}, "unknown key 'stagess'"),
        ({"weightt": "fp32"}, "unknown key 'weightt'"),
        ({"num_warps": 3}, "power of two"),
        ({"num_warps": 64}, "2048 threads"),
        ({"block": 64}, "covers 64"),
    ],
)
def test_a_name_that_the_declaration_lacks_is_an_error(wrong: dict[str, object], message: str) -> None:
    of, problem = target_of("rmsnorm_forward"), Problem(128, (128,))
    row = {"form": "tile", "rows": 8, "block": 128, "num_warps": 4}
    assert len(variants(row, problem, of, "a row")) == 4  # two dtypes, two of the weight
    with pytest.raises(ProfileError, match=message):
        variants({**row, **wrong}, problem, of, "a row")


def test_other_axes_of_a_problem() -> None:
    of = target_of("rmsnorm_forward")
    row = {"form": "tile", "rows": 8, "block": 128, "num_warps": 4}
    made = variants(row, Problem(128, (128,), when={"weight": ("fp32",)}), of, "a row")
    assert {v.axes["weight"] for v in made} == {"fp32"} and len(made) == 2


def test_the_present_row_is_a_candidate_once() -> None:
    of = target_of("relu_squared_forward")
    nothing = Space((Problem(None, (5120,)),), lambda p: ())
    (now,) = rows(nothing, nothing.problems[0], of)
    assert set(now) == {"form", "block", "num_warps"}
    assert len(rows(SPACES["relu_squared_forward"], nothing.problems[0], of)) == 9
    few = Space((Problem(4096, (4096,), most_rows=64),), lambda p: ())
    (now,) = rows(few, few.problems[0], target_of("rmsnorm_forward"))
    assert now["form"] == "in_registers" and now["aligned"] is True


def test_an_unknown_kernel() -> None:
    with pytest.raises(BuildError, match="unknown kernel 'swiglu'"):
        target(ARCH, "swiglu")


def test_grids() -> None:
    assert list(grid(form="a", block=(1, 2), num_warps=4)) == [
        {"form": "a", "block": 1, "num_warps": 4},
        {"form": "a", "block": 2, "num_warps": 4},
    ]
    assert [power(n) for n in (1, 2, 3, 1024, 1025)] == [1, 2, 4, 1024, 2048]
    assert warps(4096, 16, 64) == (2, 4, 8) and warps(32) == (1,)
