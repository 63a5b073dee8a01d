"""The project's program: calls the kernel as it does in service, and compares it with plain torch.

python serve.py            on the GPU
"""

from __future__ import annotations

import sys

import torch
from swiglu_kernels import swiglu


def reference(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def main(device: str) -> None:
    """Every dtype and width that is served: a width that 16 does not divide is another binary."""
    for dtype in (torch.bfloat16, torch.float32):
        for columns in (1024, 1000):
            x = torch.randn(4, 2 * columns, generator=torch.Generator().manual_seed(0)).to(device, dtype)
            y = swiglu(x)
            error = (y.double() - reference(x)).abs().max().item()
            print(f"swiglu {str(dtype).removeprefix('torch.')} 4 x {columns}: largest error {error:.1e}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cuda")
