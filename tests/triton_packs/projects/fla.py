"""flash-linear-attention's gated delta rule, GLA, KDA, simple GLA (Mamba-2's) and delta rule, forward and backward,
in bfloat16, against the recurrences that they are chunked forms of, token by token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.triton_packs.projects.calls import Call

BATCH, TOKENS, HEADS, SIZE = 1, 80, 2, 64  # a whole chunk of 64 tokens and a part of one

# What passes from kernel to kernel is bfloat16: within a chunk the scores and their triangular solve, keys and values
# made of them, the states between chunks, outputs; and as many gradients on the way back. Eight roundings of at most
# 2^-9 each, of values that add up with any signs.
SLACK = 8 * 2.0**-9


def _randn(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16().requires_grad_()


def _heads() -> Tensor:
    return _randn(BATCH, TOKENS, HEADS, SIZE)


def _gates(*last: int) -> Tensor:
    """Logarithms of what of the state stays."""
    return F.logsigmoid(torch.randn(BATCH, TOKENS, HEADS, *last)).requires_grad_()


def _betas() -> Tensor:
    return torch.rand(BATCH, TOKENS, HEADS).bfloat16().requires_grad_()


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _recurrence(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor | None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Outputs and the last state. ``gate``: (batch, tokens, heads, 1 or a key's size). With ``beta`` the delta rule:
    what the state holds for a key is taken off before the new value is added."""
    if state is None:
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    found = []
    for t in range(q.shape[1]):
        state = state * gate[:, t].exp().unsqueeze(-1)
        value = v[:, t]
        if beta is not None:
            held = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
            value = (value - held) * beta[:, t].unsqueeze(-1)
        state = state + k[:, t].unsqueeze(-1) * value.unsqueeze(-2)
        found.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * q.shape[3] ** -0.5)
    return torch.stack(found, 1), state


def _gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]


def _gated_delta_rule_step(*arguments: Tensor) -> Any:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    q, k, v, g, beta, state = arguments
    return fused_recurrent_gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )


def _gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    from fla.ops.gla import chunk_gla

    return chunk_gla(q, k, v, g)[0]


def _kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
    from fla.ops.kda import chunk_kda

    return chunk_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]


def _simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Any:
    from fla.ops.simple_gla import chunk_simple_gla

    return chunk_simple_gla(q, k, v, g)[0]


def _delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Any:
    from fla.ops.delta_rule import chunk_delta_rule

    return chunk_delta_rule(q, k, v, beta, use_qk_l2norm_in_kernel=True)[0]


def _step_arguments() -> tuple[Tensor, ...]:
    one = [torch.randn(BATCH, 1, HEADS, SIZE).bfloat16() for _ in range(3)]
    gate, beta = F.logsigmoid(torch.randn(BATCH, 1, HEADS)), torch.rand(BATCH, 1, HEADS).bfloat16()
    return *one, gate, beta, torch.randn(BATCH, HEADS, SIZE, SIZE)


def calls() -> list[Call]:
    return [
        Call(
            "gated_delta_rule",
            lambda: (_heads(), _heads(), _heads(), _gates(), _betas()),
            _gated_delta_rule,
            lambda q, k, v, g, b: _recurrence(_unit(q), _unit(k), v, g.unsqueeze(-1), b)[0],
            SLACK,
        ),
        Call(
            "gated_delta_rule_step",
            _step_arguments,
            _gated_delta_rule_step,
            lambda q, k, v, g, b, s: _recurrence(_unit(q), _unit(k), v, g.unsqueeze(-1), b, s),
            SLACK,
        ),
        Call(
            "gla",
            lambda: (_heads(), _heads(), _heads(), _gates(SIZE)),
            _gla,
            lambda q, k, v, g: _recurrence(q, k, v, g, None)[0],
            SLACK,
        ),
        Call(
            "kda",
            lambda: (_heads(), _heads(), _heads(), _gates(SIZE), _betas()),
            _kda,
            lambda q, k, v, g, b: _recurrence(_unit(q), _unit(k), v, g, b)[0],
            SLACK,
        ),
        Call(
            "simple_gla",
            lambda: (_heads(), _heads(), _heads(), _gates()),
            _simple_gla,
            lambda q, k, v, g: _recurrence(q, k, v, g.unsqueeze(-1), None)[0],
            SLACK,
        ),
        Call(
            "delta_rule",
            lambda: (_heads(), _heads(), _heads(), _betas()),
            _delta_rule,
            lambda q, k, v, b: _recurrence(_unit(q), _unit(k), v, torch.zeros_like(b).unsqueeze(-1), b)[0],
            SLACK,
        ),
    ]
