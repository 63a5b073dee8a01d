"""Races on shared memory between wgmma and what writes to it: found in PTX and refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from liger_aot_build.audit import audit
from liger_aot_build.compiler import Compiled, Job, compile_job
from liger_aot_build.errors import AuditError
from liger_aot_build.ptx import Races, races
from tests.liger_aot_build.test_compile_audit import changed, compile_one, one_variant

SLOT = 2048  # bytes of a 16 x 64 tile of bf16
LOOP = """
.visible .entry loop()
{{
	mov.b32 	%r1, 0;
	mov.b32 	%r2, {first};
$L__BB0_1:
	cp.async.wait_group 	0;
	bar.sync 	0;
	shl.b32 	%r3, %r1, 11;
	bfe.u32 	%r4, %r3, 4, 14;
	cvt.u64.u32 	%rd1, %r4;
	or.b64 	%rd2, %rd1, 4611686293305294848;
	wgmma.fence.sync.aligned;
	wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{%f1,%f2}}, {{%r11,%r12,%r13,%r14}}, %rd2, 1, 1, 1, 1;
	wgmma.commit_group.sync.aligned;
	{guard}
	// begin inline asm
	wgmma.wait_group.sync.aligned {pending};
	// end inline asm
$L__BB0_2:                              // the address of the next tile
	shl.b32 	%r5, %r2, 11;
	cp.async.cg.shared.global [ %r5 + {offset} ], [ %rd3 + 0 ], 0x10, %r15;
	cp.async.commit_group;
	add.s32 	%r6, %r1, 1;
	setp.lt.s32 	%p1, %r6, {buffers};
	selp.b32 	%r1, %r6, 0, %p1;
	add.s32 	%r7, %r2, 1;
	setp.ge.s32 	%p2, %r7, {buffers};
	selp.b32 	%r2, 0, %r7, %p2;
	@%p3 bra 	$L__BB0_1;
	wgmma.wait_group.sync.aligned 0;
	ret;
}}
"""


def loop(buffers: int, pending: int, guard: str = "", offset: int = 0) -> str:
    """The next tile is copied into the buffer after the one that is read, with ``pending`` groups still running."""
    first = 1 % buffers
    return LOOP.format(buffers=buffers, pending=pending, guard=guard, offset=offset, first=first)


def line(text: str, start: str) -> int:
    """The number of the one line that starts so."""
    (found,) = (n for n, one in enumerate(text.splitlines(), 1) if one.strip().startswith(start))
    return found


@pytest.mark.parametrize(
    ("buffers", "pending", "safe"),
    [(1, 0, True), (1, 1, False), (2, 0, True), (2, 1, True), (2, 2, False), (3, 2, True), (3, 3, False)],
)
def test_a_tile_is_not_overwritten_while_it_is_read(buffers: int, pending: int, safe: bool) -> None:
    text = loop(buffers, pending)
    assert races(text) == Races(() if safe else (line(text, "cp.async.cg"),), ())


def test_the_tile_ends_where_its_last_instruction_reads() -> None:
    assert races(loop(1, 1, offset=SLOT - 16)).overwritten
    assert not races(loop(1, 1, offset=SLOT)).overwritten


@pytest.mark.parametrize(
    "branch",
    [
        "@%p4 bra $L__BB0_2;",
        "$L_brx_0: .branchtargets\n\t\t$L__BB0_1,\n\t\t$L__BB0_2;\n\tbrx.idx %r16, $L_brx_0;",
    ],
)
def test_a_wait_that_a_branch_goes_around(branch: str) -> None:
    text = loop(1, 0, guard=branch)
    assert races(text).overwritten == (line(text, "cp.async.cg"),)


def test_an_address_that_is_not_known() -> None:
    """Of a kernel's argument, as no pipeline of Triton's own has it."""
    text = loop(2, 1).replace("mov.b32 	%r2, 1;", "ld.param.b32 	%r2, [loop_param_0];")
    assert races(text).unknown == (line(text, "cp.async.cg"),)


def test_kernels_without_wgmma_are_let_through() -> None:
    assert races("") == Races((), ())
    assert races(re.sub(r"(?m)^.*wgmma.*\n", "", loop(1, 1))) == Races((), ())


def dot_loop(total: bool, stages: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
    compiled = compile_job(
        Job(
            variant="dot_loop",
            module="tests.harness.dot_loops",
            function="dot_loop",
            signature={"A": "*bf16", "B": "*bf16", "C": "*fp32", "S": "*fp32", "n": "i32"}
            | dict.fromkeys(("SUM", "BLOCK_M", "BLOCK_N", "BLOCK_K"), "constexpr"),
            constants={"SUM": total, "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64},
            hinted=("A", "B", "C", "S"),
            target=("cuda", 90, 32),
            options={"num_warps": 4, "num_stages": stages},
            language="triton",
        )
    )
    assert isinstance(compiled, Compiled), compiled
    return compiled


@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("total", [False, True])
def test_what_triton_makes_of_such_loops(
    total: bool, stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile used in tl.dot alone passes. One that is summed, too, is refused."""
    text = dot_loop(total, stages, tmp_path, monkeypatch).assembly
    assert races(text).unknown == ()
    assert bool(races(text).overwritten) == total
    variant, profile = one_variant(tmp_path, "sm90")
    made = compile_one(variant, profile, tmp_path / "cache")
    good = {"sm90": (variant, profile, made)}
    assert audit(variant, made, profile.arch)
    if total:
        with pytest.raises(
            AuditError, match=r"overwrites shared memory that a wgmma still reads: .* \(PTX lines? \d"
        ):
            changed(good, "sm90", compiled={"assembly": text})
    else:
        changed(good, "sm90", compiled={"assembly": text})


def test_addresses_that_cannot_be_checked_are_refused_but_in_gluon(tmp_path: Path) -> None:
    variant, profile = one_variant(tmp_path, "sm90")
    made = compile_one(variant, profile, tmp_path / "cache")
    text = loop(2, 1).replace("mov.b32 	%r2, 1;", "ld.param.b32 	%r2, [loop_param_0];")
    with pytest.raises(AuditError, match=r"has addresses that can't be checked for races \(PTX line \d+\)$"):
        changed({"sm90": (variant, profile, made)}, "sm90", compiled={"assembly": text})
    changed({"sm90": (variant, profile, made)}, "sm90", {"language": "gluon"}, {"assembly": text})
