"""Vocabulary-parallel fused linear cross entropy: its kernel is that of vocab_parallel_cross_entropy."""

from csrc_triton.losses.vocab_parallel_cross_entropy import COMBINE, combine  # noqa: F401 (forms name functions)

DECLARATION = {
    "op": "vocab_parallel_linear_cross_entropy",
    "uses": ["cross_entropy", "fused_linear_cross_entropy"],
    "kernels": {"vocab_parallel_linear_cross_entropy_combine": COMBINE},
}
