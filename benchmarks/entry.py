"""Which ops have a benchmark.

An op's benchmark is the file in a family's folder here that bears the op's name, and in it an `OpEntry` (op_entry.py)
bound to the name `ENTRY`; nothing else names it.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from benchmarks.op_entry import OpEntry
from build_tools.declaration import declared_ops

HERE = Path(__file__).resolve().parent


def modules() -> dict[str, str]:
    """The module of each op that has a benchmark, by the op's name."""
    files = {path.stem: f"benchmarks.{path.parent.name}.{path.stem}" for path in sorted(HERE.glob("*/*.py"))}
    return {op: files[op] for op in declared_ops() if op in files}


def load(name: str) -> OpEntry:
    """The benchmark of an op.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in (found := modules()):
        raise ValueError(f"no benchmark for {name!r}: there is one for {', '.join(found)}")
    entry: OpEntry = importlib.import_module(found[name]).ENTRY
    return entry
