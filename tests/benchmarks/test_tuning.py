"""The tuner without a GPU: candidates become packs, are run on the AMD emulator and checked, a stand-in clock times
them, the winner is written into a profile. Processes that hang are killed."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import liger_aot
from benchmarks import op_entry
from benchmarks.measure import Call
from benchmarks.tuning import __main__ as command
from benchmarks.tuning import trial, tuner
from benchmarks.tuning.candidates import target
from benchmarks.tuning.rows_text import Winner, write_rows
from benchmarks.tuning.space import Problem, Space, grid
from benchmarks.tuning.spaces import SPACES
from benchmarks.tuning.trial import Job, Machine, Subject
from benchmarks.tuning.tuner import Measured
from benchmarks.workload import TOLERANCE
from liger_aot_build.errors import BuildError
from liger_aot_build.paths import PROFILES
from liger_aot_build.profile import read_profile
from tests.benchmarks.test_tuning_spaces import DECLARED
from tests.harness.drivers import MULTIPROCESSORS, EmulatorDriver

ARCH, KERNEL, ELEMENTS = "gfx942", "relu_squared_forward", 4096
CPU = torch.device("cpu")
WORKER = """
import json, sys, time
for job in json.loads(sys.stdin.read()):
    if job["does"] == "hang":
        time.sleep(3600)
    if job["does"] == "die":
        sys.exit(1)
    print(json.dumps({"refused": None, "fatal": job["does"] == "fail"}), flush=True)
"""


# ---- Processes ----


def test_a_process_that_hangs_is_killed() -> None:
    """With the rest of its candidate; the others' jobs go on, none twice."""
    does = {0: "work hang work", 1: "work die", 2: "fail work", 3: "work work"}
    jobs = [{"candidate": c, "does": d, "at": i} for c, v in does.items() for i, d in enumerate(v.split())]
    answers = list(trial.supervised([sys.executable, "-c", WORKER], jobs, limit=3.0, start=60.0))
    assert [(j["candidate"], j["at"]) for j, _ in answers] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0), (3, 1),
    ]  # fmt: skip
    assert [bool(a.get("fatal")) for _, a in answers] == [False, True, False, True, True, False, False]
    assert answers[1][1]["refused"] == "no answer in 3 s" and "ended" in answers[3][1]["refused"]


# ---- From a space to a profile ----


def small_space(p: Problem) -> Iterable[Any]:
    yield from grid(form="flat", block=(1024, 2048), num_warps=4)
    yield from grid(form="flat", block=1024, num_warps=32)  # 2048 threads are too many


class Clock:
    """Milliseconds of what runs: fewer with larger blocks; remembers what it ran."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, calls: Mapping[str, Call], in_graphs: bool) -> dict[str, float]:
        self.calls += calls
        self.in_graphs = in_graphs
        for call in calls.values():
            call.run()
        blocks = [loaded.block for loaded in self.ran()]
        return {"copy": 1.0, "op": 2048.0 / max(blocks)}

    def ran(self) -> list[Any]:
        return [loaded for on in self.bound for loaded in on._loaded.values()]

    bound: Sequence[Any] = ()
    in_graphs: bool | None = None


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> tuple[Machine, Clock]:
    """A machine that executes gfx942's binaries, and its clock."""
    clock = Clock()
    bind = trial.bound

    def bound(*arguments: Any) -> Any:
        op, on = bind(*arguments)
        clock.bound = [on]
        return op, on

    monkeypatch.setattr(trial, "bound", bound)
    driver: Any = lambda op: EmulatorDriver(op, SimpleNamespace(arch=ARCH))  # noqa: E731
    return Machine(CPU, -1, MULTIPROCESSORS, driver, clock, lambda: None), clock


def attempt_on(machine: Machine, subject: Subject) -> tuner.Try:
    """As the supervised process does it, in this one."""

    def attempt(folder: Path, jobs: Sequence[Job]) -> Any:
        return zip(jobs, trial.answers(replace(subject, folder=folder), machine, jobs), strict=True)

    return attempt


def test_the_fastest_right_candidate_is_written(
    tmp_path: Path, emulated: tuple[Machine, Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, clock = emulated
    problem = Problem(None, (64, 128), ("bf16",))
    monkeypatch.setitem(SPACES, KERNEL, Space((problem,), small_space))
    subject = trial.subject_of(ARCH, KERNEL, tmp_path, ELEMENTS)
    of = target(ARCH, KERNEL)
    ((found, measured, winner),) = tuner.tune(KERNEL, of, attempt_on(machine, subject), [problem], workers=1)
    assert found == problem and isinstance(winner, Winner) and clock.in_graphs
    by_row = {(one.row["block"], one.row["num_warps"]): one for one in measured}
    assert "2048 threads" in str(by_row[1024, 32].refused)
    right = by_row[2048, 4]
    assert right.refused is None and 0 < (right.error or 0) < TOLERANCE[torch.bfloat16]
    assert list(right.points) == ["64: 64", "128: 128"]
    assert {f["of_copy"] for f in right.points.values()} == {1.0}
    assert {f["of_copy"] for f in by_row[1024, 4].points.values()} == {0.5}
    assert clock.calls == ["copy", "op"] * 2 * sum(one.refused is None for one in measured)
    assert dict(winner.candidate) == {"form": "flat", "block": 2048, "num_warps": 4}

    for name in (ARCH, "gfx90a"):  # one may extend the other
        shutil.copy(PROFILES / f"{name}.toml", tmp_path)
    write_rows(tmp_path / f"{ARCH}.toml", KERNEL, [winner], "a stand-in clock")
    table = read_profile(ARCH, tmp_path).table(KERNEL)
    row = next(r for r in table.rows if r.when.get("dtype") == ("bf16",))
    assert row.constants == {"BLOCK": 2048} and table.provenance == "a stand-in clock"
    json.dumps(tuner.report(problem, measured))


def test_wrong_results_and_other_kernels_are_refused(
    tmp_path: Path, emulated: tuple[Machine, Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, _ = emulated
    problem = Problem(None, (64,), ("bf16",))
    space = Space((problem,), lambda p: ())  # the profile's row alone
    kernel = "relu_squared_backward"
    monkeypatch.setitem(SPACES, kernel, space)
    of = target(ARCH, kernel)
    right = trial.subject_of(ARCH, kernel, tmp_path, ELEMENTS)

    def refused(subject: Subject) -> str:
        ((_, _, why),) = tuner.tune(kernel, of, attempt_on(machine, subject), [problem], workers=1)
        assert isinstance(why, str)
        return why

    assert "error " in refused(replace(right, allowed={"bf16": 1e-9}))
    forward, _ = op_entry.load("relu_squared").workloads(KERNEL, 64, torch.bfloat16, ELEMENTS, CPU, 0)
    other = replace(space, workloads=lambda *_: [forward])
    assert "did not launch it, but relu_squared_forward" in refused(replace(right, space=other))
    broken = replace(space, workloads=lambda *_: [replace(forward, call=lambda op: 1 // 0)])
    assert "ZeroDivisionError" in refused(replace(right, space=broken))
    assert "no workload: MemoryError" in refused(replace(right, space=replace(space, workloads=no_memory)))


def no_memory(*_: Any) -> Any:
    raise MemoryError("of the GPU")


# ---- Who wins ----


def measured(name: str, *milliseconds: float, refused: str | None = None) -> Measured:
    points = {
        f"{i}": {"milliseconds": ms, "of_copy": 1 / ms, "tflops": 0.0} for i, ms in enumerate(milliseconds)
    }
    return Measured({"form": name}, refused, 0.0, points)


def test_the_winner_is_nowhere_far_behind() -> None:
    problem = Problem(64, (32, 64), when={"order": ("any",)})
    ones = [
        measured("fast at one", 1.0, 2.0), measured("good at both", 1.25, 1.25), measured("slow", 4.0, 4.0),
        measured("wrong", 0.1, 0.1, refused="error"), measured("never timed", refused=None),
    ]  # fmt: skip
    winner = tuner.best(problem, ones)
    assert winner.candidate == {"form": "good at both"} and winner.max_n == 64
    assert winner.when == {"dtype": ("bf16", "fp16"), "order": ("any",)}
    assert winner.comment == "0.800 at 0, 0.800 at 1; worst of 3 0.25 of the fastest"
    with pytest.raises(BuildError, match=r"n <= 64, bf16/fp16, order any: no candidate ran: error"):
        tuner.best(problem, ones[3:4])


# ---- Workloads ----


def test_kernels_without_workloads_of_their_own_have_the_benchmark_s() -> None:
    assert {DECLARED[kernel] for kernel, space in SPACES.items() if space.workloads is None} <= set(
        op_entry.modules()
    )


OWN = [  # kernel, which of its problems
    ("flash_attention_forward", 0), ("flash_attention_forward", -1), ("flash_attention_backward_dkdv", 0),
    ("flash_attention_backward_warp_specialized", 2), ("flash_attention_backward_warp_specialized", -1),
    ("flash_attention_varlen_forward", -1), ("flash_attention_varlen_backward_warp_specialized", 1),
    ("flash_decoding_split", 0), ("flash_decoding_split", -1), ("flash_decoding_fused", 3),
    ("flash_decoding_fused", -1), ("rope", 0), ("rope", -1),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "number"), OWN)
def test_workloads_are_right_and_errors_are_seen(kernel: str, number: int) -> None:
    """The plain-torch reference in the dtype passes; another result does not."""
    op = liger_aot.load(DECLARED[kernel])
    make = SPACES[kernel].workloads
    assert make is not None
    problem = SPACES[kernel].problems[number]
    works = make(problem, problem.sizes[0], torch.bfloat16, 64 * 2048, CPU)
    assert any(work.timed for work in works)
    for work in works:
        with torch.set_grad_enabled(work.grad):
            results = work.call(op).run()
        assert 0 < work.error(results) < 2.0**-8 * work.roundings, work.point
        for result in results:
            result[..., -1] = 0
        assert work.error(results) > 0.05, work.point
        assert work.bytes > 0 and work.point


# ---- The command ----


def test_all_kernels(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the profile has a table for; what is wrong with one does not stop the rest."""
    seen = []

    def tune(kernel: str, options: object) -> int:
        seen.append(kernel)
        if kernel == "rmsnorm_forward":
            raise BuildError("no candidate")
        return 0

    monkeypatch.setattr(command, "_tune", tune)
    assert command.main(["--arch", "sm80", "--kernel", "all", "--list"]) == 1
    assert "rmsnorm_forward: no candidate" in capsys.readouterr().err
    assert seen == [kernel for kernel in SPACES if kernel in read_profile("sm80").tables] != [*SPACES]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--arch", "sm90", "--kernel", "swiglu_backward", "--list"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("swiglu_backward n <= any, bf16/fp16/fp32:\n") and shown.count("'form'") == 9
    assert command.main(["--arch", "sm90", "--kernel", "rmsnorm_forward", "--list"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(
        "rmsnorm_forward n <= 1024, up to 256 rows, bf16/fp16:\n  {'form': 'in_registers', "
    )
    wrong = [
        (["--kernel", "swiglu"], "no search space for swiglu: there are those of "),
        (["--kernel", "swiglu_forward", "--arch", "sm75", "--list"], "no architecture 'sm75'"),
    ]
    if not torch.cuda.is_available():
        wrong.append((["--kernel", "swiglu_forward"], "torch sees none here"))
    for arguments, message in wrong:
        with pytest.raises(SystemExit) as caught:
            command.main(["--arch", "sm90", *arguments])
        assert caught.value.code == 2 and message in capsys.readouterr().err
