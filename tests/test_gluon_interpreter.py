"""Gluon on the interpreter: a copy to shared memory counts once it has been waited for."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from tests.gluon_interpreter import interpreted
from tests.interpreter import interpret

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
