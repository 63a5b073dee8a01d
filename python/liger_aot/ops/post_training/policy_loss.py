"""Policy gradient losses of language models, from the log-probabilities of the sampled tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, log
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError
from liger_aot.ops.arguments import ABOVE_ZERO, ANY, FROM_ZERO, Allowed, Schema
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.op import Problem, check_same_device, check_tensor
from liger_aot.ops.token_mask import KINDS, check_token_mask, mask_kind
from liger_aot.runtime.dispatch import OpOn
from liger_aot.runtime.layout import CPU, rows_of

# Loss type -> (formula, mean), as csrc_triton/post_training/policy_loss.py numbers them
CLIP, CISPO, SAPO, VESPO = range(4)
OF_SEQUENCES, OF_TOKENS, BY_DIVISOR, BY_LENGTHS = range(4)
LOSS_TYPES = {
    "grpo": (CLIP, OF_SEQUENCES),
    "bnpo": (CLIP, OF_TOKENS),
    "dr_grpo": (CLIP, BY_DIVISOR),
    "dapo": (CLIP, OF_TOKENS),
    "luspo": (CLIP, BY_LENGTHS),
    "cispo": (CISPO, OF_TOKENS),
    "sapo": (SAPO, OF_SEQUENCES),
    "vespo": (VESPO, OF_TOKENS),
}
NORMALIZED = ("dapo", "cispo", "vespo")  # whose mean takes a normalizer
LEVELS = ("token", "sequence")
REDUCTIONS = ("none", "mean")
LEAST, MOST = log(1e-8), 20.0  # VESPO's limits of logarithms


class Settings(NamedTuple):
    """Those of ``PolicyLoss.settings``, in its order."""

    loss_type: str
    importance_sampling_level: str
    reduction: str
    beta: float
    eps_low: float
    eps_high: float
    delta: float | None
    use_bias_correction_kl: bool
    max_completion_length: int | None
    sapo_temperature_pos: float
    sapo_temperature_neg: float
    vespo_k_pos: float
    vespo_lambda_pos: float
    vespo_k_neg: float
    vespo_lambda_neg: float

    @property
    def formula(self) -> int:
        return LOSS_TYPES[self.loss_type][0]

    @property
    def mean(self) -> int:
        return LOSS_TYPES[self.loss_type][1]

    @property
    def of_sequence(self) -> bool:
        return self.importance_sampling_level == "sequence"

    @property
    def bounds(self) -> tuple[float, float]:
        """What the importance weight is clipped to."""
        if self.formula == CISPO:
            return -inf, self.eps_high
        return 1 - self.eps_low, 1 + self.eps_high

    @property
    def by_sign(self) -> tuple[float, float]:
        """What a formula takes by the sign of the advantage: positive, negative."""
        if self.formula == VESPO:
            return self.vespo_lambda_pos, self.vespo_lambda_neg
        return self.sapo_temperature_pos, self.sapo_temperature_neg

    def divisor(self, sequences: int, length: int) -> float:
        if self.mean == BY_DIVISOR:
            return sequences * (length if self.max_completion_length is None else self.max_completion_length)
        return sequences * (length if self.mean == BY_LENGTHS else 1)


class PolicyLoss(DifferentiableOp):
    """``policy_loss(logp, old_logp, ref_logp, advantages, mask=None, sampling_ratio=None, *, loss_type="dapo",
    importance_sampling_level="token", reduction="mean", beta=0.0, eps_low=0.2, eps_high=0.2, delta=None,
    use_bias_correction_kl=False, max_completion_length=None, normalizer=None, sequence_weight=None,
    sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0,
    vespo_lambda_neg=2.0) -> (loss, kl, clipped)``: the losses of GRPO and its kin, from the log-probabilities of the
    sampled tokens (``selective_log_softmax`` gives them).

    With w = exp(logp - old_logp), the importance weight of a token or, with importance_sampling_level="sequence", the
    exponential of its mean logarithm over the sequence, and A the advantage, a token's loss is,

    for grpo, bnpo, dr_grpo, dapo and luspo, -min(min(w, delta) A, clamp(w, 1 - eps_low, 1 + eps_high) A);

    for cispo, -min(w, eps_high) A logp, where the first factor is a constant;

    for sapo, -4 / t sigmoid(t (w - 1)) A, where t is sapo_temperature_pos if A > 0, else sapo_temperature_neg;

    for vespo, -p A logp, where p is a constant of the sequence: exp(l + k log(s) - l s), with s the product of its
    tokens' weights and of all its sampling ratios, and k and l those of the advantage's sign;

    times the sampling ratio (but for vespo), plus beta times the divergence from the reference model, exp(r) - r - 1
    with r = ref_logp - logp, which use_bias_correction_kl multiplies by w.

    Differentiable in logp; works under torch.compile and, after ``preload``, in CUDA graphs. CPU tensors take the
    plain-torch reference. Computed in float32; sums are in a fixed order.

    Args:
        logp: (B, L) log-probabilities of the tokens: float32, bfloat16 or float16, as all others.
        old_logp: (B, L), by the model that sampled them; None: logp's values.
        ref_logp: (B, L), by the reference model; may be None where beta is 0.
        advantages: (B,), (B, 1) or (B, L).
        mask: (B, L) bool, int8, uint8, int32, int64 or float32: where it is zero the token does not count, and nothing
            of it is read.
        sampling_ratio: (B,), (B, 1) or (B, L): the policy's probability over that of the engine that sampled.
        loss_type: "grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo" or "vespo".
        importance_sampling_level: "token", or "sequence" for the first five.
        reduction: "none", or "mean", which is the loss type's: grpo and sapo, the mean over sequences of their means
            over tokens; bnpo, dapo, cispo and vespo, over all tokens that count; dr_grpo, over B times
            max_completion_length tokens; luspo, over B L, a sequence's tokens times those of it that count.
        beta: weight of the divergence.
        eps_low, eps_high: what the importance weight is clipped to; for cispo eps_high is the bound itself.
        delta: for the first five, the most that the weight may be.
        use_bias_correction_kl: whether the divergence is multiplied by w.
        max_completion_length: for dr_grpo; by default L.
        normalizer: () or (1,), for dapo, cispo and vespo: what to divide by in place of the tokens that count, at least
            1. With gradient accumulation or several ranks it is the whole batch's.
        sequence_weight: (B,) or (B, 1), vespo's p where it is known.
        sapo_temperature_pos, sapo_temperature_neg: sapo's t, above 0.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: vespo's k and l, of advantages from 0 on and of
            those below.

    Returns:
        the loss, float32: of a token (B, L), 0 where it does not count, or a scalar. The divergence: of a token, or its
        mean over those that count; None where beta is 0. Whether the weight was clipped: 1.0 or 0.0 a token, or the
        share of those that count. The last two have no gradient.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: shapes or devices don't match, a number is out of range, or an option is not for the loss type.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Hugging Face's TRL. GRPO: Shao et al., DeepSeekMath (2024); DAPO: Yu et al. (2025); Dr. GRPO: Liu et al. (2025);
        sequence level: Zheng et al., GSPO (2025); CISPO: MiniMax-M1 (2025); SAPO: arXiv 2511.20347; delta: INTELLECT-2
        (2025); corrected divergence: DeepSeek-V3.2 (2025).
    """

    name = "policy_loss"
    tensors = (
        "logp", "old_logp?", "ref_logp?", "advantages", "mask?", "sampling_ratio?", "normalizer?", "sequence_weight?",
    )  # fmt: skip
    settings = Schema(
        {
            "str loss_type": Allowed(among=LOSS_TYPES),
            "str importance_sampling_level": Allowed(among=LEVELS),
            "str reduction": Allowed(among=REDUCTIONS),
            "float beta": ANY,
            "float eps_low": ANY,
            "float eps_high": ANY,
            "float? delta": FROM_ZERO,
            "bool use_bias_correction_kl": ANY,
            "int? max_completion_length": Allowed(least=1),
            "float sapo_temperature_pos": ABOVE_ZERO,
            "float sapo_temperature_neg": ABOVE_ZERO,
            "float vespo_k_pos": ANY,
            "float vespo_lambda_pos": ANY,
            "float vespo_k_neg": ANY,
            "float vespo_lambda_neg": ANY,
        }
    )
    outputs = 3  # of which the loss alone has a gradient
    results = 6  # and slopes, those through the sequence's weight, the sequences' weights

    def __call__(
        self,
        logp: Tensor,
        old_logp: Tensor | None,
        ref_logp: Tensor | None,
        advantages: Tensor,
        mask: Tensor | None = None,
        sampling_ratio: Tensor | None = None,
        *,
        loss_type: str = "dapo",
        importance_sampling_level: str = "token",
        reduction: str = "mean",
        beta: float = 0.0,
        eps_low: float = 0.2,
        eps_high: float = 0.2,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        max_completion_length: int | None = None,
        normalizer: Tensor | None = None,
        sequence_weight: Tensor | None = None,
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        settings = (
            loss_type, importance_sampling_level, reduction, beta, eps_low, eps_high, delta, use_bias_correction_kl,
            max_completion_length, sapo_temperature_pos, sapo_temperature_neg, vespo_k_pos, vespo_lambda_pos,
            vespo_k_neg, vespo_lambda_neg,
        )  # fmt: skip
        tensors = (
            *map(_wide, (logp, old_logp, ref_logp, advantages)), mask,
            *map(_wide, (sampling_ratio, normalizer, sequence_weight)),
        )  # fmt: skip
        loss, kl, clipped = self.differentiable(tensors, settings)
        return loss, None if beta == 0 else kl.detach(), clipped.detach()

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        logp, old_logp, ref_logp, advantages, mask, ratio, normalizer, weight = tensors
        s = Settings(*settings)
        self._check_options(s, ref_logp, normalizer, weight)
        check_tensor(self.called, "logp", logp)
        if logp.dim() != 2:
            raise ArgumentError(
                f"{self.called}: logp must be of shape (sequences, tokens), got {tuple(logp.shape)}"
            )
        b, length = logp.shape
        for name, value, shapes in (
            ("old_logp", old_logp, ((b, length),)),
            ("ref_logp", ref_logp, ((b, length),)),
            ("advantages", advantages, ((b,), (b, 1), (b, length))),
            ("sampling_ratio", ratio, ((b,), (b, 1), (b, length))),
            ("normalizer", normalizer, ((), (1,))),
            ("sequence_weight", weight, ((b,), (b, 1))),
        ):
            if value is None and name != "advantages":
                continue
            check_tensor(self.called, name, value)
            check_same_device(self.called, name, value, "logp", logp)
            if value.shape not in shapes:
                raise ArgumentError(
                    f"{self.called}: {name} must be of shape {' or '.join(map(str, shapes))} as logp "
                    f"{tuple(logp.shape)} asks; got {tuple(value.shape)}"
                )
        if mask is not None:
            check_token_mask(self.called, mask, logp.shape, "logp", logp)

    def _check_options(
        self, s: Settings, ref_logp: Tensor | None, normalizer: Tensor | None, weight: Tensor | None
    ) -> None:
        for name, given, allowed in (
            ('importance_sampling_level="sequence"', s.of_sequence, s.formula == CLIP),
            ("delta", s.delta is not None, s.formula == CLIP),
            ("normalizer", normalizer is not None, s.loss_type in NORMALIZED),
            ("sequence_weight", weight is not None, s.formula == VESPO),
        ):
            if given and not allowed:
                raise ArgumentError(f"{self.called}: {name} is not for loss_type={s.loss_type!r}")
        if s.beta != 0 and ref_logp is None:
            raise ArgumentError(f"{self.called}: ref_logp is None, but beta is {s.beta:g}: it must be given")

    # ---- kernels --------------------------------------------------------------------------------------------

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        on = self._ready(tensors)
        if on is None:
            return self.prepare_forward(tensors, settings, keep, out)
        logp, old_logp, ref_logp, advantages, mask, ratio, normalizer, weight = tensors
        s = Settings(*settings)
        b, length = logp.shape
        device, stream, formula = on.device, on.stream(on.device), s.formula
        reduced, with_kl = s.reduction == "mean", s.beta != 0
        shape = () if reduced else logp.shape
        loss, clipped = logp.new_empty(shape), logp.new_empty(shape)
        kl = logp.new_empty(shape) if with_kl else None
        slope = torch.empty_like(logp) if keep else None
        through = torch.empty_like(logp) if keep and s.of_sequence else None
        sums = logp.new_empty((b, 4)) if reduced else None
        weights = logp.new_empty(b) if reduced else None
        outputs = (None, None, None) if reduced else (_at(loss), _at(kl), _at(clipped))
        loaded = on.kernels["policy_loss_forward"].for_rows((False,), length, b)
        loaded.launch(
            device, stream, b, 1, 1,
            *outputs, _at(slope), _at(through), _at(sums), logp.data_ptr(), _at(old_logp),
            _at(ref_logp) if with_kl else None, advantages.data_ptr(), _at(mask), _at(ratio), _at(weight), length,
            *_steps(advantages), *_steps(ratio), mask_kind(mask), formula, int(s.of_sequence),
            int(s.use_bias_correction_kl), s.beta, *s.bounds, inf if s.delta is None else s.delta, *s.by_sign,
            s.vespo_k_pos, s.vespo_k_neg,
        )  # fmt: skip
        if reduced:
            on.kernels["policy_loss_reduce"]((False,), b).launch(
                device, stream, 1, 1, 1,
                loss.data_ptr(), _at(kl), clipped.data_ptr(), _at(weights), _at(sums), _at(normalizer), b, s.mean,
                s.divisor(b, length),
            )  # fmt: skip
        return loss, kl, clipped, slope, through, weights

    def _ready(self, tensors: Tensors) -> OpOn | None:
        """Where the tensors lie, if the kernels can read them as they are."""
        logp, *others = tensors
        in_x = rows_of(logp)
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        if on is None or in_x is None or logp.dim() != 2 or not logp.numel():
            return None
        where = -1 if in_x[1] == CPU else in_x[2]
        mask = others.pop(3)
        if mask is not None and (
            not isinstance(mask, Tensor)
            or mask.dtype not in KINDS
            or mask.shape != logp.shape
            or mask.get_device() != where
            or not mask.is_contiguous()
        ):
            return None
        b, length = logp.shape
        full, one_each = (b, length), ((b,), (b, 1), (b, length))
        for t, shapes in zip(
            (logp, *others), ((full,), (full,), (full,), one_each, one_each, ((), (1,)), one_each[:2]), strict=True
        ):  # fmt: skip
            if t is not None and (
                t.dtype != torch.float32
                or t.shape not in shapes
                or t.get_device() != where
                or not t.is_contiguous()
            ):
                return None
        return on

    def prepare_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        self.check(tensors, settings)
        if self.on_reference(tensors):
            return super().prepare_forward(tensors, settings, keep, out)
        ready = tuple(t if t is None else t.contiguous() for t in tensors)
        return self.run_forward(ready, settings, keep, out)

    def saved(self, tensors: Tensors, results: Tensors) -> Tensors:
        return *tensors, *results[3:]

    def run_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        mask, (slope, through, weights), dloss = saved[4], saved[-3:], grads[0]
        nothing = (None,) * (len(self.tensors) - 1)
        if dloss is None or not needed[0]:
            return None, *nothing
        on = self._own.of(saved[0], "logp")
        if on is None or not slope.numel():
            return self.prepare_backward(grads, saved, settings, needed)
        mask = None if mask is None else mask.contiguous()
        (b, length), reduced = slope.shape, settings[2] == "mean"
        dlogp = torch.empty_like(slope)
        steps = (0, 0) if reduced else dloss.stride()
        on.kernels["policy_loss_backward"].for_rows((False,), length, b).launch(
            on.device, on.stream(on.device), b, 1, 1,
            dlogp.data_ptr(), dloss.data_ptr(), _at(weights) if reduced else None, slope.data_ptr(),
            _at(through) if settings[1] == "sequence" else None, _at(mask), length, *steps, mask_kind(mask),
        )  # fmt: skip
        return dlogp, *nothing

    # ---- plain torch ----------------------------------------------------------------------------------------

    @staticmethod
    def reference(
        logp: Tensor,
        old_logp: Tensor | None,
        ref_logp: Tensor | None,
        advantages: Tensor,
        mask: Tensor | None,
        sampling_ratio: Tensor | None,
        normalizer: Tensor | None,
        sequence_weight: Tensor | None,
        *settings: Any,
    ) -> tuple[Tensor, ...]:
        s = Settings(*settings)
        counts = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask != 0
        logp = _kept(logp, counts)
        advantages = advantages.unsqueeze(-1) if advantages.dim() == 1 else advantages
        ratio = sampling_ratio
        if ratio is not None and ratio.dim() == 1:
            ratio = ratio.unsqueeze(-1)
        log_weights = logp - (logp.detach() if old_logp is None else _kept(old_logp, counts))
        tokens = counts.to(logp.dtype).sum(-1, keepdim=True)
        if s.of_sequence:
            log_weights = (log_weights.sum(-1, keepdim=True) / tokens.clamp(min=1)).expand(logp.shape)
        weights = log_weights.exp()
        loss, slope, clipped = objective(
            logp, weights, advantages, vespo_weights(log_weights, advantages, ratio, sequence_weight, s), s
        )
        if ratio is not None and s.formula != VESPO:
            loss, slope = loss * ratio, slope * ratio
        kl, kl_slope = torch.zeros_like(logp), torch.zeros_like(logp)
        if s.beta != 0:
            assert ref_logp is not None
            away = _kept(ref_logp, counts) - logp
            kl, kl_slope = away.exp() - away - 1, 1 - away.exp()
            if s.use_bias_correction_kl:
                kl_slope = (kl_slope if s.of_sequence else -away) * weights
                kl = kl * weights
        loss = loss + s.beta * kl
        through = logp.new_empty(0)
        if s.of_sequence:
            through = slope + (s.beta * kl if s.use_bias_correction_kl else 0)
            through = _kept(through / tokens.clamp(min=1), counts)
            slope = torch.zeros_like(logp)
        slope = _kept(slope + s.beta * kl_slope, counts)
        loss, kl, clipped = (_kept(v, counts) for v in (loss, kl, clipped.to(logp.dtype)))
        of_sequences = logp.new_empty(0)
        if s.reduction == "mean":
            of_sequences = weights_of_sequences(tokens, normalizer, logp.shape, s)
            total = tokens.sum().clamp(min=1)
            loss, kl, clipped = (loss * of_sequences).sum(), kl.sum() / total, clipped.sum() / total
            of_sequences = of_sequences.reshape(-1)
        kl = kl.detach() if s.beta != 0 else logp.new_empty(0)
        return loss, kl, clipped.detach(), slope, through, of_sequences

    @staticmethod
    def reference_backward(grads: Tensors, saved: Tensors, *settings: Any) -> Tensors:
        s = Settings(*settings)
        mask, (slope, through, weights) = saved[4], saved[-3:]
        dloss = grads[0].to(slope.dtype).expand(slope.shape)
        if s.reduction == "mean":
            dloss = dloss * weights.unsqueeze(-1)
        dlogp = dloss * slope
        if s.of_sequence:
            shared = (dloss * through).sum(-1, keepdim=True).expand(slope.shape)
            dlogp = dlogp + (shared if mask is None else _kept(shared, mask != 0))
        return dlogp, *(None,) * 7

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        return tuple(
            Problem(f"policy_loss_{way}", (), False, n)
            for way, n in (("forward", shape[-1]), ("reduce", shape[0]), ("backward", shape[-1]))
        )


def _wide(t: Any) -> Any:
    narrow = isinstance(t, Tensor) and t.dtype in (torch.bfloat16, torch.float16)
    return t.float() if narrow else t


def _at(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def _steps(t: Tensor | None) -> tuple[int, int]:
    """From a sequence to the next, and from a token: of one number a sequence or a token."""
    if t is None:
        return 0, 0
    return (t.shape[1], 1) if t.dim() == 2 and t.shape[1] > 1 else (1, 0)


def _kept(x: Tensor, counts: Tensor) -> Tensor:
    """``x`` with zeros for tokens that do not count."""
    return torch.where(counts, x, 0)


def objective(
    logp: Tensor, weights: Tensor, advantages: Tensor, of_sequence: Tensor | None, s: Settings
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, its derivative by the logarithm of the weight, whether it is clipped) of tokens, before the sampling ratio
    and the divergence."""
    low, high = s.bounds
    never = torch.zeros_like(logp, dtype=torch.bool)
    if s.formula == CLIP:
        most = inf if s.delta is None else s.delta
        whole, limited = weights.clamp(max=most) * advantages, weights.clamp(low, high) * advantages
        in_whole, in_limited = weights <= most, (weights >= low) & (weights <= high)
        moves = torch.where(whole < limited, in_whole, in_limited & (in_whole | (limited < whole)))
        clipped = ((weights < low) & (advantages < 0)) | ((weights > high) & (advantages > 0))
        return -torch.minimum(whole, limited), torch.where(moves, -weights * advantages, 0), clipped
    if s.formula == CISPO:
        slope = -weights.detach().clamp(max=high) * advantages
        return slope * logp, slope, (weights > high) & (advantages > 0)
    if s.formula == SAPO:
        pos, neg = s.by_sign
        temperature = torch.where(advantages > 0, torch.full_like(advantages, pos), neg)
        gate = torch.sigmoid(temperature * (weights - 1))
        return -gate * 4 / temperature * advantages, -advantages * 4 * gate * (1 - gate) * weights, never
    assert of_sequence is not None
    slope = (-of_sequence * advantages).expand(logp.shape)
    return slope * logp, slope, never


def vespo_weights(
    log_weights: Tensor, advantages: Tensor, ratio: Tensor | None, given: Tensor | None, s: Settings
) -> Tensor | None:
    """VESPO's weight of each sequence, or by the signs of its tokens' advantages."""
    if s.formula != VESPO:
        return None
    if given is not None:
        return given.reshape(-1, 1)
    total = log_weights.detach().clamp(-MOST, MOST).sum(-1, keepdim=True)
    if ratio is not None:
        total = total + ratio.log().clamp(LEAST, MOST).sum(-1, keepdim=True)
    total = total.clamp(LEAST, MOST)
    pos, neg = s.by_sign
    rate = torch.where(advantages >= 0, torch.full_like(advantages, pos), neg).clamp(min=1e-4)
    shape = torch.where(advantages >= 0, torch.full_like(advantages, s.vespo_k_pos), s.vespo_k_neg)
    return (rate + shape * total - rate * total.exp()).exp().nan_to_num(nan=0.0, posinf=0.0)


def weights_of_sequences(tokens: Tensor, normalizer: Tensor | None, shape: torch.Size, s: Settings) -> Tensor:
    """(B, 1): what the mean multiplies the losses of each sequence's tokens by."""
    divisor = s.divisor(*shape)
    if s.mean == OF_SEQUENCES:
        return 1 / (tokens.clamp(min=1) * divisor)
    if s.mean == OF_TOKENS:
        total = tokens.sum() if normalizer is None else normalizer.reshape(()).to(tokens.dtype)
        return (1 / total.clamp(min=1)).expand(tokens.shape)
    if s.mean == BY_DIVISOR:
        return tokens.new_full(tokens.shape, 1 / divisor)
    return tokens / divisor


OP = PolicyLoss
