"""What ``liger-aot``'s commands say of packs of Triton kernels. None of it imports Triton."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from liger_aot.errors import LigerAOTError, PackNotFound, UnknownOp
from liger_aot.runtime.packs import Device
from liger_aot.triton.missing import described
from liger_aot.triton.packs import Binary, Function, TritonPack, installed, public_version, serving
from liger_aot.triton.values import plain


def table(packs: Sequence[TritonPack]) -> list[list[str]]:
    """Rows for ``liger-aot list``: a pack each, with what it holds."""
    rows = [["pack", "arch", "functions", "variants", "KB", "left out", "Triton"]]
    for pack in packs:
        count = sum(pack.variants(name) for name in pack.functions)
        size = sum(path.stat().st_size for path in pack.folder.iterdir() if path.is_file())
        numbers = (len(pack.functions), count, -(-size // 1024), len(pack.left_out))
        rows.append([pack.name, pack.arch, *map(str, numbers), pack.triton])
    return rows


def explain(name: str, arch: str | None = None) -> str:
    """What packs have of a function: "<module>:<qualified name>", or its last part where that says which.

    Raises:
        UnknownOp: no pack has the function, nor left it out.
        PackNotFound: no pack is installed for ``arch``.
    """
    found = [pack for pack in installed().packs if arch in (None, pack.arch)]
    if not found:
        where = "" if arch is None else f" for {arch}"
        raise PackNotFound(f"no pack of Triton kernels is installed{where}")
    paragraphs = []
    for pack in found:
        for function in pack.functions:
            if name in (function, function.rpartition(":")[2]):
                part = pack.function(function)
                assert part is not None
                paragraphs.append(_paragraph(pack, part))
        paragraphs += [
            f"{entry.get('function')}, left out of {pack}: {entry.get('why')}"
            for entry in pack.left_out
            if name in (entry.get("function"), str(entry.get("function")).rpartition(":")[2])
        ]
    if not paragraphs:
        known = sorted({function for pack in found for function in pack.functions})
        shown = ", ".join(known[:10]) + (f" and {len(known) - 10} more" if len(known) > 10 else "")
        raise UnknownOp(f"no pack has {name}; there are {shown}")
    return "\n".join(paragraphs)


def _paragraph(pack: TritonPack, function: Function) -> str:
    count = len(function.identities)
    lines = [
        f"{function.name}, {count} variant{'s' * (count != 1)} in {pack} (hash {function.cache_keys[0][:16]})"
    ]
    lines += [f"  {line}" for binary in function.all_binaries() for line in _variant(binary)]
    for tuner in function.tuners:
        lines.append(f"  choices of @triton.autotune by {', '.join(tuner['keys'])}:")
        for winner in tuner["winners"]:
            timed = "" if winner.get("timed") else ", not timed"
            key = ", ".join(map(plain, winner["key"]))
            lines.append(f"    {key}: {winner['text']} (of {winner.get('on')}{timed})")
    return "\n".join(lines)


def _variant(binary: Binary) -> list[str]:
    names = [name for name, _ in binary.signature]
    arguments = ", ".join(f"{name}: {words}" for name, words in described(names, binary).items())
    given = ", ".join(f"{name}={plain(value)}" for name, value in binary.given.items())
    numbers = binary.metadata
    facts = [f"{numbers['num_warps']} warps", f"{numbers['shared']} bytes of shared memory"]
    if numbers["num_ctas"] > 1:
        facts.append(f"clusters of {numbers['num_ctas']}")
    facts += [
        word
        for name, word in (("launch_cooperative_grid", "cooperative"), ("launch_pdl", "PDL"))
        if numbers[name]
    ]
    if binary.ranged:
        facts.append("tensors below 2 GiB")
    first = f"{binary.identity[:12]}  {', '.join(facts)}; {binary.blob.length} bytes"
    return [first, f"  {arguments}", *([f"  given: {given}"] if given else [])]


def running_triton() -> str | None:
    """The version of the Triton that is installed here, without importing it."""
    try:
        return public_version(version("triton"))
    except PackageNotFoundError:
        return None


def findings(devices: Sequence[Device]) -> tuple[list[str], bool]:
    """What ``liger-aot doctor`` says of installed packs, and whether all can be used. Empty where there is none."""
    found, running = installed(), running_triton()
    lines, ok = [], not found.unusable
    for pack in found.packs:
        packages = ", ".join(f"{p.get('name')} {p.get('version')}" for p in pack.packages) or "no package"
        line = f"{pack}: for {', '.join(pack.serves)}; {len(pack.functions)} functions of {packages}; in {pack.folder}"
        if running is None:
            line += f"; Triton {pack.triton} is not installed: its kernels are launched through it"
        elif (refusal := pack.refusal(running)) is not None:
            line += f"; {refusal}"
        ok = ok and running == pack.triton
        lines.append(line)
    lines += [f"{folder}: can't be used: {problem}" for folder, problem in found.unusable.items()]
    for index, device in enumerate(devices if found.packs else ()):
        packs, problems = _serving(device)
        ok = ok and not problems
        lines.append(f"cuda:{index}: {device} takes {', '.join(map(str, packs)) or 'none'}")
        lines += [f"cuda:{index}: {problem}" for problem in problems]
    return lines, ok


def _serving(device: Device) -> tuple[list[Any], list[str]]:
    try:
        packs, problems = serving(device)
    except LigerAOTError as error:
        return [], [str(error)]
    return list(packs), problems
