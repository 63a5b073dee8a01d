"""The ops that write caches: their references, the device code on Triton's interpreter, the AMD binaries on the
emulator, the binaries on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError, IndexOutOfRange
from liger_aot.ops.quantization._codes import E4M3, E4M3FNUZ
from liger_aot.ops.registry import module
from liger_aot.runtime import device_errors
from tests.conftest import built_pack
from tests.emulator.emulated_cases import BY_FORM
from tests.harness.drivers import EmulatorDriver, InterpreterDriver, bound_op
from tests.harness.op_gpu_tests import installed
from tests.harness.recording import RecordingDriver
from tests.harness.tolerances import REFERENCE
from tests.ops.cache.cache_cases import (
    BF16,
    FP16,
    FP32,
    OPS,
    Problem,
    bits,
    check,
    check_results,
    copied,
    drawn,
    fitting,
    small,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|underflow|invalid value|divide by zero) encountered", "ignore:All-NaN"
)
poisoned = pytest.mark.usefixtures("poisoned")  # memory that nobody has written to holds NaN
QK = Problem("qk_norm_rope", 4, 2, 64, q_heads=3)
WRITE = Problem("write_kv_cache", 4, 2, 64)


def bound(name: str, arch: str, driver: Any) -> Any:
    return bound_op(module(name).OP, built_pack(arch), driver)


# ---- the reference ----


@pytest.mark.parametrize("name", OPS)
def test_reference(name: str) -> None:
    for seed, problem in enumerate(small(name)):
        check(liger_aot.load(name), problem, REFERENCE, seed=seed)


def test_special_values() -> None:
    """Of codes: NaN stays, what lies beyond saturates, infinities too, and zeros keep e4m3's sign."""
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e4, -1e4, 0.0, -0.0, 1e-30], dtype=BF16).view(
        1, 1, 8
    )
    for dtype, largest in ((E4M3, 448.0), (E4M3FNUZ, 224.0)):
        cache = torch.zeros(2, 1, 1, 1, 8).to(dtype)
        slots = torch.zeros(1, dtype=torch.int64)
        liger_aot.load("write_kv_cache")(x, x, cache[0], cache[1], slots)
        got = cache[0].flatten().float()
        assert got[0].isnan() and got[1:5].tolist() == [largest, -largest, largest, -largest]
        assert got[5:].abs().sum() == 0 and bool(torch.signbit(got[6])) == (dtype == E4M3)
    scales = torch.zeros(2, 1, 1, 1)
    finite = torch.tensor([[[torch.nan, 896.0, 0, 0, 0, 0, 0, 1.0]]], dtype=BF16)
    cache = torch.zeros(2, 1, 1, 1, 8).to(E4M3)
    op = liger_aot.load("write_kv_cache")
    op(finite, finite * 0, cache[0], cache[1], slots, k_scale=scales[0], v_scale=scales[1])
    # NaN has no magnitude.
    assert scales.flatten().tolist()[0] == 2.0 and cache[0].flatten()[1].float() == 448


def test_writes_a_contiguous_cache() -> None:
    """(batch, capacity, heads, dim): a page is a sequence."""
    k, cache = torch.randn(2, 3, 16).to(FP16), torch.zeros(2, 5, 7, 3, 16, dtype=FP16)
    returned = liger_aot.load("write_kv_cache")(
        k, 2 * k, cache[0], cache[1], torch.tensor([1 * 7 + 3, 4 * 7])
    )
    assert returned[0].data_ptr() == cache[0].data_ptr() and returned[1].data_ptr() == cache[1].data_ptr()
    assert torch.equal(cache[0, 1, 3], k[0]) and torch.equal(cache[1, 4, 0], 2 * k[1])
    assert torch.equal(cache.float().abs().sum(), (3 * k.float().abs()).sum())


def test_equals_vllms_separate_steps() -> None:
    """RMSNorm of each head and rope by the package's own ops give the same but for one rounding."""
    problem = QK._replace(cache="none", dtype=FP16)
    given = drawn(problem, E4M3)
    before = copied(given)
    liger_aot.load("qk_norm_rope")(**given)
    q = before["qkv"].view(4, 7, 64)[:, :5]
    table = before["cos_sin_cache"][before["position_ids"]]
    weights = [before["q_weight"]] * 3 + [before["k_weight"]] * 2
    for i, w in enumerate(weights):
        h = liger_aot.load("rmsnorm")(q[:, i].float(), w.float())
        y, _ = liger_aot.load("rope")(h[None, None], None, *table.float().chunk(2, -1), rotary_dim=64)
        got = given["qkv"].view(4, 7, 64)[:, i].float()
        torch.testing.assert_close(got, y[0, 0], rtol=2**-10, atol=1e-6)


# ---- what is refused ----


def _refused(name: str, given: dict[str, Any], words: str, error: type[Exception] = ArgumentError) -> None:
    """On the CPU and on the way to a GPU; nothing is written."""
    for op in (liger_aot.load(name), bound(name, "gfx942", RecordingDriver)):
        before = {k: v.clone() for k, v in given.items() if isinstance(v, Tensor)}
        with pytest.raises(error, match=words):
            op(**given)
        for k, was in before.items():
            assert torch.equal(given[k].contiguous().view(torch.uint8), was.contiguous().view(torch.uint8)), k


def test_shapes_that_do_not_fit() -> None:
    good = drawn(WRITE._replace(cache="fp8", scales="head"), E4M3FNUZ)
    cache, scale = good["key_cache"], good["k_scale"]
    _refused("write_kv_cache", {**good, "value": good["value"][..., :32]}, "value must have key's shape")
    _refused("write_kv_cache", {**good, "key_cache": cache[..., :1, :]}, "key_cache must be .*2 heads, 64")
    _refused(
        "write_kv_cache",
        {**good, "value_cache": good["value_cache"][:2]},
        "value_cache must have key_cache's",
    )
    other = torch.zeros(cache.shape[0], cache.shape[2], cache.shape[1], 64).to(cache.dtype).transpose(1, 2)
    _refused("write_kv_cache", {**good, "value_cache": other}, "value_cache must have key_cache's strides")
    _refused(
        "write_kv_cache", {**good, "slot_mapping": torch.zeros(9, dtype=torch.int64)}, "slot_mapping must be"
    )
    _refused("write_kv_cache", {**good, "k_scale": scale[:1].expand(3)}, "k_scale must have one element")
    _refused("write_kv_cache", {**good, "k_scale": torch.ones(1, 1, 1)}, "k_scale must have one element")
    _refused("write_kv_cache", {**good, "v_scale": torch.ones(1)}, "v_scale must have as many elements as k")
    strided = torch.ones(4)[::2]
    _refused("write_kv_cache", {**good, "v_scale": strided}, r"v_scale must have k_scale's strides \(1,\)")
    of_tokens = drawn(WRITE._replace(cache="fp8", scales="token"), E4M3FNUZ)
    for lacking in ("k_scale", "v_scale"):
        _refused("write_kv_cache", {**of_tokens, lacking: None}, f"{lacking} must be given where")
    some = {"key_cache": cache[:1, :1], "value_cache": good["value_cache"][:1, :1]}
    one = {"k_scale": torch.ones(1, 1, 2), "v_scale": torch.ones(2)}
    _refused("write_kv_cache", {**good, **some, **one}, "v_scale must have k_scale's shape")
    _refused(
        "write_kv_cache", {**good, "k_scale": scale.double()}, "k_scale must be float32", ArgumentTypeError
    )
    plain = drawn(WRITE, E4M3FNUZ)
    _refused("write_kv_cache", {**plain, "k_scale": scale, "v_scale": scale}, "k_scale is for a cache of fp8")
    _refused("write_kv_cache", {**plain, "key": plain["key"].float()}, "key must be", ArgumentTypeError)
    qk = drawn(QK, E4M3FNUZ)
    _refused("qk_norm_rope", {**qk, "num_heads_q": 4}, "qkv must be .*num_heads_q=4")
    _refused("qk_norm_rope", {**qk, "gated": True}, "qkv must be .*gated=True")
    _refused("qk_norm_rope", {**qk, "slot_mapping": None}, "slot_mapping is None")
    _refused("qk_norm_rope", {**qk, "key_cache": None}, "key_cache is None")
    _refused("qk_norm_rope", {**qk, "k_weight": qk["k_weight"][:32]}, "k_weight must be")
    _refused("qk_norm_rope", {**qk, "cos_sin_cache": torch.zeros(9, 66, dtype=BF16)}, "cos_sin_cache must be")
    _refused(
        "qk_norm_rope", {**qk, "position_ids": qk["position_ids"][:2]}, "position_ids must be contiguous"
    )
    bare = drawn(QK._replace(cache="none"), E4M3)
    _refused("qk_norm_rope", {**bare, "k_scale": scale}, "k_scale is for a cache")
    heads = {"num_heads_q": 4, "num_heads_k": 2, "num_heads_v": 1}
    _refused("qk_norm_rope", {**qk, **heads}, "with a cache num_heads_v must be")


def test_memory_that_is_shared() -> None:
    good = drawn(WRITE, E4M3)
    cache = good["key_cache"]
    _refused("write_kv_cache", {**good, "value_cache": cache}, "value_cache overlaps key_cache")
    flat = torch.zeros(cache.numel() + 64, dtype=BF16)
    halves = {"key_cache": flat[:-64].view(cache.shape), "value_cache": flat[64:].view(cache.shape)}
    _refused("write_kv_cache", {**good, **halves}, "value_cache overlaps key_cache")
    _refused(
        "write_kv_cache",
        {**good, "key": cache.view(-1)[: good["key"].numel()].view(4, 2, 64)},
        "overlaps key,",
    )
    _refused("write_kv_cache", {**good, "key_cache": cache[:1].expand(cache.shape)}, "key_cache has strides")
    qk = drawn(QK, E4M3)
    inside = qk["qkv"].view(-1)[:64]
    _refused("qk_norm_rope", {**qk, "q_weight": inside}, "qkv overlaps q_weight")
    columns = qk["qkv"].shape[1]
    narrow = qk["qkv"].view(-1)[: columns + 48].as_strided((4, columns), (16, 1))
    _refused("qk_norm_rope", {**qk, "qkv": narrow}, "qkv has strides")


def test_gradients_are_refused() -> None:
    for name, problem, argument in (("write_kv_cache", WRITE, "key"), ("qk_norm_rope", QK, "qkv")):
        given = drawn(problem, E4M3)
        given[argument] = given[argument].clone().requires_grad_()
        with pytest.raises(ArgumentError, match=f"{name}: a gradient is needed"):
            liger_aot.load(name)(**given)
        with torch.no_grad():
            liger_aot.load(name)(**given)


def test_a_gpu_without_this_fp8() -> None:
    for arch, dtype in (("sm80", E4M3), ("gfx90a", E4M3FNUZ), ("sm90", E4M3FNUZ), ("gfx942", E4M3)):
        for problem in (WRITE, QK):
            given = drawn(problem._replace(cache="fp8"), dtype)
            with pytest.raises(ArgumentTypeError, match="does not convert key_cache's dtype float8"):
                bound(problem.op, arch, RecordingDriver)(**given)


def test_slots_and_positions_out_of_range() -> None:
    """On the CPU an error; a kernel skips the slot, gives NaN for the position, and the next call raises."""
    for problem in (WRITE, QK):
        given = drawn(problem._replace(page_size=2), E4M3)
        given["slot_mapping"] = torch.tensor([1, 6, -7, 5])
        with pytest.raises(ArgumentError, match=r"slot_mapping must be below 6.* got 6"):
            liger_aot.load(problem.op)(**given)
        for index in (torch.int64, torch.int32):
            for wrong in (6, (1 << 31) - 1, *((1 << 32, 1 << 40) if index == torch.int64 else ())):
                call = copied(given)
                call["slot_mapping"] = torch.tensor([1, wrong, -7, 5]).to(index)
                before = copied(call)
                op = bound(problem.op, "gfx942", EmulatorDriver)
                op(**call)
                before["slot_mapping"] = torch.tensor([1, -1, -1, 5])
                check_results(problem._replace(page_size=2), before, {**call, "slot_mapping": before["slot_mapping"]},
                              dict(built_pack("gfx942").tolerance), f"slot {wrong}")  # fmt: skip
                with pytest.raises(
                    IndexOutOfRange, match=f"slot_mapping of an earlier call was given {wrong},"
                ):
                    op(**call)
                device_errors.raise_if_any(problem.op)
    given = drawn(QK, E4M3)
    given["position_ids"] = torch.tensor([0, 37, 1, -1])
    with pytest.raises(ArgumentError, match="position_ids hold -1 to 37"):
        liger_aot.load("qk_norm_rope")(**given)
    bound("qk_norm_rope", "gfx942", EmulatorDriver)(**given)
    heads = given["qkv"].view(4, 7, 64)[:, :5]
    assert heads[[1, 3]].isnan().all() and heads[[0, 2]].isfinite().all()


# ---- torch.compile ----


@pytest.mark.parametrize("name", OPS)
def test_compiled(name: str) -> None:
    """A graph holds the op that writes, and nothing of a cache is copied."""
    given = drawn(small(name)[0], E4M3)
    wanted, tensors = copied(given), {k: v for k, v in given.items() if isinstance(v, Tensor)}
    settings = {k: v for k, v in given.items() if k not in tensors}
    liger_aot.load(name)(**wanted)
    torch.compiler.reset()
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    op = liger_aot.load(name)
    found = torch.compile(lambda t: op(**t, **settings), fullgraph=True, backend=backend)(tensors)
    first = found[0] if isinstance(found, tuple) else found
    assert first is tensors["key_cache" if name == "write_kv_cache" else "qkv"]
    for k, t in tensors.items():
        assert torch.equal(t, wanted[k]), k
    targets = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert targets == [f"liger_aot.{name}"], targets


@pytest.mark.parametrize("name", OPS)
def test_registered_as_torch_wants_it(name: str) -> None:
    from liger_aot.ops.torch_library import register

    register(name)
    op = liger_aot.load(name)
    given = drawn(small(name)[0], E4M3)
    arguments = [given.get(n.rstrip("?")) for n in op.tensors]
    settings = (3, 2, 2, 1e-6, 0.0, True, False) if name == "qk_norm_rope" else ()
    torch.library.opcheck(
        getattr(torch.ops.liger_aot, name).default,
        (*arguments, *settings),
        test_utils=("test_schema", "test_faketensor"),
    )


# ---- the device code ----


@poisoned
@pytest.mark.interpreter
@pytest.mark.parametrize(
    "part", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", OPS)
def test_interpreted(name: str, part: int) -> None:
    """Every third problem by the tables of sm90; in the slow tests the others, by three architectures'."""
    for seed, problem in list(enumerate(small(name)))[part::3]:
        for arch in ("sm90", *(("gfx942", "sm80") if part else ())):
            op, allowed = bound(name, arch, InterpreterDriver), dict(built_pack(arch).tolerance)
            check(op, problem, allowed, seed=seed)


@poisoned
@pytest.mark.parametrize("arch", BY_FORM)
@pytest.mark.parametrize("name", OPS)
def test_some_binaries_on_the_emulator(name: str, arch: str) -> None:
    op, allowed = bound(name, arch, EmulatorDriver), dict(built_pack(arch).tolerance)
    problems = small(name)
    for seed, problem in enumerate((*problems[:2], problems[-1])):
        check(op, problem, allowed, seed=seed)


@poisoned
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gfx942", "gfx90a"])
@pytest.mark.parametrize("name", OPS)
def test_every_binary_on_the_emulator(name: str, arch: str) -> None:
    op, allowed = bound(name, arch, EmulatorDriver), dict(built_pack(arch).tolerance)
    for seed, problem in enumerate(small(name)):
        check(op, problem, allowed, seed=seed)
    executed = {v for on in op._own.bound.values() for v in on._loaded}
    assert executed == set(built_pack(arch).op(name).variants)


# ---- on a GPU ----


def _large(name: str) -> list[Problem]:
    """As of serving: Qwen3's heads, pages of 16, thousands of tokens."""
    p = Problem(name, 3000, 8, 128, q_heads=32, pages=300, page_size=16)
    more = p._replace(layout="N2HND", heads=4, tokens=777, dtype=FP16, table=FP32)
    return [
        p,
        p._replace(cache="fp8", scales="token", tokens=513, layout="N2HD"),
        more,
        more._replace(cache="fp8", scales="head", dim=256, rotary=64, gated=True, offset=1.0),
        p._replace(tokens=100, shift=1, gap=5, cache="fp8", is_neox=False),
        p._replace(tokens=100, dim=80, rotary=40, cache="fp8", scales="one"),
    ]


@poisoned
@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
def test_on_a_gpu(name: str) -> None:
    op, allowed = liger_aot.load(name), dict(installed().tolerance)
    op.preload()
    for seed, problem in enumerate((*small(name), *_large(name))):
        check(op, problem, allowed, seed=seed, device="cuda")


@pytest.mark.gpu
def test_a_cache_past_two_to_the_31() -> None:
    """Elements of both halves, and the last slots."""
    pages = (1 << 31) // (16 * 8 * 128) + 8
    for dtype in (BF16, fitting(_on_gpu("write_kv_cache"), WRITE._replace(cache="fp8"))[1]):
        if dtype != BF16 and installed().arch in ("sm80", "gfx90a"):
            continue
        cache = torch.zeros(
            2, pages, 16, 8, 128, device="cuda", dtype=torch.int16 if dtype == BF16 else torch.uint8
        )
        cache = cache.view(dtype)
        x = torch.randn(4, 2, 8, 128, device="cuda").to(BF16)
        slots = torch.tensor([pages * 16 - 1, 0, pages * 16 - 17, pages * 8], device="cuda")
        liger_aot.load("write_kv_cache")(x[:, 0], x[:, 1], cache[0], cache[1], slots)
        few = torch.zeros(2, 4, 1, 8, 128, device="cuda").to(dtype)
        order = torch.arange(4, device="cuda")
        liger_aot.load("write_kv_cache")(x[:, 0], x[:, 1], few[0], few[1], order)
        for i, slot in enumerate(slots.tolist()):
            got = cache[:, slot // 16, slot % 16].view(torch.uint8)
            assert torch.equal(got, few[:, i, 0].view(torch.uint8)), slot
        assert int(few.view(torch.uint8).count_nonzero()) == int(
            sum(half.count_nonzero() for half in cache.view(torch.uint8).flatten().split(1 << 30))
        )
        del cache


@pytest.mark.gpu
def test_qkv_past_two_to_the_31() -> None:
    columns = (32 + 2 * 8) * 128
    tokens = (1 << 31) // columns + 40
    qkv = torch.empty(tokens, columns, device="cuda", dtype=BF16).normal_()
    w = torch.randn(2, 128, device="cuda").to(BF16)
    table, ids = torch.randn(64, 128, device="cuda").to(BF16), torch.arange(tokens, device="cuda") % 64
    heads = {"num_heads_q": 32, "num_heads_k": 8, "num_heads_v": 8}
    few = qkv[-16:].clone()
    op = liger_aot.load("qk_norm_rope")
    op(qkv, w[0], w[1], table, ids, **heads)
    op(few, w[0], w[1], table, ids[-16:], **heads)
    assert torch.equal(qkv[-16:], few)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
def test_cuda_graph(name: str) -> None:
    """Tokens, slots and scales may change between replays."""
    op, allowed = liger_aot.load(name), dict(installed().tolerance)
    op.preload()
    for problem in (
        Problem(name, 37, 8, 128, q_heads=32),
        Problem(name, 37, 8, 128, cache="fp8", scales="head"),
    ):
        problem, fp8 = fitting(_on_gpu(name), problem)
        given = drawn(problem, fp8, 0, "cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            op(**copied(given))
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            op(**given)
        for seed in (1, 2):
            for k, new in drawn(problem, fp8, seed, "cuda").items():
                if isinstance(new, Tensor):
                    given[k].copy_(new)
            before = copied(given)
            graph.replay()
            check_results(problem, before, given, allowed, f"{problem}, replay {seed}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("whole", [False, True])
def test_compiled_on_a_gpu(name: str, whole: bool) -> None:
    """By inductor: the caches are written where they are, be they tensors of their own or, given whole, the halves of
    one."""
    problem = Problem(name, 37, 8, 128, q_heads=32)
    given = drawn(problem, E4M3, 0, "cuda")
    halves = ("key_cache", "value_cache")
    both = torch.stack([given[k] for k in halves])
    given |= dict(zip(halves, both.unbind() if whole else [t.clone() for t in both], strict=True))
    before = copied(given)
    tensors = {k: v for k, v in given.items() if isinstance(v, Tensor) and not (whole and k in halves)}
    settings = {k: v for k, v in given.items() if not isinstance(v, Tensor)}
    op = liger_aot.load(name)
    torch.compiler.reset()

    def call(t: dict[str, Tensor], cache: Tensor) -> None:
        op(**t, **settings, **(dict(zip(halves, cache.unbind(), strict=True)) if whole else {}))

    torch.compile(call, fullgraph=True)(tensors, both)
    check_results(problem, before, given, dict(installed().tolerance), f"{problem}, compiled")


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
def test_results_repeat_to_the_bit(name: str) -> None:
    for problem in _large(name):
        problem, fp8 = fitting(_on_gpu(name), problem)
        given = drawn(problem, fp8, 0, "cuda")
        first, second = copied(given), copied(given)
        for call in (first, second):
            liger_aot.load(name)(**call)
        for k, t in first.items():
            assert not isinstance(t, Tensor) or torch.equal(bits(t), bits(second[k])), k


def _on_gpu(name: str) -> Any:
    """The op, bound to this GPU."""
    op = liger_aot.load(name)
    op.preload()
    return op
