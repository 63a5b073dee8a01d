"""A run's tables, its figures and the summary of several runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks import records, tables
from benchmarks.__main__ import main
from benchmarks.records import Measurement, Run
from tests.benchmarks.test_benchmarks import ENVIRONMENT, device_measurement, sample_run


def test_table_has_a_row_for_each_length_and_says_what_failed() -> None:
    text = tables.render(sample_run())
    row = next(line.split() for line in text.splitlines() if line.split()[:1] == ["131072"])
    assert row == ["131072", "0.962", "0.625", "error", "4295"]
    assert "liger failed" in text and "quack is absent: ModuleNotFoundError" in text
    assert any(line.split() == ["forward", "9.5", "10.5"] for line in text.splitlines())
    assert any(line.split() == ["total", "9.5", "10.5"] for line in text.splitlines())


def test_table_tells_variants_apart() -> None:
    made = [
        device_measurement(provider, n, 0.25, variant=variant)
        for variant in ("", "packed")
        for n in (1024, 4096)
        for provider in ("copy", "liger_aot")
    ]
    text = tables.render(Run("swiglu", ENVIRONMENT, tuple(made)))
    assert [line.rsplit(maxsplit=2)[0].strip() for line in text.splitlines()[2:6]] == [
        "1024",
        "4096",
        "packed 1024",
        "packed 4096",
    ]


def test_summary_marks_a_peer_that_is_ahead_and_a_failure_of_ours() -> None:
    made = [
        device_measurement("copy", 1024, 0.25),
        device_measurement("liger_aot", 1024, 0.26),
        device_measurement("torch", 1024, 0.254),  # within 3%
        device_measurement("liger", 1024, 0.52),
        device_measurement("liger_aot", 2048, 0.26),
        device_measurement("torch", 2048, 0.25),
        device_measurement("torch", 4096, 0.25, variant="packed"),
        Measurement(
            "rmsnorm",
            "forward",
            "bfloat16",
            (2**16, 4096),
            "liger_aot",
            status="error",
            reason="a",
            variant="packed",
        ),
        Measurement("rmsnorm", "host_forward", "bfloat16", (4, 4096), "liger_aot", host_us=5.0),
        Measurement("rmsnorm", "host_forward", "bfloat16", (4, 4096), "liger", host_us=40.0),
    ]
    lines = tables.compare([Run("rmsnorm", ENVIRONMENT, tuple(made))]).splitlines()
    assert lines[1].split() == ["rmsnorm", "forward", "1024", "0.962", "0.984", "torch", "0.98", "2.00"]
    assert lines[2].split()[-4:] == ["0.96", "-", "PEER", "AHEAD"]
    assert lines[3].split()[2:] == ["packed", "4096", "-", "1.000", "torch", "-", "-", "FAILED"]
    assert lines[4].split()[3:] == ["5.0", "us", "40.0", "us", "liger", "8.00", "8.00"]
    assert lines[5] == "4 points, 2 marked"


def test_plot_is_drawn_from_the_file_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the figures and is not installed")
    path = tmp_path / "rmsnorm.json"
    records.write(path, sample_run())
    assert main(["plot", str(path)]) == 0
    png, svg = path.with_suffix(".png").read_bytes(), path.with_suffix(".svg").read_bytes()
    assert png.startswith(b"\x89PNG") and b"liger-aot" in svg and b"first call in a fresh process" in svg
    assert main(["plot", str(path)]) == 0
    assert (path.with_suffix(".png").read_bytes(), path.with_suffix(".svg").read_bytes()) == (png, svg)


def test_plot_draws_variants_and_unlike_shapes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the figures and is not installed")
    swept = [
        device_measurement(provider, n, 0.25, variant=variant)
        for variant in ("", "packed")
        for n in (1024, 4096)
        for provider in ("copy", "liger_aot")
    ]
    unlike = [
        dataclasses.replace(device_measurement(provider, 64, 0.25), shape=shape)
        for shape in ((4, 64, 8, 64), (8, 64, 8, 64))
        for provider in ("copy", "liger_aot")
    ]
    for name, made, words in (
        ("swept", swept, ("forward, packed, bfloat16", "row length n")),
        ("unlike", unlike, ("4x64x8x64", "8x64x8x64")),
    ):
        path = tmp_path / f"{name}.json"
        records.write(path, Run("swiglu", ENVIRONMENT, tuple(made)))
        assert main(["plot", str(path)]) == 0
        svg = path.with_suffix(".svg").read_text()
        assert all(word in svg for word in words)
