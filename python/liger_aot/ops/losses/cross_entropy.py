"""Cross entropy of logits and class indices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from liger_aot.ops.arguments import ANY, Allowed, Schema, check_flag
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.losses import _reference as plain
from liger_aot.ops.losses import _row_loss as losses
from liger_aot.ops.losses._row_loss import RowLoss, counted
from liger_aot.ops.op import Problem, as_rows, check_rows
from liger_aot.ops.overwriting import overwritten
from liger_aot.ops.torch_library import register
from liger_aot.runtime import device_errors
from liger_aot.runtime.dispatch import OpOn, Runtimes
from liger_aot.runtime.layout import CPU, rows_of

KERNELS = ("forward", "forward_full", "gradient", "gradient_full", "in_place", "scale")


class CrossEntropy(DifferentiableOp):
    """``cross_entropy(logits, target, weight=None, *, ignore_index=-100, label_smoothing=0.0, lse_square_scale=0.0,
    softcap=None, reduction="mean", return_z_loss=False, return_token_accuracy=False, return_predicted_tokens=False,
    inplace_grad=False)``: as torch.nn.functional.cross_entropy with the classes in the last dimension.

    Differentiable in ``logits``; works under torch.compile and, after ``preload``, in CUDA graphs. CPU tensors take the
    plain-torch reference. Computed in float32; sums over rows are in a fixed order.

    Args:
        logits: (..., V) bfloat16, float16 or float32. Rows may have any stride; other layouts are copied. -inf is
            allowed. Finite logits must stay below 2^127 / log2(e).
        target: (...) int64 or int32 in [0, V), or ``ignore_index``: such a row has no loss and no gradient.
        weight: (V,) float32 or the logits' dtype: what the loss of a target of each class is multiplied by. It gets no
            gradient.
        ignore_index: the target of rows that do not count.
        label_smoothing: in [0, 1], as torch's, with class weights too.
        lse_square_scale: adds this times the squared log-sum-exp to each row's loss (the z-loss of PaLM).
        softcap: logits become softcap * tanh(logits / softcap).
        reduction: "mean" over the targets that are not ignored (by the sum of their weights; the z-loss always by their
            count), "sum" or "none". The mean over no targets is NaN.
        return_z_loss, return_token_accuracy, return_predicted_tokens: more results, in this order after the loss.
        inplace_grad: the forward writes the gradient over the logits, which saves the memory and the time of a second
            pass. The logits count as modified in place: their later use raises or finds the gradient. A leaf that
            requires a gradient is refused. The gradient is handed over in the first backward; a second one raises.
            Where no gradient is needed, and under torch.compile, it changes nothing.

    Returns:
        the loss, float32, a scalar or of target's shape; or a tuple with the results asked for. They get no gradient:
        the z-loss as contained in the loss; the token accuracy, the share of the targets not ignored whose logit is the
        greatest (for "none" 1.0 or 0.0 a row); the predicted tokens, int64 of target's shape, the first greatest
        logit's index, -1 where the target is ignored.

        A target out of range is an error on the CPU. On a GPU, which can't be asked without waiting, its row's loss and
        gradient are NaN, and the op's next call raises; LIGER_AOT_DEBUG=1 waits and raises at once.

    Raises:
        ArgumentTypeError: an argument is of another type or dtype.
        ArgumentError: shapes or devices don't match; a number is out of range; an earlier call had such a target.
        PackNotFound: no installed pack serves the GPU.

    Source:
        torch.nn.functional.cross_entropy; log-sum-exp in one pass: Milakov and Gimelshein, Online normalizer
        calculation for softmax (2018); the z-loss is PaLM's (Chowdhery et al., 2022).
    """

    name = "cross_entropy"
    tensors = ("logits", "target", "weight?")
    settings = Schema(
        {
            **losses.ROW_LOSS,
            "str reduction": Allowed(among=losses.REDUCTIONS),
            "bool return_z_loss": ANY,
            "bool return_token_accuracy": ANY,
            "bool return_predicted_tokens": ANY,
        }
    )
    outputs = 1
    results = 6  # loss, z-loss, accuracy, predicted tokens; lse and what it lacks, totals

    def __init__(self, runtimes: Mapping[str, Runtimes] | None = None) -> None:
        super().__init__(runtimes)
        self._detailed = self if type(self) is Detailed else Detailed(self._runtimes)

    def __call__(
        self,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        lse_square_scale: float = 0.0,
        softcap: float | None = None,
        reduction: str = "mean",
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        inplace_grad: bool = False,
    ) -> Any:
        tensors = (logits, target, weight)
        asked = (return_z_loss, return_token_accuracy, return_predicted_tokens)
        cap = 0.0 if softcap is None else softcap
        settings = (ignore_index, label_smoothing, lse_square_scale, cap, reduction, *asked)
        if (
            inplace_grad is not False
            and check_flag(self.name, "inplace_grad", inplace_grad)
            and not is_compiling()
            and torch.is_grad_enabled()
            and getattr(logits, "requires_grad", False)
        ):
            self.check_all(tensors, settings)
            found = overwritten(self, "logits", tensors, settings)
        elif return_z_loss is return_token_accuracy is return_predicted_tokens is False:
            return self.differentiable(tensors, settings)
        else:
            found = self._detailed.differentiable(tensors, settings)
        more = tuple(r.detach() for r, wanted in zip(found[1:], asked, strict=True) if wanted)
        return (found[0], *more) if more else found[0]

    def preload(self, device: torch.device | int | str | None = None) -> None:
        super().preload(device)
        device_errors.flag(self.name)

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        logits, target, weight = tensors
        check_rows(self.name, "logits", logits)
        losses.check_target(self.name, target, logits.shape[:-1], logits.device)
        if weight is not None:
            losses.check_class_weight(self.name, "weight", weight, logits, logits.shape[-1])

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        on = self._ready(tensors)
        if on is None:
            return self.prepare_forward(tensors, settings, keep, out)
        return self._run(on, tensors, settings, None)

    def _ready(self, tensors: Tensors) -> OpOn | None:
        """Where the tensors lie, if the kernels can read them as they are."""
        logits, target, weight = tensors
        in_x = rows_of(logits)
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        if on is None or in_x is None:
            return None
        _, kind, index, _, _, rows, n, _ = in_x
        where = -1 if kind == CPU else index
        if (
            target.dtype not in losses.WORDS
            or not rows * n
            or target.get_device() != where
            or target.shape != logits.shape[:-1]
            or not target.is_contiguous()
            or (
                weight is not None
                and (
                    weight.dtype != torch.float32
                    or weight.shape != (n,)
                    or weight.get_device() != where
                    or not weight.is_contiguous()
                    or weight.requires_grad
                )
            )
        ):
            return None
        return on

    def _run(
        self, on: OpOn, tensors: Tensors, settings: tuple[Any, ...], over: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """The results.

        Args:
            over: the logits, where their gradient goes over them.
        """
        logits, target, weight = tensors
        *fields, reduction, with_z, with_accuracy, with_predicted = settings
        row_loss = losses.row_loss(*fields)
        device_errors.raise_if_any(self.name)
        n = logits.shape[-1]
        loss = torch.empty_like(target, dtype=torch.float32)
        lse = logits.new_empty((2, *target.shape), dtype=torch.float32)
        parts = predicted = totals = z_loss = accuracy = None
        if with_z or (row_loss.lse_square_scale and weight is not None):
            parts = logits.new_empty((3, *target.shape), dtype=torch.float32)
        if with_accuracy or with_predicted:
            predicted = torch.empty_like(target, dtype=torch.int64)
        common = {
            "losses": loss, "lse": lse, "parts": parts, "predicted": predicted, "weight": weight,
            "weight_sum": weight.sum() if weight is not None and row_loss.label_smoothing else None,
            "flag": device_errors.flag(self.name),
        }  # fmt: skip
        if over is None:
            losses.row_stats(on, logits, target, row_loss, **common)
        else:
            if reduction == "mean":
                totals = losses.count(on, target, weight, row_loss, n)
            losses.gradient_in_place(on, over, target, row_loss, totals=totals, **common)
        if reduction == "none":
            if with_z and parts is not None:
                z_loss = parts[2].clone()
            if with_accuracy:
                accuracy = ((predicted == target) & counted(target, row_loss.ignore_index)).float()
        else:
            loss, z_loss, accuracy, totals = losses.reduce(
                on, loss, target, row_loss, reduction, vocabulary=n, totals=totals, parts=parts,
                predicted=predicted if with_accuracy else None, weight=weight,
            )  # fmt: skip
        device_errors.check_now(self.name, on.device)
        return loss, z_loss, accuracy, predicted if with_predicted else None, lse, totals

    def prepare_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        self.check(tensors, settings)
        logits, target, weight = tensors
        if self.on_reference(tensors):
            losses.check_range(self.name, target, logits.shape[-1], settings[0])
            return super().prepare_forward(tensors, settings, keep, out)
        ready = (as_rows(self.name, "logits", logits), target.contiguous(), losses.class_weight(weight))
        return self.run_forward(ready, settings, keep, out)

    def saved(self, tensors: Tensors, results: Tensors) -> Tensors:
        return (*tensors, *results[4:])

    def run_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        logits, target, weight, lse, totals = saved
        on = self._ready(saved[:3]) if needed[0] else None
        grad = grads[0]
        if on is None or not grad.is_contiguous():
            return self.prepare_backward(grads, saved, settings, needed)
        row_loss, mean = losses.row_loss(*settings[:4]), settings[4] == "mean"
        dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        weight_sum = weight.sum() if weight is not None and row_loss.label_smoothing else None
        losses.gradient(
            on, dlogits, logits, target, row_loss, lse=lse, grad=grad, totals=totals if mean else None, weight=weight,
            weight_sum=weight_sum,
        )  # fmt: skip
        return dlogits, None, None

    def prepare_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        if not needed[0] or self.on_reference(saved):
            return super().prepare_backward(grads, saved, settings, needed)
        logits, target, weight, lse, totals = saved
        ready = (
            as_rows(self.name, "logits", logits), target.contiguous(), losses.class_weight(weight), lse, totals,
        )  # fmt: skip
        return self.run_backward((grads[0].contiguous(),), ready, settings, needed)

    def overwrite(self, tensors: Tensors, settings: tuple[Any, ...]) -> tuple[Tensor | None, ...]:
        """The results, and the gradient of the loss over the logits."""
        logits, target, weight = tensors
        if not self.on_reference(tensors):
            on = self._own.of(logits, "logits")
            assert on is not None
            ready = (logits, target.contiguous(), losses.class_weight(weight))
            return self._run(on, ready, settings, logits)
        losses.check_range(self.name, target, logits.shape[-1], settings[0])
        results = self.by_reference(tensors, settings)
        ones = (torch.ones_like(results[0]),)
        logits.copy_(self.gradients_by_reference(ones, self.saved(tensors, results), settings)[0])
        return results

    def rescale(self, gradient: Tensor, grad: Tensor) -> None:
        """gradient *= grad in place, a number or one a row."""
        if not self.on_reference((gradient,)):
            on = self._own.of(gradient, "logits")
            assert on is not None
            losses.scale(on, gradient, grad.contiguous())
        else:
            gradient.mul_(grad if grad.dim() == 0 else grad.unsqueeze(-1))

    # ---- plain torch ----------------------------------------------------------------------------------------

    @staticmethod
    def reference(
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int,
        label_smoothing: float,
        lse_square_scale: float,
        softcap: float,
        reduction: str,
        return_z_loss: bool,
        return_token_accuracy: bool,
        return_predicted_tokens: bool,
    ) -> tuple[Tensor, ...]:
        row_loss = RowLoss(ignore_index, label_smoothing, lse_square_scale, softcap)
        n, shape = logits.shape[-1], target.shape
        logits, target = logits.reshape(-1, n), target.reshape(-1)
        counts = counted(target, ignore_index)
        wide = torch.promote_types(logits.dtype, torch.float32)
        of_class = None if weight is None else weight.to(wide)
        lse, at_target, total = plain.shard_stats(logits, target, row_loss, of_class)
        loss, z_loss = plain.row_losses(lse, at_target, total, target, row_loss, n, of_class)
        loss = torch.where(counts & ((target < 0) | (target >= n)), torch.nan, loss)
        weights, count = plain.totals(target, row_loss, of_class, wide)
        predicted = torch.where(counts, logits.argmax(-1), -1)
        accuracy = (counts & (predicted == target)).to(wide)
        loss, z_loss, accuracy, predicted, lse = (
            v.view(shape) for v in (loss, z_loss, accuracy, predicted, torch.where(counts, lse, 0.0))
        )
        if reduction != "none":
            loss, z_loss = (loss - z_loss).sum(), z_loss.sum()
            accuracy = accuracy.sum() / count
            if reduction == "mean":
                loss, z_loss = loss / weights, z_loss / count
            loss = loss + z_loss
        missing = loss.new_empty(0)
        return (
            loss,
            z_loss if return_z_loss else missing,
            accuracy if return_token_accuracy else missing.clone(),
            predicted if return_predicted_tokens else missing.clone(),
            torch.stack((lse, torch.zeros_like(lse))),
            missing.clone() if reduction == "none" else torch.stack((weights, count)),
        )

    @staticmethod
    def reference_backward(
        grads: Tensors,
        saved: Tensors,
        ignore_index: int,
        label_smoothing: float,
        lse_square_scale: float,
        softcap: float,
        reduction: str,
        *asked: bool,
    ) -> Tensors:
        logits, target, weight, lse, totals = saved
        if not logits.numel():
            return torch.zeros_like(logits), None, None
        row_loss = RowLoss(ignore_index, label_smoothing, lse_square_scale, softcap)
        n, of_class = logits.shape[-1], None if weight is None else weight.to(lse.dtype)
        scale = z_scale = grads[0].to(lse.dtype)
        if reduction == "mean":
            scale, z_scale = scale / totals[0], scale / totals[1]
        scale, z_scale = (v.expand(target.shape).reshape(-1) for v in (scale, z_scale))
        x, t, of_rows = logits.reshape(-1, n), target.reshape(-1), lse[0].reshape(-1)
        d = plain.gradient(x, t, row_loss, of_rows, of_rows, scale, z_scale, n, of_class)
        wrong = counted(t, ignore_index) & ((t < 0) | (t >= n))
        d = torch.where(wrong.unsqueeze(-1), torch.nan, d)
        return d.view(logits.shape).to(logits.dtype), None, None

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        n = shape[-1]
        of_rows = tuple(Problem(f"cross_entropy_{way}", (dtype,), n % 16 == 0, n) for way in KERNELS)
        return (*of_rows, *(Problem(f"cross_entropy_{way}", (), False, 1) for way in ("totals", "combine")))


class Detailed(CrossEntropy):
    """The same, with all that can be asked for as outputs."""

    outputs = 4

    def through_library(
        self, tensors: Tensors, settings: tuple[Any, ...], out: Sequence[Tensor] | None
    ) -> Any:
        register(self.name)
        self.check_all(tensors, settings)
        # The op as it is registered has one output; the others come with what its backward reads.
        return torch.ops.liger_aot.cross_entropy_forward(*tensors, *settings, True)[:4]


OP = CrossEntropy
