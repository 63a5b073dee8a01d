"""tests.harness.racecheck: which accesses it calls ordered, in code made up for it and in the pack's binaries."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import built_pack
from tests.harness import racecheck, sanitize
from tests.harness.racecheck import Code, disassembled, sift

# Groups of four warps and of one, and the first group, which starts them and does nothing itself.
ALL = "BAR.SYNC.DEFER_BLOCKING 0x1"
(TOLD, WAITS, READS, MEETS, FREES, AWAITS, WRITES, HANDS, STARTS, STARTED, ENDED, LEAVES) = (
    1, 3, 4, 5, 6, 10, 11, 12, 14, 15, 17, 18,
)  # fmt: skip
LINES = (
    ALL, "LDS.U8 R0, [R0+0x9c]",
    ALL, "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4+0x80], RZ", "LDS R9, [UR4+0x70]",
    "BAR.SYNC.DEFER_BLOCKING 0x2, 0x80", "@!P2 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x90], RZ", "WARPGROUP.ARRIVE", ALL,
    ALL, "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3+URZ+0x90], R0", "STS [UR4+0x70], R4",
    "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x80], RZ", ALL,
    "STS.64 [UR4+0xa0], R2", ALL, ALL, ALL, "STS.64 [UR4+0xa0], R2", ALL, "EXIT",
)  # fmt: skip


def text(lines: tuple[str, ...]) -> str:
    return "".join(f"        /*{16 * i:04x}*/                   {line} ;\n" for i, line in enumerate(lines))


def ordered(a: int, b: int, **edits: str) -> bool:
    """Of two lines, with others in place of some."""
    lines = list(LINES)
    for name, line in edits.items():
        lines[globals()[name]] = line
    code = Code(text(tuple(lines)))
    assert code.ordered(16 * a, 16 * b) == code.ordered(16 * b, 16 * a)
    return code.ordered(16 * a, 16 * b)


def test_start_and_end() -> None:
    assert (
        ordered(STARTS, TOLD) and ordered(LEAVES, TOLD) and ordered(STARTS, READS) and ordered(STARTS, LEAVES)
    )
    assert not ordered(STARTS, TOLD, STARTED="NOP")
    assert not ordered(LEAVES, TOLD, ENDED="NOP")
    assert not ordered(STARTS, STARTS) and not ordered(TOLD, READS)


def test_handed_on() -> None:
    assert ordered(WRITES, READS)
    assert not ordered(WRITES, WRITES) and not ordered(READS, READS)


def test_handed_on_with_other_waits_between() -> None:
    """What a group waits for while it has the place is no matter, but another arrival is."""

    def ordered_with(line: str) -> bool:
        code = Code(text((*LINES[: READS + 1], line, *LINES[READS + 1 :])))
        return code.ordered(16 * (WRITES + 1), 16 * READS)

    assert ordered_with(LINES[WAITS].replace("0x80]", "0xb0]")) and READS < WRITES
    assert not ordered_with(LINES[FREES])


@pytest.mark.parametrize("line", ["WAITS", "MEETS", "FREES", "AWAITS", "HANDS"])
def test_what_is_missing(line: str) -> None:
    assert not ordered(WRITES, READS, **{line: "NOP"})


def test_what_is_wrong() -> None:
    """Another mbarrier, and the arrival before the access."""
    for line in ("WAITS", "FREES", "AWAITS", "HANDS"):
        assert not ordered(WRITES, READS, **{line: re.sub(r"0x[89]0\]", "0xb0]", LINES[globals()[line]])})
    assert not ordered(WRITES, READS, FREES=LINES[READS], READS=LINES[FREES])
    assert not ordered(WRITES, READS, WRITES=LINES[HANDS], HANDS=LINES[WRITES])


# Two groups that take turns, in loops: one begins with its wait, the other, of eight warps, with its arrival.
FOUR, EIGHT = "BAR.SYNC.DEFER_BLOCKING 0x2, 0x80", "BAR.SYNC.DEFER_BLOCKING 0x0, 0x100"
TURNS = (
    ALL, "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4+0x80], RZ", "LDS R9, [UR4+0x70]", FOUR, "STS [UR4+0x70], R4", FOUR,
    "@!P2 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x90], RZ", "LDS R9, [UR4+0x78]", ALL,
    "STS [UR4+0x70], R4", EIGHT, "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x80], RZ", EIGHT, "LDS R9, [UR4+0x78]",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3+URZ+0x90], R0", "LDS R9, [UR4+0x70]", EIGHT, ALL,
)  # fmt: skip


def test_turns() -> None:
    code = Code(text(TURNS))
    for a, b in ((2, 9), (4, 15), (4, 9), (2, 15)):
        assert code.ordered(16 * a, 16 * b) and code.ordered(16 * b, 16 * a)
    for a, b in ((7, 9), (4, 13), (2, 4), (9, 15)):  # out of turn; of one group
        assert not code.ordered(16 * a, 16 * b) and not code.ordered(16 * b, 16 * a)


@pytest.mark.parametrize(
    ("at", "line"),
    [
        *((i, "NOP") for i in (1, 5, 6, 10, 11, 14)),
        (11, TURNS[6]),  # the same mbarrier
        (12, TURNS[11]),  # another arrival
    ],
)
def test_no_turns(at: int, line: str) -> None:
    code = Code(text((*TURNS[:at], line, *TURNS[at + 1 :])))
    assert not code.ordered(16 * 4, 16 * 15)


def log(*found: tuple[int, int]) -> str:
    """A report for each: a read and a write."""
    return (
        "".join(
            f"========= Error: Race reported between Read access at kernel+{16 * a:#x}\n"
            f"=========     and Write access at kernel+{16 * b:#x} [4 hazards]\n========= \n"
            for a, b in found
        )
        + f"========= RACECHECK SUMMARY: {len(found)} hazards displayed ({len(found)} errors, 0 warnings)\n"
    )


@pytest.fixture
def binaries(monkeypatch: pytest.MonkeyPatch) -> Any:
    """By the names of their kernels: one has nothing where the other has accesses."""
    images = {"kernel": text(LINES), "other": text(LINES[:1])}
    monkeypatch.setattr(racecheck, "disassembled", lambda image: images[image.decode()])
    return {name: SimpleNamespace(name=name, read=name.encode) for name in images}


def test_reports(binaries: Any) -> None:
    tool = "========= COMPUTE-SANITIZER\n"
    assert sift(tool + log((TOLD, STARTS), (READS, WRITES)), binaries) == (2, tool)
    count, rest = sift(tool + log((TOLD, WRITES), (READS, WRITES)), binaries)
    assert count == 1 and rest == tool + log((TOLD, WRITES)).partition("========= RACECHECK")[0]
    assert sift(log((WRITES, READS)), binaries)[0] == 0  # a read where the code writes
    several = log((READS, WRITES)).replace(
        "========= \n", f"=========     and Write access at kernel+{16 * STARTS:#x}\n"
    )
    assert sift(several, binaries)[0] == 1
    assert sift(several.replace(f"{16 * STARTS:#x}", "0x8"), binaries) == (
        0,
        several.replace(f"{16 * STARTS:#x}", "0x8"),
    )


@pytest.mark.parametrize("name", ["other", "unknown"])
def test_another_binary_shows_nothing(binaries: Any, name: str) -> None:
    reports = log((TOLD, STARTS), (READS, WRITES))
    assert sift(reports.replace("kernel", name), binaries)[0] == 0
    assert sift(reports.replace("kernel", name, 1), binaries)[0] == 1  # of two binaries


@pytest.mark.parametrize(("wrong", "failed"), [([], False), ([(READS, STARTS), (TOLD, WRITES)], True)])
def test_sanitize(
    wrong: Any, failed: bool, binaries: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tool is a script that writes such a log."""
    (tmp_path / "log").write_text(log((TOLD, STARTS), *wrong))
    program = tmp_path / "compute-sanitizer"
    program.write_text(f'#!/bin/sh\ncp {tmp_path}/log "$6"\n')
    program.chmod(0o755)
    assert sanitize.run(str(program), ["racecheck"], ["rope"], binaries) == failed
    said = capsys.readouterr().out.splitlines()[-1]
    reports = "reports of ordered accesses"
    wanted = (
        f"racecheck: 1 errors, 2 {reports} in kernel," if wrong else f"racecheck: 0 errors, 1 {reports}, exit"
    )
    assert said.startswith(wanted)


BINARIES = (
    ("flash_attention", "flash_attention_forward-warp_specialized-bf16-64-full-aligned-"),
    (
        "flash_attention_varlen",
        "flash_attention_varlen_forward-warp_specialized-bf16-64-causal-aligned-block_n128-",
    ),
    (
        "flash_attention_backward",
        "flash_attention_backward_warp_specialized-narrow-bf16-64-full-deterministic-",
    ),
    (
        "flash_attention_backward",
        "flash_attention_backward_warp_specialized-wide-bf16-192-causal-deterministic-",
    ),
    ("flash_attention_varlen_backward", "flash_attention_varlen_backward_warp_specialized-narrow-bf16-96-"),
)


@pytest.mark.parametrize(
    ("op", "start"), [BINARIES[0], *(pytest.param(*one, marks=pytest.mark.slow) for one in BINARIES[1:])]
)
def test_binaries(op: str, start: str) -> None:
    """Where one role writes and another reads, there is an order; without the barriers of groups some have none."""
    manifest = built_pack("sm90").op(op)
    name = next(name for name in manifest.variants if name.startswith(start))
    code = disassembled(manifest.variant(name).read())

    def pairs(of: str) -> dict[tuple[int, int], bool]:
        whole = Code(of)
        ends = [at for at, what in whole.instructions.items() if re.search(r"BAR\.SYNC\S* 0x1$", what)]
        places = defaultdict(list)
        for at, what in whole.instructions.items():
            if found := re.search(r"\b(LDS|STS)\b.*\[.*?(0x[0-9a-f]{5})\]", what):
                places[found[2]].append((found[1], at, sum(end < at for end in ends)))
        return {
            (write, read): whole.ordered(write, read)
            for accesses in places.values()
            for kind, write, role in accesses
            for other, read, other_role in accesses
            if (kind, other) == ("STS", "LDS") and role != other_role
        }

    found = pairs(code)
    assert len(found) > 3 and all(found.values())
    others = r"(?:(?!.*(?:BAR|SYNCS)\.).*\n)*"
    lacking = pairs(re.sub(rf"BAR\.SYNC\S* 0x\w+, 0x80 ;\n({others}.*ARRIVE)", r"NOP ;\n\1", code))
    assert lacking.keys() == found.keys()
    assert all(lacking.values()) == ("backward" in op and "-wide-" not in start)
