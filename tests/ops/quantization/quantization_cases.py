"""What the tests of the ops with 8-bit results share: problems, and the check of a result.

Codes are compared twice. With the values of which they are made, in float64: a code may lie half a step of its dtype
off, and what the values' own roundings come to in units of the scale. And, for ``quantize``, whose values are exact,
with the nearest of all codes to the quotient, ties to the even one: to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_aot.ops.quantization._codes import E4M3, E4M3FNUZ, INT8
from tests.harness.tolerances import LEAST, NAMES, UNIT_ROUNDOFF

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OPS = (
    *("quantize", "rmsnorm_quantize", "fused_add_rmsnorm_quantize", "layernorm_quantize"),
    *("swiglu_quantize", "geglu_quantize"),
)
LARGEST = {E4M3: 448.0, E4M3FNUZ: 224.0, INT8: 127.0}
SPECIAL = (
    *(
        0.0,
        -0.0,
        1e-45,
        -1e-40,
        1e-10,
        448.0,
        -449.0,
        464.0,
        3e38,
        math.nan,
        0.5,
        -0.0625,
        1e-3,
        17.0,
        18.0,
        19.0,
    ),
    *(2.0**-9, 2.0**-10, -(2.0**-10), 1.5 * 2.0**-9, 1.0625, 1.1875, -1.0625, 240.0, 232.0, 1e30),
)


class Problem(NamedTuple):
    """One call. ``cols`` is how long a row of codes is; gated ops with ``packed`` have rows of twice that."""

    op: str
    lead: tuple[int, ...]
    cols: int
    dtype: torch.dtype = BF16
    scheme: str = "token"
    out: torch.dtype = E4M3
    group_size: int = 128
    scale_layout: str = "row_major"
    ue8m0: bool = False
    given: bool = False  # a scale, or a bound of absmax
    vectors: bool = True  # weight, and bias
    packed: bool = True
    settings: tuple[Any, ...] = ()  # the op's own; () its defaults
    shift: int = 0  # elements that rows start after an aligned address
    gap: int = 0  # elements between rows
    special: bool = False  # zeros, subnormals, ties, NaN among the values

    @property
    def own(self) -> tuple[Any, ...]:
        return self.settings or DEFAULTS[self.op]

    def all_settings(self) -> tuple[Any, ...]:
        return (self.scheme, self.out, self.group_size, self.scale_layout, self.ue8m0, *self.own)

    def tensors(self, seed: int = 0, device: str = "cpu") -> tuple[Any, ...]:
        """In the order of the op's ``tensors``; NaN is around rows with gaps."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, generator=generator)

        def rows(n: int) -> Tensor:
            count, stride = math.prod(self.lead), n + self.gap
            buffer = torch.full((self.shift + count * stride,), torch.nan, device=device, dtype=self.dtype)
            view = buffer[self.shift :].view(count, stride)[:, :n]
            values = normal(count, n) * torch.rand(n, device=device, generator=generator) * 4
            if self.special and count * n:
                some = torch.tensor(SPECIAL, device=device)[: min(len(SPECIAL), n)]
                values[0, : len(some)] = some
                if count > 2:
                    values[1] = 0.0
                    values[2, 0] = math.inf
            view.copy_(values)
            return view.unflatten(0, self.lead) if self.lead else view[0]

        def vector() -> Tensor | None:
            return normal(self.cols).to(self.dtype) if self.vectors else None

        gated = "glu" in self.op
        if gated and self.packed:
            own: list[Any] = [rows(2 * self.cols), None]
        else:
            own = [rows(self.cols)]
            own += [rows(self.cols)] if gated or "fused" in self.op else []
        own += [vector()] if "norm" in self.op else []
        own += [vector()] if "layernorm" in self.op else []
        scale = bound = None
        if self.scheme == "tensor" and (self.given or self.op != "quantize"):
            scale = torch.full((), 0.013, device=device)
        elif self.given:
            bound = torch.full((1,), 2.5, device=device)
        return (*own, scale, bound)

    def run(self, op: Any, tensors: tuple[Any, ...]) -> Any:
        """By the public call."""
        names = [name.rstrip("?") for name in op.tensors]
        named = dict(zip(names, tensors, strict=True))
        own = dict(zip(SETTINGS[self.op], self.own, strict=True))
        common = {
            "scheme": self.scheme, "dtype": self.out, "group_size": self.group_size,
            "scale_layout": self.scale_layout, "ue8m0": self.ue8m0,
        }  # fmt: skip
        return op(**named, **common, **own)


SETTINGS: Mapping[str, tuple[str, ...]] = {
    "quantize": (),
    "rmsnorm_quantize": ("eps", "offset", "casting_mode"),
    "fused_add_rmsnorm_quantize": ("eps", "offset", "casting_mode"),
    "layernorm_quantize": ("eps",),
    "swiglu_quantize": ("alpha", "up_offset", "limit"),
    "geglu_quantize": ("approximate",),
}
DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "quantize": (),
    "rmsnorm_quantize": (1e-6, 0.0, "llama"),
    "fused_add_rmsnorm_quantize": (1e-6, 0.0, "llama"),
    "layernorm_quantize": (1e-5,),
    "swiglu_quantize": (1.0, 0.0, None),
    "geglu_quantize": ("tanh",),
}
OTHERS: Mapping[str, tuple[Any, ...]] = {
    **DEFAULTS,
    "rmsnorm_quantize": (1e-3, 1.0, "gemma"),
    "fused_add_rmsnorm_quantize": (1e-3, 1.0, "gemma"),
    "swiglu_quantize": (1.702, 1.0, 2.0),  # gpt-oss's, with a limit that is reached
    "geglu_quantize": ("none",),
}


class Values(NamedTuple):
    """What is quantised, in float64, and how far the kernel's values may lie off."""

    y: Tensor
    error: Tensor
    sums: Tensor | None = None  # of fused_add: to the bit


def values(problem: Problem, tensors: tuple[Any, ...], allowed: Mapping[str, float]) -> Values:
    """By formulas of their own, not the ops' references."""
    wide = [None if t is None else t.double() for t in tensors]
    x = wide[0]
    assert x is not None
    u, tiny = UNIT_ROUNDOFF[problem.dtype], LEAST[problem.dtype]
    if problem.op == "quantize":
        return Values(x, torch.zeros_like(x))
    sums = None
    if "fused" in problem.op:
        sums = (x.float() + wide[1].float()).to(problem.dtype)  # type: ignore[union-attr]
        x = sums.double()
    roundings, scale = 1, torch.ones_like(x)
    if "rmsnorm" in problem.op:
        eps, offset, mode = problem.own
        w = wide[-3]
        factor = torch.ones_like(x) if w is None else (w + offset).expand_as(x)
        y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * factor
        terms = y.abs()
        if mode == "llama" and w is not None:
            roundings, scale = 2, 1 + factor.abs()
    elif "layernorm" in problem.op:
        mean = x.mean(-1, keepdim=True)
        rstd = 1 / torch.sqrt(((x - mean) ** 2).mean(-1, keepdim=True) + problem.own[0])
        w, b = wide[-4], wide[-3]
        factor = torch.ones_like(x) if w is None else w.expand_as(x)
        shift = torch.zeros_like(x) if b is None else b.expand_as(x)
        y = (x - mean) * rstd * factor + shift
        terms = ((x - mean).abs() + x.abs().mean(-1, keepdim=True)) * rstd * factor.abs() + shift.abs()
    else:
        gate, up = (x[..., : problem.cols], x[..., problem.cols :]) if wide[1] is None else (x, wide[1])
        if problem.op == "swiglu_quantize":
            alpha, up_offset, limit = problem.own
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            act = gate / (1 + torch.exp(-alpha * gate))
            y = act * (up + up_offset)
            terms = act.abs() * (up.abs() + abs(up_offset)) * (1 + (alpha * gate).abs() / 8)
        else:
            if problem.own[0] == "none":
                exponent, phi = gate.square() / 2, torch.special.erfc(-gate * math.sqrt(0.5)) / 2
            else:
                inner = 1.5957691216057308 * (gate + 0.044715 * gate**3)
                exponent, phi = inner.abs(), torch.sigmoid(inner)
            y = gate * phi * up
            terms = y.abs() * (1 + exponent.clamp(max=104) / 8)
        scale = torch.ones_like(y)
    error = (
        allowed[NAMES[problem.dtype]] * roundings * u * y.abs()
        + allowed["fp32"] * UNIT_ROUNDOFF[FP32] * terms
        + tiny * scale
    )
    return Values(y, error, sums)


@cache
def codes_of(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All finite values of a dtype, ascending, and their bits; of two zeros the positive one."""
    if dtype == INT8:
        return torch.arange(-127, 128).double(), torch.arange(-127, 128).to(torch.int8).view(torch.uint8)
    bits = torch.arange(256, dtype=torch.uint8)
    found = bits.view(dtype).float().double()
    keep = found.isfinite() & (found.abs() <= LARGEST[dtype]) & ((found != 0) | (bits == 0))
    order = found[keep].argsort()
    return found[keep][order], bits[keep][order]


def nearest(q: Tensor, dtype: torch.dtype) -> Tensor:
    """The bits of the nearest codes, ties to the one whose last bit is 0; NaN is none of them: 0."""
    table, bits = (t.to(q.device) for t in codes_of(dtype))
    q = q.double().nan_to_num(nan=0.0).clamp(-LARGEST[dtype], LARGEST[dtype])
    above = torch.searchsorted(table, q).clamp(1, len(table) - 1)
    low, high = table[above - 1], table[above]
    tie, up = q - low == high - q, q - low > high - q
    up = torch.where(tie, (bits[above] & 1) == 0, up)
    found = bits[torch.where(up, above, above - 1)]
    if dtype == E4M3:  # the sign of what becomes zero stays
        found = torch.where((found == 0) & torch.signbit(q), 128, found)
    return found


def step_of(q: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between codes at q."""
    if dtype == INT8:
        return torch.ones_like(q)
    least = -6 if dtype == E4M3 else -7
    exponent = torch.frexp(q.abs().clamp(max=LARGEST[dtype]))[1] - 1
    return torch.ldexp(torch.ones_like(q), exponent.clamp(min=least) - 3)


def check(
    op: Any, problem: Problem, allowed: Mapping[str, float], *, seed: int = 0, device: str = "cpu"
) -> None:
    """Run ``op`` and compare everything; the arguments must stay as they were."""
    tensors = problem.tensors(seed, device)
    before = [None if t is None else t.clone() for t in tensors]
    label = f"{problem}, seed {seed}"
    got = problem.run(op, tensors)
    for name, t, was in zip(op.tensors, tensors, before, strict=True):
        assert t is None or torch.equal(t.nan_to_num(7.0), was.nan_to_num(7.0)), (
            f"{label}: {name} was overwritten"
        )
    check_results(problem, tensors, got, allowed, label)


def check_results(
    problem: Problem, tensors: tuple[Any, ...], got: Any, allowed: Mapping[str, float], label: str
) -> None:
    codes, scales = got[:2]
    n, largest = problem.cols, LARGEST[problem.out]
    assert codes.dtype == problem.out and codes.shape == (*problem.lead, n) and codes.is_contiguous(), label
    found = values(problem, tensors, allowed)
    if found.sums is not None:
        assert torch.equal(got[2], found.sums), f"{label}: the sum"
    if not codes.numel():
        return
    y, error = found.y.reshape(-1, n), found.error.reshape(-1, n)
    y = torch.where(y.abs() > torch.finfo(problem.dtype).max, y.sign() * math.inf, y)
    scale, bound = tensors[-2:]
    if problem.scheme == "tensor":
        groups = n
        top = _absmax(y).max().expand(y.shape[0], 1)
    else:
        groups = n if problem.scheme == "token" else problem.group_size
        top = _absmax(y.unflatten(1, (-1, groups)))
    if scale is not None:
        assert scales is scale, label
        s = scale.double().reshape(1, 1).expand(y.shape[0], 1)
    else:
        shape = {"tensor": (1,), "token": (*problem.lead, 1), "group": (*problem.lead, n // groups)}
        assert scales.shape == shape[problem.scheme] and scales.dtype == FP32, label
        check_layout(problem, scales, label)
        s = (
            scales.double().reshape(1, 1).expand(y.shape[0], 1)
            if problem.scheme == "tensor"
            else scales.double()
        )
        s = s.reshape(y.shape[0], -1)
        check_scales(problem, s, top, _absmax(error.unflatten(1, (-1, groups))), bound, label)
    wide = s.repeat_interleave(groups, 1)
    c = codes.reshape(-1, n)
    q = y / wide
    if problem.op == "quantize":
        y32, s32 = y.float(), wide.float()
        exact = y32 * (1 / s32) if problem.scheme == "tensor" else y32 / s32
        bits = c.view(torch.uint8)
        nan = exact.isnan()
        wanted = nearest(exact, problem.out)
        same = bits == wanted
        if problem.out != INT8:
            same = torch.where(nan, c.float().isnan(), same)
        wrong = (~same).nonzero()
        assert same.all(), (
            f"{label}: {len(wrong)} codes differ, first at {wrong[0].tolist()}: {y32[~same][:4]}"
        )
        return
    fine = q.isfinite() & error.isfinite()
    off = (c.double() - q.clamp(-largest, largest)).abs()
    slack = error / wide + UNIT_ROUNDOFF[FP32] * q.abs() * 4
    limit = step_of(q.abs() + slack, problem.out) / 2 + slack
    worst = torch.where(fine, off / limit, 0.0).max()
    assert worst <= 1, f"{label}: a code is {worst} of what it may lie off"


def _absmax(t: Tensor) -> Tensor:
    return torch.where(t.isnan(), 0.0, t.abs()).amax(-1)


def check_layout(problem: Problem, scales: Tensor, label: str) -> None:
    rows, groups = math.prod(problem.lead), scales.shape[-1]
    apart = {"column_major": rows, "tma_aligned": -(-rows // 4) * 4}.get(problem.scale_layout)
    if problem.scheme != "group" or apart is None:
        assert scales.is_contiguous(), label
    elif scales.numel():
        assert scales.stride()[-2:] == (1, apart) or groups == 1, f"{label}: {scales.stride()}"


def check_scales(
    problem: Problem, s: Tensor, top: Tensor, error: Tensor, bound: Tensor | None, label: str
) -> None:
    """s is the bounded absmax over the largest code; exactly where the values are exact, with ue8m0 the next power of
    two."""
    largest = LARGEST[problem.out]
    least = 1 / 512 if problem.scheme == "token" and problem.out != INT8 else 1e-10
    least = float(torch.tensor(least))

    def scale_of(absmax: Tensor) -> Tensor:
        held = absmax if bound is None else torch.minimum(absmax, bound.double())
        held = held.clamp(min=least).float()
        # By a tensor: on a GPU torch divides by a number as a product with its rounded reciprocal.
        found = (held / torch.full_like(held, largest)).double()
        if problem.ue8m0:
            mantissa, exponent = torch.frexp(found)
            found = torch.where(
                found.isinf(), found, torch.ldexp(torch.ones_like(found), exponent - (mantissa == 0.5).int())
            )
        return found

    top = top.reshape(s.shape)
    if problem.op == "quantize":
        assert torch.equal(s, scale_of(top)), (
            f"{label}: scales {s.flatten()[:4]}, wanted {scale_of(top).flatten()[:4]}"
        )
        return
    off = error.reshape(s.shape) * 1.01 + top * 2**-23
    inside = (s >= scale_of(top - off)) & (s <= scale_of(top + off))
    assert (inside | top.isinf()).all(), (
        f"{label}: scales {s[~inside][:4]}, wanted {scale_of(top)[~inside][:4]}"
    )


def fitting(op: Any, problem: Problem) -> Problem:
    """The problem in the fp8 of where ``op`` runs, or int8 by token where that has none."""
    if problem.out == INT8:
        return problem
    kernels = [on.kernels[op.name] for on in op._own.bound.values() if op.name in on.kernels]
    found = {key[1] for kernel in kernels for key in kernel._tables} or {E4M3}
    for dtype in (E4M3, E4M3FNUZ):
        if dtype in found:
            return problem._replace(out=dtype)
    return problem._replace(out=INT8, scheme="token", ue8m0=False, scale_layout="row_major")


def small(op: str, out: torch.dtype) -> list[Problem]:
    """Problems that every way runs: ``out`` is the fp8 of the architecture, or int8."""
    p = Problem(op, (3,), 384, out=out)
    tokens = [
        p,
        p._replace(lead=(2, 2), cols=1, dtype=FP16),
        p._replace(lead=(), cols=33, shift=1),
        p._replace(lead=(4,), cols=1000, dtype=FP16, gap=8, given=True, settings=OTHERS[op], vectors=False),
        p._replace(lead=(2,), cols=700, shift=3, gap=5, packed=False),
        p._replace(out=INT8, settings=OTHERS[op]),
        p._replace(out=INT8, cols=77, dtype=FP16, given=True, packed=False),
        p._replace(lead=(0,), cols=64),
        p._replace(lead=(1,), cols=384, special=op == "quantize"),
        p._replace(lead=(4,), cols=130, special=op == "quantize", out=INT8),
    ]
    if out == INT8:
        return [one for one in tokens if one.out == INT8]
    others = [
        p._replace(scheme="tensor", given=True),
        p._replace(scheme="tensor", lead=(2, 3), cols=35, dtype=FP16, gap=3, given=True, settings=OTHERS[op]),
        p._replace(scheme="group"),
        p._replace(
            scheme="group", group_size=64, lead=(5,), cols=192, dtype=FP16, scale_layout="column_major"
        ),
        p._replace(
            scheme="group", lead=(2, 3), cols=256, scale_layout="tma_aligned", ue8m0=True, packed=False
        ),
        p._replace(
            scheme="group",
            group_size=64,
            lead=(3,),
            cols=128,
            shift=1,
            gap=3,
            given=True,
            settings=OTHERS[op],
        ),
        p._replace(scheme="token", ue8m0=True, lead=(2,), cols=144),
        p._replace(scheme="group", lead=(4,), cols=256, special=op == "quantize"),
    ]
    if op == "quantize":
        others += [
            p._replace(scheme="tensor"),
            p._replace(scheme="tensor", lead=(3, 2), cols=1111, dtype=FP32, gap=1),
            p._replace(scheme="tensor", given=True, lead=(2,), cols=64, special=True),
            p._replace(dtype=FP32, lead=(3,), cols=200, special=True),
            p._replace(dtype=FP32, scheme="group", lead=(3,), cols=256, special=True, ue8m0=True),
        ]
    return [*tokens, *others]
