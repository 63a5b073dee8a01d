"""What PTX does to the shared memory that wgmma reads: a race that Triton makes on sm_90, so that the audit refuses it;
and the tensor memory (sm_100) that a block takes and gives back.

A loop that uses a loaded tile both in tl.dot and in registers gets one buffer too few for it, and the next tile is
copied over the one that a wgmma still reads (Triton's issue 6691, open in 3.9). On an NVIDIA H200 such a loop of Triton
3.6.0 (4 warps, 3 stages) gave other results from run to run, and right ones with a wait for all wgmma before the copy.
The gated kernel of flash-linear-attention's issue 640 has such a loop; one of its structure came out right there. It is
a race: a kernel may pass all tests. In some kernels ptxas hides it by
waiting for every wgmma, which another version need not do: the PTX is judged, not the machine code.

Addresses are computed for thread 0, along every path and with a branch taken both ways, until the buffers of each loop
repeat. What depends on arguments, on the block or on memory is unknown; Triton's own pipelines never do. Only what a
warp group does itself is judged: TMA and other warps' writes are ordered by mbarriers, which this does not follow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

_VISITS = 64  # states in which a block is run: more than the buffers of a loop, times the ways into it
_ROWS = 64  # of wgmma's first operand
_DEPTH = 32  # bytes of the inner dimension that one wgmma takes, all types
_FIELD, _UNIT = 0x3FFF, 4  # the first field of a matrix descriptor: an address in units of 16 bytes

_LABEL = re.compile(r"(\$L\w+):")
_INSTRUCTION = re.compile(r"(?:@!?(%\w+)\s+)?([a-z][\w.:]*)\s*([^;]*);")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_REGISTER = re.compile(r"%\w+(?:\.[xyz])?")
_TARGET = re.compile(r"\$L\w+")
_COLUMNS = re.compile(r"\.m64n(\d+)k")
_WRITES = ("cp.async.ca.", "cp.async.cg.", "st.shared", "stmatrix.")
_EVENTS = ("wgmma.", *_WRITES)
_TENSOR_MEMORY = re.compile(r"\btcgen05\.(alloc|dealloc)\.[^;]*,\s*(\w+);")

Region = tuple[int, int]  # the first byte, and the one behind the last


@dataclass(frozen=True)
class Races:
    """Lines of a kernel's PTX. ``overwritten``: what writes to memory that a running wgmma reads. ``unknown``:
    addresses that can't be computed."""

    overwritten: tuple[int, ...]
    unknown: tuple[int, ...]


@dataclass(frozen=True)
class _Instruction:
    op: str
    operands: tuple[str, ...]
    guard: str | None
    line: int


@dataclass
class _Block:
    instructions: list[_Instruction] = field(default_factory=list)
    following: list[int] = field(default_factory=list)
    live: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Memory:
    """What wgmma reads: not committed, and by group, oldest first."""

    uncommitted: tuple[Region, ...] = ()
    groups: tuple[tuple[Region, ...], ...] = ()


def races(text: str) -> Races:
    """Judge a kernel's PTX."""
    found: tuple[set[int], set[int]] = set(), set()
    if "wgmma.mma_async" in text:
        _explore(_graph(text), *found)
    return Races(*(tuple(sorted(lines)) for lines in found))


def tensor_memory(text: str) -> tuple[int, frozenset[int]]:
    """(columns of tensor memory that a block allocates, the sizes that it frees)."""
    found = [(name, int(columns, 0)) for name, columns in _TENSOR_MEMORY.findall(text)]
    return (
        sum(columns for name, columns in found if name == "alloc"),
        frozenset(columns for name, columns in found if name == "dealloc"),
    )


def _explore(blocks: Sequence[_Block], overwritten: set[int], unknown: set[int]) -> None:
    """Run every block in every state in which it can be reached."""
    seen: list[set[object]] = [set() for _ in blocks]
    work: list[tuple[int, Mapping[str, int], _Memory]] = [(0, {}, _Memory())]
    while work:
        at, before, memory = work.pop()
        values = {name: value for name, value in before.items() if name in blocks[at].live}
        state = (frozenset(values.items()), memory)
        if state not in seen[at] and len(seen[at]) < _VISITS:
            seen[at].add(state)
            memory = _run(blocks[at].instructions, values, memory, overwritten, unknown)
            work += [(following, values, memory) for following in blocks[at].following]


def _run(
    instructions: Sequence[_Instruction],
    values: dict[str, int],
    memory: _Memory,
    overwritten: set[int],
    unknown: set[int],
) -> _Memory:
    """Run one block: ``values`` and the lines found are updated."""
    reading, groups = memory.uncommitted, memory.groups
    dot: dict[tuple[int, int], set[int]] = {}  # (operand, bytes an instruction reads of it) -> addresses
    for one in instructions:
        if one.op.startswith("wgmma.mma_async"):
            for operand, descriptor, size in _reads(one):
                if (value := _value(descriptor, values)) is None:
                    unknown.add(one.line)
                else:
                    dot.setdefault((operand, size), set()).add((value & _FIELD) << _UNIT)
        elif one.op.startswith(("wgmma.fence", "wgmma.commit_group")):
            # The instructions of a dot read a tile in parts of the same size: it is as large as all of them.
            regions = tuple((min(parts), min(parts) + len(parts) * size) for (_, size), parts in dot.items())
            reading, dot = reading + regions, {}
            if one.op.startswith("wgmma.commit_group"):
                groups, reading = (*groups, reading), ()
        elif one.op.startswith("wgmma.wait_group"):
            groups = groups[max(len(groups) - int(one.operands[0]), 0) :]
        elif one.op.startswith(_WRITES):
            if (address := _address(one.operands[0], values)) is None:
                unknown.add(one.line)
                continue
            under_way = (*reading, *(region for group in groups for region in group))
            if any(first <= address < end for first, end in under_way):
                overwritten.add(one.line)
        elif (target := _target(one)) is not None:
            result = None if one.guard else _compute(one, values)
            values.pop(target, None)
            if result is not None:
                values[target] = result
    return _Memory(reading, groups)


def _reads(one: _Instruction) -> Iterator[tuple[int, str, int]]:
    """(operand, its descriptor, bytes) of what a wgmma reads from shared memory."""
    columns = _COLUMNS.search(one.op)
    assert columns is not None, one.op
    for operand, rows in ((1, _ROWS), (2, int(columns[1]))):
        if not one.operands[operand].startswith("{"):  # else the first operand is in registers
            yield operand, one.operands[operand], rows * _DEPTH


def _graph(text: str) -> list[_Block]:
    """The blocks of a kernel, of which the first is its entry, with no more than what addresses depend on."""
    blocks = _blocks(text)
    needed = _needed(blocks)
    for block in blocks:
        block.instructions = [i for i in block.instructions if _is_event(i.op) or _target(i) in needed]
    changed = True
    while changed:  # which registers are read before they are set, there or later
        changed = False
        for block in reversed(blocks):
            live = {name for following in block.following for name in blocks[following].live}
            for one in reversed(block.instructions):
                if not _is_event(one.op):
                    live.discard(_target(one) or "")
                live.update(_sources(one))
            if live != block.live:
                block.live, changed = frozenset(live), True
    return blocks


def _blocks(text: str) -> list[_Block]:
    """Labels inside of inline assembly, of loops that wait for an mbarrier, are no blocks."""
    blocks = [_Block()]
    places: dict[str, int] = {}
    tables: dict[str, list[str]] = {}
    jumps: list[tuple[int, list[str]]] = []
    ends: set[int] = set()  # blocks that don't go on into the next
    table: list[str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("//")[0].strip()
        label = _LABEL.match(line)
        if label and ".branchtargets" in line:  # of a brx.idx: its targets follow, one a line
            table = tables[label[1]] = []
            line = line.partition(".branchtargets")[2]
        elif label:
            blocks.append(_Block())
            places[label[1]] = len(blocks) - 1
            continue
        if table is not None:
            table += _TARGET.findall(line)
            table = None if ";" in line else table
        elif match := _INSTRUCTION.match(line):
            guard, op, operands = match.groups()
            targets = _TARGET.findall(operands) if op.startswith(("bra", "brx")) else []
            if targets or op in ("ret", "exit", "trap"):
                jumps.append((len(blocks) - 1, targets))
                if guard is None:
                    ends.add(len(blocks) - 1)
                blocks.append(_Block())
            else:
                texts = tuple(operand.strip() for operand in _OPERAND.findall(operands))
                blocks[-1].instructions.append(_Instruction(op, texts, guard, number))
    for at, names in jumps:
        blocks[at].following += [places[target] for name in names for target in tables.get(name, [name])]
    for at in range(len(blocks) - 1):
        if at not in ends:
            blocks[at].following.append(at + 1)
    return blocks


def _needed(blocks: Sequence[_Block]) -> set[str]:
    """The registers that addresses of shared memory are computed from."""
    made_from: dict[str, list[str]] = {}
    wanted: list[str] = []
    for block in blocks:
        for one in block.instructions:
            if _is_event(one.op):
                wanted += _sources(one)
            elif (target := _target(one)) is not None:
                made_from.setdefault(target, []).extend(_sources(one) if _is_integer(one.op) else [])
    needed: set[str] = set()
    while wanted:
        if (name := wanted.pop()) not in needed:
            needed.add(name)
            wanted += made_from.get(name, [])
    return needed


@cache
def _is_event(op: str) -> bool:
    return op.startswith(_EVENTS)


def _target(one: _Instruction) -> str | None:
    """The register that an instruction sets."""
    found = _REGISTER.match(one.operands[0]) if one.operands else None
    return found[0] if found else None


def _sources(one: _Instruction) -> list[str]:
    """The registers that decide what an instruction computes, or which shared memory it reads or writes."""
    if one.op.startswith("wgmma.mma_async"):
        texts = [descriptor for _, descriptor, _ in _reads(one)]
    elif one.op.startswith(_WRITES):
        texts = [one.operands[0]]
    else:
        texts = [] if _is_event(one.op) else list(one.operands[1:])
    return [name for text in texts for name in _REGISTER.findall(text)]


def _address(operand: str, values: Mapping[str, int]) -> int | None:
    """Of "[%r1+16]" or "[ %r1 + 0 ]"."""
    parts = [_value(part.strip(), values) for part in operand.strip("[]").split("+")]
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _value(operand: str, values: Mapping[str, int]) -> int | None:
    if operand in ("%tid.x", "%laneid", "global_smem"):  # thread 0; shared memory starts at 0
        return 0
    if operand.startswith("%"):
        return values.get(operand)
    try:
        return int(operand, 0)
    except ValueError:
        return None


_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
_ARITHMETIC: Mapping[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shl": lambda a, b: a << min(b, 64),
    "shr": lambda a, b: a >> min(b, 64),
    "min": min,
    "max": max,
}
_OTHERS = {"bfe", "cvt", "mad", "mov", "neg", "not", "selp", "setp", "shfl"}


@cache
def _is_integer(op: str) -> bool:
    """Whether addresses are computed with such an instruction."""
    name = op.partition(".")[0]
    return (name in _ARITHMETIC or name in _OTHERS) and not re.search(r"\.b?f\d|\.hi\.", op)


@cache
def _widths(op: str) -> tuple[int, int, bool]:
    """(bits of the inputs, bits of the result, whether the inputs have a sign)."""
    if op.endswith(".pred"):
        return 1, 1, False
    types = re.findall(r"\.([subp])(\d+)", op)
    kind, bits = types[-1] if types else ("b", "32")
    inputs = int(bits)
    if op.startswith("setp"):
        result = 1
    else:
        result = 2 * inputs if ".wide" in op else int(types[0][1]) if types else inputs
    return inputs, result, kind == "s"


def _compute(one: _Instruction, values: Mapping[str, int]) -> int | None:
    """What an instruction sets its register to; None where that is unknown."""
    if not _is_integer(one.op):
        return None
    name, _, kind = one.op.partition(".")
    inputs = [_value(operand, values) for operand in one.operands[1:]]
    if name == "selp":
        return None if inputs[2] is None else inputs[0 if inputs[2] else 1]
    if name == "shfl":  # thread 0's own value where all take one lane's: the index of its warp
        return inputs[0] if kind.startswith("sync.idx") else None
    if name == "and" and 0 in inputs:
        return 0
    numbers = [value for value in inputs if value is not None]
    if len(numbers) < len(inputs):
        return None
    bits, result_bits, signed = _widths(one.op)
    numbers = [value & ((1 << bits) - 1) for value in numbers]
    if signed:
        numbers = [value - (1 << bits) if value >> (bits - 1) else value for value in numbers]
    if name == "setp":
        compare = _COMPARISONS.get(kind.partition(".")[0])
        if compare is None or len(numbers) != 2:
            return None
        result = int(compare(*numbers))
    elif name in ("mov", "cvt"):
        result = numbers[0]
    elif name == "not":
        result = ~numbers[0]
    elif name == "neg":
        result = -numbers[0]
    elif name == "bfe":
        value, first, length = numbers
        result = value >> first & ((1 << length) - 1)
        if signed and length and result >> (length - 1):
            result -= 1 << length
    elif name == "mad":
        result = numbers[0] * numbers[1] + numbers[2]
    else:
        result = _ARITHMETIC[name](*numbers)
    return result & ((1 << result_bits) - 1)
