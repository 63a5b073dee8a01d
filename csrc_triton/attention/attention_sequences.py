"""Sequences packed one behind the other: BOUNDS holds where each starts, and then where the last one ends.

Tiles are numbered without a look at BOUNDS, which are on the device: sequence s has those from BOUNDS[s] // BLOCK + s
on, as many as it needs or one more. Rows behind the last sequence are one more sequence, which sees nothing. Whatever
BOUNDS hold, rows are within the tensors.
"""

import triton
import triton.language as tl

# What the declarations share.
DTYPES = {"dtype": ["bf16", "fp16"]}
BOUNDS = {"BOUNDS_Q": "*i32", "BOUNDS_K": "*i32"}
STRIDES = {"q_head": "i32", "q_row": "i32", "k_head": "i32", "k_row": "i32", "v_head": "i32", "v_row": "i32"}
SIZES = {"sequences": "i32", "tokens_q": "i32", "tokens_k": "i32", "right": "i32"}
LONGEST = {"longest_q": "i32", "longest_k": "i32"}
UNIT = tl.constexpr(128)  # rows; blocks of them divide it


@triton.jit
def start_of(BOUNDS, s, tokens):
    return tl.minimum(tl.maximum(tl.load(BOUNDS + s), 0), tokens)


@triton.jit
def span(BOUNDS, s, sequences, tokens):
    """(start, length) of sequence s; the one behind the last has no length."""
    start = start_of(BOUNDS, s, tokens)
    return start, tl.maximum(start_of(BOUNDS, tl.minimum(s + 1, sequences), tokens) - start, 0)


@triton.jit
def find(BOUNDS, tile, sequences, tokens, BLOCK: tl.constexpr):
    """(sequence, its start, its length, the tile's first row in it): a row outside of the length is no tile's."""
    low = tile * 0
    high = low + sequences
    while low < high:
        middle = (low + high + 1) // 2
        starts = start_of(BOUNDS, middle, tokens) // BLOCK + middle <= tile
        low = tl.where(starts, middle, low)
        high = tl.where(starts, high, middle - 1)
    start, length = span(BOUNDS, low, sequences, tokens)
    length = tl.where(low == sequences, tokens - start, length)
    return low, start, length, (tile - start // BLOCK - low) * BLOCK


@triton.jit
def padded_start(start, sequence):
    """Where a sequence's rows start among padded ones: those of its tiles of UNIT rows, as ``find`` gives them."""
    return (start // UNIT + sequence) * UNIT


@triton.jit
def report(FLAG, BOUNDS, s, tokens, longest):
    """Write to FLAG what is wrong with sequence s: where the first one starts if that is not 0, where s ends if that is
    past the tokens, how long it is if that is negative or more than ``longest``. None of it can be 0."""
    start = tl.load(BOUNDS + s).to(tl.int64)
    end = tl.load(BOUNDS + s + 1).to(tl.int64)
    length = end - start
    found = tl.where((length < 0) | (length > longest), length, 0)
    found = tl.where(end > tokens, end, found)
    found = tl.where((s == 0) & (start != 0), start, found)
    tl.store(FLAG, found, mask=found != 0)
