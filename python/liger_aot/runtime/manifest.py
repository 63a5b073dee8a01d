"""What a pack holds: ``manifest.json``, and ``<op>.json`` and ``<op>.bin`` an op, read into objects. The format is in
docs/pack-format.md.

The files are checked before anything in them is believed: types, sizes, names that could leave the pack's folder, the
format's version, the sha256 of all that is read.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from reprlib import Repr
from stat import S_ISDIR, S_ISREG
from string import ascii_letters, digits
from typing import Any, NamedTuple

from liger_aot.errors import PackDamaged, PackTooNew

FORMAT = 7
WINDOW = 1 << 15  # of a binary's base, how much its compression sees
# Bytes of a manifest, of which Python makes some 25 times as many; our largest has 124 kilobytes.
LARGEST_JSON = 4 << 20
LARGEST_FILE = 64 << 20  # bytes of one binary; ours have a few tens of kilobytes
MOST_THREADS = 1024  # a block, on every architecture
MOST_ARGUMENTS = 64  # what the launcher takes
LONGEST_NAME = 255
# Sets, not regular expressions: compiling those takes a third of a millisecond before the first result.
NAME_CHARACTERS = frozenset(f"{ascii_letters}{digits}_.-")
SYMBOL_CHARACTERS = frozenset(f"{ascii_letters}{digits}_.$")
_short = Repr()
_short.maxstring = 100
shown = _short.repr  # for messages, cut in depth too: a damaged file may nest deeper than repr() goes


# Named tuples here and slots elsewhere, not dataclasses: those take up to a millisecond each to create, which every
# process pays before its first result.
class TensorMaps(NamedTuple):
    """How tensor maps of one argument are encoded."""

    box: tuple[int, ...]  # elements of a tile, the outermost dimension first
    swizzle: int


class Blob(NamedTuple):
    """A compressed binary: a range of bytes in the op's file."""

    name: str
    path: Path
    offset: int
    length: int
    sha256: str

    @property
    def end(self) -> int:
        return self.offset + self.length

    def read(self) -> bytes:
        """The compressed bytes; PackDamaged unless they are those the manifest was written for."""
        data = _read(self.path, self.offset, self.length)
        if (found := sha256(data).hexdigest()) != self.sha256:
            raise PackDamaged(
                self.path, f"{self.name}: sha256 is {found}, the manifest says {shown(self.sha256)}"
            )
        return data

    def unpack(self, dictionary: bytes = b"") -> bytes:
        """The binary itself; ``dictionary`` is zlib's preset dictionary where it was compressed with one."""
        data = self.read()
        reader = zlib.decompressobj(zdict=dictionary)
        try:
            image = reader.decompress(data, LARGEST_FILE)
        except zlib.error as error:
            raise PackDamaged(self.path, f"{self.name}: not a zlib stream: {error}") from None
        if not reader.eof:
            raise PackDamaged(self.path, f"{self.name}: cut short, or holds more than {LARGEST_FILE} bytes")
        if reader.unused_data:
            raise PackDamaged(
                self.path, f"{self.name}: {len(reader.unused_data)} bytes follow the zlib stream"
            )
        return image


class Variant(NamedTuple):
    """One binary of a pack and what a launch of it needs."""

    name: str
    blob: Blob
    base: Blob | None  # the binary against which this one is compressed
    symbol: str
    threads: int
    shared: int  # bytes of dynamic shared memory
    cooperative: bool
    pdl: bool  # programmatic dependent launch: it waits itself for the kernel launched before it
    contiguous: bool  # whether rows must follow each other without a gap
    arguments: tuple[str, ...]  # those of the kernel that this binary takes, in order
    signature: str  # the launcher's letters
    form: str
    num_warps: int
    registers: int
    local_bytes: int
    resident: int  # blocks a multiprocessor holds at once
    numbers: Mapping[str, int]  # the profile's launch numbers
    row: str  # the profile's row it comes from
    maps: Mapping[str, TensorMaps]  # by argument

    def read(self) -> bytes:
        """The binary; PackDamaged unless its bytes and its base's are those the manifest was written for."""
        return self.blob.unpack(b"" if self.base is None else self.base.unpack()[:WINDOW])


class Kernel(NamedTuple):
    """One kernel's dispatch tables: key ("bf16/64/causal/aligned") -> ascending (max_n or None, variant name). ``few``
    has (max_n or None, most_rows, variant name) for problems of few rows, in the order in which they are looked at.
    ``absent`` says, by key, why a table ends at a bound or is not there, and what to use instead."""

    name: str
    arguments: tuple[str, ...]
    signature: str
    axes: tuple[str, ...]
    alignment: int
    tables: Mapping[str, tuple[tuple[int | None, str], ...]]
    few: Mapping[str, tuple[tuple[int | None, int, str], ...]]
    absent: Mapping[str, str]

    def not_built(self, key: str) -> str:
        """What to say of a key that is ``absent`` past the last bound of its table, or at all."""
        past = f" past n = {self.tables[key][-1][0]}" if key in self.tables else ""
        return f"{self.name} is not built for {key}{past} on this architecture: {self.absent[key]}"


class OpManifest:
    """One op's part of a pack."""

    def __init__(self, path: Path, binaries: Path, digest: str) -> None:
        self.path, self.binaries = path, binaries
        raw = read_json(path, digest)
        check_format(path, raw, FORMAT)
        self._variants = checked_object(path, raw.get("variants"), "variants")
        kernels = checked_object(path, raw.get("kernels"), "kernels")
        self.kernels = {
            name: self._kernel(name, checked_object(path, body, name)) for name, body in kernels.items()
        }
        self._owner = {
            variant: kernel
            for kernel in self.kernels.values()
            for entries in kernel.tables.values()
            for _, variant in entries
        }
        for kernel in self.kernels.values():
            self._owner |= {variant: kernel for of_few in kernel.few.values() for _, _, variant in of_few}

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(self._owner)

    def variant(self, name: str) -> Variant:
        """One of ``variants``; PackDamaged where what is said of it can't be."""
        kernel = self._owner[name]
        raw = checked_object(self.path, self._variants.get(name), name)
        where = f"{name}."
        symbol = checked_field(self.path, raw, "symbol", str, where)
        if not symbol or symbol[0] in digits + ".$" or not SYMBOL_CHARACTERS.issuperset(symbol):
            raise PackDamaged(self.path, f"{where}symbol is {shown(symbol)}")
        threads = checked_count(self.path, raw, "threads", where)
        if not 1 <= threads <= MOST_THREADS:
            raise PackDamaged(self.path, f"{where}threads is {threads}, a block has 1 to {MOST_THREADS}")
        numbers = checked_object(self.path, raw.get("numbers"), where + "numbers")
        cooperative = checked_field(self.path, raw, "cooperative", bool, where)
        pdl = "pdl" in raw and checked_field(self.path, raw, "pdl", bool, where)
        if cooperative and pdl:
            raise PackDamaged(self.path, f"{where}cooperative and {where}pdl are both true")
        base = None if raw.get("base") is None else checked_field(self.path, raw, "base", str, where)
        lacks = checked_strings(self.path, raw, "lacks", where) if "lacks" in raw else ()
        if unknown := [a for a in lacks if a not in kernel.arguments]:
            raise PackDamaged(
                self.path, f"{where}lacks names {shown(unknown[0])}, which {kernel.name} does not take"
            )
        taken = {
            argument: letter
            for argument, letter in zip(kernel.arguments, kernel.signature, strict=True)
            if argument not in lacks
        }
        return Variant(
            name=name,
            blob=self._blob(name),
            base=None if base is None else self._blob(base),
            symbol=symbol,
            threads=threads,
            shared=checked_count(self.path, raw, "shared", where),
            cooperative=cooperative,
            pdl=pdl,
            contiguous=checked_field(self.path, raw, "contiguous", bool, where),
            arguments=tuple(taken),
            signature="".join(taken.values()),
            form=checked_field(self.path, raw, "form", str, where),
            num_warps=checked_count(self.path, raw, "num_warps", where),
            registers=checked_count(self.path, raw, "registers", where),
            local_bytes=checked_count(self.path, raw, "local_bytes", where),
            resident=checked_count(self.path, raw, "resident", where),
            numbers={key: checked_count(self.path, numbers, key, where) for key in numbers},
            row=checked_field(self.path, raw, "row", str, where),
            maps=self._maps(checked_object(self.path, raw.get("maps"), where + "maps"), taken, where),
        )

    def _maps(self, raw: dict[str, Any], taken: Mapping[str, str], where: str) -> dict[str, TensorMaps]:
        ranks = {name: int(letter) for name, letter in taken.items() if letter in digits}
        if raw.keys() != ranks.keys():
            raise PackDamaged(self.path, f"{where}maps is {shown(raw)}")
        maps = {}
        for name, rank in ranks.items():
            one = checked_object(self.path, raw[name], f"{where}maps.{name}")
            box = one.get("box")
            if not isinstance(box, list) or len(box) != rank or any(type(e) is not int or e < 1 for e in box):
                raise PackDamaged(self.path, f"{where}maps.{name}.box is {shown(box)}")
            maps[name] = TensorMaps(
                tuple(box), checked_count(self.path, one, "swizzle", f"{where}maps.{name}.")
            )
        return maps

    def _blob(self, name: str) -> Blob:
        raw = checked_object(self.path, self._variants.get(name), shown(name))
        where = f"{checked_name(self.path, name)}."
        length = checked_count(self.path, raw, "length", where)
        if length > LARGEST_FILE:
            raise PackDamaged(
                self.path, f"{where}length is {length}, a binary has at most {LARGEST_FILE} bytes"
            )
        offset = checked_count(self.path, raw, "offset", where)
        return Blob(name, self.binaries, offset, length, checked_field(self.path, raw, "sha256", str, where))

    def _kernel(self, name: str, raw: dict[str, Any]) -> Kernel:
        signature = checked_field(self.path, raw, "signature", str, f"{name}.")
        arguments = tuple(checked_strings(self.path, raw, "arguments", f"{name}."))
        fits = len(signature) == len(arguments) <= MOST_ARGUMENTS
        if set(signature) - set("pilf12345") or not fits:
            raise PackDamaged(
                self.path, f"{name}.signature is {shown(signature)} for {len(arguments)} arguments"
            )
        axes = tuple(checked_strings(self.path, raw, "axes", f"{name}."))
        tables = checked_object(self.path, raw.get("tables"), f"{name}.tables")
        limited = checked_object(self.path, raw.get("limited", {}), f"{name}.limited")
        absent, ending = {}, {}
        for key, about in limited.items():
            where = f"{name}.limited.{shown(key)}"
            absent[key] = checked_field(
                self.path, checked_object(self.path, about, where), "why", str, f"{where}."
            )
            if about.get("table") != []:
                ending[key] = self._table(f"{where}.table", about.get("table"), ends=True)
        if twice := [key for key in limited if key in tables]:
            raise PackDamaged(self.path, f"{name}.limited: {shown(twice[0])} is a key of its tables, too")
        for key in (*tables, *limited):
            *values, alignment = key.split("/")
            words = len(key) <= LONGEST_NAME and all(v.isidentifier() or v.isdecimal() for v in values)
            if alignment not in ("aligned", "generic") or len(values) != len(axes) or not words:
                raise PackDamaged(self.path, f"{name}.tables: {shown(key)} is no key for axes {shown(axes)}")
        few = checked_object(self.path, raw.get("few", {}), f"{name}.few")
        if unknown := [key for key in few if key not in tables and key not in ending]:
            raise PackDamaged(self.path, f"{name}.few: {shown(unknown[0])} is no key of its tables")
        return Kernel(
            name=name,
            arguments=arguments,
            signature=signature,
            axes=axes,
            alignment=checked_count(self.path, raw, "alignment", f"{name}."),
            tables={
                **{key: self._table(f"{name}.tables.{key}", entries) for key, entries in tables.items()},
                **ending,
            },
            few={key: self._few(f"{name}.few.{key}", entries) for key, entries in few.items()},
            absent=absent,
        )

    def _table(self, where: str, raw: Any, ends: bool = False) -> tuple[tuple[int | None, str], ...]:
        if not isinstance(raw, list) or not raw:
            raise PackDamaged(self.path, f"{where} is not a list of entries")
        last = 0
        for i, entry in enumerate(raw):
            pair = isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str)
            if not pair or entry[1] not in self._variants:
                raise PackDamaged(self.path, f"{where}: {shown(entry)} is no entry")
            if entry[0] is None and i == len(raw) - 1:
                continue
            if type(entry[0]) is not int or entry[0] <= last:
                raise PackDamaged(self.path, f"{where}: bounds do not rise at {shown(entry)}")
            last = entry[0]
        if raw[-1][0] is not None and not ends:
            raise PackDamaged(self.path, f"{where}: no entry for n past {shown(last)}")
        return tuple((bound, variant) for bound, variant in raw)

    def _few(self, where: str, raw: Any) -> tuple[tuple[int | None, int, str], ...]:
        if not isinstance(raw, list):
            raise PackDamaged(self.path, f"{where} is not a list of entries")
        for entry in raw:
            triple = isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], str)
            if not triple or entry[2] not in self._variants:
                raise PackDamaged(self.path, f"{where}: {shown(entry)} is no entry")
            bounds = entry[1:2] if entry[0] is None else entry[:2]
            if any(type(bound) is not int or not 0 < bound < 1 << 31 for bound in bounds):
                raise PackDamaged(self.path, f"{where}: {shown(entry)} has a bound that is none")
        return tuple((bound, rows, variant) for bound, rows, variant in raw)


class Pack:
    """One architecture's folder of binaries."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "manifest.json"
        raw = read_json(self.path)
        check_format(self.path, raw, FORMAT)
        self.arch = checked_name(self.path, checked_field(self.path, raw, "arch", str))
        self.backend = checked_field(self.path, raw, "backend", str)
        self.serves = tuple(checked_strings(self.path, raw, "serves"))
        # the 8-bit float that it converts to, as kernels' axes name it, or "none"
        self.fp8 = checked_field(self.path, raw, "fp8", str)
        self.version = checked_field(self.path, raw, "version", str)
        self.toolchain: Mapping[str, Any] = checked_object(self.path, raw.get("toolchain"), "toolchain")
        self.tolerance: Mapping[str, Any] = checked_object(self.path, raw.get("tolerance"), "tolerance")
        # ELF ABI (cubin), code object (hsaco)
        self.binary_version = checked_count(self.path, raw, "binary_version")
        # Kernels whose launch numbers were measured.
        self.measured = checked_count(self.path, raw, "measured")
        self._ops = checked_object(self.path, raw.get("ops"), "ops")
        for op in self._ops:
            checked_name(self.path, op)

    @cached_property
    def ops(self) -> tuple[str, ...]:
        return tuple(sorted(self._ops))

    def op(self, name: str) -> OpManifest:
        entry = checked_object(self.path, self._ops.get(name), f"ops.{name}")
        digest = checked_field(self.path, entry, "sha256", str, f"ops.{name}.")
        return OpManifest(self.folder / f"{name}.json", self.folder / f"{name}.bin", digest)


def read_file(path: Path, most: int) -> bytes:
    """A whole file; PackDamaged where it has more than ``most`` bytes, before any is read."""
    return _read(path, 0, None, most)


def _read(path: Path, offset: int, length: int | None, most: int = LARGEST_FILE) -> bytes:
    """``length`` bytes of a file from ``offset`` on, or all of it. A FIFO in its place is an error, not a wait."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise PackDamaged(path, error.strerror or str(error)) from None
    try:
        status = os.fstat(descriptor)
        if S_ISDIR(status.st_mode):
            raise PackDamaged(path, "Is a directory")
        if not S_ISREG(status.st_mode):
            raise PackDamaged(path, "not a regular file")
        size = status.st_size
        if length is None:
            if size > most:
                raise PackDamaged(path, f"larger than {most} bytes")
            length = size
        data = os.pread(descriptor, length, offset) if offset + length <= size else b""
    except OSError as error:
        raise PackDamaged(path, error.strerror or str(error)) from None
    finally:
        os.close(descriptor)
    if len(data) < length:
        raise PackDamaged(path, f"cut short: it ends at byte {size}")
    return data


def read_json(path: Path, digest: str | None = None) -> dict[str, Any]:
    """A JSON file that holds an object, in which no name stands twice; its sha256 is ``digest`` where that is given."""
    data = read_file(path, LARGEST_JSON)
    if digest is not None and (found := sha256(data).hexdigest()) != digest:
        raise PackDamaged(path, f"sha256 is {found}, the manifest says {shown(digest)}")
    try:
        document = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise PackDamaged(path, f"not JSON: {error}") from None
    return checked_object(path, document)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object as a dictionary. Readers differ in which of two fields of one name they take: it may not have any."""
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            break
        seen.add(name)
    raise ValueError(f"{shown(name)} stands twice in an object")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def check_format(path: Path, raw: Mapping[str, Any], known: int) -> None:
    found = checked_count(path, raw, "format")
    if found > known:
        raise PackTooNew(path, found, known)
    if found != known:
        raise PackDamaged(path, f"format {found}, this loader reads {known}")


def checked_object(path: Path, value: Any, where: str = "the file") -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PackDamaged(path, f"{where} is not an object")
    return value


def checked_field(path: Path, raw: Mapping[str, Any], key: str, kind: type, where: str = "") -> Any:
    value = raw.get(key)
    if type(value) is not kind:
        raise PackDamaged(path, f"{where}{key} is {shown(value)}, expected {kind.__name__}")
    return value


def checked_count(path: Path, raw: Mapping[str, Any], key: str, where: str = "") -> int:
    value: int = checked_field(path, raw, key, int, where)
    if not 0 <= value < 1 << 31:
        raise PackDamaged(path, f"{where}{key} is {shown(value)}")
    return value


def checked_strings(path: Path, raw: Mapping[str, Any], key: str, where: str = "") -> Sequence[str]:
    value = raw.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise PackDamaged(path, f"{where}{key} is {shown(value)}, expected a list of strings")
    return value


def checked_name(path: Path, name: str) -> str:
    """A name that stays inside its folder."""
    if (
        not 0 < len(name) <= LONGEST_NAME
        or not NAME_CHARACTERS.issuperset(name)
        or name[0] in ".-"
        or ".." in name
    ):
        raise PackDamaged(path, f"unsafe name {shown(name)}")
    return name
