"""Gluon on the interpreter: a copy to shared memory counts once it has been waited for."""

from contextlib import nullcontext

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.runtime.errors import InterpreterError

from tests.harness.gluon_interpreter import interpreted
from tests.harness.interpreter import interpret

pytestmark = pytest.mark.interpreter


@gluon.jit
def copied(Y, X, n, ROWS: gl.constexpr, OUTSTANDING: gl.constexpr):
    """Row by row through shared memory, with so many copies under way when a row is read."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    at = gl.arange(0, 16, layout=layout)
    rows = gl.allocate_shared_memory(gl.float32, [ROWS, 16], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(ROWS):
        async_copy.async_copy_global_to_shared(rows.index(i), X + i * 16 + at, mask=at < n)
        async_copy.commit_group()
    async_copy.wait_group(OUTSTANDING)
    for i in gl.static_range(ROWS):
        gl.store(Y + i * 16 + at, rows.index(i).load(layout))


@pytest.mark.parametrize("outstanding", [0, 1, 2])
def test_what_was_not_waited_for_is_not_there(outstanding: int) -> None:
    x, y = torch.randn(3, 16), torch.zeros(3, 16)
    constants: dict[str, int | bool] = {"ROWS": 3, "OUTSTANDING": outstanding}
    arguments = (y.data_ptr(), x.data_ptr(), 10)
    interpret(
        interpreted(copied),
        (1, 1, 1),
        ["*fp32", "*fp32", "i32"],
        ["Y", "X", "n"],
        arguments,
        constants,
        concurrent=False,
    )
    x[:, 10:] = 0
    landed = 3 - outstanding
    assert torch.equal(y[:landed], x[:landed]) and y[landed:].isnan().all()


@gluon.jit
def give(place, full, X, GIVEN: gl.constexpr):
    at = gl.arange(0, 16, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    place.store(gl.load(X + at))
    gl.thread_barrier()
    if GIVEN:
        mbarrier.arrive(full.index(0), count=1)


@gluon.jit
def receive(place, full, Y):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(full.index(0), 0)
    gl.store(Y + gl.arange(0, 16, layout=layout), place.load(layout))


@gluon.jit
def handed_over(Y, X, GIVEN: gl.constexpr):
    """From one group of warps to another."""
    place = gl.allocate_shared_memory(gl.float32, [16], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    gl.warp_specialize([(give, (place, full, X, GIVEN)), (receive, (place, full, Y))], [4], [24])


@pytest.mark.parametrize("given", [True, False])
def test_groups_of_warps_wait_for_each_other(given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not given:
        monkeypatch.setattr("tests.harness.gluon_interpreter.PATIENCE", 0.1)
    x, y = torch.randn(16), torch.zeros(16)
    arguments = (y.data_ptr(), x.data_ptr())
    with nullcontext() if given else pytest.raises(InterpreterError, match="nobody arrives"):
        interpret(
            interpreted(handed_over),
            (1, 1, 1),
            ["*fp32", "*fp32"],
            ["Y", "X"],
            arguments,
            {"GIVEN": given},
            concurrent=False,
        )
    assert torch.equal(y, x) == given
