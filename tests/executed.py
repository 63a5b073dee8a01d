"""Which binaries of the AMD packs a run of the tests executed in software.

With LIGER_AOT_EXECUTED naming a file, each process adds "arch op variant" at a binary's first launch that ended well.
``python -m tests.executed FILE`` afterwards fails and names the binaries that no test executed. `make test` does both.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

VARIABLE = "LIGER_AOT_EXECUTED"
_written: set[str] = set()


def record(arch: str, op: str, variant: str) -> None:
    line = f"{arch} {op} {variant}\n"
    file = os.environ.get(VARIABLE)
    if file and line not in _written:
        _written.add(line)
        with open(file, "a") as stream:  # one short write to a file opened for appending is not torn
            stream.write(line)


def packed(arch: str) -> set[str]:
    """The same lines for every binary of the built pack."""
    from tests.conftest import built_pack

    pack = built_pack(arch)
    return {f"{arch} {op} {name}" for op in pack.ops for name in pack.op(op).variants}


def main(file: Path) -> int:
    done = set(file.read_text().splitlines()) if file.exists() else set()
    missing = 0
    for arch in ("gfx90a", "gfx942"):
        wanted = packed(arch)
        never = sorted(wanted - done)
        missing += len(never)
        print(f"{arch}: {len(wanted) - len(never)} of {len(wanted)} binaries executed in software")
        print(*(f"  never: {line}" for line in never), sep="\n", end="\n" if never else "")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
