"""Tensor maps through the native launcher, on the stand-in driver: what is encoded, and what a launch passes on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.stand_in import StandIn, image

pytest_plugins = ("tests.harness.launcher_fixtures",)

ADDRESS = 0x7F00_0000_1000
SIZES, STRIDES, BOX = (2, 8, 1000, 96), (768_000, 96, 768, 1), (1, 1, 128, 32)
CUDA_DTYPES = {"bf16": (9, 2), "fp16": (6, 2), "fp32": (7, 4)}


@pytest.fixture
def cuda(native: Any, stand_in: StandIn) -> Any:
    return native.Driver("cuda", stand_in.path)


def encoded(
    dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int
) -> list[int]:
    """What the stand-in makes of a map: 16 words."""
    code, width = CUDA_DTYPES[dtype]
    words = [code | len(sizes) << 32, ADDRESS, swizzle]
    for i, (size, stride, edge) in enumerate(zip(sizes[::-1], strides[::-1], box[::-1], strict=True)):
        words += [size | edge << 32] if i < 4 else []
        words += [stride * width] if i else []
    return words + [0] * (16 - len(words))


@pytest.mark.parametrize("dtype", CUDA_DTYPES)
@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_a_launch_passes_the_map_its_sizes_and_its_strides(
    cuda: Any, stand_in: StandIn, rank: int, dtype: str
) -> None:
    sizes, strides, box = SIZES[-rank:], STRIDES[-rank:], BOX[-rank:]
    made = cuda.tensor_map(ADDRESS, dtype, sizes, strides, box, 2)
    assert made.rank == rank
    signature = f"i{rank}lp"
    kernel = cuda.load(image(f"kernel={signature}"), "kernel", threads=32, shared=0, signature=signature)
    kernel.launch(0, 0, 1, 1, 1, 7, made, -5, 64)
    (launch,) = stand_in.launches()
    words = encoded(dtype, sizes, strides, box, 2)
    assert launch.unpack(signature) == (7, *words, *sizes, *strides, -5, 64, 0, 0)


def test_several_maps_in_one_launch(cuda: Any, stand_in: StandIn) -> None:
    first = cuda.tensor_map(ADDRESS, "bf16", SIZES, STRIDES, BOX, 3)
    second = cuda.tensor_map(ADDRESS, "fp16", SIZES[2:], STRIDES[2:], BOX[2:], 0)
    kernel = cuda.load(image("kernel=42f4"), "kernel", threads=32, shared=0, signature="42f4")
    kernel.launch(0, 0, 1, 1, 1, first, second, 0.5, first)
    (launch,) = stand_in.launches()
    of_first = (*encoded("bf16", SIZES, STRIDES, BOX, 3), *SIZES, *STRIDES)
    of_second = (*encoded("fp16", SIZES[2:], STRIDES[2:], BOX[2:], 0), *SIZES[2:], *STRIDES[2:])
    assert launch.unpack("42f4") == (*of_first, *of_second, 0.5, *of_first, 0, 0)


def test_a_map_outlives_the_call_that_made_it_and_its_driver(native: Any, stand_in: StandIn) -> None:
    made = native.Driver("cuda", stand_in.path).tensor_map(ADDRESS, "bf16", SIZES, STRIDES, BOX, 3)
    driver = native.Driver("cuda", stand_in.path)
    kernel = driver.load(image("kernel=4"), "kernel", threads=32, shared=0, signature="4")
    for _ in range(3):
        kernel.launch(0, 0, 1, 1, 1, made)
    assert {launch.unpack("4")[1] for launch in stand_in.launches()} == {ADDRESS}


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({0: "x"}, TypeError, "integer"),
        ({0: -1}, OverflowError, "negative"),
        ({1: "int8"}, ValueError, "dtype must be"),
        ({1: 9}, ValueError, "dtype must be"),
        ({2: [8]}, TypeError, "sizes must be a tuple"),
        ({2: ()}, ValueError, "sizes has 0 numbers"),
        ({2: (1,) * 6}, ValueError, "sizes has 6 numbers"),
        ({2: (2, 8, 2**31, 96)}, ValueError, "dimension 2: size 2147483648"),
        ({3: (768, 1)}, ValueError, "strides has 2 numbers"),
        ({3: (768_000, 96, 768, 2)}, ValueError, "the last of strides must be 1, not 2"),
        ({3: (-16, 96, 768, 1)}, ValueError, "strides: -16 is negative"),
        ({3: (768_000, 96.0, 768, 1)}, TypeError, "strides must be a tuple of ints"),
        ({4: (1, 1, 2**40, 32)}, ValueError, "dimension 2"),
        ({5: "3"}, TypeError, "integer"),
    ],
)
def test_wrong_arguments(cuda: Any, changes: dict[int, Any], error: type[Exception], text: str) -> None:
    arguments = [ADDRESS, "bf16", SIZES, STRIDES, BOX, 3]
    for i, value in changes.items():
        arguments[i] = value
    with pytest.raises(error, match=text):
        cuda.tensor_map(*arguments)


def test_the_number_of_arguments(cuda: Any) -> None:
    with pytest.raises(TypeError, match="6 arguments, not 1"):
        cuda.tensor_map(ADDRESS)


def test_what_the_driver_refuses(native: Any, cuda: Any) -> None:
    import liger_aot.errors

    with pytest.raises(
        liger_aot.errors.DriverError,
        match=r"cuTensorMapEncodeTiled failed with 1 .*4 dimensions at 0x7f0000001008 .*rows of 96",
    ):
        cuda.tensor_map(ADDRESS + 8, "bf16", SIZES, STRIDES, BOX, 3)


def test_hip_has_none(native: Any, stand_in: StandIn) -> None:
    with pytest.raises(ValueError, match="the hip driver has no tensor maps"):
        native.Driver("hip", stand_in.path).tensor_map(ADDRESS, "bf16", SIZES, STRIDES, BOX, 3)


@pytest.mark.parametrize("value", [5, None, "map", 2])
def test_a_launch_takes_a_map_of_the_rank_alone(cuda: Any, stand_in: StandIn, value: Any) -> None:
    kernel = cuda.load(image("kernel=p4"), "kernel", threads=32, shared=0, signature="p4")
    if value == 2:
        value = cuda.tensor_map(ADDRESS, "bf16", SIZES[2:], STRIDES[2:], BOX[2:], 3)
    with pytest.raises(TypeError, match="argument 2 of 2 must be a TensorMap of 4 dimensions, not"):
        kernel.launch(0, 0, 1, 1, 1, 0, value)
    assert stand_in.launch_count == 0


def test_more_parameters_than_a_launch_has(cuda: Any) -> None:
    with pytest.raises(ValueError, match="a signature of 264 parameters is more than the 256"):
        cuda.load(image("kernel=p"), "kernel", threads=32, shared=0, signature="5" * 24)


def test_maps_are_freed(cuda: Any) -> None:
    """What they take is theirs alone: as many as one likes may be made."""
    import gc
    import tracemalloc

    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for i in range(10_000):
        cuda.tensor_map(ADDRESS + 16 * i, "bf16", SIZES, STRIDES, BOX, 3)
    assert tracemalloc.get_traced_memory()[0] - before < 100_000
    tracemalloc.stop()
