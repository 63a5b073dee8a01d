"""Elementwise activations: elements a program."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.tuning.space import FLOATS, Problem, Row, Space, grid


def flat(p: Problem) -> Iterator[Row]:
    yield from grid(form="flat", block=(1024, 2048, 4096), num_warps=(2, 4, 8))


def flat_by_elements(p: Problem) -> Iterator[Row]:
    """Small blocks keep all multiprocessors busy with few elements; with many, launching so many programs is what takes
    the time."""
    if p.max_n is None:
        yield from flat(p)
    else:
        yield from grid(form="flat", aligned=True, block=(256, 512, 1024, 2048, 4096), num_warps=(1, 2, 4, 8))


FLAT = Space((Problem(None, (5120, 14336), FLOATS),), flat)
BY_ELEMENTS = Space(
    (
        Problem(1 << 17, (57344, 114688)),
        Problem(1 << 21, (458752, 1835008)),
        Problem(1 << 23, (3670016, 7340032)),
        Problem(None, (1 << 27,), FLOATS),
    ),
    flat_by_elements,
)
SPACES = {
    **{f"{op}_forward": BY_ELEMENTS for op in ("swiglu", "geglu")},
    **{f"{op}_backward": FLAT for op in ("swiglu", "geglu")},
    **{f"relu_squared_{way}": FLAT for way in ("forward", "backward")},
}
