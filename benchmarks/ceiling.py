"""The measured ceiling of memory-bound work: a device-to-device copy."""

from __future__ import annotations

import torch

from benchmarks.measure import Call


def copy_calls(moved_bytes: int, device: torch.device, sets: int, seed: int) -> list[Call]:
    """`out.copy_(x)` on random bf16 data, `moved_bytes` read and written together, one Call for each set."""
    generator = torch.Generator(device).manual_seed(seed)
    calls = []
    for _ in range(sets):
        x = torch.randn(moved_bytes // 4, device=device, dtype=torch.bfloat16, generator=generator)
        calls.append(_copy(torch.empty_like(x), x))
    return calls


def _copy(out: torch.Tensor, x: torch.Tensor) -> Call:
    return Call(lambda: out.copy_(x))
