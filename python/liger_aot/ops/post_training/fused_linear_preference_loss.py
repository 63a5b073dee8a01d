"""Preference losses (DPO and its kin, CPO, SimPO, ORPO, KTO) of a linear layer, whose logits are never whole."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError
from liger_aot.ops.arguments import ABOVE_ZERO, ANY, Allowed, Schema
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.losses._linear import autocast
from liger_aot.ops.losses._row_loss import WORDS, check_target, counted
from liger_aot.ops.post_training._preference import PAIRS, Numbers, kto
from liger_aot.ops.post_training._sequences import (
    MOST,
    Found,
    Given,
    Layer,
    SequenceLoss,
    Solved,
    Take,
    reference_backward_of,
    reference_of,
)

KTO = "kto"
OUTPUTS = 5


class PreferenceLoss(NamedTuple):
    """What the op returns; only ``loss`` has a gradient. All float32."""

    loss: Tensor  # ()
    logps: Tensor  # (sequences,): sums or means of their tokens' log-probabilities
    rewards: Tensor  # (sequences,): beta times logps less the reference's
    logits_mean: Tensor  # (sequences,): of all their tokens and the whole vocabulary
    nll_loss: Tensor  # (): mean of the chosen sequences' tokens; 0 for "kto"


class Settings(NamedTuple):
    """Of a call, in the order of the op's schema."""

    loss_type: str
    beta: float
    label_smoothing: float
    margin: float
    discopop_tau: float
    nll_weight: float
    average_log_prob: bool
    ignore_index: int
    chunk_bytes: int
    weight_grad_dtype: torch.dtype | None
    wanted: tuple[bool, ...] = ()


class FusedLinearPreferenceLoss(SequenceLoss):
    """``fused_linear_preference_loss(input, weight, target, bias=None, ref_input=None, ref_weight=None, ref_bias=None,
    nll_target=None, preference_labels=None, kl=None, *, loss_type="sigmoid", beta=0.1, label_smoothing=0.0, margin=0.0,
    discopop_tau=0.05, nll_weight=0.0, average_log_prob=False, ignore_index=-100, chunk_bytes=2**32,
    weight_grad_dtype=None) -> PreferenceLoss``: a preference loss of the sequences ``target`` by the logits
    input @ weight^T + bias.

    - DPO: ``loss_type="sigmoid"`` with a reference; its variants "hinge", "exo_pair", "robust", "discopop", "nca_pair",
      "bco_pair", "sppo_hard", "apo_zero", "apo_down".
    - CPO: "sigmoid" without a reference, ``nll_weight=1``. SimPO: "sigmoid" without a reference,
      ``average_log_prob=True``, ``margin=gamma``.
    - ORPO: "odds_ratio", ``average_log_prob=True``, ``nll_weight=1``.
    - KTO: "kto" with ``preference_labels``.

    Differentiable in input, weight and bias; the reference's arguments get no gradient. Works under torch.compile and,
    after ``preload``, in CUDA graphs: nothing waits for the device. CPU tensors take the plain-torch reference, which
    holds all logits.

    The logits are computed in input's dtype in chunks of whole sequences, of pairs where the loss compares two; the
    reference's go first, in the same memory. Where a gradient is wanted it is found in the forward: the chunk's logits
    are overwritten with it, and two products take it to input and weight. The first backward multiplies those by the
    loss's gradient in place; a second one (``retain_graph=True``) computes all again. For float16 they are found in the
    backward, with one more product. So they are where a single sequence or pair has logits of more than chunk_bytes:
    those are computed twice. The loss from the log-probabilities is float32.

    The log-probabilities alone, with a gradient: ``-fused_linear_cross_entropy(..., reduction="none")``.

    Args:
        input: (sequences, tokens, k) bfloat16, float16 or float32: the hidden states that predict ``target``. All but
            "kto" compare pairs: the first half of the sequences are the chosen ones, sequence i of the second half is
            the rejected one of sequence i of the first.
        weight: (vocabulary, k) of input's dtype, or float32: then it is cast for the products, once a call.
        target: (sequences, tokens) int64 or int32, each in [0, vocabulary) or ignore_index, as prompts and padding are.
        bias: (vocabulary,) of input's dtype or float32, or None.
        ref_input, ref_weight, ref_bias: the reference model's layer, with as many sequences, tokens and classes,
            in a dtype of its own; or None: its log-probabilities are 0.
        nll_target: (sequences, tokens) as target: other tokens for the likelihood of the chosen sequences, e.g. with
            the prompt. None is target.
        preference_labels: (sequences,) bool: which sequences are desirable. "kto" alone has it.
        kl: one number or (sequences,), floating point: the divergence that "kto" compares the log-ratios with, or None.
        loss_type: one of those above.
        beta: of the loss; above 0.
        label_smoothing: from 0 to 1: the share of preferences that are wrong. "sigmoid" and "robust" (below 0.5) read
            it, and "exo_pair" (above 0).
        margin: subtracted from beta times the difference of the two log-ratios.
        discopop_tau: the temperature of "discopop"; above 0.
        nll_weight: this times ``nll_loss`` is added to the loss.
        average_log_prob: whether a sequence's log-probability is the mean of its tokens' instead of the sum.
        ignore_index: tokens of this value do not count.
        chunk_bytes: what the logits of one sequence or pair may take. Chunks are as many of those as fit into 2^29
            bytes and weight's own size, at least one.
        weight_grad_dtype: in which the chunks' parts of weight's gradient are added: weight's dtype (None), which
            rounds the sum once a chunk, or torch.float32.

    Returns:
        PreferenceLoss(loss, logps, rewards, logits_mean, nll_loss): the loss is the mean over the pairs, for "kto" over
        the sequences.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: shapes or devices don't fit; a number is out of its range; a target is out of range: on the CPU
            at once, on a GPU the loss is NaN and the next call raises (with LIGER_AOT_DEBUG=1 this one).
        PackNotFound: no installed pack serves the GPU.

    Source:
        The papers that ``_preference`` names, as Hugging Face's TRL has their formulas. Gradients found in the forward:
        Liger Kernel (Hsu et al., 2024).
    """

    name = "fused_linear_preference_loss"
    tensors = (
        "input", "weight", "target", "bias?", "ref_input?", "ref_weight?", "ref_bias?", "nll_target?",
        "preference_labels?", "kl?",
    )  # fmt: skip
    settings = Schema(
        {
            "str loss_type": Allowed(among=(*PAIRS, KTO)),
            "float beta": ABOVE_ZERO,
            "float label_smoothing": Allowed(least=0, most=1),
            "float margin": ANY,
            "float discopop_tau": ABOVE_ZERO,
            "float nll_weight": ANY,
            "bool average_log_prob": ANY,
            "int ignore_index": ANY,
            "int chunk_bytes": Allowed(least=1),
            "ScalarType? weight_grad_dtype": ANY,
            "bool[] wanted": ANY,
        }
    )
    outputs = OUTPUTS
    results = OUTPUTS + 3

    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        nll_target: Tensor | None = None,
        preference_labels: Tensor | None = None,
        kl: Tensor | None = None,
        *,
        loss_type: str = "sigmoid",
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        margin: float = 0.0,
        discopop_tau: float = 0.05,
        nll_weight: float = 0.0,
        average_log_prob: bool = False,
        ignore_index: int = -100,
        chunk_bytes: int = MOST,
        weight_grad_dtype: torch.dtype | None = None,
    ) -> PreferenceLoss:
        input, weight, bias = autocast(input, weight, bias)
        fixed = (*autocast(ref_input, ref_weight, ref_bias), nll_target, preference_labels, kl)
        detached = (t.detach() if isinstance(t, Tensor) else t for t in fixed)
        settings = (
            loss_type, beta, label_smoothing, margin, discopop_tau, nll_weight, average_log_prob, ignore_index,
            chunk_bytes, weight_grad_dtype,
        )  # fmt: skip
        found = self.differentiable((input, weight, target, bias, *detached), settings)
        return PreferenceLoss(*found)

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        x, weight, target, bias, ref_x, ref_weight, ref_bias, nll_target, labels, kl = tensors
        asked = Settings(*settings)
        self.check_layer("input", x, weight, bias, None)
        check_target(self.name, target, x.shape[:2], x.device)
        if (ref_x is None) != (ref_weight is None) or (ref_x is None and ref_bias is not None):
            raise ArgumentError(
                f"{self.name}: ref_input and ref_weight must be given together, or neither and no ref_bias"
            )
        if ref_x is not None:
            self.check_layer("ref_input", ref_x, ref_weight, ref_bias, x)
        self.check_of_sequences("nll_target", nll_target, x, [tuple(x.shape[:2])], tuple(WORDS))
        self.check_of_sequences("preference_labels", labels, x, [(x.shape[0],)], (torch.bool,))
        wide = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
        self.check_of_sequences("kl", kl, x, [(), (1,), (x.shape[0],)], wide)
        self._check_kind(asked, x, nll_target, labels, kl)
        self.check_given(tensors, settings)

    def _check_kind(self, asked: Settings, x: Tensor, nll_target: Any, labels: Any, kl: Any) -> None:
        """What only some kinds of losses have."""
        kind, smoothing = asked.loss_type, asked.label_smoothing
        if kind == KTO:
            if labels is None:
                raise ArgumentError(f'{self.name}: loss_type "{KTO}" needs preference_labels')
            if asked.nll_weight or nll_target is not None:
                raise ArgumentError(f'{self.name}: loss_type "{KTO}" has no nll_weight and no nll_target')
        else:
            if labels is not None or kl is not None:
                raise ArgumentError(f'{self.name}: preference_labels and kl are for loss_type "{KTO}" alone')
            if x.shape[0] % 2:
                raise ArgumentError(
                    f"{self.name}: input must hold pairs, chosen sequences and then as many rejected ones; got "
                    f"{x.shape[0]} sequences"
                )
        if kind == "exo_pair" and smoothing in (0.0, 1.0):
            raise ArgumentError(
                f'{self.name}: label_smoothing must be between 0 and 1 for loss_type "exo_pair", got {smoothing}'
            )
        if kind == "robust" and smoothing >= 0.5:
            raise ArgumentError(
                f'{self.name}: label_smoothing must be below 0.5 for loss_type "robust", got {smoothing}'
            )

    @staticmethod
    def given(tensors: Tensors, settings: tuple[Any, ...]) -> Given:
        x, weight, target, bias, ref_x, ref_weight, ref_bias, nll_target, _, _ = tensors
        asked = Settings(*settings)
        return Given(
            Layer(x, weight, bias),
            target,
            None if ref_x is None else Layer(ref_x, ref_weight, ref_bias),
            nll_target,
            asked.ignore_index,
            True,
            asked.loss_type != KTO,
            asked.chunk_bytes,
            asked.weight_grad_dtype,
        )

    @staticmethod
    def solve(found: Found, take: Take, tensors: Tensors, settings: tuple[Any, ...]) -> Solved:
        target, nll_target, labels, kl = tensors[2], *tensors[-3:]
        asked = Settings(*settings)
        counts = counted(take(target), asked.ignore_index)
        lengths = counts.sum(-1).to(found.policy.dtype)
        logps, slope = found.policy.sum(-1), counts.to(found.policy.dtype)
        ratios = logps if found.reference is None else logps - found.reference.sum(-1)
        if asked.average_log_prob:
            logps, ratios, slope = logps / lengths, ratios / lengths, slope / lengths.unsqueeze(-1)
        nll, seconds = logps.new_zeros(()), None
        if asked.loss_type == KTO:
            one_each = kl is not None and kl.dim() == 1 and kl.shape[0] != 1
            losses, by = kto(ratios, take(kl) if one_each else kl, take(labels), asked.beta)
            slopes = slope * (by / max(target.shape[0], 1)).unsqueeze(-1)
            loss = (losses / max(target.shape[0], 1)).sum()
        else:
            half, pairs = len(logps) // 2, max(target.shape[0] // 2, 1)
            numbers = Numbers(asked.beta, asked.label_smoothing, asked.margin, asked.discopop_tau)
            losses, by_chosen, by_rejected = PAIRS[asked.loss_type](ratios[:half], ratios[half:], numbers)
            slopes = slope * (torch.cat((by_chosen, by_rejected)) / pairs).unsqueeze(-1)
            all_of = target if nll_target is None else nll_target
            likely = found.policy if found.second is None else found.second
            count = counted(all_of[: len(all_of) // 2], asked.ignore_index).sum().to(logps.dtype)
            nll = likely[:half].sum() * (-1 / count)
            loss = (losses / pairs).sum()  # a number times a scalar has no jvp of its gradient in torch.func
            if asked.nll_weight:
                loss = loss + (likely[:half] * (-asked.nll_weight / count)).sum()
                by_nll = (-asked.nll_weight / count).expand(likely[:half].shape)
                by_nll = torch.cat((by_nll, torch.zeros_like(slopes[half:])))
                slopes, seconds = (slopes, by_nll) if found.second is not None else (slopes + by_nll, None)
        if found.second is not None and seconds is None:
            seconds = torch.zeros_like(slopes)
        if len(logps) != target.shape[0]:
            return Solved((), slopes, seconds)
        outputs = (loss, logps, asked.beta * ratios, found.means, nll)
        return Solved(outputs, slopes, seconds)

    @staticmethod
    def reference(*arguments: Any) -> tuple[Tensor, ...]:
        return reference_of(FusedLinearPreferenceLoss, arguments)

    @staticmethod
    def reference_backward(grads: Tensors, saved: Tensors, *settings: Any) -> Tensors:
        return reference_backward_of(FusedLinearPreferenceLoss, grads, saved, settings)


OP = FusedLinearPreferenceLoss
