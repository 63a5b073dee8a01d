"""fused_moe: even and uneven routing, tiles that are not full, experts out of range, on every driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.moe.fused_moe import FusedMoE
from liger_aot.runtime.manifest import Pack
from tests.conftest import built_pack
from tests.harness import warp_group_interpreter as interpreter
from tests.harness.drivers import bound_op
from tests.harness.op_gpu_tests import installed
from tests.harness.op_tests import (
    BF16,
    FP16,
    FP32,
    WAYS,
    Case,
    Draw,
    Exact,
    OpTests,
    Results,
    Way,
    _one_value,
)
from tests.harness.tolerances import UNIT_ROUNDOFF

STEPS = "up", "product", "down_backward", "weight_backward"
WARP_SPECIALIZED = {"fused_moe_gather", *(f"fused_moe_{step}_warp_specialized" for step in STEPS)}
X, GATE_UP, DOWN = torch.ones(3, 8), torch.ones(4, 12, 8), torch.ones(4, 8, 6)
INDICES, WEIGHTS = torch.tensor([[0, 3], [1, 2], [3, 0]]), torch.ones(3, 2)


class TestFusedMoE(OpTests):
    """A case's shape is (tokens, hidden). ``routing`` is where pairs go: "even" draws experts at random; "one" sends
    every token to one expert; "some" leaves experts without a token; "outside" also draws experts out of range."""

    op_class = FusedMoE
    cases = (
        Case((5, 32), BF16, experts=4, inner=16, top_k=2),
        Case((1, 16), BF16, experts=3, inner=16, top_k=1),
        Case((7, 37), FP32, experts=3, inner=5, top_k=2),
        Case((19, 48), FP16, experts=2, inner=32, top_k=2, index=torch.int32),
        Case((40, 16), FP32, experts=2, inner=48, top_k=1, routing="one", weights=BF16),
        Case((9, 33), FP16, experts=7, inner=9, top_k=3, routing="some"),
        Case((6, 32), BF16, experts=3, inner=16, top_k=2, routing="outside", weights=FP32),
        Case((11, 24), BF16, experts=2, inner=7, top_k=2, routing="outside", shift=3, index=torch.int32),
        Case((70, 16), BF16, experts=1, inner=16, top_k=1, gap=16),
        Case((3, 20), FP32, experts=70, inner=6, top_k=9, gap=5),
    )
    empty = (
        Case((0, 16), BF16, experts=2, inner=16, top_k=2),
        Case((3, 16), FP32, experts=0, inner=16, top_k=2, routing="outside"),
        Case((3, 16), FP16, experts=2, inner=0, top_k=1),
    )
    large = (
        Case((1000, 1024), BF16, experts=8, inner=1536, top_k=2),
        Case((4096, 512), BF16, experts=128, inner=384, top_k=8, weights=FP32),
        Case((3000, 720), FP16, experts=32, inner=720, top_k=4, routing="some"),
        Case((64, 2048), BF16, experts=64, inner=768, top_k=8),
        Case((777, 333), FP32, experts=5, inner=250, top_k=3, routing="outside"),
        Case((2000, 512), BF16, experts=16, inner=512, top_k=1, routing="one"),
    )
    beyond = ()
    dimensions = (2, 2)
    relaid = ("x", "gate_up_weight", "down_weight", "topk_weights")
    bad: Mapping[str, Any] = {
        "a vector": (
            (X[0], GATE_UP, DOWN, INDICES, WEIGHTS),
            {},
            ArgumentError,
            r"x must be of shape \(tokens, hidden\), got \(8,\)",
        ),
        "float indices": (
            (X, GATE_UP, DOWN, WEIGHTS, WEIGHTS),
            {},
            ArgumentTypeError,
            "topk_indices must be int32 or int64, got torch.float32",
        ),
        "another dtype": (
            (X, GATE_UP.bfloat16(), DOWN, INDICES, WEIGHTS),
            {},
            ArgumentTypeError,
            "gate_up_weight must be of x's dtype torch.float32, got torch.bfloat16",
        ),
        "transposed weights": (
            (X, GATE_UP.mT, DOWN, INDICES, WEIGHTS),
            {},
            ArgumentError,
            r"gate_up_weight must be of shape \(experts, 2 inner, 8\).*got \(4, 8, 12\)",
        ),
        "odd gate_up": (
            (X, GATE_UP[:, :11], DOWN, INDICES, WEIGHTS),
            {},
            ArgumentError,
            r"gate_up_weight must be of shape \(experts, 2 inner, 8\).*got \(4, 11, 8\)",
        ),
        "another inner": (
            (X, GATE_UP, DOWN[:, :, :5], INDICES, WEIGHTS),
            {},
            ArgumentError,
            r"down_weight must be of shape \(4, 8, 6\).*got \(4, 8, 5\)",
        ),
        "fewer tokens": (
            (X, GATE_UP, DOWN, INDICES[:2], WEIGHTS[:2]),
            {},
            ArgumentError,
            r"topk_indices must be of shape \(3, k\).*got \(2, 2\)",
        ),
        "fewer weights": (
            (X, GATE_UP, DOWN, INDICES, WEIGHTS[:, :1]),
            {},
            ArgumentError,
            r"topk_weights must be of topk_indices' shape \(3, 2\), got \(3, 1\)",
        ),
    }

    def tensors(self, case: Case, draw: Draw) -> Tensors:
        (tokens, hidden), experts, inner = case.shape, case.get("experts", 4), case.get("inner", 16)
        top_k, routing = case.get("top_k", 2), case.get("routing", "even")
        low, high = {
            "one": (experts - 1, experts),
            "some": (0, max(1, experts // 2)),
            "even": (0, experts),
        }.get(routing, (-2, experts + 2))
        indices = (draw.integers(high - low, tokens, top_k) + low).to(case.get("index", torch.int64))
        if routing == "outside" and indices.dtype == torch.int64 and tokens:
            indices[0, 0] += 1 << 32  # an expert, by its low word
        return (
            draw.rows(tokens, hidden),
            draw.dense(experts, 2 * inner, hidden).mul_(hidden**-0.5),
            draw.dense(experts, hidden, inner).mul_(max(inner, 1) ** -0.5),
            indices,
            draw.uniform(0.1, 1.0, tokens, top_k).to(case.get("weights", case.dtype)),
        )

    def formula(self, x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """One pair at a time."""
        rows = []
        for token in range(x.shape[0]):
            row = x[token] * 0
            for choice in range(indices.shape[1]):
                expert = int(indices[token, choice])
                if 0 <= expert < gate_up.shape[0]:
                    gate, up = (gate_up[expert] @ x[token]).chunk(2)
                    act = torch.nn.functional.silu(gate) * up
                    row = row + weights[token, choice] * (down[expert] @ act)
            rows.append(row)
        return torch.stack(rows)

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        """The activations are rounded to x's dtype, and so is each expert's result: two roundings on the way to y. The
        backward reads rounded projections and multiplies rounded gradients of them, and dx has a rounding for each
        expert: three. Each moves a sum by its unit roundoff times the sum of its terms' sizes, and, among the
        subnormals, by their spacing times what it is multiplied by."""
        x, gate_up, down, indices, weights = exact.inputs.values()
        (dy,) = exact.grads
        size, lost = ({name: torch.zeros_like(t) for name, t in exact.inputs.items()} for _ in range(2))
        y, largest, scale = (torch.zeros_like(exact.results[0]) for _ in range(3))
        for e in range(gate_up.shape[0]):
            chosen = indices == e
            took = chosen.any(-1, keepdim=True)
            share = torch.where(chosen, weights, 0).sum(-1, keepdim=True)
            gate, up = (x @ gate_up[e].t()).chunk(2, -1)
            gate_size, up_size = (x.abs() @ gate_up[e].abs().t()).chunk(2, -1)
            # |silu'| < 1.1 and |silu''| <= 0.5: what an error of the projections does to the activations
            silu = torch.nn.functional.silu(gate)
            slope = torch.sigmoid(gate) * (1 + gate * (1 - torch.sigmoid(gate)))
            act_size = silu.abs() * up_size + 1.1 * gate_size * up.abs()
            y += torch.where(took, share * (act_size @ down[e].abs().t()), 0)
            # What is rounded on the way, at its largest: the projections, activations and the expert's result.
            act, of_result = silu * up, act_size @ down[e].abs().t()
            inner = torch.cat((gate, up, act, act.new_zeros(len(act), 1)), -1).abs().amax(-1, keepdim=True)
            reached = torch.maximum((act @ down[e].t()).abs() + 4 * self._unit * of_result, inner)
            scale += torch.where(took, share * (1 + down[e].abs().sum(-1)), 0)
            largest = torch.maximum(largest, torch.where(took, reached, 0))
            dact, dact_size = dy @ down[e], torch.where(took, dy.abs() @ down[e].abs(), 0)
            dgate = share * (slope.abs() * (dact_size * up.abs() + dact.abs() * up_size))
            dgate += share * 0.5 * gate_size * (dact * up).abs()
            dup = share * (silu.abs() * dact_size + 1.1 * gate_size * dact.abs())
            both = torch.where(took, torch.cat((dgate, dup), -1), 0)
            # |silu'| < 1.1: the projections, dact and the gradients of the projections may be subnormal.
            of_gate = 1 + share * (0.5 * (dact * up).abs() + 1.1 * dact.abs() + 1.1 * up.abs())
            of_up = 1 + share * (1.1 * dact.abs() + silu.abs())
            of_both = torch.where(took, torch.cat((of_gate, of_up), -1), 0)
            lost["x"] += took + of_both @ gate_up[e].abs()
            lost["gate_up_weight"][e] = 1 + of_both.t() @ x.abs()
            size["x"] += both @ gate_up[e].abs()
            size["gate_up_weight"][e] = both.t() @ x.abs()
            size["down_weight"][e] = dy.abs().t() @ torch.where(took, share * act_size, 0)
            lost["down_weight"][e] = (dy.abs().t() @ torch.where(took, share, 0)).expand_as(down[e])
            total = (dact.abs() * act_size + dact_size * (silu * up).abs()).sum(-1, keepdim=True)
            size["topk_weights"] += torch.where(chosen, total, 0)
        # Of a rounding, in the 32 of float32's that are allowed.
        by = 1.05 * self._unit / (32 * UNIT_ROUNDOFF[FP32])
        found = {
            f"d{name}": {"magnitude": t * (1 + 3 * by), "scale": 1 + lost[name]} for name, t in size.items()
        }
        return {"y": {"magnitude": y * (1 + 2 * by), "largest": largest, "scale": 1 + scale}, **found}

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    def test_past_the_greatest_float16(self, way: Way) -> None:
        """Activations of 139^2: an expert's result may be infinite where its share of y would not be."""
        ones = frozenset(("x", "gate_up_weight"))
        for seed in range(6):
            self.check(
                way.op, Case((5, 139), FP16), way.allowed, seed=seed, device=way.device, layout=_one_value, relaid=ones
            )  # fmt: skip

    def compare(
        self, got: Results, exact: Exact, tensors: Tensors, allowed: Mapping[str, float], label: str
    ) -> None:
        self._unit = UNIT_ROUNDOFF[tensors[0].dtype]
        super().compare(got, exact, tensors, allowed, label)

    def table_case(
        self, kernel: str, axes: Mapping[str, Any], n: int, aligned: bool, rows: int
    ) -> Case | None:
        """n is the pairs of an expert, or a tile's rows, but for the kernel that goes through rows of the result. What
        is warp specialised has tests of its own, as not every driver has tensor maps; where it is, the last row of the
        tiles ends at 63."""
        if kernel in WARP_SPECIALIZED:
            return None
        dtype, odd = axes.get("dtype", BF16), int(not aligned)
        if kernel == "fused_moe_combine":
            return Case((rows, n), dtype, experts=2, inner=16, top_k=2)
        tokens = 63 if 63 < n < 128 else n
        return Case((tokens, 32 + odd), dtype, experts=1, inner=16 + odd, top_k=1)


class Maps(interpreter.GroupsDriver):
    """Its maps start where their tensors do: a box outside is zeros."""

    tensor_map = type("Map", (interpreter.TensorMap,), {"outside": True})


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "case",
    [
        Case((150, 96), BF16, experts=2, inner=80, top_k=1),
        Case((100, 144), FP16, experts=2, inner=272, top_k=2, routing="outside"),
        Case((140, 64), BF16, experts=3, inner=64, top_k=2, routing="some", weights=FP32),
        Case((64, 2112), BF16, experts=1, inner=272, top_k=1),  # more tiles of rows than share columns
    ],
    ids=str,
)
def test_warp_specialized(case: Case, poisoned: None) -> None:
    """Forward and backward with warp groups as threads, in memory that holds NaN."""
    tests, pack = TestFusedMoE(), built_pack("sm90")
    op = bound_op(FusedMoE, pack, Maps)
    tests.check(op, case, pack.tolerance)
    loaded = {name for on in op._own.bound.values() for name in on._loaded}
    wanted = warp_specialized(pack, "fp16" if case.dtype == FP16 else "bf16")
    assert len(wanted) == 7 and wanted <= loaded


def warp_specialized(pack: Pack, dtype: str) -> set[str]:
    """Names of the binaries for a dtype, and of those for any."""
    return {
        name
        for kernel in WARP_SPECIALIZED
        for key, entries in pack.op("fused_moe").kernels[kernel].tables.items()
        for _, name in entries
        if key in ("aligned", "generic") or key.startswith(f"{dtype}/")
    }


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.usefixtures("poisoned")
def test_warp_specialized_on_a_gpu(dtype: torch.dtype) -> None:
    """Every such binary; sizes that are no multiples of a tile."""
    pack, op = installed(), FusedMoE()
    if not pack.op("fused_moe").kernels.keys() >= WARP_SPECIALIZED:
        pytest.skip(f"{pack.arch} has no warp-specialised kernels")
    for seed, (tokens, hidden, inner, top_k) in enumerate(
        ((900, 208, 336, 2), (2000, 1040, 144, 4), (300, 16, 16, 8), (500, 2320, 1168, 2))
    ):
        for routing in ("even", "some", "outside"):
            case = Case((tokens, hidden), dtype, experts=4, inner=inner, top_k=top_k, routing=routing)
            TestFusedMoE().check(op, case, pack.tolerance, seed=seed, device="cuda")
    loaded = {name for on in op._own.bound.values() for name in on._loaded}
    assert warp_specialized(pack, "fp16" if dtype == FP16 else "bf16") <= loaded


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case((3000, 4096), BF16, experts=128, inner=2560, top_k=2, weights=FP32),  # weights
        Case((131072, 128), BF16, experts=8, inner=8448, top_k=2, weights=FP32),  # projections
        Case((131072, 128), BF16, shift=1, experts=8, inner=8448, top_k=2, weights=FP32),  # by plain tiles
    ],
    ids=str,
)
def test_past_two_to_the_31(case: Case) -> None:
    """Offsets past 2^31 elements: the last tokens, of the last experts, and the last expert's gradients."""
    tests, op = TestFusedMoE(), FusedMoE()
    tensors, _, (dy,) = tests.draw(case, 0, "cuda")
    x, gate_up, down, indices, weights = tensors
    experts = case.get("experts")
    indices.copy_(experts - 1 - indices // 32 if experts > 100 else indices)
    got = tests.run(op, tensors, (), (dy,))
    assert max(gate_up.numel(), indices.numel() * gate_up.shape[1]) > 1 << 31
    few = 500
    chosen = indices[-few:].unique()
    local = torch.searchsorted(chosen, indices[-few:])
    part = (x[-few:].clone(), gate_up[chosen], down[chosen], local, weights[-few:].clone())
    exact = tests.exact(part, (), (dy[-few:].clone(),))
    wanted = Results(
        (got.outputs[0][-few:],), {name: got.gradients[name][-few:] for name in ("x", "topk_weights")}
    )  # type: ignore[index]
    tests.compare(wanted, exact, part, installed().tolerance, f"the last tokens of {case}")
    rows = (indices == experts - 1).any(-1)
    part = (x[rows], gate_up[-1:], down[-1:], indices[rows] - (experts - 1), weights[rows])
    names = ("gate_up_weight", "down_weight")
    gradients = tests.run(op, part, (), (dy[rows],), needed=names).gradients
    for name in names:
        torch.testing.assert_close(got.gradients[name][-1], gradients[name][0], rtol=0.02, atol=0.02)  # type: ignore[index]
