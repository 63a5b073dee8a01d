"""Elementwise activations: elements a program."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.tuning.space import FLOATS, Problem, Row, Space, grid


def flat(p: Problem) -> Iterator[Row]:
    if p.most_rows is None:
        yield from grid(form="flat", block=(1024, 2048, 4096), num_warps=(2, 4, 8))
    else:
        yield from grid(form="flat", aligned=True, block=(256, 512, 1024), num_warps=(1, 2, 4))


ANY_ROWS = Problem(None, (5120, 14336), FLOATS)
FEW_ROWS = Problem(None, (7168, 14336), most_rows=32)
FLAT = Space((ANY_ROWS,), flat)
SPACES = {
    **{f"{op}_forward": Space((FEW_ROWS, ANY_ROWS), flat) for op in ("swiglu", "geglu")},
    **{f"{op}_backward": FLAT for op in ("swiglu", "geglu")},
    **{f"relu_squared_{way}": FLAT for way in ("forward", "backward")},
}
