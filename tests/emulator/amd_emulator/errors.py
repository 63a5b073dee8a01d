"""The one error of the emulator."""

from __future__ import annotations


class EmulatorError(Exception):
    """Code that the emulator refuses to run: an unknown instruction or form, or a wrong access to memory."""
