"""What the losses of ``divergence`` need beside their own kernels: how many labels count, and the sum of the programs'
sums. One program each, in a fixed order: the same bits in every run."""

import triton
import triton.language as tl

from csrc_triton.losses.divergence import label_counts, per_label

DECLARATION = {
    "op": "divergence_sums",
    "kernels": {
        "divergence_count": {
            "arguments": {
                "COUNT": "*fp32",
                "LABELS": "*i32",
                "rows": "i64",
                "ignored": "i64",
                "label_words": "i32",
            },
            "axes": {},
            "aligned": ["LABELS"],
            "forms": {"tile": {"function": "count", "constants": ["BLOCK"]}},
        },
        "divergence_total": {
            "arguments": {
                "OUT": "*fp32",
                "PARTIALS": "*fp32",
                "COUNT": "*fp32",
                "parts": "i32",
                "scale": "fp32",
            },
            "axes": {},
            "aligned": ["PARTIALS"],
            "forms": {"tile": {"function": "total", "constants": ["BLOCK"]}},
        },
    },
}


@triton.jit
def count(COUNT, LABELS, rows, ignored, label_words, BLOCK: tl.constexpr):
    """COUNT[0] = how many of the labels are not ``ignored``."""
    counts = tl.zeros([BLOCK], tl.int32)
    for first in range(0, rows, BLOCK):
        at = first + tl.arange(0, BLOCK).to(tl.int64)
        counts += label_counts(LABELS, at, ignored, label_words, at < rows).to(tl.int32)
    tl.store(COUNT, tl.sum(counts, 0).to(tl.float32))


@triton.jit
def total(OUT, PARTIALS, COUNT, parts, scale, BLOCK: tl.constexpr):
    """OUT[0] = the sum of PARTIALS[parts] times ``scale``, divided by COUNT if that is given."""
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, parts, BLOCK):
        at = first + tl.arange(0, BLOCK)
        sums += tl.load(PARTIALS + at, mask=at < parts, other=0.0)
    factor = per_label(scale, COUNT)
    tl.store(OUT, tl.where(factor == 0.0, 0.0, tl.sum(sums, 0) * factor))
