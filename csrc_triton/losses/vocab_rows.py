"""Cross entropy of rows whose vocabulary is cut into shards: the whole row from what each shard knows of it."""

import triton
import triton.language as tl

from csrc_triton.losses.cross_entropy_rows import store_row, target_of
from csrc_triton.softmax.softmax_statistics import LN_2, LOG2_E

COMBINE = {
    "arguments": {
        "LOSS": "*fp32",
        "LSE": "*fp32",
        "PARTS": "*fp32",
        "FLAG": "*i64",
        "SHARDS": "*fp32",
        "T": "*i32",
        "ignore_index": "i64",
        "n_rows": "i64",
        "shards": "i32",
        "words": "i32",
        "vocabulary": "i32",
        "smoothing": "fp32",
        "z_scale": "fp32",
        "flags": "i32",
    },
    "axes": {},
    "aligned": [],
    "forms": {"rows": {"function": "from_shards", "constants": ["BLOCK"]}},
}


@triton.jit
def combine(
    LOSS, LSE, PARTS, FLAG, SHARDS, T, ignore_index, n_rows, shards, words, vocabulary, smoothing, z_scale, flags,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK rows a program. SHARDS[shards, 3, n_rows] holds each shard's log-sum-exp, its logit of the target (0 where
    another has it) and its sum of logits; LOSS, LSE and PARTS become what cross_entropy's forward writes of a whole
    row, without class weights. A row whose target is out of range is NaN, its log-sum-exp and so its gradient, too."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = row < n_rows
    t = target_of(T, row, here, words)
    ignored = t == ignore_index
    known = (t >= 0) & (t < vocabulary) & (ignored == 0)
    greatest = tl.full([BLOCK], -float("inf"), tl.float32)
    for shard in range(shards):
        greatest = tl.maximum(greatest, tl.load(SHARDS + 3 * n_rows * shard + row, mask=here, other=0.0))
    total = tl.zeros([BLOCK], tl.float32)
    x_t = tl.zeros([BLOCK], tl.float32)
    summed = tl.zeros([BLOCK], tl.float32)
    for shard in range(shards):
        at = SHARDS + 3 * n_rows * shard + row
        total += tl.exp2((tl.load(at, mask=here, other=0.0) - greatest) * LOG2_E)
        x_t += tl.load(at + n_rows, mask=here, other=0.0)
        summed += tl.load(at + 2 * n_rows, mask=here, other=0.0)
    lse = tl.where(known | ignored, greatest + tl.log2(total) * LN_2, float("nan"))
    store_row(
        LOSS, LSE, PARTS, FLAG, row, here, n_rows, t, ignored, known, lse, x_t, 1.0, summed, vocabulary * 1.0,
        vocabulary, smoothing, z_scale, flags,
    )  # fmt: skip
