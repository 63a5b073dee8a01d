"""Which cases of attention's and decoding's tests the emulator runs in the quick run of the tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from tests.harness import executed


def emulated(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Parameters (*case, architecture) of each case, whose last part is a problem. Quick are those of gfx942 that take
    the binaries for bf16 and a head dimension of 64: every kernel form, mask and option is among them, and so they are
    all that architectures run of which each form is executed."""
    return [
        pytest.param(
            *case, arch, marks=() if arch == executed.QUICK and _quick(case[-1]) else pytest.mark.slow
        )
        for case in cases
        for arch in (*executed.ARCHS, *(executed.BY_FORM if _quick(case[-1]) else ()))
    ]


# Each architecture whose binaries are executed; quick is gfx942
AMD = [
    pytest.param(arch, marks=() if arch == executed.QUICK else pytest.mark.slow)
    for arch in (*executed.ARCHS, *executed.BY_FORM)
]

# Those of which a binary of each form is executed; quick is gfx942
BY_FORM = [
    executed.QUICK,
    *(pytest.param(arch, marks=pytest.mark.slow) for arch in executed.BY_FORM),
]

_ALIKE = ("gfx1151", "gfx1200")  # their instructions are those of others


def on_architectures(*cases: Any, quick: bool = True) -> list[Any]:
    """Parameters (architecture, *case) for the tests of Triton kernels. In the quick run: all cases on gfx90a and
    gfx942, and, if ``quick``, the first on the architectures of which each form is executed."""
    made = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        made += [pytest.param(arch, *values) for arch in executed.ARCHS]
        marks = () if quick and number == 0 else pytest.mark.slow
        made += [pytest.param(arch, *values, marks=marks) for arch in executed.BY_FORM]
        if quick and number == 0:
            made += [pytest.param(arch, *values, marks=pytest.mark.slow) for arch in _ALIKE]
    return made


def _quick(problem: Any) -> bool:
    return bool(problem.dim == 64 and problem.dtype == torch.bfloat16)
