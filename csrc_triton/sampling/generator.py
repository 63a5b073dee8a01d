"""Random numbers that depend on a seed, a position and a column alone, and the arithmetic of sampling, bit by bit.

The generator is Philox4x32-10. Its key is the seed; its counter is (column // 4, low and high half of the position,
stream), and its four words are those of four columns that follow each other. Every floating-point operation here is
IEEE's, rounded to nearest: a product that is added to something is an explicit fused multiply-add, so that no compiler
has a choice. All GPUs, Triton's interpreter and the plain-torch reference get the same bits.

Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011).
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to an integer
# The streams of one seed and position: the third word of the counter's rest.
SAMPLE, ACCEPT, RECOVER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def high_and_low(a, FACTOR: tl.constexpr):
    """The halves of a product of 64 bits."""
    product = a.to(tl.uint64) * FACTOR
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def words_of(quarters, seed, position, STREAM: tl.constexpr):
    """Four 32-bit words for the columns 4 * quarters to 4 * quarters + 3. seed, position: int64. NVIDIA GPUs make both
    halves of a product in one instruction; Triton's philox takes two."""
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = tl.zeros_like(quarters).to(tl.uint32)
    c0 = quarters.to(tl.uint32)
    c1 = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    c2 = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c3 = zero + STREAM
    for _ in tl.static_range(10):
        high_0, low_0 = high_and_low(c0, 0xD2511F53)
        high_2, low_2 = high_and_low(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high_2 ^ c1 ^ k0, low_2, high_0 ^ c3 ^ k1, low_0
        k0 = (k0 + 0x9E3779B9).to(tl.uint32)
        k1 = (k1 + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def log2_of(x):
    """The base-2 logarithm of a normal positive number; relative to log2(1 + t), the error is 1.3e-6 at most."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) - 127).to(tl.float32)
    t = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    q = tl.fma(t, 0.020401187241077423, -0.09579756110906601)
    q = tl.fma(t, q, 0.2152845561504364)
    q = tl.fma(t, q, -0.339089035987854)
    q = tl.fma(t, q, 0.4776683747768402)
    q = tl.fma(t, q, -0.7211594581604004)
    q = tl.fma(t, q, 1.4426932334899902)
    return tl.fma(t, q, exponent)


@triton.jit
def exponential(words):
    """-log2(1 - v) with v = (word + 1/2) / 2^32: exponentially distributed, from 3.3e-10 to 33. The relative error is
    1e-6 at most, down to the smallest."""
    half = words < 0x80000000
    v = words.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10  # the product is exact
    w = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 1 - v
    bits = w.to(tl.int32, bitcast=True)
    exponent = tl.where(half, 0.0, (126 - (bits >> 23)).to(tl.float32))
    m = ((bits & 0x7FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)  # in [1/2, 1)
    v = tl.where(half, v, 1.0 - m)
    p = tl.fma(v, 1.4291136264801025, -0.9203357696533203)
    p = tl.fma(v, p, 0.7541677951812744)
    p = tl.fma(v, p, 0.27055028080940247)
    p = tl.fma(v, p, 0.48894548416137695)
    p = tl.fma(v, p, 0.7210831046104431)
    p = tl.fma(v, p, 1.442696452140808)
    return tl.fma(v, p, exponent)


@triton.jit
def uniform(words):
    """From 0 to 1 - 2^-24, in steps of 2^-24."""
    return (words >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def mass_of(x, greatest, scale):
    """2^((x - greatest) * scale) in units of 2^-30, rounded down: the greatest has 2^30, what is below 2^-30 has 0."""
    d = tl.minimum(tl.where(x == greatest, 0.0, (greatest - x) * scale), 31.0)
    whole = (d + ROUND) - ROUND
    f = whole - d
    p = tl.fma(f, 0.0013400436146184802, 0.009666373021900654)
    p = tl.fma(f, p, 0.05550333112478256)
    p = tl.fma(f, p, 0.2402234822511673)
    p = tl.fma(f, p, 0.6931471824645996)
    p = tl.fma(f, p, 1.0)
    return (p * 1073741824.0).to(tl.int32) >> whole.to(tl.int32)


@triton.jit
def ordered(x):
    """An int32 that is greater where x is; x is not -0."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def in_order(key):
    """The number of which ``ordered`` made ``key``."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def packed(score, cols):
    """A score and its column as an int64 that is greater where the score is or, among equals, where the column is
    lower."""
    return (ordered(score + 0.0).to(tl.int64) << 32) | (0x7FFFFFFF - cols).to(tl.int64)


@triton.jit
def column_of(word):
    """The column of ``packed``."""
    return 0x7FFFFFFF - (word & 0x7FFFFFFF)
