"""A decoded instruction."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from .architecture import ARCHITECTURES, Architecture
from .errors import EmulatorError
from .opcodes import same_operation
from .operand import Operand

Modifier = int | str | tuple[int, ...] | None  # None: a bare word
_HEXADECIMAL = frozenset({"row_mask", "bank_mask"})


@dataclass(frozen=True)
class Instruction:
    """One instruction. `address` is in bytes; `name` keeps the encoding's suffix (`_e32`, `_dpp`). `other` is
    the second of the two operations of a VOPD instruction."""

    name: str
    operands: tuple[Operand, ...] = ()
    modifiers: Mapping[str, Modifier] = field(default_factory=dict)
    address: int = 0
    words: tuple[int, ...] = ()
    architecture: Architecture = ARCHITECTURES["gfx942"]
    other: Instruction | None = None

    def __str__(self) -> str:
        text = " ".join(
            (self.name, ", ".join(str(operand) for operand in self.operands if not operand.implicit))
        ).rstrip()
        for name, value in self.modifiers.items():
            text += f" {name}" if value is None else f" {name}:{self._value_text(name, value)}"
        return f"{text} :: {self.other}" if self.other else text

    def _value_text(self, name: str, value: Modifier) -> str:
        if isinstance(value, tuple):
            return f"[{','.join(map(str, value))}]"
        if name == "bitop3":
            return str(value) if isinstance(value, int) and value < 10 else f"{value:#x}"
        hexadecimal = name in _HEXADECIMAL or self.name.startswith("s_")
        return f"{value:#x}" if hexadecimal and isinstance(value, int) else str(value)

    @property
    def size(self) -> int:
        return 4 * len(self.words)

    @cached_property
    def base_name(self) -> str:
        """The name without the encoding's suffix, of an operation that several architectures have CDNA's."""
        return same_operation(re.sub(r"_(e32|e64|dpp|e64_dpp|sdwa)$", "", self.name))

    @property
    def sdwa(self) -> bool:
        return self.name.endswith("_sdwa")

    def integer(self, modifier: str, default: int = 0) -> int:
        """The value of a numeric modifier."""
        value = self.modifiers.get(modifier, default)
        assert isinstance(value, int)
        return value

    def bits(self, modifier: str, default: int, count: int) -> tuple[int, ...]:
        """The value of a modifier such as op_sel:[0,1,0]; operands it does not name take the default."""
        given = self.modifiers.get(modifier, ())
        assert isinstance(given, tuple)
        return given + (default,) * (count - len(given))

    def expect(self, *counts: int) -> None:
        """Refuse another number of operands than the caller implements."""
        if len(self.operands) not in counts:
            raise EmulatorError(f"{len(self.operands)} operands instead of {' or '.join(map(str, counts))}")

    def allow(self, *modifiers: str) -> None:
        """Refuse every modifier that the caller does not implement."""
        unknown = self.modifiers.keys() - set(modifiers)
        if unknown:
            raise EmulatorError(f"modifier {', '.join(sorted(unknown))} is not implemented here")
