"""What a driver of Triton's has as ``launcher_cls``: turns a kernel's signature into a program of the C launcher.

Triton's own generates C for each signature and has a compiler make a module of it (3.6), or hands a description to one
that it compiled once (3.7 on). The order of parameters is theirs: what a call passes, constants left out, tuples laid
flat, a tensor descriptor as several; then two pointers to scratch memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

LETTERS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "l",
    "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "L",
    "fp16": "e", "bf16": "y", "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
# Triton numbers element types as device code does; CU_TENSOR_MAP_DATA_TYPE_* has three of them elsewhere.
_HOST_TYPES = {8: 10, 9: 8, 10: 9}


class NotLaunched(NotImplementedError):
    """A kernel that this launcher can't launch."""


def program(types: Sequence[Any], maps: Sequence[Mapping[str, Any] | None] | None, flags: int) -> str:
    """A signature's types as the C launcher's letters.

    Args:
        types: of the arguments in order: "*fp16", "i32", "constexpr", "tensordesc<fp16[64, 64]>", tuples of these.
        maps: Triton's ``tensordesc_meta``: how each descriptor is encoded; empty where they are taken apart.
        flags: how many flags follow the strides of one that is taken apart: 1 in Triton 3.6, then 2.
    """
    left = list(maps or ())

    def letters(kind: Any) -> str:
        if isinstance(kind, tuple):
            return f"({''.join(map(letters, kind))})"
        if kind == "constexpr":
            return "_"
        if kind.startswith("*"):
            return "p"
        if kind.startswith("tensordesc"):
            is_map = bool(maps) and left.pop(0) is not None
            return f"M{rank(kind)}" if is_map else f"D{rank(kind)}{flags}"
        if kind not in LETTERS:
            raise NotLaunched(f"an argument of type {kind} can't be launched")
        return LETTERS[kind]

    return "".join(map(letters, types))


def rank(kind: str) -> int:
    """Of a tensor descriptor's type: "tensordesc<fp16[64, 64]>" has 2 dimensions."""
    block = re.match(r"tensordesc<[^\[>]*\[([^\]]*)\]", kind)
    if block is None:
        raise NotLaunched(
            f"an argument of type {kind} can't be launched: of tensor descriptors, tiled ones can"
        )
    return block[1].count(",") + 1


def encodings(maps: Sequence[Mapping[str, Any] | None] | None, flags: int) -> tuple[tuple[Any, ...], ...]:
    """How tensor maps are encoded, as the C launcher takes it: (swizzle, bytes, type, doubled, mend, box). Of padded
    fp4 a map has twice the last size that the descriptor says; so has the kernel's parameter in Triton 3.6 alone."""
    found = []
    for one in maps or ():
        if one is None:
            continue
        if one.get("is_im2col"):
            raise NotLaunched("tensor descriptors of images (im2col) can't be launched: tiled ones can")
        if "swizzle" not in one:
            raise NotLaunched("tensor descriptors for AMD's tensor data mover (gfx1250) can't be launched")
        kind = _HOST_TYPES.get(one["elem_type"], one["elem_type"])
        doubled = (2 if flags == 1 else 1) if one["fp4_padded"] else 0
        mend = int(flags > 1)  # as Triton does from 3.7 on
        found.append((one["swizzle"], one["elem_size"], kind, doubled, mend, tuple(one["block_size"])))
    return tuple(found)


def make(
    native: Any, device: int, signature: Mapping[Any, Any], names: Sequence[str], metadata: Any, flags: int
) -> Callable[..., None]:
    """What Triton calls to launch a kernel on ``device``, with the arguments of its own launchers."""
    if "gsan" in str(getattr(metadata, "instrumentation_mode", "")):
        raise NotLaunched("kernels with Triton's global sanitizer (gsan) are launched by Triton alone")
    maps = getattr(metadata, "tensordesc_meta", None) or None
    cluster = getattr(metadata, "num_ctas", 1) if metadata.target.backend == "cuda" else 1
    made = native.triton_launcher(
        metadata.name,
        program(list(signature.values()), maps, flags),
        device=device,
        threads=metadata.num_warps * getattr(metadata, "warp_size", metadata.target.warp_size),
        shared=metadata.shared,
        arguments=tuple(names),
        maps=encodings(maps, flags),
        cluster=cluster,
        cooperative=bool(getattr(metadata, "launch_cooperative_grid", False)),
        pdl=bool(getattr(metadata, "launch_pdl", False)),
        scratch=_scratch(metadata, cluster),
    )
    launch: Callable[..., None] = made.launch
    return launch


def _scratch(metadata: Any, cluster: int) -> Callable[..., tuple[Any, Any]] | None:
    """What gets a launch its scratch memory, from the allocators that the program set; None where it needs none."""
    of_blocks, aligned = (
        getattr(metadata, "global_scratch_size", 0),
        getattr(metadata, "global_scratch_align", 1),
    )
    of_profile = getattr(metadata, "profile_scratch_size", 0)
    profile_aligned = getattr(metadata, "profile_scratch_align", 1)
    if not of_blocks and not of_profile:
        return None
    from triton.runtime import _allocation, driver

    def profile(size: int, stream: int) -> Any:
        if not getattr(_allocation, "has_profile_allocator", lambda: True)():  # 3.8 on: the driver's own
            return driver.active.allocate_default_profile_scratch(size, profile_aligned, stream)
        return _allocation._profile_allocator.get()(size, profile_aligned, stream)

    def allocate(x: int, y: int, z: int, stream: int) -> tuple[Any, Any]:
        blocks = x * y * z * cluster
        if blocks <= 0:
            return None, None
        first = _allocation._allocator.get()(blocks * of_blocks, aligned, stream) if of_blocks else None
        return first, profile(blocks * of_profile, stream) if of_profile else None

    return allocate
