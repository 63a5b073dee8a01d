"""The storages of CPU tensors whose addresses host code took: what a driver without a GPU may touch.

An op gets a tensor's address from ``data_ptr()``, ``rows_of`` or ``layouts_of``; they note the tensor's storage here.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from liger_aot.runtime import device_errors, layout

_noted: dict[int, tuple[StorageWeakRef, int]] = {}  # by address; and the size in bytes
_lock = threading.RLock()  # around _noted: warp groups are threads, and a collection may call data_ptr
_data_ptr, _rows_of, _layouts_of = Tensor.data_ptr, layout.rows_of, layout.layouts_of


def watch() -> None:
    """Note storages from now on, in all ops that are imported, and the words whose addresses ops hold already."""
    for word in device_errors._words.values():
        _note(word.memory)
    Tensor.data_ptr = _noting_data_ptr  # type: ignore[method-assign]
    for name, module in list(sys.modules.items()):
        if name.startswith("liger_aot."):
            if getattr(module, "rows_of", None) is _rows_of:
                module.rows_of = _noting_rows_of  # type: ignore[attr-defined]
            if getattr(module, "layouts_of", None) is _layouts_of:
                module.layouts_of = _noting_layouts_of  # type: ignore[attr-defined]


def living(addresses: Iterable[int]) -> dict[int, int]:
    """Address -> bytes of the noted storages that hold ``addresses`` and still are."""
    wanted = set(addresses)
    with _lock:
        for start in [start for start, (storage, _) in _noted.items() if storage.expired()]:
            del _noted[start]
        return {
            start: size
            for start, (_, size) in _noted.items()
            if any(start <= a < start + size for a in wanted)
        }


def _note(x: Any) -> None:
    if type(x) not in (Tensor, torch.nn.Parameter):
        return
    storage = x.untyped_storage()
    if storage.device.type == "cpu":  # of the tensor a recording on a machine without a GPU says otherwise
        with _lock:
            _noted[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()


def _noting_data_ptr(x: Tensor) -> int:
    address = _data_ptr(x)
    _note(x)
    return address


def _noting_rows_of(x: Tensor) -> layout.Rows | None:
    rows = _rows_of(x)
    if rows is not None:
        _note(x)
    return rows


def _noting_layouts_of(tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    for x in tensors:
        _note(x)
    return _layouts_of(tensors)
