"""Variants that are declared instead of recorded from a run: ``liger_aot.triton.points``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

from liger_aot.errors import ArgumentError
from liger_aot.triton import recorder, seams

MOST = 4096  # points of one call
CLASSES = (1, 16, 17)  # of an int32, as Triton tells them apart: 1, divisible by 16, and other

Choices = Mapping[str, Any] | Sequence[Mapping[str, Any]]


def points(
    kernel: Any,
    *,
    dtypes: Choices,
    sizes: Mapping[str, Any] | None = None,
    constants: Choices | None = None,
    options: Choices | None = None,
    unaligned: Sequence[str] = (),
) -> int:
    """Note variants of ``kernel`` in the recording that is being made, without launching it; how many. A file of such
    calls, run by ``liger-aot record --out DIR --target sm90 -- python points.py``, declares a pack.

    kernel: a ``@triton.jit`` function, also under ``@triton.heuristics``; where a target is named, under
        ``@triton.autotune``, too.
    dtypes: the pointers' torch dtypes by parameter, one or a list of them.
    sizes: of the other run-time arguments: None for any int32, which are three variants (1, divisible by 16, other);
        an integer or a list, of which each kind that occurs is one; a float or a bool for arguments that are.
    constants: ``tl.constexpr`` parameters, one value or a list of them.
    options: the compiler's, such as num_warps, alike.
    unaligned: pointers that may also be no multiples of 16 bytes; all others are.

    What is given for several parameters is combined, each with each. Where some go together, ``dtypes``, ``constants``
    and ``options`` take a list of mappings in place of one.

        points(add, dtypes=[{"X": d, "Y": d} for d in (torch.float16, torch.bfloat16)], sizes={"n": None},
               constants={"BLOCK": [256, 1024]})

    ArgumentError where no recording is being made, or a parameter is unknown or left without a value.
    """
    active = recorder.active()
    if active is None:
        raise ArgumentError(
            "points: there is no recording to write to; run the program with liger-aot record --out DIR -- python FILE"
        )
    fn = seams.unwrapped(kernel)
    if active.named is None and _is_tuned(kernel):
        raise ArgumentError(
            f"points: {fn} is under @triton.autotune, which here would measure on a GPU: record for a named GPU, with "
            "liger-aot record --target ARCH"
        )
    groups = [
        [_pointers(row, unaligned) for row in _rows(dtypes)],
        [{name: _sizes(name, value) for name, value in (sizes or {}).items()}],
        [_values(row) for row in _rows(constants)],
    ]
    chosen = [_values(row) for row in _rows(options)]
    every = [{name: values for part in parts for name, values in part.items()} for parts in product(*groups)]
    _check_names(fn, kernel, every)
    if (count := sum(_count(one) for one in every) * sum(map(_count, chosen))) > MOST:
        raise ArgumentError(
            f"points: all combinations of {fn}'s values are {count} variants, more than {MOST}: give fewer values, or "
            "lists of mappings"
        )
    before = len(active.variants)
    for arguments in (point for one in every for point in _each(one)):
        for given in (point for one in chosen for point in _each(one)):
            kernel.run(grid=(1,), warmup=True, **arguments, **given)
    return len(active.variants) - before


class Pointer:
    """A tensor's dtype and alignment, without the tensor."""

    def __init__(self, dtype: Any, aligned: bool) -> None:
        self.dtype, self._aligned = dtype, aligned

    def data_ptr(self) -> int:
        return 0 if self._aligned else 1

    def ptr_range(self) -> int:
        return 0


def _rows(choices: Choices | None) -> Sequence[Mapping[str, Any]]:
    if choices is None:
        return [{}]
    return [choices] if isinstance(choices, Mapping) else list(choices)


def _values(row: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {name: list(value) if isinstance(value, list) else [value] for name, value in row.items()}


def _pointers(row: Mapping[str, Any], unaligned: Sequence[str]) -> dict[str, list[Any]]:
    return {
        name: [
            Pointer(d, aligned)
            for d in found
            for aligned in ((True, False) if name in unaligned else (True,))
        ]
        for name, found in _values(row).items()
    }


def _sizes(name: str, value: Any) -> list[Any]:
    """The values as they are given: heuristics and tuners look at more than what Triton tells apart."""
    if value is None:
        return list(CLASSES)
    values = list(value) if isinstance(value, (list, tuple, range)) else [value]
    if wrong := [one for one in values if not isinstance(one, (bool, int, float))]:
        raise ArgumentError(
            f"points: sizes[{name!r}] must be None, a number, or a list of numbers, got {wrong[0]!r}"
        )
    return values


def _count(values: Mapping[str, Sequence[Any]]) -> int:
    return prod(map(len, values.values()))


def _each(values: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    for point in product(*values.values()):
        yield dict(zip(values, point, strict=True))


def _check_names(fn: Any, kernel: Any, every: Sequence[Mapping[str, Any]]) -> None:
    known = [param.name for param in fn.params]
    computed = _computed(kernel)
    for one in every:
        if unknown := [name for name in one if name not in known]:
            raise ArgumentError(f"points: {fn} has no parameter {unknown[0]!r}; it has {', '.join(known)}")
        lacking = [
            p.name for p in fn.params if p.name not in one and not p.has_default and p.name not in computed
        ]
        if lacking:
            raise ArgumentError(f"points: a value is needed for {fn}'s parameter {lacking[0]!r}")


def _computed(kernel: Any) -> set[str]:
    """Parameters that heuristics and tuners give."""
    found: set[str] = set()
    while not hasattr(kernel, "params"):
        found |= set(getattr(kernel, "values", ()))
        for config in getattr(kernel, "configs", ()):
            found |= set(config.kwargs)
        kernel = kernel.fn
    return found


def _is_tuned(kernel: Any) -> bool:
    while not hasattr(kernel, "params"):
        if hasattr(kernel, "configs"):
            return True
        kernel = kernel.fn
    return False
