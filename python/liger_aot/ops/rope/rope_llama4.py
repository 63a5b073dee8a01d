"""RoPE as Llama 4 writes it, with complex numbers, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.op import Problem, check_same_device
from liger_aot.ops.rope._rotary import MOST, KernelCall, Rotary, rotate_in_torch, table_rows


class Llama4RoPE(Rotary):
    """``rope_llama4(q, k, freqs_cis, *, inplace=False) -> (Tensor, Tensor)``: columns 2i and 2i + 1 of every head,
    taken as a complex number, times the token's i-th of ``freqs_cis``.

    One launch for q and k; computed in float32, rounded once. Differentiable in q and k; works under torch.compile and,
    after ``preload``, in CUDA graphs. CPU tensors take the plain-torch reference.

    Args:
        q: (batch, sequence, heads, D) bfloat16, float16 or float32; D is even. Any strides with contiguous heads are
            read in place; other layouts are copied.
        k: as q, with any number of heads; or None.
        freqs_cis: complex64 (sequence, D / 2), (1, sequence, D / 2) or (batch, sequence, D / 2), or the same as
            float32 with a last dimension of 2, as ``torch.view_as_real`` gives it. It gets no gradient.
        inplace: overwrite q and k and return them. Where they need gradients they must not be leaves.

    Returns:
        tensors of q's and k's shapes, dtype and order of dimensions in memory; None where k is None.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: shapes, dtypes or devices do not fit, freqs_cis requires a gradient; in place: tensors overlap,
            or a leaf requires a gradient.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding (2021).
    """

    name = "rope_llama4"
    tensors = ("q", "k", "freqs_cis")
    heads = 2
    last_vector = 0

    def __call__(
        self, q: Tensor, k: Tensor | None, freqs_cis: Tensor, *, inplace: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        return self.rotated(q, k, (freqs_cis,), (), inplace)

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        q, k, freqs = tensors
        batch, sequence, n = self.check_q_and_k(q, k, settings)
        if not isinstance(freqs, Tensor):
            raise ArgumentTypeError(
                f"rope_llama4: freqs_cis must be a torch.Tensor, got {type(freqs).__name__}"
            )
        if freqs.dtype not in (torch.complex64, torch.float32):
            raise ArgumentTypeError(f"rope_llama4: freqs_cis must be complex64 or float32, got {freqs.dtype}")
        check_same_device("rope_llama4", "freqs_cis", freqs, "q", q)
        columns = (n // 2,) if freqs.is_complex() else (n // 2, 2)
        shapes = [(sequence, *columns), (1, sequence, *columns), (batch, sequence, *columns)]
        if freqs.shape not in shapes:
            wanted = " or ".join(map(str, dict.fromkeys(shapes)))
            raise ArgumentError(f"rope_llama4: freqs_cis must be {wanted}, got {tuple(freqs.shape)}")

    def table_key(self, tables: Sequence[Any]) -> bool:
        return bool(tables[0].is_conj())

    def readable_tables(self, tables: Sequence[Any]) -> tuple[Tensor | None, ...]:
        freqs = tables[0].resolve_conj()
        rows = _rows(freqs)
        return (freqs if rows is not None and rows[0] * freqs.shape[0] <= MOST else freqs.contiguous(),)

    def describe(
        self, q: Tensor, tables: Sequence[Any], settings: tuple[Any, ...], fresh: bool
    ) -> KernelCall:
        (freqs,) = tables
        by_sequence, by_token = _rows(freqs) or (0, 0)
        n = q.shape[-1]
        in_bytes = (by_token * freqs.element_size(), n * q.element_size())
        return KernelCall("rope_llama4", (q.dtype,), n, (by_sequence, 1), in_bytes, in_bytes)

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        n = shape[-1]
        return (Problem("rope_llama4", (dtype,), not n * dtype.itemsize % 16, n),)

    @staticmethod
    def reference(q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = _angles(freqs_cis)
        return rotate_in_torch(q, cos, sin, True), rotate_in_torch(k, cos, sin, True)

    @staticmethod
    def reference_backward(grads: Tensors, saved: Tensors) -> Tensors:
        cos, sin = _angles(*saved)
        rotated = (None if dy is None else rotate_in_torch(dy, cos, -sin, True) for dy in grads)
        return *rotated, None


def _rows(freqs: Tensor) -> tuple[int, int] | None:
    """``table_rows``, for pairs that follow each other."""
    if freqs.is_complex():
        return table_rows(freqs) if freqs.stride(-1) == 1 or freqs.shape[-1] == 1 else None
    in_order = freqs.stride(-1) == 1 and (freqs.stride(-2) == 2 or freqs.shape[-2] == 1)
    return table_rows(freqs[..., 0]) if in_order else None


def _angles(freqs: Tensor) -> tuple[Tensor, Tensor]:
    """Real and imaginary parts, with a dimension for the heads."""
    real = torch.view_as_real(freqs.resolve_conj()) if freqs.is_complex() else freqs
    cos, sin = real.unsqueeze(-3).unbind(-1)
    return cos, sin


OP = Llama4RoPE
