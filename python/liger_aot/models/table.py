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
GEMMA4_NORM = modules.rms_norm(eps="eps", casting_mode="gemma")
NORM_WITHOUT_WEIGHT = modules.rms_norm(eps="eps", weight=False)
LLAMA4_NORM = modules.rms_norm(eps="eps")
TORCHS_LAYER_NORM = {"nn.LayerNorm": modules.layer_norm}

GATED_MLP = modules.gated_mlp()
PACKED_MLP = modules.packed_mlp()

ROPE = {"apply_rotary_pos_emb": modules.rotary(interleaved=False)}
INTERLEAVED_ROPE = {"apply_rotary_pos_emb": modules.rotary(interleaved=True)}
VISION_ROPE = {"apply_rotary_pos_emb_vision": modules.vision_rotary}

SOFTCAP = Logits(softcap="config.final_logit_softcapping")


@dataclass(frozen=True)
class Family:
    """A row: what is replaced in one modeling file. A model whose towers are of other files is of several families.

    Attributes:
        name: as in ``transformers.models.<name>.modeling_<name>``.
        norms, mlps: class -> what replaces its ``forward``. A class of torch is named as the file names it: that of
            "nn.LayerNorm" is replaced in models (``apply``), not for all models to come (``patch``).
        experts: class -> what replaces its ``_apply_gate``.
        rotary: function -> what replaces it.
        attentions: classes whose ``forward`` calls the functions of ``rotary``.
        packed: those of them that are wrapped too -> by what.
        losses: class with an ``lm_head`` -> what lies between its logits and its loss.
    """

    name: str
    norms: Mapping[str, Make] = field(default_factory=dict)
    mlps: Mapping[str, Make] = field(default_factory=dict)
    attentions: tuple[str, ...] = ()
    losses: Mapping[str, Logits] = field(default_factory=dict)
    rotary: Mapping[str, Make] = field(default_factory=dict)
    experts: Mapping[str, Make] = field(default_factory=dict)
    packed: Mapping[str, Make] = field(default_factory=dict)

    @property
    def module(self) -> str:
        return f"transformers.models.{self.name}.modeling_{self.name}"


def _usual(name: str, prefix: str, **different: Any) -> Family:
    """Named as Llama's classes are, with its norm, rotary embedding and gated MLP."""
    row = {
        "norms": {f"{prefix}RMSNorm": RMS_NORM},
        "mlps": {f"{prefix}MLP": GATED_MLP},
        "attentions": (f"{prefix}Attention",),
        "losses": {f"{prefix}ForCausalLM": Logits()},
        "rotary": ROPE,
    }
    return Family(name=name, **{**row, **different})


def _with_experts(name: str, prefix: str, **different: Any) -> Family:
    """As ``_usual``, with experts."""
    return _usual(name, prefix, **{"experts": {f"{prefix}Experts": modules.expert_gate}, **different})


def _with_vision(name: str, prefix: str, text: str, **different: Any) -> Family:
    """A language model whose classes begin with ``text``, and a vision tower whose attention rotates too."""
    row = {
        "norms": {f"{text}RMSNorm": RMS_NORM, **TORCHS_LAYER_NORM},
        "mlps": {f"{text}MLP": GATED_MLP},
        "attentions": (f"{text}Attention", f"{prefix}VisionAttention"),
        "losses": {f"{prefix}ForConditionalGeneration": Logits()},
        "rotary": {**ROPE, **VISION_ROPE},
    }
    return Family(name=name, **{**row, **different})


FAMILIES: Mapping[str, Family] = {
    row.name: row
    for row in (
        _usual("llama", "Llama"),
        _usual("mistral", "Mistral"),
        _with_experts("mixtral", "Mixtral", mlps={}),
        _usual("qwen2", "Qwen2"),
        _with_experts("qwen2_moe", "Qwen2Moe"),
        _usual("qwen3", "Qwen3"),
        _with_experts("qwen3_moe", "Qwen3Moe"),
        _usual("gemma", "Gemma", norms={"GemmaRMSNorm": GEMMA_NORM}),
        _usual(
            "gemma2",
            "Gemma2",
            norms={"Gemma2RMSNorm": GEMMA_NORM},
            losses={"Gemma2ForCausalLM": SOFTCAP},
        ),
        _usual(
            "gemma3",
            "Gemma3",
            norms={"Gemma3RMSNorm": GEMMA_NORM},
            losses={
                "Gemma3ForCausalLM": SOFTCAP,
                "Gemma3ForConditionalGeneration": Logits(),
            },
        ),
        _usual(
            "phi3",
            "Phi3",
            mlps={"Phi3MLP": PACKED_MLP},
            packed={"Phi3Attention": modules.packed_attention},
        ),
        _usual("olmo2", "Olmo2", norms={"Olmo2RMSNorm": RMS_NORM_ROUNDED_ONCE}),
        _usual(
            "granite", "Granite", losses={"GraniteForCausalLM": Logits(divided_by="config.logits_scaling")}
        ),
        _usual("glm", "Glm", mlps={"GlmMLP": PACKED_MLP}, rotary=INTERLEAVED_ROPE),
        _usual("glm4", "Glm4", mlps={"Glm4MLP": PACKED_MLP}, rotary=INTERLEAVED_ROPE),
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
            mlps={"Qwen2MLP": GATED_MLP},
            attentions=("Qwen2VLAttention", "VisionAttention"),
            rotary={**ROPE, **VISION_ROPE},
            losses={"Qwen2VLForConditionalGeneration": Logits()},
        ),
        _usual(
            "qwen2_5_vl",
            "Qwen2_5_VL",
            mlps={"Qwen2MLP": GATED_MLP, "Qwen2_5_VLMLP": GATED_MLP},
            attentions=("Qwen2_5_VLAttention", "Qwen2_5_VLVisionAttention"),
            rotary={**ROPE, **VISION_ROPE},
            losses={"Qwen2_5_VLForConditionalGeneration": Logits()},
        ),
        _usual("ministral", "Ministral"),
        _usual("ministral3", "Ministral3"),
        _usual("olmo3", "Olmo3", norms={"Olmo3RMSNorm": RMS_NORM_ROUNDED_ONCE}),
        _usual("smollm3", "SmolLM3"),
        _usual("exaone4", "Exaone4"),
        _usual("hunyuan_v1_dense", "HunYuanDenseV1"),
        _with_experts("hunyuan_v1_moe", "HunYuanMoEV1"),
        _with_experts("glm4_moe", "Glm4Moe"),
        _with_experts("minimax", "MiniMax", mlps={}),
        _with_experts("minimax_m2", "MiniMaxM2", mlps={}),
        _usual(  # its experts' activation is one of its own, for which there is no op
            "gpt_oss",
            "GptOss",
            norms={"GptOssRMSNorm": RMS_NORM_ROUNDED_ONCE},
            mlps={},
            rotary={"apply_rotary_pos_emb": modules.rotary(interleaved=False, tables="once")},
        ),
        _with_experts(
            "qwen3_next",
            "Qwen3Next",
            norms={"Qwen3NextRMSNorm": GEMMA_NORM, "Qwen3NextRMSNormGated": modules.gated_rms_norm},
        ),
        _with_vision(
            "qwen3_5",
            "Qwen3_5",
            "Qwen3_5",
            norms={
                "Qwen3_5RMSNorm": GEMMA_NORM,
                "Qwen3_5RMSNormGated": modules.gated_rms_norm,
                **TORCHS_LAYER_NORM,
            },
            losses={"Qwen3_5ForCausalLM": Logits(), "Qwen3_5ForConditionalGeneration": Logits()},
        ),
        _with_vision(
            "qwen3_5_moe",
            "Qwen3_5Moe",
            "Qwen3_5Moe",
            norms={
                "Qwen3_5MoeRMSNorm": GEMMA_NORM,
                "Qwen3_5MoeRMSNormGated": modules.gated_rms_norm,
                **TORCHS_LAYER_NORM,
            },
            experts={"Qwen3_5MoeExperts": modules.expert_gate},
            losses={"Qwen3_5MoeForCausalLM": Logits(), "Qwen3_5MoeForConditionalGeneration": Logits()},
        ),
        _with_vision("qwen3_vl", "Qwen3VL", "Qwen3VLText"),
        _with_vision(
            "qwen3_vl_moe",
            "Qwen3VLMoe",
            "Qwen3VLMoeText",
            experts={"Qwen3VLMoeTextExperts": modules.expert_gate},
        ),
        _with_vision(
            "glm4v",
            "Glm4v",
            "Glm4vText",
            norms={"Glm4vRMSNorm": RMS_NORM, "LayerNorm": modules.layer_norm},
            mlps={"Glm4vTextMLP": PACKED_MLP, "Glm4VisionMlp": GATED_MLP},
            rotary={
                "apply_rotary_pos_emb": modules.rotary(interleaved=True, tables="neighbours"),
                **VISION_ROPE,
            },
        ),
        _with_vision(
            "glm4v_moe",
            "Glm4vMoe",
            "Glm4vMoeText",
            norms={
                "Glm4vMoeTextRMSNorm": RMS_NORM,
                "Glm4vMoeRMSNorm": RMS_NORM,
                "LayerNorm": modules.layer_norm,
            },
            mlps={"Glm4vMoeTextMLP": GATED_MLP, "Glm4vMoeisionMlp": GATED_MLP},
            experts={"Glm4vMoeTextExperts": modules.expert_gate},
        ),
        Family(
            "gemma4",
            norms={"Gemma4RMSNorm": GEMMA4_NORM, **TORCHS_LAYER_NORM},
            mlps={"Gemma4TextMLP": GATED_MLP, "Gemma4VisionMLP": GATED_MLP},
            experts={"Gemma4TextExperts": modules.expert_gate},
            attentions=("Gemma4TextAttention",),
            rotary={"apply_rotary_pos_emb": modules.rotary_of_one},
            losses={
                "Gemma4ForCausalLM": SOFTCAP,
                "Gemma4ForConditionalGeneration": Logits(
                    softcap="config.text_config.final_logit_softcapping"
                ),
            },
        ),
        _with_experts(
            "deepseek_v2",
            "DeepseekV2",
            rotary={"apply_rotary_emb": modules.complex_rotary(layout="bhsd")},
        ),
        _with_experts(
            "deepseek_v3",
            "DeepseekV3",
            rotary={**ROPE, "apply_rotary_pos_emb_interleave": modules.rotary_to_halves},
        ),
        _with_experts(
            "deepseek_v4",
            "DeepseekV4",
            norms={"DeepseekV4RMSNorm": RMS_NORM, "DeepseekV4UnweightedRMSNorm": NORM_WITHOUT_WEIGHT},
            mlps={"DeepseekV4MLP": modules.limited_mlp},
            experts={"DeepseekV4Experts": modules.limited_expert_gate},
            rotary={"apply_rotary_pos_emb": modules.rotary_of_the_last},
            attentions=(
                "DeepseekV4Attention",
                "DeepseekV4HCACompressor",
                "DeepseekV4CSACompressor",
                "DeepseekV4Indexer",
            ),
        ),
        Family(
            "llama4",
            norms={
                "Llama4TextRMSNorm": LLAMA4_NORM,
                "Llama4TextL2Norm": NORM_WITHOUT_WEIGHT,
                **TORCHS_LAYER_NORM,
            },
            mlps={
                "Llama4TextMLP": modules.gated_mlp(activation="activation_fn"),
                "Llama4TextExperts": modules.llama4_experts,
            },
            attentions=("Llama4TextAttention", "Llama4VisionAttention"),
            rotary={
                "apply_rotary_emb": modules.complex_rotary(layout="bshd"),
                "vision_apply_rotary_emb": modules.complex_vision_rotary,
            },
            losses={"Llama4ForCausalLM": Logits()},
        ),
        Family(
            "mllama",
            norms={"MllamaTextRMSNorm": RMS_NORM, **TORCHS_LAYER_NORM},
            mlps={"MllamaTextMLP": GATED_MLP},
            attentions=("MllamaTextSelfAttention",),
            rotary=ROPE,
            losses={"MllamaForCausalLM": Logits(), "MllamaForConditionalGeneration": Logits()},
        ),
        _usual(
            "falcon_h1",
            "FalconH1",
            mlps={"FalconH1MLP": modules.scaled_mlp},
            losses={"FalconH1ForCausalLM": Logits(multiplied_by="model.lm_head_multiplier")},
        ),
        _with_experts(
            "granitemoehybrid",
            "GraniteMoeHybrid",
            mlps={
                "GraniteMoeHybridMLP": modules.packed_mlp(
                    activation="activation", into="input_linear", out_of="output_linear"
                )
            },
            losses={"GraniteMoeHybridForCausalLM": Logits(divided_by="config.logits_scaling")},
        ),
        _usual(
            "nemotron_h",
            "NemotronH",
            mlps={"NemotronHMLP": modules.plain_mlp},
            attentions=(),  # without positions
            rotary={},
        ),
        _with_experts("kimi_linear", "KimiLinear", attentions=(), rotary={}),  # without positions
        Family(
            "muse_glimmer",
            norms={
                "MuseGlimmerRMSNorm": GEMMA4_NORM,
                "MuseGlimmerTextCenteredRMSNorm": GEMMA_NORM,
                **TORCHS_LAYER_NORM,
            },
            mlps={"MuseGlimmerTextMLP": GATED_MLP},
            attentions=("MuseGlimmerTextAttention", "MuseGlimmerVisionAttention"),
            rotary={**ROPE, **VISION_ROPE},
            losses={
                "MuseGlimmerForConditionalGeneration": Logits(
                    softcap="config.text_config.final_logit_softcapping",
                    multiplied_by="config.text_config.output_multiplier",
                )
            },
        ),
        # Models that put a language model of another family beside a vision tower, and those towers.
        Family(
            "mistral3",
            norms={"Mistral3RMSNorm": RMS_NORM},
            losses={"Mistral3ForConditionalGeneration": Logits()},
        ),
        Family("llava", losses={"LlavaForConditionalGeneration": Logits()}),
        Family("paligemma", losses={"PaliGemmaForConditionalGeneration": Logits()}),
        Family(
            "internvl",
            norms={"InternVLVisionRMSNorm": RMS_NORM, **TORCHS_LAYER_NORM},
            losses={"InternVLForConditionalGeneration": Logits()},
        ),
        Family("smolvlm", norms=TORCHS_LAYER_NORM, losses={"SmolVLMForConditionalGeneration": Logits()}),
        Family(
            "kimi_k25",
            norms=TORCHS_LAYER_NORM,
            attentions=("Kimi_K25VisionAttention",),
            rotary=VISION_ROPE,
            losses={"Kimi_K25ForConditionalGeneration": Logits()},
        ),
        Family(
            "pixtral",
            norms={"PixtralRMSNorm": RMS_NORM},
            mlps={"PixtralMLP": GATED_MLP},
            attentions=("PixtralAttention",),
            rotary=ROPE,
        ),
        Family("siglip", norms=TORCHS_LAYER_NORM),
        Family("clip", norms=TORCHS_LAYER_NORM),
    )
}
