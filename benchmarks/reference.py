"""What an op should give, in fp64, from its own plain-torch reference: a few rows of the batch where a result has
rows, and sums over the whole batch, taken a chunk at a time, where it has none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]
Maybe = tuple[Any, ...]  # of tensors and None
Invoke = Callable[[Any], Callable[..., Any]]  # from the op a function of its tensor arguments

FP64_CHUNK_ELEMENTS = 2**24


class PublicCall:
    """The op as it is called: its outputs, and gradients through all that it does to its arguments."""

    def __init__(self, op: str, invoke: Invoke) -> None:
        self._function = invoke(on_reference(op))

    def results(self, arguments: Maybe) -> Maybe:
        with torch.no_grad():
            return as_tuple(self._function(*arguments))

    def gradients(self, arguments: Maybe, grads: Maybe, wanted: Collection[int]) -> Tensors:
        with torch.enable_grad():
            own = [a.detach().requires_grad_(i in wanted) for i, a in enumerate(arguments)]
            outputs = as_tuple(self._function(*own))
        return torch.autograd.grad(outputs, [own[i] for i in wanted], grads)


class Reference:
    """A calculation on one set of inputs.

    Args:
        grads: of the outputs; none where only the forward is wanted.
        shared: positions of the arguments that all of the batch is computed with, as a weight is. The others lie
            along the batch, as grads and results do: their first dimension is what is cut into chunks.
    """

    def __init__(
        self, calculation: PublicCall, arguments: Maybe, grads: Maybe, shared: Collection[int]
    ) -> None:
        self._calculation, self._arguments, self._grads = calculation, arguments, grads
        self._shared = shared
        self.batch = len(self._along()[0])

    def forward(self, rows: Tensor) -> Tensors:
        """All results at some rows of the batch, each [len(rows), elements]."""
        chunks = [
            [None if r is None else flat(r, part.batch) for r in part._results()]
            for _, part in self._at(rows)._chunks()
        ]
        return tuple(torch.cat(parts) for parts in zip(*chunks, strict=True) if parts[0] is not None)

    def backward(self, rows: Tensor, wanted: Collection[int]) -> Tensors:
        """The gradients of the `wanted` arguments: [len(rows), elements] at some rows of the batch, of the shared
        ones [elements] over all of it."""
        whole = self
        if not any(i in self._shared for i in wanted):
            whole, rows = self._at(rows), torch.arange(len(rows), device=rows.device)
        gradients: dict[int, list[Tensor]] = {i: [] for i in wanted}
        for start, part in whole._chunks():
            found = part._calculation.gradients(_wide(part._arguments), _wide(part._grads), wanted)
            inside = rows[(rows >= start) & (rows < start + part.batch)] - start
            for (i, kept), gradient in zip(gradients.items(), found, strict=True):
                if i not in self._shared:
                    kept.append(flat(gradient, part.batch)[inside])
                elif kept:
                    kept[0] += gradient.reshape(-1)
                else:
                    kept.append(gradient.reshape(-1))
        return tuple(torch.cat(kept) for kept in gradients.values())

    def _results(self) -> Maybe:
        return self._calculation.results(_wide(self._arguments))

    def _along(self) -> list[Tensor]:
        return [a for i, a in enumerate(self._arguments) if a is not None and i not in self._shared]

    def _at(self, rows: Tensor) -> Reference:
        return self._part(itemgetter(rows))

    def _chunks(self) -> Iterator[tuple[int, Reference]]:
        """Pieces of the batch in order, each with its first row."""
        row = max(t.numel() for t in (*self._along(), *self._grads)) // self.batch
        step = max(1, FP64_CHUNK_ELEMENTS // row)
        for start in range(0, self.batch, step):
            yield start, self._part(itemgetter(slice(start, start + step)))

    def _part(self, cut: Callable[[Tensor], Tensor]) -> Reference:
        arguments = tuple(
            a if a is None or i in self._shared else cut(a) for i, a in enumerate(self._arguments)
        )
        return Reference(self._calculation, arguments, tuple(map(cut, self._grads)), self._shared)


@lru_cache(maxsize=64)
def op_class(op: str) -> Any:
    """The class that `liger_aot.load(op)` makes its op of."""
    from liger_aot.ops.registry import module

    return module(op).OP


def flat(result: Tensor, batch: int) -> Tensor:
    """[batch, elements], whatever dimensions a result has within the batch."""
    return result.reshape(batch, -1)


def as_tuple(results: Any) -> Tensors:
    return results if isinstance(results, tuple) else (results,)


def _wide(tensors: Iterable[Any]) -> Maybe:
    return tuple(t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in tensors)


@lru_cache(maxsize=64)
def on_reference(op: str) -> Any:
    """The op with its references in place of its kernels and its checks: fp64, and on any device."""

    class OnReference(op_class(op)):  # type: ignore[misc]
        def differentiable(self, tensors: Maybe, settings: tuple[Any, ...] = (), out: Any = None) -> Any:
            outputs = _ByReference.apply(self, settings, *tensors)  # type: ignore[no-untyped-call]
            return outputs[0] if self.outputs == 1 else outputs

    return OnReference()


class _ByReference(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Any, settings: tuple[Any, ...], *tensors: Any) -> Any:
        results = op.reference(*tensors, *settings)
        ctx.save_for_backward(*op.saved(tensors, results))
        ctx.op, ctx.settings = op, settings
        return tuple(results[: op.outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *ctx.op.reference_backward(grads, ctx.saved_tensors, *ctx.settings)
