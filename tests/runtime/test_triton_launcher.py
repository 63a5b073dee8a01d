"""The launcher's types Binary and TritonLauncher on the stand-in driver, without Triton: what they take and refuse.
What Triton passes through them is tests/triton_packs' business."""

from __future__ import annotations

import gc
import struct
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from liger_aot.errors import DriverError
from tests.harness.stand_in import StandIn, image

pytest_plugins = ("tests.harness.launcher_fixtures",)


def launcher(driver: Any, program: str, **more: Any) -> Any:
    names = tuple(f"argument{i}" for i in range(40))
    settings = {"device": 0, "threads": 64, "shared": 0, "arguments": names, "maps": (), **more}
    return driver.triton_launcher("kernel", program, **settings)


def launched(driver: Any, stand_in: StandIn, program: str, words: str, *arguments: Any, **more: Any) -> bytes:
    """What a launch of these arguments passes to the driver, without the scratch pointers."""
    binary = driver.binary(image(f"kernel={words}"), "kernel", shared=0)
    function, *_ = binary.prepare(0)
    stand_in.reset()
    launcher(driver, program, **more).launch(1, 1, 1, 0, function, None, None, None, None, *arguments)
    (record,) = stand_in.launches()
    return record.parameters[:-16]


def test_a_binary(driver: Any, stand_in: StandIn) -> None:
    binary = driver.binary(image("one=p", "two=pi"), "two", shared=100)
    assert binary.name == "two"
    first, second = binary.prepare(0), binary.prepare(1)
    assert first[1:] == second[1:] == (40, 16, 1024)
    # One kernel for all devices, or one for each.
    assert (first[0] == second[0]) == (driver.backend == "cuda")
    assert binary.prepare(0) == first
    live = stand_in.live_libraries
    del binary
    gc.collect()
    assert stand_in.live_libraries < live


def test_a_binary_that_is_none(driver: Any) -> None:
    with pytest.raises(DriverError, match="INVALID_IMAGE"):
        driver.binary(b"what", "kernel", shared=0).prepare(0)
    with pytest.raises(DriverError, match="NOT_FOUND"):
        driver.binary(image("other=p"), "kernel", shared=0).prepare(0)
    with pytest.raises(ValueError, match="needs shared, at least 0"):
        driver.binary(image("kernel=p"), "kernel")
    with pytest.raises(ValueError, match="null character"):
        driver.binary(image("kernel=p"), "ker\0nel", shared=0)
    with pytest.raises(ValueError, match="this process sees 2"):
        driver.binary(image("kernel=p"), "kernel", shared=0).prepare(2)


def test_a_binary_is_loaded_while_a_stream_is_captured(driver: Any, stand_in: StandIn) -> None:
    stand_in.capture(True)
    driver.binary(image("kernel=p"), "kernel", shared=0).prepare(0)
    with pytest.raises(DriverError, match="CAPTURE_UNSUPPORTED"):  # as a load does that must not be
        driver.load(image("kernel=p"), "kernel", threads=32, shared=0, signature="p").prepare(0)


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("px", "a letter is none of"),
        ("(p", "a tuple does not end"),
        ("p)", "a tuple ends that has not begun"),
        ("(" * 20 + ")" * 20, "more than 16 deep"),
        ("D61", "a rank is not 1 to 5"),
        ("D", "a rank is not 1 to 5"),
        ("D23", "1 or 2 flags"),
        ("M", "a rank is not 1 to 5"),
        ("M0", "a rank is not 1 to 5"),
        ("i" * 1025, "too many arguments|more than 1024 parameters"),
        ("_" * 1025, "too many arguments"),
        ("D52" * 60, "more than 1024 parameters"),
        ("M1" * 33, "more than 32 tensor maps"),
        ("M2", "maps has 0, the program 1"),
    ],
)
def test_programs_that_are_none(driver: Any, program: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        launcher(driver, program)


def test_launchers_that_can_not_be(native: Any, stand_in: StandIn) -> None:
    cuda, hip = (native.Driver(backend, stand_in.path) for backend in ("cuda", "hip"))
    for wrong in ({"threads": 0}, {"threads": 1025}, {"shared": -1}, {"cluster": 0}, {"cluster": 17}):
        with pytest.raises(ValueError, match="no GPU has that"):
            launcher(cuda, "p", **wrong)
    with pytest.raises(ValueError, match="this process sees 2"):
        launcher(cuda, "p", device=2)
    map_of_two = (3, 2, 6, 0, 0, (4, 32))
    with pytest.raises(ValueError, match="the hip driver has no tensor maps"):
        launcher(hip, "M2", maps=(map_of_two,))
    with pytest.raises(ValueError, match="clusters are not launched through the hip driver"):
        launcher(hip, "p", cluster=2)
    with pytest.raises(ValueError, match="a tensor map of 1 dimensions has a box of 2"):
        launcher(cuda, "M1", maps=(map_of_two,))
    with pytest.raises(ValueError, match="a box of 6 dimensions"):
        launcher(cuda, "M1", maps=((3, 2, 6, 0, 0, (1,) * 6),))
    with pytest.raises(TypeError):
        launcher(cuda, "M1", maps=((3, 2, 6),))


def test_values(driver: Any, stand_in: StandIn) -> None:
    class Index:
        def __index__(self) -> int:
            return 7

    found = launched(
        driver,
        stand_in,
        "bhilfd",
        "bhilfd".replace("d", "l"),
        -1,
        Index(),
        -3,
        True,
        2,
        Index.__index__(Index()),
    )
    assert found == struct.pack("<bhiqfd", -1, 7, -3, 1, 2.0, 7.0)
    assert launched(driver, stand_in, "BHIL", "bhil", -1, -1, -1, -1) == b"\xff" * 15  # as C has it
    assert launched(driver, stand_in, "_p_", "p", "any", None, object()) == bytes(8)
    assert launched(driver, stand_in, "((i)_(ii))l", "iiil", ([1], 0, (2, 3)), 4) == struct.pack(
        "<iiiq", 1, 2, 3, 4
    )


@pytest.mark.parametrize(
    ("letter", "value", "error"),
    [
        ("i", 1 << 31, OverflowError),
        ("i", -(1 << 31) - 1, OverflowError),
        ("l", 1 << 63, OverflowError),
        ("h", 1 << 15, OverflowError),
        ("b", 256, OverflowError),
        ("i", 1.0, TypeError),
        ("i", None, TypeError),
        ("f", "1", TypeError),
        ("e", 65520.0, OverflowError),
        ("p", 1.5, TypeError),
        ("p", -1, OverflowError),
        ("(ii)", (1,), TypeError),
        ("(ii)", 5, TypeError),
        ("D11", object(), AttributeError),
    ],
)
def test_values_that_are_refused(
    driver: Any, stand_in: StandIn, letter: str, value: Any, error: type
) -> None:
    with pytest.raises(error, match="kernel kernel, argument argument1: "):
        launched(driver, stand_in, f"p{letter}", "pp", None, value)
    assert stand_in.launch_count == 0


def test_pointers_that_raise(driver: Any, stand_in: StandIn) -> None:
    class Tensor:
        def __init__(self, answer: Any) -> None:
            self.answer = answer

        def data_ptr(self) -> Any:
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

    assert launched(driver, stand_in, "p", "p", Tensor(0)) == bytes(8)
    assert launched(driver, stand_in, "p", "p", Tensor(4096)) == struct.pack("<Q", 4096)
    for answer in (None, "address", RuntimeError("no storage")):
        with pytest.raises(TypeError, match="argument argument0: "):
            launched(driver, stand_in, "p", "p", Tensor(answer))
    stand_in.reset()
    stand_in.unreachable(4096, 8192)
    binary = driver.binary(image("kernel=p"), "kernel", shared=0)
    with pytest.raises(ValueError, match="cpu tensor"):
        launcher(driver, "p").launch(1, 1, 1, 0, binary.prepare(0)[0], None, None, None, None, Tensor(4096))


def test_descriptors_that_are_wrong(native: Any, stand_in: StandIn) -> None:
    driver = native.Driver("cuda", stand_in.path)
    maps = ((0, 2, 6, 0, 0, (4, 32)),)
    right = {"base": 4096, "shape": (8, 64), "strides": (64, 1), "padding": "zero"}

    def launch(**wrong: Any) -> bytes:
        one = SimpleNamespace(**{**right, **wrong})
        return launched(driver, stand_in, "M2", "2", one, maps=maps)

    assert launch()[128:] == struct.pack("<2i2q", 8, 64, 64, 1)
    with pytest.raises(ValueError, match="shape of a tensor descriptor has 3 numbers, not 2"):
        launch(shape=(8, 64, 1))
    with pytest.raises(ValueError, match="last stride is 2, not 1"):
        launch(strides=(64, 2))
    with pytest.raises(OverflowError, match="size 2147483648 is no int32"):
        launch(shape=(1 << 31, 64))
    with pytest.raises(TypeError):
        launch(shape=(8, "64"))
    with pytest.raises(DriverError, match="cuTensorMapEncodeTiled"):
        launch(base=4097)


def test_calls_that_are_wrong(driver: Any, stand_in: StandIn) -> None:
    launch = launcher(driver, "ii").launch
    before = (1, 1, 1, 0, 1, None, None, None, None)
    with pytest.raises(TypeError, match="kernel kernel takes 2 arguments, not 1"):
        launch(*before, 1)
    with pytest.raises(TypeError, match="kernel kernel takes 2 arguments, not -7"):
        launch(1, 1)
    with pytest.raises(OverflowError, match=r"grid\[1\] is 2147483648"):
        launch(1, 1 << 31, *before[2:], 1, 1)
    with pytest.raises(TypeError, match="stream"):
        launch(1, 1, 1, None, *before[4:], 1, 1)
    assert stand_in.launch_count == 0


def test_hooks_and_scratch(driver: Any, stand_in: StandIn) -> None:
    seen: list[Any] = []

    def scratch(*asked: int) -> tuple[Any, Any]:
        seen.append(asked)
        return 4096, None

    binary = driver.binary(image("kernel=i"), "kernel", shared=0)
    function = binary.prepare(0)[0]
    one = launcher(driver, "i", scratch=scratch)
    one.launch(3, 2, 1, 5, function, None, "metadata", seen.append, seen.append, 9)
    assert seen == [(3, 2, 1, 5), "metadata", "metadata"]

    def fail(_: Any) -> None:
        raise LookupError("hook")

    stand_in.reset()
    with pytest.raises(LookupError):
        one.launch(3, 2, 1, 5, function, None, None, fail, None, 9)
    assert stand_in.launch_count == 0
    with pytest.raises(LookupError):
        one.launch(3, 2, 1, 5, function, None, None, None, fail, 9)
    assert stand_in.launch_count == 1
    one.launch(0, 2, 1, 5, function, None, "empty", seen.append, seen.append, 9)
    assert seen[-2:] == ["empty", "empty"] and stand_in.launch_count == 1
    with pytest.raises(TypeError, match="scratch must return two buffers"):
        launcher(driver, "i", scratch=lambda *_: None).launch(1, 1, 1, 0, function, None, None, None, None, 9)


def test_a_launcher_in_a_circle_is_freed(driver: Any) -> None:
    class Holder:
        launcher: Any

        def scratch(self, *grid_and_stream: int) -> tuple[Any, Any]:
            return None, None

    holder = Holder()
    holder.launcher = launcher(driver, "i", scratch=holder.scratch)
    gone = weakref.ref(holder)
    del holder
    gc.collect()
    assert gone() is None


def test_what_a_call_key_is_of(driver: Any) -> None:
    """Parameters of any name and option: equal keys where the classes of arguments are, and constants' values."""
    places, defaults = {"X": 0, "n": 1, "C": 2, "num_warps": 3}, (None, None, 7)
    flags = bytes((0, 0, 3))

    def key(*args: Any, **kwargs: Any) -> Any:
        return driver.call_key(places, flags, defaults, Size, args, kwargs)

    class Size:
        pass

    x, size = torch.zeros(64), Size()
    made, values = key(x, 48)
    assert values[0] is x and values[1:] == (48, 7)
    assert key(torch.zeros(8), n=64)[0] == made
    assert key(n=0, X=x)[0] == made and key(x, 48, 7)[0] == made
    others = [
        key(x[1:], 48), key(x.half(), 48), key(None, 48), key(x, 47), key(x, 1), key(x, True), key(x, False),
        key(x, 2**31), key(x, 2**31 + 1), key(x, 2**63), key(x, 2**63 + 1), key(x, 4.0), key(x, None), key(x, 48, 8),
        key(x, 48, True), key(x, 48, 7.0), key(x, 48, "7"), key(x, 48, None), key(x, 48, size),
        key(x, 48, num_warps=4), key(x, 48, num_warps=8), key(x, 48, num_warps=None),
    ]  # fmt: skip
    assert len({one[0] for one in others} | {made}) == len(others) + 1
    for none in (
        key(x),
        key(x, 48, 7, 8),
        key(x, 48, n=48),
        key(x, 48, other=1),
        key(x, (1, 2)),
        key(x, 2**64),
    ):
        assert none is None
    assert key(x, 48, "x" * 200) is None and key(x, 48, 2**64) is None and key(x, 48, -(2**64)) is None
    assert key(x, -(2**64)) is None and key(x, 48, object()) is None and key(x, 48, num_warps=size) is None
    many = {f"a{i}": i for i in range(256)}
    assert driver.call_key(many, b"\1" * 256, (None,) * 256, Size, tuple(range(256)), {}) is None
    before = [sys.getrefcount(one) for one in (x, size, places, defaults)]
    for _ in range(100):
        key(x, 48, size, num_warps=4)
        key(x, 48, object())
    assert [sys.getrefcount(one) for one in (x, size, places, defaults)] == before


def test_call_keys_of_what_is_none(driver: Any) -> None:
    with pytest.raises(TypeError, match="call_key takes"):
        driver.call_key({}, b"", (), int, ())
    with pytest.raises(TypeError, match="call_key takes"):
        driver.call_key([], b"", (), int, (), {})
    with pytest.raises(ValueError, match="1 parameters with 0 defaults"):
        driver.call_key({}, b"\0", (), int, (), {})
