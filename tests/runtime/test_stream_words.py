"""Words that launches of a stream leave each other."""

from __future__ import annotations

import pytest
import torch

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
    words = StreamWorkspace(torch.device("cuda"))
    monkeypatch.setattr(StreamWorkspace, "_zeros", lambda self, count: torch.zeros(count))
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
