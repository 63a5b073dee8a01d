"""All replacements, under their names in ``liger_kernel.ops``: the module that is registered with Liger."""

from __future__ import annotations

from typing import Any

from liger_aot.liger import divergences, elementwise, losses, norms

COVERED: dict[str, tuple[Any, str]] = {
    **norms.NAMES,
    **elementwise.NAMES,
    **losses.NAMES,
    **divergences.NAMES,
}
__all__ = list(COVERED)  # what Liger's registry takes
globals().update({name: ours for name, (ours, _) in COVERED.items()})
