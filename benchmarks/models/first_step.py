"""From the start of a process to the end of its first training step, and to its first generated token:
`python -m benchmarks.models.first_step`.

The clock starts when torch is imported and the GPU has a context, in a fresh process with empty compile caches; the
model's weights are random and made on the GPU. Each phase is timed by itself, so that what all providers do alike
(importing Transformers, making the model) can be told from what differs.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.cold_start import printed
from benchmarks.models.models import SHAPES, absences, adopted, config_of, made
from benchmarks.providers import MODEL_LABELS, OURS
from benchmarks.steps import Command

MODULE = "benchmarks.models.first_step"
PROVIDERS = ("transformers", "liger", OURS, "liger_aot_attention")
GOALS = ("training step", "token")
PHASES = ("import Transformers", "make the model", "adopt it", "run it")
BATCH, TOKENS = 4, 512  # of the training step
PROMPT = 128
ALIKE = 2  # phases that are the same work for all; what an import takes varies by more than all else of ours


@dataclass(frozen=True)
class Result:
    """Medians over processes, in seconds; `phases` are in PHASES' order."""

    goal: str
    provider: str
    processes: int = 0
    total: float | None = None
    phases: list[float] = field(default_factory=list)
    failed: str | None = None


def phases(goal: str, provider: str, model: str, device: torch.device) -> list[float]:
    """Run in the fresh process: seconds of each phase."""
    torch.zeros(1, device=device).item()
    at = [time.perf_counter()]
    shape = SHAPES[model]
    config = config_of(shape)
    at.append(time.perf_counter())
    ready = made(config, device, torch.bfloat16)
    at.append(time.perf_counter())
    adopted(provider, shape.family, ready)
    at.append(time.perf_counter())
    if goal == "token":
        prompt = torch.arange(3, 3 + PROMPT, device=device)[None] % config.vocab_size
        with torch.inference_mode():
            int(ready.eval()(prompt, logits_to_keep=1).logits[0, -1].argmax())
    else:
        optimizer = torch.optim.AdamW(ready.train().parameters(), lr=1e-4, fused=True)
        ids = torch.randint(config.vocab_size, (BATCH, TOKENS), device=device)
        ready(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        next(ready.parameters()).flatten()[0].item()  # waits for the GPU
    at.append(time.perf_counter())
    return [end - start for start, end in itertools.pairwise(at)]


def measured(goal: str, provider: str, model: str, device: str, processes: int) -> Result:
    try:
        runs = [printed(MODULE, "--one", goal, provider, model, device)["phases"] for _ in range(processes)]
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return Result(goal, provider, failed=str(error)[:200])
    medians = [statistics.median(phase) for phase in zip(*runs, strict=True)]
    return Result(goal, provider, processes, statistics.median(map(sum, runs)), medians)


def table(results: Sequence[Result]) -> str:
    """Seconds of each phase and in all, what part of Liger's that is, and the same of the phases that differ."""
    lines = []
    for goal in dict.fromkeys(r.goal for r in results):
        lines.append(
            f"first {goal}, s{'':18s}"
            + "".join(f"{phase:>20s}" for phase in (*PHASES, "all", "of Liger's", "adopt and run"))
        )
        found = [r for r in results if r.goal == goal]
        liger = next((r for r in found if r.provider == "liger" and r.total is not None), None)
        for r in found:
            if r.total is None:
                lines.append(f"  {MODEL_LABELS[r.provider]:30s} {r.failed}")
                continue
            cells = [f"{seconds:20.3f}" for seconds in (*r.phases, r.total)]
            if liger and liger.total:
                own = sum(r.phases[ALIKE:]) / sum(liger.phases[ALIKE:])
                cells += [f"{r.total / liger.total:20.3f}", f"{own:20.3f}"]
            lines.append(f"  {MODEL_LABELS[r.provider]:30s}{''.join(cells)}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--one"]:
        goal, provider, model, device = arguments[1:]
        print(json.dumps({"phases": phases(goal, provider, model, torch.device(device))}))
        return 0
    command = Command(MODULE, __doc__, PROVIDERS, on_cpu=True)
    add = command.parser.add_argument
    add("--model", choices=SHAPES, default="llama-1b", help="(default: %(default)s)")
    add("--processes", type=int, default=3, help="of each provider and goal (default: %(default)s)")
    options = command.read(arguments)
    absent = absences(options.providers)
    file = command.file("first_step", absent)
    results: list[Result] = []
    for goal in GOALS:
        for name in (n for n in options.providers if n not in absent):
            results.append(measured(goal, name, options.model, options.device, options.processes))
            print(table(results[-1:]).splitlines()[-1], flush=True)
            file.keep(benchmark="first_step", model=options.model, phases=PHASES, results=results)
    file.finish(table(results))
    return int(any(r.failed for r in results if r.provider == OURS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
