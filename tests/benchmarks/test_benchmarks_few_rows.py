"""The benchmark of few rows without a GPU: its inputs, what is compared, what is counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import liger_aot
from benchmarks import few_rows
from benchmarks.few_rows import KINDS, POINTS, TOLERANCE, Point
from benchmarks.in_graphs import Result
from benchmarks.markdown import made_again
from tests.conftest import built_pack
from tests.harness.drivers import EmulatorDriver, bound_op

CPU = torch.device("cpu")
SMALL = Point("rmsnorm", 3, 64)


def small(kind: str) -> Point:
    return replace(SMALL, kind=kind, columns=10 * few_rows.D if kind == "rope" else SMALL.columns)


@pytest.mark.parametrize("kind", KINDS)
def test_ours_is_right_and_errors_are_seen(kind: str) -> None:
    point = small(kind)
    if kind == "fused_add_rmsnorm":  # in place
        results = few_rows.ours(point, given := few_rows.drawn(point, CPU))()
        assert results[0] is given[0]
    else:
        results = [t.clone() for t in few_rows.ours(point, few_rows.drawn(point, CPU))()]
    given = few_rows.drawn(point, CPU)
    assert few_rows.error(point, given, results) < TOLERANCE
    assert few_rows.error(point, given, [*results[:-1], results[-1] * 1.1]) > TOLERANCE
    results[0].view(-1)[7] += 1
    assert few_rows.error(point, given, results) > TOLERANCE


def test_points() -> None:
    assert len(set(POINTS)) == len(POINTS)
    for kind in KINDS:
        point = small(kind)
        given = few_rows.drawn(point, CPU)
        results = few_rows.FORMULAS[kind](*given)
        vectors = given[1:] if kind in ("rmsnorm", "layernorm") else given[2:]
        read = given[: len(given) - len(vectors)]
        assert point.bytes == sum(t.numel() * t.element_size() for t in (*read, *results)), kind


@pytest.mark.parametrize("kind", ["rmsnorm", "rope"])
def test_launches_of_an_op(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an op that keeps its launches in plans, too."""
    op = bound_op(liger_aot.load(kind).__class__, built_pack("gfx942"), EmulatorDriver)
    monkeypatch.setattr(liger_aot, "load", lambda name: op)
    point = replace(small(kind), rows=1)
    expected = [t.clone() for t in few_rows.ours(point, few_rows.drawn(point, CPU))()]
    run = few_rows.ours(point, few_rows.drawn(point, CPU))
    with few_rows.launches(op) as found:
        assert all(torch.equal(a, b) for a, b in zip(run(), expected, strict=True))
        run()
    (on,) = op._own.bound.values()
    assert len(found) == 2 and found[0] == found[1] and found[0].programs[1:] == (1, 1)
    assert found[0].threads in {one.variant.threads for one in on._loaded.values()}
    run()
    assert len(found) == 2


def test_the_floor() -> None:
    found = [Result(SMALL, "empty", 1.0), Result(SMALL, "liger_aot", 2.5, 0.5)]
    assert few_rows.floor(found, SMALL, 2.0 * SMALL.bytes) == 1.5
    assert few_rows.line(SMALL, found, 2.0 * SMALL.bytes).endswith("floor 1.50")
    assert few_rows.floor(found[1:], SMALL, 1.0) is None


def test_kinds_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' results stay; the sentence says which were measured again, and when."""

    def record(date: str, us: float, *kinds: str) -> dict[str, Any]:
        points = [{"kind": kind, "rows": 1, "columns": 64} for kind in kinds]
        results = [{"point": point, "provider": "liger_aot", "us": us} for point in points]
        return {"environment": {"gpu": "NVIDIA H200", "date": date}, "results": results}

    kept, file = tmp_path / "h200" / "steps" / "few_rows.json", tmp_path / "new.json"
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps(record("2026-11-01", 2.0, "rope", "softmax", "swiglu")))
    file.write_text(json.dumps(record("2026-11-02", 1.0, "swiglu", "rope")))
    monkeypatch.setattr(few_rows, "RESULTS", tmp_path)
    assert few_rows.main(["merge", str(file)]) == 0
    found = json.loads(kept.read_text())
    assert {r["point"]["kind"]: r["us"] for r in found["results"]} == {
        "softmax": 2.0,
        "swiglu": 1.0,
        "rope": 1.0,
    }
    assert len(found["results"]) == 3 and found["environment"]["date"] == "2026-11-01"
    assert made_again(found["again"]) == "; rope and swiglu measured again on one NVIDIA H200 (2026-11-02)"
