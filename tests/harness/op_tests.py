"""Tests of any differentiable op, five ways: its reference on the CPU, Triton's interpreter, the AMD binaries on the
emulator, the installed binaries on a GPU (and other architectures' PTX there), and torch's machinery around it.

An op's module is a declaration, ``class TestSwiGLU(OpTests)``, and whatever is the op's alone. It gives
(dictionaries annotated as ``ClassVar[Mapping[str, Any]]``):

- ``op_class``.
- ``tensors(case, draw)``: the op's tensor arguments, in the order of ``op_class.tensors``, None for one left out; from
  ``draw.rows`` (laid out as the case says; scale them in place), ``draw.dense`` (weights), ``draw.integers`` (indices)
  and ``draw.uniform``.
- ``formula(*tensors, *settings)``: the outputs by another way than the op's reference, in float64, differentiable.
- ``cases``: small problems that every way runs; the first is the typical one: aligned and without gaps, several rows,
  all optional tensors. Odd sizes, n = 1, shifts, gaps, every setting, every dtype belong here.
- ``empty``: problems with nothing to compute. ``bad``: name -> (arguments, keywords, error, pattern).
- ``large``, ``beyond``: problems for the GPU alone; the latter have more than 2^31 elements and as many rows in the
  first dimension of the outputs as in ``case.shape``.

and where its nature asks for it:

- ``defaults``: settings of a case that does not name them.
- ``names``: of the outputs, if there are several; by default "y". ``graded``: how many of them have a gradient, the
  first ones, if not all; ``call`` gives these alone.
- ``limits(exact)``: how far results may lie off, as keywords of ``tolerances.worst`` by name ("y", "dgate"): sums give
  ``magnitude``, the sum of the absolute values of their terms. By default one rounding and 32 roundoffs of fp32.
- ``frozen``: floating-point arguments that get no gradient. ``relaid``: arguments of any layout; default all
  floating-point ones of two or more dimensions.
- ``same_without_gradient = False``: the outputs' last bits may depend on whether a gradient is wanted.
- ``order_by_address = True``: a sum's order depends on where in a cache line a row starts, as copies of what is no rows
  don't do alike on the CPU.
- ``in_place``: output -> argument that it overwrites, and ``call_in_place`` unless that is ``inplace=True``.
- ``call``, unless the op takes tensors by position and settings by name.
- ``saved``: what the float64 backward reads, where the op's own backward reads a rounded output:
  ``return (got.outputs[0].double(),)``.
- ``dimensions``: the least and the most that a case's shape has. ``fit(case, choose)``: for a random shape, dtype and
  options that stand in ``cases``, each drawn alone, the case nearest to it that the op takes; ``choose(values)`` draws
  one more. See ``random_cases``.
- ``table_case``: a problem that takes a row of a dispatch table, unless n is the last dimension. ``tail``: the last
  rows of a tensor, unless rows are the first dimension. ``longest_emulated``, ``longest_interpreted``: the largest n
  of table rows run there; the emulator runs longer rows at their smallest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError, LigerAOTError
from liger_aot.ops.differentiable import DifferentiableOp
from liger_aot.ops.torch_library import register
from liger_aot.runtime.dispatch import key_text
from liger_aot.runtime.manifest import Pack
from tests.conftest import built_pack
from tests.harness import executed
from tests.harness.drivers import EmulatorDriver, InterpreterDriver, as_of_many_rows, bound_op
from tests.harness.op_cases import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    Case,
    Draw,
    Exact,
    OpCases,
    Results,
    form_of,
    same,
)
from tests.harness.op_gpu_tests import PTX, PTX_ARCH, OpGPUTests, installed, lowered_from_ptx
from tests.harness.tolerances import REFERENCE

__all__ = ["BF16", "DTYPES", "FP16", "FP32", "Case", "Draw", "Exact", "OpTests", "Results"]


@dataclass(frozen=True)
class Way:
    """An op as one of the drivers runs it."""

    op: DifferentiableOp
    device: str
    allowed: dict[str, float]
    pack: Pack | None = None
    longest: int = 1 << 30  # n of a table's row
    rows: int = 3  # of such a case
    beyond: bool = False  # whether rows of longer ones are run, at their smallest size

    def loaded(self) -> set[str]:
        """The variants that were used so far."""
        return {v for on in self.op._own.bound.values() for v in on._loaded}


INTERPRETED = [
    pytest.param(f"interpreter {arch}", marks=pytest.mark.interpreter) for arch in ("sm90", "gfx942")
]
# On these a binary of each form, and what no case of an op reaches; the drivers of BINARIES run those of all rows.
BY_FORM = [pytest.param(f"emulator {arch}", marks=pytest.mark.slow) for arch in executed.BY_FORM]
EMULATED = "emulator gfx942"  # in the quick run: every form of each kernel, and what only a few tests reach
BINARIES = [
    INTERPRETED[0],
    pytest.param(
        "interpreter gfx942", marks=[pytest.mark.interpreter, pytest.mark.slow]
    ),  # but for its forms
    pytest.param("emulator gfx90a", marks=pytest.mark.slow),
    pytest.param(EMULATED, marks=pytest.mark.slow),
    pytest.param("gpu", marks=pytest.mark.gpu),
    PTX,
]
WAYS = ["reference", *BINARIES]


def slow_on(ways: Sequence[Any], *drivers: str) -> list[Any]:
    """The same ways; on these drivers, or on these of one architecture, a test is slow."""
    made = []
    for way in ways:
        values, marks = (way.values, way.marks) if hasattr(way, "values") else ((way,), ())
        is_slow = values[0].startswith(drivers)
        made.append(pytest.param(*values, marks=[*marks, *([pytest.mark.slow] if is_slow else [])]))
    return made


def made(tests: OpCases, name: str) -> Way:
    """The way that one of WAYS names."""
    op_class = tests.op_class
    driver, _, arch = name.partition(" ")
    if driver == "reference":
        return Way(op_class(), "cpu", REFERENCE)
    if driver == "interpreter":
        pack = built_pack(arch)
        op = bound_op(op_class, pack, InterpreterDriver)
        return Way(op, "cpu", dict(pack.tolerance), pack, tests.longest_interpreted)
    if driver == "emulator":
        pack = built_pack(arch)
        op = bound_op(op_class, pack, EmulatorDriver)
        return Way(op, "cpu", dict(pack.tolerance), pack, tests.longest_emulated, beyond=True)
    if driver == "gpu":
        pack = installed()
        return Way(op_class(), "cuda", dict(pack.tolerance), pack, rows=700)
    pack = built_pack(PTX_ARCH)
    return Way(lowered_from_ptx(op_class), "cuda", dict(pack.tolerance), pack, rows=100)


class OpTests(OpGPUTests):
    """Base of an op's tests; the module's docstring says what a subclass declares."""

    def __init_subclass__(cls) -> None:
        """What an op has nothing of is not tested: None is not collected."""
        several = hasattr(cls, "op_class") and cls.graded_outputs() > 1
        for test, applies in (
            ("test_unused_output", several),
            ("test_in_place", cls.in_place),
            ("test_compile_in_place", cls.in_place),
        ):
            setattr(cls, test, getattr(OpTests, test) if applies else None)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        for fixture, values in (
            ("bad_input", self.bad),
            ("large_case", self.large),
            ("beyond_case", self.beyond),
        ):
            if fixture in metafunc.fixturenames:
                metafunc.parametrize(fixture, list(values), ids=str)

    @pytest.fixture
    def way(self, request: pytest.FixtureRequest, poisoned: None) -> Way:
        """One of the drivers; memory that nobody has written to holds NaN."""
        return made(self, request.param)

    # ---- on every driver ------------------------------------------------------------------------------------

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    def test_cases(self, way: Way) -> None:
        for seed, case in enumerate((*self.cases, *self.empty)):
            self.check(way.op, case, way.allowed, seed=seed, device=way.device)

    @pytest.mark.parametrize("way", [*INTERPRETED, EMULATED, *BY_FORM], indirect=True)
    def test_every_form(self, way: Way) -> None:
        """At the least length of the first row of the tables that has it; on the emulator the typical case, too."""
        assert way.pack is not None
        if way.beyond:
            self.check(way.op, self.cases[0], way.allowed, device=way.device)
        manifest = way.pack.op(self.op_class.name)
        wanted, done = set(), set()
        with as_of_many_rows(way.op):
            for seed, (variant, case) in enumerate(self.form_cases(manifest, way.rows)):
                wanted.add(form_of(variant))
                if str(case) not in done:
                    self.check(way.op, case, way.allowed, seed=seed, device=way.device)
                    done.add(str(case))
        for seed, (variant, case) in enumerate(self.few_rows_form_cases(manifest)):
            wanted.add(form_of(variant))
            self.check(way.op, case, way.allowed, seed=seed, device=way.device)
        assert wanted, "no form has a case"
        assert not (left := wanted - set(map(form_of, way.loaded()))), f"forms that no case took: {left}"

    @pytest.mark.parametrize("way", slow_on(BINARIES, "interpreter"), indirect=True)
    def test_every_row_of_the_tables(self, way: Way) -> None:
        assert way.pack is not None
        manifest = way.pack.op(self.op_class.name)
        wanted, done = set(), set()
        cases = self.table_cases(manifest, way.longest, way.rows, beyond=way.beyond)
        with as_of_many_rows(way.op):
            for seed, (variant, case) in enumerate(cases):
                wanted.add(variant)
                if str(case) not in done:  # the forward's and the backward's tables may agree
                    self.check(way.op, case, way.allowed, seed=seed, device=way.device)
                    done.add(str(case))
        for seed, (variant, case) in enumerate(self.few_rows_cases(manifest)):
            wanted.add(variant)
            self.check(way.op, case, way.allowed, seed=seed, device=way.device)
        assert wanted, "no row of the tables has a case"
        assert not (left := sorted(wanted - way.loaded())), f"rows that no case took: {left}"

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    def test_one_gradient_at_a_time(self, way: Way) -> None:
        """Frozen arguments get none, and it does not change the others'."""
        case = self.cases[0]
        tensors, _, _ = self.draw(case, 0, "cpu")
        for name in self.differentiable(tensors):
            self.check(way.op, case, way.allowed, device=way.device, needed=(name,))

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    def test_unused_output(self, way: Way) -> None:
        for output in range(self.op_class.outputs):
            self.check(way.op, self.cases[0], way.allowed, device=way.device, unused=output)

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    def test_layouts(self, way: Way) -> None:
        """Arguments and gradients that are no contiguous, aligned rows."""
        case = self.cases[0]
        tensors, _, _ = self.draw(case, 0, "cpu")
        names = self.relaid
        if names is None:
            named = zip(self.tensor_names(), tensors, strict=True)
            names = tuple(k for k, t in named if t is not None and t.dim() > 1 and t.is_floating_point())
        for layout in LAYOUTS:
            for relaid in dict.fromkeys((names, names[:1], ())):
                self.check(way.op, case, way.allowed, device=way.device, layout=layout, relaid=relaid)

    @pytest.mark.parametrize("way", WAYS, indirect=True)
    def test_in_place(self, way: Way) -> None:
        """The same bits, where the arguments were; autograd follows, or an error says why it can't."""
        op = way.op
        for seed, case in enumerate(self.cases):
            tensors, settings, grads = self.draw(case, seed, way.device)
            expected = self.run(op, tensors, settings, grads)
            given = tuple(None if t is None else _copied(t) for t in tensors)
            with torch.no_grad():
                outputs = self.call_in_place(op, given, settings)
            outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
            named = dict(zip(self.tensor_names(), given, strict=True))
            for name, y, wanted in zip(self.names, outputs, expected.outputs, strict=True):
                assert torch.equal(y, wanted), f"{case}: {name} differs in place"
                to = named.get(self.in_place.get(name, ""))
                assert to is None or (to.data_ptr() == y.data_ptr() and torch.equal(to.view(y.shape), y))
            if not set(self.in_place.values()) <= set(op.overwrites):
                with pytest.raises(ArgumentError, match="gradient"):
                    self.run(op, tensors, settings, grads, call=self.call_in_place, leaf=_copied)
                continue
            with pytest.raises(ArgumentError, match="leaf"):
                self.run(op, tensors, settings, grads, call=self.call_in_place, leaf=_copied)

            def in_place_of_results(op: DifferentiableOp, leaves: Any, settings: tuple[Any, ...]) -> Any:
                made = (t if t is None or not t.requires_grad else _Copy.apply(t) for t in leaves)
                return self.call_in_place(op, tuple(made), settings)

            got = self.run(op, tensors, settings, grads, call=in_place_of_results)
            for name, gradient in got.gradients.items():
                assert same(gradient, expected.gradients[name]), f"{case}: d{name} differs in place"

    # ---- the reference and the arguments --------------------------------------------------------------------

    def test_reference_is_the_formula(self) -> None:
        """In float64: the outputs, and all gradients by the formula's derivative and by the reference's own."""
        for seed, case in enumerate(self.cases):
            tensors, settings, grads = self.draw(case.but(dtype=torch.float64), seed, "cpu")
            exact = self.exact(tensors, settings, grads)
            names = self.differentiable(tensors)
            named = {name: exact.inputs[name].clone().requires_grad_() for name in names}
            arguments = {**exact.inputs, **named}.values()
            for function in (self.formula, self.op_class.reference):
                outputs = function(*arguments, *settings)
                outputs = (outputs,) if isinstance(outputs, Tensor) else outputs[: self.graded_outputs()]
                for y, wanted in zip(outputs, exact.results, strict=False):
                    torch.testing.assert_close(y.detach(), wanted, rtol=1e-11, atol=1e-11, msg=str(case))
                found = torch.autograd.grad(outputs, list(named.values()), exact.grads, allow_unused=True)
                for name, gradient in zip(names, found, strict=True):
                    got = exact.gradients[name]
                    assert (got is None) == (gradient is None), f"{case}: d{name}"
                    if got is not None:
                        torch.testing.assert_close(
                            got, gradient, rtol=1e-10, atol=1e-10, msg=f"{case}: d{name}"
                        )

    def test_bad_input(self, bad_input: str) -> None:
        arguments, keywords, error, text = self.bad[bad_input]
        with pytest.raises(error, match=text):
            liger_aot.load(self.op_class.name)(*arguments, **keywords)

    def test_wrong_tensors(self) -> None:
        """Each argument in turn no tensor, of a wrong dtype, or elsewhere: the error names it."""
        op = liger_aot.load(self.op_class.name)
        tensors, settings, _ = self.draw(self.cases[0], 0, "cpu")
        for i, (name, t) in enumerate(zip(self.tensor_names(), tensors, strict=True)):
            if t is None:
                continue
            wrong = [[1.0], t.to(torch.complex64), t.double()] + ([t.to("meta")] if i else [])
            for value in wrong:
                with pytest.raises(LigerAOTError, match=rf"{op.name}: .*\b{name}\b"):
                    self.call(op, (*tensors[:i], value, *tensors[i + 1 :]), settings)

    @pytest.mark.parametrize("arch", ["sm80", "sm90", "gfx90a", "gfx942"])
    def test_problems_are_in_the_tables(self, arch: str) -> None:
        op, kernels = self.op_class(), built_pack(arch).op(self.op_class.name).kernels
        for case in self.cases:
            dtypes = {k: v for k, v in case.options.items() if isinstance(v, torch.dtype)}
            for problem in op.problems(case.shape, case.dtype, dtypes):
                key = key_text((*problem.axes, problem.aligned))
                assert key in kernels[problem.kernel].tables, f"{case}: {problem.kernel} {key}"

    # ---- torch.compile and torch.library --------------------------------------------------------------------

    def test_compile_is_one_graph(self) -> None:
        self.check_compiled("cpu", backend="aot_eager")

    def test_compile_in_place(self) -> None:
        op = self.loaded_op()
        tensors, settings, _ = self.draw(self.cases[0], 0, "cpu")
        twice = tuple(tuple(t if t is None else t.clone() for t in tensors) for _ in range(2))
        torch.compiler.reset()
        compiled = torch.compile(self.call_in_place, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            wanted = self.call_in_place(op, twice[0], settings)
            got = compiled(op, twice[1], settings)
        got, wanted = ((y,) if isinstance(y, Tensor) else tuple(y) for y in (got, wanted))
        for a, b in zip((*got, *twice[1]), (*wanted, *twice[0]), strict=True):
            assert same(a, b)

    def test_registration(self) -> None:
        name = self.op_class.name
        register(name)
        tensors, settings, grads = self.draw(self.cases[0], 0, "cpu")
        needed_names = self.differentiable(tensors)
        needed = [n in needed_names for n in self.tensor_names()]
        leaves = tuple(
            t if not need else t.clone().requires_grad_() for t, need in zip(tensors, needed, strict=True)
        )
        forward = getattr(torch.ops.liger_aot, f"{name}_forward")
        torch.library.opcheck(forward.default, (*leaves, *settings, True))
        results = forward(*tensors, *settings, True)
        results = (results,) if isinstance(results, Tensor) else tuple(results)
        saved = list(self.op_class().saved(tensors, results))
        backward = getattr(torch.ops.liger_aot, f"{name}_backward")
        torch.library.opcheck(backward.default, (list(grads), saved, *settings, needed))


def _copied(t: Tensor) -> Tensor:
    """A copy of a tensor and of the memory around it, laid out as it is."""
    storage = t.untyped_storage().clone()
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(
        storage, t.storage_offset(), t.shape, t.stride()
    )


class _Copy(torch.autograd.Function):
    """``_copied`` as a step of a graph: its result is no leaf."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return _copied(t)

    @staticmethod
    def backward(ctx: Any, dt: Tensor) -> Tensor:
        return dt


def _beside_others(t: Tensor) -> Tensor:
    wide = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), torch.nan)
    return wide[..., : t.shape[-1]].copy_(t)


def _misaligned(t: Tensor) -> Tensor:
    return t.new_full((t.numel() + 1,), torch.nan)[1:].view(t.shape).copy_(t)


def _rows_swapped(t: Tensor) -> Tensor:
    return t.transpose(0, -2).contiguous().transpose(0, -2)


def _transposed(t: Tensor) -> Tensor:
    return t.transpose(0, -1).contiguous().transpose(0, -1)


def _one_row(t: Tensor) -> Tensor:
    return t[:1].expand(t.shape)


def _one_value(t: Tensor) -> Tensor:
    """What the gradient of .sum() is."""
    return t.new_ones(()).expand(t.shape)


# The same values in another layout, or other values where the layout asks for it.
LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (
    _beside_others,
    _misaligned,
    _rows_swapped,
    _transposed,
    _one_row,
    _one_value,
)
