"""Attention to two sets of keys, from the attention to each of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.arguments import check_flag
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.forward_only import ForwardOnlyOp
from liger_aot.ops.op import Problem, check_same_device, check_tensor
from liger_aot.runtime.dispatch import OpOn
from liger_aot.runtime.layout import layouts_of
from liger_aot.runtime.remembered import remember

UNIT = 16  # what the aligned binaries assume of addresses (bytes), strides and the dimension (elements)
MOST = (1 << 31) - (1 << 16)  # rows: int32 with room for a program's excess


class _Plan:
    """All calls with tensors of these shapes, strides and dtypes, but for their addresses."""

    __slots__ = ("aligned", "arguments", "batch", "heads", "key", "n", "tokens", "variants")

    def __init__(self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
        self.key, self.n = out_a.dtype, out_a.shape[-1]
        tokens, heads, dim = out_a.shape[-3:]
        outs = [_strides(t.shape[:-1], t.stride()[:-1]) for t in (out_a, out_b)]
        of_lse = [_strides(t.shape, t.stride()) for t in (lse_a, lse_b)]
        if tokens == 1:
            # A program has several tokens. A single token's heads are to it as many tokens of a single head.
            outs = [(batch, head, 0) for batch, _, head in outs]
            of_lse = [(batch, 0, head) for batch, head, _ in of_lse]
            tokens, heads = heads, 1
        self.batch, self.tokens, self.heads = math.prod(out_a.shape[:-3]), tokens, heads
        of_outs = (*outs[0], *outs[1])
        self.arguments = (*of_outs, *of_lse[0], *of_lse[1], tokens, heads, dim)
        self.aligned = not any(n % UNIT for n in (*of_outs, dim))
        self.variants: list[Any] = [None, None]  # generic, aligned


class MergeAttentionStates(ForwardOnlyOp):
    """``merge_attention_states(out_a, lse_a, out_b, lse_b, *, return_lse=False) -> Tensor``: attention to the keys of
    two sets, from the attention to each and the logarithms of its sums; as vLLM's ``merge_attn_states``.

    out = (exp(lse_a) out_a + exp(lse_b) out_b) / (exp(lse_a) + exp(lse_b)), without overflow, in float32, rounded
    once. For inference: there is no gradient. Works under torch.compile and, after ``preload``, in CUDA graphs. CPU
    tensors take the plain-torch reference.

    A state without keys has lse -inf; +inf, which some kernels give such a row, counts as -inf, as in vLLM. What a
    state of no weight holds is not looked at. Without keys in either, the result is 0 and -inf (vLLM copies the first
    state, FlashInfer gives NaN). An lse that is NaN gives NaN.

    Args:
        out_a, out_b: (tokens, heads, dim) or (batch, tokens, heads, dim) bfloat16, float16 or float32. Any strides but
            the last, which must be 1.
        lse_a, lse_b: (heads, tokens) or (batch, heads, tokens) float32 of any strides: natural logarithms, as the
            attention ops return them. (FlashInfer's are base 2: times ln 2.)
        return_lse: also return the logarithm of the sum of both.

    Returns:
        a contiguous tensor of out_a's shape and dtype; with ``return_lse`` also one of lse_a's.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: shapes or devices do not fit, or a gradient is needed.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Milakov and Gimelshein, Online normalizer calculation for softmax (2018); vLLM's merge_attn_states.
    """

    name = "merge_attention_states"
    tensors = ("out_a", "lse_a", "out_b", "lse_b")
    no_gradient = "merging has none"
    outputs = 2
    results = 2  # out, lse

    def __call__(
        self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, return_lse: bool = False
    ) -> Any:
        out, lse = self.differentiable((out_a, lse_a, out_b, lse_b))
        return (
            out if return_lse is False or not check_flag(self.name, "return_lse", return_lse) else (out, lse)
        )

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        out_a, op = tensors[0], self.name
        named = list(zip(self.tensors, tensors, strict=True))
        for name, t in named[::2]:
            check_tensor(op, name, t)
            check_same_device(op, name, t, "out_a", out_a)
            if t.dtype != out_a.dtype:
                raise ArgumentTypeError(f"{op}: {name} must be of out_a's dtype {out_a.dtype}, got {t.dtype}")
            if t.dim() not in (3, 4) or t.shape != out_a.shape or (t.shape[-1] > 1 and t.stride(-1) != 1):
                raise ArgumentError(
                    f"{op}: {name} must be (tokens, heads, dim), or with a batch before, of out_a's shape "
                    f"{tuple(out_a.shape)}, its last dimension contiguous; got {tuple(t.shape)} with strides "
                    f"{t.stride()}"
                )
        *batch, tokens, heads, dim = out_a.shape
        if out_a.numel() // max(dim, 1) > MOST:
            raise ArgumentError(f"{op}: out_a has {out_a.numel() // dim} heads of tokens, more than {MOST}")
        for name, t in named[1::2]:
            check_tensor(op, name, t)
            check_same_device(op, name, t, "out_a", out_a)
            if t.dtype != torch.float32:
                raise ArgumentTypeError(f"{op}: {name} must be float32, got {t.dtype}")
            if t.shape != (*batch, heads, tokens):
                raise ArgumentError(
                    f"{op}: {name} must be of shape {(*batch, heads, tokens)}, one number a head and token; got "
                    f"{tuple(t.shape)}"
                )

    def prepare_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        self.check(tensors, settings)
        if self.on_reference(tensors):
            return self.by_reference(tensors, settings)
        return self.run_forward(tensors, settings, keep, out)  # the device is bound now

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        on = self._own.bound.get(tensors[0].get_device())
        if on is None:
            return self.prepare_forward(tensors, settings, keep, out)
        layouts, a_at, lse_a_at, b_at, lse_b_at = layouts_of(tensors)
        plan: _Plan | None = on.plans.get(layouts)
        if plan is None:
            plan = self._plan(on, layouts, tensors)
        merged = torch.empty_like(tensors[0], memory_format=torch.contiguous_format)
        lse = torch.empty_like(tensors[1], memory_format=torch.contiguous_format)
        if plan.batch and plan.tokens and plan.heads and plan.n:
            merged_at = merged.data_ptr()
            aligned = plan.aligned and not (merged_at | a_at | b_at) % UNIT
            launch, programs = plan.variants[aligned] or self._variant(on, plan, aligned)
            launch(
                on.device, on.stream(on.device), programs, 1, 1, merged_at, lse.data_ptr(), a_at, b_at, lse_a_at,
                lse_b_at, *plan.arguments,
            )  # fmt: skip
        return merged, lse

    def _plan(self, on: OpOn, layouts: Any, tensors: Tensors) -> _Plan:
        self.check(tensors, ())
        return remember(on.plans, layouts, _Plan(*tensors))

    def _variant(self, on: OpOn, plan: _Plan, aligned: bool) -> tuple[Any, int]:
        """The binary for a plan, and how many programs it takes."""
        rows = plan.batch * plan.heads * plan.tokens
        loaded = on.kernels[self.name].for_rows((plan.key, aligned), plan.n, rows)
        heads = loaded.numbers.get("heads", 1)
        programs = plan.batch * -(-plan.tokens // loaded.rows) * -(-plan.heads // heads)
        found = plan.variants[aligned] = loaded.launch, programs
        return found

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        return (Problem(self.name, (dtype,), shape[-1] % UNIT == 0, shape[-1]),)

    @staticmethod
    def reference(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(out_a.dtype, torch.float32)
        a, b = (torch.where(lse == torch.inf, -torch.inf, lse.to(wide)) for lse in (lse_a, lse_b))
        top = torch.maximum(a, b)
        top = torch.where(top == -torch.inf, 0.0, top)
        weight_a, weight_b = torch.exp(a - top), torch.exp(b - top)
        total = weight_a + weight_b
        by = torch.where(total == 0.0, 0.0, 1.0 / total)
        merged = out_a.new_zeros((), dtype=wide)
        for out, weight in ((out_a, weight_a * by), (out_b, weight_b * by)):
            weight = weight.transpose(-1, -2).unsqueeze(-1)
            merged = merged + torch.where(weight == 0.0, 0.0, out.to(wide) * weight)
        return merged.to(out_a.dtype), (top + torch.log(total)).to(
            torch.promote_types(lse_a.dtype, torch.float32)
        )


def _strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Of three dimensions, of which the first may be missing. Those of dimensions of one element are free: what all
    binaries take."""
    found = tuple(stride if size > 1 else 0 for size, stride in zip(shape, strides, strict=True))
    return (0,) * (3 - len(found)) + found


OP = MergeAttentionStates
