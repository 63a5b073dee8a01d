"""Tiny models of Transformers with random weights, and what a step with them gives.

Importing this skips a module of tests where Transformers is not installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip(
    "transformers", reason="Transformers is not installed: make venv installs it"
)

from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

TEXT: dict[str, Any] = {
    "vocab_size": 120, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Sections of a quarter of a head; 2.5's vision tower has norms without a mean and gated MLPs.
VL = TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
VISION: dict[str, Any] = {
    "depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
TOKENS = {
    "image_token_id": 110,
    "video_token_id": 111,
    "vision_start_token_id": 112,
    "vision_end_token_id": 113,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": TEXT,
    "mistral": TEXT | {"sliding_window": 8},
    "mixtral": TEXT | {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
    "qwen2": TEXT,
    "qwen2_moe": TEXT | MOE | {"shared_expert_intermediate_size": 48},
    "qwen3": TEXT | {"head_dim": 16},
    "qwen3_moe": TEXT | MOE | {"head_dim": 16, "mlp_only_layers": [0]},
    "gemma": TEXT | {"head_dim": 16},
    "gemma2": TEXT | {"head_dim": 16, "final_logit_softcapping": 2.0},
    "gemma3_text": TEXT | {"head_dim": 16, "final_logit_softcapping": 2.0},
    "gemma3": {
        "text_config": TEXT | {"head_dim": 16},
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 16, "patch_size": 4,
        },
        "mm_tokens_per_image": 4, "image_token_index": 110, "boi_token_index": 111, "eoi_token_index": 112,
    },
    "phi3": TEXT | {"partial_rotary_factor": 0.5},
    "olmo2": TEXT,
    "granite": TEXT | {"logits_scaling": 3.0, "residual_multiplier": 0.5},
    "glm": TEXT | {"head_dim": 16},
    "glm4": TEXT | {"head_dim": 16},
    "nemotron": TEXT,
    "qwen2_vl": {
        "text_config": VL, **TOKENS,
        "vision_config": VISION | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    },
    "qwen2_5_vl": {
        "text_config": VL, **TOKENS,
        "vision_config": VISION
        | {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48, "window_size": 16}
        | {"fullatt_block_indexes": [1]},
    },
}  # fmt: skip


def tiny(name: str, seed: int = 0, **config: Any) -> Any:
    """A model with weights that are nowhere alike: norms begin as ones or zeros."""
    torch.manual_seed(seed)
    made = CONFIG_MAPPING[name](**(CONFIGS[name] | config))
    auto = transformers.AutoModelForImageTextToText if "vision_config" in CONFIGS[name] else None
    model = (auto or transformers.AutoModelForCausalLM).from_config(made)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return model


def batch(name: str, seed: int = 1) -> dict[str, Tensor]:
    """Two sequences, or one with an image, and labels of which some are ignored."""
    made = torch.Generator().manual_seed(seed)
    if "vision_config" not in CONFIGS[name]:
        ids = torch.randint(3, 100, (2, 17), generator=made)
        labels = ids.clone()
        labels[0, :5] = -100
        return {"input_ids": ids, "labels": labels}
    ids = torch.randint(3, 100, (1, 14), generator=made)
    ids[0, 3:7] = TOKENS["image_token_id"]
    image = (ids == TOKENS["image_token_id"]).int()
    if name == "gemma3":
        pixels = torch.randn(1, 3, 16, 16, generator=made)
        return {"input_ids": ids, "labels": ids, "pixel_values": pixels, "token_type_ids": image}
    ids[0, 2] = TOKENS["vision_start_token_id"]
    return {
        "input_ids": ids, "labels": ids, "mm_token_type_ids": image, "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4, generator=made),
    }  # fmt: skip


@dataclass(frozen=True)
class Step:
    """Logits without labels, and loss, output and gradients of a training step."""

    logits: Tensor
    loss: Tensor
    output: Any
    gradients: dict[str, Tensor]


def step(model: Any, inputs: dict[str, Tensor]) -> Step:
    model.zero_grad()
    model.eval()
    with torch.no_grad():
        logits = model(**{k: v for k, v in inputs.items() if k != "labels"}).logits
    model.train()
    output = model(**inputs)
    output.loss.backward()
    gradients = {k: p.grad.detach().clone() for k, p in model.named_parameters() if p.grad is not None}
    return Step(logits, output.loss.detach(), output, gradients)


def assert_close(got: Step, want: Step) -> None:
    """To what float32 keeps of sums of a few hundred terms of the largest size in a tensor: 2^-17 of that."""
    assert got.gradients.keys() == want.gradients.keys()
    pairs = {"logits": (got.logits, want.logits), "loss": (got.loss, want.loss)}
    pairs |= {name: (got.gradients[name], want.gradients[name]) for name in want.gradients}
    largest = max(float(g.abs().max()) for g in want.gradients.values())
    for name, (a, b) in pairs.items():
        scale = float(b.abs().max()) if name in ("logits", "loss") else largest
        assert a.dtype == b.dtype and a.shape == b.shape
        assert float((a - b).abs().max()) <= 2**-17 * scale, name


def assert_same(got: Step, want: Step) -> None:
    """Bit by bit."""
    assert torch.equal(got.logits, want.logits) and torch.equal(got.loss, want.loss)
    assert all(torch.equal(got.gradients[name], g) for name, g in want.gradients.items())


def changed_modules(model: nn.Module) -> list[str]:
    """Names of the modules that a method of an instance's own stands in."""
    own = ("forward", "_apply_gate", "_old_forward")
    return [
        name for name, m in model.named_modules() if any(_ours(vars(m).get(attribute)) for attribute in own)
    ]


def _ours(method: Callable[..., Any] | None) -> bool:
    function = getattr(method, "__func__", None)
    module = getattr(getattr(function, "__code__", None), "co_filename", "")
    rebound = getattr(function, "__module__", "") or ""
    return "liger_aot" in module or rebound.startswith("liger_aot")


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value``, or isn't there if that is None."""
    before = vars(owner)[name]
    delattr(owner, name) if value is None else setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
