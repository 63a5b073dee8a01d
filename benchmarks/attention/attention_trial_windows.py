"""Sliding windows and soft caps for ``attention_trial``: what their kernels must get right, and FlashAttention-2."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.ops.attention.attention_cases import FP16, Problem


def cases(width: int, odd: int, capped: bool) -> list[Problem]:
    """Windows smaller than a block, that end at the edge of one or beside it, and almost as long as the sequence; rows
    that see no key, keys that no row sees. With a soft cap other masks, too."""
    windows = [
        Problem(1, 1, 1, 512, 512, width, window=(100, 0)),
        *(Problem(1, 2, 1, 1000, 1000, width, FP16, window=(n, 0)) for n in (0, 62, 126, 128, 129, 190, 998)),
        Problem(2, 3, 3, 300, 300, width, causal=True, window=(64, None)),
        Problem(1, 2, 1, 513, 777, width, FP16, "bhsd", window=(50, 20)),
        Problem(1, 4, 1, 777, 300, width, window=(100, 0)),
        Problem(2, 4, 2, 500, 700, odd, window=(130, 7), sinks=True),
        Problem(1, 2, 2, 40, 1000, width, FP16, window=(30, 0)),
        Problem(1, 2, 2, 1000, 40, width, window=(20, None)),
        Problem(1, 2, 2, 600, 250, width, window=(50, None)),
        Problem(1, 2, 2, 1, 1000, width, window=(300, 0)),
        Problem(1, 1, 1, 8192, 8192, width, window=(2000, 0)),  # many times around every ring
        Problem(4, 16, 4, 1000, 1000, width, FP16, window=(256, 0)),
    ]
    if not capped:
        return windows
    others = (Problem(2, 4, 2, 600, 700, width), Problem(2, 4, 2, 700, 600, width, FP16, causal=True))
    return [p._replace(softcap=cap) for p in (*windows, *others) for cap in (2.0, 50.0)]


def pairs(length: int, window: int) -> int:
    """Of rows and keys that see each other in a causal call whose rows see ``window`` keys before their own."""
    return length * (window + 1) - window * (window + 1) // 2


def flash(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """FlashAttention-2's output and lse of such a call, differentiable; SDPA itself has no windows."""
    o, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, False, False, scale=q.shape[-1] ** -0.5,
        window_size_left=window, window_size_right=0,
    )  # fmt: skip
    return o, lse.contiguous()
