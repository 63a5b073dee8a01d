"""How decoding is launched where one kernel shares the keys and weighs the shares, and which calls that is
(``csrc_triton/decoding/decoding_once.py``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_aot.ops.attention._operands import TensorMapCache
from liger_aot.ops.decoding import _decoding as decoding
from liger_aot.ops.decoding._decoding import MOST_SPLITS, STREAMED, Call, Plan, Settings, at, signed
from liger_aot.runtime import device_errors
from liger_aot.runtime.dispatch import Loaded, OpOn
from liger_aot.runtime.workspaces import StreamWords

MOST_SEQUENCES = (1 << 16) - 1  # what the last dimension of a grid has
DIVIDED = 1 << 32  # up to where the kernel multiplies instead of dividing
MOST_ELEMENTS = 1 << 31  # of a sequence's shares: their distances are 32-bit numbers


def plan_for(
    on: OpOn,
    q: Tensor,
    k: Tensor,
    block_table: Tensor | None,
    settings: Settings,
    addresses_aligned: bool,
) -> Plan | OncePlan:
    """The plan of all calls with tensors like these."""
    call = Call(q, k, block_table, settings, addresses_aligned)
    stream = decoding.stream_for(on, q.dtype, call)
    plan = OncePlan.of(on, call, q, k) if stream is None else None
    return plan or Plan(on, call, q, k, stream)


class OncePlan:
    """All calls with tensors like these, in one launch."""

    @classmethod
    def of(cls, on: OpOn, call: Call, q: Tensor, k: Tensor) -> OncePlan | None:
        """None where there is no kernel that can do the call."""
        shape = call.shape
        kernel = on.kernels.get(f"flash_decoding_once{'_paged' if call.paged else ''}")
        if kernel is None or not call.aligned or shape.dim > STREAMED or not call.mapped(on):
            return None
        loaded = kernel((q.dtype, True), shape.dim)
        numbers = loaded.numbers
        if not (0 < call.rows <= numbers["block_m"] and 0 < shape.batch <= MOST_SEQUENCES):
            return None
        programs = shape.batch * shape.kv_heads
        # A program of a contiguous cache keeps a multiprocessor busy, and 96 of 132 multiprocessors the memory (12 x
        # 16384 keys: 1.045 of a copy; in three waves 0.968): one wave, where it is one.
        one_wave = not call.paged and programs <= on.multiprocessors
        each = call.shares(
            on, numbers, shape.kv_heads, on.multiprocessors // programs if one_wave else MOST_SPLITS
        )
        if call.paged and each == 1 and not call.settings.splits:
            return None  # split_paged reads pages of 16 keys faster, and of 64 as fast (NVIDIA H200)
        blocks = max(call.blocks(numbers["block_n"]), 1)
        elements = each * shape.kv_heads * numbers["block_m"] * numbers["d"]
        if each * each * blocks >= DIVIDED or elements >= MOST_ELEMENTS:
            return None
        return cls(on, loaded, call, q, k, each)

    def __init__(self, on: OpOn, loaded: Loaded, call: Call, q: Tensor, k: Tensor, each: int) -> None:
        shape, width = call.shape, call.shape.kv_heads
        self._on, self._loaded = on, loaded
        self._grid = width, each, shape.batch
        self._flag = device_errors.flag("flash_decoding")
        encode: Any = on.tensor_map
        self._k_map, self._v_map = (TensorMapCache(encode, loaded, name, k, "bshd").at for name in "KV")
        by_each = signed((1 << 32) // each + 1) if each > 1 else 0
        self._numbers = (
            *call.strides[:3], call.table_row, *call.asked, shape.capacity, shape.pages,
            shape.page_size.bit_length() - 1, each, by_each, call.left, call.right,
        )  # fmt: skip
        self._shape, self._lse_shape = q.shape, call.lse_shape
        rows, columns = loaded.numbers["block_m"], loaded.numbers["d"]
        lines = width * each * shape.batch * rows if each > 1 else 0
        self._parts, self._part_sums = lines * (columns + 1), 4 * lines * columns
        self._words = (width * shape.batch + 1) // 2  # two a 64-bit word
        self._counts = counts_of(on, q.device)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache_seqlens: Tensor | None,
        block_table: Tensor | None,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        on = self._on
        o, lse = q.new_empty(self._shape), q.new_empty(self._lse_shape, dtype=torch.float32)
        device, stream = on.device, on.stream(on.device)
        parts = counts = None
        if self._parts:
            parts = q.new_empty(self._parts, dtype=torch.float32)
            counts = self._counts.on(stream, self._words)
        self._loaded.launch(
            device, stream, *self._grid, self._k_map(k.data_ptr()), self._v_map(v.data_ptr()), o.data_ptr(),
            lse.data_ptr(), at(parts), at(parts) + self._part_sums, self._flag, at(counts), q.data_ptr(),
            at(block_table), at(cache_seqlens), at(sinks), *self._numbers,
        )  # fmt: skip
        return o, lse


def counts_of(on: OpOn, device: torch.device) -> StreamWords:
    """Where programs count who has ended: zeros, which launches leave as zeros."""
    counts: StreamWords = on.plans.setdefault("counts", StreamWords(device))
    return counts
