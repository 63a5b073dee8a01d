"""One provider's process of `benchmarks.models.training`: it reads points as JSON lines and answers each.

Several of these share a GPU and take turns: between points a process holds no tensor.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import sys
import time
from typing import Any

import torch

from benchmarks.measure import summarize
from benchmarks.models.model_steps import SHAPES, adopted, config_of, made
from benchmarks.providers import first_line

WARM_STEPS = (
    3  # the first compiles and makes the optimizer's states, the second has all of them, the third is timed
)
FEWEST, MOST = 3, 60  # timed steps
RATES = {"adamw": 1e-4, "sgd": 1e-2}
PHASES = ("forward", "backward", "optimizer")
MS = 1e3


class Step:
    """A training step of one model on batches of random tokens, the same for every provider."""

    def __init__(self, point: dict[str, Any], provider: str, device: torch.device) -> None:
        shape = SHAPES[point["model"]]
        config = config_of(shape)
        model = made(config, device, torch.bfloat16)
        self.model = adopted(provider, shape.family, model).train()
        rate = RATES[point["optimizer"]]
        parameters = self.model.parameters()
        if point["optimizer"] == "adamw":
            self.optimizer: Any = torch.optim.AdamW(parameters, lr=rate, fused=True)
        else:
            self.optimizer = torch.optim.SGD(parameters, lr=rate)
        self._size, self._vocabulary = (point["batch"], point["tokens"]), config.vocab_size
        self._random = torch.Generator(device).manual_seed(0)
        self.peaks: dict[str, int] = {}

    def __call__(self, *, watched: bool = False) -> torch.Tensor:
        """One step; the loss. Watched, it notes the most bytes that each phase held."""
        ids = torch.randint(self._vocabulary, self._size, generator=self._random, device=self._random.device)
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids).loss
        self._note("forward", watched)
        loss.backward()
        self._note("backward", watched)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._note("optimizer", watched)
        return loss.detach()

    def _note(self, phase: str, watched: bool) -> None:
        if watched and self._random.device.type == "cuda":
            self.peaks[phase] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()


def measured(point: dict[str, Any], provider: str, device: torch.device, seconds: float) -> dict[str, Any]:
    """Steps until about ``seconds`` have passed: tokens per second, peak bytes, the loss."""
    step = Step(point, provider, device)
    gpu = device.type == "cuda"
    for _ in range(WARM_STEPS - 1):
        step()
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    loss = float(step(watched=True))
    each = time.perf_counter() - began
    count = min(MOST, max(FEWEST, math.ceil(seconds / each)))
    took = [ms / MS for ms in (_gpu_steps(step, count) if gpu else _cpu_steps(step, count))]
    tokens = point["batch"] * point["tokens"]
    times = summarize(took)
    return {
        "tokens_per_second": tokens / times.median_ms,  # here in seconds
        "slowest": tokens / times.p80_ms,
        "fastest": tokens / times.p20_ms,
        "steps": count,
        "loss": loss,
        "peak_bytes": max(step.peaks.values(), default=None),
        "peaks": step.peaks,
    }


def _gpu_steps(step: Step, count: int) -> list[float]:
    """Milliseconds of each of so many steps, queued one behind the other."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]


def _cpu_steps(step: Step, count: int) -> list[float]:
    took = []
    for _ in range(count):
        began = time.perf_counter()
        step()
        took.append((time.perf_counter() - began) * MS)
    return took


def answer(point: dict[str, Any], provider: str, device: torch.device, seconds: float) -> dict[str, Any]:
    """What was measured, or why it was not: what does not fit into memory is a result."""
    try:
        return measured(point, provider, device, seconds)
    except torch.OutOfMemoryError:
        failed = "out of memory"
    except Exception as error:
        failed = f"{type(error).__name__}: {first_line(error)}"
    return {"failed": failed}


def main(provider: str, device: torch.device, seconds: float) -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    for line in sys.stdin:
        found = answer(json.loads(line), provider, device, seconds)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], torch.device(sys.argv[2]), float(sys.argv[3]))
