"""What the tests of SwiGLU and GeGLU share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.differentiable import Tensors
from tests.conftest import built_pack
from tests.harness.op_tests import BF16, FP16, FP32, Case, Draw, OpTests
from tests.harness.recording import recorded

GATE = torch.ones(2, 8)


class GatedTests(OpTests):
    """With ``packed``, a case's shape is that of gate and up in one tensor."""

    empty = (Case((0, 16), BF16), Case((4, 0), FP32), Case((0, 6), FP16, packed=True))
    beyond = (
        Case(((1 << 31) // 14336 + 64, 14336), BF16),
        Case(((1 << 30) // 4096 + 64, 8192), BF16, packed=True),
    )
    bad: Mapping[str, Any] = {
        "a scalar": ((torch.tensor(1.0),), {}, ArgumentError, "gate must have at least one dimension"),
        "odd packed": ((torch.ones(2, 7),), {}, ArgumentError, r"must be even, got \(2, 7\)"),
        "shapes differ": (
            (GATE, torch.ones(2, 9)),
            {},
            ArgumentError,
            r"up must be of gate's shape \(2, 8\).*got \(2, 9\)",
        ),
        "up broadcast": ((GATE, torch.ones(8)), {}, ArgumentError, r"got \(8,\)"),
        "dtypes differ": ((GATE, GATE.to(BF16)), {}, ArgumentError, "dtype torch.float32.*torch.bfloat16"),
        "integers": ((GATE.int(), GATE.int()), {}, ArgumentTypeError, "gate must be bfloat16.*got int32"),
    }

    def fit(self, case: Case, choose: Callable[[Sequence[Any]], Any]) -> Case:
        return case.but(shape=(*case.shape[:-1], 2 * case.shape[-1])) if case.get("packed") else case

    def table_case(
        self, kernel: str, dtypes: Mapping[str, torch.dtype], n: int, aligned: bool, rows: int
    ) -> Case | None:
        """The forward's n counts the elements of all rows."""
        return super().table_case(kernel, dtypes, n, aligned, 1 if kernel.endswith("_forward") else rows)

    def test_rows_shorter_than_a_block(self) -> None:
        """Packed, they take the table's last row: a block of twice their columns would be half idle."""
        kernel, rows = f"{self.op_class.name}_forward", 2000
        for columns, packed, wanted in ((1024, True, 1024), (2048, True, 2048), (1024, False, 2048)):
            op, made = recorded(self.op_class, built_pack("sm90"))
            gate = torch.empty(rows, columns * (1 + packed), dtype=BF16)
            op(gate) if packed else op(gate, gate)
            (driver,) = (driver for driver in made if kernel in driver.loaded)
            assert driver.loaded[kernel].numbers["block"] == wanted  # of what was loaded last
            assert driver.launches[kernel][0] == rows * columns // wanted

    def tensors(self, case: Case, draw: Draw) -> Tensors:
        gate = draw.rows(*case.shape).mul_(case.get("size", 2.0))
        return gate, None if case.get("packed") else draw.rows(*case.shape)
