"""A project's kernel, as it stands: nothing in it knows of packs."""

import torch
import triton
import triton.language as tl


@triton.autotune(
    [triton.Config({"BLOCK": block}, num_warps=warps) for block, warps in ((256, 2), (512, 4), (1024, 4))],
    key=["columns"],
)
@triton.jit
def swiglu_kernel(OUT, GATE_UP, columns, BLOCK: tl.constexpr):
    """A row's blocks: silu(gate) * up, of gate and up side by side."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    gate = tl.load(GATE_UP + row * 2 * columns + at, mask=inside).to(tl.float32)
    up = tl.load(GATE_UP + row * 2 * columns + columns + at, mask=inside).to(tl.float32)
    tl.store(OUT + row * columns + at, (gate * tl.sigmoid(gate) * up).to(OUT.dtype.element_ty), mask=inside)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of a tensor [rows, 2 * columns] that holds both."""
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, columns, dtype=gate_up.dtype, device=gate_up.device)
    swiglu_kernel[lambda meta: (rows, triton.cdiv(columns, meta["BLOCK"]))](out, gate_up, columns)
    return out
