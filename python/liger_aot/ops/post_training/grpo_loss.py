"""GRPO's loss and those of its kin, from a model's logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.op import Op, Problem
from liger_aot.ops.post_training.policy_loss import PolicyLoss
from liger_aot.ops.softmax.selective_log_softmax import SelectiveLogSoftmax
from liger_aot.runtime.dispatch import Runtimes


class GRPOLoss(Op):
    """``grpo_loss(logits, old_logp, ref_logp, completion_ids, advantages, mask=None, sampling_ratio=None, *,
    temperature=1.0, inplace_grad=False, **options) -> (loss, kl, clipped)``: ``policy_loss`` of the tokens' log
    probabilities by the logits before each.

    Differentiable in logits; works under torch.compile and, after ``preload``, in CUDA graphs. CPU tensors take the
    plain-torch reference. The forward reads the logits once, the backward reads them and writes their gradient; nothing
    else of their size is made.

    Args:
        logits: (B, L + 1, V) bfloat16, float16 or float32: those before each token, and those after the last one, which
            are not read.
        old_logp, ref_logp: (B, L), as ``policy_loss``'s.
        completion_ids: (B, L) int64 or int32, the tokens; anything where the mask is zero.
        advantages, mask, sampling_ratio: as ``policy_loss``'s.
        temperature: of the logits, above 0.
        inplace_grad: the backward writes the gradient over the logits: see ``selective_log_softmax``.
        options: the settings of ``policy_loss``: loss_type, beta and all others.

    Returns:
        as ``policy_loss``: the loss, the divergence or None, what was clipped.

    Raises:
        ArgumentTypeError, ArgumentError, PackNotFound: as the two ops that it is made of: tokens out of range are found
            as ``selective_log_softmax`` says.

    Source:
        Hugging Face's TRL; Liger-Kernel's triton_grpo_loss.
    """

    name = "grpo_loss"
    uses = ("selective_log_softmax", "policy_loss")

    def __init__(self, runtimes: Mapping[str, Runtimes] | None = None) -> None:
        super().__init__(runtimes)
        self._log_softmax, self._loss = SelectiveLogSoftmax(self._runtimes), PolicyLoss(self._runtimes)

    def __call__(
        self,
        logits: Tensor,
        old_logp: Tensor | None,
        ref_logp: Tensor | None,
        completion_ids: Tensor,
        advantages: Tensor,
        mask: Tensor | None = None,
        sampling_ratio: Tensor | None = None,
        *,
        temperature: float = 1.0,
        inplace_grad: bool = False,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        try:
            logp = self._log_softmax(
                logits,
                completion_ids,
                mask,
                temperature=temperature,
                drop_last=True,
                inplace_grad=inplace_grad,
            )
            return self._loss(logp, old_logp, ref_logp, advantages, mask, sampling_ratio, **options)
        except (ArgumentError, ArgumentTypeError) as error:
            raise type(error)(_in_own_words(str(error))) from None

    def preload(self, device: torch.device | int | str | None = None) -> None:
        self._log_softmax.preload(device)
        self._loss.preload(device)

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        return (
            *self._log_softmax.problems(shape, dtype, dtypes),
            *self._loss.problems((shape[0], shape[-2] - 1), dtype, dtypes),
        )


def _in_own_words(error: str) -> str:
    """An error of one of the two ops, with this one's name and arguments."""
    for op in GRPOLoss.uses:
        error = error.replace(f"{op}: ", f"{GRPOLoss.name}: ", 1)
    return error.replace(" index ", " completion_ids ")


OP = GRPOLoss
