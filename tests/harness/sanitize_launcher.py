"""The launcher and the stand-in driver under the address and undefined-behaviour sanitizers: ``python -m
tests.harness.sanitize_launcher``. The launcher's tests are run as they are; any finding ends them.

Where the C compiler has no sanitizers it says so and does nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.harness.children import ROOT, environment

TESTS = (
    "test_launcher.py",
    "test_launcher_lifetime.py",
    "test_tensor_rows.py",
    "test_tensor_map.py",
    "test_triton_launcher.py",
)
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g -U_FORTIFY_SOURCE"
# What the sanitizers must find in a library of their own, or they are not at work: a write past the end of memory.
BROKEN = "#include <stdlib.h>\nint broken(int n) { char *p = malloc(8); p[n] = 1; return p[n]; }\n"
CALL = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).broken(8))"


def runtimes(compiler: str) -> list[str]:
    """The sanitizers' own libraries, which must be in the process before all others; none where there are none."""
    found = []
    for name in ("libasan.so", "libubsan.so"):
        done = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True)
        if not Path(path := done.stdout.strip()).is_absolute() or not Path(path).exists():
            return []
        found.append(str(Path(path).resolve()))
    return found


def sanitized(compiler: str, libraries: list[str]) -> dict[str, str]:
    """The environment of a Python that builds and loads libraries under the sanitizers.

    Leaks are not looked for: Python keeps much to its end. ``PYTHONMALLOC`` gives each object memory of its own, past
    whose end nothing can be written unseen. torch frees with another function than it allocates with.
    """
    return environment(
        CC=compiler,
        CFLAGS=FLAGS,
        LD_PRELOAD=" ".join(libraries),
        PYTHONMALLOC="malloc",
        ASAN_OPTIONS="detect_leaks=0:alloc_dealloc_mismatch=0:abort_on_error=1",
        UBSAN_OPTIONS="print_stacktrace=1",
    )


def finds(folder: Path, compiler: str, variables: dict[str, str]) -> bool:
    """Whether the sanitizers stop a library that is broken."""
    source, library = folder / "broken.c", folder / "broken.so"
    source.write_text(BROKEN)
    command = [compiler, *FLAGS.split(), "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    done = subprocess.run(
        [sys.executable, "-c", CALL, str(library)], env=variables, capture_output=True, text=True
    )
    return done.returncode != 0 and "heap-buffer-overflow" in done.stderr


def main() -> int:
    compiler = os.environ.get("CC") or shutil.which("cc") or "gcc"
    libraries = runtimes(compiler) if shutil.which(compiler) else []
    if not libraries:
        print(f"skipped: {compiler} has no address and undefined-behaviour sanitizers")
        return 0
    variables = sanitized(compiler, libraries)
    with tempfile.TemporaryDirectory() as folder:
        if not finds(Path(folder), compiler, variables):
            print("error: the sanitizers do not find a write past the end of memory")
            return 1
    tests = [str(ROOT / "tests" / "runtime" / name) for name in TESTS]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        *tests,
    ]
    return subprocess.run(command, cwd=ROOT, env=variables).returncode


if __name__ == "__main__":
    raise SystemExit(main())
