"""Functions whose sources tests compare: each reads its names in another way."""

import enum
import math
from types import SimpleNamespace

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import cdiv
from triton.language.extra.cuda import libdevice
from triton.language.extra.cuda.libdevice import tanh
from triton.runtime.jit import constexpr_function

from tests.triton_packs import source_settings as settings

BLOCK = tl.constexpr(64)
NUMBER = tl.constexpr(0.5)
ZERO = tl.constexpr(0.0)
FLAG = tl.constexpr(1)
SHAPE = tl.constexpr((8, 16))
DTYPE = tl.float16
DEFAULT = 32
OBJECT = SimpleNamespace(size=tl.constexpr(4))
NOTHING = None


class Mode(enum.Enum):
    FIRST = 1
    SECOND = 2


class Sizes:
    ROWS = tl.constexpr(4)


@triton.jit
def innermost(x):
    return x * BLOCK


@triton.jit
def helper(x):
    return innermost(x) + 1


@triton.jit
def other(x):
    return innermost(x) - 1


@triton.jit(noinline=True)
def apart(x):
    return x + FLAG


@constexpr_function
def power(x):
    return 2 ** math.ceil(x)


@triton.jit
def plain(X, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(X + at, at, mask=at < n)


@triton.jit
def calls(X, n):
    tl.store(X, helper(n))


@triton.jit
def calls_apart(X, n):
    tl.store(X, apart(n))


@triton.jit
def reads_constants(X, n):
    tl.store(X + n, NUMBER + ZERO + FLAG + SHAPE[0])


@triton.jit
def reads_a_dtype(X, n):
    tl.store(X, n.to(DTYPE))


@triton.jit
def reads_a_module(X, n):
    tl.store(X, settings.scaled(n) + settings.SIZE)


@triton.jit
def reads_a_class(X, n):
    tl.store(X, n + Mode.FIRST.value + Sizes.ROWS)


@triton.jit
def reads_an_object(X, n):
    tl.store(X, n + OBJECT.size)


@triton.jit
def has_a_default(X, n, SIZE: tl.constexpr = DEFAULT):
    tl.store(X + n, SIZE)


@triton.jit
def of_triton(X, n):
    tl.store(X, tanh(cdiv(n, 4)) + libdevice.exp(1.0) + math.pi)


@triton.jit
def while_compiling(X, n):
    tl.store(X + n, power(3))


@triton.jit
def reads_nothing(X, n):
    if NOTHING is None:
        tl.store(X, n)


@triton.jit
def hides_a_global(X, FLAG):
    BLOCK = 3
    for helper in range(BLOCK):
        tl.store(X, helper + FLAG)


@gluon.jit
def of_gluon(X, n, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = gl.arange(0, BLOCK, layout)
    gl.store(X + at, helper_of_gluon(at))


@gluon.jit
def helper_of_gluon(x):
    return x + FLAG


def factory(scale, function):
    size = tl.constexpr(scale)

    @triton.jit
    def made(X, n):
        tl.store(X, function(n) * size)

    return made


made_by_a_factory = factory(3, helper)


@triton.jit
def recursive(x):
    return recursive(x)
