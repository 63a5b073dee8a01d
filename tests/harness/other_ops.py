"""The ops whose tests have problems of their own as entries of ``all_ops``: attention, decoding, linear losses."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

import liger_aot
from liger_aot.ops.attention.flash_attention import FlashAttention
from liger_aot.ops.attention.flash_attention_paged import FlashAttentionPaged
from liger_aot.ops.attention.flash_attention_varlen import FlashAttentionVarlen
from liger_aot.ops.decoding.flash_decoding import FlashDecoding
from liger_aot.ops.decoding.merge_attention_states import MergeAttentionStates
from liger_aot.ops.losses.fused_linear_cross_entropy import FusedLinearCrossEntropy
from liger_aot.ops.losses.fused_linear_jsd import FusedLinearJSD
from liger_aot.ops.op import Op
from liger_aot.ops.post_training.fused_linear_log_probs import FusedLinearLogProbs
from liger_aot.ops.registry import module
from tests.conftest import built_pack
from tests.harness.choices import Choices, Entry, Prepared
from tests.harness.drivers import InterpreterDriver, bound_op
from tests.harness.op_cases import BF16, FP16, FP32
from tests.harness.op_gpu_tests import installed
from tests.harness.tolerances import REFERENCE
from tests.ops.attention import attention_cases, paged_cases, varlen_cases
from tests.ops.attention.attention_gradients import SMALL_GRADIENTS, check_gradients
from tests.ops.cache import cache_cases
from tests.ops.decoding import decoding_cases, merge_cases
from tests.ops.losses import linear_loss_cases
from tests.ops.losses import test_fused_linear_cross_entropy as linear_cross_entropy
from tests.ops.losses import test_fused_linear_jsd as linear_jsd
from tests.ops.post_training import test_fused_linear_log_probs as linear_log_probs
from tests.ops.quantization import quantization_cases
from tests.ops.sampling import sampling_cases


class AttentionOp:
    """On the interpreter the tiles of gfx942 in float16: it runs no Gluon and multiplies bfloat16 as integers."""

    name, op_class, interpreted = "flash_attention", FlashAttention, "gfx942"

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

    def small(self) -> list[tuple[attention_cases.Problem, int]]:
        return [(p._replace(dtype=dtype), 0) for p in SMALL_GRADIENTS for dtype in (FP16, BF16)]

    def prepare(self, problem: tuple[attention_cases.Problem, int], device: str) -> Prepared:
        asked, seed = problem
        tensors = asked.tensors(seed, device)
        do = torch.randn(tensors[0].shape, device=device).to(asked.dtype)

        def run(op: Any) -> tuple[Tensor | None, ...]:
            leaves = [t if t is None else t.detach().requires_grad_() for t in tensors]
            o, lse = op(*leaves[:3], **asked.keywords(leaves[3]))
            found = torch.autograd.grad(o, [t for t in leaves if t is not None], do)
            return o.detach(), lse.detach(), *found

        return Prepared((*tensors, do), run)

    def check(self, way: str, problem: tuple[attention_cases.Problem, int]) -> None:
        asked, seed = problem
        op, allowed, device = _way(self, way)
        if way.startswith("interpreter"):
            allowed = REFERENCE
        check = attention_cases.check if seed % 4 < 2 else check_gradients
        check(op, asked, allowed, seed=seed, device=device)


class VarlenOp:
    """On the interpreter in float16, as attention."""

    name, op_class, interpreted = "flash_attention_varlen", FlashAttentionVarlen, "sm90"

    def problem(self, choices: Choices, large: bool) -> tuple[varlen_cases.Problem, int]:
        longest, sequences, kv_heads = (300, 6, 2) if large else (40, 3, 1)
        count = choices.number(0, sequences)
        window = None
        if choices.number(0, 2) == 2:
            window = tuple(choices.one((None, choices.number(0, longest))) for _ in range(2))
        kv_heads = choices.number(1, kv_heads)
        return varlen_cases.Problem(
            heads=kv_heads * choices.number(1, 2),
            kv_heads=kv_heads,
            lengths_q=tuple(choices.number(0, longest) for _ in range(count)),
            lengths_k=tuple(choices.number(0, longest) for _ in range(count)),
            dim=choices.one((64, 128, 32, choices.number(1, 256))),
            dtype=choices.one((FP16, BF16)),
            causal=bool(choices.number(0, 1)),
            window=window,
            softcap=choices.one((0.0, 5.0, 30.0)),
            sinks=bool(choices.number(0, 1)),
            scale=choices.one((None, 0.5)),
            behind=(choices.number(0, 9), choices.number(0, 9)),
        ), choices.number(0, 9999)

    def small(self) -> list[tuple[varlen_cases.Problem, int]]:
        return [(p._replace(dtype=dtype), 0) for p in varlen_cases.SMALL for dtype in (FP16, BF16)]

    def prepare(self, problem: tuple[varlen_cases.Problem, int], device: str) -> Prepared:
        asked, seed = problem
        *tensors, sinks = asked.tensors(seed, device)
        starts = tensors[3:]
        do = torch.randn(tensors[0].shape, device=device).to(asked.dtype)

        def run(op: Any) -> tuple[Tensor | None, ...]:
            leaves = [t if t is None else t.detach().requires_grad_() for t in (*tensors[:3], sinks)]
            o, lse = op(*leaves[:3], *starts, *asked.longest(), **asked.keywords(leaves[3]))
            found = torch.autograd.grad(o, [t for t in leaves if t is not None], do, allow_unused=True)
            return o.detach(), lse.detach(), *found

        return Prepared((*tensors, sinks, do), run)

    def check(self, way: str, problem: tuple[varlen_cases.Problem, int]) -> None:
        asked, seed = problem
        op, allowed, device = _way(self, way)
        if way.startswith("interpreter"):
            allowed = REFERENCE
        varlen_cases.check(op, asked, allowed, seed=seed, device=device)


class PagedOp:
    """On the interpreter in float16, as attention. The plain kernels alone run there: causal problems with many queries
    are those of a pack without warp groups."""

    name, op_class, interpreted = "flash_attention_paged", FlashAttentionPaged, "gfx942"

    def problem(self, choices: Choices, large: bool) -> tuple[paged_cases.Problem, int]:
        longest, most = (400, 2000) if large else (20, 70)
        count = choices.number(0, 5 if large else 3)
        window = None
        if choices.number(0, 2) == 2:
            window = tuple(choices.one((None, choices.number(0, most))) for _ in range(2))
        kv_heads = choices.number(1, 3)
        queries = tuple(
            choices.number(0, longest) if choices.number(0, 1) else choices.number(0, 3) for _ in range(count)
        )
        return paged_cases.Problem(
            heads=kv_heads * choices.number(1, 9),
            kv_heads=kv_heads,
            queries=queries,
            keys=tuple(choices.number(0, most) for _ in range(count)),
            dim=choices.one((64, 128, 32, 16 * choices.number(1, 16))),
            dtype=choices.one((FP16, BF16)),
            page=choices.one((16, 32, 64, 256)),
            causal=bool(choices.number(0, 3)),
            window=window,
            softcap=choices.one((0.0, 5.0)),
            sinks=bool(choices.number(0, 1)),
            scale=choices.one((None, 0.5)),
            behind=choices.number(0, 9),
            splits=choices.one((None, 1, 2, 3)),
            halves=bool(choices.number(0, 1)),
        ), choices.number(0, 9999)

    def small(self) -> list[tuple[paged_cases.Problem, int]]:
        return [(p._replace(dtype=dtype), 0) for p in paged_cases.SMALL for dtype in (FP16, BF16)]

    def prepare(self, problem: tuple[paged_cases.Problem, int], device: str) -> Prepared:
        asked, seed = problem
        tensors = asked.tensors(seed, device)
        return Prepared(tuple(tensors), lambda op: paged_cases.run(op, asked, tensors))

    def check(self, way: str, problem: tuple[paged_cases.Problem, int]) -> None:
        asked, seed = problem
        op, allowed, device = _way(self, way)
        paged_cases.check(op, asked, allowed, seed=seed, device=device)


class DecodingOp:
    """On the interpreter in float16, as attention."""

    name, op_class, interpreted = "flash_decoding", FlashDecoding, "sm90"

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
            fp8=choices.number(0, 3) == 3,
            scales=choices.one(("none", "one", "head")),
        ), choices.number(0, 9999)

    def small(self) -> list[tuple[decoding_cases.Problem, int]]:
        return [(p._replace(dtype=dtype), 0) for p in decoding_cases.SMALL for dtype in (FP16, BF16)]

    def prepare(self, problem: tuple[decoding_cases.Problem, int], device: str) -> Prepared:
        asked, seed = problem
        tensors = asked.tensors(seed, device)
        return Prepared(tensors, lambda op: op(*tensors[:3], **asked.keywords(tensors)))

    def check(self, way: str, problem: tuple[decoding_cases.Problem, int]) -> None:
        asked, seed = problem
        op, allowed, device = _way(self, way)
        decoding_cases.check(op, asked, allowed, seed=seed, device=device)


class MergingOp:
    name, op_class, interpreted = "merge_attention_states", MergeAttentionStates, "sm90"

    def problem(self, choices: Choices, large: bool) -> tuple[merge_cases.Problem, int]:
        return merge_cases.Problem(
            tokens=choices.number(1, 500 if large else 9),
            heads=choices.number(1, 9 if large else 3),
            dim=choices.one((64, 128, 512, choices.number(1, 300))),
            dtype=choices.one((BF16, FP16, FP32)),
            batch=choices.number(0, 3),
            shift=choices.one((0, 1, 8)),
            spread=choices.one((4.0, 60.0)),
            packed=bool(choices.number(0, 1)),
            empty=bool(choices.number(0, 1)),
        ), choices.number(0, 9999)

    def small(self) -> list[tuple[merge_cases.Problem, int]]:
        typical, *others = merge_cases.SMALL
        return [(p, 0) for p in (typical, *merge_cases.FEW_AND_MANY, *others)]

    def prepare(self, problem: tuple[merge_cases.Problem, int], device: str) -> Prepared:
        asked, seed = problem
        tensors = asked.tensors(seed, device)
        return Prepared(tensors, lambda op: op(*tensors, return_lse=True))

    def check(self, way: str, problem: tuple[merge_cases.Problem, int]) -> None:
        asked, seed = problem
        op, allowed, device = _way(self, way)
        merge_cases.check(op, asked, allowed, seed=seed, device=device)


class CacheOp:
    """Problems are in the fp8 of the architecture that runs them, where it has one."""

    interpreted = "sm90"

    def __init__(self, name: str) -> None:
        self.name, self.op_class = name, module(name).OP

    def problem(self, choices: Choices, large: bool) -> tuple[cache_cases.Problem, int]:
        cache = choices.one(("same", "fp8", "none") if self.name == "qk_norm_rope" else ("same", "fp8"))
        dim = choices.one((64, 128, 256, 2 * choices.number(1, 128)))
        rotary = choices.one((0, 2 * choices.number(1, dim // 2)))
        weighted = choices.one((True, True, False))
        return cache_cases.Problem(
            self.name,
            choices.number(1, 300 if large else 6),
            choices.number(1, 9 if large else 3),
            dim,
            choices.one((BF16, FP16)),
            cache=cache,
            scales=choices.one(cache_cases.SCALES) if cache == "fp8" else "none",
            pages=choices.number(1, 20 if large else 4),
            page_size=choices.one((16, 1, choices.number(1, 40))),
            layout=choices.one(tuple(cache_cases.LAYOUTS)),
            padding=choices.number(0, 3),
            shift=choices.one((0, 1, 8)),
            gap=choices.one((0, 3, 16)),
            index=choices.one((torch.int64, torch.int32)),
            q_heads=choices.number(1, 40 if large else 5),
            rotary=rotary,
            table=choices.one((None, FP32)),
            is_neox=bool(choices.number(0, 1)),
            gated=bool(choices.number(0, 1)),
            offset=choices.one((0.0, 1.0)) if weighted else 0.0,
            weighted=weighted,
        ), choices.number(0, 9999)

    def small(self) -> list[tuple[cache_cases.Problem, int]]:
        return [(p, 0) for p in cache_cases.small(self.name)]

    def prepare(self, problem: tuple[cache_cases.Problem, int], device: str) -> Prepared:
        """A call writes what it was given: again and again the same, but for qkv."""
        asked, fp8 = cache_cases.fitting(liger_aot.load(self.name), problem[0])
        given = cache_cases.drawn(asked, fp8, problem[1], device)
        tensors = tuple(t for t in given.values() if isinstance(t, Tensor))

        def run(op: Any) -> tuple[Tensor | None, ...]:
            call = cache_cases.copied(given)
            op(**call)
            return tuple(call[k] for k, t in given.items() if isinstance(t, Tensor))

        return Prepared(tensors, run)

    def check(self, way: str, problem: tuple[cache_cases.Problem, int]) -> None:
        asked, seed = problem
        op, allowed, device = _way(self, way)
        cache_cases.check(op, asked, allowed, seed=seed, device=device)


class QuantizingOp:
    """Problems are in the fp8 of the architecture that runs them, where it has one."""

    interpreted = "sm90"

    def __init__(self, name: str) -> None:
        self.name, self.op_class = name, module(name).OP

    def problem(self, choices: Choices, large: bool) -> tuple[quantization_cases.Problem, int]:
        scheme = choices.one(("token", "tensor", "group"))
        unit = choices.one((64, 128)) if scheme == "group" else 1
        most = 40_000 if large else 2000
        kind = choices.number(0, 3)
        cols = choices.number(1, 300) if kind < 2 else 16 * choices.number(1, most // 16)
        cols = -(-cols // unit) * unit
        rows = choices.number(1, max(1, min(700 if large else 5, (1 << 20) // cols)))
        dtypes = (BF16, FP16, FP32) if self.name == "quantize" else (BF16, FP16)
        return quantization_cases.Problem(
            self.name,
            choices.one(((rows,), (1, rows), (rows, 2))),
            cols,
            choices.one(dtypes),
            scheme=scheme,
            out=choices.one((torch.float8_e4m3fn, torch.int8)) if scheme == "token" else torch.float8_e4m3fn,
            group_size=unit if scheme == "group" else 128,
            scale_layout=choices.one(("row_major", "column_major", "tma_aligned"))
            if unit > 1
            else "row_major",
            given=bool(choices.number(0, 1)),
            vectors=bool(choices.number(0, 1)),
            packed=bool(choices.number(0, 1)),
            settings=choices.one(((), quantization_cases.OTHERS[self.name])),
            shift=choices.one((0, 1, 8, 3)),
            gap=choices.one((0, 16, 1, 8)),
        ), choices.number(0, 9999)

    def small(self) -> list[tuple[quantization_cases.Problem, int]]:
        return [(p, 0) for p in quantization_cases.small(self.name, torch.float8_e4m3fn)]

    def prepare(self, problem: tuple[quantization_cases.Problem, int], device: str) -> Prepared:
        asked, seed = problem
        tensors = asked.tensors(seed, device)
        return Prepared(tensors, lambda op: quantization_cases.fitting(op, asked).run(op, tensors))

    def check(self, way: str, problem: tuple[quantization_cases.Problem, int]) -> None:
        asked, seed = problem
        op, allowed, device = _way(self, way)
        quantization_cases.check(op, quantization_cases.fitting(op, asked), allowed, seed=seed, device=device)


class SamplingOp:
    """Results are compared to the bit."""

    interpreted = "sm90"

    def __init__(self, name: str) -> None:
        self.name, self.op_class = name, module(name).OP

    def problem(self, choices: Choices, large: bool) -> tuple[sampling_cases.Problem, int]:
        some = choices.number(0, 2)
        given = (a for a in sampling_cases.optional(self.name) if choices.number(0, 2) <= some)
        return sampling_cases.Problem(
            self.name,
            choices.number(1, 200 if large else 5),
            choices.one((64, choices.number(1, 20_000 if large else 700), 32 * choices.number(1, 20))),
            FP32 if self.name == "rejection_sample" else choices.one((FP32, BF16, FP16)),
            values=choices.one(sampling_cases.VALUES[: 2 if self.name == "rejection_sample" else None]),
            given=frozenset(given),
            shift=choices.one((0, 1, 8, 3)),
            gap=choices.one((0, 16, 1, 8)),
            drafts=choices.number(1, 5),
            logprobs=0 if self.name == "sample" and choices.number(0, 1) else None,
        ), choices.number(0, 9999)

    def small(self) -> list[tuple[sampling_cases.Problem, int]]:
        return [(p, 0) for p in sampling_cases.small(self.name)]

    def prepare(self, problem: tuple[sampling_cases.Problem, int], device: str) -> Prepared:
        asked, seed = problem
        tensors = asked.tensors(seed, device)
        return Prepared(tuple(tensors.values()), lambda op: (asked.run(op, tensors),))

    def check(self, way: str, problem: tuple[sampling_cases.Problem, int]) -> None:
        asked, seed = problem
        op, _, device = _way(self, way)
        sampling_cases.check(op, asked, seed=seed, device=device)


class LinearCrossEntropyOp:
    name, op_class, interpreted = "fused_linear_cross_entropy", FusedLinearCrossEntropy, "sm90"

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
            vocabulary=choices.number(
                2, 20_000 if large else 150
            ),  # of 1 gradients are rounding errors alone
            dtype=choices.one((FP32, BF16, FP16)),
            bias=bool(choices.number(0, 1)),
            classes=bool(choices.number(0, 1)),
            index=choices.one((torch.int64, torch.int32)),
            chunks=choices.number(1, min(rows, 4)),
            keywords=keywords,
        )
        return case, choices.number(0, 9999)

    def small(self) -> list[tuple[linear_loss_cases.LinearCase, int]]:
        return [(case, 0) for case in (*linear_loss_cases.PLAIN, *linear_loss_cases.OPTIONS)]

    def prepare(self, problem: tuple[linear_loss_cases.LinearCase, int], device: str) -> Prepared:
        case, seed = problem
        drawn = linear_loss_cases.draw(case, seed, device)
        inputs = (drawn.input, drawn.weight, drawn.target, drawn.bias)

        def run(op: Any) -> tuple[Tensor | None, ...]:
            outputs, gradients, _ = linear_cross_entropy.run(op, case, drawn)
            return *(t.detach() for t in outputs), *gradients.values()

        return Prepared(inputs, run)

    def check(self, way: str, problem: tuple[linear_loss_cases.LinearCase, int]) -> None:
        case, seed = problem
        op, device = _by_way(FusedLinearCrossEntropy, way)
        if not (linear_loss_cases.draw(case, seed, device).target != linear_loss_cases.IGNORED).any():
            return  # means are NaN, as torch's: the op's tests have it
        linear_cross_entropy.check(op, case, device, seed, rounded_logits=way != "reference")


class LinearJSDOp:
    name, op_class, interpreted = "fused_linear_jsd", FusedLinearJSD, "sm90"

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

    def small(self) -> list[tuple[linear_jsd.Case, int]]:
        return [(case, 0) for case in linear_jsd.CASES]

    def prepare(self, problem: tuple[linear_jsd.Case, int], device: str) -> Prepared:
        case, seed = problem
        drawn = linear_jsd.draw(case, seed, device)
        grad = torch.tensor(0.625, device=device)

        def run(op: Any) -> tuple[Tensor | None, ...]:
            loss, gradients = linear_jsd.run(op, case, drawn, grad)
            return loss, *gradients.values()

        return Prepared((*drawn.values(), grad), run)

    def check(self, way: str, problem: tuple[linear_jsd.Case, int]) -> None:
        case, seed = problem
        op, device = _by_way(FusedLinearJSD, way)
        linear_jsd.check(op, case, device, seed, rounded_logits=way != "reference")


class LinearLogProbsOp:
    name, op_class, interpreted = "fused_linear_log_probs", FusedLinearLogProbs, "sm90"

    def problem(self, choices: Choices, large: bool) -> tuple[linear_log_probs.Case, int]:
        rows = choices.number(1, 300 if large else 9)
        keywords = {"temperature": choices.one((0.5, 2.0))} if choices.number(0, 1) else {}
        case = linear_log_probs.Case(
            rows=rows,
            k=choices.number(1, 300 if large else 40),
            vocabulary=choices.number(1, 20_000 if large else 150),
            dtype=choices.one((FP32, BF16, FP16)),
            index=choices.one((torch.int64, torch.int32)),
            bias=bool(choices.number(0, 1)),
            chunks=choices.number(1, min(rows, 4)),
            size=choices.one((1.0, 5.0)),
            used=choices.one((linear_log_probs.OUTPUTS, *((name,) for name in linear_log_probs.OUTPUTS))),
            keywords=keywords,
        )
        return case, choices.number(0, 9999)

    def small(self) -> list[tuple[linear_log_probs.Case, int]]:
        return [(case, 0) for case in linear_log_probs.CASES]

    def prepare(self, problem: tuple[linear_log_probs.Case, int], device: str) -> Prepared:
        case, seed = problem
        drawn = linear_log_probs.draw(case, seed, device)
        grads = torch.full((3, case.rows), 0.625, device=device)

        def run(op: Any) -> tuple[Tensor | None, ...]:
            outputs, gradients = linear_log_probs.run(op, case, drawn, grads)
            return *outputs, *gradients.values()

        return Prepared((*drawn.values(), grads), run)

    def check(self, way: str, problem: tuple[linear_log_probs.Case, int]) -> None:
        case, seed = problem
        op, device = _by_way(FusedLinearLogProbs, way)
        linear_log_probs.check(op, case, device, seed, rounded_logits=way != "reference")


@cache
def _way(entry: Entry, way: str) -> tuple[Any, dict[str, float], str]:
    """The op, what is allowed and the device. Of attention the interpreter runs one architecture's kernels alone."""
    if way == "gpu":
        return liger_aot.load(entry.name), dict(installed().tolerance), "cuda"
    if way == "reference":
        return liger_aot.load(entry.name), REFERENCE, "cpu"
    fixed = entry.op_class in (FlashAttention, FlashAttentionPaged)
    arch = entry.interpreted if fixed else way.split()[1]
    pack = built_pack(arch)
    return bound_op(entry.op_class, pack, InterpreterDriver), dict(pack.tolerance), "cpu"


@cache
def _by_way(op_class: type[Op], way: str) -> Any:
    return linear_loss_cases.made(op_class, way)
