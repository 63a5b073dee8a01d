"""Liger's activations, rotary embeddings, softmaxes and embedding, with its names, arguments and results, on the ops.

Liger overwrites q, k and, in a backward, the activations' inputs. Here results and gradients are new tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.liger.common import Function, checked_backward, checked_forward, rows
from liger_aot.models.fitting import fitting
from liger_aot.ops.registry import load

_swiglu, _geglu, _relu_squared = load("swiglu"), load("geglu"), load("relu_squared")
_rope, _multimodal, _llama4 = load("rope"), load("rope_multimodal"), load("rope_llama4")
_softmax, _sparsemax, _embedding = load("softmax"), load("sparsemax"), load("embedding")

TANH = (False,)  # geglu's settings for the approximation that Liger has


class LigerSiLUMulFunction(Function):
    @staticmethod
    def call(a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
        if not hasattr(a, "to_local") and not hasattr(b, "to_local"):
            return _silu_mul(a, b, gate_multiplier, down_multiplier)
        from torch.distributed.tensor import DTensor, distribute_tensor

        of: Any = a if isinstance(a, DTensor) else b
        mesh, placements = of.device_mesh, of.placements
        local_a, local_b = (
            (t if isinstance(t, DTensor) else distribute_tensor(t, mesh, placements)).to_local()
            for t in (a, b)
        )
        return DTensor.from_local(
            _silu_mul(local_a, local_b, gate_multiplier, down_multiplier), mesh, placements
        )


def _silu_mul(a: Tensor, b: Tensor, gate_multiplier: float, down_multiplier: float) -> Tensor:
    y = _gated(_swiglu, a if gate_multiplier == 1.0 else a * gate_multiplier, b)
    return y if down_multiplier == 1.0 else y * down_multiplier


def _gated(op: Any, gate: Tensor, up: Tensor) -> Tensor:
    """Of gate's dtype, as Liger's result is; where up has another one, computed in the wider of the two."""
    y: Tensor
    if gate.dtype == up.dtype:
        y = op(gate, up)
        return y
    y = op(*_widened(gate, up))
    return y.to(gate.dtype)


def _widened(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider of their dtypes."""
    wide = torch.promote_types(gate.dtype, up.dtype)
    return gate.to(wide), up.to(wide)


def _gated_forward(op: Any, gate: Tensor, up: Tensor, settings: tuple[Any, ...]) -> Tensor:
    (c,) = checked_forward(op, _widened(gate, up), settings)
    return c.to(gate.dtype)  # type: ignore[no-any-return]


def _gated_backward(
    op: Any, gate: Tensor, up: Tensor, dc: Tensor, settings: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    wide = _widened(gate.view(dc.shape), up.view(dc.shape))
    da, db = checked_backward(op, (dc,), wide, wide, settings, (True, True))
    return da.to(gate.dtype), db.to(up.dtype)


def swiglu_forward(a: Tensor, b: Tensor, gate_multiplier: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    gate = a if gate_multiplier == 1.0 else a * gate_multiplier
    return rows(a), rows(b), _gated_forward(_swiglu, gate, b, ())


def swiglu_backward(a: Tensor, b: Tensor, dc: Tensor, gate_multiplier: float = 1.0) -> tuple[Tensor, Tensor]:
    gate = a if gate_multiplier == 1.0 else a * gate_multiplier
    da, db = _gated_backward(_swiglu, gate, b, dc, ())
    return da if gate_multiplier == 1.0 else da * gate_multiplier, db


class LigerFusedGateUpSiLUMulFunction(Function):
    @staticmethod
    def call(y: Tensor, in_place: bool = False) -> Tensor:
        c: Tensor = _swiglu(y)
        return c


class LigerGELUMulFunction(Function):
    @staticmethod
    def call(a: Tensor, b: Tensor) -> Tensor:
        return _gated(_geglu, a, b)


def geglu_forward(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return rows(a), rows(b), _gated_forward(_geglu, a, b, TANH)


def geglu_backward(a: Tensor, b: Tensor, dc: Tensor) -> tuple[Tensor, Tensor]:
    return _gated_backward(_geglu, a, b, dc, TANH)


class LigerReLUSquaredFunction(Function):
    @staticmethod
    def call(X: Tensor) -> Tensor:
        y: Tensor = _relu_squared(X)
        return y


def relu_squared_forward(X: Tensor) -> Tensor:
    y: Tensor
    (y,) = checked_forward(_relu_squared, (X,), ())
    return y


def relu_squared_backward(X: Tensor, dY: Tensor) -> Tensor:
    x = (X.view(dY.shape),)
    dx: Tensor
    (dx,) = checked_backward(_relu_squared, (dY,), x, x, (), (True,))
    return dx


class LigerRopeFunction(Function):
    @staticmethod
    def call(
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        position_ids: Tensor | None = None,
        unsqueeze_dim: int = 1,
        rotary_dim: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        tables, rotated = _tables(q, cos, sin, unsqueeze_dim), _rotary_dim(q, cos, rotary_dim)
        if q.shape[-1] % 2 or rotated % 2:
            return _odd(q, k, *tables, rotated)
        turned: tuple[Tensor, Tensor] = _rope(q, k, *tables, rotary_dim=rotated, layout="bhsd")
        return turned


def _odd(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, rotated: int) -> tuple[Tensor, Tensor]:
    """Of an odd number of columns the last one stays as it is, as with Liger."""
    rotated -= rotated % 2
    even = q.shape[-1] - q.shape[-1] % 2
    cos, sin = cos[..., : rotated // 2], sin[..., : rotated // 2]
    turned: tuple[Tensor, Tensor] = _rope(
        q[..., :even], k[..., :even], cos, sin, rotary_dim=rotated, layout="bhsd"
    )
    if even == q.shape[-1]:
        return turned
    return torch.cat((turned[0], q[..., even:]), -1), torch.cat((turned[1], k[..., even:]), -1)


def _rotary_dim(q: Tensor, cos: Tensor, rotary_dim: int | None) -> int:
    return min(cos.shape[-1], q.shape[-1]) if rotary_dim is None else rotary_dim


def _tables(q: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> tuple[Tensor, Tensor]:
    """(sequence, columns) or (batch, sequence, columns), of q's dtype or float32."""
    if cos.dim() == 4:
        at = unsqueeze_dim if cos.shape[unsqueeze_dim] == 1 else 1
        cos, sin = cos.squeeze(at), sin.squeeze(at)
    fit = fitting(cos, q), fitting(sin, q)
    assert fit[0] is not None and fit[1] is not None
    return fit[0], fit[1]


def rope_forward(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    settings = (_rotary_dim(q, cos, rotary_dim), False, "bhsd")
    cos, sin = _tables(q, cos, sin, unsqueeze_dim)
    if q.shape[-1] % 2 or settings[0] % 2:
        with torch.no_grad():
            q, k = _odd(q, k, cos, sin, settings[0])
    else:
        q, k = checked_forward(_rope, (q, k, cos, sin, None), settings)
    return q, k, cos if cos.dim() == 3 else cos.unsqueeze(0), sin if sin.dim() == 3 else sin.unsqueeze(0)


def rope_backward(
    dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    settings = (_rotary_dim(dq, cos, rotary_dim), False, "bhsd")
    if dq.shape[-1] % 2 or settings[0] % 2:  # turned back
        cos, sin = _tables(dq, cos, sin, unsqueeze_dim)
        with torch.no_grad():
            return _odd(dq, dk, cos, -sin, settings[0])
    saved = (*_tables(dq, cos, sin, unsqueeze_dim), None)
    _rope.check((dq, dk, *saved), settings)
    dq, dk, *_ = _rope.run_backward((dq, dk), saved, settings, (True, True, False, False, False))
    return dq, dk


class LigerQwen2VLMRopeFunction(Function):
    @staticmethod
    def call(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        rotated: tuple[Tensor, Tensor] = _multimodal(
            q, k, fitting(cos, q), fitting(sin, q), list(mrope_section)[:3]
        )
        return rotated


class LigerLlama4RopeFunction(Function):
    @staticmethod
    def call(q: Tensor, k: Tensor, freqs_cis: Tensor, BLOCK_SIZE: int | None = None) -> tuple[Tensor, Tensor]:
        if freqs_cis.is_complex():
            freqs_cis = freqs_cis.reshape(-1, freqs_cis.shape[-1])[: q.shape[1]]
        rotated: tuple[Tensor, Tensor] = _llama4(q, k.to(q.dtype), freqs_cis)
        return rotated


class LigerSoftmaxFunction(Function):
    @staticmethod
    def call(input_: Tensor) -> Tensor:
        y: Tensor = _softmax(input_)
        return y


class LigerSparsemaxFunction(Function):
    @staticmethod
    def call(x: Tensor, dim: int) -> Tensor:
        y: Tensor = _sparsemax(x.movedim(dim, -1)).movedim(-1, dim)
        return y


class LigerEmbeddingFunction(Function):
    @staticmethod
    def call(embeddings: Tensor, indices: Tensor) -> Tensor:
        y: Tensor = _embedding(indices, embeddings)
        return y


NAMES: dict[str, tuple[Any, str]] = {  # Liger's name -> its replacement, and the op that this calls
    "LigerSiLUMulFunction": (LigerSiLUMulFunction, "swiglu"),
    "LigerFusedGateUpSiLUMulFunction": (LigerFusedGateUpSiLUMulFunction, "swiglu"),
    "swiglu_forward": (swiglu_forward, "swiglu"),
    "swiglu_backward": (swiglu_backward, "swiglu"),
    "LigerGELUMulFunction": (LigerGELUMulFunction, "geglu"),
    "geglu_forward": (geglu_forward, "geglu"),
    "geglu_backward": (geglu_backward, "geglu"),
    "LigerReLUSquaredFunction": (LigerReLUSquaredFunction, "relu_squared"),
    "relu_squared_forward": (relu_squared_forward, "relu_squared"),
    "relu_squared_backward": (relu_squared_backward, "relu_squared"),
    "LigerRopeFunction": (LigerRopeFunction, "rope"),
    "rope_forward": (rope_forward, "rope"),
    "rope_backward": (rope_backward, "rope"),
    "LigerQwen2VLMRopeFunction": (LigerQwen2VLMRopeFunction, "rope_multimodal"),
    "LigerLlama4RopeFunction": (LigerLlama4RopeFunction, "rope_llama4"),
    "LigerSoftmaxFunction": (LigerSoftmaxFunction, "softmax"),
    "LigerSparsemaxFunction": (LigerSparsemaxFunction, "sparsemax"),
    "LigerEmbeddingFunction": (LigerEmbeddingFunction, "embedding"),
}
