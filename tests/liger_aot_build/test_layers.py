"""Which room may import which: the design's table, checked on every import of the tree, also those inside functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from liger_aot_build.paths import ROOT

PACKAGES = {  # and where they lie
    "liger_aot": "python/liger_aot", "liger_aot_build": "liger_aot_build", "csrc_triton": "csrc_triton",
    "benchmarks": "benchmarks", "tests": "tests", "docs.generate": "docs/generate", "examples": "examples",
}  # fmt: skip
BASE = ("liger_aot.errors", "liger_aot._version", "liger_aot._launch")
OPS = ("liger_aot.ops", "liger_aot.runtime", *BASE)
# Room -> the rooms that it may import beside itself. Of a module, the room with the longest name that fits counts.
ROOMS: Mapping[str, tuple[str, ...]] = {
    "csrc_triton": (),
    "liger_aot_build": (),
    "liger_aot_build.triton_packs": ("liger_aot_build", "liger_aot.triton", *BASE),
    "liger_aot._version": (),
    "liger_aot._launch": (),
    "liger_aot.errors": ("liger_aot._version",),
    "liger_aot.runtime": BASE,
    "liger_aot.ops": ("liger_aot.runtime", *BASE),
    "liger_aot.models": OPS,
    "liger_aot.liger": (*OPS, "liger_aot.models"),
    "liger_aot.triton": ("liger_aot.runtime", *BASE),
    "liger_aot.cli": ("liger_aot", *OPS, "liger_aot.triton", "liger_aot_build.triton_packs"),
    "liger_aot": (*OPS, "liger_aot.models", "liger_aot.liger", "liger_aot.triton", "liger_aot.cli"),
    "benchmarks": ("liger_aot_build", "liger_aot", "examples"),
    "examples": ("liger_aot", "tests"),
    "docs.generate": ("benchmarks", "liger_aot_build", "liger_aot"),
    "tests": ("benchmarks", "liger_aot_build", "csrc_triton", "docs.generate", "examples", "liger_aot"),
}
# Modules that watch a compiler which the user's program has imported.
WATCHERS = ("liger_aot.liger.launches",)
# Where other projects' kernels are recorded, built and run: what Triton is, these know. The build says what a variant
# is in the words of the room that runs it; the command line starts it.
OF_TRITON = ("liger_aot.triton", "liger_aot_build.triton_packs", "liger_aot.cli")
# Families of ops whose files may also use another family's.
FAMILIES = {
    "cache": ("quantization", "rope"),
    "decoding": ("attention",),
    "losses": ("softmax",),
    "post_training": ("losses", "softmax"),
    "quantization": ("activations", "norms"),
    "residual": ("norms",),
}


@cache
def modules() -> dict[str, Path]:
    found = {}
    for package, folder in PACKAGES.items():
        for path in (*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.pyi")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


@cache
def imports() -> dict[str, tuple[str, ...]]:
    """Every module of the tree with the modules that it imports, of the tree and of others."""
    return {name: tuple(dict.fromkeys(_imported(name, path))) for name, path in modules().items()}


def _imported(name: str, path: Path) -> Iterator[str]:
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    for node in _executed(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            wholes = [f"{base}.{alias.name}" for alias in node.names]
            yield from (whole if whole in modules() else base for whole in wholes)


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but what only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from _executed(node)


def room_of(name: str) -> str:
    """The longest name that fits; nothing for a module that is not of the tree."""
    return max((room for room in ROOMS if f"{name}.".startswith(f"{room}.")), key=len, default="")


def test_modules_are_found() -> None:
    assert len(modules()) > 300 and all(room_of(name) for name in modules())
    assert "liger_aot_build.profile" in imports()["liger_aot_build.plan"]
    assert "liger_aot._launch" in imports()["liger_aot.runtime.devices"]  # inside a function


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_the_table_allows(room: str) -> None:
    """No arrow runs up."""
    within = [name for name in modules() if room_of(name) == room]
    allowed = (room, *ROOMS[room])
    wrong = [
        f"{name} imports {other}"
        for name in within
        for other in imports()[name]
        if (found := room_of(other)) and not any(f"{found}.".startswith(f"{one}.") for one in allowed)
    ]
    assert within and not wrong, "\n".join(wrong)


def test_the_two_halves_and_their_tools_stay_apart() -> None:
    """Device code needs Triton alone. What builds needs neither torch nor what runs; what runs needs no compiler."""
    foreign = {
        "liger_aot_build": ("torch", "benchmarks", "liger_aot", "tests"),
        "liger_aot": ("triton", "csrc_triton", "liger_aot_build"),
    }
    for name, others in imports().items():
        tops = {other.split(".")[0] for other in others}
        if name.startswith("csrc_triton."):
            assert tops <= {"triton", "csrc_triton", "typing", "__future__"}, name
        allowed = {"triton"} if name in WATCHERS else set()
        if room_of(name) in OF_TRITON:
            allowed = {"triton", "liger_aot", "liger_aot_build"}
        assert not (tops - allowed) & {*foreign.get(name.split(".")[0], ())}, name


def test_families_of_ops_stay_apart() -> None:
    for name, others in imports().items():
        family = _family(name)
        for other in others if family else ():
            allowed = (family, "common", *FAMILIES.get(str(family), ()))
            assert _family(other) in (None, *allowed), f"{name} imports {other}"


def _family(name: str) -> str | None:
    """The family of ops that a module of device or host code is of."""
    for room in ("csrc_triton.", "liger_aot.ops."):
        if name.startswith(room) and "." in name.removeprefix(room):
            return name.removeprefix(room).split(".")[0]
    return None


def test_there_are_no_circles() -> None:
    graph = {name: [o for o in others if o in modules() and o != name] for name, others in imports().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))
