"""Packs of Triton kernels for the stand-in driver, written by hand: their binaries are images of the stand-in's own
kind, which record what they are launched with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from liger_aot.runtime import devices
from liger_aot.runtime.packs import Device
from liger_aot.triton import identity, seams
from liger_aot.triton.closures import Unclear
from liger_aot_build.stored import compressed
from liger_aot_build.triton_packs.sources import Tree, flat, tree
from tests.harness.stand_in import StandIn, image

H200 = Device("cuda", "9.0", "NVIDIA H200")
MI300 = Device("hip", "gfx942", "AMD Instinct MI300X")
STREAM = 4096  # the first device's; the second's follows


class Wanted(Exception):
    """Instead of a launch: what it would have been compiled for."""

    def __init__(self, miss: seams.Miss) -> None:
        super().__init__("not to be compiled")
        self.miss = miss


def fake_gpu(stand_in: StandIn, device: Device) -> list[tuple[Any, str, Any]]:
    """What to set where for torch and the loader to see two of this GPU, the stand-in's."""
    properties = SimpleNamespace(
        multi_processor_count=132,
        warp_size=32 if device.backend == "cuda" else 64,
        gcnArchName=f"{device.target}:sramecc+:xnack-",
        name=device.name,
    )

    def current() -> int:
        return stand_in.current(device.backend) or 0

    def capability(index: int | None = None) -> tuple[int, int]:
        digits = device.target.removeprefix("gfx").replace(".", "")  # gfx942 is 9.4 to torch
        return int(digits[0]), int(digits[1])

    return [
        (devices, "gpu", lambda index: devices.GPU(index, device, 132, 232448)),
        (torch.version, "hip", None if device.backend == "cuda" else "6.3"),
        (torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM + index),
        (torch.cuda, "current_device", current),
        (torch.cuda, "get_device_capability", capability),
        (torch.cuda, "get_device_properties", lambda index: properties),
    ]


def wanted(launch: Callable[[], Any]) -> seams.Miss:
    """What ``launch`` would have a kernel compiled for, which it must not have been before."""

    def refuse(miss: seams.Miss) -> None:
        raise Wanted(miss)

    seams.on_miss(refuse)
    try:
        launch()
    except Wanted as found:
        return found.miss
    finally:
        seams.no_longer_on_miss(refuse)
    raise AssertionError("the launch asked for no kernel")


def letters(types: Sequence[Any]) -> str:
    """A signature as the stand-in's images have it, from Triton's types."""
    from liger_aot.triton.driver import FLAGS as flags

    sizes = {"1": "b", "8": "b", "16": "h", "32": "i", "64": "l"}
    found = ""
    for kind in types:
        if isinstance(kind, tuple):
            found += letters(kind)
        elif kind.startswith("tensordesc"):
            dimensions = kind.partition("[")[2].partition("]")[0].count(",") + 1
            found += "p" + "l" * 2 * dimensions + "b" * flags + "i" * dimensions + "l" * dimensions
        elif kind != "constexpr":
            found += "p" if kind.startswith("*") else sizes[kind.lstrip("iufpb")]
    return found


def variant_entry(miss: seams.Miss, symbol: str, words: str, **more: Any) -> tuple[dict[str, Any], bytes]:
    """A variant's entry in a pack and its image, of a kernel with parameters ``words`` (the stand-in's letters)."""
    variant = identity.variant(miss.fn, miss.signature, miss.constants, miss.attrs, miss.given)
    data = compressed(image(f"{symbol}={words}"))
    warps = more.pop("num_warps", 4)
    entry = {
        "offset": 0,
        "length": len(data),
        "sha256": sha256(data).hexdigest(),
        "base": None,
        "cache_key": variant.cache_key,
        "symbol": symbol,
        "num_warps": warps,
        "num_ctas": 1,
        "threads": warps * 32,
        "shared": 0,
        "cooperative": False,
        "pdl": False,
        "scratch": {"global": [0, 1], "profile": [0, 1]},
        "maps": None,
        "parameters": [],
        "signature": variant.signature,
        "constants": variant.constants,
        "attrs": variant.attrs,
        "given": dict(variant.given),
        "ranged": identity.ranged(miss.attrs),
        "registers": 40,
        "local_bytes": 0,
        "metadata": {},
        **more,
    }
    return entry, data


def _tree(fn: Any) -> Tree | None:
    try:
        return tree(fn)
    except Unclear:
        return None


def write_pack(
    root: Path,
    misses: Sequence[tuple[seams.Miss, Mapping[str, Any]]],
    *,
    name: str = "mykernels",
    arch: str = "sm90",
    tuners: Mapping[str, Sequence[Any]] = {},
    sources: bool = True,
    **manifest: Any,
) -> Path:
    """A pack of these calls' kernels; each with what ``variant_entry`` takes besides. Its folder. ``sources``: whether
    it says what the functions are told by; without, Triton's hash is asked."""
    import triton

    warp_size = 32 if arch.startswith("sm") else 64
    folder = root / name / arch
    folder.mkdir(parents=True, exist_ok=True)
    functions: dict[str, dict[str, Any]] = {}
    images: dict[str, bytes] = {}
    trees: dict[str, list[Tree | None]] = {}
    for number, (miss, more) in enumerate(misses):
        variant = identity.variant(miss.fn, miss.signature, miss.constants, miss.attrs, miss.given)
        entry, data = variant_entry(
            miss, **{"symbol": f"k{number}", "words": letters(list(miss.signature.values())), **more}
        )
        body = functions.setdefault(
            variant.function,
            {
                "format": 1,
                "function": variant.function,
                "cache_keys": [],
                "arg_names": miss.fn.arg_names,
                "gluon": variant.gluon,
                "metadata": {
                    "num_stages": 3,
                    "warp_size": warp_size,
                    "cluster_dims": [1, 1, 1],
                    "tmem_size": 0,
                },
                "variants": {},
                "tuners": tuners.get(variant.function, []),
            },
        )
        if variant.cache_key not in body["cache_keys"]:
            body["cache_keys"].append(variant.cache_key)
            trees.setdefault(variant.function, []).append(_tree(miss.fn) if sources else None)
        entry["offset"] = len(images.get(variant.function, b""))
        images[variant.function] = images.get(variant.function, b"") + data
        body["variants"].setdefault(variant.name, []).append(entry)
    index = {}
    for number, (function, body) in enumerate(functions.items()):
        body["sources"], body["source_of"] = flat(trees[function])
        text = json.dumps(body).encode()
        (folder / f"f{number}.json").write_bytes(text)
        (folder / f"f{number}.bin").write_bytes(images[function])
        index[function] = {
            "file": f"f{number}",
            "sha256": sha256(text).hexdigest(),
            "variants": len(body["variants"]),
        }
    cuda = arch.startswith("sm")
    whole = {
        "format": 1,
        "kind": "triton",
        "name": name,
        "arch": arch,
        "backend": "cuda" if cuda else "hip",
        "target": {
            "backend": "cuda" if cuda else "hip",
            "arch": int(arch[2:]) if cuda else arch,
            "warp_size": warp_size,
        },
        "serves": [f"{arch[2]}.{arch[3]}"] if cuda else [arch],
        "binary_version": 0,
        "version": "1.0",
        "liger_aot": "0",
        "toolchain": {"triton": triton.__version__.partition("+")[0], "compiler": "none"},
        "recorded_on": ["cuda-90"],
        "packages": [],
        "functions": index,
        "left_out": [],
        **manifest,
    }
    (folder / "manifest.json").write_text(json.dumps(whole))
    return folder
