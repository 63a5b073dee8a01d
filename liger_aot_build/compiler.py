"""One variant to machine code: what runs in a compiler process.

Triton compiles for a named target with no GPU, driver or torch. Every binary depends on this file's text, so that an
edit here empties the cache; how jobs are scheduled is compile.py's to say.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from liger_aot_build.paths import ROOT
from liger_aot_build.plan import ALIGNMENT

BINARY = {"cuda": "cubin", "hip": "hsaco"}


@dataclass(frozen=True)
class Compiled:
    """One variant's machine code, and what Triton says a launch of it needs."""

    variant: str
    image: bytes
    assembly: str  # PTX or AMD assembly
    symbol: str
    num_warps: int  # as made: warp specialisation adds to what was asked
    num_ctas: int
    shared: int  # bytes of dynamic shared memory
    scratch: int  # bytes of global scratch a launch would need
    maps: tuple[Mapping[str, Any], ...]  # of its tensor maps, in the order of the arguments: swizzle, box


@dataclass(frozen=True)
class Job:
    """What a worker gets: plain data only."""

    variant: str
    module: str
    function: str
    signature: dict[str, str]
    constants: dict[str, int | bool]
    hinted: tuple[str, ...]
    target: tuple[str, int | str, int]
    options: dict[str, int | bool | str]
    language: str


def start_worker(scratch: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = scratch
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # else the bytes depend on the folder
    sys.path.insert(0, str(ROOT))


def compile_job(job: Job) -> Compiled | str:
    """A job's binary. A failure comes back as its message: compiler exceptions don't all pickle."""
    backend, target, warp_size = job.target
    try:
        return _run_triton(job)
    except Exception as error:
        place = f"{backend} {target}, warp size {warp_size}"
        return f"{job.variant} ({place}): {type(error).__name__}: {error}"


def _run_triton(job: Job) -> Compiled:
    from importlib import import_module

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    target = GPUTarget(*job.target)
    backend = make_backend(target)
    known = {f.name for f in fields(type(backend.parse_options({"num_warps": 4})))}
    if unknown := sorted(set(job.options) - known):  # Triton would drop it without a word
        raise ValueError(f"triton {triton.__version__} has no option {unknown[0]!r} for {job.target[0]}")
    function = getattr(import_module(job.module), job.function)
    names = function.arg_names
    absent = {name: None for name in names if name not in job.signature}  # by the declaration
    signature = {**job.signature, **dict.fromkeys(absent, "constexpr")}
    source = _source_class(job.language)(
        function,
        {name: _laid_out(kind) if job.language == "gluon" else kind for name, kind in signature.items()},
        {(names.index(name),): value for name, value in {**job.constants, **absent}.items()},
        {(names.index(name),): [["tt.divisibility", ALIGNMENT]] for name in job.hinted},
    )
    kernel = triton.compile(source, target=target, options=dict(job.options))
    metadata: Any = kernel.metadata
    return Compiled(
        variant=job.variant,
        image=kernel.asm[BINARY[job.target[0]]],
        assembly=kernel.asm["ptx" if job.target[0] == "cuda" else "amdgcn"],
        symbol=metadata.name,
        num_warps=metadata.num_warps,
        num_ctas=metadata.num_ctas,
        shared=metadata.shared,
        # the AMD backend knows no scratch and has no such fields
        scratch=getattr(metadata, "global_scratch_size", 0) + getattr(metadata, "profile_scratch_size", 0),
        maps=tuple(
            {"swizzle": one["swizzle"], "box": list(one["block_size"])}
            for one in getattr(metadata, "tensordesc_meta", None) or ()
        ),
    )


def _source_class(language: str) -> Any:
    if language == "gluon":
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler import ASTSource

    return ASTSource


def _laid_out(kind: str) -> str:
    """A tensor map's type with the layout of its tiles in shared memory, which Gluon wants said: the widest swizzle."""
    match = re.fullmatch(r"tensordesc<(\w+)\[(.*)\]>", kind)
    if match is None:
        return kind
    from triton.experimental.gluon import language as gl

    dtype = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32}[match[1]]
    layout = gl.NVMMASharedLayout.get_default_for([int(size) for size in match[2].split(", ")], dtype)
    return f"{kind[:-1]},{layout!r}>"
