"""Cross entropy in place over long rows: the form that copies ahead through shared memory, at small blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from liger_aot.ops.losses import _row_loss as losses
from liger_aot.ops.losses._row_loss import RowLoss
from tests.harness import drivers
from tests.harness.op_tests import BF16, DTYPES, FP16, FP32, Case, Way
from tests.harness.own_tables import LENGTHS, WHOLE, way_of, with_pipeline
from tests.harness.tolerances import worst
from tests.ops.losses import (  # not its classes: those would be collected once more
    test_cross_entropy,
    test_cross_entropy_in_place,
)
from tests.ops.losses.cross_entropy_cases import IGNORED

# On the interpreter, whose NumPy warns of differences to -inf
pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered"),
    pytest.mark.usefixtures("poisoned"),
]

TABLE = """
  { form = "long", aligned = false, block = 1024, unaligned = true, num_warps = 4 },
  { form = "pipeline", block = 64, num_warps = 4, programs_per_multiprocessor = 1, NUMBERS },
  { form = "long", block = 64, num_warps = 4 },
"""
# Programs, of which there are two, have one row each, one of them alone, or four and five.
ROWS = (1, 2, 9)
TESTS = test_cross_entropy_in_place.TestCrossEntropyInPlace()


def piped(folder: Path, prefetch: int = 2) -> Way:
    """The op with a pipeline; "long" where it doesn't reach, and where anything is not aligned."""
    return way_of(TESTS, folder, cross_entropy_in_place=with_pipeline(TABLE, WHOLE, prefetch))


def forms(way: Way) -> set[str]:
    """Those of the kernel that were used."""
    return {name.split("-")[1] for name in way.loaded() if name.startswith("cross_entropy_in_place-")}


@pytest.mark.parametrize(
    "prefetch", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_rows_of_every_length(prefetch: int, tmp_path: Path) -> None:
    way = piped(tmp_path, prefetch)
    for seed, n in enumerate(LENGTHS):
        case = Case(
            (ROWS[(seed + prefetch) % 3], n),
            DTYPES[seed % 3],
            gap=16 * (n % 3),
            reduction=("mean", "sum", "none")[seed // 2 % 3],
            ignored=(None, 3, 2)[seed % 3] if seed // 2 % 3 else None,
            index=(torch.int64, torch.int32)[seed % 2],
            weight=(None, FP32)[seed // 3 % 2],
            lse_square_scale=(0.0, 0.02)[seed // 4 % 2],
        )
        TESTS.check(way.op, case, way.allowed, seed=seed)
    assert forms(way) == {"pipeline"}


@pytest.mark.parametrize("prefetch,n,dtype", [(2, 64, BF16), (1, 208, FP32), (4, 320, BF16), (2, 320, FP16)])
def test_ignored_rows_are_not_read(prefetch: int, n: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Whatever stands in them, their gradient is 0; the others are as if they were not there."""
    way = piped(tmp_path, prefetch)
    on = test_cross_entropy.runtime_of(way)
    for pattern in (0, 1, 0b110, 0b101101101101, 0b11110001111000, 0b100111100000, (1 << 14) - 1):
        target = torch.randint(n, (14,), generator=torch.Generator().manual_seed(pattern))
        ignored = torch.tensor([pattern >> i & 1 for i in range(14)], dtype=torch.bool)
        target[ignored] = IGNORED
        logits = torch.randn(14, n, generator=torch.Generator().manual_seed(n)).to(dtype)
        logits[5, 33] = logits[8, 32] = 300.0  # whose power alone would overflow
        logits[ignored, 1::7] = float("nan")
        logits[ignored, 2::7] = float("inf")
        wanted, found = _expected(logits, target, RowLoss()), _found(on, logits, target, RowLoss())
        for name in wanted:
            assert not found[name].isnan().any(), name
            assert not found[name].transpose(0, -1)[..., ignored].any(), name
        torch.testing.assert_close(found["loss"], wanted["loss"].float(), rtol=1e-5, atol=1e-6)
        assert worst(found["gradient"], wanted["gradient"], way.allowed) <= 1


def test_all_that_scales_a_row(tmp_path: Path) -> None:
    """Weights, z-loss, the target's probability, a gradient for all rows or one a row, totals; every statistic."""
    way = piped(tmp_path)
    on, n = test_cross_entropy.runtime_of(way), 272
    draw = torch.Generator().manual_seed(0)
    for seed, dtype in enumerate((FP32, BF16, FP16, FP32, FP32)):
        logits = torch.randn(7, n, generator=draw).mul_(3).to(dtype)
        target = torch.tensor([0, n - 1, 63, 64, IGNORED, n - 129, n // 2])[torch.randperm(7, generator=draw)]
        weight = torch.rand(n, generator=draw) + 0.25 if seed % 2 else None
        grad = torch.rand(7 if seed < 3 else 1, generator=draw) - 0.5
        totals = torch.tensor([3.5, 6.0]) if seed != 1 else None
        row_loss = RowLoss(token_scaling=seed < 4, lse_square_scale=0.02 * (seed - 1))
        more = {"weight": weight, "grad": grad, "totals": totals}
        wanted = _expected(logits, target, row_loss, **more)
        found = _found(on, logits, target, row_loss, **more)
        counts = target != IGNORED
        for name in wanted:
            if name != "gradient":
                torch.testing.assert_close(
                    found[name][..., counts].double(), wanted[name][..., counts], rtol=1e-5, atol=2e-6
                )
                assert not found[name][..., ~counts].any()
        error = worst(found["gradient"], wanted["gradient"], way.allowed)
        assert error <= 1, f"{dtype}: {error} of what is allowed"
    assert forms(way) == {"pipeline"}


def test_targets_out_of_range_and_infinite_logits(tmp_path: Path) -> None:
    way = piped(tmp_path)
    on, n = test_cross_entropy.runtime_of(way), 256
    inf, flag = float("inf"), torch.zeros(1, dtype=torch.int64)
    for wrong in (n, -1, n + (1 << 32), -(1 << 40)):
        logits = torch.randn(8, n, generator=torch.Generator().manual_seed(0))
        logits[3, 1:] = -inf
        logits[4] = -inf
        logits[5, 5] = inf
        logits[6, n - 1] = float("nan")
        target = torch.tensor([1, wrong, IGNORED, 0, 0, 2, 3, n - 1])
        wanted = _expected(logits, target.where(target != wrong, IGNORED), RowLoss())
        found = _found(on, logits, target, RowLoss(), flag=flag.data_ptr())
        assert flag.item() == wrong
        assert found["loss"].isnan().tolist() == [i in (1, 4, 5, 6) for i in range(8)]
        assert found["gradient"].isnan().all(1).tolist() == [i in (1, 4, 5, 6) for i in range(8)]
        for name in ("loss", "gradient"):
            rows = [0, 2, 3, 7]
            torch.testing.assert_close(found[name][rows].double(), wanted[name][rows], rtol=1e-5, atol=1e-6)


def test_other_rows_take_other_forms(tmp_path: Path) -> None:
    way = piped(tmp_path)
    for case in (Case((3, 80), BF16, shift=1), Case((3, 81), BF16), Case((3, 336), BF16)):
        TESTS.check(way.op, case, way.allowed)
    assert forms(way) == {"long"}


def test_programs_are_persistent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more of them than multiprocessors; of other forms one a row."""
    on = test_cross_entropy.runtime_of(piped(tmp_path))
    launched, launch = [], drivers.Launchable.launch

    def recorded(self: drivers.Launchable, device: int, stream: int, x: int, *more: Any) -> None:
        launched.append(x)
        launch(self, device, stream, x, *more)

    monkeypatch.setattr(drivers.Launchable, "launch", recorded)
    for rows, n in ((1, 64), (9, 64), (9, 336)):
        _found(on, torch.randn(rows, n), torch.zeros(rows, dtype=torch.int64), RowLoss())
    assert launched == [1, drivers.MULTIPROCESSORS, 9]


def _found(
    on: object, logits: Tensor, target: Tensor, row_loss: RowLoss, **more: object
) -> dict[str, Tensor]:
    rows, over = len(logits), logits.clone()
    loss, lse, parts = torch.empty(rows), torch.empty(2, rows), torch.empty(3, rows)
    losses.gradient_in_place(
        on, over, target, row_loss, losses=loss, lse=lse[0], parts=parts, **more  # type: ignore[arg-type]
    )  # fmt: skip
    return {"loss": loss, "lse": lse[0], "at target": parts[0], "z": parts[2], "gradient": over}


def _expected(
    logits: Tensor,
    target: Tensor,
    row_loss: RowLoss,
    *,
    weight: Tensor | None = None,
    grad: Tensor | None = None,
    totals: Tensor | None = None,
) -> dict[str, Tensor]:
    """By torch in float64."""
    leaf = logits.double().requires_grad_()
    at, counts = target.clamp(0), target != IGNORED
    lse = torch.logsumexp(leaf, -1)
    z = torch.where(counts, row_loss.lse_square_scale * lse * lse, 0.0)
    wide = None if weight is None else weight.double()
    plain = functional.cross_entropy(leaf, target, wide, reduction="none")
    x_t = leaf.detach().gather(-1, at[:, None])[:, 0]
    by = torch.exp(x_t - lse.detach()) if row_loss.token_scaling else torch.ones_like(x_t)
    scale = torch.ones(1).double() if grad is None else grad.double()
    weights, count = (1.0, 1.0) if totals is None else totals.tolist()
    whole = (plain / weights + z / count) * by * scale
    (gradient,) = torch.autograd.grad(whole.where(counts, 0.0).sum(), leaf)
    found = {"loss": (plain + z) * by, "lse": lse, "at target": x_t, "z": z * by}
    return {k: v.detach().where(counts, 0.0) for k, v in found.items()} | {
        "gradient": gradient.where(counts[:, None], 0.0)
    }
