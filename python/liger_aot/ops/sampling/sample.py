"""A token from each row of logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError
from liger_aot.ops.arguments import Allowed, Schema
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.op import Problem
from liger_aot.ops.sampling._logits import (
    FILTERS,
    FLOAT,
    GROUP,
    LAUNCHES,
    PENALTIES,
    Argument,
    Found,
    Logits,
    Plan,
    SamplingOp,
    Thresholds,
    first_greatest,
    kept,
    processed,
)
from liger_aot.ops.sampling._random import LOG2_E, SAMPLE, exponential, fma, log2, words
from liger_aot.runtime.dispatch import OpOn

MOST_LOGPROBS = 1024
LOGPROBS = Allowed(least=0, most=MOST_LOGPROBS)
KEYS = {"seeds": Argument((torch.int64,)), "positions": Argument((torch.int64, torch.int32))}


class SampledLogprobs(NamedTuple):
    """Of each row: its token and, after it, the columns with the greatest logits, the first of several first."""

    token_ids: Tensor  # (rows, 1 + logprobs) int64
    logprobs: Tensor  # (rows, 1 + logprobs) float32
    ranks: Tensor  # (rows,) int64: how many logits are at least the token's


class Sample(SamplingOp):
    """``sample(logits, seeds, positions, *, temperature=None, top_k=None, top_p=None, min_p=None, ..., logprobs=None)
    -> Tensor``: a token from each row of logits.

    In this order, as in vLLM: allowed and bad tokens, penalties, temperature, min-p, top-k, top-p. A row with
    temperature 0 gives its greatest logit, the first of several; sampled and greedy rows may stand in one call. What
    top-k, top-p and min-p keep is what ``top_k_top_p_mask`` says, of the logits divided by the temperature.

    A token depends on its row's logits, seed, position and settings alone, whatever else is in the call, however
    programs split it, and on whatever GPU: bit for bit the plain-torch reference's. Column c of a row with seed s and
    position t gets word c % 4 of Philox4x32-10 with key s and counter (c // 4, t % 2^32, t // 2^32, 0), which makes an
    exponentially distributed number E; the token is the column with the greatest log2(probability) - log2(E), the
    lowest of several (the Gumbel-max trick). The logarithms are polynomials, within 2e-6 of the exact ones; tokens of
    probabilities below 2^-32 are the rarer for the words' 32 bits. So a seed must not meet the same position twice.

    A NaN counts as -inf; a row of -inf alone gives token 0. No gradient. Works under torch.compile and, after
    ``preload``, in CUDA graphs: settings, seeds and positions stay on the device. CPU tensors take the reference.

    Args:
        logits: (rows, n) bfloat16, float16 or float32; n up to 262144. Rows may have any stride; other layouts are
            copied.
        seeds: (rows,) int64.
        positions: (rows,) int64 or int32: of the token in its sequence.
        temperature: (rows,) float32, at least 0. None is 1.
        top_k: (rows,) int32 or int64: keep so many of a row. 0, what is negative or at least n keep all.
        top_p: (rows,) float32: keep so much of the probability; 1 keeps all.
        min_p: (rows,) float32: keep what has at least so much of the greatest probability; 0 keeps all.
        repetition_penalties: (rows,) float32 above 0: positive logits of tokens of the prompt and the output are
            divided by it, others multiplied.
        presence_penalties: (rows,) float32: subtracted from the logits of tokens of the output.
        frequency_penalties: (rows,) float32: the same, times how often the token was.
        prompt_mask: (rows, ceil(n / 32)) int32: bit c % 32 of word c // 32 is set for tokens of the prompt.
        output_counts: (rows, n) int32: how often each token was in the output. Without it no token was.
        allowed_mask: (rows, ceil(n / 32)) int32: the bits of tokens that may be sampled, as grammars have them.
        bad_token_ids: (rows, any) int32: tokens that may not be sampled. What is no token, as -1, fills a row up.
        logprobs: also return log-probabilities, of the token and of so many columns with the greatest logits: from 0 to
            1024, at most n. They are those of the logits as given, without penalties, masks and temperature (vLLM's
            raw_logprobs), in float32 with an error below 1e-5 and 2^-22 of the logits' size.

    Returns:
        tokens, (rows,) int64; with ``logprobs`` also a ``SampledLogprobs``.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: a shape or device is not allowed, or a gradient is needed.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Gumbel (1954) and Maddison et al., A* Sampling (2014), for the trick; Salmon et al., Parallel Random Numbers: As
        Easy as 1, 2, 3 (2011), for the generator. The order of the settings is that of vLLM's sampler.
    """

    name = "sample"
    uses = (LAUNCHES,)
    arguments: ClassVar[Mapping[str, Argument]] = {
        **KEYS,
        "temperature": Argument(FLOAT),
        **FILTERS,
        **PENALTIES,
    }
    tensors = ("logits", *KEYS, "temperature?", *(f"{name}?" for name in (*FILTERS, *PENALTIES)))
    beside = tensors.index("output_counts?")
    settings = Schema({"int logprobs": Allowed(least=-1, most=MOST_LOGPROBS)})
    outputs = 4
    results = 4  # tokens, and the three of SampledLogprobs, without elements where they are not asked for

    def __call__(
        self,
        logits: Tensor,
        seeds: Tensor,
        positions: Tensor,
        *,
        temperature: Tensor | None = None,
        top_k: Tensor | None = None,
        top_p: Tensor | None = None,
        min_p: Tensor | None = None,
        repetition_penalties: Tensor | None = None,
        presence_penalties: Tensor | None = None,
        frequency_penalties: Tensor | None = None,
        prompt_mask: Tensor | None = None,
        output_counts: Tensor | None = None,
        allowed_mask: Tensor | None = None,
        bad_token_ids: Tensor | None = None,
        logprobs: int | None = None,
    ) -> Any:
        tensors = (
            logits, seeds, positions, temperature, top_k, top_p, min_p, repetition_penalties, presence_penalties,
            frequency_penalties, prompt_mask, output_counts, allowed_mask, bad_token_ids,
        )  # fmt: skip
        asked = -1 if logprobs is None else LOGPROBS.checked(self.name, "int logprobs", logprobs)
        tokens, *found = self.differentiable(tensors, (asked,))
        return tokens if logprobs is None else (tokens, SampledLogprobs(*found))

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        super().check(tensors, settings)
        n = tensors[0].shape[1]
        if settings[0] > n:
            raise ArgumentError(f"{self.name}: logprobs is {settings[0]}, of rows of {n} logits")

    def plan_for(self, on: OpOn, tensors: Tensors, settings: tuple[Any, ...], out: Tensor | None) -> Plan:
        x, filters, penalties = tensors[0], tensors[4:7], tensors[7:]
        logits = Logits.of(x)
        measure = None if settings[0] < 0 else Measurement(on, logits, settings[0])
        adjust = None
        if any(t is not None for t in penalties):
            adjust = Adjustment(on, logits, penalties)
            logits = adjust.written
        find = None
        if any(t is not None for t in filters):
            others = self._runtimes[LAUNCHES].of(x, "logits")
            assert others is not None
            find = Thresholds(others, logits, filters[0] is not None, filters[1] is not None)
        choose = on.kernels["sample_choose"].for_rows((logits.dtype, logits.aligned), logits.n, logits.rows)
        combine = on.kernels["sample_combine"]((True,), logits.n)
        rows, blocks, device = logits.rows, -(-logits.n // choose.block), on.device

        def run(tensors: Tensors, addresses: tuple[int, ...], to: Tensor | None) -> Tensors:
            x, stream = tensors[0], on.stream(device)
            x_at, seeds, positions, temperature, *filters = addresses[:7]
            given_at = x_at
            if adjust is not None:
                x = adjust(stream, x, x_at, addresses[7:])
                x_at = x.data_ptr()
            found = Found() if find is None else find(stream, x, x_at, filters, temperature)
            tokens = x.new_empty(rows, dtype=torch.int64)
            part = x.new_empty(rows * blocks, dtype=torch.int64)
            part_at = part.data_ptr()
            choose.launch(
                device, stream, rows * blocks, 1, 1, part_at, x_at, found.last, found.words, temperature,
                seeds, positions, logits.stride, logits.n, found.row_words, blocks,
            )  # fmt: skip
            combine.launch(device, stream, rows, 1, 1, tokens.data_ptr(), part_at, blocks)
            if measure is not None:
                return (tokens, *measure(stream, x, given_at, tokens.data_ptr()))
            ids, ranks = (x.new_empty(0, dtype=torch.int64) for _ in range(2))
            return tokens, ids, x.new_empty(0, dtype=torch.float32), ranks

        return run

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        rows, n = shape
        return (
            Problem("sample_choose", (dtype,), n % 16 == 0, n, rows),
            Problem("sample_combine", (), True, n),
        )

    @staticmethod
    def reference(
        logits: Tensor,
        seeds: Tensor,
        positions: Tensor,
        temperature: Tensor | None,
        top_k: Tensor | None,
        top_p: Tensor | None,
        min_p: Tensor | None,
        *others: Any,
    ) -> tuple[Tensor, ...]:
        *penalties, logprobs = others
        x = processed(logits, *penalties)
        t = torch.ones_like(x[:, 0]) if temperature is None else temperature
        warm = t > 0
        keep = kept(x, top_k, top_p, min_p, t)
        scale = torch.full_like(t, LOG2_E) / torch.where(warm, t, torch.ones_like(t))
        e = exponential(words(seeds.long(), positions.long(), x.shape[1], SAMPLE))
        score = torch.where(warm[:, None], fma(x, scale[:, None], -log2(e)), x)
        tokens = first_greatest(torch.where(keep, score, torch.full_like(x, -torch.inf)))
        if logprobs < 0:
            return tokens, tokens.new_empty(0), x.new_empty(0), tokens.new_empty(0)
        raw = processed(logits)
        own = raw.gather(1, tokens[:, None])
        top, order = raw.sort(dim=1, descending=True, stable=True)
        ids = torch.cat((tokens[:, None], order[:, :logprobs]), 1)
        measured = torch.cat((own, top[:, :logprobs]), 1) - raw.logsumexp(1, keepdim=True)
        return tokens, ids, measured, (raw >= own).sum(1)


class Measurement:
    """The launches that find log-probabilities of such logits."""

    def __init__(self, on: OpOn, logits: Logits, wanted: int) -> None:
        key, n, rows = (logits.dtype, logits.aligned), logits.n, logits.rows
        self._on, self._rows, self._wanted = on, rows, wanted
        self._first = on.kernels["sample_logprob_parts"].for_rows(key, n, rows)
        self._second = on.kernels["sample_logprobs"].for_rows(key, n, rows)
        self._blocks = -(-n // self._first.block)
        self._groups = -(-n // GROUP)
        self._numbers = logits.stride, n, self._groups, self._blocks

    def __call__(self, stream: int, x: Tensor, x_at: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """``x`` is on the device; ``x_at`` and ``tokens`` are addresses."""
        rows, wanted, device = self._rows, self._wanted, self._on.device
        ids = x.new_empty((rows, wanted + 1), dtype=torch.int64)
        found = x.new_empty((rows, wanted + 1), dtype=torch.float32)
        ranks = x.new_empty(rows, dtype=torch.int64)
        scratch = x.new_empty(rows * (2 * self._groups + 3 * self._blocks), dtype=torch.int32)
        listed = scratch.data_ptr()
        greatest = listed + 4 * rows * self._groups
        sums = greatest + 4 * rows * self._groups
        counts = sums + 8 * rows * self._blocks
        parts = (greatest, sums, counts, x_at, tokens, *self._numbers)
        self._first.launch(device, stream, rows * self._blocks, 1, 1, *parts)
        self._second.launch(
            device, stream, rows, 1, 1, ids.data_ptr(), found.data_ptr(), ranks.data_ptr(), listed, *parts,
            wanted,
        )  # fmt: skip
        return ids, found, ranks


class Adjustment:
    """The launch that applies penalties, and what is allowed, to such logits."""

    def __init__(self, on: OpOn, logits: Logits, penalties: Tensors) -> None:
        counts, _, bad = penalties[4:]
        rows, n = logits.rows, logits.n
        aligned = logits.aligned and (counts is None or not counts.data_ptr() & 15)
        self._on = on
        self._adjust = on.kernels["sample_adjust"].for_rows((logits.dtype, aligned), n, rows)
        blocks = -(-n // self._adjust.block)
        self._programs = rows * blocks
        self._numbers = logits.stride, -(-n // GROUP), 0 if bad is None else bad.shape[1], n, blocks
        self.written = Logits(torch.float32, rows, n, n, not n & 15)

    def __call__(self, stream: int, x: Tensor, x_at: int, penalties: tuple[int, ...]) -> Tensor:
        """The logits that are sampled from. ``penalties``: the addresses."""
        repetition, presence, frequency, prompt, counts, allowed, bad = penalties
        y = x.new_empty((self.written.rows, self.written.n), dtype=torch.float32)
        self._adjust.launch(
            self._on.device, stream, self._programs, 1, 1, y.data_ptr(), x_at, allowed, bad, prompt, counts, repetition,
            presence, frequency, *self._numbers,
        )  # fmt: skip
        return y


OP = Sample
