"""Norms of sequence-parallel plans: rows that are sharded over a mesh, parameters that all ranks have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def by_shards(norm: Callable[..., Tensor], x: Any, *parameters: Any) -> Any:
    """``norm(x, *parameters)``, where each rank computes its own rows. Parameters' gradients are the sum over ranks.

    Returns:
        a DTensor as x; None where the arguments are no DTensors, rows are not whole, or a parameter is sharded.
    """
    if type(x).__name__ != "DTensor":
        return None
    from torch.distributed.tensor import DTensor, Partial, Replicate

    given = [p for p in parameters if p is not None]
    if not all(isinstance(t, DTensor) and t.device_mesh == x.device_mesh for t in (x, *given)):
        return None
    if any(place.is_partial() or place.is_shard(x.dim() - 1) for place in x.placements) or any(
        not place.is_replicate() for p in given for place in p.placements
    ):
        return None
    sums = [Partial() if place.is_shard() else Replicate() for place in x.placements]
    local = (p if p is None else p.to_local(grad_placements=sums) for p in parameters)
    y = norm(x.to_local(), *local)
    return DTensor.from_local(
        y, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )
