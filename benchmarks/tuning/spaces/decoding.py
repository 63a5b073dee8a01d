"""Decoding: what bounds it is reading the cache. A row has to be good for a few sequences, whose keys are split over
many programs, and for many. n is the head dimension, where that is no axis."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.decoding.workloads import FEW, SIZES, STREAMED, Sizes, workloads
from benchmarks.tuning.space import Problem, Row, Space, grid

OP = "flash_decoding"
BLOCKS = (16, 32, 64, 128, 256)  # keys


def split(p: Problem) -> Iterator[Row]:
    """Rows of queries a block; stages and CTAs per SM so that the keys in flight fill a quarter to all of the shared
    memory."""
    d, wide = p.sizes[0], p.when["wide"][0]
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
                        form="tile", block_m=(16, 32, 64) if wide else 16, block_n=block_n, d=d, stages=stages,
                        startup_blocks=256 // block_n or 1, num_warps=(2, 4, 8), programs_per_multiprocessor=programs,
                        **({} if wide else {"ctas_to_saturate": 1}),
                    )  # fmt: skip


def persistent(p: Problem) -> Iterator[Row]:
    """Persistent programs over a tensor map."""
    for block_n, stages, programs in (
        (128, 3, 1),
        (64, 4, 1),
        (64, 6, 1),
        (32, 12, 1),
        (64, 3, 2),
        (64, 4, 2),
        (32, 6, 2),
    ):
        yield from grid(
            form="warp_specialized", block_n=block_n, stages=stages, num_warps=4, programs_per_multiprocessor=programs,
            min_blocks_per_multiprocessor=200, max_rows=16, **({"maxnreg": 128} if programs > 1 else {}),
        )  # fmt: skip


def fused(p: Problem) -> Iterator[Row]:
    """Split KV and combine in one launch."""
    keys = p.when["keys"][0]
    rows = p.when["block_m"][0]
    common = {"form": "wgmma", "block_splits": 128 // rows, "startup_blocks": (2, 4), "num_warps": 4}
    if keys == "whole":
        for stages, programs in ((1, 5), (1, 6), (2, 3)):
            yield from grid(
                **common, block_n=64, box_keys=16, stages=stages, maxnreg=80, programs_per_multiprocessor=programs,
            )  # fmt: skip
        return
    for block_n, stages in ((64, (2, 3, 5)), (128, (2, 3))):
        box_keys = {"contiguous": block_n, "pages": 16, "large_pages": 64}[keys]
        programs = 1 if keys == "contiguous" else 2
        yield from grid(
            **common, block_n=block_n, box_keys=box_keys, stages=stages, programs_per_multiprocessor=programs
        )


def combine(p: Problem) -> Iterator[Row]:
    """How many splits one step combines."""
    yield from grid(form="tile", block_splits=(16, 32, 64), d=p.sizes[0], persistent=1, num_warps=(2, 4, 8))


def calls(sizes: Sizes, p: Problem, n: int, *others: Any) -> Any:
    given = {axis: values[0] for axis, values in p.when.items()}
    paged = given.get("paged") or given.get("keys", "contiguous") != "contiguous"
    page, tokens = 64 if paged else 0, 4 if given.get("wide") else given.get("block_m", 8) // 8
    page = 16 if given.get("keys") == "pages" else page
    return workloads(p, given.get("head_dim", n), *others, sizes=sizes, page=page, tokens=tokens)


def by_dim(**axes: Any) -> tuple[Problem, ...]:
    when = {axis: (value,) for axis, value in axes.items()}
    return tuple(Problem(None if dim == 256 else dim, (dim,), when=when) for dim in (64, 128, 256))


EITHER = (False, True)
KEYS = ("contiguous", "pages", "large_pages", "whole")
OTHERS = (f"{OP}_persistent", f"{OP}_fused")
SPACES = {
    f"{OP}_split": Space(
        tuple(p for wide in EITHER for paged in EITHER for p in by_dim(wide=wide, paged=paged)),
        split,
        partial(calls, SIZES),
        OTHERS,
    ),
    f"{OP}_persistent": Space(
        tuple(Problem(None, (dim,), when={"head_dim": (dim,)}) for dim in (96, 128)),
        persistent,
        partial(calls, STREAMED),
        OTHERS[1:],
    ),
    f"{OP}_fused": Space(
        tuple(
            Problem(None, (dim,), when={"head_dim": (dim,), "keys": (keys,), "block_m": (rows,)})
            for dim, kinds, every in ((64, KEYS[:2], (8,)), (128, KEYS, (8,)), (128, KEYS[::2], (16, 32)))
            for keys in kinds
            for rows in every
        ),
        fused,
        partial(calls, FEW),
        OTHERS[:1],
    ),
    f"{OP}_combine": Space(by_dim(), combine, partial(calls, FEW), OTHERS),
}
