"""Norms: short rows whole, longer ones in blocks; gradients by persistent programs that pipeline rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.tuning.space import (
    FLOATS,
    Problem,
    Row,
    Space,
    any_row,
    by_length,
    for_few_rows,
    grid,
    one_row,
    power,
    row_in_blocks,
    row_in_registers,
    warps,
    whole_rows,
)

LENGTHS: dict[int | None, tuple[int, ...]] = {
    128: (128,), 256: (256,), 512: (512,), 1024: (1024,), 2048: (2048,), 4096: (4096,), 6144: (5120,),
    8192: (8192,), 12288: (11008,), 16384: (14336, 16384), 20480: (18944,), 24576: (24576,), 32768: (28672, 32768),
}  # fmt: skip
WIDE: dict[int | None, tuple[int, ...]] = {
    n: (n,) for n in (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
}
ENDLESS: dict[int | None, tuple[int, ...]] = {None: (65536, 131072)}
HIDDEN = (1024, 2048, 3072, 4096, 5120, 7168, 8192)  # of today's decoders, and what lies between
FEW_ROWS = for_few_rows(HIDDEN, 256)
PROBLEMS = (*by_length({**LENGTHS, **ENDLESS}), *by_length({**WIDE, **ENDLESS}, ("fp32",)))


def rows_and_blocks(p: Problem, whole: str = "row", blocks: str = "long", **keys: Any) -> Iterator[Row]:
    """A forward: a row in one block, in several blocks, or of any length."""
    if p.n <= 2048:
        yield from whole_rows(p)
    if whole != "tile" and 1024 <= p.n <= 16384:
        yield from one_row(p, whole)
    if p.n >= 4096 and p.max_n is not None:
        yield from row_in_blocks(p, blocks, **keys)
    if p.max_n is None:
        yield from any_row(p, blocks, **keys)


def held_rows(others: Callable[[Problem], Iterator[Row]]) -> Callable[[Problem], Iterator[Row]]:
    """A forward that may also hold a row in registers: the only way that is tried for few rows."""

    def rows(p: Problem) -> Iterator[Row]:
        if p.most_rows is not None or (p.width == 2 and p.max_n and 1024 < p.n <= 8192):
            yield from row_in_registers(p)
        if p.most_rows is None:
            yield from others(p)

    return rows


def rmsnorm_forward(p: Problem) -> Iterator[Row]:
    yield from rows_and_blocks(p, "tile", bypass_l1=(False, True) if p.n > 8192 else False)
    if 2048 < p.n <= 16384:
        yield from whole_rows(p, rows=(1, 2))
    if p.max_n is None:  # a part of the row stays in registers
        yield from grid(
            form="long", block=(8192, 16384), in_registers=(16384, 32768), bypass_l1=(False, True),
            reverse=(False, True), num_warps=32,
        )  # fmt: skip


def layernorm_forward(p: Problem) -> Iterator[Row]:
    yield from rows_and_blocks(p, blocks="vectorised")
    if 8192 <= p.n <= 32768 and p.max_n:
        for block in (2048, 4096, 8192):
            blocks = -(-p.n // block)
            if 2 <= blocks <= 8:
                yield from grid(
                    form="prefetched", block=block, blocks=blocks, in_flight=tuple(sorted({1, 2, min(4, blocks)})),
                    num_warps=block // 256, maxnreg=(40, 64),
                )  # fmt: skip


SHARED = 224 << 10  # bytes of a block that stages may fill


def persistent(n: int) -> tuple[int, ...]:
    """CTAs per SM, of programs with a row of n in registers."""
    return (1, 2) if n > 2048 else (2, 3, 4) if n > 1024 else (3, 4, 6, 8)


def pipelined_rows(p: Problem, inputs: int = 2, **keys: Any) -> Iterator[Row]:
    """Persistent programs with a pipeline of rows, of so many inputs."""
    block = power(p.n)
    stages = tuple(count for count in (2, 3, 4, 5) if (count - 1) * inputs * block * p.width <= SHARED)
    if p.n <= 1024:
        for rows in (1, 2, 4, 8, 16):
            if 512 <= rows * block <= 4096:
                yield from grid(
                    form="tile", rows=rows, block=block, stages=(3, 4), num_warps=warps(rows * block, 8, 32, 8),
                    programs_per_multiprocessor=(2, 4), **keys,
                )  # fmt: skip
    if 512 < p.n <= 16384:
        yield from grid(
            form="row", block=block, stages=stages, num_warps=warps(block, 16, 64),
            programs_per_multiprocessor=persistent(block), **keys,
        )  # fmt: skip


def shared_rows(p: Problem, form: str = "pipeline", halves: int = 2, **keys: Any) -> Iterator[Row]:
    """Asynchronous copies of rows to shared memory, ``halves`` * pieces blocks each."""
    for block, num_warps in ((128, 1), (256, 2), (512, 4), (1024, 8), (2048, 16)):
        pieces = -(-p.n // (halves * block))
        if 2 <= pieces <= 12 and p.width == 2:
            for programs in (1, 2, 4, 8):
                if programs * num_warps <= 16 and programs * p.n <= 32768:
                    yield from grid(
                        form=form, blocks=pieces, block=block, stages=(2, 3, 4), num_warps=num_warps,
                        programs_per_multiprocessor=programs, **keys,
                    )  # fmt: skip


def split_rows(p: Problem) -> Iterator[Row]:
    """Split rows: several programs have a part each and exchange their sums."""
    for block, num_warps, programs in ((512, 1, 12), (1024, 2, 6), (2048, 4, 3)):
        split = -(-p.n // (2 * block))
        if 3 <= split <= 64:
            yield from grid(
                form="split", splits=split, block=block, stages=(2, 3, 4), num_warps=num_warps, maxnreg=168,
                programs_per_multiprocessor=programs,
            )  # fmt: skip


def backward(p: Problem, inputs: int = 2, **keys: Any) -> Iterator[Row]:
    yield from pipelined_rows(p, inputs, **(keys if p.n <= 4096 else {}))
    if p.max_n and p.width == 2 and p.n > 8192:
        yield from shared_rows(p) if p.n <= 24576 else ()
        yield from split_rows(p)
    if p.max_n is None:
        yield from grid(
            form="long",
            rows=(1, 2),
            block=(2048, 4096, 8192),
            num_warps=(8, 16, 32),
            programs_per_multiprocessor=(1, 2),
        )


SPLITS: dict[int | None, tuple[int, ...]] = {65536: (65536,), 131072: (131072,)}
GRADIENTS = (
    *by_length({**LENGTHS, **SPLITS, **ENDLESS}),
    *by_length({**{n: s for n, s in WIDE.items() if s < (32768,)}, None: (32768, 131072)}, ("fp32",)),
)


# ---- Modulated RMSNorm ----

IMAGES: dict[int | None, tuple[int, ...]] = {
    1024: (512, 1024), 1280: (1152,), 2048: (2048,), 3072: (3072,), 4096: (3072, 4096), 6144: (5120,),
    8192: (8192,), 12288: (11008,), 16384: (14336, 16384), 32768: (32768,),
}  # fmt: skip


def modulated_forward(p: Problem) -> Iterator[Row]:
    """A part of at most max_part_rows rows has one scale and shift, which a program reads once."""
    if p.n <= 16384:
        yield from shared_rows(p, max_part_rows=(2, 4, 8), min_group_rows=4)
        block = power(p.n)
        yield from grid(
            form="part", block=block, stages=(3, 4), max_part_rows=8, min_group_rows=4,
            num_warps=warps(block, 16, 64, 16), programs_per_multiprocessor=persistent(p.n),
        )  # fmt: skip
    if p.max_n is None or p.n >= 12288:
        yield from any_row(p, blocks=(2048, 4096, 8192))


def modulated_backward(p: Problem) -> Iterator[Row]:
    """Persistent programs with a pipeline of rows, in blocks that fit registers."""
    yield from shared_rows(p)
    for block in (256, 1024, 2048, 4096, 8192):
        blocks = -(-p.n // block)
        if blocks <= 6 and block <= power(p.n):
            yield from grid(
                form="part", blocks=blocks, block=block, stages=(3, 4), num_warps=warps(blocks * block, 16, 64, 16),
                programs_per_multiprocessor=persistent(p.n),
            )  # fmt: skip


def modulated_sums(p: Problem) -> Iterator[Row]:
    """The final sums; what is timed is the whole backward."""
    yield from grid(form="tile", block=(64, 128, 256), parts=(8, 16), num_warps=(2, 4))


def modulated_tokens(p: Problem) -> Iterator[Row]:
    """A scale and shift of each token's own."""
    yield from any_row(p, blocks=(1024, 2048, 4096), programs_per_multiprocessor=(2, 4, 8, 12))


# ---- GroupNorm: n is a group's elements, of images with channels first; of channels last a group's channels ----


def group_rows(p: Problem) -> Iterator[Row]:
    """A program has a group of up to 65536 elements. Longer groups are split over programs that exchange their sums."""
    if p.max_n:
        yield from row_in_blocks(p, "two_pass")
        for block, num_warps, programs in ((2048, 4, 4), (4096, 8, 2), (8192, 16, 1)):
            blocks = -(-p.n // block)
            if 2 <= blocks <= 10:
                yield from grid(
                    form="pipeline", blocks=blocks, block=block, stages=(1, 2), max_elements=p.n, num_warps=num_warps,
                    programs_per_multiprocessor=programs,
                )  # fmt: skip
        for block, num_warps in ((4096, 8), (8192, 16), (16384, 32)):
            yield from grid(form="two_pass", block=block, max_elements=65536, num_warps=num_warps)
    for block, num_warps, registers, programs in ((4096, 8, 80, 3), (8192, 16, 64, 2), (4096, 4, 128, 4)):
        yield from grid(
            form="two_pass", max_splits=256, block=block, max_elements=tuple(block * n for n in (3, 4, 6, 8)),
            exchange_elements=4096, num_warps=num_warps, maxnreg=registers, programs_per_multiprocessor=programs,
        )  # fmt: skip


def group_gradients(p: Problem) -> Iterator[Row]:
    """n is a channel's elements; rows are channels of a group."""
    for rows in (1, 2, 4, 8, 16):
        block = min(power(p.sizes[0]), 4096)
        elements = rows * block
        if 2048 <= elements <= 8192:
            yield from grid(
                form="two_pass", rows=rows, block=block, max_elements=49152, num_warps=warps(elements, 8, 32)
            )
            if power(p.sizes[0]) == block and p.max_n:
                yield from grid(
                    form="pipeline", blocks=5, rows=rows, block=block, stages=(1, 2), max_elements=5 * elements,
                    num_warps=(4, 8, 16), programs_per_multiprocessor=(1, 2),
                )  # fmt: skip
    for rows, block, num_warps, programs in ((2, 1024, 4, 5), (2, 2048, 8, 2), (4, 1024, 8, 2)):
        yield from grid(
            form="two_pass", max_splits=256, rows=rows, block=block,
            max_elements=tuple(rows * block * n for n in (4, 6, 8)), exchange_elements=4096, num_warps=num_warps,
            maxnreg=96, programs_per_multiprocessor=programs,
        )  # fmt: skip


COSTS = {
    "exchange_kb": 72,
    "read_kb": 24,
    "reduce_kb": 16,
    "kb_for_one_cta": 96,
}  # by which the host splits an image


def channels_last(p: Problem, way: str) -> Iterator[Row]:
    """Images split over programs, which read them twice or have them in shared memory and registers (``pipeline``)."""
    rows = (4, 8) if way == "forward" else (2, 4)
    groups = (8, 32) if p.sizes[0] < 32 else (2, 8)
    yield from grid(
        form="two_pass", max_splits=64, rows=rows, block=1024, groups=groups, max_elements=(16384, 24576, 32768),
        exchange_elements=4096, num_warps=4, maxnreg=128, programs_per_multiprocessor=4,
    )  # fmt: skip
    if p.max_n is None:
        return
    for lines, blocks, stages, prefetch in (
        ((256, 2, 26, (5, 6, 8)), (256, 4, 13, 3), (512, 1, 26, (6, 8)))
        if way == "forward"
        else ((256, 2, 13, (2, 3)), (256, 1, 27, (4, 6)))
    ):
        yield from grid(
            form="pipeline", max_splits=128, lines=lines, blocks=blocks, stages=stages, prefetch=prefetch, groups=32,
            lines_per_group=(16, 32) if p.sizes[0] >= 32 else lines // 8, splits_per_read=(32, 64), exchange_warps=4,
            registers=152 if way == "forward" else 104, num_warps=8, programs_per_multiprocessor=1, **COSTS,
        )  # fmt: skip


# ---- Dynamic tanh, whose rows need no sums ----


def dyt_forward(p: Problem) -> Iterator[Row]:
    for rows, block, num_warps in (
        ((3, 4, 6), 256, 1), ((2, 4, 8), 1024, 4), ((3, 4, 5, 6) if p.width == 2 else (2, 4), 512, 2)
    ):  # fmt: skip
        yield from grid(form="rows", rows=rows, block=block, num_warps=num_warps)
    yield from grid(
        form="row",
        block=(1024, 2048),
        stages=(3, 4),
        num_warps=(2, 4),
        programs_per_multiprocessor=(4, 6, 8, 10),
    )


def dyt_backward(p: Problem) -> Iterator[Row]:
    yield from grid(
        form="row",
        block=(512, 1024),
        stages=(3, 4),
        num_warps=(2, 4),
        programs_per_multiprocessor=(2, 4, 5, 6),
    )


DYT = (Problem(None, (4096, 8192, 11008, 16384)), Problem(None, (4096, 11008), ("fp32",)))


# ---- PolyNorm ----


def poly_norm_backward(p: Problem) -> Iterator[Row]:
    yield from pipelined_rows(p)
    for block in (1024, 2048, 4096):
        pieces = -(-p.n // block)
        if p.n > 4096 and pieces <= 12:
            yield from grid(
                form="row", blocks=pieces, block=block, stages=(2, 3), num_warps=warps(pieces * block, 16, 64, 16),
                programs_per_multiprocessor=(1, 2),
            )  # fmt: skip
    if p.n > 4096:
        yield from row_in_blocks(p, most=6, programs_per_multiprocessor=(2, 4))


POLY = by_length({n: sizes for n, sizes in LENGTHS.items() if n and n <= 16384})
SPACES = {
    "rmsnorm_forward": Space((*FEW_ROWS, *PROBLEMS), held_rows(rmsnorm_forward)),
    "rmsnorm_backward": Space(GRADIENTS, partial(backward, rows_for_one_cta=4)),
    "fused_add_rmsnorm_forward": Space((*FEW_ROWS, *PROBLEMS), held_rows(rows_and_blocks)),
    "fused_add_rmsnorm_backward": Space(GRADIENTS, partial(backward, inputs=3)),
    "layernorm_forward": Space((*FEW_ROWS, *PROBLEMS), held_rows(layernorm_forward)),
    "layernorm_backward": Space(GRADIENTS, backward),
    "poly_norm_forward": Space(PROBLEMS, rows_and_blocks),
    "poly_norm_backward": Space(POLY, poly_norm_backward),
    "dyt_forward": Space(DYT, dyt_forward),
    "dyt_backward": Space(DYT, dyt_backward),
    "modulated_rmsnorm_forward": Space(by_length({**IMAGES, None: (3072, 32768)}), modulated_forward),
    "modulated_rmsnorm_backward": Space(
        by_length({n: s for n, s in IMAGES.items() if n != 32768}), modulated_backward
    ),
    "modulated_rmsnorm_sums": Space((Problem(None, (1152, 3072), FLOATS),), modulated_sums),
    "modulated_rmsnorm_backward_tokens": Space(by_length({4096: (3072,)}), modulated_tokens),
    "groupnorm_forward": Space(
        by_length({10240: (10240,), 20480: (20480,), 40960: (40960,), None: (262144,)}), group_rows
    ),
    "groupnorm_backward": Space(
        by_length({256: (256,), 1024: (1024,), 4096: (4096,), None: (16384,)}), group_gradients
    ),
    "groupnorm_forward_channels_last": Space(
        by_length({20: (10, 16, 20), 40: (40,), None: (40,)}), partial(channels_last, way="forward")
    ),
    "groupnorm_backward_channels_last": Space(
        by_length({20: (10, 16), 64: (20, 40), None: (40,)}), partial(channels_last, way="backward")
    ),
}
