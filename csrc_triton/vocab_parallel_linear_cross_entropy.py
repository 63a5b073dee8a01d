"""Vocabulary-parallel fused linear cross entropy's own kernel, as vocab_parallel_cross_entropy's."""

import triton
import triton.language as tl

from csrc_triton.vocab_rows import combine

DECLARATION = {
    "op": "vocab_parallel_linear_cross_entropy",
    "kernels": {
        "vocab_parallel_linear_cross_entropy_combine": {
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
    },
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
