"""Policy gradient losses of language models, from the log-probabilities of the sampled tokens: a sequence a program.

``forward`` gives each token's loss, or its sequence's sums for ``reduce``, which weighs the sequences; SLOPE and
THROUGH are all that ``backward`` needs: with u the gradient of each token's loss,
    dlogp[t] = u[t] * SLOPE[t] + sum over the sequence's tokens s of u[s] * THROUGH[s],
where THROUGH is what goes by way of the sequence's importance weight.
"""

import triton
import triton.language as tl

from csrc_triton.common.pdl import launch_dependents, wait_for_previous
from csrc_triton.common.token_mask import token_counts

DECLARATION = {
    "op": "policy_loss",
    "kernels": {
        "policy_loss_forward": {
            "arguments": {
                "LOSS": "*fp32",
                "KL": "*fp32",
                "CLIPPED": "*fp32",
                "SLOPE": "*fp32",
                "THROUGH": "*fp32",
                "SUMS": "*fp32",
                "LOGP": "*fp32",
                "OLD_LOGP": "*fp32",
                "REF_LOGP": "*fp32",
                "ADVANTAGES": "*fp32",
                "MASK": "*i32",
                "RATIO": "*fp32",
                "WEIGHT": "*fp32",
                "length": "i32",
                "advantage_row": "i32",
                "advantage_step": "i32",
                "ratio_row": "i32",
                "ratio_step": "i32",
                "mask_kind": "i32",
                "formula": "i32",
                "of_sequence": "i32",
                "corrected": "i32",
                "beta": "fp32",
                "low": "fp32",
                "high": "fp32",
                "most": "fp32",
                "pos": "fp32",
                "neg": "fp32",
                "k_pos": "fp32",
                "k_neg": "fp32",
            },
            "axes": {},
            "aligned": [],
            "forms": {
                "sequence": {
                    "function": "forward",
                    "constants": ["BLOCK", "PDL"],
                    "defaults": {"PDL": 0},
                    "pdl": "PDL",
                }
            },
        },
        "policy_loss_reduce": {
            "arguments": {
                "LOSS": "*fp32",
                "KL": "*fp32",
                "CLIPPED": "*fp32",
                "WEIGHTS": "*fp32",
                "SUMS": "*fp32",
                "NORMALIZER": "*fp32",
                "sequences": "i32",
                "mean": "i32",
                "divisor": "fp32",
            },
            "axes": {},
            "aligned": [],
            "forms": {
                "tile": {
                    "function": "reduce",
                    "constants": ["BLOCK", "PDL"],
                    "defaults": {"PDL": 0},
                    "pdl": "PDL",
                }
            },
        },
        "policy_loss_backward": {
            "arguments": {
                "DLOGP": "*fp32",
                "DLOSS": "*fp32",
                "WEIGHTS": "*fp32",
                "SLOPE": "*fp32",
                "THROUGH": "*fp32",
                "MASK": "*i32",
                "length": "i32",
                "dloss_row": "i64",
                "dloss_step": "i64",
                "mask_kind": "i32",
            },
            "axes": {},
            "aligned": [],
            "forms": {"sequence": {"function": "backward", "constants": ["BLOCK"]}},
        },
    },
}

# Formulas, as the host numbers them
CLIP, CISPO, SAPO, VESPO = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
# Means: of sequences' means, of all tokens, by a divisor, of sequences weighed by their lengths
OF_SEQUENCES, OF_TOKENS, BY_DIVISOR = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# VESPO's limits of logarithms: log(1e-8), and 20
LEAST, MOST = tl.constexpr(-18.420680743952367), tl.constexpr(20.0)


@triton.jit
def is_given(P):
    """Whether there is a tensor: the address of one that is left out is 0."""
    return P.to(tl.int64) != 0


@triton.jit
def clamped(x, low, high):
    """NaN stays NaN, which minimum and maximum would drop."""
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def log_weight(
    LOGP, OLD_LOGP, RATIO, MASK, sequence, length, ratio_row, ratio_step, mask_kind, formula, BLOCK: tl.constexpr
):  # fmt: skip
    """(the logarithm of the sequence's importance weight, its tokens that count): the mean of the tokens' logarithms,
    or for VESPO their sum, each clamped, with those of all ratios, also where no token counts."""
    logs = tl.zeros([BLOCK], tl.float32)
    tokens = tl.zeros([BLOCK], tl.float32)
    for first in range(0, length, BLOCK):
        token = first + tl.arange(0, BLOCK)
        here = token < length
        at = sequence * length + token
        counts = token_counts(MASK, at, mask_kind, here)
        logp = tl.load(LOGP + at, mask=counts, other=0.0)
        old = tl.load(OLD_LOGP + at, mask=counts & is_given(OLD_LOGP), other=0.0)
        log = tl.where(counts & is_given(OLD_LOGP), logp - old, 0.0)
        if formula == VESPO:
            log = clamped(log, -MOST, MOST)
            once = here & ((ratio_step != 0) | (token == 0))  # one of the whole sequence is no product
            ratio = RATIO + sequence * ratio_row + token * ratio_step
            log += clamped(tl.log(tl.load(ratio, mask=once & is_given(RATIO), other=1.0)), LEAST, MOST)
        logs += log
        tokens += counts.to(tl.float32)
    log, count = tl.sum(logs, 0), tl.sum(tokens, 0)
    if formula == VESPO:
        log = clamped(log, LEAST, MOST)
    else:
        log /= tl.maximum(count, 1.0)
    return log, count


@triton.jit
def objective(logp, coef, advantage, weight, formula, low, high, most, pos, neg):
    """(loss, its derivative by the logarithm of ``coef``, 1.0 where it is clipped), before the divergence is added.
    ``coef`` is the importance weight; a factor that is no longer than its clamp differentiated is a constant."""
    if formula == CLIP:
        whole = tl.where(coef > most, most, coef) * advantage
        limited = clamped(coef, low, high) * advantage
        loss = -tl.where(limited < whole, limited, whole)
        in_whole, in_limited = coef <= most, (coef >= low) & (coef <= high)
        moves = tl.where(whole < limited, in_whole, in_limited & (in_whole | (limited < whole)))
        slope = tl.where(moves, -coef * advantage, 0.0)
        clipped = ((coef < low) & (advantage < 0)) | ((coef > high) & (advantage > 0))
    elif formula == CISPO:
        slope = -tl.where(coef > high, high, coef) * advantage
        loss = slope * logp
        clipped = (coef > high) & (advantage > 0)
    elif formula == SAPO:
        temperature = tl.where(advantage > 0, pos, neg)
        gate = 1.0 / (1.0 + tl.exp(-temperature * (coef - 1.0)))
        loss = -gate * 4.0 / temperature * advantage
        slope = -advantage * 4.0 * gate * (1.0 - gate) * coef
        clipped = coef != coef
    else:
        slope = -weight * advantage
        loss = slope * logp
        clipped = coef != coef
    return loss, slope, clipped.to(tl.float32)


@triton.jit
def forward(
    LOSS, KL, CLIPPED, SLOPE, THROUGH, SUMS, LOGP, OLD_LOGP, REF_LOGP, ADVANTAGES, MASK, RATIO, WEIGHT, length,
    advantage_row, advantage_step, ratio_row, ratio_step, mask_kind, formula, of_sequence, corrected, beta, low, high,
    most, pos, neg, k_pos, k_neg,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of [sequences, length] tensors. ADVANTAGES and RATIO are one number a sequence or a token, as their steps say;
    WEIGHT is VESPO's weight of each sequence where the caller has it. ``pos`` and ``neg`` are SAPO's temperatures or
    VESPO's lambdas. SUMS[sequences, 4] gets the sums of loss, divergence and clipped tokens, and the tokens that
    count. Every output may be left out."""
    sequence = tl.program_id(0).to(tl.int64)
    if PDL:
        if is_given(SUMS):  # ``reduce`` follows, and waits; another's kernel must not start early
            launch_dependents()
        # The kernel before this one may write any of the tensors: all is read at addresses known after the wait.
        sequence = wait_for_previous(tl.program_id(0)).to(tl.int64)
    log, tokens = 0.0, 0.0
    if (of_sequence != 0) | (formula == VESPO):
        log, tokens = log_weight(
            LOGP, OLD_LOGP, RATIO, MASK, sequence, length, ratio_row, ratio_step, mask_kind, formula, BLOCK
        )
    given_weight = tl.load(WEIGHT + sequence, mask=is_given(WEIGHT), other=0.0)
    loss_sum = tl.zeros([BLOCK], tl.float32)
    kl_sum = tl.zeros([BLOCK], tl.float32)
    clipped_sum = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.float32)
    for first in range(0, length, BLOCK):
        token = first + tl.arange(0, BLOCK)
        here = token < length
        at = sequence * length + token
        counts = token_counts(MASK, at, mask_kind, here)
        logp = tl.load(LOGP + at, mask=counts, other=0.0)
        old = tl.where(
            is_given(OLD_LOGP), tl.load(OLD_LOGP + at, mask=counts & is_given(OLD_LOGP), other=0.0), logp
        )
        ref = tl.where(
            is_given(REF_LOGP), tl.load(REF_LOGP + at, mask=counts & is_given(REF_LOGP), other=0.0), logp
        )
        advantage = ADVANTAGES + sequence * advantage_row + token * advantage_step
        advantage = tl.load(advantage, mask=counts, other=0.0)
        coef = tl.exp(tl.where(of_sequence != 0, log, logp - old))
        weight = tl.where(is_given(WEIGHT), given_weight, 0.0) + tl.zeros([BLOCK], tl.float32)
        if (formula == VESPO) & (is_given(WEIGHT) == 0):
            rate, shape = tl.where(advantage >= 0, pos, neg), tl.where(advantage >= 0, k_pos, k_neg)
            rate = tl.maximum(rate, 1e-4)
            weight = tl.exp(rate + shape * log - rate * tl.exp(log))
            weight = tl.where(weight < float("inf"), weight, 0.0)  # nor NaN
        loss, slope, clipped = objective(logp, coef, advantage, weight, formula, low, high, most, pos, neg)
        if formula != VESPO:
            ratio = RATIO + sequence * ratio_row + token * ratio_step
            ratio = tl.load(ratio, mask=counts & is_given(RATIO), other=1.0)
            loss *= ratio
            slope *= ratio
        power = tl.exp(ref - logp)
        kl = power - (ref - logp) - 1.0
        kl_slope = 1.0 - power
        if corrected != 0:
            kl_slope = tl.where(of_sequence != 0, kl_slope, logp - ref) * coef
            kl *= coef
        loss += beta * kl
        if of_sequence != 0:
            through = slope + tl.where(corrected != 0, beta * kl, 0.0)
            tl.store(
                THROUGH + at, tl.where(counts, through / tl.maximum(tokens, 1.0), 0.0), mask=here & is_given(THROUGH)
            )  # fmt: skip
            slope = beta * kl_slope
        else:
            slope += beta * kl_slope
        loss, kl = tl.where(counts, loss, 0.0), tl.where(counts, kl, 0.0)
        clipped = tl.where(counts, clipped, 0.0)
        tl.store(LOSS + at, loss, mask=here & is_given(LOSS))
        tl.store(KL + at, kl, mask=here & is_given(KL))
        tl.store(CLIPPED + at, clipped, mask=here & is_given(CLIPPED))
        tl.store(SLOPE + at, tl.where(counts, slope, 0.0), mask=here & is_given(SLOPE))
        loss_sum += loss
        kl_sum += kl
        clipped_sum += clipped
        count += counts.to(tl.float32)
    wanted = is_given(SUMS)
    tl.store(SUMS + sequence * 4, tl.sum(loss_sum, 0), mask=wanted)
    tl.store(SUMS + sequence * 4 + 1, tl.sum(kl_sum, 0), mask=wanted)
    tl.store(SUMS + sequence * 4 + 2, tl.sum(clipped_sum, 0), mask=wanted)
    tl.store(SUMS + sequence * 4 + 3, tl.sum(count, 0), mask=wanted)


@triton.jit
def reduce(
    LOSS, KL, CLIPPED, WEIGHTS, SUMS, NORMALIZER, sequences, mean, divisor, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """LOSS[0] is the sum over all tokens of their losses times WEIGHTS of their sequences; KL[0] and CLIPPED[0] are
    means over the tokens that count."""
    if PDL:
        sequences = wait_for_previous(sequences)  # ``forward`` writes SUMS
    counts = tl.zeros([BLOCK], tl.float32)
    kl = tl.zeros([BLOCK], tl.float32)
    clipped = tl.zeros([BLOCK], tl.float32)
    for first in range(0, sequences, BLOCK):
        sequence = first + tl.arange(0, BLOCK)
        here = sequence < sequences
        kl += tl.load(SUMS + sequence.to(tl.int64) * 4 + 1, mask=here, other=0.0)
        clipped += tl.load(SUMS + sequence.to(tl.int64) * 4 + 2, mask=here, other=0.0)
        counts += tl.load(SUMS + sequence.to(tl.int64) * 4 + 3, mask=here, other=0.0)
    tokens = tl.maximum(tl.sum(counts, 0), 1.0)
    tl.store(KL, tl.sum(kl, 0) / tokens, mask=is_given(KL))
    tl.store(CLIPPED, tl.sum(clipped, 0) / tokens)
    losses = tl.zeros([BLOCK], tl.float32)
    for first in range(0, sequences, BLOCK):
        sequence = first + tl.arange(0, BLOCK)
        here = sequence < sequences
        loss = tl.load(SUMS + sequence.to(tl.int64) * 4, mask=here, other=0.0)
        count = tl.load(SUMS + sequence.to(tl.int64) * 4 + 3, mask=here, other=0.0)
        if mean == OF_SEQUENCES:
            weight = 1.0 / (tl.maximum(count, 1.0) * divisor)
        elif mean == OF_TOKENS:
            normalizer = tl.load(NORMALIZER, mask=is_given(NORMALIZER), other=0.0)
            weight = 1.0 / tl.where(is_given(NORMALIZER), tl.maximum(normalizer, 1.0), tokens)
            weight += tl.zeros([BLOCK], tl.float32)
        elif mean == BY_DIVISOR:
            weight = 1.0 / divisor + tl.zeros([BLOCK], tl.float32)
        else:
            weight = count / divisor
        tl.store(WEIGHTS + sequence, weight, mask=here)
        losses += loss * weight
    tl.store(LOSS, tl.sum(losses, 0))


@triton.jit
def backward(
    DLOGP, DLOSS, WEIGHTS, SLOPE, THROUGH, MASK, length, dloss_row, dloss_step, mask_kind, BLOCK: tl.constexpr
):  # fmt: skip
    """DLOSS is one number a token, or one in all (steps of 0), which WEIGHTS of the sequences multiply."""
    sequence = tl.program_id(0).to(tl.int64)
    weight = tl.load(WEIGHTS + sequence, mask=is_given(WEIGHTS), other=1.0)
    shared = 0.0
    if is_given(THROUGH):
        sums = tl.zeros([BLOCK], tl.float32)
        for first in range(0, length, BLOCK):
            token = first + tl.arange(0, BLOCK)
            here = token < length
            dloss = tl.load(DLOSS + sequence * dloss_row + token * dloss_step, mask=here, other=0.0)
            sums += dloss * tl.load(THROUGH + sequence * length + token, mask=here, other=0.0)
        shared = tl.sum(sums, 0)
    for first in range(0, length, BLOCK):
        token = first + tl.arange(0, BLOCK)
        here = token < length
        at = sequence * length + token
        counts = token_counts(MASK, at, mask_kind, here)
        dloss = tl.load(DLOSS + sequence * dloss_row + token * dloss_step, mask=counts, other=0.0)
        dlogp = dloss * tl.load(SLOPE + at, mask=counts, other=0.0) + tl.where(counts, shared, 0.0)
        tl.store(DLOGP + at, dlogp * weight, mask=here)
