"""The benchmarks' device-free parts: records, arithmetic, references, tables, plots and the command line."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import (
    cold_start,
    measure,
    op_entry,
    providers,
    records,
    runner,
    workload,
)
from benchmarks.__main__ import main
from benchmarks.environment import folder_name
from benchmarks.markdown import made_in
from benchmarks.records import Environment, Measurement, Run

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")

ENVIRONMENT = Environment(
    gpu="NVIDIA H200",
    multiprocessors=132,
    l2_bytes=60 * 2**20,
    driver="580.0",
    cuda="13.0",
    python="3.12.3",
    torch="2.11.0",
    triton="3.6.0",
    liger_kernel="0.8.5",
    quack=None,
    liger_aot="0.1.0",
    date="2026-01-01T00:00:00+00:00",
    commit="0123456",
    command="python -m benchmarks rmsnorm",
    absent={"quack": "ModuleNotFoundError: No module named 'quack'"},
)


def device_measurement(
    provider: str, n: int, median_ms: float, direction: str = "forward", variant: str = ""
) -> Measurement:
    moved = 2**30
    return Measurement(
        op="rmsnorm",
        direction=direction,
        dtype="bfloat16",
        shape=(2**28 // n, n),
        provider=provider,
        median_ms=median_ms,
        p20_ms=median_ms * 0.98,
        p80_ms=median_ms * 1.05,
        samples=300,
        bytes=moved,
        bandwidth_gb_s=moved / median_ms / 1e6,
        fraction=0.25 / median_ms,
        host_us=12.5,
        relative_error=2e-3,
        variant=variant,
    )


def sample_run() -> Run:
    """Every kind of record: device figures, a failure, host and cold-start times."""
    made = []
    for direction in ("forward", "backward"):
        for n in (1024, 4096, 131072):
            made += [
                device_measurement("copy", n, 0.25, direction),
                device_measurement("liger_aot", n, 0.26, direction),
                device_measurement("torch", n, 0.40, direction),
            ]
    made.append(
        Measurement(
            "rmsnorm",
            "forward",
            "bfloat16",
            (2048, 131072),
            "liger",
            status="error",
            reason="RuntimeError: n",
        )
    )
    for provider, host_us in (("liger_aot", 9.5), ("torch", 10.5)):
        made += [
            Measurement("rmsnorm", "host_forward", "bfloat16", (4, 4096), provider, host_us=host_us),
            Measurement(
                "rmsnorm",
                "cold_total",
                "bfloat16",
                (4, 4096),
                provider,
                median_ms=host_us,
                p20_ms=host_us,
                p80_ms=host_us,
                samples=5,
            ),
        ]
    return Run("rmsnorm", ENVIRONMENT, tuple(made))


# Records ---------------------------------------------------------------------------------------------------


def test_records_survive_the_file(tmp_path: Path) -> None:
    run = sample_run()
    path = tmp_path / "h200" / "rmsnorm.json"
    records.write(path, run)
    assert records.read(path) == run
    assert [p.name for p in path.parent.iterdir()] == ["rmsnorm.json"]
    body = path.read_text().partition('"measurements"')[2]
    assert sum(line.startswith('{"op"') for line in body.splitlines()) == len(run.measurements)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": "fine"}, "status"),
        ({"status": "error"}, "reason"),
        ({"reason": "slow"}, "reason"),
        ({"status": "error", "reason": "RuntimeError"}, "no time"),
        ({"median_ms": None}, "together"),
        ({"median_ms": None, "p20_ms": None, "p80_ms": None, "host_us": None}, "neither"),
        ({"p80_ms": 0.1}, "outside"),
        ({"host_us": float("nan")}, "host_us"),
        ({"samples": 0}, "samples"),
        ({"bytes": None}, "bytes"),
        ({"bandwidth_gb_s": 1.0}, "GB/s"),
    ],
)
def test_a_measurement_that_contradicts_itself_is_refused(change: dict[str, object], message: str) -> None:
    good = device_measurement("torch", 1024, 0.4)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(good, **change)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data.update(format=99), "format 2 or 1"),
        (lambda data: data["measurements"][0].pop("fraction"), "fraction"),
        (lambda data: data["measurements"][0].update(speed=1), "speed"),
        (lambda data: data["measurements"][0].update(median_ms="0.25"), "rmsnorm.json"),
        (lambda data: data["environment"].pop("driver"), "driver"),
        (lambda data: data.pop("measurements"), "measurements"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, damage, message: str) -> None:
    path = tmp_path / "rmsnorm.json"
    records.write(path, sample_run())
    data = json.loads(path.read_text())
    damage(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message) as caught:
        records.read(path)
    assert str(path) in str(caught.value)


def test_a_file_from_before_variants_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rmsnorm.json"
    records.write(path, sample_run())
    data = json.loads(path.read_text())
    data["format"] = 1
    for item in data["measurements"]:
        del item["variant"]
    path.write_text(json.dumps(data))
    assert records.read(path) == sample_run()


def test_a_point_is_named_by_its_length_or_shape_and_variant() -> None:
    one = device_measurement("torch", 1024, 0.4)
    assert one.point == "1024"
    assert dataclasses.replace(one, variant="packed").point == "packed 1024"
    assert dataclasses.replace(one, shape=(4, 64, 8, 8)).point == "4x64x8x8"


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rmsnorm.json"
    records.write(path, sample_run())
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match=str(path)):
        records.read(path)


def test_a_run_is_saved_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "rmsnorm.json"
    recorder = runner.Recorder(Run("rmsnorm", ENVIRONMENT, ()), path)
    made = sample_run().measurements
    recorder.add("first", iter(made[:3]))
    assert records.read(path).measurements == made[:3]
    recorder.add("second", iter(made[3:]))
    assert records.read(path) == sample_run()


def test_a_part_measured_again_replaces_that_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later = dataclasses.replace(ENVIRONMENT, date="2030-01-02T00:00:00+00:00", commit="later")
    made = Measurement("rmsnorm", "host_forward", "bfloat16", (4, 4096), "torch", host_us=1.5)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(runner, "observe", lambda *_, **__: later)
    monkeypatch.setattr(runner, "host_measurements", lambda *_: [made])
    monkeypatch.setattr(runner, "plot", lambda path: None)

    def measured(sections: list[str] | None) -> Run:
        runner.measure_op(
            "rmsnorm", sections=sections, providers=["torch"], effort="quick", results=tmp_path, command="", commit=None
        )  # fmt: skip
        return records.read(tmp_path / "rmsnorm.json")

    assert measured(["host"]) == Run("rmsnorm", later, (made,))  # nothing was there before
    records.write(tmp_path / "rmsnorm.json", sample_run())
    run = measured(["host"])
    kept = tuple(m for m in sample_run().measurements if not m.direction.startswith("host_"))
    assert run == Run("rmsnorm", ENVIRONMENT, (*kept, made), {"host": later})
    assert run.environments("host") == [later] and run.environments("forward") == [ENVIRONMENT]
    assert run.environments() == [ENVIRONMENT, later]
    assert "host measured again on" in made_in(run) and "2030-01-02" in made_in(run)
    assert "again" not in made_in(sample_run())


# Arithmetic ------------------------------------------------------------------------------------------------


def test_bandwidth_is_in_gigabytes_of_1e9_bytes() -> None:
    assert measure.gigabytes_per_second(2**30, 0.25) == pytest.approx(4294.97, rel=1e-5)


def test_summary_of_samples() -> None:
    timing = measure.summarize([float(i) for i in range(101)])
    assert timing == measure.Timing(median_ms=50.0, p20_ms=20.0, p80_ms=80.0, samples=101)
    assert measure.summarize([3.0]) == measure.Timing(3.0, 3.0, 3.0, 1)


def test_rotated_sets_pass_four_caches_between_two_uses() -> None:
    l2 = 60 * 2**20
    assert workload.rotated_sets(2**30, l2) == 2
    assert workload.rotated_sets(2**20, l2) == 240
    assert (workload.rotated_sets(2**20 + 1, l2)) * (2**20 + 1) >= 4 * l2


def test_an_op_that_cannot_be_measured_is_recorded_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def broken(op: str) -> None:
        raise ImportError(f"no {op} in the pack")

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(runner, "observe", lambda *_, **__: ENVIRONMENT)
    monkeypatch.setattr(runner, "load", broken)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    arguments = ["rmsnorm", "swiglu", "--out", str(tmp_path), "--providers", "liger_aot,torch"]
    assert main(arguments) == 1
    for op in ("rmsnorm", "swiglu"):
        run = records.read(tmp_path / f"{op}.json")
        assert [(m.provider, m.status) for m in run.measurements] == [
            ("liger_aot", "error"),
            ("torch", "error"),
        ]
        assert all(f"no {op} in the pack" in str(m.reason) for m in run.measurements)
    printed = capsys.readouterr().out
    assert sum(line.endswith("FAILED") for line in printed.splitlines()) == 2


def test_host_time_counts_each_call() -> None:
    made = []
    microseconds = measure.time_host(lambda: made.append(0), calls=7, repeats=5, synchronize=lambda: None)
    assert len(made) == 7 * 6
    assert microseconds > 0


@pytest.mark.parametrize(
    ("gpu", "folder"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4"),
        ("AMD Instinct MI300X", "instinct-mi300x"),
    ],
)
def test_results_folder_of_a_gpu(gpu: str, folder: str) -> None:
    assert folder_name(gpu) == folder


def test_a_cold_start_that_fails_is_a_record() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    (failed,) = cold_start.measurements("rmsnorm", ["torch"], processes=1)
    assert failed.status == "error" and failed.direction == "cold_total"
    assert failed.reason and "Traceback" not in failed.reason


# The command line ------------------------------------------------------------------------------------------


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments], cwd=ROOT, capture_output=True, text=True
    )


def test_a_machine_without_a_gpu_is_told_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = command("rmsnorm")
    assert done.returncode == 2
    assert "a GPU is needed" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rmsnorn"], "no benchmark for rmsnorn: there is one for "),
        (["rmsnorm", "--providers", "liger_aot,apex"], "no provider apex"),
        (["rmsnorm", "--only", "sideways"], "invalid choice"),
        (["rmsnorm", "--effort", "some"], "invalid choice"),
        (
            ["rmsnorm", "swiglu", "--point", "4096"],
            "swiglu has none of the points 4096: it has 5120, 11008, ",
        ),
        ([], "required"),
        (["plot", "nowhere.json"], "nowhere.json"),
        (["summary", "nowhere.json"], "nowhere.json"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(arguments: list[str], message: str, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_an_op_is_found_by_its_file() -> None:
    assert "rmsnorm" in op_entry.modules()
    assert not {"measure", "table", "__main__"} & set(op_entry.modules())
    assert [op_entry.load(name).op for name in op_entry.modules()] == list(op_entry.modules())
    with pytest.raises(ValueError, match="rmsnorm"):
        op_entry.load("measure")


def test_absent_providers_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "quack", None)
    assert providers.absence("torch") is None
    assert "quack" in str(providers.absence("quack"))
