"""flash-attn's functions on our ops: signatures, results, the cache that is written."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from liger_aot import flash_attn
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.registry import load
from tests.harness.gpu_fp8 import fp8_of_gpu

# flash-attn 2.8's parameters, which may be given by position; after them FlashAttention-3's, by keyword alone.
COMMON = ["softmax_scale", "causal", "window_size", "softcap"]
LAST = ["alibi_slopes", "deterministic", "return_attn_probs"]
SIGNATURES = {
    "flash_attn_func": ["q", "k", "v", "dropout_p", *COMMON, *LAST],
    "flash_attn_varlen_func": [
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "dropout_p", *COMMON, *LAST,
        "block_table",
    ],
    "flash_attn_with_kvcache": [
        "q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx",
        "cache_leftpad", "block_table", *COMMON, "rotary_interleaved", "alibi_slopes", "num_splits",
        "return_softmax_lse",
    ],
}  # fmt: skip
BY_KEYWORD = {
    "flash_attn_func": ["s_aux"],
    "flash_attn_varlen_func": ["s_aux", "k_descale", "v_descale"],
    "flash_attn_with_kvcache": ["s_aux", "k_descale", "v_descale"],
}


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_signatures() -> None:
    assert set(SIGNATURES) == set(flash_attn.__all__)
    for name, parameters in SIGNATURES.items():
        found = inspect.signature(getattr(flash_attn, name)).parameters
        assert list(found) == [*parameters, *BY_KEYWORD[name]]
        assert [n for n, p in found.items() if p.kind is p.KEYWORD_ONLY] == BY_KEYWORD[name]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Of one batch in float32, (batch, tokens, heads, dim)."""
    q, k, v = (t.transpose(1, 2).float() for t in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True, **options)
    return o.transpose(1, 2)


def assert_close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.float(), want, rtol=2**-7, atol=2**-7)  # a rounding to bfloat16


def test_flash_attn_func() -> None:
    q, k, v = drawn(2, 9, 4, 16), drawn(2, 9, 2, 16, seed=1), drawn(2, 9, 2, 16, seed=2)
    assert_close(flash_attn.flash_attn_func(q, k, v), plain(q, k, v))
    o, lse, probs = flash_attn.flash_attn_func(
        q, k, v, 0.0, 0.3, True, (3, -1), 0.0, None, True, return_attn_probs=True
    )
    at = torch.arange(9)
    seen = (at[:, None] >= at) & (at[:, None] - at <= 3)
    assert_close(o, plain(q, k, v, seen, scale=0.3))
    assert probs is None and lse.shape == (2, 4, 9)


def test_flash_attn_varlen_func() -> None:
    q, k, v = drawn(14, 4, 16), drawn(14, 2, 16, seed=1), drawn(14, 2, 16, seed=2)
    starts = torch.tensor([0, 5, 14], dtype=torch.int32)
    o = flash_attn.flash_attn_varlen_func(q, k, v, starts, starts, 9, torch.tensor(9), causal=True)
    for a, b in ((0, 5), (5, 14)):
        one = (t[None, a:b] for t in (q, k, v))
        assert_close(o[None, a:b], plain(*one, is_causal=True))


def test_flash_attn_varlen_func_of_a_paged_cache() -> None:
    """The last queries of two sequences, whose keys are in pages."""
    q, keys, values = drawn(7, 4, 16), drawn(60, 2, 16, seed=1), drawn(60, 2, 16, seed=2)
    lengths, counts = (40, 20), (5, 2)
    table = torch.tensor([[3, 0, 4], [1, 2, -1]], dtype=torch.int32)
    k_cache, v_cache = torch.zeros(5, 16, 2, 16).bfloat16(), torch.zeros(5, 16, 2, 16).bfloat16()
    starts_q, starts_k = torch.tensor([0, 5, 7]).int(), torch.tensor([0, 40, 60]).int()
    for b, (first, length) in enumerate(zip((0, 40), lengths, strict=True)):
        for i in range(length):
            place = int(table[b, i // 16]), i % 16
            k_cache[place], v_cache[place] = keys[first + i], values[first + i]
    o, lse, probs = flash_attn.flash_attn_varlen_func(
        q, k_cache, v_cache, starts_q, starts_k, 5, 40, causal=True, return_attn_probs=True, block_table=table
    )
    assert probs is None and lse.shape == (4, 7)
    for b, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        rows, own = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        mask = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        assert_close(o[None, rows], plain(q[None, rows], keys[None, own], values[None, own], mask))


@pytest.mark.parametrize("paged", [False, True])
def test_flash_attn_with_kvcache(paged: bool) -> None:
    """Two sequences of 20 and 3 keys, to which two new tokens come."""
    batch, capacity, new = 2, 32, 2
    keys, values = drawn(batch, capacity, 2, 16, seed=1), drawn(batch, capacity, 2, 16, seed=2)
    q, k, v = drawn(batch, new, 4, 16), drawn(batch, new, 2, 16, seed=3), drawn(batch, new, 2, 16, seed=4)
    lengths = torch.tensor([20, 3], dtype=torch.int32)
    table = None
    k_cache, v_cache = keys.clone(), values.clone()
    if paged:  # of 16 keys each, in another order
        table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
        k_cache, v_cache = (torch.empty(4, 16, 2, 16, dtype=torch.bfloat16) for _ in range(2))
        for cache, whole in ((k_cache, keys), (v_cache, values)):
            cache[table.long()] = whole.view(batch, 2, 16, 2, 16)
    o, lse = flash_attn.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=lengths,
        block_table=table,
        causal=True,
        return_softmax_lse=True,
    )
    assert lse.shape == (batch, 4, new)
    for b, length in enumerate(lengths.tolist()):
        seen = torch.cat((keys[b, :length], k[b])), torch.cat((values[b, :length], v[b]))
        mask = torch.ones(new, length + new, dtype=torch.bool).tril(length)
        assert_close(o[b : b + 1], plain(q[b : b + 1], seen[0][None], seen[1][None], mask))
    whole = flash_attn.flash_attn_with_kvcache(q, keys, values, cache_seqlens=5)
    assert_close(whole, plain(q, keys[:, :5], values[:, :5]))


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
@pytest.mark.parametrize("device", DEVICES)
def test_a_cache_of_fp8(device: str, fp8: torch.dtype, paged: bool) -> None:
    """What is read counts the descale's times, and what is written is divided by it: a scale for each head, as
    FlashAttention-3 has it, (batch, kv_heads)."""
    if device == "cuda" and fp8 != fp8_of_gpu():
        pytest.skip(f"this GPU has no {fp8}")
    batch, capacity, new, lengths = 2, 32, 2, [20, 3]
    table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32, device=device) if paged else None
    by = {"k_descale": torch.tensor([0.5, 3.0]).to(device), "v_descale": torch.tensor([2.0, 0.25]).to(device)}
    kept, given = [], []
    for seed, scale in enumerate(by.values()):
        codes = drawn(batch, capacity, 2, 16, seed=seed + 1).to(fp8).to(device)
        cache = codes.clone()
        if table is not None:
            cache = torch.zeros(4, 16, 2, 16, dtype=torch.uint8, device=device)
            cache[table.long()] = codes.view(torch.uint8).view(batch, 2, 16, 2, 16)
            cache = cache.view(fp8)
        kept.append(codes.float() * scale[:, None])
        given.append(cache)
    q, k, v = (drawn(batch, new, heads, 16, seed=s).to(device) for s, heads in ((0, 4), (3, 2), (4, 2)))
    o = flash_attn.flash_attn_with_kvcache(
        q, *given, k, v, cache_seqlens=torch.tensor(lengths).to(device), block_table=table, causal=True,
        **{name: t.expand(batch, 2) for name, t in by.items()},
    )  # fmt: skip
    # What was written is read back by the function for packed queries, too.
    starts_q, starts_k = (torch.tensor(t, dtype=torch.int32, device=device) for t in ([0, 2, 4], [0, 22, 27]))
    packed = o.flatten(0, 1)
    if paged:
        packed = flash_attn.flash_attn_varlen_func(
            q.flatten(0, 1), *given, starts_q, starts_k, 2, 22, causal=True, block_table=table, **by
        )
    for b, length in enumerate(lengths):
        seen = []
        for old, x, scale in zip(kept, (k, v), by.values(), strict=True):
            written = (x[b].float() / scale[:, None]).to(fp8).float() * scale[:, None]
            seen.append(torch.cat((old[b, :length], written))[None])
        mask = torch.ones(new, length + new, dtype=torch.bool, device=device).tril(length)
        want = plain(q[b : b + 1], *seen, mask)
        assert_close(o[b : b + 1], want)
        assert_close(packed[None, 2 * b : 2 * b + 2], want)


@pytest.mark.gpu
@pytest.mark.parametrize("paged", [False, True])
def test_steps_in_a_cuda_graph(paged: bool) -> None:
    """One graph for all steps of decoding: the lengths grow between replays, and each step's keys are in the cache that
    the next one reads."""
    batch, capacity, steps = 3, 64, 5
    table = torch.randperm(12).view(batch, 4).int().cuda() if paged else None
    shape = (12, 16, 2, 64) if paged else (batch, capacity, 2, 64)
    k_cache, v_cache = (torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    lengths = torch.tensor([0, 15, 58], dtype=torch.int32, device="cuda")
    first = lengths.tolist()
    drawn_q, drawn_k, drawn_v = (
        drawn(steps, batch, 1, heads, 64, seed=s).cuda() for s, heads in ((0, 4), (1, 2), (2, 2))
    )
    q, k, v = drawn_q[0].clone(), drawn_k[0].clone(), drawn_v[0].clone()

    def step() -> Tensor:
        o: Tensor = flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=table, causal=True
        )
        return o

    for name in ("flash_decoding", "write_kv_cache"):
        load(name).preload("cuda")
    step()  # writes what the first replay writes again
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step()
    for i in range(steps):
        for to, source in ((q, drawn_q), (k, drawn_k), (v, drawn_v)):
            to.copy_(source[i])
        graph.replay()
        lengths += 1
        for b, before in enumerate(first):
            zeros = torch.zeros(1, before, 2, 64, device="cuda", dtype=torch.bfloat16)
            keys, values = (torch.cat((zeros, t[: i + 1, b].transpose(0, 1)), 1) for t in (drawn_k, drawn_v))
            assert_close(o[b : b + 1], plain(q[b : b + 1], keys, values))


def test_new_keys_without_room_are_not_written() -> None:
    """Neither into the next sequence nor into a page of another one; reading the cache reports the length."""
    for table in (None, torch.tensor([[0], [1]], dtype=torch.int32)):
        k_cache, v_cache = torch.zeros(2, 16, 2, 16).bfloat16(), torch.zeros(2, 16, 2, 16).bfloat16()
        new = torch.ones(2, 3, 2, 16).bfloat16()
        with pytest.raises(ArgumentError, match=r"cache_seqlens must be in \[0, 16\].*got 18"):
            flash_attn.flash_attn_with_kvcache(
                drawn(2, 3, 4, 16),
                k_cache,
                v_cache,
                new,
                new,
                cache_seqlens=torch.tensor([15, 4]),
                block_table=table,
            )
        written = [[15], [4, 5, 6]]
        for cache in (k_cache, v_cache):
            assert [cache[b].flatten(1).any(-1).nonzero().flatten().tolist() for b in range(2)] == written


def test_a_descale_that_is_not_given_is_1() -> None:
    q, k, v = drawn(2, 1, 4, 16), *(drawn(2, 1, 2, 16, seed=seed) for seed in (1, 2))
    by, ones, found = torch.tensor([0.5, 3.0]), torch.ones(2), []
    for one in ({"k_descale": by, "v_descale": ones}, {"k_descale": by}):
        caches = [drawn(2, 16, 2, 16, seed=seed).clamp(-200, 200).to(torch.float8_e4m3fn) for seed in (3, 4)]
        o = flash_attn.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=5, **one)
        found.append([o, *(cache.view(torch.uint8) for cache in caches)])
    assert all(map(torch.equal, *found))


def test_descales_that_cannot_be() -> None:
    q, cache = drawn(2, 1, 2, 16), torch.zeros(2, 16, 2, 16).to(torch.float8_e4m3fn)
    by = torch.ones(2)
    with pytest.raises(ArgumentError, match="v_scale must have as many elements as k_scale, 2, got 1"):
        flash_attn.flash_attn_with_kvcache(q, cache, cache, k_descale=by, v_descale=by[:1])
    with pytest.raises(
        ArgumentError, match=r"k_descale must have one element, .* shape \(2, 2\) with strides \(2, 1\)"
    ):
        flash_attn.flash_attn_with_kvcache(q, cache, cache, k_descale=torch.ones(2, 2), v_descale=by)
    with pytest.raises(ArgumentTypeError, match=r"v_descale must be a torch\.Tensor, got float"):
        flash_attn.flash_attn_with_kvcache(q, cache, cache, k_descale=by, v_descale=1.0)  # type: ignore[arg-type]
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    with pytest.raises(
        ArgumentError, match="k_descale and v_descale are for a cache, which needs block_table"
    ):
        flash_attn.flash_attn_varlen_func(
            q[:, 0], q[:, 0], q[:, 0], starts, starts, 1, 1, k_descale=by, v_descale=by
        )


def test_what_is_not_there() -> None:
    q = drawn(1, 4, 2, 16)
    with pytest.raises(ArgumentError, match=r"flash_attn_func: dropout_p must be 0, got 0\.1"):
        flash_attn.flash_attn_func(q, q, q, 0.1)
    with pytest.raises(ArgumentError, match="flash_attn_func: alibi_slopes must be None, got Tensor"):
        flash_attn.flash_attn_func(q, q, q, alibi_slopes=torch.ones(2))
    with pytest.raises(ArgumentError, match="rotary_cos must be None, got Tensor"):
        flash_attn.flash_attn_with_kvcache(q, q, q, rotary_cos=torch.ones(2))
    with pytest.raises(ArgumentError, match="k, v and cache_seqlens belong together"):
        flash_attn.flash_attn_with_kvcache(q, q, q, q)
