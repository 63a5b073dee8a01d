"""What Liger's dispatcher (``liger_kernel.backends``) is asked for."""

from __future__ import annotations

import os
import sys

# Functions of the dispatcher that call a class of ours by its name in their module.
DISPATCHED = (
    "cross_entropy", "fused_add_rms_norm", "fused_linear_cross_entropy", "fused_linear_jsd", "geglu", "jsd", "kl_div",
    "layer_norm", "rms_norm", "rope", "softmax", "swiglu",
)  # fmt: skip


def asked_for(op: str) -> str:
    """The implementation that Liger's variables or ``set_impl`` name for an op, or nothing."""
    for variable in (f"LIGER_KERNEL_IMPL_{op.upper()}", f"LIGER_KERNEL_BACKEND_{op.upper()}"):
        if value := os.environ.get(variable):
            return value
    if value := os.environ.get("LIGER_KERNEL_IMPL") or os.environ.get("LIGER_KERNEL_BACKEND"):
        return value
    dispatcher = sys.modules.get("liger_kernel.backends.dispatch")
    chosen = getattr(dispatcher, "_GLOBAL_IMPL", None) or getattr(dispatcher, "_GLOBAL_BACKEND", None)
    return chosen or ""
