"""Second level of a two-level column sum: fp32 partials of all programs to one row in the result's dtype.

Norms write one row of partials a persistent program; this adds them in a fixed order and casts, in one launch
(``sum(0)`` and a cast take two and twice the time).
"""

import triton
import triton.language as tl

DECLARATION = {
    "op": "column_sums",
    "kernels": {
        "column_sums": {
            "arguments": {
                "OUT": "*out",
                "PARTIALS": "*fp32",
                "parts": "i32",
                "n_cols": "i32",
            },
            "axes": {"out": ["bf16", "fp16", "fp32"]},
            "aligned": ["OUT", "PARTIALS", "n_cols"],
            "forms": {"tile": {"function": "column_sums", "constants": ["BLOCK", "PARTS"]}},
        }
    },
}


@triton.jit
def column_sums(OUT, PARTIALS, parts, n_cols, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """OUT[n_cols] = sum over parts of PARTIALS[parts, n_cols]; BLOCK columns a program, PARTS rows a step."""
    cols = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_row = cols < n_cols
    part = tl.arange(0, PARTS)
    total = tl.zeros([PARTS, BLOCK], tl.float32)
    for first in range(0, parts, PARTS):
        rows = (first + part).to(tl.int64)
        total += tl.load(
            PARTIALS + rows[:, None] * n_cols + cols[None, :],
            mask=(rows < parts)[:, None] & in_row[None, :],
            other=0.0,
        )
    tl.store(OUT + cols, tl.sum(total, 0).to(OUT.dtype.element_ty), mask=in_row)
