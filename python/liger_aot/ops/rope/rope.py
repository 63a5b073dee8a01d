"""RoPE: rotary position embedding of q and k, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.arguments import ANY, Allowed, Schema
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.op import Problem, check_same_device
from liger_aot.ops.rope._rotary import (
    LAYOUT,
    MOST,
    KernelCall,
    Rotary,
    readable_pair,
    rotate_in_torch,
    table_rows,
)


class RoPE(Rotary):
    """``rope(q, k, cos, sin, *, position_ids=None, rotary_dim=None, interleaved=False, layout="bhsd", inplace=False)
    -> (Tensor, Tensor)``: the first ``rotary_dim`` columns of every head rotated by its token's angles.

    Column i is rotated with column i + rotary_dim / 2, or, interleaved, column 2i with column 2i + 1:
    (a, b) becomes (a cos_i - b sin_i, b cos_i + a sin_i). The other columns are copied. One launch for both; computed
    in float32, rounded once. Differentiable in q and k; works under torch.compile and, after ``preload``, in CUDA
    graphs. CPU tensors take the plain-torch reference.

    Args:
        q: (batch, heads, sequence, D), or (batch, sequence, heads, D) with ``layout="bshd"``, bfloat16, float16 or
            float32; D is even. Any strides with contiguous heads, so the transposed view that Hugging Face's models
            pass is read in place; other layouts are copied.
        k: as q, with any number of heads; or None.
        cos, sin: (sequence, w), (1, sequence, w) or (batch, sequence, w) of q's dtype or float32, where w is rotary_dim
            or half of it. Only the first rotary_dim / 2 columns are read: the second half of Hugging Face's tables
            repeats them. (Of tables that repeat each column for interleaved pairs, pass ``cos[..., ::2]`` and
            ``rotary_dim``.) With ``position_ids`` their rows are positions instead: (positions, w) or
            (1, positions, w). They get no gradient.
        position_ids: (sequence,), (1, sequence) or (batch, sequence) int64 or int32: the tables' row for each token.
            One out of range is an error on the CPU; on a GPU, where nobody could know before the launch, its token's
            rotated columns become NaN.
        rotary_dim: even, at most D; default w.
        interleaved: whether neighbouring columns are the pairs.
        layout: "bhsd" or "bshd".
        inplace: overwrite q and k and return them. Where they need gradients they must not be leaves.

    Returns:
        tensors of q's and k's shapes, dtype and order of dimensions in memory; None where k is None.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: shapes, dtypes, devices or the rotary dimension do not fit, cos or sin require a gradient; in
            place: tensors overlap, or a leaf requires a gradient; on the CPU: position_ids are out of range.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding (2021).
    """

    name = "rope"
    tensors = ("q", "k", "cos", "sin", "position_ids?")
    settings = Schema({"int? rotary_dim": Allowed(least=2), "bool interleaved": ANY, "str layout": LAYOUT})

    def __call__(
        self,
        q: Tensor,
        k: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        *,
        position_ids: Tensor | None = None,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        layout: str = "bhsd",
        inplace: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        return self.rotated(q, k, (cos, sin, position_ids), (rotary_dim, interleaved, layout), inplace)

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        q, k, cos, sin, ids = tensors
        rotary_dim = settings[0]
        batch, sequence, n = self.check_q_and_k(q, k, settings)
        self.check_cos_and_sin(q, cos, sin)
        if ids is None:
            shapes = [(sequence,), (1, sequence), (batch, sequence)]
            if cos.shape[:-1] not in shapes:
                raise ArgumentError(
                    f"rope: cos must be (sequence, columns) or (batch or 1, sequence, columns) with sequence "
                    f"{sequence} and batch {batch}, got {tuple(cos.shape)}"
                )
        else:
            if cos.dim() not in (2, 3) or (cos.dim() == 3 and cos.shape[0] != 1):
                raise ArgumentError(
                    f"rope: with position_ids, cos must be (positions, columns), got {tuple(cos.shape)}"
                )
            _check_ids(q, ids, batch, sequence)
        width = cos.shape[-1]
        rotary = width if rotary_dim is None else rotary_dim
        if rotary % 2 or not 0 < rotary <= n:
            what = "cos's last dimension, by default rotary_dim," if rotary_dim is None else "rotary_dim"
            raise ArgumentError(f"rope: {what} must be even and at most the head dimension {n}, got {rotary}")
        if width not in (rotary, rotary // 2):
            raise ArgumentError(
                f"rope: cos must have rotary_dim = {rotary} or half as many columns, got {tuple(cos.shape)}"
            )

    def prepare_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        self.check(tensors, settings)
        _, _, cos, _, ids = tensors
        if ids is not None and ids.device.type == "cpu" and self.on_reference(tensors) and ids.numel():
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= cos.shape[-2]:
                raise ArgumentError(
                    f"rope: position_ids hold {low} to {high}; cos and sin have {cos.shape[-2]} rows"
                )
        return super().prepare_forward(tensors, settings, keep, out)

    def readable_tables(self, tables: Sequence[Any]) -> tuple[Tensor | None, ...]:
        cos, sin, ids = tables
        if ids is not None and sum(s * (n - 1) for s, n in zip(ids.stride(), ids.shape, strict=True)) > MOST:
            ids = ids.contiguous()
        return *readable_pair(cos, sin), ids

    def describe(
        self, q: Tensor, tables: Sequence[Any], settings: tuple[Any, ...], fresh: bool
    ) -> KernelCall:
        cos, sin, ids = tables
        rotary_dim, interleaved, _ = settings
        half = (rotary_dim or cos.shape[-1]) // 2
        by_sequence, cos_stride = table_rows(cos) or (0, 0)
        _, sin_stride = table_rows(sin) or (0, 0)
        index, words = (by_sequence, 1), 0
        if ids is not None:
            words = ids.element_size() // 4
            by_sequence = ids.stride(0) if ids.dim() == 2 and ids.shape[0] > 1 else 0
            index = (by_sequence, ids.stride(-1))
        size, x_size = cos.element_size(), q.element_size()
        end = q.shape[-1] if fresh else 2 * half
        in_bytes = (cos_stride * size, sin_stride * size, half * x_size, end * x_size)
        return KernelCall(
            "rope",
            (q.dtype, cos.dtype, interleaved),
            2 * half if interleaved else half,
            index,
            (words, min(cos.shape[-2], MOST) if words else MOST, *in_bytes),
            in_bytes,
            all_rotated=end == 2 * half,
        )

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        half, size = shape[-1] // 2, dtype.itemsize
        return (
            Problem("rope", (dtype, (dtypes or {}).get("cos", dtype), False), not half * size % 16, half),
        )

    @staticmethod
    def reference(
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        position_ids: Tensor | None,
        rotary_dim: int | None,
        interleaved: bool,
        layout: str,
    ) -> tuple[Tensor, Tensor]:
        cos, sin = _angles(cos, sin, position_ids, rotary_dim, layout)
        return rotate_in_torch(q, cos, sin, interleaved), rotate_in_torch(k, cos, sin, interleaved)

    @staticmethod
    def reference_backward(
        grads: Tensors, saved: Tensors, rotary_dim: int | None, interleaved: bool, layout: str
    ) -> Tensors:
        cos, sin, ids = saved
        cos, sin = _angles(cos, sin, ids, rotary_dim, layout)
        rotated = (None if dy is None else rotate_in_torch(dy, cos, -sin, interleaved) for dy in grads)
        return *rotated, None, None, None


def _angles(
    cos: Tensor, sin: Tensor, ids: Tensor | None, rotary_dim: int | None, layout: str
) -> tuple[Tensor, Tensor]:
    """The tables' columns that count, of the tokens' rows, with a dimension for the heads."""
    half = (rotary_dim or cos.shape[-1]) // 2
    found = []
    for table in (cos, sin):
        if ids is not None:
            rows = table.reshape(-1, table.shape[-1]).index_select(0, ids.reshape(-1))
            table = rows.reshape(*ids.shape, table.shape[-1])
        found.append(table[..., :half].unsqueeze(-3 if layout == "bhsd" else -2))
    return found[0], found[1]


def _check_ids(q: Tensor, ids: Any, batch: int, sequence: int) -> None:
    if not isinstance(ids, Tensor):
        raise ArgumentTypeError(f"rope: position_ids must be a torch.Tensor, got {type(ids).__name__}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise ArgumentTypeError(f"rope: position_ids must be int64 or int32, got {ids.dtype}")
    check_same_device("rope", "position_ids", ids, "q", q)
    if ids.shape not in [(sequence,), (1, sequence), (batch, sequence)]:
        raise ArgumentError(
            f"rope: position_ids must be (sequence,) or (batch or 1, sequence) with sequence {sequence} and batch "
            f"{batch}, got {tuple(ids.shape)}"
        )


OP = RoPE
