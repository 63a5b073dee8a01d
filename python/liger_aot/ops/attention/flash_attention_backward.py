"""Flash attention's backward by itself, for those who bring their own autograd.

Dao, FlashAttention-2 (2023): probabilities are computed again from q, k and the forward's lse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch.compiler import is_compiling

from liger_aot.ops.attention._backward import backward_problems, contiguous, gradients
from liger_aot.ops.attention._checks import check_attention, check_dim, check_results, settings_of
from liger_aot.ops.attention._operands import Settings
from liger_aot.ops.attention.flash_attention import FlashAttention
from liger_aot.ops.guards import check_no_gradient, check_plain
from liger_aot.ops.op import PLAIN_OR_NONE, Op, Problem, plain_torch
from liger_aot.ops.torch_library import register


class FlashAttentionBackward(Op):
    """``flash_attention_backward(do, q, k, v, o, lse, *, dlse=None, ...) -> (dq, dk, dv, dsinks)``

    The gradients of ``o, lse = flash_attention(q, k, v, ..., return_lse=True)``. Each of dk and dv is summed by one
    program in a fixed order, over the query heads that share a key's head, too. So is dq, but where a pack has a
    warp-specialised kernel for the call (sm90; ``explain`` says so): that adds it up in float32 in memory, and unless
    the call is deterministic its last bits vary from run to run. Memory beside the results: two float32 a query and
    head; warp-specialised, dq in float32, too.

    On gfx90a, whose float16 matrix instructions read subnormal numbers as zeros, float16 is multiplied in float32, at a
    quarter of the rate.

    Args:
        do: the gradient of o: o's shape and dtype, any strides.
        q, k, v, sinks, causal, scale, window, softcap, layout: as the forward was given them. Tensors whose dim or
            strides are no multiples of 16 elements are copied.
        deterministic: the same bits every time. So does ``torch.use_deterministic_algorithms(True)``. The programs of a
            warp-specialised kernel then add to dq in a fixed order.
        o, lse: what the forward returned; lse is (batch, heads, length) float32, o of any strides but the last.
        dlse: the gradient of lse, float32 of its shape, or None. Where lse is -inf it counts as 0.

    Returns:
        contiguous gradients of the shapes and dtypes of q, k, v and sinks; dsinks is None without sinks. A query that
        sees no key gives zeros.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: a shape, stride, device or setting is not allowed, or a gradient of the gradients is needed.
        PackNotFound: no installed pack serves the GPU.
    """

    name = "flash_attention_backward"

    def __call__(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        *,
        dlse: Tensor | None = None,
        causal: bool = False,
        scale: float | None = None,
        window: tuple[int | None, int | None] | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        layout: str = "bshd",
        deterministic: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        given = settings_of(self.name, q, causal, scale, window, softcap)
        settings = Settings(*FlashAttention.settings.checked(self.name, (*given, layout, deterministic)))
        check_attention(self.name, q, k, v, sinks, settings)
        check_results(self.name, o, lse, do, dlse, q, k, layout)
        saved = (q, k, v, sinks, o, lse)
        needed = (True, True, True, sinks is not None)
        instead = "flash_attention, whose backward has one"
        check_no_gradient(self.name, (do, dlse, *saved), "gradients have none here", instead)
        if is_compiling() or not PLAIN_OR_NONE.issuperset(map(type, (do, dlse, *saved))) or dispatch_modes():
            register("flash_attention")
            call = torch.ops.liger_aot.flash_attention_backward
            found: Any = call([do, dlse], list(saved), *settings, list(needed))
        else:
            check_plain(self.name, do=do, q=q, k=k, v=v, o=o, lse=lse, dlse=dlse, sinks=sinks)
            on = self._own.of(q, "q")
            with plain_torch():
                if on is None or not q.numel() or not k.numel():
                    found = FlashAttention.reference_backward((do, dlse), saved, *settings)
                    found = [None if g is None else contiguous(g) for g in found]
                else:
                    found = gradients(on, (do, dlse), saved, settings, needed)
        dq, dk, dv = found[:3]
        return dq, dk, dv, None if sinks is None else found[3]

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        """Of a call without a left bound, a soft cap and sinks."""
        check_dim(self.name, shape[-1])
        return backward_problems(shape[-1], dtype)


OP = FlashAttentionBackward
