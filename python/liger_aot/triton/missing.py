"""What is said of a launch that no pack has a binary for: the function, what no variant fits, the nearest variant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from liger_aot.triton.identity import RANGE, Variant
from liger_aot.triton.packs import Function, TritonPack
from liger_aot.triton.sources import Changed, Same
from liger_aot.triton.values import plain

_MOST = 8  # differences that a message names


def describe(
    variant: Variant,
    packs: Sequence[TritonPack],
    found: Sequence[tuple[TritonPack, Function, Same | Changed]],
    problems: Sequence[str],
) -> str:
    """Why none of the packs has this variant. ``found``: those that have its function, and whether it is the same."""
    if not found:
        used = ", ".join(map(str, packs)) or "none"
        reasons = [f"no pack has the function; packs in use: {used}", *problems]
        return f"{variant.function}: " + "; ".join(left_out(variant.function, packs) or reasons)
    same = [(pack, function, told.cache_key) for pack, function, told in found if isinstance(told, Same)]
    if not same:
        pack, _, told = found[0]
        assert isinstance(told, Changed)
        return f"{variant.function}: it has changed since pack {pack} was built: {told.why}"
    nearest = min(
        ((differences(variant, binary), str(pack)) for pack, f, key in same for binary in f.all_binaries()
         if binary.cache_key == key),
        key=lambda one: len(one[0]),
        default=None,
    )  # fmt: skip
    if nearest is None:
        return f"{variant.function}: pack {same[0][0]} has no variant of it"
    differing, pack_name = nearest
    if not differing:
        return f"{variant.function}: pack {pack_name} has it for tensors below 2 GiB; one of this call's is larger"
    shown = "; ".join(differing[:_MOST]) + ("; ..." if len(differing) > _MOST else "")
    count = sum(len(function.identities) for _, function, _ in same)
    return f"{variant.function}: none of {count} variants fits. The nearest, of pack {pack_name}, differs: {shown}"


def left_out(function: str, packs: Sequence[TritonPack]) -> list[str]:
    """Why packs that were to have a function do not."""
    return [
        f"pack {pack} leaves it out: {entry.get('why')}"
        for pack in packs
        for entry in pack.left_out
        if entry.get("function") == function
    ]


def differences(variant: Variant, binary: Any) -> list[str]:
    """Arguments and options of a call that are not those of a variant of the pack."""
    names = [name for name, _ in variant.signature]
    mine, theirs = described(names, variant), described(names, binary)
    found = [
        f"{name} is {mine[name]}, in the pack {theirs.get(name, 'no argument')}"
        for name in names
        if mine[name] != theirs.get(name)
    ]
    given, others = dict(variant.given), dict(binary.given)
    for option in sorted(given.keys() | others.keys()):
        if given.get(option) != others.get(option):
            a, b = (plain(values[option]) if option in values else "not given" for values in (given, others))
            found.append(f"the option {option} is {a}, in the pack {b}")
    return found


def described(names: Sequence[str], one: Any) -> dict[str, str]:
    """Each argument's type, constant and alignment, in words."""
    types = {name: _type(kind) for name, kind in one.signature}
    constants: dict[str, list[str]] = {}
    for path, value in one.constants:
        name = names[path[0]] if path[0] < len(names) else str(path[0])
        constants.setdefault(name, []).append(plain(value))
    attrs: dict[str, list[str]] = {}
    for path, entries in one.attrs:
        name = names[path[0]] if path[0] < len(names) else str(path[0])
        attrs.setdefault(name, []).extend(_attribute(*entry[:2]) for entry in entries if entry[0] != RANGE)
    described = {}
    for name, kind in types.items():
        words = "the constant" if kind == "constexpr" else kind
        if name in constants:
            words += " " + ", ".join(constants[name])
        if attrs.get(name):
            words += " " + " ".join(attrs[name])
        described[name] = words
    return described


def _type(kind: Any) -> str:
    return kind if isinstance(kind, str) else plain(kind)


def _attribute(name: str, value: Any) -> str:
    return f"divisible by {value}" if name == "tt.divisibility" else f"{name}={value}"


ADVICE = (
    "Record this call too (liger-aot record) and build the pack anew, or let Triton compile what is missing "
    '(LIGER_AOT_TRITON=compile, or missing="compile")'
)
