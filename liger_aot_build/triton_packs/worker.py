"""One compiler process: it sees one GPU, real or not, imports the recorded modules once, and compiles for that GPU.

What passes between it and the build is plain data.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from liger_aot.triton.closures import Unclear, certain_key
from liger_aot.triton.identity import RANGE
from liger_aot.triton.identity import variant as identify
from liger_aot.triton.recording import Function, Noted
from liger_aot.triton.seams import FP32_DEFAULT
from liger_aot.triton.stand_ins import set_driver, stand_in
from liger_aot.triton.targets import Target
from liger_aot.triton.values import NotData, decode
from liger_aot_build.errors import AuditError
from liger_aot_build.triton_packs.audit import audit, known_arch
from liger_aot_build.triton_packs.find import (
    MAIN,
    STAND_IN_MAIN,
    Finder,
    NotFound,
    as_recorded,
    differs,
    note_functions,
    recorded_globals,
)
from liger_aot_build.triton_packs.sources import Tree, renamed, tree

_BINARY = {"cuda": ("cubin", "ptx"), "hip": ("hsaco", "amdgcn")}
_LEFT_OUT = ("hash", "target", "extern_libs")  # the build machine's, or said elsewhere


@dataclass(frozen=True)
class Setup:
    """What a process is."""

    target: Target
    packages: tuple[str, ...]
    main: str | None
    scratch: str


@dataclass(frozen=True)
class Job:
    """A variant to compile, with the functions that it is made of, itself first. ``exact``: their keys must be the
    recorded ones. ``ranged``: paths of pointers that the binary may take to be to less than 2 GiB. ``made``: keys of
    those that no import makes, where that must be known."""

    noted: Noted
    functions: tuple[Function, ...]
    exact: bool
    ranged: tuple[tuple[int, ...], ...]
    made: frozenset[tuple[str, str, str]] = frozenset()


@dataclass(frozen=True)
class Built:
    """A variant's binary, and what a launch of it needs."""

    name: str  # the variant's, with the keys that its functions have for this target
    cache_key: str
    arg_names: tuple[str, ...]
    image: bytes
    symbol: str
    parameters: tuple[str, ...]
    constants: list[Any]
    metadata: Mapping[str, Any]
    registers: int
    local_bytes: int
    binary_version: int
    ranged: tuple[tuple[int, ...], ...]
    source: Tree | None  # what the function is told by; None where only Triton's hash can tell
    globals_set: tuple[str, ...]  # those that were given their recorded values


_setup: Setup | None = None


def start(setup: Setup) -> None:
    """Begin a process of ``setup``."""
    global _setup
    os.environ["TRITON_CACHE_DIR"] = setup.scratch
    os.environ["TRITON_ALWAYS_COMPILE"] = (
        "1"  # what is cached by Triton's hash may be of another dtype that is read
    )
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # else the bytes depend on the folder
    for name in ("LIGER_AOT_RECORD", "LIGER_AOT_RECORD_TARGET", "LIGER_AOT_TRITON", "TRITON_INTERPRET"):
        os.environ.pop(name, None)
    with suppress(ImportError):  # kernels need no torch
        stand_in(setup.target)
    set_driver(setup.target)
    note_functions()
    atexit.register(os._exit, 0)  # Triton 3.9 prints on stderr what it has not freed
    _setup = setup


def reproduced(functions: Sequence[Function], of: Sequence[Function], calls: bool) -> list[str]:
    """For each function of ``of``, "" where this process makes it as it was recorded, or why not. Where the process
    sees the target that they were recorded on and makes them the same, it makes what another GPU would, too.

    Args:
        functions: all that were recorded.
        calls: also make those again of whose name an import makes others: calls have made them.
    """
    assert _setup is not None
    finder = Finder(_setup.packages, _setup.main, functions, None if calls else ())
    return [_other(finder, function) for function in of]


def _other(finder: Finder, function: Function) -> str:
    try:
        fn, same = finder.find(function.module, function.qualname, function.cache_key)
        return "" if same else differs(function, fn)
    except NotFound as error:
        return str(error)
    except Exception as error:  # what a module's globals may do when they are compared
        return f"{type(error).__name__}: {error}"


def compile_job(job: Job) -> Built | str:
    """The binary, or why there is none; a message, as compilers' exceptions don't all pickle."""
    assert _setup is not None
    try:
        return _compile(job, _setup)
    except NotFound as error:
        return str(error)
    except AuditError as error:
        return f"refused by the audit: {error}"
    except NotData as error:
        return f"its recording: {error}"
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip()
        return text if len(text) < 2000 else f"{text[:1000]} ... {text[-900:]}"


def _compile(job: Job, setup: Setup) -> Built:
    finder = Finder(setup.packages, setup.main, job.functions, None if job.exact else job.made)
    if all(_same(finder, function) for function in job.functions):
        return _with(job, setup, finder, ())
    if not job.exact:  # what this GPU makes of them, which the build has proved
        return _with(job, setup, finder, ())
    with recorded_globals(finder, job.functions) as changed:
        for function in job.functions:
            fn, same = finder.find(function.module, function.qualname, function.cache_key)
            if not same:
                raise NotFound(f"{function.name}: {differs(function, fn)}")
        return _with(job, setup, finder, tuple(changed))


def _same(finder: Finder, function: Function) -> bool:
    return finder.find(function.module, function.qualname, function.cache_key)[1]


def _with(job: Job, setup: Setup, finder: Finder, changed: tuple[str, ...]) -> Built:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource, make_backend

    noted, recorded = job.noted, job.noted.variant
    signature = {name: decode(kind) for name, kind in recorded.signature}
    constants = {
        tuple(path): decode(value, lambda named: finder.find(*named)[0], finder.find_class)
        for path, value in recorded.constants
    }
    # last, as its hash may depend on what was hashed before
    fn, _ = finder.find(recorded.module, recorded.qualname, recorded.cache_key)
    if list(signature) != fn.arg_names:
        raise NotFound(f"takes {', '.join(fn.arg_names)}; recorded were {', '.join(signature)}")
    attrs: dict[tuple[int, ...], list[list[Any]]] = {
        tuple(path): [list(a) for a in found] for path, found in recorded.attrs
    }
    for path in job.ranged:
        attrs.setdefault(path, []).append([RANGE, 32])
    given = {name: decode(value) for name, value in recorded.given}
    target = GPUTarget(*setup.target)
    options = make_backend(target).parse_options({k: v for k, v in given.items() if k != FP32_DEFAULT})
    source_class: Any = ASTSource
    if recorded.gluon:
        from triton.experimental.gluon._runtime import GluonASTSource

        source_class = GluonASTSource
    source = source_class(fn, signature, constants, attrs)
    with triton.knobs.language.scope():
        triton.knobs.language.fp32_default = given.get(FP32_DEFAULT)
        kernel = triton.compile(source, target=target, options=options.__dict__)
    made = as_recorded(identify(fn, signature, constants, attrs, given))
    if made.cache_key == recorded.cache_key and job.exact and made.name != noted.variant.name:
        raise NotFound("the recording is not consistent: its values are not those of the variant's name")
    return _read_back(job, setup, fn, made, kernel, signature, changed)


def _read_back(
    job: Job,
    setup: Setup,
    fn: Any,
    made: Any,
    kernel: Any,
    signature: Mapping[str, Any],
    changed: tuple[str, ...],
) -> Built:
    from triton._C.libtriton import get_cache_invalidating_env_vars

    binary, text = _BINARY[setup.target.backend]
    dropped = {*_LEFT_OUT, *get_cache_invalidating_env_vars()}
    metadata = {k: v for k, v in kernel.metadata._asdict().items() if k not in dropped}
    metadata = json.loads(json.dumps(metadata, default=vars))
    parameters = tuple(_flat(tuple(signature.values())))
    arch = known_arch(setup.target.profile)
    machine = f"sm_{setup.target.arch}" if setup.target.backend == "cuda" else str(setup.target.arch)
    facts = audit(kernel.asm[binary], kernel.asm[text], metadata, parameters, arch, machine)
    return Built(
        name=made.name,
        cache_key=made.cache_key,
        arg_names=tuple(fn.arg_names),
        image=kernel.asm[binary],
        symbol=metadata["name"],
        parameters=parameters,
        constants=made.constants,
        metadata=metadata,
        registers=facts.registers,
        local_bytes=facts.local_bytes,
        binary_version=facts.format_version,
        ranged=job.ranged,
        source=_source(fn),
        globals_set=changed,
    )


def _source(fn: Any) -> Tree | None:
    try:
        return renamed(tree(fn), STAND_IN_MAIN, MAIN)
    except Exception as error:  # Unclear; and what objects do that are looked at
        try:
            certain_key(fn)
        except Unclear as why:
            raise NotFound(
                f"is made inside another function, and can't be told from others: {why}"
            ) from error
        return None


def _flat(types: tuple[Any, ...]) -> list[str]:
    """Types of the launch's parameters: tuples are their parts, constants are none."""
    found: list[str] = []
    for kind in types:
        if isinstance(kind, tuple):
            found += _flat(kind)
        elif kind != "constexpr":
            found.append(kind)
    return found
