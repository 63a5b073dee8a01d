"""The embedding's lookup, and the sums of its backward."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.tuning.space import FLOATS, Problem, Row, Space, grid

PROBLEMS = (Problem(None, (1024, 4096), FLOATS),)


def forward(p: Problem) -> Iterator[Row]:
    for block in (256, 512, 1024):
        yield from grid(form="tile", rows=4096 // block, block=block, num_warps=(4, 8))


def chunks(p: Problem) -> Iterator[Row]:
    """Equal indices beside each other are summed by one program."""
    yield from grid(form="chunk", chunk=(32, 64), rows=(4, 8, 16), block=512, stages=4, num_warps=(2, 4))
    yield from grid(form="chunk", chunk=32, rows=(4, 8), block=1024, stages=4, num_warps=4)


SPACES = {"embedding_forward": Space(PROBLEMS, forward), "embedding_backward": Space(PROBLEMS, chunks)}
