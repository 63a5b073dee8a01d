"""Launches every kernel of the project, and prints results where kernels run."""

from __future__ import annotations

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.triton_packs.project import kernels as k

DEVICE = "cuda"


def launch_all(n: int = 1000, device: str = DEVICE) -> dict[str, torch.Tensor]:
    """Every kernel once or more; what they wrote, by name."""
    made: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(1024, generator=generator).to(device)[:n] for _ in range(2))
    grid = (triton.cdiv(n, 256),)

    def out(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        made[name] = torch.zeros(1024, dtype=dtype, device=device)
        return made[name]

    k.add[grid](x, y, out("add"), n, 0.5, BLOCK=256)
    k.add[grid](x.half(), y.half(), out("add half", torch.float16), n, 0.5, BLOCK=256, num_warps=8)
    k.add[grid](x[1:], y, out("add from 1"), n - 1, 2.0, BLOCK=256)
    k.mapped[grid](x, out("square"), n, k.square, 0.1, BLOCK=256)
    k.mapped[grid](x, out("negate"), n, k.negate, 2.0, BLOCK=256)
    k.pair[grid]((x, out("pair")), n, BLOCK=256)
    k.by_gpu[grid](x, out("by gpu"), n, BLOCK=256)
    k.total[(1,)](x, out("total"), n)
    k.tuned[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, out("tuned"), n)
    k.copied[(4,)](TensorDescriptor.from_tensor(y, [256]), out("copied"), n, BLOCK=256)
    k.cube[grid](x, out("cube"), n, BLOCK=256)
    k.fourth[grid](x, out("fourth"), n, BLOCK=256)
    k.needs_clusters[grid](out("clusters"), n, BLOCK=256, num_ctas=2)
    return made


if __name__ == "__main__":
    launch_all()
