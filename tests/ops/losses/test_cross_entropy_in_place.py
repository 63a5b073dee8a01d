"""Cross entropy in place: the gradient over the logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from liger_aot.errors import ArgumentError
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.losses.cross_entropy import CrossEntropy
from tests.harness.op_tests import BF16, FP16, FP32, WAYS, Case, Exact, Way
from tests.ops.losses import test_cross_entropy  # not its classes: those would be collected once more

TARGET = torch.tensor([0, 7, 3, 1])


@test_cross_entropy.quiet
class TestCrossEntropyInPlace(test_cross_entropy.TestCrossEntropy):
    """The gradient over the logits, which are a copy of the leaf: every test of the gradient beside them again."""

    large = (*test_cross_entropy.TestCrossEntropy.large[:14], Case((5, (1 << 20) + 3), BF16))
    bad: Mapping[str, Any] = {}
    test_bad_input = None
    test_layouts = None  # what is overwritten must be rows: test_other_layouts
    test_compile_is_one_graph = None  # inplace_grad changes nothing there
    test_compile = None
    test_registration = None
    test_more_results = None
    test_target_out_of_range = None
    test_debug_raises_at_once = None
    test_shards_of_the_vocabulary = None
    test_token_scaling = None
    test_sums_in_two_launches = None
    test_infinite_logits = None
    test_target_layouts = None
    test_problems_are_in_the_tables = None
    test_reference_is_the_formula = None

    def call(self, op: DifferentiableOp, tensors: Tensors, settings: tuple[Any, ...]) -> Any:
        logits, target, weight = tensors
        named = dict(zip(self.setting_names(), settings, strict=True))
        if not isinstance(logits, Tensor) or not logits.is_floating_point():
            return op(logits, target, weight, **named, inplace_grad=True)  # type: ignore[operator]
        wanted = logits.requires_grad and torch.is_grad_enabled()
        with torch.enable_grad():  # else the forward alone would run, with other roundings
            made = _Copy.apply(logits if wanted else logits.detach().requires_grad_())
            loss = op(made, target, weight, **named, inplace_grad=True)  # type: ignore[operator]
        return loss if wanted else loss.detach()

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        """The gradient of the forward is rounded before it is multiplied by that of the loss."""
        found = super().limits(exact)
        if not found:
            return {}
        dlogits = found["dlogits"]
        scale = dlogits["scale"] + max(exact.grads[0].abs().flatten().tolist(), default=0.0)
        return {**found, "dlogits": {**dlogits, "roundings": 2, "scale": scale}}

    def table_case(
        self, kernel: str, dtypes: Mapping[str, torch.dtype], n: int, aligned: bool, rows: int
    ) -> Case | None:
        if kernel not in ("cross_entropy_in_place", "cross_entropy_scale"):
            return None
        return Case((rows, n), dtypes["dtype"], reduction="none", ignored=rows)

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    def test_other_layouts(self, way: Way) -> None:
        many = Case((70, 20), FP32, reduction="none")  # more rows than programs that scale them
        for case in (Case((3, 1203), BF16, shift=3, gap=7), Case((3, 48), FP16, gap=1), many):
            self.check(way.op, case, way.allowed, device=way.device)
        logits = torch.randn(8, 3, device=way.device, requires_grad=True).t() * 1
        target = torch.zeros(3, dtype=torch.int64, device=way.device)
        with pytest.raises(ArgumentError, match="logits has strides"):
            way.op(logits, target, inplace_grad=True)

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    def test_views(self, way: Way) -> None:
        """Logits that are a view of a model's: as Hugging Face's losses call it."""
        leaf = torch.randn(2, 5, 48, device=way.device, requires_grad=True)
        target = torch.randint(48, (10,), device=way.device)
        view = (leaf * 2).view(-1, 48)
        (got,) = torch.autograd.grad(way.op(view, target, inplace_grad=True) * 3.0, leaf)
        loss = functional.cross_entropy((leaf * 2).view(-1, 48), target) * 3.0
        torch.testing.assert_close(got, torch.autograd.grad(loss, leaf)[0], rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize("view", [False, True])
    def test_autograd_knows(self, view: bool) -> None:
        op, leaf = CrossEntropy(), torch.randn(4, 8, requires_grad=True)

        def logits() -> Tensor:
            made = leaf * 1
            return made.view(4, 8) if view else made

        with pytest.raises(ArgumentError, match="logits is a leaf that requires a gradient"):
            op(leaf.view(4, 8) if view else leaf, TARGET, inplace_grad=True)
        before = logits()
        squares = before * before  # needs the values
        op(before, TARGET, inplace_grad=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squares.sum().backward()
        after = logits()
        loss = op(after, TARGET, inplace_grad=True)
        if not view:
            with pytest.raises(RuntimeError, match="nothing that needs a gradient"):
                (loss + after.sum()).backward()
        loss = op(logits(), TARGET, inplace_grad=True)
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="a second one needs inplace_grad=False"):
            loss.backward()
        overwritten = logits()
        loss = op(overwritten, TARGET, inplace_grad=True)
        with torch.no_grad():
            overwritten.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_without_a_gradient(self) -> None:
        op, logits = CrossEntropy(), torch.randn(4, 8)
        before = logits.clone()
        op(logits, TARGET, inplace_grad=True)
        with torch.no_grad():
            op(logits.requires_grad_(), TARGET, inplace_grad=True)
        assert torch.equal(before, logits)


class _Copy(torch.autograd.Function):
    """A copy, laid out in memory as the argument is, from the boundaries of cache lines too: they decide in which order
    a row is added up."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        size = storage.nbytes()
        room = torch.empty(size + 128, dtype=torch.uint8, device=t.device)
        skip = (storage.data_ptr() - room.data_ptr()) % 128
        room[skip : skip + size] = torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage)
        made = torch.empty(0, dtype=t.dtype, device=t.device)
        offset = skip // t.element_size() + t.storage_offset()
        return made.set_(room.untyped_storage(), offset, t.shape, t.stride())

    @staticmethod
    def backward(ctx: Any, dt: Tensor) -> Tensor:
        return dt.clone()
