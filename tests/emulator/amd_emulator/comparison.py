"""Inputs and error limits for the tests of whole kernels."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32}
UNIT_ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}
LEAST = {"bf16": 2.0**-126, "fp16": 2.0**-25, "fp32": 2.0**-126}  # the error of a rounding among denormals
UNTOUCHED = 7.0


def random(*shape: int, dtype: str = "fp32", seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(DTYPES[dtype])


def untouched(*shape: int, dtype: str = "fp32") -> np.ndarray:
    return np.full(shape, UNTOUCHED, DTYPES[dtype])


def wide(array: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # signalling NaN
        return array.astype(np.float64)


def check(got: np.ndarray, exact: np.ndarray, dtype: str, terms: float, magnitude: Any = None) -> None:
    """One rounding to `dtype`, and `terms` fp32 roundings of values as large as `magnitude` (default: the result)."""
    size = np.abs(exact)
    limit = LEAST[dtype] + UNIT_ROUNDOFF[dtype] * size
    limit += terms * 2.0**-24 * (size if magnitude is None else magnitude)
    assert got.shape == exact.shape
    worst = float((np.abs(wide(got) - exact) / limit).max())
    assert worst <= 1, f"{worst:.3g} of the limit"
