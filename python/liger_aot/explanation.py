"""``explain``: which binaries a call would run, and why, read from the installed packs without a GPU."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from liger_aot.errors import ArgumentError, ArgumentTypeError, NotBuilt, PackNotFound, printable
from liger_aot.ops.registry import load
from liger_aot.runtime.manifest import Kernel, OpManifest, Pack
from liger_aot.runtime.packs import describe, installed_packs, pack_of

if TYPE_CHECKING:
    import torch

    from liger_aot.ops.op import Op, Problem


@dataclass(frozen=True)
class Choice:
    """One kernel of a call on one architecture: the binary that dispatch takes and what the build found in it."""

    op: str
    kernel: str
    arch: str
    variant: str  # the binary's name
    num_warps: int
    warp_groups: int | None  # consumer warp groups, where the profile has them
    threads: int  # a block
    registers: int  # a thread
    shared: int  # bytes of dynamic shared memory a block
    local_bytes: int  # of local memory (spills) a thread
    resident: int  # blocks a multiprocessor holds at once
    numbers: Mapping[str, int] = field(hash=False)  # the profile's launch numbers
    why: str  # the dispatch key, the bound that holds n, the profile's row

    def __str__(self) -> str:
        return f"{self.arch} {self.kernel}: {self.variant}. {self.why}"


def explain(
    name: str,
    *,
    arch: str | None = None,
    shape: Sequence[int],
    dtype: torch.dtype | str,
    dtypes: Mapping[str, torch.dtype | str] | None = None,
) -> tuple[Choice, ...]:
    """The binaries that a call of op ``name`` with contiguous, aligned tensors takes. Needs no GPU.

    Args:
        name: as for ``load``.
        arch: an installed architecture such as "sm90"; None is every installed one that carries the op.
        shape: of the op's first argument.
        dtype: its dtype: torch's, or a name such as "bf16" or "bfloat16".
        dtypes: dtypes of further arguments by name, where they differ: ``{"weight": "fp32"}``.

    Returns:
        one choice a kernel and architecture, architectures in order of their names.

    Raises:
        UnknownOp: there is no such op.
        PackNotFound: the architecture is not installed, or its pack does not carry the op.
        PackDamaged, PackTooNew: its pack can't be used.
        ArgumentError, ArgumentTypeError: the shape is empty or not of positive integers; a dtype is unknown, or the op
            is not built for it.
    """
    op: Op = load(name)
    sizes = _sizes(shape)
    further = {argument: _dtype(value, codes=True) for argument, value in (dtypes or {}).items()}
    problems = op.problems(sizes, _dtype(dtype), further)
    if arch is not None:
        packs: Sequence[Pack] = (pack_of(arch),)
    else:
        packs = [pack for pack in installed_packs() if name in pack.ops]
        if not packs:
            raise PackNotFound(f"no pack that carries {name}: {describe()}")
    choices: list[Choice] = []
    for pack in packs:
        if name not in pack.ops:
            raise PackNotFound(f"pack {pack.arch} carries no {name}; it has {', '.join(pack.ops)}")
        manifests = {n: pack.op(n) for n in (op.name, *op.uses) if n in pack.ops}
        _check_arguments(further, problems, manifests.values())
        carried = [p for p in problems if _carries(manifests, p)]
        choices += [_choice(pack.arch, manifests, problem) for problem in carried or problems]
    return tuple(choices)


def table(choices: Iterable[Choice]) -> str:
    """The choices as a table for a terminal, one a line."""
    facts = ["warps", "groups", "threads", "registers", "shared", "local", "blocks/multiprocessor"]
    rows = [["arch", "kernel", "form", *facts, "launch numbers"]]
    for c in choices:
        numbers = ", ".join(f"{key} {value}" for key, value in c.numbers.items() if key != "warp_groups")
        groups = "-" if c.warp_groups is None else c.warp_groups
        form = c.variant.removeprefix(f"{c.kernel}-").partition("-")[0]
        values = (c.num_warps, groups, c.threads, c.registers, c.shared, c.local_bytes, c.resident)
        rows.append([c.arch, c.kernel, form, *map(str, values), numbers])
    return columns(rows)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines of aligned columns; numbers are aligned at their right."""
    rows = [[printable(cell) for cell in row] for row in rows]
    by_column = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in by_column]
    numeric = [all(cell.isdigit() or cell == "-" for cell in column[1:]) for column in by_column]
    lines = []
    for row in rows:
        cells = zip(row, widths, numeric, strict=True)
        lines.append("  ".join(c.rjust(w) if right else c.ljust(w) for c, w, right in cells).rstrip())
    return "\n".join(lines)


def _sizes(shape: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(shape, Sequence) or any(type(size) is not int for size in shape):
        raise ArgumentTypeError(f"shape must be a sequence of integers, got {shape!r}")
    if not shape or min(shape) < 1:
        raise ArgumentError(
            f"shape must have sizes of 1 or more, got {tuple(shape)}: an empty tensor launches nothing"
        )
    return tuple(shape)


def _dtype(given: torch.dtype | str, codes: bool = False) -> torch.dtype:
    from liger_aot.runtime.dispatch import CODE_NAMES, DTYPE_NAMES

    for dtype, short in {**DTYPE_NAMES, **(CODE_NAMES if codes else {})}.items():
        if given == dtype or given in (short, str(dtype), str(dtype).removeprefix("torch.")):
            return dtype
    raise ArgumentTypeError(
        f"no op is built for dtype {given!r}; there are {', '.join(DTYPE_NAMES.values())}"
    )


def _check_arguments(
    given: Mapping[str, torch.dtype], problems: Iterable[Problem], manifests: Iterable[OpManifest]
) -> None:
    """ArgumentError for a dtype of an argument that no kernel has a choice for."""
    kernels = {problem.kernel for problem in problems}
    axes = {axis for m in manifests for k in m.kernels.values() if k.name in kernels for axis in k.axes}
    axes.discard("dtype")
    for argument in given:
        if argument not in axes:
            raise ArgumentError(
                f"dtypes: no argument {argument!r}; there are: {', '.join(sorted(axes)) or 'none'}"
            )


def _carries(manifests: Mapping[str, OpManifest], problem: Problem) -> bool:
    """Whether the pack has the kernel in this form, or says why not: not every architecture and dtype has all."""
    from liger_aot.runtime.dispatch import key_text

    key = key_text((*problem.axes, problem.aligned))
    kernels = [m.kernels[problem.kernel] for m in manifests.values() if problem.kernel in m.kernels]
    return any(key in kernel.tables or key in kernel.absent for kernel in kernels)


def _choice(arch: str, manifests: Mapping[str, OpManifest], problem: Problem) -> Choice:
    from liger_aot.runtime.dispatch import key_text
    from liger_aot.runtime.grid import splits_rows

    owner = next((op for op, m in manifests.items() if problem.kernel in m.kernels), None)
    if owner is None:
        raise PackNotFound(f"pack {arch} has no kernel {problem.kernel}")
    kernels = manifests[owner].kernels
    kernel = kernels[problem.kernel]
    key = key_text((*problem.axes, problem.aligned))
    name, held = _held(arch, kernel, key, problem)
    splitting = kernels.get(problem.split or "")
    most = max((rows for _, rows, _ in kernel.few.get(key, ())), default=0)
    if (
        splitting is not None
        and key in splitting.tables
        and problem.rows is not None
        and problem.rows <= most
    ):
        name_of_it, by_n = _held(arch, splitting, key, problem)
        numbers = manifests[owner].variant(name_of_it).numbers
        if splits_rows(numbers, problem.n, problem.rows):
            kernel, name = splitting, name_of_it
            held = f"{by_n} for up to {numbers['up_to_rows']} rows, with {problem.rows}"
    variant = manifests[owner].variant(name)
    return Choice(
        op=owner,
        kernel=kernel.name,
        arch=arch,
        variant=name,
        num_warps=variant.num_warps,
        warp_groups=variant.numbers.get("warp_groups"),
        threads=variant.threads,
        registers=variant.registers,
        shared=variant.shared,
        local_bytes=variant.local_bytes,
        resident=variant.resident,
        numbers=variant.numbers,
        why=f"For {key}, n = {problem.n} {held}: {variant.row}.",
    )


def _held(arch: str, kernel: Kernel, key: str, problem: Problem) -> tuple[str, str]:
    """The variant for the problem's size, and in words the bound that holds it."""
    n, rows = problem.n, problem.rows
    if key in kernel.absent:
        last = kernel.tables[key][-1][0] if key in kernel.tables else None
        if last is None or n > last:
            raise NotBuilt(kernel.not_built(key))
    if key not in kernel.tables:
        raise ArgumentTypeError(
            f"{kernel.name} of {arch} is not built for {key}; it is for {', '.join(sorted(kernel.tables))}"
        )
    for most_n, most, name in kernel.few.get(key, ()):
        if rows is not None and rows <= most and (most_n is None or n <= most_n):
            by_n = "is served as every n" if most_n is None else f"is held by the bound {most_n}"
            return name, f"{by_n} for up to {most} rows, with {rows}"
    entries = kernel.tables[key]
    bounds = [bound for bound, _ in entries if bound is not None]
    i = bisect_left(bounds, n)
    if i == len(bounds):
        held = f"is past the last bound, {bounds[-1]}" if bounds else "is served as every n"
    else:
        held = f"is held by the bound {bounds[i]} ({bounds[i - 1] + 1 if i else 1} to {bounds[i]})"
    return entries[i][1], held
