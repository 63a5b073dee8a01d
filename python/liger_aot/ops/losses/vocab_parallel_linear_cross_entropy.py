"""Cross entropy of a linear layer whose weight's rows, the vocabulary, are cut into shards, one a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from liger_aot.errors import ArgumentTypeError
from liger_aot.ops.arguments import ANY, Allowed, Schema, check_flag
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.losses import _row_loss as losses
from liger_aot.ops.losses._linear import (
    BUDGET,
    LinearGradients,
    LinearLoss,
    autocast,
    check_linear,
    check_weight_grad_dtype,
    chunk_buffer,
    chunk_rows,
    contiguous_rows,
    found_in_backward,
    padded,
    project,
)
from liger_aot.ops.losses._row_loss import RowLoss
from liger_aot.ops.losses._vocab_shards import SHARD, Columns, Rows, Shard, resolve, shard_of
from liger_aot.ops.op import Problem, check_rows
from liger_aot.runtime import device_errors


class Settings(NamedTuple):
    """Of a call, in the order of the op's schema; ``wanted`` is not always with them."""

    ignore_index: int
    label_smoothing: float
    lse_square_scale: float
    softcap: float
    token_scaling: bool
    reduction: str
    vocab_start: int
    vocabulary: int
    group: str
    chunk_rows: int
    weight_grad_dtype: torch.dtype | None
    wanted: Sequence[bool] = ()

    @property
    def row_loss(self) -> RowLoss:
        return RowLoss(*self[:5])

    @property
    def shard(self) -> Shard:
        return Shard(self.vocab_start, self.vocabulary, self.group)


class VocabParallelLinearCrossEntropy(LinearLoss):
    """``vocab_parallel_linear_cross_entropy(input, weight, target, bias=None, *, group=None, vocab_start=None,
    vocabulary=None, ignore_index=-100, label_smoothing=0.0, lse_square_scale=0.0, softcap=None, reduction="mean",
    chunk_bytes=2**29, weight_grad_dtype=None, use_token_scaling=False, return_z_loss=False) -> Tensor``:
    fused_linear_cross_entropy over a group whose ranks each hold some rows of the weight.

    Differentiable in input, weight and bias. Every rank of the group calls it with the same input and target and gets
    the same loss, to the bit. Each chunk has one all-gather of three float32 a row and, where input needs a gradient,
    one all-reduce of that chunk's, which runs beside the next chunk: input's gradient is whole on every rank, so
    nothing around this op may add it up again. Weight's and bias's gradients are the shard's own. Where gradients are
    computed in the backward (reduction "none", float16, a second backward), the collectives run there, and every rank
    must run it.

    Args:
        input: (..., k), the same on all ranks.
        weight: (columns, k): this rank's rows of the weight.
        target: (...), as vocab_parallel_cross_entropy's.
        bias: (columns,) or None.
        group, vocab_start, vocabulary: as vocab_parallel_cross_entropy's.
        ignore_index, label_smoothing, lse_square_scale, softcap, reduction, chunk_bytes, weight_grad_dtype,
            use_token_scaling, return_z_loss: as fused_linear_cross_entropy's. chunk_bytes must give every rank as many
            rows a chunk: with shards of several sizes it is divided by the widest, vocabulary's size over the group's,
            rounded up.

    Returns:
        the loss; with return_z_loss a tuple of it and the z-loss, which has no gradient.

    Raises:
        ArgumentTypeError, ArgumentError, PackNotFound: as vocab_parallel_cross_entropy and fused_linear_cross_entropy.

    Source:
        As vocab_parallel_cross_entropy and fused_linear_cross_entropy.
    """

    name = "vocab_parallel_linear_cross_entropy"
    uses = ("cross_entropy", "fused_linear_cross_entropy")
    tensors = ("input", "weight", "target", "bias?")
    graded = ("input", "weight", "bias")
    settings = Schema(
        {
            **losses.TOKEN_LOSS,
            **SHARD,
            "int chunk_rows": ANY,
            "ScalarType? weight_grad_dtype": ANY,
            "bool[] wanted": ANY,
        }
    )
    twice = False
    outputs = 2
    results = 2 + len(graded)

    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        vocab_start: int | None = None,
        vocabulary: int | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        lse_square_scale: float = 0.0,
        softcap: float | None = None,
        reduction: str = "mean",
        chunk_bytes: int = BUDGET,
        weight_grad_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_z_loss: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        input, weight, bias = autocast(input, weight, bias)
        check_rows(self.name, "input", input)
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            raise ArgumentTypeError(f"{self.name}: weight must be a matrix, this rank's rows of it")
        shard = shard_of(self.name, group, weight.shape[0], vocab_start, vocabulary)
        widest = -(-shard.vocabulary // dist.get_world_size(resolve(shard.group)))
        row_bytes = padded(widest) * input.element_size()
        Allowed(least=1).checked(self.name, "int chunk_bytes", chunk_bytes)
        check_flag(self.name, "return_z_loss", return_z_loss)
        rows = chunk_rows(self.name, max(1, input.shape[:-1].numel()), row_bytes, chunk_bytes)
        cap = losses.softcap_of(self.name, softcap)
        row_loss = (ignore_index, label_smoothing, lse_square_scale, cap)
        settings = (*row_loss, use_token_scaling, reduction, *shard, rows, weight_grad_dtype)
        loss, z_loss = self.differentiable((input, weight, target, bias), settings)
        return (loss, z_loss) if return_z_loss else loss

    def preload(self, device: torch.device | int | str | None = None) -> None:
        super().preload(device)
        device_errors.flag(self.name)

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        input, weight, target, bias = tensors
        check_rows(self.name, "input", input)
        check_linear(self.name, "input", input, weight, bias)
        losses.check_target(self.name, target, input.shape[:-1], input.device)
        check_weight_grad_dtype(self.name, Settings(*settings).weight_grad_dtype, weight)

    def in_backward(self, tensors: Tensors, settings: tuple[Any, ...]) -> bool:
        return found_in_backward(tensors[0].dtype, Settings(*settings).reduction)

    def on_reference(self, tensors: Tensors) -> bool:
        """The ranks talk to each other on the CPU as on a GPU: only shapes are the reference's."""
        return bool(tensors[0].device.type == "meta")

    def compute(
        self, tensors: Tensors, settings: tuple[Any, ...], wanted: Sequence[bool], grad: Tensor | None
    ) -> tuple[Tensors, Tensors]:
        input, weight, target, bias = tensors
        asked = Settings(*settings)
        reduction, each = asked.reduction, asked.chunk_rows
        dtype, group = input.dtype, resolve(asked.group)
        x, t = contiguous_rows(input), target.reshape(-1).contiguous()
        w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
        columns = Columns(self, x, t, asked.row_loss, asked.shard)
        wide, n = torch.promote_types(dtype, torch.float32), x.shape[0]
        totals = columns.totals(t, wide) if reduction == "mean" else None
        scale = None if grad is None else grad.reshape(-1).to(wide).contiguous()
        loss, parts = x.new_empty(n, dtype=wide), x.new_empty((3, n), dtype=wide)
        buffer = chunk_buffer(x, min(each, n), weight.shape[0])
        made = LinearGradients(x, w, b, wanted, asked.weight_grad_dtype or weight.dtype)
        reductions = []
        for first in range(0, n, each):
            last = min(first + each, n)
            some = t[first:last]
            logits = project(x[first:last], w, b, buffer[: last - first])
            rows = columns.rows(logits, some)
            loss[first:last], parts[:, first:last] = rows.loss, rows.parts
            if not any(wanted):
                continue
            of_rows = scale[first:last] if scale is not None and reduction == "none" else scale
            columns.write_gradient(logits, logits, some, rows, of_rows, totals)
            made.add(first, logits)
            if made.x is not None:
                work = dist.all_reduce(made.x[first:last], group=group, async_op=True)
                reductions.append(work)
        for work in reductions:
            work.wait()
        device_errors.check_now(self.name, input.device)
        return columns.reduced(Rows(loss, loss, parts), target, reduction), made.shaped(input, bias)

    @staticmethod
    def reference(*arguments: Any) -> tuple[Tensor, ...]:
        """Shapes alone: what a rank gets depends on the others."""
        (input, weight, target, bias), asked = arguments[:4], Settings(*arguments[4:])
        wide = torch.promote_types(input.dtype, torch.float32)
        loss = input.new_empty(target.shape if asked.reduction == "none" else (), dtype=wide)
        now = not found_in_backward(input.dtype, asked.reduction)
        likes = (input, weight, bias)
        types = (input.dtype, asked.weight_grad_dtype or weight.dtype, None if bias is None else bias.dtype)
        gradients = (
            loss.new_empty(0)
            if not (now and wanted) or like is None
            else like.new_empty(like.shape, dtype=dtype)
            for like, dtype, wanted in zip(likes, types, asked.wanted, strict=True)
        )
        return loss, torch.empty_like(loss), *gradients

    @staticmethod
    def reference_backward(grads: Tensors, saved: Tensors, *settings: Any) -> Tensors:
        """Shapes alone."""
        tensors, gradients = saved[:4], saved[4:]
        if any(g is not None for g in gradients):
            likes: Tensors = gradients
        else:
            likes = (tensors[0], tensors[1], tensors[3])
        made = (None if g is None else torch.empty_like(g) for g in likes)
        d_input, d_weight, d_bias = made
        return d_input, d_weight, None, d_bias

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        """The one kernel of the op's own, which knows no sizes."""
        return (Problem(f"{self.name}_combine", (), False, 1),)


OP = VocabParallelLinearCrossEntropy
