"""Layers and attention for Hugging Face's ``kernels``, which Transformers takes with ``use_kernels=True``.

    import liger_aot.kernels
    liger_aot.kernels.register()
    model = AutoModelForCausalLM.from_pretrained(name, use_kernels=True)

What is not registered here keeps the layer that Transformers names for it.

This folder also is what ``kernels`` calls a local repository: ``metadata.json`` beside a module that has ``layers`` and
flash-attn's functions. ``PATH`` says where it is.

    KernelConfig({"RMSNorm": f"{liger_aot.kernels.PATH}:LigerRMSNorm"}, use_local_kernel=True)
    LOCAL_KERNELS=kernels-community/flash-attn2=PATH    # attn_implementation="flash_attention_2" without flash-attn
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from liger_aot.errors import PatchError
from liger_aot.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from liger_aot.kernels import layers
from liger_aot.kernels.layers import LAYERS

__all__ = [
    "LAYERS", "PATH", "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "layers", "register",
]  # fmt: skip

PATH = str(Path(__file__).resolve().parent)


@dataclass(frozen=True)
class _Repository:
    """What ``kernels`` asks for a layer: nothing is downloaded."""

    layer: type[nn.Module]

    def load(self) -> type[nn.Module]:
        return self.layer

    def __str__(self) -> str:
        return f"liger_aot.kernels.{self.layer.__name__}"


def _wanted() -> str:
    """The versions of ``kernels`` that the installed Transformers takes, as pip names them."""
    try:
        from transformers.utils.import_utils import KERNELS_MAX_VERSION, KERNELS_MIN_VERSION
    except ImportError:
        return "kernels"
    return f"kernels>={KERNELS_MIN_VERSION},<{KERNELS_MAX_VERSION}"


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
        raise PatchError(f"liger_aot.kernels.register: {error}: pip install '{_wanted()}'") from error
    mapping = get_kernel_mapping_transformers()
    for name, layer in LAYERS.items():
        repository = _Repository(layer)
        modes = {
            Mode.INFERENCE | Mode.TORCH_COMPILE: repository,
            Mode.TRAINING | Mode.TORCH_COMPILE: repository,
        }
        mapping[name] = {**mapping.get(name, {}), **dict.fromkeys(devices, modes)}
    register_kernel_mapping(mapping)
