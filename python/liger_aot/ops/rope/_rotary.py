"""The host side of rotary embeddings: q and k rotated in one launch, read and written where they lie.

Most of a launch's arguments depend on shapes and strides alone. They are computed once for each combination and
remembered (``_Plan``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError
from liger_aot.ops.arguments import Allowed, check_flag
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.in_place import share_an_element
from liger_aot.ops.op import check_same_device, check_tensor, written
from liger_aot.runtime.dispatch import OpOn
from liger_aot.runtime.grid import programs_of
from liger_aot.runtime.layout import layouts_of, overlap
from liger_aot.runtime.remembered import remember

LAYOUT = Allowed(among=("bhsd", "bshd"))  # batch, heads, sequence, head dimension
K_OVERLAPS = "k overlaps q: they can't be overwritten in place"
OVERLAPS = "overlaps q or k, which are overwritten in place"
MOST = (1 << 31) - (1 << 16)  # rows, and rows of tables: int32 with room for a program's excess


class KernelCall(NamedTuple):
    """What is an op's own in a launch: the kernel and its variant, and the arguments that describe the tables."""

    kernel: str
    axes: tuple[Any, ...]
    n: int  # by which the dispatch table chooses
    # Of the index of a token: from one sequence to the next, from one token to the next.
    steps: tuple[int, int]
    arguments: tuple[int, ...]  # after the index, but for the sign
    in_bytes: tuple[int, ...]  # those of them that count bytes: multiples of 16 for the aligned variant
    all_rotated: bool = False  # no columns are left to copy: known of what has a variant for whole tokens


class _Plan:
    """A launch, but for addresses and the sign."""

    __slots__ = ("aligned", "call", "disjoint", "index", "k", "q", "spans", "tokens", "variants")

    def __init__(
        self, call: KernelCall, placed: Sequence[tuple[int, ...]], heads_fastest: bool, spans: tuple[int, ...]
    ) -> None:
        by_sequence, by_token = call.steps
        self.call = call
        self.q, self.k = q, k = placed  # rows and how they are counted and placed, as the kernels take it
        self.index = (by_sequence, by_token, 0) if heads_fastest else (by_sequence, 0, by_token)
        # How many, where a program may take a whole token: its heads are the fast dimension then.
        self.tokens = q[0] // q[4] if heads_fastest and call.all_rotated and q[4] else 0
        self.aligned = not any(n & 15 for n in (*q[7:], *k[7:], *call.in_bytes))  # all but the addresses
        self.spans = spans  # bytes from the start to the end of q, k and the tables
        self.disjoint: dict[int, bool] = {}  # distances of k from q at which the two do not overlap
        self.variants: list[tuple[Any, int, tuple[int, ...]] | None] = [None, None]  # generic, aligned


class Rotary(DifferentiableOp):
    """Base of the rotary ops: q and k first among the tensors, then the tables, which get no gradient."""

    outputs = 2
    results = 2
    overwrites = ("q", "k")
    contiguous = False
    heads: ClassVar[int | None] = None  # the heads' dimension, for ops that have no layout argument
    last_vector: ClassVar[int] = 1  # the last of the tables that kernels read with vector loads

    # ---- what a subclass defines ----------------------------------------------------------------------------

    def table_key(self, tables: Sequence[Tensor | None]) -> Any:
        """What else a plan depends on of the tables, beside their shapes and strides."""
        return None

    def readable_tables(self, tables: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """The tables, with copies of those whose layout no kernel can read."""
        raise NotImplementedError

    def describe(
        self, q: Tensor, tables: Sequence[Any], settings: tuple[Any, ...], fresh: bool
    ) -> KernelCall:
        """The op's part of a plan, for arguments that passed ``check`` and tables that are readable.

        Args:
            fresh: whether outputs are new, so that columns that are not rotated must be copied.
        """
        raise NotImplementedError

    # ---- what it inherits -----------------------------------------------------------------------------------

    def rotated(
        self,
        q: Tensor,
        k: Tensor | None,
        tables: tuple[Tensor | None, ...],
        settings: tuple[Any, ...],
        inplace: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The public call: ``k`` may be missing."""
        if inplace is not False:
            check_flag(self.name, "inplace", inplace)
        if torch.is_grad_enabled():
            for name, table in zip(self.tensors[2:], tables, strict=True):
                if getattr(table, "requires_grad", False):
                    raise ArgumentError(
                        f"{self.name}: {name} requires a gradient, which is not computed: detach it"
                    )
        if k is not None:
            rotated: tuple[Tensor, Tensor] = self.differentiable(
                (q, k, *tables), settings, (q, k) if inplace else None
            )
            return rotated
        check_tensor(self.name, "q", q)
        self._validated(*settings)
        no_k = self._without_heads(q, settings)
        only, _ = self.differentiable((q, no_k, *tables), settings, (q, no_k) if inplace else None)
        return only, None

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        q, k, *tables = tensors
        on = self._own.bound.get(q.get_device())
        if on is None:
            return self.prepare_forward(tensors, settings, keep, out)
        return self._rotate(on, q, k, tables, settings, 1.0, out)

    def prepare_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        self.check(tensors, settings)
        if self.on_reference(tensors):
            if out is not None:
                _check_writable(self.name, q=tensors[0], k=tensors[1])
                self._check_apart(tensors, settings)
            return super().prepare_forward(tensors, settings, keep, out)
        return self.run_forward(tensors, settings, keep, out)  # the device is bound now

    def saved(self, tensors: Tensors, results: Tensors) -> Tensors:
        return tensors[2:]

    def run_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        dq, dk = (dy if need else None for dy, need in zip(grads, needed, strict=False))
        first = dk if dq is None else dq
        if first is None:
            return (None,) * len(needed)
        on = self._own.bound.get(first.get_device())
        if on is None:
            return self.prepare_backward(grads, saved, settings, needed)
        q, k = (self._without_heads(first, settings) if dy is None else dy for dy in (dq, dk))
        rotated = self._rotate(on, q, k, saved, settings, -1.0, None)
        back = (None if dy is None else dx for dy, dx in zip((dq, dk), rotated, strict=True))
        return *back, *(None,) * (len(needed) - 2)

    def _rotate(
        self,
        on: OpOn,
        q: Tensor,
        k: Tensor,
        tables: Sequence[Tensor | None],
        settings: tuple[Any, ...],
        sign: float,
        out: Sequence[Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        layouts, q_at, k_at, *at = layouts_of((q, k, *tables))
        key = (layouts, settings, out is None, self.table_key(tables))
        plan: _Plan | None = on.plans.get(key)
        if plan is None:
            return self._prepare(on, key, q, k, tables, settings, sign, out)
        if out is None:
            q_out, k_out = torch.empty_like(q), torch.empty_like(k)
            q_out_at, k_out_at = q_out.data_ptr(), k_out.data_ptr()
        else:
            self._check_disjoint(plan, q, k, (q_at, k_at, *at), settings)
            (q_out, k_out), q_out_at, k_out_at = out, q_at, k_at
        aligned = plan.aligned and not (q_at | k_at | q_out_at | k_out_at | at[0] | at[self.last_vector]) & 15
        launch, programs, arguments = plan.variants[aligned] or self._variant(on, plan, aligned)
        launch(
            on.device, on.stream(on.device), programs, 1, 1, q_out_at, k_out_at, q_at, k_at, *at, *arguments, sign
        )  # fmt: skip
        if out is not None:
            written(q, k)
        return q_out, k_out

    def _prepare(
        self,
        on: OpOn,
        key: tuple[Any, ...],
        q: Tensor,
        k: Tensor,
        tables: Sequence[Tensor | None],
        settings: tuple[Any, ...],
        sign: float,
        out: Sequence[Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        """``_rotate`` for new shapes or strides: after all checks, with copies of what no kernel can read."""
        self.check((q, k, *tables), settings)
        if out is not None:
            _check_writable(self.name, q=q, k=k)
        in_rows = readable(q), readable(k), *self.readable_tables(tables)
        if any(a is not b for a, b in zip(in_rows, (q, k, *tables), strict=True)):
            q, k, *tables = in_rows  # type: ignore[assignment]
            return self._rotate(on, q, k, tables, settings, sign, out)
        remember(on.plans, key, self._plan(q, k, tables, settings, out is None))
        return self._rotate(on, q, k, tables, settings, sign, out)

    def _plan(
        self, q: Tensor, k: Tensor, tables: Sequence[Tensor | None], settings: tuple[Any, ...], fresh: bool
    ) -> _Plan:
        call = self.describe(q, tables, settings, fresh)
        heads = self._heads(settings)
        first = q if q.numel() else k
        heads_fastest = first.stride(heads) <= first.stride(3 - heads)
        inner = (3 - heads, heads) if heads_fastest else (heads, 3 - heads)
        placed: list[tuple[int, ...]] = []
        for x in (q, k):
            rows = x.shape[0] * x.shape[1] * x.shape[2]
            if rows > MOST:
                raise ArgumentError(f"{self.name}: {rows} heads of tokens: at most {MOST} go in one call")
            counted = (number for d in inner for number in (x.shape[d], *_inverse(x.shape[d])))
            strides = (
                t.stride(d) * t.element_size() if t.shape[d] > 1 else 0
                for t in (torch.empty_like(x) if fresh else x, x)
                for d in (0, *inner)
            )
            placed.append((rows, *counted, *strides))
        return _Plan(call, placed, heads_fastest, tuple(_span(t) for t in (q, k, *tables)))

    def _variant(self, on: OpOn, plan: _Plan, aligned: bool) -> tuple[Any, int, tuple[int, ...]]:
        """The binary for a plan, how many programs it takes and its arguments after the addresses."""
        call = plan.call
        kernel, key = on.kernels[call.kernel], (*call.axes, aligned)
        loaded = kernel.for_rows(key, call.n, plan.tokens) if plan.tokens else kernel(key, call.n)
        by_token = "fewest_heads" in loaded.numbers
        if by_token and plan.q[4] < loaded.numbers["fewest_heads"]:
            loaded, by_token = kernel(key, call.n), False
        q_programs, k_programs = (-(-placed[0] // loaded.rows) for placed in (plan.q, plan.k))
        arguments = (*plan.q, *plan.k, q_programs, *plan.index, *call.arguments)
        programs = programs_of(on, loaded, plan.tokens) if by_token else q_programs + k_programs
        found = plan.variants[aligned] = (loaded.launch, programs, arguments)
        return found

    def _heads(self, settings: tuple[Any, ...]) -> int:
        """The dimension of the heads; that of the sequence is the other of 1 and 2."""
        return self.heads or (1 if settings[-1] == "bhsd" else 2)

    def _without_heads(self, like: Tensor, settings: tuple[Any, ...]) -> Tensor:
        """An empty tensor for an argument that is missing."""
        shape = list(like.shape)
        if len(shape) == 4:
            shape[self._heads(settings)] = 0
        return like.new_empty(shape)

    def check_q_and_k(self, q: Any, k: Any, settings: tuple[Any, ...]) -> tuple[int, int, int]:
        """(batch, sequence, head dimension), once q and k are known to fit each other."""
        heads = self._heads(settings)
        names = ("batch", "heads", "sequence") if heads == 1 else ("batch", "sequence", "heads")
        check_tensor(self.name, "q", q)
        check_tensor(self.name, "k", k)
        for name, x in (("q", q), ("k", k)):
            if x.dim() != 4:
                wanted = ", ".join((*names, "head dimension"))
                raise ArgumentError(f"{self.name}: {name} must be ({wanted}), got {tuple(x.shape)}")
        check_same_device(self.name, "k", k, "q", q)
        n = q.shape[3]
        same = all(q.shape[d] == k.shape[d] for d in (0, 3 - heads, 3))
        if not same or q.dtype != k.dtype:
            raise ArgumentError(
                f"{self.name}: k must be as q but for the number of heads: {tuple(q.shape)}, {q.dtype}; got "
                f"{tuple(k.shape)}, {k.dtype}"
            )
        if n == 0 or n % 2:
            raise ArgumentError(f"{self.name}: the head dimension, q's last, must be even, got {n}")
        return q.shape[0], q.shape[3 - heads], n

    def check_cos_and_sin(self, q: Tensor, cos: Any, sin: Any) -> None:
        """Types and devices, and that the two are alike."""
        for name, table in (("cos", cos), ("sin", sin)):
            check_tensor(self.name, name, table)
            check_same_device(self.name, name, table, "q", q)
            if table.dtype not in (q.dtype, torch.float32):
                raise ArgumentError(
                    f"{self.name}: {name} must be of q's dtype {q.dtype} or float32, got {table.dtype}"
                )
        if sin.shape != cos.shape or sin.dtype != cos.dtype:
            raise ArgumentError(
                f"{self.name}: sin must be of cos's shape {tuple(cos.shape)} and dtype {cos.dtype}; got "
                f"{tuple(sin.shape)}, {sin.dtype}"
            )

    def _check_apart(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        """``_check_disjoint`` without a plan: of the reference."""
        q, k, *tables = tensors
        if share_an_element(q, k) and _may_overlap(q, k, self._heads(settings)):
            raise ArgumentError(f"{self.name}: {K_OVERLAPS}")
        for name, t in zip(self.tensors[2:], tables, strict=True):
            if t is not None and (share_an_element(q, t) or share_an_element(k, t)):
                raise ArgumentError(f"{self.name}: {name.rstrip('?')} {OVERLAPS}")

    def _check_disjoint(
        self, plan: _Plan, q: Tensor, k: Tensor, at: tuple[int, ...], settings: tuple[Any, ...]
    ) -> None:
        """ArgumentError where memory that is overwritten in place is also read for something else in the same call."""
        q_end, k_end, distance = at[0] + plan.spans[0], at[1] + plan.spans[1], at[1] - at[0]
        if distance not in plan.disjoint:
            if at[1] < q_end and at[0] < k_end and _may_overlap(q, k, self._heads(settings)):
                raise ArgumentError(f"{self.name}: {K_OVERLAPS}")
            remember(plan.disjoint, distance, True)
        for name, start, span in zip(self.tensors[2:], at[2:], plan.spans[2:], strict=True):
            end = start + span
            if (start < q_end and at[0] < end) or (start < k_end and at[1] < end):
                raise ArgumentError(f"{self.name}: {name.rstrip('?')} {OVERLAPS}")


def readable(x: Tensor) -> Tensor:
    """``x``, or a contiguous copy where the last dimension of x, or of a result of its layout, is not contiguous."""
    if not x.numel() or (x.stride(-1) == 1 and torch.empty_like(x, device="meta").stride(-1) == 1):
        return x
    return x.contiguous()


def readable_pair(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The tables, or contiguous copies unless both have the same number of rows from one sequence to the next."""
    reached = [table_rows(t) for t in (cos, sin) if t.stride(-1) == 1 or t.shape[-1] == 1]
    if len(reached) == 2:
        (by_sequence, _), (same, _) = (r or (-1, 0) for r in reached)
        if by_sequence == same and 0 <= by_sequence * cos.shape[0] <= MOST:
            return cos, sin
    return cos.contiguous(), sin.contiguous()


def table_rows(table: Tensor) -> tuple[int, int] | None:
    """(rows from one sequence to the next, elements from one row to the next) of a table (sequence, columns) or
    (batch, sequence, columns); None where no two such numbers reach all rows."""
    if table.dim() == 2:
        return 0, table.stride(0)
    by_sequence, by_token = table.stride(0), table.stride(1)
    if table.shape[0] <= 1:
        return 0, by_token
    if table.shape[1] <= 1:
        return 1, by_sequence
    if by_token == 0:
        return (0, 0) if by_sequence == 0 else None
    return None if by_sequence % by_token else (by_sequence // by_token, by_token)


def rotate_in_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The reference of all rotary ops: ``x`` (..., D), its first 2r columns rotated by ``cos`` and ``sin`` (..., r),
    in float32 or, for float64, in float64."""
    x = readable(x)
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin, half = cos.to(wide), sin.to(wide), cos.shape[-1]
    y = torch.empty_like(x)
    y[..., 2 * half :] = x[..., 2 * half :]
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    a, b = x[..., first].to(wide), x[..., second].to(wide)
    y[..., first] = (a * cos - b * sin).to(x.dtype)
    y[..., second] = (b * cos + a * sin).to(x.dtype)
    return y


def _inverse(divisor: int) -> tuple[int, int]:
    """(multiplier, shift) that divide numbers below 2^31: n // divisor == n * multiplier >> shift."""
    shift = 31 + max(divisor - 1, 0).bit_length()
    return -(-(1 << shift) // max(divisor, 1)), shift


def _span(x: Tensor | None) -> int:
    """Bytes from a tensor's start to its end."""
    if x is None or not x.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


def _check_writable(op: str, **tensors: Tensor) -> None:
    """ArgumentError unless each tensor's last dimension is contiguous and no two elements share memory."""
    for name, x in tensors.items():
        if not x.numel():
            continue
        dims = sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1)
        end = 0
        for stride, size in dims:
            if stride <= end:
                raise ArgumentError(
                    f"{op}: {name} has strides {x.stride()}: elements share memory, which can't be overwritten"
                )
            end += (size - 1) * stride
        if readable(x) is not x:
            raise ArgumentError(
                f"{op}: {name} has strides {x.stride()}: in place its last dimension must be contiguous"
            )


def _may_overlap(q: Tensor, k: Tensor, heads: int) -> bool:
    """Whether q and k, whose address ranges overlap, may share an element. They do not if they are columns side by
    side, as of one packed projection."""
    if q.data_ptr() == k.data_ptr():
        return True
    columns = []
    for x in (q, k):
        if x.shape[heads] > 1 and x.stride(heads) != x.shape[3]:
            return True
        columns.append(x.movedim(heads, 2).flatten(2))
    return overlap(*columns)
