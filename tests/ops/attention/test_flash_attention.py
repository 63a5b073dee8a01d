"""Flash attention without a GPU: the reference, its gradients, the checks, the AMD binaries on the emulator, the device
code on Triton's interpreter, and what is launched where there are tensor maps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError, UnsupportedDevice
from liger_aot.ops.attention._operands import (
    LOG2_E,
    MAX_SEQLEN,
    Settings,
    bounded,
    padded_head_dim,
    shape_of,
)
from liger_aot.ops.attention.flash_attention import FlashAttention
from liger_aot.ops.torch_library import register
from liger_aot.runtime.manifest import Pack, Variant
from tests.conftest import built_pack
from tests.emulator.emulated_cases import emulated
from tests.harness.drivers import EmulatorDriver, InterpreterDriver, bound_op
from tests.harness.planned_packs import tables_of
from tests.harness.tolerances import NAMES, REFERENCE
from tests.ops.attention.attention_cases import (
    BF16,
    EMPTY,
    FP16,
    GAPS,
    SMALL,
    Problem,
    check,
    errors,
    far_behind,
)

pytest_plugins = ("tests.harness.pack_fixtures",)
ARCHS = ("sm80", "sm90", "gfx90a", "gfx942")


def wide(problem: Problem, seed: int = 0) -> tuple[Tensor, ...]:
    """A problem's tensors in float64, as leaves; sinks last, where there are any."""
    tensors = problem._replace(dtype=torch.float32).tensors(seed)
    return tuple(t.double().requires_grad_() for t in tensors if t is not None)


def formula(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Scores, softmax, product, written out once more."""
    scale, left, right, softcap, layout = problem.settings()
    if layout == "bshd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(problem.heads // problem.kv_heads, 1) for t in (k, v))
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = torch.zeros(problem.len_q, problem.len_k, dtype=torch.bool)
    for row in range(problem.len_q):
        at = row + problem.len_k - problem.len_q
        for key in range(problem.len_k):
            hidden[row, key] = (right >= 0 and key > at + right) or (left >= 0 and key < at - left)
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        column = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
        v = F.pad(v, (0, 0, 0, 1))
    blind = torch.isneginf(scores).all(-1, keepdim=True)  # rows that see nothing
    p = torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
    lse = torch.logsumexp(scores.masked_fill(blind, 0.0), -1).masked_fill(blind[..., 0], -math.inf)
    return (p @ v).transpose(1, 2) if layout == "bshd" else p @ v, lse


FEW = tuple(p._replace(len_q=min(p.len_q, 24), len_k=min(p.len_k, 30), dim=min(p.dim, 8)) for p in SMALL)


BLIND = Problem(2, 2, 1, 24, 10, 8, causal=True)


@pytest.mark.parametrize("problem", dict.fromkeys((*FEW, BLIND, BLIND._replace(sinks=True))), ids=str)
def test_reference_and_its_gradients_are_the_formula(problem: Problem) -> None:
    leaves = wide(problem)
    wanted, wanted_lse = formula(problem, *(t * 1.0 for t in leaves))
    results = FlashAttention.reference(*leaves, *(() if problem.sinks else (None,)), *problem.settings())
    torch.testing.assert_close(results, (wanted, wanted_lse), rtol=1e-12, atol=1e-12)

    do, dlse = torch.randn_like(wanted), torch.randn_like(wanted_lse)
    expected = torch.autograd.grad((wanted, wanted_lse), leaves, (do, dlse))
    tensors = tuple(t.detach() for t in leaves) + (() if problem.sinks else (None,))
    saved = (*tensors, *(r.detach() for r in results))
    got = FlashAttention.reference_backward((do, dlse), saved, *problem.settings())
    for a, b in zip(got, expected, strict=False):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("problem", (*SMALL, *EMPTY), ids=str)
def test_cpu(problem: Problem) -> None:
    check(liger_aot.load("flash_attention"), problem, REFERENCE)


def test_cpu_gradients_through_autograd() -> None:
    problem = Problem(2, 4, 2, 20, 30, 16, torch.float32, causal=True, sinks=True)
    q, k, v, sinks = problem.tensors()
    leaves = [t.requires_grad_() for t in (q, k, v, sinks) if t is not None]
    op = liger_aot.load("flash_attention")
    o, lse = op(*leaves[:3], **problem.keywords(leaves[3]))
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    got = torch.autograd.grad((o, lse), leaves, (do, dlse))
    copies = [t.detach().double().requires_grad_() for t in leaves]
    wanted = torch.autograd.grad(
        formula(problem, *(t * 1.0 for t in copies)), copies, (do.double(), dlse.double())
    )
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=1e-5)


def test_torch_agrees() -> None:
    q, k, v = (torch.randn(2, 4, 50, 32) for _ in range(3))
    for causal in (False, True):
        got = liger_aot.load("flash_attention")(q, k, v, causal=causal, layout="bhsd")
        torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, v, is_causal=causal))


# ---- Arguments ----

Q = torch.ones(2, 6, 4, 16, dtype=BF16)
K = torch.ones(2, 6, 2, 16, dtype=BF16)
BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "no tensor": (([1.0], K, K), {}, ArgumentTypeError, "q must be a torch.Tensor"),
    "k is None": ((Q, None, K), {}, ArgumentTypeError, "k must be a torch.Tensor"),
    "float64": ((Q.double(), K, K), {}, ArgumentTypeError, "q must be bfloat16, float16, float32"),
    "mixed dtypes": ((Q, K, K.half()), {}, ArgumentTypeError, "v must be of q's dtype"),
    "devices": ((Q, K.to("meta"), K), {}, ArgumentError, "k is on meta"),
    "three dimensions": ((Q[0], K, K), {}, ArgumentError, "q must have 4 dimensions"),
    "dim over 256": ((torch.ones(1, 2, 1, 257),) * 3, {}, ArgumentError, "1 to 256, got 257"),
    "no columns": ((torch.ones(1, 2, 1, 0),) * 3, {}, ArgumentError, "1 to 256, got 0"),
    "other dim": ((Q, K[..., :8], K[..., :8]), {}, ArgumentError, "k has shape .* last dimension"),
    "other batch": ((Q, K[:1], K[:1]), {}, ArgumentError, "k has shape .* batch"),
    "v another shape": ((Q, K, K[:, :3]), {}, ArgumentError, "v must have k's shape"),
    "heads": ((Q[:, :, :3], K, K), {}, ArgumentError, r"heads of q \(3\) must be a multiple .* \(2\)"),
    "fewer heads of q": ((K, Q, Q), {}, ArgumentError, r"heads of q \(2\) must be a multiple .* \(4\)"),
    "last dimension": (
        (torch.ones(2, 6, 16, 4).transpose(2, 3), K, K),
        {},
        ArgumentError,
        "last dimension of q must be contiguous",
    ),
    "layout": ((Q, K, K), {"layout": "sbhd"}, ArgumentError, "layout must be one of bshd, bhsd; got 'sbhd'"),
    "scale 0": ((Q, K, K), {"scale": 0.0}, ArgumentError, "scale must be above 0"),
    "scale nan": ((Q, K, K), {"scale": math.nan}, ArgumentError, "scale must be above 0"),
    "scale": ((Q, K, K), {"scale": "1"}, ArgumentTypeError, "scale must be a number"),
    "softcap": ((Q, K, K), {"softcap": -1.0}, ArgumentError, "softcap must be at least 0 and finite"),
    "window": ((Q, K, K), {"window": 5}, ArgumentTypeError, r"window must be \(left, right\)"),
    "window of floats": ((Q, K, K), {"window": (5.0, 0)}, ArgumentError, "window must be two numbers"),
    "negative window": ((Q, K, K), {"window": (5, -2)}, ArgumentError, "window must be two numbers"),
    "sinks": ((Q, K, K), {"sinks": torch.ones(3)}, ArgumentError, r"sinks must be of shape \(4,\)"),
    "integer sinks": ((Q, K, K), {"sinks": torch.ones(4).int()}, ArgumentTypeError, "sinks must be"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    arguments, keywords, error, text = BAD[name]
    with pytest.raises(error, match=f"flash_attention: .*{text}"):
        liger_aot.load("flash_attention")(*arguments, **keywords)


def test_another_device() -> None:
    meta = Q.to("meta")
    assert liger_aot.load("flash_attention")(meta, meta, meta).shape == Q.shape
    with pytest.raises((UnsupportedDevice, RuntimeError)):
        liger_aot.load("flash_attention")(*(Q.to("xla") for _ in range(3)))


# ---- torch ----


def test_compile_is_one_graph() -> None:
    op = liger_aot.load("flash_attention")
    q, k, v, _ = Problem(1, 4, 2, 20, 30, 16, torch.float32).tensors()
    torch.compiler.reset()
    compiled = torch.compile(
        lambda *t: op(*t, causal=True, return_lse=True), fullgraph=True, backend="aot_eager"
    )
    for a, b in zip(compiled(q, k, v), op(q, k, v, causal=True, return_lse=True), strict=True):
        assert torch.equal(a, b)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    got = torch.autograd.grad(compiled(*leaves)[0].square().sum(), leaves)
    wanted = torch.autograd.grad(op(*leaves, causal=True).square().sum(), leaves)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_registration() -> None:
    register("flash_attention")
    problem = Problem(1, 2, 1, 5, 7, 8, torch.float32, causal=True, sinks=True)
    leaves = tuple(t.requires_grad_() for t in problem.tensors() if t is not None)
    torch.library.opcheck(
        torch.ops.liger_aot.flash_attention_forward.default, (*leaves, *problem.settings(), False, True)
    )


# ---- The binaries and the device code of tiles ----


@pytest.mark.parametrize(("problem", "arch"), emulated((p,) for p in (*SMALL, *EMPTY)), ids=str)
def test_amd_binaries(problem: Problem, arch: str, poisoned: None) -> None:
    pack = built_pack(arch)
    op = bound_op(FlashAttention, pack, EmulatorDriver)
    check(op, problem, dict(pack.tolerance))


@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("arch", ["gfx90a", "gfx942"])
def test_keys_far_behind_on_amd(arch: str, gap: float) -> None:
    """In float16 their probabilities are subnormal, which gfx90a's matrix instructions read as zeros."""
    pack, (problem, tensors) = built_pack(arch), far_behind(gap, FP16)
    o, lse = bound_op(FlashAttention, pack, EmulatorDriver)(*tensors[:3], return_lse=True)
    assert max(errors(o, lse, tensors, problem, dict(pack.tolerance), approximate=False)) <= 1


@pytest.mark.parametrize("gap", GAPS)
def test_what_is_allowed_of_keys_far_behind(gap: float) -> None:
    """Probabilities that are rounded to float16; zeros in the place of subnormal ones are too far off."""
    problem, tensors = far_behind(gap, FP16)
    q, k, v, _ = (None if t is None else t.double() for t in tensors)
    assert q is not None and k is not None and v is not None
    _, lse = FlashAttention.reference(q, k, v, None, *problem.settings())
    e = torch.exp(torch.tensor([0.0] + [-gap] * 199, dtype=torch.float64))

    def found(p: Tensor) -> float:
        o = (p.double() @ v[0, :, 0] / e.sum()).to(FP16).view(1, 1, 1, 64)
        return errors(o, lse.float(), tensors, problem, REFERENCE, approximate=False)[0]

    rounded = e.to(FP16)
    assert found(rounded) <= 1
    flushed = torch.where(rounded < torch.finfo(FP16).tiny, 0, rounded)
    assert (found(flushed) > 10) == (gap > 9.7)


def test_every_head_dimension_has_a_problem() -> None:
    for arch in ("gfx90a", "gfx942"):
        kernels = built_pack(arch).op("flash_attention").kernels
        tables = kernels["flash_attention_forward_tiles"].tables
        assert all(len(rows) == 1 for rows in tables.values())
        assert set(tables) == {f"{NAMES[p.dtype]}/{padded_head_dim(p.dim)}/aligned" for p in SMALL}


def test_float32_is_refused_where_there_are_binaries() -> None:
    op = bound_op(FlashAttention, built_pack("gfx942"), EmulatorDriver)
    with pytest.raises(ArgumentTypeError, match="not built for fp32/64/aligned; it is for bf16/"):
        op(*(torch.ones(1, 8, 1, 64) for _ in range(3)))


@pytest.mark.interpreter
@pytest.mark.parametrize("problem", SMALL, ids=str)
def test_tiles_on_the_interpreter(problem: Problem, poisoned: None) -> None:
    op = bound_op(FlashAttention, built_pack("gfx942"), InterpreterDriver)
    check(op, problem, REFERENCE)


@pytest.mark.parametrize("arch", ARCHS)
def test_explain(arch: str, built: Path) -> None:
    from liger_aot.explanation import explain

    choices = explain("flash_attention", arch=arch, shape=(1, 128, 8, 96), dtype="bf16")
    backward = [f"flash_attention_backward_{kind}" for kind in ("preprocess", "dkdv", "dq")]
    if arch == "sm90":
        forward = ["flash_attention_forward"] * 2
        assert [(c.warp_groups, c.threads) for c in choices[:2]] == [(2, 384), (3, 512)]
        backward += [
            *4 * ["flash_attention_backward_warp_specialized"],
            "flash_attention_backward_postprocess",
        ]
    else:
        forward = ["flash_attention_forward_tiles"]
    assert [c.kernel for c in choices] == forward + backward
    assert not any(c.local_bytes for c in choices)
    alone = explain("flash_attention_backward", arch=arch, shape=(1, 128, 8, 96), dtype="bf16")
    assert [c.kernel for c in alone] == backward
    variants = [c.variant.partition("-bf16-")[2].partition("-aligned")[0] for c in alone[3:-1]]
    if arch == "sm90":
        assert variants == ["96-full", "96-causal", "96-full-deterministic", "96-causal-deterministic"]
    with pytest.raises(ArgumentError, match="1 to 256"):
        explain("flash_attention", arch=arch, shape=(1, 128, 8, 257), dtype="bf16")


# ---- Bounds ----


def test_bounds_that_bind_nothing_are_dropped() -> None:
    q, k, _, _ = Problem(1, 2, 1, 5, 9, 16).tensors()
    shape = shape_of(q, k, "bshd")
    assert tuple(shape) == (1, 2, 1, 5, 9, 16)
    for left, right, kept in ((8, 4, (-1, -1)), (7, 3, (7, 3)), (-1, 0, (-1, 0)), (100, 100, (-1, -1))):
        assert bounded(shape, Settings(1.0, left, right, 0.0, "bshd"))[1:3] == kept
    assert MAX_SEQLEN == 2**30 and math.log2(math.e) == LOG2_E


# ---- What is launched with tensor maps ----


class Recorder:
    """A driver that launches nothing and keeps what it was asked; a tensor map is what it is made of."""

    def __init__(self, op: str, pack: Pack) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.loaded: list[str] = []
        self.encoded = 0
        self.on_stream = 0

    def load(self, variant: Variant) -> Recorder:
        self.loaded.append(variant.name)
        return self

    def stream(self, device: int) -> int:
        return self.on_stream

    def tensor_map(self, *arguments: Any) -> tuple[Any, ...]:
        self.encoded += 1
        return arguments

    def launch(self, *arguments: Any) -> None:
        self.launches.append(arguments)

    def prepare(self, device: int, /) -> None:
        pass


@pytest.fixture
def recorded() -> tuple[FlashAttention, Recorder]:
    made: list[Recorder] = []

    def driver(op: str, pack: Pack) -> Recorder:
        made.append(Recorder(op, pack))
        return made[-1]

    return bound_op(FlashAttention, tables_of("sm90"), driver), made[0]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_maps_and_numbers(recorded: tuple[FlashAttention, Recorder], layout: str) -> None:
    op, driver = recorded
    q, k, v, _ = Problem(2, 6, 2, 1000, 2500, 72, layout=layout).tensors()
    o, lse = op(q, k, v, causal=True, layout=layout, scale=0.5, return_lse=True)
    ((device, stream, x, y, z, *arguments),) = driver.launches
    order = (0, 2, 1, 3) if layout == "bshd" else (0, 1, 2, 3)
    for tensor, found, rows in zip((q, k, v, o), arguments, (64, 128, 128, 64), strict=False):
        seen = tensor.permute(order)
        wanted = ("bf16", tuple(seen.shape), seen.stride(), (1, 1, rows, 32), 2)
        assert found == (tensor.data_ptr(), *wanted)
    lse_at, sinks, counter, *numbers = arguments[4:]
    assert lse_at == lse.data_ptr() and sinks is None and counter
    tiles = math.ceil(1000 / 128)
    all_in_one = 12 * tiles  # K and V of all heads are smaller than the part of the cache they are given
    assert numbers[:3] == [1000, 0.5 * LOG2_E, 0.0]
    assert numbers[3:] == [12 * tiles, tiles, 6, 12, 3, all_in_one, 12, 1000, 2500, 1501, -MAX_SEQLEN]
    assert (device, stream, x, y, z) == (-1, 0, 2, 1, 1)  # as many programs as multiprocessors


def test_numbers_of_bounds_and_caps(recorded: tuple[FlashAttention, Recorder]) -> None:
    op, driver = recorded
    q, k, v, sinks = Problem(1, 2, 2, 100, 60, 64, sinks=True).tensors()
    op(q, k, v, window=(7, 5), softcap=20.0, sinks=sinks)
    op(q, k, v, window=(59, 99))
    op(q, k, v, window=(58, 98))
    capped, free, bound = (launch[5:] for launch in driver.launches)
    assert sinks is not None and capped[5] == sinks.data_ptr()
    assert capped[8:10] == (20.0 * LOG2_E, 0.125 / 20.0)
    assert capped[-2:] == (-40 + 5 + 1, -40 - 7)
    assert free[8:10] == (0.125 * LOG2_E, 0.0) and free[-2:] == (MAX_SEQLEN, -MAX_SEQLEN)
    assert bound[-2:] == (59, -98)


@pytest.mark.parametrize(("dim", "few"), [(64, 1024), (70, 2048), (128, 1024), (192, 0)])
def test_a_causal_call_over_few_keys_has_its_own_variant(
    recorded: tuple[FlashAttention, Recorder], dim: int, few: int
) -> None:
    op, driver = recorded
    for len_k in (few, few + 1):
        q, k, v, _ = Problem(1, 1, 1, 20, max(len_k, 20), dim).tensors()
        for settings in ({"causal": True}, {}, {"window": (3, 0)}):
            op(q, k, v, **settings)
    loaded = [name.split("-")[:5] for name in driver.loaded]
    assert all(parts[:2] == ["flash_attention_forward", "warp_specialized"] for parts in loaded)
    assert {int(parts[3]) for parts in loaded} == {padded_head_dim(dim)}
    masks = ["causal", "full", "local"]
    assert [parts[4] for parts in loaded] == ([*masks, "causal"] if few else masks)


def test_maps_are_encoded_once(recorded: tuple[FlashAttention, Recorder]) -> None:
    op, driver = recorded
    q, k, v, _ = Problem(1, 2, 2, 100, 60, 64).tensors()
    outputs = [op(q, k, v) for _ in range(3)]
    assert driver.encoded == 3 + len({o.data_ptr() for o in outputs})
    op(q.clone(), k, v)
    assert driver.encoded > 6


def test_a_stream_has_a_counter_of_its_own(
    recorded: tuple[FlashAttention, Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    op, driver = recorded
    q, k, v, _ = Problem(1, 2, 2, 10, 10, 64).tensors()
    zeros = [torch.zeros(1, dtype=torch.int64) for _ in range(5)]
    given = iter(zeros)
    monkeypatch.setattr(
        "liger_aot.runtime.workspaces.StreamWorkspace._zeros", lambda self, count: next(given)
    )

    def counter(stream: int) -> int:
        driver.on_stream = stream
        op(q, k, v)
        return [z.data_ptr() for z in zeros].index(driver.launches[-1][5 + 6])

    assert [counter(s) for s in (0, 7, 0, 9, 7)] == [0, 1, 0, 2, 1]
    assert [counter(2), counter(2)] == [3, 4]


def test_heads_whose_keys_fit_into_l2_are_interleaved(recorded: tuple[FlashAttention, Recorder]) -> None:
    """16 MB hold the keys and values of 4 heads of 8192 x 128, which 8 heads of q share."""
    op, driver = recorded
    q, k, v, _ = Problem(1, 32, 16, 8192, 8192, 128).tensors()
    op(q, k, v, causal=True)
    tiles_per_head, tiles, heads = 64, *driver.launches[0][5 + 15 : 5 + 17]
    assert (tiles, heads) == (8 * tiles_per_head, 8)
