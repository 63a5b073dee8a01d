"""What makes two variants of a kernel the same binary, told alike where it is recorded, built and run.

Not the target: a recording made on one GPU is built for others. Not Triton's version either: a pack names it once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, NamedTuple

from liger_aot.triton.closures import key
from liger_aot.triton.values import encode

VERSION = 1
DIGITS = 40  # of a variant's name
RANGE = "tt.pointer_range"  # AMD alone: a pointer whose tensor is smaller than 2 GiB. A binary may do without


class Variant(NamedTuple):
    """One specialisation of a function, as data."""

    module: str
    qualname: str
    cache_key: str  # Triton's hash of the function's source and all that it reads, as ``closures.key`` has it
    gluon: bool
    signature: list[list[Any]]  # [parameter, encoded type] in order
    constants: list[list[Any]]  # [path, encoded value]
    attrs: list[list[Any]]  # [path, [[name, value] ...]]
    given: list[list[Any]]  # [option, encoded value]

    @property
    def function(self) -> str:
        return f"{self.module}:{self.qualname}"

    @property
    def name(self) -> str:
        """The variant's name in recordings and packs, in hexadecimal."""
        text = json.dumps([VERSION, *self], separators=(",", ":"), ensure_ascii=True)
        return sha256(text.encode()).hexdigest()[:DIGITS]


def variant(
    fn: Any,
    signature: Mapping[str, Any],
    constants: Mapping[Any, Any],
    attrs: Mapping[Any, Any],
    given: Mapping[str, Any],
    cache_key: str | None = None,
) -> Variant:
    """The variant of a JITFunction that ``_do_compile`` is called for; NotData where a constant can't be data.
    Triton computes the function's key unless it is given, which takes milliseconds."""
    kept = [(list(path), [a for a in found if a[0] != RANGE]) for path, found in attrs.items()]
    return Variant(
        module=fn.fn.__module__,
        qualname=fn.fn.__qualname__,
        cache_key=key(fn) if cache_key is None else cache_key,
        gluon=fn.is_gluon(),
        signature=[[name, encode(kind)] for name, kind in signature.items()],
        constants=sorted([list(path), encode(value)] for path, value in constants.items()),
        attrs=sorted([path, [list(a) for a in found]] for path, found in kept if found),
        given=sorted([name, encode(value)] for name, value in given.items()),
    )


def ranged(attrs: Mapping[Any, Any]) -> list[list[int]]:
    """Paths of the pointers that Triton's AMD backend says lie in less than 2 GiB."""
    return sorted(list(path) for path, found in attrs.items() if any(a[0] == RANGE for a in found))
