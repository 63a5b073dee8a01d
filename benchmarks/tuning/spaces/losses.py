"""Losses over a vocabulary: a row in one block, in blocks, or pipelined through shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.tuning.space import FLOATS, Problem, Row, Space, any_row, by_length, grid, whole_rows
from benchmarks.tuning.spaces.softmax import pipelines

VOCABULARIES = {
    40960: (32000,), 53248: (50256, 50304), 65536: (65024,), 106496: (100352,), 131072: (128256,),
    155648: (151936,), 163840: (163840,), None: (201088, 262144),
}  # fmt: skip


def forward(p: Problem) -> Iterator[Row]:
    if p.n <= 1024:
        yield from whole_rows(p)
    elif p.n <= 16384:
        yield from any_row(p, blocks=(1024, 2048), stages=(1, 3))
    else:
        yield from any_row(p, blocks=(4096, 8192), stages=(1, 3))


def gradient(p: Problem) -> Iterator[Row]:
    if p.n <= 1024 and p.max_n:
        yield from whole_rows(p)
    else:
        yield from grid(form="pieces", block=(1024, 2048), num_warps=(1, 2, 4))


def in_place(p: Problem) -> Iterator[Row]:
    """The loss and its gradient. Logits that fit registers and shared memory are read once."""
    if p.n <= 1024:
        yield from whole_rows(p, rows=(1, 2, 4))
        return
    yield from any_row(p, blocks=(2048, 4096, 8192))
    if p.n > 16384:
        yield from grid(
            form="long", block=(8192, 16384), in_registers=1, patch=True, num_warps=16, maxnreg=64
        )
        cached = (81920, 98304, 114688) if p.width == 2 else (65536,)
        yield from grid(
            form="long", block=16384, in_registers=1, cached=cached, patch=True, num_warps=16, maxnreg=64
        )
        if p.max_n is not None:
            yield from pipelines(p)


def divergence(p: Problem, programs: tuple[int, ...]) -> Iterator[Row]:
    """Persistent programs; MANY: one for each piece of a row."""
    for block, num_warps, registers in (
        (2048, 4, (64,)), (2048, 8, (40, 64)), (4096, 8, (64, 80)), (4096, 16, (40, 64))
    ):  # fmt: skip
        yield from grid(
            form="persistent", block=block, num_warps=num_warps, maxnreg=registers,
            programs_per_multiprocessor=programs, fast=True,
        )  # fmt: skip
    yield from grid(
        form="persistent",
        block=2048,
        num_warps=4,
        maxnreg=96,
        programs_per_multiprocessor=programs,
        fast=True,
    )


MANY = 1_000_000
CROSS_ENTROPY = by_length({128: (128,), 1024: (1000, 1024), 16384: (4096, 16384)}, FLOATS)
DIVERGENCE = (Problem(None, (128256,), FLOATS),)
SPACES = {
    "cross_entropy_forward": Space((*CROSS_ENTROPY, Problem(None, (32000, 128256, 262144), FLOATS)), forward),
    "cross_entropy_gradient": Space(
        (CROSS_ENTROPY[0], Problem(None, (1024, 4096, 32000, 128256), FLOATS)), gradient
    ),
    "cross_entropy_in_place": Space(
        (
            *CROSS_ENTROPY[1:],
            *by_length(VOCABULARIES),
            *by_length({57344: (50256,), None: (128256,)}, ("fp32",)),
        ),
        in_place,
    ),
    **{
        f"{op}_{way}": Space(
            DIVERGENCE, partial(divergence, programs=(8, 16, MANY) if way == "both" else (8, 16))
        )
        for op in ("kl_div", "jsd", "tvd")
        for way in ("forward", "both", "backward")
    },
}
