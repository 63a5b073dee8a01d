"""The loss of ``forward(labels=...)`` without logits: the model's own forward runs, but for its head and its loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import cache, partial, wraps
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.losses._linear import BUDGET, TILE_ROWS, padded
from liger_aot.ops.op import PLAIN
from liger_aot.ops.registry import load


@dataclass(frozen=True)
class Loss:
    """How a model's loss is computed: for ``apply(model, loss=Loss(...))``. A call of the model may say otherwise by
    arguments of these names: ``model(..., return_token_accuracy=True)``, as with Liger.

    Attributes:
        keep_logits: compute the loss from logits, which the output then has in training too.
        accum_dtype: in which the chunks' parts of the head's gradient are added: its own dtype (None) or torch.float32.
        use_token_scaling: each token's loss times the probability of its target, which gets no gradient.
        return_token_accuracy: the output's ``token_accuracy``: the part of the targets that have the largest logit.
        return_predicted_tokens: the output's ``predicted_tokens``, (batch, tokens): the largest logit's index.
    """

    keep_logits: bool = False
    accum_dtype: torch.dtype | None = None
    use_token_scaling: bool = False
    return_token_accuracy: bool = False
    return_predicted_tokens: bool = False


_OF_LOSS = tuple(f.name for f in fields(Loss) if f.name != "keep_logits")
# Of Transformers' loss, among a forward's arguments.
OPTIONS = ("num_items_in_batch", "ignore_index", "shift_labels")


@dataclass(frozen=True)
class Logits:
    """What a model does to its head's result before the loss: attributes of the model by path, "" for nothing.

    Attributes:
        softcap: logits become cap * tanh(logits / cap); without effect where it is None.
        divided_by, multiplied_by: what logits are divided and multiplied by, before they are capped.
    """

    softcap: str = ""
    divided_by: str = ""
    multiplied_by: str = ""


def wanted_loss(name: str, loss: Any) -> Loss | None:
    """The argument ``loss`` of ``apply`` and ``patch``."""
    if isinstance(loss, bool):
        return Loss() if loss else None
    if not isinstance(loss, Loss):
        raise ArgumentTypeError(
            f"liger_aot.{name}: loss must be True, False or a liger_aot.models.Loss, got {type(loss).__name__}"
        )
    if loss.accum_dtype not in (None, torch.float32):
        raise ArgumentError(
            f"liger_aot.{name}: loss.accum_dtype must be None or torch.float32, got {loss.accum_dtype}"
        )
    if loss.keep_logits and (loss.accum_dtype is not None or loss.use_token_scaling):
        raise ArgumentError(
            f"liger_aot.{name}: loss.keep_logits must be False with accum_dtype or use_token_scaling, which belong to "
            "the loss without logits"
        )
    return loss


def fused_loss(logits: Logits, loss: Loss) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Of the ``forward`` of a model with an ``lm_head`` and Transformers' causal language model loss.

    While the model trains and labels are given, the loss comes from ``fused_linear_cross_entropy`` and the output has
    no logits, unless ``loss`` keeps them; ``skip_logits=True`` or ``False`` in the call decides otherwise. Where a
    tensor-parallel plan shards the head's rows it is ``vocab_parallel_linear_cross_entropy``. A loss of logits comes
    from ``cross_entropy``. A model whose head or loss is not the usual one (``usual``) runs as it is.
    """

    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        linear, of_logits = load("fused_linear_cross_entropy"), load("cross_entropy")
        sharded = load("vocab_parallel_linear_cross_entropy")
        labels_at = list(inspect.signature(plain).parameters).index("labels") - 1  # but for self

        @wraps(plain)
        def forward(self: Any, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
            asked = {name: kwargs.pop(name) for name in _OF_LOSS if name in kwargs}
            labels = args[labels_at] if len(args) > labels_at else kwargs.get("labels")
            if labels is None or not usual_loss(self):
                return plain(self, *args, **kwargs)
            how = replace(loss, **asked) if asked else loss
            skip = self.training and not how.keep_logits if skip_logits is None else skip_logits
            options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
            shard = vocabulary_shard(self) if skip else None
            if shard is not None and not (how.return_token_accuracy or how.return_predicted_tokens):
                by_shards = partial(sharded, group=shard.group)
                inner: _WithLoss = _WithoutLogits(self, by_shards, how, labels, options, logits, shard)
            elif skip and usual_head(self):
                inner = _WithoutLogits(self, linear, how, labels, options, logits)
            else:
                inner = _WithLoss(self, of_logits, how, labels, options)
            return_dict = kwargs.pop("return_dict", None)
            if return_dict is None:
                return_dict = self.config.return_dict
            output = plain(inner, *args, return_dict=True, **kwargs)
            output = inner.finished(output)
            return output if return_dict else output.to_tuple()

        return forward

    return make


def usual(model: Any) -> bool:
    """Whether the head is a linear layer with parameters of its own here, and the loss the usual one.

    A head that is quantised, adapted, sharded in another way than by rows or that hooks look at is not.
    """
    return usual_loss(model) and (usual_head(model) or vocabulary_shard(model) is not None)


def usual_loss(model: Any) -> bool:
    from transformers.loss.loss_utils import ForCausalLMLoss

    return model.loss_function is ForCausalLMLoss


def usual_head(model: Any) -> bool:
    head = model.lm_head
    return (
        isinstance(head, nn.Linear)
        and type(head).forward is nn.Linear.forward
        and not ("forward" in vars(head) or head._forward_hooks or head._forward_pre_hooks)
        and type(head.weight) in PLAIN
    )


class Shard(NamedTuple):
    """This rank's rows of a head's weight, and its bias's; all ranks have as many."""

    weight: Tensor
    bias: Tensor | None
    group: Any


def vocabulary_shard(model: Any) -> Shard | None:
    """Of a head that a plan of Transformers shards over one mesh's ranks and whose output it gathers."""
    head = model.lm_head
    weight: Any = getattr(head, "weight", None)
    if type(weight).__name__ != "DTensor" or not isinstance(head, nn.Linear):
        return None
    own = vars(head).get("forward")
    if getattr(own, "__module__", None) != "transformers.distributed.tensor_parallel":
        return None
    if head._forward_hooks or head._forward_pre_hooks:
        return None
    sharded: list[Any] = [t for t in (weight, head.bias) if t is not None]
    if any(t.device_mesh.ndim != 1 or not t.placements[0].is_shard(0) for t in sharded):
        return None
    mesh = weight.device_mesh
    if weight.shape[0] % mesh.size():
        return None
    of_bias = [t.to_local() for t in sharded[1:]]
    return Shard(weight.to_local(), of_bias[0] if of_bias else None, mesh.get_group())


class _WithLoss:
    """Stands for the model while its forward runs: its loss is ours."""

    def __init__(self, model: Any, op: Any, how: Loss, labels: Tensor, options: dict[str, Any]) -> None:
        self._model, self._op, self._how, self._labels, self._options = model, op, how, labels, options
        self._found: Found | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def loss_function(self, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if type(logits) not in PLAIN:  # sharded over a tensor-parallel group
            loss: Tensor = self._model.loss_function(logits, *args, **kwargs)
            return loss
        self._found = loss_of_logits(self._op, logits, self._labels, self._how, **self._options)
        return self._found.loss

    def finished(self, output: Any) -> Any:
        """The output with what else was asked for."""
        more = {
            "token_accuracy": None if self._found is None else self._found.token_accuracy,
            "predicted_tokens": None if self._found is None else self._found.predicted_tokens,
        }
        more = {name: value for name, value in more.items() if value is not None}
        cls: Any = type(output)
        return output_class(cls)(**output, **more) if more else output


class _WithoutLogits(_WithLoss):
    """The head finds the loss and gives no logits."""

    def __init__(
        self,
        model: Any,
        op: Any,
        how: Loss,
        labels: Tensor,
        options: dict[str, Any],
        logits: Logits,
        shard: Shard | None = None,
    ) -> None:
        super().__init__(model, op, how, labels, options)
        self._logits, self._shard = logits, shard

    def lm_head(self, hidden: Tensor) -> Tensor:
        model, head, of = self._model, self._model.lm_head, self._logits
        if of.divided_by:
            hidden = hidden / attrgetter(of.divided_by)(model)
        if of.multiplied_by:
            hidden = hidden * attrgetter(of.multiplied_by)(model)
        softcap = attrgetter(of.softcap)(model) if of.softcap else None
        weight, bias = (head.weight, head.bias) if self._shard is None else self._shard[:2]
        self._found = linear_loss(
            self._op, hidden, weight, bias, self._labels, softcap, self._how, **self._options
        )
        return hidden.new_empty(0)

    def loss_function(self, *args: Any, **kwargs: Any) -> Tensor:
        assert self._found is not None
        return self._found.loss

    def finished(self, output: Any) -> Any:
        output = type(output)(**{name: value for name, value in output.items() if name != "logits"})
        return super().finished(output)


@cache
def output_class(cls: Any) -> Any:
    """A model's output with ``token_accuracy`` and ``predicted_tokens``."""
    optional = [(name, Any, field(default=None)) for name in ("token_accuracy", "predicted_tokens")]
    return make_dataclass(cls.__name__, optional, bases=(cls,), namespace={"__module__": __name__})


@dataclass(frozen=True)
class Found:
    """A loss and what was asked for beside it."""

    loss: Tensor
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


def linear_loss(
    op: Any,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    softcap: float | None,
    how: Loss,
    *,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
) -> Found:
    """Transformers' ``ForCausalLMLoss`` of hidden @ weight^T + bias.

    Args:
        op: ``fused_linear_cross_entropy``, or ``vocab_parallel_linear_cross_entropy`` of a shard's weight and bias.
        hidden: (batch, tokens, hidden size).
        labels: (batch, tokens); each token's target is the label after it, which the last one has not.
        num_items_in_batch: what the sum of the losses is divided by, instead of their number.
        shift_labels: the targets themselves, instead of labels.
    """
    asked = {
        name: True for name in ("return_token_accuracy", "return_predicted_tokens") if getattr(how, name)
    }
    found = op(
        hidden,
        weight,
        _targets(hidden, labels, shift_labels, ignore_index),
        bias,
        chunk_bytes=chunk_bytes(hidden, weight),
        ignore_index=ignore_index,
        softcap=softcap,
        reduction="mean" if num_items_in_batch is None else "sum",
        weight_grad_dtype=how.accum_dtype,
        use_token_scaling=how.use_token_scaling,
        **asked,
    )
    return _found(found, how, num_items_in_batch)


def loss_of_logits(
    op: Any,
    logits: Tensor,
    labels: Tensor,
    how: Loss,
    *,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
) -> Found:
    """Transformers' ``ForCausalLMLoss`` of logits (batch, tokens, vocabulary), by ``cross_entropy``."""
    found = op(
        logits,
        _targets(logits, labels, shift_labels, ignore_index),
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
        return_token_accuracy=how.return_token_accuracy,
        return_predicted_tokens=how.return_predicted_tokens,
    )
    return _found(found, how, num_items_in_batch)


def _targets(rows: Tensor, labels: Tensor, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return shift_labels.to(rows.device).reshape(rows.shape[:-1])


def _found(found: Any, how: Loss, num_items_in_batch: Tensor | int | None) -> Found:
    loss, *others = found if isinstance(found, tuple) else (found,)
    rest = iter(others)
    accuracy = next(rest) if how.return_token_accuracy else None
    predicted = next(rest) if how.return_predicted_tokens else None
    if num_items_in_batch is not None:
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        loss = loss / num_items_in_batch
    return Found(loss, accuracy, predicted)


# Rows below which the products of a chunk get slow: each chunk reads and writes all of the weight's gradient. With
# 8192 x 4096 x 128256 in bf16 on an NVIDIA H200 chunks of 512 rows took 1.15 times as long as chunks of 4096, those
# of 1024 and 2048 1.06 and 1.01; torch's own loss of whole logits 1.21.
FEWEST_ROWS = 4 * TILE_ROWS
CHUNKS = 8


def chunk_bytes(hidden: Tensor, weight: Tensor) -> int:
    """What a chunk of logits may take where a whole model trains: an eighth of all logits, at least 512 rows of them,
    at most the op's own budget.

    The loss is computed when all layers' activations are held, so its chunk may set the step's peak. A layer of a gated
    model holds about 16 times the hidden size a token (8 of it around attention, 8 in the MLP), the chunk an eighth of
    the vocabulary: of the activations of Llama-3-8B's 32 layers that is 0.8%, of 1B's 16 layers 3.1%, of Phi-3-mini's
    0.25%; of parameters and activations together 1B's is 2.5% at most.
    """
    if is_compiling():  # a number of a varying number of rows would be a guard on each length
        return BUDGET
    rows, row = hidden.shape[:-1].numel(), padded(weight.shape[0]) * hidden.element_size()
    return max(row, min(BUDGET, max(FEWEST_ROWS, -(-rows // CHUNKS)) * row))
