"""Elementwise activations: elements a program."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.tuning.space import FLOATS, Problem, Row, Space, grid


def flat(p: Problem) -> Iterator[Row]:
    yield from grid(form="flat", block=(1024, 2048, 4096), num_warps=(2, 4, 8))


FLAT = Space((Problem(None, (5120, 14336), FLOATS),), flat)
SPACES = {
    f"{op}_{way}": FLAT for op in ("swiglu", "geglu", "relu_squared") for way in ("forward", "backward")
}
