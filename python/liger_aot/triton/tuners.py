"""Autotuned kernels: what won where it was recorded is what a tuner finds it has tried already.

``Autotuner.run`` keeps winners in ``self.cache`` by its own key and tunes for keys that are not there. With a pack in
use that dictionary is one of ours, filled with the pack's winners; asked for a key that it lacks, it decides.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from math import log2
from threading import RLock
from typing import Any
from weakref import WeakSet

from liger_aot.errors import KernelNotInPack
from liger_aot.triton.seams import unwrapped
from liger_aot.triton.values import NotData, decode

_UNLIKE = 1e6  # how far two values of a key are from each other that are no numbers


class Winners(dict[Any, Any]):
    """A tuner's cache. A key that it lacks is looked up nearby, refused, or left to the tuner, by ``missing``."""

    def __init__(
        self, tuner: Any, tuned: Mapping[Any, Any], missing: str, left_out: Sequence[str] = ()
    ) -> None:
        super().__init__(tuner.cache)
        self.plain = tuner.cache  # what the tuner had before, and gets back
        self._name = f"{unwrapped(tuner).fn.__module__}:{unwrapped(tuner).fn.__qualname__}"
        self._keys = list(tuner.keys)
        self._tuned, self._missing, self._left_out = tuned, missing, left_out
        for key, config in tuned.items():
            self.setdefault(key, config)

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key):
            return True
        if self._missing == "compile":
            return False
        near = nearest(key, self._tuned)
        what = f"{self._name}: no pack has the choice of @triton.autotune for {self._keys} = {key}"
        if self._missing == "error":
            none = "; ".join(self._left_out) or "it has choices for none"
            tail = none if near is None else f"the nearest that it has is for {near}"
            raise KernelNotInPack(
                f"{what}; {tail}. Record this size too, or take the nearest choice with "
                'LIGER_AOT_TRITON=warn, or missing="warn"'
            )
        if near is None:
            warnings.warn(f"{what}, nor for any other: it is tuned now", RuntimeWarning, stacklevel=4)
            return False
        config = self._tuned[near]
        warnings.warn(f"{what}: it runs with that for {near}, {config}", RuntimeWarning, stacklevel=4)
        self[key] = config
        return True


def nearest(key: Any, tuned: Mapping[Any, Any]) -> Any:
    """The key of ``tuned`` that is nearest: numbers by their ratio, all else equal or not; None where none is alike."""
    alike = [other for other in tuned if len(other) == len(key)]
    return min(alike, key=lambda other: sum(map(_distance, key, other)), default=None)


def _distance(a: Any, b: Any) -> float:
    if a == b and type(a) is type(b):
        return 0.0
    numbers = all(
        isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 for value in (a, b)
    )
    return abs(log2(a) - log2(b)) if numbers else _UNLIKE


class Tuners:
    """Fills tuners from packs, each before its first call.

    Args:
        functions: the parts of packs that may hold a function's tuners, by "<module>:<qualified name>".
        missing: "error", "warn" or "compile".
        left_out: why packs that were to have a function of that name do not, in words.
    """

    def __init__(
        self, functions: Callable[[str], list[Any]], missing: str, left_out: Callable[[str], list[str]]
    ) -> None:
        self._functions, self.missing, self._left_out = functions, missing, left_out
        self._filled: WeakSet[Any] = WeakSet()  # a program may make one at each call
        self._lock = RLock()

    def fill(self, tuner: Any) -> None:
        """Give a tuner the packs' winners. One whose function is in no pack is left to ``missing`` as well."""
        with self._lock:
            if isinstance(tuner.cache, Winners):
                return
            fn = unwrapped(tuner)
            name = f"{fn.fn.__module__}:{fn.fn.__qualname__}"
            tuned: dict[Any, Any] = {}
            for function in self._functions(name):
                for recorded in function.tuners:
                    if list(recorded["keys"]) == list(tuner.keys):
                        for winner in recorded["winners"]:
                            _add(tuned, tuner, winner)
            tuner.cache = Winners(tuner, tuned, self.missing, self._left_out(name))
            self._filled.add(tuner)

    def empty(self) -> None:
        """Give all tuners back what they had."""
        with self._lock:
            for tuner in self._filled:
                tuner.cache = tuner.cache.plain
            self._filled.clear()


def _add(tuned: dict[Any, Any], tuner: Any, winner: Mapping[str, Any]) -> None:
    try:
        key = tuple(decode(value) for value in winner["key"])
    except NotData:
        return  # such as a function: the tuner will ask for a key that is not there
    config = _config(tuner, winner)
    if config is not None:
        tuned.setdefault(key, config)


def _config(tuner: Any, winner: Mapping[str, Any]) -> Any:
    """The tuner's own configuration where it is among them, with its hook; else one like it, where that can be."""
    for config in tuner.configs:
        if str(config) == winner["text"]:
            return config
    if any(config.pre_hook is not None for config in tuner.configs):
        return None  # which of the hooks, nobody knows
    from triton import Config

    said = winner["config"]
    try:
        kwargs = {str(name): decode(value) for name, value in said.get("kwargs", {}).items()}
        numbers = {name: value for name, value in said.items() if name != "kwargs" and value is not None}
        return Config(kwargs, **numbers)
    except (NotData, TypeError, AttributeError):
        return None
