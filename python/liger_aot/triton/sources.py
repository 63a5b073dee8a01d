"""Whether a function is the one that a pack's binaries were made of, told without parsing its source.

Triton tells by ``JITFunction.cache_key``: it parses the source, and looks up each name that it reads, through all
functions that it calls. That takes milliseconds. All that its answer depends on is the text and what the names stand
for; so a build writes both down (``liger_aot_build.triton_packs.sources``), and here the text's hash and the same names
are compared with what was written. Where both are the same, Triton's answer is: the text has one syntax tree, and that
looks up the same names and finds the same. Nothing of Triton's is changed by this: asked itself, it hashes by itself.

docs/triton-pack-format.md says how names' meanings are written.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from hashlib import sha256
from types import ModuleType
from typing import Any, NamedTuple

from liger_aot.triton.closures import Unclear, closure, data, in_words, is_builtin, is_function, key
from liger_aot.triton.values import plain

ABSENT, NONE, DATA = "absent", "none", "data"
VALUE, TYPE, FUNCTION = "=", "type:", "function"
# Classes whose hash is Triton's own.
KINDS = (
    "triton.runtime.jit.JITFunction",
    "triton.runtime.jit.ConstexprFunction",
    "triton.experimental.gluon._runtime.GluonJITFunction",
)
_absent = object()

Source = Mapping[str, Any]  # a function in a pack: text, line, kind, noinline, names
# Globals that a launch compares: name, the module's dictionary, value.
Kept = list[tuple[str, dict[str, Any], Any]]


class Same(NamedTuple):
    """A function is the one that a pack has under ``cache_key``."""

    cache_key: str
    kept: Kept  # empty where Triton has hashed the function: it compares them itself


class Changed(NamedTuple):
    """A function is another than the pack's."""

    why: str
    near: bool  # its own text is the pack's


def text(fn: Any) -> str:
    """The sha256 of a function's source, as Triton has it: without decorators."""
    return sha256(fn.src.encode()).hexdigest()


def kind(fn: Any) -> str:
    """A function's class: kernels, those of Gluon, those that run while a kernel is compiled."""
    return f"{type(fn).__module__}.{type(fn).__qualname__}"


def look_up(
    path: str, found: Mapping[str, Any], outside: Mapping[str, Any], inside: Mapping[str, Any]
) -> Any:
    """What a name, or an attribute of what is in ``found``, stands for; ``_absent`` where it is not there. A name that
    both a module and a function around it have is unclear, unless it is the same: versions of Triton differ in which
    they take."""
    before, _, last = path.rpartition(".")
    if before:
        return getattr(found[before], last, _absent)
    if last in outside and last in inside and outside[last] is not inside[last]:
        raise Unclear(f"{last} is a global and a variable of a function around it")
    return outside.get(last, inside.get(last, _absent))


def meaning(value: Any) -> str:
    """What a name stands for, as text: the same only where Triton's hash and compiler see the same.

    Raises:
        Unclear: it can't be told by a text.
    """
    if value is _absent:
        return ABSENT
    if value is None:
        return NONE
    if type(value) is ModuleType:
        return f"module:{value.__name__}"
    if getattr(value, "__triton_aggregate__", False):
        raise Unclear(f"an aggregate, {value!r:.80}")
    module = getattr(value, "__module__", "")
    if is_builtin(value):
        return f"builtin:{module}.{getattr(value, '__qualname__', '')}"
    if isinstance(value, type):
        return f"{TYPE}{module}.{value.__qualname__}"
    if is_function(value):
        if kind(value) not in KINDS:
            raise Unclear(f"a {kind(value)}")
        return FUNCTION
    return VALUE + json.dumps(data(value, _enumeration), separators=(",", ":"))


def is_data(said: str) -> bool:
    """What a launch compares where it is a global: a value, or a class."""
    return said.startswith((VALUE, TYPE))


def _enumeration(value: Any) -> Any:
    of = type(value)
    if isinstance(value, enum.Enum) and not hasattr(value, "__call__"):  # noqa: B004
        return {"enum": [f"{of.__module__}:{of.__qualname__}", value.name, data(value.value, _enumeration)]}
    raise Unclear(in_words(value))


def told(fn: Any, function: Any) -> Same | Changed:
    """Which of a pack's function's keys ``fn`` has (a ``packs.Function``), or how it differs from it. Where the pack
    can't tell, Triton's hash is asked."""
    changes: list[Changed] = []
    for of, place in function.source_of.items():
        if place is not None:
            result = compare(fn, function.sources, place)
            if not isinstance(result, Changed):
                return Same(of, result)
            changes.append(result)
    for of, place in function.source_of.items():
        if place is None and key(fn) == of:
            return Same(of, [])
    if not changes:
        return Changed(
            "its own source, that of a function that it calls, or a global that it reads (hash "
            f"{key(fn)[:16]}, the pack has {', '.join(of[:16] for of in function.cache_keys[:3])})",
            False,
        )
    return next((change for change in changes if change.near), changes[0])


def compare(fn: Any, sources: Sequence[Source], index: int) -> Changed | Kept:
    """How ``fn`` differs from the pack's function ``index``, or the globals that it reads.

    Args:
        sources: of the pack; those that a function calls are named by their place in it.
    """
    kept: dict[tuple[str, int], tuple[str, dict[str, Any], Any]] = {}
    changed = _compare(fn, sources, index, kept, set(), fn)
    return list(kept.values()) if changed is None else changed


def _compare(
    fn: Any,
    sources: Sequence[Source],
    index: int,
    kept: dict[tuple[str, int], tuple[str, dict[str, Any], Any]],
    seen: set[tuple[int, int]],
    top: Any,
) -> Changed | None:
    if (index, id(fn)) in seen:
        return None
    seen.add((index, id(fn)))
    source = sources[index]
    whose = "its own source" if fn is top else f"the source of {fn.__name__}, which it calls"
    if (kind(fn), str(getattr(fn, "noinline", False))) != (source["kind"], source["noinline"]):
        return Changed(f"how {fn.__name__} is decorated", True)
    if text(fn) != source["text"]:
        return Changed(whose, fn is not top)
    if fn.starting_line_number != source["line"]:
        return Changed(f"{whose} is at line {fn.starting_line_number}, was at line {source['line']}", True)
    reader = "it" if fn is top else f"{fn.__name__}, which it calls,"
    outside = fn.__globals__
    found: dict[str, Any] = {}
    try:
        inside = closure(fn)
        for path, then in source["names"].items():
            value = found[path] = look_up(path, found, outside, inside)
            now = meaning(value)
            if isinstance(then, int):
                if now != FUNCTION:
                    return Changed(f"{reader} reads {path}, which was a function", True)
                if (changed := _compare(value, sources, then, kept, seen, top)) is not None:
                    return changed
            elif then == DATA:  # the default of an argument, which is read when the function is made
                if not is_data(now):
                    return Changed(f"{reader} reads {path}, which was data", True)
            elif now != then:
                return Changed(f"{reader} reads {path}, which is {_shown(now)}, was {_shown(then)}", True)
            elif is_data(now) and "." not in path and path in outside:
                kept[path, id(outside)] = (path, outside, deepcopy(value))
    except Unclear as error:
        return Changed(f"{reader} reads {error}", True)
    return None


def _shown(said: str) -> str:
    return plain(json.loads(said[1:])) if said[0] == VALUE else said.replace(":", " ", 1)


def check_kept(kept: Kept) -> None:
    """What Triton does at each launch: the globals that a kernel was compiled with must be the same."""
    for name, where, value in kept:
        if (now := where.get(name, _absent)) != value:
            raise RuntimeError(
                f"Global variable {name} has changed since we compiled this kernel, from {value} to "
                f"{'nothing' if now is _absent else now}"
            )
