"""Rotary embedding: n is the part of a head that is rotated, a row is a head of a token."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.tuning.space import Problem, Row, Space, by_length, grid, warps


def heads(p: Problem) -> Iterator[Row]:
    """Several heads a program, each in one block or in a few."""
    for block in (32, 64, 128):
        if block <= p.n:
            for rows in (8, 16, 32, 64):
                if 512 <= rows * p.n <= 4096:
                    counts = warps(rows * p.n, 4, 16, limit=8)
                    yield from grid(
                        form="rows", rows=rows, block=block, blocks=-(-p.n // block), num_warps=counts
                    )


def space(*dims: int) -> Space:
    return Space(
        (*by_length({n: (n,) for n in dims}), *by_length({n: (n,) for n in dims if n > 32}, ("fp32",))), heads
    )


SPACES = {
    "rope_halves": space(32, 64, 128),
    "rope_pairs": space(64, 128, 256),
    "rope_llama4": space(128),
    "rope_multimodal": space(64),
}
