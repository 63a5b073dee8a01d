"""Values of module-level names, read from a file's source without running it: literals, which may name others of the
same file or of one that it imports from.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

from liger_aot_build.errors import DeclarationError


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imported(module: str, folder: Path) -> Path:
    """The file of ``module``, whose package is ``folder``."""
    return folder.joinpath(*module.split(".")[1:]).with_suffix(".py")


def literal(path: Path, name: str, folder: Path) -> Any:
    """The value that the file gives ``name``; None where it gives none. Imports are looked for below ``folder``, which
    is the package that their names begin with.

    Raises:
        DeclarationError: it is no literal: constants, lists, tuples, dicts (with ``*`` and ``**``), names of such.
    """
    return _Reader(path, name, folder, ()).named(name, missing=None)


class _Reader:
    """Reads one name of one file; ``asked`` are those it is read for, which it may not need itself."""

    def __init__(self, path: Path, name: str, folder: Path, asked: tuple[tuple[Path, str], ...]) -> None:
        self._path, self._name, self._folder = path, name, folder
        self._asked = (*asked, (path, name))

    def named(self, name: str, **missing: Any) -> Any:
        for node in tree(self._path).body:
            if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == [name]:
                return self._value(node.value)
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self._of(imported(node.module, self._folder), alias.name)
        if missing:
            return missing["missing"]
        raise self._error(f"nothing gives {name} a value")

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List | ast.Tuple):
            return [value for item in node.elts for value in self._items(item)]
        if isinstance(node, ast.Dict):
            merged: dict[Any, Any] = {}
            for key, item in zip(node.keys, node.values, strict=True):
                value = self._value(item)
                if key is not None:
                    merged[self._value(key)] = value
                elif isinstance(value, dict):
                    merged |= value
                else:
                    raise self._error(f"** of {ast.unparse(item)}, which is no dict")
            return merged
        if isinstance(node, ast.Name):
            return self._of(self._path, node.id)
        raise self._error(f"found {ast.unparse(node)}")

    def _items(self, node: ast.expr) -> list[Any]:
        if not isinstance(node, ast.Starred):
            return [self._value(node)]
        values = self._value(node.value)
        if not isinstance(values, list | dict):
            raise self._error(f"* of {ast.unparse(node.value)}, which is no list and no dict")
        return list(values)

    def _of(self, path: Path, name: str) -> Any:
        if (path, name) in self._asked or not path.is_file():
            raise self._error(f"{name} has no value that can be read")
        return _Reader(path, name, self._folder, self._asked).named(name)

    def _error(self, problem: str) -> DeclarationError:
        return DeclarationError(f"{self._path.name}: {self._name} must be a literal: {problem}")
