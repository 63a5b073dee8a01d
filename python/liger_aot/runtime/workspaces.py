"""Memory that one launch leaves for the next: counters, and words through which programs of a launch talk."""

from __future__ import annotations

from itertools import count

import torch
from torch import Tensor

from liger_aot.runtime.locks import new_lock
from liger_aot.runtime.remembered import remember

NUMBERS = 1 << 31
PER_THREAD_STREAM = 2  # CUDA's handle of "this thread's default stream", which is another one in each thread
GRAPH_WORDS = 1 << 15  # words for launches in graphs: 256 KiB


class StreamWorkspace:
    """64-bit words, some a stream, that are 0 before their first use: a launch leaves them as the next one needs them,
    and launches on one stream follow each other. Where they need not, a launch has words of its own: in a graph, which
    may be replayed on any stream, and on the handle that is another stream in each thread."""

    __slots__ = ("_by_stream", "_device", "_graph_words", "_launches", "_lock", "_taken")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_stream: dict[int, Tensor] = {}
        self._launches = count(1)
        self._graph_words: list[Tensor] = []  # the last one has words left; graphs use the others
        self._taken = 0
        self._lock = new_lock()

    def with_epoch(self, stream: int, least: int) -> tuple[Tensor, int]:
        """At least so many of them, and a number for the launch, from 1 to 2^31 - 1, that is in none of them."""
        number = next(self._launches) % NUMBERS
        if not number:
            self._by_stream.clear()
            number = next(self._launches) % NUMBERS
        if self._in_graph():  # each replay has the number again: zeros before each
            return self._zeros(least), number
        return self.on(stream, least), number

    def on(self, stream: int, least: int) -> Tensor:
        """At least so many of them."""
        if self._in_graph():
            return self._of_graph(least)
        if stream == PER_THREAD_STREAM:
            return self._zeros(least)
        kept = self._by_stream.get(stream)
        if kept is None or kept.numel() < least:
            # Streams come and go. Memory that is given up is its stream's: launches on it come before its next use.
            kept = remember(self._by_stream, stream, self._zeros(least))
        return kept

    def prepare(self) -> None:
        """Make zeros for launches in graphs, which else make their own at each replay. Waits for the device."""
        with self._lock:
            if not self._graph_words or self._taken > GRAPH_WORDS // 2:
                self._graph_words.append(self._zeros(GRAPH_WORDS))
                self._taken = 0
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)

    def _in_graph(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _of_graph(self, least: int) -> Tensor:
        with self._lock:
            if self._graph_words and self._taken + least <= GRAPH_WORDS:
                self._taken += least
                return self._graph_words[-1][self._taken - least : self._taken]
        return self._zeros(least)

    def _zeros(self, least: int) -> Tensor:
        return torch.zeros(least, dtype=torch.int64, device=self._device)
