"""``policy_loss`` of the log-probabilities of some of the sequences, with its derivatives, in torch.

They are written out, as the gradient of the logits is found in the forward, where autograd does not run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from liger_aot.ops.post_training.policy_loss import VESPO, Settings, objective, vespo_weights


class Tokens(NamedTuple):
    """(sequences, tokens), but for ``advantages`` and ``ratio``, which may have one column."""

    logps: Tensor
    old: Tensor  # the same numbers as logps where there are none, and where a token does not count
    reference: Tensor
    mask: Tensor  # 1 where a token counts, else 0
    advantages: Tensor
    ratio: Tensor | None  # of the trainer's and the sampler's probabilities


class Policy(NamedTuple):
    """(sequences, tokens) each."""

    losses: Tensor
    kl: Tensor
    clipped: Tensor  # 1 or 0
    direct: Tensor  # the derivative of a token's loss by its log-probability, its sequence's importance weight held
    by_weight: Tensor  # and by the logarithm of that


def policy(t: Tokens, s: Settings) -> Policy:
    """Each token's loss, its parts and its derivatives."""
    logs = t.logps - t.old
    if s.of_sequence:
        mean = (logs * t.mask).sum(-1, keepdim=True) / t.mask.sum(-1, keepdim=True).clamp(min=1)
        logs = mean.expand(logs.shape)
    of_sequences = vespo_weights(logs * t.mask, t.advantages, t.ratio, None, s)
    losses, slopes, clipped = objective(t.logps, logs.exp(), t.advantages, of_sequences, s)
    if t.ratio is not None and s.formula != VESPO:
        losses, slopes = losses * t.ratio, slopes * t.ratio
    apart = t.reference - t.logps
    power = apart.exp()
    kl, by_kl = power - apart - 1, 1 - power
    if s.use_bias_correction_kl:
        kl, by_kl = kl * logs.exp(), by_kl * logs.exp()
        slopes = slopes + s.beta * kl
    losses, by_kl = losses + s.beta * kl, s.beta * by_kl
    if not s.of_sequence:
        slopes, by_kl = torch.zeros_like(slopes), slopes + by_kl
    return Policy(losses, kl, clipped.to(logs.dtype), by_kl, slopes)


def slopes_of(found: Policy, weights: Tensor, mask: Tensor) -> Tensor:
    """(sequences, tokens) the derivatives of the sum of ``losses`` times ``weights`` by the log-probabilities."""
    share = mask / mask.sum(-1, keepdim=True).clamp(min=1)
    return found.direct * weights + (found.by_weight * weights).sum(-1, keepdim=True) * share
