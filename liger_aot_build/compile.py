"""Variants to binaries: one pool of compiler processes for all architectures, and a content-addressed cache."""

from __future__ import annotations

import ast
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from hashlib import sha256
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from liger_aot_build import compiler, ptx_target
from liger_aot_build.compiler import Compiled, Job, compile_job, start_worker
from liger_aot_build.declaration import FP8, op_module, op_path
from liger_aot_build.errors import BuildError, CompileError
from liger_aot_build.literals import imported
from liger_aot_build.paths import CACHE, KERNELS
from liger_aot_build.plan import Variant
from liger_aot_build.profile import Profile
from liger_aot_build.ptx_target import compile_for, own_machine

# Roughly how long kinds of kernels take to compile, beside each other: it decides the order and the time left.
GLUON, MATRIX, OTHER = 8, 3, 1


def compile_all(
    work: Sequence[tuple[Variant, Profile]],
    *,
    cache: Path = CACHE,
    workers: int | None = None,
    progress: bool = True,
) -> list[Compiled]:
    """The binary of each variant for its profile's architecture, in the order given; CompileError at the first that
    fails."""
    made: dict[int, Compiled] = {}
    for index, outcome in try_all(work, cache=cache, workers=workers, progress=progress):
        if isinstance(outcome, str):
            raise CompileError(outcome)
        made[index] = outcome
    return [made[index] for index in range(len(work))]


def try_variants(
    variants: Sequence[Variant],
    profile: Profile,
    *,
    cache: Path = CACHE,
    workers: int | None = None,
    progress: bool = True,
) -> Iterator[tuple[str, Compiled | str]]:
    """Every variant's name with its binary, or with the compiler's message."""
    work = [(variant, profile) for variant in variants]
    for index, outcome in try_all(work, cache=cache, workers=workers, progress=progress):
        yield variants[index].name, outcome


def try_all(
    work: Sequence[tuple[Variant, Profile]],
    *,
    cache: Path = CACHE,
    workers: int | None = None,
    progress: bool = True,
) -> Iterator[tuple[int, Compiled | str]]:
    """Each variant's place in ``work`` with its binary or the compiler's message, as they come: what the cache has
    first, then the rest, what takes longest first, so that no process is left with a long one at the end."""
    for profile in {id(profile): profile for _, profile in work}.values():
        check_toolchain(profile)
    cache.mkdir(parents=True, exist_ok=True)
    missing: list[tuple[int, Job, str | None, Path]] = []
    made_by = {op: _made_by(op) for op in {variant.op for variant, _ in work}}
    for index, (variant, profile) in enumerate(work):
        job, machine = job_of(variant, profile), _machine(profile)
        entry = cache / _key(job, machine, made_by[variant.op])
        if (found := _read(entry, job.variant)) is not None:
            yield index, found
        else:
            missing.append((index, job, machine, entry))
    missing.sort(key=lambda item: -_effort(work[item[0]][0]))
    yield from _run(missing, [_effort(work[index][0]) for index, *_ in missing], workers, progress)


def compile_here(variant: Variant, profile: Profile, cache: Path = CACHE) -> Compiled:
    """Compile one variant, in this process where that may be (``_converts``), or take it from the cache; CompileError
    where that fails."""
    check_toolchain(profile)
    job, machine = job_of(variant, profile), _machine(profile)
    entry = cache / _key(job, machine, _made_by(variant.op))
    if (found := _read(entry, job.variant)) is not None:
        return found
    backend, target, _ = job.target
    if _converts(job) and _converted.get(backend, target) != target:
        return compile_all([(variant, profile)], cache=cache, workers=1, progress=False)[0]
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="liger-aot-") as scratch:
        before = dict(os.environ)
        start_worker(scratch)
        outcome = _compile(job, machine)
        for name in (n for n in set(os.environ) | set(before) if os.environ.get(n) != before.get(n)):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
    if isinstance(outcome, str):
        raise CompileError(outcome)
    _write(entry, outcome)
    return outcome


def _effort(variant: Variant) -> int:
    """How long a variant takes to compile, beside others."""
    if variant.language == "gluon":
        return GLUON
    return MATRIX if variant.matrix else OTHER


def check_toolchain(profile: Profile) -> None:
    """Launch numbers belong to one pinned Triton; another one is an error."""
    found = version("triton")
    if found != profile.toolchain.triton:
        raise BuildError(
            f"{profile.path.name}: tuned for triton {profile.toolchain.triton}, found {found}: "
            f"pip install triton=={profile.toolchain.triton}"
        )


def job_of(variant: Variant, profile: Profile) -> Job:
    """What a worker needs to compile a variant."""
    arch = profile.arch
    target: int | str = int(arch.target) if arch.backend == "cuda" else arch.target
    return Job(
        variant=variant.name,
        module=op_module(variant.op),
        function=variant.function,
        signature={**variant.arguments, **dict.fromkeys(variant.constants, "constexpr")},
        constants=dict(variant.constants),
        hinted=variant.hinted,
        target=(arch.backend, target, arch.warp_size),
        options={**profile.toolchain.options, **variant.options},
        language=variant.language,
    )


def _machine(profile: Profile) -> str | None:
    """The machine that PTX is assembled for, where it is not the one that Triton takes by itself."""
    arch = profile.arch
    return arch.machine if arch.backend == "cuda" and arch.machine != own_machine(arch.target) else None


# By backend, the target whose conversions of 8-bit floats this process has compiled
_converted: dict[str, int | str] = {}


def _converts(job: Job) -> bool:
    """Whether a job may convert 8-bit floats. Triton fills a backend's table of such conversions once a process, for
    the target that comes first; another target then gets that one's instructions (gfx950's in gfx1201's code, at which
    LLVM aborts; sm90's in sm89's, which ptxas refuses) or lacks its own. So a process compiles them for one target
    alone."""
    return any(name in kind for kind in job.signature.values() for name in FP8)


def _compile(job: Job, machine: str | None) -> Compiled | str:
    if _converts(job):
        backend, target, _ = job.target
        if (first := _converted.setdefault(backend, target)) != target:
            raise AssertionError(f"{target}'s conversions in a process that has compiled {first}'s")
    return compile_job(job) if machine is None else compile_for(job, machine)


def _made_by(op: str) -> dict[str, Any]:
    """The same for all variants of an op: the device code, Triton, and what a compiler process runs."""
    texts = {path: path.read_bytes() for path in (*sources(op), Path(compiler.__file__))}
    return {
        "sources": [sha256(text).hexdigest() for text in texts.values()],
        "triton": version("triton"),
    }


def _key(job: Job, machine: str | None, made_by: Mapping[str, Any]) -> str:
    """Everything that decides the bytes, and nothing else."""
    parts = {**asdict(job), **made_by}
    parts.pop("variant")
    if job.target[0] == "hip" and _converts(job):
        parts["conversions"] = "of one target a process"
    if machine is not None:
        parts["assembled"] = [machine, sha256(Path(ptx_target.__file__).read_bytes()).hexdigest()]
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def sources(op: str, folder: Path = KERNELS) -> tuple[Path, ...]:
    """The op's file and every file of csrc_triton that it imports."""
    found: list[Path] = []
    queue = [op_path(op, folder)]
    while queue:
        path = queue.pop()
        if path in found:
            continue
        found.append(path)
        nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom))
        modules = (str(node.module) for node in nodes)
        queue += [imported(module, folder) for module in modules if module.startswith("csrc_triton.")]
    return tuple(sorted(found))


def _run(
    missing: Sequence[tuple[int, Job, str | None, Path]],
    efforts: Sequence[int],
    workers: int | None,
    progress: bool,
) -> Iterator[tuple[int, Compiled | str]]:
    """Compile in processes that import Triton once; write each binary into the cache as it comes."""
    if not missing:
        return
    apart: dict[int | str | None, list[int]] = {}  # processes of their own for each target's conversions
    for place, (_, job, *_) in enumerate(missing):
        apart.setdefault(job.target[1] if _converts(job) else None, []).append(place)
    others = apart.pop(None, [])
    together = list(apart.values()) or [[]]
    together[0] = sorted(others + together[0])
    scratch = tempfile.mkdtemp(prefix="liger-aot-")
    try:
        with _Bar(len(missing), sum(efforts), progress) as bar:
            for places in together:
                some = [(*missing[place], efforts[place]) for place in places]
                yield from _run_together(some, workers, scratch, bar)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run_together(
    missing: Sequence[tuple[int, Job, str | None, Path, int]], workers: int | None, scratch: str, bar: _Bar
) -> Iterator[tuple[int, Compiled | str]]:
    """Compile in one pool of processes what may share them."""
    count = min(workers or len(os.sched_getaffinity(0)), len(missing))
    pool = ProcessPoolExecutor(count, get_context("spawn"), start_worker, (scratch,))
    try:
        futures = {
            pool.submit(_compile, job, machine): (index, entry, effort)
            for index, job, machine, entry, effort in missing
        }
        for future in as_completed(futures):
            outcome = future.result()
            index, entry, effort = futures[future]
            if isinstance(outcome, Compiled):
                _write(entry, outcome)
            bar.advance(effort)
            yield index, outcome
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _Bar:
    """How many kernels are compiled and how much time is left, by their efforts."""

    def __init__(self, kernels: int, efforts: int, shown: bool) -> None:
        from tqdm import tqdm

        seconds = 0.1 if sys.stderr.isatty() else 10.0
        self._kernels, self._done = kernels, 0
        self._bar: Any = tqdm(
            total=efforts,
            desc=f"compile 0/{kernels} kernels",
            bar_format="{desc} {percentage:3.0f}% |{bar:20}| {elapsed} passed, {remaining} left",
            mininterval=seconds,
            maxinterval=2 * seconds,
            file=sys.stderr if sys.stderr.isatty() else _Lines(),
            disable=not shown,
        )

    def advance(self, effort: int) -> None:
        self._done += 1
        self._bar.set_description_str(f"compile {self._done}/{self._kernels} kernels", refresh=False)
        self._bar.update(effort)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()


class _Lines:
    """A bar that no terminal shows: a line for each of its states. pip, for one, passes on whole lines alone."""

    def write(self, text: str) -> None:
        if state := text.strip():
            sys.stderr.write(f"{state}\n")

    def flush(self) -> None:
        sys.stderr.flush()


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


def ptxas_version(target: str) -> str:
    """The version of the ptxas inside the pinned Triton that assembles for a compute capability such as "90"."""
    from triton.backends.nvidia.compiler import get_ptxas

    version: str = get_ptxas(int(target)).version
    return version
