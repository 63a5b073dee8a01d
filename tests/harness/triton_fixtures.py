"""Triton on the stand-in driver: pytest_plugins = ("tests.harness.launcher_fixtures", "tests.harness.triton_fixtures")
brings it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest

from liger_aot.runtime import devices
from liger_aot.runtime.packs import Device
from liger_aot.triton import running
from liger_aot.triton.packs import OVERRIDE
from tests.harness.stand_in import StandIn
from tests.harness.triton_stand_in import H200, MI300, fake_gpu


@pytest.fixture
def triton_gpu(native: Any, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Two H200 that the stand-in plays, for Triton and torch; no pack is installed, or in use after the test."""
    yield from _play(native, stand_in, monkeypatch, H200)


@pytest.fixture
def triton_amd_gpu(native: Any, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """The same with MI300X."""
    yield from _play(native, stand_in, monkeypatch, MI300)


def _play(
    native: Any, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, device: Device
) -> Iterator[StandIn]:
    from triton.compiler.compiler import max_shared_mem
    from triton.runtime import driver

    from liger_aot.triton.driver import _properties

    for where, name, value in fake_gpu(stand_in, device):
        monkeypatch.setattr(where, name, value, raising=False)
    opened = lru_cache(lambda: native.Driver(device.backend, stand_in.path))
    monkeypatch.setattr(devices, "driver", opened)
    monkeypatch.setenv(OVERRIDE, "/nonexistent")
    active = driver._active
    _properties.cache_clear()
    max_shared_mem.cache_clear()
    yield stand_in
    running.stop()
    driver._active = active
    _properties.cache_clear()
    max_shared_mem.cache_clear()
