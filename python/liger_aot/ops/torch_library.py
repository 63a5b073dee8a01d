"""Registration with torch.library: how torch.compile, torch.export and tensor subclasses see an op.

Eager calls on plain tensors don't come this way: the dispatcher costs several times a launch. An op is registered when
it is first needed; a program that loads one that torch.export saved calls ``register_all`` before.

An op named ``f`` becomes ``liger_aot::f_forward``, which gives all of its results, and ``liger_aot::f_backward``; one
that writes its arguments becomes ``liger_aot::f``, which gives nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.compiler import is_compiling

from liger_aot.ops.op import PLAIN_OR_NONE
from liger_aot.ops.registry import load, names
from liger_aot.runtime.locks import new_lock

NAMESPACE = "liger_aot"
Tensors = tuple[Any, ...]


@runtime_checkable
class Differentiable(Protocol):
    """What is read of an op: see ``DifferentiableOp``, which has all of it."""

    name: str
    tensors: tuple[str, ...]
    settings: Sequence[str]
    outputs: int
    results: int
    same_gradient: Mapping[str, str]
    writes: tuple[str, ...]

    def overwritten(self, tensors: Tensors, /) -> Tensors: ...

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None, /
    ) -> Tensors: ...

    def run_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool], /
    ) -> Tensors: ...

    def saved(self, tensors: Tensors, results: Tensors, /) -> Tensors: ...

    def by_reference(self, tensors: Tensors, settings: tuple[Any, ...], /) -> Tensors: ...

    def gradients_by_reference(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], /
    ) -> Tensors: ...

    def backward_in_torch(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool], /
    ) -> Tensors: ...


_library = torch.library.Library(NAMESPACE, "DEF")
_registered: set[str] = set()
_lock = new_lock()


def register(op: str) -> bool:
    """Register one op, if it wasn't yet. Its name is a constant to dynamo, and so is the answer: this runs while a
    graph is traced and leaves nothing in it."""
    with _lock:
        if op not in _registered:
            if isinstance(found := load(op), Differentiable):
                (_define_in_place if found.writes else _define)(found)
            _registered.add(op)
    return True


# What torch.compiler.assume_constant_result sets; that imports all of dynamo, which takes seconds.
register._dynamo_marked_constant = True  # type: ignore[attr-defined]


def register_all() -> None:
    """Register every op of the package with torch.library."""
    for name in names():
        register(name)


def _plain(tensors: Sequence[Any]) -> Tensors:
    """The tensors, of subclasses what they are of: one with a dispatch of its own has had its turn before."""
    return tuple(t if type(t) in PLAIN_OR_NONE else t.as_subclass(Tensor) for t in tensors)


def _define_in_place(op: Differentiable) -> None:
    """An op that writes arguments: its schema says which, so that nobody copies them."""
    arguments, count = [], len(op.tensors)
    for name in op.tensors:
        optional, name = name.endswith("?"), name.rstrip("?")
        alias = f"({chr(ord('a') + op.writes.index(name))}!)" if name in op.writes else ""
        arguments.append(f"Tensor{alias}{'?' if optional else ''} {name}")

    def run(*arguments: Any) -> None:
        tensors = _plain(arguments[:count])
        op.run_forward(tensors, tuple(arguments[count:]), False, op.overwritten(tensors))

    def fake(*arguments: Any) -> None:
        return None

    _library.define(f"{op.name}({', '.join((*arguments, *op.settings))}) -> ()")
    _library.impl(op.name, run, "CompositeExplicitAutograd")
    _library.impl(op.name, fake, "Meta")


def _define(op: Differentiable) -> None:
    count = len(op.tensors)
    arguments = [f"Tensor{'?' if name.endswith('?') else ''} {name.rstrip('?')}" for name in op.tensors]
    forward, backward = f"{op.name}_forward", f"{op.name}_backward"
    index = {name.rstrip("?"): i for i, name in enumerate(op.tensors)}
    same = [(index[other], index[first]) for other, first in op.same_gradient.items()]
    results = ", ".join(["Tensor"] * op.results)
    _library.define(f"{forward}({', '.join((*arguments, *op.settings, 'bool keep'))}) -> ({results})")
    read = ("Tensor?[] grads", "Tensor?[] saved", *op.settings, "bool[] needed")
    _library.define(f"{backward}({', '.join(read)}) -> Tensor[]")

    def unpacked(results: Sequence[Tensor]) -> Any:
        return results[0] if op.results == 1 else tuple(results)

    def run_forward(*arguments: Any) -> Any:
        tensors, (*settings, keep) = _plain(arguments[:count]), arguments[count:]
        found = op.run_forward(tensors, tuple(settings), keep, None)
        first = found[0]
        assert first is not None
        return unpacked([first.new_empty(0) if r is None else r for r in found])

    def fake_forward(*arguments: Any) -> Any:
        *inputs, keep = arguments
        found = op.by_reference(tuple(inputs[:count]), tuple(inputs[count:]))
        return unpacked(
            [
                r.new_empty_strided(r.shape, r.stride()) if keep or i < op.outputs else r.new_empty(0)
                for i, r in enumerate(found)
            ]
        )

    def listed(found: Tensors, needed: Sequence[bool], like: Tensors) -> list[Tensor]:
        """The gradients that are needed; one that does not exist is a tensor of no elements. None may be another one or
        an argument: graphs are rewritten in that belief."""
        first = next(t for t in like if t is not None)
        made: list[Tensor] = []
        for g, need in zip(found, needed, strict=True):
            if need:
                g = first.new_empty(0) if g is None else g
                taken = any(g is t for t in (*like, *made))
                made.append(g.clone(memory_format=torch.contiguous_format) if taken else g)
        return made

    def run_backward(grads: Tensors, saved: Tensors, *arguments: Any) -> list[Tensor]:
        *settings, needed = arguments
        grads, saved = _plain(grads), _plain(saved)
        return listed(op.run_backward(grads, saved, tuple(settings), needed), needed, grads)

    def fake_backward(grads: Tensors, saved: Tensors, *arguments: Any) -> list[Tensor]:
        *settings, needed = arguments
        found = op.gradients_by_reference(tuple(grads), tuple(saved), tuple(settings))
        return [torch.empty_like(g) for g in listed(found, needed, grads)]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        results = (output,) if op.results == 1 else tuple(output)
        ctx.save_for_backward(*op.saved(inputs[:count], results))
        ctx.settings = inputs[count:-1]
        ctx.shapes = [None if t is None else t.shape for t in inputs[:count]]
        ctx.mark_non_differentiable(*results[op.outputs :])
        ctx.set_materialize_grads(False)

    def autograd(ctx: Any, *grads: Any) -> Any:
        rest = (None,) * (len(op.settings) + 1)
        grads = grads[: op.outputs]
        needed = [
            need and shape is not None for need, shape in zip(ctx.needs_input_grad, ctx.shapes, strict=False)
        ]
        if not any(needed) or all(g is None for g in grads):
            return (None,) * count + rest
        if torch.is_grad_enabled() and not is_compiling():
            return (*op.backward_in_torch(grads, ctx.saved_tensors, ctx.settings, needed), *rest)
        asked = list(needed)  # a gradient that two arguments have is asked for once
        for other, first in same:
            asked[first] = asked[first] or asked[other]
            asked[other] = False
        call = getattr(torch.ops.liger_aot, backward)
        found = iter(call(grads, ctx.saved_tensors, *ctx.settings, asked))
        made = [next(found) if ask else None for ask in asked]
        for other, first in same:
            made[other] = made[first] if needed[other] else None
        made = [g if need else None for g, need in zip(made, needed, strict=True)]
        shapes = zip(made, ctx.shapes, strict=True)
        return tuple(g if g is not None and g.shape == shape else None for g, shape in shapes) + rest

    for name, run, fake in ((forward, run_forward, fake_forward), (backward, run_backward, fake_backward)):
        _library.impl(name, run, "CompositeExplicitAutograd")
        _library.impl(name, fake, "Meta")  # register_fake does the same and reads source files: 1 ms an op
    torch.library.register_autograd(
        f"{NAMESPACE}::{forward}", autograd, setup_context=setup_context, lib=_library
    )
