"""Random problems by Hypothesis, which makes the ones that fail as small as they get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.harness.choices import Entry

BATCH = 50  # so many at once have a seed of their own


class Drawn:
    """Choices by Hypothesis."""

    def __init__(self, draw: Any) -> None:
        self._draw = draw

    def one(self, values: Sequence[Any]) -> Any:
        return values[self.number(0, len(values) - 1)]

    def number(self, low: int, high: int) -> int:
        return int(self._draw(st.integers(low, high)))


@st.composite
def problems(draw: Any, entry: Entry, large: bool) -> Any:
    return entry.problem(Drawn(draw), large)


def check_random(entry: Entry, ways: Sequence[str], *, large: bool, first_seed: int, cases: int) -> None:
    """Check so many random problems, each on one of ``ways``."""
    for done in range(0, cases, BATCH):

        @seed(first_seed + done // BATCH)
        @settings(
            max_examples=min(BATCH, cases - done),
            database=None,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.sampled_from(ways), problems(entry, large))
        def batch(way: str, problem: Any) -> None:
            entry.check(way, problem)

        batch()
