"""``storages``: what it knows is whole while several threads ask and note, as warp groups and a pack's waiters do."""

from __future__ import annotations

import sys
import threading

import torch

from tests.harness import storages


def test_threads_note_and_ask_at_once() -> None:
    errors: list[BaseException] = []
    kept = torch.zeros(64)
    storages._note(kept)
    start = kept.untyped_storage().data_ptr()

    def work() -> None:
        try:
            for _ in range(200):
                for x in [torch.empty(n) for n in range(1, 40)]:
                    storages._note(x)
                assert storages.living([start + 8]) == {start: 256}
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors, errors[0]
