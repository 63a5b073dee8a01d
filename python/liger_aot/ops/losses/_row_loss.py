"""Losses of logits and targets: their arguments, the checks, and the launches of cross_entropy's kernels.

The launch functions take tensors on the device as they are, unchecked: ``target`` 1-D, contiguous, int32 or int64, as
long as ``logits`` (rows, classes) has rows, whose stride is any; what is fp32 is contiguous. None of them waits for the
device. ``csrc_triton/losses/cross_entropy_rows.py`` has the formula of a row.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError, IndexOutOfRange
from liger_aot.ops.arguments import ABOVE_ZERO, ANY, FROM_ZERO, Allowed, Schema
from liger_aot.ops.op import check_same_device, check_tensor
from liger_aot.runtime.dispatch import OpOn
from liger_aot.runtime.grid import programs_of
from liger_aot.runtime.layout import rows_of

REDUCTIONS = ("mean", "sum", "none")
# The settings of RowLoss's fields, as the ops that take them begin; a softcap of 0 is none.
ROW_LOSS = Schema(
    {
        "int ignore_index": ANY,
        "float label_smoothing": Allowed(least=0, most=1),
        "float lse_square_scale": ANY,
        "float softcap": FROM_ZERO,
    }
)
TOKEN_LOSS = Schema(
    {
        **ROW_LOSS,
        "bool token_scaling": Allowed(called="use_token_scaling"),
        "str reduction": Allowed(among=REDUCTIONS),
    }
)
WORDS = {torch.int32: 1, torch.int64: 2}  # 32-bit words a target


class RowLoss:
    """What the loss of a row is; by default torch.nn.functional.cross_entropy's.

    Args:
        softcap: logits become softcap * tanh(logits / softcap); 0 is none.
        token_scaling: loss and gradient times the target's probability, which gets no gradient.
    """

    __slots__ = ("ignore_index", "label_smoothing", "lse_square_scale", "softcap", "token_scaling")

    def __init__(
        self,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        lse_square_scale: float = 0.0,
        softcap: float = 0.0,
        token_scaling: bool = False,
    ) -> None:
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self.lse_square_scale, self.softcap, self.token_scaling = lse_square_scale, softcap, token_scaling


@lru_cache(maxsize=256)
def row_loss(*fields: Any) -> RowLoss:
    """A RowLoss of these fields; a call's settings are those of the call before, mostly."""
    return RowLoss(*fields)


def check_target(op: str, target: Any, shape: torch.Size, device: torch.device, name: str = "target") -> None:
    """Raise unless ``target`` holds an integer for each row: of ``shape``, on ``device``; ``name`` is its argument."""
    if not isinstance(target, Tensor):
        raise ArgumentTypeError(f"{op}: {name} must be a torch.Tensor, got {type(target).__name__}")
    if target.dtype not in WORDS:
        raise ArgumentTypeError(f"{op}: {name} must be int64 or int32, got {target.dtype}")
    if target.device != device:
        raise ArgumentError(
            f"{op}: {name} is on {target.device}, the logits on {device}: both must be on one"
        )
    if target.shape != shape:
        raise ArgumentError(
            f"{op}: {name} must be of shape {tuple(shape)}, one for each row; got {tuple(target.shape)}"
        )


def check_class_weight(op: str, argument: str, weight: Tensor, logits: Tensor, vocabulary: int) -> None:
    """Raise unless ``weight`` holds fp32 or the logits' dtype for every class, where the logits are."""
    check_tensor(op, argument, weight)
    check_same_device(op, argument, weight, "logits", logits)
    if weight.dtype not in (logits.dtype, torch.float32):
        raise ArgumentTypeError(
            f"{op}: {argument} must be float32 or of the logits' dtype {logits.dtype}, got {weight.dtype}"
        )
    if weight.shape != (vocabulary,):
        raise ArgumentError(
            f"{op}: {argument} must be of shape ({vocabulary},), a number a class; got {tuple(weight.shape)}"
        )
    if weight.requires_grad:
        raise ArgumentError(f"{op}: {argument} gets no gradient: give weight.detach()")


def softcap_of(op: str, softcap: Any) -> float:
    """0 for None, which is what a public softcap above 0 may be, too."""
    return 0.0 if softcap is None else float(ABOVE_ZERO.checked(op, "float softcap", softcap))


def counted(target: Tensor, ignore_index: int) -> Tensor:
    """Which targets are not ``ignore_index``. As int64: torch takes a number modulo 2^32 to compare int32 with it."""
    return target.long() != ignore_index


def check_range(op: str, target: Tensor, vocabulary: int, ignore_index: int) -> None:
    """IndexOutOfRange for a target outside of the classes; on the CPU alone, where looking costs nothing."""
    if target.device.type != "cpu" or not target.numel():
        return
    wrong = counted(target, ignore_index) & ((target < 0) | (target >= vocabulary))
    if wrong.any():
        raise IndexOutOfRange(
            f"{op}: target must be in [0, {vocabulary}), the classes, or ignore_index {ignore_index}; got "
            f"{int(target[wrong][0])}"
        )


def class_weight(weight: Tensor | None) -> Tensor | None:
    """Class weights as the kernels read them: fp32, contiguous."""
    return None if weight is None else weight.detach().float().contiguous()


# ---- launches --------------------------------------------------------------------------------------------------

# The flags of the kernels (csrc_triton/losses/cross_entropy_rows.py, cross_entropy.py).
WEIGHTED, BY_TARGET, WITH_PARTS, WITH_PREDICTED, DIVIDED, GIVEN = 1, 2, 4, 8, 16, 32
MEAN, WITH_LOSS, WITH_Z, WITH_HITS, WITH_REST = 64, 128, 256, 512, 1024

FIELDS = 8  # numbers that a program of cross_entropy_totals writes, where there are several


def count(on: OpOn, target: Tensor, weight: Tensor | None, row_loss: RowLoss, vocabulary: int) -> Tensor:
    """fp32 (2,): the sum of the class weights of the targets that are not ignored, and their count."""
    totals = target.new_empty(2, dtype=torch.float32)
    _add_up(on, (0, 0, 0), totals, 0, None, None, target, weight, row_loss, vocabulary, 0)
    return totals


def row_stats(
    on: OpOn,
    logits: Tensor,
    target: Tensor,
    row_loss: RowLoss,
    *,
    losses: Tensor,
    lse: Tensor,
    parts: Tensor | None = None,
    predicted: Tensor | None = None,
    weight: Tensor | None = None,
    weight_sum: Tensor | None = None,
    vocab_start: int = 0,
    vocabulary: int | None = None,
    flag: int = 0,
) -> None:
    """Every row's loss and log-sum-exp, in one read of the logits.

    Args:
        losses, lse: fp32 (rows,), written; 0 where the target is ignored, a NaN loss where it is out of range. A second
            row of lse gets what the first, rounded, lacks, for a more exact gradient.
        parts: fp32 (3, rows), written: the target's logit after the cap (0 where the columns don't hold it), the sum
            of weight * logit over the columns (only with label smoothing), the z-loss.
        predicted: int64 (rows,), written: the greatest logit's class, -1 where the target is ignored.
        weight, weight_sum: fp32 (classes,) and its sum; the latter is only read with label smoothing.
        vocab_start, vocabulary: the first column's class, and how many there are, where the columns are a part of them.
            ``lse`` is then the part's, and ``losses`` means nothing.
        flag: address of an int64 that a target out of range is written to; 0: none.
    """
    x_at, _, _, _, _, rows, n, stride = rows_of(logits)  # type: ignore[misc]
    dtype, full = logits.dtype, row_loss.softcap or row_loss.label_smoothing or predicted is not None
    flags = _flags(row_loss, weight, parts, rest=lse.numel() != rows)
    w_at = _at(weight)
    sizes = (
        row_loss.ignore_index,
        rows,
        n,
        WORDS[target.dtype],
        vocab_start,
        n if vocabulary is None else vocabulary,
    )
    at = (losses.data_ptr(), lse.data_ptr(), _at(parts))
    device = on.device
    if not full:
        kernel, aligned = on.kernels["cross_entropy_forward"], not (x_at | stride | n) & 15
        loaded = kernel.recent.get((dtype, aligned, n)) or kernel((dtype, aligned), n)
        loaded.launch(
            device, on.stream(device), -(-rows // loaded.rows), 1, 1,
            *at, flag, x_at, target.data_ptr(), w_at, stride, *sizes, row_loss.lse_square_scale, flags,
        )  # fmt: skip
        return
    kernel, aligned = on.kernels["cross_entropy_forward_full"], not (x_at | w_at | stride | n) & 15
    loaded = kernel.recent.get((dtype, aligned, n)) or kernel((dtype, aligned), n)
    loaded.launch(
        device, on.stream(device), rows, 1, 1,
        *at, _at(predicted), flag, x_at, target.data_ptr(), w_at,
        _at(weight_sum), stride, *sizes, row_loss.label_smoothing,
        row_loss.lse_square_scale, row_loss.softcap, flags | (WITH_PREDICTED if predicted is not None else 0),
    )  # fmt: skip


def gradient(
    on: OpOn,
    out: Tensor,
    logits: Tensor,
    target: Tensor,
    row_loss: RowLoss,
    *,
    lse: Tensor,
    parts: Tensor | None = None,
    grad: Tensor | None = None,
    totals: Tensor | None = None,
    weight: Tensor | None = None,
    weight_sum: Tensor | None = None,
    vocab_start: int = 0,
    vocabulary: int | None = None,
) -> None:
    """out (rows, classes) = the gradient of the rows' losses, each times a scale; ``out`` may be the logits.

    Args:
        lse: fp32 (rows,), of all classes, or (2, rows) as ``row_stats`` wrote it.
        parts: its first row is only read with token scaling: the target's logit.
        grad: fp32, one number or one a row: the scale; None is 1.
        totals: as ``count`` gives them: the scale is divided by the first, that of the z-loss by the second.
    """
    x_at, _, _, _, _, rows, n, stride = rows_of(logits)  # type: ignore[misc]
    out_at, *_, out_stride = rows_of(out)  # type: ignore[misc]
    dtype = logits.dtype
    full = row_loss.softcap != 0.0 or (row_loss.label_smoothing != 0.0 and weight is not None)
    w_at = _at(weight)
    flags = _flags(row_loss, weight, parts, grad, totals, lse.numel() != rows)
    unaligned = out_at | x_at | out_stride | stride | n
    if not full:
        kernel, aligned = on.kernels["cross_entropy_gradient"], not unaligned & 15
        loaded = kernel.recent.get((dtype, aligned, n)) or kernel((dtype, aligned), n)
        offset = (out_at ^ x_at) | (out_stride - stride) * logits.element_size()
        full = bool(offset & 127 and loaded.numbers.get("unaligned"))  # see its device code
    if full:
        kernel, aligned = on.kernels["cross_entropy_gradient_full"], not (unaligned | w_at) & 15
        loaded = kernel.recent.get((dtype, aligned, n)) or kernel((dtype, aligned), n)
    addresses = [out_at, x_at, lse.data_ptr(), _at(parts), target.data_ptr(), w_at]
    scales = [_at(grad), _at(totals), out_stride, stride, 0 if grad is None or grad.numel() == 1 else 1]
    sizes = [
        row_loss.ignore_index,
        rows,
        n,
        WORDS[target.dtype],
        vocab_start,
        n if vocabulary is None else vocabulary,
    ]
    numbers = [row_loss.label_smoothing, row_loss.lse_square_scale]
    if full:
        addresses.append(_at(weight_sum))
        numbers.append(row_loss.softcap)
    device = on.device
    loaded.launch(
        device, on.stream(device), -(-rows // loaded.rows) * -(-n // loaded.block), 1, 1,
        *addresses, *scales, *sizes, *numbers, flags,
    )  # fmt: skip


def gradient_in_place(
    on: OpOn,
    logits: Tensor,
    target: Tensor,
    row_loss: RowLoss,
    *,
    losses: Tensor,
    lse: Tensor,
    parts: Tensor | None = None,
    predicted: Tensor | None = None,
    grad: Tensor | None = None,
    totals: Tensor | None = None,
    weight: Tensor | None = None,
    weight_sum: Tensor | None = None,
    flag: int = 0,
) -> None:
    """``row_stats`` and ``gradient`` over the logits: in one launch, but for a softcap, label smoothing and
    ``predicted``. The arguments are theirs; ``parts`` must be given with token scaling and one of those."""
    if row_loss.softcap or row_loss.label_smoothing or predicted is not None:
        row_stats(
            on, logits, target, row_loss, losses=losses, lse=lse, parts=parts, predicted=predicted, weight=weight,
            weight_sum=weight_sum, flag=flag,
        )  # fmt: skip
        gradient(
            on, logits, logits, target, row_loss, lse=lse, parts=parts, grad=grad, totals=totals, weight=weight,
            weight_sum=weight_sum,
        )  # fmt: skip
        return
    x_at, _, _, _, _, rows, n, stride = rows_of(logits)  # type: ignore[misc]
    flags = _flags(row_loss, weight, parts, grad, totals)
    dtype, kernel = logits.dtype, on.kernels["cross_entropy_in_place"]
    aligned, device = not (x_at | stride | n) & 15, on.device
    loaded = kernel.recent.get((dtype, aligned, n)) or kernel((dtype, aligned), n)
    loaded.launch(
        device, on.stream(device), programs_of(on, loaded, rows), 1, 1,
        x_at, losses.data_ptr(), lse.data_ptr(), _at(parts), flag, target.data_ptr(), _at(weight), _at(grad),
        _at(totals), stride, 0 if grad is None or grad.numel() == 1 else 1, row_loss.ignore_index, rows, n,
        WORDS[target.dtype], row_loss.lse_square_scale, flags,
    )  # fmt: skip


def reduce(
    on: OpOn,
    losses: Tensor,
    target: Tensor,
    row_loss: RowLoss,
    reduction: str,
    *,
    vocabulary: int,
    totals: Tensor | None = None,
    parts: Tensor | None = None,
    predicted: Tensor | None = None,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """(loss, z-loss, token accuracy, totals) of the rows, added up in a fixed order, by one launch or two.

    Args:
        reduction: "mean" divides the losses by the weights' sum and the z-losses by the count; or "sum".
        totals: memory for them, written.
        parts: with the rows' z-losses, where they are wanted apart from the losses; else the z-loss is None.
        predicted: where the accuracy is wanted: the share of the targets not ignored that it equals.
    """
    totals = losses.new_empty(2) if totals is None else totals
    loss = losses.new_empty(())
    z_loss = None if parts is None else losses.new_empty(())
    accuracy = None if predicted is None else losses.new_empty(())
    flags = (WITH_LOSS | MEAN) if reduction == "mean" else WITH_LOSS
    results = (loss.data_ptr(), _at(z_loss), _at(accuracy))
    _add_up(
        on, results, totals, losses.data_ptr(), parts, predicted, target, weight, row_loss, vocabulary, flags
    )
    return loss, z_loss, accuracy, totals


def scale(on: OpOn, x: Tensor, grad: Tensor) -> None:
    """x (rows, n) *= grad in place, fp32, one number or one a row, on the device; where that is 1 nothing is read."""
    x_at, _, _, _, _, rows, n, stride = rows_of(x)  # type: ignore[misc]
    kernel, dtype = on.kernels["cross_entropy_scale"], x.dtype
    aligned, device = not (x_at | stride | n) & 15, on.device
    loaded = kernel.recent.get((dtype, aligned, n)) or kernel((dtype, aligned), n)
    programs = min(
        rows * -(-n // loaded.block), on.multiprocessors * loaded.numbers["programs_per_multiprocessor"]
    )
    loaded.launch(
        device, on.stream(device), programs, 1, 1,
        x_at, grad.data_ptr(), stride, 0 if grad.numel() == 1 else 1, rows, n,
    )  # fmt: skip


def _at(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _flags(
    row_loss: RowLoss,
    weight: Tensor | None,
    parts: Tensor | None,
    grad: Tensor | None = None,
    totals: Tensor | None = None,
    rest: bool = False,
) -> int:
    return (
        (WEIGHTED if weight is not None else 0)
        | (BY_TARGET if row_loss.token_scaling else 0)
        | (WITH_PARTS if parts is not None else 0)
        | (GIVEN if grad is not None else 0)
        | (DIVIDED if totals is not None else 0)
        | (WITH_REST if rest else 0)
    )


def _add_up(
    on: OpOn,
    results: tuple[int, int, int],
    totals: Tensor,
    losses_at: int,
    parts: Tensor | None,
    predicted: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    row_loss: RowLoss,
    vocabulary: int,
    flags: int,
) -> None:
    rows = target.numel()
    flags |= (
        (WEIGHTED if weight is not None else 0)
        | (WITH_Z if parts is not None else 0)
        | (WITH_HITS if predicted is not None else 0)
    )
    device = on.device
    stream = on.stream(device)
    kernel = on.kernels["cross_entropy_totals"]
    loaded = kernel.recent.get((False, 1)) or kernel((False,), 1)
    programs, program_rows = 1, rows
    if rows > loaded.numbers["rows_for_one_cta"]:
        programs, program_rows = -(-rows // loaded.rows), loaded.rows
    partials = None if programs == 1 else totals.new_empty(programs * FIELDS)
    loaded.launch(
        device, stream, programs, 1, 1,
        *results, totals.data_ptr(), _at(partials), losses_at, _at(parts), _at(predicted), target.data_ptr(),
        _at(weight), row_loss.ignore_index, rows, program_rows, WORDS[target.dtype], vocabulary, flags,
    )  # fmt: skip
    if partials is not None:
        on.kernels["cross_entropy_combine"]((False,), 1).launch(
            device, stream, 1, 1, 1, *results, totals.data_ptr(), partials.data_ptr(), programs, flags
        )
