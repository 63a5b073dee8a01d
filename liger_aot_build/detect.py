"""Which architectures to build: what was asked for, else those of the GPUs of this machine, else all."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from liger_aot_build.errors import BuildError
from liger_aot_build.paths import PROFILES
from liger_aot_build.profile import profile_names, read_profile

VARIABLE = "LIGER_AOT_ARCHS"
KFD = Path("/sys/class/kfd/kfd/topology/nodes")
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


def chosen_archs(folder: Path = PROFILES) -> tuple[str, ...]:
    """By LIGER_AOT_ARCHS ("sm90,gfx942", "none", "all"); unset, the GPUs that are seen; none seen, all profiles."""
    asked = os.environ.get(VARIABLE)
    if asked is not None:
        return parse_archs(asked, folder)
    return seen_archs(folder) or profile_names(folder)


def seen_archs(folder: Path = PROFILES) -> tuple[str, ...]:
    """The profiles that serve this machine's GPUs: of several for one GPU that which the loader prefers, which names it
    earliest."""
    serves = {name: read_profile(name, folder).arch.serves for name in profile_names(folder)}
    found = set()
    for target in (*_cuda_targets(), *_hip_targets()):
        if serving := [(s.index(target), name) for name, s in serves.items() if target in s]:
            found.add(min(serving)[1])
    return tuple(sorted(found))


def parse_archs(text: str, folder: Path = PROFILES) -> tuple[str, ...]:
    """A comma list of profile names; BuildError names what is unknown."""
    known = profile_names(folder)
    names = tuple(dict.fromkeys(n.strip() for n in text.split(",") if n.strip()))
    if names == ("none",):
        return ()
    if names == ("all",):
        return known
    if not names or (unknown := [n for n in names if n not in known]):
        wrong = unknown[0] if names else text
        raise BuildError(f"unknown architecture {wrong!r}: known are {', '.join(known)}, 'all' and 'none'")
    return names


def _cuda_targets() -> set[str]:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return set()
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return set()
    found = set()
    for index in range(count.value):
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
        found.add(f"{major.value}.{minor.value}")
    return found


def _hip_targets() -> set[str]:
    """From the kernel driver's files: 90402 is gfx942, 90010 is gfx90a."""
    found = set()
    for properties in KFD.glob("*/properties"):
        for line in properties.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "gfx_target_version" and value.isdigit() and int(value):
                major, minor, step = int(value) // 10000, int(value) // 100 % 100, int(value) % 100
                found.add(f"gfx{major}{minor}{step:x}")
    return found
