"""Split and combine in one launch: the device code on the interpreter of warp groups, and which calls take it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from liger_aot.errors import ArgumentError
from liger_aot.ops.decoding._plans import FusedPlan, Settings, plan_for
from liger_aot.ops.decoding.flash_decoding import FlashDecoding
from liger_aot.runtime.workspaces import GRAPH_WORDS, StreamWorkspace
from tests.conftest import built_pack
from tests.harness import warp_group_interpreter
from tests.harness.drivers import bound_op
from tests.harness.planned_packs import tables_of
from tests.harness.warp_group_interpreter import GroupsDriver
from tests.ops.decoding.decoding_cases import FP16, Problem, check

PROBLEMS = (
    Problem(8, 1, 1, 900, (900, 137, 1, 0), 64, splits=3),  # the second has fewer blocks than splits
    Problem(8, 2, 1, 640, (640, 500), 128, FP16, page=16, splits=2),
    Problem(4, 1, 2, 300, (300, 130), 128, page=64, splits=5, sinks=True),
    Problem(1, 1, 1, 1300, (1300,), 128, splits=20),  # more splits than are combined at a time
    Problem(6, 2, 1, 300, (300, 3, 211), 96, window=(100, None), softcap=10.0, splits=2),
    Problem(6, 2, 2, 130, (130, 40), 80, page=32, causal=False, splits=2),
    Problem(3, 1, 1, 700, (700,), 128, full=True, splits=1),  # more blocks than stages
    Problem(1, 1, 2, 520, (520, 77), 64, page=16, window=(300, 0), splits=4),
    Problem(12, 1, 1, 1300, (1300, 140, 0), 128, splits=9),  # combined 8 at a time
    Problem(16, 2, 3, 640, (640, 2), 96, page=64, splits=5, window=(300, None)),  # 24 of 32
    Problem(32, 1, 1, 400, (400, 129), 128, page=128, sinks=True, softcap=10.0, splits=2),
    Problem(8, 1, 1, 640, (640, 77), 64, page=64, splits=3),
    # by the rows of many programs
    Problem(8, 2, 1, 700, (700, 700), 96, full=True, splits=5),
    Problem(4, 1, 2, 1300, (1300, 1, 700, 0, 64), 128, FP16, page=16, splits=6),
    Problem(8, 2, 1, 256, (200, 0, 17), 128, FP16, page=64, splits=1),
    Problem(6, 2, 1, 208, (208, 65, 64, 1), 96, page=16, window=(70, None), softcap=10.0),
    Problem(3, 1, 2, 160, (160, 63, 0, 130, 2), 128, page=32, sinks=True, causal=False),
)


def op_on_interpreter() -> FlashDecoding:
    return bound_op(FlashDecoding, tables_of("sm90"), GroupsDriver)


def counters_of(op: FlashDecoding) -> torch.Tensor:
    """All in which programs counted."""
    kept = op._own.on(-1).workspaces["counters"]._by_stream.values()
    return torch.cat([torch.zeros(1, dtype=torch.int64), *kept])


@pytest.mark.interpreter
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_device_code(problem: Problem, poisoned: None) -> None:
    op = op_on_interpreter()
    check(op, problem, dict(built_pack("sm90").tolerance))
    assert all(isinstance(plan, FusedPlan) for plan in op._plans.values())
    assert not counters_of(op).any()


@pytest.mark.interpreter
def test_whichever_program_combines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of a result do not depend on the order in which programs end."""
    problem = Problem(8, 1, 1, 640, (640, 300), 64, splits=4)
    tensors = problem.tensors()
    found = []
    for seed in range(3):
        monkeypatch.setattr(
            warp_group_interpreter,
            "in_turn",
            lambda all, seed=seed: random.Random(seed).sample(all, len(all)),
        )
        found.append(op_on_interpreter()(*tensors[:3], **problem.keywords(tensors)))
    for other in found[1:]:
        assert torch.equal(other[0], found[0][0]) and torch.equal(other[1], found[0][1])


@pytest.mark.interpreter
def test_pages_and_lengths_out_of_range() -> None:
    """Nothing out of bounds is read, which the interpreter would not let pass; the next call raises, once."""
    op = op_on_interpreter()
    problem = Problem(8, 2, 1, 192, (150, 100, 192, 33), 64, page=32, splits=3)
    tensors = list(problem.tensors())
    good = op(*tensors[:3], **problem.keywords(tensors))
    tensors[3], tensors[4] = tensors[3].clone(), tensors[4].clone()
    tensors[4][1, 2], tensors[3][2] = 77, 193
    o, lse = op(*tensors[:3], **problem.keywords(tensors))
    assert torch.isnan(o[1:3]).all() and torch.isnan(lse[1:3]).all()
    for b in (0, 3):
        assert torch.equal(o[b], good[0][b]) and torch.equal(lse[b], good[1][b])
    with pytest.raises(ArgumentError, match=r"flash_decoding: .* of an earlier call was given (77|193)"):
        op(*tensors[:3], **problem.keywords(tensors))
    assert not counters_of(op).any()


def planned(op: FlashDecoding, problem: Problem) -> Any:
    q, k, _, _, table = problem.tensors()[:5]
    settings = Settings(*problem.settings())
    return plan_for(op._own.on(-1), q, k, table, problem.full, 0, settings, not problem.shift)


@pytest.mark.parametrize(
    ("problem", "fused"),
    [
        (Problem(8, 1, 1, 256, (256,), 128), True),
        (Problem(8, 1, 1, 4096, (4096,), 64, page=16), True),
        (Problem(8, 8, 1, 64, (64,) * 9, 64, page=16), True),
        (Problem(8, 8, 1, 64, (64,) * 9, 128, page=16), True),
        (Problem(8, 8, 1, 64, (64,) * 9, 128), True),
        (Problem(2, 2, 1, 8192, (8192,), 128), True),
        (Problem(2, 2, 1, 8192, (8192,), 128, splits=1), True),
        (Problem(9, 1, 1, 256, (256,), 64), False),  # more rows than it has
        (Problem(9, 1, 1, 256, (256,), 128), True),
        (Problem(8, 1, 4, 256, (256,), 128, page=64), True),
        (Problem(8, 1, 4, 256, (256,), 128, page=16), False),
        (Problem(33, 1, 1, 256, (256,), 128), False),
        (Problem(8, 1, 1, 256, (256,), 192), False),  # no kernel for it
        (Problem(8, 1, 1, 256, (256,), 72), False),  # not aligned
        (Problem(8, 1, 1, 256, (256,), 64, shift=1), False),
    ],
    ids=str,
)
def test_which_calls(problem: Problem, fused: bool) -> None:
    assert isinstance(planned(op_on_interpreter(), problem), FusedPlan) == fused


def test_one_wave() -> None:
    """Of a contiguous cache, as long as each split can have a multiprocessor of its own."""
    op = op_on_interpreter()
    for batch, splits in ((1, 16), (2, 8), (3, 5), (5, 3), (12, 1), (16, 1)):
        op._own.on(-1).multiprocessors = 132
        assert planned(op, Problem(8, 8, 1, 4096, (4096,) * batch, 16))._grid == (8, splits, batch)
    assert planned(op, Problem(8, 8, 1, 4096, (4096,), 16, splits=3))._grid == (8, 3, 1)


def plan_of(page: int, batch: int, room: int, dim: int = 128, full: bool = False) -> Any:
    """8 heads of keys, on 132 multiprocessors."""
    op = op_on_interpreter()
    op._own.on(-1).multiprocessors = 132
    like = torch.empty((), dtype=torch.bfloat16, device="meta")
    q = like.new_empty(batch, 1, 64, dim)
    k = like.new_empty(512, page, 8, dim) if page else like.new_empty(batch, room, 8, dim)
    table = like.new_empty(batch, room // page, dtype=torch.int32) if page else None
    return plan_for(op._own.on(-1), q, k, table, full, 0, Settings(1.0, -1, 0, 0.0, 0), True)


@pytest.mark.parametrize(
    ("page", "batch", "room", "splits", "kind"),
    [
        # one: all of them are full
        (64, 1, 8192, 16, "large_pages"),  # one wave
        (16, 1, 8192, 32, "pages"),
        # as many as two waves of programs
        (256, 2, 131072, 32, "large_pages"),
        (64, 8, 32768, 8, "large_pages"),
        (64, 8, 4096, 4, "large_pages"),  # of too few keys
        # at least
        (64, 33, 8192, 4, "large_pages"),
        (64, 34, 131072, 4, "large_pages"),
        (16, 33, 8192, 4, "pages"),
        (16, 34, 8192, 4, "pages-many"),  # more programs than run at once
        (16, 206, 8192, 4, "pages-many"),
        # so many that each is whole
        (16, 207, 8192, 1, "whole-many"),
        (64, 83, 8192, 1, "large_pages"),
        (64, 2, 8192, 8, "large_pages"),  # not a wave: as if all were full
        # short ones, too
        (64, 8, 1024, 4, "large_pages"),
        (64, 33, 2048, 1, "large_pages"),
        (64, 34, 2048, 2, "pages-many"),
        (16, 82, 4032, 1, "whole-many"),
        # contiguous
        (0, 8, 8192, 4, "contiguous"),
        (0, 8, 4096, 2, "contiguous"),
        (0, 41, 8192, 4, "contiguous"),
        (0, 42, 8192, 1, "contiguous"),
    ],
)
def test_sequences_of_different_lengths(page: int, batch: int, room: int, splits: int, kind: str) -> None:
    plan = plan_of(page, batch, room)
    assert plan._grid == (8, splits, batch) and f"-{kind}-8-" in plan._loaded.variant.name


@pytest.mark.parametrize(
    ("batch", "keys", "splits", "many"),
    [(8, 8192, 2, False), (9, 8192, 5, True), (17, 8192, 2, True), (49, 8192, 1, True), (64, 8192, 1, False)],
)
def test_full_sequences(batch: int, keys: int, splits: int, many: bool) -> None:
    """Of a contiguous cache: three programs a multiprocessor where one each would leave some idle at the end."""
    plan = plan_of(0, batch, keys, full=True)
    assert plan._grid == (8, splits, batch) and ("-many-" in plan._loaded.variant.name) == many


def test_words_of_graphs() -> None:
    """Each launch has its own of those that were made before, as long as there are any."""
    words = StreamWorkspace(torch.device("cpu"))
    assert words._of_graph(10).numel() == 10  # none were made: its own
    words.prepare()
    first, second = words._of_graph(10), words._of_graph(10)
    assert first.data_ptr() + 10 * 8 == second.data_ptr() and not first.any()
    rest = words._of_graph(GRAPH_WORDS - 20)
    assert rest.data_ptr() == second.data_ptr() + 10 * 8
    assert words._of_graph(1).data_ptr() != rest.data_ptr() + rest.nbytes
    words.prepare()
    assert words._of_graph(GRAPH_WORDS).numel() == GRAPH_WORDS and len(words._graph_words) == 2
