"""Problems of the ops that write caches, and their check: against float64 and, where a result is defined to the bit,
the bits, with a loop over tokens that shares nothing with the ops' own references."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_aot.ops.quantization._codes import E4M3, E4M3FNUZ, LARGEST
from tests.harness.tolerances import LEAST, NAMES, UNIT_ROUNDOFF
from tests.ops.quantization.quantization_cases import nearest

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OPS = ("qk_norm_rope", "write_kv_cache")
# What a problem has: no cache (qk_norm_rope), one of the keys' dtype, one of codes.
CACHES = ("none", "same", "fp8")
SCALES = ("none", "one", "head", "token")
# How a cache of both is laid out: its dimensions in memory, of (key or value, page, row, head).
LAYOUTS = {"2NHD": (0, 1, 2, 3), "N2HD": (1, 0, 2, 3), "2HND": (0, 1, 3, 2), "N2HND": (1, 0, 3, 2)}


class Problem(NamedTuple):
    op: str
    tokens: int
    heads: int  # of keys
    dim: int
    dtype: torch.dtype = BF16
    cache: str = "same"
    scales: str = "none"
    unscaled: str = ""  # "k" or "v" has none
    pages: int = 3
    page_size: int = 4
    layout: str = "2NHD"
    padding: int = 0  # tokens past those that have slots
    shift: int = 0  # elements by which keys, or qkv, are off
    gap: int = 0  # elements between a cache's rows
    index: torch.dtype = torch.int64
    # of qk_norm_rope
    q_heads: int = 1
    rotary: int = 0  # 0: dim
    table: torch.dtype | None = None  # None: dtype
    is_neox: bool = True
    gated: bool = False
    offset: float = 0.0
    weighted: bool = True

    @property
    def slots(self) -> int:
        return self.pages * self.page_size


def fitting(op: Any, problem: Problem) -> tuple[Problem, torch.dtype]:
    """The problem in the fp8 of where ``op`` runs, or without where that has none; and that fp8."""
    kernels = [on.kernels[op.name] for on in op._own.bound.values() if op.name in on.kernels]
    found = {axis for kernel in kernels for key in kernel._tables for axis in key} or {E4M3}
    for dtype in (E4M3, E4M3FNUZ):
        if dtype in found:
            return problem, dtype
    return (problem._replace(cache="same", scales="none") if problem.cache == "fp8" else problem), E4M3


def drawn(problem: Problem, fp8: torch.dtype, seed: int = 0, device: str = "cpu") -> dict[str, Any]:
    """A call's arguments by name. Caches hold what the op must leave; slots are skipped and permuted."""
    p, generator = problem, torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = p.dtype) -> Tensor:
        size = torch.Size(shape).numel()
        spread = torch.randn(size + p.shift, generator=generator)[p.shift :]
        flat = torch.empty(size + p.shift, dtype=dtype, device=device)
        flat[p.shift :] = (spread * torch.exp2(2 * torch.randn(size, generator=generator))).to(dtype)
        return flat[p.shift :].view(shape)

    given: dict[str, Any] = {}
    all_tokens = p.tokens + p.padding
    if p.op == "write_kv_cache":
        both = normal(all_tokens, 2, p.heads, p.dim)  # as of one projection
        given |= {"key": both[:, 0], "value": both[:, 1]}
    else:
        rotary, positions = p.rotary or p.dim, 37
        columns = (p.q_heads * (1 + p.gated) + 2 * p.heads) * p.dim
        table = torch.randn(positions, rotary, generator=generator)
        given |= {
            "qkv": normal(all_tokens, columns),
            **{name: normal(p.dim) if p.weighted else None for name in ("q_weight", "k_weight")},
            "cos_sin_cache": table.to(device, p.table or p.dtype),
            "position_ids": torch.randint(positions, (all_tokens,), generator=generator).to(device, p.index),
            "num_heads_q": p.q_heads, "num_heads_k": p.heads, "num_heads_v": p.heads, "offset": p.offset,
            "is_neox": p.is_neox, "gated": p.gated,
        }  # fmt: skip
    if p.cache == "none":
        return given
    dtype = fp8 if p.cache == "fp8" else p.dtype
    dims, order = (2, p.pages, p.page_size, p.heads), LAYOUTS[p.layout]
    width = p.dim + p.gap
    held = torch.randn((*(dims[d] for d in order), width), generator=generator).to(dtype).to(device)
    back = [order.index(d) for d in range(4)]
    caches = held.permute(*back, 4)[..., : p.dim]
    # as many places as there may be, among them some that are skipped
    slots = torch.randperm(max(p.slots, p.tokens), generator=generator)[: p.tokens]
    slots = torch.where((slots < p.slots) & (torch.rand(p.tokens, generator=generator) < 0.8), slots, -1)
    given |= {"key_cache": caches[0], "value_cache": caches[1], "slot_mapping": slots.to(device, p.index)}
    if p.scales != "none" and p.cache == "fp8":
        shapes = {"one": (2,), "head": (2, p.heads), "token": (2, p.pages, p.page_size, p.heads)}
        scales = torch.exp2(torch.randn(shapes[p.scales], generator=generator) - 4).to(device)
        both = zip("kv", scales, strict=True)
        given |= {f"{name}_scale": scale for name, scale in both if name != p.unscaled}
    return given


def copied(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same in memory laid out alike."""
    made = {}
    for name, t in given.items():
        if isinstance(t, Tensor):
            t = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t)
        made[name] = t
    return made


def check(
    op: Any, problem: Problem, allowed: Mapping[str, float], *, seed: int = 0, device: str = "cpu"
) -> None:
    """Run ``op`` and compare all that it wrote, and that it wrote nothing else."""
    problem, fp8 = fitting(op, problem)
    given = drawn(problem, fp8, seed, device)
    before = copied(given)
    tensors = [t for t in given.values() if isinstance(t, Tensor)]
    storages = {t.untyped_storage().data_ptr(): _storage(t) for t in tensors}
    result = op(**given)
    label = f"{problem}, seed {seed}"
    first = result[0] if isinstance(result, tuple) else result
    assert first is given["key_cache" if problem.op == "write_kv_cache" else "qkv"], label
    check_results(problem, before, given, allowed, label)
    for at, was in storages.items():  # what lies between the tensors' elements
        mask = torch.ones_like(was, dtype=torch.bool)
        for t in given.values():
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() == at:
                size = t.element_size()
                strides = (*(stride * size for stride in t.stride()), 1)
                mask.as_strided((*t.shape, size), strides, t.storage_offset() * size).fill_(False)
                now = _storage(t)
        assert torch.equal(now[mask], was[mask]), f"{label}: written beside the tensors"


def check_results(
    problem: Problem,
    before: Mapping[str, Any],
    given: Mapping[str, Any],
    allowed: Mapping[str, float],
    label: str,
) -> None:
    """What a call left, from what it was given."""
    wanted = copied(before)
    if problem.op == "qk_norm_rope":
        found = worst_of_heads(problem, before, given["qkv"], allowed)
        assert found <= 1, f"{label}: error of q or k as a fraction of what is allowed: {found}"
        columns = given["qkv"].unflatten(-1, (-1, problem.dim))
        key, value = columns[:, -2 * problem.heads : -problem.heads], columns[:, -problem.heads :]
        wanted["qkv"] = given["qkv"]
    else:
        key, value = before["key"], before["value"]
    if problem.cache != "none":
        write(wanted, key, value)
    for name, t in given.items():
        if isinstance(t, Tensor):
            assert torch.equal(bits(t), bits(wanted[name])), f"{label}: {name}"


def write(call: dict[str, Any], key: Tensor, value: Tensor) -> None:
    """One token after the other into its slot."""
    for x, cache, scale in (
        (key, call["key_cache"], call.get("k_scale")),
        (value, call["value_cache"], call.get("v_scale")),
    ):
        page_size = cache.shape[1]
        for token, slot in enumerate(call["slot_mapping"].tolist()):
            if slot < 0:
                continue
            to = cache[slot // page_size, slot % page_size]
            row = x[token]
            if cache.dtype == x.dtype:
                to.copy_(row)
                continue
            wide = row.float().cpu()
            if scale is None:
                s = torch.ones(1, 1)
            elif scale.dim() == 3:
                top = wide.abs().amax(-1).clamp(min=1 / 512)
                s = (
                    top.double() / LARGEST[cache.dtype]
                ).float()  # rounded twice, but 53 bits suffice for a quotient
                scale[slot // page_size, slot % page_size] = s.to(scale.device)
                s = s[:, None]
            else:
                s = scale.cpu().reshape(-1, 1)
            codes = nearest((wide.double() / s.double()).float(), cache.dtype)
            to.copy_(codes.view(cache.dtype).to(to.device))


def worst_of_heads(
    problem: Problem, before: Mapping[str, Any], got: Tensor, allowed: Mapping[str, float]
) -> float:
    """The largest error of q and k as a fraction of what is allowed; all other columns must be as they were."""
    p, rotary = problem, problem.rotary or problem.dim
    x = before["qkv"].double().unflatten(-1, (-1, p.dim))
    heads = p.q_heads * (1 + p.gated)
    which = [*range(0, heads, 1 + p.gated), *range(heads, heads + p.heads)]
    others = [i for i in range(x.shape[1]) if i not in which]
    y = got.unflatten(-1, (-1, p.dim))
    assert torch.equal(y[:, others], before["qkv"].unflatten(-1, (-1, p.dim))[:, others])
    h = x[:, which]
    if p.weighted:
        weights = [before["q_weight"]] * p.q_heads + [before["k_weight"]] * p.heads
        w = torch.stack(weights).double() + p.offset
        h = h / torch.sqrt(h.square().mean(-1, keepdim=True) + 1e-6) * w
    table = before["cos_sin_cache"].double()[before["position_ids"].long()][:, None]
    cos, sin = table[..., : rotary // 2], table[..., rotary // 2 :]
    first = torch.arange(0, rotary, 2) if not p.is_neox else torch.arange(rotary // 2)
    second = first + 1 if not p.is_neox else first + rotary // 2
    exact, terms = h.clone(), h.abs()
    a, b = h[..., first], h[..., second]
    exact[..., first], exact[..., second] = a * cos - b * sin, b * cos + a * sin
    terms[..., first] = (a * cos).abs() + (b * sin).abs()
    terms[..., second] = (b * cos).abs() + (a * sin).abs()
    error = (
        allowed[NAMES[p.dtype]] * UNIT_ROUNDOFF[p.dtype] * exact.abs()
        + allowed["fp32"] * UNIT_ROUNDOFF[FP32] * terms
        + LEAST[p.dtype]
    )
    found = y[:, which].double()
    over = exact.abs() > torch.finfo(p.dtype).max  # an infinity is right there
    off = torch.where(over & (found == exact.sign() * torch.inf), 0.0, (found - exact).abs())
    return float((off / error).nan_to_num(torch.inf, posinf=torch.inf).max()) if off.numel() else 0.0


def _storage(t: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage()).clone()  # type: ignore[call-overload, no-any-return]


def bits(t: Tensor) -> Tensor:
    """What is compared: NaN equals itself."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return t.contiguous().view(kinds[t.element_size()]) if t.is_floating_point() else t


def small(op: str) -> list[Problem]:
    """Problems that every way runs: each binary's, every layout, scale and setting."""
    p = Problem(op, 5, 2, 128)
    if op == "write_kv_cache":
        kinds = [
            (cache, scales) for cache, scales in zip(("same", *["fp8"] * 4), ("none", *SCALES), strict=True)
        ]
        found = [
            p._replace(dtype=dtype, cache=cache, scales=scales, dim=dim, layout=layout)
            for dtype in (BF16, FP16)
            for (cache, scales), dim, layout in zip(
                kinds, (128, 64, 256, 128, 64), (*LAYOUTS, "2NHD"), strict=True
            )
        ]
        found += [p._replace(dtype=dtype, dim=256, cache="same") for dtype in (BF16, FP16)]
        found += [p._replace(dtype=dtype, dim=64, cache="same") for dtype in (BF16, FP16)]
        found += [
            p._replace(dtype=dtype, dim=40, cache=cache, scales="token", shift=1, gap=3, index=torch.int32)
            for dtype in (BF16, FP16)
            for cache in ("same", "fp8")
        ]
        return [
            *found,
            p._replace(cache="fp8", scales="head", unscaled="k"),
            p._replace(cache="fp8", scales="head", unscaled="v"),
            p._replace(heads=1, page_size=1, pages=7, padding=3),
            p._replace(tokens=40, heads=3, page_size=16, pages=1, dim=80),  # contiguous, of one sequence
            p._replace(tokens=0),
            p._replace(heads=0),
        ]
    q = p._replace(q_heads=3)
    found = [
        q._replace(dtype=dtype, table=table, is_neox=neox, cache=cache, scales=scales, dim=dim, rotary=rotary)
        for dtype in (BF16, FP16)
        for table in (None, FP32)
        for neox in (True, False)
        for cache, scales, dim, rotary in (
            ("same", "none", 128, 0),
            ("fp8", "token", 128, 64),
            ("same", "none", 256, 64),
            ("fp8", "head", 256, 0),
            ("none", "none", 36, 24),
            ("fp8", "one", 36, 0),
        )
    ]
    return [
        *found,
        q._replace(cache="none", gated=True, dim=256, rotary=64, offset=1.0),
        q._replace(cache="fp8", scales="token", gated=True, dim=64, rotary=32, offset=1.0, layout="N2HND"),
        q._replace(cache="fp8", scales="head", unscaled="k"),
        q._replace(tokens=3, padding=2, index=torch.int32),
        q._replace(cache="none", tokens=0),
        q._replace(cache="fp8", dim=6, rotary=2, shift=1, is_neox=False),
        q._replace(q_heads=32, heads=4, tokens=2, layout="N2HD", page_size=16),
        q._replace(weighted=False, q_heads=4),
        q._replace(weighted=False, cache="fp8", scales="token", rotary=64, is_neox=False),
    ]
