"""A kernel's declaration, read from its source without importing it: planning needs no Triton."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from liger_aot_build.errors import DeclarationError
from liger_aot_build.literals import imported, literal, tree
from liger_aot_build.paths import KERNELS

DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}  # Triton's names and bytes an element
FP8 = ("fp8e4nv", "fp8e4b8")  # e4m3 and e4m3fnuz: an architecture has one of them or none
CODES = (*FP8, "i8")  # what tensors are quantised to
SCALARS = {"i32": "i", "i64": "l", "fp32": "f"}  # Triton's names and the launcher's letters
POINTEES = {*DTYPES, "i32", "i64"}
LANGUAGES = ("triton", "gluon")
Value = str | int  # of an axis: a dtype ("bf16"), a word ("causal"), an integer (64) or a bool
RESERVED = ("true", "false", "aligned", "generic")  # what a dispatch key says besides
Node = TypeVar("Node", bound=ast.AST)
_TILES = re.compile(r"(\w+)\[(\w+(?:, \w+){1,4})\]")  # a tensor map of two to five dimensions


@dataclass(frozen=True)
class Form:
    """One way to compute a kernel: a device function and the numbers a profile gives it."""

    name: str
    function: str
    constants: tuple[str, ...]
    defaults: Mapping[str, int | bool]  # constants that a profile's row may leave out
    covers: str | None  # the longest row, a sum of products of constants; None: any
    any_length: str | None  # a constant that, at 0, lifts that bound
    requires: Mapping[str, tuple[Any, ...]]  # axis -> values it is written for
    staged: tuple[str, ...]  # arguments whose tiles a STAGES-deep pipeline keeps in shared memory
    cooperative: str | None  # the constant that, above 1, makes programs wait for each other
    pdl: str | None  # the constant that, unless 0, makes it a programmatic dependent launch: it waits itself
    loads_before_wait: int  # so many loads may stand before that, of what the kernel before does not write
    contiguous: bool  # whether rows must follow each other without a gap
    may_spill: str | None  # the reason, where a binary of this form may use local memory
    language: str | None  # where it is not the kernel's


@dataclass(frozen=True)
class Kernel:
    name: str
    arguments: Mapping[str, str]  # name -> "*dtype-or-axis" or a scalar type, in launch order
    # Of dtypes (or the name of an axis before), words, integers or bools.
    axes: Mapping[str, tuple[Value, ...]]
    excluded: tuple[Mapping[str, tuple[Value, ...]], ...]  # combinations of the axes that are not built
    # Argument -> the axes' values that it is there for.
    only_with: Mapping[str, Mapping[str, tuple[Value, ...]]]
    # Axis -> value -> constants that it decides.
    gives: Mapping[str, Mapping[Value, Mapping[str, int | bool]]]
    # Numbers that the op's host code reads from a profile's row, which may leave them out.
    host: tuple[str, ...]
    aligned: tuple[str, ...]  # arguments that the aligned variant assumes divisible by 16
    forms: Mapping[str, Form]
    language: str
    optional: bool  # whether an architecture may do without it: one whose profile has no table for it
    always_aligned: bool  # whether there is no generic variant
    matrix: bool  # whether its binaries must have the architecture's matrix instructions

    def signature(self) -> str:
        """The launcher's letters, one an argument."""
        return "".join(_letter(kind) for kind in self.arguments.values())

    def taken(self, axes: Mapping[str, Value]) -> tuple[str, ...]:
        """The arguments that the variants for these values of the axes take."""
        return tuple(a for a in self.arguments if holds(self.only_with.get(a, {}), axes))

    def decided(self, axes: Mapping[str, Value]) -> dict[str, int | bool]:
        """The constants that these values of the axes decide: those that ``gives`` names, and for an axis of integers
        or bools the constant of its name."""
        found: dict[str, int | bool] = {a.upper(): v for a, v in axes.items() if not isinstance(v, str)}
        for axis, constants in self.gives.items():
            found |= constants[axes[axis]]
        return found


def holds(wanted: Mapping[str, tuple[Any, ...]], axes: Mapping[str, Value]) -> bool:
    """Whether each axis that ``wanted`` names has one of its values; a value may name an axis that has the same."""
    for axis, values in wanted.items():
        have = axes[axis]
        if have not in values and not any(isinstance(v, str) and axes.get(v) == have for v in values):
            return False
    return True


def _letter(kind: str) -> str:
    if (tiles := tiles_of(kind)) is not None:
        return str(len(tiles[1]))
    return "p" if kind.startswith("*") else SCALARS[kind]


def tiles_of(kind: str) -> tuple[str, tuple[str, ...]] | None:
    """(dtype or axis, sizes of a tile: numbers and constants) of a tensor map such as "dtype[1, ROWS, 64]", else
    None."""
    match = _TILES.fullmatch(kind)
    return None if match is None else (match[1], tuple(match[2].split(", ")))


@dataclass(frozen=True)
class Declaration:
    op: str
    path: Path
    uses: tuple[str, ...]  # other ops that its host code launches
    kernels: Mapping[str, Kernel]


def declared_ops(folder: Path = KERNELS) -> tuple[str, ...]:
    """Names of the ops that the files in ``folder`` declare, however deep."""
    return tuple(sorted(p.stem for p in folder.rglob("*.py") if _literal(p, folder) is not None))


def op_path(op: str, folder: Path = KERNELS) -> Path:
    """The file that declares ``op``; DeclarationError where there is none, or more than one."""
    found = sorted(p for p in folder.rglob(f"{op}.py") if _literal(p, folder) is not None)
    if not found:
        raise DeclarationError(f"no op {op!r}: there are {', '.join(declared_ops(folder))}")
    if len(found) > 1:
        raise DeclarationError(
            f"op {op!r} is declared by {' and '.join(str(p.relative_to(folder)) for p in found)}"
        )
    return found[0]


@cache
def op_module(op: str) -> str:
    """The name by which Python imports the file that declares ``op``."""
    return ".".join((KERNELS.name, *op_path(op).relative_to(KERNELS).with_suffix("").parts))


def with_used(ops: Sequence[str], folder: Path = KERNELS) -> tuple[str, ...]:
    """``ops`` and those that they launch, sorted: what must be built for ``ops`` to work."""
    found: set[str] = set()
    queue = [*ops]
    while queue:
        op = queue.pop()
        if op not in found:
            found.add(op)
            queue += read_declaration(op, folder).uses
    return tuple(sorted(found))


def read_declaration(op: str, folder: Path = KERNELS) -> Declaration:
    """The declaration of ``op``; DeclarationError when there is none or it is wrong."""
    path = op_path(op, folder)
    raw = _literal(path, folder)
    fields = _Fields(f"{path.name}: DECLARATION", raw)
    if (named := fields.take("op")) != op:
        raise DeclarationError(f"{path.name}: DECLARATION['op'] is {named!r}, the file is named {op}")
    uses = tuple(fields.take("uses", ()))
    if unknown := [name for name in uses if not any(folder.rglob(f"{name}.py"))]:
        raise DeclarationError(f"{path.name}: DECLARATION['uses']: there is no op {unknown[0]!r}")
    functions = _functions(path, folder)
    kernels = {
        name: _kernel(f"{path.name}: kernel {name}", name, body, functions)
        for name, body in _likened(path.name, fields.table("kernels")).items()
    }
    fields.finish()
    return Declaration(op, path, uses, kernels)


class _Fields:
    """A dict whose every key must be asked for."""

    def __init__(self, where: str, raw: Any) -> None:
        if not isinstance(raw, dict):
            raise DeclarationError(f"{where}: expected a dict, found {raw!r}")
        self.where, self.left = where, dict(raw)

    def take(self, key: str, default: Any = None) -> Any:
        if key not in self.left and default is None:
            raise DeclarationError(f"{self.where}: {key!r} is missing")
        return self.left.pop(key, default)

    def table(self, key: str, default: Any = None) -> dict[str, Any]:
        value = self.take(key, default)
        if not isinstance(value, dict):
            raise DeclarationError(f"{self.where}: {key} must be a dict, found {value!r}")
        return value

    def finish(self) -> None:
        if self.left:
            raise DeclarationError(f"{self.where}: unknown {', '.join(map(repr, self.left))}")


def _likened(file: str, kernels: dict[str, Any]) -> dict[str, Any]:
    """Every kernel whole: one that says ``like`` another has its fields where it gives none."""
    whole: dict[str, Any] = {}
    for name, body in kernels.items():
        if isinstance(body, dict) and "like" in body:
            if not isinstance(model := whole.get(body["like"]), dict):
                raise DeclarationError(f"{file}: kernel {name}: like: no kernel {body['like']!r} before it")
            body = {**model, **{key: value for key, value in body.items() if key != "like"}}
        whole[name] = body
    return whole


def _kernel(where: str, name: str, raw: dict[str, Any], functions: dict[str, dict[str, str]]) -> Kernel:
    fields = _Fields(where, raw)
    arguments: dict[str, str] = fields.table("arguments")
    axes = _axes(where, fields.table("axes"))
    for argument, kind in arguments.items():
        tiles = tiles_of(kind)
        of_dtypes = {axis for axis, values in axes.items() if of_dtype(values, axes)}
        known = kind.startswith("*") and (kind[1:] in POINTEES or kind[1:] in of_dtypes)
        if not known and kind not in SCALARS and (tiles is None or tiles[0] not in {*DTYPES, *of_dtypes}):
            raise DeclarationError(f"{where}: argument {argument}: unknown type {kind!r}")
    excluded = tuple(_condition(f"{where}: excluded", rule, axes) for rule in fields.take("excluded", ()))
    only_with = {}
    for argument, wanted in fields.table("only_with", {}).items():
        if argument not in arguments:
            raise DeclarationError(f"{where}: only_with: no argument {argument!r}")
        only_with[argument] = _condition(f"{where}: only_with {argument}", wanted, axes)
    host = tuple(fields.take("host", ()))
    gives = fields.table("gives", {})
    for axis, by_value in gives.items():
        if axis not in axes or set(by_value) != set(axes[axis]):
            raise DeclarationError(
                f"{where}: gives: {axis} has values {', '.join(map(str, axes.get(axis, ()))) or 'not at all'}, "
                f"found {', '.join(map(str, by_value))}"
            )
    aligned = tuple(fields.take("aligned"))
    if unknown := [a for a in aligned if a not in arguments]:
        raise DeclarationError(f"{where}: aligned: no argument {unknown[0]!r}")
    forms = {}
    for form, body in fields.table("forms").items():
        forms[form] = _form(f"{where}: form {form}", form, body)
        _condition(
            f"{where}: form {form}: requires", forms[form].requires, {**axes, "aligned": (True, False)}
        )
        if unknown := [a for a in forms[form].staged if not arguments.get(a, "").startswith("*")]:
            raise DeclarationError(f"{where}: form {form}: staged: no pointer {unknown[0]!r}")
        _check_function(f"{where}: form {form}", forms[form], arguments, only_with, functions)
        sizes = {size for kind in arguments.values() for size in (tiles_of(kind) or ("", ()))[1]}
        if unknown := sorted(s for s in sizes if not s.isdigit() and s not in forms[form].constants):
            raise DeclarationError(f"{where}: form {form}: {unknown[0]!r} is none of its constants")
    language = fields.take("language", "triton")
    for found in (language, *(form.language or language for form in forms.values())):
        if found not in LANGUAGES:
            raise DeclarationError(
                f"{where}: language must be one of {', '.join(LANGUAGES)}, found {found!r}"
            )
    optional, always_aligned = fields.take("optional", False), fields.take("always_aligned", False)
    matrix = fields.take("matrix", False)
    fields.finish()
    return Kernel(
        name,
        arguments,
        axes,
        excluded,
        only_with,
        gives,
        host,
        aligned,
        forms,
        language,
        optional,
        always_aligned,
        matrix,
    )


def of_dtype(values: Sequence[Value], axes: Mapping[str, Sequence[Value]]) -> bool:
    """Whether an axis' values are dtypes, of which some may be named by an axis that has the same."""
    return all(value in DTYPES or value in CODES or value in axes for value in values)


def _axes(where: str, raw: Mapping[str, Any]) -> dict[str, tuple[Value, ...]]:
    """Each axis' values: dtypes and names of other axes, or else words, or integers, or bools, of one kind."""
    axes = {axis: tuple(values) for axis, values in raw.items()}
    for axis, values in axes.items():
        if of_dtype(values, axes):
            continue
        if any(value in DTYPES or value in CODES or value in axes for value in values):
            wrong = next(value for value in values if not of_dtype((value,), axes))
            raise DeclarationError(f"{where}: axis {axis}: {wrong!r} is no dtype and no other axis")
        if len({type(value) for value in values}) > 1 or len(set(values)) < len(values):
            raise DeclarationError(
                f"{where}: axis {axis}: values must be distinct and of one kind, found {values}"
            )
        for value in values:
            word = isinstance(value, str) and value.isidentifier() and value not in RESERVED
            if not word and not (isinstance(value, int) and value >= 0):
                raise DeclarationError(
                    f"{where}: axis {axis}: {value!r} is no dtype, word, bool or integer from 0 on"
                )
    return axes


def _condition(
    where: str, raw: Mapping[str, Any], axes: Mapping[str, tuple[Value, ...]]
) -> dict[str, tuple[Value, ...]]:
    """Values of some axes, each of which the axis has."""
    wanted = {axis: tuple(values) for axis, values in raw.items()}
    for axis, values in wanted.items():
        if axis not in axes:
            raise DeclarationError(f"{where}: no axis {axis!r}")
        allowed = {*axes[axis], *(DTYPES if of_dtype(axes[axis], axes) else ())}
        if unknown := [value for value in values if value not in allowed]:
            raise DeclarationError(f"{where}: axis {axis} has no value {unknown[0]!r}")
    return wanted


def _check_function(
    where: str,
    form: Form,
    arguments: Mapping[str, str],
    only_with: Mapping[str, Any],
    functions: dict[str, dict[str, str]],
) -> None:
    """It takes the arguments in their order, and the constants in theirs. A parameter that is neither, or an argument
    that not all variants have, may be compiled as None, which must be its default."""
    if (found := functions.get(form.function)) is None:
        raise DeclarationError(f"{where}: there is no function {form.function}")
    declared = [*arguments, *form.constants]
    if sorted((n for n in found if n in declared), key=lambda n: n in form.constants) != declared:
        raise DeclarationError(
            f"{where}: function {form.function} takes {[*found]}, the declaration says {declared}"
        )
    for name, default in found.items():
        if (name not in declared or name in only_with) and default != "None":
            absent = "some variants do not have" if name in only_with else "the declaration leaves out"
            raise DeclarationError(
                f"{where}: function {form.function} takes {name!r}, which {absent}: "
                f"its default must be None, {f'found {default}' if default else 'it has none'}"
            )


def _form(where: str, name: str, raw: dict[str, Any]) -> Form:
    fields = _Fields(where, raw)
    form = Form(
        name=name,
        function=fields.take("function"),
        constants=tuple(fields.take("constants")),
        defaults=fields.table("defaults", {}),
        covers=fields.left.pop("covers", None),
        any_length=fields.left.pop("any_length", None),
        requires={axis: tuple(values) for axis, values in fields.table("requires", {}).items()},
        staged=tuple(fields.take("staged", ())),
        cooperative=fields.left.pop("cooperative", None),
        pdl=fields.left.pop("pdl", None),
        loads_before_wait=fields.take("loads_before_wait", 0),
        contiguous=fields.left.pop("contiguous", False),
        may_spill=fields.left.pop("may_spill", None),
        language=fields.left.pop("language", None),
    )
    fields.finish()
    switches = filter(None, (form.cooperative, form.pdl, form.any_length))
    if form.cooperative and form.pdl:
        raise DeclarationError(f"{where}: cooperative and pdl: a kernel is launched in one way")
    if type(form.loads_before_wait) is not int or (form.loads_before_wait and not form.pdl):
        raise DeclarationError(f"{where}: loads_before_wait must be a number, of a form with pdl")
    named = {*_names(where, form.covers), *switches, *form.defaults}
    if form.staged:
        named |= {"BLOCK", "STAGES"}  # what a plan computes the pipeline's shared memory from
    if unknown := sorted(named - set(form.constants)):
        raise DeclarationError(f"{where}: {unknown[0]!r} is none of its constants")
    return form


def _names(where: str, expression: str | None) -> set[str]:
    """Names in a sum of products of names and integers; anything else is refused."""
    if expression is None:
        return set()
    allowed = (ast.Expression, ast.BinOp, ast.Add, ast.Mult, ast.Name, ast.Load, ast.Constant)
    try:
        nodes = list(ast.walk(ast.parse(expression, mode="eval")))
    except (SyntaxError, TypeError):
        nodes = [ast.Pass()]
    if not all(isinstance(n, allowed) and type(getattr(n, "value", 0)) is int for n in nodes):
        raise DeclarationError(f"{where}: covers: {expression!r} is no sum of products")
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def longest_row(form: Form, constants: Mapping[str, int | bool]) -> int | None:
    """The longest row that ``form`` covers with these numbers; None: any."""
    if form.covers is None or (form.any_length and not constants[form.any_length]):
        return None
    length: int = eval(form.covers, {"__builtins__": {}}, dict(constants))  # checked by _names
    return length


def _literal(path: Path, folder: Path) -> dict[str, Any] | None:
    value = literal(path, "DECLARATION", folder)
    if value is not None and not isinstance(value, dict):
        raise DeclarationError(f"{path.name}: DECLARATION must be a dict")
    return value


def _functions(path: Path, folder: Path) -> dict[str, dict[str, str]]:
    """Parameters of every function that the file defines or imports from another one in ``folder``, with their defaults
    as written ("" where there is none)."""
    found = {node.name: _parameters(node.args) for node in _of_kind(path, ast.FunctionDef)}
    for node in _of_kind(path, ast.ImportFrom):
        if (other := imported(node.module or "", folder)).is_file():
            there = {n.name: _parameters(n.args) for n in _of_kind(other, ast.FunctionDef)}
            found |= {a.asname or a.name: there[a.name] for a in node.names if a.name in there}
    return found


def _of_kind(path: Path, kind: type[Node]) -> Iterator[Node]:
    return (node for node in tree(path).body if isinstance(node, kind))


def _parameters(of: ast.arguments) -> dict[str, str]:
    defaults = [""] * (len(of.args) - len(of.defaults)) + [ast.unparse(d) for d in of.defaults]
    return {a.arg: default for a, default in zip(of.args, defaults, strict=True)}
