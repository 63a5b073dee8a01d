"""The ops around a cache of keys and values on this machine's GPU: `python -m benchmarks.cache.cache`.

Microseconds a call inside a CUDA graph, as ``benchmarks.quantization.quantization`` measures them, beside a copy of as
many bytes as a call must move. Cases: keys and values into a paged cache (bf16, fp8 by tensor, fp8 by token and head),
RMSNorm of heads and rope in place on packed q, k and v, the same with the write to the cache, and the merging of two
attention results. The peers are vLLM's CUDA kernels, where ``--vllm`` names its shared object; what it does in two
kernels is both. Before it is timed, a provider's result is compared with float64.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.in_graphs import Ready, Result, beside_the_copy, captured, cells, small_error
from benchmarks.quantization.quantization import FP8, LARGEST
from benchmarks.steps import Command

TOKENS = (1, 8, 32, 128, 512, 2048, 8192)
HEADS = ((32, 8), (32, 4))  # of q and k: Qwen3-8B's, Qwen3-30B-A3B's
DIM, PAGE, EPS = 128, 16, 1e-6
KINDS = ("write", "write_fp8", "write_fp8_dynamic", "qk_norm_rope", "qk_norm_rope_and_write", "merge")
TOLERANCE = {"write": 0.0, "write_fp8": 2.0**-4, "write_fp8_dynamic": 2.0**-4}  # half a step of e4m3
SIXTEEN_BITS = 2.0**-7  # of all else: a rounding to bf16 or two
Run = Callable[[], Any]


@dataclass(frozen=True)
class Point:
    kind: str
    tokens: int
    q_heads: int
    kv_heads: int

    @property
    def bytes(self) -> int:
        """Read and written once: tokens' own rows, the lines of the cache, and angles; not the weights."""
        a_head = 2 * DIM
        written = {"write": 2 * DIM, "write_fp8": DIM, "write_fp8_dynamic": DIM + 4}
        if self.kind in written:
            a_token = 2 * self.kv_heads * (a_head + written[self.kind])
        elif self.kind == "merge":
            a_token = self.q_heads * (3 * a_head + 3 * 4)
        else:
            a_token = 2 * (self.q_heads + self.kv_heads) * a_head + a_head
            if self.kind == "qk_norm_rope_and_write":
                a_token += 3 * self.kv_heads * a_head  # v is read, k and v are written
        return self.tokens * a_token


POINTS = tuple(
    Point(kind, tokens, *heads)
    for tokens in TOKENS
    for kind in KINDS
    for heads in HEADS
    if kind != "merge" or heads == HEADS[0]
)


@dataclass(frozen=True)
class Inputs:
    qkv: Tensor
    weights: Tensor
    table: Tensor
    positions: Tensor
    cache: Tensor  # of keys and values
    scales: Tensor
    slots: Tensor
    lse: Tensor  # of two states, whose values are the halves of ``outs``
    outs: Tensor

    @property
    def key_value(self) -> tuple[Tensor, Tensor]:
        heads = self.qkv.unflatten(-1, (-1, DIM))
        count = self.cache.shape[3]
        return heads[:, -2 * count : -count], heads[:, -count:]


def drawn(point: Point, device: torch.device, seed: int = 0) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, device=device, dtype=torch.float32).normal_(generator=generator).to(dtype)

    tokens, kv = point.tokens, point.kv_heads
    pages = 2 * -(-tokens // PAGE) + 1
    dtype = FP8 if "fp8" in point.kind else torch.bfloat16
    dynamic = point.kind == "write_fp8_dynamic"
    scales = torch.full((2, pages, PAGE, kv) if dynamic else (2, 1), 6 / LARGEST, device=device)
    return Inputs(
        normal(tokens, (point.q_heads + 2 * kv) * DIM),
        normal(2, DIM),
        normal(4096, DIM),
        torch.randint(4096, (tokens,), device=device, generator=generator),
        torch.zeros(2, pages, PAGE, kv, DIM, device=device).to(dtype),
        scales,
        torch.randperm(pages * PAGE, device=device, generator=generator)[:tokens],
        normal(2, point.q_heads, tokens, dtype=torch.float32),
        normal(2, tokens, point.q_heads, DIM),
    )


# ---- the formula ----


def exact(point: Point, i: Inputs) -> tuple[Tensor, ...]:
    """What a call leaves, in float64: q, k and v where they change, and of the cache the slots' keys and values."""
    if point.kind == "merge":
        weights = torch.softmax(i.lse.double(), 0).transpose(-1, -2).unsqueeze(-1)
        return ((i.outs.double() * weights).sum(0),)
    key, value = (t.double() for t in i.key_value)
    if point.kind.startswith("write"):
        return key, value
    heads = i.qkv.double().unflatten(-1, (-1, DIM))
    q_and_k, count = heads[:, : point.q_heads + point.kv_heads], point.q_heads
    h = q_and_k / torch.sqrt(q_and_k.square().mean(-1, keepdim=True) + EPS)
    w = torch.cat([i.weights[:1].expand(count, -1), i.weights[1:].expand(point.kv_heads, -1)]).double()
    cos, sin = i.table.double()[i.positions][:, None].chunk(2, -1)
    a, b = (h * w).chunk(2, -1)
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    left = torch.cat((rotated, heads[:, q_and_k.shape[1] :]), 1).flatten(1)
    return (left, rotated[:, count:], value) if point.kind == "qk_norm_rope_and_write" else (left,)


def left(point: Point, i: Inputs, merged: Tensor | None) -> tuple[Tensor, ...]:
    """The same of what a call left."""
    if merged is not None:
        return (merged.double(),)
    lines = [half.flatten(0, 1).float()[i.slots].double() for half in i.cache]
    if "fp8" in point.kind:
        scales = i.scales.flatten(1, 2)[:, i.slots] if i.scales.dim() == 4 else i.scales.view(2, 1, 1)
        lines = [line * s.double().unsqueeze(-1) for line, s in zip(lines, scales, strict=True)]
    if point.kind.startswith("write"):
        return tuple(lines)
    rows = (i.qkv.double(),)
    return (*rows, *lines) if point.kind == "qk_norm_rope_and_write" else rows


def error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest error, as a fraction of a value's size and, for those near zero, of a hundredth of the typical."""
    pairs = zip(found, wanted, strict=True)
    return max(float(((a - b).abs() / (b.abs() + 0.01 * b.abs().mean())).max()) for a, b in pairs)


# ---- the providers: a call, which gives the merged states where it merges ----


def ours(point: Point, i: Inputs) -> Run:
    import liger_aot

    if point.kind == "merge":
        merge = liger_aot.load("merge_attention_states")
        return lambda: merge(i.outs[0], i.lse[0], i.outs[1], i.lse[1])
    key, value = i.key_value
    cache = {"key_cache": i.cache[0], "value_cache": i.cache[1], "slot_mapping": i.slots}
    if point.kind.startswith("write"):
        write = liger_aot.load("write_kv_cache")
        scales = {"k_scale": i.scales[0], "v_scale": i.scales[1]} if "fp8" in point.kind else {}
        return lambda: (write(key, value, **cache, **scales), None)[1]
    op = liger_aot.load("qk_norm_rope")
    heads = {"num_heads_q": point.q_heads, "num_heads_k": point.kv_heads, "num_heads_v": point.kv_heads}
    given = cache if point.kind == "qk_norm_rope_and_write" else {}
    rest = (i.weights[0], i.weights[1], i.table, i.positions)
    return lambda: (op(i.qkv, *rest, eps=EPS, **heads, **given), None)[1]


def vllm(point: Point, i: Inputs) -> Run:
    ops: Any = torch.ops._C
    caches: Any = torch.ops._C_cache_ops
    if point.kind == "merge":
        merged = torch.empty_like(i.outs[0])
        return lambda: (
            ops.merge_attn_states(merged, None, i.outs[0], i.lse[0], i.outs[1], i.lse[1], None),
            merged,
        )[1]
    key, value = i.key_value
    if point.kind == "write_fp8_dynamic":
        raise NotImplementedError("vLLM has it in Triton")
    kind, held = ("fp8", i.cache.view(torch.uint8)) if "fp8" in point.kind else ("auto", i.cache)

    def write() -> None:
        caches.reshape_and_cache_flash(key, value, held[0], held[1], i.slots, kind, i.scales[0], i.scales[1])

    if point.kind.startswith("write"):
        return write
    heads = (point.q_heads, point.kv_heads, point.kv_heads, DIM)

    def rotate() -> None:
        ops.fused_qk_norm_rope(i.qkv, *heads, EPS, i.weights[0], i.weights[1], i.table, True, i.positions)

    return rotate if point.kind == "qk_norm_rope" else lambda: (rotate(), write())[1]


PROVIDERS: dict[str, Callable[[Point, Inputs], Run]] = {"liger_aot": ours, "vllm": vllm}


# ---- measuring ----


def checked(point: Point, name: str, device: torch.device) -> float:
    """The error of one call, once it is known to be small."""
    inputs = drawn(point, device)
    wanted = exact(point, inputs)
    found = error(left(point, inputs, PROVIDERS[name](point, inputs)()), wanted)
    return small_error(found, TOLERANCE.get(point.kind, SIXTEEN_BITS))


def prepared(point: Point, name: str, device: torch.device) -> Ready:
    """A provider's graph and its error."""
    found = checked(point, name, device)
    return captured(PROVIDERS[name](point, drawn(point, device))), found


def at(point: Point, names: Sequence[str], device: torch.device) -> list[Result]:
    return beside_the_copy(point, names, lambda name: prepared(point, name, device), device)


def line(point: Point, found: Sequence[Result]) -> str:
    return f"{point.kind} {point.tokens} tokens, {point.q_heads}/{point.kv_heads} heads: {cells(found)}"


def main(arguments: Sequence[str]) -> int:
    command = Command("benchmarks.cache.cache", __doc__, PROVIDERS)
    command.library("vllm", "vLLM's _C_stable_libtorch.abi3.so")
    command.several("kinds", KINDS)
    options = command.read(arguments)
    points = [point for point in POINTS if point.kind in options.kinds]
    return command.measure("cache", points, lambda p: at(p, options.providers, command.device), line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
