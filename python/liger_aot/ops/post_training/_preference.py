"""Preference losses from the log-probabilities of whole sequences, with their derivatives.

a and b are the log-ratios of the chosen and the rejected sequence, log(pi / pi_ref), and d = beta (a - b) - margin. The
derivatives are written out, as the gradient of the logits is found in the forward, where autograd does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log, log1p
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

PairLoss = tuple[Tensor, Tensor, Tensor]  # the loss of each pair and its derivatives by a and b


class Numbers(NamedTuple):
    """The settings that the losses read."""

    beta: float
    label_smoothing: float
    margin: float
    discopop_tau: float


def _by_difference(loss: Callable[[Tensor, Numbers], tuple[Tensor, Tensor]]) -> Callable[..., PairLoss]:
    """A loss that is a function of d alone; ``loss`` gives it and its derivative."""

    def of_pair(a: Tensor, b: Tensor, by: Numbers) -> PairLoss:
        value, slope = loss(by.beta * (a - b) - by.margin, by)
        return value, by.beta * slope, -by.beta * slope

    return of_pair


def _sigmoid(d: Tensor, by: Numbers) -> tuple[Tensor, Tensor]:
    """DPO (Rafailov et al., 2023); smoothed, cDPO; without a reference, CPO (Xu et al., 2024) and, of averages with a
    margin, SimPO (Meng et al., 2024)."""
    s = by.label_smoothing
    return -(1 - s) * logsigmoid(d) - s * logsigmoid(-d), torch.sigmoid(d) - (1 - s)


def _hinge(d: Tensor, by: Numbers) -> tuple[Tensor, Tensor]:
    """SLiC (Zhao et al., 2023)."""
    return torch.relu(1 - d), -(d < 1).to(d.dtype)


def _exo_pair(d: Tensor, by: Numbers) -> tuple[Tensor, Tensor]:
    """EXO (Ji et al., 2024), equation 16."""
    q, p = torch.sigmoid(d), torch.sigmoid(-d)
    log_pw, log_pl = log1p(-by.label_smoothing), log(by.label_smoothing)
    value = q * (logsigmoid(d) - log_pw) + p * (logsigmoid(-d) - log_pl)
    return value, q * p * (d - log_pw + log_pl)


def _robust(d: Tensor, by: Numbers) -> tuple[Tensor, Tensor]:
    """Robust DPO (Chowdhury et al., 2024)."""
    s = by.label_smoothing
    value = -(1 - s) * logsigmoid(d) + s * logsigmoid(-d)
    slope = -(1 - s) * torch.sigmoid(-d) - s * torch.sigmoid(d)
    return value / (1 - 2 * s), slope / (1 - 2 * s)


def _discopop(d: Tensor, by: Numbers) -> tuple[Tensor, Tensor]:
    """DiscoPOP (Lu et al., 2024), equation 5."""
    m, tau = torch.sigmoid(d / by.discopop_tau), by.discopop_tau
    dm = m * torch.sigmoid(-d / tau) / tau
    exp, log_sigmoid = torch.exp(-d), logsigmoid(d)
    return -log_sigmoid * (1 - m) + exp * m, -torch.sigmoid(-d) * (1 - m) - exp * m + (log_sigmoid + exp) * dm


def _nca_pair(a: Tensor, b: Tensor, by: Numbers) -> PairLoss:
    """NCA (Chen et al., 2024)."""
    u, v = by.beta * a, by.beta * b
    value = -logsigmoid(u) - 0.5 * logsigmoid(-u) - 0.5 * logsigmoid(-v)
    return value, by.beta * (1.5 * torch.sigmoid(u) - 1), by.beta * 0.5 * torch.sigmoid(v)


def _bco_pair(a: Tensor, b: Tensor, by: Numbers) -> PairLoss:
    """BCO (Jung et al., 2024)."""
    u, v = by.beta * a, by.beta * b
    return -logsigmoid(u) - logsigmoid(-v), -by.beta * torch.sigmoid(-u), by.beta * torch.sigmoid(v)


def _sppo_hard(a: Tensor, b: Tensor, by: Numbers) -> PairLoss:
    """SPPO (Wu et al., 2024), with a probability of 1 that the chosen one wins."""
    half = 0.5 / by.beta
    return (a - half) ** 2 + (b + half) ** 2, 2 * (a - half), 2 * (b + half)


def _apo_zero(a: Tensor, b: Tensor, by: Numbers) -> PairLoss:
    """APO-zero (D'Oosterlinck et al., 2024), equation 7."""
    u, v = by.beta * a, by.beta * b
    return torch.sigmoid(-u) + torch.sigmoid(v), -by.beta * _bell(u), by.beta * _bell(v)


def _apo_down(a: Tensor, b: Tensor, by: Numbers) -> PairLoss:
    """APO-down, equation 8."""
    u, d = by.beta * a, by.beta * (a - b) - by.margin
    value = torch.sigmoid(u) + torch.sigmoid(-d)
    return value, by.beta * (_bell(u) - _bell(d)), by.beta * _bell(d)


def _odds_ratio(a: Tensor, b: Tensor, by: Numbers) -> PairLoss:
    """ORPO (Hong et al., 2024), of the sequences' mean log-probabilities; beta is its lambda."""
    x = log_odds(a) - log_odds(b)
    slope = -by.beta * torch.sigmoid(-x)
    return -by.beta * logsigmoid(x), slope / -torch.expm1(a), slope / torch.expm1(b)


def _bell(x: Tensor) -> Tensor:
    """The derivative of the sigmoid."""
    return torch.sigmoid(x) * torch.sigmoid(-x)


def log_odds(log_p: Tensor) -> Tensor:
    """log(p / (1 - p))."""
    return log_p - (-torch.expm1(log_p)).log()


PAIRS: Mapping[str, Callable[[Tensor, Tensor, Numbers], PairLoss]] = {
    "sigmoid": _by_difference(_sigmoid),
    "hinge": _by_difference(_hinge),
    "exo_pair": _by_difference(_exo_pair),
    "robust": _by_difference(_robust),
    "discopop": _by_difference(_discopop),
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "odds_ratio": _odds_ratio,
}


def kto(a: Tensor, kl: Tensor | None, chosen: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """KTO (Ethayarajh et al., 2024): the loss of each sequence and its derivative by a, its log-ratio.

    Args:
        kl: the divergence of policy and reference, a number or one a sequence; None is 0.
        chosen: bool, which sequences are desirable.
    """
    side = torch.where(chosen, beta, -beta).to(a.dtype)
    x = side * (a if kl is None else a - kl.to(a.dtype))
    return torch.sigmoid(-x), -side * _bell(x)
