"""Memory through which the programs of a launch meet, count and talk, kept from one launch to the next."""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor

from liger_aot.runtime import REMEMBERED

PER_THREAD_STREAM = 2  # CUDA's handle of "this thread's default stream", which is another one in each thread
HEAD = 2  # words ahead of those that a launch asks for: the counter of csrc_triton.exchange's barrier
AHEAD = 1 << 15  # words for launches in graphs: 256 KiB


class StreamWords:
    """64-bit words, some a stream: a launch leaves the counter ahead of them as the next one needs it, and launches on
    one stream follow each other. Where they need not, a launch has words of its own: in a graph, which may be replayed
    on any stream, and on the handle that is another stream in each thread."""

    __slots__ = ("_ahead", "_device", "_kept", "_lock", "_taken")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[int, Tensor] = {}
        self._ahead: list[Tensor] = []  # the last one has words left; graphs use the others
        self._taken = 0
        self._lock = Lock()

    def on(self, stream: int, words: int) -> Tensor:
        """HEAD + ``words`` of them, of which the first HEAD were 0 when they were first used; all of them, if the
        launches that they are for leave them so."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self._of_graph(HEAD + words)
        if stream == PER_THREAD_STREAM:
            return self._zeros(HEAD + words)
        kept = self._kept.get(stream)
        if kept is None or kept.numel() < HEAD + words:
            if len(self._kept) >= REMEMBERED:
                self._kept.clear()  # of the stream that they are used on, so its launches come before their next use
            kept = self._kept[stream] = self._zeros(HEAD + words)
        return kept

    def prepare(self) -> None:
        """Make zeros for launches in graphs, which else make their own at each replay. Waits for the device."""
        with self._lock:
            if not self._ahead or self._taken > AHEAD // 2:
                self._ahead.append(self._zeros(AHEAD))
                self._taken = 0
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)

    def _of_graph(self, words: int) -> Tensor:
        with self._lock:
            if self._ahead and self._taken + words <= AHEAD:
                self._taken += words
                return self._ahead[-1][self._taken - words : self._taken]
        return self._zeros(words)

    def _zeros(self, words: int) -> Tensor:
        return torch.zeros(words, dtype=torch.int64, device=self._device)
