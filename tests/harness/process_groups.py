"""Tests over several processes: one torch.distributed group, a function in each."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def in_group(
    work: Callable[..., None], world: int, *arguments: Any, backend: str = "gloo", device: str = "cpu"
) -> None:
    """Run ``work(rank, device, *arguments)`` in ``world`` new processes, which form the default group: with gloo, on
    ``device`` all of them ("cuda" is the first GPU); with NCCL, on a GPU each. ``work`` is a module's function. What
    one of them raises is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        meet = f"file://{Path(folder) / 'meet'}"
        given = work, world, backend, device, meet, arguments
        mp.spawn(_one, args=given, nprocs=world)  # type: ignore[no-untyped-call]


def _one(
    rank: int,
    work: Callable[..., None],
    world: int,
    backend: str,
    where: str,
    meet: str,
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device(where)
    if device.type == "cuda":
        # torch.cuda.set_device wants an index, as the tensors of this device have one.
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=meet, rank=rank, world_size=world)
    try:
        work(rank, device, *arguments)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    # torch's threads can outlive the group, and abort a process that ends as usual ("terminate called")
    os._exit(0)
