"""``apply``, ``patch`` and ``restore``: a model, or a family's classes, on liger-aot's ops."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import MethodType
from typing import Any, TypeVar

from torch import nn

from liger_aot.errors import ArgumentTypeError, LeftAlone, PatchError
from liger_aot.models import modules
from liger_aot.models.attention import register_attention
from liger_aot.models.experts import OTHERS, register_experts
from liger_aot.models.loss import Loss, usual, wanted_loss
from liger_aot.models.paged import NAME
from liger_aot.models.record import Change, Record
from liger_aot.models.resolve import Method, Parts, Resolved, families_of_model, family_of, resolve
from liger_aot.ops.op import PLAIN

Model = TypeVar("Model", bound=nn.Module)

_KEPT = "_liger_aot_record"  # on a model: what was changed in it
_families: dict[str, Record] = {}


def apply(
    model: Model,
    *,
    norms: bool = True,
    rotary: bool = True,
    mlp: bool = True,
    loss: bool | Loss = True,
    attention: bool = False,
) -> Model:
    """Run one model of Transformers on liger-aot's ops. Other models in the process stay as they are.

    A model that was applied already is done anew with these arguments. Parameters, state_dict and hooks stay as they
    are. Call it before the model is compiled or wrapped (DistributedDataParallel); FSDP2 may come before or after.

    Args:
        model: of a family in ``liger_aot.models.FAMILIES``; or a PEFT model of one. Models within it, such as a vision
            tower, are done too where their family is in the table.
        norms: RMSNorm or LayerNorm.
        rotary: the rotation of queries and keys.
        mlp: the activation between projections. Gated experts with SiLU run as the op ``fused_moe``
            (``experts_implementation="liger_aot"``), unless the model was made with an implementation of its own.
        loss: in training, ``forward(labels=...)`` computes the loss without logits; the output then has none.
            ``model(..., skip_logits=False)`` keeps them. A ``liger_aot.models.Loss`` says how it is computed.
        attention: set ``attn_implementation="liger_aot"``.

    Returns:
        the model.

    Raises:
        ArgumentTypeError: model is no torch.nn.Module, or loss neither a bool nor a Loss.
        ArgumentError: its family is not in the table, or loss asks for what can't be had together.
        PatchError: Transformers' names are not those that are known, or Liger has changed the model. In all these cases
            nothing was changed.

    Warns:
        LeftAlone: modules that were replaced by others, quantised or tensor-parallel ones that can't be read, or an
            activation that there is no op for: they run as before.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            f"liger_aot.apply: model must be a torch.nn.Module, got {type(model).__name__}"
        )
    inner = _without_adapter(model)
    parts = Parts(norms, rotary, mlp, wanted_loss("apply", loss))
    families = families_of_model(inner)
    for family in families:
        if family.name in _families:
            raise PatchError(
                f"liger_aot.apply: all {family.name} models are patched already: liger_aot.restore({family.name!r}) "
                "first"
            )
    resolved = tuple(resolve(family, parts) for family in families)
    before = vars(inner).get(_KEPT)
    if before is not None:
        before.undo()
    try:
        found = _Instance(inner, resolved)
    except BaseException:
        if before is not None:
            before.make()
        raise
    register_attention()
    if attention:
        found.changes += _attention_changes(inner)
    if mlp:
        found.changes += _experts_changes(inner)
    record = Record(found.changes)
    record.make()
    vars(inner)[_KEPT] = record
    if found.left:
        warnings.warn(f"liger_aot.apply: left alone: {'; '.join(found.left)}", LeftAlone, stacklevel=2)
    return model


def patch(
    family: str, *, norms: bool = True, rotary: bool = True, mlp: bool = True, loss: bool | Loss = True
) -> None:
    """Run every model of a family, made already or yet to come, on liger-aot's ops.

    Args:
        family: a name in ``liger_aot.models.FAMILIES``, such as "llama". Of a model whose towers are of other families
            ("llava") patch those too.
        norms, rotary, mlp, loss: as in ``apply``. A module whose activation there is no op for runs as before.

    Raises:
        ArgumentError: there is no such family.
        PatchError: as in ``apply``. Nothing was changed.
    """
    row, how = family_of(family), wanted_loss("patch", loss)
    before = _families.pop(row.name, None)
    if before is not None:
        before.undo()
    try:
        resolved = resolve(row, Parts(norms, rotary, mlp, how))
    except BaseException:
        if before is not None:
            before.make()
            _families[row.name] = before
        raise
    changes = [Change(resolved.module, name, new) for name, new in resolved.functions.items()]
    for method in resolved.methods:
        if method.part == "attention" and method.make is None:
            continue  # it looks its function up in the module
        if method.cls.__module__ == resolved.module.__name__:
            changes.append(Change(method.cls, method.name, method.new))
        elif vars(resolved.module).get(name := method.cls.__name__) is method.cls:
            # torch's own class, or another family's: others use it too. One named as nn.LayerNorm stays torch's.
            ours = type(name, (method.cls,), {method.name: method.new, "__module__": __name__})
            changes.append(Change(resolved.module, name, ours))
    record = Record(changes)
    record.make()
    _families[row.name] = record
    register_attention()


def restore(model: nn.Module | str) -> None:
    """Take back what ``apply`` did to a model or, given a family's name, what ``patch`` did."""
    if isinstance(model, str):
        record = _families.pop(family_of(model).name, None)
    else:
        inner = _without_adapter(model)
        record = vars(inner).pop(_KEPT, None)
    if record is not None:
        record.undo()


class _Instance:
    """What is to be changed in one model, and what is left alone."""

    def __init__(self, model: Any, resolved: tuple[Resolved, ...]) -> None:
        self.changes: list[Change] = []
        self.left: list[str] = []
        self._methods = {method.plain: method for row in resolved for method in row.methods}
        own_modules = {row.module.__name__ for row in resolved}
        self._sharded = tuple(_fsdp_modules(model))
        self._model = model
        self._parents = {f"{n}." if n else "": type(m) for n, m in model.named_modules()}
        self._places: dict[tuple[type, str], Method] = {}  # where modules of the family were found
        others: list[tuple[str, nn.Module]] = []
        for name, module in model.named_modules():
            method = self._method_of(module)
            if method is None:
                others.append((name, module))
            else:
                self._places.setdefault(self._place(name), method)
                self._take(name, module, method)
        for name, module in others:
            method = self._places.get(self._place(name))
            if method is not None and name and type(module).__module__ not in own_modules:
                self._leave(name, f"is {_called(module)}, no {method.cls.__name__}")
        for row in resolved:
            self._note_missing(row)
        if not self.changes:
            raise PatchError(
                f"liger_aot.apply: nothing of {type(model).__name__} can be replaced. Nothing was changed: "
                f"{'; '.join(self.left) or 'nothing was asked for'}"
            )

    def _method_of(self, module: Any) -> Method | None:
        cls = type(module)
        return self._methods.get(cls.forward) or self._methods.get(getattr(cls, "_apply_gate", cls.forward))

    def _place(self, name: str) -> tuple[type, str]:
        parent, dot, own = name.rpartition(".")
        return self._parents[parent + dot], own

    def _note_missing(self, resolved: Resolved) -> None:
        """Parts that every model of a family has, all of whose modules were replaced by others."""
        found = {method.plain for method in self._places.values()}
        parts = {method.part for method in resolved.methods if method.plain in found}
        for part in dict.fromkeys(method.part for method in resolved.methods):
            if part not in parts and part != "loss":
                names = ", ".join(m.cls.__name__ for m in resolved.methods if m.part == part)
                self._leave("the model", f"has no {names}")

    def _take(self, name: str, module: Any, method: Method) -> None:
        attribute = method.name
        own = vars(module).get(attribute)
        if own is not None and "_old_forward" in vars(module):  # a hook of accelerate's around the forward
            attribute = "_old_forward"
            own = vars(module)[attribute]
        if own is not None and getattr(own, "__func__", None) is not method.plain:
            module_of = getattr(getattr(own, "__func__", own), "__module__", None) or "?"
            if module_of.startswith("liger_kernel"):
                raise PatchError(
                    f"liger_aot.apply: {name or type(module).__name__} was changed by Liger-Kernel. Nothing was "
                    "changed. `import liger_aot.liger` runs Liger's own modules on liger-aot's binaries"
                )
            return self._leave(name, f"has a forward of {module_of}")
        foreign = [k for k, p in module.named_parameters(recurse=False) if type(p) not in PLAIN]
        if foreign and method.part == "norm" and not self._sharded_by_fsdp(name):
            kind = type(getattr(module, foreign[0])).__name__
            return self._leave(name, f"has a {kind} as {foreign[0]} (tensor-parallel or quantised)")
        if method.make in modules.ACTIVATIONS:
            attribute_of, known = modules.ACTIVATIONS[method.make]
            activation = getattr(module, attribute_of)
            if type(activation) not in known():
                return self._leave(
                    name, f"has the activation {_called(activation)}, for which there is no op"
                )
        if method.part == "loss" and not usual(module) and not self._sharded_by_fsdp("lm_head"):
            return self._leave(
                name or type(module).__name__,
                f"computes its loss as before: its lm_head is {_called(module.lm_head)}, quantised, adapted, "
                "tensor-parallel or hooked, or its loss function is another one",
            )
        self.changes.append(Change(module, attribute, MethodType(method.new, module)))
        return None

    def _leave(self, name: str, why: str) -> None:
        self.left.append(f"{name} {why}")

    def _sharded_by_fsdp(self, name: str) -> bool:
        """Whether FSDP2 shards the module's parameters: its forward finds them whole."""
        return any(
            prefix == "" or name == prefix or name.startswith(f"{prefix}.") for prefix in self._sharded
        )


def _fsdp_modules(model: nn.Module) -> Iterator[str]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    cls = getattr(fsdp, "FSDPModule", None)
    if cls is not None:
        yield from (name for name, module in model.named_modules() if isinstance(module, cls))


def _without_adapter(model: Any) -> Any:
    """A PEFT model's own model, or the model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _configs(model: nn.Module) -> list[Any]:
    found = {
        id(config): config for m in model.modules() if (config := getattr(m, "config", None)) is not None
    }
    return list(found.values())


def _attention_changes(model: nn.Module) -> list[Change]:
    """The attention that each of the model's configs names."""
    key = "_attn_implementation_internal"
    return [Change(config, key, NAME) for config in _configs(model) if key in vars(config)]


def _experts_changes(model: nn.Module) -> list[Change]:
    """The experts' implementation that each of the model's configs names, where it is Transformers' default."""
    key = "_experts_implementation_internal"
    wanted = [config for config in _configs(model) if vars(config).get(key) == OTHERS]
    if wanted:
        register_experts()
    return [Change(config, key, NAME) for config in wanted]


def _called(module: Any) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
