"""The interpreter of warp groups: what it gives for a kernel that GPUs proved, and that it notices what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from csrc_triton.attention.pipeline import mbarriers
from liger_aot.ops.attention.flash_attention import FlashAttention
from liger_aot.ops.attention.flash_attention_backward import FlashAttentionBackward
from tests.conftest import built_pack
from tests.harness import storages
from tests.harness import warp_group_interpreter as interpreter
from tests.harness.drivers import bound_op
from tests.harness.tolerances import REFERENCE
from tests.ops.attention.attention_cases import FP16, Problem, errors
from tests.ops.attention.attention_gradients import gradient_errors


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "problem",
    [
        Problem(1, 2, 1, 200, 150, 64, causal=True),
        Problem(1, 1, 1, 70, 130, 128, FP16, "bhsd"),
        Problem(2, 4, 2, 130, 100, 64, causal=True),  # tiles of heads are interleaved
        Problem(1, 2, 2, 130, 200, 192, causal=True),
    ],
)
def test_the_dense_backward(problem: Problem) -> None:
    op = bound_op(FlashAttentionBackward, built_pack("sm90"), interpreter.GroupsDriver)
    q, k, v, _ = tensors = problem.tensors()
    o, lse = (t.contiguous() for t in FlashAttention.reference(*tensors, *problem.settings()))
    do = torch.randn_like(o)
    keywords = {"causal": problem.causal, "layout": problem.layout}
    found = op(do, q, k, v, o, lse, **keywords)
    worst = gradient_errors(found, tensors, do, None, problem, REFERENCE, approximate=False)
    assert any("_warp_specialized-" in name for name in op._own.of(torch.empty(1), "q")._loaded)
    assert max(worst.values()) <= 1, worst


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "problem",
    [
        Problem(2, 4, 2, 300, 300, 64, causal=True, sinks=True), Problem(1, 2, 2, 130, 200, 192, causal=True),
        Problem(1, 2, 1, 200, 450, 128, FP16, "bhsd"), Problem(1, 2, 2, 300, 300, 96, window=(100, 0)),
        Problem(1, 1, 1, 140, 140, 256, softcap=5.0), Problem(1, 4, 2, 300, 513, 192, FP16),
        Problem(2, 1, 1, 200, 100, 192), Problem(1, 1, 1, 200, 64, 96),
    ],
)  # fmt: skip
def test_the_dense_forward(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory that holds NaN; the counters are zeros again."""
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *s, **kind: empty(*s, **kind).fill_(torch.nan))
    op = bound_op(FlashAttention, built_pack("sm90"), interpreter.GroupsDriver)
    *tensors, sinks = problem.tensors()
    o, lse = op(*tensors, **problem.keywords(sinks))
    worst = errors(o, lse, (*tensors, sinks), problem, REFERENCE, approximate=False)
    assert max(worst) <= 1, worst
    on = op._own.of(torch.empty(1), "q")
    assert any("-warp_specialized-" in name for name in on._loaded) and on.workspaces["counters"].on(
        0, 1
    ).tolist() == [0]


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch) -> interpreter.Block:
    monkeypatch.setattr(interpreter, "PATIENCE", 0.1)
    storages.watch()
    return interpreter.Block(0, 1)


def barrier(block: interpreter.Block, count: int) -> interpreter.Barrier:
    made = interpreter.Barrier()
    block.init(made, count)
    return made


def tensor_map(t: torch.Tensor, rows_before: int = 0) -> interpreter.TensorMap:
    """Of a float32 matrix, in boxes of [1, 1, 4, 4]."""
    address = t.data_ptr() - rows_before * t.stride(0) * 4
    sizes = (1, 1, t.shape[0] + rows_before, t.shape[1])
    return interpreter.TensorMap(address, "fp32", sizes, (16, 16, t.stride(0), 1), (1, 1, 4, 4), 0)


def test_a_copy_arrives_when_it_is_waited_for(block: interpreter.Block) -> None:
    """Zeros for what is outside; before that it is NaN."""
    t = torch.arange(24.0).view(6, 4)
    to, full = block.allocate(torch.float32, [1, 1, 4, 4], None), barrier(block, 1)
    block.expect(full, 64)
    block.copy_in(tensor_map(t), [0, 0, 4, 0], full, to)
    assert to.values.isnan().all()
    block.wait(full, 0)
    assert torch.equal(to.values[0, 0], torch.cat([t[4:], torch.zeros(2, 4)]))


def test_a_store_leaves_when_it_is_waited_for(block: interpreter.Block) -> None:
    t = torch.zeros(6, 4)
    source = block.allocate(torch.float32, [1, 1, 4, 4], None)
    source.store(torch.ones(1, 1, 4, 4))
    block.copy_out(tensor_map(t), [0, 0, 4, 0], source)
    assert not t.any()
    block.store_wait(0)
    assert not t[:4].any() and t[4:].all()


def test_what_is_wrong(block: interpreter.Block) -> None:
    full = barrier(block, 1)
    with pytest.raises(AssertionError, match="never ends"):
        block.wait(full, 0)
    block.wait(full, 1)  # the phase before
    block.expect(full, 64)
    with pytest.raises(AssertionError, match="more arrivals"):
        block.arrive(full, 1)
    to, t = block.allocate(torch.float32, [1, 1, 4, 4], None), torch.zeros(6, 4)
    for row in (0, 1 << 21):  # inside of the map, where no tensor is, and outside of both
        with pytest.raises(AssertionError, match="no tensor holds"):
            block.copy_in(tensor_map(t, rows_before=1 << 20), [0, 0, row, 0], full, to)

    block.named_barrier("bar.arrive 8, 256; mov.b32 $0, $1;")
    block.named_barrier("bar.sync 8, 256; mov.b32 $0, $1;")
    with pytest.raises(AssertionError, match="nobody passes on"):
        block.named_barrier("bar.sync 8, 256; mov.b32 $0, $1;")

    def group(*arguments: Any) -> None:
        raise ValueError("of a group")

    with pytest.raises(ValueError, match="of a group"):
        block.specialize([(block.wait, (full, 0)), (group, ())], [1], [24])


@gluon.jit
def two_pairs(USED: gl.constexpr):
    used = mbarriers(1, 1)
    idle = mbarriers(1, 1)
    gl.warp_specialize([(arrive, (used,)), (arrive, (used if USED == 1 else idle,))], [4], [24])


@gluon.jit
def arrive(at):
    if gl.program_id(0) == 1:  # it is enough that one program uses them
        mbarrier.arrive(at.index(0), count=1)


@pytest.mark.interpreter
def test_barriers_that_nobody_uses() -> None:
    interpreter.run(two_pairs, {}, {"USED": 2}, (2, 1, 1), ())
    with pytest.raises(AssertionError, match="nobody uses"):
        interpreter.run(two_pairs, {}, {"USED": 1}, (2, 1, 1), ())
