"""GPUs as Triton names them, and what torch says of one of each kind: for machines that have none."""

from __future__ import annotations

import re
from typing import NamedTuple

from liger_aot.errors import ArgumentError


class Target(NamedTuple):
    """What Triton compiles for: ("cuda", 90, 32) or ("hip", "gfx942", 64)."""

    backend: str
    arch: int | str
    warp_size: int

    @property
    def name(self) -> str:
        """As a recording's folders are named: "cuda-90", "hip-gfx942"."""
        return f"{self.backend}-{self.arch}"

    @property
    def profile(self) -> str:
        """As packs are named: "sm90", "gfx942"."""
        return f"sm{self.arch}" if self.backend == "cuda" else str(self.arch)


def target(arch: str) -> Target:
    """The target of an architecture: "sm90", "sm90a" (the same), "gfx942". ArgumentError for what is none."""
    if match := re.fullmatch(r"sm_?(\d{2,3})[af]?", arch):
        return Target("cuda", int(match[1]), 32)
    if match := re.fullmatch(r"gfx(\d{1,2})[0-9a-f]{2}", arch):
        return Target("hip", arch, 32 if int(match[1]) >= 10 else 64)
    raise ArgumentError(f"the architecture must be one such as sm90 or gfx942, got {arch!r}")


class Device(NamedTuple):
    """One GPU of an architecture, as torch and Triton describe it."""

    name: str
    multiprocessors: int
    shared: int  # bytes a block may have
    shared_multiprocessor: int
    threads_multiprocessor: int
    memory: int  # GiB
    l2: int  # MiB


# The GPU of each architecture that data centres have most of; the vendors' tables and CUDA's programming guide.
DEVICES = {
    "sm75": Device("Tesla T4", 40, 65536, 65536, 1024, 16, 4),
    "sm80": Device("NVIDIA A100-SXM4-80GB", 108, 166912, 167936, 2048, 80, 40),
    "sm86": Device("NVIDIA A10", 72, 101376, 102400, 1536, 24, 6),
    "sm89": Device("NVIDIA L40S", 142, 101376, 102400, 1536, 48, 96),
    "sm90": Device("NVIDIA H100 80GB HBM3", 132, 232448, 233472, 2048, 80, 50),
    "sm100": Device("NVIDIA B200", 148, 232448, 233472, 2048, 180, 126),
    "sm103": Device("NVIDIA B300", 148, 232448, 233472, 2048, 270, 126),
    "sm120": Device("NVIDIA GeForce RTX 5090", 170, 101376, 102400, 1536, 32, 96),
    "gfx90a": Device("AMD Instinct MI250X", 104, 65536, 65536, 2048, 64, 8),
    "gfx942": Device("AMD Instinct MI300X", 304, 65536, 65536, 2048, 192, 4),
    "gfx950": Device("AMD Instinct MI355X", 256, 163840, 163840, 2048, 288, 4),
}


def device(of: Target) -> Device:
    """A GPU of the target's architecture; ArgumentError for one that is not known here."""
    found = DEVICES.get(of.profile)
    if found is None:
        raise ArgumentError(f"no GPU of {of.profile} is known here; known are {', '.join(DEVICES)}")
    return found
