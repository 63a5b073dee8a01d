"""What was worked out for earlier calls, so that a call like one of them looks it up."""

from __future__ import annotations

from typing import Any, TypeVar

REMEMBERED = 1024  # entries of a dict: no program's shapes, addresses or streams may fill the memory
_Value = TypeVar("_Value")


def remember(known: dict[Any, Any], key: Any, value: _Value) -> _Value:
    """``value``, which ``known`` has under ``key`` from now on. A full dict is emptied first: what is still in use
    comes back with its next call, and a lookup, which every call makes, is that of a plain dict."""
    if len(known) >= REMEMBERED:
        known.clear()
    known[key] = value
    return value
