"""Cross entropy of logits whose vocabulary is cut into shards, one a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from liger_aot.ops.arguments import Schema, check_flag
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.losses import _row_loss as losses
from liger_aot.ops.losses._linear import contiguous_rows
from liger_aot.ops.losses._row_loss import RowLoss
from liger_aot.ops.losses._vocab_shards import SHARD, Columns, Rows, Shard, shard_of
from liger_aot.ops.op import Problem, check_rows
from liger_aot.runtime import device_errors


class Settings(NamedTuple):
    """Of a call, in the order of the op's schema."""

    ignore_index: int
    label_smoothing: float
    lse_square_scale: float
    softcap: float
    token_scaling: bool
    reduction: str
    vocab_start: int
    vocabulary: int
    group: str

    @property
    def row_loss(self) -> RowLoss:
        return RowLoss(*self[:5])

    @property
    def shard(self) -> Shard:
        return Shard(self.vocab_start, self.vocabulary, self.group)


class VocabParallelCrossEntropy(DifferentiableOp):
    """``vocab_parallel_cross_entropy(logits, target, *, group=None, vocab_start=None, vocabulary=None,
    ignore_index=-100, label_smoothing=0.0, lse_square_scale=0.0, softcap=None, reduction="mean",
    use_token_scaling=False, return_z_loss=False) -> Tensor``: cross entropy over a group whose ranks each hold some
    columns of the logits.

    Differentiable in logits. Every rank of the group calls it with the same target and gets the same loss, to the bit.
    The forward reads the logits once and has one collective, an all-gather of three float32 a row; the backward reads
    them again, writes their gradient, and has none. CPU tensors take plain torch.

    Args:
        logits: (..., columns) bfloat16, float16 or float32: this rank's columns of the vocabulary. Rows may have any
            stride.
        target: (...) int64 or int32, in [0, vocabulary) or ignore_index; the same on all ranks.
        group: a ProcessGroup, or None for the default one: NCCL for GPU tensors, gloo for the CPU's.
        vocab_start, vocabulary: this rank's first column and the columns of all ranks, where the shards are not all of
            one size. By default rank * columns and world size * columns.
        ignore_index, label_smoothing, lse_square_scale, softcap, reduction, use_token_scaling, return_z_loss: as
            fused_linear_cross_entropy's; the smoothing is over the whole vocabulary.

    Returns:
        the loss, float32: a scalar or, with reduction "none", of target's shape; with return_z_loss a tuple of it and
        the z-loss, which has no gradient.

    Raises:
        ArgumentTypeError, ArgumentError, PackNotFound: as fused_linear_cross_entropy; ArgumentError also where
            torch.distributed is not initialised or the shard lies outside of the vocabulary.

    Source:
        Megatron-LM (Shoeybi et al., 2019) has the idea; here the ranks exchange once.
    """

    name = "vocab_parallel_cross_entropy"
    uses = ("cross_entropy",)
    tensors = ("logits", "target")
    settings = Schema({**losses.TOKEN_LOSS, **SHARD})
    twice = False
    outputs = 2
    results = 5  # loss, z-loss; lse, parts, totals

    def __call__(
        self,
        logits: Tensor,
        target: Tensor,
        *,
        group: dist.ProcessGroup | None = None,
        vocab_start: int | None = None,
        vocabulary: int | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        lse_square_scale: float = 0.0,
        softcap: float | None = None,
        reduction: str = "mean",
        use_token_scaling: bool = False,
        return_z_loss: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        check_rows(self.name, "logits", logits)
        shard = shard_of(self.name, group, logits.shape[-1], vocab_start, vocabulary)
        cap = losses.softcap_of(self.name, softcap)
        row_loss = (ignore_index, label_smoothing, lse_square_scale, cap)
        settings = (*row_loss, use_token_scaling, reduction, *shard)
        check_flag(self.name, "return_z_loss", return_z_loss)
        loss, z_loss = self.differentiable((logits, target), settings)
        return (loss, z_loss.detach()) if return_z_loss else loss

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        logits, target = tensors
        check_rows(self.name, "logits", logits)
        losses.check_target(self.name, target, logits.shape[:-1], logits.device)

    def preload(self, device: torch.device | int | str | None = None) -> None:
        super().preload(device)
        device_errors.flag(self.name)

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        self.check(tensors, settings)
        logits, target = tensors
        asked, t = Settings(*settings), target.reshape(-1).contiguous()
        columns = Columns(self, logits, t, asked.row_loss, asked.shard)
        rows = columns.rows(contiguous_rows(logits), t)
        loss, z_loss = columns.reduced(rows, target, asked.reduction)
        divided = keep and asked.reduction == "mean"
        totals = columns.totals(t, rows.lse.dtype) if divided else rows.lse.new_empty(2)
        device_errors.check_now(self.name, logits.device)
        return loss, z_loss, rows.lse, rows.parts, totals

    def saved(self, tensors: Tensors, results: Tensors) -> Tensors:
        return (*tensors, *results[2:])

    def run_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        logits, target, lse, parts, totals = saved
        grad = grads[0]
        if grad is None:
            return torch.zeros_like(logits, memory_format=torch.contiguous_format), None
        t, rows = target.reshape(-1).contiguous(), contiguous_rows(logits)
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        asked = Settings(*settings)
        columns = Columns(self, logits, t, asked.row_loss, asked.shard)
        grad = grad.reshape(-1).to(lse.dtype).contiguous()
        divisor = totals if asked.reduction == "mean" else None
        columns.write_gradient(out.view(rows.shape), rows, t, Rows(lse, lse, parts), grad, divisor)
        return out, None

    @staticmethod
    def reference(logits: Tensor, target: Tensor, *settings: Any) -> tuple[Tensor, ...]:
        """Shapes alone: what a rank gets depends on the others."""
        wide = torch.promote_types(logits.dtype, torch.float32)
        rows = target.numel()
        loss = logits.new_empty(target.shape if Settings(*settings).reduction == "none" else (), dtype=wide)
        shapes = (rows,), (3, rows), (2,)
        return loss, torch.empty_like(loss), *(logits.new_empty(shape, dtype=wide) for shape in shapes)

    @staticmethod
    def reference_backward(grads: Tensors, saved: Tensors, *settings: Any) -> Tensors:
        """Shapes alone."""
        return torch.empty_like(saved[0], memory_format=torch.contiguous_format), None

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        """The one kernel of the op's own, which knows no sizes."""
        return (Problem(f"{self.name}_combine", (), False, 1),)


OP = VocabParallelCrossEntropy
