"""The forward of softmax for few rows: a row in one program's registers, or shared by several programs.

``scale`` is log2(e) / temperature. Differences to the greatest value are taken before the scaling, so that no finite
input overflows.
"""

import triton
import triton.language as tl

from csrc_triton.common.pdl_begin import begin

IN_REGISTERS = {
    "function": "forward_in_registers",
    "constants": ["BLOCK", "BLOCKS", "PDL"],
    "defaults": {"PDL": 0},
    "covers": "BLOCKS * BLOCK",
    "pdl": "PDL",
}
SPLIT_ARGUMENTS = {
    "Y": "*dtype",
    "X": "*dtype",
    "PEAKS": "*fp32",
    "SUMS": "*fp32",
    "y_stride": "i64",
    "x_stride": "i64",
    "n_cols": "i32",
    "parts": "i32",
    "combine": "i32",
    "scale": "fp32",
}
SPLIT = {
    "function": "forward_split",
    "constants": ["BLOCK", "PARTS", "PDL"],
    "defaults": {"PDL": 0},
    "pdl": "PDL",
}


@triton.jit
def forward_in_registers(
    Y, X, y_stride, x_stride, n_rows, n_cols, scale, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One row of at most BLOCKS * BLOCK columns a program: all its loads are in flight together."""
    row = tl.program_id(0).to(tl.int64)
    X += row * x_stride
    Y += row * y_stride
    block = tl.arange(0, BLOCK)
    begin(tl.program_id(0), PDL)
    xs = ()
    for i in tl.static_range(BLOCKS):
        cols = i * BLOCK + block
        xs += (tl.load(X + cols, mask=cols < n_cols, other=-float("inf")),)
    greatest = tl.full([BLOCK], -float("inf"), tl.float32)
    for i in tl.static_range(BLOCKS):
        greatest = tl.maximum(greatest, xs[i].to(tl.float32))
    highest = tl.max(greatest, 0)
    powers = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(BLOCKS):
        powers += tl.exp2((xs[i].to(tl.float32) - highest) * scale)
    inverse = 1.0 / tl.sum(powers, 0)
    for i in tl.static_range(BLOCKS):
        cols = i * BLOCK + block
        y = tl.exp2((xs[i].to(tl.float32) - highest) * scale) * inverse
        tl.store(Y + cols, y.to(Y.dtype.element_ty), mask=cols < n_cols)


@triton.jit
def forward_split(
    Y, X, PEAKS, SUMS, y_stride, x_stride, n_cols, parts, combine, scale,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row by ``parts`` programs of BLOCK columns, at most PARTS, in two launches: the first writes each part's
    greatest value and sum of powers; the second, with ``combine``, reads those of all parts and writes y."""
    program = tl.program_id(0)
    row = (program // parts).to(tl.int64)
    part = program % parts
    cols = part * BLOCK + tl.arange(0, BLOCK)
    combine = begin(combine, PDL)
    x = tl.load(X + row * x_stride + cols, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
    PEAKS += row * parts
    SUMS += row * parts
    if combine == 0:
        peak = tl.max(x, 0)
        # A part of -inf alone, beside which others may be finite: a sum of 0, not NaN.
        from_peak = x - tl.where(peak == -float("inf"), 0.0, peak)
        tl.store(PEAKS + part, peak)
        tl.store(SUMS + part, tl.sum(tl.exp2(from_peak * scale), 0))
    else:
        at = tl.arange(0, PARTS)
        peaks = tl.load(PEAKS + at, mask=at < parts, other=-float("inf"))
        sums = tl.load(SUMS + at, mask=at < parts, other=0.0)
        peak = tl.max(peaks, 0)
        peak = tl.where(peak == -float("inf"), 0.0, peak)
        inverse = 1.0 / tl.sum(sums * tl.exp2((peaks - peak) * scale), 0)
        y = tl.exp2((x - peak) * scale) * inverse
        tl.store(Y + row * y_stride + cols, y.to(Y.dtype.element_ty), mask=cols < n_cols)
