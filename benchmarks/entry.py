"""Which ops have a benchmark.

An op's benchmark is the file here that bears the name of the op's device code in csrc_triton/, and in it an
`OpEntry` (op_entry.py) bound to the name `ENTRY`; nothing else names it.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from .op_entry import OpEntry

HERE = Path(__file__).resolve().parent


def names() -> list[str]:
    """The ops that have a benchmark."""
    device_code = {path.stem for path in (HERE.parent / "csrc_triton").glob("*.py")} - {"__init__"}
    return sorted(device_code & {path.stem for path in HERE.glob("*.py")})


def load(name: str) -> OpEntry:
    """The benchmark of an op.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in names():
        raise ValueError(f"no benchmark for {name!r}: there is one for {', '.join(names())}")
    found: OpEntry = importlib.import_module(f"benchmarks.{name}").ENTRY
    return found
