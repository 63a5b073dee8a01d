"""Attention: warp-specialised kernels (Gluon, Hopper) and plain Triton's tiles. n is the number of keys of a forward,
and the head dimension of the backward's tiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.attention.workloads import Calls, workloads
from benchmarks.tuning.space import Problem, Row, Space, grid

DIMS = (64, 96, 128, 192, 256)
MASKS = ("full", "causal", "local")
BACKWARD, VARLEN_BACKWARD = "flash_attention_backward", "flash_attention_varlen_backward"
SPLITS = {
    64: (64, 0),
    96: (64, 32),
    128: (128, 0),
    192: (128, 64),
    256: (256, 0),
}  # of the head dimension, powers of two
LENGTHS = (2048, 8192)
WINDOW = 1024
SOFTCAP = 50.0  # Gemma 2's


def dim_of(p: Problem) -> int:
    """The head dimension: an axis, or n."""
    (dim,) = p.when.get("head_dim", p.sizes[:1])
    return int(dim)


def forward_blocks(p: Problem) -> Iterator[dict[str, int]]:
    """Keys per block, pipeline stages and consumer warp groups, as shared memory and registers allow."""
    dim = dim_of(p)
    for block_n in (32, 64, 128):
        for warp_groups, registers in ((2, 240), (3, 160)):
            rows = 64 * warp_groups
            for stages in (2, 3, 4, 6):
                shared = 2 * dim * (rows + 2 * stages * block_n)
                if 96 << 10 < shared <= 220 << 10 and not (warp_groups == 3 and dim > 128):
                    numbers = {"block_n": block_n, "stages": stages}
                    yield {**numbers, "warp_groups": warp_groups, "registers": registers}


def forward(p: Problem) -> Iterator[Row]:
    dim, full = dim_of(p), p.when["mask"] == ("full",)
    cache = (16, 32) if dim > 128 else 16
    for numbers in forward_blocks(p):
        yield from grid(
            form="warp_specialized", **numbers, ping_pong=(True, False),
            **({} if full else {"prefetch_tile": (False, True)}), num_warps=4, l2_megabytes=cache,
        )  # fmt: skip
    if full:  # keys and values in one pipeline
        yield from grid(
            form="warp_specialized", block_n=128, stages={64: 7, 96: 6, 128: 5, 192: 3}.get(dim, 2), warp_groups=2,
            registers=240, ping_pong=(True, False), shared_pipeline=True, broadcast_tile=(False, True), num_warps=4,
            l2_megabytes=cache,
        )  # fmt: skip


def varlen_forward(p: Problem) -> Iterator[Row]:
    for numbers in forward_blocks(p):
        yield from grid(
            form="warp_specialized", **numbers, ping_pong=(True, False), num_warps=4, l2_megabytes=16
        )


def backward(p: Problem, **keys: Any) -> Iterator[Row]:
    """Narrow: consumer warp groups that do the same; wide: one of them computes dQ."""
    if (dim := dim_of(p)) <= 128:
        yield from grid(
            form="narrow", block_m=128 if dim == 64 else 64, q_stages=(2, 3), dy_stages=(2, 3),
            pipelined_scores=(True, False), registers=240, num_warps=4, **keys,
        )  # fmt: skip
    else:
        registers, dq_registers = (192, 96) if dim == 192 else (208, 64)
        yield from grid(
            form="wide", block_m=64, q_stages=(2, 3), dy_stages=2, registers=registers, dq_registers=dq_registers,
            num_warps=4, **keys,
        )  # fmt: skip


def gradient_tiles(p: Problem, of: str) -> Iterator[Row]:
    """Plain Triton. The larger side of a tile stays in registers: keys for dK and dV, queries for dQ."""
    dim = dim_of(p)
    d1, d2 = SPLITS[dim]
    for kept in (32, 64, 128):
        for other in (16, 32, 64, 128):
            if 2048 <= kept * other <= 16384 // (1 if dim <= 128 else 2) and other <= kept:
                sides = (
                    {"block_n": kept, "block_m": other}
                    if of == "keys"
                    else {"block_m": kept, "block_n": other}
                )
                yield from grid(form="tiles", **sides, d1=d1, d2=d2, stages=(2, 3), num_warps=(4, 8))


def axes(dim: int, **others: Any) -> dict[str, tuple[Any, ...]]:
    return {"head_dim": (dim,), **{axis: (value,) for axis, value in others.items()}}


def rows_of_forward(masks: tuple[str, ...]) -> tuple[Problem, ...]:
    """Causal rows for few keys, and for any number."""
    return tuple(
        Problem(bound, lengths, when=axes(dim, mask=mask))
        for mask in masks
        for dim in DIMS
        for bound, lengths in (((1024, (512, 1024)),) if mask == "causal" and dim <= 128 else ())
        + ((None, LENGTHS),)
    )


TILES = tuple(Problem(None if dim == 256 else dim, (dim,), when={"softcap": (False,)}) for dim in DIMS)
DENSE_BACKWARD = tuple(
    Problem(None, LENGTHS, when=axes(dim, mask=mask, softcap=softcap, deterministic=deterministic))
    for dim in DIMS
    for mask in MASKS
    for softcap in ((False, True) if dim == 256 and mask == "local" else (False,))
    for deterministic in (False, True)
)


def calls(op: str, p: Problem, n: int, *others: Any) -> Any:
    """The calls for a problem's axes, with sequences of n where n is not the head dimension."""
    given = {axis: values[0] for axis, values in p.when.items()}
    mask = given.get("mask", "causal" if op.startswith(VARLEN_BACKWARD) else "full")
    made = Calls(
        op,
        causal=mask != "full",
        window=WINDOW if mask == "local" else None,
        softcap=SOFTCAP if given.get("softcap") else 0.0,
        deterministic=bool(given.get("deterministic")),
        lengths=(n,) if "head_dim" in given else LENGTHS,
    )
    return workloads(made, dim_of(p), *others)


def space(problems: tuple[Problem, ...], rows: Any, op: str, without: tuple[str, ...] = ()) -> Space:
    return Space(problems, rows, partial(calls, op), without)


HIDDEN = (f"{BACKWARD}_warp_specialized",)
SPACES = {
    "flash_attention_forward": space(rows_of_forward(MASKS), forward, "flash_attention"),
    "flash_attention_varlen_forward": space(
        rows_of_forward(MASKS[:2]), varlen_forward, "flash_attention_varlen"
    ),
    f"{BACKWARD}_dkdv": space(TILES, partial(gradient_tiles, of="keys"), BACKWARD, HIDDEN),
    f"{BACKWARD}_dq": space(TILES, partial(gradient_tiles, of="queries"), BACKWARD, HIDDEN),
    f"{BACKWARD}_warp_specialized": space(DENSE_BACKWARD, backward, BACKWARD),
    f"{VARLEN_BACKWARD}_warp_specialized": space(
        tuple(Problem(None, LENGTHS, when=axes(dim)) for dim in DIMS),
        partial(backward, waves=2),
        VARLEN_BACKWARD,
    ),
}
