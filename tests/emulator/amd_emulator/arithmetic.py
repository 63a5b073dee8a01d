"""What vector instructions compute: one function over lanes for each, with its operand types.

Functions get numpy arrays of 64 lanes or numpy scalars of the declared source types and return the declared
result type. The f32 functions v_exp, v_log, v_rcp, v_rsq and v_sqrt flush denormals as the hardware does,
whatever the mode; everything else keeps them (the emulator refuses code that asks for flushing).
Transcendental functions are rounded from float64, where the hardware may be one unit in the last place off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .operand import DTYPES

F16, F32, F64 = np.float16, np.float32, np.float64
U16, U32, U64, I32, I64 = np.uint16, np.uint32, np.uint64, np.int32, np.int64
Lanes = Any  # an array of 64 lanes or a numpy scalar


@dataclass(frozen=True)
class Operation:
    result: str  # a key of operand.DTYPES
    sources: tuple[str, ...]
    function: Callable[..., Lanes]


def fma_f32(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """a * b + c rounded once.

    The product is exact in float64. Rounding the sum to float64 and then to float32 is wrong only if the
    first rounding lands halfway between two float32: then the float64 is moved off the tie towards the exact
    sum. (Between denormals ties lie elsewhere; there the last bit may be wrong.)
    """
    product, addend = np.multiply(a, b, dtype=F64), np.asarray(c, F64)
    total = np.atleast_1d(product + addend)
    tie = (total.view(U64) & U64(0x1FFFFFFF)) == U64(0x10000000)
    if tie.any():
        rest = total - product
        error = (product - (total - rest)) + (addend - rest)  # total + error is the exact sum
        away = np.where(error > 0, np.inf, -np.inf)
        total = np.where(tie & (error != 0), np.nextafter(total, away), total)
    return total.astype(F32) if total.size > 1 else total.astype(F32)[0]


def _split(a: Lanes) -> tuple[Lanes, Lanes]:
    """A double as two of 26 bits, by Veltkamp's method."""
    scaled = a * 134217729.0
    high = scaled - (scaled - a)
    return high, a - high


def fma_f64(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """a * b + c by error-free transformations (Dekker's product, Knuth's sum), then one rounding."""
    product = a * b
    (a1, a0), (b1, b0) = _split(a), _split(b)
    product_error = ((a1 * b1 - product) + a1 * b0 + a0 * b1) + a0 * b0
    total = product + c
    rest = total - product
    sum_error = (product - (total - rest)) + (c - rest)
    result = total + (sum_error + product_error)
    return np.where(np.isfinite(result), result, total)


def fma_f16(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """a * b + c rounded once: float64 holds the sum exactly wherever it is near a tie of float16."""
    return (np.asarray(a, F64) * np.asarray(b, F64) + np.asarray(c, F64)).astype(F16)


def mad_f32(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """v_mad and v_mac: the product is rounded too, and denormals are flushed whatever the mode."""
    return _flush(_flush(_flush(a) * _flush(b)) + _flush(c))


# The conditions of comparisons; "n" before one: not so, which holds for NaN too
FLOAT_COMPARISONS: dict[str, Callable[..., Lanes]] = {
    "eq": np.equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lg": lambda a, b: (a < b) | (a > b),
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "neq": np.not_equal,
    "nlt": lambda a, b: ~(a < b),
    "nle": lambda a, b: ~(a <= b),
    "ngt": lambda a, b: ~(a > b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
}
FMA = {"f16": fma_f16, "f32": fma_f32, "f64": fma_f64}


def _flush(a: Lanes) -> Lanes:
    return np.where(np.abs(a) < F32(2.0**-126), np.copysign(F32(0), a), a)


def _transcendental(function: Callable[[Lanes], Lanes], name: str) -> Callable[[Lanes], Lanes]:
    if name == "f32":
        return lambda a: _flush(function(_flush(a).astype(F64)).astype(F32))
    dtype = DTYPES[name]
    return lambda a: function(np.asarray(a, F64)).astype(dtype)


def to_e4m3fnuz(x: np.ndarray) -> np.ndarray:
    """Codes of e4m3fnuz, rounded to nearest even: exponents from 2^-7, below that multiples of 2^-10. There is no
    negative zero, its code is NaN; what lies past 240 is NaN too, as with the mode bit FP16_OVFL at 0."""
    size = np.abs(np.where(np.isfinite(x), x, 0.0).astype(np.float64))
    exponent = np.where(size > 0, np.maximum(np.frexp(size)[1] - 1, -7), -7)
    rounded = np.rint(np.ldexp(size, 3 - exponent))  # in units of the last place
    code = rounded + (exponent + 7) * 8  # a carry moves on into the exponent
    code = np.where((size > 0) & (code > 0) & np.signbit(x), code + 128, code)
    fits = np.isfinite(x) & (np.ldexp(rounded, exponent - 3) <= 240)
    return np.where(fits, code, 128).astype(U16)


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """Codes of OCP's e4m3, rounded to nearest even: exponents from 2^-6, below that multiples of 2^-9; what rounds past
    448 is NaN, as with the mode bit FP16_OVFL at 0."""
    size = np.abs(np.where(np.isfinite(x), x, 0.0).astype(np.float64))
    exponent = np.where(size > 0, np.maximum(np.frexp(size)[1] - 1, -6), -6)
    rounded = np.rint(np.ldexp(size, 3 - exponent))  # in units of the last place
    # A carry moves on into the exponent.
    code = np.where(exponent == -6, rounded, rounded + (exponent + 6) * 8)
    fits = np.isfinite(x) & (np.ldexp(rounded, exponent - 3) <= 448)
    return (np.where(fits, code, 127) + np.where(np.signbit(x), 128, 0)).astype(U16)


def to_bf16(x: Lanes) -> Lanes:
    """The bits of bfloat16 in the lower half of 32, rounded to nearest even; NaN stays one."""
    bits = np.asarray(x, F32).view(U32)
    rounded = bits + U32(0x7FFF) + (bits >> U32(16) & U32(1)) >> U32(16)
    return np.where(np.isnan(x), bits >> U32(16) | U32(0x40), rounded)


def from_e4m3fnuz(code: np.ndarray) -> np.ndarray:
    """The float32 values of codes in the low bytes."""
    code = np.asarray(code).astype(np.int64) & 255
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.ldexp((mantissa + 8.0 * (exponent > 0)).astype(F64), np.maximum(exponent, 1) - 11)
    return np.where(code == 128, np.nan, np.where(code >> 7, -size, size)).astype(F32)


def from_e4m3(code: np.ndarray) -> np.ndarray:
    """The same of OCP's e4m3, whose NaN has either sign."""
    code = np.asarray(code).astype(np.int64) & 255
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.ldexp((mantissa + 8.0 * (exponent > 0)).astype(F64), np.maximum(exponent, 1) - 10)
    size = np.where(code & 127 == 127, np.nan, size)
    return np.where(code >> 7, -size, size).astype(F32)


def _pair_from_e4m3fnuz(codes: np.ndarray) -> np.ndarray:
    low, high = (from_e4m3fnuz(np.asarray(codes, U32) >> U32(8 * i)).view(U32).astype(U64) for i in range(2))
    return low | high << U64(32)


def round_towards_zero_f16(a: Lanes) -> Lanes:
    nearest = a.astype(F16)
    return np.where(np.abs(nearest.astype(F32)) > np.abs(a), np.nextafter(nearest, F16(0)), nearest)


def clamp_to_one(a: Lanes) -> Lanes:
    """The clamp modifier on a float; NaN becomes 0 (DX10_CLAMP)."""
    return np.fmin(np.fmax(a, a.dtype.type(0)), a.dtype.type(1))


def _to_integer(dtype: Any) -> Callable[[Lanes], Lanes]:
    limits = np.iinfo(dtype)

    def convert(a: Lanes) -> Lanes:
        whole = np.clip(np.trunc(np.asarray(a, F64)), limits.min, limits.max)
        return np.where(np.isnan(whole), 0, whole).astype(I64).astype(dtype)

    return convert


def _bit_length(a: Lanes) -> Lanes:
    return np.frexp(np.asarray(a, F64))[1].astype(U32)


def _find_high(a: Lanes) -> Lanes:
    return np.where(a == 0, U32(0xFFFFFFFF), U32(32) - _bit_length(a))


def _find_low(a: Lanes) -> Lanes:
    return np.where(a == 0, U32(0xFFFFFFFF), _bit_length(a & (~a + U32(1))) - U32(1))


def _reverse_bits(a: Lanes) -> Lanes:
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
        a = (a >> U32(shift) & U32(mask)) | (a & U32(mask)) << U32(shift)
    return a >> U32(16) | a << U32(16)


def _permute_bytes(a: Lanes, b: Lanes, selector: Lanes) -> Lanes:
    """Each selector byte picks a byte of {a, b} (0-7, b low), a sign (8-11), 0x00 (12) or 0xff (13 up)."""
    if selector.ndim:
        return _permute_bytes_by_lane(a, b, selector)
    result = U32(0)
    for byte in range(4):
        index = int(selector) >> 8 * byte & 255
        if index < 8:
            picked = (a if index & 4 else b) >> U32(8 * (index & 3)) & U32(255)
        elif index < 12:  # the signs of the four 16-bit halves, low half of b first
            picked = ((a if index & 2 else b) >> U32(31 if index & 1 else 15) & U32(1)) * U32(255)
        else:
            picked = U32(0 if index == 12 else 255)
        result = result | picked << U32(8 * byte)
    return result


def _permute_bytes_by_lane(a: Lanes, b: Lanes, selectors: Lanes) -> Lanes:
    result = np.zeros_like(selectors)
    for selector in np.unique(selectors):
        np.copyto(result, _permute_bytes(a, b, selector), where=selectors == selector)
    return result


def _multiply_high(wide: Any, dtype: Any) -> Callable[[Lanes, Lanes], Lanes]:
    return lambda a, b: (a.astype(wide) * b.astype(wide) >> wide(32)).astype(dtype)


def _saturating(function: Callable[[Lanes, Lanes], Lanes], dtype: Any) -> Callable[[Lanes, Lanes], Lanes]:
    limits = np.iinfo(dtype)
    return lambda a, b: np.clip(function(a.astype(I64), b.astype(I64)), limits.min, limits.max).astype(dtype)


def _low24(a: Lanes) -> Lanes:
    if a.dtype == U32:
        return a & U32(0xFFFFFF)
    return a << I32(8) >> I32(8)


def _shift(amount: Lanes, dtype: Any, bits: int) -> Lanes:
    """A shift amount: only its low bits count."""
    return (amount & amount.dtype.type(bits - 1)).astype(dtype)


def _shift_left(amount: Lanes, a: Lanes) -> Lanes:
    return a << _shift(amount, a.dtype.type, 8 * a.dtype.itemsize)


def _shift_right(amount: Lanes, a: Lanes) -> Lanes:
    return a >> _shift(amount, a.dtype.type, 8 * a.dtype.itemsize)


def _extract_unsigned(a: Lanes, offset: Lanes, width: Lanes) -> Lanes:
    return a >> _shift(offset, U32, 32) & (U32(1) << _shift(width, U32, 32)) - U32(1)


def _extract_signed(a: Lanes, offset: Lanes, width: Lanes) -> Lanes:
    width = _shift(width, I64, 32)
    field = a.astype(I64) >> _shift(offset, I64, 32) & (I64(1) << width) - I64(1)
    sign = (I64(1) << width) >> I64(1)
    return ((field ^ sign) - sign).astype(I32)


def _align(unit: int) -> Callable[[Lanes, Lanes, Lanes], Lanes]:
    def align(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
        pair = a.astype(U64) << U64(32) | b.astype(U64)
        return (pair >> (c & U32(32 // unit - 1)).astype(U64) * U64(unit)).astype(U32)

    return align


def _turns(function: Callable[[Lanes], Lanes]) -> Callable[[Lanes], Lanes]:
    """Sine and cosine take turns, not radians; beyond 256 turns the hardware gives the value at 0."""
    return lambda a: function(np.where(np.abs(a) <= 256, a, 0).astype(F64) * (2 * np.pi)).astype(F32)


def _ldexp(a: Lanes, exponent: Lanes) -> Lanes:
    return np.ldexp(a.astype(F64), exponent.astype(I32)).astype(a.dtype)


OPERATIONS: dict[str, Operation] = {}


def _define(names: str, result: str, sources: str, function: Callable[..., Lanes]) -> None:
    for name in names.split():
        OPERATIONS[name] = Operation(result, tuple(sources.split()), function)


def _define_moves_and_logic() -> None:
    copies = "v_mov_b32 v_accvgpr_read_b32 v_accvgpr_write_b32 v_accvgpr_mov_b32"
    _define(copies, "b32", "b32", lambda a: a)
    _define("v_mov_b64", "b64", "b64", lambda a: a)
    _define("v_not_b32", "b32", "b32", lambda a: ~a)
    _define("v_and_b32", "b32", "b32 b32", lambda a, b: a & b)
    _define("v_or_b32", "b32", "b32 b32", lambda a, b: a | b)
    _define("v_xor_b32", "b32", "b32 b32", lambda a, b: a ^ b)
    _define("v_xnor_b32", "b32", "b32 b32", lambda a, b: ~(a ^ b))
    _define("v_or3_b32", "b32", "b32 b32 b32", lambda a, b, c: a | b | c)
    _define("v_and_or_b32", "b32", "b32 b32 b32", lambda a, b, c: a & b | c)
    _define("v_bfi_b32", "b32", "b32 b32 b32", lambda a, b, c: a & b | ~a & c)
    _define("v_bfe_u32", "u32", "u32 u32 u32", _extract_unsigned)
    _define("v_bfe_i32", "i32", "i32 u32 u32", _extract_signed)
    mask = lambda a, b: (U32(1) << _shift(a, U32, 32)) - U32(1) << _shift(b, U32, 32)  # noqa: E731
    _define("v_bfm_b32", "b32", "b32 b32", mask)
    _define("v_bfrev_b32", "b32", "b32", _reverse_bits)
    _define("v_ffbh_u32", "u32", "u32", _find_high)
    _define("v_ffbl_b32", "u32", "b32", _find_low)
    _define("v_bcnt_u32_b32", "u32", "b32 u32", lambda a, b: np.bitwise_count(a).astype(U32) + b)
    _define("v_perm_b32", "b32", "b32 b32 b32", _permute_bytes)
    _define("v_alignbit_b32", "b32", "b32 b32 b32", _align(1))
    _define("v_alignbyte_b32", "b32", "b32 b32 b32", _align(8))
    for bits in (16, 32, 64):
        amount = "u16" if bits == 16 else "u32"
        _define(f"v_lshlrev_b{bits}", f"u{bits}", f"{amount} u{bits}", _shift_left)
        _define(f"v_lshrrev_b{bits}", f"u{bits}", f"{amount} u{bits}", _shift_right)
        _define(f"v_ashrrev_i{bits}", f"i{bits}", f"{amount} i{bits}", _shift_right)
    _define("v_xor3_b32", "b32", "b32 b32 b32", lambda a, b, c: a ^ b ^ c)
    _define("v_and_b16", "b16", "b16 b16", lambda a, b: a & b)
    _define("v_or_b16", "b16", "b16 b16", lambda a, b: a | b)
    _define("v_xor_b16", "b16", "b16 b16", lambda a, b: a ^ b)
    _define("v_mov_b16", "b16", "b16", lambda a: a)
    _define("v_lshl_or_b32", "b32", "b32 b32 b32", lambda a, b, c: a << _shift(b, U32, 32) | c)


def _define_integer_arithmetic() -> None:
    for name in ("u16", "u32"):
        _define(f"v_add_{name}", name, f"{name} {name}", lambda a, b: a + b)
        _define(f"v_sub_{name}", name, f"{name} {name}", lambda a, b: a - b)
        _define(f"v_subrev_{name}", name, f"{name} {name}", lambda a, b: b - a)
        _define(f"v_mul_lo_{name}", name, f"{name} {name}", lambda a, b: a * b)
    _define("v_add_i32", "i32", "i32 i32", lambda a, b: a + b)
    _define("v_sub_i32", "i32", "i32 i32", lambda a, b: a - b)
    _define("v_mul_hi_u32", "u32", "u32 u32", _multiply_high(U64, U32))
    _define("v_mul_hi_i32", "i32", "i32 i32", _multiply_high(I64, I32))
    for name in ("u32", "i32"):
        _define(f"v_mul_{name}_{name[0]}24", name, f"{name} {name}", lambda a, b: _low24(a) * _low24(b))
        madd = lambda a, b, c: _low24(a) * _low24(b) + c  # noqa: E731
        _define(f"v_mad_{name}_{name[0]}24", name, f"{name} {name} {name}", madd)
    _define("v_add3_u32", "u32", "u32 u32 u32", lambda a, b, c: a + b + c)
    _define("v_xad_u32", "u32", "u32 u32 u32", lambda a, b, c: (a ^ b) + c)
    _define("v_lshl_add_u32", "u32", "u32 u32 u32", lambda a, b, c: (a << _shift(b, U32, 32)) + c)
    _define("v_add_lshl_u32", "u32", "u32 u32 u32", lambda a, b, c: a + b << _shift(c, U32, 32))
    _define("v_lshl_add_u64", "u64", "u64 u32 u64", lambda a, b, c: (a << _shift(b, U64, 8)) + c)
    for name in ("u32", "i32", "u16", "i16"):
        _define_extrema(name, np.maximum, np.minimum)


def _define_extrema(name: str, largest: Callable[..., Lanes], smallest: Callable[..., Lanes]) -> None:
    two, three = f"{name} {name}", f"{name} {name} {name}"
    _define(f"v_max_{name}", name, two, largest)
    _define(f"v_min_{name}", name, two, smallest)
    if name != "f64":
        _define(f"v_max3_{name}", name, three, lambda a, b, c: largest(largest(a, b), c))
        _define(f"v_min3_{name}", name, three, lambda a, b, c: smallest(smallest(a, b), c))
        median = lambda a, b, c: largest(smallest(a, b), smallest(largest(a, b), c))  # noqa: E731
        _define(f"v_med3_{name}", name, three, median)
        _define(f"v_minmax_{name}", name, three, lambda a, b, c: largest(smallest(a, b), c))
        _define(f"v_maxmin_{name}", name, three, lambda a, b, c: smallest(largest(a, b), c))


def _define_float_arithmetic() -> None:
    for name in ("f16", "f32", "f64"):
        two = f"{name} {name}"
        _define(f"v_add_{name}", name, two, lambda a, b: a + b)
        _define(f"v_sub_{name}", name, two, lambda a, b: a - b)
        _define(f"v_subrev_{name}", name, two, lambda a, b: b - a)
        _define(f"v_mul_{name}", name, two, lambda a, b: a * b)
        _define_extrema(name, np.fmax, np.fmin)
        _define(f"v_fma_{name}", name, f"{name} {name} {name}", FMA[name])
        for op, rounding in {"trunc": np.trunc, "rndne": np.rint, "floor": np.floor, "ceil": np.ceil}.items():
            _define(f"v_{op}_{name}", name, name, rounding)
        below_one = np.nextafter(DTYPES[name](1), DTYPES[name](0))
        _define(f"v_fract_{name}", name, name, lambda a, top=below_one: np.minimum(a - np.floor(a), top))
        functions: dict[str, Callable[[Lanes], Lanes]] = {
            "sqrt": np.sqrt,
            "rcp": lambda a: 1.0 / a,
            "rsq": lambda a: 1.0 / np.sqrt(a),
            "exp": np.exp2,
            "log": np.log2,
        }
        for op, function in functions.items():
            _define(f"v_{op}_{name}", name, name, _transcendental(function, name))
        _define(f"v_frexp_mant_{name}", name, name, lambda a: np.frexp(a)[0])
    # These have NaN where an operand is NaN.
    _define("v_maximum3_f32", "f32", "f32 f32 f32", lambda a, b, c: np.maximum(np.maximum(a, b), c))
    _define("v_minimum3_f32", "f32", "f32 f32 f32", lambda a, b, c: np.minimum(np.minimum(a, b), c))
    _define("v_rcp_iflag_f32", "f32", "f32", OPERATIONS["v_rcp_f32"].function)
    _define("v_fmaak_f32 v_fmamk_f32", "f32", "f32 f32 f32", fma_f32)
    _define("v_mad_f32 v_madak_f32 v_madmk_f32", "f32", "f32 f32 f32", mad_f32)
    _define("v_ldexp_f64", "f64", "f64 i32", _ldexp)
    _define("v_ldexp_f32", "f32", "f32 i32", _ldexp)
    _define("v_ldexp_f16", "f16", "f16 i16", _ldexp)
    _define("v_sin_f32", "f32", "f32", _turns(np.sin))
    _define("v_cos_f32", "f32", "f32", _turns(np.cos))
    exponent = lambda a: np.where(np.isfinite(a), np.frexp(a)[1], 0).astype(I32)  # noqa: E731
    _define("v_frexp_exp_i32_f32", "i32", "f32", exponent)
    _define("v_frexp_exp_i32_f64", "i32", "f64", exponent)


def _define_conversions() -> None:
    for result, source in (
        *(("f32", source) for source in ("f16", "i32", "u32", "f64")),
        *(("f16", source) for source in ("f32", "i16", "u16")),
        *(("f64", source) for source in ("f32", "i32", "u32")),
    ):
        dtype = DTYPES[result]
        _define(f"v_cvt_{result}_{source}", result, source, lambda a, dtype=dtype: a.astype(dtype))
    for result, source in (
        ("i32", "f32"),
        ("u32", "f32"),
        ("i32", "f64"),
        ("u32", "f64"),
        ("i16", "f16"),
        ("u16", "f16"),
    ):
        _define(f"v_cvt_{result}_{source}", result, source, _to_integer(DTYPES[result]))
    for byte in range(4):
        extract = lambda a, byte=byte: (a >> U32(8 * byte) & U32(255)).astype(F32)  # noqa: E731
        _define(f"v_cvt_f32_ubyte{byte}", "f32", "u32", extract)
    pack = lambda a, b: a.view(U16).astype(U32) | b.view(U16).astype(U32) << U32(16)  # noqa: E731
    _define("v_pack_b32_f16", "b32", "f16 f16", pack)
    pack_truncated = lambda a, b: pack(round_towards_zero_f16(a), round_towards_zero_f16(b))  # noqa: E731
    _define("v_cvt_pkrtz_f16_f32", "b32", "f32 f32", pack_truncated)
    _define("v_cvt_pk_f16_f32", "b32", "f32 f32", lambda a, b: pack(a.astype(F16), b.astype(F16)))
    pack_bf16 = lambda a, b: to_bf16(a) | to_bf16(b) << U32(16)  # noqa: E731
    _define("v_cvt_pk_bf16_f32", "b32", "f32 f32", pack_bf16)
    _define("v_cvt_f32_fp8", "f32", "u32", from_e4m3fnuz)
    _define("v_cvt_pk_f32_fp8", "u64", "u16", _pair_from_e4m3fnuz)
    _define("v_cvt_pk_fp8_f32", "u16", "f32 f32", lambda a, b: to_e4m3fnuz(a) | to_e4m3fnuz(b) << U16(8))


# Integer instructions with the clamp modifier, which limits the exact result to the type's range.
SATURATING = {
    f"v_{op}_{name}": _saturating(function, DTYPES[name])
    for name in ("u16", "u32", "i32")
    for op, function in {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "subrev": lambda a, b: b - a,
    }.items()
}

_define_moves_and_logic()
_define_integer_arithmetic()
_define_float_arithmetic()
_define_conversions()
