"""Every op, loaded, used and dropped many times with the sm90 pack's manifests, down to the stand-in driver: neither
Python's memory nor malloc's grows."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from liger_aot.ops.op import Op
from liger_aot.runtime import devices
from liger_aot.runtime.dispatch import GPUDriver
from liger_aot.runtime.manifest import Pack, Variant
from tests.harness import soak, storages
from tests.harness.all_ops import entries
from tests.harness.choices import Entry, RandomChoices
from tests.harness.drivers import bound_op
from tests.harness.planned_packs import tables_of
from tests.harness.stand_in import StandIn, image

pytest_plugins = ("tests.harness.launcher_fixtures",)

LOADS, CYCLES = 10, 3  # loads a cycle; a leak is in every cycle
# torch's caches and Python's may add as much in a cycle. LOADS of the smallest manifest are 750 blocks, of the smallest
# binary 43 KB.
BLOCKS, LIVE = 250, 16 << 10


class OnStandIn(GPUDriver):
    """The launcher with its driver standing in for a GPU's: CPU tensors are of no GPU, kernels go to the first."""

    def __init__(self, op: str, pack: Pack) -> None:
        super().__init__(shared_per_block=227 << 10)

    def load(self, variant: Variant) -> Any:
        kernel = super().load(variant)
        return SimpleNamespace(
            launch=lambda device, *arguments: kernel.launch(0, *arguments),
            prepare=lambda device: kernel.prepare(0),
        )


@pytest.fixture
def on_stand_in(native: Any, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> Callable[[type[Op]], Op]:
    """An op of a class, loaded anew."""
    driver, pack = native.Driver("cuda", stand_in.path), tables_of("sm90")
    read = Variant.read

    def read_for_stand_in(variant: Variant) -> bytes:
        read(variant)
        return image(f"{variant.symbol}={variant.signature}")

    stand_in.log_calls(False)
    monkeypatch.setattr(Variant, "read", read_for_stand_in)
    monkeypatch.setattr(devices, "driver", lambda: driver)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # keeps code for many shapes of products
    return lambda op_class: bound_op(op_class, pack, OnStandIn)


@pytest.mark.slow
@pytest.mark.parametrize("entry", entries().values(), ids=list(entries()))
def test_an_op_dropped_leaves_nothing(
    entry: Entry, on_stand_in: Callable[[type[Op]], Op], stand_in: StandIn
) -> None:
    """Forward and backward of random problems, which load other binaries and make other plans each time."""
    sizes, libraries = [], stand_in.live_libraries
    for _ in range(CYCLES):
        choices = RandomChoices(1)
        before = stand_in.launch_count
        for _ in range(LOADS):
            op = on_stand_in(entry.op_class)
            for _ in range(2):
                entry.prepare(entry.problem(choices, False), "cpu").run(op)
        assert stand_in.launch_count - before > LOADS
        del op
        gc.collect()
        storages.living(())  # forgets those that are gone: other tests have them noted
        assert stand_in.live_libraries == libraries
        sizes.append((sys.getallocatedblocks(), soak.live()))
    grown = [(now[0] - was[0], now[1] - was[1]) for was, now in pairwise(sizes)]
    assert min(blocks for blocks, _ in grown) < BLOCKS, grown
    assert min(live for _, live in grown) < LIVE, grown
