"""A vocabulary in shards, one for each rank of a torch.distributed group: which rank has which columns, and what
the ranks exchange of a row.

Each rank reads its own columns and finds a row's log(sum(exp)), its target's logit (0 where another rank has it) and
the sum of its logits. One all-gather of those three gives every rank the same bits of the whole row: a maximum and sums
can't share an all-reduce (Megatron-LM, Shoeybi et al., 2019, takes three).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.arguments import ANY, Schema
from liger_aot.ops.losses import _reference as plain
from liger_aot.ops.losses import _row_loss as losses
from liger_aot.ops.losses._row_loss import RowLoss, counted
from liger_aot.ops.op import Op
from liger_aot.runtime import device_errors
from liger_aot.runtime.dispatch import OpOn

SHARD = Schema({"int vocab_start": ANY, "int vocabulary": ANY, "str group": ANY})


class Shard(NamedTuple):
    """The columns that a rank has.

    Args:
        start: its first one.
        vocabulary: columns of all ranks.
        group: the group's name, which torch.library can hand through.
    """

    start: int
    vocabulary: int
    group: str


class Rows(NamedTuple):
    """What every rank knows of rows.

    Args:
        loss, lse: (rows,).
        parts: (3, rows): the target's logit, the sum of the logits, the z-loss.
    """

    loss: Tensor
    lse: Tensor
    parts: Tensor


def shard_of(op: str, group: Any, columns: int, vocab_start: int | None, vocabulary: int | None) -> Shard:
    """The shard of this rank.

    Args:
        group: a ProcessGroup, or None for the default one.
        columns: of this rank.
        vocab_start, vocabulary: by default those of shards that are all of this size, in the order of ranks.

    Raises:
        ArgumentError: torch.distributed is not initialised, this rank is not in the group, one of the two is missing,
            or the shard lies outside of the vocabulary.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ArgumentError(
            f"{op}: group needs torch.distributed: call torch.distributed.init_process_group first"
        )
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentTypeError(
            f"{op}: group must be a torch.distributed.ProcessGroup that this rank is in, or None; got "
            f"{type(group).__name__}"
        )
    if (vocab_start is None) != (vocabulary is None):
        raise ArgumentError(f"{op}: vocab_start and vocabulary must be given together or not at all")
    if vocab_start is None or vocabulary is None:
        vocab_start, vocabulary = dist.get_rank(group) * columns, dist.get_world_size(group) * columns
    ANY.checked(op, "int vocab_start", vocab_start)
    ANY.checked(op, "int vocabulary", vocabulary)
    if vocab_start < 0 or vocab_start + columns > vocabulary:
        raise ArgumentError(
            f"{op}: vocab_start {vocab_start} and this rank's {columns} columns must lie within vocabulary {vocabulary}"
        )
    return Shard(vocab_start, vocabulary, group.group_name)


def resolve(name: Any) -> Any:
    """The group of a name."""
    from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

    return _resolve_process_group(name)


class Columns:
    """One rank's columns of some op's call, on the kernels or in plain torch. On the CPU targets are looked at at once.

    Args:
        x: what lies where the call runs.
        target: (rows of the call,), contiguous.
    """

    def __init__(self, op: Op, x: Tensor, target: Tensor, row_loss: RowLoss, shard: Shard) -> None:
        self._op, self._row_loss, self._shard = op.name, row_loss, shard
        self._group = resolve(shard.group)
        self._own: OpOn | None = op._own.of(x, "input")
        self._kernels: OpOn | None = op._runtimes["cross_entropy"].of(x, "input")
        if self._kernels is None:
            losses.check_range(op.name, target, shard.vocabulary, row_loss.ignore_index)
        else:
            device_errors.raise_if_any(op.name)

    def totals(self, target: Tensor, dtype: torch.dtype) -> Tensor:
        """(2,): twice the count of targets that are not ignored."""
        if self._kernels is None or not target.numel():
            return counted(target, self._row_loss.ignore_index).sum().to(dtype).repeat(2)
        return losses.count(self._kernels, target, None, self._row_loss, self._shard.vocabulary)

    def rows(self, logits: Tensor, target: Tensor) -> Rows:
        """From logits (rows, columns), contiguous rows, and target (rows,): one read, one all-gather."""
        if self._kernels is None or not logits.numel():
            return self._plain_rows(logits, target)
        n, row_loss = logits.shape[0], self._row_loss
        made = logits.new_empty((8, n), dtype=torch.float32)
        flag = device_errors.flag(self._op)
        losses.row_stats(
            self._kernels, logits, target, row_loss, losses=made[4], lse=made[0], parts=made[1:4],
            vocab_start=self._shard.start, vocabulary=self._shard.vocabulary, flag=flag,
        )  # fmt: skip
        everyone = self._gathered(made[:3])
        rows = Rows(made[3], made[4], made[5:])
        self._combine(rows, everyone, target, flag)
        return rows

    def reduced(self, rows: Rows, target: Tensor, reduction: str) -> tuple[Tensor, Tensor]:
        """(loss, z-loss) of ``target``'s shape or a scalar."""
        if reduction == "none":
            return rows.loss.view(target.shape), rows.parts[2].clone().view(target.shape)
        t = target.reshape(-1).contiguous()
        if self._kernels is not None and t.numel():
            loss, z_loss, _, _ = losses.reduce(
                self._kernels, rows.loss, t, self._row_loss, reduction,
                vocabulary=self._shard.vocabulary, parts=rows.parts,
            )  # fmt: skip
            assert z_loss is not None
            return loss, z_loss
        loss, z_loss = rows.loss.sum(), rows.parts[2].sum()
        count = counted(t, self._row_loss.ignore_index).sum()
        return (loss / count, z_loss / count) if reduction == "mean" else (loss, z_loss)

    def write_gradient(
        self,
        out: Tensor,
        logits: Tensor,
        target: Tensor,
        rows: Rows,
        grad: Tensor | None,
        totals: Tensor | None,
    ) -> None:
        """out = d(grad * losses / totals) / d logits of these columns; out may be the logits.

        Args:
            grad: float32, of one element or one a row; None is 1.
            totals: as ``totals`` gives them; None is 1.
        """
        shard, row_loss = self._shard, self._row_loss
        if self._kernels is not None and logits.numel():
            losses.gradient(
                self._kernels, out, logits, target, row_loss, lse=rows.lse, parts=rows.parts, grad=grad,
                totals=totals, vocab_start=shard.start, vocabulary=shard.vocabulary,
            )  # fmt: skip
            return
        scale = rows.lse.new_ones(()) if grad is None else grad
        scale = (scale if totals is None else scale / totals[0]).expand(rows.lse.shape)
        found = plain.gradient(
            logits,
            target,
            row_loss,
            rows.lse,
            rows.parts[0],
            scale,
            scale,
            shard.vocabulary,
            None,
            shard.start,
        )
        out.copy_(found)

    def _gathered(self, own: Tensor) -> Tensor:
        """(ranks, 3, rows) from every rank's (3, rows)."""
        world = dist.get_world_size(self._group)
        everyone = own.new_empty((world * 3, own.shape[1]))
        if world == 1:
            everyone.copy_(own)
        else:
            dist.all_gather_into_tensor(everyone, own.contiguous(), group=self._group)
        return everyone.view(world, 3, -1)

    def _combine(self, rows: Rows, everyone: Tensor, target: Tensor, flag: int) -> None:
        on, row_loss = self._own, self._row_loss
        assert on is not None
        n = target.numel()
        loaded = on.kernels[f"{self._op}_combine"]((False,), 1)
        loaded.launch(
            on.device, on.stream(on.device), -(-n // loaded.block), 1, 1,
            rows.loss.data_ptr(), rows.lse.data_ptr(), rows.parts.data_ptr(), flag, everyone.data_ptr(),
            target.data_ptr(), row_loss.ignore_index, n, everyone.shape[0], losses.WORDS[target.dtype],
            self._shard.vocabulary, row_loss.label_smoothing, row_loss.lse_square_scale,
            losses.WITH_PARTS | (losses.BY_TARGET if row_loss.token_scaling else 0),
        )  # fmt: skip

    def _plain_rows(self, logits: Tensor, target: Tensor) -> Rows:
        shard, row_loss = self._shard, self._row_loss
        everyone = self._gathered(torch.stack(plain.shard_stats(logits, target, row_loss, None, shard.start)))
        lse, at_target, total = torch.logsumexp(everyone[:, 0], 0), *everyone[:, 1:].sum(0)
        loss, z_loss = plain.row_losses(lse, at_target, total, target, row_loss, shard.vocabulary)
        return Rows(loss, lse, torch.stack((at_target, total, z_loss)))
