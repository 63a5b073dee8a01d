"""What the replacements of Liger's functions share: its arguments turned into those of the ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError

CASTING_MODES = {"llama": 0, "gemma": 1, "none": -1}  # with Liger's numbers
_NAMES = {number: name for name, number in CASTING_MODES.items()}


def casting_name(mode: str | int) -> str:
    name = _NAMES.get(mode) if isinstance(mode, int) else mode
    if name not in CASTING_MODES:
        raise ArgumentError(
            f"casting_mode must be one of {', '.join(CASTING_MODES)} or {', '.join(map(str, _NAMES))}; got {mode!r}"
        )
    return name


def launch_numbers(n: int) -> tuple[int, int]:
    """(BLOCK_SIZE, num_warps), which Liger's forwards return and its backwards take. Nothing here reads them."""
    block = 1 << max(n - 1, 0).bit_length()
    return block, 4 if block < 2048 else 8 if block < 8192 else 16 if block < 32768 else 32


def whole(x: Any) -> Any:
    """A DTensor's full tensor, as in Liger's norms; any other argument itself."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def gradients_of(
    loss: Tensor, inputs: tuple[Tensor | None, ...], grad: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs that require one; None for the others. An unreduced loss is summed."""
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    if not wanted:
        return (None,) * len(inputs)
    grad = torch.ones_like(loss) if grad is None else grad.to(loss.dtype).reshape(loss.shape)
    found = iter(torch.autograd.grad(loss, wanted, grad))
    return tuple(next(found) if t is not None and t.requires_grad else None for t in inputs)
