"""Launches like one before: calls that take a kernel without asking Triton are those for which Triton has the same, and
the driver is asked for the same as by Triton's own ``run``."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import liger_aot.triton
from liger_aot.triton import anew, repeated
from liger_aot.triton.packs import OVERRIDE
from tests.harness.stand_in import StandIn
from tests.harness.triton_stand_in import wanted, write_pack
from tests.triton_packs import run_kernels as kernels
from tests.triton_packs.run_like_triton import forget, launches

pytest_plugins = ("tests.harness.launcher_fixtures", "tests.harness.triton_fixtures")

SCALE = tl.constexpr(2)


@triton.jit
def every_kind(X, n, s: tl.int64, C: tl.constexpr, D: tl.constexpr = 4, k=None):
    tl.store(X + n, s + C + D)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["X"])
def less_specialised(X, n, s: fp32, C: tl.constexpr, D: tl.constexpr = 4, k=1):  # noqa: F821
    tl.store(X, n + s + C + D)


@triton.jit
def scaled(X):
    tl.store(X, SCALE)


@pytest.fixture(autouse=True)
def fresh_kernels() -> Iterator[None]:
    for fn in (every_kind, less_specialised, scaled, *vars(kernels).values()):
        if isinstance(fn, triton.JITFunction):
            fn.device_caches.clear()
            fn.pre_run_hooks.clear()
            fn.__dict__.pop(anew.CALLS, None)
    yield
    forget()


@pytest.fixture
def packed(tmp_path: Path, triton_gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def install(*calls: Callable[[], Any], missing: str = "error", more: Any = ({},)) -> None:
        liger_aot.triton.use(missing="compile")  # a driver that names the target
        misses = [(wanted(call), extra) for call, extra in zip(calls, more, strict=True)]
        write_pack(tmp_path, misses)
        monkeypatch.setenv(OVERRIDE, str(tmp_path))
        liger_aot.triton.use(missing=missing)

    return install


def by_triton(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the calls whose kernel Triton is asked for from now on."""
    asked: list[int] = []
    from triton.runtime import jit

    plain = jit.compute_cache_key

    def counted(*arguments: Any) -> Any:
        asked.append(1)
        return plain(*arguments)

    monkeypatch.setattr(jit, "compute_cache_key", counted)
    return asked


NAMES = [name for name, _, _ in launches("cuda")]
ASKED_AGAIN = ("tuples", "function", "descriptors", "maps")  # their arguments are Triton's to judge


@pytest.mark.parametrize("name", NAMES)
def test_the_second_launch_is_as_the_first(
    packed: Any, triton_gpu: StandIn, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ((launch, more),) = ((launch, more) for found, launch, more in launches("cuda") if found == name)
    packed(launch, more=({"symbol": "kernel", **more},))
    launch()
    asked = by_triton(monkeypatch)
    launch()
    assert bool(asked) == (name in ASKED_AGAIN)
    first, second = (asdict(record) for record in triton_gpu.launches())
    assert first == second


@pytest.mark.parametrize("name", [name for name, _, _ in launches("hip")])
def test_the_second_launch_on_amd(
    tmp_path: Path, triton_amd_gpu: StandIn, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ((launch, more),) = ((launch, more) for found, launch, more in launches("hip") if found == name)
    liger_aot.triton.use(missing="compile")
    write_pack(tmp_path, [(wanted(launch), {"symbol": "kernel", **more})], arch="gfx942")
    monkeypatch.setenv(OVERRIDE, str(tmp_path))
    liger_aot.triton.use()
    launch()
    asked = by_triton(monkeypatch)
    launch()
    assert bool(asked) == (name in ASKED_AGAIN)
    first, second = (asdict(record) for record in triton_amd_gpu.launches())
    assert first == second


def test_a_tensor_in_larger_memory_on_amd(
    tmp_path: Path, triton_amd_gpu: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the binary for any size, before and after others; so do all where the setting says so."""
    small, (large, part, _) = torch.zeros(64), in_large_memory()
    small = small.to(torch.int8)
    liger_aot.triton.use(missing="compile")
    misses = [(wanted(lambda x=x: scaled[(1,)](x)), {}) for x in (small, large)]
    write_pack(tmp_path, misses, arch="gfx942")
    monkeypatch.setenv(OVERRIDE, str(tmp_path))
    liger_aot.triton.use()
    for x in (small, large, part, small, large):
        scaled[(1,)](x)
    monkeypatch.setattr(triton.knobs.amd, "use_buffer_ops", False)
    for x in (small, large):
        scaled[(1,)](x)
    names = [record.name for record in triton_amd_gpu.launches()]
    assert names == ["k0", "k1", "k1", "k0", "k1", "k1", "k1"]


@cache
def in_large_memory() -> tuple[torch.Tensor, ...]:
    """Tensors in memory of 2 GiB, less one byte and less; no page of it is touched."""
    bytes_ = torch.empty(2**31, dtype=torch.int8)
    return bytes_, bytes_[:16], torch.empty(2**31 - 1, dtype=torch.int8)[:16]


def values() -> Iterator[Any]:
    """What arguments may be."""
    x = torch.zeros(64)
    yield from (
        x,
        x[1:],
        x[4:],
        x.half(),
        x.to(torch.int8),
        x.bool(),
        torch.nn.Parameter(x),
        x.view(8, 8).t(),
        *in_large_memory(),
    )
    yield from (None, True, False, 0.0, -0.0, 1.0, 2.5, float("inf"))
    yield from (0, 1, 2, 15, 16, 17, -1, -16, 2**31 - 1, 2**31, -(2**31), 2**33, 2**63 - 1, 2**63, 2**64 - 16)
    yield from ("ieee", "tf32", "", tl.float32, tl.bfloat16, torch.float32, (1, 2), kernels.double, SCALE)


@pytest.mark.parametrize("gpu", ["triton_gpu", "triton_amd_gpu"])
@pytest.mark.parametrize("fn", [every_kind, less_specialised], ids=lambda fn: fn.fn.__name__)
def test_equal_keys_are_the_same_kernel(fn: Any, gpu: str, request: pytest.FixtureRequest) -> None:
    """By what Triton looks its kernels up by, for calls of random arguments."""
    request.getfixturevalue(gpu)
    on_amd = gpu == "triton_amd_gpu"
    from triton.runtime.jit import compute_cache_key

    liger_aot.triton.use(missing="compile")
    calls, pool, choose = repeated._Calls(fn), list(values()), random.Random(0)
    common = [pool[0], pool[2], 2, 3, 32, 48]  # so that calls are alike
    _, keys, _, _, binder = fn.device_caches[0]
    seen: dict[bytes, str] = {}
    again = without = 0
    for _ in range(6000):
        names = ["X", "n", "s", "C", *choose.sample(["D", "k"], choose.randint(0, 2))]
        given = {name: choose.choice(choose.choice((pool, common, common))) for name in names}
        by_place = choose.randint(0, 4)
        args = tuple(given.pop(name) for name in names[:by_place])
        options = choose.choice([{}, {}, {"num_warps": 8}, {"num_warps": 4, "num_stages": 2}])
        kwargs = {**given, **options}
        try:
            _, specialization, found_options = binder(*args, **kwargs)
        except (TypeError, OverflowError):
            continue
        found = calls.call_key(calls.places, calls.flags, calls.defaults, calls.dtype, args, kwargs)
        if found is None:
            without += 1
            continue
        key, bound = found
        assert calls.by_size == on_amd
        key += calls.sizes(bound) if on_amd else b""
        theirs = compute_cache_key(keys, specialization, found_options)
        again += key in seen
        assert seen.setdefault(key, theirs) == theirs, (args, kwargs)
        assert len(bound) == len(fn.params)
    assert len(seen) > 1000 and again > 200 and without > 200


def test_calls_that_do_not_fit_are_refused_by_triton(packed: Any, triton_gpu: StandIn) -> None:
    x = torch.zeros(64)
    launch = lambda: kernels.add[(1,)](x, x, x, 60, BLOCK=32)  # noqa: E731
    packed(launch)
    launch()
    with pytest.raises(TypeError, match="missing"):
        kernels.add[(1,)](x, x, x, BLOCK=32)
    with pytest.raises(TypeError, match="multiple values"):
        kernels.add[(1,)](x, x, x, 60, X=x, BLOCK=32)
    with pytest.raises(KeyError, match="no_option"):
        kernels.add[(1,)](x, x, x, 60, BLOCK=32, no_option=3)


def test_hooks_grids_and_cleared_caches(
    packed: Any, triton_gpu: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.zeros(64)
    seen: list[Any] = []

    def grid(bound: Any) -> tuple[int]:
        seen.append(dict(bound))
        return (bound["n"] // 16,)

    launch = lambda: kernels.add[grid](x, x, n=64, Z=x, BLOCK=32)  # noqa: E731
    packed(launch)
    seen.clear()
    kernel = launch()
    asked = by_triton(monkeypatch)
    assert launch() is kernel and not asked
    assert seen[0] == seen[1] and list(seen[0]) == ["X", "Y", "Z", "n", "BLOCK"]
    assert [record.grid for record in triton_gpu.launches()] == [(4, 1, 1)] * 2

    called: list[str] = []
    kernels.add.add_pre_run_hook(lambda *args, **kwargs: called.append("before"))
    launch()
    kernels.add.pre_run_hooks.clear()
    enter = lambda metadata: called.append(metadata.get()["name"])  # noqa: E731
    triton.knobs.runtime.launch_enter_hook.add(enter)
    try:
        launch()
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(enter)
    assert called == ["before", "k0"] and len(asked) == 2

    kernels.add.device_caches[0][0].clear()
    assert launch() is not kernel and len(asked) == 3
    assert launch() is launch()
    liger_aot.triton.stop()
    asked.clear()
    liger_aot.triton.use(missing="error")
    kernels.add.device_caches.clear()
    launch()
    assert asked


def test_a_global_that_changed(packed: Any, triton_gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(64)
    launch = lambda: scaled[(1,)](x)  # noqa: E731
    packed(launch)
    launch()
    launch()
    monkeypatch.setitem(globals(), "SCALE", tl.constexpr(3))
    with pytest.raises(RuntimeError, match="SCALE has changed"):
        launch()
    assert len(triton_gpu.launches()) == 2


def test_a_function_whose_calls_have_no_key(
    packed: Any, triton_gpu: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not tried for ever; one that has calls with a key is."""
    x = torch.zeros(64)
    without = lambda: kernels.tuples[(1,)](kernels.Pair(x, 5), (3.5, (7, 1 << 40), 1), 9)  # noqa: E731
    plain = lambda: kernels.add[(1,)](x, x, x, 60, BLOCK=32)  # noqa: E731
    constant = lambda: kernels.apply[(1,)](x, kernels.double, 3)  # noqa: E731
    packed(without, plain, constant, more=({}, {}, {}))
    for launch in (without, constant):
        for _ in range(20):
            launch()
        fn = kernels.tuples if launch is without else kernels.apply
        assert getattr(fn, anew.CALLS).call_key is repeated._no_key
    for _ in range(20):
        plain()
    assert getattr(kernels.add, anew.CALLS).call_key is not repeated._no_key
    assert len(triton_gpu.launches()) == 60
