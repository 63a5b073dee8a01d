"""The native launcher against a stand-in driver: what reaches it, on which device, and what failures say."""

from __future__ import annotations

import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.harness.stand_in import StandIn, build_stand_in, image

pytest_plugins = ("tests.harness.launcher_fixtures",)

LAUNCH = {"cuda": "cuLaunchKernel", "hip": "hipModuleLaunchKernel"}
SCRATCH = (0, 0)


@pytest.fixture(scope="module")
def errors(native: Any) -> Any:
    import liger_aot.errors

    return liger_aot.errors


def load(driver: Any, signature: str, *, threads: int = 128, shared: int = 0, **options: Any) -> Any:
    return driver.load(
        image(f"kernel={signature}"), "kernel", threads=threads, shared=shared, signature=signature, **options
    )


# ---- What a launch passes on ----


def test_attributes(driver: Any) -> None:
    kernel = load(driver, "pif", threads=256, shared=1024, cooperative=True)
    assert (kernel.name, kernel.threads, kernel.shared) == ("kernel", 256, 1024)
    assert (kernel.signature, kernel.cooperative) == ("pif", True)
    assert driver.version == {"cuda": 12040, "hip": 60342134}[driver.backend]
    assert driver.device_count == 2 and "standin" in driver.library


@pytest.mark.parametrize(
    ("letter", "value", "expected"),
    [
        ("p", 0, 0),
        ("p", None, 0),
        ("p", 0x7F00_1234_5678_9AB0, 0x7F00_1234_5678_9AB0),
        ("p", 2**64 - 1, 2**64 - 1),
        ("i", -1, -1),
        ("i", True, 1),
        ("i", 2**31 - 1, 2**31 - 1),
        ("i", -(2**31), -(2**31)),
        ("l", -1, -1),
        ("l", 2**40 + 3, 2**40 + 3),
        ("l", 2**63 - 1, 2**63 - 1),
        ("l", -(2**63), -(2**63)),
        ("f", 0.5, 0.5),
        ("f", 3, 3.0),
        ("f", 1e-45, 1.401298464324817e-45),
        ("f", -math.inf, -math.inf),
        ("f", 1e300, math.inf),
        ("f", 0.1, 0.10000000149011612),
    ],
)
def test_one_argument(driver: Any, stand_in: StandIn, letter: str, value: Any, expected: float) -> None:
    load(driver, letter).launch(0, 0, 1, 1, 1, value)
    (launch,) = stand_in.launches()
    assert launch.unpack(letter) == (expected, *SCRATCH)


def test_nan_and_negative_zero_keep_their_bits(driver: Any, stand_in: StandIn) -> None:
    load(driver, "ff").launch(0, 0, 1, 1, 1, math.nan, -0.0)
    nan, zero, *scratch = stand_in.launches()[0].unpack("ff")
    assert math.isnan(nan) and math.copysign(1, zero) == -1 and tuple(scratch) == SCRATCH


def test_a_whole_launch(driver: Any, stand_in: StandIn) -> None:
    signature = "pplif" * 12 + "iii"
    values = [value for i in range(12) for value in (2**45 + i, None, -(2**40) - i, -i, i / 4)] + [7, 8, 9]
    kernel = load(driver, signature, threads=1024, shared=4096)
    kernel.launch(0, 0x5000_0000_1000, 2**20, 65535, 3, *values)
    (launch,) = stand_in.launches()
    assert launch.name == "kernel" and launch.stream == 0x5000_0000_1000
    assert (launch.grid, launch.block, launch.shared) == ((2**20, 65535, 3), (1024, 1, 1), 4096)
    assert launch.unpack(signature) == (*(value or 0 for value in values), *SCRATCH)
    assert not launch.cooperative


def test_a_kernel_without_arguments_still_gets_its_scratch_pointers(driver: Any, stand_in: StandIn) -> None:
    load(driver, "").launch(0, 0, 1, 1, 1)
    assert stand_in.launches()[0].unpack("") == SCRATCH


def test_cooperative(driver: Any, stand_in: StandIn) -> None:
    load(driver, "p", cooperative=True).launch(1, 0, 4, 1, 1, 64)
    (launch,) = stand_in.launches()
    assert launch.cooperative and launch.device == 1 and launch.unpack("p") == (64, *SCRATCH)


def test_ptx_is_passed_with_its_end_marked(native: Any, stand_in: StandIn) -> None:
    text = memoryview(image("kernel=i", ptx=True) + b"garbage")[: len(image("kernel=i", ptx=True))]
    driver = native.Driver("cuda", stand_in.path)
    driver.load(bytes(text), "kernel", threads=32, shared=0, signature="i").launch(0, 0, 1, 1, 1, 5)
    assert stand_in.launches()[0].unpack("i") == (5, *SCRATCH)


@pytest.mark.parametrize("grid", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_an_empty_grid_launches_nothing(driver: Any, stand_in: StandIn, grid: tuple[int, int, int]) -> None:
    load(driver, "i").launch(0, 0, *grid, 1)
    assert stand_in.launch_count == 0


# ---- Devices ----


@pytest.mark.parametrize("current", [None, 0, 1])
@pytest.mark.parametrize("device", [0, 1])
def test_launches_on_the_device_and_restores_the_current_one(
    driver: Any, stand_in: StandIn, current: int | None, device: int
) -> None:
    kernel = load(driver, "i")
    stand_in.set_current(current)
    before = stand_in.current(driver.backend)
    for _ in range(2):  # the first launch loads the kernel, the second finds it
        kernel.launch(device, 0, 1, 1, 1, 1)
        assert stand_in.current(driver.backend) == before
    assert [launch.device for launch in stand_in.launches()] == [device, device]


def test_the_current_device_costs_no_switch(driver: Any, stand_in: StandIn) -> None:
    kernel = load(driver, "i")
    kernel.launch(0, 0, 1, 1, 1, 1)  # the first of a thread also asks whether it has a context
    before = len(stand_in.calls())
    kernel.launch(0, 0, 1, 1, 1, 1)
    query = {"cuda": "cuCtxGetDevice@0", "hip": "hipGetDevice@0"}[driver.backend]
    assert stand_in.calls()[before:] == [query, LAUNCH[driver.backend] + "@0"]


@pytest.mark.parametrize("failing", ["launch", "prepare"])
def test_the_current_device_is_restored_after_a_failure(
    driver: Any, stand_in: StandIn, errors: Any, failing: str
) -> None:
    kernel = load(driver, "i")
    if failing == "launch":
        kernel.prepare(1)
        stand_in.fail(LAUNCH[driver.backend], 1)
    else:
        stand_in.fail({"cuda": "cuKernelGetFunction", "hip": "hipModuleGetFunction"}[driver.backend], 1)
    with pytest.raises(errors.DriverError, match="device 1"):
        kernel.launch(1, 0, 1, 1, 1, 1)
    assert stand_in.current(driver.backend) == 0
    stand_in.fail("", 0)
    kernel.launch(1, 0, 1, 1, 1, 1)  # a failure is not remembered
    assert [launch.device for launch in stand_in.launches()] == [1]


def test_prepare_does_what_the_first_launch_would_do_once_a_device(driver: Any, stand_in: StandIn) -> None:
    kernel = load(driver, "i")
    loads = {
        "cuda": ("cuLibraryLoadData", "cuKernelGetFunction", "cuFuncLoad"),
        "hip": ("hipModuleLoadData", "hipModuleGetFunction"),
    }[driver.backend]
    for _ in range(3):
        kernel.prepare(1)
    kernel.launch(1, 0, 1, 1, 1, 1)
    first = {"cuda": ["cuLibraryLoadData@-1"], "hip": []}[driver.backend]
    on_device = [f"{call}@1" for call in loads if call != "cuLibraryLoadData"]
    assert stand_in.calls(*loads) == first + on_device
    kernel.prepare(0)
    assert stand_in.calls(*loads) == first + on_device + [line.replace("@1", "@0") for line in on_device]


@pytest.mark.parametrize(
    ("shared", "devices"), [(48 * 1024, []), (48 * 1024 + 1, [0, 1]), (227 * 1024, [0, 1])]
)
def test_large_shared_memory_is_opted_in_on_each_device(
    native: Any, stand_in: StandIn, shared: int, devices: list[int]
) -> None:
    kernel = load(native.Driver("cuda", stand_in.path), "i", shared=shared)
    for device in (0, 1):
        kernel.launch(device, 0, 1, 1, 1, 1)
    assert stand_in.calls("cuKernelSetAttribute") == [f"cuKernelSetAttribute@{device}" for device in devices]
    assert [launch.shared for launch in stand_in.launches()] == [shared, shared]


# ---- Failures ----


@pytest.mark.parametrize(
    ("backend", "call", "code", "name", "text"),
    [
        ("cuda", "cuInit", 1, "CUDA_ERROR_INVALID_VALUE", "starting the cuda driver"),
        ("cuda", "cuLibraryLoadData", 200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"),
        ("cuda", "cuLibraryGetKernel", 500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"),
        ("cuda", "cuDevicePrimaryCtxRetain", 1, "CUDA_ERROR_INVALID_VALUE", "preparing device 0"),
        ("cuda", "cuLaunchKernel", 719, "unknown error", "grid of 3 x 2 x 1 on device 0"),
        ("hip", "hipInit", 1, "hipErrorINVALID_VALUE", "starting the hip driver"),
        ("hip", "hipModuleLoadData", 200, "hipErrorINVALID_IMAGE", "device kernel image is invalid"),
        ("hip", "hipModuleGetFunction", 500, "hipErrorNOT_FOUND", "preparing device 0"),
        ("hip", "hipModuleLaunchKernel", 719, "hipErrorUnknown", "grid of 3 x 2 x 1 on device 0"),
    ],
)
def test_a_driver_error_tells_call_code_and_name(
    native: Any, stand_in: StandIn, errors: Any, backend: str, call: str, code: int, name: str, text: str
) -> None:
    stand_in.fail(call, code)
    with pytest.raises(errors.DriverError) as caught:
        load(native.Driver(backend, stand_in.path), "i", threads=96).launch(0, 0, 3, 2, 1, 1)
    error = caught.value
    assert isinstance(error, RuntimeError) and isinstance(error, errors.LigerAOTError)
    assert (error.call, error.code, error.name) == (call, code, name)
    assert f"{call} failed with {code} ({name}" in str(error) and text in str(error)
    assert call.endswith("Init") or "kernel kernel: 96 threads" in str(error)
    assert stand_in.last_error == 0  # else the framework would report it as its own


def test_a_damaged_image(driver: Any, errors: Any) -> None:
    with pytest.raises(errors.DriverError, match=r"200 .*INVALID_IMAGE"):
        driver.load(b"\x7fELX kernel=i", "kernel", threads=32, shared=0, signature="i").prepare(0)


def test_a_kernel_that_is_not_in_the_image(driver: Any, stand_in: StandIn, errors: Any) -> None:
    before = stand_in.live_libraries
    with pytest.raises(errors.DriverError, match=r"NOT_FOUND.*kernel other"):
        driver.load(image("kernel=i"), "other", threads=32, shared=0, signature="i").prepare(0)
    assert stand_in.live_libraries == before


def test_a_library_that_is_not_there(native: Any, errors: Any) -> None:
    with pytest.raises(
        errors.DriverNotFound, match=r"cuda driver library: libnosuchdriver\.so\.1: cannot open"
    ) as caught:
        native.Driver("cuda", "libnosuchdriver.so.1")
    assert isinstance(caught.value, errors.LigerAOTError) and isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize(("backend", "symbol"), [("cuda", "cuLibraryLoadData"), ("hip", "hipModuleLoadData")])
def test_a_driver_without_a_function_is_refused_by_its_name(
    native: Any, errors: Any, tmp_path: Path, backend: str, symbol: str
) -> None:
    library = build_stand_in(tmp_path, without=symbol)
    with pytest.raises(errors.DriverNotFound, match=f"has no function {symbol}"):
        native.Driver(backend, str(library))
    native.Driver({"cuda": "hip", "hip": "cuda"}[backend], str(library))


def load_for(driver: Any, own: str, signature: str) -> Any:
    """A kernel whose parameters are those of ``own``, by a signature that may say otherwise."""
    return driver.load(image(f"kernel={own}"), "kernel", threads=32, shared=0, signature=signature)


@pytest.mark.parametrize("signature", ["", "i", "p", "ipf", "iipil", "ffff", "1", "i2p", "p5i3", "l4ffp"])
def test_a_signature_that_the_kernel_has(native: Any, stand_in: StandIn, signature: str) -> None:
    """Each parameter is asked for, and no other: that would be an error, which compute-sanitizer reports."""
    load_for(native.Driver("cuda", stand_in.path), signature, signature)
    asked = len(stand_in.calls("cuKernelGetParamInfo"))
    assert asked == sum(1 + 2 * (int(c) if c.isdigit() else 0) for c in signature) + 2


@pytest.mark.parametrize(
    ("own", "signature", "message"),
    [
        (
            "ppi",
            "ppl",
            'signature "ppl": parameter 3 of kernel kernel has 4 bytes, the signature has 8',
        ),
        ("pil", "pii", "parameter 3 of kernel kernel has 8 bytes, the signature has 4"),
        (
            "ppip",
            "ppi",
            'signature "ppi" has 5 parameters with the two for scratch memory, kernel kernel has 6',
        ),
        (
            "pp",
            "ppp",
            'signature "ppp" has 5 parameters with the two for scratch memory, kernel kernel has 4',
        ),
        ("", "p", "kernel kernel has 2"),
        ("1", "pil", "parameter 1 of kernel kernel has 128 bytes, the signature has 8"),
        ("2", "1il", "parameter 3 of kernel kernel has 4 bytes, the signature has 8"),
        ("p1", "pp", "has 4 parameters with the two for scratch memory, kernel kernel has 6"),
    ],
)
def test_a_signature_that_the_kernel_has_not(
    native: Any, stand_in: StandIn, own: str, signature: str, message: str
) -> None:
    """The driver would read past the end of what a launch gives it, or other bytes than were meant."""
    before = stand_in.live_libraries
    with pytest.raises(ValueError, match=re.escape(message)):
        load_for(native.Driver("cuda", stand_in.path), own, signature)
    assert stand_in.live_libraries == before


def test_a_driver_that_cannot_tell_a_kernels_parameters(
    native: Any, tmp_path: Path, stand_in: StandIn
) -> None:
    """CUDA before 12.4 has no function for it, HIP none at all; a failure of it says nothing of the kernel."""
    old = StandIn(build_stand_in(tmp_path, without="cuKernelGetParamInfo"))
    load_for(native.Driver("cuda", old.path), "i", "l").launch(0, 0, 1, 1, 1, 1)
    load_for(native.Driver("hip", stand_in.path), "i", "l").prepare(0)
    stand_in.fail("cuKernelGetParamInfo", 201)
    load_for(native.Driver("cuda", stand_in.path), "i", "l")


def test_a_thread_without_a_context(native: Any, stand_in: StandIn) -> None:
    """As autograd's is at first: one that the launcher holds serves, and what would be an error there is not asked."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_without_a_context, native.Driver("cuda", stand_in.path), stand_in).result()


def _without_a_context(driver: Any, stand_in: StandIn) -> None:
    stand_in.set_current(None)
    load_for(driver, "i", "p")  # nobody holds any yet: the driver cannot say
    kernel = load_for(driver, "i", "i")
    before = len(stand_in.calls())
    kernel.launch(1, 0, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="parameter 1 of kernel kernel has 4 bytes, the signature has 8"):
        load_for(driver, "i", "p")
    kernel.launch(1, 0, 1, 1, 1, 1)
    assert stand_in.current("cuda") is None
    assert not stand_in.calls("cuCtxGetDevice")
    asked = [line for line in stand_in.calls()[before:] if line.startswith("cuKernelGetParam")]
    assert asked and all(line.endswith("@1") for line in asked)


def test_a_context_that_a_thread_has_lost(native: Any, stand_in: StandIn) -> None:
    kernel = load(native.Driver("cuda", stand_in.path), "i")
    kernel.launch(0, 0, 1, 1, 1, 1)
    stand_in.set_current(None)
    kernel.launch(0, 0, 1, 1, 1, 1)
    assert stand_in.current("cuda") is None
    assert [launch.device for launch in stand_in.launches()] == [0, 0]


def test_a_driver_that_cannot_tell_how_many_parameters_a_kernel_has(native: Any, tmp_path: Path) -> None:
    """CUDA before 13.2: fewer than the signature has are seen, more are not, and nothing is asked for past the end."""
    old = StandIn(build_stand_in(tmp_path, without="cuKernelGetParamCount"))
    driver = native.Driver("cuda", old.path)
    load_for(driver, "ppp", "pp")
    assert len(old.calls("cuKernelGetParamInfo")) == 4
    with pytest.raises(
        ValueError, match=re.escape('"ppp" has 5 parameters with the two for scratch memory, kernel')
    ):
        load_for(driver, "pp", "ppp")
    with pytest.raises(ValueError, match="parameter 1 of kernel kernel has 4 bytes, the signature has 8"):
        load_for(driver, "i", "p")


def test_cuda_before_12_4_has_no_function_load(native: Any, tmp_path: Path) -> None:
    stand_in = StandIn(build_stand_in(tmp_path, without="cuFuncLoad"))
    load(native.Driver("cuda", stand_in.path), "i").launch(1, 0, 1, 1, 1, 1)
    assert stand_in.launch_count == 1


def test_an_unknown_backend(native: Any, stand_in: StandIn) -> None:
    with pytest.raises(ValueError, match='"cuda" or "hip", not "metal"'):
        native.Driver("metal", stand_in.path)


# ---- Arguments that are refused ----


@pytest.mark.parametrize(
    ("signature", "values", "error", "message"),
    [
        ("pi", (1,), TypeError, r'kernel kernel takes 2 arguments \(signature "pi"\).*not 1$'),
        ("pi", (1, 2, 3), TypeError, "not 3$"),
        ("ip", (1, 2.0), TypeError, r"argument 2 of 2 must be an int \(an address\) or None, not float"),
        ("p", (-1,), OverflowError, "argument 1 of 1: -1 is out of range for an int .an address."),
        ("p", (2**64,), OverflowError, "argument 1 of 1: 18446744073709551616 is out of range"),
        ("fi", (1, 2**31), OverflowError, "argument 2 of 2: 2147483648 is out of range for an int .int32."),
        ("i", (-(2**31) - 1,), OverflowError, "argument 1 of 1"),
        ("i", (2**80,), OverflowError, "argument 1 of 1"),
        ("i", (1.0,), TypeError, r"argument 1 of 1 must be an int \(int32\), not float"),
        ("i", (None,), TypeError, "not NoneType"),
        ("pil", (1, 1, 2**63), OverflowError, "argument 3 of 3.*int64"),
        ("l", ("1",), TypeError, r"must be an int \(int64\), not str"),
        ("if", (1, "x"), TypeError, r"argument 2 of 2 must be a float or an int \(float32\), not str"),
        ("f", (10**400,), OverflowError, "argument 1 of 1"),
        ("f", (None,), TypeError, "not NoneType"),
    ],
)
def test_wrong_arguments(
    driver: Any,
    stand_in: StandIn,
    signature: str,
    values: tuple[Any, ...],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        load(driver, signature).launch(0, 0, 1, 1, 1, *values)
    assert stand_in.launch_count == 0


@pytest.mark.parametrize(
    ("place", "error", "message"),
    [
        ((2, 0, 1, 1, 1), ValueError, "device 2: this process sees 2"),
        ((-1, 0, 1, 1, 1), ValueError, "device -1"),
        ((2**70, 0, 1, 1, 1), ValueError, "device 1180591620717411303424"),
        (("0", 0, 1, 1, 1), TypeError, "device must be an int, not str"),
        ((0, None, 1, 1, 1), TypeError, "stream .* must be an int, not NoneType"),
        ((0, 2**64, 1, 1, 1), OverflowError, "stream is 18446744073709551616"),
        ((0, -1, 1, 1, 1), OverflowError, "stream is -1, which is no address"),
        ((0, 0, 2**31, 1, 1), ValueError, "grid_x is 2147483648, outside 0 to "),
        ((0, 0, 1, 65536, 1), ValueError, "grid_y is 65536, outside 0 to 65535"),
        ((0, 0, 1, 1, 65536), ValueError, "grid_z is 65536"),
        ((0, 0, -1, 1, 1), ValueError, "grid_x is -1"),
        ((0, 0, 1, 2.0, 1), TypeError, "grid_y must be an int, not float"),
        ((0, 0, 1, 1), TypeError, "not -1"),
        ((), TypeError, "kernel takes 0 arguments"),
    ],
)
def test_wrong_device_stream_or_grid(
    driver: Any, place: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load(driver, "").launch(*place)


def test_the_largest_grid(driver: Any, stand_in: StandIn) -> None:
    largest = {"cuda": 2**31 - 1, "hip": 2**32 // 1024 - 1}[driver.backend]  # HIP counts threads in 32 bits
    kernel = load(driver, "", threads=1024)
    kernel.launch(0, 0, largest, 1, 1)
    assert stand_in.launches()[0].grid == (largest, 1, 1)
    with pytest.raises(ValueError, match=f"outside 0 to {largest}"):
        kernel.launch(0, 0, largest + 1, 1, 1)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"signature": "px"}, ValueError, "character 2 is none of p"),
        ({"signature": "p" * 65}, ValueError, "65 arguments is more than the 64"),
        ({"signature": "p\0i"}, ValueError, "has a null character"),
        ({"threads": 0}, ValueError, "threads is 0, outside 1 to 1024"),
        ({"threads": 1025}, ValueError, "threads is 1025"),
        ({"shared": -1}, ValueError, "shared is -1"),
        ({"threads": None}, TypeError, "int"),
        ({"warps": 4}, TypeError, "warps"),
    ],
)
def test_wrong_load_arguments(
    driver: Any, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    options = {"threads": 32, "shared": 0, "signature": "p"} | changed
    with pytest.raises(error, match=message):
        driver.load(image("kernel=p"), "kernel", **options)


def test_load_needs_its_keywords_and_types(driver: Any, native: Any) -> None:
    with pytest.raises(TypeError, match="threads, shared and signature"):
        driver.load(image("kernel=p"), "kernel", threads=32, shared=0)
    with pytest.raises(TypeError, match="bytes"):
        driver.load(bytearray(image("kernel=p")), "kernel", threads=32, shared=0, signature="p")
    with pytest.raises(ValueError, match=r"name 'ker.x00nel' has a null"):
        driver.load(image("kernel=p"), "ker\0nel", threads=32, shared=0, signature="p")
    with pytest.raises(TypeError, match="cannot create"):
        native.Kernel()
