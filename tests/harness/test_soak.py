"""tests.harness.soak without a GPU: some problems on the references, wrong results, growing memory."""

from __future__ import annotations

import gc
import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.harness import soak
from tests.harness.all_ops import HarnessOp
from tests.harness.soak import Memory, grown


def test_it_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of its own: a second a problem, however long it takes."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # as main does
    monkeypatch.setattr(soak, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    monkeypatch.setattr(soak, "PROBLEMS", 15)
    names = ("swiglu", "rmsnorm", "flash_decoding", "flash_attention", "fused_linear_jsd")
    assert soak.soak(150.0, "cpu", 2, 7, names) == []
    assert len(capsys.readouterr().out.splitlines()) == soak.ROUNDS + 1


def test_a_wrong_result_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(*arguments: Any) -> None:
        raise AssertionError("wrong")

    monkeypatch.setattr(HarnessOp, "check", check)
    with pytest.raises(AssertionError, match=r"thread \d, seed \d, problem 0: swiglu Asked\(case=Case\("):
        soak.soak(3600.0, "cpu", 2, 7, ["swiglu"])


def test_what_has_grown() -> None:
    before, filled = Memory(0, 0, 0, 0), Memory(1 << 20, 1 << 30, 1 << 30, 1 << 30)
    assert grown([before, before, before, *[filled] * 6]) == []
    leaking = [Memory(i << 22, 1 << 30, i << 20, 1 << 30) for i in range(10)]
    assert grown(leaking) == ["allocated memory grew by 25165824 bytes, 8388608 are allowed"]
    leaking = [Memory(0, 0, i * (20 << 20), 0) for i in range(10)]
    assert grown(leaking) == ["live memory grew by 125829120 bytes, 33554432 are allowed"]


def test_what_malloc_has_given_out() -> None:
    """Of another thread's arena and of a mapping of its own, too; what was freed is none of it."""
    if not hasattr(soak._libc, "mallinfo2"):
        pytest.skip("glibc is older than 2.33")
    kept: list[bytearray] = []
    gc.collect()  # garbage of tests before this one would be freed meanwhile
    before = soak.live()
    thread = threading.Thread(target=lambda: kept.extend(bytearray(4096) for _ in range(1024)))
    thread.start()
    thread.join()
    kept.append(bytearray(64 << 20))
    assert 68 << 20 <= soak.live() - before < 70 << 20
    kept.clear()
    assert abs(soak.live() - before) < 1 << 20
