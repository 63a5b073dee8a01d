"""Which binaries of the AMD packs a run of the tests executed in software: it should be all of them.

With LIGER_AOT_EXECUTED naming a file, each process adds "arch op variant" when a binary's first launch has ended well.
``python -m tests.executed FILE`` afterwards names the binaries that none executed, and fails. ``make test`` does both.
"""

from __future__ import annotations

import os
import sys
from hashlib import sha256
from pathlib import Path

from tests.conftest import built_pack

VARIABLE = "LIGER_AOT_EXECUTED"
ARCHS = ("gfx90a", "gfx942")
# kernel, its alignment -> why no call asks for it
UNREACHED = {
    ("fused_linear_jsd_rows", "generic"): "the chunk of logits is the op's own: always aligned",
}
_written: set[str] = set()


def record(arch: str, op: str, variant: str) -> None:
    """Note that a binary ran to its end."""
    line, file = f"{arch} {op} {variant}\n", os.environ.get(VARIABLE)
    if file and line not in _written:
        _written.add(line)
        with open(file, "a") as stream:  # processes share it: a short line that is appended stays whole
            stream.write(line)


def never(arch: str, lines: set[str]) -> tuple[int, list[str]]:
    """How many binaries the built pack has, and which were not executed: neither they nor others of the same bytes."""
    pack = built_pack(arch)
    bytes_of: dict[str, str] = {}
    reachable = set()
    for op in pack.ops:
        manifest = pack.op(op)
        for name in manifest.variants:
            line = f"{arch} {op} {name}"
            bytes_of[line] = sha256(manifest.variant(name).read()).hexdigest()
            kernel, *rest = name.split("-")
            if not any(kernel == k and alignment in rest for k, alignment in UNREACHED):
                reachable.add(line)
    executed = {digest for line, digest in bytes_of.items() if line in lines}
    return len(bytes_of), sorted(line for line in reachable if bytes_of[line] not in executed)


def main(file: Path) -> int:
    lines = set(file.read_text().splitlines())
    missing = {arch: never(arch, lines) for arch in ARCHS}
    for arch, (binaries, left) in missing.items():
        print(f"{arch}: {binaries} binaries, {len(left)} of those that calls reach were executed by no test")
        print(*(f"  {line}" for line in left), sep="\n", end="\n" if left else "")
    return int(any(left for _, left in missing.values()))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
