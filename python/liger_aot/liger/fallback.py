"""Where no installed pack serves a GPU, Liger's own functions run, and one warning says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor
from torch.compiler import assume_constant_result, is_compiling

from liger_aot.errors import LeftAlone, PackNotFound
from liger_aot.runtime.devices import gpu
from liger_aot.runtime.packs import pack_for

theirs: dict[str, Any] = {}  # Liger's own, by name, while ours are in their place
unserved: set[int] = set()  # GPUs that were found without a pack


def served(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, or Liger's own of that name for tensors on a GPU that no pack serves."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():  # a launch in a compiled graph has nothing to fall back on
            index = _gpu_of(args)
            if index is not None and name in theirs and not _has_pack(index):
                return _own(name)(*args, **kwargs)
        if unserved and _gpu_of(args) in unserved and name in theirs:
            return _own(name)(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except PackNotFound as error:
            index = _gpu_of(args)
            if index is None or name not in theirs:
                raise
            _remember(index, str(error))
        return _own(name)(*args, **kwargs)

    return call


def _own(name: str) -> Callable[..., Any]:
    own: Callable[..., Any] = getattr(theirs[name], "apply", theirs[name])
    return own


def _gpu_of(args: tuple[Any, ...]) -> int | None:
    """The GPU of the first tensor."""
    return next((t.get_device() for t in args if isinstance(t, Tensor) and t.is_cuda), None)


@assume_constant_result  # type: ignore[untyped-decorator]
def _has_pack(index: int) -> bool:
    """Whether a pack serves the GPU; found, and said where none does, while a graph is traced."""
    try:
        pack_for(gpu(index).device)
    except PackNotFound as error:
        _remember(index, str(error))
        return False
    return True


def _remember(index: int, why: str) -> None:
    if not unserved:
        warnings.warn(
            f"liger_aot.liger: Liger's own functions run on cuda:{index}, and Triton compiles them: {why}",
            LeftAlone,
            stacklevel=4,
        )
    unserved.add(index)
