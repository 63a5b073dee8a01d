"""``doctor``: what of torch, the GPU driver and the packs is here, which pack each GPU takes, and what is missing."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from liger_aot._version import __version__
from liger_aot.errors import DriverNotFound, printable
from liger_aot.ops.registry import names as ops
from liger_aot.runtime.manifest import Pack
from liger_aot.runtime.packs import describe, hidden_folders, installed, pack_for

Body = Callable[[], "tuple[list[str], bool]"]
# The oldest driver that loads binaries of a version, as drivers count their own. Cubins: ptxas 12.8, the first that
# knows sm_100 and sm_120, writes ELF ABI 8 for them and ELF ABI 7 for all before. Code objects: ROCm 6.3 is the first
# to take version 6; some before 6.0 read version 5, of which too little is known to promise it.
OLDEST_DRIVER = {
    ("cuda", 7): (12_000, "R525 or newer"),
    ("cuda", 8): (12_080, "R570 or newer"),
    ("hip", 5): (60_000_000, "ROCm 6.0 or newer"),
    ("hip", 6): (60_300_000, "ROCm 6.3 or newer"),
}
NO_GPU = "none: ops run their plain-torch reference on the CPU"


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
    verdict: str

    def __str__(self) -> str:
        return "\n".join((*map(str, self.sections), self.verdict))


def examine() -> Report:
    """The report. Never raises: a section that fails says so and why."""
    torch_, packs = _section("torch", _torch), _section("packs", _packs)
    driver, gpus = _section("GPU driver", _driver), _section("GPUs", _gpus)
    kernels = _section("packs of Triton kernels", _triton_packs)
    sections = (
        _section("liger-aot", _versions),
        torch_,
        driver,
        packs,
        gpus,
        *([kernels] if kernels.lines else []),
    )
    if not kernels.ok:
        return Report(sections, False, "Not ready: the lines above say what is missing.")
    if gpus.ok and gpus.lines[0] == NO_GPU:
        return Report(sections, True, "Ready on the CPU.")
    if gpus.ok and driver.ok:
        return Report(sections, True, "Ready: every GPU has its pack.")
    return Report(sections, False, "Not ready: the lines above say what is missing.")


def _section(title: str, body: Body) -> Section:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            lines, ok = body()
        except Exception as error:  # whatever is broken here is what is to be reported
            lines, ok = [f"failed: {type(error).__name__}: {error}"], False
    lines += [f"warning: {warning.message}" for warning in caught]
    return Section(title, tuple(printable(" ".join(line.split())) for line in lines), ok)


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
    from liger_aot.runtime.devices import driver

    try:
        found = driver()
    except DriverNotFound as error:
        return [str(error), "it comes with the GPU's driver: in a container, start it with the GPUs"], False
    except ImportError as error:
        return [
            f"{error}: liger-aot was installed without its launcher: install the wheel for this machine and Python, or "
            "build it from source"
        ], False
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
        lines.append(
            f"{pack.arch}: for {serves}; version {pack.version}, {made}, {_needs(pack)}; in {pack.folder}"
        )
    lines += [f"{folder.name}: can't be used: {problem}" for folder, problem in found.unusable.items()]
    lines += [
        f"{folder.name}: {folder} is not used: {first} comes first" for folder, first in hidden_folders()
    ]
    return lines or [describe()], bool(found.packs) and not found.unusable


def _triton_packs() -> tuple[list[str], bool]:
    from liger_aot.triton.inspection import findings
    from liger_aot.triton.packs import folders

    if not folders():
        return [], True
    import torch

    from liger_aot.runtime.devices import gpu

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return findings([gpu(index).device for index in range(count)])


def _needs(pack: Pack) -> str:
    """The driver that a pack's binaries need, in words."""
    format_ = "ELF ABI" if pack.backend == "cuda" else "code object"
    oldest = OLDEST_DRIVER.get((pack.backend, pack.binary_version))
    if oldest is None:
        return f"{format_} {pack.binary_version}, which this liger-aot does not know"
    number, release = oldest
    return f"{format_} {pack.binary_version} for {pack.backend} {_driver_version(pack.backend, number)} ({release})"


def _gpus() -> tuple[list[str], bool]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        hidden = _seen_by_driver()
        if not hidden:
            return [NO_GPU], True
        advice = "install a torch that is built for them, or see its warnings above"
        return [f"torch sees none, the driver sees {hidden}: {advice}"], False
    served = [_served(index) for index in range(count)]
    return [f"cuda:{index}: {line}" for index, (line, _) in enumerate(served)], all(ok for _, ok in served)


def _served(index: int) -> tuple[str, bool]:
    """How the packs serve one GPU. A failure is an answer too: the other GPUs are reported all the same."""
    from liger_aot.runtime.devices import gpu

    try:
        found = gpu(index)
        pack = pack_for(found.device)
        wanting = [*_driver_too_old(pack), *_wanting(pack, found.shared_per_block)]
    except Exception as error:
        return str(error) or type(error).__name__, False
    return "; ".join((f"{found.device} takes pack {pack.arch}", *wanting, *_unmeasured(pack))), not wanting


def _seen_by_driver() -> int:
    """GPUs of the driver; 0 where it can't be asked: its own section says why."""
    from liger_aot.runtime.devices import driver

    try:
        return int(driver().device_count)
    except Exception:
        return 0


def _unmeasured(pack: Pack) -> list[str]:
    """What makes a pack slower than it need be, and who can change that."""
    if pack.measured:
        return []
    return [
        "its launch numbers are derived from another architecture's, not measured: with the source tree, python -m "
        f"benchmarks.tuning --arch {pack.arch} --kernel all --write measures them (docs/tuning-your-chip.md)"
    ]


def _driver_too_old(pack: Pack) -> list[str]:
    """Whether the driver can load a pack's binaries, said before a load fails."""
    from liger_aot.runtime.devices import driver

    try:
        found = driver()
    except Exception:  # its own section says why
        return []
    number, release = OLDEST_DRIVER.get((pack.backend, pack.binary_version), (0, ""))
    if found.backend != pack.backend or found.version >= number:
        return []
    return [
        f"its binaries need {pack.backend} {_driver_version(pack.backend, number)}, the driver is "
        f"{_driver_version(found.backend, found.version)}: update it to {release}"
    ]


def _wanting(pack: Pack, shared_per_block: int) -> list[str]:
    """What a pack lacks for a GPU."""
    wanting = []
    if missing := [op for op in ops() if op not in pack.ops]:
        wanting.append(f"it lacks {', '.join(missing)}: install liger-aot and its pack at the same version")
    for op in pack.ops:
        manifest = pack.op(op)
        shared = [manifest.variant(name).shared for name in manifest.variants]
        if too_large := [size for size in shared if size > shared_per_block]:
            wanting.append(
                f"{len(too_large)} of {len(shared)} binaries of {op} need up to {max(too_large)} bytes of shared "
                f"memory a block, this GPU has {shared_per_block}"
            )
    return wanting
