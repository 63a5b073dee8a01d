"""Who is measured: the product and its peers, how each is found, and why one is absent."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True)
class Provider:
    """One implementation. `module` is what has to be importable, `distribution` what gives its version."""

    name: str
    label: str
    module: str
    distribution: str


PROVIDERS = (
    Provider("liger_aot", "liger-aot", "liger_aot", "liger-aot"),
    Provider("torch", "torch eager", "torch", "torch"),
    Provider("torch_compile", "torch.compile", "torch", "torch"),
    Provider("liger", "Liger (Triton JIT)", "liger_kernel.ops", "liger-kernel"),
    Provider("quack", "QuACK (CuTe)", "quack", "quack-kernels"),
)
NAMES = tuple(provider.name for provider in PROVIDERS)

OURS = NAMES[0]
# How whole models are run, and what that is called in tables and plots.
MODEL_LABELS = {
    OURS: "liger-aot",
    "liger_aot_attention": "liger-aot, its attention too",
    "liger_on_aot": "Liger's code on liger-aot",
    "transformers": "Transformers",
    "liger": "Liger (Triton JIT)",
}

# The measured ceiling stands among the records as a provider of its own.
COPY = "copy"


def label(name: str) -> str:
    """How a provider is called in tables and plots; an unknown name is its own label."""
    return next((provider.label for provider in PROVIDERS if provider.name == name), name)


def short_label(name: str) -> str:
    """The label without what stands in brackets."""
    return label(name).partition(" (")[0]


def absence(name: str) -> str | None:
    """Why a provider cannot be measured here, or None. Imports it: finding it is not enough, as a peer may
    lack a library of its own."""
    provider = next(provider for provider in PROVIDERS if provider.name == name)
    try:
        importlib.import_module(provider.module)
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def first_line(error: BaseException, limit: int = 200) -> str:
    """The first line of an error's message, cut to what a table or a record can hold."""
    lines = str(error).strip().splitlines()
    return lines[0][:limit] if lines else ""
