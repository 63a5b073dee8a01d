"""How much of a wrong binary the AMD emulator would notice."""

from __future__ import annotations

import numpy as np
import pytest

from tests.amd_emulator import Program, missing_tool
from tests.amd_emulator.comparison import random
from tests.amd_emulator.mutation import flip_bits
from tests.amd_emulator.triton_kernel import compile_kernel
from tests.test_amd_emulator_rows import rmsnorm

pytestmark = pytest.mark.skipif(bool(missing_tool()), reason=str(missing_tool()))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gfx90a", "gfx942"])
def test_most_flipped_bits_are_noticed(arch: str, capsys: pytest.CaptureFixture[str]) -> None:
    types = {
        "Y": "*bf16",
        "X": "*bf16",
        "W": "*bf16",
        "RSTD": "*fp32",
        "stride": "i64",
        "n": "i32",
        "eps": "fp32",
    }
    kernel = compile_kernel(rmsnorm, arch, types, {"BLOCK": 512}, num_warps=2)
    x, w = random(2, 500, dtype="bf16"), random(500, dtype="bf16", seed=1)

    def run(program: Program, limit: int) -> np.ndarray:
        y, rstd = np.zeros_like(x), np.zeros(2, np.float32)
        kernel.run((2,), y, x, w, rstd, 500, 500, 1e-6, program=program, max_instructions=limit)
        return np.concatenate([y.reshape(-1).astype(np.float32), rstd])

    outcomes = flip_bits(kernel.image, arch, kernel.name, run, samples=300)
    with capsys.disabled():
        print(f"\n{arch}: {dict(outcomes)}")
    assert outcomes["unnoticed"] < 0.3 * outcomes.total()
