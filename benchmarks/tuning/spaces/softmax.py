"""Softmax and its kind: a row in one block, in several blocks in registers, or pipelined through shared memory."""

from __future__ import annotations

from collections.abc import Iterator
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
    row_in_blocks,
    row_in_registers,
    whole_rows,
)

Bounds = dict[int | None, tuple[int, ...]]
SHORT: Bounds = {256: (256,), 1024: (1024,), 4096: (4096,), 6144: (5120,), 8192: (8192,), 12288: (11008,)}
LONG: Bounds = {16384: (14336, 16384), 20480: (18944,), 32768: (32768,)}
PIPELINED: Bounds = {65536: (49152, 65536), 131072: (98304, 131072), 155648: (151936,), None: (262144,)}
PROBLEMS = (
    *by_length({**SHORT, **LONG, **PIPELINED}),
    *by_length(
        {4096: (4096,), 16384: (8192, 11008, 16384), 32768: (32768,), 65536: (65536,), None: (131072,)},
        ("fp32",),
    ),
)
FEW_ROWS = for_few_rows((2048, 3072, 4096, 5120, 7168, 8192), 256)
SHARED = 224 << 10  # bytes of a multiprocessor that a pipeline may fill


def all_pipelines(p: Problem, inputs: int = 1, whole: bool | None = None, **keys: Any) -> Iterator[Row]:
    """Rows that do not fit registers: an asynchronous-copy pipeline, with a part of the row in registers; one or two
    CTAs per SM. What fits neither is read twice."""
    for block, programs, num_warps, registers in (
        (8192, 1, 16, {}), (8192, 1, 32, {}), (4096, 1, 8, {}), (4096, 1, 16, {}), (4096, 2, 8, {"maxnreg": 128}),
    ):  # fmt: skip
        blocks = SHARED // programs // (inputs * block * p.width)
        for prefetch in (2, 4, 6, 8):
            stages = blocks - prefetch
            if prefetch > stages:
                continue
            for in_registers in (prefetch + 2, 2 * prefetch):
                whole_rows_only = {} if whole is None else {"whole": whole}
                yield dict(
                    form="pipeline", block=block, stages=stages, prefetch=prefetch,
                    in_registers=min(in_registers, stages), **whole_rows_only,
                    num_warps=num_warps, programs_per_multiprocessor=programs, **registers, **keys,
                )  # fmt: skip


def forward(p: Problem, interleaves: tuple[int, ...]) -> Iterator[Row]:
    if p.n <= 4096:
        yield from whole_rows(p, rows=(1, 2, 4, 8))
    if p.n <= 16384:
        yield from one_row(p)
    if p.n <= 32768:
        yield from row_in_blocks(p, "blocks", most=10)
    if p.n >= 65536:
        for interleave in interleaves:
            yield from pipelines(
                p, whole=p.max_n is not None, **({"interleave": interleave} if interleave else {})
            )
        yield from any_row(p, blocks=(8192, 16384))


def softmax_forward(p: Problem) -> Iterator[Row]:
    if p.most_rows is not None or (p.width == 2 and p.max_n and 1024 < p.n <= 8192):
        yield from row_in_registers(p)
    if p.most_rows is None:
        yield from forward(p, (1, 2, 4))


def backward(p: Problem, pipelined: bool) -> Iterator[Row]:
    if p.n <= 4096:
        yield from whole_rows(p, rows=(1, 2, 4, 8))
    if p.n <= 32768:
        yield from one_row(p)
    if p.n >= 65536 and pipelined:
        yield from pipelines(p, inputs=2)
    if p.n >= 32768:
        yield from any_row(p, blocks=(4096, 8192, 16384))


def pipelines(p: Problem, **keys: Any) -> Iterator[Row]:
    """Pipelines that cover the problem's rows, each once."""
    seen = []
    for row in all_pipelines(p, **keys):
        covers = (row["stages"] + row["in_registers"]) * row["block"]
        if (p.max_n is None or covers >= p.max_n) and row not in seen:
            seen.append(row)
            yield row


def sparsemax(p: Problem, way: str) -> Iterator[Row]:
    if p.n <= 1024:
        yield from whole_rows(p, rows=(2, 4, 8))
    if p.n <= 16384:
        yield from one_row(p)
    if p.n <= 32768:
        yield from row_in_blocks(p, "vectors", most=10)
        if way == "backward" or p.n >= 1024:
            yield from any_row(p, blocks=(1024, 2048, 4096))
    else:
        yield from any_row(p, blocks=(4096, 8192, 16384))


def chosen(p: Problem) -> Iterator[Row]:
    """The log-softmax of chosen elements: a row a program, a block at a time."""
    yield from any_row(p, "row", blocks=(1024, 2048, 4096, 8192))


def chosen_gradient(p: Problem) -> Iterator[Row]:
    yield from grid(form="tile", block=(2048, 4096, 8192), steps=(4, 8, 16), num_warps=(2, 4, 8, 16))


VOCABULARIES = (32000, 128256, 262144)
SPARSEMAX = by_length({**SHORT, **LONG, None: (65536,)})
SPACES = {
    "softmax_forward": Space((*FEW_ROWS, *PROBLEMS), softmax_forward),
    "softmax_backward": Space(PROBLEMS, partial(backward, pipelined=True)),
    "log_softmax_forward": Space(PROBLEMS, partial(forward, interleaves=(0,))),
    "log_softmax_backward": Space(PROBLEMS, partial(backward, pipelined=False)),
    **{f"sparsemax_{way}": Space(SPARSEMAX, partial(sparsemax, way=way)) for way in ("forward", "backward")},
    "selective_log_softmax_forward": Space(
        (Problem(8192, (4096,), FLOATS), Problem(None, VOCABULARIES, FLOATS)), chosen
    ),
    "selective_log_softmax_backward": Space((Problem(None, VOCABULARIES, FLOATS),), chosen_gradient),
}
