"""Where a token's keys and values lie in a cache, and how they are stored there, in its dtype or as fp8 codes.

A cache is (pages, page size, heads, columns), a slot the number of a place in it: page * page size + offset. A negative
slot is no place: nothing is written. Neither is at one past the last, whose number goes to the op's device error flag.

A code is value / scale, saturated; value = code * scale. Scales are given, for the whole cache or for each head, or
they are written, one for each token and head: its greatest magnitude by the dtype's largest value (``codes``).
"""

import triton
import triton.language as tl
from triton.language.core import _aggregate as aggregate

from csrc_triton.quantization.codes import divide, encode, floor_of, largest_of, reciprocal_of, scale_of

# What declarations share; key and value cache lie alike in memory, and so do their scales.
CACHES = {"KEY_CACHE": "*cache", "VALUE_CACHE": "*cache"}
SCALES = {"K_SCALE": "*fp32", "V_SCALE": "*fp32"}
STRIDES = {"cache_page": "i64", "cache_row": "i64", "cache_head": "i64"}
PLACES = {
    "scale_page": "i64", "scale_row": "i64", "scale_head": "i64", "slot_words": "i32", "slots": "i32",
    "page_size": "i32", "dynamic": "i32",
}  # fmt: skip


@aggregate
class Layout:
    """How a cache and its scales lie in memory, in elements."""

    page: tl.tensor
    row: tl.tensor
    head: tl.tensor
    scale_page: tl.tensor
    scale_row: tl.tensor
    scale_head: tl.tensor
    dynamic: tl.tensor  # whether scales are written

    @triton.constexpr_function
    def __init__(self, page, row, head, scale_page, scale_row, scale_head, dynamic):
        self.page, self.row, self.head = page, row, head
        self.scale_page, self.scale_row, self.scale_head = scale_page, scale_row, scale_head
        self.dynamic = dynamic


@aggregate
class Place:
    """Of each of a program's rows."""

    page: tl.tensor
    row: tl.tensor
    known: tl.tensor  # whether there is such a place

    @triton.constexpr_function
    def __init__(self, page, row, known):
        self.page, self.row, self.known = page, row, known


@triton.jit
def divide_by(a, b):
    """a // b of int32 that are not negative: unsigned division takes half as long."""
    return (a.to(tl.uint32, bitcast=True) // b.to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True)


@triton.jit
def slots_of(SLOTS, token, inside, slot_words):
    """The lower and upper 32 bits of the slots of ``token``; ``slot_words``: 32-bit words a slot."""
    at = token.to(tl.int64) * slot_words
    low = tl.load(SLOTS + at, mask=inside, other=-1)
    high = tl.load(SLOTS + at + 1, mask=inside & (slot_words == 2), other=0)
    return low, tl.where(slot_words == 2, high, low >> 31)


@triton.jit
def place_of(low, high, FLAG, inside, slots, page_size):
    """The places of slots. What is loaded before does not wait for them, what is loaded after does: a number out of
    range is stored."""
    known = inside & (high == 0) & (low >= 0) & (low < slots)
    wrong = inside & (high >= 0) & ((high != 0) | (low < 0) | (low >= slots))
    given = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    tl.store(FLAG + low * 0, given, mask=wrong)
    slot = tl.where(known, low, 0)
    page = divide_by(slot, page_size)
    return Place(page, slot - page * page_size, known)


@triton.jit
def row_in(place, head, page_stride, row_stride, head_stride):
    """Elements from a cache's start to rows of heads."""
    at = place.page.to(tl.int64) * page_stride + place.row.to(tl.int64) * row_stride
    return at + head.to(tl.int64) * head_stride


@triton.jit
def given_scale(SCALE, place, head, mask, to):
    """The scales of rows of heads; null is 1."""
    at = SCALE + row_in(place, head, to.scale_page, to.scale_row, to.scale_head)
    return tl.load(at, mask=mask & (SCALE.to(tl.int64) != 0), other=1.0)


@triton.jit
def found_scale(SCALE, place, head, mask, absmax, to, dtype: tl.constexpr):
    """The scales of rows whose greatest magnitudes are ``absmax``, which are written, too."""
    at = SCALE + row_in(place, head, to.scale_page, to.scale_row, to.scale_head)
    s = scale_of(absmax, float("inf"), 0, floor_of(dtype, 0), largest_of(dtype))
    tl.store(at, s, mask=mask)
    return s


@triton.jit
def code_of(x, s, dtype: tl.constexpr):
    """Codes of rows with a scale each, which is a number or infinite."""
    minus, finite = reciprocal_of(s)
    return encode(divide(x, minus[:, None], finite[:, None]), dtype)


@triton.jit
def store_row(CACHE, SCALE, x, place, head, cols, mask, to):
    """Store whole rows x of heads, of ``mask``, and their scales."""
    dtype: tl.constexpr = CACHE.dtype.element_ty
    at = CACHE + row_in(place, head, to.page, to.row, to.head)[:, None] + cols[None, :]
    if dtype.is_fp8():
        x = x.to(tl.float32)
        if to.dynamic != 0:
            absmax = tl.max(tl.where(mask, tl.abs(x), 0.0), 1)
            s = found_scale(SCALE, place, head, place.known, absmax, to, dtype)
        else:
            s = given_scale(SCALE, place, head, place.known, to)
        tl.store(at, code_of(x, s, dtype), mask=mask)
    else:
        tl.store(at, x, mask=mask)
