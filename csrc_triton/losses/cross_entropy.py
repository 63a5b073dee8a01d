"""Cross entropy of rows of logits: losses, gradients, both in one pass over the logits, and the sums over rows.

``cross_entropy_rows`` has the formula and what the arguments mean for a row. Of the kernels:

- ``forward`` reads the logits once and writes each row's loss and log-sum-exp (LSE); with the flag WITH_PARTS also
  PARTS[3, rows]: the target's logit, the weighted sum of the logits (``full`` alone), the z-loss. ``full`` knows
  smoothing, softcap and the greatest logit's column (PREDICTED) too.
- ``gradient`` writes DX from X and LSE; DX may be X. ``full`` knows softcap, and class weights with smoothing, too.
- ``both`` writes what ``forward`` does and the gradient over the logits, with the second read from the caches or, in
  ``ring``, none.
- ``totals`` adds up rows in a fixed order, into TOTALS (the sum of the targets' weights, their count) and the results.
- ``scale`` multiplies rows in place by a number on the device, and returns at once where that is 1.

With ``vocab_start`` and ``vocabulary`` the columns are a part of the classes: the row's LSE, target logit and weighted
sum are then the part's, and the gradient is right with the LSE of all parts.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_triton.common.pipeline import ROW_PIPELINE
from csrc_triton.losses.cross_entropy_both import both_in_row, both_in_tile
from csrc_triton.losses.cross_entropy_full import full_forward, full_gradient
from csrc_triton.losses.cross_entropy_ring import both_in_ring
from csrc_triton.losses.cross_entropy_rows import (
    BY_TARGET,
    around,
    first_statistics,
    gradient_of,
    logarithms,
    origin_of,
    row_factors,
    row_scales,
    row_statistics,
    split,
    statistics,
    store_statistics,
    target_of,
    weight_of,
)
from csrc_triton.losses.cross_entropy_totals import add_rows, finish_totals
from csrc_triton.softmax.softmax_statistics import LOG2_E, fold

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
                    "constants": ["BLOCK", "STAGES", "SPLIT"],
                    "defaults": {"STAGES": 1, "SPLIT": False},
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
                    "constants": ["BLOCK", "SPLIT"],
                    "defaults": {"SPLIT": False},
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
        "cross_entropy_both": {
            "arguments": {
                "X": "*dtype", "LOSS": "*fp32", "LSE": "*fp32", "PARTS": "*fp32", "FLAG": "*i64", "T": "*i32",
                "W": "*fp32", "GRAD": "*fp32", "TOTALS": "*fp32", "x_stride": "i64", "g_stride": "i64",
                "ignore_index": "i64", "n_rows": "i64", "n_cols": "i32", "words": "i32", "z_scale": "fp32",
                "flags": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["X", "x_stride", "n_cols"],
            "forms": {
                "tile": {"function": "both_tile", "constants": ["ROWS", "BLOCK"], "covers": "BLOCK"},
                "long": {
                    "function": "both_long",
                    "constants": ["BLOCK", "KEEP", "SPLIT", "HELD", "REPACK", "PATCH"],
                    "defaults": {"KEEP": False, "SPLIT": False, "HELD": 0, "REPACK": False, "PATCH": False},
                },
                "pipeline": {**ROW_PIPELINE, "function": "both_ring"},
            },
        },
        "cross_entropy_totals": {
            "arguments": {
                "LOSS_SUM": "*fp32", "Z_SUM": "*fp32", "ACCURACY": "*fp32", "TOTALS": "*fp32",
                "PARTIALS": "*fp32", "LOSS": "*fp32", "PARTS": "*fp32", "PREDICTED": "*i64", "T": "*i32",
                "W": "*fp32", "ignore_index": "i64", "n_rows": "i64", "chunk": "i64", "words": "i32",
                "vocabulary": "i32", "flags": "i32",
            },
            "axes": {},
            "aligned": [],
            "forms": {"rows": {"function": "totals", "constants": ["BLOCK"]}},
        },
        "cross_entropy_finish": {
            "arguments": {
                "LOSS_SUM": "*fp32", "Z_SUM": "*fp32", "ACCURACY": "*fp32", "TOTALS": "*fp32",
                "PARTIALS": "*fp32", "parts": "i32", "flags": "i32",
            },
            "axes": {},
            "aligned": [],
            "forms": {"rows": {"function": "finish", "constants": ["BLOCK"]}},
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
    t = target_of(T, rows, here, words)
    ignored = t == ignore_index
    known = (t >= 0) & (t < vocabulary) & (ignored == 0)
    own = t - vocab_start
    among = here & known & (own >= 0) & (own < n_cols)
    cols = tl.arange(0, BLOCK)
    mask = (here & (ignored == 0))[:, None] & (cols < n_cols)[None, :]
    x = tl.load(X + rows[:, None] * x_stride + cols[None, :], mask=mask, other=-float("inf")).to(tl.float32)
    x_t = tl.load(X + rows * x_stride + own, mask=among, other=0.0).to(tl.float32)
    peak, total = row_statistics(x)
    lse, nll, rest = logarithms(peak, total, x_t)
    w = weight_of(W, t, here & known, flags)
    store_statistics(
        LOSS, LSE, PARTS, FLAG, rows, here, n_rows, t, ignored, known, lse, nll, rest, x_t, w, x_t, 0.0,
        vocabulary, 0.0, z_scale, flags,
    )  # fmt: skip


@triton.jit
def forward_long(
    LOSS, LSE, PARTS, FLAG, X, T, W, x_stride, ignore_index, n_rows, n_cols, words, vocab_start, vocabulary, z_scale,
    flags, BLOCK: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One row of any length a program; SPLIT: it may start anywhere."""
    row = tl.program_id(0).to(tl.int64)
    here = row < n_rows
    t = target_of(T, row, here, words)
    ignored = t == ignore_index
    known = (t >= 0) & (t < vocabulary) & (ignored == 0)
    own = t - vocab_start
    R = X + row * x_stride
    x_t = tl.load(R + own, mask=known & (own >= 0) & (own < n_cols), other=0.0).to(tl.float32)
    w = weight_of(W, t, known, flags)
    BODY, before, length = split(R, n_cols, SPLIT)
    lse, nll, rest = 0.0, 0.0, 0.0
    if ignored == 0:
        peak, total = first_statistics(R, before, length, n_cols, LOG2_E, BLOCK, SPLIT)
        peak, total = statistics(BODY, peak, total, 0, length, LOG2_E, BLOCK, STAGES, "")
        peak, total = fold(peak, total)
        lse, nll, rest = logarithms(peak, total, x_t)
    store_statistics(
        LOSS, LSE, PARTS, FLAG, row, here, n_rows, t, ignored, known, lse, nll, rest, x_t, w, x_t, 0.0,
        vocabulary, 0.0, z_scale, flags,
    )  # fmt: skip


@triton.jit
def forward_full(
    LOSS, LSE, PARTS, PREDICTED, FLAG, X, T, W, WEIGHT_SUM, x_stride, ignore_index, n_rows, n_cols, words, vocab_start,
    vocabulary, smoothing, z_scale, softcap, flags, BLOCK: tl.constexpr,
):  # fmt: skip
    full_forward(
        LOSS, LSE, PARTS, PREDICTED, FLAG, X, T, W, WEIGHT_SUM, x_stride, ignore_index, n_rows, n_cols, words,
        vocab_start, vocabulary, smoothing, z_scale, softcap, flags, BLOCK,
    )  # fmt: skip


@triton.jit
def gradient_tile(
    DX, X, LSE, PARTS, T, W, GRAD, TOTALS, dx_stride, x_stride, g_stride, ignore_index, n_rows, n_cols, words,
    vocab_start, vocabulary, smoothing, z_scale, flags, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS whole rows a program."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = rows < n_rows
    t = target_of(T, rows, here, words)
    ignored = t == ignore_index
    known = (t >= 0) & (t < vocabulary) & (ignored == 0)
    lse, origin, by = origin_of(LSE, rows, here, n_rows, flags)
    x_t = tl.load(PARTS + rows, mask=here & ((flags & BY_TARGET) != 0), other=0.0)
    scale, z = row_scales(GRAD, TOTALS, rows, here, g_stride, flags)
    a, b, c = row_factors(
        scale, z, ignored, known, lse, x_t, weight_of(W, t, here & known, flags), 1.0 * vocabulary, vocabulary,
        smoothing, z_scale, flags,
    )  # fmt: skip
    cols = tl.arange(0, BLOCK)
    mask = here[:, None] & (cols < n_cols)[None, :]
    read = mask & (ignored == 0)[:, None]
    x = tl.load(X + rows[:, None] * x_stride + cols[None, :], mask=read, other=-float("inf")).to(tl.float32)
    y = tl.exp2(tl.fma(x, LOG2_E, -origin[:, None])) * (a * by)[:, None] - b[:, None]
    y = tl.where(cols[None, :] == (t - vocab_start)[:, None], y - c[:, None], y)
    tl.store(DX + rows[:, None] * dx_stride + cols[None, :], y.to(DX.dtype.element_ty), mask=mask)


@triton.jit
def gradient_pieces(
    DX, X, LSE, PARTS, T, W, GRAD, TOTALS, dx_stride, x_stride, g_stride, ignore_index, n_rows, n_cols, words,
    vocab_start, vocabulary, smoothing, z_scale, flags, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of a row a program. SPLIT: rows may start anywhere, but those of DX where those of X do, as seen
    from the boundaries of cache lines."""
    pieces = tl.cdiv(n_cols, BLOCK)
    program = tl.program_id(0)
    row = (program // pieces).to(tl.int64)
    first = program % pieces * BLOCK
    here = row < n_rows
    t = target_of(T, row, here, words)
    ignored = t == ignore_index
    known = (t >= 0) & (t < vocabulary) & (ignored == 0)
    lse, origin, by = origin_of(LSE, row, here, n_rows, flags)
    x_t = tl.load(PARTS + row, mask=(flags & BY_TARGET) != 0, other=0.0)
    scale, z = row_scales(GRAD, TOTALS, row, here, g_stride, flags)
    a, b, c = row_factors(
        scale, z, ignored, known, lse, x_t, weight_of(W, t, known, flags), 1.0 * vocabulary, vocabulary, smoothing,
        z_scale, flags,
    )  # fmt: skip
    a *= by
    own = tl.where(known, t - vocab_start, -1)
    R = X + row * x_stride
    D = DX + row * dx_stride
    BODY, before, length = split(R, n_cols, SPLIT)
    TO = tl.multiple_of(D + before, 128) if SPLIT else D
    cols = first + tl.arange(0, BLOCK)
    read = (cols < length) & (ignored == 0)
    x = tl.load(BODY + cols, mask=read, other=-float("inf"), eviction_policy="evict_first").to(tl.float32)
    y = gradient_of(x, cols, first, first + BLOCK, origin, a, b, c, own - before, False).to(
        DX.dtype.element_ty
    )
    tl.store(TO + cols, y, mask=cols < length, eviction_policy="evict_first")
    if SPLIT:  # noqa: SIM102 (a constant, and a number on the device)
        if first == 0:
            edges, mask = around(R, before, length, n_cols, 2048 // X.dtype.element_ty.primitive_bitwidth)
            edge = tl.load(R + edges, mask=mask & (ignored == 0), other=-float("inf")).to(tl.float32)
            of_edge = gradient_of(edge, edges, 0, n_cols, origin, a, b, c, own, False)
            tl.store(D + edges, of_edge.to(DX.dtype.element_ty), mask=mask)


@triton.jit
def gradient_full(
    DX, X, LSE, PARTS, T, W, WEIGHT_SUM, GRAD, TOTALS, dx_stride, x_stride, g_stride, ignore_index, n_rows, n_cols,
    words, vocab_start, vocabulary, smoothing, z_scale, softcap, flags, BLOCK: tl.constexpr,
):  # fmt: skip
    full_gradient(
        DX, X, LSE, PARTS, T, W, WEIGHT_SUM, GRAD, TOTALS, dx_stride, x_stride, g_stride, ignore_index, n_rows, n_cols,
        words, vocab_start, vocabulary, smoothing, z_scale, softcap, flags, BLOCK,
    )  # fmt: skip


@triton.jit
def both_tile(
    X, LOSS, LSE, PARTS, FLAG, T, W, GRAD, TOTALS, x_stride, g_stride, ignore_index, n_rows, n_cols, words, z_scale,
    flags, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    both_in_tile(
        X, LOSS, LSE, PARTS, FLAG, T, W, GRAD, TOTALS, x_stride, g_stride, ignore_index, n_rows, n_cols, words, z_scale,
        flags, ROWS, BLOCK,
    )  # fmt: skip


@triton.jit
def both_long(
    X, LOSS, LSE, PARTS, FLAG, T, W, GRAD, TOTALS, x_stride, g_stride, ignore_index, n_rows, n_cols, words, z_scale,
    flags, BLOCK: tl.constexpr, KEEP: tl.constexpr, SPLIT: tl.constexpr, HELD: tl.constexpr, REPACK: tl.constexpr,
    PATCH: tl.constexpr,
):  # fmt: skip
    both_in_row(
        X, LOSS, LSE, PARTS, FLAG, T, W, GRAD, TOTALS, x_stride, g_stride, ignore_index, n_rows, n_cols, words, z_scale,
        flags, BLOCK, KEEP, SPLIT, HELD, REPACK, PATCH,
    )  # fmt: skip


@gluon.jit
def both_ring(
    X, LOSS, LSE, PARTS, FLAG, T, W, GRAD, TOTALS, x_stride, g_stride, ignore_index, n_rows, n_cols, words, z_scale,
    flags, BLOCK: gl.constexpr, STAGES: gl.constexpr, PREFETCH: gl.constexpr, IN_REGISTERS: gl.constexpr,
    WHOLE: gl.constexpr, INTERLEAVE: gl.constexpr,
):  # fmt: skip
    """Persistent programs, a long row a step, held in shared memory and registers: see ``common/pipeline.py``."""
    both_in_ring(
        X, LOSS, LSE, PARTS, FLAG, T, W, GRAD, TOTALS, x_stride, g_stride, ignore_index, n_rows, n_cols, words, z_scale,
        flags, BLOCK, STAGES, PREFETCH, IN_REGISTERS, WHOLE, INTERLEAVE,
    )  # fmt: skip


@triton.jit
def totals(
    LOSS_SUM, Z_SUM, ACCURACY, TOTALS, PARTIALS, LOSS, PARTS, PREDICTED, T, W, ignore_index, n_rows, chunk, words,
    vocabulary, flags, BLOCK: tl.constexpr,
):  # fmt: skip
    add_rows(
        LOSS_SUM, Z_SUM, ACCURACY, TOTALS, PARTIALS, LOSS, PARTS, PREDICTED, T, W, ignore_index, n_rows, chunk, words,
        vocabulary, flags, BLOCK,
    )  # fmt: skip


@triton.jit
def finish(LOSS_SUM, Z_SUM, ACCURACY, TOTALS, PARTIALS, parts, flags, BLOCK: tl.constexpr):
    finish_totals(LOSS_SUM, Z_SUM, ACCURACY, TOTALS, PARTIALS, parts, flags, BLOCK)


@triton.jit
def scale_pieces(X, GRAD, x_stride, g_stride, n_rows, n_cols, BLOCK: tl.constexpr):
    """BLOCK columns of a row at a time. One factor for all rows is 1 wherever the loss is what backward() is called on:
    then a few programs look at one number and are done, with no word from the host."""
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
