"""Decoding: n is the head dimension. What bounds it is reading the cache. A row has to be good for a few sequences,
whose keys are split over many programs, and for many."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.decoding.workloads import FEW, SIZES, STREAMED, workloads
from benchmarks.tuning.space import Problem, Row, Space, grid

OP = "flash_decoding"
DIMS = (Problem(64, (64,)), Problem(128, (128,)), Problem(None, (256,)))
TO_128 = (Problem(64, (64,)), Problem(None, (128,)))
BLOCKS = (16, 32, 64, 128, 256)  # keys


def split(p: Problem, rows: tuple[int, ...]) -> Iterator[Row]:
    """``rows`` of queries a block; stages and CTAs per SM so that the keys in flight fill a quarter to all of the
    shared memory."""
    d = p.sizes[0]
    for block_n in BLOCKS:
        if 4096 <= block_n * d <= 16384:
            for stages, programs in (
                (2, 2),
                (2, 3),
                (2, 4),
                (3, 1),
                (3, 2),
                (3, 3),
                (4, 2),
                (4, 3),
                (5, 3),
                (6, 1),
            ):
                if 48 << 10 <= 4 * block_n * d * stages * programs <= 220 << 10:
                    yield from grid(
                        form="tile", block_m=rows, block_n=block_n, d=d, stages=stages, start=256 // block_n or 1,
                        num_warps=(2, 4, 8), programs_per_multiprocessor=programs,
                    )  # fmt: skip


def stream(p: Problem) -> Iterator[Row]:
    """Persistent programs over a tensor map."""
    d1, d2 = {64: (64, 0), 96: (64, 32), 128: (128, 0)}[p.sizes[0]]
    for block_n, stages, programs in (
        (128, 5, 1),
        (128, 3, 1),
        (64, 4, 1),
        (64, 6, 1),
        (32, 12, 1),
        (64, 3, 2),
        (32, 6, 2),
    ):
        yield dict(
            form="stream", block_n=block_n, d1=d1, d2=d2, box=32 if d2 else 64, stages=stages, num_warps=4,
            programs_per_multiprocessor=programs, least_blocks=200, **({"maxnreg": 128} if programs > 1 else {}),
        )  # fmt: skip


def once(p: Problem, programs: int) -> Iterator[Row]:
    """Split KV and combine in one launch."""
    for block_n, stages in ((64, (2, 3, 5)), (128, (2, 3))):
        yield from grid(
            form="once", block_m=8, block_n=block_n, d=p.sizes[0], stages=stages, shares=16, start=(2, 4), num_warps=4,
            programs_per_multiprocessor=programs,
        )  # fmt: skip


def combine(p: Problem) -> Iterator[Row]:
    """How many splits one step combines."""
    yield from grid(form="tile", shares=(16, 32, 64), d=p.sizes[0], evenly=1, num_warps=(2, 4, 8))


OTHERS = (f"{OP}_stream", f"{OP}_once")
SPACES = {
    **{
        f"{OP}_{kind}{paged}": Space(
            DIMS,
            partial(split, rows=rows),
            partial(workloads, sizes=SIZES, page=64 if paged else 0, tokens=tokens),
            OTHERS,
        )
        for kind, rows, tokens in (("split", (16,), 1), ("wide", (16, 32, 64), 4))
        for paged in ("", "_paged")
    },
    f"{OP}_stream": Space(
        (Problem(64, (64,)), Problem(96, (96,)), Problem(None, (128,))),
        stream,
        partial(workloads, sizes=STREAMED),
        (f"{OP}_once",),
    ),
    **{
        f"{OP}_once{paged}": Space(
            TO_128,
            partial(once, programs=2 if paged else 1),
            partial(workloads, sizes=FEW, page=64 if paged else 0),
        )
        for paged in ("", "_paged")
    },
    f"{OP}_combine": Space(DIMS, combine, partial(workloads, sizes=FEW), OTHERS),
}
