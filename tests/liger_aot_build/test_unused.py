"""Nothing is kept that nobody uses: forms without a row, switches that no row sets, functions that no code names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from liger_aot_build.build import make_plans
from liger_aot_build.declaration import declared_ops, read_declaration
from liger_aot_build.paths import KERNELS, ROOT
from liger_aot_build.plan import Variant
from liger_aot_build.profile import profile_names

HOST = ROOT / "python" / "liger_aot"


@cache
def variants() -> tuple[Variant, ...]:
    return tuple(v for arch in profile_names() for plan in make_plans(arch)[1] for v in plan.variants)


def test_every_form_has_a_row() -> None:
    declared = {
        (k.name, f) for op in declared_ops() for k in read_declaration(op).kernels.values() for f in k.forms
    }
    assert sorted(declared - {(v.kernel, v.form.name) for v in variants()}) == []


def test_every_default_is_overridden_somewhere() -> None:
    """A constant that has its default in every binary of a form is none."""
    settable = {
        (kernel.name, form.name, constant): default
        for op in declared_ops()
        for kernel in read_declaration(op).kernels.values()
        for form in kernel.forms.values()
        for constant, default in form.defaults.items()
    }
    for v in variants():
        for constant, value in v.constants.items():
            if (key := (v.kernel, v.form.name, constant)) in settable and settable[key] != value:
                del settable[key]
    assert sorted(settable) == []


def functions(folder: Path) -> Iterator[tuple[Path, str]]:
    """Functions and classes at the top of every module in ``folder``."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield path, node.name


@cache
def said(*places: Path) -> frozenset[str]:
    """Names that the code there says other than to define them: as a name, an attribute, an import or a string, as
    declarations do."""
    files = [file for place in places for file in (place.rglob("*.py") if place.is_dir() else (place,))]
    found: set[str] = set()
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return frozenset(found)


@pytest.mark.parametrize(
    ("folder", "users"),
    [
        (KERNELS, (KERNELS,)),
        (
            ROOT / "liger_aot_build",
            (
                ROOT / "liger_aot_build",
                ROOT / "setup.py",
                ROOT / "benchmarks",
                ROOT / "docs",
                ROOT / "tests" / "harness",
            ),
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_every_function_is_used(folder: Path, users: tuple[Path, ...]) -> None:
    """Tests are no users, what runs them is."""
    assert [f"{path.relative_to(ROOT)}: {f}" for path, f in functions(folder) if f not in said(*users)] == []


def test_every_private_function_of_the_host_is_used() -> None:
    """Of modules or names that begin with an underscore, and of the loader's own modules: all others are for users."""
    private = (
        (path, name)
        for path, name in functions(HOST)
        if not name.startswith("__")
        and (path.name.startswith("_") or name.startswith("_") or path.parent.name == "runtime")
    )
    assert [f"{path.relative_to(ROOT)}: {name}" for path, name in private if name not in said(HOST)] == []
