"""Attention: n is the head dimension. Warp-specialised kernels (Gluon, Hopper) and plain Triton's tiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from benchmarks.attention.workloads import Calls, workloads
from benchmarks.tuning.space import Problem, Row, Space, grid

DIMS = (64, 96, 128, 192, 256)
FORWARD, BACKWARD = "flash_attention_forward", "flash_attention_backward"
VARLEN, VARLEN_BACKWARD = "flash_attention_varlen_forward", "flash_attention_varlen_backward"
SPLITS = {
    64: (64, 0),
    96: (64, 32),
    128: (128, 0),
    192: (128, 64),
    256: (256, 0),
}  # of the head dimension, powers of two
WINDOW = 1024
SOFTCAP = 50.0  # Gemma 2's


def by_dim(*dims: int) -> tuple[Problem, ...]:
    """A row for each head dimension, the last one for all larger ones."""
    return tuple(Problem(None if dim == max(DIMS) else dim, (dim,)) for dim in dims)


def halves(p: Problem) -> dict[str, int]:
    d1, d2 = SPLITS[p.sizes[0]]
    return {"d1": d1, "d2": d2}


def tile_sizes(p: Problem) -> Mapping[str, Any]:
    """How tensor maps and the output's tile divide the head dimension."""
    d1, d2 = SPLITS[p.sizes[0]]
    return {"d1": d1, "d2": d2, "box": 32 if d2 == 32 else 64, "out": min(d1, 128)}


def forward_blocks(p: Problem) -> Iterator[Row]:
    """Keys per block, pipeline stages and consumer warp groups, as shared memory and registers allow."""
    dim = p.sizes[0]
    for block_n in (32, 64, 128):
        for warp_groups, registers in ((2, 240), (3, 160)):
            rows = 64 * warp_groups
            for stages in (2, 3, 4, 6):
                shared = 2 * dim * (rows + 2 * stages * block_n)
                if 96 << 10 < shared <= 220 << 10 and not (warp_groups == 3 and dim > 128):
                    numbers = {"block_n": block_n, "stages": stages}
                    yield {**numbers, "warp_groups": warp_groups, "registers": registers}


def forward(p: Problem, masked: bool, **keys: Any) -> Iterator[Row]:
    cache = (16, 32) if p.sizes[0] > 128 else 16
    for numbers in forward_blocks(p):
        yield from grid(
            form="groups", **numbers, **tile_sizes(p), turns=(True, False), **({"late": (0, 1)} if masked else {}),
            num_warps=4, cache_megabytes=cache, **keys,
        )  # fmt: skip
    if not masked:  # keys and values in one pipeline; the scheduler broadcasts the tile's coordinates
        yield from grid(
            form="groups", block_n=128, **tile_sizes(p), stages={64: 7, 96: 6, 128: 5, 192: 3}.get(p.sizes[0], 2),
            warp_groups=2, registers=240, turns=(True, False), one_ring=1, told=(0, 1), num_warps=4,
            cache_megabytes=cache,
        )  # fmt: skip


def varlen_forward(p: Problem, **keys: Any) -> Iterator[Row]:
    """``ask``: how many blocks before a tile's end the next tile is fetched from the scheduler."""
    for numbers in forward_blocks(p):
        yield from grid(
            form="groups", **numbers, turns=(True, False), ask=(3, 6), num_warps=4, cache_megabytes=16, **keys
        )


def backward(p: Problem) -> Iterator[Row]:
    if (dim := p.sizes[0]) <= 128:
        block_m = 128 if dim == 64 else 64
        yield from grid(
            form="groups", block_m=block_m, q_stages=(2, 3), dy_stages=(2, 3), ahead=(True, False), warp_groups=2,
            registers=240, num_warps=4,
        )  # fmt: skip
    else:
        registers, dq_registers = (192, 96) if dim == 192 else (208, 64)
        yield from grid(
            form="roles", block_m=64, q_stages=(2, 3), dy_stages=2, warp_groups=3, registers=registers,
            dq_registers=dq_registers, num_warps=4,
        )  # fmt: skip


def gradient_tiles(p: Problem, of: str) -> Iterator[Row]:
    """Plain Triton. The larger side of a tile stays in registers: keys for dK and dV, queries for dQ."""
    dim = p.sizes[0]
    for kept in (32, 64, 128):
        for walked in (16, 32, 64, 128):
            if 2048 <= kept * walked <= 16384 // (1 if dim <= 128 else 2) and walked <= kept:
                sides = (
                    {"block_n": kept, "block_m": walked}
                    if of == "keys"
                    else {"block_m": kept, "block_n": walked}
                )
                yield from grid(form="tiles", **sides, **halves(p), stages=(2, 3), num_warps=(4, 8))


def space(problems: tuple[Problem, ...], rows: Any, calls: Calls, without: tuple[str, ...] = ()) -> Space:
    return Space(problems, rows, partial(workloads, calls), without)


SHORT = Calls("flash_attention", causal=True, lengths=(512, 1024))
LONG = (f"{FORWARD}_short",)
SPACES = {
    FORWARD: space(by_dim(*DIMS), partial(forward, masked=False), Calls("flash_attention")),
    f"{FORWARD}_causal": space(
        by_dim(*DIMS), partial(forward, masked=True), Calls("flash_attention", causal=True), LONG
    ),
    f"{FORWARD}_local": space(
        by_dim(*DIMS),
        partial(forward, masked=True),
        Calls("flash_attention", causal=True, window=WINDOW),
        LONG,
    ),
    f"{BACKWARD}_keys": space(
        by_dim(*DIMS), partial(gradient_tiles, of="keys"), Calls(BACKWARD), (f"{BACKWARD}_groups",)
    ),
    f"{BACKWARD}_queries": space(
        by_dim(*DIMS), partial(gradient_tiles, of="queries"), Calls(BACKWARD), (f"{BACKWARD}_groups",)
    ),
}
for dim in DIMS:
    one = (Problem(None, (dim,)),)
    for ending, order in ((e, o) for e in ("", "_causal", "_local", "_capped") for o in ("", "_ordered")):
        if ending != "_capped" or dim == 256:
            SPACES[f"{BACKWARD}_groups_{dim}{ending}{order}"] = space(
                one,
                backward,
                Calls(
                    BACKWARD, causal=ending != "", window=WINDOW if ending == "_local" else None,
                    softcap=SOFTCAP if ending == "_capped" else 0.0, deterministic=order != "",
                ),
            )  # fmt: skip
    SPACES[f"{VARLEN}_groups_{dim}"] = space(
        one,
        varlen_forward,
        Calls("flash_attention_varlen", causal=True),
        (f"{VARLEN}_groups_{dim}_short",) * (dim <= 128),
    )
    SPACES[f"{VARLEN}_groups_{dim}_full"] = space(one, varlen_forward, Calls("flash_attention_varlen"))
    SPACES[f"{VARLEN_BACKWARD}_groups_{dim}"] = space(one, backward, Calls(VARLEN_BACKWARD, causal=True))
    if dim <= 128:
        SPACES[f"{FORWARD}_short_{dim}"] = space(
            one, partial(forward, masked=True, longest=(1024, 2048)), SHORT
        )
        SPACES[f"{VARLEN}_groups_{dim}_short"] = space(
            one,
            partial(varlen_forward, longest=1024),
            Calls("flash_attention_varlen", causal=True, lengths=(256, 512)),
        )
