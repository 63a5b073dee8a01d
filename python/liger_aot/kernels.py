"""Layers for Hugging Face's ``kernels``, which Transformers takes with ``use_kernels=True``.

    import liger_aot.kernels
    liger_aot.kernels.register()
    model = AutoModelForCausalLM.from_pretrained(name, use_kernels=True)

The layers have no state: their ``forward`` is put into a model's own modules and reads those modules' attributes. Both
have gradients and work under torch.compile in one graph. What is not registered here keeps the layer that Transformers
names for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from liger_aot.errors import PatchError
from liger_aot.models.fitting import fitting
from liger_aot.ops.registry import load

__all__ = ["LAYERS", "RMSNorm", "RMSNormZeroCentered", "RotaryPosEmb", "register"]

_rmsnorm, _rope = load("rmsnorm"), load("rope")


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


LAYERS: dict[str, type[nn.Module]] = {
    "RMSNorm": RMSNorm,
    "RMSNormZeroCentered": RMSNormZeroCentered,
    "rotary_pos_emb": RotaryPosEmb,
}


@dataclass(frozen=True)
class _Repository:
    """What ``kernels`` asks for a layer: nothing is downloaded."""

    layer: type[nn.Module]

    def load(self) -> type[nn.Module]:
        return self.layer

    def __str__(self) -> str:
        return f"liger_aot.kernels.{self.layer.__name__}"


def register(devices: Iterable[str] = ("cuda", "rocm")) -> None:
    """Put ``LAYERS`` into the mapping that Transformers' ``use_kernels=True`` reads: before a model is made.

    Args:
        devices: of ``kernels``' names. On "cpu" the layers run the plain-torch references.

    Raises:
        PatchError: ``kernels`` or Transformers is not installed, or of a version without that mapping.
    """
    try:
        from kernels import Mode, register_kernel_mapping
        from transformers.integrations.hub_kernels import get_kernel_mapping_transformers
    except ImportError as error:
        raise PatchError(
            f"liger_aot.kernels.register: {error}: pip install kernels, as Transformers asks"
        ) from error
    mapping = get_kernel_mapping_transformers()
    for name, layer in LAYERS.items():
        repository = _Repository(layer)
        modes = {
            Mode.INFERENCE | Mode.TORCH_COMPILE: repository,
            Mode.TRAINING | Mode.TORCH_COMPILE: repository,
        }
        mapping[name] = {**mapping.get(name, {}), **dict.fromkeys(devices, modes)}
    register_kernel_mapping(mapping)
