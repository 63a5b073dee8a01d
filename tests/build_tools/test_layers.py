"""Which room may import which: the table of the design, checked on every import of the tree, those inside functions too."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from build_tools.paths import ROOT

# Top-level packages of the tree and where they lie.
PACKAGES = {
    "liger_aot": "python/liger_aot", "build_tools": "build_tools", "csrc_triton": "csrc_triton",
    "benchmarks": "benchmarks", "tests": "tests", "docs.generate": "docs/generate",
}  # fmt: skip
# Room -> what of the tree it may import beside itself. A room is a package or a folder of one; the longest that fits
# counts.
ROOMS: Mapping[str, tuple[str, ...]] = {
    "csrc_triton": (),
    "build_tools": (),
    "liger_aot._version": (),
    "liger_aot.errors": (),
    "liger_aot._launch": (),
    "liger_aot.runtime": ("liger_aot.errors", "liger_aot._version", "liger_aot._launch"),
    "liger_aot.ops": ("liger_aot.runtime", "liger_aot.errors", "liger_aot._version"),
    "liger_aot": ("liger_aot",),
    "benchmarks": ("build_tools", "liger_aot"),
    "docs.generate": ("benchmarks", "build_tools", "liger_aot"),
    "tests": ("benchmarks", "build_tools", "csrc_triton", "docs.generate", "examples", "liger_aot", "setup"),
}
# Family of device code -> the other families whose device code it may use.
FAMILIES = {"decoding": ("attention",), "losses": ("softmax",)}
# Module -> a module of a higher room that it imports nevertheless, with the reason.
UPWARD: Mapping[tuple[str, str], str] = {}


@cache
def modules() -> dict[str, Path]:
    found = {}
    for package, folder in PACKAGES.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


@cache
def imports() -> dict[str, tuple[str, ...]]:
    """Every module of the tree with the modules that it imports, of the tree and of others."""
    return {name: tuple(dict.fromkeys(_imported(name, path))) for name, path in modules().items()}


def _imported(name: str, path: Path) -> Iterator[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield whole if whole in modules() else base


def room_of(name: str) -> str:
    return max((room for room in ROOMS if f"{name}.".startswith(f"{room}.")), key=len, default="")


def of_the_tree(name: str) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in PACKAGES)


def test_modules_are_found() -> None:
    assert len(modules()) > 300 and all(room_of(name) for name in modules())
    assert "build_tools.profile" in imports()["build_tools.plan"]
    assert "liger_aot.runtime.devices" in imports()["benchmarks.tuning.trial"]


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_what_the_table_allows(room: str) -> None:
    wrong = [
        f"{name} imports {other}"
        for name, others in imports().items()
        if room_of(name) == room
        for other in others
        if of_the_tree(other) and (name, other) not in UPWARD
        and room_of(other) not in (room, *ROOMS[room])
        and not any(f"{room_of(other)}.".startswith(f"{allowed}.") for allowed in ROOMS[room])
    ]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def test_device_code_needs_triton_alone() -> None:
    for name, others in imports().items():
        if name.startswith("csrc_triton."):
            family = name.split(".")[1]
            for other in others:
                assert other.split(".")[0] in ("triton", "csrc_triton", "__future__"), f"{name} imports {other}"
                if other.startswith("csrc_triton."):
                    allowed = (family, "common", *FAMILIES.get(family, ()))
                    assert other.split(".")[1] in allowed, f"{name} imports {other}"


def test_nobody_imports_what_is_above_all() -> None:
    """At most one arrow runs up, and each that does is needed."""
    assert len(UPWARD) <= 1
    for (name, other), why in UPWARD.items():
        assert other in imports()[name] and why


def test_there_are_no_circles() -> None:
    """Not among imports inside functions, either."""
    graph = {name: [o for o in others if o in modules() and o != name] for name, others in imports().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))
