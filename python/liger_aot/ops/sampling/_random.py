"""The arithmetic of csrc_triton/sampling/generator.py in plain torch, to the bit.

Nothing here depends on the device or on what else is computed: integers, and float32 operations that are rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SAMPLE, ACCEPT, RECOVER = 0, 1, 2  # the streams of one seed and position
LOG2_E = 1.4426950408889634
UNIT = 1 << 30  # the mass of the greatest logit
_WORD = 0xFFFFFFFF
_LOG2 = (
    0.020401187241077423, -0.09579756110906601, 0.2152845561504364, -0.339089035987854, 0.4776683747768402,
    -0.7211594581604004, 1.4426932334899902,
)  # fmt: skip
_EXPONENTIAL = (
    1.4291136264801025, -0.9203357696533203, 0.7541677951812744, 0.27055028080940247, 0.48894548416137695,
    0.7210831046104431, 1.442696452140808,
)  # fmt: skip
_EXP2 = (
    0.0013400436146184802,
    0.009666373021900654,
    0.05550333112478256,
    0.2402234822511673,
    0.6931471824645996,
    1.0,
)


def fma(a: Tensor, b: Tensor, c: Tensor | float) -> Tensor:
    """a * b + c of float32, rounded once."""
    product = a.double() * b.double()  # exact
    addend = c.double() if isinstance(c, Tensor) else torch.full_like(product, c)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)  # of the sum, exactly
    near = total.float()
    beyond = torch.nextafter(near, torch.where(total > near.double(), torch.inf, -torch.inf).float())
    # Where the sum lies half way between two numbers, its error says on which side what it stands for is. Sums round to
    # infinity from half way to 2^128 on.
    at, other_at = (t.double().clamp(-(2.0**128), 2.0**128) for t in (near, beyond))
    half_way = (total - at) * 2 == other_at - at
    other = half_way & (error != 0) & ((error > 0) == (beyond > near))
    return torch.where(other, beyond, near)


def philox(counter: Sequence[Tensor], seeds: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four words of 32 bits, as int64, from a counter of four and a key of 64 bits."""
    c0, c1, c2, c3 = counter
    k0, k1 = seeds & _WORD, (seeds >> 32) & _WORD
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # of 64 bits, which wrap around
        c0, c1, c2, c3 = (b >> 32) & _WORD ^ c1 ^ k0, b & _WORD, (a >> 32) & _WORD ^ c3 ^ k1, a & _WORD
        k0, k1 = k0 + 0x9E3779B9 & _WORD, k1 + 0xBB67AE85 & _WORD
    return c0, c1, c2, c3


def words(seeds: Tensor, positions: Tensor, columns: int, stream: int) -> Tensor:
    """(rows, columns) int64: a word for each column of rows with these seeds and positions, (rows,) int64 each."""
    quarters = torch.arange(-(-columns // 4), device=seeds.device)
    key, at = seeds[:, None], positions[:, None]
    zero = torch.zeros_like(at + quarters)
    counter = (quarters + zero, (at & _WORD) + zero, (at >> 32 & _WORD) + zero, zero + stream)
    return torch.stack(philox(counter, key), -1).flatten(1)[:, :columns]


def log2(x: Tensor) -> Tensor:
    """The base-2 logarithm of normal positive numbers."""
    mantissa, exponent = torch.frexp(x)  # in [1/2, 1)
    t = mantissa * 2.0 - 1.0
    return fma(t, _polynomial(t, _LOG2), (exponent - 1).float())


def exponential(words: Tensor) -> Tensor:
    """-log2(1 - v) with v = (word + 1/2) / 2^32, float32: exponentially distributed."""
    half = words < 1 << 31
    v = words.float() * 2.0**-32 + 2.0**-33
    mantissa, exponent = torch.frexp(((words ^ _WORD).float() + 0.5) * 2.0**-32)
    v = torch.where(half, v, 1.0 - mantissa)
    return fma(v, _polynomial(v, _EXPONENTIAL), torch.where(half, 0.0, -exponent.float()))


def uniform(words: Tensor) -> Tensor:
    """From 0 to 1 - 2^-24, in steps of 2^-24."""
    return (words >> 8).float() * 2.0**-24


def masses(x: Tensor, greatest: Tensor, scale: Tensor) -> Tensor:
    """2^((x - greatest) * scale) in units of 2^-30, rounded down, as int64."""
    d = torch.where(x == greatest, 0.0, (greatest - x) * scale).clamp(max=31.0)
    whole = d.round()
    return (_polynomial(whole - d, _EXP2) * UNIT).long() >> whole.long()


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    total = torch.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        total = fma(x, total, c)
    return total
