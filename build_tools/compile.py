"""Variants to binaries: persistent worker processes and a content-addressed cache.

Triton compiles for a named target with no GPU, driver or torch. A worker imports Triton once and keeps it.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from build_tools.errors import BuildError, CompileError
from build_tools.paths import CACHE, KERNELS, ROOT
from build_tools.plan import ALIGNMENT, Variant
from build_tools.profile import Profile

T = TypeVar("T")
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


def compile_variants(
    variants: Sequence[Variant],
    profile: Profile,
    *,
    cache: Path = CACHE,
    workers: int | None = None,
    progress: bool = True,
) -> dict[str, Compiled]:
    """Compile, or take from the cache, every variant; CompileError at the first that fails."""
    made: dict[str, Compiled] = {}
    for name, outcome in try_variants(variants, profile, cache=cache, workers=workers, progress=progress):
        if isinstance(outcome, str):
            raise CompileError(outcome)
        made[name] = outcome
    return made


def try_variants(
    variants: Sequence[Variant],
    profile: Profile,
    *,
    cache: Path = CACHE,
    workers: int | None = None,
    progress: bool = True,
) -> Iterator[tuple[str, Compiled | str]]:
    """Every variant's name with its binary, or with the compiler's message."""
    check_toolchain(profile)
    cache.mkdir(parents=True, exist_ok=True)
    missing: list[tuple[Job, Path]] = []
    made_by = {op: _made_by(op) for op in {variant.op for variant in variants}}
    for variant in variants:
        job = _job(variant, profile)
        entry = cache / _key(job, made_by[variant.op])
        if (found := _read(entry, job.variant)) is not None:
            yield job.variant, found
        else:
            missing.append((job, entry))
    yield from _bar(_compile_all(missing, workers), len(missing), profile.arch.name, progress)


def check_toolchain(profile: Profile) -> None:
    """Launch numbers belong to one pinned Triton; another one is an error."""
    found = version("triton")
    if found != profile.toolchain.triton:
        raise BuildError(
            f"{profile.path.name}: tuned for triton {profile.toolchain.triton}, found {found}: "
            f"pip install triton=={profile.toolchain.triton}"
        )


def _job(variant: Variant, profile: Profile) -> Job:
    arch = profile.arch
    target: int | str = int(arch.target) if arch.backend == "cuda" else arch.target
    return Job(
        variant=variant.name,
        module=f"csrc_triton.{variant.op}",
        function=variant.function,
        signature={**variant.arguments, **dict.fromkeys(variant.constants, "constexpr")},
        constants=dict(variant.constants),
        hinted=variant.hinted,
        target=(arch.backend, target, arch.warp_size),
        options={**profile.toolchain.options, **variant.options},
        language=variant.language,
    )


def _made_by(op: str) -> dict[str, Any]:
    """The same for all variants of an op: the device code, Triton, and this file."""
    return {
        "sources": [sha256(path.read_bytes()).hexdigest() for path in sources(op)],
        "triton": version("triton"),
        "builder": sha256(Path(__file__).read_bytes()).hexdigest(),
    }


def _key(job: Job, made_by: Mapping[str, Any]) -> str:
    """Everything that decides the bytes, and nothing else."""
    parts = {**asdict(job), **made_by}
    parts.pop("variant")
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def sources(op: str, folder: Path = KERNELS) -> tuple[Path, ...]:
    """The op's file and every file of csrc_triton that it imports."""
    found: list[Path] = []
    queue = [folder / f"{op}.py"]
    while queue:
        path = queue.pop()
        if path in found:
            continue
        found.append(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("csrc_triton."):
                queue += [folder / f"{str(node.module).partition('.')[2]}.py"]
    return tuple(sorted(found))


def _compile_all(
    missing: list[tuple[Job, Path]], workers: int | None
) -> Iterator[tuple[str, Compiled | str]]:
    if not missing:
        return
    count = min(workers or len(os.sched_getaffinity(0)), len(missing))
    scratch = tempfile.mkdtemp(prefix="liger-aot-")
    pool = ProcessPoolExecutor(count, get_context("spawn"), _start_worker, (scratch,))
    try:
        futures = {pool.submit(_compile, job): (job.variant, entry) for job, entry in missing}
        for future in as_completed(futures):
            outcome = future.result()
            name, entry = futures[future]
            if isinstance(outcome, Compiled):
                _write(entry, outcome)
            yield name, outcome
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        shutil.rmtree(scratch, ignore_errors=True)


def _bar(items: Iterable[T], total: int, arch: str, progress: bool) -> Iterable[T]:
    if not progress or not total:
        return items
    from tqdm import tqdm

    quiet = 0.1 if sys.stderr.isatty() else 10.0  # a log wants few lines
    bar: Iterable[T] = tqdm(
        items, total=total, desc=f"compile {arch}", unit="kernel", mininterval=quiet, maxinterval=2 * quiet
    )
    return bar


def _start_worker(scratch: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = scratch
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # else the bytes depend on the folder
    sys.path.insert(0, str(ROOT))


def _compile(job: Job) -> Compiled | str:
    """Runs in a worker. A failure comes back as its message: compiler exceptions don't all pickle."""
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


def _write(entry: Path, compiled: Compiled) -> None:
    """Whole or not at all."""
    temporary = Path(tempfile.mkdtemp(dir=entry.parent))
    facts = asdict(compiled)
    (temporary / "image").write_bytes(facts.pop("image"))
    (temporary / "assembly").write_text(facts.pop("assembly"))
    (temporary / "facts.json").write_text(json.dumps(facts))
    try:
        temporary.rename(entry)
    except OSError:  # another build was first; its bytes are the same
        shutil.rmtree(temporary)


def _read(entry: Path, variant: str) -> Compiled | None:
    if not entry.is_dir():
        return None
    facts = json.loads((entry / "facts.json").read_text())
    facts["variant"] = variant
    facts["maps"] = tuple(facts["maps"])
    image, assembly = (entry / "image").read_bytes(), (entry / "assembly").read_text()
    return Compiled(image=image, assembly=assembly, **facts)


def ptxas_version() -> str:
    """The version of the ptxas inside the pinned Triton."""
    import subprocess

    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"release ([\d.]+)", text)
    if match is None:
        raise BuildError(f"can't read the version of {path}: {text!r}")
    return match[1]
