"""Which memory the drivers without a GPU may touch: storages whose addresses were taken, while they live."""

from __future__ import annotations

import pytest
import torch

from liger_aot.ops.norms import rmsnorm
from liger_aot.runtime import device_errors
from tests.harness import storages


def test_storages_are_known_while_they_live() -> None:
    storages.watch()
    for address_of in (torch.Tensor.data_ptr, lambda x: rmsnorm.rows_of(x)[0]):  # type: ignore[index]
        base = torch.zeros(64, dtype=torch.float32)
        at = address_of(base[16:32])
        start = at - 64
        assert storages.living([at]) == {start: 256}, "the view's whole storage"
        assert storages.living([start + 256]).get(start) is None, "its end is beside it"
        del base
        assert start not in storages.living([at]), "its memory may be another's by now"


def test_a_word_that_was_made_before_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the process's: a test without a driver may have made it."""
    monkeypatch.setattr(torch.Tensor, "data_ptr", storages._data_ptr)
    monkeypatch.setattr(device_errors, "_words", {})
    at = device_errors.flag("some op")
    storages.watch()
    assert storages.living([at]) == {at: 8}
