"""torch and Triton answer as if a named GPU were there: for recording, and for building, on machines without one.

Modules of kernels look at the GPU when they are imported, and choose functions and constants by it. Here they see the
GPU that a pack is for. No kernel runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from liger_aot.triton.targets import Device, Target, device, target

VARIABLE = "LIGER_AOT_RECORD_TARGET"
_UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
CUDA, HIP = "12.8", "6.4.43482"  # versions that a torch without them is said to be built for


class NamedTarget:
    """Triton's driver of a GPU that is not there: it says what the target is, and launches nothing."""

    def __init__(self, of: Target) -> None:
        self.target, self.device = of, device(of)
        self.utils = SimpleNamespace(
            get_device_properties=lambda index: triton_properties(self.target, self.device),
            load_binary=self._no_launch,
        )
        self.launcher_cls = self._no_launch

    @classmethod
    def is_active(cls) -> bool:
        return True

    def _no_launch(self, *arguments: Any) -> Any:
        raise RuntimeError(f"no kernel runs where a GPU ({self.target.profile}) is only named")

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(*self.target)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, index: int) -> None:
        pass

    def get_current_stream(self, index: int | None = None) -> int:
        return 0

    def get_device_capability(self, index: int = 0) -> tuple[int, int]:
        return capability(self.target)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        import torch

        return torch.cuda

    def get_benchmarker(self) -> Callable[..., Any]:
        return lambda call, quantiles=(0.5,), **_: [0.0 for _ in quantiles]

    def get_empty_cache_for_benchmark(self) -> Any:
        import torch

        return torch.empty(1, dtype=torch.int)

    def clear_cache(self, cache: Any) -> None:
        pass

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


def capability(of: Target) -> tuple[int, int]:
    """What ``torch.cuda.get_device_capability`` says: of gfx942 (9, 4)."""
    if isinstance(of.arch, int):
        return divmod(of.arch, 10)
    digits = of.arch.removeprefix("gfx")
    return int(digits[:-2]), int(digits[-2], 16)


def triton_properties(of: Target, chip: Device) -> dict[str, Any]:
    """``driver.active.utils.get_device_properties``."""
    return {
        "max_shared_mem": chip.shared,
        "max_num_regs": 65536,
        "multiprocessor_count": chip.multiprocessors,
        "warpSize": of.warp_size,
        "sm_clock_rate": 1_700_000,
        "mem_clock_rate": 2_600_000,
        "mem_bus_width": 5120,
        "arch": of.arch,
    }


def torch_properties(of: Target, chip: Device) -> SimpleNamespace:
    """``torch.cuda.get_device_properties``."""
    major, minor = capability(of)
    return SimpleNamespace(
        name=chip.name,
        major=major,
        minor=minor,
        total_memory=chip.memory << 30,
        multi_processor_count=chip.multiprocessors,
        max_threads_per_multi_processor=chip.threads_multiprocessor,
        max_threads_per_block=1024,
        warp_size=of.warp_size,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=min(chip.shared, 49152 if of.backend == "cuda" else 65536),
        shared_memory_per_block_optin=chip.shared,
        shared_memory_per_multiprocessor=chip.shared_multiprocessor,
        L2_cache_size=chip.l2 << 20,
        gcnArchName=f"{of.arch}:sramecc+:xnack-" if of.backend == "hip" else chip.name,
        is_integrated=0,
        is_multi_gpu_board=0,
    )


def stand_in(of: Target) -> None:
    """Have torch.cuda answer for a GPU of ``of``, in this process, from now on."""
    import torch

    chip = device(of)
    stream = SimpleNamespace(cuda_stream=0, device=torch.device("cuda", 0), synchronize=_nothing())
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": _nothing(),
        "_lazy_init": _nothing(),
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": _nothing(),
        "synchronize": _nothing(),
        "empty_cache": _nothing(),
        "get_device_capability": lambda *_: capability(of),
        "get_device_name": lambda *_: chip.name,
        "get_device_properties": lambda *_: torch_properties(of, chip),
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda *_: (chip.memory << 30, chip.memory << 30),
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": _nothing(),
        "manual_seed": _nothing(),
        "manual_seed_all": _nothing(),
        "device": _AnyDevice,
        "device_of": _AnyDevice,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    is_hip = of.backend == "hip"
    cuda, hip = (
        torch.version.cuda,
        torch.version.hip,
    )  # its own are kept: torchvision compares them with what it is for
    torch.version.cuda, torch.version.hip = (None, hip or HIP) if is_hip else (cuda or CUDA, None)
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    if accelerator := getattr(torch, "accelerator", None):
        accelerator.is_available = lambda: True
        accelerator.device_count = lambda: 1
        accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
        accelerator.current_device_index = lambda: 0
        accelerator.set_device_index = _nothing()
        accelerator.device_index = _AnyDevice
        accelerator.synchronize = _nothing()


class _AnyDevice:
    """``with torch.cuda.device(...)``."""

    def __init__(self, index: Any = None) -> None:
        self.idx = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


def _nothing() -> Callable[..., None]:
    """A function that does nothing, another one at each call: torch.compile has rules by function."""
    return lambda *arguments, **named: None


def set_driver(of: Target) -> None:
    """Have Triton compile for ``of`` and launch nothing."""
    from triton.runtime import driver

    driver.set_active(NamedTarget(of))


def start() -> None:
    """At startup, after torch has been imported: a recording's target (``LIGER_AOT_RECORD_TARGET``)."""
    of = target(os.environ[VARIABLE])
    stand_in(of)
    _on_the_cpu()


def _on_the_cpu() -> None:
    """Tensors that are asked for on a GPU lie on the CPU and say that they are on the GPU."""
    import torch
    from torch.overrides import TorchFunctionMode

    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    is_cuda, of_tensor = torch.Tensor.is_cuda.__get__, torch.Tensor.device.__get__  # type: ignore[attr-defined]

    def there(value: Any) -> Any:
        if isinstance(value, torch.device):
            return cpu if value.type == "cuda" else value
        if isinstance(value, str) and value.partition(":")[0] == "cuda":
            return cpu
        return value

    class OnTheCPU(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, arguments: Any = (), named: dict[str, Any] | None = None
        ) -> Any:
            named = dict(named or {})
            if function == is_cuda:  # a new object each time that it is asked for
                return True
            if function == of_tensor:
                found = function(*arguments)
                return gpu if found.type == "cpu" else found
            name = getattr(function, "__name__", "")
            if name in ("cuda", "pin_memory"):
                return arguments[0]
            if name == "get_device":
                return 0
            if named.get("device") is not None:
                named["device"] = there(named["device"])
            if name == "to":
                arguments = (arguments[0], *map(there, arguments[1:]))
            if named.pop("pin_memory", False):
                named["pin_memory"] = False
            made = function(*arguments, **named)
            # No kernel writes it: sizes that are read from it are the same in each run.
            if name in _UNWRITTEN:
                made.zero_()
            return made

    mode: Any = OnTheCPU()
    mode.__enter__()
    # torch takes a mode off while it runs what the mode handles, backward() too, in which functions of the program run.
    engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run_backward(*arguments: Any, **named: Any) -> Any:
        with mode:
            return engine(*arguments, **named)

    torch.autograd._engine_run_backward = run_backward  # type: ignore[attr-defined]
