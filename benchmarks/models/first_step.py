"""From the start of a process to the end of its first training step, and to its first generated token:
`python -m benchmarks.models.first_step`.

The clock starts when torch is imported and the GPU has a context, in a fresh process with empty compile caches; the
model's weights are random and made on the GPU. Each phase is timed by itself, so that what all providers do alike
(importing Transformers, making the model) can be told from what differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.cold_start import printed
from benchmarks.models.model_steps import (
    LABELS,
    OURS,
    SHAPES,
    absences,
    adopted,
    config_of,
    file_of,
    finish,
    keep,
    made,
    seen_on,
)

MODULE = "benchmarks.models.first_step"
PROVIDERS = ("transformers", "liger", OURS, "liger_aot_attention")
GOALS = ("training step", "token")
PHASES = ("import Transformers", "make the model", "adopt it", "run it")
BATCH, TOKENS = 4, 512  # of the training step
PROMPT = 128
ALIKE = 2  # phases that are the same work for all; what an import takes varies by more than all else of ours
MINE = (OURS, "liger_aot_attention")
MOST_OF_LIGER = 0.1  # wanted of ours: of Liger's time to either goal in the other phases


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
                lines.append(f"  {LABELS[r.provider]:30s} {r.failed}")
                continue
            cells = [f"{seconds:20.3f}" for seconds in (*r.phases, r.total)]
            mark = ""
            if liger and liger.total:
                own = sum(r.phases[ALIKE:]) / sum(liger.phases[ALIKE:])
                cells += [f"{r.total / liger.total:20.3f}", f"{own:20.3f}"]
                mark = "  MORE THAN WANTED" * (r.provider in MINE and own > MOST_OF_LIGER)
            lines.append(f"  {LABELS[r.provider]:30s}{''.join(cells)}{mark}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(f"python -m {MODULE}", description=__doc__)
    parser.add_argument(
        "--out", type=Path, help="folder of the results (default: benchmarks/results/GPU/steps)"
    )
    parser.add_argument("--model", choices=SHAPES, default="llama-1b", help="(default: %(default)s)")
    parser.add_argument(
        "--processes", type=int, default=3, help="of each provider and goal (default: %(default)s)"
    )
    parser.add_argument("--providers", default=",".join(PROVIDERS), help="(default: %(default)s)")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it with a tiny model"
    )
    parser.add_argument("--commit", help="the commit measured, where the tree has no history")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        goal, provider, model, device = options.one
        print(json.dumps({"phases": phases(goal, provider, model, torch.device(device))}))
        return 0
    names = options.providers.split(",")
    if strangers := [name for name in names if name not in PROVIDERS]:
        parser.error(f"no provider {', '.join(strangers)}: there are {', '.join(PROVIDERS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("a GPU is needed, and torch sees none here")
    command, absent = shlex.join(["python", "-m", MODULE, *arguments]), absences(names)
    seen = seen_on(torch.device(options.device), command=command, commit=options.commit, absent=absent)
    file = file_of(seen, "first_step", options.out)
    results: list[Result] = []
    for goal in GOALS:
        for name in (n for n in names if n not in absent):
            results.append(measured(goal, name, options.model, options.device, options.processes))
            print(table(results[-1:]).splitlines()[-1], flush=True)
            found = [dataclasses.asdict(r) for r in results]
            keep(file, "first_step", seen, model=options.model, phases=PHASES, results=found)
    finish(file, table(results))
    return int(any(r.failed for r in results if r.provider == OURS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
