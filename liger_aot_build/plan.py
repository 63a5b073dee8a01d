"""Declaration x profile -> variants. Pure: no GPU, no Triton, nothing written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from liger_aot_build.declaration import (
    DTYPES,
    FP8,
    Declaration,
    Form,
    Kernel,
    Value,
    holds,
    longest_row,
    of_dtype,
    tiles_of,
)
from liger_aot_build.errors import ProfileError
from liger_aot_build.profile import ABSENT, ANY, Arch, Profile, Row

ALIGNMENT = 16  # what the aligned variant assumes of pointers (bytes), strides and sizes (elements)
_ALIGNED = {True: "aligned", False: "generic"}
# Constants that the profile decides: 1 where its [arch] says so.
DECIDED = {"PDL": "pdl", "FP16_FLUSHES": "fp16_flushes", "TENSOR_MEMORY": "tensor_memory"}


@dataclass(frozen=True)
class Variant:
    """One binary to make."""

    name: str
    op: str
    kernel: str
    function: str
    form: Form
    axes: Mapping[str, Value]
    aligned: bool
    arguments: Mapping[str, str]  # name -> Triton type, dtypes filled in
    hinted: tuple[str, ...]  # arguments divisible by ALIGNMENT
    constants: Mapping[str, int | bool]
    options: Mapping[str, int]
    host: Mapping[str, int]
    where: str  # the profile's row, for messages
    language: str = "triton"
    matrix: bool = False  # whether it must have matrix instructions

    @property
    def cooperative(self) -> bool:
        """Whether its programs wait for each other."""
        return self.form.cooperative is not None and self.constants[self.form.cooperative] > 1

    @property
    def pdl(self) -> bool:
        """Whether it is a programmatic dependent launch: it may start before the kernel before it has ended."""
        return self.form.pdl is not None and self.constants[self.form.pdl] > 0


@dataclass(frozen=True)
class KernelPlan:
    kernel: Kernel
    # Dispatch key -> (max_n, variant name), ascending.
    tables: Mapping[str, tuple[tuple[int | None, str], ...]]
    variants: Mapping[str, Variant]
    # Dispatch key -> (max_n, most_rows, variant name), looked at before the tables, in order.
    few: Mapping[str, tuple[tuple[int | None, int, str], ...]]
    absent: Mapping[str, str]  # dispatch key -> why there is no binary past its table's last bound, or at all


@dataclass(frozen=True)
class Plan:
    """All that is to be compiled of one op for one architecture."""

    op: str
    arch: str
    kernels: Mapping[str, KernelPlan]

    @property
    def variants(self) -> tuple[Variant, ...]:
        return tuple(v for k in self.kernels.values() for v in k.variants.values())


def plan(declaration: Declaration, profile: Profile) -> Plan:
    """Every variant that the profile's tables ask for; ProfileError names the row that can't be met."""
    fitted = {
        n: _fitted(k, profile.arch)
        for n, k in declaration.kernels.items()
        if not k.optional or n in profile.tables
    }
    carried = {n: k for n, k in fitted.items() if all(k.axes.values())}
    kernels = {
        name: _plan_kernel(declaration.op, k, declaration.kernels[name], profile)
        for name, k in carried.items()
    }
    return Plan(declaration.op, profile.arch.name, kernels)


def _fitted(kernel: Kernel, arch: Arch) -> Kernel:
    """The kernel with the constants that the profile decides, and its axes without the 8-bit floats that the
    architecture lacks."""
    decided = {constant: int(getattr(arch, field)) for constant, field in DECIDED.items()}
    forms = {
        name: replace(
            form, defaults={**form.defaults, **{c: decided[c] for c in form.constants if c in decided}}
        )
        for name, form in kernel.forms.items()
    }
    axes = {
        axis: tuple(v for v in values if v not in FP8 or v == arch.fp8)
        for axis, values in kernel.axes.items()
    }
    return replace(kernel, forms=forms, axes=axes)


def dispatch_key(axes: Mapping[str, Value], aligned: bool) -> str:
    return "/".join(
        (*(str(v).lower() if isinstance(v, bool) else str(v) for v in axes.values()), _ALIGNED[aligned])
    )


def resolved(kernel: Kernel, row: Row) -> Row:
    """The row with its numbers told apart: those that choose an axis' value, those that the host reads, constants."""
    axes = {k.lower(): (v,) for k, v in row.constants.items() if k.lower() in kernel.axes}
    numbers = {k.lower(): int(v) for k, v in row.constants.items() if k.lower() in kernel.host}
    constants = {k: v for k, v in row.constants.items() if k.lower() not in {*axes, *numbers}}
    return replace(row, when={**row.when, **axes}, host={**row.host, **numbers}, constants=constants)


def _plan_kernel(op: str, kernel: Kernel, declared: Kernel, profile: Profile) -> KernelPlan:
    rows = tuple(resolved(kernel, row) for row in profile.table(kernel.name).rows)
    for row in rows:
        check_row(kernel, row, profile)
    tables: dict[str, tuple[tuple[int | None, str], ...]] = {}
    variants: dict[str, Variant] = {}
    few: dict[str, tuple[tuple[int | None, int, str], ...]] = {}
    absent: dict[str, str] = {}
    used: set[str] = set()
    for axes in combinations(kernel):
        for aligned in (True,) if kernel.always_aligned else (True, False):
            entries: list[tuple[int | None, str]] = []
            of_few: list[tuple[int | None, int, str]] = []
            key = dispatch_key(axes, aligned)
            for row in rows:
                if key in absent:
                    break
                if row.form == ABSENT:
                    open_ended = not entries or entries[-1][0] is not None
                    if open_ended and holds(row.when, {**axes, "aligned": aligned}):
                        absent[key] = row.why or ""
                        used.add(row.where)
                    continue
                form = kernel.forms[row.form]
                if not all(holds(w, {**axes, "aligned": aligned}) for w in (row.when, form.requires)):
                    continue
                if row.most_rows is not None:
                    if not any(_holds_all(row, *entry[:2]) for entry in of_few):
                        variant = make_variant(op, kernel, row, axes, aligned)
                        of_few.append((row.max_n, row.most_rows, variant.name))
                        variants[variant.name] = variant
                        used.add(row.where)
                    continue
                if entries and entries[-1][0] is None:
                    continue  # everything is held already
                if entries and row.max_n is not None and row.max_n <= (entries[-1][0] or 0):
                    continue  # an earlier row holds all of it, for these dtypes
                variant = make_variant(op, kernel, row, axes, aligned)
                if variant.constants.get("EXACT"):
                    _check_exact(variant, row, entries[-1][0] if entries else 0)
                entries.append((row.max_n, variant.name))
                variants[variant.name] = variant
                used.add(row.where)
            if not entries and (kernel.optional or key in absent):
                continue  # for these values of the axes the architecture does without
            if key not in absent and (not entries or entries[-1][0] is not None):
                largest = entries[-1][0] if entries else 0
                raise ProfileError(
                    f"{profile.path.name}: [kernel.{kernel.name}]: no row holds {key} past n = {largest}"
                )
            tables[key] = tuple(entries)
            if of_few:
                few[key] = tuple(of_few)
    lacking = [
        axes
        for axes in combinations(declared)
        if any(value in FP8 and value not in kernel.axes[axis] for axis, value in axes.items())
    ]
    if unused := [row.where for row in rows if row.where not in used and not _for_any(kernel, row, lacking)]:
        raise ProfileError(f"{unused[0]}: never reached: earlier rows hold all that it would")
    return KernelPlan(kernel, tables, variants, few, absent)


def _for_any(kernel: Kernel, row: Row, choices: Sequence[Mapping[str, Value]]) -> bool:
    """Whether a row is for some of these: the values that an inherited table serves and this chip lacks."""
    when = {axis: values for axis, values in row.when.items() if axis != "aligned"}
    requires = {} if row.form == ABSENT else kernel.forms[row.form].requires
    return any(holds(when, c) and holds(requires, c) for c in choices)


def _holds_all(row: Row, max_n: int | None, most_rows: int) -> bool:
    """Whether an earlier row for few rows, with these bounds, takes every problem that ``row`` would."""
    return (max_n is None or (row.max_n is not None and row.max_n <= max_n)) and (
        row.most_rows or 0
    ) <= most_rows


def _check_exact(variant: Variant, row: Row, last: int | None) -> None:
    """An unmasked row may only meet the one length that it covers: the row before must hold all shorter ones."""
    longest = longest_row(variant.form, variant.constants) or 0
    if not variant.aligned or row.max_n != longest or (last or 0) < longest - ALIGNMENT:
        raise ProfileError(
            f"{row.where}: exact covers n = {longest} alone: it needs max_n = {longest}, aligned = true, and a row "
            f"before it with max_n = {longest - ALIGNMENT}; that has {last}"
        )


def check_row(kernel: Kernel, row: Row, profile: Profile) -> None:
    """ProfileError where a row asks for what the kernel or the architecture does not have."""
    if row.form not in (*kernel.forms, ABSENT):
        raise ProfileError(
            f"{row.where}: unknown form {row.form!r}; {kernel.name} has {', '.join(kernel.forms)}"
        )
    for axis, values in row.when.items():
        allowed = (True, False) if axis == "aligned" else kernel.axes.get(axis)
        if allowed is None:
            raise ProfileError(f"{row.where}: unknown key {axis!r}")
        dtypes = DTYPES if axis in kernel.axes and of_dtype(allowed, kernel.axes) else ()
        if bad := [v for v in values if v not in allowed and v not in dtypes]:
            raise ProfileError(
                f"{row.where}: {axis}: {bad[0]!r} is not one of {', '.join(map(str, allowed))}"
            )
    if row.form == ABSENT:
        return
    form = kernel.forms[row.form]
    if unknown := [c.lower() for c in row.constants if c not in form.constants]:
        raise ProfileError(f"{row.where}: unknown key {unknown[0]!r} for form {form.name!r}")
    for axes in combinations(kernel):
        if holds({k: v for k, v in row.when.items() if k != "aligned"}, axes):
            _check_constants(form, row, kernel.decided(axes))
    constants = {**form.defaults, **row.constants}
    if form.staged:
        _check_staged(form, constants, row, kernel, profile)


def _check_constants(form: Form, row: Row, decided: Mapping[str, int | bool]) -> None:
    """ProfileError unless the row and the axes' values between them give each constant, once, and cover the row's n."""
    if twice := [c.lower() for c in row.constants if c in decided]:
        raise ProfileError(f"{row.where}: {twice[0]!r} is decided by an axis, not by the row")
    constants = {**form.defaults, **decided, **row.constants}
    if missing := [c.lower() for c in form.constants if c not in constants]:
        raise ProfileError(f"{row.where}: {missing[0]!r} is missing for form {form.name!r}")
    covered = longest_row(form, constants)
    if covered is not None and (row.max_n is None or row.max_n > covered):
        raise ProfileError(f"{row.where}: max_n = {row.max_n}, but form {form.name!r} covers {covered}")


def _check_staged(
    form: Form, constants: Mapping[str, int | bool], row: Row, kernel: Kernel, profile: Profile
) -> None:
    """The tiles that a pipeline keeps in shared memory, at the widest dtype the row serves."""
    dtypes = row.when.get("dtype", kernel.axes.get("dtype", ()))
    width = max(DTYPES[d] for d in dtypes)
    tile = constants.get("ROWS", 1) * constants["BLOCK"] * width
    shared = (constants["STAGES"] - 1) * len(form.staged) * tile
    if shared > profile.arch.shared_per_block:
        raise ProfileError(
            f"{row.where}: {constants['STAGES']} stages of {len(form.staged)} tiles of {tile} bytes need {shared} "
            f"bytes of shared memory; {profile.arch.name} has {profile.arch.shared_per_block} a block"
        )


def combinations(kernel: Kernel) -> Iterator[dict[str, Value]]:
    """Every distinct choice of the axes' values that is built; an axis may take the dtype of an earlier one."""
    seen: set[tuple[Value, ...]] = set()
    for values in product(*kernel.axes.values()):
        chosen: dict[str, Value] = {}
        for axis, value in zip(kernel.axes, values, strict=True):
            chosen[axis] = chosen.get(value, value) if isinstance(value, str) else value
        if tuple(chosen.values()) in seen or any(holds(rule, chosen) for rule in kernel.excluded):
            continue
        seen.add(tuple(chosen.values()))
        yield chosen


def make_variant(op: str, kernel: Kernel, row: Row, axes: Mapping[str, Value], aligned: bool) -> Variant:
    """The binary that a row asks for at one choice of the axes' values and alignment: the same for both where alignment
    does not matter to it."""
    form = kernel.forms[row.form]
    decided = kernel.decided(axes)
    constants = {c: {**form.defaults, **decided, **row.constants}[c] for c in form.constants}
    numbers = [
        f"{k.lower()}{int(v)}" for k, v in constants.items() if v != {**form.defaults, **decided}.get(k)
    ]
    numbers += [f"{k.replace('num_', '')}{v}" for k, v in row.options.items()]
    numbers += [f"{k.partition('_')[0]}{v}" for k, v in row.host.items()]
    if row.any_alignment:
        aligned = False
    kind = ANY if row.any_alignment else _ALIGNED[aligned]
    values = [axis if value is True else str(value) for axis, value in axes.items() if value is not False]
    name = "-".join((kernel.name, form.name, *values, kind, *numbers))
    taken = kernel.taken(axes)
    return Variant(
        name=name,
        op=op,
        kernel=kernel.name,
        function=form.function,
        form=form,
        axes=dict(axes),
        aligned=aligned,
        arguments={name: _filled(kernel.arguments[name], axes, constants) for name in taken},
        hinted=tuple(name for name in kernel.aligned if name in taken) if aligned else (),
        constants=constants,
        options=row.options,
        host=row.host,
        where=row.where,
        language=form.language or kernel.language,
        matrix=kernel.matrix,
    )


def _filled(kind: str, axes: Mapping[str, Value], constants: Mapping[str, int | bool]) -> str:
    """An argument's Triton type, with the dtypes and sizes of a variant."""
    if (tiles := tiles_of(kind)) is not None:
        sizes = ", ".join(str(int(constants.get(size, size))) for size in tiles[1])
        return f"tensordesc<{axes.get(tiles[0], tiles[0])}[{sizes}]>"
    return f"*{axes.get(kind[1:], kind[1:])}" if kind.startswith("*") else kind
