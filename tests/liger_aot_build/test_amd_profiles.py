"""The AMD profiles that extend gfx942: their limits, what they inherit, and of each a norm, an attention and a matrix
product, compiled and read back."""

from __future__ import annotations

import pytest

from liger_aot_build.profile import DERIVED, read_profile
from tests.harness.planned_packs import audited, plans_of

NEW = ("gfx950", "gfx1100", "gfx1151", "gfx1200", "gfx1201")
KERNELS = {  # op: (kernel, values of its axes)
    "rmsnorm": ("rmsnorm_forward", {"dtype": "bf16"}),
    "flash_attention": ("flash_attention_forward_tiles", {"dtype": "bf16", "head_dim": 64}),
    "fused_moe": ("fused_moe_up", {"dtype": "bf16"}),
}
SLOW = {("gfx1151", op) for op in KERNELS} | {("gfx1200", op) for op in KERNELS} | {("gfx950", "rmsnorm")}


def first_variant(arch: str, op: str) -> str:
    """The aligned binary of the largest problems."""
    kernel, axes = KERNELS[op]
    plan = plans_of(arch)[1][op].kernels[kernel]
    found = [v.name for v in plan.variants.values() if v.aligned and axes.items() <= v.axes.items()]
    return found[-1]


@pytest.mark.parametrize("arch", NEW)
def test_limits(arch: str) -> None:
    profile = read_profile(arch)
    assert all(t.provenance.startswith(DERIVED) for t in profile.tables.values())
    rows = [row for table in profile.tables.values() for row in table.rows if row.form != "absent"]
    threads = {row.options["num_warps"] * profile.arch.warp_size for row in rows}
    assert max(threads) <= profile.arch.threads_per_block == 1024
    if profile.arch.warp_size == 32:
        assert not any("waves_per_eu" in row.options for row in rows)
        assert profile.arch.shared_per_multiprocessor == 2 * profile.arch.shared_per_block


@pytest.mark.parametrize(
    ("arch", "op"),
    [
        pytest.param(arch, op, marks=[pytest.mark.slow] if (arch, op) in SLOW else [])
        for arch in NEW
        for op in KERNELS
    ],
)
def test_a_binary_of_each_kind(arch: str, op: str) -> None:
    found = audited(arch, op, first_variant(arch, op))
    profile = read_profile(arch)
    matrix = {"gfx9": "MFMA", "gfx1": "WMMA"}[arch[:4]]
    assert found.facts.arch.partition(":")[0] == arch
    assert found.facts.wave_size == profile.arch.warp_size == (64 if matrix == "MFMA" else 32)
    assert set(found.facts.matrix) == (set() if op == "rmsnorm" else {matrix})
    assert (found.facts.spilled_registers, found.facts.local_bytes) == (0, 0)


@pytest.mark.slow
def test_gfx1200_and_gfx1201_run_the_same_code() -> None:
    """Their binaries differ in the machine's number and name alone: what is known of the one is known of the other."""
    for op in KERNELS:
        name = first_variant("gfx1201", op)
        one, other = (audited(arch, op, name).compiled.image for arch in ("gfx1200", "gfx1201"))
        differing = [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
        assert len(differing) == 2 and differing[0] == 48, op  # e_flags, and the last digit of the target
