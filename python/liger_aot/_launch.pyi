"""Loads ahead-of-time compiled kernels into a CUDA or HIP driver and launches them (a C extension).

Safe to use from any number of threads; in a forked process, only what was opened there. Values are checked strictly: an
int is an `int`, not a numpy scalar.
"""

from collections.abc import Callable
from typing import Any, final

@final
class Driver:
    """An opened and initialised GPU driver.

    Args:
        backend: "cuda" or "hip".
        library: name or path of the driver library, as for dlopen ("libcuda.so.1"). For HIP, the path of the
            libamdhip64 that torch has mapped: a second copy in one process would not know torch's streams.

    Raises:
        liger_aot.errors.DriverNotFound: the library cannot be opened or lacks a function (CUDA needs 12.0).
        liger_aot.errors.DriverError: the driver does not initialise.
        ValueError: another backend.
    """

    @property
    def backend(self) -> str: ...
    @property
    def library(self) -> str: ...
    @property
    def version(self) -> int:
        """What cuDriverGetVersion or hipRuntimeGetVersion says: 12040 is CUDA 12.4."""

    @property
    def device_count(self) -> int:
        """The devices that this process sees."""

    def __new__(cls, backend: str, library: str) -> Driver: ...
    def load(
        self,
        image: bytes,
        name: str,
        /,
        *,
        threads: int,
        shared: int,
        signature: str,
        cooperative: bool = False,
        pdl: bool = False,
    ) -> Kernel:
        """Load one kernel of a compiled image: a cubin, PTX text or an hsaco.

        CUDA reads the image here, once for all devices. HIP reads it when a device first needs it, so that
        `Kernel.prepare` is what finds a damaged hsaco. Neither is told how long the image is: check a hash
        before.

        Args:
            threads: threads a block, 1 to 1024.
            shared: bytes of dynamic shared memory a block.
            signature: one letter an argument: p pointer, i int32, l int64, f float32, 1 to 5 a tensor map of so
                many dimensions; at most 64. What Triton adds follows by itself: a tensor map's sizes (int32) and
                strides (int64), and in the end two scratch pointers, as null.
            cooperative: launch so that all blocks are resident at once, or not at all.
            pdl: programmatic dependent launch: blocks may start before the kernel before them in the stream has
                ended, and every block must wait for that kernel itself, with griddepcontrol.wait. Not together with
                `cooperative`. On HIP, and on CUDA before 12.3, whose graphs can't capture it, the launch is like any
                other.

        Raises:
            liger_aot.errors.DriverError: the driver refuses the image or has no kernel of that name in it.
            liger_aot.errors.ForkedProcess: this process was forked after the driver had been opened; so do
                `Kernel.prepare` and `Kernel.launch`.
            TypeError, ValueError: an argument is of the wrong type or out of range, or the signature's parameters
                are not the kernel's own. The driver says their sizes from CUDA 12.4 on and their number from 13.2 on;
                HIP's says neither.
        """

    def tensor_map(
        self,
        address: int,
        dtype: str,
        sizes: tuple[int, ...],
        strides: tuple[int, ...],
        box: tuple[int, ...],
        swizzle: int,
        /,
    ) -> TensorMap:
        """Encode where the tiles of a tensor lie (cuTensorMapEncodeTiled). What a tile has outside the tensor reads as
        zero and is not written. The map holds the address alone: it is good as long as the memory is.

        Args:
            address: of the first element, a multiple of 16.
            dtype: "bf16", "fp16" or "fp32".
            sizes: elements, the outermost dimension first; one to five, at most 2**31 - 1.
            strides: in elements; the last is 1, the others are multiples of 16 bytes, of less than 2**40.
            box: elements of a tile in each dimension, at most 256.
            swizzle: how shared memory is swizzled: 0 not, 1 to 3 by 32, 64, 128 bytes.

        Raises:
            liger_aot.errors.DriverError: the driver refuses.
            TypeError, ValueError, OverflowError: an argument is wrong, or the driver is HIP's, which has no such maps.
        """

    def binary(self, image: bytes, name: str, /, *, shared: int) -> Binary:
        """Load one kernel of a compiled image whose parameters are the caller's business: a `TritonLauncher` launches
        it. Unlike `load`, also while a graph is captured.

        Args:
            shared: bytes of dynamic shared memory a block that launches will ask for.

        Raises:
            liger_aot.errors.DriverError, liger_aot.errors.ForkedProcess: as `load`.
        """

    def call_key(
        self,
        places: dict[str, int],
        flags: bytes,
        defaults: tuple[Any, ...],
        dtype_class: type,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        /,
    ) -> tuple[bytes, tuple[Any, ...]] | None:
        """What Triton's choice of a kernel for a call depends on: calls of a function with equal keys have the same.

        Args:
            places: numbers of parameters by name and, after them, of the compiler's options.
            flags: a byte for each parameter: 1 where it is a constant, plus 2 where it has a default.
            defaults: of all parameters; not looked at where there is none.
            dtype_class: Triton's own; its values are told apart by their address, so keep them alive.

        Returns:
            The key and the values by parameter; None where an argument is of a kind that only Triton can judge, or the
            arguments do not fit.
        """

    def triton_launcher(
        self,
        name: str,
        program: str,
        /,
        device: int,
        threads: int,
        shared: int,
        arguments: tuple[str, ...],
        maps: tuple[tuple[int, int, int, int, int, tuple[int, ...]], ...],
        cluster: int = 1,
        cooperative: bool = False,
        pdl: bool = False,
        scratch: Callable[[int, int, int, int], tuple[Any, Any]] | None = None,
    ) -> TritonLauncher:
        """What launches a kernel for Triton.

        Args:
            name: the kernel's, for errors.
            program: how arguments become parameters, one letter each: p a pointer (a tensor, an int, None); b h i l
                integers of 8 to 64 bits, B H I L unsigned; e y f d fp16, bf16, fp32, fp64; _ a constant; ( ) around a
                tuple's; D and two digits a tensor descriptor that is taken apart, of so many dimensions and flags; M
                and a digit one that is encoded as a tensor map. Two scratch pointers follow.
            device: on which it launches, whatever context is current.
            threads, shared: of a block.
            arguments: their names, for errors.
            maps: for each M, (swizzle, bytes an element, CU_TENSOR_MAP_DATA_TYPE_*, doubled, mend, box with the
                outermost dimension first); doubled is 1 where a map has twice the last size, 2 where a parameter has
                it, too; mend is 1 to take away a bit that drivers up to CUDA 13.1 set wrongly for tensors of less than
                128 KiB.
            cluster: blocks of a cluster, 1 to 16; the grid counts clusters.
            cooperative, pdl: as in `load`; here they may go together.
            scratch: called with the grid and the stream before each launch, for the two buffers.

        Raises:
            TypeError, ValueError: an argument is wrong, or the hip driver has no such launch.
        """

@final
class Binary:
    """One kernel of a loaded image; `Driver.binary` makes them. It must outlive its launches."""

    @property
    def name(self) -> str: ...
    def prepare(self, device: int, /) -> tuple[int, int, int, int]:
        """Load it onto a device, once: (function, registers a thread, local bytes a thread, most threads a block)."""

@final
class TritonLauncher:
    """Launches one kernel as Triton's own launchers do; `Driver.triton_launcher` makes them."""

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> int: ...
    def launch(
        self,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        stream: int,
        function: int,
        packed_metadata: Any,
        launch_metadata: Any,
        enter_hook: Callable[[Any], Any] | None,
        exit_hook: Callable[[Any], Any] | None,
        /,
        *args: Any,
    ) -> None:
        """Launch `function`, what `Binary.prepare` of the device said, between the two hooks. A grid with a number
        below 1 launches nothing.

        Raises:
            liger_aot.errors.DriverError: the driver refuses.
            TypeError, OverflowError: an argument is not of its parameter's type; names the kernel and the argument.
            ValueError: a tensor lies in memory that kernels don't reach.
        """

@final
class TensorMap:
    """Where the tiles of a tensor lie; `Driver.tensor_map` makes them. One may serve any number of launches."""

    @property
    def rank(self) -> int: ...

@final
class Kernel:
    """One kernel of a loaded image; `Driver.load` makes them.

    It is unloaded when freed, so it must outlive its launches and every graph that captured one.
    """

    @property
    def name(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def shared(self) -> int: ...
    @property
    def signature(self) -> str: ...
    @property
    def cooperative(self) -> bool: ...
    @property
    def pdl(self) -> bool: ...
    def prepare(self, device: int, /) -> None:
        """Do now what the first launch on `device` would do (load, opt in to shared memory), once.

        Needed before a stream capture, where loading is not allowed.

        Raises:
            liger_aot.errors.DriverError: the driver refuses; the next call tries again.
            ValueError: no such device.
        """

    def launch(
        self,
        device: int,
        stream: int,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        /,
        *args: int | float | TensorMap | None,
    ) -> None:
        """Launch on a stream of `device`, whatever device is current, and leave the current one as it was.

        Args:
            stream: the stream's address, 0 for the default stream.
            grid_x: blocks, 0 to 2**31 - 1; on HIP also fewer than 2**32 threads.
            grid_y, grid_z: blocks, 0 to 65535. A zero in the grid launches nothing.
            args: one value a letter of the signature: an address or None for p, an int for i and l, a float
                or int for f, which is rounded to float32 (beyond its range, to an infinity), a TensorMap for 1
                to 5.

        Raises:
            liger_aot.errors.DriverError: the driver refuses, or reports the failure of earlier work.
            TypeError: the number of arguments or the type of one; names its position, counted from 1.
            OverflowError: a number does not fit its type; names its position.
            ValueError: no such device, or a grid out of range.
        """

def tensor_rows(tensor: Any, /) -> tuple[int, int, int, int, int, int, int, int] | None:
    """A torch tensor as rows of contiguous elements, read through torch's DLPack exchange API (torch 2.10).

    Takes exact torch.Tensor and torch.nn.Parameter objects with plain storage. Torch's lazy conjugation bit, which only
    complex numbers have, does not show in what it returns.

    Returns:
        (address, device_type, device_index, dtype_code, dtype_bits, rows, columns, row_stride), or None where
        the tensor is not such rows: the last dimension is not contiguous, the others do not have one common
        stride (sizes of 1 do not count), it is a scalar, has no plain storage, is lazily negated or of another type; or
        torch is older. The types are DLPack's: device 1 CPU, 2 CUDA, 10 ROCm; dtype 0 int, 1 unsigned, 2 float,
        4 bfloat16, 6 bool. `columns` is the last size, `rows` the product of the others, `row_stride` in
        elements; it is `columns` where there is but one row, or no element.
    """

def traits(tensors: tuple[Any, ...], settings: tuple[Any, ...] = (), known: tuple[Any, ...] = (), /) -> int:
    """What a call must know of its arguments, in one look.

    Args:
        tensors: each None or a tensor.
        settings, known: given together or not at all: settings, and others that are known to be right.

    Returns:
        4 where a tensor is no exact torch.Tensor or torch.nn.Parameter with memory of its own, or without elements: a
        subclass, a wrapper of a transform (alive or dead), sparse, lazily negated, no tensor at all; every tensor of an
        older torch. Else the sum of 1 where a tensor requires a gradient, and 2 where the settings are not the very
        objects of ``known``.

    Raises:
        TypeError: an argument is no tuple.
    """

def layouts(tensors: tuple[Any, ...], /) -> tuple[Any, ...] | None:
    """How tensors lie in memory, each None or plain as ``traits`` has it.

    Returns:
        (key, *addresses): two keys are equal where the tensors' devices, dtypes, sizes and strides are; an address is 0
        for None. Torch's lazy conjugation bit does not show. None where one is not readable, or where 256
        words do not hold the key (three a tensor and two a dimension).

    Raises:
        TypeError: ``tensors`` is no tuple.
    """
