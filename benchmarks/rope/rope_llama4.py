"""Rotary embedding by complex numbers (Llama 4) of q and k, shape (batch, tokens, q heads, k heads, head dimension):
(batch, tokens, heads, d) tensors, neighbouring elements a complex number, times freqs_cis (tokens, d / 2).

A backward rotates the gradients back and reads neither q nor k."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.op_entry import Function, Random, both
from benchmarks.rope.rope import Rotary
from benchmarks.workload import Case

SCOUT = (4, 8192, 40, 8, 128)


class RoPELlama4(Rotary):
    op = "rope_llama4"
    kernels = (("rope_llama4", "forward", ""),)
    points = tuple(both([SCOUT]))
    small = (1, 4, 40, 8, 128)
    shared = (2,)

    def inputs(self, case: Case, random: Random) -> tuple[Tensor, ...]:
        batch, tokens, q_heads, k_heads, d = case.shape
        angles = random.normal(tokens, d // 2).float() * 3
        q, k = random.normal(batch, tokens, q_heads, d), random.normal(batch, tokens, k_heads, d)
        return q, k, torch.polar(torch.ones_like(angles), angles)

    def eager(self, variant: str) -> Function:
        return lambda q, k, freqs_cis: (_rotated(q, freqs_cis), _rotated(k, freqs_cis))

    def liger(self, variant: str) -> Function:
        from liger_kernel.ops.llama4_rope import LigerLlama4RopeFunction

        apply: Function = LigerLlama4RopeFunction.apply
        return apply


def _rotated(x: Tensor, freqs_cis: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * freqs_cis[None, :, None]).flatten(-2).to(x.dtype)


ENTRY = RoPELlama4()
