"""Cross entropy's losses and their gradient over the logits, in one launch."""

import triton
import triton.language as tl

from csrc_triton.common.bf16x2 import repack
from csrc_triton.losses.cross_entropy_rows import (
    around,
    columns,
    first_statistics,
    gradient_of,
    logarithms,
    row_factors,
    row_scales,
    row_statistics,
    split,
    statistics,
    store_statistics,
    target_of,
    weight_of,
)
from csrc_triton.softmax.softmax_statistics import LOG2_E, fold, include


@triton.jit
def both_in_tile(
    X, LOSS, LSE, PARTS, FLAG, T, W, GRAD, TOTALS, x_stride, g_stride, ignore_index, n_rows, n_cols, words, z_scale,
    flags, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS whole rows a program, held in registers; n_cols <= BLOCK."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = rows < n_rows
    t = target_of(T, rows, here, words)
    ignored = t == ignore_index
    known = (t >= 0) & (t < n_cols) & (ignored == 0)
    cols = tl.arange(0, BLOCK)
    mask = here[:, None] & (cols < n_cols)[None, :]
    at = X + rows[:, None] * x_stride + cols[None, :]
    x = tl.load(at, mask=mask & (ignored == 0)[:, None], other=-float("inf")).to(tl.float32)
    x_t = tl.load(X + rows * x_stride + t, mask=here & known, other=0.0).to(tl.float32)
    peak, total = row_statistics(x)
    lse, nll, rest = logarithms(peak, total, x_t)
    w = weight_of(W, t, here & known, flags)
    store_statistics(
        LOSS, LSE, PARTS, FLAG, rows, here, n_rows, t, ignored, known, lse, nll, rest, x_t, w, x_t, 0.0,
        n_cols, 0.0, z_scale, flags,
    )  # fmt: skip
    scale, z = row_scales(GRAD, TOTALS, rows, here, g_stride, flags)
    a, b, c = row_factors(scale, z, ignored, known, lse, x_t, w, 0.0, n_cols, 0.0, z_scale, flags)
    y = tl.exp2(tl.fma(x, LOG2_E, -peak[:, None])) * (a / total)[:, None] - b[:, None]
    y = tl.where(cols[None, :] == t[:, None], y - c[:, None], y)
    y = tl.where((ignored == 0)[:, None], y, 0.0)  # whose total is 0
    tl.debug_barrier()  # x_t was read by other threads than those that write there
    tl.store(at, y.to(X.dtype.element_ty), mask=mask)


@triton.jit
def both_in_row(
    X, LOSS, LSE, PARTS, FLAG, T, W, GRAD, TOTALS, x_stride, g_stride, ignore_index, n_rows, n_cols, words, z_scale,
    flags, BLOCK: tl.constexpr, KEEP: tl.constexpr, SPLIT: tl.constexpr, HELD: tl.constexpr, REPACK: tl.constexpr,
    PATCH: tl.constexpr,
):  # fmt: skip
    """One row of any length a program. With KEEP its first BLOCK columns stay in registers; the others are read twice,
    the second time backwards: what was read last is the likeliest to be in a cache still. The caches are asked to hold
    the last HELD columns and to forget those before, so that the rows in flight do not push each other out; 0 is all.
    REPACK makes the kept columns be unpacked twice instead of living on in fp32; PATCH writes the target's column last,
    by itself, instead of looking for it in every block."""
    dtype: tl.constexpr = X.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    here = row < n_rows
    t = target_of(T, row, here, words)
    ignored = t == ignore_index
    known = (t >= 0) & (t < n_cols) & (ignored == 0)
    R = X + row * x_stride
    x_t = tl.load(R + t, mask=known, other=0.0).to(tl.float32)
    w = weight_of(W, t, known, flags)
    scale, z = row_scales(GRAD, TOTALS, row, here, g_stride, flags)
    FIRST: tl.constexpr = BLOCK if KEEP else 0
    BODY, before, length = split(R, n_cols, SPLIT)
    cols = tl.arange(0, BLOCK)
    if SPLIT:
        edges, mask = around(R, before, length, n_cols, 2048 // dtype.primitive_bitwidth)
    lse, nll, rest = 0.0, 0.0, 0.0
    if ignored == 0:
        peak, total = first_statistics(R, before, length, n_cols, LOG2_E, BLOCK, SPLIT)
        held = FIRST
        if HELD:
            held = tl.maximum(tl.cdiv(length - HELD - FIRST, BLOCK) * BLOCK, 0) + FIRST
            peak, total = statistics(BODY, peak, total, FIRST, held, LOG2_E, BLOCK, 1, "evict_first")
        peak, total = statistics(BODY, peak, total, held, length, LOG2_E, BLOCK, 1, "evict_last")
        if KEEP:
            kept_cols = columns(BLOCK, dtype)
            kept = tl.load(
                BODY + kept_cols, mask=kept_cols < length, other=-float("inf"), eviction_policy="evict_first"
            )
            peak, total = include(peak, total, kept.to(tl.float32), LOG2_E, 1)
        if SPLIT:
            edge = tl.load(R + edges, mask=mask, other=-float("inf")).to(tl.float32)
        # This exchange between all threads also keeps any from writing what another has not read yet.
        peak, total = fold(peak, total)
        lse, nll, rest = logarithms(peak, total, x_t)
        a, b, c = row_factors(scale, z, ignored, known, lse, x_t, w, 0.0, n_cols, 0.0, z_scale, flags)
        a /= total
        own = tl.where(known, t, -1)
        mine = -1 if PATCH else own - before
        blocks = tl.cdiv(tl.maximum(length - FIRST, 0), BLOCK)
        for i in range(blocks):
            at = FIRST + (blocks - 1 - i) * BLOCK
            x = tl.load(
                BODY + (at + cols), mask=at + cols < length, other=0.0, eviction_policy="evict_first"
            ).to(tl.float32)
            y = gradient_of(x, at + cols, at, at + BLOCK, peak, a, b, c, mine, PATCH).to(dtype)
            tl.store(BODY + (at + cols), y, mask=at + cols < length, eviction_policy="evict_first")
        if KEEP:
            if REPACK:
                kept = repack(kept)
            of_kept = gradient_of(kept.to(tl.float32), kept_cols, 0, BLOCK, peak, a, b, c, mine, PATCH)
            tl.store(
                BODY + kept_cols, of_kept.to(dtype), mask=kept_cols < length, eviction_policy="evict_first"
            )
        if SPLIT:
            of_edge = gradient_of(edge, edges, 0, n_cols, peak, a, b, c, own, PATCH)
            tl.store(R + edges, of_edge.to(dtype), mask=mask)
        if PATCH:
            tl.debug_barrier()
            tl.store(R + own, (tl.exp2(tl.fma(x_t, LOG2_E, -peak)) * a - b - c).to(dtype), mask=known)
    else:
        zeros = tl.zeros([BLOCK], dtype)
        for at in range(0, length, BLOCK):
            tl.store(BODY + (at + cols), zeros, mask=at + cols < length, eviction_policy="evict_first")
        if SPLIT:
            tl.store(R + edges, tl.zeros_like(edges).to(dtype), mask=mask)
    store_statistics(
        LOSS, LSE, PARTS, FLAG, row, here, n_rows, t, ignored, known, lse, nll, rest, x_t, w, x_t, 0.0,
        n_cols, 0.0, z_scale, flags,
    )  # fmt: skip
