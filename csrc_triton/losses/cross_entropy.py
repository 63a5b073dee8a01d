"""Cross entropy of rows of logits: losses, gradients, both in one launch, and the sums over rows.

``cross_entropy_rows`` has the formula and what the arguments mean for a row. Of the kernels:

- ``forward`` reads the logits once and writes the loss and log-sum-exp (LSE) of each row; with the flag WITH_PARTS also
  PARTS[3, rows]: the target's logit, the weighted sum of the logits (``full`` alone), the z-loss. ``full`` also knows
  smoothing, softcap and the column of the greatest logit (PREDICTED).
- ``gradient`` writes DX from X and LSE; DX may be X. ``full`` also knows softcap, and class weights with smoothing.
- ``in_place`` writes what ``forward`` does, and the gradient over the logits, with the second read from the caches or,
  in ``pipeline``, none.
- ``totals`` adds up rows in a fixed order, into TOTALS (the sum of the targets' weights, their count) and the results;
  ``combine`` adds up the sums of its programs, where there are several.
- ``scale`` multiplies rows in place by a number on the device, and returns at once where that is 1.

With ``vocab_start`` and ``vocabulary`` the columns are a part of the classes: the LSE, the target's logit and the
weighted sum are then of that part, and the gradient is right with the LSE of all parts.
"""

import triton
import triton.language as tl

from csrc_triton.common.pipeline import WHOLE_ROW_PIPELINE
from csrc_triton.common.tanh import tanh_and_slope, units
from csrc_triton.losses.cross_entropy_in_place import (  # noqa: F401 (forms name functions)
    in_place_long,
    in_place_pipeline,
    in_place_tile,
)
from csrc_triton.losses.cross_entropy_rows import (
    BY_TARGET,
    WEIGHTED,
    WITH_PREDICTED,
    RowLoss,
    RowResults,
    RowSums,
    accumulate_columns,
    edges,
    gradient_of,
    init_stats,
    load_target,
    origin_of,
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

DECLARATION = {
    "op": "cross_entropy",
    "kernels": {
        "cross_entropy_forward": {
            "arguments": {
                "LOSS": "*fp32", "LSE": "*fp32", "PARTS": "*fp32", "FLAG": "*i64", "X": "*dtype", "T": "*i32",
                "W": "*fp32", "x_stride": "i64", "ignore_index": "i64", "n_rows": "i64", "n_cols": "i32",
                "words": "i32", "vocab_start": "i32", "vocabulary": "i32", "z_scale": "fp32", "flags": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["X", "x_stride", "n_cols"],
            "forms": {
                "tile": {"function": "forward_tile", "constants": ["ROWS", "BLOCK"], "covers": "BLOCK"},
                "long": {
                    "function": "forward_long",
                    "constants": ["BLOCK", "STAGES", "UNALIGNED"],
                    "defaults": {"STAGES": 1, "UNALIGNED": False},
                    "staged": ["X"],
                },
            },
        },
        "cross_entropy_forward_full": {
            "arguments": {
                "LOSS": "*fp32", "LSE": "*fp32", "PARTS": "*fp32", "PREDICTED": "*i64", "FLAG": "*i64",
                "X": "*dtype", "T": "*i32", "W": "*fp32", "WEIGHT_SUM": "*fp32", "x_stride": "i64",
                "ignore_index": "i64", "n_rows": "i64", "n_cols": "i32", "words": "i32", "vocab_start": "i32",
                "vocabulary": "i32", "smoothing": "fp32", "z_scale": "fp32", "softcap": "fp32",
                "flags": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["X", "W", "x_stride", "n_cols"],
            "forms": {"long": {"function": "forward_full", "constants": ["BLOCK"]}},
        },
        "cross_entropy_gradient": {
            "arguments": {
                "DX": "*dtype", "X": "*dtype", "LSE": "*fp32", "PARTS": "*fp32", "T": "*i32", "W": "*fp32",
                "GRAD": "*fp32", "TOTALS": "*fp32", "dx_stride": "i64", "x_stride": "i64", "g_stride": "i64",
                "ignore_index": "i64", "n_rows": "i64", "n_cols": "i32", "words": "i32", "vocab_start": "i32",
                "vocabulary": "i32", "smoothing": "fp32", "z_scale": "fp32", "flags": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["DX", "X", "dx_stride", "x_stride", "n_cols"],
            "forms": {
                "tile": {"function": "gradient_tile", "constants": ["ROWS", "BLOCK"], "covers": "BLOCK"},
                "pieces": {
                    "function": "gradient_pieces",
                    "constants": ["BLOCK", "UNALIGNED"],
                    "defaults": {"UNALIGNED": False},
                },
            },
        },
        "cross_entropy_gradient_full": {
            "arguments": {
                "DX": "*dtype", "X": "*dtype", "LSE": "*fp32", "PARTS": "*fp32", "T": "*i32", "W": "*fp32",
                "WEIGHT_SUM": "*fp32", "GRAD": "*fp32", "TOTALS": "*fp32", "dx_stride": "i64",
                "x_stride": "i64", "g_stride": "i64", "ignore_index": "i64", "n_rows": "i64", "n_cols": "i32",
                "words": "i32", "vocab_start": "i32", "vocabulary": "i32", "smoothing": "fp32",
                "z_scale": "fp32", "softcap": "fp32", "flags": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["DX", "X", "W", "dx_stride", "x_stride", "n_cols"],
            "forms": {"pieces": {"function": "gradient_full", "constants": ["BLOCK"]}},
        },
        "cross_entropy_in_place": {
            "arguments": {
                "X": "*dtype", "LOSS": "*fp32", "LSE": "*fp32", "PARTS": "*fp32", "FLAG": "*i64", "T": "*i32",
                "W": "*fp32", "GRAD": "*fp32", "TOTALS": "*fp32", "x_stride": "i64", "g_stride": "i64",
                "ignore_index": "i64", "n_rows": "i64", "n_cols": "i32", "words": "i32", "z_scale": "fp32",
                "flags": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["X", "x_stride", "n_cols"],
            "forms": {
                "tile": {"function": "in_place_tile", "constants": ["ROWS", "BLOCK"], "covers": "BLOCK"},
                "long": {
                    "function": "in_place_long",
                    "constants": ["BLOCK", "IN_REGISTERS", "UNALIGNED", "CACHED", "PATCH"],
                    "defaults": {"IN_REGISTERS": 0, "UNALIGNED": False, "CACHED": 0, "PATCH": False},
                },
                "pipeline": {**WHOLE_ROW_PIPELINE, "function": "in_place_pipeline"},
            },
        },
        "cross_entropy_totals": {
            "arguments": {
                "LOSS_SUM": "*fp32", "Z_SUM": "*fp32", "ACCURACY": "*fp32", "TOTALS": "*fp32",
                "PARTIALS": "*fp32", "LOSS": "*fp32", "PARTS": "*fp32", "PREDICTED": "*i64", "T": "*i32",
                "W": "*fp32", "ignore_index": "i64", "n_rows": "i64", "program_rows": "i64", "words": "i32",
                "vocabulary": "i32", "flags": "i32",
            },
            "axes": {},
            "host": ["rows", "rows_for_one_cta"],
            "aligned": [],
            "forms": {"rows": {"function": "totals", "constants": ["BLOCK"]}},
        },
        "cross_entropy_combine": {
            "arguments": {
                "LOSS_SUM": "*fp32", "Z_SUM": "*fp32", "ACCURACY": "*fp32", "TOTALS": "*fp32",
                "PARTIALS": "*fp32", "parts": "i32", "flags": "i32",
            },
            "axes": {},
            "aligned": [],
            "forms": {"rows": {"function": "combine", "constants": ["BLOCK"]}},
        },
        "cross_entropy_scale": {
            "arguments": {
                "X": "*dtype", "GRAD": "*fp32", "x_stride": "i64", "g_stride": "i64", "n_rows": "i64",
                "n_cols": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["X", "x_stride", "n_cols"],
            "forms": {"pieces": {"function": "scale_pieces", "constants": ["BLOCK"]}},
        },
    },
}  # fmt: skip


@triton.jit
def forward_tile(
    LOSS, LSE, PARTS, FLAG, X, T, W, x_stride, ignore_index, n_rows, n_cols, words, vocab_start, vocabulary, z_scale,
    flags, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS whole rows a program, held in registers; n_cols <= BLOCK."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = rows < n_rows
    target = target_of(T, rows, here, words, ignore_index, vocabulary)
    own = target.t - vocab_start
    among = here & target.known & (own >= 0) & (own < n_cols)
    cols = tl.arange(0, BLOCK)
    mask = (here & (target.ignored == 0))[:, None] & (cols < n_cols)[None, :]
    x = tl.load(X + rows[:, None] * x_stride + cols[None, :], mask=mask, other=-float("inf")).to(tl.float32)
    x_t = tl.load(X + rows * x_stride + own, mask=among, other=0.0).to(tl.float32)
    peak, total = row_stats(x)
    sums = row_sums(peak, total, x_t)
    w = weight_of(W, target.t, here & target.known, flags)
    out = RowResults(LOSS, LSE, PARTS, FLAG, n_rows)
    store_results(out, rows, here, target, sums, x_t, w, x_t, 0.0, RowLoss(vocabulary, 0.0, z_scale, flags))


@triton.jit
def forward_long(
    LOSS, LSE, PARTS, FLAG, X, T, W, x_stride, ignore_index, n_rows, n_cols, words, vocab_start, vocabulary, z_scale,
    flags, BLOCK: tl.constexpr, STAGES: tl.constexpr, UNALIGNED: tl.constexpr,
):  # fmt: skip
    """One row of any length a program; UNALIGNED: it may start anywhere."""
    row = tl.program_id(0).to(tl.int64)
    here = row < n_rows
    target = target_of(T, row, here, words, ignore_index, vocabulary)
    own = target.t - vocab_start
    R = X + row * x_stride
    x_t = tl.load(R + own, mask=target.known & (own >= 0) & (own < n_cols), other=0.0).to(tl.float32)
    w = weight_of(W, target.t, target.known, flags)
    BODY, before, length = row_body(R, n_cols, UNALIGNED)
    lse, nll, rest = 0.0, 0.0, 0.0
    if target.ignored == 0:
        peak, total = init_stats(R, before, length, n_cols, BLOCK, UNALIGNED)
        peak, total = accumulate_columns(BODY, peak, total, 0, length, BLOCK, STAGES, "")
        peak, total = reduce(peak, total)
        lse, nll, rest = row_sums(peak, total, x_t)
    out, sums = RowResults(LOSS, LSE, PARTS, FLAG, n_rows), RowSums(lse, nll, rest)
    store_results(out, row, here, target, sums, x_t, w, x_t, 0.0, RowLoss(vocabulary, 0.0, z_scale, flags))


@triton.jit
def capped(x, softcap):
    """x after the softcap; 0 is none."""
    if softcap != 0.0:
        x = tanh_and_slope(x * units(1.0 / softcap))[0] * softcap
    return x


@triton.jit
def sum_of_weights(WEIGHT_SUM, vocabulary):
    """The sum of the class weights. Without an address there are none, or nothing is multiplied by their sum."""
    return tl.load(WEIGHT_SUM, mask=WEIGHT_SUM.to(tl.int64) != 0, other=1.0 * vocabulary)


@triton.jit
def forward_full(
    LOSS, LSE, PARTS, PREDICTED, FLAG, X, T, W, WEIGHT_SUM, x_stride, ignore_index, n_rows, n_cols, words, vocab_start,
    vocabulary, smoothing, z_scale, softcap, flags, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program. Each vector of a block remembers the block in which it was greatest; those blocks are read
    again at the end, for the first column of the greatest logit. W is indexed by class."""
    dtype: tl.constexpr = X.dtype.element_ty
    SHORT: tl.constexpr = 128 // dtype.primitive_bitwidth
    row = tl.program_id(0).to(tl.int64)
    here = row < n_rows
    target = target_of(T, row, here, words, ignore_index, vocabulary)
    own = target.t - vocab_start
    R = X + row * x_stride
    x_t = tl.load(R + own, mask=target.known & (own >= 0) & (own < n_cols), other=0.0).to(tl.float32)
    x_t = capped(x_t, softcap)
    cols = vectors(BLOCK, dtype, False)
    lse, nll, rest, weighted = 0.0, 0.0, 0.0, 0.0
    best = tl.full([], -1, tl.int64)
    if target.ignored == 0:
        peak = tl.full([BLOCK // SHORT], LOWEST, tl.float32)
        total = tl.zeros([BLOCK // SHORT], tl.float32)
        sums = tl.zeros([BLOCK // SHORT], tl.float32)
        greatest = tl.full([BLOCK // SHORT], -float("inf"), tl.float32)
        where = tl.zeros([BLOCK // SHORT], tl.int32)
        for first in range(0, n_cols, BLOCK):
            mask = first + cols < n_cols
            x = tl.load(R + (first + cols), mask=mask, other=-float("inf")).to(tl.float32)
            higher = tl.max(x, 1)
            where = tl.where(higher > greatest, first, where)
            greatest = tl.maximum(greatest, higher)
            x = tl.where(mask, capped(x, softcap), -float("inf"))
            peak, total = accumulate(peak, total, x, LOG2_E, 1)
            w = tl.load(W + (vocab_start + first + cols), mask=mask & ((flags & WEIGHTED) != 0), other=1.0)
            sums += tl.sum(tl.where(mask, w * x, 0.0), 1)
        peak, total = reduce(peak, total)
        lse, nll, rest = row_sums(peak, total, x_t)
        weighted = tl.sum(sums, 0)
        if (flags & WITH_PREDICTED) != 0:
            at = where[:, None] + cols
            x = tl.load(R + at, mask=at < n_cols, other=-float("inf")).to(tl.float32)
            at = tl.where((x == tl.max(greatest, 0)) & (at < n_cols), at, n_cols)
            best = (tl.min(tl.min(at, 1), 0) + vocab_start).to(tl.int64)
    tl.store(PREDICTED + row, best, mask=(flags & WITH_PREDICTED) != 0)
    weight_sum, w = sum_of_weights(WEIGHT_SUM, vocabulary), weight_of(W, target.t, target.known, flags)
    out, row_loss = RowResults(LOSS, LSE, PARTS, FLAG, n_rows), RowLoss(vocabulary, smoothing, z_scale, flags)
    store_results(out, row, here, target, RowSums(lse, nll, rest), x_t, w, weighted, weight_sum, row_loss)


@triton.jit
def gradient_tile(
    DX, X, LSE, PARTS, T, W, GRAD, TOTALS, dx_stride, x_stride, g_stride, ignore_index, n_rows, n_cols, words,
    vocab_start, vocabulary, smoothing, z_scale, flags, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS whole rows a program."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = rows < n_rows
    target = target_of(T, rows, here, words, ignore_index, vocabulary)
    lse, origin, by = origin_of(LSE, rows, here, n_rows, flags)
    x_t = tl.load(PARTS + rows, mask=here & ((flags & BY_TARGET) != 0), other=0.0)
    scale, z = row_scales(GRAD, TOTALS, rows, here, g_stride, flags)
    w = weight_of(W, target.t, here & target.known, flags)
    loss = RowLoss(vocabulary, smoothing, z_scale, flags)
    a, b, c = row_factors(scale, z, target, lse, x_t, w, 1.0 * vocabulary, loss)
    cols = tl.arange(0, BLOCK)
    mask = here[:, None] & (cols < n_cols)[None, :]
    read = mask & (target.ignored == 0)[:, None]
    x = tl.load(X + rows[:, None] * x_stride + cols[None, :], mask=read, other=-float("inf")).to(tl.float32)
    y = tl.exp2(tl.fma(x, LOG2_E, -origin[:, None])) * (a * by)[:, None] - b[:, None]
    y = tl.where(cols[None, :] == (target.t - vocab_start)[:, None], y - c[:, None], y)
    tl.store(DX + rows[:, None] * dx_stride + cols[None, :], y.to(DX.dtype.element_ty), mask=mask)


@triton.jit
def gradient_pieces(
    DX, X, LSE, PARTS, T, W, GRAD, TOTALS, dx_stride, x_stride, g_stride, ignore_index, n_rows, n_cols, words,
    vocab_start, vocabulary, smoothing, z_scale, flags, BLOCK: tl.constexpr, UNALIGNED: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of a row a program. UNALIGNED: rows may start anywhere, but a row of DX as far from a boundary of
    cache lines as that of X."""
    pieces = tl.cdiv(n_cols, BLOCK)
    program = tl.program_id(0)
    row = (program // pieces).to(tl.int64)
    first = program % pieces * BLOCK
    here = row < n_rows
    target = target_of(T, row, here, words, ignore_index, vocabulary)
    ignored = target.ignored
    lse, origin, by = origin_of(LSE, row, here, n_rows, flags)
    x_t = tl.load(PARTS + row, mask=(flags & BY_TARGET) != 0, other=0.0)
    scale, z = row_scales(GRAD, TOTALS, row, here, g_stride, flags)
    w = weight_of(W, target.t, target.known, flags)
    loss = RowLoss(vocabulary, smoothing, z_scale, flags)
    a, b, c = row_factors(scale, z, target, lse, x_t, w, 1.0 * vocabulary, loss)
    a *= by
    own = tl.where(target.known, target.t - vocab_start, -1)
    R = X + row * x_stride
    D = DX + row * dx_stride
    BODY, before, length = row_body(R, n_cols, UNALIGNED)
    TO = tl.multiple_of(D + before, 128) if UNALIGNED else D
    cols = first + tl.arange(0, BLOCK)
    read = (cols < length) & (ignored == 0)
    x = tl.load(BODY + cols, mask=read, other=-float("inf"), eviction_policy="evict_first").to(tl.float32)
    y = gradient_of(x, cols, first, first + BLOCK, origin, a, b, c, own - before, False).to(
        DX.dtype.element_ty
    )
    tl.store(TO + cols, y, mask=cols < length, eviction_policy="evict_first")
    if UNALIGNED:  # noqa: SIM102 (a constant, and a number on the device)
        if first == 0:
            at, mask = edges(R, before, length, n_cols, 2048 // X.dtype.element_ty.primitive_bitwidth)
            edge = tl.load(R + at, mask=mask & (ignored == 0), other=-float("inf")).to(tl.float32)
            dx = gradient_of(edge, at, 0, n_cols, origin, a, b, c, own, False)
            tl.store(D + at, dx.to(DX.dtype.element_ty), mask=mask)


@triton.jit
def gradient_full(
    DX, X, LSE, PARTS, T, W, WEIGHT_SUM, GRAD, TOTALS, dx_stride, x_stride, g_stride, ignore_index, n_rows, n_cols,
    words, vocab_start, vocabulary, smoothing, z_scale, softcap, flags, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of a row a program. W is indexed by class."""
    pieces = tl.cdiv(n_cols, BLOCK)
    program = tl.program_id(0)
    row = (program // pieces).to(tl.int64)
    cols = program % pieces * BLOCK + tl.arange(0, BLOCK)
    here = row < n_rows
    target = target_of(T, row, here, words, ignore_index, vocabulary)
    ignored = target.ignored
    lse, origin, by = origin_of(LSE, row, here, n_rows, flags)
    x_t = tl.load(PARTS + row, mask=(flags & BY_TARGET) != 0, other=0.0)
    weight_sum = sum_of_weights(WEIGHT_SUM, vocabulary)
    scale, z = row_scales(GRAD, TOTALS, row, here, g_stride, flags)
    w = weight_of(W, target.t, target.known, flags)
    loss = RowLoss(vocabulary, smoothing, z_scale, flags)
    a, b, c = row_factors(scale, z, target, lse, x_t, w, weight_sum, loss)
    mask = cols < n_cols
    x = tl.load(X + row * x_stride + cols, mask=mask & (ignored == 0), other=-float("inf")).to(tl.float32)
    w = tl.load(W + (vocab_start + cols), mask=mask & ((flags & WEIGHTED) != 0), other=1.0)
    slope = tl.full([BLOCK], 1.0, tl.float32)
    if softcap != 0.0:
        tanh, slope = tanh_and_slope(x * units(1.0 / softcap))
        x = tanh * softcap
        slope *= 1.0 / 256
    y = tl.exp2(tl.fma(x, LOG2_E, -origin)) * (a * by) - b * w
    y = tl.where(cols == target.t - vocab_start, y - c, y) * slope
    y = tl.where(ignored, 0.0, y)
    tl.store(DX + row * dx_stride + cols, y.to(DX.dtype.element_ty), mask=mask)


# Sums over the rows, in a fixed order: one program, or several and one that combines their sums. Five sums: of the
# losses less their z-losses, of the z-losses, of the weights of the targets not ignored, of their count, of those
# predicted right.

MEAN = tl.constexpr(64)
WITH_LOSS = tl.constexpr(128)  # LOSS holds losses; their sum or mean goes to LOSS_SUM
WITH_Z = tl.constexpr(256)  # the third row of PARTS holds the z-losses; to Z_SUM
WITH_HITS = tl.constexpr(512)  # PREDICTED is compared with T; to ACCURACY
FIELDS = tl.constexpr(8)  # of a row of PARTIALS


@triton.jit
def totals(
    LOSS_SUM, Z_SUM, ACCURACY, TOTALS, PARTIALS, LOSS, PARTS, PREDICTED, T, W, ignore_index, n_rows, program_rows,
    words, vocabulary, flags, BLOCK: tl.constexpr,
):  # fmt: skip
    """``program_rows`` rows a program, BLOCK at a time."""
    program = tl.program_id(0).to(tl.int64)
    last = tl.minimum(program * program_rows + program_rows, n_rows)
    losses = tl.zeros([BLOCK], tl.float32)
    zs = tl.zeros([BLOCK], tl.float32)
    weights = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    hits = tl.zeros([BLOCK], tl.int32)
    for first in range(program * program_rows, last, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        here = rows < last
        t = load_target(T, rows, here, words)
        taken = here & (t != ignore_index)
        z = tl.load(PARTS + 2 * n_rows + rows, mask=here & ((flags & WITH_Z) != 0), other=0.0)
        losses += tl.load(LOSS + rows, mask=here & ((flags & WITH_LOSS) != 0), other=0.0) - z
        zs += z
        w = weight_of(W, t, taken & (t >= 0) & (t < vocabulary), flags)
        weights += tl.where(taken, w, 0.0)
        count += taken.to(tl.int32)
        hit = tl.load(PREDICTED + rows, mask=taken & ((flags & WITH_HITS) != 0), other=-1)
        hits += (taken & (hit == t)).to(tl.int32)
    loss, z, weight = tl.sum(losses, 0), tl.sum(zs, 0), tl.sum(weights, 0)
    counted, right = tl.sum(count, 0).to(tl.float32), tl.sum(hits, 0).to(tl.float32)
    if tl.num_programs(0) == 1:
        store_totals(LOSS_SUM, Z_SUM, ACCURACY, TOTALS, loss, z, weight, counted, right, flags)
    else:
        to = PARTIALS + program * FIELDS
        tl.store(to, loss)
        tl.store(to + 1, z)
        tl.store(to + 2, weight)
        tl.store(to + 3, counted)
        tl.store(to + 4, right)


@triton.jit
def combine(LOSS_SUM, Z_SUM, ACCURACY, TOTALS, PARTIALS, parts, flags, BLOCK: tl.constexpr):
    """The sums of PARTIALS[parts, FIELDS]."""
    part, field = tl.arange(0, BLOCK), tl.arange(0, FIELDS)
    sums = tl.zeros([BLOCK, FIELDS], tl.float32)
    for first in range(0, parts, BLOCK):
        rows = (first + part)[:, None]
        mask = (rows < parts) & (field < 5)[None, :]
        sums += tl.load(PARTIALS + rows * FIELDS + field[None, :], mask=mask, other=0.0)
    total = tl.sum(sums, 0)
    loss = tl.sum(tl.where(field == 0, total, 0.0), 0)
    z = tl.sum(tl.where(field == 1, total, 0.0), 0)
    weight = tl.sum(tl.where(field == 2, total, 0.0), 0)
    counted = tl.sum(tl.where(field == 3, total, 0.0), 0)
    right = tl.sum(tl.where(field == 4, total, 0.0), 0)
    store_totals(LOSS_SUM, Z_SUM, ACCURACY, TOTALS, loss, z, weight, counted, right, flags)


@triton.jit
def store_totals(LOSS_SUM, Z_SUM, ACCURACY, TOTALS, loss, z, weight, counted, right, flags):
    """The results: NaN where there is nothing to divide by, as in torch."""
    tl.store(TOTALS, weight)
    tl.store(TOTALS + 1, counted)
    if (flags & MEAN) != 0:
        loss /= weight
        z /= counted
    tl.store(LOSS_SUM, tl.where((flags & WITH_Z) != 0, loss + z, loss), mask=(flags & WITH_LOSS) != 0)
    tl.store(Z_SUM, z, mask=(flags & WITH_Z) != 0)
    tl.store(ACCURACY, right / counted, mask=(flags & WITH_HITS) != 0)


@triton.jit
def scale_pieces(X, GRAD, x_stride, g_stride, n_rows, n_cols, BLOCK: tl.constexpr):
    """BLOCK columns of a row at a time. One factor for all rows is 1 wherever backward() is called on the loss itself:
    then each program reads that number and returns, and the host need not know it."""
    pieces = tl.cdiv(n_cols, BLOCK)
    total = n_rows * pieces
    if g_stride == 0:
        total = tl.where(tl.load(GRAD) == 1.0, 0, total)
    for piece in range(tl.program_id(0), total, tl.num_programs(0)):
        row = (piece // pieces).to(tl.int64)
        factor = tl.load(GRAD + row * g_stride)
        if factor != 1.0:
            cols = piece % pieces * BLOCK + tl.arange(0, BLOCK)
            at = X + row * x_stride + cols
            x = tl.load(at, mask=cols < n_cols, other=0.0).to(tl.float32)
            tl.store(at, (x * factor).to(X.dtype.element_ty), mask=cols < n_cols)
