"""A GPU down to the launcher, on the stand-in driver: pytest_plugins = (..., "tests.harness.stand_in_gpu") brings it.

It needs the fixtures of ``tests.harness.pack_fixtures`` and ``tests.harness.launcher_fixtures``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from liger_aot.runtime import devices
from liger_aot.runtime.manifest import Pack
from liger_aot.runtime.packs import Device
from liger_aot_build.stored import compressed
from tests.harness.pack_edits import edit, replace_binaries
from tests.harness.stand_in import StandIn, image

A100 = Device("cuda", "8.0", "NVIDIA A100")


@pytest.fixture
def stand_in_gpu(
    sm80: Path, native: Any, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """An A100 whose driver takes images of its own kind: a pack of one op, with its binaries as such."""

    edit(sm80 / "manifest.json", lambda m: m.update(ops={"column_sums": m["ops"]["column_sums"]}))
    manifest = Pack(sm80).op("column_sums")
    symbols = {name: manifest.variant(name).symbol for name in manifest.variants}
    images = {name: compressed(image(f"{symbol}=ppii")) for name, symbol in symbols.items()}
    replace_binaries(sm80, "column_sums", images)
    monkeypatch.setattr(devices, "gpu", lambda index: devices.GPU(index, A100, 108, 166912))
    monkeypatch.setattr(devices, "driver", lru_cache(lambda: native.Driver("cuda", stand_in.path)))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    yield sm80
