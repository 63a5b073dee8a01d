"""What an op's test module declares, and the one check that all ways of running the op share: every output and every
gradient, through the op's public call and torch.autograd.grad, against the op's own reference in float64."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.runtime.manifest import OpManifest
from tests.harness.tolerances import NAMES, worst

DTYPES = BF16, FP16, FP32 = (torch.bfloat16, torch.float16, torch.float32)
BY_NAME = {name: dtype for dtype, name in NAMES.items()}
BadInput = tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]


class Case:
    """One problem.

    Args:
        shape: usually of the first tensor.
        dtype: usually of all tensors.
        shift: elements that the rows of ``Draw.rows`` start after an aligned address.
        gap: elements between those rows.
        options: what else the op's ``tensors`` looks up with ``case.get``, and settings by name.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, *, shift: int = 0, gap: int = 0, **options: Any
    ) -> None:
        self.shape, self.dtype, self.shift, self.gap, self.options = tuple(shape), dtype, shift, gap, options

    def get(self, option: str, default: Any = None) -> Any:
        return self.options.get(option, default)

    def but(self, **changes: Any) -> Case:
        """This case with another shape, dtype, shift, gap or option."""
        own = {"shape": self.shape, "dtype": self.dtype, "shift": self.shift, "gap": self.gap}
        return Case(**{**own, **self.options, **changes})

    def __repr__(self) -> str:
        """As it stands among an op's cases."""
        laid_out = {name: value for name in ("shift", "gap") if (value := getattr(self, name))}
        options = "".join(f", {name}={value!r}" for name, value in {**laid_out, **self.options}.items())
        return f"Case({self.shape}, {self.dtype}{options})"

    def __str__(self) -> str:
        parts = ["x".join(map(str, self.shape)), _short(self.dtype)]
        parts += [f"{name}{value}" for name in ("shift", "gap") if (value := getattr(self, name))]
        parts += [f"{name}={_short(value)}" for name, value in self.options.items()]
        return "-".join(parts)


def _short(value: Any) -> str:
    return str(value).removeprefix("torch.")


@dataclass(frozen=True)
class Draw:
    """Random tensors of a case, on the generator's device."""

    case: Case
    generator: torch.Generator

    def rows(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal values of ``dtype`` (default: the case's) whose rows lie in memory as the case says. All
        around them is NaN."""
        case, n = self.case, shape[-1]
        strides = [1]
        for size in (n + case.gap, *reversed(shape[1:-1])):
            strides.append(strides[-1] * size)
        strides = strides[: len(shape)]
        size = case.shift + (strides[-1] * shape[0] if len(shape) > 1 else n)
        buffer = torch.empty(size, dtype=dtype or case.dtype, device=self.generator.device)
        if case.shift or case.gap:
            buffer.fill_(torch.nan)
        view = buffer.as_strided(shape, strides[::-1], case.shift)
        return view.normal_(generator=self.generator)

    def dense(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal values, contiguous and aligned whatever the case: weights."""
        made = torch.empty(shape, dtype=dtype or self.case.dtype, device=self.generator.device)
        return made.normal_(generator=self.generator)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Float32 between the two, contiguous."""
        return torch.empty(shape, device=self.generator.device).uniform_(low, high, generator=self.generator)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Int64 from 0 to high - 1, contiguous."""
        return torch.randint(high, shape, device=self.generator.device, generator=self.generator)


class Results(NamedTuple):
    """What a call gave."""

    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor | None]  # by the name of the tensor argument


class Exact(NamedTuple):
    """The same in float64, with what it was computed from. Integer tensors are as they were."""

    inputs: dict[str, Any]  # by name; None for an optional one that is not there
    settings: dict[str, Any]
    grads: Tensors  # of the outputs; None for one that is not used
    results: Tensors  # the outputs, then what the backward needs
    gradients: dict[str, Tensor | None]


class OpCases:
    """An op's declaration: what must be given stands first."""

    op_class: ClassVar[type[DifferentiableOp]]
    cases: ClassVar[Sequence[Case]]
    empty: ClassVar[Sequence[Case]]
    bad: ClassVar[Mapping[str, BadInput]]
    large: ClassVar[Sequence[Case]]
    beyond: ClassVar[Sequence[Case]]
    defaults: ClassVar[Mapping[str, Any]] = {}
    names: ClassVar[tuple[str, ...]] = ("y",)
    graded: ClassVar[int | None] = None
    frozen: ClassVar[tuple[str, ...]] = ()
    relaid: ClassVar[tuple[str, ...] | None] = None
    in_place: ClassVar[Mapping[str, str]] = {}
    same_without_gradient: ClassVar[bool] = True
    order_by_address: ClassVar[bool] = False
    dimensions: ClassVar[tuple[int, int]] = (1, 4)
    longest_emulated: ClassVar[int] = 5000
    longest_interpreted: ClassVar[int] = 20480

    def tensors(self, case: Case, draw: Draw) -> Tensors:
        raise NotImplementedError

    def formula(self, *arguments: Any) -> Tensor | tuple[Tensor, ...]:
        raise NotImplementedError

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        return {}

    def call(self, op: DifferentiableOp, tensors: Tensors, settings: tuple[Any, ...]) -> Any:
        return op(*tensors, **dict(zip(self.setting_names(), settings, strict=True)))  # type: ignore[operator]

    def call_in_place(self, op: DifferentiableOp, tensors: Tensors, settings: tuple[Any, ...]) -> Any:
        named = dict(zip(self.setting_names(), settings, strict=True))
        return op(*tensors, **named, inplace=True)  # type: ignore[operator]

    def saved(self, wide: Tensors, results: Tensors, got: Results) -> Tensors:
        return self.op_class.saved(None, wide, results)  # type: ignore[arg-type]

    def table_case(
        self, kernel: str, dtypes: Mapping[str, torch.dtype], n: int, aligned: bool, rows: int
    ) -> Case | None:
        options: dict[str, Any] = {axis: dtype for axis, dtype in dtypes.items() if axis != "dtype"}
        return Case((rows, n), dtypes["dtype"], shift=int(not aligned), **options)

    def fit(self, case: Case, choose: Callable[[Sequence[Any]], Any]) -> Case:
        return case

    def tail(self, case: Case, tensor: Any) -> Any:
        return tensor[-96:] if tensor.shape[:1] == case.shape[:1] else None

    # ---- what the harness makes of it -----------------------------------------------------------------------

    def tensor_names(self) -> tuple[str, ...]:
        return tuple(name.rstrip("?") for name in self.op_class.tensors)

    def setting_names(self) -> tuple[str, ...]:
        return tuple(schema.split()[-1] for schema in self.op_class.settings)

    @classmethod
    def graded_outputs(cls) -> int:
        """How many of the outputs have a gradient: the first ones."""
        return cls.op_class.outputs if cls.graded is None else cls.graded

    def settings(self, case: Case) -> tuple[Any, ...]:
        return tuple(
            case.options[name] if name in case.options else self.defaults[name]
            for name in self.setting_names()
        )

    def draw(self, case: Case, seed: int, device: str) -> tuple[Tensors, tuple[Any, ...], tuple[Tensor, ...]]:
        """Tensor arguments, settings and a gradient for each output."""
        draw = Draw(case, torch.Generator(device).manual_seed(seed))
        tensors, settings = self.tensors(case, draw), self.settings(case)
        shaped = self.op_class.reference(*(t if t is None else t.to("meta") for t in tensors), *settings)
        grads = tuple(draw.rows(*y.shape, dtype=y.dtype) for y in shaped[: self.graded_outputs()])
        return tensors, settings, grads

    def differentiable(self, tensors: Tensors) -> tuple[str, ...]:
        """Names of the arguments that get a gradient."""
        named = zip(self.tensor_names(), tensors, strict=True)
        return tuple(
            name for name, t in named if t is not None and t.is_floating_point() and name not in self.frozen
        )

    def run(
        self,
        op: DifferentiableOp,
        tensors: Tensors,
        settings: tuple[Any, ...],
        grads: Tensors,
        *,
        needed: Collection[str] | None = None,
        call: Callable[[DifferentiableOp, Tensors, tuple[Any, ...]], Any] | None = None,
        leaf: Callable[[Tensor], Tensor] = Tensor.detach,
    ) -> Results:
        """Forward and backward through autograd.

        Args:
            grads: of the outputs; None for one that is not used.
            needed: names of the arguments that need a gradient; default all that can have one.
            call: default ``self.call``.
            leaf: what makes of an argument the tensor that gets its gradient.
        """
        needed = self.differentiable(tensors) if needed is None else needed
        named = dict(zip(self.tensor_names(), tensors, strict=True))
        leaves = {name: leaf(named[name]).requires_grad_() for name in needed}
        outputs = (call or self.call)(op, tuple({**named, **leaves}.values()), settings)
        outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        used = [(y, dy) for y, dy in zip(outputs, grads, strict=True) if dy is not None]
        found: Sequence[Tensor | None] = ()
        if leaves:
            ys, dys = zip(*used, strict=True)
            found = torch.autograd.grad(ys, list(leaves.values()), dys, allow_unused=True)
        return Results(tuple(y.detach() for y in outputs), dict(zip(leaves, found, strict=True)))

    def exact(
        self, tensors: Tensors, settings: tuple[Any, ...], grads: Tensors, got: Results | None = None
    ) -> Exact:
        wide, wide_grads = _wide(tensors), _wide(grads)
        results = self.op_class.reference(*wide, *settings)
        got = got or Results(results[: self.graded_outputs()], {})
        gradients = self.op_class.reference_backward(wide_grads, self.saved(wide, results, got), *settings)
        names = self.tensor_names()
        return Exact(
            dict(zip(names, wide, strict=True)),
            dict(zip(self.setting_names(), settings, strict=True)),
            wide_grads,
            results,
            dict(zip(names, gradients, strict=True)),
        )

    def compare(
        self, got: Results, exact: Exact, tensors: Tensors, allowed: Mapping[str, float], label: str
    ) -> None:
        """Assert that every error is within what is allowed, and every dtype the reference's."""
        limits = self.limits(exact)
        errors = {
            name: worst(y, wanted, allowed, **limits.get(name, {}))
            for name, y, wanted in zip(self.names, got.outputs, exact.results, strict=False)
        }
        named = dict(zip(self.tensor_names(), tensors, strict=True))
        for name, gradient in got.gradients.items():
            wanted = exact.gradients[name]
            if wanted is None or gradient is None:
                assert gradient is wanted, f"{label}: the gradient of {name} is {gradient}, not {wanted}"
                continue
            assert gradient.dtype == named[name].dtype, f"{label}: the gradient of {name} is {gradient.dtype}"
            key = f"d{name}"
            errors[key] = worst(gradient, wanted, allowed, **limits.get(key, {}))
        assert max(errors.values()) <= 1, f"{label}: errors as fractions of what is allowed {errors}"

    def check(
        self,
        op: DifferentiableOp,
        case: Case,
        allowed: Mapping[str, float],
        *,
        seed: int = 0,
        device: str = "cpu",
        needed: Collection[str] | None = None,
        unused: int | None = None,
        layout: Callable[[Tensor], Tensor] | None = None,
        relaid: Collection[str] = (),
    ) -> None:
        """Run ``op`` on fresh random inputs and compare everything with float64; the arguments must stay as they were.

        Args:
            needed: names of the arguments that need a gradient, where they can have one; default all.
            unused: an output that nothing is computed from.
            layout: of the gradients of the outputs, and of the arguments named by ``relaid``, where they are no vectors
                of a floating-point dtype.
        """
        tensors, settings, grads = self.draw(case, seed, device)
        if layout is not None:
            named = zip(self.tensor_names(), tensors, strict=True)
            tensors = tuple(
                layout(t) if name in relaid and t is not None and t.dim() > 1 and t.is_floating_point() else t
                for name, t in named
            )
            grads = tuple(layout(dy) if dy.dim() > 1 else dy for dy in grads)
        if needed is not None:
            needed = [name for name in self.differentiable(tensors) if name in needed]
        before = [None if t is None else t.clone() for t in tensors]
        asked = tuple(None if i == unused else dy for i, dy in enumerate(grads))
        label = f"{self.op_class.name} {case}, seed {seed}"
        if layout is not None:
            label += f", {layout.__name__} {' '.join(relaid)}"
        try:
            got = self.run(op, tensors, settings, asked, needed=needed)
        except Exception as error:
            raise AssertionError(f"{label}: {error}") from error
        for y, dy in zip(got.outputs, grads, strict=True):
            assert y.dtype == dy.dtype and y.device == dy.device
        for name, t, was in zip(self.tensor_names(), tensors, before, strict=True):
            assert same(t, was), f"{label}: {name} was overwritten"
        self.compare(got, self.exact(tensors, settings, asked, got), tensors, allowed, label)
        with torch.no_grad():
            alone = self.call(op, tensors, settings)
        alone = (alone,) if isinstance(alone, Tensor) else tuple(alone)
        copied = bool(relaid) and self.order_by_address
        if copied or not self.same_without_gradient:
            self.compare(Results(alone, {}), self.exact(tensors, settings, asked), tensors, allowed, label)
            return
        for y, again in zip(got.outputs, alone, strict=True):
            assert torch.equal(y, again), f"{label}: another result where no gradient is needed"

    def table_cases(
        self, manifest: OpManifest, longest: int, rows: int, *, beyond: bool = True
    ) -> Iterator[tuple[str, Case]]:
        """(variant, a case that takes it) for every row of every dispatch table, dtype and alignment, as one of many
        rows. Rows whose usual size is above ``longest`` are left out, or with ``beyond`` get their smallest."""
        for kernel in manifest.kernels.values():
            for key, entries in kernel.tables.items():
                if _shared(manifest, entries):
                    continue  # no call of many rows takes it
                *values, alignment = key.split("/")
                axes = dict(zip(kernel.axes, (BY_NAME.get(v, v) for v in values), strict=True))
                aligned = alignment == "aligned"
                sizes = sizes_of(entries, aligned, longest if beyond else 1 << 40)
                for n, (_, variant) in zip(sizes, entries, strict=True):
                    wanted = beyond or n <= longest
                    case = self.table_case(kernel.name, axes, n, aligned, rows) if wanted else None
                    if case is not None:
                        yield variant, case

    def few_rows_cases(self, manifest: OpManifest) -> Iterator[tuple[str, Case]]:
        """(variant, a case that takes it) for every row of the tables that is for few rows, and for the kernels of
        which several programs share a row."""
        for kernel in manifest.kernels.values():
            for key in kernel.tables:
                *values, alignment = key.split("/")
                axes = dict(zip(kernel.axes, (BY_NAME.get(v, v) for v in values), strict=True))
                few = kernel.few.get(key, ())
                sizes = [
                    *((v, *_first_that_takes(b, m, few[:i])) for i, (b, m, v) in enumerate(few)),
                    *((v, from_n // 16 * 16 + 32, 2) for v, from_n in _shared(manifest, kernel.tables[key])),
                ]
                for variant, n, rows in sizes:
                    case = self.table_case(kernel.name, axes, n, alignment == "aligned", rows)
                    if case is not None:
                        yield variant, case

    def form_cases(self, manifest: OpManifest, rows: int) -> list[tuple[str, Case]]:
        """(variant, a case that takes it) for every form of every kernel: the first row of the tables that has one."""
        return _first_of_forms(self.table_cases(manifest, 64, rows))

    def few_rows_form_cases(self, manifest: OpManifest) -> list[tuple[str, Case]]:
        """The same for the forms of ``few_rows_cases``."""
        return _first_of_forms(self.few_rows_cases(manifest))


def _first_of_forms(cases: Iterator[tuple[str, Case]]) -> list[tuple[str, Case]]:
    found: dict[str, tuple[str, Case]] = {}
    for variant, case in cases:
        found.setdefault(form_of(variant), (variant, case))
    return list(found.values())


def _shared(manifest: OpManifest, entries: tuple[tuple[int | None, str], ...]) -> list[tuple[str, int]]:
    """Those of a table's variants of which several programs share a row, each with the least length that takes it."""
    found, before = [], 0
    for bound, variant in entries:
        if (from_n := manifest.variant(variant).numbers.get("from_n")) is not None:
            found.append((variant, max(from_n, before + 1)))
        before = bound or before
    return found


def _first_that_takes(
    bound: int | None, most: int, earlier: Sequence[tuple[int | None, int, str]]
) -> tuple[int, int]:
    """(n, rows) of a problem that a row for few rows takes and none of the earlier ones."""
    low = max((b for b, m, _ in earlier if b is not None and m >= most), default=0)
    n = low + 16 if bound is None else max(bound - 16, min(low + 16, bound))
    return n, 1 + max((m for b, m, _ in earlier if b is None or n <= b), default=0)


def form_of(variant: str) -> str:
    return "-".join(variant.split("-")[:2])  # its kernel's name stands first


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Both missing, or equal to the bit."""
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _wide(tensors: Tensors) -> Tensors:
    return tuple(t.double() if t is not None and t.is_floating_point() else t for t in tensors)


def sizes_of(entries: tuple[tuple[int | None, str], ...], aligned: bool, longest: int) -> list[int]:
    """One size for each row of a dispatch table: inside the row's range, not a power of two; where that would be above
    ``longest``, the smallest there is."""
    sizes, low = [], 0
    for bound, _ in entries:
        high = bound if bound is not None else 2 * low + 64
        n = low + max(1, (high - low) * 5 // 8)
        n = n if n <= longest else low + 1
        n = -(-n // 16) * 16 if aligned else n | 1
        sizes.append(min(n, high))
        low = high
    return sizes
