"""The three steps of an exact division: scale away from overflow and denormals, multiply-add, repair.

The compiler refines a reciprocal between them. The ranges are those of the instruction set manual's pseudo-code,
read so that LLVM's division is correctly rounded for all operands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .arithmetic import FMA, Lanes


@dataclass(frozen=True)
class _Format:
    scale: int  # the exponent that v_div_scale adds or takes, and v_div_fmas gives back
    far: int  # how far apart exponents may be before the quotient is near the largest number
    tiny: int  # biased exponents up to this may give denormals in the refinement
    underflow: int  # quotients below this power of two are zero


_FORMATS = {
    np.dtype(np.float32): _Format(64, 96, 23, -150),
    np.dtype(np.float64): _Format(128, 768, 53, -1075),
}


def _exponent(a: Lanes) -> Any:
    """The biased exponent field."""
    mantissa, bits = np.finfo(a.dtype).nmant, 8 * a.dtype.itemsize
    field = np.asarray(a).view(f"u{a.dtype.itemsize}").astype(np.uint64) >> np.uint64(mantissa)
    return (field & np.uint64((1 << bits - 1 - mantissa) - 1)).astype(np.int64)


def _is_denormal(a: Lanes) -> Any:
    return (a != 0) & (np.abs(a) < np.finfo(a.dtype).smallest_normal)


def _all_plain(a: Lanes, b: Lanes, form: _Format) -> bool:
    """Every operand, their inverses and quotients are far from zero, denormals, overflow and NaN."""
    limit = 2.0 ** (form.far // 2)
    return all(((np.abs(x) > 1 / limit) & (np.abs(x) < limit)).all() for x in (a, b))


def scale(value: Lanes, denominator: Lanes, numerator: Lanes) -> tuple[Lanes, Lanes]:
    """v_div_scale: `value` (one of the other two) scaled, and whether v_div_fmas must scale back."""
    form = _FORMATS[value.dtype]
    no, yes = np.zeros(value.shape, np.bool_), np.ones(value.shape, np.bool_)
    if _all_plain(numerator, denominator, form):
        return value, no
    up, down = np.ldexp(value, form.scale), np.ldexp(value, -form.scale)
    is_denominator, is_numerator = value == denominator, value == numerator
    wide = np.longdouble  # its exponents reach past those of float64
    inverse_denormal = _is_denormal((wide(1) / denominator).astype(value.dtype))
    quotient_denormal = _is_denormal((numerator.astype(wide) / denominator).astype(value.dtype))
    nothing = (denominator == 0) | (numerator == 0)
    far = _exponent(numerator) - _exponent(denominator) >= form.far
    conditions = [
        nothing,
        far,
        _is_denormal(denominator),
        inverse_denormal & quotient_denormal,
        inverse_denormal,
        quotient_denormal,
        _exponent(numerator) <= form.tiny,
    ]
    results = [
        np.full_like(value, np.nan),
        np.where(is_denominator, up, value),
        up,
        np.where(is_denominator, down, value),
        down,
        np.where(is_numerator, up, value),
        up,
    ]
    flags = [no, yes, no, yes, no, yes, no]
    return np.select(conditions, results, value), np.select(conditions, flags, no)


def multiply_add(a: Lanes, b: Lanes, c: Lanes, scaled: Lanes) -> Lanes:
    """v_div_fmas: a * b + c, scaled back in the lanes that v_div_scale flagged.

    There the quotient was made smaller if it is large by itself (c, which is near it, is above 1) and larger if
    it is small. f32 is rounded once, after the scaling.
    """
    form = _FORMATS[a.dtype]
    back = np.where(np.abs(c) >= 2, form.scale, -form.scale)
    if a.dtype == np.float64:
        total = FMA["f64"](a, b, c)
        return np.where(scaled, np.ldexp(total, back), total)
    exact = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    return np.where(scaled, np.ldexp(exact, back).astype(np.float32), FMA["f32"](a, b, c))


def fix_up(quotient: Lanes, denominator: Lanes, numerator: Lanes) -> Lanes:
    """v_div_fixup: the quotient with its sign, or what IEEE 754 says for zeros, infinities and NaN."""
    dtype = quotient.dtype
    form = _FORMATS[dtype]
    sign = np.where(np.signbit(numerator) ^ np.signbit(denominator), dtype.type(-1), dtype.type(1))
    if _all_plain(numerator, denominator, form):
        return np.copysign(quotient, sign)
    infinity, zero = sign * dtype.type(np.inf), np.copysign(dtype.type(0), sign)
    invalid = (denominator == 0) & (numerator == 0) | np.isinf(denominator) & np.isinf(numerator)
    conditions = [
        np.isnan(numerator) | np.isnan(denominator),
        invalid,
        (denominator == 0) | np.isinf(numerator),
        np.isinf(denominator) | (numerator == 0),
        _exponent(numerator) - _exponent(denominator) < form.underflow,
    ]
    results = [numerator + denominator, dtype.type(np.nan), infinity, zero, zero]
    # A quotient far past the largest number is NaN by now: the refinement met infinities.
    repaired = np.where(np.isnan(quotient), infinity, np.copysign(quotient, sign))
    return np.select(conditions, np.broadcast_arrays(*results), repaired)
