"""Packs that need no build: manifests by the plan, and binaries that are compiled when a test first asks for one.

`make test` compiles what it runs and no more. The host code and Triton's interpreter need a pack's tables and launch
numbers alone, which the plan gives. A binary's own facts (registers, shared memory) are what its compilation and audit
find; until then the manifest holds placeholders.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from threading import Lock

from liger_aot.runtime.manifest import OpManifest, Pack
from liger_aot.runtime.manifest import Variant as Packed
from liger_aot_build.audit import Audited, audit
from liger_aot_build.binary import BinaryFacts
from liger_aot_build.build import compiler, make_plans, project_version
from liger_aot_build.compile import compile_all, compile_here
from liger_aot_build.compiler import Compiled
from liger_aot_build.declaration import tiles_of
from liger_aot_build.pack import write_op, write_pack
from liger_aot_build.plan import Plan, Variant
from liger_aot_build.profile import Profile

GROUP_WARPS = 4  # of a warp group; a producer's warp group comes on top
LINE = 128  # bytes of the widest swizzle
ABI = {"cuda": 7, "hip": 5}  # format versions of the pinned toolchain's binaries


class PlannedPack(Pack):
    """The pack that the present tree would be built into."""

    def __init__(self, folder: Path, arch: str, compiles: bool) -> None:
        super().__init__(folder)
        self._arch, self._compiles = arch, compiles

    def op(self, name: str) -> OpManifest:
        planned = super().op(name)
        return OnDemand(planned, self._arch, name) if self._compiles else planned


class OnDemand(OpManifest):
    """An op's part of such a pack: asked for a variant, it compiles and audits it."""

    def __init__(self, planned: OpManifest, arch: str, op: str) -> None:
        self.__dict__.update(planned.__dict__)
        self._arch, self._op = arch, op

    def variant(self, name: str) -> Packed:
        return built(self._arch, self._op, name)


_writing = Lock()


@cache
def plans_of(arch: str) -> tuple[Profile, dict[str, Plan]]:
    """The profile and every op's plan."""
    profile, plans = make_plans(arch)
    return profile, {p.op: p for p in plans}


def audited(arch: str, op: str, name: str) -> Audited:
    """A variant of the plan, compiled in this process (or taken from the cache) and read back."""
    profile, plans = plans_of(arch)
    variant = next(v for v in plans[op].variants if v.name == name)
    return audit(variant, compile_here(variant, profile), profile.arch)


@cache
def built(arch: str, op: str, name: str) -> Packed:
    """The variant as a pack of it alone holds it."""
    plan = plans_of(arch)[1][op]
    kernel = next(k for k in plan.kernels.values() if name in k.variants)
    tables = {
        key: ((None, name),)
        for key, entries in kernel.tables.items()
        if name in {variant for *_, variant in (*entries, *kernel.few.get(key, ()))}
    }
    alone = Plan(
        op,
        arch,
        {kernel.kernel.name: type(kernel)(kernel.kernel, tables, {name: kernel.variants[name]}, {}, {})},
    )
    found = {name: audited(arch, op, name)}
    folder = _folder() / "built" / f"{arch}-{name}"
    folder.mkdir(parents=True)
    text = write_op(folder, alone, found)
    path = folder / f"{op}.json"
    return OpManifest(path, folder / f"{op}.bin", sha256(text).hexdigest()).variant(name)


def compile_variants(variants: Sequence[Variant], profile: Profile, cache: Path) -> dict[str, Compiled]:
    """The binary of each variant by its name, from ``cache`` where it has it."""
    made = compile_all([(variant, profile) for variant in variants], cache=cache, workers=1, progress=False)
    return {variant.name: one for variant, one in zip(variants, made, strict=True)}


@cache
def planned_pack(arch: str, compiles: bool) -> PlannedPack:
    """The pack of the present tree for ``arch``; a process writes its manifests once, whichever thread asks first."""
    with _writing:
        profile, plans = plans_of(arch)
        folder = _folder() / "packs" / arch
        if not folder.is_dir():
            write_planned(folder, profile, list(plans.values()))
    return PlannedPack(folder, arch, compiles)


def write_planned(folder: Path, profile: Profile, plans: Sequence[Plan]) -> Pack:
    """A pack of ``plans`` with no binary in it, at ``folder``."""
    found = {v.name: _placeholder(v, profile) for p in plans for v in p.variants}
    write_pack(folder, profile, plans, found, project_version(), compiler(profile))
    return Pack(folder)


@cache
def compiled_pack(arch: str, *ops: str) -> Pack:
    """A pack of these ops alone with their binaries in it, or the whole one under LIGER_AOT_PACKS."""
    if packs := os.environ.get("LIGER_AOT_PACKS"):
        return Pack(Path(packs) / arch)
    profile, plans = plans_of(arch)
    folder = _folder() / "compiled" / f"{arch}-{'-'.join(ops)}"
    found = {v.name: audited(arch, op, v.name) for op in ops for v in plans[op].variants}
    folder.parent.mkdir(exist_ok=True)
    write_pack(folder, profile, [plans[op] for op in ops], found, project_version(), compiler(profile))
    return Pack(folder)


def tables_of(arch: str) -> Pack:
    """The pack of ``arch`` for drivers that launch nothing: tables and launch numbers, no binary is compiled."""
    if packs := os.environ.get("LIGER_AOT_PACKS"):
        return Pack(Path(packs) / arch)
    return planned_pack(arch, compiles=False)


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="liger-aot-planned-"))
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))
    return folder


def _placeholder(variant: Variant, profile: Profile) -> Audited:
    """What a manifest needs of a variant that is not compiled: threads and tensor maps by the plan, one block a
    multiprocessor."""
    arch, groups = profile.arch, variant.constants.get("WARP_GROUPS")
    warps = variant.options["num_warps"] if groups is None else GROUP_WARPS * (int(groups) + 1)
    maps = []
    for kind in variant.arguments.values():
        if kind.startswith("tensordesc<"):
            dtype, sizes = tiles_of(kind.removeprefix("tensordesc<").rstrip(">")) or ("", ())
            box = [int(size) for size in sizes]
            row = min(LINE, box[-1] * (4 if dtype == "fp32" else 2))
            swizzle = (row // 32).bit_length() if box[-2] > 1 else 0  # as CUtensorMapSwizzle counts
            maps.append({"swizzle": swizzle, "box": box})
    compiled = Compiled(
        variant.name, variant.name.encode(), "", variant.function, warps, 1, 0, 0, tuple(maps)
    )
    facts = BinaryFacts(
        kind="", arch=arch.machine, kernel=variant.function, format_version=ABI[arch.backend], registers=0,
        accumulator_registers=0, scalar_registers=0, granted_registers=0, granted_scalars=0, spilled_registers=0,
        local_bytes=0, static_shared=0, shared_granule=1, shared_reserved=0, max_threads=arch.threads_per_block,
        wave_size=arch.warp_size, parameters=(), parameter_bytes=0, parameter_offset=0, matrix={},
        register_budgets=(), before_wait=None,
    )  # fmt: skip
    return Audited(variant, compiled, facts, warps * arch.warp_size, 1)
