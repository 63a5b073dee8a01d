"""What the tests of all ops ask of one: problems, random ones among them, and the ways to run one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from liger_aot.ops.op import Op


class Choices(Protocol):
    """What a random problem is drawn with: Hypothesis, or a generator of random numbers."""

    def one(self, values: Sequence[Any]) -> Any:
        """One of them; the first is the simplest."""

    def number(self, low: int, high: int) -> int:
        """From ``low`` to ``high``, which are among them."""


class RandomChoices:
    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def one(self, values: Sequence[Any]) -> Any:
        return self._random.choice(values)

    def number(self, low: int, high: int) -> int:
        return self._random.randint(low, high)


class Prepared(NamedTuple):
    """A problem's tensors, and a forward and backward of an op with them: outputs and gradients."""

    inputs: tuple[Tensor | None, ...]
    run: Callable[[Any], tuple[Tensor | None, ...]]


class Entry(Protocol):
    """One op."""

    name: str
    op_class: type[Op]
    interpreted: str  # the architecture whose kernels Triton's interpreter can run

    def small(self) -> Sequence[Any]:
        """The declared problems."""

    def problem(self, choices: Choices, large: bool) -> Any:
        """A random one: of a few rows for the interpreter, ``large`` for a GPU."""

    def prepare(self, problem: Any, device: str) -> Prepared: ...

    def check(self, way: str, problem: Any) -> None:
        """Forward and backward, compared with float64. ``way`` is one of ``op_tests.WAYS`` but the emulator's."""
