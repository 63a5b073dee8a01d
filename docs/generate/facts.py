"""What the plans say about an op, by architecture: its kernels, their launch tables, where the numbers come from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from liger_aot_build.build import make_plans
from liger_aot_build.declaration import declared_ops, read_declaration
from liger_aot_build.plan import KernelPlan, Plan
from liger_aot_build.profile import Profile, profile_names

# NVIDIA's first, the older ones first.
ARCHS = tuple(
    sorted(profile_names(), key=lambda name: (name.startswith("gfx"), len(name.rstrip("abcdef")), name))
)


@dataclass(frozen=True)
class Planned:
    profile: Profile
    ops: Mapping[str, Plan]


@cache
def planned(arch: str) -> Planned:
    profile, plans = make_plans(arch)
    return Planned(profile, {plan.op: plan for plan in plans if plan.variants})


def ops() -> tuple[str, ...]:
    """That run on any architecture."""
    return tuple(op for op in declared_ops() if archs(op))


@cache
def archs(op: str) -> tuple[str, ...]:
    """The architectures that have binaries of it or, where it has no kernel of its own, of the ops that it launches."""
    if op not in declared_ops():
        return ()
    declared = read_declaration(op)
    parts = (op,) if declared.kernels else declared.uses
    return tuple(arch for arch in ARCHS if all(binaries(part, arch) for part in parts))


def binaries(op: str, arch: str) -> int:
    plan = planned(arch).ops.get(op)
    return 0 if plan is None else len(plan.variants)


def kernels(op: str) -> dict[str, dict[str, KernelPlan]]:
    """By kernel and architecture, in the declaration's order."""
    found: dict[str, dict[str, KernelPlan]] = {}
    for arch in ARCHS:
        if plan := planned(arch).ops.get(op):
            for name, kernel in plan.kernels.items():
                found.setdefault(name, {})[arch] = kernel
    return found


def dtypes(*ops: str) -> str:
    """Of the tensors that the kernels of these ops are compiled for."""
    found = (by_arch.values() for op in ops for by_arch in kernels(op).values())
    axes = (plan.kernel.axes.get("dtype", ()) for plans in found for plan in plans)
    return ", ".join(dict.fromkeys(dtype for axis in axes for dtype in axis))


def combinations(by_arch: Mapping[str, KernelPlan]) -> str:
    """Combinations of the axes' dtypes that a kernel is compiled for."""
    keys = dict.fromkeys(key.rpartition("/")[0] for plan in by_arch.values() for key in plan.tables)
    return ", ".join(key.replace("/", " with ") for key in keys if key) or "-"


def alignment(by_arch: Mapping[str, KernelPlan]) -> str:
    found = {key.rpartition("/")[2] for plan in by_arch.values() for key in plan.tables}
    return " and ".join(sorted(found))


def bounds(plan: KernelPlan) -> str:
    """Up to which n the rows of the tables reach, of all dtypes together."""
    found = {bound for entries in plan.tables.values() for bound, _ in entries}
    numbers = sorted(bound for bound in found if bound is not None)
    rest = ["above" if numbers else "any"] if None in found else []
    return ", ".join([*map(str, numbers), *rest]) or "none"


def lacking(op: str) -> tuple[str, ...]:
    """The architectures that do without some binaries of an op."""
    planned_ops = ((arch, planned(arch).ops.get(op)) for arch in ARCHS)
    return tuple(a for a, plan in planned_ops if plan and any(k.absent for k in plan.kernels.values()))


def numbers(profile: Profile, kernel: str) -> str:
    """Whether a table's launch numbers are measured, as its provenance and its rows' comments say."""
    provenance = profile.tables[kernel].provenance
    if provenance.startswith("derived"):
        return "derived"
    if "rows with no comment" not in provenance:
        return "measured"
    text = profile.path.read_text()
    section = re.search(rf"^\[kernel\.{kernel}\]\n.*?(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL)
    rows = [line for line in (section[0] if section else "").splitlines() if line.lstrip().startswith("{")]
    return f"{sum('#' in row for row in rows)} of {len(rows)} rows measured"
