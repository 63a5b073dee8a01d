"""The loss of ``forward(labels=...)`` without logits: the model's own forward runs, but for its head and its loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_compiling

from liger_aot.ops.losses._linear import BUDGET, TILE_ROWS, padded
from liger_aot.ops.op import PLAIN
from liger_aot.ops.registry import load

OPTIONS = (
    "num_items_in_batch",
    "ignore_index",
    "shift_labels",
)  # of a forward's arguments, those that are the loss's


@dataclass(frozen=True)
class Logits:
    """What a model does to its head's result before the loss: attributes of its config, "" for nothing.

    Attributes:
        softcap: logits become cap * tanh(logits / cap); without effect where it is None.
        divided_by: logits are divided by it.
    """

    softcap: str = ""
    divided_by: str = ""


def fused_loss(logits: Logits) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Of the ``forward`` of a model with an ``lm_head`` and Transformers' causal language model loss.

    While the model trains and labels are given, the loss comes from ``fused_linear_cross_entropy`` and the output has
    no logits; ``skip_logits=True`` or ``False`` in the call decides otherwise. A model whose head or loss is not the
    usual one (``usual``) runs as it is.
    """

    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        op = load("fused_linear_cross_entropy")
        labels_at = list(inspect.signature(plain).parameters).index("labels") - 1  # but for self

        @wraps(plain)
        def forward(self: Any, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
            labels = args[labels_at] if len(args) > labels_at else kwargs.get("labels")
            skip = self.training if skip_logits is None else skip_logits
            if labels is None or not skip or not usual(self):
                return plain(self, *args, **kwargs)
            return_dict = kwargs.pop("return_dict", None)
            if return_dict is None:
                return_dict = self.config.return_dict
            options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
            fused = _WithoutLogits(self, op, logits, labels, options)
            output = plain(fused, *args, return_dict=True, **kwargs)
            output = type(output)(**{name: value for name, value in output.items() if name != "logits"})
            return output if return_dict else output.to_tuple()

        return forward

    return make


def usual(model: Any) -> bool:
    """Whether the head is a linear layer with parameters of its own here, and the loss the usual one.

    A head that is quantised, adapted, sharded over a tensor-parallel group or that hooks look at is not.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    head = model.lm_head
    return (
        isinstance(head, nn.Linear)
        and type(head).forward is nn.Linear.forward
        and not ("forward" in vars(head) or head._forward_hooks or head._forward_pre_hooks)
        and type(head.weight) in PLAIN
        and model.loss_function is ForCausalLMLoss
    )


class _WithoutLogits:
    """Stands for the model while its forward runs: the head keeps the loss and gives no logits."""

    def __init__(self, model: Any, op: Any, logits: Logits, labels: Tensor, options: dict[str, Any]) -> None:
        self._model, self._op, self._logits, self._labels, self._options = model, op, logits, labels, options
        self._loss: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def lm_head(self, hidden: Tensor) -> Tensor:
        config, head = self._model.config, self._model.lm_head
        softcap = getattr(config, self._logits.softcap) if self._logits.softcap else None
        if self._logits.divided_by:
            hidden = hidden / getattr(config, self._logits.divided_by)
        self._loss = linear_loss(
            self._op, hidden, head.weight, head.bias, self._labels, softcap, **self._options
        )
        return hidden.new_empty(0)

    def loss_function(self, *args: Any, **kwargs: Any) -> Tensor | None:
        return self._loss


def linear_loss(
    op: Any,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    softcap: float | None,
    *,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
) -> Tensor:
    """Transformers' ``ForCausalLMLoss`` of hidden @ weight^T + bias.

    Args:
        op: ``fused_linear_cross_entropy``.
        hidden: (batch, tokens, hidden size).
        labels: (batch, tokens); each token's target is the label after it, which the last one has not.
        num_items_in_batch: what the sum of the losses is divided by, instead of their number.
        shift_labels: the targets themselves, instead of labels.
    """
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    loss: Tensor = op(
        hidden,
        weight,
        shift_labels.to(hidden.device).reshape(hidden.shape[:-1]),
        bias,
        chunk_bytes=chunk_bytes(hidden, weight),
        ignore_index=ignore_index,
        softcap=softcap,
        reduction="mean" if num_items_in_batch is None else "sum",
    )
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


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
