"""The second read of a long row in RMSNorm's forward; see ``rmsnorm.forward_long``."""

import triton
import triton.language as tl

from csrc_triton.common.bf16x2 import repack


@triton.jit
def scale_block(
    Y, x, W, cols, n_cols, rstd, offset, has_weight, round_first, dtype: tl.constexpr,
    BYPASS: tl.constexpr, EXACT: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """One block of a row, x in fp32: normalise, scale, store. MODE is "llama" (a weight, no offset, rounded first),
    "gemma" (a weight, not rounded first) or "any": what is known here costs nothing per element."""
    if EXACT:
        mask = cols >= 0
    else:
        mask = cols < n_cols
    w_mask = mask
    if MODE == "any":
        w_mask = mask & (has_weight != 0)
    if EXACT and MODE != "any":
        w = tl.load(W + cols, cache_modifier=".cg" if BYPASS else "")
    else:
        w = tl.load(W + cols, mask=w_mask, other=0.0, cache_modifier=".cg" if BYPASS else "")
    w = w.to(tl.float32)
    if MODE != "llama":
        w += offset
    y = x * rstd
    if MODE == "llama":
        y = y.to(dtype).to(tl.float32)
    elif (
        MODE == "any"
    ):  # a select, not a branch: the loads of the next block must be free to move up past this
        y = tl.where(round_first != 0, y.to(dtype).to(tl.float32), y)
    if EXACT:
        tl.store(Y + cols, (y * w).to(dtype), eviction_policy="evict_first")
    else:
        tl.store(Y + cols, (y * w).to(dtype), mask=mask, eviction_policy="evict_first")


@triton.jit
def load_block(X, cols, n_cols, EVICT: tl.constexpr, EXACT: tl.constexpr):
    if EXACT:
        return tl.load(X + cols, eviction_policy=EVICT)
    else:
        return tl.load(X + cols, mask=cols < n_cols, other=0.0, eviction_policy=EVICT)


@triton.jit
def scale_row(
    Y, X, W, kept, blocks, n_cols, rstd, offset, has_weight, round_first, dtype: tl.constexpr,
    BLOCK: tl.constexpr, KEEP: tl.constexpr, REVERSE: tl.constexpr, REPACK: tl.constexpr, BYPASS: tl.constexpr,
    EXACT: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """The second read of a row, then the KEEP columns that were kept: unpacked last, their registers are few till
    then."""
    for i in range(blocks):
        if REVERSE:  # what was read last is the likeliest to be in the cache still
            cols = KEEP + (blocks - 1 - i) * BLOCK + tl.arange(0, BLOCK)
        else:
            cols = KEEP + i * BLOCK + tl.arange(0, BLOCK)
        x = load_block(X, cols, n_cols, "evict_first", EXACT).to(tl.float32)
        scale_block(Y, x, W, cols, n_cols, rstd, offset, has_weight, round_first, dtype, BYPASS, EXACT, MODE)
    if KEEP > 0:
        cols = tl.arange(0, KEEP)
        if REPACK:
            kept = repack(kept)
        kept = kept.to(tl.float32)
        scale_block(
            Y, kept, W, cols, n_cols, rstd, offset, has_weight, round_first, dtype, BYPASS, EXACT, MODE
        )
