"""``experts_implementation="liger_aot"``: the fused mixture of experts for Transformers' experts interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import PatchError
from liger_aot.models import modules
from liger_aot.models.paged import NAME
from liger_aot.ops.op import PLAIN, autocast_dtype
from liger_aot.ops.registry import load

OTHERS = "grouped_mm"  # Transformers' implementation of experts that the op is not for, and its default


def register_experts() -> None:
    """Make ``experts_implementation="liger_aot"`` known to Transformers: before a model is made that asks for it.

    ``apply`` does this too, and sets it. Gated experts with SiLU run as the op ``fused_moe``; all others, and those
    whose weights are quantised or sharded, as ``grouped_mm``.

    Raises:
        PatchError: Transformers isn't installed, or is without its experts interface.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise PatchError(f"liger_aot.register_experts: Transformers' experts interface: {error}") from error
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def experts_forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **others: Any
) -> Any:
    """The interface's function. An index past the last expert is another rank's in expert parallelism: it adds
    nothing."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if others or not _is_usual(module) or not _is_plain(module, hidden_states):
        plain = ALL_EXPERTS_FUNCTIONS[OTHERS]
        return plain(module, hidden_states, top_k_index, top_k_weights, **others)
    return load("fused_moe")(hidden_states, module.gate_up_proj, module.down_proj, top_k_index, top_k_weights)


def _is_usual(module: Any) -> bool:
    """Whether the module computes down(silu(gate) * up), with gate and up one after the other in one weight."""
    return (
        module.has_gate
        and module.is_concatenated
        and not module.is_transposed
        and not module.has_bias
        and modules.is_silu(module.act_fn)
        and modules.gates_as_usual(type(module))
    )


def _is_plain(module: Any, x: Tensor) -> bool:
    """Whether the op can read the weights, and computes in the dtype that Transformers would."""
    weights = module.gate_up_proj, module.down_proj
    return (
        x.dim() == 2
        and all(type(w) in PLAIN and w.dtype == x.dtype and w.dim() == 3 for w in weights)
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and autocast_dtype(x) is None
    )
