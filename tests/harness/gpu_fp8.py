"""The 8-bit float of this machine's GPU."""

from __future__ import annotations

import pytest
import torch

from liger_aot.runtime.devices import gpu
from liger_aot.runtime.packs import pack_for
from liger_aot_build.profile import read_profile

DTYPES = {"fp8e4nv": torch.float8_e4m3fn, "fp8e4b8": torch.float8_e4m3fnuz}


def fp8_of_gpu() -> torch.dtype:
    """That which the pack for this GPU converts to; a skip where it has none."""
    arch = pack_for(gpu(0).device).arch
    found = DTYPES.get(read_profile(arch).arch.fp8)
    if found is None:
        pytest.skip(f"{arch} has no fp8")
    return found
