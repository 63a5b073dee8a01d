"""Cross entropy of a linear layer's results, which are never whole in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_aot.ops.arguments import ANY, Allowed, Schema, check_flag
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.losses import _reference as plain
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
    scaled,
)
from liger_aot.ops.losses._row_loss import RowLoss, counted
from liger_aot.ops.op import Problem, check_rows
from liger_aot.runtime import device_errors

OUTPUTS = 4  # loss, z-loss, token accuracy, predicted tokens


class Settings(NamedTuple):
    """Of a call, in the order of the op's schema; ``wanted`` is not always with them."""

    ignore_index: int
    label_smoothing: float
    lse_square_scale: float
    softcap: float
    token_scaling: bool
    reduction: str
    chunk_bytes: int
    weight_grad_dtype: torch.dtype | None
    extras: Sequence[bool]
    wanted: Sequence[bool] = ()

    @property
    def row_loss(self) -> RowLoss:
        return RowLoss(*self[:5])


class FusedLinearCrossEntropy(LinearLoss):
    """``fused_linear_cross_entropy(input, weight, target, bias=None, *, class_weight=None, ignore_index=-100,
    label_smoothing=0.0, lse_square_scale=0.0, softcap=None, reduction="mean", chunk_bytes=2**29,
    weight_grad_dtype=None, use_token_scaling=False, return_z_loss=False, return_token_accuracy=False,
    return_predicted_tokens=False) -> Tensor``: cross entropy of input @ weight^T + bias.

    Differentiable in input, weight and bias; works under torch.compile and, after ``preload``, in CUDA graphs: nothing
    waits for the device. CPU tensors take the plain-torch reference, which holds all logits.

    The logits are computed in chunks of rows, in input's dtype, into one buffer. Where a gradient is wanted it is found
    in the forward: the chunk's kernel writes the logits' gradient over them, and two products take it to input and
    weight. The first backward multiplies those by the loss's gradient in place (a launch that returns at once where
    that is 1) and gives them to autograd; a second one (``retain_graph=True``) computes all again. What is frozen costs
    nothing. With reduction "none", and for float16 (whose range a loss scaler's factor has to reach before the
    gradients are found), they are found in the backward, with one more product.

    Under autocast input is cast as torch.nn.functional.linear's is; weight and bias may stay in float32 and get float32
    gradients. Under DistributedDataParallel and FSDP2 call it inside the forward of the module that holds the weight.

    Args:
        input: (..., k) bfloat16, float16 or float32.
        weight: (vocabulary, k) of input's dtype, or float32: then it is cast for the products, once a call.
        target: (...) int64 or int32, each in [0, vocabulary) or ignore_index.
        bias: (vocabulary,) of input's dtype or float32, or None.
        class_weight: (vocabulary,) floating point, as torch.nn.functional.cross_entropy's weight. No gradient.
        ignore_index: targets of this value have no loss and no gradient.
        label_smoothing: in [0, 1], as torch's.
        lse_square_scale: z-loss: this times the square of log(sum(exp(logits))) is added to each token's loss.
        softcap: c above 0: logits become c * tanh(logits / c).
        reduction: "mean" over the targets not ignored (their class weights' sum where there are any; the z-loss over
            their count), "sum", or "none".
        chunk_bytes: what the chunk of logits may take. More gives fewer chunks: each reads and writes all of weight's
            gradient.
        weight_grad_dtype: in which the chunks' parts of weight's gradient are added: weight's dtype (None), which
            rounds the sum once a chunk, or torch.float32. Autograd rounds that to weight's dtype at the end, unless
            weight.grad_dtype allows float32. On a GPU float32 with 16-bit inputs needs torch 2.8 and CUDA.
        use_token_scaling: each token's loss times the probability of its target, which gets no gradient.
        return_z_loss: also give the z-loss, reduced as the loss.
        return_token_accuracy: also give the part of the targets not ignored that have the largest logit.
        return_predicted_tokens: also give the largest logit's index, int64 of target's shape, -1 where ignored.

    Returns:
        the loss, float32: a scalar or, with reduction "none", of target's shape; or a tuple of it and what the
        ``return_`` arguments ask for, in their order, without gradients. Where all targets are ignored the mean is NaN.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: shapes or devices don't fit; a number is out of its range; chunk_bytes holds no row; a target is
            out of range: on the CPU at once, on a GPU the loss is NaN and the next call raises (with
            LIGER_AOT_DEBUG=1 this one, which then waits for the GPU).
        PackNotFound: no installed pack serves the GPU.

    Source:
        Liger Kernel (Hsu et al., 2024), Efficient cross entropy (Malek, 2023). The z-loss is PaLM's
        (Chowdhery et al., 2022).
    """

    name = "fused_linear_cross_entropy"
    uses = ("cross_entropy",)
    tensors = ("input", "weight", "target", "bias?", "class_weight?")
    graded = ("input", "weight", "bias")
    settings = Schema(
        {
            **losses.TOKEN_LOSS,
            "int chunk_bytes": Allowed(least=1),
            "ScalarType? weight_grad_dtype": ANY,
            "bool[] extras": ANY,
            "bool[] wanted": ANY,
        }
    )
    outputs = OUTPUTS
    results = OUTPUTS + len(graded)

    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        lse_square_scale: float = 0.0,
        softcap: float | None = None,
        reduction: str = "mean",
        chunk_bytes: int = BUDGET,
        weight_grad_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        extras = (
            check_flag(self.name, "return_z_loss", return_z_loss),
            check_flag(self.name, "return_token_accuracy", return_token_accuracy),
            check_flag(self.name, "return_predicted_tokens", return_predicted_tokens),
        )
        settings = (
            ignore_index, label_smoothing, lse_square_scale, losses.softcap_of(self.name, softcap),
            use_token_scaling, reduction, chunk_bytes, weight_grad_dtype, extras,
        )  # fmt: skip
        input, weight, bias = autocast(input, weight, bias)
        loss, *others = self.differentiable((input, weight, target, bias, class_weight), settings)
        asked = tuple(value for value, wanted in zip(others, extras, strict=True) if wanted)
        return (loss, *asked) if asked else loss

    def preload(self, device: torch.device | int | str | None = None) -> None:
        super().preload(device)
        device_errors.flag(self.name)

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        input, weight, target, bias, class_weight = tensors
        asked = Settings(*settings)
        check_rows(self.name, "input", input)
        check_linear(self.name, "input", input, weight, bias)
        losses.check_target(self.name, target, input.shape[:-1], input.device)
        if class_weight is not None:
            losses.check_class_weight(self.name, "class_weight", class_weight, input, weight.shape[0])
        check_weight_grad_dtype(self.name, asked.weight_grad_dtype, weight)
        row_bytes = padded(weight.shape[0]) * input.element_size()
        chunk_rows(self.name, 1, row_bytes, asked.chunk_bytes)

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        if tensors[0].device.type == "cpu":
            self.check(tensors, settings)
            losses.check_range(self.name, tensors[2], tensors[1].shape[0], Settings(*settings).ignore_index)
        return super().run_forward(tensors, settings, keep, out)

    def in_backward(self, tensors: Tensors, settings: tuple[Any, ...]) -> bool:
        return found_in_backward(tensors[0].dtype, Settings(*settings).reduction)

    def compute(
        self, tensors: Tensors, settings: tuple[Any, ...], wanted: Sequence[bool], grad: Tensor | None
    ) -> tuple[Tensors, Tensors]:
        input, weight, target, bias, class_weight = tensors
        asked = Settings(*settings)
        row_loss, reduction = asked.row_loss, asked.reduction
        want_z, want_accuracy, want_predicted = asked.extras if grad is None else (False,) * 3
        device_errors.raise_if_any(self.name)
        on = self._runtimes["cross_entropy"].of(input, "input")
        assert on is not None
        vocabulary, dtype = weight.shape[0], input.dtype
        x, t = contiguous_rows(input), target.reshape(-1).contiguous()
        w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
        rows = x.shape[0]
        classes = losses.class_weight(class_weight)
        classes_sum = None if classes is None else classes.sum()
        totals = losses.count(on, t, classes, row_loss, vocabulary) if reduction == "mean" else None
        scale = None if grad is None else grad.reshape(-1).to(torch.float32).contiguous()
        per_row = scale is not None and reduction == "none"

        row = x.new_empty((2, rows), dtype=torch.float32)
        parts = x.new_empty((3, rows), dtype=torch.float32) if want_z else None
        predicted = x.new_empty(rows, dtype=torch.int64) if want_accuracy or want_predicted else None
        each = chunk_rows(self.name, rows, padded(vocabulary) * x.element_size(), asked.chunk_bytes)
        buffer = chunk_buffer(x, each, vocabulary)
        made = LinearGradients(x, w, b, wanted, asked.weight_grad_dtype or weight.dtype)
        for first in range(0, rows, each):
            last = min(first + each, rows)
            logits = project(x[first:last], w, b, buffer[: last - first])
            needs_parts = parts is not None or row_loss.token_scaling
            these = x.new_empty((3, last - first), dtype=torch.float32) if needs_parts else None
            common: dict[str, Any] = {
                "losses": row[0, first:last],
                "lse": row[1, first:last],
                "parts": these,
                "predicted": None if predicted is None else predicted[first:last],
                "weight": classes,
                "weight_sum": classes_sum,
                "flag": device_errors.flag(self.name),
            }
            if any(wanted):
                of_rows = scale[first:last] if per_row and scale is not None else scale
                losses.gradient_in_place(
                    on, logits, t[first:last], row_loss, grad=of_rows, totals=totals, **common
                )
                made.add(first, logits)
            else:
                losses.row_stats(on, logits, t[first:last], row_loss, **common)
            if parts is not None and these is not None:
                parts[:, first:last] = these
        device_errors.check_now(self.name, input.device)
        gradients = made.shaped(input, bias)
        if grad is not None:  # the forward gave them
            return (None,) * OUTPUTS, gradients
        loss = z_loss = accuracy = None
        if reduction != "none" or want_accuracy:
            loss, z_loss, accuracy, _ = losses.reduce(
                on, row[0], t, row_loss, reduction, totals=totals, parts=parts,
                predicted=predicted if want_accuracy else None, weight=classes, vocabulary=vocabulary,
            )  # fmt: skip
        if reduction == "none":
            loss = row[0].view(target.shape)
            z_loss = None if parts is None else parts[2].clone().view(target.shape)
        tokens = predicted.view(target.shape) if want_predicted and predicted is not None else None
        return (loss, z_loss, accuracy, tokens), gradients

    @staticmethod
    def reference(*arguments: Any) -> tuple[Tensor, ...]:
        tensors, settings = arguments[:5], arguments[5:]
        asked = Settings(*settings)
        now = not found_in_backward(tensors[0].dtype, asked.reduction)
        outputs, gradients = whole(tensors, asked, None, [want and now for want in asked.wanted])
        return tuple(outputs[0].new_empty(0) if r is None else r for r in (*outputs, *gradients))

    @staticmethod
    def reference_backward(grads: Tensors, saved: Tensors, *settings: Any) -> Tensors:
        tensors, gradients = saved[:5], saved[5:]
        if any(g is not None for g in gradients):
            found: Tensors = tuple(None if g is None else scaled(g, grads[0]) for g in gradients)
        else:
            _, found = whole(tensors, Settings(*settings), grads[0], [True, True, tensors[3] is not None])
        d_input, d_weight, d_bias = found
        return d_input, d_weight, None, d_bias, None

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        """The one kernel of the op's own, on a gradient of ``shape``."""
        n = torch.Size(shape).numel()
        return (Problem("fused_linear_cross_entropy_scale", (dtype,), n % 16 == 0, n),)


def whole(
    tensors: Tensors, asked: Settings, grad: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensors, Tensors]:
    """(outputs, gradients) as ``compute`` gives them, in plain torch from all logits at once."""
    input, weight, target, bias, class_weight = tensors
    row_loss, reduction = asked.row_loss, asked.reduction
    wide = torch.promote_types(input.dtype, torch.float32)
    x, w, t = input.reshape(target.numel(), input.shape[-1]).to(wide), weight.to(wide), target.reshape(-1)
    classes = None if class_weight is None else class_weight.to(wide)
    logits = x @ w.t() if bias is None else x @ w.t() + bias.to(wide)
    vocabulary = logits.shape[-1]
    lse, at_target, total = plain.shard_stats(logits, t, row_loss, classes)
    rows, z_rows = plain.row_losses(lse, at_target, total, t, row_loss, vocabulary, classes)
    main, count = plain.totals(t, row_loss, classes, wide)
    if reduction == "none":
        loss, z_loss = rows.view(target.shape), z_rows.view(target.shape)
    elif reduction == "sum":
        loss, z_loss = rows.sum(), z_rows.sum()
    else:
        z_loss = z_rows.sum() / count
        loss = (rows - z_rows).sum() / main + z_loss
    counts = counted(t, row_loss.ignore_index)
    best = torch.where(counts, plain.capped(logits, row_loss.softcap).argmax(-1), -1)
    accuracy = (counts & (best == t)).sum().to(wide) / count
    others = (z_loss, accuracy, best.view(target.shape))
    outputs = (loss, *(o if extra else None for o, extra in zip(others, asked.extras, strict=True)))
    if not any(wanted):
        return outputs, (None, None, None)
    scale = (lse.new_ones(()) if grad is None else grad.reshape(-1).to(wide)).expand(lse.shape)
    scale, z_scale = (scale / main, scale / count) if reduction == "mean" else (scale, scale)
    g = plain.gradient(logits, t, row_loss, lse, at_target, scale, z_scale, vocabulary, classes)
    narrow = input.dtype != torch.float64
    types = (input.dtype, (asked.weight_grad_dtype if narrow else None) or weight.dtype)
    d_input = (g @ w).view(input.shape).to(types[0]) if wanted[0] else None
    d_weight = (g.t() @ x).to(types[1]) if wanted[1] else None
    d_bias = g.sum(0).to(bias.dtype) if wanted[2] and bias is not None else None
    return outputs, (d_input, d_weight, d_bias)


OP = FusedLinearCrossEntropy
