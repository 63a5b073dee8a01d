"""What an op's settings may be: declared with the op, checked alike on the CPU and on a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch._C import _is_tracing as is_tracing

from liger_aot.errors import ArgumentError, ArgumentTypeError

LARGEST = {"float": torch.finfo(torch.float32).max, "int": (1 << 63) - 1, "SymInt": (1 << 63) - 1}
TYPES: dict[str, Any] = {
    "float": (float, int, torch.SymFloat, torch.SymInt),
    "int": (int,),
    "SymInt": (int, torch.SymInt),
    "bool": (bool,),
    "str": (str,),
    "ScalarType": (torch.dtype,),
}
SAID = {
    "float": "a number",
    "int": "an int",
    "SymInt": "an int",
    "bool": "True or False",
    "str": "a string",
    "ScalarType": "a torch.dtype",
}


class Allowed:
    """The values of one setting, whose type its schema says: "float eps", "int? rotary_dim", "bool[] wanted".

    Args:
        least, most: the range of a number; by default all finite ones, of 64 bits where they are integers.
        above: whether ``least`` itself is out.
        among: the strings that are allowed.
        called: the public argument, where the setting's name differs.
    """

    def __init__(
        self,
        *,
        least: float = -math.inf,
        most: float = math.inf,
        above: bool = False,
        among: Iterable[str] = (),
        called: str = "",
    ) -> None:
        self._least, self._most, self._above = least, most, above
        self._among, self._called = tuple(among), called

    def checked(self, op: str, schema: str, value: Any) -> Any:
        """``value`` as the schema has it: integers become floats where those are asked for.

        Raises:
            ArgumentTypeError: of another type. A bool is no number.
            ArgumentError: out of range.
        """
        kind, name = schema.split()
        name = self._called or name
        if kind.endswith("[]"):
            return tuple(self.checked(op, f"{kind[:-2]} {name}", v) for v in value)
        if kind.endswith("?"):
            if value is None:
                return None
            kind = kind[:-1]
        if isinstance(value, torch.Tensor) and is_tracing() and kind in LARGEST:
            value = value.item()  # a size: torch.jit.trace has them as tensors
        if self._among:
            if not isinstance(value, str) or value not in self._among:
                raise ArgumentError(
                    f"{op}: {name} must be one of {', '.join(self._among)}; got {_shown(value)}"
                )
        elif not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "bool"):
            raise ArgumentTypeError(f"{op}: {name} must be {SAID[kind]}, got {_shown(value)}")
        elif (largest := LARGEST.get(kind)) is not None:
            least, most = max(self._least, -largest), min(self._most, largest)
            if not (least < value if self._above else least <= value) or not value <= most:
                raise ArgumentError(f"{op}: {name} must be {self._range(kind)}, got {_shown(value)}")
            if kind == "float" and isinstance(value, int):
                return float(value)
        return value

    def _range(self, kind: str) -> str:
        if self._least > -math.inf and self._most < math.inf:
            return f"from {self._least:g} to {self._most:g}"
        rest = "finite" if kind == "float" else "of 64 bits"
        return (
            rest
            if self._least == -math.inf
            else f"{'above' if self._above else 'at least'} {self._least:g} and {rest}"
        )


def check_flag(op: str, name: str, value: Any) -> bool:
    """``value``, which must be True or False; ArgumentTypeError for what is only taken for it."""
    return bool(ANY.checked(op, f"bool {name}", value))


def _shown(value: Any) -> str:
    """A number or a string as it is, of anything else the type."""
    if value is None or type(value) in (bool, int, float, str):
        text = (
            repr(value) if type(value) is not int or abs(value) < 1 << 70 else "an int of more than 64 bits"
        )
        return text[:80] if value is None else f"{text[:80]} ({type(value).__name__})"
    return type(value).__name__


class Schema(dict[str, Allowed]):
    """An op's settings: of each, in torch's schema language, what is allowed."""

    def checked(self, op: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """All of them, as ``Allowed.checked``."""
        named = zip(self.items(), values, strict=True)
        return tuple(allowed.checked(op, schema, value) for (schema, allowed), value in named)


ANY = Allowed()
FROM_ZERO = Allowed(least=0)
ABOVE_ZERO = Allowed(least=0, above=True)
