"""The first calls of a function are bound and specialised as by the function that Triton makes for it."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import jit
from triton.tools.tensor_descriptor import TensorDescriptor

import liger_aot.triton
from liger_aot.triton import anew
from liger_aot.triton.binder import _FEW, VERSIONS, Binder
from liger_aot.triton.packs import OVERRIDE
from tests.harness.stand_in import StandIn
from tests.harness.triton_stand_in import wanted, write_pack
from tests.triton_packs import run_kernels as kernels
from tests.triton_packs.test_run_repeated import every_kind, less_specialised, values

pytest_plugins = ("tests.harness.launcher_fixtures", "tests.harness.triton_fixtures")


INT8, INT32, FP16, BOOL, POINTER, POINTER_32 = "i8", "i32", "fp16", "u1", "*i16", "*fp32"


@triton.jit
def annotated(X: POINTER, a: INT8, b: tl.uint64, c: FP16, d: tl.bfloat16, e: BOOL, f: tl.const):
    tl.store(X, a + b + c + d + e)


@triton.jit(do_not_specialize=["a", 2], do_not_specialize_on_alignment=["X", "d"])
def annotated_less(X: POINTER_32, a: INT32, b: tl.int64, c, d, e: tl.constexpr = 3, f=None):
    tl.store(X, a + b)


@triton.jit
def named_as_an_option(X, num_warps: tl.constexpr, num_stages=3):
    tl.store(X, num_warps + num_stages)


FUNCTIONS = [
    every_kind,
    less_specialised,
    annotated,
    annotated_less,
    named_as_an_option,
    kernels.tuples,
    kernels.apply,
]
FUNCTIONS += [kernels.of_descriptors]


def triton_own() -> Any:
    return getattr(jit.create_function_from_signature, "__wrapped__", jit.create_function_from_signature)


def outcome(binder: Any, args: Any, kwargs: Any) -> Any:
    try:
        bound, special, options = binder(*args, **dict(kwargs))
    except Exception as error:
        return type(error), str(error)
    return list(bound.items()), special, list(options.items())


def is_same(a: Any, b: Any) -> bool:
    """Of the same types, too: True is no 1. Tensors are compared by being the same."""
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(is_same, a, b))
    return a is b or (type(a) is type(b) and not isinstance(a, torch.Tensor) and repr(a) == repr(b))


@pytest.mark.parametrize("gpu", ["triton_gpu", "triton_amd_gpu"])
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.fn.__name__)
def test_as_tritons(fn: Any, gpu: str, request: pytest.FixtureRequest) -> None:
    """Random arguments by place and by name, also too few, too many and twice; options between them."""
    request.getfixturevalue(gpu)
    liger_aot.triton.use(missing="compile")
    backend = fn.device_caches[0][3]
    theirs = triton_own()(fn.signature, fn.params, backend)
    base = torch.zeros(16, 64)
    pool = [
        *values(), TensorDescriptor(base, [16, 64], [64, 1], [4, 32]), kernels.Pair(base, 5), (base, 1, (16, None)),
    ]  # fmt: skip
    choose, bound = random.Random(0), 0
    names = [param.name for param in fn.params]
    for _ in range(3000):
        wrong = choose.random() < 0.1
        required = [n for n, p in zip(names, fn.params, strict=True) if not p.has_default]
        given = required + [n for n in names if n not in required and choose.random() < 0.5]
        if wrong:
            given = choose.sample(names, choose.randint(0, len(names)))
        by_place = choose.randint(0, len(names) + wrong)
        args = tuple(choose.choice(pool) for _ in range(by_place))
        kwargs = {n: choose.choice(pool) for n in given if wrong or n not in names[:by_place]}
        kwargs |= choose.choice([{}, {"num_warps": 8}, {"num_stages": 2, "no_option": 1}, {"debug": False}])
        kwargs = dict(choose.sample(list(kwargs.items()), len(kwargs)))

        def refuse(*arguments: Any) -> Any:
            return theirs  # for calls that it does not take

        mine = Binder(refuse, fn.signature, fn.params, backend)
        wanted_ = outcome(theirs, args, kwargs)
        assert is_same(outcome(mine, args, kwargs), wanted_), (args, kwargs)
        bound += mine._made is None
    assert bound > 1500


def test_functions_that_are_often_bound_get_tritons(triton_gpu: StandIn) -> None:
    made = []

    def make(*arguments: Any) -> Any:
        made.append(arguments)
        return triton_own()(*arguments)

    liger_aot.triton.use(missing="compile")
    backend = every_kind.device_caches[0][3]
    binder, x = Binder(make, every_kind.signature, every_kind.params, backend), torch.zeros(4)
    for count in range(_FEW + 3):
        assert len(made) == (count > _FEW)
        binder(x, 3, 4, C=5)
    assert len(made) == 1


def test_other_kinds_of_parameters_are_tritons(triton_gpu: StandIn) -> None:
    liger_aot.triton.use(missing="compile")

    def by_name_alone(X: Any, *, n: Any) -> None: ...

    def any_number(X: Any, *n: Any) -> None: ...

    for plain in (by_name_alone, any_number):
        fn = triton.JITFunction(plain)
        asked: list[int] = []
        Binder(
            lambda *a, found=asked: lambda *args, **kwargs: found.append(1), fn.signature, fn.params, None
        )(1, n=3)
        assert asked


def test_a_first_launch_makes_no_function(
    tmp_path: Path, triton_gpu: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In versions of Triton that this was compared with; not where packs are not in use."""
    x = torch.zeros(64)
    launch: Callable[[], Any] = lambda: kernels.add[(1,)](x, x, x, 60, BLOCK=32)  # noqa: E731
    liger_aot.triton.use(missing="compile")
    kernels.add.device_caches.clear()
    write_pack(tmp_path, [(wanted(launch), {})])
    monkeypatch.setenv(OVERRIDE, str(tmp_path))
    liger_aot.triton.use()
    kernels.add.device_caches.clear()
    kernels.add.__dict__.pop(anew.CALLS, None)
    launch()
    binder = kernels.add.device_caches[0][4]
    assert type(binder) is Binder and binder._made is None
    assert ".".join(triton.__version__.split(".")[:2]) in VERSIONS
    liger_aot.triton.stop()
    assert (
        type(jit.create_function_from_signature(kernels.add.signature, kernels.add.params, None))
        is not Binder
    )
