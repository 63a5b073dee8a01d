"""Clocks: device time by events over a full queue, host time over a queue that never fills; and the measured ceiling of
memory-bound work, a device-to-device copy."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

# Calls queued before the first timed one. The device is busy with them while the host gets ahead, so that no
# timed call waits for its own launch; also the calls that warm caches, clocks and allocator blocks.
LEAD_CALLS = 4
CYCLES = 2.5e9  # of a second, for waiting on the device: above any GPU's clock
MIN_CALLS = 10
MAX_CALLS = 200


@dataclass(frozen=True)
class Call:
    """One call to time. `restore` puts back what `run` destroys (an input overwritten in place): it runs
    before each call, outside the timed region."""

    run: Callable[[], object]
    restore: Callable[[], object] | None = None


@dataclass(frozen=True)
class Timing:
    """Milliseconds: the median of `samples` timed calls and the range that holds the middle three fifths."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    samples: int


def summarize(samples: Sequence[float]) -> Timing:
    """Median, 20th and 80th percentile of at least one sample, in the samples' unit."""
    if len(samples) == 1:
        return Timing(samples[0], samples[0], samples[0], 1)
    fifths = statistics.quantiles(samples, n=5, method="inclusive")
    return Timing(statistics.median(samples), fifths[0], fifths[-1], len(samples))


def gigabytes_per_second(moved_bytes: int, milliseconds: float) -> float:
    return moved_bytes / milliseconds / 1e6


def time_device(calls: Sequence[Call], count: int) -> list[float]:
    """Device milliseconds of each of `count` calls, by a pair of events around each.

    The calls are queued without a wait between them, and before each the device is kept busy for as long as the host
    takes to queue one: it idles neither for a short kernel nor between the launches of one call. What a call costs the
    host is `time_host`'s. The calls given are taken in turn; give one for each input set (see `rotated_sets`).
    """
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)
    ]
    began = time.perf_counter()
    _queue(calls, LEAD_CALLS)
    spin = int((time.perf_counter() - began) / LEAD_CALLS * CYCLES)
    for i, (start, end) in enumerate(events):
        call = calls[i % len(calls)]
        if call.restore is not None:
            call.restore()
        torch.cuda._sleep(spin)
        start.record()
        call.run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def time_interleaved(
    subjects: Mapping[str, Sequence[Call]], *, rounds: int, min_ms: float
) -> dict[str, list[float]]:
    """`time_device` of several subjects in turn, `rounds` times over, samples pooled by subject.

    Clocks, temperature and neighbours drift over seconds; what is compared with each other is timed within
    the same fraction of a second.

    Args:
        min_ms: the least device time to sample of a subject in a round, within 10 to 200 calls.
    """
    counts = {name: _calls_in(min_ms, calls) for name, calls in subjects.items()}
    samples: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, calls in subjects.items():
            samples[name] += time_device(calls, counts[name])
    return samples


def time_host(
    run: Callable[[], object],
    *,
    calls: int,
    repeats: int,
    synchronize: Callable[[], object] = torch.cuda.synchronize,
) -> float:
    """Host microseconds a call: the median over `repeats` of the mean over `calls` calls.

    Each repeat starts with an idle device and makes few enough calls that the launch queue (about a thousand
    entries) never fills: the host is never held back by the device.
    """
    means = []
    collecting = gc.isenabled()
    for _ in range(calls):
        run()
    gc.disable()
    try:
        for _ in range(repeats):
            synchronize()
            start = time.perf_counter_ns()
            for _ in range(calls):
                run()
            means.append((time.perf_counter_ns() - start) / calls / 1e3)
    finally:
        if collecting:
            gc.enable()
    synchronize()
    return statistics.median(means)


def _calls_in(min_ms: float, calls: Sequence[Call]) -> int:
    """How many calls take about `min_ms` of device time."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    _queue(calls, LEAD_CALLS)
    start.record()
    _queue(calls, LEAD_CALLS)
    end.record()
    torch.cuda.synchronize()
    each = start.elapsed_time(end) / LEAD_CALLS
    wanted: int = math.ceil(min_ms / each)
    return min(MAX_CALLS, max(MIN_CALLS, wanted))


def _queue(calls: Sequence[Call], count: int) -> None:
    for i in range(count):
        call = calls[i % len(calls)]
        if call.restore is not None:
            call.restore()
        call.run()


def copy_calls(moved_bytes: int, device: torch.device, sets: int, seed: int) -> list[Call]:
    """`out.copy_(x)` on random bf16 data, `moved_bytes` read and written together, one Call for each set."""
    generator = torch.Generator(device).manual_seed(seed)
    calls = []
    for _ in range(sets):
        x = torch.randn(moved_bytes // 4, device=device, dtype=torch.bfloat16, generator=generator)
        calls.append(_copy(torch.empty_like(x), x))
    return calls


def _copy(out: torch.Tensor, x: torch.Tensor) -> Call:
    return Call(lambda: out.copy_(x))
