import math, pytest, torch, liger_aot
from torch import Tensor
from tests.ops.attention.paged_cases import *
from tests.harness.tolerances import REFERENCE
from tests.harness.planned_packs import tables_of
from tests.harness.drivers import *
from tests.harness.warp_group_interpreter import GroupsDriver
from liger_aot.ops.attention.flash_attention_paged import FlashAttentionPaged

PROBLEMS = (
    Problem(2, 1, (200,), (270,), 64, sinks=True, behind=9),
    Problem(4, 2, (140,), (300,), 128, FP16, page=64, halves=True, behind=3),
    Problem(2, 1, (200, 3, 0, 140), (270, 40, 200, 5), 64, page=128, behind=9, sinks=True),
    Problem(2, 1, (130, 65), (300, 65), 128, window=(70, 0), softcap=5.0),
    Problem(1, 1, (150,), (150,), 208, FP16, page=64, window=(30, 0)),
)


@pytest.mark.interpreter
@pytest.mark.parametrize("p", PROBLEMS, ids=str)
def test_interp(p, monkeypatch):
    empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *size, **kind: empty(*size, **kind).fill_(math.nan))
    op = bound_op(FlashAttentionPaged, tables_of("sm90"), GroupsDriver)
    check(op, p, REFERENCE)
    on = op._own.of(torch.empty(1), "q")
    print({name.partition("-")[0] for name in on._loaded}, on.plans["counters"].on(0, 1).tolist())
