"""Cross entropy's losses, and their gradient over the logits, in one launch."""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_triton.common.bf16x2 import even, odd, pack, repack
from csrc_triton.common.pipeline import RowFunctions, RowSizes, process_rows
from csrc_triton.losses.cross_entropy_rows import (
    DIVIDED,
    GIVEN,
    RowLoss,
    RowResults,
    RowSums,
    Target,
    accumulate_columns,
    edges,
    gradient_of,
    init_stats,
    join_words,
    load_target,
    row_body,
    row_factors,
    row_scales,
    row_stats,
    row_sums,
    store_results,
    target_of,
    weight_of,
)
from csrc_triton.softmax.online_softmax import LOG2_E, LOWEST, accumulate, reduce, vectors
from csrc_triton.softmax.softmax_forward import minus_infinity


@triton.jit
def in_place_tile(
    X, LOSS, LSE, PARTS, FLAG, T, W, GRAD, TOTALS, x_stride, g_stride, ignore_index, n_rows, n_cols, words, z_scale,
    flags, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS whole rows a program, held in registers; n_cols <= BLOCK."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = rows < n_rows
    target = target_of(T, rows, here, words, ignore_index, n_cols)
    t, ignored = target.t, target.ignored
    cols = tl.arange(0, BLOCK)
    mask = here[:, None] & (cols < n_cols)[None, :]
    at = X + rows[:, None] * x_stride + cols[None, :]
    x = tl.load(at, mask=mask & (ignored == 0)[:, None], other=-float("inf")).to(tl.float32)
    x_t = tl.load(X + rows * x_stride + t, mask=here & target.known, other=0.0).to(tl.float32)
    peak, total = row_stats(x)
    sums = row_sums(peak, total, x_t)
    w = weight_of(W, t, here & target.known, flags)
    out, loss = RowResults(LOSS, LSE, PARTS, FLAG, n_rows), RowLoss(n_cols, 0.0, z_scale, flags)
    store_results(out, rows, here, target, sums, x_t, w, x_t, 0.0, loss)
    scale, z = row_scales(GRAD, TOTALS, rows, here, g_stride, flags)
    a, b, c = row_factors(scale, z, target, sums.lse, x_t, w, 0.0, loss)
    y = tl.exp2(tl.fma(x, LOG2_E, -peak[:, None])) * (a / total)[:, None] - b[:, None]
    y = tl.where(cols[None, :] == t[:, None], y - c[:, None], y)
    y = tl.where((ignored == 0)[:, None], y, 0.0)  # whose total is 0
    tl.debug_barrier()  # x_t was read by other threads than those that write there
    tl.store(at, y.to(X.dtype.element_ty), mask=mask)


@triton.jit
def in_place_long(
    X, LOSS, LSE, PARTS, FLAG, T, W, GRAD, TOTALS, x_stride, g_stride, ignore_index, n_rows, n_cols, words, z_scale,
    flags, BLOCK: tl.constexpr, IN_REGISTERS: tl.constexpr, UNALIGNED: tl.constexpr, CACHED: tl.constexpr,
    PATCH: tl.constexpr,
):  # fmt: skip
    """One row of any length a program. With IN_REGISTERS its first BLOCK columns stay in registers (16-bit elements,
    PTX only: see ``bf16x2.repack``); the others are read twice, the second time backwards, since what was read last is
    the likeliest to be still in a cache. The caches are asked to keep the last CACHED columns and to drop those before,
    so that the rows in flight do not evict each other; 0 is all. PATCH writes the column of the target last, by itself,
    instead of comparing columns in every block."""
    dtype: tl.constexpr = X.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    here = row < n_rows
    target = target_of(T, row, here, words, ignore_index, n_cols)
    R = X + row * x_stride
    x_t = tl.load(R + target.t, mask=target.known, other=0.0).to(tl.float32)
    w = weight_of(W, target.t, target.known, flags)
    scale, z = row_scales(GRAD, TOTALS, row, here, g_stride, flags)
    loss = RowLoss(n_cols, 0.0, z_scale, flags)
    FIRST: tl.constexpr = BLOCK if IN_REGISTERS else 0
    BODY, before, length = row_body(R, n_cols, UNALIGNED)
    cols = tl.arange(0, BLOCK)
    if UNALIGNED:
        edge_cols, edge_mask = edges(R, before, length, n_cols, 2048 // dtype.primitive_bitwidth)
    lse, nll, rest = 0.0, 0.0, 0.0
    if target.ignored == 0:
        peak, total = init_stats(R, before, length, n_cols, BLOCK, UNALIGNED)
        cached = FIRST
        if CACHED:
            cached = tl.maximum(tl.cdiv(length - CACHED - FIRST, BLOCK) * BLOCK, 0) + FIRST
            peak, total = accumulate_columns(BODY, peak, total, FIRST, cached, BLOCK, 1, "evict_first")
        peak, total = accumulate_columns(BODY, peak, total, cached, length, BLOCK, 1, "evict_last")
        if IN_REGISTERS:
            first_cols = vectors(BLOCK, dtype, False)
            first_mask = first_cols < length
            first = tl.load(
                BODY + first_cols, mask=first_mask, other=-float("inf"), eviction_policy="evict_first"
            )
            peak, total = accumulate(peak, total, first.to(tl.float32), LOG2_E, 1)
        if UNALIGNED:
            edge = tl.load(R + edge_cols, mask=edge_mask, other=-float("inf")).to(tl.float32)
        # This exchange between all threads also keeps any from writing what another has not read yet.
        peak, total = reduce(peak, total)
        lse, nll, rest = row_sums(peak, total, x_t)
        a, b, c = row_factors(scale, z, target, lse, x_t, w, 0.0, loss)
        a /= total
        own = tl.where(target.known, target.t, -1)
        own_in_body = -1 if PATCH else own - before
        blocks = tl.cdiv(tl.maximum(length - FIRST, 0), BLOCK)
        for i in range(blocks):
            at = FIRST + (blocks - 1 - i) * BLOCK
            x = tl.load(
                BODY + (at + cols), mask=at + cols < length, other=0.0, eviction_policy="evict_first"
            ).to(tl.float32)
            y = gradient_of(x, at + cols, at, at + BLOCK, peak, a, b, c, own_in_body, PATCH).to(dtype)
            tl.store(BODY + (at + cols), y, mask=at + cols < length, eviction_policy="evict_first")
        if IN_REGISTERS:
            first = repack(first)
            y = gradient_of(first.to(tl.float32), first_cols, 0, BLOCK, peak, a, b, c, own_in_body, PATCH)
            tl.store(BODY + first_cols, y.to(dtype), mask=first_mask, eviction_policy="evict_first")
        if UNALIGNED:
            y = gradient_of(edge, edge_cols, 0, n_cols, peak, a, b, c, own, PATCH)
            tl.store(R + edge_cols, y.to(dtype), mask=edge_mask)
        if PATCH:
            tl.debug_barrier()
            y = tl.exp2(tl.fma(x_t, LOG2_E, -peak)) * a - b - c
            tl.store(R + own, y.to(dtype), mask=target.known)
    else:
        zeros = tl.zeros([BLOCK], dtype)
        for at in range(0, length, BLOCK):
            tl.store(BODY + (at + cols), zeros, mask=at + cols < length, eviction_policy="evict_first")
        if UNALIGNED:
            tl.store(R + edge_cols, tl.zeros_like(edge_cols).to(dtype), mask=edge_mask)
    out, sums = RowResults(LOSS, LSE, PARTS, FLAG, n_rows), RowSums(lse, nll, rest)
    store_results(out, row, here, target, sums, x_t, w, x_t, 0.0, loss)


# The form ``pipeline`` (Gluon, Hopper). A row's scalars are loaded before the row ahead of it is written. A row whose
# target is ignored is not read: zeros stand in for it, and the factor of its gradient is 0.

IGNORED = gl.constexpr(-1)
WRONG = gl.constexpr(-2)


class Arguments(NamedTuple):
    """Those of the kernel, with the two numbers of TOTALS in place of their address."""

    X: gl.tensor
    x_stride: gl.tensor
    n_rows: gl.tensor
    n_cols: gl.tensor
    T: gl.tensor
    words: gl.tensor
    ignore_index: gl.tensor
    LOSS: gl.tensor
    LSE: gl.tensor
    PARTS: gl.tensor
    FLAG: gl.tensor
    W: gl.tensor
    GRAD: gl.tensor
    g_stride: gl.tensor
    weights: gl.tensor
    count: gl.tensor
    z_scale: gl.tensor
    flags: gl.tensor


@gluon.jit
def opaque(x):
    """Identity on a 64-bit number, opaque to the compiler, which otherwise keeps in registers what it can compute ahead
    of the loop over rows, or from one row to the next."""
    return gl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [x], dtype=gl.int64, is_pure=False, pack=1)


@gluon.jit
def load_scalars(row, args):
    """The target of a row, in words; that of the nearest row where there is none."""
    at = args.T + opaque(gl.minimum(gl.maximum(row, 0), args.n_rows - 1)) * args.words
    return gl.load(at), gl.load(at + (args.words - 1))


@gluon.jit
def is_read(scalars, args):
    return join_words(scalars[0], scalars[1], args.words) != args.ignore_index


@gluon.jit
def init(row, scalars, args, LINES: gl.constexpr, layout: gl.constexpr):
    """(greatest logit in units of log(2), sum of powers relative to it) of each line; of the row the column of its
    target, IGNORED, or WRONG where the target is no class; its target's logit and weight, and what GRAD holds for it.
    """
    lines: gl.constexpr = gl.SliceLayout(1, layout)
    row = opaque(row)
    here = row < args.n_rows
    t = join_words(scalars[0], scalars[1], args.words)
    own = gl.where((t >= 0) & (t < args.n_cols) & here, t.to(gl.int32), WRONG)
    own = gl.where(t == args.ignore_index, IGNORED, own)
    known = own >= 0
    # Read here, before any thread writes the row: the exchange between all threads in ``reduce_stats`` lies between.
    x_t = gl.load(args.X + row * args.x_stride + own, mask=known, other=0.0)
    w = weight_of(args.W, own, known, args.flags)
    grad = gl.load(args.GRAD + row * args.g_stride, mask=here & ((args.flags & GIVEN) != 0), other=1.0)
    peak, total = gl.full([LINES], LOWEST, gl.float32, lines), gl.zeros([LINES], gl.float32, lines)
    return peak, total, own, x_t, w, grad


@gluon.jit
def power(x, origin):
    return gl.exp2(gl.fma(x, LOG2_E, -origin))


@gluon.jit
def accumulate_stats(sums, tiles, args, dtype: gl.constexpr):
    peak, total, own, x_t, w, grad = sums
    x = tiles[0]
    if dtype == gl.float32:
        higher = gl.maximum(peak, gl.max(x, 1) * LOG2_E)
        added = power(x, higher[:, None])
    else:
        low, high = even(x, dtype), odd(x, dtype)
        higher = gl.maximum(peak, gl.max(gl.maximum(low, high), 1) * LOG2_E)
        added = power(low, higher[:, None]) + power(high, higher[:, None])
    return higher, total * gl.exp2(peak - higher) + gl.sum(added, 1), own, x_t, w, grad


@gluon.jit
def reduce_stats(sums, args, dtype: gl.constexpr):
    """The greatest logit, the sum, the factor of the powers, what is subtracted at the target; and of what ``init``
    gives the target's column, logit and weight."""
    peak, total, own, x_t, w, grad = sums
    highest = gl.max(peak, 0)
    total = gl.sum(total * gl.exp2(peak - highest), 0)
    x_t = x_t.to(gl.float32)
    lse, _, _ = row_sums(highest, total, x_t)
    target, loss = Target(own, own == IGNORED, own >= 0), RowLoss(1.0, 0.0, args.z_scale, args.flags)
    a, _, c = row_factors(grad / args.weights, grad / args.count, target, lse, x_t, w, 0.0, loss)
    a = gl.where(own == IGNORED, 0.0, a / total)
    return highest, total, a, c, own, x_t, w


@gluon.jit
def epilogue(tiles, result, args, dtype: gl.constexpr):
    """The gradient, without what is subtracted at the target."""
    highest, a, x = result[0], result[2], tiles[0]
    if dtype == gl.float32:
        return power(x, highest) * a
    else:
        return pack(power(even(x, dtype), highest) * a, power(odd(x, dtype), highest) * a, dtype)


@gluon.jit
def finalise(row, result, args, dtype: gl.constexpr):
    """The gradient at the target, over what another thread stored there, and the results of the row."""
    highest, total, a, c, own, x_t, w = result
    row, n_rows = opaque(row), opaque(args.n_rows)
    known = own >= 0
    gl.thread_barrier()
    gl.store(args.X + row * args.x_stride + own, (power(x_t, highest) * a - c).to(dtype), mask=known)
    sums = row_sums(highest, total, x_t)
    target = Target(load_target(args.T, row, own == WRONG, args.words), own == IGNORED, known)
    out = RowResults(args.LOSS, args.LSE, args.PARTS, args.FLAG, n_rows)
    loss = RowLoss(1.0, 0.0, args.z_scale, args.flags)
    store_results(out, row, row < n_rows, target, sums, x_t, w, x_t, 0.0, loss)


@gluon.jit
def in_place_pipeline(
    X, LOSS, LSE, PARTS, FLAG, T, W, GRAD, TOTALS, x_stride, g_stride, ignore_index, n_rows, n_cols, words, z_scale,
    flags, BLOCK: gl.constexpr, STAGES: gl.constexpr, PREFETCH: gl.constexpr, IN_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Persistent programs that hold long rows in shared memory and registers: see ``pipeline.process_rows``."""
    dtype: gl.constexpr = X.dtype.element_ty
    FILL: gl.constexpr = minus_infinity(dtype)
    divided = (flags & DIVIDED) != 0
    weights = gl.load(TOTALS, mask=divided, other=1.0)
    count = gl.load(TOTALS + 1, mask=divided, other=1.0)
    args = Arguments(
        X, x_stride, n_rows, n_cols, T, words, ignore_index, LOSS, LSE, PARTS, FLAG, W, GRAD, g_stride, weights, count,
        z_scale, flags,
    )  # fmt: skip
    f = RowFunctions(load_scalars, is_read, init, accumulate_stats, reduce_stats, epilogue, finalise, FILL)
    z = RowSizes(dtype, gl.num_warps(), BLOCK, STAGES, PREFETCH, IN_REGISTERS, True, 1)
    process_rows(X, (X,), x_stride, (x_stride,), n_rows, n_cols, args, f, z)
