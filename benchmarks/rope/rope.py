"""Rotary embedding of q and k, shape (batch, tokens, q heads, k heads, head dimension): (batch, heads, tokens, d)
views of (batch, tokens, heads, d) memory, as a projection gives them; half-split pairs, cos and sin rows by token.
"rotary 64": the first 64 of a head's dimensions alone are rotated, "rotary 64 inplace" where they lie, as Liger always
does; "interleaved": neighbours are the pairs.

A backward rotates the gradients back and reads neither q nor k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.op_entry import Function, OpEntry, Overwritten, Random, both
from benchmarks.workload import Case

LLAMA_8B = (4, 8192, 32, 8, 128)


class Rotary(OpEntry):
    """What the rotary embeddings share: (q, k, what they are rotated by), of which q and k alone have gradients."""

    unread = (0, 1)

    def overwritten(self, provider: str, case: Case) -> Overwritten:
        # Liger rotates q and k, and their gradients, where they lie. (That a backward's forward does so, once, changes
        # nothing: no backward reads them.)
        if provider == "liger_aot" and "inplace" in case.variant:
            return Overwritten((0, 1))
        if provider != "liger":
            return Overwritten()
        return Overwritten((0, 1)) if case.direction == "forward" else Overwritten(grads=True)

    def tuned_shape(self, kernel: str, n: int, elements: int) -> tuple[int, ...]:
        """Heads of n; of n pairs for the kernels that take their halves."""
        batch, _, q_heads, k_heads, _ = self._usual.shape
        d = 2 * n if kernel in ("rope", "rope_multimodal") else n
        return batch, elements // (batch * (q_heads + k_heads) * d), q_heads, k_heads, d


class RoPE(Rotary):
    op = "rope"
    kernels = (("rope", "forward", ""), ("rope interleaved", "forward", "interleaved"))
    points = (
        *both([LLAMA_8B, (4, 8192, 32, 8, 64)]),
        *both([LLAMA_8B], "rotary 64"),
        Case("forward", torch.bfloat16, LLAMA_8B, "rotary 64 inplace"),
        *both([LLAMA_8B], "interleaved"),
    )
    small = (1, 4, 32, 8, 128)
    shared = (2, 3)
    constant = (2, 3)

    def inputs(self, case: Case, random: Random) -> tuple[Tensor, ...]:
        q, k = queries_and_keys(case, random)
        rotary = 64 if case.variant.startswith("rotary 64") else case.shape[-1]
        return q, k, *angles(random, case.shape[1], rotary)

    def keywords(self, variant: str) -> Mapping[str, Any]:
        return {"interleaved": variant == "interleaved", "inplace": "inplace" in variant}

    def eager(self, variant: str) -> Function:
        if variant == "interleaved":
            return lambda q, k, cos, sin: (_interleaved(q, cos, sin), _interleaved(k, cos, sin))
        return _partial if variant.startswith("rotary 64") else _whole

    def offers(self, provider: str, variant: str) -> bool:
        if "inplace" in variant:
            return provider in ("liger_aot", "liger")
        return provider in self.providers and (provider != "liger" or variant != "interleaved")

    def liger(self, variant: str) -> Function:
        from liger_kernel.ops.rope import LigerRopeFunction

        apply: Function = LigerRopeFunction.apply
        return apply


def queries_and_keys(case: Case, random: Random) -> tuple[Tensor, Tensor]:
    """q and k as (batch, heads, tokens, d) views of token-major memory."""
    batch, tokens, q_heads, k_heads, d = case.shape
    q = random.normal(batch, tokens, q_heads, d).transpose(1, 2)
    k = random.normal(batch, tokens, k_heads, d).transpose(1, 2)
    return q, k


def angles(random: Random, *shape: int) -> tuple[Tensor, Tensor]:
    """cos and sin of random angles, each angle twice along the last dimension."""
    *outer, rotary = shape
    half = random.normal(*outer, rotary // 2).float() * 3
    both = torch.cat((half, half), -1)
    return both.cos().to(random.dtype), both.sin().to(random.dtype)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _whole(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def _partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    rotary = cos.shape[-1]
    q_out, k_out = _whole(q[..., :rotary], k[..., :rotary], cos, sin)
    return torch.cat((q_out, q[..., rotary:]), -1), torch.cat((k_out, k[..., rotary:]), -1)


def _interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = x.shape[-1] // 2
    cos, sin = cos[..., :pairs], sin[..., :pairs]
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


ENTRY = RoPE()
