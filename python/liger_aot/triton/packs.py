"""Packs of a project's Triton kernels: where they are installed, and what is in them. docs/triton-pack-format.md has
the format.

Reading is by need: a pack's ``manifest.json`` names its functions, ``<function>.json`` the binaries of one, which is
read when a program first launches that function.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from liger_aot.errors import LigerAOTError, PackDamaged, PackNotFound
from liger_aot.runtime.manifest import (
    MOST_THREADS,
    SYMBOL_CHARACTERS,
    WINDOW,
    Blob,
    check_format,
    checked_count,
    checked_field,
    checked_name,
    checked_object,
    checked_strings,
    read_json,
    shown,
)
from liger_aot.runtime.packs import Device, namespace_folders, own_arch
from liger_aot.triton.sources import Source

NAMESPACE = "liger_aot_triton_packs"
GROUP = "liger_aot.triton_packs"  # of entry points, for packs that lie inside a project's own package
OVERRIDE = (
    "LIGER_AOT_TRITON_PACKS"  # folders that hold <name>/<arch>, separated like PATH, instead of the installed
)
FORMAT = 1
KIND = "triton"


class Binary(NamedTuple):
    """One compiled kernel and what a launch of it needs."""

    identity: str
    blob: Blob
    base: Blob | None  # the binary against which this one is compressed
    cache_key: str
    ranged: tuple[tuple[int, ...], ...]  # pointers that must lie in tensors below 2 GiB (AMD)
    signature: list[Any]  # [parameter, type]
    constants: list[Any]  # [path, encoded value]
    attrs: list[Any]  # [path, [[name, value]]]
    given: Mapping[str, Any]  # option -> encoded value
    metadata: Mapping[str, Any]  # Triton's own, but for target and hash

    def read(self) -> bytes:
        """The binary; PackDamaged unless its bytes are those the manifest was written for."""
        return self.blob.unpack(b"" if self.base is None else self.base.unpack()[:WINDOW])


class Function:
    """One function's part of a pack."""

    def __init__(self, path: Path, binaries: Path, digest: str, name: str) -> None:
        self.path, self.binaries, self.name = path, binaries, name
        raw = read_json(path, digest)
        check_format(path, raw, FORMAT)
        if raw.get("function") != name:
            raise PackDamaged(path, f"function is {shown(raw.get('function'))}, the manifest says {name}")
        self.cache_keys = tuple(checked_strings(path, raw, "cache_keys"))
        self.sources = self._checked_sources(raw.get("sources", []))
        self.source_of = self._checked_places(raw.get("source_of", [None] * len(self.cache_keys)))
        self._metadata = checked_object(path, raw.get("metadata"), "metadata")
        self._variants = checked_object(path, raw.get("variants"), "variants")
        tuners = raw.get("tuners", [])
        if not isinstance(tuners, list):
            raise PackDamaged(path, f"tuners is {shown(tuners)}, expected a list")
        self.tuners = tuple(self._tuner(tuner) for tuner in tuners)

    @property
    def identities(self) -> tuple[str, ...]:
        return tuple(self._variants)

    def binaries_of(self, identity: str) -> tuple[Binary, ...]:
        """The binaries of one variant, the most demanding first; none where the pack has no such variant."""
        entries = self._variants.get(identity, [])
        if not isinstance(entries, list):
            raise PackDamaged(self.path, f"{identity} is {shown(entries)}, expected a list")
        return tuple(self._binary(identity, index) for index in range(len(entries)))

    def binary(self, identity: str, ranged: Collection[tuple[int, ...]]) -> Binary | None:
        """The binary for a call whose pointers at the paths ``ranged`` lie in tensors below 2 GiB."""
        for found in self.binaries_of(identity):
            if set(found.ranged) <= set(ranged):
                return found
        return None

    def all_binaries(self) -> Iterator[Binary]:
        for identity in self._variants:
            yield from self.binaries_of(identity)

    def _binary(self, identity: str, index: int) -> Binary:
        where = f"{identity}/{index}."
        raw = checked_object(self.path, self._variants[identity][index], where)
        symbol = checked_field(self.path, raw, "symbol", str, where)
        if not symbol or not SYMBOL_CHARACTERS.issuperset(symbol):
            raise PackDamaged(self.path, f"{where}symbol is {shown(symbol)}")
        threads = checked_count(self.path, raw, "threads", where)
        if not 1 <= threads <= MOST_THREADS:
            raise PackDamaged(self.path, f"{where}threads is {threads}, a block has 1 to {MOST_THREADS}")
        base = None if raw.get("base") is None else checked_field(self.path, raw, "base", str, where)
        scratch = checked_object(self.path, raw.get("scratch"), where + "scratch")
        maps = raw.get("maps")
        if maps is not None and not (
            isinstance(maps, list) and all(isinstance(m, (dict, type(None))) for m in maps)
        ):
            raise PackDamaged(self.path, f"{where}maps is {shown(maps)}")
        metadata = {
            **self._metadata,
            **checked_object(self.path, raw.get("metadata"), where + "metadata"),
            "name": symbol,
            "num_warps": checked_count(self.path, raw, "num_warps", where),
            "num_ctas": checked_count(self.path, raw, "num_ctas", where),
            "shared": checked_count(self.path, raw, "shared", where),
            "launch_cooperative_grid": checked_field(self.path, raw, "cooperative", bool, where),
            "launch_pdl": checked_field(self.path, raw, "pdl", bool, where),
            "tensordesc_meta": maps or [],  # 3.8 asks for a list
        }
        for kind in ("global", "profile"):
            size, alignment = self._pair(scratch.get(kind), f"{where}scratch.{kind}")
            metadata[f"{kind}_scratch_size"], metadata[f"{kind}_scratch_align"] = size, alignment
        return Binary(
            identity=identity,
            blob=self._blob(f"{identity}/{index}"),
            base=None if base is None else self._blob(base),
            cache_key=checked_field(self.path, raw, "cache_key", str, where),
            ranged=tuple(tuple(path) for path in self._list(raw, "ranged", where)),
            signature=self._list(raw, "signature", where),
            constants=self._list(raw, "constants", where),
            attrs=self._list(raw, "attrs", where),
            given=checked_object(self.path, raw.get("given"), where + "given"),
            metadata=metadata,
        )

    def _checked_sources(self, raw: Any) -> tuple[Source, ...]:
        """What the functions are told by that these binaries were made of, those that a function calls before it."""
        if not isinstance(raw, list):
            raise PackDamaged(self.path, f"sources is {shown(raw)}, expected a list")
        for place, one in enumerate(raw):
            where = f"sources.{place}."
            source = checked_object(self.path, one, where)
            for key in ("text", "kind", "noinline"):
                checked_field(self.path, source, key, str, where)
            checked_count(self.path, source, "line", where)
            names = checked_object(self.path, source.get("names"), where + "names")
            if not all(type(n) is str or (type(n) is int and 0 <= n < place) for n in names.values()):
                raise PackDamaged(self.path, f"{where}names has {shown([*names.values()])}")
            if not all(path.rpartition(".")[0] in names for path in names if "." in path):
                raise PackDamaged(self.path, f"{where}names has an attribute of a name that it lacks")
        return tuple(raw)

    def _checked_places(self, raw: Any) -> Mapping[str, int | None]:
        fits = isinstance(raw, list) and len(raw) == len(self.cache_keys)
        if not fits or not all(p is None or (type(p) is int and 0 <= p < len(self.sources)) for p in raw):
            raise PackDamaged(self.path, f"source_of is {shown(raw)}")
        return dict(zip(self.cache_keys, raw, strict=True))

    def _pair(self, value: Any, where: str) -> tuple[int, int]:
        numbers = (
            isinstance(value, list) and len(value) == 2 and all(type(v) is int and v >= 0 for v in value)
        )
        if not numbers:
            raise PackDamaged(self.path, f"{where} is {shown(value)}, expected two numbers")
        return value[0], value[1]

    def _list(self, raw: Mapping[str, Any], key: str, where: str) -> list[Any]:
        value: list[Any] = checked_field(self.path, raw, key, list, where)
        if not all(isinstance(item, list) for item in value):
            raise PackDamaged(self.path, f"{where}{key} is {shown(value)}, expected a list of lists")
        return value

    def _blob(self, name: str) -> Blob:
        identity, _, index = name.rpartition("/")
        entries = self._variants.get(identity)
        if not isinstance(entries, list) or not index.isdecimal() or int(index) >= len(entries):
            raise PackDamaged(self.path, f"no binary {shown(name)}")
        raw = checked_object(self.path, entries[int(index)], name)
        return Blob(
            name,
            self.binaries,
            checked_count(self.path, raw, "offset", name + "."),
            checked_count(self.path, raw, "length", name + "."),
            checked_field(self.path, raw, "sha256", str, name + "."),
        )

    def _tuner(self, raw: Any) -> Mapping[str, Any]:
        tuner = checked_object(self.path, raw, "a tuner")
        checked_strings(self.path, tuner, "keys", "tuners.")
        for winner in checked_field(self.path, tuner, "winners", list, "tuners."):
            winner = checked_object(self.path, winner, "a winner")
            checked_field(self.path, winner, "key", list, "winners.")
            checked_field(self.path, winner, "text", str, "winners.")
            checked_object(self.path, winner.get("config"), "winners.config")
        return tuner


class TritonPack:
    """One project's kernels for one architecture."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "manifest.json"
        raw = read_json(self.path)
        check_format(self.path, raw, FORMAT)
        if raw.get("kind") != KIND:
            raise PackDamaged(self.path, f"kind is {shown(raw.get('kind'))}, expected {KIND!r}")
        self.name = checked_name(self.path, checked_field(self.path, raw, "name", str))
        self.arch = checked_name(self.path, checked_field(self.path, raw, "arch", str))
        self.backend = checked_field(self.path, raw, "backend", str)
        self.target: Mapping[str, Any] = checked_object(self.path, raw.get("target"), "target")
        self.serves = tuple(checked_strings(self.path, raw, "serves"))
        self.version = checked_field(self.path, raw, "version", str)
        self.binary_version = checked_count(self.path, raw, "binary_version")
        toolchain = checked_object(self.path, raw.get("toolchain"), "toolchain")
        self.triton: str = checked_field(self.path, toolchain, "triton", str, "toolchain.")
        self.toolchain: Mapping[str, Any] = toolchain
        self.recorded_on = tuple(checked_strings(self.path, raw, "recorded_on"))
        self.packages = tuple(checked_object(self.path, p, "packages") for p in raw.get("packages", ()))
        self.left_out = tuple(checked_object(self.path, p, "left_out") for p in raw.get("left_out", ()))
        self._functions = checked_object(self.path, raw.get("functions"), "functions")
        self._read: dict[str, Function] = {}
        self._lock = Lock()

    def __str__(self) -> str:
        return f"{self.name} for {self.arch}"

    @property
    def functions(self) -> tuple[str, ...]:
        """ "<module>:<qualified name>" of each."""
        return tuple(self._functions)

    def variants(self, name: str) -> int:
        """How many variants the pack has of a function, by its manifest."""
        entry = checked_object(self.path, self._functions.get(name), f"functions.{name}")
        return checked_count(self.path, entry, "variants", f"functions.{name}.")

    def stem(self, name: str) -> str:
        """What the files of a function are called, without .json and .bin."""
        entry = checked_object(self.path, self._functions.get(name), f"functions.{name}")
        return checked_name(self.path, checked_field(self.path, entry, "file", str, f"functions.{name}."))

    def function(self, name: str) -> Function | None:
        """One function, read once; None where the pack has none of that name."""
        if name not in self._functions:
            return None
        with self._lock:
            if name not in self._read:
                stem = self.stem(name)
                digest = checked_field(self.path, self._functions[name], "sha256", str, f"functions.{name}.")
                path, binaries = self.folder / f"{stem}.json", self.folder / f"{stem}.bin"
                self._read[name] = Function(path, binaries, digest, name)
            return self._read[name]

    def refusal(self, triton: str) -> str | None:
        """Why a Triton of this version can't use the pack, or None. Versions differ in how a function's source is
        hashed and in what the compiler is asked for, so that no other's binaries are the same."""
        if public_version(triton) == self.triton:
            return None
        return f"pack {self} was built with Triton {self.triton}, and {public_version(triton)} runs: build it with that"


def public_version(version: str) -> str:
    """A version without what a distributor adds: 3.6.0+git1234 is 3.6.0."""
    return version.partition("+")[0]


# ---- Where they are installed ----


def folders() -> dict[str, dict[str, Path]]:
    """Folders of installed packs by name and architecture. Of two alike the first on the import path counts."""
    found: dict[str, dict[str, Path]] = {}
    for root in _roots():
        for named in _subfolders(root):
            for folder in _subfolders(named):
                found.setdefault(named.name, {}).setdefault(folder.name, folder)
    if not os.environ.get(OVERRIDE):
        for name, arch, folder in _from_entry_points():
            found.setdefault(name, {}).setdefault(arch, folder)
    return found


def _roots() -> Iterator[Path]:
    """As ``liger_aot.runtime.packs.pack_roots``: not the current directory."""
    if override := os.environ.get(OVERRIDE):
        yield from (Path(root) for root in override.split(os.pathsep) if root)
        return
    yield from namespace_folders(NAMESPACE)


def _subfolders(root: Path) -> list[Path]:
    try:
        entries = sorted(entry.path for entry in os.scandir(root) if entry.is_dir())
    except OSError:
        return []
    return [Path(path) for path in entries if not os.path.basename(path).startswith((".", "_"))]


def _from_entry_points() -> Iterator[tuple[str, str, Path]]:
    """Packs that lie elsewhere: an entry "<name>.<arch> = package.folder" of a distribution on the import path. Read by
    hand: importlib.metadata takes longer to import than this does."""
    for site in dict.fromkeys(entry for entry in sys.path if entry):
        for path in sorted(Path(site).glob("*.dist-info/entry_points.txt")):
            for name, value in _entries(path):
                pack, _, arch = name.partition(".")
                if pack and arch and all(part.isidentifier() for part in value.split(".")):
                    for root in (site, *sys.path):  # another than the site where it is installed to be edited
                        folder = Path(root, *value.split("."))
                        if root and (folder / "manifest.json").is_file():
                            yield pack, arch, folder
                            break


def _entries(path: Path) -> Iterator[tuple[str, str]]:
    """The entries of our group in an entry_points.txt."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return
    ours = False
    for line in text.splitlines() if GROUP in text else ():
        line = line.strip()
        if line.startswith("["):
            ours = line == f"[{GROUP}]"
        elif ours and "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            yield name.strip(), value.strip()


def open_pack(folder: Path) -> TritonPack:
    """The pack in ``folder``, which is named as its architecture and lies in one named as the pack."""
    pack = TritonPack(folder)
    if pack.arch != folder.name:
        raise PackDamaged(pack.path, f"arch is {pack.arch!r}, its folder is {folder.name!r}")
    return pack


class Installed(NamedTuple):
    """Installed packs that can be read, and the folders that can't with what is wrong."""

    packs: tuple[TritonPack, ...]
    unusable: Mapping[Path, str]


def installed() -> Installed:
    """All of them, opened."""
    packs, unusable = [], {}
    for _, archs in sorted(folders().items()):
        for _, folder in sorted(archs.items()):
            try:
                packs.append(open_pack(folder))
            except LigerAOTError as error:  # noqa: PERF203 (the others are usable)
                unusable[folder] = str(error)
    return Installed(tuple(packs), unusable)


@lru_cache(maxsize=256)
def _opened(folder: Path) -> TritonPack:
    return open_pack(folder)


def serving(device: Device, names: Collection[str] = ()) -> tuple[list[TritonPack], list[str]]:
    """The packs that serve a device, one of each name, and what is wrong with others.

    Args:
        names: packs to look at, in this order; all that are installed where there are none.

    Raises:
        PackNotFound: a pack of ``names`` is not installed.
    """
    found = folders()
    packs, problems = [], []
    for name in names or sorted(found):
        if name not in found:
            known = ", ".join(sorted(found)) or "none"
            raise PackNotFound(f"no pack {name!r} of Triton kernels is installed; installed: {known}")
        candidates = found[name]
        own = own_arch(device)
        if own in candidates:  # without a look at the others
            candidates = {own: candidates[own]}
        opened = []
        for folder in candidates.values():
            try:
                opened.append(_opened(folder))
            except LigerAOTError as error:  # noqa: PERF203 (the others are usable)
                problems.append(str(error))
        fitting = [p for p in opened if p.backend == device.backend and device.target in p.serves]
        if fitting:
            packs.append(min(fitting, key=lambda pack: (pack.serves.index(device.target), pack.arch)))
        elif opened:
            built = ", ".join(pack.arch for pack in opened)
            problems.append(f"pack {name} is installed for {built}, none of which serves {device}")
    return packs, problems
