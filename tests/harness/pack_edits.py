"""What tests do to copies of packs, and the command that inspects them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import liger_aot
from liger_aot.runtime.manifest import Pack
from liger_aot_build.plan import Plan

ARCHS = ("gfx90a", "gfx942", "sm80", "sm90")


def edit(path: Path, change: Callable[[Any], None]) -> None:
    """Rewrite a JSON file, and what its pack's manifest says of it."""
    document = json.loads(path.read_bytes())
    change(document)
    path.write_bytes(json.dumps(document).encode())
    if path.name != "manifest.json":
        believe(path)


def believe(path: Path) -> None:
    """Let the manifest say that an op's file is as it lies there."""
    digest = sha256(path.read_bytes()).hexdigest()
    edit(path.parent / "manifest.json", lambda m: m["ops"][path.stem].update(sha256=digest))


def need_shared(path: Path, amount: int) -> None:
    """Let every binary of an op need so many bytes of shared memory."""

    def need(document: dict[str, Any]) -> None:
        for variant in document["variants"].values():
            variant["shared"] = amount

    edit(path, need)


def add_kernels(path: Path, plan: Plan) -> None:
    """Let an op's manifest name the kernels of ``plan`` that it lacks. Of their binaries there is nothing."""

    def add(document: dict[str, Any]) -> None:
        like = next(iter(document["variants"].values()))
        for name, kernel in plan.kernels.items():
            if name in document["kernels"]:
                continue
            document["kernels"][name] = {
                "arguments": list(kernel.kernel.arguments),
                "signature": kernel.kernel.signature(),
                "axes": list(kernel.kernel.axes),
                "aligned": list(kernel.kernel.aligned),
                "alignment": 16,
                "tables": {key: [list(entry) for entry in entries] for key, entries in kernel.tables.items()},
                "few": {key: [list(entry) for entry in entries] for key, entries in kernel.few.items()},
            }
            for variant in kernel.variants.values():
                boxes = {
                    argument: [int(size) for size in re.findall(r"\d+", kind.partition("[")[2])]
                    for argument, kind in variant.arguments.items()
                    if kind.startswith("tensordesc<")
                }
                document["variants"][variant.name] = {
                    **like,
                    "lacks": [name for name in kernel.kernel.arguments if name not in variant.arguments],
                    "form": variant.form.name,
                    "cooperative": variant.cooperative,
                    "numbers": {**{k.lower(): int(v) for k, v in variant.constants.items()}, **variant.host},
                    "maps": {a: {"box": box, "swizzle": 3 if box[2] > 1 else 0} for a, box in boxes.items()},
                }

    edit(path, add)


def flip(path: Path, at: int) -> None:
    """Flip one bit of a byte; ``at`` may count from the end."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def read_all(pack: Pack) -> int:
    """Bytes of all binaries of a pack; raises at what is damaged."""
    manifests = [pack.op(op) for op in pack.ops]
    return sum(len(m.variant(name).read()) for m in manifests for name in m.variants)


def replace_binaries(pack: Path, op: str, binaries: Mapping[str, bytes]) -> None:
    """Let an op's variants have these compressed binaries, without a base; the others keep theirs."""

    def replace(document: dict[str, Any]) -> None:
        path = pack / f"{op}.bin"
        old, new = path.read_bytes(), b""
        for name, variant in document["variants"].items():
            data = old[variant["offset"] :][: variant["length"]]
            if name in binaries:
                data = binaries[name]
                variant.update(sha256=sha256(data).hexdigest(), base=None)
            variant.update(offset=len(new), length=len(data))
            new += data
        path.write_bytes(new)

    edit(pack / f"{op}.json", replace)


def count_binaries(pack: Path, op: str) -> int:
    return len(json.loads((pack / f"{op}.json").read_bytes())["variants"])


def command(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """``python -m liger_aot``; ``path`` comes before all else that can be imported."""
    package = Path(liger_aot.__file__).parents[1]
    folders = [str(package)] if path is None else [str(path), str(package)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    return subprocess.run(
        [sys.executable, "-m", "liger_aot", *arguments], capture_output=True, text=True, env=environment
    )
