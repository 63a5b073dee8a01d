"""Hyper-connections and attention residuals, at the benchmarks' 4 streams."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.tuning.space import FLOATS, HALVES, LANES, Problem, Row, Space, by_length, grid, power, warps

SHARED = 224 << 10  # bytes of a block that stages may fill
STREAMS = {"streams": (4,)}


# ---- mhc_pre and mhc_post: a program has a part of a token's channels, of all streams ----


def channels(p: Problem, stages: int | tuple[int, ...] | None = None) -> Iterator[Row]:
    keys = {} if stages is None else {"stages": stages}
    for block in (256, 512, 1024):
        yield from grid(form="row", block=block, num_warps=warps(block, 4, 16, 4), **keys)


CHANNELS = (Problem(None, (4096, 7168), FLOATS, STREAMS),)


# ---- mhc_coefficients: n is streams * channels; phi has x's dtype ----


def project(p: Problem) -> Iterator[Row]:
    """A stage has ROWS x 64 elements of x and 64 x 32 of phi."""
    for rows in (64, 128, 256):
        for num_warps in (4, 8):
            for stages in (3, 4, 6):
                for programs in (1, 2, 3, 4):
                    staged = stages * programs * (rows * 128 + 4096)
                    if rows // num_warps in (16, 32) and staged <= SHARED:
                        yield from grid(
                            form="pipeline", rows=rows, stages=stages, num_warps=num_warps,
                            programs_per_multiprocessor=programs,
                        )  # fmt: skip


def project_backward(p: Problem) -> Iterator[Row]:
    """A warp has at least 16 tokens and 8 columns of x's tile, and a thread at most 64 elements of it."""
    for rows in (64, 128):
        for block in (64, 128):
            for num_warps in (4, 8):
                if rows < 16 * num_warps or block < 8 * num_warps or rows * block > 64 * LANES * num_warps:
                    continue
                for stages in (3, 4, 5):
                    for programs in (1, 2, 3, 4):
                        if stages * programs * rows * (2 * block + 64) <= SHARED:
                            yield from grid(
                                form="pipeline", rows=rows, block=block, stages=stages, num_warps=num_warps,
                                programs_per_multiprocessor=programs,
                            )  # fmt: skip


COLUMNS = (16384, 28672)
USUAL = {**STREAMS, "weight": ("dtype",)}


# ---- Attention residuals: a program has a token of each block, n channels ----


def attention(p: Problem, programs: bool = False) -> Iterator[Row]:
    """Persistent programs in the backward."""
    block = power(p.n)
    for num_warps in warps(block, 8, 32):
        for stages in (3, 4, 5):
            for count in (1, 2, 4, 8) if programs else (1,):
                if stages * count * block * p.width <= SHARED + count * block * p.width:
                    keys = {"programs_per_multiprocessor": count} if programs else {}
                    yield from grid(form="row", block=block, stages=stages, num_warps=num_warps, **keys)


LENGTHS: dict[int | None, tuple[int, ...]] = {1024: (1024,), 2048: (2048,), 4096: (4096,), 8192: (7168,)}
SPACES = {
    "mhc_pre_forward": Space(CHANNELS, channels),
    "mhc_pre_backward": Space(CHANNELS, partial(channels, stages=(1, 2, 3))),
    "mhc_post_forward": Space(CHANNELS, channels),
    "mhc_post_backward": Space(CHANNELS, channels),
    "mhc_coefficients_project": Space((Problem(None, COLUMNS, HALVES, USUAL),), project),
    "mhc_coefficients_project_backward": Space(
        (Problem(None, COLUMNS, ("bf16",), {**USUAL, "dz": ("bf16",)}),),
        project_backward,
    ),
    "attention_residuals_forward": Space(by_length(LENGTHS), attention),
    "attention_residuals_backward": Space(by_length(LENGTHS), partial(attention, programs=True)),
}
