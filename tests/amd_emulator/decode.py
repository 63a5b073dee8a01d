"""From an AMDGPU code object to instructions: llvm-objdump disassembles, this file parses its lines."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from .errors import EmulatorError

TOOL_VARIABLE = "LIGER_AOT_LLVM_OBJDUMP"
OLDEST_LLVM = 17  # the first that knows gfx942
_CANDIDATES = ("llvm-objdump-19", *(f"llvm-objdump-{v}" for v in (22, 21, 20, 18, 17)), "llvm-objdump")

# Modifiers that are a bare word; all others are written as name:value.
_FLAGS = frozenset(
    {"offen", "idxen", "glc", "slc", "sc0", "sc1", "nt", "lds", "gds", "tfe", "scc", "clamp"}
    | {"row_mirror", "row_half_mirror"}
)
_LINE = re.compile(
    r"\s+(?P<text>\S.*?)\s*// (?P<address>[0-9A-F]{12}): (?P<words>[0-9A-F]{8}(?: [0-9A-F]{8})*)"
)


@dataclass(frozen=True)
class Instruction:
    """One disassembled instruction.

    `address` and `size` are in bytes, `name` keeps the encoding suffix (`_e32`, `_dpp`), `operands` and
    `modifiers` are text; a modifier that is a bare word has the value "".
    """

    name: str
    operands: tuple[str, ...]
    modifiers: Mapping[str, str] = field(default_factory=dict)
    text: str = ""
    address: int = 0
    words: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return 4 * len(self.words)

    @property
    def base_name(self) -> str:
        """The name without the encoding suffix."""
        return re.sub(r"_(e32|e64|dpp|sdwa)$", "", self.name)

    @property
    def sdwa(self) -> bool:
        return self.name.endswith("_sdwa")

    def integer(self, modifier: str, default: int = 0) -> int:
        """The value of a numeric modifier."""
        return int(self.modifiers[modifier], 0) if modifier in self.modifiers else default

    def bits(self, modifier: str, default: int, count: int) -> tuple[int, ...]:
        """The value of a modifier such as op_sel:[0,1,0]; operands it does not name take the default."""
        text = self.modifiers.get(modifier)
        given = tuple(int(bit) for bit in text.strip("[]").split(",")) if text else ()
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


def parse(text: str, address: int = 0, words: tuple[int, ...] = (0,)) -> Instruction:
    """Parse one instruction as llvm-objdump prints it, e.g. `v_add_f32_e32 v1, v2, v3`."""
    name, _, rest = text.strip().partition(" ")
    operands: list[str] = []
    modifiers: dict[str, str] = {}
    for chunk in _split(rest, ","):
        for position, token in enumerate(_split(chunk, " ")):
            key, colon, value = token.partition(":")
            if colon and re.fullmatch(r"[a-z]\w*", key):
                modifiers[key] = value
            elif token in _FLAGS and (position or token != "scc"):
                modifiers[token] = ""
            else:
                operands.append(token)
    return Instruction(name, tuple(operands), modifiers, text.strip(), address, words)


def _split(text: str, separator: str) -> Iterator[str]:
    """Split at separators that stand outside brackets; empty parts are dropped."""
    depth, part = 0, ""
    for character in text:
        depth += (character in "[(") - (character in "])")
        if character == separator and not depth:
            if part.strip():
                yield part.strip()
            part = ""
        else:
            part += character
    if part.strip():
        yield part.strip()


@functools.cache
def _probe(tool: str) -> str | None:
    """Why `tool` cannot be used, or None if it can."""
    path = shutil.which(tool)
    if path is None:
        return f"{tool} is not installed"
    shown = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"LLVM version (\d+)", shown)
    if version is None or int(version[1]) < OLDEST_LLVM:
        return f"{tool} is older than LLVM {OLDEST_LLVM}"
    return None if "amdgcn" in shown else f"{tool} was built without the AMDGPU target"


def find_tool() -> tuple[str | None, str]:
    """(the tool, "") or (None, the reason why there is none)."""
    override = os.environ.get(TOOL_VARIABLE)
    reasons = []
    for tool in (override,) if override else _CANDIDATES:
        reason = _probe(tool)
        if reason is None:
            return tool, ""
        reasons.append(reason)
    return (
        None,
        f"no llvm-objdump >= {OLDEST_LLVM} for AMDGPU ({reasons[-1]}; set {TOOL_VARIABLE} to name one)",
    )


def missing_tool() -> str | None:
    """Why code objects cannot be disassembled here, or None if they can."""
    return find_tool()[1] or None


def disassemble(image: bytes, arch: str) -> list[Instruction]:
    """Every instruction in the code object `image`, in address order; `arch` is e.g. "gfx942"."""
    tool, reason = find_tool()
    if tool is None:
        raise EmulatorError(reason)
    command = [tool, "-d", f"--mcpu={arch}", "-"]
    result = subprocess.run(command, input=image, capture_output=True, check=False)
    if result.returncode:
        raise EmulatorError(f"{tool}: {result.stderr.decode(errors='replace').strip()}")
    lines = (_LINE.match(line) for line in result.stdout.decode().splitlines())
    return [
        parse(line["text"], int(line["address"], 16), tuple(int(word, 16) for word in line["words"].split()))
        for line in lines
        if line
    ]
