"""``doctor``: what of torch, the GPU driver and the packs is here, which pack each GPU takes, and what is missing."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from liger_aot._version import __version__
from liger_aot.loader import ops
from liger_aot.packs import describe, installed, pack_for

Body = Callable[[], "tuple[list[str], bool]"]


@dataclass(frozen=True)
class Section:
    """One subject of the report, a finding a line."""

    title: str
    lines: tuple[str, ...]
    ok: bool

    def __str__(self) -> str:
        return "\n".join((self.title, *(f"  {line}" for line in self.lines)))


@dataclass(frozen=True)
class Report:
    """What was found. ``healthy``: every GPU has a pack and a driver to load it, or there is no GPU."""

    sections: tuple[Section, ...]
    healthy: bool

    def __str__(self) -> str:
        verdict = "All is well." if self.healthy else "Not ready: see the lines that say what to do."
        return "\n".join((*map(str, self.sections), verdict))


def examine() -> Report:
    """The report. Never raises: a section that fails says so and why."""
    torch_, packs = _section("torch", _torch), _section("packs", _packs)
    driver, gpus = _section("GPU driver", _driver), _section("GPUs", _gpus)
    return Report(
        (_section("liger-aot", _versions), torch_, driver, packs, gpus),
        gpus.ok and (driver.ok or gpus.lines == (NO_GPU,)),
    )


NO_GPU = "none: ops run their plain-torch reference on the CPU"


def _section(title: str, body: Body) -> Section:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            lines, ok = body()
        except Exception as error:  # whatever is broken here is what is to be reported
            lines, ok = [f"failed: {type(error).__name__}: {error}"], False
    lines += [f"warning: {warning.message}" for warning in caught]
    return Section(title, tuple(" ".join(line.split()) for line in lines), ok)


def _versions() -> tuple[list[str], bool]:
    system = f"{platform.system()} {platform.machine()}"
    return [f"{__version__}, Python {platform.python_version()}, {system}", f"ops: {', '.join(ops())}"], True


def _torch() -> tuple[list[str], bool]:
    import torch

    if torch.version.hip:
        built = f"built for ROCm (HIP {torch.version.hip})"
    elif torch.version.cuda:
        built = f"built for CUDA {torch.version.cuda}"
    else:
        built = "built for the CPU alone: to use a GPU, install torch for CUDA or ROCm"
    return [f"{torch.__version__}, {built}"], True


def _driver() -> tuple[list[str], bool]:
    from liger_aot.devices import driver

    found = driver()
    return [f"{found.library}, {found.backend} {_driver_version(found.backend, found.version)}"], True


def _driver_version(backend: str, number: int) -> str:
    """12040 is CUDA 12.4, 60342134 is HIP 6.3.42134."""
    if backend == "cuda":
        return f"{number // 1000}.{number % 1000 // 10}"
    return f"{number // 10_000_000}.{number // 100_000 % 100}.{number % 100_000}"


def _packs() -> tuple[list[str], bool]:
    found = installed()
    lines = []
    for pack in found.packs:
        made = f"Triton {pack.toolchain.get('triton')}, {pack.toolchain.get('compiler')}"
        serves = ", ".join(pack.serves)
        lines.append(f"{pack.arch}: for {serves}; version {pack.version}, {made}; in {pack.folder}")
    lines += [f"{folder.name}: can't be used: {problem}" for folder, problem in found.unusable.items()]
    return lines or [describe()], bool(found.packs) and not found.unusable


def _gpus() -> tuple[list[str], bool]:
    import torch

    from liger_aot.devices import gpu

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        hidden = _seen_by_driver()
        if not hidden:
            return [NO_GPU], True
        advice = "install a torch that is built for them, or see its warnings above"
        return [f"torch sees none, the driver sees {hidden}: {advice}"], False
    lines, ok = [], True
    for index in range(count):
        try:
            found = gpu(index)
            wanting = _wanting(found)
            line = f"{found.device} takes pack {pack_for(found.device).arch}"
            lines.append(f"cuda:{index}: {line}{'; ' if wanting else ''}{'; '.join(wanting)}")
            ok = ok and not wanting
        except Exception as error:  # the other GPUs are reported all the same
            lines.append(f"cuda:{index}: {error}")
            ok = False
    return lines, ok


def _seen_by_driver() -> int:
    """GPUs of the driver; 0 where it can't be asked: its own section says why."""
    from liger_aot.devices import driver

    try:
        return int(driver().device_count)
    except Exception:
        return 0


def _wanting(found: Any) -> list[str]:
    """What the pack of a GPU lacks for it."""
    pack = pack_for(found.device)
    wanting = []
    if missing := [op for op in ops() if op not in pack.ops]:
        wanting.append(f"it lacks {', '.join(missing)}: install liger-aot and its pack at the same version")
    for op in pack.ops:
        manifest = pack.op(op)
        shared = [manifest.variant(name).shared for name in manifest.variants]
        if too_large := [size for size in shared if size > found.shared_per_block]:
            wanting.append(
                f"{len(too_large)} of {len(shared)} binaries of {op} need up to {max(too_large)} bytes of shared "
                f"memory a block, this GPU has {found.shared_per_block}"
            )
    return wanting
