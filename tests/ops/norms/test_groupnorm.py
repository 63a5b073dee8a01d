"""GroupNorm of channels-first and channels-last images, with and without weight and bias, on every driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.norms._groupnorm_plan import Shape, splits_of
from liger_aot.ops.norms.groupnorm import GroupNorm
from tests.harness.op_tests import BF16, DTYPES, FP16, FP32, WAYS, Case, Draw, Exact, OpTests, Way, slow_on
from tests.ops.norms.test_layernorm import sums_of_nearly_zero

X, V = torch.ones(2, 8, 3, 3), torch.ones(8)


class TestGroupNorm(OpTests):
    """A case's shape is (N, C, ...); channels-last images come as the op has them inside, channels last."""

    op_class = GroupNorm
    defaults: Mapping[str, Any] = {"num_groups": 2, "eps": 1e-5, "channels_last": False}
    cases = (
        Case((2, 6, 4, 8), BF16),
        Case((2, 6, 5, 7), FP32, num_groups=3),
        Case((3, 32, 4, 4), FP16, channels_last=True, wide=True),
        Case((1, 1, 1), BF16, num_groups=1),
        Case((3, 12), FP32, num_groups=3, bias=None),
        Case((2, 20, 9), BF16, channels_last=True, num_groups=4, weight=None),
        Case((2, 4, 3, 5, 2), FP16, num_groups=4, weight=None, bias=None, eps=0.1),
        Case((1, 4, 50, 100), BF16, wide=True, bias=None),
        Case((1, 6, 47, 101), FP16, shift=1),
        Case((1, 2, 64, 64), FP32, num_groups=1, offset=300.0),
        Case((1, 40, 24, 12), BF16, channels_last=True, num_groups=4),
        Case((2, 1088, 3, 3), BF16, channels_last=True, num_groups=1, wide=True),
        Case((1, 320, 20, 20), FP32, channels_last=True, num_groups=32, offset=300.0),
        Case((2, 18, 3, 3), BF16, channels_last=True, num_groups=9, shift=1),
        Case((2, 6, 4, 8), BF16, gap=8),
        Case((3, 21, 2, 2), FP32, channels_last=True, num_groups=7, gap=3),
        Case((4, 84, 4, 4), BF16, offset=3.0),  # more channels a group than the pipeline holds
        Case((4, 10, 48), FP16, weight=None),
    )
    empty = (Case((0, 4, 3, 3), BF16), Case((2, 4, 0), FP32), Case((0, 4, 3, 3), FP16, channels_last=True))
    large = tuple(
        Case(shape, dtype, num_groups=32, channels_last=last)
        for shape in (
            (32, 320, 64, 64),
            (8, 1280, 32, 32),
            (4, 512, 128, 128),
            (1, 128, 512, 512),
            (64, 256, 14, 14),
        )
        for dtype in DTYPES
        for last in (False, True)
    )
    beyond = (
        Case((132, 256, 256, 256), BF16, num_groups=32),
        Case((132, 256, 256, 256), BF16, num_groups=32, channels_last=True),
    )
    bad: Mapping[str, Any] = {
        "a vector": (
            (V, 2),
            {},
            ArgumentError,
            r"x must have a batch and a channel dimension, got shape \(8,\)",
        ),
        "groups": ((X, 3), {}, ArgumentError, "num_groups must divide the 8 channels of x, got 3"),
        "no group": ((X, 0), {}, ArgumentError, "num_groups must be at least 1 .*, got 0"),
        "weight too long": (
            (X, 2, torch.ones(9)),
            {},
            ArgumentError,
            r"weight must be .* shape \(8,\).*got shape \(9,\)",
        ),
        "bias 2-D": (
            (X, 2, V, torch.ones(1, 8)),
            {},
            ArgumentError,
            r"bias must be .* shape \(8,\).*got shape \(1, 8\)",
        ),
        "two dtypes": (
            (X.to(BF16), 2, V, V.to(BF16)),
            {},
            ArgumentTypeError,
            "bias must be of weight's dtype",
        ),
        "narrow weight": ((X, 2, V.to(BF16)), {}, ArgumentTypeError, "x's dtype torch.float32 or float32"),
        "integers": ((X.int(), 2), {}, ArgumentTypeError, "x must be bfloat16.*got int32"),
    }

    dimensions = (2, 5)

    def fit(self, case: Case, choose: Callable[[Sequence[Any]], Any]) -> Case:
        """Channels are a multiple of the groups; the longest dimension may be theirs or the last place's."""
        images, _, *places = case.shape if len(case.shape) > 2 else (*case.shape[:1], 1, case.shape[1])
        groups = case.get("num_groups", self.defaults["num_groups"])
        images = 1 if groups > 8 else images
        if choose((False, True)):
            channels = groups * -(-places[-1] // groups)
            return case.but(shape=(images, channels, *places[:-1], choose((1, 3, 8))))
        channels = groups * choose((1, 2, 3, 8))
        if images * channels * prod(places) > 1 << 23:
            images, places = 1, places[-1:]
        return case.but(shape=(images, channels, *places))

    def tensors(self, case: Case, draw: Draw) -> Tensors:
        images, channels, *places = case.shape
        last = case.get("channels_last")
        x = draw.rows(images, *places, channels) if last else draw.rows(*case.shape)
        x.add_(case.get("offset", 0.5))
        dtype = FP32 if case.get("wide") and case.dtype != torch.float64 else case.dtype
        weight = None if case.get("weight", True) is None else draw.dense(channels, dtype=dtype)
        return x, weight, None if case.get("bias", True) is None else draw.dense(channels, dtype=dtype)

    def call(self, op: DifferentiableOp, tensors: Tensors, settings: tuple[Any, ...]) -> Any:
        x, weight, bias = tensors
        num_groups, eps, channels_last = settings
        if not channels_last or not isinstance(x, Tensor):
            return op(x, num_groups, weight, bias, eps=eps)  # type: ignore[operator]
        return op(x.movedim(-1, 1), num_groups, weight, bias, eps=eps).movedim(1, -1)  # type: ignore[operator]

    def formula(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: int, eps: float, last: bool
    ) -> Tensor:
        first = x.movedim(-1, 1) if last else x
        flat = first.reshape(first.shape[0], num_groups, -1)
        y = torch.nn.functional.layer_norm(flat, flat.shape[-1:], eps=eps).reshape(first.shape)
        each = (-1, *(1,) * (first.dim() - 2))  # one a channel
        y = y if weight is None else y * weight.reshape(each)
        y = y if bias is None else y + bias.reshape(each)
        return y.movedim(1, -1) if last else y

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        x, weight, bias = (exact.inputs[name] for name in ("x", "weight", "bias"))
        groups, last = exact.settings["num_groups"], exact.settings["channels_last"]
        (dy,), (_, stats) = exact.grads, exact.results

        def grouped(t: Tensor) -> Tensor:
            first = t.movedim(-1, 1) if last else t
            return first.reshape(x.shape[0], groups, first.shape[1] // groups, first.shape[2:].numel())

        def like_x(t: Tensor) -> Tensor:
            return (
                t.reshape(x.shape[0], x.shape[-1], *x.shape[1:-1]).movedim(1, -1)
                if last
                else t.reshape(x.shape)
            )

        mean, rstd = stats.reshape(x.shape[0], groups, 1, 2).split(1, -1)
        added = grouped(x).abs().mean((2, 3), keepdim=True)
        normal = ((grouped(x) - mean).abs() + added) * rstd  # and what the mean's sum loses
        scale = 1.0 if weight is None else weight.abs().reshape(groups, -1, 1)
        shift = 0.0 if bias is None else bias.abs().reshape(groups, -1, 1)
        limits: dict[str, Mapping[str, Any]] = {"y": {"magnitude": like_x(normal * scale + shift)}}
        if dy is not None:
            scaled = grouped(dy).abs() * scale
            along = (scaled * normal).mean((2, 3), keepdim=True)
            terms = scaled + normal * along + scaled.mean((2, 3), keepdim=True)
            limits["dx"] = {"magnitude": like_x(terms * rstd)}
            limits["dweight"] = {"magnitude": (grouped(dy).abs() * normal).sum((0, 3)).reshape(-1)}
            limits["dbias"] = {"magnitude": grouped(dy).abs().sum((0, 3)).reshape(-1)}
        return limits

    def table_case(
        self, kernel: str, dtypes: Mapping[str, torch.dtype], n: int, aligned: bool, rows: int
    ) -> Case | None:
        """n is what lies together in memory: a group's channels, its elements (forward), or a channel's places."""
        groups = 2
        if kernel.endswith("channels_last"):
            groups = 32 if n <= 64 else 2  # as many as the pipeline must have, for its lines
            shape, last = (1, groups * n, 3), True
        elif n > 1 << 30:  # the row with a split, as there are few groups
            shape, last = ((1, 4, 48) if kernel.endswith("forward") else (1, 6, 80)), False
        elif n > 1 << 20:  # the row for all others has no bound of its own
            shape, last = ((rows, 4, 24592) if kernel.endswith("forward") else (rows, 6, 1040)), False
        elif kernel.endswith("forward"):
            # Places: a multiple of 16 takes the aligned binary.
            half = -(-n // 32) * 16 if aligned else n // 2
            shape, last = ((rows, 4, half) if n % 2 == 0 else (rows, 2, n)), False
        else:
            shape, last = (rows, 6, n), False
        return Case(shape, dtypes["dtype"], shift=int(not aligned), num_groups=groups, channels_last=last)

    def tail(self, case: Case, tensor: Any) -> Any:
        return tensor[-1:] if tensor.shape[:1] == case.shape[:1] else None

    @pytest.mark.parametrize("way", slow_on(WAYS, "emulator"), indirect=True)
    @pytest.mark.parametrize("last", [False, True])
    def test_a_mean_of_nearly_zero(self, way: Way, last: bool) -> None:
        """As layernorm's."""
        x = sums_of_nearly_zero(8, way.device).view(4, 2, 5)
        tensors = x.mT.contiguous() if last else x, None, None
        settings, grads = (2, self.defaults["eps"], last), (torch.ones_like(tensors[0]),)
        got = self.run(way.op, tensors, settings, grads)
        exact = self.exact(tensors, settings, grads, got)
        self.compare(got, exact, tensors, way.allowed, "groups with a mean of nearly zero")


@pytest.mark.parametrize("last", [False, True])
def test_memory_format_stays(last: bool) -> None:
    x = torch.randn(2, 6, 4, 5)
    x = x.to(memory_format=torch.channels_last) if last else x
    x.requires_grad_()
    y = liger_aot.load("groupnorm")(x, 3)
    y.square().sum().backward()
    assert x.grad is not None
    for t in (y, x.grad):
        assert t.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def test_units_are_split_for_the_least_steps() -> None:
    """Parts no longer than asked, and no fewer of them where that leaves programs idle in the last step."""
    for units, elements, least, resident in (
        (128, 1 << 18, 8, 396),
        (64, 40960, 2, 528),
        (1, 1 << 20, 1, 132),
    ):
        splits = splits_of(units, elements, least, 64, resident, 4096)
        assert least <= splits <= 64
        steps = -(-units // max(1, resident // splits))
        for other in (least, 64):
            other_steps = -(-units // (resident // other))
            assert steps * elements / splits <= other_steps * (elements / other + 4096)
    assert splits_of(1000, 10240, 1, 64, 396, 4096) == 1  # enough units: no exchange
    assert splits_of(1000, 10240, 1, 64, 396, 0) > 1


@pytest.mark.parametrize(
    ("groups", "channels", "spatial", "max_elements", "width"),
    [
        (32, 320, 4096, 32768, 80),  # 10 channels a group: 8 groups, the fewest that are aligned
        (32, 1280, 256, 32768, 80),  # fits a program
        (32, 1280, 256, 0, 320),
        (32, 512, 16384, 32768, 128),
        (35, 70, 9, 0, 14),  # no width is aligned
        (4, 4800, 9, 0, 1200),  # a group longer than a block
    ],
)
def test_width_of_a_program(groups: int, channels: int, spatial: int, max_elements: int, width: int) -> None:
    shape = Shape(1, channels, groups, spatial, True)
    assert shape.width(1024, 8, max_elements) == width
