"""RMSNorm of each head of q and k and rotary embedding, in place on packed q, k and v, and the write to a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.arguments import ANY, FROM_ZERO, Allowed, Schema
from liger_aot.ops.cache._cache_op import CacheOp, Plan
from liger_aot.ops.cache._slots import (
    LARGEST_DIM,
    MOST,
    UNIT,
    Cache,
    Named,
    check_cache,
    check_slots,
    write_slots,
)
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.in_place import check_writable
from liger_aot.ops.op import Problem, check_same_device, check_tensor
from liger_aot.ops.rope._rotary import rotate_in_torch

HEADS = Allowed(least=1, most=1 << 16)


class Settings(NamedTuple):
    """As the op takes them, in its order."""

    num_heads_q: int
    num_heads_k: int
    num_heads_v: int
    eps: float
    offset: float
    is_neox: bool
    gated: bool

    @property
    def columns(self) -> int:
        """Of a token's row, in heads."""
        return self.k_first + self.num_heads_k + self.num_heads_v

    @property
    def k_first(self) -> int:
        """In heads."""
        return self.num_heads_q * (1 + self.gated)


class QKNormRope(CacheOp):
    """``qk_norm_rope(qkv, q_weight, k_weight, cos_sin_cache, position_ids, *, num_heads_q, num_heads_k, num_heads_v,
    eps=1e-6, offset=0.0, is_neox=True, gated=False, key_cache=None, value_cache=None, slot_mapping=None, k_scale=None,
    v_scale=None) -> Tensor``: RMSNorm of each head of q and k, then rotary embedding, in place on packed q, k and v; as
    vLLM's ``fused_qk_norm_rope``.

    A head x becomes x / sqrt(mean(x^2) + eps) * (weight + offset), or without weights stays x, and of that the pairs
    (a, b) of the first ``rotary_dim`` columns (a cos - b sin, b cos + a sin); in float32, rounded once. v and gates
    stay as they are. With a cache, the same launch writes the new k, and v, to their slots, as ``write_kv_cache`` would
    afterwards, bit for bit. Nothing waits for the device: works under torch.compile, which copies neither qkv nor a
    cache (one rule: see ``write_kv_cache``), and, after ``preload``, in CUDA graphs. For inference: there is no
    gradient. CPU tensors take the plain-torch reference.

    Args:
        qkv: (tokens, columns) bfloat16 or float16; rows may have any stride. The columns are num_heads_q heads of q,
            num_heads_k of k and num_heads_v of v, of dim columns each; with ``gated`` each head of q is followed by its
            gate of as many columns (Qwen3-Next).
        q_weight, k_weight: (dim,) of qkv's dtype, contiguous. dim is even, at most 256. None for both: heads are not
            normalised (Llama), and dim follows from qkv's columns.
        cos_sin_cache: (positions, rotary_dim) of qkv's dtype or float32, rows contiguous: rotary_dim / 2 cosines, then
            as many sines. rotary_dim is even and at most dim.
        position_ids: (tokens,) int64 or int32, contiguous: the row of cos_sin_cache for each token. One out of range
            is an error on the CPU; on a GPU its token's rotated columns become NaN.
        num_heads_q, num_heads_k, num_heads_v: at least 1.
        eps: added to the mean of squares.
        offset: added to the weights (1.0 for Gemma and Qwen3-Next).
        is_neox: pairs are column i and i + rotary_dim / 2; else 2i and 2i + 1.
        gated: see qkv.
        key_cache, value_cache, slot_mapping, k_scale, v_scale: as of ``write_kv_cache``; the first three are given
            together, with num_heads_v = num_heads_k, or none is.

    Returns:
        qkv.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype; the GPU has no such fp8.
        ArgumentError: shapes, strides or devices do not fit, what is written shares memory with another argument, or a
            gradient is needed. Nothing was written then. On the CPU also a position out of range or a slot past the
            last; on a GPU such a slot is skipped, and the next call raises (LIGER_AOT_DEBUG=1: the call itself).
        PackNotFound: no installed pack serves the GPU.

    Source:
        Zhang and Sennrich, Root Mean Square Layer Normalization (2019); Su et al., RoFormer (2021); vLLM's
        fused_qk_norm_rope.
    """

    name = "qk_norm_rope"
    tensors = (
        "qkv", "q_weight?", "k_weight?", "cos_sin_cache", "position_ids", "key_cache?", "value_cache?", "slot_mapping?",
        "k_scale?", "v_scale?",
    )  # fmt: skip
    settings = Schema(
        {
            "int num_heads_q": HEADS, "int num_heads_k": HEADS, "int num_heads_v": HEADS, "float eps": FROM_ZERO,
            "float offset": ANY, "bool is_neox": ANY, "bool gated": ANY,
        }
    )  # fmt: skip
    writes = ("qkv", "key_cache", "value_cache", "k_scale", "v_scale")

    def __call__(
        self,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos_sin_cache: Tensor,
        position_ids: Tensor,
        *,
        num_heads_q: int,
        num_heads_k: int,
        num_heads_v: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        is_neox: bool = True,
        gated: bool = False,
        key_cache: Tensor | None = None,
        value_cache: Tensor | None = None,
        slot_mapping: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor:
        cache = (key_cache, value_cache, slot_mapping, k_scale, v_scale)
        settings = (num_heads_q, num_heads_k, num_heads_v, eps, offset, is_neox, gated)
        tensors = (qkv, q_weight, k_weight, cos_sin_cache, position_ids, *cache)
        found: Tensor = self.write(tensors, settings)[0]
        return found

    def overwritten(self, tensors: Tensors) -> Tensors:
        scales = [t for t in tensors[8:] if isinstance(t, Tensor) and t.dim() == 3]
        return tensors[0], *(t for t in tensors[5:7] if t is not None), *scales

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        qkv, q_weight, k_weight, table, ids, *cache = tensors
        asked, op = Settings(*settings), self.name
        check_tensor(op, "qkv", qkv)
        if qkv.dtype not in (torch.bfloat16, torch.float16):
            raise ArgumentTypeError(f"{op}: qkv must be bfloat16, float16, got {qkv.dtype}")
        if (q_weight is None) != (k_weight is None):
            name = "q_weight" if q_weight is None else "k_weight"
            raise ArgumentError(f"{op}: {name} is None, the other weight is not: give both or neither")
        if q_weight is None and asked.offset:
            raise ArgumentError(f"{op}: offset must be 0 without weights, got {asked.offset}")
        weights = {} if q_weight is None else {"q_weight": q_weight, "k_weight": k_weight}
        for name, w in weights.items():
            check_tensor(op, name, w)
            check_same_device(op, name, w, "qkv", qkv)
            if w.dtype != qkv.dtype:
                raise ArgumentTypeError(f"{op}: {name} must be of qkv's dtype {qkv.dtype}, got {w.dtype}")
            if w.dim() != 1 or not w.is_contiguous() or w.shape != q_weight.shape:
                raise ArgumentError(
                    f"{op}: {name} must be contiguous of shape (dim,), alike for q and k; got {tuple(w.shape)} with "
                    f"strides {w.stride()}"
                )
        heads = (
            f"num_heads_q={asked.num_heads_q}, num_heads_k={asked.num_heads_k}, num_heads_v={asked.num_heads_v}, "
            f"gated={asked.gated}"
        )
        if qkv.dim() != 2 or qkv.shape[1] % asked.columns or qkv.stride(1) != 1:
            raise ArgumentError(
                f"{op}: qkv must be (tokens, a multiple of {asked.columns}) with contiguous rows, by {heads}; got "
                f"shape {tuple(qkv.shape)} with strides {qkv.stride()}"
            )
        dim = _head_dim(qkv, q_weight, asked)
        if dim % 2 or not 2 <= dim <= LARGEST_DIM:
            raise ArgumentError(
                f"{op}: a head must have an even number of columns, 2 to {LARGEST_DIM}, got {dim} (the elements of "
                "q_weight or, without, qkv's columns by heads)"
            )
        if qkv.shape[1] != asked.columns * dim:
            raise ArgumentError(
                f"{op}: qkv must be (tokens, {asked.columns * dim}), by {heads} and {dim} elements of q_weight; "
                f"got shape {tuple(qkv.shape)}"
            )
        check_writable(op, "qkv", qkv)
        rows = qkv.shape[0] * (asked.num_heads_q + asked.num_heads_k)
        if rows > MOST:
            raise ArgumentError(f"{op}: qkv has {rows} heads of tokens, more than {MOST}")
        self._check_positions(qkv, table, ids, dim)
        given = [t is not None for t in cache[:3]]
        if not any(given):
            for name, t in (("k_scale", cache[3]), ("v_scale", cache[4])):
                if t is not None:
                    raise ArgumentError(f"{op}: {name} is for a cache, and key_cache is None")
            return
        if not all(given):
            names = ("key_cache", "value_cache", "slot_mapping")
            raise ArgumentError(
                f"{op}: {names[given.index(False)]} is None: a cache is {', '.join(names)} together"
            )
        if asked.num_heads_v != asked.num_heads_k:
            raise ArgumentError(
                f"{op}: with a cache num_heads_v must be num_heads_k = {asked.num_heads_k}, got {asked.num_heads_v}"
            )
        check_cache(op, "qkv", qkv, asked.num_heads_k, dim, Cache(*cache))

    def _check_positions(self, qkv: Tensor, table: Any, ids: Any, dim: int) -> None:
        op = self.name
        check_tensor(op, "cos_sin_cache", table)
        check_same_device(op, "cos_sin_cache", table, "qkv", qkv)
        if table.dtype not in (qkv.dtype, torch.float32):
            raise ArgumentTypeError(
                f"{op}: cos_sin_cache must be of qkv's dtype {qkv.dtype} or float32, got {table.dtype}"
            )
        if (
            table.dim() != 2
            or table.stride(1) != 1
            or table.shape[1] % 2
            or not 2 <= table.shape[1] <= dim
            or table.stride(0) < 0
        ):
            raise ArgumentError(
                f"{op}: cos_sin_cache must be (positions, rotary_dim) with contiguous rows, rotary_dim even and at "
                f"most {dim}; got shape {tuple(table.shape)} with strides {table.stride()}"
            )
        if not isinstance(ids, Tensor):
            raise ArgumentTypeError(f"{op}: position_ids must be a torch.Tensor, got {type(ids).__name__}")
        if ids.dtype not in (torch.int64, torch.int32) or ids.layout != torch.strided or ids.is_nested:
            raise ArgumentTypeError(
                f"{op}: position_ids must be a dense tensor of int64 or int32, got {ids.dtype}, {ids.layout}"
            )
        check_same_device(op, "position_ids", ids, "qkv", qkv)
        if ids.shape != qkv.shape[:1] or not ids.is_contiguous():
            raise ArgumentError(
                f"{op}: position_ids must be contiguous of shape ({qkv.shape[0]},), one a token; got shape "
                f"{tuple(ids.shape)} with strides {ids.stride()}"
            )

    def check_values(self, tensors: Tensors) -> None:
        table, ids, *cache = tensors[3:]
        if ids.device.type == "cpu" and ids.numel():
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= table.shape[0]:
                raise ArgumentError(
                    f"{self.name}: position_ids hold {low} to {high}; cos_sin_cache has {table.shape[0]} rows"
                )
        if cache[0] is not None:
            check_slots(self.name, Cache(*cache))

    def addresses(self, at: Sequence[int]) -> tuple[tuple[int, ...], int]:
        qkv, q_weight, k_weight, table, ids, k_cache, v_cache, slots, *scales = at
        together = qkv | q_weight | k_weight | table | k_cache | v_cache
        return (qkv, k_cache, v_cache, *scales, q_weight, k_weight, table, ids, slots), together

    def memory(self, tensors: Tensors) -> tuple[Named, Named]:
        named = {name.rstrip("?"): t for name, t in zip(self.tensors, tensors, strict=True)}
        to: Named = {"qkv": tensors[0], **Cache(*tensors[5:]).written}
        return to, {name: t for name, t in named.items() if name not in to}

    def plan(self, tensors: Tensors, settings: tuple[Any, ...]) -> Plan:
        qkv, q_weight, _, table, ids, *rest = tensors
        asked = Settings(*settings)
        dim = _head_dim(qkv, q_weight, asked)
        cache = Cache(*rest) if rest[0] is not None else None
        heads_q, heads_k = asked.num_heads_q, asked.num_heads_k
        half = table.shape[1] // 2
        rows = qkv.shape[0] * (heads_q + heads_k)
        token = qkv.stride(0) if qkv.shape[0] > 1 else 0
        firsts = asked.k_first * dim, (asked.k_first + heads_k) * dim
        columns = token, dim * (1 + asked.gated), *firsts, table.stride(0) if table.shape[0] > 1 else 0
        cache_strides = (0, 0, 0) if cache is None else cache.strides
        places = (0, 0, 0, 1, 0, 1, 0) if cache is None else cache.places
        slot_tokens = 0 if cache is None else cache.slot_mapping.shape[0]
        arguments = (
            *cache_strides, *columns, half, dim, *places, ids.element_size() // 4, min(table.shape[0], MOST),
            slot_tokens, heads_q, heads_k, rows,
        )  # fmt: skip
        of_cache = qkv.dtype if cache is None else cache.key_cache.dtype
        key = qkv.dtype, table.dtype, not asked.is_neox, of_cache

        def grid(of_program: int) -> tuple[int, tuple[Any, ...]]:
            """Programs of q's and k's heads come before those that copy v's."""
            of_rows, of_v = (-(-n // of_program) for n in (rows, slot_tokens * heads_k))
            return of_rows + of_v, (of_rows, asked.eps, asked.offset)

        return Plan(key, dim, rows, (*cache_strides, *columns, half, dim), arguments, grid)

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        """``shape`` is that of a head: its last number counts. ``dtypes`` may name those of cos_sin_cache and
        key_cache."""
        dim, given = shape[-1], dtypes or {}
        axes = (dtype, given.get("cos_sin_cache", dtype), False, given.get("key_cache", dtype))
        return (Problem(self.name, axes, dim // 2 % UNIT == 0, dim),)

    @staticmethod
    def write_in_torch(
        qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, table: Tensor, ids: Tensor, *rest: Any
    ) -> None:
        cache, asked = rest[:5], Settings(*rest[5:])
        dim, wide = _head_dim(qkv, q_weight, asked), torch.promote_types(qkv.dtype, torch.float32)
        known = (ids >= 0) & (ids < table.shape[0])
        angles = table.to(wide).index_select(0, torch.where(known, ids, 0).reshape(-1))
        angles = torch.where(known[:, None], angles, torch.nan).unsqueeze(1)
        cos, sin = angles.chunk(2, -1)
        heads = asked.columns
        columns = qkv.unflatten(-1, (heads, dim))
        q = columns[:, : asked.k_first : 1 + asked.gated]
        k = columns[:, asked.k_first : asked.k_first + asked.num_heads_k]
        for x, weight in ((q, q_weight), (k, k_weight)):
            h = x.to(wide)
            if weight is not None:
                h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + asked.eps)
                h = h * (weight.to(wide) + asked.offset)
            x.copy_(rotate_in_torch(h, cos, sin, not asked.is_neox).to(x.dtype))
        if cache[0] is not None:
            write_slots(k, columns[:, asked.k_first + asked.num_heads_k :], Cache(*cache))

    @staticmethod
    def reference(qkv: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        given = [None if t is None else t.clone() for t in rest[4:9]]
        made = (qkv.clone(), *rest[:4], *given)
        QKNormRope.write_in_torch(*made, *rest[9:])
        scales = [t for t in made[8:10] if t is not None and t.dim() == 3]
        return made[0], *(t for t in made[5:7] if t is not None), *scales


def _head_dim(qkv: Tensor, q_weight: Tensor | None, asked: Settings) -> int:
    """Columns of a head."""
    return int(qkv.shape[1] // asked.columns if q_weight is None else q_weight.shape[0])


OP = QKNormRope
