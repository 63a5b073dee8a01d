"""Launches of Triton kernels from a pack, on the stand-in driver: what the driver is asked for, byte for byte."""

from __future__ import annotations

import gc
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import liger_aot.triton
from liger_aot.errors import DriverError, KernelNotInPack, PackDamaged, PackNotFound
from liger_aot.triton import anew
from liger_aot.triton.driver import FLAGS
from liger_aot.triton.packs import OVERRIDE
from tests.harness.stand_in import StandIn
from tests.harness.triton_stand_in import STREAM, wanted, write_pack
from tests.triton_packs import run_kernels as kernels

pytest_plugins = ("tests.harness.launcher_fixtures", "tests.harness.triton_fixtures")


@pytest.fixture(autouse=True)
def fresh_kernels() -> None:
    """No kernel from a test before."""
    forget_hashes()
    for fn in (*vars(kernels).values(), scaled):
        while not isinstance(fn, triton.JITFunction) and hasattr(fn, "fn"):
            fn = fn.fn
        if isinstance(fn, triton.JITFunction):
            fn.device_caches.clear()
            fn.pre_run_hooks.clear()
            fn.__dict__.pop(anew.CALLS, None)


def forget_hashes() -> None:
    """Triton's, as in a new process."""
    for fn in (*vars(kernels).values(), scaled):
        if isinstance(fn, triton.JITFunction):
            fn.hash, fn.used_global_vals = None, {}


@pytest.fixture
def packed(tmp_path: Path, triton_gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Puts launches into a pack, installs it and has it used."""

    def install(
        *launches: Callable[[], Any], missing: str = "error", more: Any = (), **manifest: Any
    ) -> Path:
        liger_aot.triton.use(missing="compile")  # a driver that names the target
        each = [*more, *[{}] * len(launches)][: len(launches)]
        misses = [(wanted(launch), extra) for launch, extra in zip(launches, each, strict=True)]
        folder = write_pack(tmp_path, misses, **manifest)
        monkeypatch.setenv(OVERRIDE, str(tmp_path))
        liger_aot.triton.use(missing=missing)
        forget_hashes()
        return folder

    return install


SCALE = tl.constexpr(2)


@triton.jit
def scaled(X):
    tl.store(X, tl.load(X) * SCALE)


def tensors(count: int) -> list[torch.Tensor]:
    return [torch.zeros(64) for _ in range(count)]


def test_a_launch(packed: Any, triton_gpu: StandIn) -> None:
    x, y, z = tensors(3)

    def launch() -> None:
        kernels.add[(3, 2)](x, y, z, 60, BLOCK=32, num_warps=8)

    packed(launch, more=[{"num_warps": 8, "shared": 70_000, "symbol": "add_kernel"}])
    launch()
    launch()
    first, second = triton_gpu.launches()
    assert first == second
    assert (first.name, first.grid, first.block, first.shared) == (
        "add_kernel",
        (3, 2, 1),
        (256, 1, 1),
        70_000,
    )
    assert (first.device, first.stream, first.cooperative, first.pdl, first.cluster) == (
        0,
        STREAM,
        False,
        False,
        1,
    )
    assert first.unpack("pppi") == (x.data_ptr(), y.data_ptr(), z.data_ptr(), 60, 0, 0)
    status = liger_aot.triton.status()
    assert (status.loaded, status.missed, status.packs) == (1, (), ("mykernels for sm90",))


def test_every_type_of_argument(packed: Any, triton_gpu: StandIn) -> None:
    (x,) = tensors(1)
    values = (-5, -300, 1 << 20, -(1 << 40), 200, 60_000, 4_000_000_000, (1 << 64) - 1, 0.1, 0.1, 0.1, 0.1)

    def launch() -> None:
        kernels.every_type[(1,)](x, *values, True, None, 1, WORD="word")

    packed(launch)
    launch()
    (record,) = triton_gpu.launches()
    half = struct.unpack("<H", struct.pack("<e", 0.1))[0]
    brain = struct.unpack("<I", struct.pack("<f", 0.1))[0] >> 16
    integers = struct.pack("<Qbhiq", x.data_ptr(), -5, -300, 1 << 20, -(1 << 40))
    unsigned = struct.pack("<BHIQ", 200, 60_000, 4_000_000_000, (1 << 64) - 1)
    floats = struct.pack("<HHfd", half, brain, 0.1, 0.1)
    assert record.parameters == integers + unsigned + floats + struct.pack("<bQQ", 1, 0, 0)


@pytest.mark.parametrize(
    "number", [0.0, -0.0, 1e-8, 5.96e-8, 6.1e-5, 6.0976e-5, 1.00048828125, 2049.0, 65504.0, 65519.0]
)
def test_fp16_rounds_as_ieee_has_it(packed: Any, triton_gpu: StandIn, number: float) -> None:
    (x,) = tensors(1)
    fixed = (1, 2, 3, 4, 5, 6, 7, 8)

    def launch() -> None:
        kernels.every_type[(1,)](x, *fixed, number, 0.0, 0.5, 0.0, False, None, 1, WORD="word")

    packed(launch)
    launch()
    (record,) = triton_gpu.launches()
    at = struct.calcsize("<QbhiqBHIQ")
    assert record.parameters[at : at + 2] == struct.pack("<e", number)


def test_arguments_that_are_not_of_their_type(packed: Any, triton_gpu: StandIn) -> None:
    (x,) = tensors(1)

    def launch(half: Any = 0.5, byte: Any = 1) -> None:
        kernels.every_type[(1,)](
            x, byte, 2, 3, 4, 5, 6, 7, 8, half, 0.0, 0.5, 0.0, False, None, 1, WORD="word"
        )

    packed(launch, more=[{"symbol": "all_of_them"}])
    with pytest.raises(OverflowError, match=r"all_of_them, argument e: 70000.0 is no float16"):
        launch(half=70000.0)
    with pytest.raises(OverflowError, match=r"all_of_them, argument b: 257 is outside -128 to 255"):
        launch(byte=257)
    with pytest.raises(TypeError, match=r"all_of_them, argument e"):
        launch(half="text")
    assert triton_gpu.launch_count == 0


def test_tuples(packed: Any, triton_gpu: StandIn) -> None:
    (x,) = tensors(1)
    several = (3.5, (7, 1 << 40), 1)

    def launch() -> None:
        kernels.tuples[(1,)](kernels.Pair(x, 5), several, 9)

    packed(launch)
    launch()
    (record,) = triton_gpu.launches()
    expected = struct.pack("<Qifiqi", x.data_ptr(), 5, 3.5, 7, 1 << 40, 9)
    assert record.parameters == expected + bytes(16)


def descriptor(tensor: torch.Tensor, block: list[int], **more: Any) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, **more)


def test_tensor_descriptors_that_are_taken_apart(packed: Any, triton_gpu: StandIn) -> None:
    a, b = torch.zeros(8, 64), torch.zeros(16, 32)

    def launch() -> None:
        first, second = descriptor(a, [4, 32], padding="nan"), descriptor(b, [4, 32])
        kernels.of_descriptors[(1,)](first, 12, second)

    packed(launch)
    launch()
    (record,) = triton_gpu.launches()
    flags = "b" * FLAGS
    parts = [
        (a.data_ptr(), 8, 64, 64, 1, *[1, 0][:FLAGS], 8, 64, 64, 1),
        (b.data_ptr(), 16, 32, 32, 1, *[0, 0][:FLAGS], 16, 32, 32, 1),
    ]
    expected = [struct.pack(f"<Q4q{flags}2i2q", *part) for part in parts]
    assert record.parameters == expected[0] + struct.pack("<i", 12) + expected[1] + bytes(16)


def test_tensor_maps(packed: Any, triton_gpu: StandIn) -> None:
    a, b = torch.zeros(8, 64, dtype=torch.float16), torch.zeros(16, 32)
    maps = [
        {"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [4, 32], "fp4_padded": False},
        {"swizzle": 1, "elem_size": 4, "elem_type": 7, "block_size": [4, 16], "fp4_padded": True},
    ]

    def launch() -> None:
        first, second = descriptor(a, [4, 32], padding="nan"), descriptor(b, [4, 32])
        kernels.of_descriptors[(1,)](first, 12, second)

    packed(launch, more=[{"maps": maps, "words": "2i2"}])
    launch()
    (record,) = triton_gpu.launches()

    def encoded(kind: int, address: int, swizzle: int, nan: int, sizes: Any, box: Any, stride: int) -> bytes:
        words = [
            kind | 2 << 32,
            address & ~(1 << 21 if FLAGS > 1 else 0),  # the bit that drivers get wrong, in the stand-in's map
            swizzle | nan << 32,
            sizes[1] | box[1] << 32,
            sizes[0] | box[0] << 32,
            stride,
        ]
        return struct.pack("<16Q", *words, *[0] * 10)

    first = encoded(6, a.data_ptr(), 3, 1, (8, 64), (4, 32), 128)
    second = encoded(7, b.data_ptr(), 1, 0, (16, 64), (4, 16), 128)
    expected = first + struct.pack("<2i2q", 8, 64, 64, 1) + struct.pack("<i", 12)
    expected += second + struct.pack("<2i2q", 16, 64 if FLAGS == 1 else 32, 32, 1) + bytes(16)
    assert record.parameters == expected


@pytest.mark.parametrize("cooperative", [False, True])
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("cluster", [1, 2, 16])
def test_ways_of_launching(
    packed: Any, triton_gpu: StandIn, cooperative: bool, pdl: bool, cluster: int
) -> None:
    x, y, z = tensors(3)

    def launch() -> None:
        kernels.add[(3, 2, 5)](x, y, z, 60, BLOCK=32, num_ctas=cluster)

    packed(launch, more=[{"cooperative": cooperative, "pdl": pdl, "num_ctas": cluster}])
    launch()
    (record,) = triton_gpu.launches()
    assert record.grid == (3 * cluster, 2, 5)
    assert (record.cooperative, record.pdl, record.cluster) == (cooperative, pdl, cluster)
    assert record.spread == (cluster > 1)


def test_scratch_memory(packed: Any, triton_gpu: StandIn) -> None:
    x, y, z = tensors(3)
    asked = []

    class Buffer:
        def __init__(self, address: int) -> None:
            self.address = address

        def data_ptr(self) -> int:
            return self.address

    def allocate(size: int, alignment: int, stream: int | None) -> Buffer:
        asked.append((size, alignment, stream))
        return Buffer(0x1000 * len(asked))

    def launch(grid: Any = (3, 2)) -> None:
        kernels.add[grid](x, y, z, 60, BLOCK=32)

    packed(launch, more=[{"scratch": {"global": [48, 16], "profile": [8, 4]}, "num_ctas": 2}])
    triton.set_allocator(allocate)
    from triton.runtime._allocation import set_profile_allocator

    set_profile_allocator(allocate)
    try:
        launch()
        launch((0, 2))
    finally:
        set_profile_allocator(None)
    assert asked == [(48 * 12, 16, STREAM), (8 * 12, 4, STREAM)]
    (record,) = triton_gpu.launches()
    assert record.unpack("pppi")[-2:] == (0x1000, 0x2000)


def test_functions_as_constants(packed: Any, triton_gpu: StandIn) -> None:
    (x,) = tensors(1)

    def launch(function: Any = kernels.double) -> None:
        kernels.apply[(1,)](x, function, 3)

    packed(launch)
    launch()
    with pytest.raises(
        KernelNotInPack, match="FUNCTION is the constant triple, in the pack the constant double"
    ):
        launch(triple)
    assert triton_gpu.launch_count == 1


@triton.jit
def triple(x):  # type: ignore[no-untyped-def]
    return x * 3


def test_hooks_grids_and_kernels_as_objects(packed: Any, triton_gpu: StandIn) -> None:
    x, y, z = tensors(3)
    seen = []

    def launch() -> Any:
        return kernels.add[lambda meta: (meta["n"] // meta["BLOCK"],)](x, y, z, 64, BLOCK=32)

    packed(launch, more=[{"symbol": "add_kernel"}])
    kernels.add.add_pre_run_hook(lambda *args, **kwargs: seen.append("before"))
    knobs = triton.knobs.runtime
    enter = lambda metadata: seen.append(("enter", metadata.get()["name"]))  # noqa: E731
    leave = lambda metadata: seen.append(("leave", metadata.get()["name"]))  # noqa: E731
    knobs.launch_enter_hook.add(enter) if hasattr(knobs.launch_enter_hook, "add") else None
    knobs.launch_exit_hook.add(leave) if hasattr(knobs.launch_exit_hook, "add") else None
    try:
        kernel = launch()
    finally:
        if hasattr(knobs.launch_enter_hook, "remove"):
            knobs.launch_enter_hook.remove(enter)
            knobs.launch_exit_hook.remove(leave)
    assert seen == ["before", ("enter", "add_kernel"), ("leave", "add_kernel")]
    kernel[(7, 1, 1)](x, y, z, 64, 32)
    assert [record.grid for record in triton_gpu.launches()] == [(2, 1, 1), (7, 1, 1)]
    assert kernel.name == "add_kernel" and kernel.n_regs == 40 and kernel.n_spills == 4
    assert isinstance(kernel, triton.compiler.CompiledKernel)
    assert kernel.asm["cubin"].startswith(b"\x7fELF")
    with pytest.raises(KeyError):
        kernel.asm["ttgir"]


@pytest.mark.parametrize("collects", [True, False])
def test_collection_of_garbage_is_as_it_was(packed: Any, triton_gpu: StandIn, collects: bool) -> None:
    """Also after a launch that no pack has."""
    x, y, z = tensors(3)
    packed(lambda: kernels.add[(1,)](x, y, z, 60, BLOCK=32))
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        kernels.add[(1,)](x, y, z, 60, BLOCK=32)
        assert gc.isenabled() == collects
        with pytest.raises(KernelNotInPack):
            kernels.add[(1,)](x, y, z, 60, BLOCK=64)
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()


def test_an_empty_grid_launches_nothing(packed: Any, triton_gpu: StandIn) -> None:
    x, y, z = tensors(3)

    def launch(*grid: int) -> None:
        kernels.add[grid](x, y, z, 60, BLOCK=32)

    packed(lambda: launch(1))
    for grid in ((0,), (1, 0), (1, 1, 0), (-1,)):
        launch(*grid)
    assert triton_gpu.launch_count == 0
    with pytest.raises(OverflowError, match=r"grid\[0\] is 2147483648: no int32"):
        launch(1 << 31)


def test_two_devices(packed: Any, triton_gpu: StandIn) -> None:
    x, y, z = tensors(3)

    def launch() -> None:
        kernels.add[(1,)](x, y, z, 60, BLOCK=32)

    packed(launch)
    launch()
    triton_gpu.set_current(1)
    launch()
    assert [(record.device, record.stream) for record in triton_gpu.launches()] == [
        (0, STREAM),
        (1, STREAM + 1),
    ]


def test_the_first_launch_in_a_capture(packed: Any, triton_gpu: StandIn) -> None:
    x, y, z = tensors(3)

    def launch() -> None:
        kernels.add[(1,)](x, y, z, 60, BLOCK=32)

    packed(launch)
    triton_gpu.capture(True)
    launch()
    assert triton_gpu.launch_count == 1


def test_memory_that_kernels_do_not_reach(packed: Any, triton_gpu: StandIn) -> None:
    x, y, z = tensors(3)

    def launch() -> None:
        kernels.add[(1,)](x, y, z, 60, BLOCK=32)

    packed(launch, more=[{"symbol": "add_kernel"}])
    triton_gpu.unreachable(y.data_ptr(), y.data_ptr() + 1)
    with pytest.raises(
        ValueError, match=r"add_kernel, argument Y: .*cannot be accessed from Triton \(cpu tensor\?\)"
    ):
        launch()
    assert triton_gpu.launch_count == 0


def test_a_driver_that_fails(packed: Any, triton_gpu: StandIn) -> None:
    x, y, z = tensors(3)

    def launch() -> None:
        kernels.add[(1,)](x, y, z, 60, BLOCK=32)

    packed(launch, more=[{"symbol": "add_kernel"}])
    triton_gpu.fail("cuLibraryLoadData", 200)
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_IMAGE"):
        launch()
    triton_gpu.fail("cuLaunchKernel", 1)
    with pytest.raises(
        DriverError, match=r"launching a grid of 1 x 1 x 1 on device 0 .kernel add_kernel: 128 threads"
    ):
        launch()
    triton_gpu.fail("", 0)
    launch()
    assert triton_gpu.launch_count == 1


def test_threads_that_launch_at_once(packed: Any, triton_gpu: StandIn) -> None:
    x, y, z = tensors(3)
    failed: list[BaseException] = []

    def launch() -> None:
        kernels.add[(1,)](x, y, z, 60, BLOCK=32)

    def in_thread() -> None:
        try:
            triton_gpu.set_current(0)
            launch()
        except BaseException as error:
            failed.append(error)

    packed(launch)
    triton_gpu.hold("cuLibraryLoadData")
    threads = [threading.Thread(target=in_thread) for _ in range(4)]
    for thread in threads:
        thread.start()
    triton_gpu.hold(None)
    for thread in threads:
        thread.join()
    assert not failed and triton_gpu.launch_count == 4


def test_a_thread_without_a_context(packed: Any, triton_gpu: StandIn) -> None:
    x, y, z = tensors(3)

    def launch() -> None:
        kernels.add[(1,)](x, y, z, 60, BLOCK=32)

    packed(launch)
    launch()
    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    assert [record.device for record in triton_gpu.launches()] == [0, 0]


# ---- What no pack has ----


def test_a_miss_says_what_does_not_fit(packed: Any, triton_gpu: StandIn) -> None:
    x, y, z = tensors(3)

    def launch(x: torch.Tensor = x, n: Any = 64, block: int = 32, **options: Any) -> None:
        kernels.add[(1,)](x, y, z, n, BLOCK=block, **options)

    packed(launch)
    launch()
    name = (
        "tests.triton_packs.run_kernels:add: none of 1 variants fits. The nearest, of pack mykernels for sm90"
    )
    with pytest.raises(
        KernelNotInPack, match=f"{name}, differs: BLOCK is the constant 64, in the pack the constant 32"
    ):
        launch(block=64)
    with pytest.raises(KernelNotInPack, match=r"differs: X is .fp32, in the pack .fp32 divisible by 16"):
        launch(x[1:])
    with pytest.raises(KernelNotInPack, match="n is i32, in the pack i32 divisible by 16"):
        launch(n=63)
    with pytest.raises(KernelNotInPack, match="the option num_warps is 2, in the pack not given"):
        launch(num_warps=2)
    with pytest.raises(
        KernelNotInPack,
        match=r"X is .fp16 divisible by 16, in the pack .fp32 .*; n is .*Record this call too",
    ):
        launch(x.half(), n=1)
    assert triton_gpu.launch_count == 1
    assert len(liger_aot.triton.status().missed) == 5


def test_a_function_that_no_pack_has(packed: Any, triton_gpu: StandIn) -> None:
    x, y, z = tensors(3)
    why = {
        "function": "tests.triton_packs.run_kernels:apply",
        "why": "it reads a global that another GPU sets",
    }
    packed(lambda: kernels.add[(1,)](x, y, z, 60, BLOCK=32), left_out=[why])
    with pytest.raises(
        KernelNotInPack, match="run_kernels:tuples: no pack has the function; packs in use: mykernels"
    ):
        kernels.tuples[(1,)](kernels.Pair(x, 5), (3.5, (7, 8), 1), 9)
    with pytest.raises(
        KernelNotInPack, match="mykernels for sm90 leaves it out: it reads a global that another GPU"
    ):
        kernels.apply[(1,)](x, kernels.double, 3)


def test_a_function_whose_source_changed(packed: Any, triton_gpu: StandIn) -> None:
    x, y, z = tensors(3)
    source = kernels.add.src

    def launch() -> None:
        kernels.add[(1,)](x, y, z, 60, BLOCK=32)

    packed(launch)
    try:
        kernels.add._unsafe_update_src(source.replace("+ tl.load(Y", "- tl.load(Y"))
        with pytest.raises(
            KernelNotInPack, match="run_kernels:add: it has changed since pack mykernels for sm90"
        ):
            launch()
    finally:
        kernels.add._unsafe_update_src(source)
    launch()
    assert triton_gpu.launch_count == 1


@pytest.mark.parametrize("sources", [True, False])
def test_whose_hash_is_taken(packed: Any, triton_gpu: StandIn, sources: bool) -> None:
    """Triton's only where the pack does not say what its functions are told by."""
    x, y, z = tensors(3)
    packed(lambda: kernels.add[(1,)](x, y, z, 60, BLOCK=32), sources=sources)
    kernels.add[(1,)](x, y, z, 60, BLOCK=32)
    assert (kernels.add.hash is None) == sources and triton_gpu.launch_count == 1


@pytest.mark.parametrize("sources", [True, False])
@pytest.mark.parametrize("repeated", [True, False])
def test_a_global_is_compared_at_each_launch(
    packed: Any, triton_gpu: StandIn, monkeypatch: pytest.MonkeyPatch, sources: bool, repeated: bool
) -> None:
    """Also where Triton hashes the function later, when the global is another."""
    (x,) = tensors(1)
    hooks = [] if repeated else [lambda *arguments, **named: None]  # Triton's own run is taken then
    monkeypatch.setattr(scaled, "pre_run_hooks", hooks)
    packed(lambda: scaled[(1,)](x), sources=sources)
    scaled[(1,)](x)
    scaled[(1,)](x)
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "SCALE", tl.constexpr(3))
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=r"SCALE has changed since we compiled this kernel, from .*2.* to .*3"
            ):
                scaled[(1,)](x)
            _ = scaled.cache_key
    assert triton_gpu.launch_count == 2


def test_a_kernel_that_is_compiled_has_a_hash_of_its_own(
    packed: Any, triton_gpu: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    (x,) = tensors(1)
    key = scaled.cache_key
    packed(lambda: scaled[(1,)](x), missing="compile")
    scaled[(1,)](x)
    assert scaled.hash is None
    keys = []

    def compiled(src: Any, **more: Any) -> Any:
        keys.append(src.fn.cache_key)
        raise KeyboardInterrupt

    monkeypatch.setattr(scaled, "compile", compiled)
    with pytest.raises(KeyboardInterrupt):
        scaled[(1,)](x.half())
    assert keys == [key]


@pytest.mark.parametrize("missing", ["warn", "compile"])
def test_what_is_missing_is_compiled(
    packed: Any, triton_gpu: StandIn, monkeypatch: pytest.MonkeyPatch, missing: str, recwarn: Any
) -> None:
    """By Triton itself, for the target that this driver names; launched without its launcher."""
    x, y, z = tensors(3)
    asked = []

    def compiled(src: Any, target: Any = None, options: Any = None, **more: Any) -> Any:
        asked.append((src.fn.__name__, target.arch, options["num_warps"]))
        return "compiled"

    packed(lambda: kernels.add[(1,)](x, y, z, 60, BLOCK=32), missing=missing)
    assert kernels.add.device_caches[0]  # made by this driver
    kernels.add.compile = compiled
    for _ in range(2):
        kernels.add.device_caches[0][0].clear()
        assert kernels.add.warmup(x, y, z, 60, BLOCK=64, grid=(1,)) == "compiled"
    assert asked == [("add", 90, 4)] * 2
    said = [str(warning.message) for warning in recwarn if issubclass(warning.category, RuntimeWarning)]
    assert len(said) == (missing == "warn")
    assert all("BLOCK is the constant 64" in text and "Triton compiles it now" in text for text in said)


def test_after_stop_triton_is_as_before(packed: Any, triton_gpu: StandIn) -> None:
    x, y, z = tensors(3)
    packed(lambda: kernels.add[(1,)](x, y, z, 60, BLOCK=32))
    liger_aot.triton.stop()
    asked = []
    kernels.add.compile = lambda *args, **kwargs: asked.append(args)
    liger_aot.triton.use(missing="compile")
    kernels.add.device_caches.clear()
    assert liger_aot.triton.status().missing == "compile"
    liger_aot.triton.stop()
    assert liger_aot.triton.status() == (None, (), 0, (), ())


# ---- Which packs ----


def test_packs_by_name(packed: Any, triton_gpu: StandIn, tmp_path: Path) -> None:
    x, y, z = tensors(3)
    packed(lambda: kernels.add[(1,)](x, y, z, 60, BLOCK=32))
    with pytest.raises(
        PackNotFound, match="no pack 'others' of Triton kernels is installed; installed: mykernels"
    ):
        liger_aot.triton.use("others")
    with pytest.raises(ValueError, match="missing must be 'error', 'warn' or 'compile', got 'maybe'"):
        liger_aot.triton.use(missing="maybe")
    liger_aot.triton.use("mykernels")
    kernels.add[(1,)](x, y, z, 60, BLOCK=32)
    assert triton_gpu.launch_count == 1


@pytest.mark.parametrize("named", [False, True])
def test_a_pack_of_another_triton(packed: Any, triton_gpu: StandIn, named: bool) -> None:
    x, y, z = tensors(3)
    packed(lambda: kernels.add[(1,)](x, y, z, 60, BLOCK=32), toolchain={"triton": "3.5.1"})
    if named:
        liger_aot.triton.use("mykernels")
    error = PackNotFound if named else KernelNotInPack
    with pytest.raises(error, match=r"pack mykernels for sm90 was built with Triton 3.5.1, and 3.* runs"):
        kernels.add[(1,)](x, y, z, 60, BLOCK=32)


def test_a_pack_for_another_gpu(packed: Any, triton_gpu: StandIn) -> None:
    x, y, z = tensors(3)
    packed(lambda: kernels.add[(1,)](x, y, z, 60, BLOCK=32), arch="sm80")
    with pytest.raises(
        KernelNotInPack, match="pack mykernels is installed for sm80, none of which serves NVIDIA H200"
    ):
        kernels.add[(1,)](x, y, z, 60, BLOCK=32)


def test_a_damaged_binary(packed: Any, triton_gpu: StandIn) -> None:
    x, y, z = tensors(3)

    def launch() -> None:
        kernels.add[(1,)](x, y, z, 60, BLOCK=32)

    folder = packed(launch)
    data = bytearray((folder / "f0.bin").read_bytes())
    data[-1] ^= 1
    (folder / "f0.bin").write_bytes(data)
    with pytest.raises(PackDamaged, match="sha256"):
        launch()
    assert triton_gpu.launch_count == 0


# ---- Tuners ----


def winner(key: tuple[Any, ...], block: int, warps: int, **more: Any) -> dict[str, Any]:
    config = triton.Config({"BLOCK": block}, num_warps=warps)
    said = {"kwargs": {"BLOCK": block}, "num_warps": warps, "num_stages": 3, "num_ctas": 1}
    return {"key": list(key), "config": said, "text": str(config), "on": "cuda-90", "timed": True, **more}


@pytest.fixture
def tuned(packed: Any, triton_gpu: StandIn) -> Callable[..., None]:
    """A pack that has choices for n = 64 (128, 4 warps) and n = 4096 (256, 8 warps), and the kernels of both."""
    (x,) = tensors(1)
    kernels.tuned.cache = {}

    def install(missing: str) -> None:
        plain = kernels.tuned.fn
        dtype = str(x.dtype)
        winners = [winner((64, dtype), 128, 4), winner((4096, dtype), 256, 8)]
        name = "tests.triton_packs.run_kernels:tuned"
        launches = [
            lambda: plain[(1,)](x, 64, BLOCK=128, num_warps=4, num_stages=3, num_ctas=1),
            lambda: plain[(1,)](x, 4096, BLOCK=256, num_warps=8, num_stages=3, num_ctas=1),
        ]
        more = [{"symbol": "small"}, {"symbol": "large", "num_warps": 8}]
        packed(*launches, missing=missing, more=more, tuners={name: [{"keys": ["n"], "winners": winners}]})

    return install


def test_winners(tuned: Any, triton_gpu: StandIn) -> None:
    (x,) = tensors(1)
    tuned("error")
    for n in (64, 4096, 64):
        kernels.tuned[(1,)](x, n)
    assert [record.name for record in triton_gpu.launches()] == ["small", "large", "small"]
    wanted_text = (
        r"n.\] = \(1024, 'torch.float32'\); the nearest that it has is for \(4096, 'torch.float32'\)"
    )
    with pytest.raises(KernelNotInPack, match=wanted_text):
        kernels.tuned[(1,)](x, 1024)


def test_a_size_that_was_not_tuned_takes_the_nearest_choice(tuned: Any, triton_gpu: StandIn) -> None:
    (x,) = tensors(1)
    tuned("warn")
    with pytest.warns(RuntimeWarning, match=r"it runs with that for \(4096, 'torch.float32'\), BLOCK: 256"):
        kernels.tuned[(1,)](x, 1024)
    kernels.tuned[(1,)](x, 1024)
    assert [record.name for record in triton_gpu.launches()] == ["large", "large"]


def test_compile_tunes_what_was_not_tuned(
    tuned: Any, triton_gpu: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    (x,) = tensors(1)
    tuned("compile")
    tried = []

    def bench(self: Any, *args: Any, config: Any, **meta: Any) -> float:
        tried.append(config.kwargs["BLOCK"])
        return abs(config.kwargs["BLOCK"] - 250)

    monkeypatch.setattr(type(kernels.tuned), "_bench", bench)
    kernels.tuned[(1,)](x, 1024)
    assert tried == [64, 128, 256]
    assert [record.name for record in triton_gpu.launches()] == ["large"]
    liger_aot.triton.stop()
    assert type(kernels.tuned.cache) is dict
