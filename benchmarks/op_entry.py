"""The base of every op's benchmark: from the op's inputs and what each provider calls to device figures, host time
and the tuner's workloads.

Bytes count what one call has to move: forward, each argument read once and each output written once; backward, the
outputs' gradients and what the formula reads of the arguments (of softmax's kind: of the output, as large) read once,
the gradients of the arguments written once. Statistics that a forward keeps for its backward are left out, the same
for every provider.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.measure import Call
from benchmarks.reference import (
    Invoke,
    Maybe,
    PublicCall,
    Reference,
    Tensors,
    as_tuple,
    flat,
    op_class,
)
from benchmarks.workload import Case, Problem, Workload, checked_rows, largest_error
from liger_aot_build.declaration import declared_ops

# The row lengths of the norms: powers of two, and hidden sizes of models that are none.
LENGTHS = (1024, 2048, 4096, 5120, 8192, 11008, 16384, 18944, 32768)

Function = Callable[..., Any]  # the op's tensor arguments -> a tensor or a tuple of them


@dataclass(frozen=True)
class Random:
    """Random tensors of a case; on the meta device tensors of shapes alone."""

    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator | None

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device, generator=self.generator)

    def near(self, value: float, *shape: int) -> Tensor:
        """Spread a little around a value, as trained parameters are."""
        return value + self.normal(*shape) / 4

    def integers(self, bound: int, *shape: int) -> Tensor:
        """int64 in [0, bound)."""
        return torch.randint(bound, shape, device=self.device, generator=self.generator)

    def like(self, x: Tensor) -> Tensor:
        """Of x's shape and order in memory."""
        new = torch.empty_like(x, dtype=self.dtype, device=self.device)
        return new.normal_(generator=self.generator)


@dataclass(frozen=True)
class Overwritten:
    """What a provider's call writes its results over: it gets copies, put right again before each call."""

    arguments: tuple[int, ...] = ()
    grads: bool = False


class OpEntry:
    """An op's benchmark. A subclass names the op and its points, and gives its inputs and its providers' functions;
    a function takes the tensors that `inputs` gives, in the order of the op's tensor arguments."""

    op: ClassVar[str]
    points: ClassVar[Sequence[Case]]
    small: ClassVar[tuple[int, ...]] = (4, 4096)  # the shape at which a call's cost is the host's
    providers: ClassVar[tuple[str, ...]] = ("liger_aot", "torch", "torch_compile", "liger")
    sections: ClassVar[tuple[str, ...]] = ("forward", "backward", "host")  # measured where none is asked for
    # Kernels beside <op>_forward and <op>_backward, or one for a value of an axis ("rope interleaved"), each with the
    # direction and variant it is tuned by.
    kernels: ClassVar[tuple[tuple[str, str, str], ...]] = ()

    # Whether a result, or a sum of them, comes from each row of the batch alone.
    by_rows: ClassVar[bool] = True

    # Positions of arguments: those that all rows of the batch share, as a weight; those that have no gradient; those
    # that a backward need not read; those whose gradient is another's.
    shared: ClassVar[tuple[int, ...]] = ()
    constant: ClassVar[tuple[int, ...]] = ()
    unread: ClassVar[tuple[int, ...]] = ()
    unwritten: ClassVar[tuple[int, ...]] = ()

    # ---- what a subclass gives ----------------------------------------------------------------------------

    def inputs(self, case: Case, random: Random) -> Tensors:
        """The tensor arguments; by default x of the case's shape."""
        return (random.normal(*case.shape),)

    def keywords(self, variant: str) -> Mapping[str, Any]:
        """The arguments of ours that are no tensors."""
        return {}

    def eager(self, variant: str) -> Function:
        """The op as its users write it in torch."""
        raise NotImplementedError

    def formula(self, variant: str) -> Function:
        """What torch.compile is given."""
        return self.eager(variant)

    def liger(self, variant: str) -> Function:
        """Liger's. From the submodule of liger_kernel.ops, which itself may hand out another implementation
        (LIGER_KERNEL_IMPL)."""
        raise NotImplementedError

    def quack(self, variant: str) -> Function:
        raise NotImplementedError

    def overwritten(self, provider: str, case: Case) -> Overwritten:
        return Overwritten()

    def offers(self, provider: str, variant: str) -> bool:
        """Whether the provider has the op in that variant."""
        return provider in self.providers

    def invoke(self, op: Any, variant: str) -> Function:
        """Our op as a function of the tensors that `inputs` gives."""
        return partial(op, **self.keywords(variant))

    def tuned_shape(self, kernel: str, n: int, elements: int) -> tuple[int, ...]:
        """About `elements` elements that the kernel is dispatched for by n."""
        return elements // n, n

    # ---- what it gets -------------------------------------------------------------------------------------

    def function(self, provider: str, variant: str = "") -> Function:
        """The op as a provider gives it, imported and loaded now: called with `small_inputs`, or tensors of that
        kind in other shapes."""
        make: dict[str, Callable[[str], Function]] = {
            "liger_aot": self._ours,
            "torch": self.eager,
            "torch_compile": self._compiled,
            "liger": self.liger,
            "quack": self.quack,
        }
        return make[provider](variant)

    def cases(self, most: int | None = None, points: Sequence[str] = ()) -> list[Case]:
        """The points of the device figures: those that are named or, where none is, all of them, at most so many of
        each kind, spread evenly."""
        if points:
            return [case for case in self.points if case.point in points]
        kinds: dict[tuple[object, ...], list[Case]] = {}
        for case in self.points:
            kinds.setdefault((case.direction, case.dtype, case.variant), []).append(case)
        return [case for cases in kinds.values() for case in _spread(cases, most)]

    def moved_bytes(self, case: Case) -> int:
        """What one call has to move through device memory (see the module)."""
        arguments = self.inputs(case, Random(case.dtype, torch.device("meta"), None))
        outputs = self._public(case).results(arguments)
        if case.direction == "forward":
            return _bytes(arguments) + _bytes(outputs)
        read = [a for i, a in enumerate(arguments) if i not in self.unread]
        written = [arguments[i] for i in self.wanted(arguments) if i not in self.unwritten]
        return _bytes(outputs) + _bytes(read) + _bytes(written)

    def wanted(self, arguments: Tensors) -> tuple[int, ...]:
        """Positions of the arguments whose gradients a backward gives."""
        return tuple(i for i, a in enumerate(arguments) if a.is_floating_point() and i not in self.constant)

    def problem(self, case: Case, device: torch.device, sets: int, seed: int) -> Problem:
        """A case with `sets` sets of random inputs."""
        random = Random(case.dtype, device, torch.Generator(device).manual_seed(seed))
        inputs = [self._inputs_and_grads(case, random) for _ in range(sets)]
        wanted = self.wanted(inputs[0][0])
        reference = Reference(self._public(case), *inputs[0], self.shared)
        rows = checked_rows(reference.batch, device, seed)
        select = self._selector(case.direction, wanted, rows, reference.batch)
        if case.direction == "forward":
            expected = reference.forward(rows)
        else:
            expected = reference.backward(rows, wanted)

        def calls(provider: str, function: Function | None = None) -> list[Call]:
            function = function or self.function(provider, case.variant)
            overwritten = self.overwritten(provider, case)
            return [self._call(case, function, overwritten, *one) for one in inputs]

        return Problem(calls, lambda results: largest_error(select(results), expected))

    def small_inputs(self, device: torch.device) -> Tensors:
        """Inputs so small that a call's cost is the host's, bf16, with gradients wanted as a model's parameters
        have them."""
        return self._small(device)[0]

    def host_calls(self, provider: str, device: torch.device) -> Mapping[str, Callable[[], object]]:
        """Calls on small inputs by direction ("host_..."); a direction with "backward" in its name is timed with
        autograd on, the others under no_grad. Who overwrites an input finds its values drifting, which host time
        does not notice."""
        arguments, grads = self._small(device)
        leaves = [a for a in arguments if a.requires_grad]
        function = self.function(provider, self._usual.variant)
        return {
            "host_forward": lambda: function(*arguments),
            "host_forward_backward": lambda: torch.autograd.grad(function(*arguments), leaves, grads),
        }

    def workloads(
        self,
        kernel: str,
        n: int,
        dtype: torch.dtype,
        elements: int,
        device: torch.device,
        seed: int,
        variant: str | None = None,
    ) -> list[Workload]:
        """Calls that run one of the op's kernels, for the tuner, of a variant or the kernel's usual one. A forward is
        timed without gradients; another call, whose gradients are checked, shows that what it saves for them is right.

        Args:
            n: what the kernel is dispatched by, or any row length where that is no length.

        Raises:
            ValueError: the kernel is another op's, or there are fewer elements than one row has.
        """
        kernels = {f"{self.op}_{way}": (way, self._usual.variant) for way in ("forward", "backward")}
        kernels |= {name: (way, variant) for name, way, variant in self.kernels}
        if kernel not in kernels:
            raise ValueError(f"no workload for {kernel!r}: there are those of {', '.join(kernels)}")
        direction, usual = kernels[kernel]
        variant = usual if variant is None else variant
        case = Case(direction, dtype, self.tuned_shape(kernel, n, elements), variant)
        if 0 in case.shape:
            raise ValueError(f"{elements} elements do not fill a row of {n}")
        found = [self._workload(case, device, seed)]
        if direction == "forward" and self.by_rows:
            found.append(
                replace(self._workload(replace(case, direction="backward"), device, seed), timed=False)
            )
        return found

    def _workload(self, case: Case, device: torch.device, seed: int) -> Workload:
        backward = case.direction == "backward"
        with torch.set_grad_enabled(backward):
            problem = self.problem(case, device, 1, seed)
        return Workload(
            call=lambda op: problem.calls("liger_aot", self.invoke(op, case.variant))[0],
            error=problem.check,
            bytes=self.moved_bytes(case),
            point=case.point,
            grad=backward,
        )

    @property
    def _usual(self) -> Case:
        return self.points[0]

    def _invoke(self, variant: str) -> Invoke:
        return lambda op: self.invoke(op, variant)

    def _public(self, case: Case) -> PublicCall:
        return PublicCall(self.op, self._invoke(case.variant))

    def _inputs_and_grads(self, case: Case, random: Random) -> tuple[Tensors, Tensors]:
        """Arguments and, for a backward, the outputs' gradients."""
        arguments = self.inputs(case, random)
        if case.direction == "forward":
            return arguments, ()
        return arguments, self._grads(self._public(case), arguments, random)

    def _grads(self, calculation: PublicCall, arguments: Maybe, random: Random) -> Tensors:
        """Random gradients of the outputs, each lying in memory as the first argument of its shape does."""
        outputs = calculation.results(_meta(arguments))[: op_class(self.op).outputs]
        given = [a for a in arguments if a is not None]
        return tuple(random.like(next((a for a in given if a.shape == y.shape), y)) for y in outputs)

    def _selector(
        self, direction: str, wanted: Sequence[int], rows: Tensor, batch: int
    ) -> Callable[[Tensors], Tensors]:
        """What to compare of a call's results: some rows of the batch, and all of a shared argument's gradient."""
        if direction == "forward":
            return lambda results: tuple(flat(r, batch)[rows] for r in results)
        shared = [i in self.shared for i in wanted]
        return lambda results: tuple(
            r.reshape(-1) if whole else flat(r, batch)[rows] for r, whole in zip(results, shared, strict=True)
        )

    def _call(
        self, case: Case, function: Function, overwritten: Overwritten, arguments: Tensors, grads: Tensors
    ) -> Call:
        own = [a.clone() if i in overwritten.arguments else a for i, a in enumerate(arguments)]
        own_grads = [g.clone() for g in grads] if overwritten.grads else list(grads)
        restored = [(own[i], arguments[i]) for i in overwritten.arguments]
        restored += zip(own_grads, grads, strict=True) if overwritten.grads else ()
        restore = partial(_restore, restored) if restored else None
        if case.direction == "forward":
            return Call(lambda: as_tuple(function(*own)), restore)
        leaves = {i: own[i].detach().requires_grad_() for i in self.wanted(arguments)}
        outputs = as_tuple(function(*(leaves.get(i, a) for i, a in enumerate(own))))
        wanted = list(leaves.values())
        return Call(lambda: torch.autograd.grad(outputs, wanted, own_grads, retain_graph=True), restore)

    def _small(self, device: torch.device) -> tuple[Tensors, Tensors]:
        case = Case("backward", torch.bfloat16, self.small, self._usual.variant)
        random = Random(case.dtype, device, torch.Generator(device).manual_seed(0))
        arguments, grads = self._inputs_and_grads(case, random)
        for i in self.wanted(arguments):
            arguments[i].requires_grad_()
        return arguments, grads

    def _ours(self, variant: str) -> Function:
        import liger_aot

        return self.invoke(liger_aot.load(self.op), variant)

    def _compiled(self, variant: str) -> Function:
        import torch._dynamo
        import torch._functorch.config

        # Every shape is compiled afresh, as a model of that shape would be, not as the n-th recompilation.
        torch._dynamo.reset()
        # Donated buffers refuse retain_graph=True, with which the backward is timed.
        torch._functorch.config.donated_buffer = False
        compiled: Function = torch.compile(self.formula(variant), fullgraph=True, dynamic=False)
        return compiled


def sweep(
    direction: str,
    elements: int,
    lengths: Iterable[int],
    dtype: torch.dtype = torch.bfloat16,
    variant: str = "",
) -> list[Case]:
    """(rows, n) cases of about as many elements at each row length n."""
    return [Case(direction, dtype, (elements // n, n), variant) for n in lengths]


def both(shapes: Iterable[tuple[int, ...]], variant: str = "") -> list[Case]:
    """bf16 cases of these shapes in both directions."""
    return [
        Case(direction, torch.bfloat16, shape, variant)
        for direction in ("forward", "backward")
        for shape in shapes
    ]


def _spread(cases: list[Case], most: int | None) -> list[Case]:
    """The middle one, or several with both ends."""
    if most is None or len(cases) <= most:
        return cases
    if most == 1:
        return [cases[len(cases) // 2]]
    return [cases[i * (len(cases) - 1) // (most - 1)] for i in range(most)]


def _restore(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copies back, past autograd's eyes: the overwriting went past them too."""
    for to, pristine in pairs:
        to.data.copy_(pristine)


def _meta(tensors: Maybe) -> Maybe:
    return tuple(None if t is None else t.to("meta") for t in tensors)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def modules() -> dict[str, str]:
    """The module of each op that has a benchmark, by the op's name: the file of that name in a family's folder,
    which binds an `OpEntry` to the name `ENTRY`. Nothing else names it."""
    files = {
        path.stem: f"benchmarks.{path.parent.name}.{path.stem}"
        for path in sorted(Path(__file__).parent.glob("*/*.py"))
    }
    return {op: files[op] for op in declared_ops() if op in files}


def load(name: str) -> OpEntry:
    """The benchmark of an op.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in (found := modules()):
        raise ValueError(f"no benchmark for {name!r}: there is one for {', '.join(found)}")
    entry: OpEntry = importlib.import_module(found[name]).ENTRY
    return entry
