"""Speculative decoding: which draft tokens are accepted, and the token after them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError
from liger_aot.ops.arguments import Allowed, Schema
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.op import Problem
from liger_aot.ops.sampling._logits import (
    A_COLUMN,
    A_REQUEST,
    Argument,
    Plan,
    SamplingOp,
    first_greatest,
)
from liger_aot.ops.sampling._random import ACCEPT, RECOVER, exponential, uniform, words
from liger_aot.runtime.dispatch import OpOn
from liger_aot.runtime.layout import rows_of

MOST_DRAFTS = 1024
# One of each request, where the others have one of each draft token.
OF_REQUESTS = {
    "cu_num_draft_tokens": Argument((torch.int32,), A_REQUEST),
    "bonus_token_ids": Argument((torch.int64, torch.int32), A_REQUEST),
    "seeds": Argument((torch.int64,), A_REQUEST),
    "positions": Argument((torch.int64, torch.int32), A_REQUEST),
    "greedy": Argument((torch.int32, torch.bool), A_REQUEST),
}


class RejectionSample(SamplingOp):
    """``rejection_sample(target_probs, draft_token_ids, cu_num_draft_tokens, bonus_token_ids, seeds, positions, *,
    max_spec_len, draft_probs=None, greedy=None) -> Tensor``: the tokens of a step of speculative decoding, as in vLLM.

    A request's draft tokens are looked at in turn. One of probability p in the target and q in the draft is accepted
    where u * q < p, with u uniform from 0 to 1 - 2^-24 in steps of 2^-24. In the place of the first that is rejected
    comes a token with probabilities proportional to max(target - draft, 0); behind the last, if all are accepted, the
    bonus token. So tokens have the target's distribution. Without ``draft_probs`` the draft was sure of its tokens: q
    is 1, and a rejected token is left out of the target. A greedy request accepts tokens as long as they are the
    target's most probable one, the first of several, and goes on with that.

    The tokens depend on the request alone, bit for bit as in the plain-torch reference: draft token i has the position
    ``positions`` + i; u comes from column 0 of stream 1, the other token from stream 2 of the generator that ``sample``
    describes. A token id out of [0, n) is rejected, as is a token with a probability of NaN. No gradient. Works under
    torch.compile and, after ``preload``, in CUDA graphs: numbers of tokens stay on the device. CPU tensors take the
    reference.

    Args:
        target_probs: (tokens, n) float32: a row for each draft token of all requests, one request after the other;
            n up to 262144. Rows may have any stride; other layouts are copied.
        draft_token_ids: (tokens,) int64 or int32.
        cu_num_draft_tokens: (requests,) int32: draft tokens of all requests up to and with this one.
        bonus_token_ids: (requests,) int64 or int32: sampled from the target behind the last draft token.
        seeds: (requests,) int64.
        positions: (requests,) int64 or int32: of the first draft token in its sequence.
        max_spec_len: the most draft tokens of a request, from 1 to 1024. Further ones are not looked at.
        draft_probs: (tokens, n) float32: what the draft tokens were sampled from.
        greedy: (requests,) bool or int32: which requests are greedy. None: no request is.

    Returns:
        (requests, max_spec_len + 1) int64: accepted tokens, the one after them, and -1 in the rest.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: a shape, device or setting is not allowed, or a gradient is needed.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Leviathan et al., Fast Inference from Transformers via Speculative Decoding (2023). The arguments are vLLM's.
    """

    name = "rejection_sample"
    arguments: ClassVar[Mapping[str, Argument]] = {
        "draft_token_ids": Argument((torch.int64, torch.int32)),
        **OF_REQUESTS,
        "draft_probs": Argument((torch.float32,), A_COLUMN),
    }
    tensors = (
        "target_probs", "draft_token_ids", "cu_num_draft_tokens", "bonus_token_ids", "seeds", "positions", "greedy?",
        "draft_probs?",
    )  # fmt: skip
    beside = tensors.index("draft_probs?")
    sources = (torch.float32,)
    settings = Schema({"int max_spec_len": Allowed(least=1, most=MOST_DRAFTS)})

    def __call__(
        self,
        target_probs: Tensor,
        draft_token_ids: Tensor,
        cu_num_draft_tokens: Tensor,
        bonus_token_ids: Tensor,
        seeds: Tensor,
        positions: Tensor,
        *,
        max_spec_len: int,
        draft_probs: Tensor | None = None,
        greedy: Tensor | None = None,
    ) -> Tensor:
        tokens: Tensor = self.differentiable(
            (
                target_probs,
                draft_token_ids,
                cu_num_draft_tokens,
                bonus_token_ids,
                seeds,
                positions,
                greedy,
                draft_probs,
            ),
            (max_spec_len,),
        )
        return tokens

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        super().check(tensors, settings)
        requests = tensors[2].shape[0]
        for name, value in zip(OF_REQUESTS, tensors[2:7], strict=True):
            if value is not None and value.shape[0] != requests:
                raise ArgumentError(
                    f"{self.name}: {name} must have one element a request, as cu_num_draft_tokens has {requests}; got "
                    f"{value.shape[0]}"
                )

    def on_reference(self, tensors: Tensors) -> bool:
        """Also without requests."""
        return super().on_reference(tensors) or not tensors[2].shape[0]

    def plan_for(self, on: OpOn, tensors: Tensors, settings: tuple[Any, ...], out: Tensor | None) -> Plan:
        target, draft, requests = tensors[0], tensors[7], tensors[2].shape[0]
        (drafts,) = settings
        in_target, in_draft = rows_of(target), None if draft is None else rows_of(draft)
        assert in_target is not None
        x_at, _, _, _, _, tokens, n, stride = in_target
        draft_at, draft_stride = (0, n) if in_draft is None else (in_draft[0], in_draft[7])
        aligned = not (x_at | draft_at | stride | draft_stride | n) & 15
        parts = on.kernels["rejection_sample_parts"].for_rows((aligned,), n, requests * drafts)
        accept = on.kernels["rejection_sample"]((True,), n)
        blocks, device = -(-n // parts.block), on.device
        numbers = (stride, draft_stride, tokens, drafts, n, blocks)

        def run(tensors: Tensors, addresses: tuple[int, ...], to: Tensor | None) -> Tensors:
            target, stream = tensors[0], on.stream(device)
            target_at, ids, ends, bonus, seeds, positions, greedy, draft_at = addresses
            result = target.new_empty((requests, drafts + 1), dtype=torch.int64)
            part = target.new_empty(requests * drafts * blocks, dtype=torch.int64)
            part_at = part.data_ptr()
            given = (target_at, draft_at, ids, ends, greedy, seeds, positions, *numbers)
            parts.launch(device, stream, requests * drafts * blocks, 1, 1, part_at, *given)
            accept.launch(device, stream, requests, 1, 1, result.data_ptr(), part_at, bonus, *given)
            return (result,)

        return run

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        tokens, n = shape
        return (
            Problem("rejection_sample_parts", (), n % 16 == 0, n, tokens),
            Problem("rejection_sample", (), True, n),
        )

    @staticmethod
    def reference(
        target_probs: Tensor,
        draft_token_ids: Tensor,
        cu_num_draft_tokens: Tensor,
        bonus_token_ids: Tensor,
        seeds: Tensor,
        positions: Tensor,
        greedy: Tensor | None,
        draft_probs: Tensor | None,
        max_spec_len: int,
    ) -> tuple[Tensor, ...]:
        n = target_probs.shape[1]
        if not target_probs.shape[0]:  # no request has a draft token
            target_probs = target_probs.new_zeros((1, n))
            draft_token_ids = draft_token_ids.new_zeros(1)
            draft_probs = None
            cu_num_draft_tokens = torch.zeros_like(cu_num_draft_tokens)
        tokens = target_probs.shape[0]
        ends = cu_num_draft_tokens.long().clamp(0, tokens)
        start = torch.cat((torch.zeros_like(ends[:1]), ends))[: ends.shape[0]]
        count = (ends - start).clamp(0, max_spec_len)[:, None]
        i = torch.arange(max_spec_len, device=start.device)
        row = start[:, None] + i
        row = torch.where(row < tokens, row, tokens - 1)
        ids = draft_token_ids.long()[row]
        known = (ids >= 0) & (ids < n)
        at, wide = torch.where(known, ids, 0), positions.long()[:, None] + i
        p = torch.where(known, target_probs[row, at], 0.0)
        q = torch.ones_like(p) if draft_probs is None else torch.where(known, draft_probs[row, at], 1.0)
        u = uniform(words(seeds.repeat_interleave(max_spec_len), wide.flatten(), 1, ACCEPT)).view_as(p)
        accepted = u * q < p
        best = first_greatest(torch.where(target_probs.isnan(), -1.0, target_probs))[row]
        if greedy is not None:
            accepted = torch.where(greedy[:, None] != 0, best == ids, accepted)
        first = torch.where(accepted & (i < count), max_spec_len, i).amin(1, keepdim=True)
        first = torch.minimum(first, count)
        last = first.clamp(max=max_spec_len - 1)
        here = row.gather(1, last)[:, 0]
        rest = target_probs[here]
        if draft_probs is None:
            drafted = torch.arange(n, device=ids.device) == ids.gather(1, last)
            rest = torch.where(drafted, 0.0, rest)
        else:
            rest = rest - draft_probs[here]
        e = exponential(words(seeds, wide.gather(1, last)[:, 0], n, RECOVER))
        other = first_greatest(torch.where(rest > 0, rest, 0.0) / e)
        if greedy is not None:
            other = torch.where(greedy != 0, best.gather(1, last)[:, 0], other)
        after = torch.where(first < count, other[:, None], bonus_token_ids.long()[:, None])
        columns = torch.arange(max_spec_len + 1, device=ids.device)
        padded = torch.cat((ids, torch.full_like(ids[:, :1], -1)), 1)
        return (torch.where(columns < first, padded, torch.where(columns == first, after, -1)),)


OP = RejectionSample
