"""The first calls of a function, bound and specialised without the function that Triton makes for it.

For each function Triton writes the text of another that binds arguments to parameters and finds what each is
specialised for, and has Python compile it: a fifth of what a first launch from a pack costs, and few calls need it,
since ``repeated`` takes those that are like one before. Here the first calls go through the same steps one by one.
Calls that are out of the ordinary, and functions that Triton is asked for often, get what Triton makes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Versions whose steps these are. Tests compare with Triton's function for random arguments, in each of them.
VERSIONS = ("3.6", "3.7", "3.8", "3.9")
# Calls. To make Triton's function costs 0.2 to 0.4 ms, the first call here 0.05 to 0.1, others 10 us more than that
# function's (two busy cores, 2026-11-28).
_FEW = 8


class Binder:
    """Called as the function that ``make`` makes of the other arguments, which it makes where it is needed."""

    def __init__(self, make: Callable[..., Any], signature: Any, params: Any, backend: Any) -> None:
        self._arguments, self._make = (signature, params, backend), make
        self._left = _FEW
        self._made: Any = None

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self._made is None and self._left:
            self._left -= 1
            if (found := self._bound(args, options)) is not None:
                return found
        if self._made is None:
            self._made = self._make(*self._arguments)
        return self._made(*args, **options)

    def _bound(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Parameters' values, what each is specialised for, and options; None where Triton is to say what is wrong."""
        from triton.runtime.jit import native_specialize_impl

        signature, params, backend = self._arguments
        declared = signature.parameters.values()
        left, values = dict(options), dict(zip(signature.parameters, args, strict=False))
        if len(args) > len(params) or not values.keys().isdisjoint(left):
            return None
        for one in declared:
            if one.kind is not one.POSITIONAL_OR_KEYWORD:
                return None
            if one.name not in values:
                if one.name not in left and one.default is one.empty:
                    return None
                values[one.name] = left.pop(one.name, one.default)
        special: list[Any] = []
        for param, value in zip(params, values.values(), strict=True):
            if param.is_constexpr:
                special.append(("constexpr", value))
                continue
            of = param.annotation_type
            if of == "u1" or of[:2] in ("fp", "bf"):
                special.append((of, None))
                continue
            aligned, specialised = not param.do_not_specialize_on_alignment, not param.do_not_specialize
            found = native_specialize_impl(backend, value, param.is_const, specialised, aligned)
            special.append((of, *found[1:]) if of else found)
        return values, special, left
