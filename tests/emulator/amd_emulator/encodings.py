"""Lines of assembly and their machine code, kept in encodings.txt: the tests need no assembler.

    python -m tests.emulator.amd_emulator.encodings gfx942 "v_add_f32_e32 v0, v1, v2" ...

adds lines and writes the whole file anew; only that needs llvm-mc of LLVM 22. A row of the file has the
architectures, the line, its words, and how LLVM's disassembler prints them where that differs.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .errors import EmulatorError

FILE = Path(__file__).with_name("encodings.txt")
# gfx1200's instructions are those of gfx1201.
ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1201")
_LLVM = (22, 23)  # older ones know fewer architectures, or print 16-bit operands otherwise
_ENCODING = re.compile(r"\s*(?P<printed>\S.*?)\s*// encoding: \[(?P<bytes>[0-9a-fx,]+)\]")


@dataclass(frozen=True)
class Encoding:
    words: tuple[int, ...]
    printed: str  # as LLVM's disassembler has it


@cache
def encodings() -> dict[tuple[str, str], Encoding]:
    """By architecture and line."""
    found = {}
    for row in FILE.read_text().splitlines():
        arch, line, words, *other = row.split(" ; ")
        encoding = Encoding(tuple(int(word, 16) for word in words.split()), other[0] if other else line)
        for name in arch.split(","):
            found[name, line] = encoding
    return found


def assembled(line: str, arch: str) -> tuple[int, ...]:
    """The words of a line of the file."""
    if (arch, line) not in encodings():
        raise EmulatorError(
            f"{line!r} is not in encodings.txt: python -m tests.emulator.amd_emulator.encodings {arch} {line!r} adds it"
        )
    return encodings()[arch, line].words


def llvm_tool(name: str) -> str | None:
    """The path of an LLVM tool that knows all architectures, if one is installed."""
    return next((path for version in _LLVM if (path := shutil.which(f"{name}-{version}"))), None)


def _assemble(lines: Iterable[str], arch: str) -> dict[tuple[str, str], Encoding]:
    tool = llvm_tool("llvm-mc")
    if tool is None:
        raise SystemExit(f"error: no llvm-mc of LLVM {min(_LLVM)} or newer is on PATH")
    lines = list(lines)
    command = [tool, "-triple=amdgcn-amd-amdhsa", f"-mcpu={arch}", "-show-encoding"]
    result = subprocess.run(command, input="\n".join(lines), capture_output=True, check=False, text=True)
    printed = [
        match
        for row in result.stdout.splitlines()
        if (match := _ENCODING.match(row.replace("; enc", "// enc")))
    ]
    if result.returncode or len(printed) != len(lines):
        raise SystemExit(result.stderr or f"error: {len(lines)} lines, {len(printed)} encodings")
    found = {}
    for line, match in zip(lines, printed, strict=True):
        data = bytes(int(byte, 16) for byte in match["bytes"].split(","))
        words = tuple(int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4))
        found[arch, line] = Encoding(words, re.sub(r"\s+", " ", match["printed"]))
    return found


def _rows(known: dict[tuple[str, str], Encoding]) -> Iterable[str]:
    for line in sorted({line for _, line in known}):
        alike: dict[Encoding, list[str]] = {}
        for arch in ARCHS:
            if (encoding := known.get((arch, line))) is not None:
                alike.setdefault(encoding, []).append(arch)
        for encoding, archs in alike.items():
            words = " ".join(f"{word:08x}" for word in encoding.words)
            yield " ; ".join(
                (",".join(archs), line, words) + (encoding.printed,) * (encoding.printed != line)
            )


def main(arch: str, lines: list[str]) -> None:
    """Add lines of ``arch``, and assemble those of the file anew."""
    if arch not in ARCHS:
        raise SystemExit(f"error: the architecture is one of {', '.join(ARCHS)}, not {arch!r}")
    wanted = (
        {*encodings(), *((arch, line) for line in lines)}
        if FILE.exists()
        else {(arch, line) for line in lines}
    )
    known = {}
    for name in ARCHS:
        known |= _assemble([line for a, line in sorted(wanted) if a == name], name)
    FILE.write_text("".join(f"{row}\n" for row in _rows(known)))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(sys.argv[1], sys.argv[2:])
