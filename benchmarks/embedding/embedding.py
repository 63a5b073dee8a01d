"""Embedding: rows of a table by index, shape (tokens, vocabulary, n); indices uniform, or "skewed" as words are (one
in twenty the same, of 128256).

Bytes forward count as many rows read as there are tokens, at most the table; backward the whole table's gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.op_entry import Function, OpEntry, Random, both
from benchmarks.workload import Case

SHAPES = ((32768, 128256, 4096), (32768, 32000, 4096), (32768, 1024, 4096))


class Embedding(OpEntry):
    op = "embedding"
    kernels = (("embedding_combine", "backward", ""),)
    points = (*both(SHAPES), *both(SHAPES[:1], "skewed"))
    small = (16, 1024, 1024)
    shared = (1,)
    unread = (1,)

    def inputs(self, case: Case, random: Random) -> tuple[Tensor, ...]:
        tokens, vocabulary, n = case.shape
        indices = random.integers(vocabulary, tokens)
        if case.variant == "skewed":
            indices = ((indices / vocabulary) ** 4 * vocabulary).long()
        return indices, random.normal(vocabulary, n)

    def eager(self, variant: str) -> Function:
        return torch.nn.functional.embedding

    def liger(self, variant: str) -> Function:
        from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction

        return lambda indices, weight: LigerEmbeddingFunction.apply(weight, indices)

    def moved_bytes(self, case: Case) -> int:
        if case.direction == "backward":
            return super().moved_bytes(case)
        tokens, vocabulary, n = case.shape
        indices = tokens * torch.int64.itemsize
        return indices + (min(tokens, vocabulary) + tokens) * n * case.dtype.itemsize

    def tuned_shape(self, kernel: str, n: int, elements: int) -> tuple[int, ...]:
        """Four rows of the table a token, as a large vocabulary has."""
        return elements // n, 4 * (elements // n), n


ENTRY = Embedding()
