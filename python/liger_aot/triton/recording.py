"""A recording on disk: a folder of JSON files, a folder in it for each target that was recorded on.

    recording.json                      {"format": 1}
    cuda-90/target.json                 what was recorded on, and with which Triton
    cuda-90/functions/<hash>.json       a function: where it is, its cache key, the globals that it reads, its package
    cuda-90/variants/<identity>-<ranged>.json  one specialisation
    cuda-90/tuners/<hash>.json          a tuner's choice for one key
    cuda-90/refused/<hash>.json         a call that can't be written as data, and why

Many processes write into one folder at once: a file's name is made of what it says, and it appears whole. A recording
may come from strangers, so that everything read is checked before it is believed.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from liger_aot.errors import ArgumentError, PackDamaged, RecordingDamaged
from liger_aot.runtime.manifest import read_json
from liger_aot.triton.identity import Variant
from liger_aot.triton.targets import Target, target

FORMAT = 1
MOST_FILES = 1 << 17  # of one kind and target
MOST_PATH = 64  # places in a path's part: Triton's kernels have at most some tens of parameters
LONGEST = 4096  # characters of a name or a version


class Package(NamedTuple):
    """The distribution that a function's module belongs to; "" where it is none."""

    name: str
    version: str
    licence: str


class Made(NamedTuple):
    """What makes a function again that is made inside another function: without a call of that."""

    kind: str  # its class
    noinline: bool | None
    variables: tuple[
        tuple[str, Any], ...
    ]  # of the functions around it: name, value as ``closures.written`` has it
    defaults: tuple[tuple[str, Any], ...]  # of parameters, in their order
    annotations: tuple[tuple[str, str], ...]  # of parameters, as Triton reads them


class Function(NamedTuple):
    """A ``@triton.jit`` function, as it was when it was recorded."""

    module: str
    qualname: str
    cache_key: str  # as ``closures.key`` has it
    file: str  # for people; nothing opens it
    line: int
    reads: tuple[tuple[str, str, Any], ...]  # globals: module, name, encoded value
    package: Package
    made: Made | str | None  # why it can't be made again; None where it is not made inside another function

    @property
    def name(self) -> str:
        return f"{self.module}:{self.qualname}"

    @property
    def key(self) -> tuple[str, str, str]:
        return self.module, self.qualname, self.cache_key


class Noted(NamedTuple):
    """A variant, and the pointers whose tensors were smaller than 2 GiB."""

    variant: Variant
    ranged: tuple[tuple[int, ...], ...]


class Choice(NamedTuple):
    """What a tuner chose for one key."""

    module: str
    qualname: str
    keys: tuple[str, ...]  # names of the arguments that the key is made of
    key: tuple[Any, ...]  # encoded values
    config: Mapping[str, Any]  # kwargs (encoded), num_warps, num_stages, num_ctas, maxnreg, ir_override
    text: str  # str(config)
    timed: bool  # False where no kernel ran: the first of the tuner's configurations


class Part(NamedTuple):
    """What was recorded on one target."""

    target: Target
    triton: str
    device: str
    timed: bool
    functions: Mapping[tuple[str, str, str], Function]
    variants: tuple[Noted, ...]
    choices: tuple[Choice, ...]
    refused: tuple[tuple[str, str], ...]  # function, why


# -- writing ----------------------------------------------------------------------------------------------------------
class Writer:
    """Writes one process' part of a recording. Files that are there already stay."""

    def __init__(self, folder: Path, of: Target, triton: str, device: str, timed: bool) -> None:
        self.folder = folder / of.name
        for kind in ("functions", "variants", "tuners", "refused"):
            (self.folder / kind).mkdir(parents=True, exist_ok=True)
        _write(folder / "recording.json", {"format": FORMAT})
        about = {"backend": of.backend, "arch": of.arch, "warp_size": of.warp_size, "triton": triton}
        _write(self.folder / "target.json", {**about, "device": device, "timed": timed})
        found = read_json(self.folder / "target.json")
        if found.get("triton") != triton:
            raise ArgumentError(
                f"{self.folder} was recorded with triton {found.get('triton')}, this is {triton}: "
                "record into another folder"
            )

    def function(self, function: Function) -> None:
        made = function.made._asdict() if isinstance(function.made, Made) else function.made
        about = {**function._asdict(), "package": function.package._asdict(), "made": made}
        _write(
            self.folder
            / "functions"
            / f"{_hash([function.module, function.qualname, function.cache_key])}.json",
            about,
        )

    def variant(self, noted: Noted) -> None:
        name = f"{noted.variant.name}-{_hash(noted.ranged)[:8]}.json"
        _write(self.folder / "variants" / name, {**noted.variant._asdict(), "ranged": noted.ranged})

    def choice(self, choice: Choice) -> None:
        name = _hash([choice.module, choice.qualname, choice.keys, choice.key])
        _write(self.folder / "tuners" / f"{name}.json", choice._asdict())

    def refused(self, function: str, why: str) -> None:
        about = {"function": function, "why": why[:LONGEST]}
        _write(self.folder / "refused" / f"{_hash(about)}.json", about)


def _hash(data: Any) -> str:
    return sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:40]


def _write(path: Path, data: Any) -> None:
    if path.exists():
        return
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".new")
    with os.fdopen(descriptor, "w") as file:
        json.dump(data, file, sort_keys=True, indent=1)
        file.write("\n")
    os.replace(temporary, path)


# -- reading ----------------------------------------------------------------------------------------------------------
def read(folder: Path) -> tuple[Part, ...]:
    """All that a recording says, by target; RecordingDamaged where it can't be."""
    path = folder / "recording.json"
    if not path.exists():
        raise ArgumentError(f"{folder} is no recording: it has no recording.json")
    if (found := _read(path).get("format")) != FORMAT:
        raise RecordingDamaged(path, f"format {found!r}, this liger-aot reads {FORMAT}")
    parts = tuple(_part(below) for below in sorted(folder.iterdir()) if (below / "target.json").exists())
    if not parts:
        raise ArgumentError(f"{folder}: nothing was recorded into it")
    if len(versions := {part.triton for part in parts}) > 1:
        raise ArgumentError(
            f"{folder}: recorded with triton {' and '.join(sorted(versions))}: a pack has one"
        )
    return parts


def _part(folder: Path) -> Part:
    path = folder / "target.json"
    about = _Fields(path, _read(path))
    arch = about.any("arch")
    of = target(f"sm{arch}" if isinstance(arch, int) else str(arch))
    if of.name != folder.name or of.backend != about.text("backend"):
        raise RecordingDamaged(path, f"is of {of.name}, in a folder named {folder.name}")
    functions = {(f.module, f.qualname, f.cache_key): f for f in map(_function, _files(folder / "functions"))}
    variants = tuple(_noted(fields) for fields in _files(folder / "variants"))
    for noted in variants:
        v = noted.variant
        if (v.module, v.qualname, v.cache_key) not in functions:
            raise RecordingDamaged(folder, f"has a variant of {v.function}, and nothing about that function")
    return Part(
        target=of,
        triton=about.text("triton"),
        device=about.text("device"),
        timed=about.flag("timed"),
        functions=functions,
        variants=variants,
        choices=tuple(_choice(fields) for fields in _files(folder / "tuners")),
        refused=tuple((f.text("function"), f.text("why")) for f in _files(folder / "refused")),
    )


def _files(folder: Path) -> Iterator[_Fields]:
    paths = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if len(paths) > MOST_FILES:
        raise RecordingDamaged(folder, f"has {len(paths)} files, at most {MOST_FILES} are read")
    for path in paths:
        yield _Fields(path, _read(path))


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except PackDamaged as error:
        raise RecordingDamaged(path, error.problem) from None


class _Fields:
    """A file's fields, each checked as it is taken."""

    def __init__(self, path: Path, body: Mapping[str, Any]) -> None:
        self.path, self.body = path, body

    def any(self, name: str) -> Any:
        if name not in self.body:
            raise RecordingDamaged(self.path, f"has no {name}")
        return self.body[name]

    def text(self, name: str) -> str:
        return str(self._kind(name, str))

    def flag(self, name: str) -> bool:
        return bool(self._kind(name, bool))

    def items(self, name: str) -> list[Any]:
        found: list[Any] = self._kind(name, list)
        return found

    def _kind(self, name: str, kind: type) -> Any:
        value = self.any(name)
        if type(value) is not kind or (isinstance(value, str) and len(value) > LONGEST):
            raise RecordingDamaged(self.path, f"{name} is {value!r:.80}, expected {kind.__name__}")
        return value

    def module(self) -> str:
        self.check("module", is_module(name := self.text("module")), name)
        return name

    def qualname(self) -> str:
        self.check("qualname", is_qualname(name := self.text("qualname")), name)
        return name

    def key(self) -> str:
        key = self.text("cache_key")
        self.check("cache_key", len(key) == 64 and not set(key) - set("0123456789abcdef"), key)
        return key

    def check(self, name: str, good: bool, value: Any) -> None:
        if not good:
            raise RecordingDamaged(self.path, f"{name} is {value!r:.80}")

    def pairs(self, name: str, first: type) -> list[list[Any]]:
        pairs = self.items(name)
        for pair in pairs:
            fine = isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is first
            self.check(name, fine and (first is str or _is_path(pair[0])), pair)
        return pairs


def is_module(name: str) -> bool:
    """Whether it can be a module's name: no path, nothing relative."""
    return bool(name) and all(part.isidentifier() for part in name.split("."))


def is_qualname(name: str) -> bool:
    """Whether it can be a function's qualified name."""
    return bool(name) and all(part.isidentifier() or part == "<locals>" for part in name.split("."))


def _is_path(path: Any) -> bool:
    return (
        isinstance(path, list)
        and 0 < len(path) <= MOST_PATH
        and all(type(place) is int and 0 <= place < 1 << 16 for place in path)
    )


def _function(fields: _Fields) -> Function:
    package = fields.any("package")
    known = isinstance(package, dict) and set(package) == set(Package._fields)
    fields.check("package", known and all(isinstance(v, str) for v in package.values()), package)
    reads = fields.items("reads")
    for read_ in reads:
        fine = (
            isinstance(read_, list) and len(read_) == 3 and all(isinstance(part, str) for part in read_[:2])
        )
        fields.check("reads", fine and is_module(read_[0]) and read_[1].isidentifier(), read_)
    line = fields.any("line")
    fields.check("line", type(line) is int, line)
    return Function(
        fields.module(),
        fields.qualname(),
        fields.key(),
        fields.text("file"),
        line,
        tuple((module, name, value) for module, name, value in reads),
        Package(**package),
        _made(fields),
    )


def _made(fields: _Fields) -> Made | str | None:
    made = fields.body.get("made")
    if made is None or isinstance(made, str):
        return made
    fields.check("made", isinstance(made, dict) and set(made) == set(Made._fields), made)
    inner = _Fields(fields.path, made)
    pairs = {name: inner.pairs(name, str) for name in ("variables", "defaults", "annotations")}
    for name, found in pairs.items():
        fields.check(name, all(one.isidentifier() for one, _ in found), found)
    fields.check("annotations", all(isinstance(text, str) for _, text in pairs["annotations"]), pairs)
    noinline = inner.any("noinline")
    fields.check("noinline", noinline in (None, True, False), noinline)
    return Made(
        kind=inner.text("kind"),
        noinline=noinline,
        **{name: tuple((one, value) for one, value in found) for name, found in pairs.items()},
    )


def _noted(fields: _Fields) -> Noted:
    for path, found in fields.pairs("attrs", list):
        fine = isinstance(found, list) and all(isinstance(a, list) and len(a) == 2 for a in found)
        fields.check("attrs", fine, [path, found])
    for name, _ in (*fields.pairs("signature", str), *fields.pairs("given", str)):
        fields.check("signature", name.isidentifier(), name)
    variant = Variant(
        module=fields.module(),
        qualname=fields.qualname(),
        cache_key=fields.key(),
        gluon=fields.flag("gluon"),
        signature=fields.items("signature"),
        constants=fields.pairs("constants", list),
        attrs=fields.items("attrs"),
        given=fields.items("given"),
    )
    ranged = fields.items("ranged")
    fields.check("ranged", all(map(_is_path, ranged)), ranged)
    if not fields.path.name.startswith(f"{variant.name}-"):
        raise RecordingDamaged(fields.path, f"its name says another variant than its text, {variant.name}")
    return Noted(variant, tuple(tuple(path) for path in ranged))


def _choice(fields: _Fields) -> Choice:
    keys, config = fields.items("keys"), fields.any("config")
    fields.check("keys", all(isinstance(key, str) for key in keys), keys)
    fields.check("config", isinstance(config, dict) and isinstance(config.get("kwargs"), dict), config)
    return Choice(
        module=fields.module(),
        qualname=fields.qualname(),
        keys=tuple(keys),
        key=tuple(fields.items("key")),
        config=config,
        text=fields.text("text"),
        timed=fields.flag("timed"),
    )
