"""Log-probabilities and entropies of tokens from a linear layer's results, which are never whole in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import e, log, log2
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from liger_aot.ops.arguments import ABOVE_ZERO, ANY, Allowed, Schema, check_flag
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.losses._linear import (
    BUDGET,
    LinearGradients,
    autocast,
    check_linear,
    check_weight_grad_dtype,
    chunk_buffer,
    chunk_rows,
    contiguous_rows,
    padded,
    project,
)
from liger_aot.ops.losses._row_loss import check_range, check_target, counted
from liger_aot.ops.losses._vocab_shards import Shard, resolve, shard_of
from liger_aot.ops.op import Problem, check_rows
from liger_aot.runtime import device_errors
from liger_aot.runtime.dispatch import OpOn

NAME = "fused_linear_log_probs"
LOG2_E, LN_2 = log2(e), log(2)


class Settings(NamedTuple):
    """Of a call, in the order of the op's schema."""

    temperature: float
    ignore_index: int
    chunk_bytes: int
    weight_grad_dtype: torch.dtype | None


class FusedLinearLogProbs(DifferentiableOp):
    """``fused_linear_log_probs(input, weight, target, bias=None, *, temperature=1.0, ignore_index=-100,
    return_entropy=False, return_lse=False, chunk_bytes=2**29, weight_grad_dtype=None, group=None) -> Tensor``:
    log_softmax((input @ weight^T + bias) / temperature) at the targets, as reinforcement learning needs it.

    Differentiable in input, weight and bias, through all of its results; works under torch.compile and, after
    ``preload``, in CUDA graphs: nothing waits for the device. CPU tensors take the plain-torch reference, which holds
    all logits.

    The logits are computed in chunks of rows, in input's dtype, into one buffer; of each row four float32 numbers stay.
    The backward computes the logits again and writes their gradient over them: four matrix products for both. What is
    frozen costs nothing.

    Under autocast input is cast as torch.nn.functional.linear's is; weight and bias may stay in float32 and get float32
    gradients. Under DistributedDataParallel and FSDP2 call it inside the forward of the module that holds the weight.

    Args:
        input: (..., k) bfloat16, float16 or float32.
        weight: (vocabulary, k) of input's dtype, or float32: then it is cast for the products, once a call.
        target: (...) int64 or int32, each in [0, vocabulary) or ignore_index.
        bias: (vocabulary,) of input's dtype or float32, or None.
        temperature: above 0; what the logits are divided by, in float32.
        ignore_index: targets of this value have zeros for results, and no gradient.
        return_entropy: also give -sum(p log p) of each row's probabilities p.
        return_lse: also give log(sum(exp(logits / temperature))): with it, the log-probability of any other token is
            its logit over the temperature less that.
        chunk_bytes: what the chunk of logits may take. More gives fewer chunks: each reads and writes all of weight's
            gradient.
        weight_grad_dtype: in which the chunks' parts of weight's gradient are added, as fused_linear_cross_entropy's.
        group: a torch.distributed.ProcessGroup whose ranks each hold as many rows of weight and bias, in the order of
            ranks, and give the same input and target. One all-gather of four float32 a row gives every rank the same
            results, to the bit; in the backward one all-reduce makes input's gradient whole on every rank, so nothing
            around this op may add it up again. Not for torch.compile, and without second derivatives.

    Returns:
        the log-probabilities, or a tuple of them and what the ``return_`` arguments ask for, in their order; each
        float32, of target's shape.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: shapes or devices don't fit; a number is out of its range; chunk_bytes holds no row; a target is
            out of range: on the CPU at once, on a GPU the log-probability is NaN and the next call raises (with
            LIGER_AOT_DEBUG=1 this one, which then waits for the GPU).
        PackNotFound: no installed pack serves the GPU.

    Source:
        The linear cross entropy of verl (Sheng et al., HybridFlow, 2024) and Liger Kernel (Hsu et al., 2024); Milakov
        and Gimelshein, Online normalizer calculation for softmax (2018).
    """

    name = NAME
    tensors = ("input", "weight", "target", "bias?")
    settings = Schema(
        {
            "float temperature": ABOVE_ZERO,
            "int ignore_index": ANY,
            "int chunk_bytes": Allowed(least=1),
            "ScalarType? weight_grad_dtype": ANY,
        }
    )
    outputs = 3  # log-probabilities, entropies, log-sum-exps
    results = 4  # and the rows' statistics

    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        *,
        temperature: float = 1.0,
        ignore_index: int = -100,
        return_entropy: bool = False,
        return_lse: bool = False,
        chunk_bytes: int = BUDGET,
        weight_grad_dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        asked = (
            True,
            check_flag(self.name, "return_entropy", return_entropy),
            check_flag(self.name, "return_lse", return_lse),
        )
        input, weight, bias = autocast(input, weight, bias)
        settings = (temperature, ignore_index, chunk_bytes, weight_grad_dtype)
        tensors = (input, weight, target, bias)
        if group is None:
            outputs = self.differentiable(tensors, settings)
        else:
            self.check_all(tensors, settings)
            shard = shard_of(self.name, group, weight.shape[0], None, None)
            outputs = _OfShards.apply(self, Settings(*settings), shard, *tensors)  # type: ignore[no-untyped-call]
        wanted = tuple(output for output, want in zip(outputs, asked, strict=True) if want)
        return wanted if len(wanted) > 1 else wanted[0]

    def preload(self, device: torch.device | int | str | None = None) -> None:
        super().preload(device)
        device_errors.flag(self.name)

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        input, weight, target, bias = tensors
        asked = Settings(*settings)
        check_rows(self.name, "input", input)
        check_linear(self.name, "input", input, weight, bias)
        check_target(self.name, target, input.shape[:-1], input.device)
        check_weight_grad_dtype(self.name, asked.weight_grad_dtype, weight)
        chunk_rows(self.name, 1, padded(weight.shape[0]) * input.element_size(), asked.chunk_bytes)

    def on_reference(self, tensors: Tensors) -> bool:
        return super().on_reference(tensors) or not all(t is None or t.numel() for t in tensors)

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        self.check(tensors, settings)
        asked = Settings(*settings)
        if self.on_reference(tensors):
            check_range(self.name, tensors[2], tensors[1].shape[0], asked.ignore_index)
            return self.by_reference(tensors, settings)
        device_errors.raise_if_any(self.name)
        on = self._own.of(tensors[0], "input")
        layer = layer_of(tensors, asked, 0, tensors[1].shape[0])
        found = statistics_of(on, layer)
        device_errors.check_now(self.name, tensors[0].device)
        shape = tensors[2].shape
        return *(t.view(shape) for t in results_of(found, asked.temperature)), found

    def saved(self, tensors: Tensors, results: Tensors) -> Tensors:
        return *tensors, results[1], results[3]

    def run_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        *tensors, entropy, found = saved
        if self.on_reference(tuple(tensors)):
            made = self.gradients_by_reference(grads, saved, settings)
            return tuple(g if need else None for g, need in zip(made, needed, strict=True))
        input, weight, _, bias = tensors
        asked = Settings(*settings)
        on = self._own.of(input, "input")
        layer = layer_of(tuple(tensors), asked, 0, weight.shape[0])
        wanted = (needed[0], needed[1], needed[3])
        gradients = gradients_of(on, layer, found, entropy, grads, wanted, weight, asked.weight_grad_dtype)
        d_input, d_weight, d_bias = gradients.shaped(input, bias)
        return d_input, d_weight, None, d_bias

    @staticmethod
    def reference(
        input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *settings: Any
    ) -> tuple[Tensor, ...]:
        asked = Settings(*settings)
        scores = _scores(input, weight, bias, asked.temperature)
        log_p = scores.log_softmax(-1)
        counts, chosen = _chosen(log_p, target, asked.ignore_index)
        entropy = -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)
        outputs = (torch.where(counts, t, 0) for t in (chosen, entropy, scores.logsumexp(-1)))
        return *outputs, scores.new_zeros((target.numel(), 4))

    @staticmethod
    def reference_backward(grads: Tensors, saved: Tensors, *settings: Any) -> Tensors:
        input, weight, target, bias, *_ = saved
        asked = Settings(*settings)
        scores = _scores(input, weight, bias, asked.temperature)
        log_p = scores.log_softmax(-1)
        p, log_p = log_p.exp(), log_p.clamp(min=torch.finfo(log_p.dtype).min)
        counts, _ = _chosen(log_p, target, asked.ignore_index)
        of_target, of_entropy, of_lse = (
            torch.zeros_like(counts, dtype=p.dtype) if g is None else torch.where(counts, g.to(p.dtype), 0)
            for g in grads
        )
        entropy = -(p * log_p).sum(-1)
        constant = of_target + of_entropy * entropy - of_lse
        dz = -p * (constant.unsqueeze(-1) + of_entropy.unsqueeze(-1) * log_p)
        at = torch.where(counts, target.long(), 0).unsqueeze(-1)
        dz = dz.scatter_add(-1, at, of_target.unsqueeze(-1)) / asked.temperature
        flat, x = dz.reshape(-1, dz.shape[-1]), input.reshape(-1, input.shape[-1]).to(p.dtype)
        narrow = input.dtype != torch.float64
        return (
            (dz @ weight.to(p.dtype)).to(input.dtype),
            (flat.t() @ x).to((asked.weight_grad_dtype if narrow else None) or weight.dtype),
            None,
            None if bias is None else flat.sum(0).to(bias.dtype),
        )

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        """On logits of ``shape``."""
        return tuple(
            Problem(f"{NAME}_{kind}", (dtype,), True, shape[-1]) for kind in ("statistics", "gradient")
        )


def _scores(input: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    wide = torch.promote_types(input.dtype, torch.float32)
    logits = input.to(wide) @ weight.to(wide).t()
    return (logits if bias is None else logits + bias.to(wide)) / temperature


def _chosen(log_p: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Which rows count, and what stands at their targets."""
    counts = counted(target, ignore_index)
    at = torch.where(counts, target.long(), 0).unsqueeze(-1)
    return counts, log_p.gather(-1, at).squeeze(-1)


class _OfShards(torch.autograd.Function):
    """The op where each rank of a group holds a part of the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any, op: FusedLinearLogProbs, asked: Settings, shard: Shard, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        input, _, target, _ = tensors
        assert input is not None and target is not None
        on = op._own.of(input, "input")
        device_errors.raise_if_any(op.name)
        check_range(op.name, target, shard.vocabulary, asked.ignore_index)
        layer = layer_of(tensors, asked, shard.start, shard.vocabulary)
        group = resolve(shard.group)
        own = statistics_of(on, layer)
        parts = own.new_empty((dist.get_world_size(group), *own.shape))
        dist.all_gather(list(parts), own, group=group)
        device_errors.check_now(op.name, input.device)
        found = combined(parts, layer)
        outputs = results_of(found, asked.temperature)
        ctx.asked, ctx.shard, ctx.on = asked, shard, on
        ctx.save_for_backward(*tensors, outputs[1], found)
        ctx.set_materialize_grads(False)
        return tuple(t.view(target.shape) for t in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        *tensors, entropy, found = ctx.saved_tensors
        input, weight, _, bias = tensors
        asked, shard = ctx.asked, ctx.shard
        needed = ctx.needs_input_grad[3:]
        layer = layer_of(tuple(tensors), asked, shard.start, shard.vocabulary)
        wanted = (needed[0], needed[1], needed[3])
        made = gradients_of(ctx.on, layer, found, entropy, grads, wanted, weight, asked.weight_grad_dtype)
        d_input, d_weight, d_bias = made.shaped(input, bias)
        if d_input is not None:
            dist.all_reduce(d_input, group=resolve(shard.group))
        return None, None, None, d_input, d_weight, None, d_bias


# ---- by chunks of rows: also of a part of the vocabulary, whose other parts are on other ranks --------------------


class Layer(NamedTuple):
    """A linear layer with the targets of its rows.

    Args:
        x: (rows, k), contiguous rows.
        weight, bias: of x's dtype; the rows of the vocabulary from ``start`` on.
        target: (rows,).
        vocabulary: of all parts.
        each: rows a chunk.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    temperature: float
    ignore_index: int
    start: int
    vocabulary: int
    each: int


def layer_of(tensors: Tensors, asked: Settings, start: int, vocabulary: int) -> Layer:
    """The layer of a call's arguments, which are checked."""
    input, weight, target, bias = tensors
    x = contiguous_rows(input)
    row_bytes = padded(weight.shape[0]) * x.element_size()
    return Layer(
        x,
        weight.to(x.dtype),
        None if bias is None else bias.to(x.dtype),
        target.reshape(-1).contiguous(),
        asked.temperature,
        asked.ignore_index,
        start,
        vocabulary,
        chunk_rows(NAME, x.shape[0], row_bytes, asked.chunk_bytes),
    )


def statistics_of(on: OpOn | None, layer: Layer) -> Tensor:
    """(rows, 4) float32, as the kernel's file says, of the layer's part of the vocabulary. ``on`` is None for plain
    torch."""
    rows, n = layer.x.shape[0], layer.weight.shape[0]
    found = layer.x.new_empty((rows, 4), dtype=torch.float32)
    buffer = chunk_buffer(layer.x, layer.each, n)
    for first in range(0, rows, layer.each):
        last = min(first + layer.each, rows)
        logits = project(layer.x[first:last], layer.weight, layer.bias, buffer[: last - first])
        target = layer.target[first:last]
        if on is None:
            found[first:last] = _statistics(logits, target, layer)
            continue
        loaded = on.kernels[f"{NAME}_statistics"]((logits.dtype, True), n)
        loaded.launch(
            on.device, on.stream(on.device), last - first, 1, 1,
            found[first:].data_ptr(), logits.data_ptr(), target.data_ptr(), device_errors.flag(NAME), padded(n), n,
            padded(n), target.element_size() // 4, layer.ignore_index, layer.start, layer.vocabulary,
            LOG2_E / layer.temperature,
        )  # fmt: skip
    return found


def combined(parts: Tensor, layer: Layer) -> Tensor:
    """The statistics (rows, 4) of a whole vocabulary from those of its parts, (parts, rows, 4), which ``layer`` is one
    of."""
    greatest, total, mean, chosen = parts.unbind(-1)
    highest = greatest.amax(0)
    down = (greatest - highest) * (LOG2_E / layer.temperature)
    totals = total + down
    total = torch.logsumexp(totals * LN_2, 0) / LN_2
    mean = (torch.exp2(totals - total) * (mean + down)).sum(0)
    found = torch.stack((highest, total, mean, chosen.sum(0)), -1)
    return torch.where(counted(layer.target, layer.ignore_index).unsqueeze(-1), found, 0)


def results_of(found: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probabilities, entropies, log-sum-exps) of rows from their statistics."""
    greatest, total, mean, chosen = found.unbind(-1)
    return (
        torch.add((chosen - greatest) / temperature, total, alpha=-LN_2),
        (total - mean) * LN_2,
        torch.add(greatest / temperature, total, alpha=LN_2),
    )


def gradients_of(
    on: OpOn | None,
    layer: Layer,
    found: Tensor,
    entropy: Tensor,
    grads: Tensors,
    wanted: Sequence[bool],
    weight: Tensor,
    weight_grad_dtype: torch.dtype | None,
) -> LinearGradients:
    """Of input, weight and bias, from those of the log-probabilities, entropies and log-sum-exps.

    Args:
        found: statistics of the whole vocabulary.
        weight: as the caller has it, whose dtype its gradient gets.
    """
    rows, n = layer.x.shape[0], layer.weight.shape[0]
    factors = _factors(entropy, grads, layer.temperature)
    buffer = chunk_buffer(layer.x, layer.each, n)
    made = LinearGradients(layer.x, layer.weight, layer.bias, wanted, weight_grad_dtype or weight.dtype)
    for first in range(0, rows, layer.each):
        last = min(first + layer.each, rows)
        logits = project(layer.x[first:last], layer.weight, layer.bias, buffer[: last - first])
        target = layer.target[first:last]
        if on is None:
            logits.copy_(_gradient(logits, found[first:last], factors[first:last], target, layer))
        else:
            loaded = on.kernels[f"{NAME}_gradient"]((logits.dtype, True), n)
            blocks = -(-padded(n) // loaded.block)
            loaded.launch(
                on.device, on.stream(on.device), (last - first) * blocks, 1, 1,
                logits.data_ptr(), found[first:].data_ptr(), factors[first:].data_ptr(), target.data_ptr(), padded(n),
                n, padded(n), target.element_size() // 4, layer.ignore_index, layer.start, blocks,
                LOG2_E / layer.temperature,
            )  # fmt: skip
        made.add(first, logits)
    return made


def _factors(entropy: Tensor, grads: Tensors, temperature: float) -> Tensor:
    """(rows, 3) float32: what the gradient's kernel multiplies with, as its file says."""
    of_target, of_entropy, of_lse = (None if g is None else g.reshape(-1).float() for g in grads)
    factors = entropy.new_zeros((entropy.numel(), 3))
    if of_target is not None:
        factors[:, 0] = of_target
        factors[:, 1] = of_target
    if of_entropy is not None:
        factors[:, 1].addcmul_(of_entropy, entropy.reshape(-1))
        torch.mul(of_entropy, LN_2, out=factors[:, 2])
    if of_lse is not None:
        factors[:, 1].sub_(of_lse)
    return factors if temperature == 1 else factors.div_(temperature)


# ---- what the kernels do, in plain torch ---------------------------------------------------------------------------


def _here(target: Tensor, layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
    """Which rows count, which targets are in this part, and the columns of those."""
    counts, at = counted(target, layer.ignore_index), target.long() - layer.start
    here = counts & (at >= 0) & (at < layer.weight.shape[0])
    return counts, here, torch.where(here, at, 0).unsqueeze(-1)


def _statistics(logits: Tensor, target: Tensor, layer: Layer) -> Tensor:
    check_range(NAME, target, layer.vocabulary, layer.ignore_index)
    counts, here, at = _here(target, layer)
    x = logits.float()
    greatest = x.amax(-1, keepdim=True)
    y = (x - greatest) * (LOG2_E / layer.temperature)
    power = y.exp2()
    total = power.sum(-1)
    mean = (power * y.clamp(min=torch.finfo(y.dtype).min)).sum(-1) / total
    chosen = torch.where(here, x.gather(-1, at).squeeze(-1), 0)
    found = torch.stack((greatest.squeeze(-1), total.log2(), mean, chosen), -1)
    return torch.where(counts.unsqueeze(-1), found, 0)


def _gradient(logits: Tensor, found: Tensor, factors: Tensor, target: Tensor, layer: Layer) -> Tensor:
    counts, here, at = _here(target, layer)
    greatest, total, _, _ = found.split(1, -1)
    at_target, constant, slope = factors.split(1, -1)
    y = (logits.float() - greatest) * (LOG2_E / layer.temperature) - total
    dx = -y.exp2() * (constant + slope * y.clamp(min=torch.finfo(y.dtype).min))
    dx = dx.scatter_add(-1, at, torch.where(here.unsqueeze(-1), at_target, 0))
    return torch.where(counts.unsqueeze(-1), dx, 0)


OP = FusedLinearLogProbs
