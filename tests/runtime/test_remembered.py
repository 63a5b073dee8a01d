"""What host code keeps from call to call is bounded, but for memory that captured graphs use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from liger_aot.ops.norms.groupnorm import GroupNorm
from liger_aot.runtime.dispatch import OpOn
from liger_aot.runtime.remembered import REMEMBERED, remember
from tests.conftest import built_pack
from tests.harness.drivers import EmulatorDriver


def test_a_full_dict_is_emptied_for_the_next() -> None:
    known: dict[int, str] = {}
    for key in range(REMEMBERED):
        assert remember(known, key, str(key)) == str(key)
    assert len(known) == REMEMBERED and known[0] == "0"
    assert remember(known, REMEMBERED, "new") == "new" and known == {REMEMBERED: "new"}


def test_workspaces_outlive_what_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph writes to the workspace of the launches in it, however many shapes came after them."""
    pack = built_pack("gfx942")
    on = OpOn(pack.op(GroupNorm.name), EmulatorDriver(GroupNorm.name, pack), -1, 2)
    monkeypatch.setattr("liger_aot.runtime.remembered.REMEMBERED", 1)
    words: Any = on.workspace("tagged", torch.device("cpu"))
    for shape in range(3):
        remember(on.plans, shape, shape)
    assert len(on.plans) == 1
    assert on.workspace("tagged", torch.device("cpu")) is words
    assert on.workspace("untagged", torch.device("cpu")) is not words
