"""Models of Transformers with random weights, and who runs them: what the benchmarks of whole models share.

Sizes are those of the models' public config.json files, written out: nothing is downloaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.providers import OURS, absence


@dataclass(frozen=True)
class Shape:
    """A family of Transformers, the numbers of its config and where they are from."""

    family: str
    source: str
    config: Mapping[str, Any] = field(repr=False)


SHAPES = {
    "phi3-mini": Shape(
        "phi3",
        "config.json of microsoft/Phi-3-mini-4k-instruct",
        {
            "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5, "sliding_window": 2047, "bos_token_id": 1, "eos_token_id": 32000,
            "pad_token_id": 32000, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "llama-1b": Shape(
        "llama",
        "config.json of meta-llama/Llama-3.2-1B, without the scaling of its rotary table beyond 8192 tokens",
        {
            "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "bos_token_id": 128000, "eos_token_id": 128001,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
    "llama-8b": Shape(
        "llama",
        "config.json of meta-llama/Meta-Llama-3-8B with 8 of its 32 layers, so that 32768 tokens train on one GPU",
        {
            "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8,
            "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5, "bos_token_id": 128000, "eos_token_id": 128001,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
}  # fmt: skip
_TINY = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SHAPES |= {f"tiny-{f}": Shape(f, "to try a benchmark on the CPU", _TINY) for f in ("phi3", "llama")}


def absences(names: Sequence[str]) -> dict[str, str]:
    """Which of these can't run here, and why. Imports what they need: not for a process whose start is timed."""
    needs = {"liger": ("liger",), "liger_on_aot": ("liger", OURS), "transformers": ()}
    found = {n: [why for need in needs.get(n, (OURS,)) if (why := absence(need))] for n in names}
    return {name: reasons[0] for name, reasons in found.items() if reasons}


def config_of(shape: Shape, **changed: Any) -> Any:
    from transformers import AutoConfig

    numbers = {"use_cache": False, "attn_implementation": "sdpa", **shape.config, **changed}
    return AutoConfig.for_model(shape.family, **numbers)


def made(config: Any, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Any:
    """A model with random weights, made where it stays."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def adopted(provider: str, family: str, model: Any) -> Any:
    """The model as a provider runs it. A process is one provider's: Liger changes classes of Transformers."""
    if provider in ("liger", "liger_on_aot"):
        if provider == "liger_on_aot":
            importlib.import_module("liger_aot.liger")
        patches = importlib.import_module("liger_kernel.transformers.monkey_patch")
        getattr(patches, f"apply_liger_kernel_to_{family}")(model=model)
    elif provider != "transformers":
        import liger_aot

        liger_aot.apply(model, attention=provider == "liger_aot_attention")
    return model
