"""All replacements, under their names in ``liger_kernel.ops``: the module that is registered with Liger. Those of
``liger_kernel.chunked_loss`` are in ``REPLACED`` alone."""

from __future__ import annotations

from typing import Any

from liger_aot.liger import (
    attention,
    chunked,
    divergences,
    elementwise,
    log_probs,
    losses,
    mlp,
    moe,
    norms,
    residual,
)
from liger_aot.liger.fallback import served

COVERED: dict[str, tuple[Any, str]] = {
    name: (ours if isinstance(ours, type) else served(name, ours), op)
    for rows in (
        norms.NAMES,
        elementwise.NAMES,
        losses.NAMES,
        divergences.NAMES,
        attention.NAMES,
        mlp.NAMES,
        moe.NAMES,
        log_probs.NAMES,
        residual.NAMES,
    )
    for name, (ours, op) in rows.items()
}
REPLACED = COVERED | {f"{chunked.PREFIX}{name}": row for name, row in chunked.NAMES.items()}
__all__ = list(COVERED)  # what Liger's registry takes
globals().update({name: ours for name, (ours, _) in COVERED.items()})
