"""Multimodal rotary embedding (Qwen2-VL) of q and k, shape (1, tokens, q heads, k heads, head dimension): cos and sin
rows for a token's place in time, height and width, each for its section of the head's dimensions.

A backward rotates the gradients back and reads neither q nor k."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.op_entry import Function, Random, both
from benchmarks.rope.rope import Rotary, angles, queries_and_keys, rotate_half
from benchmarks.workload import Case

QWEN2_VL_7B = (1, 32768, 28, 4, 128)


class RoPEMultimodal(Rotary):
    op = "rope_multimodal"
    kernels = (("rope_multimodal", "forward", ""),)
    points = tuple(both([QWEN2_VL_7B, (1, 32768, 32, 8, 128)]))
    small = (1, 4, 28, 4, 128)
    shared = (2, 3)
    constant = (2, 3)

    def inputs(self, case: Case, random: Random) -> tuple[Tensor, ...]:
        batch, tokens, _, _, d = case.shape
        return *queries_and_keys(case, random), *angles(random, 3, batch, tokens, d)

    def invoke(self, op: Function, variant: str) -> Function:
        return lambda q, k, cos, sin: op(q, k, cos, sin, sections(q))

    def eager(self, variant: str) -> Function:
        return _rotated

    def liger(self, variant: str) -> Function:
        from liger_kernel.ops.qwen2vl_mrope import LigerQwen2VLMRopeFunction

        return lambda q, k, cos, sin: LigerQwen2VLMRopeFunction.apply(q, k, cos, sin, sections(q))


def sections(q: Tensor) -> list[int]:
    """A quarter of a head's pairs for time, the rest shared by height and width: (16, 24, 24) of 64."""
    pairs = q.shape[-1] // 2
    return [pairs - 2 * (pairs * 3 // 8), pairs * 3 // 8, pairs * 3 // 8]


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = _by_section(cos, sections(q)), _by_section(sin, sections(q))
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def _by_section(rows: Tensor, parts: list[int]) -> Tensor:
    """(3, batch, tokens, d) -> (batch, 1, tokens, d): of each section of both halves, its own axis' rows."""
    split = rows.split(parts * 2, -1)
    return torch.cat([part[i % 3] for i, part in enumerate(split)], -1).unsqueeze(1)


ENTRY = RoPEMultimodal()
