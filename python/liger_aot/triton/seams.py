"""Where this package reaches into Triton (3.6 to 3.9): what a call gave, and the place where a miss would compile.

``JITFunction.run`` looks its kernel up in a cache of the process. On a miss it calls ``_pack_args``, which knows the
call's arguments, and right after it, on the same thread, ``_do_compile``, which no longer does. Both are wrapped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

# Triton gives these to each call itself: they count only where they are set.
_ADDED = ("debug", "instrumentation_mode", "fpsan_homomorphic_casts")

FP32_DEFAULT = "knob_fp32_default"  # among the options that a call gave: knobs.language.fp32_default

Given = dict[str, Any]


class Miss:
    """A call that the process has no kernel for: what ``_do_compile`` was called with, and what the call gave."""

    __slots__ = (
        "attrs",
        "bound",
        "constants",
        "device",
        "fn",
        "given",
        "key",
        "options",
        "signature",
        "warmup",
    )

    def __init__(
        self,
        fn: Any,
        key: Any,
        signature: Mapping[str, Any],
        device: int,
        constants: Mapping[Any, Any],
        options: Any,
        attrs: Mapping[Any, Any],
        warmup: bool,
        given: Given,
        bound: Mapping[str, Any] | None,
    ) -> None:
        self.fn = fn  # the JITFunction
        self.key = key  # of the process' cache
        self.signature = signature  # parameter -> type, "constexpr", or a tuple of these
        self.device = device
        self.constants = constants  # path (parameter's place, place in its tuple ...) -> value
        self.options = options  # the backend's, parsed
        self.attrs = attrs  # path -> [["tt.divisibility", 16]]
        self.warmup = warmup
        self.given = given  # options that the call itself gave
        self.bound = bound  # arguments by parameter; None where the kernel is preloaded from a description


Handler = Callable[[Miss], Any]

_handlers: list[Handler] = []
_local = threading.local()
_lock = threading.Lock()


def on_miss(handler: Handler) -> None:
    """Ask ``handler`` for a kernel before Triton compiles one: the last that was added first, those that return None
    pass the question on. What it returns is kept in the process' cache, as a compiled kernel is."""
    with _lock:
        _install()
        if handler not in _handlers:
            _handlers.insert(0, handler)


def no_longer_on_miss(handler: Handler) -> None:
    """Undo ``on_miss``."""
    with _lock:
        if handler in _handlers:
            _handlers.remove(handler)


def _install() -> None:
    from triton.runtime.jit import JITFunction

    if getattr(JITFunction, "_liger_aot_seams", False):
        return
    pack_args, do_compile = JITFunction._pack_args, JITFunction._do_compile

    def _pack_args(
        self: Any, backend: Any, kwargs: Any, bound: Any, specialization: Any, options: Any
    ) -> Any:
        packed = pack_args(self, backend, kwargs, bound, specialization, options)
        _local.packed = (packed[0], kwargs, bound)
        return packed

    def _do_compile(
        self: Any,
        key: Any,
        signature: Any,
        device: Any,
        constexprs: Any,
        options: Any,
        attrs: Any,
        warmup: bool,
    ) -> Any:
        kept, kwargs, bound = getattr(_local, "packed", (None, {}, None))
        _local.packed = (None, {}, None)  # or it would hold the call's tensors
        if _handlers:
            if kept is not options:  # preloaded from a description: the arguments are not known
                kwargs, bound = _not_default(self, device, options), None
            given = given_options(self, kwargs)
            miss = Miss(self, key, signature, device, constexprs, options, attrs, warmup, given, bound)
            for handler in tuple(_handlers):
                if (kernel := handler(miss)) is not None:
                    self.device_caches[device][0][key] = kernel
                    return kernel
        return do_compile(self, key, signature, device, constexprs, options, attrs, warmup)

    JITFunction._pack_args, JITFunction._do_compile = _pack_args, _do_compile
    JITFunction._liger_aot_seams = True


def given_options(fn: Any, kwargs: Mapping[str, Any]) -> Given:
    """The compiler's options among the keyword arguments of a call of ``fn``. Not how the parsed ones differ from the
    backend's defaults: num_stages=3 is CUDA's default and not AMD's. A constexpr parameter that is named as an option
    is both; None says nothing."""
    constexprs = {param.name: param.is_constexpr for param in fn.params}
    given = {}
    for name, value in kwargs.items():
        if value is None or (name in _ADDED and not value):
            continue
        if name not in constexprs or (constexprs[name] and name in option_names()):
            given[name] = value
    return _with_knobs(given)


def _with_knobs(given: Given) -> Given:
    """Triton's settings of the whole process that change results, where they are not what Triton has by itself: fusing
    of products and sums, and the precision of float32 tl.dot."""
    from triton import knobs

    if not knobs.language.default_fp_fusion:
        given.setdefault("enable_fp_fusion", False)
    if (precision := knobs.language.fp32_default) is not None:
        given[FP32_DEFAULT] = precision
    return given


@cache
def option_names() -> frozenset[str]:
    """The options of all backends: a kernel may be built for each of them."""
    from triton.backends.amd.compiler import HIPOptions
    from triton.backends.nvidia.compiler import CUDAOptions

    return frozenset(CUDAOptions.__dataclass_fields__) | frozenset(HIPOptions.__dataclass_fields__)


def _not_default(fn: Any, device: int, options: Any) -> dict[str, Any]:
    """Options that are not the backend's defaults, but for those that say what the target is."""
    defaults = fn.device_caches[device][3].parse_options({}).__dict__
    return {
        name: value
        for name, value in options.__dict__.items()
        if defaults.get(name) != value and name not in ("extern_libs", "arch", "backend_name")
    }


def unwrapped(fn: Any) -> Any:
    """The JITFunction under @triton.autotune and @triton.heuristics."""
    from triton.runtime.jit import JITFunction

    while not isinstance(fn, JITFunction):
        fn = fn.fn
    return fn
