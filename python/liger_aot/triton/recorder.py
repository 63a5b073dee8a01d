"""Notes every specialisation of a ``@triton.jit`` kernel that a program launches, into a recording's folder.

Where a GPU is, Triton compiles and launches as ever. With a named target (``LIGER_AOT_RECORD_TARGET``) nothing is
compiled and no kernel runs. What a tuner only tries is not noted: a variant is, at its first launch outside of one.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from liger_aot.triton import closures, seams, sources
from liger_aot.triton.identity import ranged, variant
from liger_aot.triton.recording import Choice, Function, Made, Noted, Package, Writer
from liger_aot.triton.targets import Target, target
from liger_aot.triton.values import NotData, encode

FOLDER, TARGET = "LIGER_AOT_RECORD", "LIGER_AOT_RECORD_TARGET"
_MARK = "_liger_aot_noted"  # of a compiled kernel: the variant that it is
_SMALL = 2**31 - 1

_active: Recorder | None = None


class Recorder:
    """Notes what this process launches."""

    def __init__(self, folder: Path, named: Target | None = None) -> None:
        self.folder, self.named = folder, named
        self._writers: dict[Target, Writer] = {}
        self._functions: set[tuple[Target, str, str, str]] = set()
        self._written: set[tuple[Target, tuple[str, Any]]] = set()
        self._lock = threading.Lock()
        self._local = threading.local()

    @property
    def variants(self) -> frozenset[str]:
        """Names of the variants that this process has noted."""
        return frozenset(name for _, (name, _) in self._written)

    # -- what the hooks call ------------------------------------------------------------------------------------------
    def missed(self, miss: seams.Miss) -> Any:
        """A call without a kernel in this process: it is about to be compiled, and launched."""
        of = _target(miss.fn, miss.device)
        noted: tuple[Any, ...] | None = None
        try:
            found = variant(miss.fn, miss.signature, miss.constants, miss.attrs, miss.given)
        except NotData as error:
            self._writer(of).refused(f"{miss.fn.fn.__module__}:{miss.fn.fn.__qualname__}", str(error))
        else:
            noted = (of, found, _ranged(miss, of), _functions_in(tuple(miss.constants.values())))
        if self.named is None:
            self._local.fresh = noted  # for launched(), once it is compiled
            return None
        kernel = NotLaunched(miss)
        setattr(kernel, _MARK, noted)
        return kernel

    def forget(self) -> None:
        """A call begins: what a call before it left that failed is not its."""
        self._local.fresh = None

    def launched(self, kernel: Any, fn: Any) -> None:
        """``kernel`` was launched, or would have been."""
        fresh, self._local.fresh = getattr(self._local, "fresh", None), None
        if fresh is not None and kernel is not None:
            setattr(kernel, _MARK, fresh)
        found = getattr(kernel, "__dict__", {}).get(_MARK)
        if found is None or self.tuning:
            return
        of, one, small, functions = found
        noted = Noted(one, small)
        with self._lock:
            if (of, _key(noted)) in self._written:
                return
            self._written.add((of, _key(noted)))
            for function in (fn, *functions):
                self._function(of, function)
            self._writer(of).variant(noted)

    def chosen(self, tuner: Any, key: tuple[Any, ...]) -> None:
        """A tuner has a configuration for ``key``."""
        fn, config = seams.unwrapped(tuner), tuner.cache[key]
        of = _target(fn, _driver().get_current_device())
        try:
            choice = Choice(
                module=fn.fn.__module__,
                qualname=fn.fn.__qualname__,
                keys=tuple(tuner.keys),
                key=tuple(encode(value) for value in key),
                config=config_data(config),
                text=str(config),
                timed=self.named is None,
            )
        except NotData as error:
            self._writer(of).refused(f"{fn.fn.__module__}:{fn.fn.__qualname__}", f"its tuner: {error}")
        else:
            with self._lock:
                self._writer(of).choice(choice)

    @property
    def tuning(self) -> int:
        """Whether this thread is in a tuner's trial."""
        depth: int = getattr(self._local, "depth", 0)
        return depth

    @tuning.setter
    def tuning(self, depth: int) -> None:
        self._local.depth = depth

    # -- files --------------------------------------------------------------------------------------------------------
    def _writer(self, of: Target) -> Writer:
        if of not in self._writers:
            import triton

            device = "" if self.named else _device_name()
            self._writers[of] = Writer(self.folder, of, public(triton.__version__), device, not self.named)
        return self._writers[of]

    def _function(self, of: Target, fn: Any) -> None:
        known = (of, fn.fn.__module__, fn.fn.__qualname__, closures.key(fn))
        if known not in self._functions:
            self._functions.add(known)
            self._writer(of).function(about := describe(fn))
            for other in closures.functions(fn) if isinstance(about.made, Made) else ():
                self._function(of, other)


def _key(noted: Noted) -> Any:
    return noted.variant.name, noted.ranged


def public(version: str) -> str:
    """A version without its local part, "3.6.0" of "3.6.0+git1": what binds a pack to Triton."""
    return version.partition("+")[0]


def describe(fn: Any) -> Function:
    """A function as a recording has it."""
    key = closures.key(fn)  # reads the globals
    reads = []
    for (name, _), (value, owner) in fn.used_global_vals.items():
        with suppress(NotData):  # it is in the key all the same
            reads.append((str(owner.get("__name__", "")), name, encode(value)))
    code = fn.fn.__code__
    return Function(
        module=fn.fn.__module__,
        qualname=fn.fn.__qualname__,
        cache_key=key,
        file=_shown_path(fn.fn.__module__, code.co_filename),
        line=code.co_firstlineno,
        reads=tuple(read for read in sorted(reads, key=str) if read[0]),
        package=package(fn.fn.__module__),
        made=_made(fn),
    )


def _made(fn: Any) -> Made | str | None:
    """What makes a function again, without the function that it is made in; why not, where that can't be said."""
    if closures.LOCAL not in fn.fn.__qualname__:
        return None
    parameters = fn.signature.parameters.values()
    given = [param for param in parameters if param.default is not param.empty]
    try:
        variables = closures.variables(fn, _named)
        closures.certain_key(fn)  # of the functions among them, too
        defaults = [(param.name, _default(param)) for param in given]
    except closures.Unclear as error:
        return str(error)
    return Made(
        kind=sources.kind(fn),
        noinline=getattr(fn, "noinline", None),
        variables=tuple((name, value) for name, value in variables),
        defaults=tuple(defaults),
        annotations=tuple((p.name, p.annotation) for p in getattr(fn, "params", ()) if p.annotation),
    )


def _named(fn: Any) -> list[str]:
    return [fn.fn.__module__, fn.fn.__qualname__, closures.key(fn)]


def _default(param: Any) -> Any:
    try:
        return closures.written(param.default, _named)
    except closures.Unclear as error:
        raise closures.Unclear(f"the default of its parameter {param.name} is {error}") from None


def config_data(config: Any) -> Mapping[str, Any]:
    """A tuner's configuration as data."""
    numbers = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")
    kwargs = {name: encode(value) for name, value in config.kwargs.items()}
    return {"kwargs": kwargs, **{name: encode(getattr(config, name, None)) for name in numbers}}


def _shown_path(module: str, path: str) -> str:
    """A file by its place under its package's folder: where it lies on this machine is nobody's business."""
    parts = Path(path).parts
    top = module.partition(".")[0]
    return "/".join(parts[parts.index(top) :]) if top in parts else parts[-1]


@cache
def package(module: str) -> Package:
    """The distribution that a module is of."""
    from importlib import metadata

    top = module.partition(".")[0]
    names = _distributions().get(top)
    if not names:
        return Package("", "", "")
    about: Any = metadata.metadata(names[0])
    licence = about.get("License-Expression") or about.get("License") or ""
    return Package(names[0], metadata.version(names[0]), licence.partition("\n")[0][:200])


@cache
def _distributions() -> Mapping[str, list[str]]:
    from importlib import metadata

    return metadata.packages_distributions()


def _ranged(miss: seams.Miss, of: Target) -> tuple[tuple[int, ...], ...]:
    """Pointers whose tensors are smaller than 2 GiB. Triton's AMD backend says so itself; elsewhere the arguments do,
    for packs for AMD that are built from this recording."""
    if of.backend == "hip" or miss.bound is None:
        return tuple(tuple(path) for path in ranged(miss.attrs))
    found = []
    for place, (argument, kind) in enumerate(zip(miss.bound.values(), miss.signature.values(), strict=True)):
        if isinstance(kind, str) and kind.startswith("*") and _is_small(argument):
            found.append((place,))
    return tuple(found)


def _is_small(argument: Any) -> bool:
    if hasattr(argument, "ptr_range"):
        return bool(argument.ptr_range() <= _SMALL)
    storage = getattr(argument, "untyped_storage", None)
    return storage is not None and bool(storage().size() <= _SMALL)


def _functions_in(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Functions that a kernel is given as constants."""
    from triton.runtime.jit import JITFunction

    found: list[Any] = []
    for value in values:
        if isinstance(value, JITFunction):
            found.append(value)
        elif isinstance(value, tuple):
            found += _functions_in(value)
    return tuple(found)


def _target(fn: Any, device: int) -> Target:
    of = fn.device_caches[device][2]
    return Target(of.backend, of.arch, of.warp_size)


def _driver() -> Any:
    from triton.runtime import driver

    return driver.active


def _device_name() -> str:
    torch: ModuleType | None = sys.modules.get("torch")
    return str(torch.cuda.get_device_name()) if torch is not None and torch.cuda.is_available() else ""


class NotLaunched:
    """In a compiled kernel's place where kernels do not run. What is asked of it beyond a launch, it compiles for."""

    function = packed_metadata = module = None

    def __init__(self, miss: seams.Miss) -> None:
        self._miss = miss

    def run(self, *arguments: Any) -> None:
        pass

    def launch_metadata(self, *arguments: Any) -> None:
        return None

    def _init_handles(self) -> None:
        pass

    def __getitem__(self, grid: Any) -> Any:
        return self.run

    def __getattr__(self, name: str) -> Any:
        if name not in (
            "metadata",
            "asm",
            "kernel",
            "name",
            "hash",
            "n_regs",
            "n_spills",
            "n_max_threads",
            "src",
        ):
            raise AttributeError(name)
        if name in ("n_regs", "n_spills", "n_max_threads"):
            return {"n_regs": 128, "n_spills": 0, "n_max_threads": 1024}[name]  # they decide grids, no binary
        return getattr(self._compiled(), name)

    def _compiled(self) -> Any:
        if "_kernel" not in self.__dict__:
            import triton

            miss = self._miss
            source = miss.fn.ASTSource(miss.fn, miss.signature, miss.constants, miss.attrs)
            of = miss.fn.device_caches[miss.device][2]
            self._kernel = triton.compile(source, target=of, options=miss.options.__dict__)
        return self._kernel


# -- hooks ------------------------------------------------------------------------------------------------------------
def start() -> None:
    """At startup, after Triton has been imported: what ``LIGER_AOT_RECORD`` asks for."""
    named = os.environ.get(TARGET)
    record(Path(os.environ[FOLDER]), target(named) if named else None)


def record(folder: Path, named: Target | None = None) -> Recorder:
    """Note from now on what this process launches, into ``folder``; with ``named``, no kernel runs."""
    global _active
    if _active is not None:
        seams.no_longer_on_miss(_active.missed)
    _active = Recorder(folder.absolute(), named)
    if named is not None:
        from liger_aot.triton.stand_ins import set_driver

        set_driver(named)
    _hook()
    seams.on_miss(_active.missed)
    return _active


def stop() -> None:
    """Note nothing more."""
    global _active
    if _active is not None:
        seams.no_longer_on_miss(_active.missed)
    _active = None


def active() -> Recorder | None:
    """The recorder that notes what this process launches."""
    return _active


def _hook() -> None:
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    if getattr(JITFunction, "_liger_aot_recorder", False):
        return
    run, tune, trial = JITFunction.run, Autotuner.run, Autotuner._bench

    def _run(self: Any, *arguments: Any, **named: Any) -> Any:
        if _active is None:
            return run(self, *arguments, **named)
        _active.forget()
        kernel = run(self, *arguments, **named)
        if _active is not None:
            _active.launched(kernel, self)
        return kernel

    def _tune(self: Any, *arguments: Any, **named: Any) -> Any:
        if _active is None or len(self.configs) < 2:
            return tune(self, *arguments, **named)
        before = set(self.cache)
        result = tune(self, *arguments, **named)
        for key in set(self.cache) - before:
            _active.chosen(self, key)
        return result

    def _trial(self: Any, *arguments: Any, **named: Any) -> Any:
        if _active is None:
            return trial(self, *arguments, **named)
        if _active.named is not None:
            return [0.0, 0.0, 0.0]  # nothing runs: the first configuration is taken
        _active.tuning += 1
        try:
            return trial(self, *arguments, **named)
        finally:
            _active.tuning -= 1

    JITFunction.run, Autotuner.run, Autotuner._bench = _run, _tune, _trial
    JITFunction._liger_aot_recorder = True
