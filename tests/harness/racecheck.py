"""Which of racecheck's reports are of shared-memory accesses that are ordered all the same.

Of kernels by warp groups it reports accesses soon after the barriers of all threads by which Triton (3.6.0) starts and
ends a ``warp_specialize``: the word that tells a warp what to run, captured values, the first tile on the forward's
board. Later tiles, handed on by the same instructions, it does not report. A report counts as none where the binary's
machine code shows the order in one of three forms; all else remains an error:

- One of the accesses alone is the first group's before it lets the others start, or after they have ended. A barrier
  of all threads lies between.
- A pair of mbarriers hands the place on. The writer waits for the one on which the reader arrives behind its access,
  the reader for the one on which the writer does; between an access and the arrival, which is one thread's, the warps
  of a group of several meet. One of the two may wait for other things, too, while it has the place, if it arrives in
  one place of its code alone. Whether phases are right the code does not show: tests of the interpreter do.
- Two groups take turns: each waits in one place of its code for one mbarrier, on which the other arrives in one place,
  where its warps have just met. Both accesses lie between the wait and the arrival, in a loop of them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from liger_aot.runtime.manifest import Variant

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
_OF_ALL = re.compile(r"BAR\.SYNC\S* 0x1$")
_OF_A_GROUP = re.compile(r"BAR\.SYNC\S* 0x\w+, 0x80$")
_OF_SEVERAL_WARPS = re.compile(rf"{_OF_A_GROUP.pattern}|\bWARPGROUP\.")
_OF_EIGHT_WARPS = re.compile(r"BAR\.SYNC\S* 0x\w+, 0x(80|100)$")  # or of four
_SYNCHRONIZES = re.compile(r"\b(BAR|SYNCS)\.")
_MATTERS = re.compile(r"\b(BAR|SYNCS|LDSM?|STSM?)\b")
_MBARRIER = re.compile(r"SYNCS\.(PHASECHK|ARRIVE)\..*\[.*?(0x[0-9a-f]+)\]")
_KINDS = {"Read": re.compile(r"\bLDSM?\b"), "Write": re.compile(r"\bSTSM?\b")}
_REPORT = re.compile(r"^(?==+ \w+: Race reported)", re.M)
_ACCESS = re.compile(r"(?:between|and) (Read|Write) access at (\w+)\+0x([0-9a-f]+)")


class Code:
    """A kernel's machine code as nvdisasm prints it."""

    def __init__(self, text: str) -> None:
        self.instructions = {int(at, 16): what for at, what in _INSTRUCTION.findall(text)}
        self._of_all = sorted(at for at, what in self.instructions.items() if _OF_ALL.search(what))

    def has(self, accesses: Iterable[tuple[str, int]]) -> bool:
        """Whether those, Read or Write at a place, are there."""
        return all(_KINDS[kind].search(self.instructions.get(at, "")) for kind, at in accesses)

    def ordered(self, a: int, b: int) -> bool:
        return self._apart(a, b) or self._handed_on(a, b) or self._by_turns(a, b)

    def _apart(self, a: int, b: int) -> bool:
        """The first group's code is the last and has four barriers of all: the others start, have started, have ended,
        and leave. It writes what they are to do before it lets them start and leave."""
        if len(self._of_all) < 5:
            return False
        others, start, _, ended, leave = self._of_all[-5:]
        if not all(_KINDS["Write"].search(self._last_before(at)) for at in (start, leave)):
            return False
        return any((low < a < high) != (low < b < high) for low, high in ((others, start), (ended, leave)))

    def _last_before(self, barrier: int) -> str:
        """Of what touches shared memory or synchronizes."""
        return [what for at, what in self.instructions.items() if at < barrier and _MATTERS.search(what)][-1]

    def _handed_on(self, a: int, b: int) -> bool:
        return self._hands_on(a, b) or self._hands_on(b, a)

    def _hands_on(self, a: int, b: int) -> bool:
        barriers = self._mbarriers(a)
        back = barriers[::-1]
        return len(set(barriers)) == 2 and (self._mbarriers(b) == back or self._keeps(b, *back))

    def _keeps(self, access: int, waited: int, arrived: int) -> bool:
        """Whether a group has the place from where it waits for one mbarrier to the only arrival on the other, whatever
        else it waits for between them."""
        role = self._role(access)
        found = [(at, m[1], int(m[2], 16)) for at, what in role.items() if (m := _MBARRIER.search(what))]
        waits = [at for at, kind, on in found if (kind, on) == ("PHASECHK", waited)]
        arrivals = [at for at, kind, on in found if (kind, on) == ("ARRIVE", arrived)]
        if len(arrivals) != 1:
            return False
        begins = arrivals[0] if access >= arrivals[0] else 0
        if not any(begins < at < access for at in waits):
            return False
        if not any(map(_OF_SEVERAL_WARPS.search, role.values())):
            return True
        met = max(
            (at for at, what in role.items() if at < arrivals[0] and _SYNCHRONIZES.search(what)), default=0
        )
        return bool(_OF_A_GROUP.search(role.get(met, ""))) and not met < access < arrivals[0]

    def _by_turns(self, a: int, b: int) -> bool:
        turn = self._turn(a)
        return len(set(turn)) == 2 and self._turn(b) == turn[::-1]

    def _turn(self, access: int) -> tuple[int, ...]:
        """(waited for, arrived on) where the access is in its group's turn."""
        role = self._role(access)
        found = [(at, m[1], int(m[2], 16)) for at, what in role.items() if (m := _MBARRIER.search(what))]
        if sorted(kind for _, kind, _ in found) != ["ARRIVE", "PHASECHK"]:
            return ()
        (arrives, _, on), (waits, _, for_) = sorted(found, key=lambda one: one[1])
        met = max((at for at, what in role.items() if at < arrives and _SYNCHRONIZES.search(what)), default=0)
        inside = waits < access < arrives if waits < arrives else not arrives <= access <= waits
        ready = _OF_EIGHT_WARPS.search(role.get(met, "")) and not met < access < arrives
        return (for_, on) if inside and ready else ()

    def _role(self, access: int) -> dict[int, str]:
        """The code of the access's group."""
        first = max((at for at in self._of_all if at < access), default=0)
        last = min((at for at in self._of_all if at > access), default=first)
        return {at: what for at, what in self.instructions.items() if first < at < last}

    def _mbarriers(self, access: int) -> tuple[int, ...]:
        """(waited for before it, arrived on behind it), or none."""
        role = self._role(access)
        before = [what for at, what in role.items() if at < access and _SYNCHRONIZES.search(what)]
        behind = [what for at, what in role.items() if at > access and _SYNCHRONIZES.search(what)]
        several = any(map(_OF_SEVERAL_WARPS.search, role.values()))
        if several and not (behind and _OF_A_GROUP.search(behind.pop(0))):
            return ()
        found = [_MBARRIER.search(what) for what in (*before[-1:], *behind[:1])]
        if [m and m[1] for m in found] != ["PHASECHK", "ARRIVE"]:
            return ()
        return tuple(int(m[2], 16) for m in found if m)


def disassembled(image: bytes) -> str:
    """By Triton's nvdisasm, or one on the PATH."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        command = [str(tool) if tool.exists() else shutil.which("nvdisasm") or "nvdisasm", "-c", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def sift(log: str, binaries: Mapping[str, Variant]) -> tuple[int, str]:
    """How many of a log's reports are of ordered accesses, and the log without them. A report is the first access
    against each of the others; ``binaries`` are by the names that it has for them."""
    before, *reports = _REPORT.split(log)
    codes: dict[str, Code] = {}
    left = [before]
    for report in reports:
        accesses = _ACCESS.findall(report)
        kernels = {kernel for _, kernel, _ in accesses}
        for kernel in kernels & set(binaries) - set(codes):
            codes[kernel] = Code(disassembled(binaries[kernel].read()))
        code = codes.get(kernels.pop()) if len(kernels) == 1 else None
        places = [(kind, int(at, 16)) for kind, _, at in accesses]
        if (
            code is None
            or not code.has(places)
            or not all(code.ordered(places[0][1], at) for _, at in places[1:])
        ):
            left.append(report)
    return 1 + len(reports) - len(left), "".join(left)
