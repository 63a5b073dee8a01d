"""Decoding without a GPU: the reference, the checks, the AMD binaries on the emulator, the device code on Triton's
interpreter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.decoding.flash_decoding import FlashDecoding
from liger_aot.ops.torch_library import register
from liger_aot.runtime.manifest import Variant
from liger_aot_build.binary import inspect
from liger_aot_build.cubin import Cubin
from tests.conftest import built_pack
from tests.emulator.emulated_cases import emulated
from tests.harness.drivers import EmulatorDriver, InterpreterDriver, bound_op
from tests.harness.op_cases import form_of
from tests.harness.planned_packs import tables_of
from tests.harness.tolerances import REFERENCE
from tests.ops.attention.attention_cases import GAPS
from tests.ops.decoding.decoding_cases import (
    BF16,
    E4M3,
    E4M3FNUZ,
    EMPTY,
    FP8,
    FP16,
    MORE_BINARIES,
    SMALL,
    Problem,
    Recorder,
    check,
    errors,
    far_behind,
)

pytest_plugins = ("tests.harness.pack_fixtures",)
ARCHS = ("sm80", "sm90", "gfx90a", "gfx942")


def loops(problem: Problem, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The formula, written out once more: a token and a head at a time, over the keys that it sees."""
    lengths, table, sinks = rest[:3]
    scale, left, right, softcap, _ = problem.settings()
    o, lse = torch.zeros_like(q), q.new_full((q.shape[0], q.shape[2], q.shape[1]), -math.inf)
    for b, length in enumerate(problem.lengths if lengths is not None else [problem.capacity] * q.shape[0]):
        for t in range(problem.tokens):
            own = length - problem.tokens + t
            first = max(0, own - left) if left >= 0 else 0
            stop = min(length, own + right + 1) if right >= 0 else length
            keys = range(first, max(first, stop))
            places = [
                (b, i) if table is None else (int(table[b, i // problem.page]), i % problem.page)
                for i in keys
            ]
            for h in range(problem.heads):
                kv = h * problem.kv_heads // problem.heads
                scores = [torch.dot(q[b, t, h], k[page, line, kv]) * scale for page, line in places]
                if softcap:
                    scores = [softcap * torch.tanh(s / softcap) for s in scores]
                values = [v[page, line, kv] for page, line in places]
                if sinks is not None:
                    scores, values = [*scores, sinks[h]], [*values, torch.zeros_like(q[b, t, h])]
                if scores:
                    every = torch.stack(scores)
                    lse[b, h, t] = torch.logsumexp(every, 0)
                    o[b, t, h] = torch.softmax(every, 0) @ torch.stack(values)
    return o, lse


@pytest.mark.parametrize("problem", SMALL, ids=str)
def test_reference_is_the_formula(problem: Problem) -> None:
    problem = problem._replace(dim=min(problem.dim, 8))
    tensors = [t.double() if t is not None and t.is_floating_point() else t for t in problem.tensors()]
    got = FlashDecoding.reference(*tensors, *problem.settings())
    torch.testing.assert_close(got, loops(problem, *tensors), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("problem", (*SMALL, *EMPTY, *FP8[:4]), ids=str)
def test_cpu(problem: Problem) -> None:
    check(liger_aot.load("flash_decoding"), problem, REFERENCE)


def test_torch_agrees() -> None:
    q, k, v = torch.randn(2, 5, 6, 32), torch.randn(2, 50, 2, 32), torch.randn(2, 50, 2, 32)
    mask = torch.ones(5, 50).tril(45).bool()
    heads_first = [t.transpose(1, 2) for t in (q, k, v)]
    wanted = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(liger_aot.load("flash_decoding")(q, k, v), wanted)


# ---- Arguments ----

Q = torch.ones(2, 1, 4, 16, dtype=BF16)
K = torch.ones(2, 32, 2, 16, dtype=BF16)
PAGES = torch.ones(5, 16, 2, 16, dtype=BF16)
TABLE = torch.tensor([[0, 4], [2, 1]], dtype=torch.int32)
LENGTHS = torch.tensor([32, 20], dtype=torch.int32)
PAGED = {"block_table": TABLE, "cache_seqlens": LENGTHS}
BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "no tensor": (([1.0], K, K), {}, ArgumentTypeError, "q must be a torch.Tensor"),
    "k is None": ((Q, None, K), {}, ArgumentTypeError, "k_cache must be a torch.Tensor"),
    "float64": ((Q.double(), K, K), {}, ArgumentTypeError, "q must be bfloat16, float16, float32"),
    "mixed dtypes": ((Q, K, K.half()), {}, ArgumentTypeError, "v_cache must be of q's dtype"),
    "devices": ((Q, K.to("meta"), K), {}, ArgumentError, "k_cache is on meta"),
    "three dimensions": ((Q[0], K, K), {}, ArgumentError, "q must have 4 dimensions"),
    "dim over 256": ((torch.ones(1, 2, 1, 257),) * 3, {}, ArgumentError, "1 to 256, got 257"),
    "other dim": ((Q, K[..., :8], K[..., :8]), {}, ArgumentError, "last dimension of k_cache must be q's 16, got 8"),
    "other batch": ((Q, K[:1], K[:1]), {}, ArgumentError, "k_cache must have q's 2 sequences .* got 1"),
    "v another shape": ((Q, K, K[:, :3]), {}, ArgumentError, "v_cache must have k_cache's shape"),
    "v other strides": (
        (Q, K, K.transpose(1, 2).contiguous().transpose(1, 2)),
        {},
        ArgumentError,
        "v_cache must have k_cache's strides",
    ),
    "heads": ((Q[:, :, :3], K, K), {}, ArgumentError, r"heads of q \(3\) must be a multiple .* k_cache \(2\)"),
    "fewer heads of q": ((Q[:, :, :1], K, K), {}, ArgumentError, r"heads of q \(1\) must be a multiple"),
    "last dimension": (
        (Q, torch.ones(2, 32, 16, 2).transpose(2, 3).bfloat16(), K),
        {},
        ArgumentError,
        "last dimension of k_cache must be contiguous",
    ),
    "scale 0": ((Q, K, K), {"scale": 0.0}, ArgumentError, "scale must be above 0"),
    "scale": ((Q, K, K), {"scale": "1"}, ArgumentTypeError, "scale must be a number"),
    "softcap": ((Q, K, K), {"softcap": -1.0}, ArgumentError, "softcap must be at least 0 and finite"),
    "window": ((Q, K, K), {"window": 5}, ArgumentTypeError, r"window must be \(left, right\)"),
    "negative window": ((Q, K, K), {"window": (5, -2)}, ArgumentError, "window must be two numbers"),
    "splits": ((Q, K, K), {"splits": 257}, ArgumentError, "splits must be from 1 to 256, got 257"),
    "half a split": ((Q, K, K), {"splits": 1.5}, ArgumentTypeError, "splits must be an int, got 1.5"),
    "k_scale of a cache of values": (
        (Q, K, K),
        {"k_scale": torch.ones(1), "v_scale": torch.ones(1)},
        ArgumentError,
        "k_scale is for a cache of fp8",
    ),
    "scales of another length": (
        (Q, K.to(E4M3), K.to(E4M3)),
        {"k_scale": torch.ones(2), "v_scale": torch.ones(3)},
        ArgumentError,
        r"v_scale must have one element or be of shape \(2,\)",
    ),
    "two kinds of scales": (
        (Q, K.to(E4M3), K.to(E4M3)),
        {"k_scale": torch.ones(2), "v_scale": torch.ones(1)},
        ArgumentError,
        "v_scale must have as many elements",
    ),
    "two dtypes of codes": (
        (Q, K.to(E4M3), K.to(E4M3FNUZ)),
        {},
        ArgumentTypeError,
        "v_cache must be of k_cache's dtype",
    ),
    "sinks": ((Q, K, K), {"sinks": torch.ones(3)}, ArgumentError, r"sinks must be of shape \(4,\)"),
    "integer sinks": ((Q, K, K), {"sinks": torch.ones(4).int()}, ArgumentTypeError, "sinks must be"),
    "lengths as a list": ((Q, K, K), {"cache_seqlens": [3, 4]}, ArgumentTypeError, "cache_seqlens must be a torch"),
    "long lengths": ((Q, K, K), {"cache_seqlens": LENGTHS.long()}, ArgumentTypeError, "must be int32, got"),
    "lengths of others": ((Q, K, K), {"cache_seqlens": LENGTHS[:1]}, ArgumentError, r"of shape \(2,\), one a seq"),
    "lengths elsewhere": ((Q, K, K), {"cache_seqlens": LENGTHS.to("meta")}, ArgumentError, "is on meta"),
    "a length": ((Q, K, K), {"cache_seqlens": LENGTHS + 1}, ArgumentError, r"in \[0, 32\].* got 33"),
    "negative length": ((Q, K, K), {"cache_seqlens": -LENGTHS}, ArgumentError, r"in \[0, 32\].* got -32"),
    "long table": (
        (Q, PAGES, PAGES),
        {"block_table": TABLE.long()},
        ArgumentTypeError,
        "block_table must be int32, got torch.int64",
    ),
    "flat table": ((Q, PAGES, PAGES), {"block_table": TABLE[0]}, ArgumentError, "block_table must be .batch"),
    "turned table": ((Q, PAGES, PAGES), {"block_table": TABLE.t()}, ArgumentError, "with contiguous rows"),
    "table of others": ((Q, PAGES, PAGES), {"block_table": TABLE[:1]}, ArgumentError, "block_table must have q's 2"),
    "small pages": (
        (Q, PAGES[:, :8], PAGES[:, :8]),
        {"block_table": TABLE},
        ArgumentError,
        "power of 2 of keys, 16 or more; got 8",
    ),
    "odd pages": ((Q, K[:, :24], K[:, :24]), {"block_table": TABLE}, ArgumentError, "power of 2 .* got 24"),
    "a page": (
        (Q, PAGES, PAGES),
        {**PAGED, "block_table": TABLE + 1},
        ArgumentError,
        r"block_table must be in \[0, 5\).* got 5",
    ),
    "gradient": ((Q.clone().requires_grad_(), K, K), {}, ArgumentError, "decoding has none"),
    "gradient of v": ((Q, K, K.clone().requires_grad_()), {}, ArgumentError, "decoding has none"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    arguments, keywords, error, text = BAD[name]
    with pytest.raises(error, match=f"flash_decoding: .*{text}"):
        liger_aot.load("flash_decoding")(*arguments, **keywords)


def test_gradients_are_no_matter_under_no_grad() -> None:
    op, leaf = liger_aot.load("flash_decoding"), Q.clone().requires_grad_()
    with torch.no_grad():
        assert torch.equal(op(leaf, K, K), op(Q, K, K))


def test_pages_that_are_not_looked_at_may_be_none() -> None:
    op = liger_aot.load("flash_decoding")
    table = torch.tensor([[0, 4], [2, -7]], dtype=torch.int32)
    lengths = torch.tensor([32, 16], dtype=torch.int32)
    op(Q, PAGES, PAGES, block_table=table, cache_seqlens=lengths)
    table[0, 0] = 5
    op(Q, PAGES, PAGES, block_table=table, cache_seqlens=lengths, window=(15, None))
    with pytest.raises(ArgumentError, match="got 5"):
        op(Q, PAGES, PAGES, block_table=table, cache_seqlens=lengths, window=(16, None))


# ---- torch ----


def test_compile_is_one_graph() -> None:
    op = liger_aot.load("flash_decoding")
    problem = Problem(6, 2, 2, 64, (50, 64), 16, torch.float32, page=16)
    q, k, v, lengths, table = problem.tensors()[:5]
    torch.compiler.reset()

    def call(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor) -> Any:
        return op(q, k, v, cache_seqlens=lengths, block_table=table, return_lse=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(q, k, v, lengths, table), call(q, k, v, lengths, table), strict=True):
        assert torch.equal(a, b)


def test_registration() -> None:
    register("flash_decoding")
    problem = Problem(4, 2, 1, 32, (20, 32), 8, torch.float32, page=16, sinks=True)
    q, k, v, *rest = problem.tensors()
    # memory that no key was written to holds NaN, which opcheck takes for a difference
    tensors = (q, torch.nan_to_num(k), torch.nan_to_num(v), *rest)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    call = torch.ops.liger_aot.flash_decoding_forward.default
    torch.library.opcheck(call, (*tensors, *problem.settings(), False), test_utils=tests)


# ---- The binaries and the device code ----


@pytest.mark.parametrize(
    ("problem", "arch"), emulated((p,) for p in (*SMALL, *MORE_BINARIES, *EMPTY, *FP8)), ids=str
)
def test_amd_binaries(problem: Problem, arch: str, poisoned: None) -> None:
    pack = built_pack(arch)
    check(bound_op(FlashDecoding, pack, EmulatorDriver), problem, dict(pack.tolerance))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("arch", ["gfx90a", "gfx942"])
def test_keys_far_behind_on_amd(arch: str, gap: float, splits: int) -> None:
    """In float16 their probabilities are subnormal, which gfx90a's matrix instructions read as zeros."""
    pack, (problem, tensors) = built_pack(arch), far_behind(gap, FP16, splits)
    op = bound_op(FlashDecoding, pack, EmulatorDriver)
    o, lse = op(*tensors[:3], **problem.keywords(tensors))
    assert max(errors(o, lse, tensors, problem, dict(pack.tolerance))) <= 1


def spoiled(device: str = "cpu") -> tuple[Problem, list[Any]]:
    """A page and a length out of range in two of four sequences; 6 programs split each."""
    problem = Problem(8, 2, 1, 192, (150, 100, 192, 33), 64, page=32, splits=3)
    tensors = list(problem.tensors(device=device))
    tensors[4][1, 2] = 77
    tensors[3][2] = 193
    return problem, tensors


@pytest.mark.parametrize("arch", [pytest.param("gfx90a", marks=pytest.mark.slow), "gfx942"])
def test_pages_and_lengths_out_of_range(arch: str) -> None:
    """Nothing out of bounds is read, which the emulator would not let pass; the next call raises, once."""
    op = bound_op(FlashDecoding, built_pack(arch), EmulatorDriver)
    problem, tensors = spoiled()
    good = op(*tensors[:3], **problem.keywords(problem.tensors()))
    o, lse = op(*tensors[:3], **problem.keywords(tensors))
    assert torch.isnan(o[1:3]).all() and torch.isnan(lse[1:3]).all()
    for b in (0, 3):
        assert torch.equal(o[b], good[0][b]) and torch.equal(lse[b], good[1][b])
    with pytest.raises(ArgumentError, match=r"flash_decoding: .* of an earlier call was given (77|193)"):
        op(*tensors[:3], **problem.keywords(problem.tensors()))
    op(*tensors[:3], **problem.keywords(problem.tensors()))


def test_float32_is_refused_where_there_are_binaries() -> None:
    op = bound_op(FlashDecoding, built_pack("gfx942"), EmulatorDriver)
    with pytest.raises(ArgumentTypeError, match="not built for fp32/false/false/fp32/aligned"):
        op(*(torch.ones(1, 8, 1, 64) for _ in range(3)))


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [BF16, pytest.param(FP16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("problem", SMALL, ids=str)
def test_device_code_on_the_interpreter(problem: Problem, dtype: torch.dtype, poisoned: None) -> None:
    pack = built_pack("sm90")
    check(bound_op(FlashDecoding, pack, InterpreterDriver), problem._replace(dtype=dtype), pack.tolerance)


@pytest.mark.interpreter
@pytest.mark.parametrize("arch", ["sm90", pytest.param("gfx942", marks=pytest.mark.slow)])
@pytest.mark.parametrize("problem", FP8[:4], ids=str)
def test_a_cache_of_codes_on_the_interpreter(problem: Problem, arch: str, poisoned: None) -> None:
    """In float16: Triton's interpreter multiplies bfloat16 as integers."""
    pack = built_pack(arch)
    check(bound_op(FlashDecoding, pack, InterpreterDriver), problem._replace(dtype=FP16), pack.tolerance)


def test_a_gpu_without_this_fp8() -> None:
    for arch, dtype in (("sm80", E4M3), ("gfx90a", E4M3FNUZ), ("sm90", E4M3FNUZ), ("gfx942", E4M3)):
        op = bound_op(FlashDecoding, tables_of(arch), Recorder)
        problem = Problem(2, 1, 1, 32, (20,), 64, fp8=True)
        with pytest.raises(ArgumentTypeError, match=f"does not convert k_cache's dtype {str(dtype)[6:]}:"):
            op(*problem.tensors(fp8=dtype)[:3])


def binaries(which: str) -> Iterator[Variant]:
    """All of an architecture, or one of each of its kernels' forms."""
    arch, _, one_a_form = which.partition(" ")
    op = built_pack(arch).op("flash_decoding")
    first = {form_of(name): name for name in reversed(op.variants)}
    return map(op.variant, sorted(first.values()) if one_a_form else op.variants)


BINARIES = ["sm90 forms", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ARCHS)]


@pytest.mark.parametrize("which", BINARIES)
def test_products_are_the_matrix_units(which: str) -> None:
    """On sm90 wgmma wants 64 rows: a small tile takes mma, as sm80."""
    arch = which.split()[0]
    wanted = {"sm80": {"HMMA"}, "sm90": {"HMMA", "HGMMA"}, "gfx90a": {"MFMA"}, "gfx942": {"MFMA"}}[arch]
    for variant in binaries(which):
        name = variant.name
        kinds = set(inspect(variant.read()).matrix)
        assert not kinds if "_combine" in name else kinds and kinds <= wanted, name
        if arch == "sm90" and "block_m64" in name:
            assert "HGMMA" in kinds


@pytest.mark.parametrize("which", BINARIES)
def test_combine_waits_for_split_on_sm90(which: str) -> None:
    for variant in binaries(which):
        facts = inspect(variant.read())
        waits = facts.before_wait is not None
        assert variant.pdl == waits
        if "_fused" not in variant.name:  # of which the profile says it
            assert waits == (which.startswith("sm90") and "_combine" in variant.name)


@pytest.mark.parametrize("which", ["sm90 forms", pytest.param("sm90", marks=pytest.mark.slow)])
def test_where_combine_waits(which: str) -> None:
    """On the way of every program, and after a row's length alone has been asked for; split
    says that it may start first of all. The opcodes are what nvdisasm prints as ACQBULK, PREEXIT, EXIT and LDG."""
    wait, let_start, end, load = 0x02E, 0x02D, 0x14D, 0x181
    for variant in binaries(which):
        (kernel,) = Cubin(variant.read()).kernels.values()
        found = [
            int.from_bytes(kernel.code[at : at + 2], "little") & 0x1FF
            for at in range(0, len(kernel.code), 16)
        ]
        if "_combine" in variant.name:
            before, after = found[: found.index(wait)], found[found.index(wait) + 1 :]
            assert end not in before and before.count(load) == 1 and load in after and let_start not in found
        elif "_fused" in variant.name:
            assert (wait in found) == (let_start in found) == variant.pdl
        else:
            assert end not in found[: found.index(let_start)] and load not in found[: found.index(let_start)]


@pytest.mark.parametrize("arch", ARCHS)
def test_explain(arch: str, built: Path) -> None:
    from liger_aot.explanation import explain

    choices = explain("flash_decoding", arch=arch, shape=(1, 1, 8, 96), dtype="bf16")
    kinds = [*4 * ["split"], "combine"] + (10 * ["fused"] if arch == "sm90" else [])
    assert [c.kernel for c in choices] == [f"flash_decoding_{kind}" for kind in kinds]
    assert all(c.numbers["d"] == 128 for c in choices[:5]) and not any(c.local_bytes for c in choices)
    with pytest.raises(ArgumentError, match="1 to 256"):
        explain("flash_decoding", arch=arch, shape=(1, 1, 8, 257), dtype="bf16")
