"""Launches like one before, without asking Triton again which kernel they take.

``JITFunction.run`` binds a call's arguments, finds what each is specialised for and makes a text of it that it looks
the kernel up by: most of what a launch costs the host. Here a call is compared with those before in C, by what Triton's
choice depends on, and takes the kernel that the call before got. For AMD GPUs that is also the size of the memory that
tensors lie in, which is asked of torch. Whatever is out of the ordinary is left to Triton's ``run``: arguments of other
kinds, hooks, debugging, a cache that was cleared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from liger_aot.runtime import devices
from liger_aot.runtime.remembered import remember
from liger_aot.triton.anew import CALLS, NEW, SEEN, before_launch
from liger_aot.triton.seams import option_names

_IS_CONSTANT, _HAS_DEFAULT = 1, 2
_PLAIN = (Tensor, Parameter)
_LEFT_TO_TRITON = ("debug", "instrumentation_mode")
_MOST_PLACES = 250  # a key has a byte for an option's
_SMALL = 2**31 - 1  # bytes that a 32-bit offset reaches
_TRIED = 16  # calls without a key after which a function is left to Triton


class _Known(NamedTuple):
    """A call that took ``kernel``, which lies in ``cache``, Triton's of this function and device, under ``key``."""

    kernel: Any
    cache: Any
    key: Any
    constants: tuple[Any, ...]  # kept alive: dtypes are known by their address


class _Calls:
    """Of one function: how its arguments are bound, and the calls that it has had."""

    def __init__(self, fn: Any) -> None:
        from triton import knobs
        from triton.language import dtype

        self.amd = knobs.amd
        self.call_key = devices.driver().call_key
        self.names = tuple(param.name for param in fn.params)
        parameters = list(fn.signature.parameters.values())
        has_default = [p.default is not p.empty for p in parameters]
        options = {option: place for place, option in enumerate(_options(), len(self.names))}
        self.places = options | {name: place for place, name in enumerate(self.names)}
        self.flags = bytes(
            _IS_CONSTANT * bool(param.is_constexpr) + _HAS_DEFAULT * default
            for param, default in zip(fn.params, has_default, strict=True)
        )
        self.defaults = tuple(p.default if d else None for p, d in zip(parameters, has_default, strict=True))
        self.dtype = dtype
        self.by_size = devices.backend() == "hip"
        self.without_key = 0
        if (
            any(p.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters)
            or len(self.names) + len(options) > _MOST_PLACES
        ):
            self.call_key = _no_key
        self.known: dict[tuple[int, bytes, bytes], _Known] = {}

    def sizes(self, values: tuple[Any, ...]) -> bytes | None:
        """Which of a call's tensors lie in less than 2 GiB, as Triton's AMD backend asks it; None where it is to be
        asked itself."""
        found = b"+" if self.amd.use_buffer_ops else b"-"
        for value in values:
            if isinstance(value, Tensor):
                if type(value) not in _PLAIN and hasattr(value, "ptr_range"):
                    return None
                found += b"s" if value.untyped_storage().size() <= _SMALL else b"l"
        return found


def wrapped(plain: Callable[..., Any], active: Callable[[], bool]) -> Any:
    """``JITFunction.run``, for calls like one before; all others are passed on to ``plain``. ``active`` says whether
    packs are in use."""
    from triton import knobs
    from triton.runtime import driver

    from liger_aot.triton.kernel import PackedKernel

    runtime, compilation, absent = knobs.runtime, knobs.compilation, object()
    casts = hasattr(compilation, "fpsan_homomorphic_casts")  # 3.8 on
    stages = hasattr(runtime, "add_stages_inspection_hook")

    @wraps(plain)
    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if not active():
            return plain(self, *args, grid=grid, warmup=warmup, **kwargs)
        if (seen := self.__dict__.get(SEEN, NEW)) is not None:
            before_launch(self, seen)
        if (
            warmup
            or self.pre_run_hooks
            or self.debug
            or runtime.debug
            or compilation.instrumentation_mode
            or (casts and compilation.fpsan_homomorphic_casts)
            or (stages and runtime.add_stages_inspection_hook is not None)
            or ((enter := runtime.launch_enter_hook) is not None and getattr(enter, "calls", True))
            or ((leave := runtime.launch_exit_hook) is not None and getattr(leave, "calls", True))
        ):
            return plain(self, *args, grid=grid, warmup=warmup, **kwargs)
        calls: _Calls | None = self.__dict__.get(CALLS)
        if calls is None:
            calls = self.__dict__.setdefault(CALLS, _Calls(self))
        found = calls.call_key(calls.places, calls.flags, calls.defaults, calls.dtype, args, kwargs)
        sizes = b"" if not calls.by_size or found is None else calls.sizes(found[1])
        if found is None or sizes is None:
            calls.without_key += 1
            if calls.without_key >= _TRIED and not calls.known:
                calls.call_key = _no_key  # all its calls have an argument that is Triton's to judge
            return plain(self, *args, grid=grid, warmup=warmup, **kwargs)
        key, values = found
        device = driver.active.get_current_device()
        known = calls.known.get((device, key, sizes))
        if known is None:
            kernel = plain(self, *args, grid=grid, warmup=warmup, **kwargs)
            if type(kernel) is PackedKernel:
                _remember(calls, self, (device, key, sizes), kernel, values)
            return kernel
        kernel = known.kernel
        if self.device_caches[device][0] is not known.cache or known.cache.get(known.key) is not kernel:
            calls.known.clear()
            return plain(self, *args, grid=grid, warmup=warmup, **kwargs)
        for (name, _), (value, where) in self.used_global_vals.items():
            if where.get(name, absent) != value:
                return plain(self, *args, grid=grid, warmup=warmup, **kwargs)  # which says so
        for name, where, value in kernel.kept:
            if where.get(name, absent) != value:
                return plain(self, *args, grid=grid, warmup=warmup, **kwargs)
        if callable(grid):
            grid = grid(dict(zip(calls.names, values, strict=True)))
        size = len(grid)
        stream = driver.active.get_current_stream(device)
        y, z = grid[1] if size > 1 else 1, grid[2] if size > 2 else 1
        kernel.run(grid[0], y, z, stream, kernel.function, kernel.packed_metadata, None, None, None, *values)
        return kernel

    return run


@cache
def _options() -> tuple[str, ...]:
    return tuple(sorted(option_names() - set(_LEFT_TO_TRITON)))


def _no_key(*arguments: Any) -> None:
    """For functions whose arguments are bound in other ways."""


def _remember(
    calls: _Calls, fn: Any, key: tuple[int, bytes, bytes], kernel: Any, values: tuple[Any, ...]
) -> None:
    cache = fn.device_caches[key[0]][0]
    names = [name for name, known in tuple(cache.items()) if known is kernel]
    if len(names) != 1 or kernel.function is None:
        return
    constants = tuple(v for v, flag in zip(values, calls.flags, strict=True) if flag & _IS_CONSTANT)
    remember(calls.known, key, _Known(kernel, cache, names[0], constants))
