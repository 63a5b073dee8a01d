"""Decoding: what bounds it is reading the cache. A row has to be good for a few sequences, whose keys are split over
many programs, and for many. n is the head dimension, where that is no axis."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.decoding.workloads import FEW, MANY, SIZES, Sizes, workloads
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


def fused(p: Problem) -> Iterator[Row]:
    """Split KV and combine in one launch."""
    keys, rows, many = (p.when[axis][0] for axis in ("keys", "block_m", "many"))
    common = {
        "form": "wgmma",
        "startup_blocks": (2, 4),
        "parts": (2, 4),
        "part_keys": (1024, 2048),
        "num_warps": 4,
    }
    box_keys = 16 if keys in ("pages", "whole") else 64
    if many:
        for registers, programs in ((80, 6), (96, 5), (168, 3)):
            yield from grid(
                **common, block_n=64, box_keys=box_keys, stages=1, block_splits=4, maxnreg=registers,
                programs_per_multiprocessor=programs,
            )  # fmt: skip
        return
    for block_n, stages, programs in ((64, (2, 3, 5), 2), (64, (2, 3), 4), (128, (2, 3), 1), (128, 2, 3)):
        yield from grid(
            **common, block_n=block_n, box_keys=block_n if keys == "contiguous" else box_keys, stages=stages,
            block_splits=128 // rows, programs_per_multiprocessor=programs,
            **({"maxnreg": 512 // programs // 8 * 8} if programs > 2 else {}),
        )  # fmt: skip


def combine(p: Problem) -> Iterator[Row]:
    """How many splits one step combines."""
    yield from grid(form="tile", block_splits=(16, 32, 64), d=p.sizes[0], num_warps=(2, 4, 8))


def calls(sizes: Sizes | None, p: Problem, n: int, *others: Any) -> Any:
    given = {axis: values[0] for axis, values in p.when.items()}
    paged = given.get("paged") or given.get("keys", "contiguous") != "contiguous"
    page, tokens = 64 if paged else 0, 4 if given.get("wide") else given.get("block_m", 8) // 8
    page = 16 if given.get("keys") in ("pages", "whole") else page
    return workloads(
        p,
        given.get("head_dim", n),
        *others,
        sizes=sizes or (MANY if given["many"] else FEW),
        page=page,
        tokens=tokens,
    )


def by_dim(**axes: Any) -> tuple[Problem, ...]:
    when = {axis: (value,) for axis, value in axes.items()}
    return tuple(Problem(None if dim == 256 else dim, (dim,), when=when) for dim in (64, 128, 256))


EITHER = (False, True)
KEYS = ("contiguous", "pages", "large_pages")
SPACES = {
    f"{OP}_split": Space(
        tuple(p for wide in EITHER for paged in EITHER for p in by_dim(wide=wide, paged=paged)),
        split,
        partial(calls, SIZES),
        (f"{OP}_fused",),
    ),
    f"{OP}_fused": Space(
        tuple(
            Problem(
                None, (dim,), when={"head_dim": (dim,), "keys": (keys,), "many": (many,), "block_m": (rows,)}
            )
            for dim, kinds, many, every in (
                (64, KEYS, False, (8,)),
                (128, KEYS, False, (8,)),
                (128, (*KEYS[:2], "whole"), True, (8,)),
                (128, KEYS[::2], False, (16, 32)),
            )
            for keys in kinds
            for rows in every
        ),
        fused,
        partial(calls, None),
    ),
    f"{OP}_combine": Space(by_dim(), combine, partial(calls, FEW), (f"{OP}_fused",)),
}
