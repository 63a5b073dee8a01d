"""What an op's settings may be: declared with the op, checked alike on the CPU and on a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

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
SAID = {"float": "a number", "int": "an int", "SymInt": "an int", "bool": "True or False", "str": "a string"}


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
        if not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "bool"):
            said = SAID.get(kind, "a torch.dtype")
            raise ArgumentTypeError(f"{op}: {name} must be {self._or_among(said)}, got {_shown(value)}")
        if kind == "str":
            if self._among and value not in self._among:
                raise ArgumentError(f"{op}: {name} must be {self._or_among('a string')}, got {value!r}")
        elif (largest := LARGEST.get(kind)) is not None:
            least, most = max(self._least, -largest), min(self._most, largest)
            if not (least < value if self._above else least <= value) or not value <= most:
                raise ArgumentError(f"{op}: {name} must be {self._range()}, got {_shown(value)}")
            if kind == "float" and isinstance(value, int):
                return float(value)
        return value

    def _or_among(self, said: str) -> str:
        return f"one of {', '.join(self._among)}" if self._among else said

    def _range(self) -> str:
        least = (
            "" if self._least == -math.inf else f"{'above' if self._above else 'at least'} {self._least:g}"
        )
        most = "finite" if self._most == math.inf else f"at most {self._most:g}"
        return f"{least} and {most}" if least else most


def check_flag(op: str, name: str, value: Any) -> bool:
    """``value``, which must be True or False; ArgumentTypeError for what is only taken for it."""
    if value is True or value is False:
        return bool(value)
    raise ArgumentTypeError(f"{op}: {name} must be True or False, got {_shown(value)}")


def _shown(value: Any) -> str:
    """A number or a string as it is; of anything else the type."""
    if isinstance(value, (int, float)) and type(value).__module__ == "builtins":
        return (
            repr(value) if abs(value) < 1e300 or isinstance(value, float) else "an int of more than 64 bits"
        )
    return repr(value)[:80] if isinstance(value, str) else type(value).__name__


class Schema(dict[str, Allowed]):
    """An op's settings: of each, in torch's schema language, what is allowed."""

    def checked(self, op: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """All of them, as ``Allowed.checked``."""
        named = zip(self.items(), values, strict=True)
        return tuple(allowed.checked(op, schema, value) for (schema, allowed), value in named)


ANY = Allowed()
FROM_ZERO = Allowed(least=0)
ABOVE_ZERO = Allowed(least=0, above=True)
