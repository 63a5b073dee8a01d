"""The sums that the divergences launch beside their own kernels, on the AMD binaries: aligned and not, odd lengths."""

from __future__ import annotations

import pytest
import torch

from liger_aot.ops.losses._divergence import count_labels
from liger_aot.ops.losses.divergence_sums import DivergenceSums
from tests.conftest import built_pack
from tests.emulator.emulated_cases import AMD
from tests.harness.drivers import EmulatorDriver, bound_op


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("arch", AMD)
def test_sums_and_counts(arch: str, shift: int) -> None:
    op = bound_op(DivergenceSums, built_pack(arch), EmulatorDriver)
    for n in (1, 63, 1500):
        partials = torch.rand(n + shift)[shift:]
        exact = float(partials.double().sum())
        # Positive terms: the profile's fp32 tolerance.
        assert abs(float(op(partials)) - exact) <= 32 * 2**-24 * exact
        labels = torch.randint(3, (n + shift,))[shift:]
        for dtype in (torch.int64, torch.int32):
            given = labels if dtype == labels.dtype else labels.to(dtype).repeat(2)[shift : shift + n]
            on = op._own.of(partials, "partials")
            assert on is not None
            assert float(count_labels(on, given, 2)) == int((given != 2).sum())
