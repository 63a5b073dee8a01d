"""The backward of packed sequences' flash attention by itself, for those who bring their own autograd.

Dao, FlashAttention-2 (2023): probabilities are computed again from q, k and the forward's lse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch.compiler import is_compiling

from liger_aot.ops.attention._backward import contiguous
from liger_aot.ops.attention._checks import check_dim, check_results, settings_of
from liger_aot.ops.attention._operands import VARLEN
from liger_aot.ops.attention._varlen import check_values, check_varlen
from liger_aot.ops.attention._varlen_backward import varlen_backward_problems
from liger_aot.ops.attention.flash_attention_varlen import (
    BACKWARD,
    FlashAttentionVarlen,
    varlen_gradients,
    varlen_settings,
)
from liger_aot.ops.guards import check_no_gradient, check_plain
from liger_aot.ops.op import PLAIN_OR_NONE, Op, Problem, plain_torch
from liger_aot.ops.torch_library import register


class FlashAttentionVarlenBackward(Op):
    """``flash_attention_varlen_backward(do, q, k, v, o, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *,
    dlse=None, ...) -> (dq, dk, dv, dsinks)``

    The gradients of ``o, lse = flash_attention_varlen(q, k, v, cu_seqlens_q, ..., return_lse=True)``. They have the
    same bits every time, but for dq's last ones where a pack has a warp-specialised kernel for the call (sm90;
    ``explain`` says so), which adds it up in float32 in memory. Memory beside the results: two float32 a query and
    head; warp-specialised, dq in float32, too, and of both up to 128 rows a sequence more.

    On gfx90a, whose float16 matrix instructions read subnormal numbers as zeros, float16 is multiplied in float32, at a
    quarter of the rate.

    Args:
        do: the gradient of o: o's shape and dtype, any strides.
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, sinks, causal, scale, window, softcap: as the
            forward was given them. On a GPU it is the forward that finds cu_seqlens out of order or range.
        deterministic: the same bits every time, of dq, too. So does ``torch.use_deterministic_algorithms(True)``. The
            tiles then compute all.
        o, lse: what the forward returned; lse is (heads, tokens) float32, o of any strides but the last.
        dlse: the gradient of lse, float32 of its shape, or None. Where lse is -inf it counts as 0.

    Returns:
        contiguous gradients of the shapes and dtypes of q, k, v and sinks; dsinks is None without sinks. A query that
        sees no key gives zeros, and so do tokens behind the last sequence.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: a shape, stride, device or setting is not allowed, or a gradient of the gradients is needed; on
            the CPU also what cu_seqlens hold.
        PackNotFound: no installed pack serves the GPU.
    """

    name = "flash_attention_varlen_backward"
    uses = BACKWARD[1:]

    def __call__(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        dlse: Tensor | None = None,
        causal: bool = False,
        scale: float | None = None,
        window: tuple[int | None, int | None] | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        deterministic: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        given = settings_of(self.name, q, causal, scale, window, softcap)
        values = FlashAttentionVarlen.settings.checked(
            self.name, (max_seqlen_q, max_seqlen_k, *given, deterministic)
        )
        max_seqlens: tuple[Any, ...] = values[:2]
        settings: tuple[Any, ...] = values[2:]
        cu_seqlens = (cu_seqlens_q, cu_seqlens_k)
        check_varlen(self.name, q, k, v, cu_seqlens, sinks, varlen_settings(*settings))
        check_results(self.name, o, lse, do, dlse, q, k, VARLEN)
        saved = (q, k, v, *cu_seqlens, sinks, o, lse)
        needed = (True, True, True, False, False, sinks is not None)
        instead = "flash_attention_varlen, whose backward has one"
        check_no_gradient(self.name, (do, dlse, *saved), "gradients have none here", instead)
        if is_compiling() or not PLAIN_OR_NONE.issuperset(map(type, (do, dlse, *saved))) or dispatch_modes():
            register("flash_attention_varlen")
            call = torch.ops.liger_aot.flash_attention_varlen_backward
            found: Any = call([do, dlse], list(saved), *max_seqlens, *settings, list(needed))
        else:
            named = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "dlse": dlse, "sinks": sinks}
            check_plain(self.name, do=do, q=q, k=k, v=v, o=o, lse=lse, **named)
            with plain_torch():
                if self._own.of(q, "q") is None or not q.numel() or not k.numel():
                    check_values(self.name, cu_seqlens, (q.shape[0], k.shape[0]), max_seqlens)
                    made = FlashAttentionVarlen.reference_backward((do, dlse), saved, *max_seqlens, *settings)
                    found = [contiguous(g) for g in made if g is not None]
                else:
                    kinds = (*needed[:3], needed[5])
                    found = varlen_gradients(self._runtimes, (do, dlse), saved, settings, kinds)
        dq, dk, dv = found[:3]
        return dq, dk, dv, None if sinks is None else found[3]

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        """Of a call without a soft cap and without sinks."""
        check_dim(self.name, shape[-1])
        return varlen_backward_problems(shape[-1], dtype)


OP = FlashAttentionVarlenBackward
