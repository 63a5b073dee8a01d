"""Errors that a kernel finds: it writes to pinned host memory, and the host looks there at the op's next call.

Asking a GPU whether an index was in range would wait for it. A kernel that meets one outside of its range writes it to
its op's word instead, an int64 at an address that stays the same for the life of the process, so that CUDA graphs may
hold it. No index of a range that starts at 0 and is outside of it is 0: that is the empty word. ``LIGER_AOT_DEBUG=1``
waits at the end of every call and raises there.
"""

from __future__ import annotations

import ctypes
import os

import torch

from liger_aot.errors import IndexOutOfRange
from liger_aot.runtime.locks import new_lock

DEBUG = os.environ.get("LIGER_AOT_DEBUG", "0") not in ("", "0")


class _Word:
    """An op's int64 in memory that its kernels can write to."""

    def __init__(self) -> None:
        # Pinned only where there is a GPU: kernels without one are those of the tests' drivers.
        self.memory = torch.zeros(1, dtype=torch.int64, pin_memory=torch.cuda.is_available())
        self.address = self.memory.data_ptr()
        self.cell = ctypes.c_int64.from_address(self.address)


_words: dict[str, _Word] = {}
_lock = new_lock()


def flag(op: str) -> int:
    """The address that the op's kernels write an index out of range to. Its first use allocates: before a CUDA graph is
    captured."""
    word = _words.get(op)
    if word is None:
        with _lock:
            word = _words.get(op) or _words.setdefault(op, _Word())
    return word.address


def raise_if_any(op: str, call: str = "an earlier call") -> None:
    """IndexOutOfRange if a kernel of the op met an index out of range since the last look. Waits for nothing."""
    word = _words.get(op)
    if word is not None and word.cell.value:
        found, word.cell.value = word.cell.value, 0
        hint = "" if DEBUG else "; LIGER_AOT_DEBUG=1 raises in the call itself"
        raise IndexOutOfRange(
            f"{op}: {call} was given {found}, which is out of range and no index to ignore{hint}"
        )


def check_now(op: str, device: torch.device | int) -> None:
    """At the end of a call: with LIGER_AOT_DEBUG=1, wait for the GPU and raise what the call's kernels found."""
    if DEBUG and torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(device)
    if DEBUG:
        raise_if_any(op, "this call")
