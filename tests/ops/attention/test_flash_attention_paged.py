"""Paged attention without a GPU: the reference, the checks, what is launched, the AMD binaries on the emulator, the
device code on Triton's interpreter and as threads with real barriers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.attention._operands import LOG2_E
from liger_aot.ops.attention._paged import (
    NAME,
    Call,
    PagedSettings,
    head_dim_of,
    split_kernel,
    splits_for,
)
from liger_aot.ops.attention._varlen import MAX_TOKENS
from liger_aot.ops.attention.flash_attention_paged import FlashAttentionPaged
from liger_aot.ops.torch_library import register
from liger_aot.runtime import device_errors
from liger_aot_build.build import make_plans
from tests.conftest import built_pack
from tests.emulator.emulated_cases import emulated
from tests.harness import executed
from tests.harness.drivers import EmulatorDriver, InterpreterDriver, bound_op
from tests.harness.planned_packs import tables_of
from tests.harness.recording import recorded
from tests.harness.tolerances import REFERENCE
from tests.harness.warp_group_interpreter import GroupsDriver
from tests.ops.attention.paged_cases import (
    BF16,
    E4M3,
    EMPTY,
    FNUZ,
    FP16,
    SMALL,
    SMALL_FP8,
    Problem,
    check,
    check_sequences,
    reference,
    run,
)

FORWARD, TILES, SPLIT, COMBINE = (f"{NAME}_{name}" for name in ("forward", "tiles", "split", "combine"))


def coded(problems: tuple[Problem, ...], dtype: torch.dtype) -> tuple[Problem, ...]:
    return tuple(problem._replace(cache=dtype) for problem in problems)


# ---- The reference ----


def loops(problem: Problem, tensors: list[Any]) -> tuple[Tensor, Tensor]:
    """The formula, written out once more: a query and a head at a time, over the keys that it sees."""
    q, k, v, starts, keys, table, sinks, *scales = tensors
    _, _, scale, left, right, softcap, _ = problem.settings()
    k_scale, v_scale = (
        torch.ones(problem.kv_heads) if t is None else t.expand(problem.kv_heads) for t in scales
    )
    o, lse = torch.zeros(q.shape).double(), torch.full((q.shape[1], q.shape[0]), -math.inf).double()
    for s in range(len(problem.queries)):
        first, stop, length = int(starts[s]), int(starts[s + 1]), int(keys[s])
        for t in range(first, stop):
            own = length - (stop - t)
            low = max(0, own - left) if left >= 0 else 0
            high = min(length, own + right + 1) if right >= 0 else length
            places = [(int(table[s, i // problem.page]), i % problem.page) for i in range(low, high)]
            for h in range(problem.heads):
                of = h * problem.kv_heads // problem.heads
                scores = [
                    torch.dot(q[t, h].double(), k[page, row, of].double()) * scale * k_scale[of]
                    for page, row in places
                ]
                if softcap:
                    scores = [softcap * torch.tanh(score / softcap) for score in scores]
                values = [v[page, row, of].double() * v_scale[of] for page, row in places]
                if sinks is not None:
                    scores, values = (
                        [*scores, sinks[h].double()],
                        [*values, torch.zeros(problem.dim).double()],
                    )
                if scores:
                    every = torch.stack(scores)
                    lse[h, t] = torch.logsumexp(every, 0)
                    o[t, h] = torch.softmax(every, 0) @ torch.stack(values)
    return o, lse


@pytest.mark.parametrize("problem", (*SMALL, *coded(SMALL_FP8, E4M3)), ids=str)
def test_reference_is_the_formula(problem: Problem) -> None:
    problem = problem._replace(dim=min(problem.dim, 16))
    tensors = problem.tensors()
    wanted, wanted_lse = loops(problem, tensors)
    wide = [t.double() if i in (0, 6) and t is not None else t for i, t in enumerate(tensors)]
    wide[1:3] = [t if problem.cache else t.double() for t in wide[1:3]]
    o, lse = reference(problem, wide)
    inside = slice(0, sum(problem.queries))
    torch.testing.assert_close(o[inside], wanted[inside], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("problem", (*SMALL, *EMPTY, *coded(SMALL_FP8, E4M3)), ids=str)
def test_cpu(problem: Problem) -> None:
    check(liger_aot.load(NAME), problem, REFERENCE)


def test_decoding_agrees() -> None:
    """One query of each sequence: what ``flash_decoding`` gives."""
    problem = Problem(6, 2, (1, 1, 1), (40, 3, 17), 32, torch.float32, window=(20, 0))
    q, k, v, _, keys, table, *_ = tensors = problem.tensors()
    wanted, wanted_lse = liger_aot.load("flash_decoding")(
        q[:, None], k, v, cache_seqlens=keys, block_table=table, window=(20, 0), return_lse=True
    )
    o, lse = run(liger_aot.load(NAME), problem, tensors)
    torch.testing.assert_close(o, wanted[:, 0])
    torch.testing.assert_close(lse, wanted_lse[:, :, 0].t())


# ---- Arguments ----

Q = torch.ones(5, 4, 16, dtype=BF16)
K = torch.ones(6, 16, 2, 16, dtype=BF16)
STARTS = torch.tensor([0, 3, 5], dtype=torch.int32)
KEYS = torch.tensor([32, 20], dtype=torch.int32)
TABLE = torch.tensor([[0, 4], [2, 1]], dtype=torch.int32)
GOOD = {
    "q": Q, "k_cache": K, "v_cache": K, "cu_seqlens_q": STARTS, "seqused_k": KEYS, "block_table": TABLE,
    "max_seqlen_q": 3,
}  # fmt: skip
CODES = K.to(E4M3)
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no tensor": ({"q": [1.0]}, ArgumentTypeError, "q must be a torch.Tensor"),
    "k is None": ({"k_cache": None}, ArgumentTypeError, "k_cache must be a torch.Tensor, got NoneType"),
    "float64": ({"q": Q.double()}, ArgumentTypeError, "q must be bfloat16, float16, float32"),
    "mixed dtypes": ({"v_cache": K.half()}, ArgumentTypeError, "v_cache must be of q's dtype"),
    "one of fp8": ({"k_cache": CODES}, ArgumentTypeError, "v_cache must be of k_cache's dtype"),
    "int8": ({"k_cache": K.to(torch.int8)}, ArgumentTypeError, "k_cache must be of q's dtype .* or float8_e4m3fn"),
    "devices": ({"k_cache": K.to("meta")}, ArgumentError, "k_cache is on meta"),
    "four dimensions": ({"q": Q[None]}, ArgumentError, "q must have 3 dimensions"),
    "three of k": ({"k_cache": K[0]}, ArgumentError, "k_cache must be .pages, page_size, kv_heads, dim."),
    "other dim": ({"q": Q[..., :8]}, ArgumentError, "last dimension of k_cache must be q's 8, got 16"),
    "dim of 8": (
        {"q": Q[..., :8], "k_cache": K[..., :8], "v_cache": K[..., :8]},
        ArgumentError,
        "last dimension and the strides of k_cache must be multiples of 16",
    ),
    "odd strides": (
        dict.fromkeys(("k_cache", "v_cache"), torch.ones(6, 16, 2, 17, dtype=BF16)[..., :16]),
        ArgumentError,
        "strides of k_cache must be multiples of 16",
    ),
    "v another shape": ({"v_cache": K[:5]}, ArgumentError, "v_cache must have k_cache's shape"),
    "v other strides": (
        {"v_cache": K.transpose(1, 2).contiguous().transpose(1, 2)}, ArgumentError, "v_cache must have k_cache's str"
    ),
    "columns outside": (
        {"k_cache": K.transpose(2, 3).contiguous().transpose(2, 3)}, ArgumentError, "v_cache must have k_cache's str"
    ),
    "heads": ({"q": Q[:, :3]}, ArgumentError, r"heads of q \(3\) must be a multiple .* k_cache \(2\)"),
    "small pages": (
        {"k_cache": K[:, :8], "v_cache": K[:, :8]}, ArgumentError, "power of 2 of keys, 16 or more; got 8"
    ),
    "starts as a list": ({"cu_seqlens_q": [0, 3, 5]}, ArgumentTypeError, "cu_seqlens_q must be a torch"),
    "long starts": ({"cu_seqlens_q": STARTS.long()}, ArgumentTypeError, "cu_seqlens_q must be int32"),
    "starts of others": ({"cu_seqlens_q": STARTS[:2]}, ArgumentError, r"cu_seqlens_q must be of shape \(3,\)"),
    "starts fall": ({"cu_seqlens_q": STARTS.flip(0)}, ArgumentError, "cu_seqlens_q must start at 0, got 5"),
    "starts past q": ({"cu_seqlens_q": STARTS + STARTS}, ArgumentError, "must end at the 5 tokens of q or before"),
    "max_seqlen_q": ({"max_seqlen_q": 2}, ArgumentError, "max_seqlen_q must be the longest length, 3"),
    "no max_seqlen_q": ({"max_seqlen_q": "3"}, ArgumentTypeError, "max_seqlen_q must be an int"),
    "max_seqlen_k": ({"max_seqlen_k": 31}, ArgumentError, r"seqused_k must be in \[0, 31\].* got 32"),
    "max_seqlen_k 0": ({"max_seqlen_k": 0}, ArgumentError, "max_seqlen_k must be at least 1"),
    "lengths": ({"seqused_k": KEYS + 1}, ArgumentError, r"seqused_k must be in \[0, 32\].* got 33"),
    "negative length": ({"seqused_k": -KEYS}, ArgumentError, r"in \[0, 32\].* got -32"),
    "flat table": ({"block_table": TABLE[0]}, ArgumentError, r"block_table must be of shape \(2, pages"),
    "table of others": ({"block_table": TABLE[:1]}, ArgumentError, r"block_table must be of shape \(2, pages"),
    "turned table": ({"block_table": TABLE.t()}, ArgumentError, "rows of block_table must be contiguous"),
    "long table": ({"block_table": TABLE.long()}, ArgumentTypeError, "block_table must be int32"),
    "a page": ({"block_table": TABLE + 2}, ArgumentError, r"block_table must be in \[0, 6\).* got 6"),
    "scale 0": ({"scale": 0.0}, ArgumentError, "scale must be above 0"),
    "window": ({"window": 5}, ArgumentTypeError, r"window must be \(left, right\)"),
    "sinks": ({"sinks": torch.ones(3)}, ArgumentError, r"sinks must be of shape \(4,\)"),
    "splits": ({"splits": 257}, ArgumentError, "splits must be from 1 to 256, got 257"),
    "k_scale of bf16": ({"k_scale": torch.ones(1)}, ArgumentError, "k_scale is for a cache of fp8"),
    "k_scale in bf16": (
        {"k_cache": CODES, "v_cache": CODES, "k_scale": torch.ones(1, dtype=BF16)}, ArgumentTypeError, "must be float32"
    ),
    "k_scale of others": (
        {"k_cache": CODES, "v_cache": CODES, "v_scale": torch.ones(4)}, ArgumentError, r"one element or .* .2,."
    ),
    "two kinds of scales": (
        {"k_cache": CODES, "v_cache": CODES, "k_scale": torch.ones(2), "v_scale": torch.ones(1)},
        ArgumentError,
        "v_scale must have as many elements as k_scale, 2, got 1",
    ),
    "out": ({"out": Q[:, :2]}, ArgumentError, "out must have q's shape"),
    "out in half": ({"out": Q.half()}, ArgumentTypeError, "out must be of q's dtype"),
    "gradient": ({"q": Q.clone().requires_grad_()}, ArgumentError, "attention to a cache has none"),
    "gradient of v": ({"v_cache": K.clone().requires_grad_()}, ArgumentError, "attention to a cache has none"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    keywords, error, text = BAD[name]
    with pytest.raises(error, match=f"{NAME}: .*{text}"):
        liger_aot.load(NAME)(**{**GOOD, **keywords})


def test_gradients_are_no_matter_under_no_grad() -> None:
    op = liger_aot.load(NAME)
    with torch.no_grad():
        assert torch.equal(op(**{**GOOD, "q": Q.clone().requires_grad_()}), op(**GOOD))


@pytest.mark.parametrize(
    ("arch", "dtype"), [("sm80", E4M3), ("gfx90a", FNUZ), ("sm90", FNUZ), ("gfx942", E4M3)]
)
def test_fp8_that_a_gpu_lacks(arch: str, dtype: torch.dtype) -> None:
    op, _ = recorded(FlashAttentionPaged, tables_of(arch))
    codes = K.to(dtype)
    with pytest.raises(
        ArgumentTypeError, match=f"{NAME}: this GPU does not convert k_cache's dtype {str(dtype)[6:]}:"
    ):
        op(**{**GOOD, "k_cache": codes, "v_cache": codes})


def test_a_cache_that_starts_anywhere_is_refused() -> None:
    op, _ = recorded(FlashAttentionPaged, tables_of("gfx942"))
    shifted = torch.ones(K.numel() + 1, dtype=BF16)[1:].view(K.shape)
    with pytest.raises(ArgumentError, match="k_cache must start at a multiple of 16 bytes"):
        op(**{**GOOD, "k_cache": shifted, "v_cache": shifted})


# ---- torch ----


def test_compile_is_one_graph() -> None:
    op = liger_aot.load(NAME)
    problem = Problem(6, 2, (2, 1), (50, 64), 16, torch.float32, sinks=True)
    tensors = problem.tensors()
    torch.compiler.reset()
    compiled = torch.compile(lambda *t: run(op, problem, list(t)), fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(*tensors), run(op, problem, tensors), strict=True):
        assert torch.equal(a, b)


def test_registration() -> None:
    register(NAME)
    problem = Problem(4, 2, (1, 2), (20, 32), 16, torch.float32, sinks=True)
    # memory that no key was written to holds NaN, which opcheck takes for a difference
    tensors = [torch.nan_to_num(t) if i < 3 else t for i, t in enumerate(problem.tensors())]
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    call = torch.ops.liger_aot.flash_attention_paged_forward.default
    torch.library.opcheck(call, (*tensors, *problem.settings(), False), test_utils=tests)


# ---- What is built and launched ----


def test_what_is_planned() -> None:
    with_fp8 = (("gfx942", {"fp8e4b8"}), ("sm90", {"fp8e4nv"}), ("sm100", {"fp8e4nv"}))
    for arch, codes in (("sm80", set()), ("gfx90a", set()), *with_fp8):
        _, (plan,) = make_plans(arch, (NAME,))
        assert set(plan.kernels) == {TILES, COMBINE, *([FORWARD, SPLIT] if arch == "sm90" else [])}
        found = {(v.axes["dtype"], v.axes["cache"]) for v in plan.kernels[TILES].variants.values()}
        assert found == {(d, c) for d in ("bf16", "fp16") for c in {d, *codes}}
    _, (plan,) = make_plans("sm90", (NAME,))
    for variant in plan.kernels[FORWARD].variants.values():
        c = variant.constants
        assert c["MASK"] == 1 + (variant.axes["mask"] == "local") and c["D1"] == variant.axes["head_dim"]
        assert c["BLOCK_N"] % c["BOX_KEYS"] == 0


def launched(problem: Problem, arch: str = "sm90", **others: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What one call launches, by kernel, and of which variants."""
    op, made = recorded(FlashAttentionPaged, tables_of(arch))
    run(op, problem, problem.tensors(), **others)
    return made[0].launches, made[0].loaded


# By warp groups (their mask and box), by which kernel sequences of few queries, and whether parts are combined.
NARROW, WIDE = (TILES, False), (TILES, True)
LAUNCHES: dict[str, tuple[Problem, tuple[str, int] | None, Any, bool]] = {
    "one prompt": (Problem(4, 2, (300,), (300,), 128, page=64), ("causal", 64), None, False),
    "small pages": (Problem(4, 2, (300,), (300,), 64, page=32), ("causal", 16), None, False),
    "a window": (Problem(4, 2, (300,), (300,), 128, page=128, window=(99, 0)), ("local", 64), None, False),
    "a soft cap": (Problem(4, 2, (300,), (300,), 128, softcap=9.0), ("local", 16), None, False),
    "160 columns": (Problem(4, 2, (300,), (300,), 160), ("causal", 16), None, False),
    "a window over all": (Problem(4, 2, (300,), (300,), 128, window=(400, 0)), ("causal", 16), None, False),
    "mixed": (Problem(4, 2, (300, 1), (300, 900), 128, splits=4), ("causal", 16), (SPLIT, None), True),
    "no mask": (Problem(4, 2, (300,), (300,), 128, causal=False), None, WIDE, False),
    "no mask, few queries": (Problem(4, 2, (30,), (300,), 128, causal=False, splits=1), None, (SPLIT, None), False),
    "fp8": (Problem(4, 2, (300,), (300,), 128, cache=E4M3), None, WIDE, False),
    "decoding, fp8": (Problem(8, 2, (1, 1), (900, 900), 128, cache=E4M3, splits=3), None, NARROW, True),
    "decoding": (Problem(8, 2, (1, 1), (900, 900), 128, splits=3), None, (SPLIT, None), True),
    "decoding of many": (Problem(8, 2, (1,) * 9, (900,) * 9, 128, splits=3), None, NARROW, True),
    "one split": (Problem(8, 2, (1, 1), (30, 30), 128, splits=1), None, NARROW, False),
    "16 rows a head": (Problem(32, 2, (1, 1), (30, 30), 128, splits=1), None, NARROW, False),
    "17 rows a head": (Problem(34, 2, (1, 1), (30, 30), 128, splits=1), None, (SPLIT, None), False),
    "speculation": (Problem(16, 2, (3, 1), (30, 30), 128), None, (SPLIT, None), False),
    "speculation, fp8": (Problem(16, 2, (3, 1), (30, 30), 128, cache=E4M3), None, WIDE, False),
}  # fmt: skip


@pytest.mark.parametrize("name", LAUNCHES)
def test_which_kernels(name: str) -> None:
    problem, groups, few, combined = LAUNCHES[name]
    launches, loaded = launched(problem)
    assert set(launches) == {
        *([FORWARD] if groups else []), *([few[0]] if few else []), *([COMBINE] if combined else []),
    }  # fmt: skip
    if groups:
        numbers = loaded[FORWARD].numbers
        assert (("causal", "local")[numbers["mask"] - 1], numbers["box_keys"]) == groups
    if few in (NARROW, WIDE):
        assert (loaded[TILES].numbers["block_m"] > 16) == few[1]


def test_which_kernels_without_tensor_maps() -> None:
    for queries, wide in ((1, False), (5, True)):
        launches, loaded = launched(Problem(8, 2, (queries, 1), (900, 900), 128, splits=3), "sm80")
        assert set(launches) == {TILES, COMBINE}
        assert (loaded[TILES].numbers["block_m"] > 16) == wide


def test_numbers_come_from_shapes_alone() -> None:
    """Of a mixed batch: the maps, and what both kernels take for the sizes; nothing that lengths or tables hold."""
    problem = Problem(4, 2, (300, 2), (310, 900), 128, page=64, splits=2, scale=0.5, behind=7, halves=True)
    op, made = recorded(FlashAttentionPaged, tables_of("sm90"))
    q, k, v, starts, keys, table, *_ = tensors = problem.tensors()
    o, lse = run(op, problem, tensors, max_seqlen_k=1000)
    launches = made[0].launches
    *grid, q_map, k_map, v_map, y_map, lse_at, sinks, cu_at, keys_at, table_at, flag, counter = launches[
        FORWARD
    ][:14]
    few = 128 // 2
    assert grid == [2, 1, 1]  # a multiprocessor each
    row = 4 * 128
    sizes = (310, 4, 309, 128), (row, 128, row, 1), (1, 1, 64, 64), 3
    assert q_map == (q.data_ptr() - 309 * row * 2, "bf16", *sizes) and y_map == (
        o.data_ptr() - 309 * row * 2, "bf16", *sizes,
    )  # fmt: skip
    page = 2 * 2 * 64 * 128
    for t, found in ((k, k_map), (v, v_map)):
        assert found == (
            t.data_ptr(), "bf16", (t.shape[0], 2, 64, 128), (page, 64 * 128, 128, 1), (1, 1, 64, 64), 3,
        )  # fmt: skip
    assert (lse_at, cu_at, keys_at, table_at) == tuple(t.data_ptr() for t in (lse, starts, keys, table))
    assert flag == device_errors.flag(NAME) and counter and not sinks
    shared = [2, 309, min(1000, table.shape[1] * 64), k.shape[0], 6, 1, -MAX_TOKENS, 300, few]
    tiles = (309 // 128 + 3) * 4
    assert launches[FORWARD][14:] == (
        table.stride(0), 0.5 * LOG2_E, 0.0, tiles, 4, 2, 128, (16 << 20) // (4 * 128), *shared,
    )  # fmt: skip
    each = few * 2 // 64
    rows = 2 * each
    assert launches[SPLIT][:3] == (rows * 2 * 2, 1, 1)
    for t, found in ((k, launches[SPLIT][3]), (v, launches[SPLIT][4])):
        assert found == (
            t.data_ptr(), "bf16", (t.shape[0], 2, 64, 128), (page, 64 * 128, 128, 1), (1, 1, 16, 64), 3,
        )  # fmt: skip
    least = 2048 // 64
    assert launches[SPLIT][-5 - 9 :] == (*shared, rows, 2, each, 2, least)
    assert launches[COMBINE][:3] == (2 * few * 4, 1, 1)
    assert launches[COMBINE][-11:] == (2, 309, few, 2, 0, least, 1000, -MAX_TOKENS, 2, 64, 6)


def test_numbers_of_keys_split_by_lengths(all_multiprocessors: None) -> None:
    """As many slots beside each sequence's own as four waves have programs, where there is one program for each
    multiprocessor; parts of 2048 keys and more."""
    for keys, slots, most in ((12672, 20 + 4 * 132 // 8, 6), (2112, 20, 1)):
        op, made = recorded(FlashAttentionPaged, tables_of("sm90"))
        problem = Problem(32, 8, (2,) * 20, (100,) * 19 + (keys,), 128, known=True)
        run(op, problem, problem.tensors())
        launches = made[0].launches
        assert launches[SPLIT][0] == slots * 8
        assert launches[SPLIT][-5:] == (slots, 8, 0, most, 32)
        assert (COMBINE in launches) == (most > 1)
        if most > 1:
            assert launches[COMBINE][0] == 20 * 2 * 32
            assert launches[COMBINE][-8:-6] == (most, slots)


def test_where_no_map_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """q is larger than its address: by tiles; other calls of the same plan are as ever."""
    op, made = recorded(FlashAttentionPaged, tables_of("sm90"))
    problem = Problem(4, 2, (300,), (300,), 128)
    tensors = problem.tensors()
    before = [1 << 62]
    monkeypatch.setattr("liger_aot.ops.attention._paged.bytes_before", lambda t: before[0])
    run(op, problem, tensors)
    assert set(made[0].launches) == {TILES}
    (plan,) = op._plans.values()
    plan._groups._before = 0, 0
    made[0].launches.clear()
    run(op, problem, tensors)
    assert set(made[0].launches) == {FORWARD}


def test_a_cache_without_tensor_maps() -> None:
    """One head for all, by a stride of 0, which no tensor map has."""
    op, made = recorded(FlashAttentionPaged, tables_of("sm90"))
    problem = Problem(8, 2, (300, 1), (300, 900), 128, splits=3)
    tensors = problem.tensors()
    tensors[1:3] = [t[:, :, :1].expand(-1, -1, 2, -1) for t in tensors[1:3]]
    run(op, problem, tensors)
    assert set(made[0].launches) == {TILES}


def test_long_tables_split_by_max_seqlen_k() -> None:
    """What a table has room for would be split, were it not for max_seqlen_k."""
    problem = Problem(8, 1, (1,), (4000,), 128)
    assert COMBINE in launched(problem, splits=None)[0]
    short = problem._replace(keys=(40,))
    op, made = recorded(FlashAttentionPaged, tables_of("sm90"))
    tensors = short.tensors()
    tensors[5] = torch.zeros(1, 4000, dtype=torch.int32)
    run(op, short, tensors, max_seqlen_k=64)
    assert set(made[0].launches) == {SPLIT}
    run(op, short, tensors)
    assert set(made[0].launches) == {SPLIT, COMBINE}


@pytest.fixture
def all_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as an H200 has."""
    monkeypatch.setattr("tests.harness.drivers.MULTIPROCESSORS", 132)


# How many rows a tile of the split kernel has, None: the forward kernel or the tiles.
FEW_OR_MANY: dict[str, tuple[tuple[int, ...], int, int | None]] = {
    "a chunk": ((128,), 32768, 128),
    "short parts": ((128,), 8192, 64),
    "a short chunk": ((64,), 1088, 64),
    "a chunk of several": ((64,) * 4, 8256, 128),
    "half of the multiprocessors": ((256,), 8448, 128),
    "and few keys": ((256,), 2304, None),
    "fewer keys": ((128,), 640, None),
    "most of the multiprocessors": ((384,), 8576, None),
    "all of them": ((512,), 8192, None),
    "a chunk and its own keys": ((256,), 256, None),
    "beside decoding": ((512,) + (1,) * 8, 33280, None),
    "two tiles": ((32, 32), 2048, 64),
    "one token": ((1,), 2048, 64),
    "a token of each of many": ((1,) * 32, 2048, None),
    "four of each of more": ((4,) * 64, 1028, None),
}


@pytest.mark.parametrize("name", FEW_OR_MANY)
def test_which_kernel_splits_keys(name: str, all_multiprocessors: None) -> None:
    queries, keys, rows = FEW_OR_MANY[name]
    problem = Problem(32, 8, queries, (keys,) * len(queries), 128, known=True)
    launches, _ = launched(problem)
    if rows:
        assert set(launches) == {SPLIT, COMBINE}
        assert launches[COMBINE][-2] == rows
    else:
        assert (FORWARD in launches) == (max(queries) > 4)
    if rows == 128:  # a block table may be far longer than its sequences
        assert FORWARD in launched(problem._replace(known=False))[0]


def test_a_soft_cap_of_many_queries(all_multiprocessors: None) -> None:
    """By one warp group where two have no code for it."""
    problem = Problem(32, 8, (128,), (32768,), 128, softcap=30.0, known=True)
    for page, groups in ((16, 1), (64, 2)):
        launches, _ = launched(problem._replace(page=page))
        assert set(launches) == {SPLIT, COMBINE}
        assert launches[COMBINE][-2] == 64 * groups


def test_many_tiles_of_a_head_take_two_programs_a_multiprocessor() -> None:
    """Their keys come from L2: as many programs as there are places; with one tile memory is the bound."""
    numbers = {"block_n": 64, "startup_blocks": 2, "ctas_to_saturate": 1}
    loaded: Any = SimpleNamespace(numbers=numbers, variant=SimpleNamespace(resident=2))
    on: Any = SimpleNamespace(multiprocessors=132)
    for count, queries, keys, splits in ((8, 16, 2064, 2), (4, 32, 2080, 4), (1, 64, 8256, 8)):
        q, k, _, _, _, table, *_ = Problem(32, 8, (queries,) * count, (keys,) * count, 128).tensors()
        call = Call(q, k, table, PagedSettings(queries, keys, 1.0, -1, 0, 0.0, 0))
        assert splits_for(on, loaded, call, queries, 0) == splits


# ---- The binaries and the device code ----


@pytest.mark.parametrize(("problem", "arch"), emulated((p,) for p in (*SMALL, *EMPTY)), ids=str)
def test_amd_binaries(problem: Problem, arch: str, poisoned: None) -> None:
    pack = built_pack(arch)
    check(bound_op(FlashAttentionPaged, pack, EmulatorDriver), problem, dict(pack.tolerance))


@pytest.mark.parametrize(
    ("seed", "arch"),
    [
        *((i, "gfx942") for i in range(2)),
        *(pytest.param(i, "gfx942", marks=pytest.mark.slow) for i in range(2, len(SMALL_FP8))),
        *(pytest.param(0, arch, marks=pytest.mark.slow) for arch in executed.BY_FORM),
    ],
)
def test_amd_binaries_of_fp8(seed: int, arch: str, poisoned: None) -> None:
    """The first takes the kernel that combines parts; of what has no fp8, with a cache of 16 bits."""
    pack = built_pack(arch)
    problem = SMALL_FP8[seed]
    if pack.fp8 != "none":
        (problem,) = coded((problem,), {"fp8e4nv": E4M3, "fp8e4b8": FNUZ}[pack.fp8])
    check(bound_op(FlashAttentionPaged, pack, EmulatorDriver), problem, dict(pack.tolerance))


def interpreted(problems: tuple[Problem, ...]) -> list[Any]:
    """Quick are those of one head dimension and dtype, which have every option among them."""
    return [
        p if p.dim == 64 and p.dtype == BF16 and p.queries else pytest.param(p, marks=pytest.mark.slow)
        for p in problems
    ]


@pytest.mark.interpreter
@pytest.mark.parametrize("problem", interpreted((*SMALL, *EMPTY, *coded(SMALL_FP8, FNUZ))), ids=str)
def test_device_code_on_the_interpreter(problem: Problem, poisoned: None) -> None:
    pack = built_pack("gfx942")
    check(bound_op(FlashAttentionPaged, pack, InterpreterDriver), problem, pack.tolerance)


# Of several tiles a program: pages of all sizes, lengths that end within a page and at its end, sequences without
# queries or keys, queries that see no key, tokens behind the last sequence, mixed batches, windows with NaN before.
WARP_SPECIALIZED = (
    Problem(2, 1, (200,), (270,), 64, sinks=True, behind=9),
    Problem(4, 2, (140,), (300,), 128, FP16, page=64, halves=True, behind=3),
    Problem(2, 1, (200, 3, 0, 140, 150), (270, 40, 200, 5, 0), 64, page=128, behind=9, sinks=True),
    Problem(2, 1, (130, 65), (300, 65), 128, window=(70, 0), softcap=5.0),
    Problem(1, 1, (150,), (160,), 208, FP16, page=64, window=(30, 0)),
    Problem(1, 1, (150, 129), (170, 0), 208),  # two producers
    Problem(2, 1, (150, 129), (170, 0), 160, behind=3),
    Problem(2, 1, (150, 5), (170, 60), 192, FP16, page=64),
    Problem(
        1, 1, (3, 129, 0) * 23, (7, 133, 5) * 23, 64, page=32, behind=2
    ),  # more than are sorted at a time
)


@pytest.fixture
def nan_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is never written shows."""
    empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *size, **kind: empty(*size, **kind).fill_(math.nan))


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "seed",
    [
        0,
        pytest.param(1, marks=pytest.mark.slow),
        2,
        3,
        6,
        *(pytest.param(i, marks=pytest.mark.slow) for i in (4, 5, 7, 8)),
    ],
)
def test_warp_specialized(seed: int, nan_memory: None) -> None:
    """By the host's own launches, in memory that holds NaN wherever no key was written."""
    op = bound_op(FlashAttentionPaged, tables_of("sm90"), GroupsDriver)
    problem = WARP_SPECIALIZED[seed]
    check(op, problem, REFERENCE, seed=seed)
    on = op._own.of(torch.empty(1), "q")
    assert FORWARD in {name.partition("-")[0] for name in on._loaded}
    assert on.workspaces["counters"].on(0, 1).tolist() == [0]


# Few queries of each sequence, by the kernel for those: as SMALL, with more blocks than stages, tiles of one sequence
# beside each other, a split without keys, rows that see no key, windows that start inside a block, a whole head
# dimension and a part of it, more tokens behind the last sequence than the programs zero at once.
FEW = (
    Problem(4, 1, (1, 1, 0, 1), (600, 16, 9, 33), 64, behind=3),
    Problem(4, 2, (5, 2, 1), (300, 40, 0), 128, FP16, splits=3, sinks=True, behind=1),
    Problem(8, 1, (14, 3, 1), (200, 65, 1), 64, page=64, splits=2, window=(50, 0), halves=True),
    Problem(2, 2, (20, 3), (150, 40), 64, softcap=5.0),
    Problem(4, 1, (16, 1), (10, 33), 128, causal=False, window=(None, 20), behind=40),
    Problem(2, 1, (1, 2), (300, 40), 256, splits=2),
    Problem(3, 1, (5, 1), (100, 20), 208, FP16, page=128),
    Problem(20, 1, (2, 1), (260, 31), 96, FP16, splits=4),
    Problem(2, 1, (0, 0), (4, 3), 64, behind=5),
)


@pytest.mark.interpreter
@pytest.mark.parametrize("seed", range(len(FEW)))
def test_few_queries_by_warp_groups(seed: int, nan_memory: None) -> None:
    op = bound_op(FlashAttentionPaged, tables_of("sm90"), GroupsDriver)
    check(op, FEW[seed], REFERENCE, seed=seed)
    assert SPLIT in {name.partition("-")[0] for name in op._own.of(torch.empty(1), "q")._loaded}


# Split by their lengths: sequences of other numbers of parts, of none, of several tiles, without keys or queries, one
# that is another kernel's, more sequences than are looked at together, a window.
UNLIKE = (
    Problem(4, 2, (1, 1, 1, 1), (700, 30, 0, 200), 128, behind=3),
    Problem(8, 2, (3, 0, 1, 5), (900, 40, 64, 300), 128, FP16, sinks=True),
    Problem(16, 2, (20, 3), (600, 140), 64, page=64),
    Problem(4, 2, (70, 2, 1), (70, 500, 129), 128, behind=1),
    Problem(4, 1, (2, 1, 1, 2), (400, 300, 64, 1), 128, window=(100, 0), halves=True),
    Problem(1, 1, (1, 2, 1) * 44, (3, 9, 0, 7) * 32 + (9, 300, 20, 40), 256),
)


@pytest.mark.interpreter
@pytest.mark.parametrize("seed", range(len(UNLIKE)))
def test_keys_split_by_lengths(seed: int, nan_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("liger_aot.ops.attention._paged.least_blocks", lambda numbers: 1)
    monkeypatch.setattr("liger_aot.ops.attention._paged.by_lengths", lambda *of_call: True)
    monkeypatch.setattr(
        "liger_aot.ops.attention._paged.split_for", lambda on, call, queries: split_kernel(on, call, False)
    )
    op = bound_op(FlashAttentionPaged, tables_of("sm90"), GroupsDriver)
    check(op, UNLIKE[seed], REFERENCE, seed=seed)
    assert all(plan._tiles._combine_numbers[8] for plan in op._plans.values())  # slots


# By two warp groups: rows of the second tile and none of its second warp group, a sequence of one tile, one of none.
WIDE_SPLIT = (
    Problem(4, 1, (40, 3), (300, 50), 64, sinks=True, behind=3, known=True),
    Problem(4, 1, (70,), (700,), 128, page=64, window=(50, 0), softcap=5.0, known=True),
    Problem(8, 1, (17, 1), (300, 200), 208, known=True),
    Problem(4, 1, (40, 0, 36), (300, 0, 33), 128, FP16, causal=False, known=True),
)


@pytest.mark.interpreter
@pytest.mark.parametrize("seed", range(len(WIDE_SPLIT)))
def test_many_queries_by_warp_groups(
    seed: int, nan_memory: None, all_multiprocessors: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "liger_aot.ops.attention._paged.split_for", lambda on, call, queries: split_kernel(on, call, True)
    )
    op = bound_op(FlashAttentionPaged, tables_of("sm90"), GroupsDriver)
    check(op, WIDE_SPLIT[seed], REFERENCE, seed=seed)
    wide = [n for n in op._own.of(torch.empty(1), "q")._loaded if n.startswith(SPLIT) and "-wide-" in n]
    assert wide


def spoiled(problem: Problem) -> tuple[list[Any], ...]:
    """Arguments with a page, a length and a start out of range, of the last sequence."""
    found = []
    for argument, value in ((5, 5000), (4, 7777), (3, 6666)):
        tensors = problem.tensors()
        tensors[argument] = tensors[argument].clone()
        if argument == 5:
            tensors[5][-1, 1] = value
        else:
            tensors[argument][-1] = value
        found.append(tensors)
    return tuple(found)


def check_out_of_range(op: Any, problem: Problem, allowed: Any) -> None:
    """Nothing out of bounds is read or written, other sequences are as ever, the next call raises, once."""
    for tensors in spoiled(problem):
        o, lse = run(op, problem, tensors)
        good = problem._replace(
            queries=problem.queries[:-1], keys=problem.keys[:-1], behind=problem.queries[-1]
        )
        check_sequences(good, tensors, o, lse, allowed)
        # a sequence that is longer than it says looks at entries that are no pages: 9999 and -1
        with pytest.raises(
            ArgumentError, match=rf"{NAME}: .* of an earlier call was given (5000|7777|6666|9999|-1)"
        ):
            run(op, problem, problem.tensors())
        run(op, problem, problem.tensors())


def test_out_of_range_on_the_emulator() -> None:
    pack = built_pack("gfx942")
    op = bound_op(FlashAttentionPaged, pack, EmulatorDriver)
    check_out_of_range(op, Problem(4, 1, (1, 2), (40, 37), 64, splits=2), dict(pack.tolerance))


@pytest.mark.interpreter
def test_out_of_range_by_warp_groups() -> None:
    op = bound_op(FlashAttentionPaged, tables_of("sm90"), GroupsDriver)
    check_out_of_range(op, Problem(1, 1, (130, 140), (140, 150), 64, page=64), REFERENCE)
    op = bound_op(FlashAttentionPaged, tables_of("sm90"), GroupsDriver)
    check_out_of_range(op, Problem(4, 1, (1, 2), (40, 37), 64, splits=2), REFERENCE)


def test_float32_is_refused_where_there_are_binaries() -> None:
    op = bound_op(FlashAttentionPaged, tables_of("gfx942"), EmulatorDriver)
    with pytest.raises(ArgumentTypeError, match="not built for fp32/fp32/64/false/aligned"):
        op(**{**GOOD, "q": Q.float(), "k_cache": K.float(), "v_cache": K.float()})


def test_head_dimensions() -> None:
    assert [head_dim_of(n) for n in (16, 64, 80, 128, 144, 256)] == [64, 64, 128, 128, 256, 256]
