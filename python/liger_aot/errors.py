"""Every error that liger-aot raises by a name of its own."""

from __future__ import annotations

from pathlib import Path

from liger_aot._version import __version__


def printable(text: str) -> str:
    """``text`` with control characters escaped, for a terminal: what a path, a file or a driver says may hold any."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def how_to_install(arch: str) -> str:
    """How to get the binaries of an architecture, at this version. ``--no-index``, as none of our names is ours on a
    package index: what lies there under one of them is somebody else's."""
    return (
        f"With the wheels of liger-aot in FOLDER: pip install --no-index --find-links FOLDER "
        f'"liger-aot[{arch}]=={__version__}"; from its source: LIGER_AOT_ARCHS={arch} pip install .'
    )


class LigerAOTError(Exception):
    """The base of all of them."""


class DriverError(LigerAOTError, RuntimeError):
    """A call into the GPU driver failed.

    Attributes:
        call: the driver's function, such as "cuLaunchKernel".
        code: what it returned, a CUresult or hipError_t.
        name: the driver's own name for that code, such as "CUDA_ERROR_INVALID_IMAGE".
    """

    def __init__(self, message: str, *, call: str, code: int, name: str) -> None:
        super().__init__(message)
        self.call = call
        self.code = code
        self.name = name


class DriverNotFound(LigerAOTError, RuntimeError):
    """The GPU driver's library cannot be opened, or lacks a function that the launcher needs."""


class ForkedProcess(LigerAOTError, RuntimeError):
    """A GPU is to be used in a process that was forked from one that had opened its driver: no driver works there."""


class UnknownOp(LigerAOTError, ValueError):
    """There is no op of this name."""


class PackNotFound(LigerAOTError, RuntimeError):
    """No installed pack serves this device or architecture, or the pack does not carry the op."""


class PackDamaged(LigerAOTError, RuntimeError):
    """A pack's file is missing, unreadable, or not what the manifest says."""

    def __init__(self, path: Path, problem: str) -> None:
        if len(problem) > 400:  # it may quote what is in the file
            problem = f"{problem[:397]}..."
        super().__init__(
            f"{path}: {problem}. Reinstall the package that holds it, from where it came: the wheel of liger-aot "
            f"{__version__} for this architecture (pip install --force-reinstall --no-deps WHEEL), or the source"
        )
        self.path, self.problem = path, problem


class PackTooNew(LigerAOTError, RuntimeError):
    """A pack was written by a newer liger-aot than the one that reads it."""

    def __init__(self, path: Path, found: int, known: int) -> None:
        super().__init__(
            f"{path}: format {found}, this liger-aot reads up to {known}. Upgrade liger-aot to the pack's version"
        )
        self.path, self.found, self.known = path, found, known


class NotBuilt(LigerAOTError, RuntimeError):
    """The GPU's architecture does without a binary for this call; the message says why and what to use instead."""


class KernelNotInPack(LigerAOTError, RuntimeError):
    """A Triton kernel is launched in a way that no installed pack has a binary for."""


class NotLoaded(LigerAOTError, RuntimeError):
    """A binary would have to be loaded while a CUDA graph is captured: call the op's ``preload`` before."""


class UnsupportedDevice(LigerAOTError, ValueError):
    """A tensor lies on a device that has neither binaries nor the CPU reference."""


class ArgumentError(LigerAOTError, ValueError):
    """An argument's value, shape, device or layout is not allowed."""


class IndexOutOfRange(ArgumentError):
    """A target, an index or a length in a tensor lies outside of its range."""


class ArgumentTypeError(LigerAOTError, TypeError):
    """An argument's type or dtype is not allowed."""


class PatchError(LigerAOTError, RuntimeError):
    """A model or library can't be changed to use the ops: its names are not those that are known, or others changed it.
    Nothing was changed."""


class LeftAlone(UserWarning):
    """Parts of a model or library that run as before."""


class RecordingDamaged(LigerAOTError, RuntimeError):
    """A file of a recording of Triton kernels is missing, unreadable, or says what can't be."""

    def __init__(self, path: Path, problem: str) -> None:
        if len(problem) > 400:  # it may quote what is in the file
            problem = f"{problem[:397]}..."
        super().__init__(f"{path}: {problem}")
        self.path, self.problem = path, problem
