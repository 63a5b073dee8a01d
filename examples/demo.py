"""What the wheel does where there is no Triton and no compiler: ``make demo`` runs it. Needs torch and liger-aot."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import PackNotFound
from liger_aot.explanation import Choice, columns, explain

EPS = 1e-6
SHAPES = [(4096, 512), (4096, 4096), (512, 16384)]


def main() -> None:
    torch.manual_seed(0)
    print(f"liger-aot {liger_aot.__version__}, torch {torch.__version__}")
    print(f"Triton:     {'installed' if find_spec('triton') else 'not installed'}")
    print(f"C compiler: {which('cc') or which('gcc') or 'none on PATH'}")
    print(f"binaries:   {', '.join(liger_aot.archs()) or 'none'}")

    title("RMSNorm on the CPU: the plain-torch reference, against fp64")
    compare("cpu", [(64, 4096), (7, 5000)])

    title("What a call would run on each architecture")
    print(columns([["rows x columns", "arch", "forward", "backward"], *choices()]))

    if not torch.cuda.is_available():
        on_the_emulator()
        return
    title("On this machine's GPU")
    try:
        start = time.perf_counter()
        liger_aot.load("rmsnorm").preload()
    except PackNotFound as error:
        print(error)
        return
    took = (time.perf_counter() - start) * 1e3
    print(f"{torch.cuda.get_device_name()}: every RMSNorm binary loaded in {took:.0f} ms\n")
    compare("cuda", [(64, 4096), (7, 5000), (64, 131072)])
    print()
    race([(1 << 16, 1024), (1 << 14, 4096), (1 << 12, 16384)])


def on_the_emulator() -> None:
    """Machine code of the wheel on the CPU, instruction by instruction; the emulator is this checkout's."""
    title("Without a GPU: gfx942 (MI300) machine code of the wheel, executed on the CPU")
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from examples import emulated

    if not emulated.run():
        raise SystemExit("error: a result is not within the tolerance of its profile")


def choices() -> list[list[str]]:
    """The binaries that dispatch takes for bf16, an architecture a line; what they are is read back from them."""
    lines = []
    for rows, n in SHAPES:
        for arch in liger_aot.archs():
            found = explain("rmsnorm", arch=arch, shape=(rows, n), dtype="bf16")
            cells = [f"{form(c)}, {c.num_warps} warps, {c.registers} registers" for c in found]
            lines.append([f"{rows} x {n}", arch, *cells])
    return lines


def form(choice: Choice) -> str:
    """Which of the kernel's device functions: the second part of its name."""
    return choice.variant.split("-")[1]


def title(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


def compare(device: str, shapes: list[tuple[int, int]]) -> None:
    """Forward and backward against fp64: the largest error as a fraction of the largest value."""
    print(f"{'rows x columns':>14}  dtype     {'y':>8}  {'dx':>8}  {'dweight':>8}")
    rmsnorm = liger_aot.load("rmsnorm")
    for rows, n in shapes:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            given = [torch.randn(size, dtype=dtype, device=device) for size in ((rows, n), (n,), (rows, n))]
            got = gradients(lambda x, w: rmsnorm(x, w, eps=EPS), *given)
            exact = gradients(formula, *(t.double() for t in given))
            errors = [
                float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(got, exact, strict=True)
            ]
            name = str(dtype).removeprefix("torch.")
            print(f"{f'{rows} x {n}':>14}  {name:<8}  {errors[0]:8.1e}  {errors[1]:8.1e}  {errors[2]:8.1e}")


def formula(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def gradients(
    function: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, dy: Tensor
) -> list[Tensor]:
    """y, dx and dweight."""
    x, weight = x.requires_grad_(), weight.requires_grad_()
    y = function(x, weight)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), dy)]


def race(shapes: list[tuple[int, int]]) -> None:
    """Milliseconds and bandwidth beside torch's own, bf16, forward; x read once and y written once are counted."""
    print(f"{'rows x columns':>14}  {'liger-aot':>20}  {'torch F.rms_norm':>20}")
    rmsnorm = liger_aot.load("rmsnorm")
    for rows, n in shapes:
        x = torch.randn(rows, n, dtype=torch.bfloat16, device="cuda")
        weight = torch.randn(n, dtype=torch.bfloat16, device="cuda")
        ours = milliseconds(partial(rmsnorm, x, weight, eps=EPS))
        theirs = milliseconds(partial(torch.nn.functional.rms_norm, x, weight.shape, weight, EPS))
        cells = [f"{ms:.3f} ms {2 * x.nbytes / ms / 1e6:6.0f} GB/s" for ms in (ours, theirs)]
        print(f"{f'{rows} x {n}':>14}  {cells[0]:>20}  {cells[1]:>20}")


def milliseconds(call: Callable[[], object], repeats: int = 50) -> float:
    """Mean time of ``call`` on the GPU."""
    for _ in range(10):
        call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / repeats


if __name__ == "__main__":
    main()
