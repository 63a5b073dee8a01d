"""From a row of the table to what it names in the installed Transformers: all of it, before anything is changed."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

from liger_aot.errors import ArgumentError, PatchError
from liger_aot.models import modules
from liger_aot.models.loss import Loss, fused_loss
from liger_aot.models.table import FAMILIES, Family, Make

Function = Callable[..., Any]


@dataclass(frozen=True)
class Parts:
    """Which parts of a model are replaced."""

    norms: bool = True
    rotary: bool = True
    mlp: bool = True
    loss: Loss | None = None


@dataclass(frozen=True)
class Method:
    """A class's method and what replaces it.

    Attributes:
        part: "norm", "mlp", "attention" or "loss".
        plain: as the class has it.
        new: stands in its place.
        make: of the table, which made ``new``.
    """

    part: str
    cls: type
    name: str
    plain: Function
    new: Function
    make: Any


@dataclass(frozen=True)
class Resolved:
    """A family as the installed Transformers has it.

    Attributes:
        methods: to be replaced in classes or their instances.
        functions: name in ``module`` -> what replaces it, for all that look it up there.
    """

    family: Family
    module: ModuleType
    methods: tuple[Method, ...]
    functions: Mapping[str, Function]


def family_of(name: str) -> Family:
    """The row of that name; "qwen2.5" and "qwen3-moe" are understood too."""
    plain = name.lower().replace("-", "_").replace(".", "_")
    found = FAMILIES.get({"qwen2_5": "qwen2", "gemma1": "gemma", "gemma3_text": "gemma3"}.get(plain, plain))
    if found is None:
        raise ArgumentError(f"liger_aot.patch: no family {name!r}: there are {', '.join(sorted(FAMILIES))}")
    return found


def families_of_model(model: Any) -> tuple[Family, ...]:
    """The row that a model's class, or one it derives from, belongs to; then those of the models within it."""
    if _row_of(model) is not None:
        return tuple({row.name: row for row in map(_row_of, _models_within(model)) if row}.values())
    raise ArgumentError(
        f"liger_aot.apply: {type(model).__module__}.{type(model).__qualname__} is of no family in the table: there are "
        f"{', '.join(sorted(FAMILIES))}. Nothing was changed. Apply before a model is wrapped or compiled"
    )


def _row_of(model: Any) -> Family | None:
    by_module = {row.module: row for row in FAMILIES.values()}
    return next((by_module[c.__module__] for c in type(model).__mro__ if c.__module__ in by_module), None)


def _models_within(model: Any) -> Iterator[Any]:
    """The model first, then the pretrained models among its modules: a vision tower, a language model."""
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    yield model
    yield from (m for m in model.modules() if m is not model and base is not None and isinstance(m, base))


def resolve(family: Family, parts: Parts) -> Resolved:
    """What the row names.

    Raises:
        PatchError: Transformers isn't installed, lacks a name, has another signature, or Liger has replaced it.
    """
    try:
        module = import_module(family.module)
    except ImportError as error:
        raise PatchError(f"liger_aot: {family.module} can't be imported: {error}") from error
    found = _Finder(module)
    methods: list[Method] = []
    if parts.norms:
        methods += found.methods("norm", family.norms, "forward")
    if parts.mlp:
        methods += found.methods("mlp", family.mlps, "forward")
        methods += found.methods("mlp", family.experts, "_apply_gate")
    functions = found.functions(family.rotary) if parts.rotary else {}
    if parts.rotary:
        methods += found.attentions(family.attentions, functions, family.packed)
    if parts.loss is not None:
        losses = {name: fused_loss(logits, parts.loss) for name, logits in family.losses.items()}
        methods += found.methods("loss", losses, "forward")
    if found.missing:
        raise PatchError(
            f"liger_aot: {module.__name__} of Transformers {_version()} is not as this liger-aot knows it: "
            f"{'; '.join(found.missing)}. Nothing was changed"
        )
    return Resolved(family, module, tuple(methods), functions)


class _Finder:
    """Looks names up in a modeling module and notes what is not there."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.missing: list[str] = []

    def classes(
        self, names: Iterator[str] | Mapping[str, Any] | tuple[str, ...]
    ) -> Iterator[tuple[str, type]]:
        for name in names:
            cls: Any = self.module
            for word in name.split("."):
                cls = getattr(cls, word, None)
            if not isinstance(cls, type):
                self.missing.append(f"there is no class {name}")
            elif _by_liger(cls):
                raise PatchError(
                    f"liger_aot: {self.module.__name__}.{name} was replaced by Liger-Kernel. Nothing was changed. "
                    "`import liger_aot.liger` runs Liger's own modules on liger-aot's binaries"
                )
            else:
                yield name, cls

    def methods(self, part: str, rows: Mapping[str, Make], method: str) -> Iterator[Method]:
        for name, cls in self.classes(rows):
            make, plain = rows[name], getattr(cls, method, None)
            if not isinstance(plain, FunctionType):
                self.missing.append(f"{name} has no method {method}")
            elif part == "loss" and not {"lm_head", "loss_function"} <= _names_in(plain):
                self.missing.append(f"{name}.forward uses no lm_head and loss_function")
            elif unread := set(modules.READS.get(make, ())) - _attributes(cls):
                self.missing.append(f"{name} has no {', '.join(sorted(unread))}")
            else:
                try:
                    new = make(plain)
                except AttributeError as error:  # an activation
                    self.missing.append(str(error))
                else:
                    yield Method(part, cls, method, plain, _named(new, method), make)

    def functions(self, rows: Mapping[str, Make]) -> dict[str, Function]:
        found: dict[str, Function] = {}
        for name, make in rows.items():
            plain = getattr(self.module, name, None)
            if not callable(plain):
                self.missing.append(f"there is no function {name}")
                continue
            if _by_liger(plain):
                raise PatchError(
                    f"liger_aot: {self.module.__name__}.{name} was replaced by Liger-Kernel. Nothing was changed. "
                    "`import liger_aot.liger` runs Liger's own modules on liger-aot's binaries"
                )
            new = make(plain)
            code = getattr(plain, "__code__", None)
            expected = new.__code__.co_varnames[: new.__code__.co_argcount]
            if code is not None and code.co_varnames[: code.co_argcount] != expected:
                self.missing.append(f"{name} doesn't take {', '.join(expected)}")
            found[name] = _named(new, name)
        return found

    def attentions(
        self, names: tuple[str, ...], functions: Mapping[str, Function], packed: Mapping[str, Make]
    ) -> Iterator[Method]:
        """Methods that are as they were, but find ``functions`` where they look for globals of their module; those of
        ``packed`` wrapped."""
        for name, cls in self.classes(names):
            plain = getattr(cls, "forward", None)
            if not isinstance(plain, FunctionType) or not _names_in(plain, unwrap=False) & set(functions):
                self.missing.append(
                    f"{name}.forward doesn't call {' or '.join(functions) or 'a rotary function'}"
                )
                continue
            new, make = rebound(plain, functions), packed.get(name)
            if make is None:
                yield Method("attention", cls, "forward", plain, new, None)
            elif unread := set(modules.READS[make]) - _attributes(cls):
                self.missing.append(f"{name} has no {', '.join(sorted(unread))}")
            else:
                yield Method("attention", cls, "forward", plain, _named(make(new), "forward"), make)


def rebound(plain: FunctionType, functions: Mapping[str, Function]) -> FunctionType:
    """A copy of ``plain`` that finds ``functions`` among its globals."""
    # Without a module's name: torch.compile reads a function's globals from the module they are named after.
    around = {k: v for k, v in plain.__globals__.items() if k != "__name__"} | dict(functions)
    new = FunctionType(plain.__code__, around, plain.__name__, plain.__defaults__, plain.__closure__)
    new.__kwdefaults__, new.__doc__ = plain.__kwdefaults__, plain.__doc__
    new.__module__, new.__qualname__ = __name__, plain.__qualname__
    new.__annotations__ = plain.__annotations__
    return new


def _named(new: Function, name: str) -> Function:
    new.__name__ = name  # a bound method is pickled by its function's name
    return new


def _names_in(function: FunctionType, *, unwrap: bool = True) -> set[str]:
    """The attributes and globals that it uses."""
    while unwrap and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return set(function.__code__.co_names)


def _attributes(cls: type) -> set[str]:
    """What the ``__init__``s of a class and its bases name, those within decorators too."""
    names: set[str] = set()
    waiting: list[Any] = [vars(base).get("__init__") for base in cls.__mro__]
    seen: list[Any] = []
    while waiting:
        init = waiting.pop()
        if not isinstance(init, FunctionType) or init in seen:
            continue
        seen.append(init)
        names.update(init.__code__.co_names)
        waiting += list(inspect.getclosurevars(init).nonlocals.values())
    return names


def _by_liger(thing: Any) -> bool:
    names = [getattr(thing, "__module__", "")]
    if isinstance(thing, type):
        names.append(getattr(getattr(thing, "forward", None), "__module__", ""))
    return any((name or "").startswith("liger_kernel") for name in names)


def _version() -> str:
    return str(getattr(sys.modules.get("transformers"), "__version__", "of an unknown version"))
