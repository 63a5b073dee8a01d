"""What the tests of attention on the CPU, on the emulator, on the interpreter and on a GPU share: problems, and the
check of a result against float64 with a limit for every element."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_aot.ops.attention.flash_attention import FlashAttention
from tests.harness.tolerances import LEAST, NAMES, UNIT_ROUNDOFF

BF16, FP16 = torch.bfloat16, torch.float16
Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None]


class Problem(NamedTuple):
    """One call; ``window``, ``softcap`` and ``causal`` as the op takes them."""

    batch: int
    heads: int
    kv_heads: int
    len_q: int
    len_k: int
    dim: int
    dtype: torch.dtype = BF16
    layout: str = "bshd"
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float = 0.0
    sinks: bool = False
    scale: float | None = None
    shift: int = 0  # elements that tensors start after an aligned address

    def tensors(self, seed: int = 0, device: str = "cpu") -> Tensors:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(heads: int, length: int) -> Tensor:
            order = (length, heads) if self.layout == "bshd" else (heads, length)
            shape = (self.batch, *order, self.dim)
            flat = torch.randn(math.prod(shape) + self.shift, device=device, generator=generator)
            return flat.to(self.dtype)[self.shift :].view(shape)

        q, k, v = (
            normal(h, n)
            for h, n in (
                (self.heads, self.len_q),
                (self.kv_heads, self.len_k),
                (self.kv_heads, self.len_k),
            )
        )
        sinks = torch.randn(self.heads, device=device, generator=generator) if self.sinks else None
        return q, k, v, sinks

    def keywords(self, sinks: Tensor | None) -> dict[str, Any]:
        """The op's arguments but q, k and v."""
        return {
            "causal": self.causal,
            "window": self.window,
            "softcap": self.softcap,
            "sinks": sinks,
            "scale": self.scale,
            "layout": self.layout,
            "return_lse": True,
        }

    def settings(self) -> tuple[float, int, int, float, str]:
        """As the reference takes them."""
        left, right = self.window or (None, None)
        right = 0 if self.causal else right
        scale = self.dim**-0.5 if self.scale is None else self.scale
        return scale, -1 if left is None else left, -1 if right is None else right, self.softcap, self.layout


GAPS = (9.0, 9.75, 12.0, 14.0)  # e^-9.7 is float16's least normal number


def far_behind(gap: float, dtype: torch.dtype, device: str = "cpu") -> tuple[Problem, Tensors]:
    """One query whose first of 200 keys has nearly all of it; the others' scores are ``gap`` less, their values 1."""
    problem = Problem(1, 1, 1, 1, 200, 64, dtype)
    q, k, v = (torch.zeros(1, n, 1, 64, dtype=dtype, device=device) for n in (1, 200, 200))
    q[..., 0], k[:, 0, :, 0], v[:, 1:] = 4.0, gap * 2, 1.0  # the scale is 1/8
    return problem, (q, k, v, None)


def check(
    op: Any, problem: Problem, allowed: Mapping[str, float], *, seed: int = 0, device: str = "cpu"
) -> None:
    """Run ``op`` and compare with float64; without return_lse the same bits; the arguments must stay as they were."""
    q, k, v, sinks = problem.tensors(seed, device)
    before = [t.clone() for t in (q, k, v)]
    keywords = problem.keywords(sinks)
    o, lse = op(q, k, v, **keywords)
    assert o.is_contiguous() and o.shape == q.shape and o.dtype == q.dtype and lse.dtype == torch.float32
    worst = errors(o, lse, (q, k, v, sinks), problem, allowed, approximate=device == "cuda")
    assert max(worst) <= 1, (
        f"{problem}, seed {seed}: errors of o and lse as fractions of what is allowed {worst}"
    )
    assert all(torch.equal(t, was) for t, was in zip((q, k, v), before, strict=True))
    assert torch.equal(op(q, k, v, **{**keywords, "return_lse": False}), o), f"{problem}: not the same twice"


def errors(
    o: Tensor,
    lse: Tensor,
    tensors: Tensors,
    problem: Problem,
    allowed: Mapping[str, float],
    *,
    approximate: bool,
) -> tuple[float, float]:
    """The largest errors of o and lse as fractions of what is allowed; NaN and wrong infinities count as infinite.

    O is rounded once, and so is each P before it is multiplied with V: a unit roundoff of the dtype of P |V|, or among
    the subnormals LEAST of |V| for each key, as P is at most 1 then and its sum at least. Scores are sums in float32,
    and their error is P's relative one. ``approximate``: the soft cap's tanh is off by 2^-10.7.
    """
    q, k, v, sinks = (None if t is None else t.double() for t in tensors)
    assert q is not None and k is not None and v is not None
    wanted, wanted_lse = FlashAttention.reference(q, k, v, sinks, *problem.settings())
    size, _ = FlashAttention.reference(q, k, v.abs(), sinks, *problem.settings())
    mean, log_keys = FlashAttention.reference(torch.zeros_like(q), k, v.abs(), None, *problem.settings())
    keys = torch.exp(log_keys.transpose(1, 2) if problem.layout == "bshd" else log_keys)[..., None]
    norms = (t.norm(dim=-1).max().item() if t.numel() else 0.0 for t in (q, k))
    terms = 1.0 + problem.settings()[0] * math.prod(norms)  # |q| |k| bounds the sum of a score's terms
    fp32 = allowed["fp32"] * UNIT_ROUNDOFF[torch.float32] * terms
    score = fp32 + (problem.softcap * 2.0**-10.7 if approximate else 0.0)
    roundoff = allowed[NAMES[o.dtype]] * UNIT_ROUNDOFF[o.dtype]
    limit = roundoff * (wanted.abs() + size) + 2 * score * size + LEAST[o.dtype] * (1 + mean * keys)
    ratio = (o.double() - wanted).abs() / limit
    finite = torch.isfinite(wanted_lse)
    lse_error = torch.where(finite, (lse.double() - wanted_lse).abs(), 0.0) / (score * (1 + wanted_lse.abs()))
    lse_error = torch.where(finite, lse_error, torch.where(lse.double() == wanted_lse, 0.0, torch.inf))
    return tuple(
        float(torch.where(torch.isnan(r), torch.inf, r).max()) if r.numel() else 0.0
        for r in (ratio, lse_error)
    )  # type: ignore[return-value]


# Small ones, for the emulator: every dimension's kernel, both dtypes, ragged lengths, every mask, rows without keys.
SMALL = (
    Problem(1, 2, 1, 130, 150, 64),
    Problem(1, 2, 1, 40, 70, 64, FP16, "bhsd", causal=True),
    Problem(1, 1, 1, 70, 50, 64, causal=True),
    Problem(2, 1, 1, 20, 33, 96, window=(9, 5), softcap=5.0),
    Problem(1, 1, 1, 20, 50, 96, FP16, causal=True, sinks=True),
    Problem(1, 3, 1, 17, 64, 128, causal=True, scale=0.5),
    Problem(1, 1, 1, 33, 40, 128, FP16),
    Problem(1, 1, 1, 20, 40, 192, sinks=True),
    Problem(1, 1, 1, 33, 20, 160, FP16, causal=True, sinks=True),
    Problem(1, 1, 1, 20, 40, 256, window=(None, 3)),
    Problem(1, 1, 1, 20, 40, 208, FP16, "bhsd", softcap=20.0),
    Problem(1, 2, 2, 10, 20, 20, causal=True),
    Problem(1, 1, 1, 1, 30, 64, causal=True),
    Problem(1, 1, 1, 30, 1, 64),
    Problem(1, 1, 1, 30, 1, 64, causal=True),
    Problem(1, 1, 1, 100, 300, 32, window=(40, 0)),
    Problem(1, 1, 1, 100, 100, 16, FP16, window=(1, 1)),
    Problem(1, 1, 1, 20, 20, 64, shift=1),
)
EMPTY = (
    Problem(0, 2, 1, 8, 8, 64),
    Problem(1, 2, 1, 0, 8, 64),
    Problem(1, 2, 1, 8, 0, 64),
    Problem(1, 2, 1, 8, 0, 64, sinks=True),
)
DIMS = (8, 33, 40, 64, 72, 80, 96, 100, 104, 128, 136, 160, 192, 200, 248, 256)
LARGE = (
    *(
        problem
        for dim in DIMS
        for problem in (
            Problem(2, 4, 2, 300, 300, dim),
            Problem(2, 4, 2, 300, 300, dim, causal=True),
            Problem(2, 4, 1, 513, 777, dim, FP16, "bhsd"),
            Problem(2, 4, 1, 513, 777, dim, FP16, "bhsd", causal=True),
            Problem(1, 2, 1, 777, 300, dim, causal=True, sinks=True),
            Problem(2, 4, 2, 500, 700, dim, window=(100, 30)),
            Problem(1, 4, 4, 300, 1000, dim, window=(64, 0), softcap=15.0, sinks=True),
            Problem(1, 2, 2, 600, 250, dim, window=(50, None)),
            Problem(1, 2, 2, 250, 600, dim, window=(None, 20)),
        )
    ),
    Problem(1, 6, 2, 1000, 1000, 128, softcap=30.0),
    Problem(2, 3, 1, 1, 1000, 128, causal=True),
    Problem(3, 2, 2, 129, 1, 64, causal=True),
    Problem(4, 32, 8, 2048, 2048, 128, causal=True),
    Problem(40, 32, 8, 129, 200, 64, causal=True),
    Problem(1, 2, 2, 300, 300, 64, shift=1),
)
