"""Minutes of mixed ops, shapes, threads and streams: `python -m tests.harness.soak --minutes 5`, or `make soak`.

Each thread has a stream of its own and draws random problems of random ops; one result in CHECKED is compared with
float64. After PROBLEMS of them a thread begins again with its first: what torch and cuBLAS keep for each shape they
have seen is kept by then, and what still grows is a leak. At the end of each of the ROUNDS every thread's ops are
dropped and loaded anew, so that binaries come and go, and memory is measured: what torch has allocated, what the driver
has given out, what malloc has, and the process's own. After the first rounds, which fill caches, none of it may grow.
It fails at the first wrong result or error.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import count
from typing import Any, NamedTuple

import torch

from tests.conftest import no_gpu, seed_of_run
from tests.harness.all_ops import entries
from tests.harness.choices import RandomChoices

ROUNDS = 10
SETTLED = 4  # rounds after which memory is compared
PROBLEMS = 200  # of a thread; no multiple of CHECKED, so that other ones are checked each time
CHECKED = 3
THREADS = 8
# What caches and fragments may add from the settled round to the last.
SLACK = {"allocated": 8 << 20, "driver": 256 << 20, "live": 32 << 20, "host": 128 << 20}


class Memory(NamedTuple):
    """Bytes."""

    allocated: int  # by torch, on the GPU
    driver: int  # given out by the driver, torch's cache being empty
    live: int  # given out by malloc: no fragments in it, nor what Python has for small objects
    host: int  # resident

    def __str__(self) -> str:
        return ", ".join(f"{name} {size / (1 << 20):.1f} MiB" for name, size in self._asdict().items())


class _Mallinfo2(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _names = (
        "arena",
        "ordblks",
        "smblks",
        "hblks",
        "hblkhd",
        "usmblks",
        "fsmblks",
        "uordblks",
        "fordblks",
        "keepcost",
    )
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


_libc = ctypes.CDLL(None)
M_ARENA_MAX = -8


def live() -> int:
    """Bytes that malloc has given out, in all arenas and by mmap; 0 before glibc 2.33, which can't say."""
    if not hasattr(_libc, "mallinfo2"):
        return 0
    _libc.mallinfo2.restype = _Mallinfo2
    info = _libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def measure(device: str) -> Memory:
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # cuBLAS keeps one for each thread and stream
        torch.cuda.empty_cache()
    _libc.malloc_trim(0)  # what is free in malloc's hands is not in use
    with open("/proc/self/statm") as file:
        host = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if device == "cpu":
        return Memory(0, 0, live(), host)
    free, total = torch.cuda.mem_get_info()
    return Memory(torch.cuda.memory_allocated(), total - free, live(), host)


def grown(rounds: Sequence[Memory]) -> list[str]:
    """What is larger after the last round than it may be, in words."""
    settled, last = rounds[min(SETTLED, len(rounds)) - 1], rounds[-1]
    return [
        f"{name} memory grew by {now - was} bytes, {SLACK[name]} are allowed"
        for name, was, now in zip(Memory._fields, settled, last, strict=True)
        if now - was > SLACK[name]
    ]


def work(
    thread: int, seed: int, stream: Any, names: Sequence[str], end: float, stop: threading.Event
) -> Counter[str]:
    """Problems until ``end``; how many of each op.

    Args:
        stream: of the GPU; None for the CPU's references.
    """
    done: Counter[str] = Counter()
    ops: dict[str, Any] = {}  # bound anew: each thread loads its own binaries
    device, way = ("cuda", "gpu") if stream else ("cpu", "reference")
    with torch.cuda.stream(stream) if stream else nullcontext():
        for i in count():
            if time.perf_counter() > end or stop.is_set():
                break
            if i % PROBLEMS == 0:
                choices = RandomChoices(seed)
            entry = entries()[choices.one(names)]
            problem = entry.problem(choices, device == "cuda")
            try:
                if i % CHECKED == 0:
                    entry.check(way, problem)
                else:
                    op = ops.setdefault(entry.name, entry.op_class())
                    entry.prepare(problem, device).run(op)
            except BaseException as error:
                stop.set()
                raise AssertionError(
                    f"thread {thread}, seed {seed}, problem {i % PROBLEMS}: {entry.name} {problem}"
                ) from error
            done[entry.name] += 1
    if stream is not None:
        stream.synchronize()
    return done


def soak(
    seconds: float, device: str, threads: int, seed: int, names: Sequence[str] | None = None
) -> list[str]:
    """What was wrong with the memory, in words; AssertionError for a wrong result."""
    start, done, rounds, stop = time.perf_counter(), Counter[str](), list[Memory](), threading.Event()
    names = names or list(entries())
    streams = [torch.cuda.Stream() if device == "cuda" else None for _ in range(threads)]
    for _ in range(ROUNDS):
        end = time.perf_counter() + seconds / ROUNDS
        with ThreadPoolExecutor(threads) as pool:
            running = [pool.submit(work, t, seed + t, streams[t], names, end, stop) for t in range(threads)]
            for thread in running:
                done += thread.result()
        del running, thread
        rounds.append(measure(device))
        print(f"{time.perf_counter() - start:.0f} s: {done.total()} problems; {rounds[-1]}", flush=True)
    print(", ".join(f"{name} {number}" for name, number in sorted(done.items())))
    return grown(rounds) + [f"{name} never ran" for name in names if not done[name]]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.harness.soak", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--cpu", action="store_true", help="the ops' references: a dry run")
    given = parser.parse_args(arguments)
    if not given.cpu and (why := no_gpu()):
        parser.exit(2, f"soak: {why}\n")
    device = "cpu" if given.cpu else "cuda"
    # Each thread would have an arena, and an arena of threads keeps the free pages at its end.
    _libc.mallopt(M_ARENA_MAX, 1)
    if given.cpu:
        torch.backends.mkldnn.enabled = False  # keeps code for 1024 shapes of bfloat16 products, 0.5 MiB each
    print(f"LIGER_AOT_SEED={seed_of_run()}", flush=True)
    wrong = soak(given.minutes * 60, device, given.threads, seed_of_run())
    print("\n".join(wrong) or "all results are right, memory is flat")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
