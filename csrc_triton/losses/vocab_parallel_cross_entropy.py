"""Vocabulary-parallel cross entropy's own kernel: a row's loss from what the ranks exchanged of it. The rest is
cross_entropy's."""

import triton
import triton.language as tl

from csrc_triton.losses.vocab_rows import COMBINE, combine

DECLARATION = {
    "op": "vocab_parallel_cross_entropy",
    "uses": ["cross_entropy"],
    "kernels": {"vocab_parallel_cross_entropy_combine": COMBINE},
}


@triton.jit
def from_shards(
    LOSS, LSE, PARTS, FLAG, SHARDS, T, ignore_index, n_rows, shards, words, vocabulary, smoothing, z_scale, flags,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK rows a program."""
    combine(
        LOSS, LSE, PARTS, FLAG, SHARDS, T, ignore_index, n_rows, shards, words, vocabulary, smoothing, z_scale, flags,
        BLOCK,
    )  # fmt: skip
