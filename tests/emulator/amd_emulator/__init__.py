"""Runs AMD code objects of CDNA 2 to 4 and RDNA 3 and 4 (architecture.py lists them) without an AMD GPU,
instruction by instruction, on numpy.

Each instruction is decoded by decode.py and becomes a closure over the lanes of a wave. There is no
timing, there are no caches and no wait states: this checks results. What it does not know, and every wrong
access to memory, is an EmulatorError that names the instruction and its address.
"""

from .errors import EmulatorError
from .memory import Memory
from .program import Program

__all__ = ["EmulatorError", "Memory", "Program"]
