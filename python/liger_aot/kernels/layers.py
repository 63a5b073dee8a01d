"""The layers. They have no state: their ``forward`` is put into a model's own modules and reads those modules'
attributes. All have gradients and work under torch.compile in one graph."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from liger_aot.errors import ArgumentError
from liger_aot.models.fitting import fitting
from liger_aot.models.loss import Loss, loss_of_logits
from liger_aot.ops.registry import load

_rmsnorm, _rope, _swiglu, _geglu = map(load, ("rmsnorm", "rope", "swiglu", "geglu"))
_cross_entropy = load("cross_entropy")


class RMSNorm(nn.Module):
    """In the place of "RMSNorm": Llama's casts, epsilon in ``variance_epsilon``."""

    has_backward = True
    can_torch_compile = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        of: Any = self  # the model's own module
        y: Tensor = _rmsnorm(hidden_states, fitting(of.weight, hidden_states), eps=of.variance_epsilon)
        return y


class RMSNormZeroCentered(nn.Module):
    """In the place of "RMSNormZeroCentered": Gemma's casts, a weight that is stored less one, epsilon in ``eps``."""

    has_backward = True
    can_torch_compile = True

    def forward(self, x: Tensor) -> Tensor:
        of: Any = self
        y: Tensor = _rmsnorm(x, fitting(of.weight, x), eps=of.eps, offset=1.0, casting_mode="gemma")
        return y


class RotaryPosEmb(nn.Module):
    """In the place of "rotary_pos_emb": all of each head is rotated, column i with column i + dim / 2."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        turned: tuple[Tensor, Tensor] = _rope(
            q,
            k,
            fitting(cos, q),
            fitting(sin, q),
            rotary_dim=q.shape[-1],  # gpt-oss has tables of half as many columns
            layout="bshd" if unsqueeze_dim == 2 else "bhsd",
        )
        return turned


class SwiGLUMLP(nn.Module):
    """In the place of "SwiGLUMLP": silu(gate) * up between three projections."""

    has_backward = True
    can_torch_compile = True

    def forward(self, x: Tensor) -> Tensor:
        of: Any = self
        y: Tensor = of.down_proj(_swiglu(of.gate_proj(x), of.up_proj(x)))
        return y


class GeGLUMLP(nn.Module):
    """In the place of "GeGLUMLP": gelu(gate) * up between three projections; exact where the module's ``act_fn`` is,
    else by tanh."""

    has_backward = True
    can_torch_compile = True

    def forward(self, x: Tensor) -> Tensor:
        of: Any = self
        activation = getattr(of, "act_fn", None)
        exact = (
            type(activation).__name__ == "GELUActivation" or getattr(activation, "approximate", "") == "none"
        )
        gated = _geglu(of.gate_proj(x), of.up_proj(x), approximate="none" if exact else "tanh")
        y: Tensor = of.down_proj(gated)
        return y


class ForCausalLMLoss(nn.Module):
    """In the place of "ForCausalLMLoss": Transformers' function of that name. The loss is float32."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        targets = labels if shift_labels is None else shift_labels
        if targets is None:
            raise ArgumentError(
                "liger_aot.kernels.ForCausalLMLoss: labels or shift_labels must be given, got neither"
            )
        found = loss_of_logits(
            _cross_entropy,
            logits,
            targets,
            Loss(),
            num_items_in_batch=num_items_in_batch,
            ignore_index=ignore_index,
            shift_labels=shift_labels,
        )
        return found.loss


LAYERS: dict[str, type[nn.Module]] = {
    "RMSNorm": RMSNorm,
    "RMSNormZeroCentered": RMSNormZeroCentered,
    "rotary_pos_emb": RotaryPosEmb,
    "SwiGLUMLP": SwiGLUMLP,
    "GeGLUMLP": GeGLUMLP,
    "ForCausalLMLoss": ForCausalLMLoss,
}
# As the repositories kernels-community/liger-kernels and kernels-community/rotary name them. Liger's tiled MLPs compute
# the same with less memory for activations.
LigerRMSNorm = RMSNorm
LigerSwiGLUMLP = LigerTiledSwiGLUMLP = SwiGLUMLP
LigerGEGLUMLP = LigerTiledGEGLUMLP = GeGLUMLP
LigerForCausalLMLossLayer = ForCausalLMLoss
apply_rotary_transformers = RotaryPosEmb
