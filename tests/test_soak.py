"""tests.soak without a GPU: some seconds of the references, wrong results, growing memory."""

from __future__ import annotations

from typing import Any

import pytest

from tests import soak
from tests.all_ops import HarnessOp
from tests.soak import Memory, grown


def test_some_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("swiglu", "rmsnorm", "flash_decoding", "flash_attention", "fused_linear_jsd")
    assert soak.soak(3.0, "cpu", 2, 7, names) == []
    assert len(capsys.readouterr().out.splitlines()) == soak.ROUNDS + 1


def test_a_wrong_result_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(*arguments: Any) -> None:
        raise AssertionError("wrong")

    monkeypatch.setattr(HarnessOp, "check", check)
    with pytest.raises(AssertionError, match=r"thread \d, seed \d, problem 0: swiglu Asked\(case=Case\("):
        soak.soak(60.0, "cpu", 2, 7, ["swiglu"])


def test_what_has_grown() -> None:
    before, filled = Memory(0, 0, 0), Memory(1 << 20, 1 << 30, 1 << 30)
    assert grown([before, before, before, *[filled] * 6]) == []
    leaking = [Memory(i << 22, 1 << 30, 1 << 30) for i in range(10)]
    assert grown(leaking) == ["allocated memory grew by 25165824 bytes, 8388608 are allowed"]
