"""Policy gradient losses from the log-probabilities of sampled tokens, with their derivatives.

w is the logarithm of the importance weight: log(pi / pi_old) of a token, or the mean of it over its sequence. A is the
advantage. The derivatives are written out, as the gradient of the logits is found in the forward, where autograd does
not run.
"""

from __future__ import annotations

from math import log
from typing import NamedTuple

import torch
from torch import Tensor

CLIPPED = (
    "grpo",
    "bnpo",
    "dr_grpo",
    "dapo",
    "luspo",
)  # by PPO's objective; they differ in how they are reduced
LOSS_TYPES = (*CLIPPED, "cispo", "sapo", "vespo")
OF_TOKENS = ("cispo", "sapo", "vespo")  # have no importance weight of whole sequences
LOG_LEAST, LOG_MOST = log(1e-8), 20.0  # of VESPO's logarithms


class Numbers(NamedTuple):
    """The settings that the losses read."""

    loss_type: str
    of_sequences: bool
    beta: float
    epsilon_low: float
    epsilon_high: float
    delta: float | None
    sapo: tuple[float, float]  # temperatures of positive and of other advantages
    vespo: tuple[float, float, float, float]  # k and lambda of advantages from 0 on, and of negative ones
    corrected_kl: bool


class Tokens(NamedTuple):
    """Of some sequences. (sequences, tokens), but for ``advantages`` and ``ratio``: these may have one column."""

    logps: Tensor
    old: Tensor  # the same numbers as logps where there are none
    reference: Tensor
    mask: Tensor  # 1 where a token counts, else 0
    advantages: Tensor
    ratio: Tensor | None  # of the sampler's and the trainer's probabilities


class Policy(NamedTuple):
    """(sequences, tokens) each or, of whole sequences, (sequences, 1)."""

    losses: Tensor
    kl: Tensor
    clipped: Tensor  # 1 or 0
    direct: Tensor  # the derivative of a token's loss by its log-probability, w held
    by_weight: Tensor  # and by w


def policy(t: Tokens, by: Numbers) -> Policy:
    """Each token's loss, its parts and its derivatives."""
    w = t.logps - t.old
    if by.of_sequences:
        w = (w * t.mask).sum(-1, keepdim=True) / t.mask.sum(-1, keepdim=True).clamp(min=1)
    coef, zero = w.exp(), torch.zeros_like(w)
    clipped, direct, by_weight = zero, zero, zero
    if by.loss_type == "cispo":
        direct = -coef.detach().clamp(max=by.epsilon_high) * t.advantages
        losses, clipped = direct * t.logps, (coef > by.epsilon_high) & (t.advantages > 0)
    elif by.loss_type == "sapo":
        temperature = torch.where(t.advantages > 0, by.sapo[0], by.sapo[1]).to(w.dtype)
        gate = torch.sigmoid(temperature * (coef - 1))
        losses = -t.advantages * gate * (4 / temperature)
        by_weight = -t.advantages * 4 * gate * (1 - gate) * coef
    elif by.loss_type == "vespo":
        direct = -_vespo_weight(w, t, by) * t.advantages
        losses = direct * t.logps
    else:
        losses, by_weight = _clip(coef, t.advantages, by)
        low, high = coef < 1 - by.epsilon_low, coef > 1 + by.epsilon_high
        clipped = (low & (t.advantages < 0)) | (high & (t.advantages > 0))
    if t.ratio is not None and by.loss_type != "vespo":
        losses, direct, by_weight = (x * t.ratio for x in (losses, direct, by_weight))
    apart = t.reference - t.logps
    power = apart.exp()
    kl, kl_direct = power - apart - 1, 1 - power
    if by.beta:
        if by.corrected_kl:
            kl, kl_direct = kl * coef, kl_direct * coef
            by_weight = by_weight + by.beta * kl
        losses, direct = losses + by.beta * kl, direct + by.beta * kl_direct
    return Policy(losses, kl, clipped.to(w.dtype), direct, by_weight)


def slopes(found: Policy, weights: Tensor, t: Tokens, of_sequences: bool) -> Tensor:
    """(sequences, tokens) the derivatives of the sum of ``losses`` times ``weights``, which have their shape, by the
    log-probabilities."""
    direct, by_weight = found.direct * weights, found.by_weight * weights
    if of_sequences:
        share = t.mask / t.mask.sum(-1, keepdim=True).clamp(min=1)
        by_weight = by_weight.sum(-1, keepdim=True) * share
    return direct + by_weight


def _clip(coef: Tensor, advantages: Tensor, by: Numbers) -> tuple[Tensor, Tensor]:
    """PPO's objective, its upper end also limited by ``delta``, and its derivative by log(coef). Where both arms are
    alike each has half of the derivative, as torch's minimum does it."""
    low, high = 1 - by.epsilon_low, 1 + by.epsilon_high
    free = coef if by.delta is None else coef.clamp(max=by.delta)
    one, other = free * advantages, coef.clamp(low, high) * advantages
    in_one = torch.ones_like(coef) if by.delta is None else (coef <= by.delta).to(coef.dtype)
    in_other = ((coef >= low) & (coef <= high)).to(coef.dtype)
    inside = torch.where(one < other, in_one, torch.where(one > other, in_other, (in_one + in_other) / 2))
    return -torch.minimum(one, other), -advantages * coef * inside


def _vespo_weight(w: Tensor, t: Tokens, by: Numbers) -> Tensor:
    """(sequences, 1): a gamma density of the sequence's importance weight, 1 at 1; it gets no gradient."""
    k_pos, lambda_pos, k_neg, lambda_neg = by.vespo
    total = (w.clamp(-LOG_MOST, LOG_MOST) * t.mask).sum(-1, keepdim=True)
    if t.ratio is not None:
        total = total + t.ratio.log().clamp(LOG_LEAST, LOG_MOST).sum(-1, keepdim=True)
    total = total.detach().clamp(LOG_LEAST, LOG_MOST)
    positive = t.advantages >= 0
    k = torch.where(positive, k_pos, k_neg).to(w.dtype)
    rate = torch.where(positive, max(lambda_pos, 1e-4), max(lambda_neg, 1e-4)).to(w.dtype)
    return (rate + k * total - rate * total.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
