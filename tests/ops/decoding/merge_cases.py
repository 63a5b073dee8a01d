"""Problems of merge_attention_states, and their check against float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.harness.tolerances import LEAST, NAMES, UNIT_ROUNDOFF

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Problem(NamedTuple):
    tokens: int
    heads: int
    dim: int
    dtype: torch.dtype = BF16
    batch: int = 0  # 0: no such dimension
    shift: int = 0  # elements by which the first state is off
    spread: float = 4.0  # of the logarithms
    packed: bool = False  # states with the heads' dimension outside, logarithms with the tokens' outside
    empty: bool = True  # some states without keys, whose values are NaN

    def tensors(self, seed: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        lead = (self.batch,) if self.batch else ()
        shape = (*lead, self.tokens, self.heads, self.dim)
        made = []
        for i in range(2):
            out = torch.randn(shape, generator=generator)
            lse = torch.randn((*lead, self.heads, self.tokens), generator=generator) * self.spread + 3
            if self.empty:
                none = torch.rand(lse.shape, generator=generator) < 0.3
                lse[none] = torch.inf if i else -torch.inf
                out[none.transpose(-1, -2)] = torch.nan
            flat = torch.empty(out.numel() + self.shift, dtype=self.dtype, device=device)
            out = flat[self.shift :].view(shape).copy_(out)
            lse = lse.to(device)
            if self.packed:
                out = out.transpose(-3, -2).contiguous().transpose(-3, -2)
                lse = lse.transpose(-1, -2).contiguous().transpose(-1, -2)
            made += [out, lse]
        return made[0], made[1], made[2], made[3]


def check(
    op: Any, problem: Problem, allowed: Mapping[str, float], *, seed: int = 0, device: str = "cpu"
) -> None:
    """Run ``op`` and compare with float64; the arguments must stay as they were."""
    tensors = problem.tensors(seed, device)
    before = [t.clone() for t in tensors]
    out, lse = op(*tensors, return_lse=True)
    label = f"{problem}, seed {seed}"
    assert out.is_contiguous() and out.shape == tensors[0].shape and out.dtype == problem.dtype, label
    assert lse.is_contiguous() and lse.shape == tensors[1].shape and lse.dtype == FP32, label
    worst = errors(out, lse, tensors, allowed)
    assert max(worst) <= 1, f"{label}: errors of out and lse as fractions of what is allowed {worst}"
    assert all(torch.equal(t.nan_to_num(7), w.nan_to_num(7)) for t, w in zip(tensors, before, strict=True)), (
        label
    )
    assert torch.equal(op(*tensors), out), f"{label}: not the same twice"


def errors(
    out: Tensor, lse: Tensor, tensors: tuple[Tensor, ...], allowed: Mapping[str, float]
) -> tuple[float, float]:
    """As fractions of what is allowed. The weights are exp(difference), whose relative error is that of the difference:
    a unit roundoff times its size, and as much again for the product with log2(e) in exp."""
    a, lse_a, b, lse_b = (t.double() for t in tensors)
    lse_a, lse_b = (torch.where(x == torch.inf, -torch.inf, x) for x in (lse_a, lse_b))
    exact_lse = torch.logaddexp(lse_a, lse_b)
    none = exact_lse == -torch.inf
    exact, terms = torch.zeros_like(a), torch.zeros_like(a)
    far = torch.zeros_like(exact_lse)
    for x, of_x in ((a, lse_a), (b, lse_b)):
        weight = torch.where(none, 0.0, torch.exp(of_x - torch.where(none, 0.0, exact_lse)))
        w = weight.transpose(-1, -2).unsqueeze(-1)
        part = torch.where(w == 0, 0.0, x * w)
        exact, terms = exact + part, terms + part.abs()
        distance = torch.where(weight == 0, 0.0, (of_x - torch.where(none, 0.0, exact_lse)).abs())
        far = torch.maximum(far, distance)
    dtype, u = out.dtype, UNIT_ROUNDOFF[FP32]
    by = allowed["fp32"] * u * (1 + far.transpose(-1, -2).unsqueeze(-1) / 8)
    error = (
        allowed[NAMES[dtype]] * UNIT_ROUNDOFF[dtype] * exact.abs() * (dtype != FP32)
        + by * terms
        + LEAST[dtype]
    )
    off = (out.double() - exact).abs() / error
    of_lse = (lse.double() - exact_lse).abs() / (allowed["fp32"] * u * (1 + exact_lse.abs()))
    of_lse = torch.where(none & (lse == -torch.inf), 0.0, of_lse)
    worst = [
        float(e.nan_to_num(torch.inf, posinf=torch.inf).max()) if e.numel() else 0.0 for e in (off, of_lse)
    ]
    return worst[0], worst[1]


SMALL = (
    *(Problem(5, 3, 128, dtype) for dtype in (BF16, FP16, FP32)),
    *(Problem(3, 2, 64, dtype, batch=2, packed=True) for dtype in (BF16, FP16, FP32)),
    *(Problem(4, 2, 40, dtype, shift=1) for dtype in (BF16, FP16, FP32)),
    Problem(3, 1, 512),
    Problem(1, 1, 7),
    Problem(1, 9, 64),
    Problem(1, 5, 128, batch=3, shift=16, packed=True),
    Problem(9, 2, 128, FP32, spread=60.0, empty=False),
    Problem(11, 5, 128, packed=True),
    Problem(5, 3, 192, batch=2),
    Problem(0, 2, 64),
)
# As many rows of heads as the tables tell apart
FEW_AND_MANY = tuple(
    Problem(tokens, 1, dim, dtype)
    for dtype in (BF16, FP16, FP32)
    for dim in (64, 128, 256)
    for tokens in (40, 4000, 9000)
)
