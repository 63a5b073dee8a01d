"""Cross entropy's losses and their gradient over long rows of logits that one program holds (Gluon, Hopper): what is
computed; ``pipeline.process_rows`` goes over the rows.

``given`` are the arguments of ``cross_entropy_both``, with the two numbers of TOTALS in place of their address. What
is read of a row beside its logits is asked for before the row ahead of it is written. A row whose target is ignored is
not read: zeros stand in for it, and the factor of its gradient is 0.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_triton.common.bf16x2 import even, odd, pack
from csrc_triton.common.pipeline import RowFunctions, RowSizes, process_rows
from csrc_triton.losses.cross_entropy_rows import (
    DIVIDED,
    GIVEN,
    logarithms,
    row_factors,
    store_statistics,
    target_from,
    target_of,
    weight_of,
)
from csrc_triton.softmax.softmax_ring import LOWEST, nothing

LOG2_E = gl.constexpr(1.4426950408889634)
LOGITS, TARGETS, RESULTS, SCALES = (gl.constexpr(i) for i in range(4))  # the parts of ``given``
IGNORED = gl.constexpr(-1)
WRONG = gl.constexpr(-2)


@gluon.jit
def unseen(x):
    """Identity on a 64-bit number that the compiler can't see through, so that it keeps no registers for what it could
    work out ahead of the loop over rows, or from one row to the next."""
    return gl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [x], dtype=gl.int64, is_pure=False, pack=1)


@gluon.jit
def look(row, given):
    """A row's target, in words; that of the nearest row where there is none."""
    _, _, n_rows, _ = given[LOGITS]
    T, words, _ = given[TARGETS]
    at = T + unseen(gl.minimum(gl.maximum(row, 0), n_rows - 1)) * words
    return gl.load(at), gl.load(at + (words - 1))


@gluon.jit
def wanted(told, given):
    _, words, ignore_index = given[TARGETS]
    return target_from(told[0], told[1], words) != ignore_index


@gluon.jit
def begin(row, told, given, LINES: gl.constexpr, layout: gl.constexpr):
    """(greatest logit in units of log(2), sum of powers relative to it) of each line; of the row the column of its
    target, IGNORED, or WRONG where the target is no class; its target's logit and weight, and what GRAD holds for it.
    """
    X, x_stride, n_rows, n_cols = given[LOGITS]
    _, words, ignore_index = given[TARGETS]
    W, GRAD, g_stride, _, _, _, flags = given[SCALES]
    lines: gl.constexpr = gl.SliceLayout(1, layout)
    row = unseen(row)
    here = row < n_rows
    t = target_from(told[0], told[1], words)
    own = gl.where((t >= 0) & (t < n_cols) & here, t.to(gl.int32), WRONG)
    own = gl.where(t == ignore_index, IGNORED, own)
    known = own >= 0
    # Read here, before any thread writes the row: the exchange between all threads in ``fold`` lies between.
    x_t = gl.load(X + row * x_stride + own, mask=known, other=0.0)
    w = weight_of(W, own, known, flags)
    grad = gl.load(GRAD + row * g_stride, mask=here & ((flags & GIVEN) != 0), other=1.0)
    peak, total = gl.full([LINES], LOWEST, gl.float32, lines), gl.zeros([LINES], gl.float32, lines)
    return peak, total, own, x_t, w, grad


@gluon.jit
def power(x, origin):
    return gl.exp2(gl.fma(x, LOG2_E, -origin))


@gluon.jit
def include(sums, tiles, given, dtype: gl.constexpr):
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
def fold(sums, given, dtype: gl.constexpr):
    """A row's greatest logit, its sum, the factor of its powers and what is taken away at its target; and of that what
    ``begin`` gives."""
    peak, total, own, x_t, w, grad = sums
    _, _, _, weights, count, z_scale, flags = given[SCALES]
    highest = gl.max(peak, 0)
    total = gl.sum(total * gl.exp2(peak - highest), 0)
    x_t = x_t.to(gl.float32)
    lse, _, _ = logarithms(highest, total, x_t)
    a, _, c = row_factors(
        grad / weights, grad / count, own == IGNORED, own >= 0, lse, x_t, w, 0.0, 1.0, 0.0, z_scale, flags
    )  # fmt: skip
    a = gl.where(own == IGNORED, 0.0, a / total)
    return highest, total, a, c, own, x_t, w


@gluon.jit
def finish(tiles, folded, given, dtype: gl.constexpr):
    """The gradient, without what is taken away at the target."""
    highest, a, x = folded[0], folded[2], tiles[0]
    if dtype == gl.float32:
        return power(x, highest) * a
    else:
        return pack(power(even(x, dtype), highest) * a, power(odd(x, dtype), highest) * a, dtype)


@gluon.jit
def end(row, folded, given, dtype: gl.constexpr):
    """The gradient at the target, over that of another thread, and the row's statistics."""
    highest, total, a, c, own, x_t, w = folded
    X, x_stride, n_rows, _ = given[LOGITS]
    T, words, _ = given[TARGETS]
    LOSS, LSE, PARTS, FLAG = given[RESULTS]
    _, _, _, _, _, z_scale, flags = given[SCALES]
    row, n_rows = unseen(row), unseen(n_rows)
    known = own >= 0
    gl.thread_barrier()
    gl.store(X + row * x_stride + own, (power(x_t, highest) * a - c).to(dtype), mask=known)
    lse, nll, rest = logarithms(highest, total, x_t)
    t = target_of(T, row, own == WRONG, words)
    store_statistics(
        LOSS, LSE, PARTS, FLAG, row, row < n_rows, n_rows, t, own == IGNORED, known, lse, nll, rest, x_t, w, x_t, 0.0,
        1.0, 0.0, z_scale, flags,
    )  # fmt: skip


@gluon.jit
def both_in_ring(
    X, LOSS, LSE, PARTS, FLAG, T, W, GRAD, TOTALS, x_stride, g_stride, ignore_index, n_rows, n_cols, words, z_scale,
    flags, BLOCK: gl.constexpr, STAGES: gl.constexpr, PREFETCH: gl.constexpr, IN_REGISTERS: gl.constexpr,
    WHOLE: gl.constexpr, INTERLEAVE: gl.constexpr,
):  # fmt: skip
    """See ``pipeline.process_rows``."""
    FILL: gl.constexpr = nothing(X.dtype.element_ty)
    divided = (flags & DIVIDED) != 0
    weights = gl.load(TOTALS, mask=divided, other=1.0)
    count = gl.load(TOTALS + 1, mask=divided, other=1.0)
    given = (
        (X, x_stride, n_rows, n_cols), (T, words, ignore_index), (LOSS, LSE, PARTS, FLAG),
        (W, GRAD, g_stride, weights, count, z_scale, flags),
    )  # fmt: skip
    z = RowSizes(X.dtype.element_ty, gl.num_warps(), BLOCK, STAGES, PREFETCH, IN_REGISTERS, WHOLE, INTERLEAVE)
    f = RowFunctions(look, wanted, begin, include, fold, finish, end, FILL)
    process_rows(X, (X,), x_stride, (x_stride,), n_rows, n_cols, given, f, z)
