"""Words that launches of a stream leave each other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_aot.runtime.workspaces import PER_THREAD_STREAM, StreamWorkspace


def test_a_stream_keeps_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it needs more, or too many other streams have come."""
    words = StreamWorkspace(torch.device("cpu"))
    first = words.on(7, 10)
    assert first.numel() >= 10 and not first.any()
    assert words.on(7, 4) is first and words.on(8, 4) is not first
    more = words.on(7, 100)
    assert more.numel() >= 100 and not more.any() and words.on(7, 10) is more
    monkeypatch.setattr("liger_aot.runtime.remembered.REMEMBERED", 2)
    assert words.on(9, 4) is words.on(9, 4) and words.on(7, 4) is not more


def test_launches_that_need_not_follow_each_other_share_none(monkeypatch: pytest.MonkeyPatch) -> None:
    words = StreamWorkspace(torch.device("cuda", 0))
    for made in ("_zeros", "_lasting"):
        monkeypatch.setattr(StreamWorkspace, made, lambda self, count: torch.zeros(count))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert words.on(PER_THREAD_STREAM, 4) is not words.on(PER_THREAD_STREAM, 4)
    kept = words.on(0, 4)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    captured = words.on(0, 4)
    assert captured is not kept and words.on(0, 4) is not captured


def test_no_words_have_the_number_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    words = StreamWorkspace(torch.device("cpu"))
    first, one = words.with_epoch(7, 4)
    again, two = words.with_epoch(7, 4)
    assert again is first and 0 < one < two
    # It begins again, with words that are zeros.
    monkeypatch.setattr("liger_aot.runtime.workspaces.NUMBERS", 4)
    first.fill_(1)
    numbers = {words.with_epoch(7, 4)[1] for _ in range(2)}
    assert numbers == {3, 1} and not words.on(7, 4).any()


class Streams:
    """torch.cuda's as words ask it: each thread's current stream and device, and what was done, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.local = threading.local()
        self.local.stream, self.local.device = "current", 0
        self.done: list[tuple[Any, ...]] = []
        self.captured: set[int] = set()  # devices
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: self.local.device, raising=False)
        monkeypatch.setattr(
            torch.cuda, "is_current_stream_capturing", lambda: self.local.device in self.captured
        )
        monkeypatch.setattr(torch.cuda, "device", self.device)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Named("other", self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Named(self.local.stream, self))
        monkeypatch.setattr(StreamWorkspace, "_zeros", lambda words, least: self.zeros(least))
        monkeypatch.setattr(
            Tensor, "record_stream", lambda t, stream: self.done.append(("recorded", stream.name))
        )

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.local.device = self.local.device, device.index
        yield
        self.local.device = before

    @contextmanager
    def stream(self, stream: Named) -> Iterator[None]:
        self.local.stream = stream.name
        yield

    def zeros(self, least: int) -> Tensor:
        self.done.append(("zeros", self.local.stream, threading.get_ident()))
        return torch.zeros(least, dtype=torch.int64)


class Named:
    def __init__(self, name: str, streams: Streams) -> None:
        self.name, self._done = name, streams.done

    def wait_stream(self, other: Named) -> None:
        self._done.append(("waits", self.name, other.name))


def test_words_that_stay_come_from_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.compile puts into a CUDA graph is first called with a pool of its own for the thread's memory, or for
    the stream's, which may hold nothing that stays."""
    streams = Streams(monkeypatch)
    words = StreamWorkspace(torch.device("cuda", 0))
    kept = words.on(7, 4)
    (made, stream, thread), *then = streams.done
    assert (made, stream) == ("zeros", "other") and thread != threading.get_ident()
    assert then == [("waits", "current", "other"), ("recorded", "current")]
    assert words.on(7, 4) is kept and len(streams.done) == 3
    streams.captured = {0}
    words.on(7, 4)
    assert streams.done[3:] == [("zeros", "current", threading.get_ident())], "the graph's own: from its pool"


def test_the_stream_of_a_launch_is_asked_whether_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the current device, which may be another."""
    streams = Streams(monkeypatch)
    words = StreamWorkspace(torch.device("cuda", 1))
    kept = words.on(7, 4)
    streams.captured = {1}
    captured = words.on(7, 4)
    assert captured is not kept and words.on(7, 4) is not captured
    streams.captured = {0}
    assert words.on(7, 4) is kept
    assert streams.local.device == 0
