"""rejection_sample: which draft tokens of a speculative step are accepted, and the token after them.

Two launches. ``parts`` leaves the best column of each block of columns of a target row: the greatest probability of a
greedy request's rows, a sample of max(target - draft, 0) of another request's first row whose draft is rejected.
``accept`` writes a request's tokens.

Leviathan et al., Fast Inference from Transformers via Speculative Decoding (2023).
"""

import triton
import triton.language as tl

from csrc_triton.common.pdl_begin import begin
from csrc_triton.sampling.generator import (
    ACCEPT,
    RECOVER,
    column_of,
    exponential,
    packed,
    uniform,
    words_of,
)
from csrc_triton.sampling.logits import given

DRAFTS = tl.constexpr(32)  # draft tokens of a request that are looked at together
REQUESTS = {
    "TARGET": "*fp32", "DRAFT": "*fp32", "IDS": "*i64", "ENDS": "*i32", "GREEDY": "*i32", "SEEDS": "*i64",
    "POSITIONS": "*i64", "target_stride": "i64", "draft_stride": "i64", "tokens": "i32", "drafts": "i32", "n": "i32",
    "blocks": "i32",
}  # fmt: skip
DECLARATION = {
    "op": "rejection_sample",
    "kernels": {
        "rejection_sample_parts": {
            "arguments": {"PART": "*i64", **REQUESTS},
            "axes": {},
            "aligned": ["TARGET", "DRAFT", "target_stride", "draft_stride", "n"],
            "forms": {
                "block": {
                    "function": "parts", "constants": ["BLOCK", "PDL"], "defaults": {"PDL": 0}, "pdl": "PDL",
                },
            },
        },
        "rejection_sample": {
            "arguments": {"TOKENS": "*i64", "PART": "*i64", "BONUS": "*i64", **REQUESTS},
            "axes": {},
            "always_aligned": True,
            "aligned": [],
            "forms": {
                "request": {
                    "function": "accept", "constants": ["BLOCK", "PDL"], "defaults": {"PDL": 0}, "pdl": "PDL",
                },
            },
        },
    },
}  # fmt: skip


@triton.jit
def drafts_of(request, ENDS, tokens, drafts):
    """(first row, number of rows) of a request."""
    start = tl.load(ENDS + request - 1, mask=request > 0, other=0)
    start = tl.minimum(tl.maximum(start, 0), tokens)
    end = tl.minimum(tl.maximum(tl.load(ENDS + request), start), tokens)
    return start, tl.minimum(end - start, drafts)


@triton.jit
def first_rejected(
    TARGET, DRAFT, IDS, seed, position, target_stride, draft_stride, n, start, count
):  # fmt: skip
    """The first draft token that is rejected, or ``count``: one of probability p in the target and q in the draft is
    accepted where u * q < p."""
    first = count
    for begin_at in range(0, count, DRAFTS):
        i = begin_at + tl.arange(0, DRAFTS)
        token = tl.load(IDS + start + i, mask=i < count, other=-1)
        known = (token >= 0) & (token < n)
        row = (start + i).to(tl.int64)
        p = tl.load(TARGET + row * target_stride + token, mask=known, other=0.0)
        q = tl.load(DRAFT + row * draft_stride + token, mask=known & (DRAFT.to(tl.int64) != 0), other=1.0)
        at = position + i.to(tl.int64)
        words = words_of(tl.zeros([DRAFTS], tl.int32), seed, at, ACCEPT)
        accepted = uniform(words[0]) * q < p
        first = tl.minimum(first, tl.min(tl.where(accepted, 0x7FFFFFFF, i), 0))
    return tl.minimum(first, count)


@triton.jit
def parts(
    PART, TARGET, DRAFT, IDS, ENDS, GREEDY, SEEDS, POSITIONS, target_stride, draft_stride, tokens, drafts, n, blocks,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One block of columns of one draft token's row."""
    blocks = begin(blocks, PDL)
    program = tl.program_id(0)
    at = program // blocks
    request = at // drafts
    i = at - request * drafts
    start, count = drafts_of(request, ENDS, tokens, drafts)
    if i < count:
        greedy = given(GREEDY, request, 0) != 0
        seed, position = tl.load(SEEDS + request), tl.load(POSITIONS + request)
        wanted = i
        if greedy == 0:
            wanted = first_rejected(
                TARGET, DRAFT, IDS, seed, position, target_stride, draft_stride, n, start, count
            )
        if i == wanted:
            quarters = (program - at * blocks) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
            row = (start + i).to(tl.int64)
            drafted = tl.load(IDS + start + i)
            words = words_of(quarters, seed, position + i, RECOVER)
            best = tl.full([BLOCK // 4], -9223372036854775808, tl.int64)
            for j in tl.static_range(4):
                cols = quarters * 4 + j
                p = tl.load(TARGET + row * target_stride + cols, mask=cols < n, other=-1.0)
                if greedy:
                    score = tl.where(p == p, p, -1.0)
                else:
                    if DRAFT.to(tl.int64) != 0:
                        p -= tl.load(DRAFT + row * draft_stride + cols, mask=cols < n, other=0.0)
                    else:
                        p = tl.where(cols == drafted, 0.0, p)
                    score = tl.div_rn(tl.where(p > 0.0, p, 0.0), exponential(words[j]))
                best = tl.maximum(best, packed(score, cols))
            tl.store(PART + program.to(tl.int64), tl.max(best, 0))


@triton.jit
def best_of(PART, blocks, BLOCK: tl.constexpr):
    """The best column of all blocks."""
    best = tl.full([BLOCK], -9223372036854775808, tl.int64)
    for first in range(0, blocks, BLOCK):
        at = first + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(PART + at, mask=at < blocks, other=-9223372036854775808))
    return column_of(tl.max(best, 0))


@triton.jit
def accept(
    TOKENS, PART, BONUS, TARGET, DRAFT, IDS, ENDS, GREEDY, SEEDS, POSITIONS, target_stride, draft_stride, tokens,
    drafts, n, blocks, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One request: the accepted tokens, the one after them, and -1 in the rest of its row."""
    blocks = begin(blocks, PDL)
    request = tl.program_id(0)
    start, count = drafts_of(request, ENDS, tokens, drafts)
    PART += request.to(tl.int64) * drafts * blocks
    TOKENS += request.to(tl.int64) * (drafts + 1)
    accepted = 0
    if given(GREEDY, request, 0) != 0:
        going = count > 0
        while going:
            going = best_of(PART + accepted.to(tl.int64) * blocks, blocks, BLOCK) == tl.load(
                IDS + start + accepted
            )
            accepted += going.to(tl.int32)
            going = going & (accepted < count)
    else:
        accepted = first_rejected(
            TARGET, DRAFT, IDS, tl.load(SEEDS + request), tl.load(POSITIONS + request), target_stride, draft_stride, n,
            start, count,
        )  # fmt: skip
    for first in range(0, drafts + 1, DRAFTS):
        i = first + tl.arange(0, DRAFTS)
        token = tl.load(IDS + start + i, mask=i < accepted, other=-1)
        tl.store(TOKENS + i, token, mask=(i <= drafts) & (i != accepted))
    if accepted < count:
        tl.store(TOKENS + accepted, best_of(PART + accepted.to(tl.int64) * blocks, blocks, BLOCK))
    else:
        tl.store(TOKENS + accepted, tl.load(BONUS + request))
