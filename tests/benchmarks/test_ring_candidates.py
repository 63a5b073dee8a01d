"""The rings of long rows that candidates for Hopper ask for: they fit their kernels and the chip."""

from __future__ import annotations

from pathlib import Path

import pytest

from build_tools.audit import audit
from build_tools.compile import compile_variants
from build_tools.declaration import read_declaration
from build_tools.paths import PROFILES
from build_tools.plan import Variant, check_row, make_variant
from build_tools.profile import read_profile, read_row
from build_tools.tune import read_problems

ARCH = "sm90"
KERNELS = [  # the op, the kernel, the inputs that it reads
    ("softmax", "softmax_forward", 1),
    ("softmax", "softmax_backward", 2),
    ("log_softmax", "log_softmax_forward", 1),
    ("log_softmax", "log_softmax_backward", 2),
    ("cross_entropy", "cross_entropy_both", 1),
]


def rings(op: str, name: str) -> list[list[Variant]]:
    """Of every problem that has any, those of its first dtype."""
    profile, kernel = read_profile(ARCH), read_declaration(op).kernels[name]
    found = []
    for problem in read_problems(PROFILES / "candidates" / f"{ARCH}-{name}.toml"):
        bound = {} if problem.max_n is None else {"max_n": problem.max_n}
        rows = [read_row("a candidate", {**c, **bound}, profile.arch) for c in problem.candidates]
        for row in rows:
            check_row(kernel, row, profile)
        axes = {"dtype": problem.dtypes[0]}
        found.append([make_variant(op, kernel, row, axes, True) for row in rows if row.form == "ring"])
    return [variants for variants in found if variants]


@pytest.mark.parametrize("op,kernel,inputs", KERNELS)
def test_candidates_fit(op: str, kernel: str, inputs: int) -> None:
    """Shared memory for its blocks, and no candidate twice."""
    arch = read_profile(ARCH).arch
    problems = rings(op, kernel)
    assert len(problems) >= 2
    for variants in problems:
        assert len({v.name for v in variants}) == len(variants)
        for v in variants:
            blocks = v.constants["SLOTS"] + v.constants["AHEAD"]
            width = 4 if v.axes["dtype"] == "fp32" else 2
            shared = inputs * blocks * v.constants["BLOCK"] * width * v.host["programs_per_multiprocessor"]
            assert shared < arch.shared_per_multiprocessor, v.name


@pytest.mark.slow
@pytest.mark.parametrize("op,kernel", [(op, kernel) for op, kernel, _ in KERNELS])
def test_no_candidate_spills(op: str, kernel: str, tmp_path: Path) -> None:
    """Of each problem the one that keeps the most registers of a thread's."""
    profile = read_profile(ARCH)
    kept = [
        max(variants, key=lambda v: v.constants["KEPT"] * v.constants["BLOCK"] // v.options["num_warps"])
        for variants in rings(op, kernel)
    ]
    compiled = compile_variants(kept, profile, cache=tmp_path, workers=1, progress=False)
    for variant in kept:
        audited = audit(variant, compiled[variant.name], profile.arch)  # refuses a binary that spills
        assert audited.resident >= variant.host["programs_per_multiprocessor"]
