"""What ``warp_group_interpreter`` runs in place of device functions of attention's forward that say how values lie in
registers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def mask_scores(s: Tensor, key: Any, bounds: tuple[Tensor, Tensor], left: Any) -> Tensor:
    keys = key + torch.arange(s.shape[1])
    seen = keys < bounds[1][:, None]
    if left:
        seen = seen & (keys >= bounds[0][:, None])
    return torch.where(seen, s, -torch.inf)


SOFTMAX = {
    "soft_cap": lambda s, inner: torch.tanh(s * inner) if inner else s,
    "no_hoist": lambda x: x,
    "mask_scores": mask_scores,
    "to_x2": lambda e, dtype: e.type(dtype),
    "from_x2": lambda x, dtype, layout, n: x,
    "partial_row_sums": lambda e: e.sum(1, keepdim=True),
    "scale_rows": lambda acc, by: acc * by[:, None],
    "whole_blocks": lambda keys, z: keys // z.BLOCK_N,
}
