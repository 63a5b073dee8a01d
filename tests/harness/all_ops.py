"""Every op with its problems and its check against float64, alike for all: what tests of all ops are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from math import prod
from typing import Any

from torch import Tensor

from liger_aot.ops.registry import families, names
from tests.conftest import built_pack
from tests.harness.choices import Choices, Entry, Prepared
from tests.harness.linear_loss_ops import LossOp
from tests.harness.op_cases import BF16, DTYPES, FP16, FP32, Case, OpCases
from tests.harness.op_tests import LAYOUTS, OpTests, made
from tests.harness.other_ops import (
    AttentionOp,
    CacheOp,
    DecodingOp,
    LinearCrossEntropyOp,
    LinearJSDOp,
    LinearLogProbsOp,
    MergingOp,
    PagedOp,
    QuantizingOp,
    SamplingOp,
    VarlenOp,
)
from tests.ops.cache.cache_cases import OPS as CACHE
from tests.ops.post_training.row_cases import RowTests
from tests.ops.post_training.sequence_cases import SequenceTests
from tests.ops.quantization.quantization_cases import OPS as QUANTIZING
from tests.ops.sampling.sampling_cases import OPS as SAMPLING

# Those of a process group, parts of others, and what is made of two others alone
LEFT_OUT = {
    "column_sums",
    "divergence_sums",
    "flash_attention_backward",
    "flash_attention_varlen_backward",
    "grpo_loss",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
}


@dataclass(frozen=True)
class Asked:
    """A case, and how it is run: the arguments of ``OpCases.check``."""

    case: Case
    seed: int = 0
    needed: frozenset[str] | None = None
    unused: int | None = None
    layout: Callable[[Tensor], Tensor] | None = None
    relaid: frozenset[str] = frozenset()


SHIFTS, GAPS = (0, 1, 8, 3, 16, 5), (0, 16, 1, 8, 3)


class HarnessOp:
    """An op whose tests derive from ``OpTests``."""

    interpreted, asked = "sm90", Asked

    def __init__(self, tests: OpCases) -> None:
        self.tests, self.op_class, self.name = tests, tests.op_class, tests.op_class.name
        self._seen: dict[str, list[Any]] = {}  # each option's values among the cases
        for case in tests.cases:
            for name, value in case.options.items():
                values = self._seen.setdefault(name, [])
                if value not in values:
                    values.append(value)
        self._lengths: dict[int, list[int]] = {}
        self._ways = cache(lambda way: made(tests, way))

    def lengths(self, longest: int) -> list[int]:
        """At the ends of the dispatch tables' rows, of all architectures: where a wrong choice would show."""
        if longest not in self._lengths:
            ends: set[int] = set()
            for arch in ("sm90", "gfx942"):
                for kernel in built_pack(arch).op(self.name).kernels.values():
                    for entries in (*kernel.tables.values(), *kernel.few.values()):
                        ends |= {bound for bound, *_ in entries if bound is not None}
            near = {max(1, end + by) for end in ends for by in (-1, 0, 1, 16)}
            self._lengths[longest] = sorted(n for n in near if n <= longest) or [1]
        return self._lengths[longest]

    def problem(self, choices: Choices, large: bool) -> Asked:
        case = self.case(choices, large)
        names = self.tests.tensor_names()
        some = choices.number(0, 3) == 3
        needed = frozenset(n for n in names if choices.number(0, 1)) if some else None
        unused = None
        outputs = self.tests.graded_outputs()
        if outputs > 1 and not some and choices.number(0, 3) == 3:
            unused = choices.number(0, outputs - 1)
        layout = choices.one(LAYOUTS) if choices.number(0, 3) == 3 else None
        relaid = frozenset(n for n in names if choices.number(0, 1)) if layout else frozenset()
        return Asked(case, choices.number(0, 9999), needed, unused, layout, relaid)

    def case(self, choices: Choices, large: bool) -> Case:
        dtype = choices.one((FP32, BF16, FP16))
        kind = choices.number(0, 9)
        if kind < 5:
            n = choices.number(1, 1000 if large else 70)
        elif kind < 7:
            n = 16 * choices.number(1, 500 if large else 8)
        else:
            n = choices.one(self.lengths(40_000 if large else 2100))
        most = (1 << 20) // n + 1 if large else 6
        shape: tuple[int, ...] = ()
        least, greatest = self.tests.dimensions
        for _ in range(choices.number(least, greatest) - 1):
            shape += (choices.number(1, max(1, min(700 if large else 5, most // prod(shape)))),)
        options = {}
        for name, values in self._seen.items():
            if choices.number(0, 1):
                value = choices.one(values)
                if value in DTYPES:
                    value = choices.one((dtype, FP32))
                options[name] = value
        case = Case((*shape, n), dtype, **options)
        if choices.number(0, 1):
            case = case.but(shift=choices.one(SHIFTS), gap=choices.one(GAPS))
        return self.tests.fit(case, choices.one)

    def small(self) -> list[Asked]:
        return list(map(Asked, self.tests.cases))

    def prepare(self, problem: Asked, device: str) -> Prepared:
        tensors, settings, grads = self.tests.draw(problem.case, problem.seed, device)

        def run(op: Any) -> tuple[Tensor | None, ...]:
            got = self.tests.run(op, tensors, settings, grads)
            return *got.outputs, *got.gradients.values()

        return Prepared((*tensors, *grads), run)

    def check(self, way: str, problem: Asked) -> None:
        by, movable = self._ways(way), self.tests.relaid
        self.tests.check(
            by.op,
            problem.case,
            by.allowed,
            seed=problem.seed,
            device=by.device,
            needed=problem.needed,
            unused=problem.unused,
            layout=problem.layout,
            relaid=problem.relaid if movable is None else problem.relaid & set(movable),
        )


@cache
def entries() -> dict[str, Entry]:
    """By name. The ops of the harness are found by their tests' classes."""
    others = (
        AttentionOp(),
        VarlenOp(),
        PagedOp(),
        DecodingOp(),
        MergingOp(),
        *(CacheOp(name) for name in CACHE),
        LinearCrossEntropyOp(),
        LinearJSDOp(),
        LinearLogProbsOp(),
        *(QuantizingOp(name) for name in QUANTIZING),
        *(SamplingOp(name) for name in SAMPLING),
    )
    found: dict[str, Entry] = {
        entry.name: entry for entry in (HarnessOp(o) if isinstance(o, OpCases) else o for o in others)
    }
    for name in set(names()) - LEFT_OUT - set(found):
        for thing in vars(import_module(f"tests.ops.{families()[name]}.test_{name}")).values():
            if not isinstance(thing, type) or not thing.__module__.endswith(f"test_{name}"):
                continue
            if issubclass(thing, OpTests):
                found[name] = HarnessOp(thing())
                break  # what follows is another way to call it
            if issubclass(thing, (SequenceTests, RowTests)):
                found[name] = LossOp(thing())
                break
    assert set(found) | LEFT_OUT == set(names())
    return dict(sorted(found.items()))
