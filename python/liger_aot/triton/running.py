"""Running Triton kernels from packs. ``LIGER_AOT_TRITON`` in the environment calls ``use`` in programs that don't:
``_liger_aot_startup``, when Triton's driver is first asked something."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import Any, NamedTuple

from liger_aot.errors import ArgumentError, KernelNotInPack, PackNotFound
from liger_aot.triton import anew, identity, missing, packs, seams, sources
from liger_aot.triton.tuners import Tuners
from liger_aot.triton.values import NotData

ERROR, WARN, COMPILE = "error", "warn", "compile"
MISSING = (ERROR, WARN, COMPILE)


class Status(NamedTuple):
    """What this process has had of packs so far."""

    missing: str | None  # None: packs are not in use
    packs: tuple[str, ...]  # "mykernels for sm90", of the devices that were launched on
    loaded: int  # kernels that came from a pack
    missed: tuple[str, ...]  # what was said of launches that no pack has, each once
    problems: tuple[str, ...]  # why packs that are installed are not used


class _Running:
    """Packs in use in this process."""

    def __init__(self, names: tuple[str, ...], missing: str) -> None:
        self.names, self.missing = names, missing
        self.loaded = 0
        self.missed: dict[str, None] = {}
        self._serving: dict[int, tuple[list[packs.TritonPack], list[str]]] = {}
        self._lock = RLock()
        self.tuners = Tuners(self._functions_here, missing, self._left_out_here)
        self.before: Any = None  # the driver that was active

    def serving(self, device: int) -> tuple[list[packs.TritonPack], list[str]]:
        """Packs for the GPU that torch calls cuda:<device>, and why others are not used."""
        with self._lock:
            if device not in self._serving:
                import triton

                from liger_aot.runtime.devices import gpu

                found, problems = packs.serving(gpu(device).device, self.names)
                used = []
                for pack in found:
                    if (refusal := pack.refusal(triton.__version__)) is None:
                        used.append(pack)
                    elif self.names:
                        raise PackNotFound(refusal)
                    else:
                        problems.append(refusal)
                self._serving[device] = used, problems
            return self._serving[device]

    def status(self) -> Status:
        with self._lock:
            known = [
                (str(pack), tuple(problems)) for used, problems in self._serving.values() for pack in used
            ]
            problems = {problem for _, found in self._serving.values() for problem in found}
            return Status(
                self.missing,
                tuple(dict.fromkeys(name for name, _ in known)),
                self.loaded,
                tuple(self.missed),
                tuple(sorted(problems)),
            )

    def _functions_here(self, name: str) -> list[packs.Function]:
        from triton.runtime import driver

        used, _ = self.serving(driver.active.get_current_device())
        return [function for pack in used if (function := pack.function(name)) is not None]

    def _left_out_here(self, name: str) -> list[str]:
        from triton.runtime import driver

        used, _ = self.serving(driver.active.get_current_device())
        return missing.left_out(name, used)

    def find(self, miss: seams.Miss) -> Any:
        """The kernel for a call that this process has none for yet; None where Triton is to compile it."""
        from liger_aot.triton.kernel import PackedKernel

        used, problems = self.serving(miss.device)
        try:
            anyone = identity.variant(miss.fn, miss.signature, miss.constants, miss.attrs, miss.given, "")
        except NotData as error:
            name = f"{miss.fn.fn.__module__}:{miss.fn.fn.__qualname__}"
            return self._miss(f"{name}: no pack can have it: one of its constants is {error}")
        ranged = {tuple(path) for path in identity.ranged(miss.attrs)}
        found = []
        for pack in used:
            if (function := pack.function(anyone.function)) is None:
                continue
            told = sources.told(miss.fn, function)
            if not isinstance(told, sources.Changed):
                variant = anyone._replace(cache_key=told.cache_key)
                if (binary := function.binary(variant.name, ranged)) is not None:
                    with self._lock:
                        self.loaded += 1
                    return PackedKernel(miss, pack, binary, told.kept)
            found.append((pack, function, told))
        return self._miss(missing.describe(anyone, used, found, problems))

    def _miss(self, text: str) -> None:
        with self._lock:
            known = text in self.missed
            self.missed[text] = None
        if self.missing == ERROR:
            raise KernelNotInPack(f"{text}. {missing.ADVICE}")
        if self.missing == WARN and not known:
            warnings.warn(f"{text}. Triton compiles it now", RuntimeWarning, stacklevel=2)


_running: _Running | None = None
_changing = RLock()


def use(*names: str, missing: str = ERROR) -> None:
    """Run Triton's kernels from installed packs, in this process, with nothing to compile.

    From now on ``kernel[grid](...)`` looks for a binary in the packs where Triton would compile one; Triton's driver
    is one that compiles nothing either. Kernels that the process has compiled before stay as they are. Calling it again
    replaces what was said before.

    Args:
        names: of packs, looked at in this order; all installed ones where none is named.
        missing: what becomes of a launch that no pack has a binary for: "error" raises KernelNotInPack, "warn" warns
            and lets Triton compile it, "compile" only does the latter. Where a tuner (@triton.autotune) is asked for a
            key that no pack knows, "error" raises, "warn" takes the choice for the nearest key and says so, and
            "compile" tunes.

    Raises:
        PackNotFound: a named pack is not installed, or was built with another Triton.
        ArgumentError: another value of ``missing``.
    """
    if missing not in MISSING:
        raise ArgumentError(f"missing must be 'error', 'warn' or 'compile', got {missing!r}")
    found = packs.folders()
    for name in names:
        if name not in found:
            known = ", ".join(sorted(found)) or "none"
            raise PackNotFound(f"no pack {name!r} of Triton kernels is installed; installed: {known}")
    from triton.runtime import driver

    from liger_aot.triton.driver import pack_driver

    global _running
    with _changing:
        before = driver._active if _running is None else _running.before
        stop()
        running = _Running(names, missing)
        running.before = before
        driver.set_active(pack_driver())
        _wrap_tuners()
        _wrap_runs()
        _wrap_binders()
        seams.on_miss(_find)
        _running = running


def stop() -> None:
    """Undo ``use``: Triton's own driver is active again. Kernels that came from packs stay in the process' caches."""
    global _running
    with _changing:
        if _running is None:
            return
        from triton.runtime import driver

        seams.no_longer_on_miss(_find)
        _running.tuners.empty()
        driver._active = _running.before
        _running = None


def status() -> Status:
    """What this process has had of packs so far. A test run may assert that ``missed`` is empty."""
    running = _running
    return Status(None, (), 0, (), ()) if running is None else running.status()


def _find(miss: seams.Miss) -> Any:
    running = _running
    if running is None:
        return None
    # What is read from a pack, and where Triton hashes a function's source its syntax tree, are thousands of objects,
    # for which Python would look through all that the process holds for garbage, more than once.
    collects = gc.isenabled()
    gc.disable()
    try:
        if (seen := miss.fn.__dict__.get(anew.SEEN, anew.NEW)) is not None:  # preloading is no launch
            anew.before_launch(miss.fn, seen)
        if (kernel := running.find(miss)) is None:
            anew.compiled(miss.fn)
        return kernel
    finally:
        if collects:
            gc.enable()


def _wrap_tuners() -> None:
    """Have every tuner filled before it looks for its key; once a process."""
    from triton.runtime.autotuner import Autotuner

    if hasattr(Autotuner.run, "_liger_aot_fills"):
        return
    plain: Callable[..., Any] = Autotuner.run

    @wraps(plain)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        fill(self)
        return plain(self, *args, **kwargs)

    run._liger_aot_fills = True  # type: ignore[attr-defined]
    Autotuner.run = run


def _wrap_runs() -> None:
    """Have calls like one before take its kernel, and functions that are made anew those of one like it; once a
    process."""
    from triton.runtime.jit import JITFunction

    from liger_aot.triton import repeated

    if not hasattr(JITFunction.run, "_liger_aot_repeats"):
        JITFunction.run = repeated.wrapped(JITFunction.run, lambda: _running is not None)
        JITFunction.run._liger_aot_repeats = True


def _wrap_binders() -> None:
    """Have functions do without the one that Triton makes to bind their arguments, as long as few calls need it; once
    a process."""
    import triton
    from triton.runtime import jit

    from liger_aot.triton import binder

    make = jit.create_function_from_signature
    if (
        hasattr(make, "_liger_aot_binds")
        or ".".join(triton.__version__.split(".")[:2]) not in binder.VERSIONS
    ):
        return

    @wraps(make)
    def later(signature: Any, params: Any, backend: Any) -> Any:
        if _running is None:
            return make(signature, params, backend)
        return binder.Binder(make, signature, params, backend)

    later._liger_aot_binds = True  # type: ignore[attr-defined]
    jit.create_function_from_signature = later


def fill(tuner: Any) -> None:
    """Give a tuner the winners of the packs in use, before it looks for its key."""
    running = _running
    if running is not None and len(tuner.configs) > 1:
        running.tuners.fill(tuner)
