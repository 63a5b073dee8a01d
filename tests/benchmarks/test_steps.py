"""Benchmarks that measure points one by one: which points and providers a command line names, what it keeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import few_rows, steps
from benchmarks.attention import paged
from benchmarks.cache import cache
from benchmarks.decoding import decoding
from benchmarks.in_graphs import Result
from benchmarks.moe import experts
from benchmarks.quantization import quantization
from benchmarks.sampling import sampling
from tests.benchmarks.test_benchmarks import ENVIRONMENT


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Runs a benchmark whose points take no time: (point, providers) of each that was to be measured."""

    def run(benchmark: Any, *arguments: str, failing: str = "nobody") -> list[Any]:
        seen: list[Any] = []

        def at(*given: Any) -> list[Result]:
            i = next(i for i, value in enumerate(given) if isinstance(value, list))
            point, names = given[0] if i == 1 else given[:i], given[i]
            seen.append((point, list(names)))
            return [
                Result("p", name, failed="cannot") if name == failing else Result("p", name, 1.0)
                for name in names
            ]

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(steps, "observe", lambda *_, **__: ENVIRONMENT)
        monkeypatch.setattr(few_rows, "bytes_a_microsecond", lambda device: 1.0)
        monkeypatch.setattr(benchmark, "at", at)
        monkeypatch.setattr(benchmark, "line", lambda *found: "a line")
        assert benchmark.main([*arguments]) == (failing == "liger_aot")
        return seen

    return run


@pytest.mark.parametrize(
    ("benchmark", "arguments", "count", "absent"),
    [
        (cache, ("--kinds", "merge,write"), 21, "vllm"),
        (quantization, ("--rows", "1,8", "--columns", "4096"), None, "vllm"),
        (sampling, ("--rows", "1"), None, None),
        (few_rows, ("--rows", "1", "--kinds", "swiglu"), len(few_rows.KINDS["swiglu"]), "vllm"),
        (paged, ("--pages", "16"), None, "fa3"),
        (decoding, ("--most-gigabytes", "1"), None, None),
        (experts, ("--tokens", "128,16"), 4 * len(experts.MODELS), None),
    ],
)
def test_points_and_providers(
    benchmark: Any, arguments: tuple[str, ...], count: int | None, absent: str | None,
    asked: Callable[..., list[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    seen = asked(benchmark, *arguments, "--out", str(tmp_path))
    every = len(getattr(benchmark, "POINTS", ())) or len(seen) + 1
    assert 0 < len(seen) < every and count in (None, len(seen))
    # A peer whose library is not given is left out.
    assert {tuple(names) for _, names in seen} == {tuple(p for p in benchmark.PROVIDERS if p != absent)}
    (file,) = tmp_path.iterdir()
    content = json.loads(file.read_text())
    facts = ["bytes_a_microsecond"] if benchmark is few_rows else []
    assert list(content) == ["environment", *facts, "results"]
    assert len(content["results"]) == sum(len(names) for _, names in seen)
    assert capsys.readouterr().out.count("a line") >= len(seen)


def test_a_library_brings_its_peer(
    asked: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    seen = asked(cache, "--kinds", "merge", "--vllm", "some.so", "--out", str(tmp_path))
    assert loaded == ["some.so"] and all(names == ["liger_aot", "vllm"] for _, names in seen)


def test_ours_must_not_fail(asked: Callable[..., list[Any]], tmp_path: Path) -> None:
    assert asked(cache, "--kinds", "merge", "--out", str(tmp_path), failing="liger_aot")
    assert asked(sampling, "--rows", "1", "--out", str(tmp_path), failing="torch")
