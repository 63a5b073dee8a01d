"""Memory through which the programs of a cooperative launch meet and talk, kept from one launch to the next."""

from __future__ import annotations

import torch
from torch import Tensor

PER_THREAD_STREAM = 2  # CUDA's handle of "this thread's default stream", which is another one in each thread
HEAD = 2  # words ahead of those that a launch asks for: the counter of csrc_triton.exchange's barrier


class StreamWords:
    """64-bit words, some a stream: a launch leaves the counter ahead of them as the next one needs it, and launches on
    one stream follow each other. Where they need not, a launch has words of its own: in a graph, which may be replayed
    on any stream, and on the handle that is another stream in each thread."""

    __slots__ = ("_device", "_kept")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[int, Tensor] = {}

    def on(self, stream: int, words: int) -> Tensor:
        """HEAD + ``words`` of them, of which the first HEAD were 0 when they were first used."""
        capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing or stream == PER_THREAD_STREAM:
            return self._zeros(words)
        kept = self._kept.get(stream)
        if kept is None or kept.numel() < HEAD + words:
            kept = self._kept[stream] = self._zeros(words)
        return kept

    def _zeros(self, words: int) -> Tensor:
        return torch.zeros(HEAD + words, dtype=torch.int64, device=self._device)
