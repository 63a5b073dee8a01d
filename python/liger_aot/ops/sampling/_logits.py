"""What the ops of this family share: which logits are sampled from, what is kept of them, checks, and the launches that
find a row's threshold.

The rules are those of csrc_triton/sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.differentiable import Tensors
from liger_aot.ops.forward_only import ForwardOnlyOp
from liger_aot.ops.op import as_rows, check_rows, check_same_device
from liger_aot.ops.sampling._random import LOG2_E, fma, log2, masses
from liger_aot.runtime.dispatch import OpOn
from liger_aot.runtime.grid import programs_of
from liger_aot.runtime.layout import layouts_of, rows_of
from liger_aot.runtime.remembered import remember

GROUP = 32  # columns: as many as a word of a mask has bits
MAX_COLUMNS = 1 << 18
SUMS, HELD = 8, 8192  # as in csrc_triton/sampling/bracket.py
RANKED = 256  # as in csrc_triton/sampling/ranks.py
LAUNCHES = "top_k_top_p_mask"  # the op whose kernels find thresholds
INT, FLOAT = (torch.int32, torch.int64), (torch.float32,)
# How an argument's elements lie: one a row, a bit a column, one a column, some a row; one a request, where rows are
# those of several requests.
A_ROW, A_BIT, A_COLUMN, SOME = "(rows,)", "(rows, ceil(n / 32))", "(rows, n)", "(rows, any)"
A_REQUEST = "(requests,)"


# What a call with tensors of a known layout does: from the tensors, their addresses and memory for the result.
Plan = Callable[[Tensors, tuple[int, ...], Any], Tensors]


class Argument(NamedTuple):
    """A tensor beside the logits: its dtypes, of which kernels read the first, and its shape."""

    dtypes: tuple[torch.dtype, ...]
    shape: str = A_ROW


FILTERS = {
    "top_k": Argument(INT),
    "top_p": Argument(FLOAT),
    "min_p": Argument(FLOAT),
}
PENALTIES = {
    "repetition_penalties": Argument(FLOAT),
    "presence_penalties": Argument(FLOAT),
    "frequency_penalties": Argument(FLOAT),
    "prompt_mask": Argument((torch.int32,), A_BIT),
    "output_counts": Argument((torch.int32,), A_COLUMN),
    "allowed_mask": Argument((torch.int32,), A_BIT),
    "bad_token_ids": Argument((torch.int32,), SOME),
}


class SamplingOp(ForwardOnlyOp):
    """Base of the ops of this family."""

    no_gradient = "sampling has none"
    arguments: ClassVar[Mapping[str, Argument]]  # of the tensors after the first
    beside: ClassVar[int | None] = None  # which tensor has rows as long as the first one's
    sources: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16, torch.float32)

    def __init__(self, runtimes: Any = None) -> None:
        super().__init__(runtimes)
        self._plans: dict[Any, Plan] = {}  # of calls with tensors of one layout

    def plan_for(self, on: OpOn, tensors: Tensors, settings: tuple[Any, ...], out: Tensor | None) -> Plan:
        """What a call with tensors of these layouts launches, once they are ``prepared``."""
        raise NotImplementedError

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        self.check_arguments(tensors)

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        to = None if out is None else out[0]
        try:
            key, addresses = self._key(tensors, settings, to)
        except (AttributeError, TypeError, RuntimeError):  # no tensors: the checks say so
            return self.prepare_forward(tensors, settings, keep, out)
        plan = self._plans.get(key)
        if plan is None:
            return self.prepare_forward(tensors, settings, keep, out)
        return plan(tensors, addresses, to)

    def _key(
        self, tensors: Tensors, settings: tuple[Any, ...], to: Tensor | None
    ) -> tuple[Any, tuple[int, ...]]:
        """All that a plan depends on, and the tensors' addresses."""
        layouts, *addresses = layouts_of(tensors if to is None else (*tensors, to))
        y_at = 0 if to is None else addresses.pop()
        beside = 0 if self.beside is None else addresses[self.beside]
        return (layouts, addresses[0] & 15, beside & 15, y_at & 15, settings), tuple(addresses)

    def prepare_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        self.check(tensors, settings)
        if self.on_reference(tensors):
            results = self.by_reference(tensors, settings)
            return results if out is None else (out[0].copy_(results[0]), *results[1:])
        on = self._own.of(tensors[0], self.tensors[0])
        assert on is not None
        ready, to = self.prepared(tensors), None if out is None else out[0]
        key, addresses = self._key(ready, settings, to)
        plan = self._plans.get(key)
        if plan is None:
            plan = remember(self._plans, key, self.plan_for(on, ready, settings, to))
        return plan(ready, addresses, to)

    def check_arguments(self, tensors: Tensors) -> None:
        """Raise unless the first tensor is (rows, n) logits and the others are what ``arguments`` says."""
        first = self.tensors[0]
        x: Tensor = tensors[0]
        check_rows(self.name, first, x)
        if x.dtype not in self.sources:
            allowed = " or ".join(map(_said, self.sources))
            raise ArgumentTypeError(f"{self.name}: {first} must be {allowed}, got {_said(x.dtype)}")
        if x.dim() != 2 or not 0 < x.shape[1] <= MAX_COLUMNS:
            raise ArgumentError(
                f"{self.name}: {first} must be (rows, n) with n from 1 to {MAX_COLUMNS}, got {tuple(x.shape)}"
            )
        for (name, asked), value in zip(self.arguments.items(), tensors[1:], strict=True):
            if value is None and f"{name}?" in self.tensors:
                continue
            self._check_argument(name, value, asked, x)

    def _check_argument(self, name: str, value: Any, asked: Argument, x: Tensor) -> None:
        if not isinstance(value, Tensor):
            raise ArgumentTypeError(f"{self.name}: {name} must be a torch.Tensor, got {type(value).__name__}")
        if value.dtype not in asked.dtypes or value.layout != torch.strided or value.is_nested:
            allowed = " or ".join(map(_said, asked.dtypes))
            raise ArgumentTypeError(
                f"{self.name}: {name} must be a dense tensor of {allowed}, got {_said(value.dtype)}"
            )
        check_same_device(self.name, name, value, self.tensors[0], x)
        rows, n = x.shape
        sizes = {
            A_ROW: (rows,), A_BIT: (rows, -(-n // GROUP)), A_COLUMN: (rows, n), SOME: (rows, None), A_REQUEST: (None,),
        }[asked.shape]  # fmt: skip
        fits = (size is None or size == have for size, have in zip(sizes, value.shape, strict=False))
        if value.dim() != len(sizes) or not all(fits):
            raise ArgumentError(
                f"{self.name}: {name} must have shape {asked.shape} with rows = {rows} and n = {n}, got "
                f"{tuple(value.shape)}"
            )

    def prepared(self, tensors: Tensors) -> Tensors:
        """The tensors as kernels read them: evenly spaced rows of logits, the others contiguous and of one dtype."""
        asked = zip(self.arguments.values(), tensors[1:], strict=True)
        x = as_rows(self.name, self.tensors[0], tensors[0])
        return (x, *(t if t is None else t.to(a.dtypes[0]).contiguous() for a, t in asked))


class Logits(NamedTuple):
    """Rows of logits in memory, but for their address."""

    dtype: torch.dtype
    rows: int
    n: int
    stride: int
    aligned: bool

    @staticmethod
    def of(x: Tensor) -> Logits:
        in_x = rows_of(x)
        assert in_x is not None
        x_at, _, _, _, _, rows, n, stride = in_x
        return Logits(x.dtype, rows, n, stride, not (x_at | stride | n) & 15)


class Found(NamedTuple):
    """Addresses, and the memory that must live until the last launch that reads there is in the stream."""

    memory: tuple[Tensor, ...] = ()
    # Of the last column that is kept of each row, in the order of (greatest logit, lowest column).
    last: int = 0
    words: int = 0  # of a row's candidates, where they are few
    row_words: int = 0


class Thresholds:
    """The launches that find the thresholds of calls with such logits, with or without a top-k and a top-p."""

    def __init__(self, on: OpOn, logits: Logits, top_k: bool, top_p: bool) -> None:
        key, n, rows = (logits.dtype, logits.aligned), logits.n, logits.rows
        self._on, self._fours = on, int(top_k)  # top-k looks at fours of groups
        self._first = on.kernels["logits_groups"].for_rows(key, n, rows)
        self._last = on.kernels["logits_threshold"].for_rows((logits.dtype, True), n, rows)
        self._rows, self._groups, self._n, self._stride = rows, -(-n // GROUP), n, logits.stride
        self._blocks = -(-n // self._first.block)
        collection = Collection(on, logits, top_k, top_p) if self._blocks > 1 else None
        self._collection = collection if collection is not None and collection.needed else None

    def __call__(self, stream: int, x: Tensor, x_at: int, filters: Sequence[int], temperature: int) -> Found:
        """What is found, in memory.

        Args:
            filters: addresses of k, p and the least share.
        """
        rows, groups, device, collection = self._rows, self._groups, self._on.device, self._collection
        bracketed = collection is not None and collection.bracketed
        row_words = SUMS + (HELD if bracketed else RANKED)
        measured = self._blocks if bracketed else 0
        # columns; the groups' greatest, and a list of groups; what is known of blocks
        scratch = x.new_empty(rows * (row_words + groups + measured), dtype=torch.int64)
        last = x.new_empty(rows, dtype=torch.int64)
        words = scratch.data_ptr()
        greatest = words + 8 * rows * row_words
        parts = greatest + 8 * rows * groups if bracketed else 0
        logits = (x_at, *filters, temperature, self._stride, self._n)
        self._first.launch(
            device, stream, rows * self._blocks, 1, 1, greatest, parts, words, x_at, temperature, self._stride, self._n,
            groups, row_words, self._blocks, self._fours,
        )  # fmt: skip
        if collection is not None:
            collection(stream, words, greatest, parts, self._blocks, logits, row_words)
        self._last.launch(
            device, stream, rows, 1, 1, last.data_ptr(), greatest, words, *logits, groups, row_words,
            int(collection is not None and collection.ranked),
        )  # fmt: skip
        return Found((scratch, last), last.data_ptr(), words, row_words)


class Collection:
    """The launches that write down the columns among which a row's threshold lies: a flat row's, and of few rows that
    of a small top-k. Of many rows, ``threshold`` finds the latter as soon as many programs a row do."""

    def __init__(self, on: OpOn, logits: Logits, top_k: bool, top_p: bool) -> None:
        key, n, rows = (logits.dtype, logits.aligned), logits.n, logits.rows
        self._device, self._rows, self._groups = on.device, rows, -(-n // GROUP)
        self._find = on.kernels["logits_bracket"].for_rows(key, n, rows)
        self._collect = collect = on.kernels["logits_collect"].for_rows(key, n, rows)
        blocks = -(-n // collect.block)
        self.ranked = top_k and rows <= collect.numbers["few_rows"]
        self.bracketed = top_p
        self.needed = self.ranked or self.bracketed
        # of a row; they walk its blocks where rows are many, but for those of a small top-k
        self._programs = blocks if self.ranked else max(1, programs_of(on, collect, rows * blocks) // rows)

    def __call__(
        self,
        stream: int,
        words: int,
        greatest: int,
        parts: int,
        blocks: int,
        logits: tuple[int, ...],
        row_words: int,
    ) -> None:
        """``words``, ``greatest`` and ``parts`` are addresses: of the rows' columns, of the groups' greatest logits,
        and of what is known of so many blocks."""
        device, rows, groups, programs = self._device, self._rows, self._groups, self._programs
        x_at, k, _p, min_p, temperature, stride, n = logits
        if self.bracketed:
            self._find.launch(device, stream, rows, 1, 1, words, parts, *logits, groups, blocks, row_words)
        self._collect.launch(
            device, stream, rows * programs, 1, 1, words, greatest, x_at, k, min_p, temperature, stride, n, groups,
            row_words, programs, int(self.ranked),
        )  # fmt: skip


# ---- the reference ----


def bits_of(mask: Tensor, n: int) -> Tensor:
    """(rows, n) bool from 32 bits a word."""
    shifts = torch.arange(GROUP, device=mask.device, dtype=torch.int32)
    return ((mask[:, :, None] >> shifts) & 1).flatten(1)[:, :n] != 0


def processed(
    logits: Tensor,
    repetition: Tensor | None = None,
    presence: Tensor | None = None,
    frequency: Tensor | None = None,
    prompt_mask: Tensor | None = None,
    output_counts: Tensor | None = None,
    allowed_mask: Tensor | None = None,
    bad_token_ids: Tensor | None = None,
) -> Tensor:
    """The logits that are sampled from, as float32: -inf for what is not allowed, and for NaN; never -0."""
    n = logits.shape[1]
    x = logits.float()
    lowest = torch.full_like(x, -torch.inf)
    x = torch.where(x.isnan(), lowest, x)
    if allowed_mask is not None:
        x = torch.where(bits_of(allowed_mask, n), x, lowest)
    if bad_token_ids is not None and bad_token_ids.shape[1]:
        ids = bad_token_ids.long()
        inside = (ids >= 0) & (ids < n)
        bad = torch.zeros((x.shape[0], n + 1), dtype=torch.bool, device=x.device)
        bad = bad.scatter(1, torch.where(inside, ids, n), True)[:, :n]
        x = torch.where(bad, lowest, x)
    zero = torch.zeros_like(x)
    counts = zero.int() if output_counts is None else output_counts
    seen = counts > 0 if prompt_mask is None else (counts > 0) | bits_of(prompt_mask, n)
    if repetition is not None:
        by = repetition[:, None]
        x = torch.where(seen, torch.where(x > 0, x / by, x * by), x)
    if frequency is not None or presence is not None:
        often = zero if frequency is None else -frequency[:, None] + zero
        once = zero if presence is None else presence[:, None]
        x = torch.where(counts > 0, fma(often, counts.float(), x) - once, x)
    return torch.where(x.isnan(), lowest, x) + 0.0


def kept(
    x: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    temperature: Tensor | None = None,
) -> Tensor:
    """(rows, n) bool: what is kept of rows of float32 without NaN. Rows with temperature 0 keep everything."""
    rows, n = x.shape
    t = torch.ones(rows, device=x.device) if temperature is None else temperature
    warm = (t > 0)[:, None]
    scale = torch.full_like(t, LOG2_E) / torch.where(t > 0, t, torch.ones_like(t))
    scale = scale[:, None]
    greatest = x.amax(1, keepdim=True)
    keep = torch.ones_like(x, dtype=torch.bool)
    if min_p is not None:
        share = min_p.clamp(1e-37, 1.0)[:, None]
        far = torch.where(x == greatest, 0.0, (greatest - x) * scale)
        keep = keep & ((far <= -log2(share.contiguous())) | (min_p <= 0)[:, None])
    lowest = torch.full_like(x, -torch.inf)
    if top_k is not None:
        wanted = top_k.long()
        wanted = torch.where((wanted > 0) & (wanted < n), wanted, n)[:, None]
        ranked = torch.where(keep, x, lowest).sort(1, descending=True).values
        keep = keep & ((x >= ranked.gather(1, wanted - 1)) | (wanted >= n))
    if top_p is not None:
        ranked, order = torch.where(keep, x, lowest).sort(dim=1, descending=True, stable=True)
        mass = torch.where(keep.gather(1, order), masses(ranked, greatest, scale), 0)
        upto = mass.cumsum(1)
        needed = (top_p.double() * upto[:, -1].double()).ceil().long().clamp(min=1)[:, None]
        share = torch.zeros_like(keep).scatter(1, order, upto - mass < needed)
        keep = keep & (share | (top_p >= 1)[:, None])
    return keep | ~warm | (greatest == -torch.inf)


def first_greatest(score: Tensor) -> Tensor:
    """The first column of each row with its greatest value, as int64."""
    columns = torch.arange(score.shape[1], device=score.device)
    return torch.where(score == score.amax(1, keepdim=True), columns, score.shape[1]).amin(1)


def _said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
