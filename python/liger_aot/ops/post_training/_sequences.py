"""Losses of sequences whose tokens' log-probabilities a linear layer gives, without ever holding all of its logits.

A loss of this kind is a function of the log-probabilities of the given tokens alone: (sequences, tokens) numbers, which
is small. So the chunks of logits go through two kernels of cross_entropy (the log-probabilities; the gradient of the
logits, once that of the log-probabilities is known), and all that is the loss's own is plain torch between them.

A chunk holds whole sequences (whole pairs of a chosen and a rejected one), so that the loss's derivative by each of its
tokens is known before the chunk's logits are overwritten with their gradient: three matrix products for loss and
gradients (Liger Kernel, Hsu et al., 2024). Where a single sequence or pair is larger than ``chunk_bytes``, all
log-probabilities come first and the logits are computed a second time, in chunks of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.losses._linear import (
    BUDGET,
    LinearGradients,
    LinearLoss,
    check_linear,
    check_weight_grad_dtype,
    chunk_buffer,
    chunk_rows,
    contiguous_rows,
    found_in_backward,
    project,
    row_bytes,
    scaled,
)
from liger_aot.ops.losses._row_loss import RowLoss, check_range, counted, gradient, row_stats
from liger_aot.ops.op import Problem, check_rows, check_same_device
from liger_aot.runtime import device_errors
from liger_aot.runtime.dispatch import OpOn

MOST = 1 << 32  # bytes of the logits of one sequence or pair that are held at once
# A tensor of all sequences -> of those of one chunk.
Take = Callable[[Tensor], Tensor]


class Layer(NamedTuple):
    """input (sequences, tokens, k) @ weight (vocabulary, k)^T + bias, times ``scale``."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: float = 1.0


class Given(NamedTuple):
    """What the shared code reads of a call."""

    policy: Layer
    target: Tensor  # (sequences, tokens)
    reference: Layer | None = None
    second: Tensor | None = None  # other tokens whose log-probabilities the loss has, too
    ignore_index: int = -100
    with_means: bool = False  # whether the outputs have ``Found.means``
    # The first half of the sequences are chosen, each with its rejected one in the second.
    paired: bool = False
    chunk_bytes: int = MOST
    weight_grad_dtype: torch.dtype | None = None


class Found(NamedTuple):
    """Log-probabilities (sequences, tokens), float32 (of a float64 reference float64), 0 where the token is ignored."""

    policy: Tensor
    reference: Tensor | None = None
    second: Tensor | None = None
    means: Tensor | None = None  # (sequences,) of all of the policy's logits


class Solved(NamedTuple):
    """The outputs for these sequences, and the derivatives of the loss by ``Found.policy`` and ``Found.second``."""

    outputs: Tensors
    slopes: Tensor
    second: Tensor | None = None


class SequenceLoss(LinearLoss):
    """Base of the losses. ``graded`` are the policy's input, weight and bias, which ``tensors`` begin with; the fourth
    is the target."""

    uses = ("cross_entropy", "fused_linear_cross_entropy")
    graded = ("input", "weight", "bias")

    # ---- what a subclass gives ------------------------------------------------------------------------------

    @staticmethod
    def given(tensors: Tensors, settings: tuple[Any, ...]) -> Given:
        raise NotImplementedError

    @staticmethod
    def solve(found: Found, take: Take, tensors: Tensors, settings: tuple[Any, ...]) -> Solved:
        """The loss from log-probabilities. What it divides by is that of all sequences, whichever are ``found``: the
        derivatives of a chunk are those of the whole loss. The outputs are only used of all sequences."""
        raise NotImplementedError

    # ``reference`` and ``reference_backward``, of ``whole`` and ``whole_backward``.

    # ---- what it gets ---------------------------------------------------------------------------------------

    def preload(self, device: torch.device | int | str | None = None) -> None:
        super().preload(device)
        device_errors.flag(self.name)

    def in_backward(self, tensors: Tensors, settings: tuple[Any, ...]) -> bool:
        return found_in_backward(tensors[0].dtype, "mean")

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        if isinstance(tensors[0], Tensor) and tensors[0].device.type == "cpu":
            self.check(tensors, settings)
            given = self.given(tensors, settings)
            for target in (given.target, given.second):
                if target is not None:
                    check_range(self.name, target, given.policy.weight.shape[0], given.ignore_index)
        return super().run_forward(tensors, settings, keep, out)

    def check_layer(self, name: str, input: Any, weight: Any, bias: Any, like: Tensor | None) -> None:
        """Raise unless these are a linear layer over (sequences, tokens), those of ``like`` where that is given."""
        check_rows(self.name, name, input)
        if input.dim() != 3:
            raise ArgumentError(
                f"{self.name}: {name} must be of shape (sequences, tokens, k), got {tuple(input.shape)}"
            )
        if like is not None:
            check_same_device(self.name, name, input, "input", like)
            if input.shape[:2] != like.shape[:2]:
                raise ArgumentError(
                    f"{self.name}: {name} must be of shape ({like.shape[0]}, {like.shape[1]}, k), as input; got "
                    f"{tuple(input.shape)}"
                )
        check_linear(self.name, name, input, weight, bias, name.removesuffix("input"))

    def check_given(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        """What all losses check of ``given``, whose layers are right."""
        given = self.given(tensors, settings)
        x, weight = given.policy.input, given.policy.weight
        if given.reference is not None and given.reference.weight.shape[0] != weight.shape[0]:
            raise ArgumentError(
                f"{self.name}: ref_weight must have weight's {weight.shape[0]} rows; got "
                f"{tuple(given.reference.weight.shape)}"
            )
        check_weight_grad_dtype(self.name, given.weight_grad_dtype, weight)
        layers = [x] if given.reference is None else [x, given.reference.input]
        chunk_rows(self.name, 1, max(row_bytes(t, weight.shape[0]) for t in layers), given.chunk_bytes)

    def check_of_sequences(
        self,
        name: str,
        value: Any,
        x: Tensor,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[torch.dtype],
    ) -> None:
        """Raise unless ``value`` is None or a tensor where x is, of one of these shapes and dtypes."""
        if value is None:
            return
        if not isinstance(value, Tensor):
            raise ArgumentTypeError(f"{self.name}: {name} must be a torch.Tensor, got {type(value).__name__}")
        check_same_device(self.name, name, value, "input", x)
        if value.dtype not in dtypes:
            allowed = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
            got = str(value.dtype).removeprefix("torch.")
            raise ArgumentTypeError(f"{self.name}: {name} must be {allowed}, got {got}")
        if tuple(value.shape) not in shapes:
            allowed = " or ".join(map(str, shapes))
            raise ArgumentError(f"{self.name}: {name} must be of shape {allowed}, got {tuple(value.shape)}")

    def compute(
        self, tensors: Tensors, settings: tuple[Any, ...], wanted: Sequence[bool], grad: Tensor | None
    ) -> tuple[Tensors, Tensors]:
        device_errors.raise_if_any(self.name)
        given = self.given(tensors, settings)
        on = self._runtimes["cross_entropy"].of(given.policy.input, "input")
        assert on is not None
        ref, reference = given.reference, None
        if ref is not None and ref.input.dtype != given.policy.input.dtype:
            reference = (
                _Chunks(self.name, on, given._replace(policy=ref), False).log_probs(ref, None)[0].policy
            )
        chunks = _Chunks(self.name, on, given, any(wanted))
        if ref is not None and reference is None:
            reference = chunks.log_probs(ref, None)[0].policy
        policy, made = chunks.cast(given.policy), None
        outer = None if grad is None else grad.to(torch.float32)
        second = given.second
        if any(wanted):
            x = contiguous_rows(policy.input)
            made = LinearGradients(
                x, policy.weight, policy.bias, wanted, given.weight_grad_dtype or given.policy.weight.dtype
            )
        if made is None or chunks.units_at_once < 1:
            found, lse = chunks.log_probs(policy, second)
            found = found._replace(reference=reference, means=chunks.means(policy))
            solved = self.solve(found, lambda t: t, tensors, settings)
            if made is not None:
                chunks.add_by_rows(made, policy, lse, solved, outer)
        else:
            means = chunks.means(policy)
            log_probs = given.policy.input.new_empty(given.target.shape, dtype=torch.float32)
            seconds = None if second is None else torch.empty_like(log_probs)
            for part in chunks.parts():
                logits, lse, some = chunks.log_probs_of(part, policy)
                some = some._replace(
                    reference=None if reference is None else part.take(reference), means=means
                )
                solved = self.solve(some, part.take, tensors, settings)
                chunks.add_part(made, part, logits, lse, solved, outer)
                part.put(log_probs, some.policy)
                if seconds is not None and some.second is not None:
                    part.put(seconds, some.second)
            found = Found(log_probs, reference, seconds, means)
            if chunks.several:
                solved = self.solve(found, lambda t: t, tensors, settings)
        device_errors.check_now(self.name, given.policy.input.device)
        bias = given.policy.bias
        gradients = (None,) * 3 if made is None else made.shaped(given.policy.input, bias)
        return solved.outputs if grad is None else (None,) * self.outputs, gradients

    def problems(self, shape: Sequence[int], dtype: torch.dtype, dtypes: Any = None) -> tuple[Problem, ...]:
        """There is no kernel of the op's own: its chunks are ``cross_entropy``'s."""
        return ()


class _Tokens(NamedTuple):
    """Of some rows."""

    first: Tensor  # where only the second counts, that
    first_counts: Tensor | None  # None: those that are not ignored
    second: Tensor | None  # in the vocabulary
    second_counts: Tensor | None


class _Part(NamedTuple):
    """Some of the sequences: ``first`` to ``last`` and, where they are in pairs, their partners ``half`` later."""

    first: int
    last: int
    half: int
    whole: bool

    def take(self, t: Tensor) -> Tensor:
        if self.whole:
            return t
        chosen = t[self.first : self.last]
        return torch.cat((chosen, t[self.half + self.first : self.half + self.last])) if self.half else chosen

    def put(self, into: Tensor, part: Tensor) -> None:
        """The reverse of ``take``."""
        count = self.last - self.first
        into[self.first : self.last] = part[:count]
        if self.half:
            into[self.half + self.first : self.half + self.last] = part[count:]


class _Chunks:
    """The chunks of a call: how many sequences go at once, the buffer of their logits, the launches. The buffer takes
    no more than the weight does, unless a single sequence or pair needs it."""

    def __init__(self, op: str, on: OpOn, given: Given, gradients: bool) -> None:
        self._op, self._on, self._given = op, on, given
        x, weight = given.policy.input, given.policy.weight
        self._dtype, self._vocabulary = x.dtype, weight.shape[0]
        sequences, self._length = x.shape[:2]
        self._row_loss = RowLoss(given.ignore_index)
        a_row = row_bytes(x, weight.shape[0])
        budget = min(BUDGET, given.chunk_bytes, max(x.shape[-1], 1) * a_row)
        self._half = sequences // 2 if given.paired else 0
        self._units = self._half or sequences
        unit = self._length * (2 if given.paired else 1)
        most = budget // max(unit * a_row, 1)
        if not most and unit * a_row <= given.chunk_bytes:
            most = 1
        chunks = -(-self._units // most) if most else 0
        self.units_at_once = -(-self._units // chunks) if chunks else 0
        self._rows_at_once = chunk_rows(op, sequences * self._length, a_row, budget)
        held = self.units_at_once * unit if gradients else 0
        self._buffer = chunk_buffer(x, max(held, self._rows_at_once), self._vocabulary)
        self.several = self.units_at_once < self._units

    def cast(self, layer: Layer) -> Layer:
        """With the parameters in the input's dtype."""
        bias = None if layer.bias is None else layer.bias.to(self._dtype)
        return layer._replace(weight=layer.weight.to(self._dtype), bias=bias)

    def parts(self) -> Sequence[_Part]:
        step = self.units_at_once
        return [
            _Part(first, min(first + step, self._units), self._half, not self.several)
            for first in range(0, self._units, step)
        ]

    def log_probs(self, layer: Layer, second: Tensor | None) -> tuple[Found, Tensor]:
        """Of all sequences, in chunks of rows, and the rows' log-sum-exps: (2, rows) as ``row_stats`` gives them."""
        layer = self.cast(layer)
        x, size = contiguous_rows(layer.input), self._given.target.shape
        target = self._given.target.reshape(-1)
        other = None if second is None else second.reshape(-1)
        lse = x.new_empty((2, x.shape[0]), dtype=torch.float32)
        log_probs = torch.empty_like(lse[0])
        seconds = None if other is None else torch.empty_like(log_probs)
        for first in range(0, x.shape[0], self._rows_at_once):
            these = slice(first, first + self._rows_at_once)
            tokens = self._tokens_of(target[these], None if other is None else other[these])
            some, lse[:, these] = self._stats(self._project(layer, x[these]), tokens)
            log_probs[these] = some.policy
            if seconds is not None and some.second is not None:
                seconds[these] = some.second
        return Found(log_probs.view(size), None, None if seconds is None else seconds.view(size)), lse

    def log_probs_of(self, part: _Part, layer: Layer) -> tuple[Tensor, Tensor, Found]:
        """(logits, log-sum-exps, log-probabilities) of a part."""
        logits = self._project(layer, contiguous_rows(part.take(layer.input)))
        found, lse = self._stats(logits, self._tokens_of_part(part))
        second = None if found.second is None else found.second.view(-1, self._length)
        return logits, lse, Found(found.policy.view(-1, self._length), None, second)

    def means(self, layer: Layer) -> Tensor | None:
        """Of each sequence's logits, by one product with the mean of its rows."""
        if not self._given.with_means:
            return None
        rows = layer.input.mean(1, dtype=torch.float32).to(self._dtype)
        logits = project(rows, layer.weight, None, chunk_buffer(rows, rows.shape[0], self._vocabulary))
        found = logits.mean(-1, dtype=torch.float32)
        return found if layer.bias is None else found + layer.bias.mean(dtype=torch.float32)

    def add_part(
        self,
        made: LinearGradients,
        part: _Part,
        logits: Tensor,
        lse: Tensor,
        solved: Solved,
        outer: Tensor | None,
    ) -> None:
        """Take the gradient of a part, whose logits are overwritten with it, to the layer's arguments."""
        layer = self._given.policy
        self._gradient(logits, lse, self._tokens_of_part(part), solved, outer, layer.scale)
        if part.whole:
            made.add(0, logits)
            return
        x = contiguous_rows(part.take(layer.input))
        dx = None if made.x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        made.add_rows(x, logits, dx, part.first == 0)
        if dx is not None and made.x is not None:
            part.put(made.x.view(layer.input.shape), dx.view(-1, *layer.input.shape[1:]))

    def add_by_rows(
        self, made: LinearGradients, layer: Layer, lse: Tensor, solved: Solved, outer: Tensor | None
    ) -> None:
        """The gradients from logits that are computed again."""
        x, target, other = contiguous_rows(layer.input), self._given.target, self._given.second
        for first in range(0, x.shape[0], self._rows_at_once):
            these = slice(first, first + self._rows_at_once)
            rows = (
                None if t is None else t.reshape(-1)[these]
                for t in (target, other, solved.slopes, solved.second)
            )
            t, o, slopes, second = rows
            assert t is not None and slopes is not None
            logits = self._project(layer, x[these])
            some = Solved((), slopes, second)
            self._gradient(
                logits, lse[:, these].contiguous(), self._tokens_of(t, o), some, outer, layer.scale
            )
            made.add(first, logits)

    def _project(self, layer: Layer, x: Tensor) -> Tensor:
        return project(x, layer.weight, layer.bias, self._buffer[: x.shape[0]], layer.scale)

    def _tokens_of_part(self, part: _Part) -> _Tokens:
        second = None if self._given.second is None else part.take(self._given.second).reshape(-1)
        return self._tokens_of(part.take(self._given.target).reshape(-1), second)

    def _tokens_of(self, target: Tensor, second: Tensor | None) -> _Tokens:
        if second is None:
            return _Tokens(target.contiguous(), None, None, None)
        counts, others = (counted(t, self._given.ignore_index) for t in (target, second))
        first = torch.where(counts, target, second.to(target.dtype))
        return _Tokens(first, counts, second.long().clamp(0, self._vocabulary - 1), others)

    def _stats(self, logits: Tensor, tokens: _Tokens) -> tuple[Found, Tensor]:
        lse = logits.new_empty((2, logits.shape[0]), dtype=torch.float32)
        losses, flag = torch.empty_like(lse[0]), device_errors.flag(self._op)
        row_stats(self._on, logits, tokens.first, self._row_loss, losses=losses, lse=lse, flag=flag)
        policy = losses.neg_()
        if tokens.second is None or tokens.first_counts is None or tokens.second_counts is None:
            return Found(policy), lse
        second = logits.gather(1, tokens.second.unsqueeze(1)).squeeze(1) - lse[0]
        second = torch.where(tokens.second_counts, second, 0.0)
        return Found(torch.where(tokens.first_counts, policy, 0.0), None, second), lse

    def _gradient(
        self, logits: Tensor, lse: Tensor, tokens: _Tokens, solved: Solved, outer: Tensor | None, scale: float
    ) -> None:
        """The logits become their gradient. cross_entropy's is that of the negative log-probability."""
        by = -scale if outer is None else outer * -scale
        grad = solved.slopes.reshape(-1) * by
        if tokens.second is None or tokens.first_counts is None or tokens.second_counts is None:
            gradient(self._on, logits, logits, tokens.first, self._row_loss, lse=lse, grad=grad.contiguous())
            return
        assert solved.second is not None
        own = torch.stack((grad, solved.second.reshape(-1) * by), 1)
        own = torch.where(torch.stack((tokens.first_counts, tokens.second_counts), 1), own, 0.0)
        both = own.sum(1)
        at = torch.stack((tokens.first.long().clamp(0, self._vocabulary - 1), tokens.second), 1)
        # Of the logits, before they are overwritten; a row without a gradient may have no lse.
        p = torch.exp(logits.gather(1, at).float() - lse[0].unsqueeze(1))
        p = torch.where(both.unsqueeze(1) == 0, 0.0, p)
        gradient(self._on, logits, logits, tokens.first, self._row_loss, lse=lse, grad=both)
        # The kernel took both parts to the first token. Each token's own is written from float32: a small part would
        # drown in the rounding of a large one that is taken away again.
        own = own + torch.where(at[:, :1] == at[:, 1:], own.flip(1), 0.0)
        logits.scatter_(1, at, (both.unsqueeze(1) * p - own).to(logits.dtype))


# ---- the reference --------------------------------------------------------------------------------------------


def whole(
    op: type[SequenceLoss],
    tensors: Tensors,
    settings: tuple[Any, ...],
    grad: Tensor | None,
    wanted: Sequence[bool],
) -> tuple[Tensors, Tensors]:
    """(outputs, gradients) as ``compute`` gives them, in plain torch from all logits at once."""
    given = op.given(tensors, settings)
    x, weight, bias, scale = given.policy
    wide = torch.promote_types(x.dtype, torch.float32)
    log_q = _log_softmax(given.policy, wide)
    reference = None
    if given.reference is not None:
        reference = _chosen(_log_softmax(given.reference, wide), given.target, given.ignore_index).detach()
    second = None if given.second is None else _chosen(log_q, given.second, given.ignore_index)
    means = None
    if given.with_means:
        means = (x.to(wide).mean(1) @ weight.to(wide).t()).mean(-1)
        means = means if bias is None else means + bias.to(wide).mean()
    found = Found(_chosen(log_q, given.target, given.ignore_index), reference, second, means)
    solved = op.solve(found, lambda t: t, tensors, settings)
    outputs = (solved.outputs[0], *(o.detach() for o in solved.outputs[1:]))
    if not any(wanted):
        return outputs, (None,) * 3
    g = torch.zeros_like(log_q)
    for slopes, tokens in ((solved.slopes, given.target), (solved.second, given.second)):
        if slopes is not None and tokens is not None:
            counts = counted(tokens, given.ignore_index)
            by = torch.where(counts, slopes, 0).unsqueeze(-1)
            at = torch.where(counts, tokens.long(), 0).unsqueeze(-1)
            g = g.scatter_add(-1, at, by) - by * log_q.exp()
    g = g * scale if grad is None else g * (scale * grad.to(wide))
    flat = g.view(-1, g.shape[-1])
    rows = x.reshape(flat.shape[0], x.shape[-1]).to(wide)
    d_input = (flat @ weight.to(wide)).view(x.shape).to(x.dtype) if wanted[0] else None
    narrow = x.dtype != torch.float64
    dtype = (given.weight_grad_dtype if narrow else None) or weight.dtype
    d_weight = (flat.t() @ rows).to(dtype) if wanted[1] else None
    d_bias = flat.sum(0).to(bias.dtype) if wanted[2] and bias is not None else None
    return outputs, (d_input, d_weight, d_bias)


def reference_of(op: type[SequenceLoss], arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """``reference`` of ``op``."""
    count = len(op.tensors)
    tensors, settings = arguments[:count], arguments[count:]
    now = not found_in_backward(tensors[0].dtype, "mean")
    outputs, gradients = whole(op, tensors, settings, None, [want and now for want in settings[-1]])
    return tuple(outputs[0].new_empty(0) if r is None else r for r in (*outputs, *gradients))


def reference_backward_of(
    op: type[SequenceLoss], grads: Tensors, saved: Tensors, settings: tuple[Any, ...]
) -> Tensors:
    """``reference_backward`` of ``op``."""
    count = len(op.tensors)
    tensors, gradients = saved[:count], saved[count:]
    names = [name.rstrip("?") for name in op.tensors]
    if any(g is not None for g in gradients):
        found: Tensors = tuple(None if g is None else scaled(g, grads[0]) for g in gradients)
    else:
        bias = tensors[names.index("bias")]
        _, found = whole(op, tensors, settings, grads[0], [True, True, bias is not None])
    by_name = dict(zip(op.graded, found, strict=True))
    return tuple(by_name.get(name) for name in names)


def _log_softmax(layer: Layer, wide: torch.dtype) -> Tensor:
    logits = layer.input.to(wide) @ layer.weight.to(wide).t()
    logits = logits if layer.bias is None else logits + layer.bias.to(wide)
    return (logits * layer.scale if layer.scale != 1 else logits).log_softmax(-1)


def _chosen(log_probs: Tensor, tokens: Tensor, ignore_index: int) -> Tensor:
    counts = counted(tokens, ignore_index)
    at = torch.where(counts, tokens.long(), 0).unsqueeze(-1)
    return torch.where(counts, log_probs.gather(-1, at).squeeze(-1), 0)
