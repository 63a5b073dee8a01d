"""The first call in a fresh process: import and load, then the first result on the device.

The parent starts processes one after another, each with empty compile caches. The process (this module run as
a program) has imported torch and made the CUDA context before its clock starts; what it prints is the
provider's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.environment import ROOT
from benchmarks.measure import summarize
from benchmarks.op_entry import load
from benchmarks.records import Measurement

TIMEOUT_S = 180
CACHE_VARIABLES = (
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "QUACK_CACHE_DIR",
    "CUTE_DSL_CACHE_DIR",
    "CUDA_CACHE_PATH",
)
PHASES = ("cold_import", "cold_first_call", "cold_total")


def measurements(op: str, providers: Sequence[str], processes: int) -> Iterator[Measurement]:
    """Milliseconds of each phase by provider: import and load, first call, and both together."""
    for provider in providers:
        try:
            runs = [printed("benchmarks.cold_start", op, provider) for _ in range(processes)]
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            reason = str(error)[:200]
            yield Measurement(op, "cold_total", "bfloat16", (), provider, status="error", reason=reason)
            continue
        for phase in PHASES:
            timing = summarize([run["ms"][phase] for run in runs])
            yield Measurement(
                op=op,
                direction=phase,
                dtype=runs[0]["dtype"],
                shape=tuple(runs[0]["shape"]),
                provider=provider,
                median_ms=timing.median_ms,
                p20_ms=timing.p20_ms,
                p80_ms=timing.p80_ms,
                samples=timing.samples,
            )


def printed(module: str, *arguments: str) -> dict[str, Any]:
    """The JSON in the last line that a module prints, run as a program in a fresh process with empty compile caches.

    Raises:
        RuntimeError: it failed; the message is the last line of what it wrote to stderr.
        subprocess.TimeoutExpired: it took longer than TIMEOUT_S.
    """
    with tempfile.TemporaryDirectory(prefix="cold_start_") as caches:
        environment = dict(os.environ)
        for variable in CACHE_VARIABLES:
            environment[variable] = os.path.join(caches, variable.lower())
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"exit status {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _first_call(op: str, provider: str, device: torch.device) -> dict[str, object]:
    """Run in the fresh process: milliseconds of each phase."""
    entry = load(op)
    inputs = entry.small_inputs(device)
    with torch.no_grad():
        torch.cuda.synchronize(device)
        start = time.perf_counter_ns()
        function = entry.function(provider)
        loaded = time.perf_counter_ns()
        function(*inputs)
        torch.cuda.synchronize(device)
        end = time.perf_counter_ns()
    ms = dict(zip(PHASES, ((loaded - start) / 1e6, (end - loaded) / 1e6, (end - start) / 1e6), strict=True))
    return {"ms": ms, "shape": tuple(inputs[0].shape), "dtype": str(inputs[0].dtype).removeprefix("torch.")}


if __name__ == "__main__":
    print(json.dumps(_first_call(sys.argv[1], sys.argv[2], torch.device("cuda", 0))))
