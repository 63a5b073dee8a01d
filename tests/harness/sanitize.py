"""compute-sanitizer and guard pages over every binary that this machine's GPU takes: `make sanitize`.

Each op runs forward and backward, in one process a tool: once for every row of its dispatch tables, dtype and
alignment, or, where its tests can't name those, on random problems. It prints how many of the op's binaries that took.
torch's own kernels are not looked at, and under racecheck torch's products are made in float32. Reports name a kernel,
and many binaries have a kernel of that name: here each gets one of its own. First an access beyond a tensor, made on
purpose, must be found. Of kernels by warp groups racecheck reports accesses that are ordered all the same:
`tests.harness.racecheck` tells them from races by the machine code. compute-sanitizer does not see what TMA reads:
under the tool `guard` each tensor lies between unmapped addresses instead (guard_pages.c), flush with those behind it,
then with those before. `--part 1/2` and `--part 2/2` do half of the ops each.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import string
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from glob import glob
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

import liger_aot
from liger_aot.runtime.devices import driver
from liger_aot.runtime.dispatch import GPUDriver, Launchable
from liger_aot.runtime.manifest import Pack, Variant
from tests.conftest import built_pack, no_gpu
from tests.harness.all_ops import HarnessOp, entries
from tests.harness.choices import Entry, RandomChoices
from tests.harness.op_gpu_tests import installed, on_first_gpu
from tests.harness.racecheck import sift

GUARD = "guard"
TOOLS = ("memcheck", "racecheck", GUARD)
PLANTED = "planted"
EXERCISE = "exercise"
LONGEST = 1 << 30  # n of a table's row
DRAWN = 200  # random problems of an op whose tables are not walked
DIGITS = string.digits + string.ascii_letters
_SUMMARY = re.compile(
    r"(?:ERROR SUMMARY: (\d+) errors?$|RACECHECK SUMMARY: .*\((\d+) errors?, (\d+) warning)", re.M
)
_WHERE = re.compile(r"\bat (?:0x[0-9a-f]+ in )?([\w-]+)[^\s+]*(?:\+0x| in )")
_UNTRACKED = "Internal Sanitizer Error"


class Findings(NamedTuple):
    """What a tool's log says."""

    errors: int
    kernels: Counter[str]  # named in reports, but for those of ordered accesses
    finished: bool  # it has a summary
    ordered: int = 0  # reports that are none, and not among the errors


def findings(log: str) -> Findings:
    """Those that the tool counts: it prints no more than so many."""
    summaries = [sum(map(int, filter(None, counts))) for counts in _SUMMARY.findall(log)]
    return Findings(sum(summaries) + log.count(_UNTRACKED), Counter(_WHERE.findall(log)), bool(summaries))


# ---- What runs under a tool ---------------------------------------------------------------------------------


def by_name(pack: Pack) -> dict[str, Variant]:
    """The pack's binaries by the names that they have under a tool, each as long as its kernel's."""
    variants = (manifest.variant(name) for manifest in map(pack.op, pack.ops) for name in manifest.variants)
    counts: Counter[int] = Counter()  # of the names of each length: a short one has few digits
    found = {}
    for variant in variants:
        length = len(variant.symbol)
        found[numbered(counts[length], length)] = variant
        counts[length] += 1
    return found


def numbered(number: int, length: int) -> str:
    """A name of so many characters."""
    digits = ""
    while number:
        number, digit = divmod(number, 62)
        digits = DIGITS[digit] + digits
    name = "z" + digits.rjust(length - 1, "0")
    if len(name) != length:
        raise ValueError(f"more kernels have names of {length} characters than there are numbers for")
    return name


def renamed(image: bytes, symbol: str, name: str) -> bytes:
    """A cubin whose kernel has another name: it stands in tables of strings, at the end of each that holds it."""
    found, count = re.subn(rb"(?<=[.\0])%s(?=\0)" % re.escape(symbol.encode()), name.encode(), image)
    assert count and len(found) == len(image)
    return found


class NamingDriver(GPUDriver):
    """Gives each binary its name of ``by_name``."""

    def load(self, variant: Variant) -> Launchable:
        name = _names()[variant.name]
        kernel: Launchable = driver().load(
            renamed(variant.read(), variant.symbol, name),
            name,
            threads=variant.threads,
            shared=variant.shared,
            signature=variant.signature,
            cooperative=variant.cooperative,
            pdl=variant.pdl,
        )
        return kernel


@cache
def _names() -> dict[str, str]:
    return {variant.name: name for name, variant in by_name(installed()).items()}


def problems(entry: Entry, pack: Pack, longest: int, drawn: int = 0) -> Iterator[Any]:
    """The declared ones, and one for every row of the tables, dtype and alignment that the op's tests can name. Of an
    op whose tests name none, ``drawn`` random ones."""
    yield from entry.small()
    if not isinstance(entry, HarnessOp):
        for seed in range(drawn):
            yield entry.problem(RandomChoices(seed), large=True)
    else:
        manifest = pack.op(entry.name)
        of_few = [most for k in manifest.kernels.values() for e in k.few.values() for _, most, _ in e]
        many = entry.tests.table_cases(manifest, longest, 1 + max(of_few, default=2))
        found = (*many, *entry.tests.few_rows_cases(manifest))
        cases = {str(case): case for _, case in found}
        yield from map(entry.asked, cases.values())


@contextmanager
def products_in_float32() -> Iterator[None]:
    """torch's products of matrices with ``out``, made in float32. racecheck of CUDA 13.0 breaks in cuBLAS' products of
    16-bit numbers whose rows are whole vectors ("failed to handle a hardware exception", then an illegal address), also
    where it is told to watch no kernel at all; memcheck of all kernels finds nothing there."""
    aten, mm, addmm = torch.ops.aten, torch.mm, torch.addmm

    def product(a: Tensor, b: Tensor, *_: torch.dtype, out: Tensor) -> Tensor:
        return out.copy_(mm(a.float(), b.float()))

    def sum_with_product(
        c: Tensor, a: Tensor, b: Tensor, *_: torch.dtype, beta: float = 1.0, alpha: float = 1.0, out: Tensor
    ) -> Tensor:
        return out.copy_(addmm(c.float(), a.float(), b.float(), beta=beta, alpha=alpha))

    with (
        patch.object(torch, "mm", product),
        patch.object(torch, "addmm", sum_with_product),
        patch.object(aten.mm, "dtype_out", product),
        patch.object(aten.addmm, "dtype_out", sum_with_product),
    ):
        yield


def exercise(
    names: Sequence[str], device: str, longest: int = LONGEST, drawn: int = 0, tell: bool = False
) -> None:
    """Run those ops, and say how many of their binaries it took. ``tell``: name each problem before it is run."""
    pack = installed() if device == "cuda" else built_pack("sm90")
    for name in names:
        start, count, entry = time.perf_counter(), 0, entries()[name]
        op: Any = liger_aot.load(name)
        if device == "cuda":
            op = on_first_gpu(type(op), pack, NamingDriver)
        for problem in problems(entry, pack, longest, drawn):
            if tell:
                print(problem, file=sys.stderr, flush=True)
            entry.prepare(problem, device).run(op)
            if device == "cuda":
                torch.cuda.synchronize()
            count += 1
        taken = {v for on in op._own.bound.values() for v in on._loaded}
        of = len(pack.op(name).variants)
        seconds = time.perf_counter() - start
        print(f"{name}: {count} problems, {len(taken)} of {of} binaries, {seconds:.1f} s", flush=True)


def plant() -> None:
    """A tensor of more elements than its memory holds."""
    x = torch.zeros(1 << 20, device="cuda")
    x.untyped_storage().resize_(4096)
    op = on_first_gpu(type(liger_aot.load("relu_squared")), installed(), NamingDriver)
    op(x)
    torch.cuda.synchronize()


# ---- What starts the tool -----------------------------------------------------------------------------------


def sanitizer() -> str | None:
    """The program: on the PATH, or where CUDA's toolkits put it."""
    found = sorted(glob("/usr/local/cuda*/bin/compute-sanitizer"), reverse=True)
    return shutil.which("compute-sanitizer") or next(iter(found), None)


def under(
    program: str, tool: str, binaries: Mapping[str, Variant], arguments: Sequence[str]
) -> tuple[int, Findings]:
    """(exit status, findings) of this module under ``tool``."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        kernels = ",".join(f"kne={name}" for name in binaries)
        command = [
            program, "--tool", tool, "--kernel-name", kernels, "--log-file", str(log),
            "--print-limit", "20" if tool == "memcheck" else "100000", "--target-processes", "application-only",
            sys.executable, "-m", "tests.harness.sanitize", *arguments,
        ]  # fmt: skip
        # Each tensor an allocation of its own: what lies beside it is nobody's.
        status = subprocess.run(command, env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}).returncode
        text = log.read_text() if log.exists() else ""
    found = findings(named(text, binaries))
    if tool == "racecheck" and found.errors:
        ordered, text = sift(text, binaries)
        left = findings(named(text, binaries)).kernels
        found = found._replace(errors=found.errors - ordered, kernels=left, ordered=ordered)
    if found.errors and arguments != [PLANTED]:
        print(named(text, binaries))
    return status, found


def guard_library(folder: Path) -> Path:
    """guard_pages.c, compiled."""
    source, library = Path(__file__).with_name("guard_pages.c"), folder / "guard_pages.so"
    flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([os.environ.get("CC", "cc"), *flags, "-o", str(library), str(source), "-ldl"], check=True)
    return library


def between_guard_pages(library: Path, side: str, arguments: Sequence[str]) -> tuple[int, str]:
    """(exit status, output) of this module where each tensor lies between unmapped addresses, flush with those on that
    side."""
    command = [sys.executable, "-m", "tests.harness.sanitize", GUARD, str(library), *arguments]
    environment = {**os.environ, "LIGER_AOT_GUARD": side}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout


def run_guarded(names: Sequence[str]) -> int:
    """1 where an op reached beyond a tensor, or the pages did not stop what should be stopped."""
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        library = guard_library(Path(folder))
        status, _ = between_guard_pages(library, "behind", [PLANTED])
        failed = not status
        print(f"guard pages: an access beyond a tensor: {'not ' if failed else ''}found", flush=True)
        for name, side in product(names, ("behind", "before")):
            status, said = between_guard_pages(library, side, [EXERCISE, GUARD, name])
            failed = failed or bool(status)
            lines = said.splitlines()
            print("\n".join(lines[-20:]) if status else f"guard pages {side}: {lines[-1]}", flush=True)
            if status:
                print(f"guard pages {side}: {name} failed, exit status {status}", flush=True)
    return int(failed)


def named(log: str, binaries: Mapping[str, Variant]) -> str:
    """The log with the binaries' own names."""
    return re.sub(r"\bz[0-9a-zA-Z]+\b", lambda m: binaries[m[0]].name if m[0] in binaries else m[0], log)


def run(program: str, tools: Sequence[str], names: Sequence[str], binaries: Mapping[str, Variant]) -> int:
    """1 where a tool found something, or did not see what it should."""
    failed = False
    if "memcheck" in tools:
        _, found = under(program, "memcheck", binaries, [PLANTED])
        failed = not found.errors
        print(f"memcheck of an access beyond a tensor: {'not ' if failed else ''}found", flush=True)
    for tool in tools:
        if tool == GUARD:
            failed = bool(run_guarded(names)) or failed
            continue
        start = time.perf_counter()
        status, found = under(program, tool, binaries, [EXERCISE, tool, *names])
        wrong = status or found.errors or not found.finished
        failed = failed or bool(wrong)
        said = f"{found.errors} errors" if found.finished else "it did not finish"
        said += f", {found.ordered} reports of ordered accesses" if found.ordered else ""
        where = f" in {', '.join(sorted(found.kernels))}" if found.kernels else ""
        print(f"{tool}: {said}{where}, exit status {status}, {time.perf_counter() - start:.0f} s", flush=True)
    return int(failed)


def main(arguments: Sequence[str]) -> int:
    """The exit status: 2 where nothing can be run."""
    if arguments[:1] == [GUARD]:
        guarded = torch.cuda.memory.CUDAPluggableAllocator(arguments[1], "guarded_malloc", "guarded_free")
        torch.cuda.memory.change_current_allocator(guarded)
        status = main(arguments[2:])
        sys.stdout.flush()
        os._exit(status)  # at exit torch frees what it holds when its threads have ended
    if arguments[:1] == [PLANTED]:
        plant()
        return 0
    if arguments[:1] == [EXERCISE]:
        with products_in_float32() if arguments[1] == "racecheck" else nullcontext():
            exercise(arguments[2:], "cuda", drawn=DRAWN, tell=arguments[1] == GUARD)
        return 0
    parser = argparse.ArgumentParser(
        "python -m tests.harness.sanitize", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("ops", nargs="*", help="by default all")
    parser.add_argument("--tools", nargs="+", default=TOOLS, choices=(*TOOLS, "synccheck"))
    parser.add_argument("--part", default="1/1", metavar="I/N", help="of the ops")
    given = parser.parse_args(arguments)
    part, of = map(int, given.part.split("/"))
    if unknown := set(given.ops) - set(entries()):
        parser.error(f"no op of the name {', '.join(sorted(unknown))}; there are {', '.join(entries())}")
    if why := no_gpu():
        parser.exit(2, f"sanitize: {why}\n")
    program = sanitizer()
    if program is None and set(given.tools) != {GUARD}:
        parser.exit(2, "sanitize: there is no compute-sanitizer on the PATH; it comes with CUDA's toolkit\n")
    names = (given.ops or list(entries()))[part - 1 :: of]
    return run(program or "", given.tools, names, by_name(installed()))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
