"""Models of Hugging Face Transformers on liger-aot's ops.

    model = liger_aot.apply(AutoModelForCausalLM.from_pretrained(...))   # this model
    liger_aot.patch("llama")                                             # all Llama models
    liger_aot.restore(model); liger_aot.restore("llama")

``FAMILIES`` is the table of what is replaced; ``register_attention`` makes ``attn_implementation="liger_aot"`` known,
``register_experts`` ``experts_implementation="liger_aot"``.
"""

from liger_aot.models.adoption import apply, patch, restore
from liger_aot.models.attention import register_attention
from liger_aot.models.experts import register_experts
from liger_aot.models.loss import Loss
from liger_aot.models.table import FAMILIES

__all__ = ["FAMILIES", "Loss", "apply", "patch", "register_attention", "register_experts", "restore"]
