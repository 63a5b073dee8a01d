"""What a kernel is compiled for, as JSON: constants, types, keys of tuners.

A recording is data that may come from strangers, so that nothing here runs what a file names: no pickle, and a class
is looked up only where it is an enumeration or a dataclass, by ``decode``'s caller's leave.
"""

from __future__ import annotations

import enum
from collections import namedtuple
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from liger_aot.triton.closures import Unclear, certain_key

DEEPEST = 16  # values within values; Triton's own have two or three

Function = tuple[str, str, str]  # module, qualified name, cache key


class NotData(TypeError):
    """A value that can't be written as data, or data that is no value."""


def encode(value: Any, depth: int = DEEPEST) -> Any:
    """``value`` as JSON, the same for equal values and different for different ones; NotData where it can't be."""
    if not depth:
        raise NotData("values within values, too deep")
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return {"float": value.hex()}
    if isinstance(value, enum.Enum):
        return {"enum": [_class(value), value.name]}
    if isinstance(value, tuple):
        items = [encode(item, depth - 1) for item in value]
        names = getattr(value, "_fields", None)
        return {"tuple": items} if names is None else {"namedtuple": [type(value).__name__, [*names], items]}
    if type(value) is list:
        return {"list": [encode(item, depth - 1) for item in value]}
    if isinstance(value, (bool, int, str)):
        return encode(int(value) if isinstance(value, int) else str(value), depth)
    return _encode_known(value, depth)


def _encode_known(value: Any, depth: int) -> Any:
    """Triton's and torch's values, told by their classes' names: neither need be imported for it."""
    kind, module = type(value).__name__, type(value).__module__
    if module == "torch" and kind == "dtype":
        return {"torch": str(value).removeprefix("torch.")}
    if module.startswith("triton.language") and kind == "dtype":
        return {"dtype": value.name}
    if module.startswith("triton.language") and kind == "constexpr":
        return {"constexpr": encode(value.value, depth - 1)}
    if hasattr(value, "cache_key") and hasattr(value, "fn"):
        try:
            return {"function": [value.fn.__module__, value.fn.__qualname__, certain_key(value)]}
        except Unclear as error:
            raise NotData(f"{value.fn.__qualname__}, and {error}") from None
    if is_dataclass(value) and not isinstance(value, type):
        named = [[field.name, encode(getattr(value, field.name), depth - 1)] for field in fields(value)]
        return {"dataclass": [_class(value), named]}
    if module == "numpy" and hasattr(value, "item") and getattr(value, "shape", None) == ():
        return encode(value.item(), depth - 1)
    raise NotData(f"a {module}.{kind}, {value!r:.80}")


def _class(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def decode(
    data: Any,
    function: Callable[[Function], Any] | None = None,
    find_class: Callable[[str, str], Any] | None = None,
    depth: int = DEEPEST,
) -> Any:
    """The value that was encoded. ``function`` gives a kernel's function, ``find_class`` a class by module and
    qualified name; without them (and for classes that are neither an enumeration nor a dataclass), NotData."""

    def inner(item: Any) -> Any:
        return decode(item, function, find_class, depth - 1)

    if not depth:
        raise NotData("values within values, too deep")
    if data is None or type(data) in (bool, int, str):
        return data
    if not isinstance(data, dict) or len(data) != 1:
        raise NotData(f"{data!r:.80} is no value")
    kind, body = next(iter(data.items()))
    try:
        if kind == "float":
            return float.fromhex(body)
        if kind == "tuple":
            return tuple(inner(item) for item in _list(body))
        if kind == "list":
            return [inner(item) for item in _list(body)]
        if kind == "namedtuple":
            name, names, items = body
            make: Any = namedtuple  # a type checker wants names that it can read
            return make(name, names)(*map(inner, _list(items)))
        if kind == "constexpr":
            return _triton("constexpr")(inner(body))
        if kind == "dtype":
            return _triton("dtype")(body)
        if kind == "torch":
            return _torch_dtype(body)
        if kind == "function" and function is not None:
            module, qualname, key = body
            return function((str(module), str(qualname), str(key)))
        if kind in ("enum", "dataclass") and find_class is not None:
            return _of_class(kind, body, find_class, inner)
    except NotData:
        raise
    except Exception as error:  # whatever a damaged file brings
        raise NotData(f"{data!r:.80}: {error}") from None
    raise NotData(f"{data!r:.80} is no value")


def _list(body: Any) -> list[Any]:
    if not isinstance(body, list):
        raise NotData(f"{body!r:.80} is no list")
    return body


def _of_class(
    kind: str, body: Any, find_class: Callable[[str, str], Any], inner: Callable[[Any], Any]
) -> Any:
    module, _, qualname = body[0].partition(":")
    found = find_class(module, qualname)
    if not isinstance(found, type):
        raise NotData(f"{body[0]} is no class")
    if kind == "enum":
        if not issubclass(found, enum.Enum):
            raise NotData(f"{body[0]} is no enumeration")
        return found[body[1]]
    if not is_dataclass(found):
        raise NotData(f"{body[0]} is no dataclass")
    return found(**{str(name): inner(value) for name, value in body[1]})


def _triton(name: str) -> Any:
    import triton.language as tl

    return getattr(tl, name)


def _torch_dtype(name: str) -> Any:
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise NotData(f"torch has no dtype {name!r:.40}")
    return found


def plain(data: Any) -> str:
    """Encoded data for a message, short: 1024, fp16, 0.5, f(x)."""
    if not isinstance(data, dict) or len(data) != 1:
        return repr(data)
    kind, body = next(iter(data.items()))
    if kind == "float":
        return repr(float.fromhex(body))
    if kind == "tuple":
        return f"({', '.join(map(plain, body))})"
    if kind == "list":
        return f"[{', '.join(map(plain, body))}]"
    if kind == "namedtuple":
        return f"{body[0]}({', '.join(map(plain, body[2]))})"
    if kind == "function":
        return str(body[1])
    if kind == "constexpr":
        return plain(body)
    if kind == "enum":
        return f"{body[0].rpartition(':')[2]}.{body[1]}"
    if kind == "dataclass":
        return f"{body[0].rpartition(':')[2]}(...)"
    return str(body)
