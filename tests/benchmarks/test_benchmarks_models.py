"""The benchmarks of whole models without a GPU: tiny models on the CPU, arithmetic, tables, figures."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="Transformers is not installed: make venv installs it")

from benchmarks.environment import observe
from benchmarks.models import first_step, loss_curves, serve, training
from benchmarks.models.loss_curves import Curve
from benchmarks.models.models import SHAPES, adopted, config_of, made
from benchmarks.models.training import Point, Process, Result
from benchmarks.plot import plot
from benchmarks.providers import MODEL_LABELS, OURS
from examples.serve import Load

CPU = torch.device("cpu")
TINY = Point("tiny-llama", 2, 16, "adamw")
PHI3 = Point("phi3-mini", 4, 512, "adamw")


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("phi3-mini", 3.82), ("llama-1b", 1.24), ("llama-8b", 2.80)],  # the third: 8 of 32 layers of 8.03
)
def test_shapes_are_the_models(name: str, billions: float) -> None:
    """By their parameters, which are public too."""
    model = made(config_of(SHAPES[name]), torch.device("meta"), torch.bfloat16)
    assert model.num_parameters() / 1e9 == pytest.approx(billions, abs=0.005)
    assert next(model.parameters()).dtype == torch.bfloat16 and not model.config.use_cache
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_every_provider_takes_the_same_step(family: str) -> None:
    """Weights, tokens and losses are those of the plain model; Liger's on our ops runs in a process of its own."""
    losses = {}
    for provider in ("transformers", "liger_aot", "liger_aot_attention"):
        step = training.Step(
            {"model": f"tiny-{family}", "batch": 2, "tokens": 16, "optimizer": "sgd"}, provider, CPU
        )
        losses[provider] = [float(step(watched=True)) for _ in range(3)]
    for got in losses.values():
        assert got == pytest.approx(losses["transformers"], rel=2**-8)  # a rounding to bfloat16
    assert len(set(losses["transformers"])) == 3


def test_what_does_not_run_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = dataclasses.asdict(TINY)
    good = training.answer(asked, "transformers", CPU, 0.01)
    assert good["tokens_per_second"] > 0 and good["steps"] >= training.FEWEST
    assert good["slowest"] <= good["tokens_per_second"] <= good["fastest"] and good["peak_bytes"] is None

    def full(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(training, "Step", full)
    assert training.answer(asked, "liger", CPU, 0.01) == {"failed": "out of memory"}
    monkeypatch.setattr(training, "Step", lambda *arguments: 1 / 0)
    assert training.answer(asked, "liger", CPU, 0.01) == {"failed": "ZeroDivisionError: division by zero"}


def test_requests_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU there are no graphs, and so no times of steps."""
    models, load = serve.Models("small"), Load(1, 2, (2, 3), (2, 3))
    point = serve.Point("bf16", 1)
    found = serve.measured(point, OURS, models, load, (64,))
    assert found.failed is None and found.tokens_per_second and found.first_ms and not found.steps
    assert serve.line(point, [found]).startswith("bf16, 1 sequences: liger_aot ")
    assert serve.share({"whole": 4.0, "products": 3.0, "attention": 0.5}) == 0.25
    monkeypatch.setattr(serve.serve, "with_transformers", lambda *arguments: 1 / 0)
    missing = serve.measured(point, "transformers", models, load, ())
    assert missing.failed == "ZeroDivisionError: division by zero"


ECHO = """import json, sys
for line in sys.stdin:
    print(json.dumps({"failed": str(json.loads(line)["batch"])}), flush=True)
"""


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (
            "import sys; sys.stdin.readline(); sys.exit('a broken driver')",
            "its process ended: a broken driver",
        ),
        ("import sys; sys.stdin.readline(); sys.exit(3)", "its process ended: exit status 3"),
        ("import time; time.sleep(3600)", "no answer in 1 s"),
    ],
)
def test_a_process_that_ends_or_hangs(program: str, reason: str) -> None:
    process = Process("liger", "cpu", 0.1, timeout=1.0 if "no answer" in reason else 60.0)
    process._command = [sys.executable, "-c", program]
    try:
        assert process.ask(TINY) == {"failed": reason}
        process._command, process._timeout = [sys.executable, "-c", ECHO], 60.0
        assert [process.ask(dataclasses.replace(TINY, batch=n))["failed"] for n in (3, 4)] == ["3", "4"]
    finally:
        process.end()


class Scripted:
    """A process that answers from a list."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers, self.asked = list(answers), 0

    def ask(self, point: Point) -> dict[str, Any]:
        self.asked += 1
        return self.answers.pop(0)


def found(speed: float, peak: int | None = 100) -> dict[str, Any]:
    return {
        "tokens_per_second": speed, "slowest": speed - 1, "fastest": speed + 1, "steps": 5, "loss": 4.0,
        "peak_bytes": peak, "peaks": {"forward": peak},
    }  # fmt: skip


def test_rounds_are_pooled_and_a_failure_ends_a_providers() -> None:
    processes: Any = {
        "transformers": Scripted(found(10), found(14, 120), found(11)),
        "liger": Scripted({"failed": "out of memory"}),
        "liger_on_aot": Scripted(found(9)),
    }
    plain, liger, once = training.at(PHI3, processes, 3)
    assert (plain.tokens_per_second, plain.slowest, plain.fastest) == (11, 9, 15)
    assert (plain.rounds, plain.steps, plain.peak_bytes) == (3, 15, 120)
    assert liger.failed == "out of memory" and processes["liger"].asked == 1
    assert once.rounds == 1


def of(provider: str, speed: float | None, peak: int | None = 100) -> Result:
    if speed is None:
        return Result(PHI3, provider, failed="out of memory")
    return Result(PHI3, provider, speed, speed, speed, 1, 3, peak)


def test_table_of_training() -> None:
    text = training.table([of("transformers", 100, 2**30), of("liger", None), of("liger_aot", 125, 2**29)])
    assert "phi3-mini 4 x 512 adamw" in text and "Liger (Triton JIT)             out of memory" in text
    ours = next(line for line in text.splitlines() if line.startswith("  liger-aot"))
    assert ours.split() == ["liger-aot", "125", "tokens/s", "1.250", "-", "0.50", "GiB", "0.500", "-"]


def test_points() -> None:
    every = training.EFFORTS["full"].points
    assert len(set(every)) == len(every) == 3 * 3 * 3 * 2
    for point in training.SHORT:
        assert point.model in SHAPES and point.batch in (4, 8, 16) and 512 <= point.tokens <= 2048


@pytest.mark.slow
def test_training_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole program, with a provider whose process fails: it is a result."""
    small = ["--model", "tiny-llama", "--batch", "2", "--tokens", "16", "--optimizer", "sgd", "--rounds", "1"]
    run = ["--device", "cpu", "--effort", "short", "--out", str(tmp_path), "--providers", "liger,liger_aot"]
    assert training.main([*run, *small]) == 0
    content = json.loads((tmp_path / "training.json").read_text())
    liger, ours = content["results"]
    assert content["benchmark"] == "training" and content["environment"]["gpu"] == "CPU"
    assert ours["tokens_per_second"] > 0 and ours["failed"] is None
    assert liger["failed"] and "tiny-llama 2 x 16 sgd" in capsys.readouterr().out
    assert (tmp_path / "training.png").stat().st_size > 10_000


@pytest.mark.slow
def test_first_steps_on_the_cpu(tmp_path: Path) -> None:
    run = ["--device", "cpu", "--model", "tiny-llama", "--processes", "1", "--providers", "liger_aot"]
    assert first_step.main([*run, "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "first_step.json").read_text())
    assert [r["goal"] for r in content["results"]] == ["training step", "token"]
    for r in content["results"]:
        assert r["total"] == pytest.approx(sum(r["phases"])) and min(r["phases"]) > 0
    assert (tmp_path / "first_step.svg").is_file()


def test_table_of_first_steps() -> None:
    made_of = [
        first_step.Result("token", "transformers", 1, 2.0, [1.0, 0.5, 0.0, 0.5]),
        first_step.Result("token", "liger", 1, 12.0, [1.0, 0.5, 6.0, 4.5]),
        first_step.Result("token", "liger_aot", 1, 3.0, [1.0, 0.5, 0.5, 1.0]),
        first_step.Result("token", "liger_aot_attention", failed="no pack"),
    ]
    *_, ours, failed = first_step.table(made_of).splitlines()
    assert ours.split()[1:] == [
        "1.000",
        "0.500",
        "0.500",
        "1.000",
        "3.000",
        "0.250",
        "0.143",
    ]
    assert failed.split()[-2:] == ["no", "pack"]


def test_the_corpus_can_be_learnt_and_is_always_the_same() -> None:
    text = loss_curves.corpus(50, 40, 30)
    assert torch.equal(text, loss_curves.corpus(50, 40, 30)) and text.shape == (40, 30)
    pairs = {(int(a), int(b)) for row in text for a, b in itertools.pairwise(row)}
    followers = [len({b for a, b in pairs if a == token}) for token in range(50)]
    assert max(followers) <= loss_curves.SUCCESSORS and sum(followers) > 100


def test_verdict_compares_with_what_seeds_differ_by() -> None:
    def curves(ours: float) -> list[Curve]:
        finals = [
            ("transformers", 0, 1.0),
            ("transformers", 1, 1.2),
            ("liger_aot", 0, 1.05),
            ("liger_aot", 1, ours),
        ]
        return [Curve(p, "float32", seed, [9.0] + [final] * loss_curves.LAST) for p, seed, final in finals]

    good = loss_curves.verdict("float32", curves(1.2 - 0.14))
    assert good.noise == pytest.approx(0.2 / 2**0.5) and good.differences == pytest.approx([0.05, -0.14])
    assert good.within and not loss_curves.verdict("float32", curves(1.2 + 0.15)).within


def test_loss_curves_on_the_cpu(tmp_path: Path) -> None:
    run = [
        "--device",
        "cpu",
        "--steps",
        "20",
        "--seeds",
        "2",
        "--batch",
        "2",
        "--tokens",
        "16",
        "--layers",
        "1",
    ]
    status = loss_curves.main([*run, "--out", str(tmp_path)])
    content = json.loads((tmp_path / "loss_curves.json").read_text())
    assert status == int(not all(v["within"] for v in content["verdicts"]))
    by = {(c["provider"], c["dtype"], c["seed"]): c["losses"] for c in content["curves"]}
    assert len(by) == 8 and all(len(losses) == 20 for losses in by.values())
    for seed in range(2):  # a rounding of sums a step, in float32
        pair = [by[provider, "float32", seed] for provider in loss_curves.PROVIDERS]
        assert pair[1] == pytest.approx(pair[0], rel=1e-4)
        assert pair[0][-1] < pair[0][0]
    assert by["transformers", "float32", 0] != by["transformers", "float32", 1]


def test_results_of_models_are_drawn_beside_them(tmp_path: Path) -> None:
    seen = observe(CPU, command="c", commit="c", absent={})
    file = tmp_path / "training.json"
    results = [
        dataclasses.asdict(r) for r in (of("transformers", 1.0), of("liger_aot", 2.0), of("liger", None))
    ]
    environment = dataclasses.asdict(seen) | {"gpu": "NVIDIA H200"}
    file.write_text(json.dumps({"benchmark": "training", "environment": environment, "results": results}))
    first = [path.read_bytes() for path in plot(file)]
    assert [path.name for path in plot(file)] == ["training.png", "training.svg"]
    assert [path.read_bytes() for path in plot(file)] == first
    assert (tmp_path / "training.svg").is_file()
    file.write_text(json.dumps({"benchmark": "weather", "environment": environment}))
    with pytest.raises(ValueError, match="no figure for the benchmark 'weather'"):
        plot(file)


def test_liger_is_adopted_by_its_own_name_for_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    module = pytest.importorskip("liger_kernel.transformers.monkey_patch")
    monkeypatch.setattr(module, "apply_liger_kernel_to_phi3", lambda model: asked.append(model))
    assert adopted("liger", "phi3", "the model") == "the model" and asked == ["the model"]


@pytest.mark.parametrize("benchmark", [training, first_step, loss_curves])
def test_without_a_gpu(
    benchmark: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        benchmark.main([])
    assert "a GPU is needed" in capsys.readouterr().err


def test_unknown_providers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for benchmark in (training, first_step):
        with pytest.raises(SystemExit):
            benchmark.main(["--providers", "nobody"])
        assert "no provider nobody" in capsys.readouterr().err
    assert set(training.PROVIDERS) == set(MODEL_LABELS)
