"""An architecture profile: one TOML file read into frozen dataclasses, every key known, every number checked."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from liger_aot_build.declaration import DTYPES, FP8
from liger_aot_build.errors import ProfileError
from liger_aot_build.paths import PROFILES

if sys.version_info >= (3, 11):
    import tomllib
else:
    from setuptools.compat.py310 import tomllib

BACKENDS = ("cuda", "hip")
DERIVED = "derived, not measured"  # what the provenance of numbers that nobody measured begins with
# The form of a row for what the architecture does without; ``why`` says what to use instead.
ABSENT = "absent"
ANY = "any"  # a row's ``aligned``, where an aligned binary would not be faster
OPTIONS = ("num_warps", "maxnreg", "waves_per_eu")  # launch numbers that the compiler takes
# The one that every op's host code reads: forms that declare no other (``host``) need not name it.
HOST_NUMBERS = ("programs_per_multiprocessor",)


@dataclass(frozen=True)
class Arch:
    """What the chip can do. Bytes, threads and registers; a register is 32 bits wide."""

    name: str
    backend: str
    target: str  # what Triton is told: "90", "gfx942"
    machine: str  # what its binaries must say they are: "sm_90a", "gfx942"
    serves: tuple[str, ...]  # compute capabilities ("9.0") or gfx names, most wanted first
    warp_size: int
    threads_per_block: int
    threads_per_multiprocessor: int
    blocks_per_multiprocessor: int
    registers_per_thread: int
    registers_per_multiprocessor: int
    shared_per_block: int
    shared_per_multiprocessor: int
    matrix: str  # its matrix instructions, as the audit names them: "HMMA", "HGMMA", "MFMA"
    pdl: bool  # whether it has programmatic dependent launch
    fp8: str  # the 8-bit float that it converts to: "fp8e4nv" (e4m3), "fp8e4b8" (e4m3fnuz), or "none"
    fp16_flushes: bool  # whether its float16 matrix instructions read subnormal numbers as zeros

    @property
    def tensor_memory(self) -> bool:
        """Whether matrix instructions accumulate in tensor memory (tcgen05)."""
        return self.matrix == "UTCHMMA"


@dataclass(frozen=True)
class CodeObject:
    """What an AMD chip's binaries mean. Counts are a work-item's, LDS is a workgroup's."""

    elf_machine: int  # what the ELF flags say, bits 7:0
    accumulators: (
        bool  # one file holds vector and accumulator registers; scalar registers are given by eights
    )
    register_granule: int  # a wave is given vector registers by so many
    shared_granule: int  # and LDS by so many bytes


_CODE_KEYS = {field.name for field in fields(CodeObject)}
_ARCH_KEYS = {field.name for field in fields(Arch)}


@dataclass(frozen=True)
class Toolchain:
    triton: str
    options: Mapping[str, bool | int | str]


@dataclass(frozen=True)
class Tolerance:
    """How many unit roundoffs of its dtype a result may lie off the fp64 reference for each rounding in its way."""

    why: str
    roundoffs: Mapping[str, float]


@dataclass(frozen=True)
class Row:
    """One line of a launch table: used for problems up to ``max_n`` whose axes match ``when``; with ``most_rows``, for
    those of at most so many rows, before all lines without. One of form "absent" says ``why`` there is no binary for
    what the lines before it leave."""

    max_n: int | None
    form: str
    when: Mapping[str, tuple[Any, ...]]
    any_alignment: bool  # whether one binary, which assumes nothing of addresses, serves aligned calls too
    constants: Mapping[str, int | bool]
    options: Mapping[str, int]
    host: Mapping[str, int]
    where: str  # file, table and row, for messages
    most_rows: int | None = None
    why: str | None = None


@dataclass(frozen=True)
class Table:
    provenance: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Profile:
    path: Path
    arch: Arch
    toolchain: Toolchain
    tolerance: Tolerance
    tables: Mapping[str, Table]
    sha256: str
    code_object: CodeObject | None = None  # of an AMD chip

    def table(self, kernel: str) -> Table:
        if kernel not in self.tables:
            raise ProfileError(f"{self.path.name}: table [kernel.{kernel}] is missing")
        return self.tables[kernel]


def profile_names(folder: Path = PROFILES) -> tuple[str, ...]:
    return tuple(sorted(p.stem for p in folder.glob("*.toml")))


def read_profile(name: str, folder: Path = PROFILES) -> Profile:
    """Read ``<folder>/<name>.toml``; ProfileError names the file, table and row that is wrong.

    A profile that ``extends`` another has its [toolchain], [tolerance] and kernels' tables where it gives none itself,
    and its [arch] key by key; the other may extend a third. Rows for another warp size keep their threads: see
    ``_inherited``. ``without`` names kernels whose tables it does not take over. A table may have `changes` instead of
    rows: the rows of the other, of which those with the keys in `of` get the keys beside it.
    """
    return _read_profile(name, folder, ())


def _read_profile(name: str, folder: Path, extended_by: tuple[str, ...]) -> Profile:
    path, raw, digest = _read(name, folder)
    base: Profile | None = None
    without = raw.pop("without", [])
    if (extends := raw.pop("extends", None)) is not None:
        where, chain = f"{path.name}: extends", (*extended_by, name)
        if not isinstance(extends, str) or extends == name or extends not in profile_names(folder):
            raise ProfileError(f"{where} must name another profile, found {extends!r}")
        if extends in chain:
            raise ProfileError(
                f"{where} {extends!r}, which extends {name} itself: {' > '.join((*chain, extends))}"
            )
        base = _read_profile(extends, folder, chain)
        raw = {"toolchain": {**vars(base.toolchain)}, "arch": {}, "kernel": {}, **raw}
        raw.setdefault("tolerance", {"why": base.tolerance.why, **base.tolerance.roundoffs})
        told = _known(f"{path.name}: [arch]", raw["arch"], _ARCH_KEYS)
        raw["arch"] = {**vars(base.arch), "serves": list(base.arch.serves), **told}
        if base.code_object is not None:
            raw["code_object"] = {**vars(base.code_object), **_own_code(path.name, raw)}
        digest = sha256((digest + base.sha256).encode()).hexdigest()
    amd = isinstance(raw.get("arch"), dict) and raw["arch"].get("backend") == "hip"
    optional = {"code_object"} if amd or "code_object" in raw else set()
    _known(path.name, raw, {"arch", "toolchain", "tolerance", "kernel", *optional}, required=True)
    arch = _arch(path.name, raw["arch"])
    if arch.name != name:
        raise ProfileError(f"{path.name}: [arch]: name is {arch.name!r}, the file is named {name}")
    toolchain = _toolchain(f"{path.name}: [toolchain]", raw["toolchain"])
    tolerance = _tolerance(f"{path.name}: [tolerance]", raw["tolerance"])
    if not isinstance(raw["kernel"], dict):
        raise ProfileError(f"{path.name}: [kernel]: expected a table, found {raw['kernel']!r}")
    inherited = {} if base is None else {k: _inherited(table, base, arch) for k, table in base.tables.items()}
    tables = {k: _table(path.name, k, body, arch, inherited.get(k)) for k, body in raw["kernel"].items()}
    for kernel in without:
        if inherited.pop(kernel, None) is None or kernel in tables:
            raise ProfileError(f"{path.name}: without: {kernel!r} is no table that it would take over")
    tables = {**inherited, **tables}
    if optional and not amd:
        raise ProfileError(f"{path.name}: [code_object]: it is of AMD chips, the backend is {arch.backend}")
    code = _code_object(f"{path.name}: [code_object]", raw["code_object"]) if amd else None
    return Profile(path, arch, toolchain, tolerance, tables, digest, code)


def code_objects(folder: Path = PROFILES) -> dict[int, tuple[str, CodeObject]]:
    """(architecture, what its binaries mean) of all AMD chips, by what the ELF flags say; of each profile no more is
    read than that."""
    files = {name: _read(name, folder) for name in profile_names(folder)}
    found: dict[int, tuple[str, CodeObject]] = {}
    for name, (path, raw, _) in files.items():
        told: dict[str, Any] = {}
        chain, at = [raw], raw
        while (at := files.get(at.get("extends", ""), ("", {}, ""))[1]) and at not in chain:
            chain.append(at)
        for each in reversed(chain):
            told |= each.get("code_object", {})
        if told:
            _own_code(path.name, raw)
            code = _code_object(f"{path.name}: [code_object]", told)
            if (other := found.setdefault(code.elf_machine, (name, code))[0]) != name:
                raise ProfileError(
                    f"{path.name}: [code_object]: elf_machine {code.elf_machine:#x} is {other}'s"
                )
    return found


def _own_code(file: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """What a profile says itself: no two chips' binaries have one machine."""
    own = _known(f"{file}: [code_object]", raw.get("code_object", {}), _CODE_KEYS)
    if "elf_machine" not in own:
        raise ProfileError(
            f"{file}: [code_object]: 'elf_machine' is missing: each AMD chip has a number of its own"
        )
    return own


def _code_object(where: str, raw: Any) -> CodeObject:
    _known(where, raw, _CODE_KEYS, required=True)
    _check_fields(where, CodeObject, raw)
    return CodeObject(**raw)


def _read(name: str, folder: Path) -> tuple[Path, dict[str, Any], str]:
    """A profile's file, what it says and its sha256."""
    path = folder / f"{name}.toml"
    if not path.is_file():
        raise ProfileError(f"no architecture {name!r}: there are {', '.join(profile_names(folder))}")
    text = path.read_bytes()
    try:
        return path, tomllib.loads(text.decode()), sha256(text).hexdigest()
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path.name}: {error}") from None


def _inherited(table: Table, base: Profile, arch: Arch) -> Table:
    """Another architecture's table: nothing in it was measured on this one.

    The rule for a chip whose warps have another size: a program has as many threads as before, so that each has as many
    elements, in more or fewer warps. ``waves_per_eu`` is dropped there: it divides registers among waves, and a wave of
    half the lanes takes half of them.
    """
    provenance = table.provenance
    if not provenance.startswith(DERIVED):
        provenance = f"{DERIVED}: the {base.arch.name} rows"
    if arch.warp_size == base.arch.warp_size:
        return replace(table, provenance=provenance)
    return Table(
        f"{provenance}; the same threads in warps of {arch.warp_size}, not {base.arch.warp_size}",
        tuple(_same_threads(row, base.arch, arch) for row in table.rows),
    )


def _same_threads(row: Row, base: Arch, arch: Arch) -> Row:
    if row.form == ABSENT:
        return row
    threads = row.options["num_warps"] * base.warp_size
    if threads > arch.threads_per_block:
        raise ProfileError(
            f"{row.where}: {threads} threads, {arch.name} takes {arch.threads_per_block} a block: give it a table of "
            "its own"
        )
    options = {name: value for name, value in row.options.items() if name != "waves_per_eu"}
    return replace(row, options={**options, "num_warps": max(1, threads // arch.warp_size)})


def _known(where: str, raw: Any, keys: set[str], required: bool = False) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ProfileError(f"{where}: expected a table, found {raw!r}")
    if unknown := sorted(set(raw) - keys):
        raise ProfileError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(sorted(keys))}")
    if required and (missing := sorted(keys - set(raw))):
        raise ProfileError(f"{where}: {missing[0]!r} is missing")
    return raw


def _arch(file: str, raw: Any) -> Arch:
    where = f"{file}: [arch]"
    _known(where, raw, _ARCH_KEYS, required=True)
    _check_fields(where, Arch, raw)
    serves = raw["serves"]
    if not isinstance(serves, list) or not serves or not all(isinstance(s, str) for s in serves):
        raise ProfileError(f"{where}: serves must be a list of strings, found {serves!r}")
    if raw["backend"] not in BACKENDS:
        raise ProfileError(f"{where}: backend must be one of {', '.join(BACKENDS)}, found {raw['backend']!r}")
    if raw["fp8"] not in (*FP8, "none"):
        raise ProfileError(f"{where}: fp8 must be one of {', '.join(FP8)}, none; found {raw['fp8']!r}")
    return Arch(**{**raw, "serves": tuple(serves)})


def _check_fields(where: str, kind: type[Arch] | type[CodeObject], raw: Mapping[str, Any]) -> None:
    """ProfileError for a value that is not of its field's type."""
    for field in fields(kind):
        value = raw[field.name]
        if field.type == "int" and not (type(value) is int and value > 0):
            raise ProfileError(f"{where}: {field.name} must be a positive integer, found {value!r}")
        if field.type == "bool" and type(value) is not bool:
            raise ProfileError(f"{where}: {field.name} must be true or false, found {value!r}")
        if field.type == "str" and not isinstance(value, str):
            raise ProfileError(f"{where}: {field.name} must be a string, found {value!r}")


def _toolchain(where: str, raw: Any) -> Toolchain:
    _known(where, raw, {"triton", "options"}, required=True)
    if not isinstance(raw["triton"], str):
        raise ProfileError(f"{where}: triton must be a string, found {raw['triton']!r}")
    if not isinstance(raw["options"], dict):
        raise ProfileError(f"{where}: options: expected a table, found {raw['options']!r}")
    return Toolchain(raw["triton"], raw["options"])


def _tolerance(where: str, raw: Any) -> Tolerance:
    roundoffs = dict(_known(where, raw, {"why", *DTYPES}, required=True))
    why = roundoffs.pop("why")
    if not isinstance(why, str) or not why.strip():
        raise ProfileError(f"{where}: why must say where the numbers come from")
    if wrong := [d for d, v in roundoffs.items() if not (isinstance(v, float) and v > 0)]:
        raise ProfileError(f"{where}: {wrong[0]} must be a positive float, found {roundoffs[wrong[0]]!r}")
    return Tolerance(why, roundoffs)


def _table(file: str, kernel: str, raw: Any, arch: Arch, inherited: Table | None) -> Table:
    where = f"{file}: [kernel.{kernel}]"
    kind = "changes" if isinstance(raw, dict) and "changes" in raw else "rows"
    _known(where, raw, {"provenance", kind}, required=True)
    if not isinstance(raw["provenance"], str) or not raw["provenance"].strip():
        raise ProfileError(f"{where}: provenance must say where the numbers were measured")
    if not isinstance(raw[kind], list) or not raw[kind]:
        raise ProfileError(f"{where}: {kind} must be a list of at least one {kind.removesuffix('s')}")
    if kind == "changes":
        rows = _changed(where, raw[kind], inherited, arch)
    else:
        rows = tuple(read_row(f"{where} row {i + 1}", row, arch) for i, row in enumerate(raw[kind]))
    return Table(raw["provenance"].strip(), rows)


def _changed(where: str, changes: Sequence[Any], inherited: Table | None, arch: Arch) -> tuple[Row, ...]:
    """The rows of another profile's table with some numbers of their own."""
    if inherited is None:
        raise ProfileError(f"{where}: changes: there is no table of another profile to change")
    rows = list(inherited.rows)
    for i, change in enumerate(changes):
        place = f"{where} change {i + 1}"
        if not isinstance(change, dict) or not isinstance(change.get("of"), dict) or len(change) < 2:
            raise ProfileError(
                f"{place}: expected {{ of = {{ keys of rows }}, and what they get }}, found {change!r}"
            )
        of, fresh = change["of"], {key: value for key, value in change.items() if key != "of"}
        found = [at for at, row in enumerate(rows) if _has(row_keys(row), of)]
        if not found:
            raise ProfileError(f"{place}: no row has {of}")
        for at in found:
            rows[at] = read_row(place, {**row_keys(rows[at]), **fresh}, arch)
    return tuple(rows)


def _has(keys: Mapping[str, Any], of: Mapping[str, Any]) -> bool:
    """Whether a row has these keys; a list of one word is that word."""
    single = {
        key: value[0] if isinstance(value, list) and len(value) == 1 else value for key, value in of.items()
    }
    return all(key in keys and keys[key] in (value, single[key]) for key, value in of.items())


def row_keys(row: Row) -> dict[str, Any]:
    """A row as a profile says it."""
    bounds = {"max_n": row.max_n, "most_rows": row.most_rows}
    when = {
        axis: values[0]
        if axis == "aligned" or (len(values) == 1 and isinstance(values[0], str))
        else list(values)
        for axis, values in row.when.items()
    }
    return {
        **{key: bound for key, bound in bounds.items() if bound is not None},
        "form": row.form,
        **when,
        **({"aligned": ANY} if row.any_alignment else {}),
        **{name.lower(): value for name, value in row.constants.items()},
        **row.options,
        **row.host,
        **({} if row.why is None else {"why": row.why}),
    }


def read_row(where: str, raw: Any, arch: Arch) -> Row:
    """Split a row into its parts. Which constants and axes exist is the declaration's to say (``plan``): here a lower
    case name is a constant where its value is a number or bool, an axis where it is a string or list."""
    if not isinstance(raw, dict):
        raise ProfileError(f"{where}: expected a table, found {raw!r}")
    left = dict(raw)
    max_n, most_rows, form = left.pop("max_n", None), left.pop("most_rows", None), left.pop("form", None)
    if not isinstance(form, str):
        raise ProfileError(f"{where}: 'form' is missing")
    for key, value in (("max_n", max_n), ("most_rows", most_rows)):
        if value is not None and not (type(value) is int and value > 0):
            raise ProfileError(f"{where}: {key} must be a positive integer, found {value!r}")
    options = {key: left.pop(key) for key in OPTIONS if key in left}
    host = {key: left.pop(key) for key in HOST_NUMBERS if key in left}
    for key, value in {**options, **host}.items():
        if type(value) is not int or value <= 0:
            raise ProfileError(f"{where}: {key} must be a positive integer, found {value!r}")
    why = left.pop("why", None)
    if form == ABSENT:
        if not isinstance(why, str) or not why.strip():
            raise ProfileError(f"{where}: why must say what is absent and what to use instead")
        if (max_n, most_rows, options, host) != (None, None, {}, {}):
            raise ProfileError(f"{where}: absent is what earlier rows leave: it has no bound and no numbers")
    elif why is not None:
        raise ProfileError(f"{where}: why is for a row of form {ABSENT!r}")
    warps = options.get("num_warps", 1 if form == ABSENT else None)
    if warps is None:
        raise ProfileError(f"{where}: 'num_warps' is missing")
    if warps & (warps - 1):
        raise ProfileError(f"{where}: num_warps must be a power of two, found {warps}")
    if warps * arch.warp_size > arch.threads_per_block:
        raise ProfileError(
            f"{where}: {warps} warps of {arch.warp_size} lanes are {warps * arch.warp_size} threads; "
            f"{arch.name} takes {arch.threads_per_block} a block"
        )
    when: dict[str, tuple[Any, ...]] = {}
    constants: dict[str, int | bool] = {}
    for key, value in left.items():
        if key == "aligned":
            if not isinstance(value, bool) and value != ANY:
                raise ProfileError(f'{where}: aligned must be true, false or "any", found {value!r}')
            if isinstance(value, bool):
                when[key] = (value,)
        elif isinstance(value, (str, list)):
            when[key] = tuple(value) if isinstance(value, list) else (value,)
        elif isinstance(value, int) and value >= 0:
            constants[key.upper()] = value
        else:
            raise ProfileError(f"{where}: {key}: unexpected value {value!r}")
    if form == ABSENT and constants:
        raise ProfileError(
            f"{where}: {min(constants).lower()}: absent takes no numbers; an axis' values are a list"
        )
    return Row(max_n, form, when, raw.get("aligned") == ANY, constants, options, host, where, most_rows, why)
