"""Which binaries of the AMD packs a run of the tests executed in software.

With LIGER_AOT_EXECUTED naming a file, each process adds "arch op variant" when a binary's first launch has ended well.
Afterwards

    python -m tests.harness.executed --forms FILE

names the forms of kernels of which no gfx942 binary was executed (``make test``), and

    python -m tests.harness.executed FILE

the binaries of gfx90a and gfx942 that none executed, and the forms of the other architectures (``make test-all``). What
is named is a failure.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

VARIABLE = "LIGER_AOT_EXECUTED"
ARCHS = ("gfx90a", "gfx942")
QUICK = "gfx942"  # whose forms `make test` executes
# Those of which a binary of each form is executed by `make test-all`. gfx1151's and gfx1200's instructions are
# gfx1100's and gfx1201's, but for the scalar floats of gfx1151, which gfx1201 has too.
BY_FORM = ("gfx950", "gfx1100", "gfx1201")
# kernel, its alignment -> why no call asks for it
UNREACHED = {
    ("fused_linear_jsd_rows", "generic"): "the chunk of logits is the op's own: always aligned",
    ("fused_linear_distillation_rows", "generic"): "as fused_linear_jsd_rows",
}
_written: set[str] = set()


def record(arch: str, op: str, variant: str) -> None:
    """Note that a binary ran to its end."""
    line, file = f"{arch} {op} {variant}\n", os.environ.get(VARIABLE)
    if file and line not in _written:
        _written.add(line)
        with open(file, "a") as stream:  # processes share it: a short line that is appended stays whole
            stream.write(line)


def reachable(arch: str) -> Iterator[tuple[str, str]]:
    """The op and the name of each binary of the built pack that a call can ask for."""
    from tests.conftest import built_pack

    pack = built_pack(arch)
    for op in pack.ops:
        for name in pack.op(op).variants:
            kernel, *rest = name.split("-")
            if not any(kernel == k and alignment in rest for k, alignment in UNREACHED):
                yield op, name


def forms_left(arch: str, lines: set[str]) -> tuple[int, list[str]]:
    """How many forms of kernels there are, and those of which no binary was executed."""
    every, done = set(), set()
    for op, name in reachable(arch):
        form = f"{arch} {op} {'-'.join(name.split('-')[:2])}"
        every.add(form)
        if f"{arch} {op} {name}" in lines:
            done.add(form)
    return len(every), sorted(every - done)


def binaries_left(arch: str, lines: set[str]) -> tuple[int, list[str]]:
    """How many binaries there are, and those that were not executed: neither they nor others of the same bytes."""
    from tests.conftest import built_pack

    pack = built_pack(arch)
    bytes_of = {
        f"{arch} {op} {name}": sha256(pack.op(op).variant(name).read()).hexdigest()
        for op, name in reachable(arch)
    }
    executed = {digest for line, digest in bytes_of.items() if line in lines}
    return len(bytes_of), sorted(line for line, digest in bytes_of.items() if digest not in executed)


def main() -> int:
    parser = argparse.ArgumentParser(description="Name what a run of the tests did not execute.")
    parser.add_argument("--forms", action="store_true", help=f"of {QUICK}'s kernels, not all binaries")
    parser.add_argument("file", type=Path, help="what LIGER_AOT_EXECUTED named")
    options = parser.parse_args()
    lines = set(options.file.read_text().splitlines()) if options.file.exists() else set[str]()
    by_form = (QUICK,) if options.forms else BY_FORM
    failed = False
    for arch in by_form if options.forms else (*ARCHS, *by_form):
        what = "forms of kernels" if arch in by_form else "binaries that calls reach"
        count, left = (forms_left if arch in by_form else binaries_left)(arch, lines)
        print(f"{arch}: of {count} {what} {len(left)} were executed by no test")
        print(*(f"  {line}" for line in left), sep="\n", end="\n" if left else "")
        failed = failed or bool(left) or not count
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
