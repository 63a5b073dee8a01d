"""Search spaces by family: a file here has ``SPACES``, by kernel."""

from __future__ import annotations

from benchmarks.tuning.space import Space
from benchmarks.tuning.spaces import (
    activations,
    attention,
    decoding,
    embedding,
    losses,
    moe,
    norms,
    residual,
    rope,
    softmax,
)

FAMILIES = (norms, activations, rope, softmax, losses, attention, decoding, embedding, moe, residual)
SPACES: dict[str, Space] = {kernel: space for family in FAMILIES for kernel, space in family.SPACES.items()}
