"""Cross entropy of rows in plain torch, with the signatures of ``losses``: what the CPU runs, and in float64 what the
kernels are tested against.

With y the logits after the cap, w the class weights (1 where there are none), s the smoothing and z the scale of the
z-loss, a row's loss is (1 - s) w_t (lse - y_t) + s / V (sum(w) lse - sum(w y)) + z lse^2, where lse = log(sum(exp(y))).
A row's columns may be a shard of the vocabulary, from ``vocab_start`` on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_aot.ops.losses._row_loss import RowLoss, counted


def capped(logits: Tensor, softcap: float) -> Tensor:
    """The logits after the cap, in float32 or what they are wider in."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return softcap * torch.tanh(wide / softcap) if softcap else wide


def shard_stats(
    logits: Tensor, target: Tensor, row_loss: RowLoss, weight: Tensor | None = None, vocab_start: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """(lse, target logit, sum of w y) of each row over the columns there are; the second is 0 where the target is
    elsewhere or ignored."""
    y = capped(logits, row_loss.softcap)
    columns, inside = _columns(target, row_loss, vocab_start, y.shape[-1])
    at_target = torch.where(inside, y.gather(-1, columns.unsqueeze(-1)).squeeze(-1), 0.0)
    total = y.sum(-1) if weight is None else (y * weight).sum(-1)
    return torch.logsumexp(y, -1), at_target, total


def row_losses(
    lse: Tensor,
    at_target: Tensor,
    total: Tensor,
    target: Tensor,
    row_loss: RowLoss,
    vocabulary: int,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(loss, z-loss of it) of each row from the whole vocabulary's ``shard_stats``; 0 where ignored."""
    smoothing = row_loss.label_smoothing
    of_target, weight_sum = _class_weights(target, row_loss, weight, vocabulary)
    z_loss = row_loss.lse_square_scale * lse * lse
    loss = (1 - smoothing) * of_target * (lse - at_target) + z_loss
    if smoothing:
        loss = loss + smoothing / vocabulary * (weight_sum * lse - total)
    if row_loss.token_scaling:
        p = torch.exp(at_target - lse).detach()
        loss, z_loss = loss * p, z_loss * p
    counts = counted(target, row_loss.ignore_index)
    return torch.where(counts, loss, 0.0), torch.where(counts, z_loss, 0.0)


def gradient(
    logits: Tensor,
    target: Tensor,
    row_loss: RowLoss,
    lse: Tensor,
    at_target: Tensor,
    scale: Tensor,
    z_scale: Tensor,
    vocabulary: int,
    weight: Tensor | None = None,
    vocab_start: int = 0,
) -> Tensor:
    """d(sum of scale * (loss - z-loss) + z_scale * z-loss) / d logits, in float32 or what the logits are wider in.

    Args:
        lse, at_target: of the whole vocabulary.
        scale, z_scale: scalars or one a row.
        weight: of the columns there are. It must be whole where there is smoothing.
    """
    y = capped(logits, row_loss.softcap)
    columns, inside = _columns(target, row_loss, vocab_start, y.shape[-1])
    of_target, weight_sum = _class_weights(target, row_loss, weight, vocabulary)
    smoothing = row_loss.label_smoothing
    counts = counted(target, row_loss.ignore_index)
    scale, z_scale = (torch.where(counts, s, 0.0) for s in (scale, z_scale))
    if row_loss.token_scaling:
        p = torch.exp(at_target - lse).detach()
        scale, z_scale = scale * p, z_scale * p
    of_p = scale * ((1 - smoothing) * of_target + smoothing * weight_sum / vocabulary)
    of_p = of_p + z_scale * 2 * row_loss.lse_square_scale * lse
    dy = of_p.unsqueeze(-1) * torch.exp(y - lse.unsqueeze(-1))
    if smoothing:
        each = 1.0 if weight is None else weight
        dy = dy - (scale * smoothing / vocabulary).unsqueeze(-1) * each
    hot = torch.where(inside, -scale * (1 - smoothing) * of_target, 0.0)
    dy = dy.scatter_add(-1, columns.unsqueeze(-1), hot.unsqueeze(-1).to(dy.dtype))
    if row_loss.softcap:
        dy = dy * (1 - (y / row_loss.softcap) ** 2)
    return torch.where(counts.unsqueeze(-1), dy, 0.0)


def totals(
    target: Tensor, row_loss: RowLoss, weight: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """What a mean divides by: the class weights of the targets not ignored, and for the z-loss their count."""
    counts = counted(target, row_loss.ignore_index)
    count = counts.sum().to(dtype)
    if weight is None:
        return count, count
    of_target = weight.to(dtype).index_select(
        0, torch.where(counts, target, 0).long().clamp(0, weight.shape[0] - 1)
    )
    return torch.where(counts, of_target, 0.0).sum(), count


def _columns(target: Tensor, row_loss: RowLoss, vocab_start: int, n: int) -> tuple[Tensor, Tensor]:
    """(the target's column, whether it is there)."""
    columns = target.long() - vocab_start
    inside = counted(target, row_loss.ignore_index) & (columns >= 0) & (columns < n)
    return torch.where(inside, columns, 0), inside


def _class_weights(
    target: Tensor, row_loss: RowLoss, weight: Tensor | None, vocabulary: int
) -> tuple[Tensor | float, Tensor | float]:
    if weight is None:
        return 1.0, float(vocabulary)
    counts = counted(target, row_loss.ignore_index)
    at = torch.where(counts, target, 0).long().clamp(0, weight.shape[0] - 1)
    return weight.index_select(0, at), weight.sum()
