"""What the tests of kl_div, jsd and tvd share: losses of one number, labels, and gradients that are given away."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.differentiable import Tensors
from tests.harness.op_gpu_tests import installed
from tests.harness.op_tests import BF16, DTYPES, FP16, FP32, WAYS, Case, Draw, Exact, OpTests, Way
from tests.harness.tolerances import UNIT_ROUNDOFF

IGNORED = -100


class DivergenceTests(OpTests):
    """A case's option ``labels`` is the labels' dtype; every third row is ignored then, or all with ``all_ignored``."""

    names = ("loss",)
    empty = (Case((0, 16), BF16), Case((4, 0), FP32))
    beyond = ()
    longest_interpreted = 70_000
    same_without_gradient = False  # a kernel of its own finds the loss and the gradient together
    labelled: ClassVar[bool] = True
    # What makes a call take a kind, if not the defaults.
    settings_of: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    @staticmethod
    def base_cases(**options: Any) -> tuple[Case, ...]:
        """Of settings that these options change."""
        return (
            Case((3, 5, 48), BF16, **options),
            Case((1, 1), BF16, **options),
            Case((7, 1), FP32, **options),
            Case((5, 37), FP16, **options),
            Case((6, 1000), FP32, **options),
            Case((4, 17), BF16, shift=3, **options),
            Case((5, 48), BF16, gap=16, **options),
            Case((3, 2064), FP16, gap=5, **options),
            Case((5001,), BF16, shift=1, **options),
            Case((3, 8192), BF16, **options),
        )

    @staticmethod
    def labelled_cases(**options: Any) -> tuple[Case, ...]:
        return (
            Case((5, 48), BF16, labels=torch.int64, **options),
            Case((2, 4, 37), FP16, labels=torch.int32, **options),
            Case((7, 2100), FP32, labels=torch.int64, gap=3, **options),
            Case((4, 4112), BF16, labels=torch.int32, gap=16, **options),
            Case((4, 48), BF16, labels=torch.int64, all_ignored=True, **options),
        )

    def fit(self, case: Case, choose: Callable[[Sequence[Any]], Any]) -> Case:
        return case if case.get("labels") else case.but(all_ignored=False)

    def distributions(self, case: Case, draw: Draw) -> tuple[Tensor, Tensor]:
        """Log-probabilities of two models that agree in part."""
        x, y = draw.rows(*case.shape), draw.rows(*case.shape)
        if not x.numel():
            return x, y
        for t, other in ((x, None), (y, x)):
            wide = t.float() * 2 if other is None else t.float() + other.float()
            t.copy_(wide.log_softmax(-1))
        return x, y

    def labels(self, case: Case, draw: Draw) -> Tensor | None:
        dtype = case.get("labels")
        if dtype is None:
            return None
        labels = draw.integers(1000, *case.shape[:-1])
        ignored = torch.arange(labels.numel(), device=labels.device).view(labels.shape) % 3 == 1
        return torch.where(ignored | case.get("all_ignored", False), IGNORED, labels).to(dtype)

    def draw(self, case: Case, seed: int, device: str) -> tuple[Tensors, tuple[Any, ...], tuple[Tensor, ...]]:
        """A gradient of one number is no row."""
        draw = Draw(case, torch.Generator(device).manual_seed(seed))
        tensors, settings = self.tensors(case, draw), self.settings(case)
        meta = (t if t is None else t.to("meta") for t in tensors)
        (loss,) = self.op_class.reference(*meta, *settings)
        if loss.dim():
            return tensors, settings, (draw.rows(*loss.shape, dtype=loss.dtype),)
        return tensors, settings, (draw.dense(1, dtype=loss.dtype)[0],)

    def sizes(self, exact: Exact) -> tuple[Tensor, Tensor]:
        """Of each element the sum of the absolute values that its summand, and its derivative, are made of."""
        raise NotImplementedError

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        """The loss adds up the errors of its summands; both are multiplied by 1 / count, in two roundings more."""
        x = next(iter(exact.inputs.values()))
        if not x.numel():
            return {}
        of_term, of_slope = self.sizes(exact)
        labels, dloss = exact.inputs.get("shift_labels"), exact.grads[0]
        if labels is not None:
            counts = (labels.long() != exact.settings["ignore_index"]).unsqueeze(-1)
            of_term, of_slope = of_term * counts, of_slope * counts
        reduction = exact.settings.get("reduction", "batchmean")
        if reduction != "none":
            rows = x.shape[0] if self.op_class.batch_is_first else x.shape[:-1].numel()
            if labels is not None:
                rows = max(int((labels.long() != exact.settings["ignore_index"]).sum()), 1)
            divisor = {"sum": 1, "batchmean": rows, "mean": rows * x.shape[-1]}[reduction]
            if self.op_class.batch_is_first and reduction == "mean":
                divisor = x.numel()
            of_term, of_slope = of_term.sum() / divisor, of_slope / divisor
        name = next(iter(exact.inputs))
        return {
            "loss": {"magnitude": of_term},
            f"d{name}": {"magnitude": of_slope * dloss.abs()},
        }

    def table_case(
        self, kernel: str, axes: Mapping[str, Any], n: int, aligned: bool, rows: int
    ) -> Case | None:
        return Case((1, n), axes["dtype"], shift=int(not aligned), **self.settings_of.get(axes["kind"], {}))

    # ---- beyond what every op is tested for -----------------------------------------------------------------

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    def test_second_backward(self, way: Way) -> None:
        """With retain_graph=True: the same, also after what the first gave was overwritten, and for a gradient of 1,
        which the forward has found already."""
        tensors, settings, _ = self.draw(self.cases[0], 3, way.device)
        x, *rest = tensors
        leaf = x.detach().requires_grad_()
        loss = self.call(way.op, (leaf, *rest), settings)
        one = torch.ones_like(loss)
        (first,) = torch.autograd.grad(loss, leaf, one, retain_graph=True)
        was = first.clone()
        first.fill_(torch.nan)
        for factor in (1.0, 2.0, 1.0):
            (more,) = torch.autograd.grad(loss, leaf, one * factor, retain_graph=True)
            # Two kernels: where products and sums are contracted differently, a rounding may fall the other way.
            torch.testing.assert_close(more, was * factor, rtol=2 * UNIT_ROUNDOFF[more.dtype], atol=0)

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    def test_gradient_of_one(self, way: Way) -> None:
        """What the forward found is what the backward computes: bits aside, as the compilers may contract differently,
        within an ulp."""
        for seed, case in enumerate(self.cases[:4]):
            tensors, settings, grads = self.draw(case, seed, way.device)
            one = torch.ones_like(grads[0])
            got = self.run(way.op, tensors, settings, (one,))
            exact = self.exact(tensors, settings, (one,), got)
            self.compare(got, exact, tensors, way.allowed, f"{case}, a gradient of 1")

    @pytest.mark.gpu
    def test_compile(self) -> None:
        """One graph, for other shapes too. It finds the gradient in the backward, so the loss is another kernel's than
        the eager call's: the last bits may differ."""
        op, case = self.loaded_op(), self.cases[0]
        torch.compiler.reset()
        compiled = torch.compile(self.call, fullgraph=True)
        for seed, longer in enumerate((0, 1, 2)):
            case = case.but(shape=(case.shape[0] + longer, *case.shape[1:]))
            tensors, settings, grads = self.draw(case, seed, "cuda")
            got = self.run(op, tensors, settings, grads, call=compiled)
            exact = self.exact(tensors, settings, grads, got)
            self.compare(got, exact, tensors, installed().tolerance, f"{case}, compiled")

    def test_teacher_gets_no_gradient(self) -> None:
        tensors, settings, _ = self.draw(self.cases[0], 0, "cpu")
        x, y, *rest = tensors
        name = self.tensor_names()[1]
        with pytest.raises(ArgumentError, match=rf"{name} requires a gradient.*{name}\.detach\(\)"):
            self.call(self.op_class(), (x, y.requires_grad_(), *rest), settings)
        with torch.no_grad():
            self.call(self.op_class(), (x, y, *rest), settings)

    @pytest.mark.gpu
    @pytest.mark.parametrize("reduction", ["none", "batchmean"])
    def test_past_two_to_the_31_elements(self, reduction: str) -> None:
        """Offsets past 2^31 elements: the last rows' losses and gradients are those of a call with them alone."""
        op = self.loaded_op()
        rows, n = (1 << 31) // 131072 + 96, 131072
        if reduction == "none" and "reduction" not in self.setting_names():
            pytest.skip(f"{op.name} has no reductions")
        options = {"reduction": reduction} if "reduction" in self.setting_names() else {}
        labels = {"labels": torch.int64} if self.labelled and reduction != "none" else {}
        case = Case((rows, n), BF16, **options, **labels)
        settings = self.settings(case)
        x = torch.empty((rows, n), dtype=BF16, device="cuda").uniform_(0, 2 / n)
        y = torch.empty((rows, n), dtype=BF16, device="cuda").uniform_(0, 2 / n)
        tensors = (x, y, self.labels(case, Draw(case, torch.Generator("cuda"))))[: len(self.tensor_names())]
        tail = 96
        last = tuple(None if t is None else t[-tail:].clone() for t in tensors)
        grads = None
        found = []
        for given in (tensors, last):
            leaf = given[0].detach().requires_grad_()
            loss = self.call(op, (leaf, *given[1:]), settings)
            grads = torch.ones_like(loss)
            (dx,) = torch.autograd.grad(loss, leaf, grads)
            count = 1.0
            if reduction == "batchmean":
                labels_of = given[2] if len(given) > 2 else None
                count = float(rows if labels_of is None else (labels_of != IGNORED).sum())
                if labels_of is None:
                    count = float(given[0].shape[0])
            found.append((loss[-tail:] if loss.dim() else None, dx[-tail:].double() * count))
            del loss, dx, grads
        (loss, dx), (wanted, dwanted) = found
        if loss is not None:
            assert torch.equal(loss, wanted)
        torch.testing.assert_close(dx, dwanted, rtol=2.0**-7, atol=0)


def bad_inputs(x: str, y: str) -> dict[str, Any]:
    """Arguments that the three refuse alike."""
    a = torch.full((3, 8), 0.125)
    found: dict[str, Any] = {
        "a scalar": (
            (torch.tensor(1.0), torch.tensor(1.0)),
            {},
            ArgumentError,
            f"{x} must have at least one",
        ),
        "integers": ((a.int(), a), {}, ArgumentTypeError, f"{x} must be bfloat16.*got int32"),
        "another shape": (
            (a, a[:2]),
            {},
            ArgumentError,
            rf"{y} must be of {x}'s shape \(3, 8\).*got \(2, 8\)",
        ),
        "another dtype": ((a, a.bfloat16()), {}, ArgumentError, f"{y} must be of {x}'s.*got.*bfloat16"),
    }
    return found


def bad_labels(x: str) -> dict[str, Any]:
    a = torch.full((3, 8), 0.125)
    return {
        "float labels": (
            (a, a, a[:, 0]),
            {},
            ArgumentTypeError,
            "shift_labels must be int64 or int32.*float32",
        ),
        "labels of another shape": (
            (a, a, torch.zeros(8, dtype=torch.int64)),
            {},
            ArgumentError,
            rf"shift_labels must be of shape \(3,\), one a row of {x}; got \(8,\)",
        ),
        "no tensor": (
            (a, a, [1, 2, 3]),
            {},
            ArgumentTypeError,
            "shift_labels must be a torch.Tensor or None",
        ),
    }


LARGE = (
    *(Case((256, 128256), dtype) for dtype in DTYPES),
    *(Case(((1 << 25) // n, n), BF16) for n in (1000, 50257, 262144)),
)
