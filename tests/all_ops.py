"""Every op with its problems and its check against float64, alike for all: what tests of all ops are made of.

An ``Entry`` is one op. Its problems are random: a ``Choices`` draws them, which may be Hypothesis or a generator of
random numbers. Not here: the vocabulary-parallel losses, which are a process group's, and the ops that are parts of
others (column_sums, divergence_sums, flash_attention_backward).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from math import prod
from typing import Any, Protocol

import torch

import liger_aot
from liger_aot.ops.flash_attention import FlashAttention
from liger_aot.ops.flash_decoding import FlashDecoding
from tests import attention_cases, decoding_cases, linear_loss_cases
from tests import test_fused_linear_cross_entropy as linear_cross_entropy
from tests import test_fused_linear_jsd as linear_jsd
from tests.attention_gradients import check_gradients
from tests.conftest import built_pack
from tests.drivers import InterpreterDriver, bound_op
from tests.op_cases import BF16, DTYPES, FP16, FP32, Case, OpCases
from tests.op_gpu_tests import installed
from tests.op_tests import LAYOUTS, made
from tests.rmsnorm_cases import RMSNormCases
from tests.tolerances import REFERENCE

# Ops whose tests derive from OpTests, and the class that does.
HARNESS = (
    "cross_entropy:TestCrossEntropy", "dyt:TestDyT", "embedding:TestEmbedding",
    "fused_add_rmsnorm:TestFusedAddRMSNorm", "geglu:TestGeGLU", "groupnorm:TestGroupNorm", "jsd:TestJSD",
    "kl_div:TestKLDiv", "layernorm:TestLayerNorm", "log_softmax:TestLogSoftmax",
    "modulated_rmsnorm:TestModulatedRMSNorm", "poly_norm:TestPolyNorm", "relu_squared:TestReLUSquared",
    "rope:TestRoPE", "rope_llama4:TestLlama4RoPE", "rope_multimodal:TestMultimodalRoPE",
    "selective_log_softmax:TestSelectiveLogSoftmax", "softmax:TestSoftmax", "sparsemax:TestSparsemax",
    "swiglu:TestSwiGLU", "tvd:TestTVD",
)  # fmt: skip


class Choices(Protocol):
    def one(self, values: Sequence[Any]) -> Any:
        """One of them; the first is the simplest."""

    def number(self, low: int, high: int) -> int:
        """From ``low`` to ``high``, which are among them."""


class Entry(Protocol):
    name: str

    def problem(self, choices: Choices, large: bool) -> Any:
        """A random problem: of a few rows for the interpreter, ``large`` for a GPU."""

    def check(self, way: str, problem: Any) -> None:
        """Forward and backward, compared with float64. ``way`` is "interpreter sm90", "interpreter gfx942" or "gpu"."""


# ---- The ops of the harness ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """A case, and how it is run: the arguments of ``OpCases.check``."""

    case: Case
    seed: int = 0
    needed: frozenset[str] | None = None
    unused: int | None = None
    layout: Callable[[torch.Tensor], torch.Tensor] | None = None
    relaid: frozenset[str] = frozenset()


ABSENT = object()
SHIFTS, GAPS = (0, 1, 8, 3, 16, 5), (0, 16, 1, 8, 3)


class HarnessOp:
    def __init__(self, tests: OpCases) -> None:
        self.tests, self.name = tests, tests.op_class.name
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
                    for entries in kernel.tables.values():
                        ends |= {bound for bound, _ in entries if bound is not None}
            near = {max(1, end + by) for end in ends for by in (-1, 0, 1, 16)}
            self._lengths[longest] = sorted(n for n in near if n <= longest) or [1]
        return self._lengths[longest]

    def problem(self, choices: Choices, large: bool) -> Asked:
        case = self.case(choices, large)
        names = self.tests.tensor_names()
        some = choices.number(0, 3) == 3
        needed = frozenset(n for n in names if choices.number(0, 1)) if some else None
        unused = None
        if self.tests.op_class.outputs > 1 and not some and choices.number(0, 3) == 3:
            unused = choices.number(0, self.tests.op_class.outputs - 1)
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


# ---- Those with problems of their own -----------------------------------------------------------------------


class AttentionOp:
    """On the interpreter the tiles of gfx942 in float16: it runs no Gluon and multiplies bfloat16 as integers."""

    name = "flash_attention"

    def problem(self, choices: Choices, large: bool) -> tuple[attention_cases.Problem, int]:
        longest, heads = (700, 4) if large else (70, 2)
        kv_heads = choices.number(1, heads)
        window = None
        if choices.number(0, 2) == 2:
            window = tuple(choices.one((None, choices.number(0, longest))) for _ in range(2))
        return attention_cases.Problem(
            batch=choices.number(1, 2),
            heads=kv_heads * choices.number(1, heads // kv_heads),
            kv_heads=kv_heads,
            len_q=choices.number(1, longest),
            len_k=choices.number(1, longest),
            dim=choices.one((64, 128, 32, choices.number(1, 256))),
            dtype=choices.one((FP16, BF16)),
            layout=choices.one(("bshd", "bhsd")),
            causal=bool(choices.number(0, 1)),
            window=window,
            softcap=choices.one((0.0, 5.0, 30.0)),
            sinks=bool(choices.number(0, 1)),
            scale=choices.one((None, 0.5)),
            shift=choices.one((0, 1, 8)),
        ), choices.number(0, 9999)

    def check(self, way: str, problem: tuple[attention_cases.Problem, int]) -> None:
        asked, seed = problem
        if way == "gpu":
            op, allowed, device = liger_aot.load(self.name), dict(installed().tolerance), "cuda"
        else:
            op, allowed, device = _bound(FlashAttention, "gfx942"), REFERENCE, "cpu"
            asked = asked._replace(dtype=FP16)
        check = attention_cases.check if seed % 4 < 2 else check_gradients
        check(op, asked, allowed, seed=seed, device=device)


class DecodingOp:
    """On the interpreter in float16, as attention."""

    name = "flash_decoding"

    def problem(self, choices: Choices, large: bool) -> tuple[decoding_cases.Problem, int]:
        page = choices.one((0, 16, 32, 64))
        capacity = choices.number(1, 2000 if large else 150)
        capacity = page * -(-capacity // page) if page else capacity
        kv_heads = choices.number(1, 3)
        tokens = choices.number(1, 4)
        lengths = tuple(choices.number(0, capacity) for _ in range(choices.number(1, 3)))
        window = None
        if choices.number(0, 2) == 2:
            window = tuple(choices.one((None, choices.number(0, capacity))) for _ in range(2))
        full = not choices.number(0, 5)
        return decoding_cases.Problem(
            heads=kv_heads * choices.number(1, 9),
            kv_heads=kv_heads,
            tokens=tokens,
            capacity=capacity,
            lengths=tuple(capacity for _ in lengths) if full else lengths,
            dim=choices.one((64, 128, 32, choices.number(1, 256))),
            dtype=choices.one((FP16, BF16)),
            page=page,
            splits=choices.one((None, 1, 2, 3)),
            causal=bool(choices.number(0, 1)),
            window=window,
            softcap=choices.one((0.0, 5.0)),
            sinks=bool(choices.number(0, 1)),
            scale=choices.one((None, 0.5)),
            shift=choices.one((0, 1, 8)),
            full=full,
        ), choices.number(0, 9999)

    def check(self, way: str, problem: tuple[decoding_cases.Problem, int]) -> None:
        asked, seed = problem
        if way == "gpu":
            op, allowed, device = liger_aot.load(self.name), dict(installed().tolerance), "cuda"
        else:
            arch = way.split()[1]
            op, allowed, device = _bound(FlashDecoding, arch), dict(built_pack(arch).tolerance), "cpu"
            asked = asked._replace(dtype=FP16)
        decoding_cases.check(op, asked, allowed, seed=seed, device=device)


class LinearCrossEntropyOp:
    name = "fused_linear_cross_entropy"

    def problem(self, choices: Choices, large: bool) -> tuple[linear_loss_cases.LinearCase, int]:
        rows = choices.number(1, 300 if large else 9)
        keywords: dict[str, Any] = {}
        for name, values in (
            ("label_smoothing", (0.1, 0.5)),
            ("lse_square_scale", (0.01,)),
            ("softcap", (3.0, 30.0)),
            ("use_token_scaling", (True,)),
            ("reduction", ("sum", "none")),
        ):
            if choices.number(0, 2) == 2:
                keywords[name] = choices.one(values)
        case = linear_loss_cases.LinearCase(
            rows=rows,
            k=choices.number(1, 300 if large else 40),
            vocabulary=choices.number(1, 20_000 if large else 150),
            dtype=choices.one((FP32, BF16, FP16)),
            bias=bool(choices.number(0, 1)),
            classes=bool(choices.number(0, 1)),
            index=choices.one((torch.int64, torch.int32)),
            chunks=choices.number(1, min(rows, 4)),
            keywords=keywords,
        )
        return case, choices.number(0, 9999)

    def check(self, way: str, problem: tuple[linear_loss_cases.LinearCase, int]) -> None:
        case, seed = problem
        drawn = linear_loss_cases.draw(case, seed)
        if not (drawn.target != linear_loss_cases.IGNORED).any() and case.get("reduction", "mean") == "mean":
            return  # NaN, as torch's: the op's tests have it
        op, device = _by_way(linear_cross_entropy.made, way)
        linear_cross_entropy.check(op, case, device, seed)


class LinearJSDOp:
    name = "fused_linear_jsd"

    def problem(self, choices: Choices, large: bool) -> tuple[linear_jsd.Case, int]:
        rows, wide = choices.number(1, 300 if large else 9), 300 if large else 40
        keywords: dict[str, Any] = {}
        if choices.number(0, 1):
            keywords["jsd_beta"] = choices.one((0.5, 0.0, 1.0, 0.1, 0.9))
        if choices.number(0, 1):
            keywords["temperature"] = choices.one((1.0, 2.0, 0.7))
        case = linear_jsd.Case(
            rows=rows,
            k=choices.number(1, wide),
            j=choices.number(1, wide),
            vocabulary=choices.number(1, 20_000 if large else 150),
            dtype=choices.one((FP32, BF16, FP16)),
            labels=choices.one((None, torch.int64, torch.int32)),
            bias=bool(choices.number(0, 1)),
            chunks=choices.number(1, min(rows, 4)),
            keywords=keywords,
        )
        return case, choices.number(0, 9999)

    def check(self, way: str, problem: tuple[linear_jsd.Case, int]) -> None:
        case, seed = problem
        op, device = _by_way(linear_jsd.made, way)
        linear_jsd.check(op, case, device, seed, rounded_logits=True)


@cache
def _bound(op_class: Any, arch: str) -> Any:
    return bound_op(op_class, built_pack(arch), InterpreterDriver)


@cache
def _by_way(made_by: Any, way: str) -> Any:
    return made_by(way)


@cache
def entries() -> dict[str, Entry]:
    """By name."""
    found: list[Entry] = [HarnessOp(RMSNormCases())]
    for entry in HARNESS:
        name, class_name = entry.split(":")
        found.append(HarnessOp(getattr(import_module(f"tests.test_{name}"), class_name)()))
    found += [AttentionOp(), DecodingOp(), LinearCrossEntropyOp(), LinearJSDOp()]
    return {entry.name: entry for entry in sorted(found, key=lambda entry: entry.name)}
