"""Embedding: rows of a table by index; a deterministic gradient for the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.arguments import ANY, Schema
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.op import Problem, as_rows, check_same_device, check_tensor
from liger_aot.runtime.layout import CPU, rows_of

WORDS = {torch.int32: 1, torch.int64: 2}  # 32-bit words an index
NO_PADDING = -1
ONE_BLOCK = 4096  # keys that torch sorts within one block, whatever their width


class Embedding(DifferentiableOp):
    """``embedding(indices, weight, *, padding_idx=None) -> Tensor``: weight[indices].

    Differentiable in ``weight``; works under torch.compile and, after ``preload``, in CUDA graphs. CPU tensors take the
    plain-torch reference.

    The gradient is dense and deterministic: summed in float32 in the order of the tokens, cut into chunks that do not
    depend on how often a token occurs, and rounded once. Its launches are torch's stable sort of the indices (beside it
    up to three small ones that narrow them and widen them again), and one or two of ours, which read dy and write the
    gradient once.

    Args:
        indices: (...) int32 or int64, of any layout.
        weight: (rows, n) bfloat16, float16 or float32, fewer than 2^31 rows. They may have any stride; a table whose
            rows are not contiguous is copied.
        padding_idx: an index that gives the table no gradient; negative ones count from the end.

    Returns:
        a contiguous tensor (..., n) of weight's dtype. Where an index is outside of the table: on the CPU an error; on
        a GPU, which can't be asked without waiting for it, nothing is read, the row is NaN and gives no gradient.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: weight is no matrix or is elsewhere than indices; padding_idx is outside of the table; on the
            CPU, an index is.
        PackNotFound: no installed pack serves the GPU.

    Source:
        The definition: torch.nn.functional.embedding.
    """

    name = "embedding"
    tensors = ("indices", "weight")
    settings = Schema({"int padding": ANY, "SymInt vocabulary": ANY})

    def __call__(self, indices: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> Tensor:
        sized = isinstance(weight, Tensor) and not weight.is_nested and weight.dim()
        vocabulary = weight.shape[0] if sized else 0
        padding = NO_PADDING
        if padding_idx is not None:
            ANY.checked(self.name, "int padding_idx", padding_idx)
            padding = padding_idx + vocabulary if padding_idx < 0 else padding_idx
            if not 0 <= padding < vocabulary:
                raise ArgumentError(
                    f"embedding: padding_idx must be an index of weight's {vocabulary} rows, got {padding_idx}"
                )
        y: Tensor = self.differentiable((indices, weight), (padding, vocabulary))
        return y

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        indices, weight = tensors
        if not isinstance(indices, Tensor):
            raise ArgumentTypeError(
                f"embedding: indices must be a torch.Tensor, got {type(indices).__name__}"
            )
        if indices.dtype not in WORDS:
            raise ArgumentTypeError(f"embedding: indices must be int32 or int64, got {indices.dtype}")
        check_tensor(self.name, "weight", weight)
        check_same_device(self.name, "weight", weight, "indices", indices)
        if weight.dim() != 2 or weight.shape[0] >= 1 << 31:
            raise ArgumentError(
                f"embedding: weight must be of shape (rows, n) with fewer than 2^31 rows, got {tuple(weight.shape)}"
            )

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        indices, weight = tensors
        table = rows_of(weight)
        on = None if table is None else self._own.find(table[1], table[2])
        if on is None or table is None:
            return self.prepare_forward(tensors, settings, keep, out)
        table_at, kind, index, _, _, vocabulary, n, table_stride = table
        words, tokens = WORDS.get(indices.dtype), indices.numel()
        if (
            words is None
            or not tokens * n
            or vocabulary != settings[1]
            or indices.get_device() != (-1 if kind == CPU else index)
            or weight.dim() != 2
            or not indices.is_contiguous()
        ):
            return self.prepare_forward(tensors, settings, keep, out)
        y = weight.new_empty((*indices.shape, n))
        y_at, dtype = y.data_ptr(), weight.dtype
        key, kernel = (dtype, not (y_at | table_at | table_stride | n) & 15), on.kernels["embedding_forward"]
        loaded = kernel.recent.get((*key, n)) or kernel(key, n)
        steps = -(-tokens // loaded.rows)
        device = on.device
        loaded.launch(
            device, on.stream(device), steps * -(-n // loaded.block), 1, 1,
            y_at, indices.data_ptr(), table_at, n, table_stride, tokens, n, steps, vocabulary, words,
        )  # fmt: skip
        return (y,)

    def prepare_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        self.check(tensors, settings)
        indices, weight = tensors
        if not self.on_reference(tensors):
            ready = indices.contiguous(), as_rows(self.name, "weight", weight)
            return self.run_forward(ready, settings, keep, out)
        if indices.device.type == "cpu" and indices.numel():
            low, high = (int(v) for v in indices.aminmax())
            if low < 0 or high >= weight.shape[0]:
                raise ArgumentError(
                    f"embedding: indices must be in [0, {weight.shape[0]}), the rows of weight; got "
                    f"{low if low < 0 else high}"
                )
        return super().prepare_forward(tensors, settings, keep, out)

    def on_reference(self, tensors: Tensors) -> bool:
        return super().on_reference(tensors) or not all(t.numel() for t in tensors)

    def saved(self, tensors: Tensors, results: Tensors) -> Tensors:
        return tensors[:1]  # not the weight: no value of it is needed

    def run_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        (dy,), (indices,) = grads, saved
        in_dy = rows_of(dy)
        on = None if in_dy is None else self._own.find(in_dy[1], in_dy[2])
        if on is None or in_dy is None or not dy.numel():
            return self.prepare_backward(grads, saved, settings, needed)
        padding, vocabulary = settings
        dy_at, _, _, _, _, tokens, n, dy_stride = in_dy
        keys, order = _sorted(indices.reshape(-1), vocabulary)
        dweight = dy.new_empty((vocabulary, n))
        key = (dy.dtype, not (dy_at | dy_stride | n) & 15)
        first, second = on.kernels["embedding_backward"](key, n), on.kernels["embedding_combine"](key, n)
        chunk = first.numbers["chunk"]
        chunks = -(-tokens // chunk)
        partials = dy.new_empty((chunks, 2, n), dtype=torch.float32)
        places = dweight.data_ptr(), partials.data_ptr()
        device = on.device
        stream = on.stream(device)
        blocks = -(-n // first.block)
        first.launch(
            device, stream, chunks * blocks + -(-vocabulary // first.rows), 1, 1,
            *places, dy_at, keys.data_ptr(), order.data_ptr(), dy_stride, tokens, n, blocks, vocabulary, padding,
        )  # fmt: skip
        if chunks > 1:
            blocks = -(-n // second.block)
            second.launch(
                device, stream, (chunks - 1) * blocks, 1, 1,
                *places, keys.data_ptr(), chunk, chunks, n, blocks, vocabulary, padding,
            )  # fmt: skip
        return None, dweight

    def prepare_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        if not grads[0].numel():  # rows of no columns: what is saved does not show it
            return self.gradients_by_reference(grads, saved, settings)
        return super().prepare_backward(grads, saved, settings, needed)

    @staticmethod
    def reference(indices: Tensor, weight: Tensor, padding: int, vocabulary: int) -> tuple[Tensor]:
        if not vocabulary:
            return (weight.new_full((*indices.shape, weight.shape[1]), torch.nan),)
        known = (indices >= 0) & (indices < vocabulary)
        y = weight.index_select(0, torch.where(known, indices, 0).reshape(-1))
        y = y.view(*indices.shape, weight.shape[1])
        y = torch.where((indices == padding).unsqueeze(-1), y.detach(), y)
        return (torch.where(known.unsqueeze(-1), y, torch.nan),)

    @staticmethod
    def reference_backward(
        grads: Tensors, saved: Tensors, padding: int, vocabulary: int
    ) -> tuple[Tensor | None, ...]:
        (dy,), (indices,) = grads, saved
        wide = torch.promote_types(dy.dtype, torch.float32)
        flat, n = indices.reshape(-1), dy.shape[-1]
        wanted = (flat >= 0) & (flat < vocabulary) & (flat != padding)
        # One row more takes what goes nowhere.
        to = torch.where(wanted, flat, vocabulary).long()
        sums = torch.zeros((vocabulary + 1, n), dtype=wide, device=dy.device)
        sums.index_add_(0, to, dy.reshape(flat.numel(), n).to(wide))
        return None, sums[:vocabulary].to(dy.dtype)

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        """``shape`` and ``dtype`` are those of the result, (..., n): the kernels do not depend on the indices."""
        n = shape[-1]
        steps = ("forward", "backward", "combine")
        return tuple(Problem(f"embedding_{step}", (dtype,), n % 16 == 0, n) for step in steps)


def _sorted(indices: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """(the indices in ascending order as int32, where each was). The sort of many takes a pass for every few bits of a
    key, so they are narrowed first; what is outside of the table stays there."""
    short = vocabulary <= torch.iinfo(torch.int16).max and indices.numel() > ONE_BLOCK
    narrow = torch.int16 if short else torch.int32
    if indices.dtype != narrow:
        indices = indices.clamp(NO_PADDING, vocabulary).to(narrow)
    keys, order = torch.sort(indices, stable=True)
    return keys.to(torch.int32), order


OP = Embedding
