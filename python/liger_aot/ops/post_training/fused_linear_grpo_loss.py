"""Policy gradient losses (GRPO and its kin) of a linear layer, whose logits are never whole in memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.arguments import ABOVE_ZERO, ANY, FROM_ZERO, Allowed, Schema
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.losses._linear import autocast
from liger_aot.ops.losses._row_loss import check_target
from liger_aot.ops.post_training import policy_loss
from liger_aot.ops.post_training._policy import Tokens, policy, slopes_of
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
from liger_aot.ops.token_mask import KINDS

IGNORED = -1  # the target of a token that does not count: no class
OUTPUTS = 4
WIDE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class PolicyLoss(NamedTuple):
    """What the op returns; only ``loss`` has a gradient. All float32."""

    loss: Tensor  # ()
    kl: Tensor  # (): mean of the counted tokens' divergence from the reference; 0 without beta
    clip_ratio: Tensor  # (): which part of the counted tokens is clipped
    logps: Tensor  # (sequences, tokens), 0 where a token does not count


class Settings(NamedTuple):
    """Of a call, in the order of the op's schema."""

    loss_type: str
    importance_sampling_level: str
    beta: float
    epsilon_low: float
    epsilon_high: float
    delta: float | None
    temperature: float
    max_completion_length: int | None
    use_bias_correction_kl: bool
    sapo_temperature_pos: float
    sapo_temperature_neg: float
    vespo_k_pos: float
    vespo_lambda_pos: float
    vespo_k_neg: float
    vespo_lambda_neg: float
    chunk_bytes: int
    weight_grad_dtype: torch.dtype | None
    wanted: tuple[bool, ...] = ()

    @property
    def policy(self) -> policy_loss.Settings:
        """What ``policy_loss`` would take."""
        return policy_loss.Settings(
            self.loss_type, self.importance_sampling_level, "mean", self.beta, self.epsilon_low, self.epsilon_high,
            self.delta, self.use_bias_correction_kl, self.max_completion_length, self.sapo_temperature_pos,
            self.sapo_temperature_neg, self.vespo_k_pos, self.vespo_lambda_pos, self.vespo_k_neg, self.vespo_lambda_neg,
        )  # fmt: skip


class FusedLinearGRPOLoss(SequenceLoss):
    """``fused_linear_grpo_loss(input, weight, completion_ids, advantages, completion_mask=None, bias=None,
    ref_logps=None, old_logps=None, ref_input=None, ref_weight=None, ref_bias=None, vllm_is_ratio=None,
    normalizer=None, *, loss_type="dapo", importance_sampling_level="token", beta=0.04, epsilon_low=0.2,
    epsilon_high=0.2, delta=None, temperature=1.0, max_completion_length=None, use_bias_correction_kl=False,
    sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0,
    vespo_lambda_neg=2.0, chunk_bytes=2**32, weight_grad_dtype=None) -> PolicyLoss``: a policy gradient loss of sampled
    completions by the logits (input @ weight^T + bias) / temperature.

    Differentiable in input, weight and bias; the reference's arguments get no gradient. Works under torch.compile and,
    after ``preload``, in CUDA graphs: nothing waits for the device. CPU tensors take the plain-torch reference, which
    holds all logits.

    The logits are computed in input's dtype in chunks of whole completions; the reference's go first, in the same
    memory. Where a gradient is wanted it is found in the forward: the chunk's logits are overwritten with it, and two
    products take it to input and weight. The first backward multiplies those by the loss's gradient in place; a second
    one (``retain_graph=True``) computes all again. For float16 they are found in the backward, with one more product.
    So they are where a single completion has logits of more than chunk_bytes: those are computed twice. The loss from
    the log-probabilities is float32. Logits of tokens that do not count are not read.

    The log-probabilities alone, for ``old_logps`` and ``ref_logps``: ``logps`` of a call without gradients.

    Args:
        input: (sequences, tokens, k) bfloat16, float16 or float32: the hidden states that predict ``completion_ids``.
        weight: (vocabulary, k) of input's dtype, or float32: then it is cast for the products, once a call.
        completion_ids: (sequences, tokens) int64 or int32, in [0, vocabulary) where the mask is not 0.
        advantages: (sequences,) or (sequences, tokens), floating point.
        completion_mask: (sequences, tokens) bool, int8, uint8, int32, int64 or float32: tokens count where it is not 0.
            None: all do.
        bias: (vocabulary,) of input's dtype or float32, or None.
        ref_logps: (sequences, tokens), floating point: the reference's log-probabilities. None: those of ``ref_input``.
        old_logps: (sequences, tokens), floating point: of the policy that sampled. None: the policy's own.
        ref_input, ref_weight, ref_bias: the reference model's layer, with as many sequences, tokens and classes,
            in a dtype of its own; with neither that nor ref_logps the divergence is 0.
        vllm_is_ratio: (sequences,), (sequences, 1) or (sequences, tokens), floating point: the trainer's probabilities
            over the sampler's, which the losses are multiplied by; or None.
        normalizer: one number: what "dapo", "cispo" and "vespo" divide by instead of the counted tokens, at least 1:
            e.g. those of the whole batch over all processes and steps.
        loss_type: "grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo" or "vespo". "luspo" weighs each
            sequence by its length and also sums over the tokens that don't count.
        importance_sampling_level: "token", or "sequence" as GSPO has it; not for "cispo", "sapo" and "vespo".
        beta: of the divergence from the reference, exp(r) - r - 1 with r = log(pi_ref / pi); from 0.
        epsilon_low, epsilon_high: importance weights are clipped to [1 - epsilon_low, 1 + epsilon_high]; those of
            "cispo" at epsilon_high itself.
        delta: above 0: the most that an importance weight counts, on either side of the advantage; or None.
        temperature: above 0.
        max_completion_length: what "dr_grpo" divides by, times the number of sequences; by default the tokens.
        use_bias_correction_kl: the divergence times the importance weight.
        sapo_temperature_pos, sapo_temperature_neg: above 0: of SAPO's gate, for positive and for other advantages.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: of VESPO's gamma density, for advantages from 0 on
            and for negative ones.
        chunk_bytes: what the logits of one completion may take. Chunks are as many of those as fit into 2^29 bytes and
            weight's own size, at least one.
        weight_grad_dtype: in which the chunks' parts of weight's gradient are added: weight's dtype (None), which
            rounds the sum once a chunk, or torch.float32.

    Returns:
        PolicyLoss(loss, kl, clip_ratio, logps).

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: shapes or devices don't fit; a number is out of its range; an id is out of range: on the CPU at
            once, on a GPU the loss is NaN and the next call raises (with LIGER_AOT_DEBUG=1 this one).
        PackNotFound: no installed pack serves the GPU.

    Source:
        GRPO (Shao et al., 2024), DAPO (Yu et al., 2025), Dr. GRPO (Liu et al., 2025), GSPO (Zheng et al., 2025), CISPO
        (MiniMax, 2025), SAPO (Gao et al., 2025) and others as Hugging Face's TRL has their formulas. Chunks: Liger
        Kernel (Hsu et al., 2024).
    """

    name = "fused_linear_grpo_loss"
    tensors = (
        "input", "weight", "completion_ids", "advantages", "completion_mask?", "bias?", "ref_logps?", "old_logps?",
        "ref_input?", "ref_weight?", "ref_bias?", "vllm_is_ratio?", "normalizer?",
    )  # fmt: skip
    settings = Schema(
        {
            "str loss_type": Allowed(among=policy_loss.LOSS_TYPES),
            "str importance_sampling_level": Allowed(among=policy_loss.LEVELS),
            "float beta": FROM_ZERO,
            "float epsilon_low": ANY,
            "float epsilon_high": ANY,
            "float? delta": ABOVE_ZERO,
            "float temperature": ABOVE_ZERO,
            "int? max_completion_length": Allowed(least=1),
            "bool use_bias_correction_kl": ANY,
            "float sapo_temperature_pos": ABOVE_ZERO,
            "float sapo_temperature_neg": ABOVE_ZERO,
            "float vespo_k_pos": ANY,
            "float vespo_lambda_pos": ANY,
            "float vespo_k_neg": ANY,
            "float vespo_lambda_neg": ANY,
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
        completion_ids: Tensor,
        advantages: Tensor,
        completion_mask: Tensor | None = None,
        bias: Tensor | None = None,
        ref_logps: Tensor | None = None,
        old_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        normalizer: Tensor | None = None,
        *,
        loss_type: str = "dapo",
        importance_sampling_level: str = "token",
        beta: float = 0.04,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        delta: float | None = None,
        temperature: float = 1.0,
        max_completion_length: int | None = None,
        use_bias_correction_kl: bool = False,
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
        chunk_bytes: int = MOST,
        weight_grad_dtype: torch.dtype | None = None,
    ) -> PolicyLoss:
        input, weight, bias = autocast(input, weight, bias)
        ref = autocast(ref_input, ref_weight, ref_bias)
        fixed = (
            t.detach() if isinstance(t, Tensor) else t
            for t in (advantages, completion_mask, ref_logps, old_logps, *ref, vllm_is_ratio, normalizer)
        )
        advantages, mask, *rest = fixed
        settings = (
            loss_type, importance_sampling_level, beta, epsilon_low, epsilon_high, delta, temperature,
            max_completion_length, use_bias_correction_kl, sapo_temperature_pos, sapo_temperature_neg, vespo_k_pos,
            vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg, chunk_bytes, weight_grad_dtype,
        )  # fmt: skip
        found = self.differentiable((input, weight, completion_ids, advantages, mask, bias, *rest), settings)
        return PolicyLoss(*found)

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        (
            x, weight, ids, advantages, mask, bias, ref_logps, old_logps, ref_x, ref_weight, ref_bias, ratio,
            normalizer,
        ) = tensors  # fmt: skip
        asked = Settings(*settings)
        self.check_layer("input", x, weight, bias, None)
        sequences, size = x.shape[0], tuple(x.shape[:2])
        check_target(self.name, ids, x.shape[:2], x.device, "completion_ids")
        if (ref_x is None) != (ref_weight is None) or (ref_x is None and ref_bias is not None):
            raise ArgumentError(
                f"{self.name}: ref_input and ref_weight must be given together, or neither and no ref_bias"
            )
        if ref_x is not None:
            if ref_logps is not None:
                raise ArgumentError(f"{self.name}: ref_logps and ref_input are two references: give one")
            self.check_layer("ref_input", ref_x, ref_weight, ref_bias, x)
        shapes: dict[str, tuple[Any, list[tuple[int, ...]], tuple[torch.dtype, ...]]] = {
            "completion_mask": (mask, [size], tuple(KINDS)),
            "advantages": (advantages, [(sequences,), size], WIDE),
            "ref_logps": (ref_logps, [size], WIDE),
            "old_logps": (old_logps, [size], WIDE),
            "vllm_is_ratio": (ratio, [(sequences,), (sequences, 1), size], WIDE),
            "normalizer": (normalizer, [(), (1,)], (*WIDE, torch.int64, torch.int32)),
        }
        if not isinstance(advantages, Tensor):
            raise ArgumentTypeError(
                f"{self.name}: advantages must be a torch.Tensor, got {type(advantages).__name__}"
            )
        for name, (value, allowed, dtypes) in shapes.items():
            self.check_of_sequences(name, value, x, allowed, dtypes)
        if asked.policy.of_sequence and asked.policy.formula != policy_loss.CLIP:
            raise ArgumentError(
                f'{self.name}: importance_sampling_level must be "token" for loss_type "{asked.loss_type}", got '
                '"sequence"'
            )
        if asked.policy.of_sequence and advantages.dim() == 2:
            raise ArgumentError(
                f'{self.name}: advantages must be of shape ({sequences},) for importance_sampling_level "sequence", '
                f"got {size}"
            )
        self.check_given(tensors, settings)

    @staticmethod
    def given(tensors: Tensors, settings: tuple[Any, ...]) -> Given:
        x, weight, ids, _, mask, bias, _, _, ref_x, ref_weight, ref_bias, _, _ = tensors
        asked = Settings(*settings)
        scale = 1 / asked.temperature
        return Given(
            Layer(x, weight, bias, scale),
            ids if mask is None or asked.loss_type == "luspo" else torch.where(mask != 0, ids, IGNORED),
            None if ref_x is None or not asked.beta else Layer(ref_x, ref_weight, ref_bias, scale),
            None,
            IGNORED,
            False,
            False,
            asked.chunk_bytes,
            asked.weight_grad_dtype,
        )

    @staticmethod
    def solve(found: Found, take: Take, tensors: Tensors, settings: tuple[Any, ...]) -> Solved:
        _, _, ids, advantages, mask, _, ref_logps, old_logps, *_, ratio, normalizer = tensors
        asked, logps = Settings(*settings), found.policy
        s, dtype, own = asked.policy, logps.dtype, logps.detach()
        every = (
            torch.ones(ids.shape, dtype=dtype, device=ids.device) if mask is None else (mask != 0).to(dtype)
        )
        counts = take(every)
        summed = torch.ones_like(counts) if asked.loss_type == "luspo" else counts

        def given(values: Tensor | None) -> Tensor:
            """These log-probabilities; a token's that is left out may be anything."""
            return own if values is None else torch.where(summed != 0, take(values).to(dtype), own)

        t = Tokens(
            logps,
            given(old_logps),
            given(ref_logps) if found.reference is None else found.reference,
            counts,
            _column(take(advantages)).to(dtype),
            None if ratio is None else _column(take(ratio)).to(dtype),
        )
        made = policy(t, s)
        normalizer = normalizer if asked.loss_type in policy_loss.NORMALIZED else None
        lengths = every.sum(-1, keepdim=True)
        weights = take(policy_loss.weights_of_sequences(lengths, normalizer, ids.shape, s)) * summed
        by_logp = slopes_of(made, weights, counts)
        if len(logps) != ids.shape[0]:
            return Solved((), by_logp)
        total = lengths.sum().clamp(min=1)
        kl = (made.kl * counts).sum() / total
        outputs = (
            (made.losses * weights).sum(),
            kl if asked.beta else torch.zeros_like(kl),
            (made.clipped * counts).sum() / total,
            logps * counts,
        )
        return Solved(outputs, by_logp)

    @staticmethod
    def reference(*arguments: Any) -> tuple[Tensor, ...]:
        return reference_of(FusedLinearGRPOLoss, arguments)

    @staticmethod
    def reference_backward(grads: Tensors, saved: Tensors, *settings: Any) -> Tensors:
        return reference_backward_of(FusedLinearGRPOLoss, grads, saved, settings)


def _column(t: Tensor) -> Tensor:
    return t.unsqueeze(1) if t.dim() == 1 else t


OP = FusedLinearGRPOLoss
