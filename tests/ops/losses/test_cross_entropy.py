"""Cross entropy on every driver: against torch's function in float64, and what its kernels have beside; its module,
and torch.compile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.nn import CrossEntropyLoss
from liger_aot.ops.losses import _row_loss as losses
from liger_aot.ops.losses._row_loss import RowLoss
from liger_aot.ops.losses.cross_entropy import CrossEntropy
from liger_aot.runtime import device_errors
from tests.harness.op_tests import BF16, BINARIES, BY_FORM, DTYPES, EMULATED, FP32, WAYS, Case, OpTests, Way
from tests.ops.losses.cross_entropy_cases import CASES, EMPTY, EVERYTHING, IGNORED, CrossEntropyCases

X, T = torch.ones(4, 8), torch.tensor([0, 7, 3, 1])
# NumPy's, on the interpreter: differences to -inf and the lowest value are meant to overflow
quiet = pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered")


@quiet
class TestCrossEntropy(CrossEntropyCases, OpTests):
    op_class = CrossEntropy
    cases = CASES
    empty = EMPTY
    large = (
        *(
            Case(((1 << 23) // n, n), dtype, ignored=7)
            for n in (10, 1000, 4096, 32000, 50257, 128_256, 262_144)
            for dtype in DTYPES
        ),
        Case((7, 1 << 20), BF16),
        Case((5, (1 << 20) + 3), FP32),
        Case((70_000, 100), BF16, weight=FP32, ignored=3),
        Case((60, 128_256), BF16, **EVERYTHING),
    )
    beyond = (Case((16_640, 131_072), BF16, reduction="none"),)
    longest_interpreted = 20_000
    bad: Mapping[str, Any] = {
        "a scalar": ((torch.tensor(1.0), T), {}, ArgumentError, "logits must have at least one dimension"),
        "integers": ((X.int(), T), {}, ArgumentTypeError, "logits must be bfloat16.*got int32"),
        "float targets": ((X, T.float()), {}, ArgumentTypeError, "target must be int64 or int32, got torch.f"),
        "short targets": ((X, T.short()), {}, ArgumentTypeError, "target must be int64.*got torch.int16"),
        "few targets": ((X, T[:3]), {}, ArgumentError, r"target must be of shape \(4,\).*got \(3,\)"),
        "a column": ((X, T[:, None]), {}, ArgumentError, r"target must be of shape \(4,\).*got \(4, 1\)"),
        "no class": ((X, T + 1), {}, ArgumentError, r"target must be in \[0, 8\).*got 8"),
        "a negative one": ((X, T - 1), {}, ArgumentError, r"target must be in \[0, 8\).*got -1"),
        "few weights": ((X, T, X[0, :7]), {}, ArgumentError, r"weight must be of shape \(8,\).*got \(7,\)"),
        "half weights": ((X, T, X[0].half()), {}, ArgumentTypeError, "weight must be float32 or.*float16"),
        "learned weights": (
            (X, T, X[0].clone().requires_grad_()), {}, ArgumentError, "weight gets no gradient",
        ),
        "reduction": ((X, T), {"reduction": "batchmean"}, ArgumentError, "reduction must be one of mean"),
        "smoothing": ((X, T), {"label_smoothing": 1.5}, ArgumentError, "label_smoothing must be from 0 to 1"),
        "softcap": ((X, T), {"softcap": -1.0}, ArgumentError, "softcap must be at least 0.*got -1"),
        "no number": ((X, T), {"softcap": "30"}, ArgumentTypeError, "softcap must be a number, got '30'"),
        "z": ((X, T), {"lse_square_scale": float("nan")}, ArgumentError, "lse_square_scale must be fin.*nan"),
        "ignore": ((X, T), {"ignore_index": 1.0}, ArgumentTypeError, "ignore_index must be an int"),
    }  # fmt: skip

    def table_case(
        self, kernel: str, dtypes: Mapping[str, torch.dtype], n: int, aligned: bool, rows: int
    ) -> Case | None:
        options = {"softcap": 5.0} if kernel.endswith("full") else {}
        if kernel.removeprefix("cross_entropy_").split("_")[0] not in ("forward", "gradient"):
            return None
        return Case((rows, n), dtypes["dtype"], **options)  # a generic row's n is odd

    # ---- beside the loss ------------------------------------------------------------------------------------

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    @pytest.mark.parametrize("reduction", losses.REDUCTIONS)
    def test_more_results(self, way: Way, reduction: str) -> None:
        case = Case((2, 9, 1203), BF16, ignored=4, reduction=reduction, lse_square_scale=0.01)
        (logits, target, _), _, _ = self.draw(case, 0, way.device)
        logits[0, 0, 700], logits[0, 0, 40] = 50.0, 50.0
        logits[1, 0, int(target[1, 0])] = 60.0
        leaf = logits.clone().requires_grad_()
        loss, z, accuracy, predicted = way.op(
            leaf, target, lse_square_scale=0.01, reduction=reduction, return_z_loss=True,
            return_token_accuracy=True, return_predicted_tokens=True,
        )  # fmt: skip
        counts = target != IGNORED
        assert torch.equal(predicted, torch.where(counts, logits.argmax(-1), -1)) and predicted[0, 0] == 40
        hits = (predicted == target) & counts
        assert hits.any()
        lse = torch.logsumexp(logits.double(), -1)
        wanted = torch.where(counts, 0.01 * lse * lse, 0.0)
        of_rows = hits.float()
        if reduction != "none":
            of_rows = of_rows.sum() / counts.sum()
            wanted = wanted.sum() / (counts.sum() if reduction == "mean" else 1)
        torch.testing.assert_close(z.double(), wanted, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(accuracy, of_rows)
        assert loss.requires_grad and not (z.requires_grad or accuracy.requires_grad)
        plain = leaf.detach().clone().requires_grad_()
        alone = way.op(plain, target, lse_square_scale=0.01, reduction=reduction)
        torch.testing.assert_close(loss, alone, rtol=1e-6, atol=1e-6)
        found = torch.autograd.grad(loss.sum(), leaf)[0], torch.autograd.grad(alone.sum(), plain)[0]
        torch.testing.assert_close(*found, rtol=2**-7, atol=1e-6)
        only = way.op(leaf, target, reduction=reduction, return_predicted_tokens=True)
        assert len(only) == 2 and torch.equal(only[1], predicted)

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    def test_all_ignored(self, way: Way) -> None:
        target = torch.full((3,), IGNORED, device=way.device)
        for n in (40, 1203):
            logits = torch.randn(3, n, device=way.device, requires_grad=True)
            for reduction in losses.REDUCTIONS:
                loss = way.op(logits, target, reduction=reduction)
                wanted = functional.cross_entropy(logits, target, reduction=reduction)
                assert torch.equal(loss, wanted) or (loss.isnan() and wanted.isnan())
                (gradient,) = torch.autograd.grad(loss.sum(), logits)
                assert not gradient.any()

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    def test_infinite_logits(self, way: Way) -> None:
        """-inf masks a class, as in torch; rows with NaN, +inf or nothing but -inf give what torch gives."""
        inf = float("inf")
        for n in (40, 1203):
            logits = torch.randn(6, n)
            logits[0, 3:] = -inf
            logits[1, :] = -inf
            logits[2, 5] = inf
            logits[3, 5] = float("nan")
            logits[4, 2] = -inf
            target = torch.tensor([0, 1, 2, 3, 2, 5])
            logits, target = logits.to(way.device), target.to(way.device)
            got = way.op(logits, target, reduction="none")
            wanted = functional.cross_entropy(logits, target, reduction="none")
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6, equal_nan=True)
            leaf = logits[[0, 4, 5]].clone().requires_grad_()
            (gradient,) = torch.autograd.grad(way.op(leaf, target[[0, 4, 5]]), leaf)
            loss = functional.cross_entropy(leaf, target[[0, 4, 5]])
            torch.testing.assert_close(gradient, torch.autograd.grad(loss, leaf)[0], rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    def test_target_layouts(self, way: Way) -> None:
        (logits, target, _), _, _ = self.draw(Case((4, 6, 40), FP32), 0, way.device)
        across = target.t().contiguous().t()
        assert not across.is_contiguous()
        assert torch.equal(way.op(logits, across), way.op(logits, target))

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    def test_an_ignored_index_past_int32_ignores_no_int32_target(self, way: Way) -> None:
        """Modulo 2^32 it is one of them; with gradients and without."""
        logits, target = torch.randn(5, 40, device=way.device), torch.arange(5, device=way.device)
        wanted = functional.cross_entropy(logits, target)
        for grad in (False, True):
            found = way.op(logits.requires_grad_(grad), target.int(), ignore_index=3 + (1 << 32))
            torch.testing.assert_close(found.detach(), wanted)

    # ---- targets out of range -------------------------------------------------------------------------------

    @pytest.mark.parametrize("way", BINARIES, indirect=True)
    @pytest.mark.parametrize("n", [40, 1203])
    @pytest.mark.parametrize("in_place", [False, True])
    def test_target_out_of_range(self, way: Way, n: int, in_place: bool) -> None:
        """The row is NaN, the others are right, and the next call raises, once."""
        for wrong in (n, -1, n + (1 << 32), -(1 << 40)):
            target = torch.tensor([1, wrong, 2, IGNORED], device=way.device)
            logits = torch.randn(4, n, device=way.device, requires_grad=True)
            way.op(logits, target.clamp(0, n - 1))
            loss = way.op(logits * 1, target, reduction="none", inplace_grad=in_place)
            (gradient,) = torch.autograd.grad(loss.sum(), logits)
            if way.device == "cuda":
                torch.cuda.synchronize()
            assert loss.isnan().tolist() == [False, True, False, False]
            assert gradient.isnan().any(1).tolist() == [False, True, False, False]
            with pytest.raises(ArgumentError, match=rf"cross_entropy: an earlier call was given {wrong},"):
                way.op(logits, target)
            torch.testing.assert_close(
                way.op(logits[:1], target[:1]), functional.cross_entropy(logits[:1], target[:1])
            )

    @pytest.mark.parametrize("way", BINARIES, indirect=True)
    def test_debug_raises_at_once(self, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device_errors, "DEBUG", True)
        logits = torch.randn(2, 40, device=way.device)
        with pytest.raises(ArgumentError, match="cross_entropy: this call was given 41"):
            way.op(logits, torch.tensor([1, 41], device=way.device))

    # ---- what fused and vocabulary-parallel losses are built from -------------------------------------------

    @pytest.mark.parametrize("way", BINARIES, indirect=True)
    @pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"softcap": 5.0}], ids=str)
    def test_shards_of_the_vocabulary(self, way: Way, options: dict[str, Any]) -> None:
        """Statistics of uneven parts of the columns combine to the whole row's; the gradient comes part by part."""
        for n, cut in ((60, 17), (2600, 1040)):
            (logits, target, weight), _, _ = self.draw(
                Case((4, n), FP32, ignored=3, weight=FP32), 0, way.device
            )
            row_loss, on = RowLoss(**options), runtime_of(way)
            weight_sum = weight.sum()
            more = {"weight": weight, "weight_sum": weight_sum, "vocabulary": n}
            whole = statistics(on, logits, target, row_loss, **more)
            halves = [(0, logits[:, :cut]), (cut, logits[:, cut:])]
            found = [statistics(on, x, target, row_loss, vocab_start=at, **more) for at, x in halves]
            lse = torch.logaddexp(found[0][1], found[1][1])
            counts = target != IGNORED
            torch.testing.assert_close(lse[counts], whole[1][counts], rtol=1e-6, atol=1e-6)
            parts = found[0][2] + found[1][2]
            torch.testing.assert_close(parts[0], whole[2][0], rtol=1e-6, atol=1e-6)
            if row_loss.label_smoothing:
                torch.testing.assert_close(parts[1], whole[2][1], rtol=1e-5, atol=1e-4)
            wanted = torch.empty_like(logits)
            losses.gradient(on, wanted, logits, target, row_loss, lse=whole[1], **more)
            for at, x in halves:
                out = torch.empty_like(x, memory_format=torch.contiguous_format)
                losses.gradient(on, out, x, target, row_loss, lse=whole[1], vocab_start=at, **more)
                torch.testing.assert_close(out, wanted[:, at : at + x.shape[1]], rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize("way", BINARIES, indirect=True)
    @pytest.mark.parametrize("options", [{}, {"softcap": 5.0}], ids=str)
    def test_token_scaling(self, way: Way, options: dict[str, Any]) -> None:
        """A row's loss and gradient times its target's probability; the gradient does not go through that."""
        for n in (60, 2003):
            (logits, target, _), _, _ = self.draw(Case((5, n), FP32, ignored=4), 0, way.device)
            on, row_loss = runtime_of(way), RowLoss(token_scaling=True, lse_square_scale=0.01, **options)
            leaf = logits.double().requires_grad_()
            cap = options.get("softcap")
            x = cap * torch.tanh(leaf / cap) if cap else leaf
            each = functional.cross_entropy(x, target, reduction="none")
            counts = target != IGNORED
            each = each + torch.where(counts, 0.01 * torch.logsumexp(x, -1) ** 2, 0.0)
            p = torch.softmax(x.detach(), -1).gather(-1, target.clamp(0)[:, None])[:, 0]
            each = each * p
            scale = torch.rand(5, device=way.device)
            (wanted,) = torch.autograd.grad(each, leaf, scale.double())
            loss, lse, parts = statistics(on, logits, target, row_loss)
            torch.testing.assert_close(loss.double(), each.detach(), rtol=1e-5, atol=1e-7)
            out = torch.empty_like(logits)
            losses.gradient(on, out, logits, target, row_loss, lse=lse, parts=parts, grad=scale)
            torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-8)
            losses.gradient_in_place(
                on, logits, target, row_loss, losses=loss, lse=lse, parts=parts, grad=scale
            )
            torch.testing.assert_close(logits.double(), wanted, rtol=1e-5, atol=1e-8)
            torch.testing.assert_close(loss.double(), each.detach(), rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize(
        "way", [EMULATED, *(way for way in BINARIES if EMULATED not in way.values), *BY_FORM], indirect=True
    )
    def test_sums_in_two_launches(self, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
        loaded = runtime_of(way).kernels["cross_entropy_totals"]((False,), 1)
        monkeypatch.setattr(loaded, "numbers", {**loaded.numbers, "rows_for_one_cta": 10})
        monkeypatch.setattr(loaded, "rows", 2)
        for rows in (10, 11, 150):
            case = Case((rows, 7), FP32, ignored=3, weight=FP32, lse_square_scale=0.1)
            (logits, target, weight), settings, _ = self.draw(case, rows, way.device)
            loss, z, accuracy = way.op(
                logits, target, weight, lse_square_scale=0.1, return_z_loss=True, return_token_accuracy=True
            )
            wanted = self.formula(logits.double(), target, weight.double(), *settings)
            torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-6)
            counts = target != IGNORED
            lse = torch.logsumexp(logits.double(), -1)
            torch.testing.assert_close(z.double(), (0.1 * lse * lse)[counts].mean(), rtol=1e-5, atol=1e-6)
            hits = (logits.argmax(-1) == target)[counts].float().mean()
            torch.testing.assert_close(accuracy, hits)


def runtime_of(way: Way) -> Any:
    where = torch.empty(1, device=way.device)
    return way.op._own.of(where, "where")


def statistics(on: Any, logits: Tensor, target: Tensor, row_loss: RowLoss, **more: Any) -> tuple[Tensor, ...]:
    rows = logits.shape[0]
    made = torch.empty(2, rows, device=logits.device), torch.zeros(3, rows, device=logits.device)
    losses.row_stats(on, logits, target, row_loss, losses=made[0][0], lse=made[0][1], parts=made[1], **more)
    return made[0][0], made[0][1], made[1]


# ---- in torch's machinery -------------------------------------------------------------------------------------


def test_module() -> None:
    """As torch's, classes last; a new module has torch's state."""
    weight = torch.rand(8)
    for keywords in ({}, {"weight": weight, "label_smoothing": 0.1, "reduction": "sum"}):
        module, other = CrossEntropyLoss(**keywords), torch.nn.CrossEntropyLoss(**keywords)
        assert module.state_dict().keys() == other.state_dict().keys()
        torch.testing.assert_close(module(X * T[:, None], T), other(X * T[:, None], T))
    capped = CrossEntropyLoss(softcap=2.0, lse_square_scale=0.1)
    wanted = liger_aot.load("cross_entropy")(X, T, softcap=2.0, lse_square_scale=0.1)
    assert torch.equal(capped(X, T), wanted)


def test_compiled_results() -> None:
    """All results under torch.compile, with and without gradients, in place or not."""
    op = liger_aot.load("cross_entropy")
    more = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}

    def called(x: Tensor) -> Any:
        return op(x * 2, T, lse_square_scale=0.1, **more), op(x * 2, T, inplace_grad=True)

    torch.compiler.reset()
    compiled = torch.compile(called, fullgraph=True, backend="aot_eager")
    for grad in (False, True):
        x = torch.randn(4, 8, requires_grad=grad)
        (wanted, w), (got, g) = called(x), compiled(x)
        for a, b in zip((*wanted, w), (*got, g), strict=True):
            assert torch.equal(a, b)
        if grad:
            torch.testing.assert_close(
                torch.autograd.grad(got[0] + g, x)[0], torch.autograd.grad(wanted[0] + w, x)[0]
            )
