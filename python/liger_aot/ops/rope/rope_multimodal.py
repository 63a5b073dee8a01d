"""Multimodal RoPE: rotary position embedding by time, height and width, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError
from liger_aot.ops.arguments import Allowed, Schema
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.op import Problem
from liger_aot.ops.rope._rotary import LAYOUT, KernelCall, Rotary, readable_pair, rotate_in_torch, table_rows

SECTION = Allowed(called="mrope_section")


class MultimodalRoPE(Rotary):
    """``rope_multimodal(q, k, cos, sin, mrope_section, *, layout="bhsd", inplace=False) -> (Tensor, Tensor)``: RoPE
    whose angles come from three tables, each for a section of the columns.

    With h = sum(mrope_section), column i < h is rotated with column i + h, as in ``rope``, by the time plane's angles
    where i lies in the first section, by the height plane's in the second and by the width plane's in the third. Other
    columns are copied. One launch for q and k; computed in float32, rounded once. Differentiable in q and k; works
    under torch.compile and, after ``preload``, in CUDA graphs. CPU tensors take the plain-torch reference.

    Args:
        q: (batch, heads, sequence, D), or (batch, sequence, heads, D) with ``layout="bshd"``, bfloat16, float16 or
            float32; D is even. Any strides with contiguous heads are read in place; other layouts are copied.
        k: as q, with any number of heads; or None.
        cos, sin: (3, batch or 1, sequence, w) of q's dtype or float32, where w is h or 2 h. Only the first h columns
            are read: the second half of Hugging Face's tables repeats them. They get no gradient.
        mrope_section: three numbers of columns: time, height, width.
        layout: "bhsd" or "bshd".
        inplace: overwrite q and k and return them. Where they need gradients they must not be leaves.

    Returns:
        tensors of q's and k's shapes, dtype and order of dimensions in memory; None where k is None.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: shapes, dtypes, devices or sections do not fit, cos or sin require a gradient; in place: tensors
            overlap, or a leaf requires a gradient.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Wang et al., Qwen2-VL: Enhancing Vision-Language Model's Perception of the World at Any Resolution
        (2024).
    """

    name = "rope_multimodal"
    tensors = ("q", "k", "cos", "sin")
    settings = Schema(
        {"int time": SECTION, "int height": SECTION, "int width": SECTION, "str layout": LAYOUT}
    )

    def __call__(
        self,
        q: Tensor,
        k: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        mrope_section: Sequence[int],
        *,
        layout: str = "bhsd",
        inplace: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if not isinstance(mrope_section, (list, tuple)) or len(mrope_section) != 3:
            raise ArgumentError(
                f"rope_multimodal: mrope_section must be three numbers, for time, height and width; got {mrope_section}"
            )
        return self.rotated(q, k, (cos, sin), (*mrope_section, layout), inplace)

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        q, k, cos, sin = tensors
        *sections, _ = settings
        batch, sequence, n = self.check_q_and_k(q, k, settings)
        self.check_cos_and_sin(q, cos, sin)
        if cos.dim() != 4 or cos.shape[:3] not in [(3, 1, sequence), (3, batch, sequence)]:
            raise ArgumentError(
                f"rope_multimodal: cos must be (3, batch or 1, sequence, columns) with batch {batch} and sequence "
                f"{sequence}, got {tuple(cos.shape)}"
            )
        half = sum(sections)
        if min(sections) < 0 or not 0 < 2 * half <= n or cos.shape[3] not in (half, 2 * half):
            raise ArgumentError(
                f"rope_multimodal: mrope_section must add up to half of cos's {cos.shape[3]} columns, or to all of "
                f"them, and at most to half of the head dimension {n}; got {tuple(sections)}"
            )

    def readable_tables(self, tables: Sequence[Any]) -> tuple[Tensor | None, ...]:
        cos, sin = tables
        planes = cos[0], sin[0]
        if all(a is b for a, b in zip(readable_pair(*planes), planes, strict=True)):
            return cos, sin
        return cos.contiguous(), sin.contiguous()

    def describe(
        self, q: Tensor, tables: Sequence[Any], settings: tuple[Any, ...], fresh: bool
    ) -> KernelCall:
        cos, sin = tables
        time, height, width, _ = settings
        half = time + height + width
        size, x_size = cos.element_size(), q.element_size()
        by_sequence, cos_stride = table_rows(cos[0]) or (0, 0)
        _, sin_stride = table_rows(sin[0]) or (0, 0)
        in_bytes = (
            *(n * size for n in (cos_stride, sin_stride, cos.stride(0), sin.stride(0))),
            *(n * x_size for n in (time, time + height, half, q.shape[-1] if fresh else 2 * half)),
        )
        return KernelCall("rope_multimodal", (q.dtype, cos.dtype), half, (by_sequence, 1), in_bytes, in_bytes)

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        half, size = shape[-1] // 2, dtype.itemsize
        table = (dtypes or {}).get("cos", dtype)
        return (Problem("rope_multimodal", (dtype, table), not half * size % 16, half),)

    @staticmethod
    def reference(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, time: int, height: int, width: int, layout: str
    ) -> tuple[Tensor, Tensor]:
        cos, sin = (_angles(t, (time, height, width), layout) for t in (cos, sin))
        return rotate_in_torch(q, cos, sin, False), rotate_in_torch(k, cos, sin, False)

    @staticmethod
    def reference_backward(
        grads: Tensors, saved: Tensors, time: int, height: int, width: int, layout: str
    ) -> Tensors:
        cos, sin = (_angles(t, (time, height, width), layout) for t in saved)
        rotated = (None if dy is None else rotate_in_torch(dy, cos, -sin, False) for dy in grads)
        return *rotated, None, None


def _angles(table: Tensor, sections: tuple[int, int, int], layout: str) -> Tensor:
    """Each plane's section of the columns, with a dimension for the heads."""
    parts = table[..., : sum(sections)].split(sections, -1)
    chosen = torch.cat([part[plane] for plane, part in enumerate(parts)], -1)
    return chosen.unsqueeze(1 if layout == "bhsd" else 2)


OP = MultimodalRoPE
