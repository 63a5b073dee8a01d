"""The kernel of the vocabulary-parallel losses: the loss of a whole row from what each rank knows of it. The rest is
cross_entropy's."""

import triton
import triton.language as tl

from csrc_triton.losses.cross_entropy_rows import RowLoss, RowResults, RowSums, store_results, target_of
from csrc_triton.softmax.online_softmax import LN_2, LOG2_E

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
    "forms": {"rows": {"function": "combine", "constants": ["BLOCK"]}},
}

DECLARATION = {
    "op": "vocab_parallel_cross_entropy",
    "uses": ["cross_entropy"],
    "kernels": {"vocab_parallel_cross_entropy_combine": COMBINE},
}


@triton.jit
def combine(
    LOSS, LSE, PARTS, FLAG, SHARDS, T, ignore_index, n_rows, shards, words, vocabulary, smoothing, z_scale, flags,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK rows a program. SHARDS[shards, 3, n_rows] holds the log-sum-exp of each shard, its logit of the target (0
    where another has it) and its sum of logits; LOSS, LSE and PARTS become what cross_entropy's forward writes of a
    whole row, without class weights. A row whose target is out of range is NaN, and so are its LSE and gradient."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = row < n_rows
    target = target_of(T, row, here, words, ignore_index, vocabulary)
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
    lse = tl.where(target.known | target.ignored, greatest + tl.log2(total) * LN_2, float("nan"))
    weight_sum, sums = vocabulary * 1.0, RowSums(lse, lse - x_t, 0.0)
    out, loss = RowResults(LOSS, LSE, PARTS, FLAG, n_rows), RowLoss(vocabulary, smoothing, z_scale, flags)
    store_results(out, row, here, target, sums, x_t, 1.0, summed, weight_sum, loss)
