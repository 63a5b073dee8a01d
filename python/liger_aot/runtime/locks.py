"""Locks that are free in a forked process, whatever thread of its parent held them: that thread is not there."""

from __future__ import annotations

import os
from threading import Lock
from weakref import WeakSet

_locks: WeakSet[Lock] = WeakSet()


def new_lock() -> Lock:
    """A lock for what may be under way in one thread while another forks the process, such as a DataLoader."""
    lock = Lock()
    _locks.add(lock)
    return lock


def _free_all() -> None:
    for lock in _locks:
        lock._at_fork_reinit()  # type: ignore[attr-defined]  # as logging's and threading's own locks


os.register_at_fork(after_in_child=_free_all)
