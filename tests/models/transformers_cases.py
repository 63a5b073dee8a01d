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

SIGLIP: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
QWEN3_VISION = VISION | {
    "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48, "num_position_embeddings": 16,
}  # fmt: skip
GLM_VISION = VISION | {
    "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48, "image_size": 16, "attention_bias": False,
}  # fmt: skip
GLM_TOKENS = {
    "image_token_id": 110, "video_token_id": 111, "image_start_token_id": 112, "image_end_token_id": 113,
    "video_start_token_id": 114, "video_end_token_id": 115,
}  # fmt: skip
GLM_VL = TEXT | {
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5,
    }
}  # fmt: skip
ROTATED_QUARTER = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
}
DEEPSEEK = {
    "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "first_k_dense_replace": 1, "n_shared_experts": 1, "num_key_value_heads": 4,
}  # fmt: skip
LINEAR_ATTENTION = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
SHARED_EXPERT = MOE | {"shared_expert_intermediate_size": 48}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": TEXT,
    "mistral": TEXT | {"sliding_window": 8},
    "ministral": TEXT | {"head_dim": 16, "sliding_window": 8},
    "ministral3": TEXT | {"head_dim": 16},
    "mixtral": TEXT | {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
    "qwen2": TEXT,
    "qwen2_moe": TEXT | SHARED_EXPERT,
    "qwen3": TEXT | {"head_dim": 16},
    "qwen3_moe": TEXT | MOE | {"head_dim": 16, "mlp_only_layers": [0]},
    "qwen3_next": TEXT | SHARED_EXPERT | LINEAR_ATTENTION | ROTATED_QUARTER | {"head_dim": 32},
    "qwen3_5_text": TEXT | LINEAR_ATTENTION | {"head_dim": 16},
    "qwen3_5_moe_text": TEXT | SHARED_EXPERT | LINEAR_ATTENTION | {"head_dim": 16},
    "gemma": TEXT | {"head_dim": 16},
    "gemma2": TEXT | {"head_dim": 16, "final_logit_softcapping": 2.0},
    "gemma3_text": TEXT | {"head_dim": 16, "final_logit_softcapping": 2.0},
    "gemma3": {
        "text_config": TEXT | {"head_dim": 16}, "vision_config": SIGLIP,
        "mm_tokens_per_image": 4, "image_token_index": 110, "boi_token_index": 111, "eoi_token_index": 112,
    },
    "gemma4_text": TEXT | {
        "head_dim": 16, "global_head_dim": 16, "final_logit_softcapping": 2.0, "hidden_size_per_layer_input": 0,
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
        "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8,
    },
    "phi3": TEXT | {"partial_rotary_factor": 0.5},
    "olmo2": TEXT,
    "olmo3": TEXT | {"sliding_window": 8},
    "smollm3": TEXT | {"no_rope_layers": [1, 0]},
    "granite": TEXT | {"logits_scaling": 3.0, "residual_multiplier": 0.5},
    "granitemoehybrid": TEXT | MAMBA | {
        "logits_scaling": 3.0, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32,
        "shared_intermediate_size": 48, "layer_types": ["mamba", "attention"], "position_embedding_type": "rope",
    },
    "glm": TEXT | {"head_dim": 16},
    "glm4": TEXT | {"head_dim": 16},
    "glm4_moe": TEXT | DEEPSEEK | {"head_dim": 16, "use_qk_norm": True},
    "nemotron": TEXT,
    "nemotron_h": TEXT | {
        "head_dim": 16, "layers_block_type": ["mamba", "mlp", "attention", "moe"], "mamba_num_heads": 8,
        "mamba_head_dim": 16, "ssm_state_size": 8, "chunk_size": 8, "n_groups": 2, "n_routed_experts": 4,
        "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "num_experts_per_tok": 2,
    },
    "exaone4": TEXT | {"head_dim": 16, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    "hunyuan_v1_dense": TEXT | {"head_dim": 16},
    "hunyuan_v1_moe": TEXT | {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "minimax": TEXT | {
        "head_dim": 16, "num_local_experts": 4, "block_size": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "minimax_m2": TEXT | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, **ROTATED_QUARTER},
    "gpt_oss": TEXT | {
        "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "deepseek_v2": TEXT | DEEPSEEK,
    "deepseek_v3": TEXT | DEEPSEEK,
    "deepseek_v4": TEXT | {
        "head_dim": 16, "num_key_value_heads": 1, "partial_rotary_factor": 0.5, "moe_intermediate_size": 32,
        "q_lora_rank": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "o_groups": 2, "o_lora_rank": 16,
        "num_hash_layers": 1, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "sliding_window": 8,
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe"], "swiglu_limit": 0.5,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "llama4_text": TEXT | {
        "head_dim": 16, "intermediate_size": 48, "intermediate_size_mlp": 96, "num_local_experts": 4,
        "moe_layers": [1], "no_rope_layers": [1, 1], "attention_chunk_size": 8,
    },
    "falcon_h1": TEXT | MAMBA | {
        "head_dim": 16, "mamba_d_ssm": 128, "mamba_n_groups": 1, "lm_head_multiplier": 0.5,
        "mlp_multipliers": [0.5, 2.0],
    },
    "kimi_linear": TEXT | {
        "num_key_value_heads": 4, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_token": 2,
        "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "linear_head_dim": 16,
        "linear_num_heads": 4, "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
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
    "qwen3_vl": {
        "text_config": VL | {"head_dim": 16}, **TOKENS,
        "vision_config": QWEN3_VISION | {"deepstack_visual_indexes": [0]},
    },
    "qwen3_vl_moe": {
        "text_config": VL | MOE | {"head_dim": 16}, **TOKENS,
        "vision_config": QWEN3_VISION | {"deepstack_visual_indexes": [0]},
    },
    "qwen3_5": {"text_config": VL | LINEAR_ATTENTION | {"head_dim": 16}, **TOKENS, "vision_config": QWEN3_VISION},
    "qwen3_5_moe": {
        "text_config": VL | SHARED_EXPERT | LINEAR_ATTENTION | {"head_dim": 16}, **TOKENS,
        "vision_config": QWEN3_VISION,
    },
    "glm4v": {"text_config": GLM_VL, **GLM_TOKENS, "vision_config": GLM_VISION},
    "glm4v_moe": {"text_config": GLM_VL | DEEPSEEK | {"head_dim": 16}, **GLM_TOKENS, "vision_config": GLM_VISION},
    "mllama": {
        "text_config": TEXT | {"cross_attention_layers": [1]}, "image_token_index": 110,
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_global_layers": 1,
            "attention_heads": 2, "image_size": 16, "patch_size": 4, "max_num_tiles": 1,
            "intermediate_layers_indices": [0], "vision_output_dim": 64, "supported_aspect_ratios": [[1, 1]],
        },
    },
    "mistral3": {
        "text_config": TEXT | {"model_type": "ministral3", "head_dim": 16}, "image_token_index": 110,
        "vision_config": SIGLIP | {"model_type": "pixtral", "head_dim": 16},
    },
    "llava": {
        "text_config": TEXT | {"model_type": "llama"}, "image_token_index": 110,
        "vision_config": SIGLIP | {"model_type": "clip_vision_model"},
    },
    "paligemma": {
        "text_config": TEXT | {"model_type": "gemma", "head_dim": 16}, "image_token_index": 110,
        "vision_config": SIGLIP | {"projection_dim": 64}, "projection_dim": 64,
    },
    "internvl": {
        "text_config": TEXT | {"model_type": "qwen2"}, "image_token_id": 110, "image_seq_length": 4,
        "vision_config": SIGLIP | {"image_size": [16, 16], "patch_size": [4, 4], "use_qk_norm": True},
    },
    "smolvlm": {
        "text_config": TEXT | {"model_type": "llama"}, "image_token_id": 110, "vision_config": SIGLIP,
        "pad_token_id": 0,
    },
    "kimi_k25": {
        "text_config": TEXT | DEEPSEEK | {"model_type": "deepseek_v3"}, **TOKENS, "projection_hidden_size": 32,
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
            "patch_size": 4,
        },
    },
    "muse_glimmer": {
        "text_config": TEXT | {
            "head_dim": 16, "final_logit_softcapping": 2.0, "output_multiplier": 0.5, "initializer_range": 0.2,
        }, **TOKENS,
        "out_hidden_size": 128, "projector_hidden_size": 48,
        "vision_config": SIGLIP | {"patch_size": 4},
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


def sized(name: str, **config: Any) -> Any:
    """Bfloat16, with heads of 64, which the kernels of attention are made for."""
    return tiny(name, **{"hidden_size": 256, "head_dim": 64} | config).bfloat16()


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
    whole = torch.randn(1, 3, 16, 16, generator=made)
    inputs = {"input_ids": ids, "labels": ids}
    if name == "gemma3":
        return inputs | {"pixel_values": whole, "token_type_ids": image}
    if name == "mistral3":  # 2 x 2 patches make a token
        return inputs | {"pixel_values": whole, "image_sizes": torch.tensor([[16, 16]])}
    if name in ("llava", "paligemma"):  # 16 patches: one token each
        ids = torch.cat([ids[:, :3], torch.full((1, 16), TOKENS["image_token_id"]), ids[:, 7:]], 1)
        image = {"token_type_ids": (ids == TOKENS["image_token_id"]).int()} if name == "paligemma" else {}
        return {"input_ids": ids, "labels": ids, "pixel_values": whole} | image
    if name == "internvl":
        return inputs | {"pixel_values": whole}
    if name == "smolvlm":
        return inputs | {"pixel_values": whole.unsqueeze(1)}
    if name == "mllama":
        seen = torch.ones(1, ids.shape[1], 1, 1, dtype=torch.int64)
        return inputs | {
            "pixel_values": whole[:, None, None], "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.int64),
            "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.int64), "cross_attention_mask": seen,
        }  # fmt: skip
    ids[0, 2] = TOKENS["vision_start_token_id"]
    grid = {"image_grid_thw": torch.tensor([[1, 4, 4]])}
    patches = torch.randn(16, 3 * 2 * 4 * 4, generator=made)
    if name == "kimi_k25":
        return inputs | grid | {"pixel_values": patches[:, :48].view(16, 3, 4, 4)}
    if name == "muse_glimmer":
        return inputs | grid | {"pixel_values": patches}
    return inputs | grid | {"pixel_values": patches, "mm_token_type_ids": image}


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
