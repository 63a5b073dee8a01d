"""What a function's source and names stand for, written down for ``liger_aot.triton.sources`` to compare.

Which names count is Triton's own answer: its visitor of the syntax tree is asked, so that this follows each version's
rules of what a function's local names hide.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from liger_aot.triton.closures import Unclear, closure
from liger_aot.triton.sources import (
    DATA,
    FUNCTION,
    KINDS,
    is_data,
    kind,
    look_up,
    meaning,
    text,
)

Tree = dict[str, Any]  # a function: as in a pack, but for those that it calls, which stand in their place


def tree(fn: Any, above: tuple[int, ...] = ()) -> Tree:
    """A function with all that it calls.

    Raises:
        Unclear: it reads what can't be written down; a pack then says nothing, and Triton's hash is asked at run time.
    """
    if id(fn) in above:
        raise Unclear(f"{fn.__name__} calls itself")
    if kind(fn) not in KINDS:
        raise Unclear(f"a {kind(fn)}")
    visited, supported = _visited(fn)
    outside, inside = fn.__globals__, closure(fn)
    found: dict[str, Any] = {}
    names: dict[str, Any] = {}
    for path in sorted(visited, key=lambda path: (path.count("."), path)):
        before = path.rpartition(".")[0]
        if before and (before not in found or getattr(found[before], "__name__", "") in supported):
            continue  # Triton does not look at it
        value = look_up(path, found, outside, inside)
        said = meaning(value)
        if not said.startswith("module:") and getattr(value, "__name__", "") in supported:
            raise Unclear(f"{path} is named as a module that Triton knows")
        if said == FUNCTION:
            names[path] = tree(value, (*above, id(fn)))
        else:
            names[path] = DATA if is_data(said) and not visited[path] else said
        if said not in ("absent", "none"):
            found[path] = value
    return {
        "text": text(fn),
        "line": fn.starting_line_number,
        "kind": kind(fn),
        "noinline": str(getattr(fn, "noinline", False)),
        "names": names,
    }


def _visited(fn: Any) -> tuple[dict[str, bool], frozenset[str]]:
    """Names and attributes of names that Triton looks up in ``fn``, each with whether its value counts: not that of
    names which only stand in the defaults of arguments. And names of modules that it does not look into."""
    from triton.runtime.jit import DependenciesFinder

    visited: dict[str, bool] = {}

    class Visitor(DependenciesFinder):  # type: ignore[misc]
        def visit_Name(self, node: ast.Name) -> Any:
            self._note(node)
            return super().visit_Name(node)

        def visit_Attribute(self, node: ast.Attribute) -> Any:
            self._note(node)
            return super().visit_Attribute(node)

        def _note(self, node: ast.expr) -> None:
            path, root = _dotted(node)
            if root is None or isinstance(root.ctx, ast.Store) or root.id in self.local_names:
                return
            if not isinstance(getattr(node, "ctx", None), ast.Load):
                raise Unclear(f"{path} is assigned to")
            counts = not self.visiting_arg_default_value and path not in self.supported_python_builtins
            visited[path] = visited.get(path, False) or counts

    # Its globals are those of the module itself: what is read by their dictionary's identity stays so.
    finder = Visitor(name=fn._fn_name, globals=fn.__globals__, nonlocals=closure(fn), src=fn.src)
    finder.visit(fn.parse())
    return visited, frozenset(finder.supported_modules)


def _dotted(node: ast.AST) -> tuple[str, ast.Name | None]:
    """ "a.b.c" and the name that it begins with."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return "", None
    return ".".join((node.id, *reversed(parts))), node


def flat(trees: Sequence[Tree | None]) -> tuple[list[dict[str, Any]], list[int | None]]:
    """Trees as a pack has them: a list in which each function stands once, and the place of each tree in it."""
    places: dict[str, int] = {}
    table: list[dict[str, Any]] = []

    def place(one: Tree) -> int:
        names = {path: said if isinstance(said, str) else place(said) for path, said in one["names"].items()}
        entry = {**one, "names": names}
        key = repr(sorted(entry.items(), key=lambda item: item[0]))
        if key not in places:
            places[key] = len(table)
            table.append(entry)
        return places[key]

    return table, [None if one is None else place(one) for one in trees]


def renamed(one: Tree, before: str, now: str) -> Tree:
    """A tree in which a module has another name."""
    names = {
        path: renamed(said, before, now) if isinstance(said, dict) else said.replace(before, now)
        for path, said in one["names"].items()
    }
    return {**one, "names": names}
