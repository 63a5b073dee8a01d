"""The model families of Transformers: one row each, what is replaced in it and by what.

A class or function is named as its modeling module names it. Adding a family is adding a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from liger_aot.models import modules
from liger_aot.models.loss import Logits

# Given what it replaces, the function that stands in its place.
Make = Callable[[Callable[..., Any]], Callable[..., Any]]

RMS_NORM = modules.rms_norm(eps="variance_epsilon")
RMS_NORM_ROUNDED_ONCE = modules.rms_norm(eps="variance_epsilon", casting_mode="none")
GEMMA_NORM = modules.rms_norm(eps="eps", offset=1.0, casting_mode="gemma")

ROPE = {"apply_rotary_pos_emb": modules.rotary(interleaved=False)}
INTERLEAVED_ROPE = {"apply_rotary_pos_emb": modules.rotary(interleaved=True)}


@dataclass(frozen=True)
class Family:
    """A row.

    Attributes:
        name: as in ``transformers.models.<name>.modeling_<name>``.
        norms, mlps: class -> what replaces its ``forward``.
        experts: class -> what replaces its ``_apply_gate``.
        rotary: function -> what replaces it.
        attentions: classes whose ``forward`` calls the functions of ``rotary``.
        packed: those of them that are wrapped too -> by what.
        losses: class with an ``lm_head`` -> what lies between its logits and its loss.
    """

    name: str
    norms: Mapping[str, Make]
    mlps: Mapping[str, Make]
    attentions: tuple[str, ...]
    losses: Mapping[str, Logits]
    rotary: Mapping[str, Make] = field(default_factory=lambda: ROPE)
    experts: Mapping[str, Make] = field(default_factory=dict)
    packed: Mapping[str, Make] = field(default_factory=dict)

    @property
    def module(self) -> str:
        return f"transformers.models.{self.name}.modeling_{self.name}"


def _usual(name: str, prefix: str, **different: Any) -> Family:
    """Named as Llama's classes are, with its norm and a gated MLP."""
    row = {
        "norms": {f"{prefix}RMSNorm": RMS_NORM},
        "mlps": {f"{prefix}MLP": modules.gated_mlp},
        "attentions": (f"{prefix}Attention",),
        "losses": {f"{prefix}ForCausalLM": Logits()},
    }
    return Family(name=name, **{**row, **different})


FAMILIES: Mapping[str, Family] = {
    row.name: row
    for row in (
        _usual("llama", "Llama"),
        _usual("mistral", "Mistral"),
        _usual("mixtral", "Mixtral", mlps={}, experts={"MixtralExperts": modules.expert_gate}),
        _usual("qwen2", "Qwen2"),
        _usual("qwen2_moe", "Qwen2Moe", experts={"Qwen2MoeExperts": modules.expert_gate}),
        _usual("qwen3", "Qwen3"),
        _usual("qwen3_moe", "Qwen3Moe", experts={"Qwen3MoeExperts": modules.expert_gate}),
        _usual("gemma", "Gemma", norms={"GemmaRMSNorm": GEMMA_NORM}),
        _usual(
            "gemma2",
            "Gemma2",
            norms={"Gemma2RMSNorm": GEMMA_NORM},
            losses={"Gemma2ForCausalLM": Logits(softcap="final_logit_softcapping")},
        ),
        _usual(
            "gemma3",
            "Gemma3",
            norms={"Gemma3RMSNorm": GEMMA_NORM},
            losses={
                "Gemma3ForCausalLM": Logits(softcap="final_logit_softcapping"),
                "Gemma3ForConditionalGeneration": Logits(),
            },
        ),
        _usual(
            "phi3",
            "Phi3",
            mlps={"Phi3MLP": modules.packed_mlp},
            packed={"Phi3Attention": modules.packed_attention},
        ),
        _usual("olmo2", "Olmo2", norms={"Olmo2RMSNorm": RMS_NORM_ROUNDED_ONCE}),
        _usual("granite", "Granite", losses={"GraniteForCausalLM": Logits(divided_by="logits_scaling")}),
        _usual("glm", "Glm", mlps={"GlmMLP": modules.packed_mlp}, rotary=INTERLEAVED_ROPE),
        _usual("glm4", "Glm4", mlps={"Glm4MLP": modules.packed_mlp}, rotary=INTERLEAVED_ROPE),
        _usual(
            "nemotron",
            "Nemotron",
            norms={"NemotronLayerNorm1P": modules.layer_norm_1p},
            mlps={"NemotronMLP": modules.plain_mlp},
        ),
        _usual(
            "qwen2_vl",
            "Qwen2VL",
            norms={"Qwen2VLRMSNorm": RMS_NORM, "LayerNorm": modules.layer_norm},
            mlps={"Qwen2MLP": modules.gated_mlp},
            attentions=("Qwen2VLAttention", "VisionAttention"),
            rotary={**ROPE, "apply_rotary_pos_emb_vision": modules.vision_rotary},
            losses={"Qwen2VLForConditionalGeneration": Logits()},
        ),
        _usual(
            "qwen2_5_vl",
            "Qwen2_5_VL",
            mlps={"Qwen2MLP": modules.gated_mlp, "Qwen2_5_VLMLP": modules.gated_mlp},
            attentions=("Qwen2_5_VLAttention", "Qwen2_5_VLVisionAttention"),
            rotary={**ROPE, "apply_rotary_pos_emb_vision": modules.vision_rotary},
            losses={"Qwen2_5_VLForConditionalGeneration": Logits()},
        ),
    )
}
