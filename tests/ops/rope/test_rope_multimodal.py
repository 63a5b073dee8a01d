"""Multimodal RoPE: three planes of tables, on every driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.rope.rope_multimodal import MultimodalRoPE
from tests.harness.op_tests import BF16, FP16, FP32, Case, Draw, Exact, OpTests
from tests.ops.rope.rotary_cases import by_complex_numbers, magnitudes, q_and_k

X = torch.ones(2, 3, 5, 8)
COS = torch.ones(3, 2, 5, 8)


class TestMultimodalRoPE(OpTests):
    """A case's shape is q's; ``sections`` are time, height and width."""

    op_class = MultimodalRoPE
    names = ("q_out", "k_out")
    frozen = ("cos", "sin")
    in_place: ClassVar[Mapping[str, str]] = {"q_out": "q", "k_out": "k"}
    cases = tuple(
        case.but(time=sections[0], height=sections[1], width=sections[2])
        for sections, case in (
            ((16, 24, 24), Case((2, 4, 5, 128), BF16)),
            ((16, 24, 24), Case((1, 3, 7, 128), FP16, cos=FP32, transposed=True)),
            ((3, 1, 2), Case((2, 3, 4, 12), FP32, k=1)),
            ((0, 0, 1), Case((2, 3, 4, 2), BF16)),
            ((8, 12, 12), Case((2, 5, 4, 64), BF16, layout="bshd", one=True)),
            ((5, 6, 9), Case((2, 3, 4, 80), FP16, half=True)),
            ((100, 30, 31), Case((1, 2, 3, 322), BF16, cos=FP32)),
            ((16, 16, 0), Case((2, 3, 4, 64), BF16, shift=1)),
            ((16, 0, 16), Case((2, 3, 4, 64), FP32, gap=4)),
        )
    )
    empty = (Case((0, 2, 3, 8), BF16, time=2, height=1, width=1),)
    large = (
        Case((2, 8192, 28, 128), BF16, k=4, layout="bshd", time=16, height=24, width=24),
        Case((2, 28, 8192, 128), FP16, k=4, transposed=True, time=16, height=24, width=24),
        Case((2, 16, 4096, 80), FP32, k=16, time=10, height=14, width=16),
    )
    beyond = (
        Case(((1 << 31) // (512 * 32 * 128) + 64, 512, 32, 128), BF16, layout="bshd", one=True,
             time=16, height=24, width=24),
    )  # fmt: skip
    bad: ClassVar[Mapping[str, Any]] = {
        "two sections": (
            (X, X, COS, COS, (2, 2)),
            {},
            ArgumentError,
            r"mrope_section must be three.*\(2, 2\)",
        ),
        "sections too long": ((X, X, COS, COS, (2, 2, 2)), {}, ArgumentError, r"add up.*got \(2, 2, 2\)"),
        "sections too short": ((X, X, COS, COS, (1, 1, 1)), {}, ArgumentError, r"add up.*got \(1, 1, 1\)"),
        "a negative section": ((X, X, COS, COS, (3, 2, -1)), {}, ArgumentError, r"add up.*\(3, 2, -1\)"),
        "no columns": ((X, X, COS[..., :0], COS[..., :0], (0, 0, 0)), {}, ArgumentError, "add up"),
        "wider than heads": (
            (X, X, torch.ones(3, 2, 5, 5), torch.ones(3, 2, 5, 5), (1, 2, 2)),
            {},
            ArgumentError,
            "at most to half of the head dimension 8",
        ),
        "one plane": ((X, X, COS[0], COS[0], (2, 1, 1)), {}, ArgumentError, r"cos must be.*got \(2, 5, 8\)"),
        "two planes": ((X, X, COS[:2], COS[:2], (2, 1, 1)), {}, ArgumentError, "cos must be"),
        "the tables' sequence": (
            (X, X, COS[:, :, :4], COS[:, :, :4], (2, 1, 1)),
            {},
            ArgumentError,
            "cos must",
        ),
        "sin's shape": ((X, X, COS, COS[:, :1], (2, 1, 1)), {}, ArgumentError, "sin must be of cos's shape"),
        "k's sequence": ((X, X[:, :, :4], COS, COS, (2, 1, 1)), {}, ArgumentError, "k must be as q"),
        "odd heads": ((X[..., :7], X[..., :7], COS, COS, (2, 1, 1)), {}, ArgumentError, "even, got 7"),
        "a layout": ((X, X, COS, COS, (2, 1, 1)), {"layout": "sb"}, ArgumentError, "layout must be one of"),
        "integers": ((X.int(), X.int(), COS, COS, (2, 1, 1)), {}, ArgumentTypeError, "q must be bfloat16"),
    }
    defaults: ClassVar[Mapping[str, Any]] = {"layout": "bhsd"}

    dimensions = (4, 4)

    def fit(self, case: Case, choose: Callable[[Sequence[Any]], Any]) -> Case:
        half = -(-min(case.shape[-1], 600) // 2)
        time = choose((half // 4, 0, half))
        height = choose(((half - time) // 2, 0, half - time))
        return case.but(
            shape=(*case.shape[:-1], 2 * half), time=time, height=height, width=half - time - height
        )

    def tensors(self, case: Case, draw: Draw) -> Tensors:
        layout = case.get("layout", "bhsd")
        q, k = q_and_k(case, draw, layout)
        batch, sequence = case.shape[0], case.shape[2 if layout == "bhsd" else 1]
        half = sum(case.get(name) for name in ("time", "height", "width"))
        angles = draw.uniform(-3.2, 3.2, 3, 1 if case.get("one") else batch, sequence, half)
        tables = (t.to(case.get("cos", case.dtype)) for t in (angles.cos(), angles.sin()))
        cos, sin = (t if case.get("half") else torch.cat((t, t), -1) for t in tables)
        return q, k, cos, sin

    def call(self, op: DifferentiableOp, tensors: Tensors, settings: tuple[Any, ...], **more: Any) -> Any:
        return op(*tensors, settings[:3], layout=settings[3], **more)  # type: ignore[operator]

    def call_in_place(self, op: DifferentiableOp, tensors: Tensors, settings: tuple[Any, ...]) -> Any:
        return self.call(op, tensors, settings, inplace=True)

    def table_case(
        self, kernel: str, dtypes: Mapping[str, torch.dtype], n: int, aligned: bool, rows: int
    ) -> Case:
        time = n // 4 // 16 * 16
        return Case(
            (1, 3, rows, 2 * n),
            dtypes["dtype"],
            shift=int(not aligned),
            cos=dtypes["table"],
            time=time,
            height=time,
            width=n - 2 * time,
        )

    def formula(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, time: int, height: int, width: int, layout: str
    ) -> tuple[Tensor, Tensor]:
        """Each column of a plane by its number, as Qwen2-VL's sections of both halves."""
        plane = torch.tensor([0] * time + [1] * height + [2] * width)
        columns = torch.arange(time + height + width)
        cos, sin = (
            t[plane, :, :, columns].movedim(0, -1).unsqueeze(1 if layout == "bhsd" else 2) for t in (cos, sin)
        )
        return by_complex_numbers(q, cos, sin, False), by_complex_numbers(k, cos, sin, False)

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        cos, sin = exact.inputs["cos"], exact.inputs["sin"]
        settings = exact.settings.values()

        def rotated(x: Tensor, sign: int) -> Tensor:
            return MultimodalRoPE.reference(x, x, cos.abs(), sign * sin.abs(), *settings)[0]

        return magnitudes(exact, rotated)


def test_same_planes_are_rope() -> None:
    tests = TestMultimodalRoPE()
    (q, k, cos, sin), settings, _ = tests.draw(tests.cases[0], 0, "cpu")
    cos, sin = (t[:1].expand(t.shape) for t in (cos, sin))
    got = tests.call(liger_aot.load("rope_multimodal"), (q, k, cos, sin), settings)
    wanted = liger_aot.load("rope")(q, k, cos[0], sin[0])
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_without_k() -> None:
    tests = TestMultimodalRoPE()
    (q, k, cos, sin), settings, _ = tests.draw(tests.cases[0], 0, "cpu")
    op = liger_aot.load("rope_multimodal")
    wanted, _ = tests.call(op, (q, k, cos, sin), settings)
    got, none = tests.call(op, (q, None, cos, sin), settings)
    assert none is None and torch.equal(got, wanted)
