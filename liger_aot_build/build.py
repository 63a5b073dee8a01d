"""The way of a kernel, whole: profile -> plan -> compile -> audit -> pack."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from liger_aot_build.audit import Audited, audit
from liger_aot_build.compile import compile_all, ptxas_version
from liger_aot_build.declaration import declared_ops, read_declaration
from liger_aot_build.errors import BuildError
from liger_aot_build.pack import write_pack
from liger_aot_build.paths import CACHE, KERNELS, PACKS, PROFILES, ROOT
from liger_aot_build.plan import Plan, plan
from liger_aot_build.profile import Profile, read_profile


@dataclass(frozen=True)
class Tree:
    """Where a build reads and writes."""

    profiles: Path = PROFILES
    kernels: Path = KERNELS
    packs: Path = PACKS
    cache: Path = CACHE


def project_version() -> str:
    """The version that the host package states: a pack must be of the same."""
    text = (ROOT / "python" / "liger_aot" / "_version.py").read_text()
    version: str = ast.literal_eval(text.rpartition("=")[2].strip())
    return version


def make_plans(arch: str, ops: Sequence[str] = (), tree: Tree | None = None) -> tuple[Profile, list[Plan]]:
    """Plans of ``ops`` (none: all that are declared) for ``arch``."""
    tree = tree or Tree()
    profile = read_profile(arch, tree.profiles)
    names = ops or declared_ops(tree.kernels)
    plans = [plan(read_declaration(op, tree.kernels), profile) for op in names]
    declared = {k for op in declared_ops(tree.kernels) for k in read_declaration(op, tree.kernels).kernels}
    if stray := sorted(set(profile.tables) - declared):
        raise BuildError(f"{profile.path.name}: [kernel.{stray[0]}]: no op declares this kernel")
    return profile, plans


def compile_and_audit(
    planned: Sequence[tuple[Profile, Sequence[Plan]]],
    tree: Tree | None = None,
    *,
    workers: int | None = None,
    progress: bool = True,
) -> list[dict[str, Audited]]:
    """Compile every variant of each architecture's plans, all of them in one pool of processes, and read each binary
    back; what was found by variant name, an architecture an item."""
    work = [(v, profile) for profile, plans in planned for p in plans for v in p.variants]
    compiled = compile_all(work, cache=(tree or Tree()).cache, workers=workers, progress=progress)
    found: dict[str, dict[str, Audited]] = {profile.arch.name: {} for profile, _ in planned}
    for (variant, profile), one in zip(work, compiled, strict=True):
        found[profile.arch.name][variant.name] = audit(variant, one, profile.arch)
    return list(found.values())


def compiler(profile: Profile) -> str:
    """What makes the machine code, for a pack's manifest."""
    if profile.arch.backend == "cuda":
        return f"ptxas {ptxas_version(profile.arch.target)}"
    return f"llvm of triton {profile.toolchain.triton}"


def build_packs(
    archs: Sequence[str],
    ops: Sequence[str] = (),
    tree: Tree | None = None,
    *,
    workers: int | None = None,
    progress: bool = True,
) -> dict[str, dict[str, Audited]]:
    """Build the packs of ``archs`` under ``tree.packs``; the audit's facts by architecture and variant name."""
    tree = tree or Tree()
    planned = [make_plans(arch, ops, tree) for arch in archs]
    audited = compile_and_audit(planned, tree, workers=workers, progress=progress)
    for (profile, plans), found in zip(planned, audited, strict=True):
        folder = tree.packs / profile.arch.name
        write_pack(folder, profile, plans, found, project_version(), compiler(profile))
    return dict(zip(archs, audited, strict=True))
