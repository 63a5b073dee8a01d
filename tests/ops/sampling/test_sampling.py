"""The ops that sample: their reference, the device code on Triton's interpreter, the AMD binaries on the emulator, the
binaries on a GPU."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from csrc_triton.sampling import screen, threshold
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.registry import module
from liger_aot.ops.sampling._random import exponential, fma, log2, masses, philox, uniform, words
from liger_aot.ops.torch_library import register
from liger_aot.runtime.manifest import OpManifest, Pack
from tests.conftest import built_pack
from tests.emulator.emulated_cases import BY_FORM
from tests.harness.drivers import EmulatorDriver, InterpreterDriver, bound_op
from tests.harness.op_cases import form_of, sizes_of
from tests.harness.op_gpu_tests import installed
from tests.harness.recording import RecordingDriver
from tests.ops.sampling.sampling_cases import BF16, FP16, FP32, OPS, Problem, check, decided, optional, small

DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
WORDS = (
    0,
    1,
    2,
    255,
    256,
    (1 << 31) - 1,
    1 << 31,
    (1 << 31) + 1,
    (1 << 32) - 257,
    (1 << 32) - 2,
    (1 << 32) - 1,
)
poisoned = pytest.mark.usefixtures("poisoned")  # memory that nobody has written to holds NaN
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|underflow|invalid value|divide by zero) encountered"
)


def bound(name: str, arch: str, driver: Any) -> Any:
    return bound_op(module(name).OP, built_pack(arch), driver)


# ---- the generator, and the arithmetic of the reference ----


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),
    [
        ((0, 0, 0, 0), 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, -1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_the_generator_is_philox(counter: tuple[int, ...], key: int, wanted: str) -> None:
    """The known answers of Random123, by the authors of the generator."""
    found = philox([torch.tensor([c]) for c in counter], torch.tensor([key]))
    assert " ".join(f"{int(w):08x}" for w in found) == wanted


def test_words_belong_to_seed_position_column_and_stream() -> None:
    seeds, positions = torch.tensor([5, 5, 6]), torch.tensor([1 << 33, (1 << 33) + 1, 1 << 33])
    found = words(seeds, positions, 11, 0)
    counter = [torch.tensor([c]) for c in (2, 0, 2, 0)]
    assert found[0, 8:].tolist() == [int(w) for w in philox(counter, torch.tensor([5]))][:3]
    assert len(set(found.flatten().tolist()) | set(words(seeds, positions, 11, 2).flatten().tolist())) == 66
    assert torch.equal(found[:, :7], words(seeds, positions, 7, 0))


def test_a_product_and_a_sum_are_rounded_once() -> None:
    draw = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(1000, generator=draw) for _ in range(3))
    c[:250] = -(a * b)[:250]  # cancels all but the product's rounding
    c[250:500] *= 2.0**-30
    c[500:600] = torch.tensor(2.0**-60)  # decides a tie of the product's
    a[500:600], b[500:600] = 1 + 2.0**-12, 1 + 2.0**-12
    for x, y, z, got in zip(a.tolist(), b.tolist(), c.tolist(), fma(a, b, c).tolist(), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        near = torch.tensor([got]).float()
        beside = [float(torch.nextafter(near, torch.tensor(to))) for to in (-math.inf, math.inf)]
        assert all(abs(Fraction(got) - exact) <= abs(Fraction(v) - exact) for v in beside), (x, y, z)


def test_sums_from_half_way_to_the_next_power_are_infinite() -> None:
    largest = torch.finfo(torch.float32).max
    a = torch.tensor([3e38, 3e38, -3e38, 2.0**127, 2.0**127, 2.0**127])
    b = torch.tensor([1.4, 1.4, 1.4, 2 - 2.0**-23, 2 - 2.0**-23, 2 - 2.0**-23])
    half = 2.0**103  # of the last place
    c = torch.tensor([0.3, -0.3, -0.3, half, half - 2.0**79, half / 2])
    assert fma(a, b, c).tolist() == [math.inf, math.inf, -math.inf, math.inf, largest, largest]
    assert fma(torch.tensor([math.inf]), b[:1], c[:1]).tolist() == [math.inf]
    assert fma(torch.tensor([math.inf]), b[:1], torch.tensor([-math.inf])).isnan().all()


def test_logarithms_and_exponentials() -> None:
    found = words(torch.tensor([3]), torch.tensor([4]), 60_000, 0)[0]
    found = torch.cat((found, torch.tensor(WORDS)))
    v = (found.double() + 0.5) / 2.0**32
    wanted = -torch.log1p(-v) / math.log(2)
    got = exponential(found)
    assert float(((got.double() - wanted) / wanted).abs().max()) < 1.5e-6
    assert float((log2(got).double() - got.double().log2()).abs().max()) < 2.5e-6
    assert float(uniform(found).max()) < 1 and float(uniform(found).min()) == 0


def test_masses() -> None:
    x, top, scale = torch.linspace(-40, 3, 100_000)[None], torch.tensor([[3.0]]), torch.tensor([[1.0]])
    got, exact = masses(x, top, scale)[0], 2.0 ** (30 + x[0].double() - 3.0)
    assert int(got[-1]) == 1 << 30
    error = exact - got  # rounded down, from a value that is off by less than 2^-19 of it
    assert bool(((error > -(2.0**-19) * exact) & (error < 1 + 2.0**-19 * exact)).all())
    infinite = torch.tensor([[math.inf, 3e38, -math.inf]])
    assert masses(infinite, torch.tensor([[math.inf]]), scale).tolist() == [[1 << 30, 0, 0]]


# ---- the reference ----


@pytest.mark.parametrize("name", OPS)
def test_reference(name: str) -> None:
    for seed, problem in enumerate(small(name)):
        check(liger_aot.load(name), problem, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_reference_with_every_argument(name: str) -> None:
    """Each value of the rows' settings meets each kind of logits."""
    everything = frozenset(optional(name))
    for seed, (values, n) in enumerate(product(("normal", "ties", "peaked", "special", "same"), (33, 640))):
        if name == "rejection_sample" and values == "same":
            continue
        check(liger_aot.load(name), Problem(name, 40, n, values=values, given=everything), seed=seed)


def vllm_mask(logits: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
    """vLLM's apply_top_k_top_p by its own steps: an ascending sort, whose equals are in the order of columns turned
    round, so that of equals the lowest column counts as the greatest."""
    n = logits.shape[1]
    columns = torch.arange(n - 1, -1, -1).expand_as(logits)
    ordered, at = logits.flip(1).sort(dim=1, stable=True)
    order = columns.gather(1, at)
    if k is not None:
        ordered = ordered.masked_fill(ordered < ordered.gather(1, n - k.long()[:, None]), -math.inf)
    if p is not None:
        left_out = ordered.double().softmax(1).cumsum(1) <= 1 - p.double()[:, None]
        left_out[:, -1] = False
        ordered = ordered.masked_fill(left_out, -math.inf)
    return torch.empty_like(logits).scatter(1, order, ordered)


@pytest.mark.parametrize("ties", [False, True])
def test_the_mask_is_vllms(ties: bool) -> None:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(60, 500, generator=draw) * 3
    x = x.round() if ties else x
    k = torch.randint(1, 501, (60,), generator=draw)
    p = torch.rand(60, generator=draw) * 0.98 + 0.01
    op = liger_aot.load("top_k_top_p_mask")
    for top_k, top_p in ((k, None), (None, p), (k, p)):
        assert torch.equal(op(x, top_k, top_p), vllm_mask(x, top_k, top_p))


def test_each_filter_alone_is_transformers() -> None:
    """TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper, whose top-p keeps the token that reaches p, too."""
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(100, 300, generator=draw) * 2
    op = liger_aot.load("top_k_top_p_mask")
    rows = torch.ones(100)
    got = op(x, (rows * 20).int())
    assert torch.equal(got, x.masked_fill(x < x.topk(20).values[:, -1:], -math.inf))
    probs = x.double().softmax(1)
    got = op(x, None, None, rows * 0.05)
    assert torch.equal(got, x.masked_fill(probs < 0.05 * probs.amax(1, keepdim=True), -math.inf))
    ordered, at = x.sort(descending=False)
    remove = ordered.double().softmax(1).cumsum(1) <= 1 - 0.9
    remove[:, -1] = False
    left_out = torch.zeros_like(remove).scatter(1, at, remove)
    assert torch.equal(op(x, None, rows * 0.9), x.masked_fill(left_out, -math.inf))


def test_of_equal_logits_the_lowest_columns_are_kept() -> None:
    op = liger_aot.load("top_k_top_p_mask")
    x = torch.tensor([[1.0, 2.0, 2.0, 2.0, 2.0, -0.0, 0.0]])
    kept = op(x, torch.tensor([2])) > -math.inf
    assert kept.tolist() == [[False, True, True, True, True, False, False]]  # top-k keeps all of them
    kept = op(torch.full((1, 8), 3.0), None, torch.tensor([0.5])) > -math.inf
    assert kept.tolist() == [[True] * 4 + [False] * 4]  # 3 / 8 < 0.5, 4 / 8 is not
    assert op(x, None, torch.tensor([0.0])).argmax().item() == 1
    same = op(torch.tensor([[0.0, -0.0, -1.0]]), torch.tensor([1])) > -math.inf
    assert same.tolist() == [[True, True, False]]


def chi_square_limit(freedom: int) -> float:
    """What chi-square exceeds with a probability of 1e-6 (Wilson and Hilferty)."""
    by = 2 / (9 * freedom)
    return freedom * (1 - by + 4.7534 * math.sqrt(by)) ** 3


def check_distribution(tokens: Tensor, probabilities: Tensor) -> None:
    counts = torch.bincount(tokens, minlength=probabilities.shape[0]).double()
    assert not counts[probabilities == 0].any()
    wanted = probabilities * tokens.shape[0]
    often = wanted >= 10
    rest = wanted[~often].sum()
    chi = ((counts - wanted)[often] ** 2 / wanted[often]).sum()
    freedom = int(often.sum()) - 1
    if rest >= 10:
        chi, freedom = chi + (counts[~often].sum() - rest) ** 2 / rest, freedom + 1
    assert float(chi) < chi_square_limit(freedom)


@pytest.mark.parametrize(
    ("by", "given"),
    [
        ("seeds", {}), ("positions", {"temperature": 0.7}), ("seeds", {"top_k": 7, "temperature": 1.5}),
        ("positions", {"top_p": 0.8}),
    ],
)  # fmt: skip
def test_tokens_have_their_probabilities(by: str, given: dict[str, float]) -> None:
    rows = 4000
    x = torch.randn(40, generator=torch.Generator().manual_seed(3)) * 2
    asked = {k: torch.full((rows,), v, dtype=torch.int32 if k == "top_k" else FP32) for k, v in given.items()}
    varied, fixed = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    keys = (varied, fixed) if by == "seeds" else (fixed, varied)
    tokens = liger_aot.load("sample")(x.expand(rows, -1), *keys, **asked)
    z = x.double() / given.get("temperature", 1.0)
    one = {k: torch.tensor([v]) for k, v in given.items() if k != "temperature"}
    kept = vllm_mask(z[None], one.get("top_k"), one.get("top_p"))[0]
    check_distribution(tokens, kept.softmax(0))


@pytest.mark.parametrize("sure", [False, True], ids=["draft probabilities", "no draft probabilities"])
def test_rejection_gives_the_targets_distribution(sure: bool) -> None:
    requests, n = 6000, 12
    draw = torch.Generator().manual_seed(4)
    target, draft = (torch.randn(n, generator=draw).mul(1.5).softmax(0) for _ in range(2))
    ids = torch.multinomial(draft, requests, replacement=True, generator=draw)
    tokens = liger_aot.load("rejection_sample")(
        target.expand(requests, n),
        torch.full_like(ids, 5) if sure else ids,
        torch.arange(1, requests + 1, dtype=torch.int32),
        torch.full((requests,), 77),
        torch.arange(requests),
        torch.zeros(requests, dtype=torch.int64),
        max_spec_len=1,
        draft_probs=None if sure else draft.expand(requests, n),
    )
    check_distribution(tokens[:, 0], target.double() / target.double().sum())
    accepted = tokens[:, 1] == 77
    assert bool((accepted | (tokens[:, 1] == -1)).all())
    wanted = float(target[5] if sure else torch.minimum(target, draft).sum())
    assert abs(float(accepted.double().mean()) - wanted) < 5 * math.sqrt(wanted * (1 - wanted) / requests)


def test_a_row_does_not_depend_on_the_others() -> None:
    problem = Problem("sample", 6, 100, given=frozenset(("temperature", "top_k", "top_p")))
    tensors, op = problem.tensors(5), liger_aot.load("sample")
    whole = op(**tensors)
    for row in range(6):
        assert op(**{name: t[row : row + 1] for name, t in tensors.items()}).item() == whole[row].item()


# ---- arguments ----

X, ROW, KEYS = (
    torch.zeros(2, 64),
    torch.ones(2),
    {"seeds": torch.zeros(2).long(), "positions": torch.zeros(2).long()},
)
DRAFTS = {
    "target_probs": X, "draft_token_ids": torch.zeros(2).long(), "cu_num_draft_tokens": torch.tensor([1, 2]).int(),
    "bonus_token_ids": torch.zeros(2).long(), **KEYS, "max_spec_len": 1,
}  # fmt: skip
BAD: dict[str, tuple[str, dict[str, Any], type[Exception], str]] = {
    "one row alone": ("sample", {"logits": X[0]}, ArgumentError, r"logits must be \(rows, n\) with n from 1"),
    "too long": ("sample", {"logits": torch.zeros(1, 1).expand(2, 1 << 19)}, ArgumentError, "from 1 to 262144"),
    "float64": ("sample", {"logits": X.double()}, ArgumentTypeError, "logits must be bfloat16, float16"),
    "seeds of 32 bits": ("sample", {"seeds": ROW.int()}, ArgumentTypeError, "seeds must be .* int64, got int32"),
    "no seeds": ("sample", {"seeds": None}, ArgumentTypeError, "seeds must be a torch.Tensor, got NoneType"),
    "a number": ("sample", {"temperature": 1.0}, ArgumentTypeError, "temperature must be a torch.Tensor, got float"),
    "k of floats": ("sample", {"top_k": ROW}, ArgumentTypeError, "top_k must be .* int32 or int64, got float32"),
    "too few": ("sample", {"top_p": ROW[:1]}, ArgumentError, r"top_p must have shape \(rows,\) with rows = 2"),
    "elsewhere": ("sample", {"min_p": ROW.to("meta")}, ArgumentError, "min_p is on meta, logits on cpu"),
    "words": (
        "sample", {"allowed_mask": torch.zeros(2, 3).int()}, ArgumentError, r"allowed_mask must .* ceil\(n / 32\)",
    ),
    "a gradient": ("sample", {"logits": X.clone().requires_grad_()}, ArgumentError, "a gradient is needed, and samp"),
    "two places": ("top_k_top_p_mask", {"out": X.clone(), "inplace": True}, ArgumentError, "out is given, and inpl"),
    "another shape": ("top_k_top_p_mask", {"out": torch.zeros(2, 63)}, ArgumentError, "out must be of logits' shape"),
    "half probabilities": ("rejection_sample", {"target_probs": X.half()}, ArgumentTypeError, "must be float32, got"),
    "no drafts": ("rejection_sample", {"max_spec_len": 0}, ArgumentError, "max_spec_len must be from 1 to 1024"),
    "more than there are": ("sample", {"logprobs": 65}, ArgumentError, "logprobs is 65, of rows of 64 logits"),
    "requests": ("rejection_sample", {"seeds": KEYS["seeds"][:1]}, ArgumentError, "one element a request"),
}  # fmt: skip
GOOD: dict[str, dict[str, Any]] = {
    "sample": {"logits": X, **KEYS},
    "top_k_top_p_mask": {"logits": X, "top_k": ROW.int()},
    "rejection_sample": DRAFTS,
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    name, changes, error, text = BAD[case]
    with pytest.raises(error, match=f"{name}: .*{text}"):
        liger_aot.load(name)(**{**GOOD[name], **changes})


def test_results_in_place() -> None:
    op = liger_aot.load("top_k_top_p_mask")
    x, k = torch.randn(3, 50), torch.tensor([3, 4, 5])
    wanted, own, out = op(x, k), x.clone(), torch.empty_like(x)
    version = own._version
    assert op(own, k, inplace=True) is own and own._version > version and torch.equal(own, wanted)
    assert op(x, k, out=out) is out and torch.equal(out, wanted)


@pytest.mark.parametrize("name", OPS)
def test_nothing_to_do(name: str) -> None:
    op = liger_aot.load(name)
    if name == "rejection_sample":
        none = {k: v if k == "max_spec_len" else v[:0] for k, v in DRAFTS.items()}
        assert op(**none).shape == (0, 2)
        no_drafts = {**DRAFTS, "target_probs": X[:0], "draft_token_ids": KEYS["seeds"][:0]}
        no_drafts["cu_num_draft_tokens"] = torch.zeros(2).int()
        assert op(**no_drafts).tolist() == [[0, -1], [0, -1]]
    else:
        empty = op(**{k: v[:0] for k, v in GOOD[name].items()})
        assert empty.shape == ((0, 64) if name == "top_k_top_p_mask" else (0,))


@pytest.mark.parametrize("name", OPS)
def test_compiled_graphs_have_the_same_results(name: str) -> None:
    register(name)
    problem = small(name)[1]
    tensors, op = problem.tensors(), liger_aot.load(name)
    torch.compiler.reset()
    compiled = torch.compile(lambda t: problem.run(op, t), backend="aot_eager", fullgraph=True)(tensors)
    assert torch.equal(compiled, problem.run(op, tensors))


# ---- the kernels ----

OF_LONG_ROWS = (
    "logits_bracket",
    "logits_collect",
)  # launched where a row is more than one block of logits_groups
MORE_THAN_A_BLOCK = 4096 + 64


def table_problems(name: str, manifest: OpManifest, longest: int, rows: int) -> list[tuple[str, Problem]]:
    """(variant, a problem that takes it) for every row of every table."""
    found = []
    for kernel in manifest.kernels.values():
        for key, entries in kernel.tables.items():
            *words_of_key, alignment = key.split("/")
            axes = dict(zip(kernel.axes, words_of_key, strict=True))
            for n, (_, variant) in zip(
                sizes_of(entries, alignment == "aligned", longest), entries, strict=True
            ):
                given = optional(name)
                if "choose" in variant:
                    given = given[:4]  # with penalties it reads float32
                if variant.startswith(OF_LONG_ROWS):
                    given, n = ("top_p",), n + MORE_THAN_A_BLOCK
                found.append(
                    (
                        variant,
                        Problem(
                            name,
                            rows,
                            n,
                            DTYPES[axes.get("dtype", "fp32")],
                            given=frozenset(given),
                            shift=int(alignment == "generic"),
                            gap=16 if alignment == "aligned" else 3,
                            logprobs=5 if "logprob" in variant else None,
                        ),
                    )
                )
    return found


def check_tables(op: Any, problems: list[tuple[str, Problem]], rows: bool, device: str = "cpu") -> None:
    done: set[Any] = set()
    for variant, problem in problems:
        if (problem if rows else form_of(variant)) not in done:
            done |= {problem, form_of(variant)}
            check(op, problem, device=device)
    assert done


def test_plans_are_for_one_alignment() -> None:
    """The same layouts at other addresses: each tensor's own alignment counts."""
    op, buffer = bound("rejection_sample", "gfx942", RecordingDriver), torch.zeros(2, 144)
    for target_at, draft_at in ((0, 1), (1, 0), (0, 0), (1, 1)):
        target, draft = (
            buffer.as_strided((2, 64), (64, 1), 144 * i + at) for i, at in enumerate((target_at, draft_at))
        )
        op(**{**DRAFTS, "target_probs": target, "draft_probs": draft})
    assert len(op._plans) == 4


def test_of_few_rows_many_programs_collect_a_small_top_k() -> None:
    drivers: dict[str, RecordingDriver] = {}

    def driver(name: str, pack: Pack) -> RecordingDriver:
        return drivers.setdefault(name, RecordingDriver(name, pack))

    op, n = bound("top_k_top_p_mask", "sm90", driver), 20_000
    kernels = op._runtimes["top_k_top_p_mask"].of(torch.zeros(1, n), "logits").kernels
    few = kernels["logits_collect"].for_rows((torch.float32, True), n, 1).numbers["few_rows"]
    launches = drivers["top_k_top_p_mask"].launches
    for rows, top_p, collected in ((few, None, 1), (few, 0.9, 1), (few + 1, None, None), (few + 1, 0.9, 0)):
        launches.clear()
        share = None if top_p is None else torch.full((rows,), top_p)
        op(torch.zeros(rows, n), torch.full((rows,), 50, dtype=torch.int32), share)
        assert launches.get("logits_collect", (None,))[-1] == collected
        assert launches["logits_threshold"][-1] == (collected or 0)
        assert launches["logits_groups"][-1] == 1  # fours of groups are there


@poisoned
@pytest.mark.interpreter
@pytest.mark.parametrize("arch", ["sm90", pytest.param("gfx942", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPS)
def test_on_the_interpreter(name: str, arch: str) -> None:
    op = bound(name, arch, InterpreterDriver)
    for seed, problem in enumerate(small(name)):
        check(op, problem, seed=seed)


@poisoned
@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.parametrize("name", OPS)
def test_every_row_on_the_interpreter(name: str) -> None:
    op = bound(name, "sm90", InterpreterDriver)
    check_tables(op, table_problems(name, built_pack("sm90").op(name), 140_000, 2), rows=True)


@poisoned
@pytest.mark.slow
@pytest.mark.interpreter
def test_long_lists_on_the_interpreter() -> None:
    """Many more groups are left than a tile holds, of flat rows, ties and rows whose top-k is long."""
    op = bound("top_k_top_p_mask", "sm90", InterpreterDriver)
    for values in ("normal", "ties", "special"):
        for given in (("top_p",), ("top_k",), ("top_k", "top_p", "min_p")):
            check(op, Problem("top_k_top_p_mask", 4, 12_345, values=values, given=frozenset(given)))


@poisoned
@pytest.mark.interpreter
@pytest.mark.parametrize(("values", "n"), [("ties", 8_200), ("normal", 33_000)])
def test_few_and_many_rows_keep_the_same_columns(values: str, n: int) -> None:
    """Of few rows many programs collect the columns of a small top-k, of many rows one does; they look at the greatest
    of groups, of long rows at those of fours of them."""
    op, reference = bound("top_k_top_p_mask", "sm90", InterpreterDriver), liger_aot.load("top_k_top_p_mask")
    given = frozenset(("top_k", "top_p", "min_p"))
    tensors = Problem("top_k_top_p_mask", 5, n, values=values, given=given).tensors()
    logits, p, least = tensors["logits"], tensors["top_p"], tensors["min_p"]
    k = torch.tensor([1, 50, 128, 200, 0], dtype=torch.int32)
    whole = op(logits, k, p, least)
    assert torch.equal(whole, reference(logits, k, p, least))
    for rows in (slice(0, 2), slice(2, 5)):
        assert torch.equal(op(logits[rows], k[rows], p[rows], least[rows]), whole[rows])


def misleading() -> Tensor:
    """Rows whose sample, one group in three of such long ones, is not as the others are."""
    x = torch.randn(2, 40_000, generator=torch.Generator().manual_seed(7))
    sampled = torch.arange(x.shape[1]) // 32 % 3 == 0
    return x + torch.where(sampled, torch.tensor([[-9.0], [3.0]]), 0.0)


@poisoned
@pytest.mark.interpreter
def test_the_threshold_is_among_the_columns_that_were_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """No search over the row is left of flat and peaked rows, nor of a small top-k; of a row whose sample misleads and
    of equal logits one is, with the same result."""
    searched: list[bool] = []

    def search(*arguments: Any) -> Any:
        searched.append(True)
        return search_list(*arguments)

    search_list = threshold.search_list
    monkeypatch.setattr(threshold, "search_list", search)
    op, reference = bound("top_k_top_p_mask", "sm90", InterpreterDriver), liger_aot.load("top_k_top_p_mask")
    draw, n = torch.Generator().manual_seed(6), 12_000
    x = torch.randn(3, n, generator=draw)
    peaked = x * 0.5 - torch.rand(3, n, generator=draw).log() * 1.7
    p, k = torch.tensor([0.1, 0.9, 0.99]), torch.tensor([50, 1, 128])
    for logits, given, wanted in (
        (x, (None, p), False), (x.bfloat16(), (None, p), False), (x * 2, (k, p), False), (peaked, (None, p), False),
        (misleading(), (None, p[:2]), True), (torch.ones(3, n), (None, p), True), (x, (k * 9, None), True),
    ):  # fmt: skip
        searched.clear()
        assert torch.equal(op(logits, *given), reference(logits, *given))
        assert bool(searched) == wanted


@poisoned
@pytest.mark.interpreter
@pytest.mark.parametrize("values", ["normal", "ties", "peaked", "special", "same"])
def test_few_blocks_are_scored_whole(values: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with infinities are, and a few of others. The tokens are the reference's."""
    whole: list[bool] = []

    def score(*arguments: Any) -> Any:
        whole.append(True)
        return best_of_all(*arguments)

    best_of_all = screen.best_of_all
    monkeypatch.setattr(screen, "best_of_all", score)
    op = bound("sample", "sm90", InterpreterDriver)
    for shift, dtype in ((0, FP32), (1, BF16)):
        check(op, Problem("sample", 8, 6160, dtype, values, frozenset(("temperature",)), shift=shift, gap=16))
    assert len(whole) > 1 if values == "special" else len(whole) < 24  # of 64, the greedy rows' among them
    check(op, Problem("sample", 4, 6160, values=values, given=frozenset(("temperature", "top_p", "min_p"))))


@poisoned
@pytest.mark.interpreter
def test_many_long_rows_on_the_interpreter() -> None:
    """More rows than the binary for few takes, longer than the one for short rows."""
    op = bound("sample", "sm90", InterpreterDriver)
    for values in ("normal", "special"):
        check(op, Problem("sample", 65, 16_400, values=values, given=frozenset(("temperature",))))
    loaded = {v for on in op._own.bound.values() for v in on._loaded}
    assert any("block8192" in v for v in loaded)


@poisoned
@pytest.mark.parametrize("arch", BY_FORM)
@pytest.mark.parametrize("name", OPS)
def test_forms_on_the_emulator(name: str, arch: str) -> None:
    """Every form of each kernel."""
    op = bound(name, arch, EmulatorDriver)
    problem = Problem(name, 2, 96, given=frozenset(optional(name)))
    check(op, problem._replace(logprobs=2 if name == "sample" else None))
    if name == "top_k_top_p_mask":
        check(op, problem._replace(rows=1, n=MORE_THAN_A_BLOCK, given=frozenset(("top_p",))))


@poisoned
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gfx90a", "gfx942"])
@pytest.mark.parametrize("name", OPS)
def test_every_binary_on_the_emulator(name: str, arch: str) -> None:
    op = bound(name, arch, EmulatorDriver)
    for seed, problem in enumerate(small(name)):
        check(op, problem, seed=seed)
    manifest = built_pack(arch).op(name)
    asked = table_problems(name, manifest, 132_000, 2)
    # rows of a table for longer rows take those; the others' short ones, which the emulator runs in seconds
    short = [
        (v, p if p.n > 1 << 17 or v.startswith(OF_LONG_ROWS) else p._replace(n=min(p.n, 96 + p.shift)))
        for v, p in asked
    ]
    check_tables(op, short, rows=True)
    loaded = {v for on in op._own.bound.values() for v in on._loaded}
    assert not set(manifest.variants) - loaded


# ---- on a GPU ----


@poisoned
@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
def test_on_a_gpu(name: str) -> None:
    op = liger_aot.load(name)
    for seed, problem in enumerate(small(name)):
        check(op, problem, seed=seed, device="cuda")
    for rows in (1, 6):
        check_tables(op, table_problems(name, installed().op(name), 200_000, rows), rows=True, device="cuda")


@poisoned
@pytest.mark.gpu
@pytest.mark.parametrize("values", ["normal", "ties", "peaked", "special", "same"])
@pytest.mark.parametrize("n", [128_256, 131_072, 151_936, 262_144])
def test_vocabularies_on_a_gpu(n: int, values: str) -> None:
    """Flat rows, whose lists of groups are long, among others; each filter alone and all of them."""
    for given in (("top_k",), ("top_p",), ("min_p",), ("top_k", "top_p", "min_p")):
        for dtype in (FP32, BF16):
            problem = Problem("top_k_top_p_mask", 6, n, dtype, values=values, given=frozenset(given))
            check(liger_aot.load("top_k_top_p_mask"), problem, device="cuda")
    everything = Problem(
        "sample", 9, n, BF16, values=values, given=frozenset(optional("sample")), logprobs=20
    )
    check(liger_aot.load("sample"), everything, device="cuda")


@poisoned
@pytest.mark.gpu
@pytest.mark.parametrize("values", ["normal", "ties", "peaked", "special", "same"])
def test_many_rows_on_a_gpu(values: str) -> None:
    for dtype, shift in product((FP32, BF16, FP16), (0, 1)):
        for given in (("temperature",), ("temperature", "top_p")):
            problem = Problem("sample", 70, 40_016, dtype, values, frozenset(given), shift=shift, gap=16)
            check(liger_aot.load("sample"), problem, device="cuda")


@pytest.mark.gpu
def test_past_two_to_the_31() -> None:
    """The last rows are those of a call with them alone."""
    n = 1 << 18
    x = torch.empty((1 << 31) // n + 8, n, device="cuda", dtype=BF16).normal_()
    rows = x.shape[0]
    k, keys = torch.full((rows,), 40, device="cuda"), torch.arange(rows, device="cuda")
    for run in (
        lambda x, k, at: liger_aot.load("top_k_top_p_mask")(x, k),
        lambda x, k, at: liger_aot.load("sample")(x, at, at, top_k=k),
    ):
        assert torch.equal(run(x, k, keys)[-6:], run(x[-6:].clone(), k[-6:], keys[-6:]))


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
def test_cuda_graph(name: str) -> None:
    """Replays follow the tensors: numbers of draft tokens, k, p, temperatures, seeds."""
    op = liger_aot.load(name)
    op.preload()
    problem = Problem(name, 7, 5000, given=frozenset(optional(name)))
    problems = [problem.tensors(seed, "cuda") for seed in range(3)]
    most = max(t.shape[0] for p in problems for t in p.values())
    for p in problems:  # as many rows of drafts in each
        for key in ("target_probs", "draft_probs", "draft_token_ids"):
            if key in p:
                p[key] = torch.cat((p[key], p[key].new_zeros(most - p[key].shape[0], *p[key].shape[1:])))
    given = {key: t.clone() for key, t in problems[0].items()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        problem.run(op, given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = problem.run(op, given)
    for p in problems:
        for key, t in given.items():
            t.copy_(p[key])
        graph.replay()
        on_cpu = {key: t.cpu() for key, t in p.items()}
        assert torch.equal(captured.cpu(), problem.run(liger_aot.load(name), on_cpu))


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
def test_compiled_on_a_gpu(name: str) -> None:
    op, problem = liger_aot.load(name), small(name)[1]
    tensors = problem.tensors(0, "cuda")
    torch.compiler.reset()
    compiled = torch.compile(lambda t: problem.run(op, t), fullgraph=True)(tensors)
    assert torch.equal(compiled, problem.run(op, tensors))


def test_what_is_certain_of_equal_logits() -> None:
    """Of two at the top, top-p keeps the first alone where that one's share reaches p; so says the check also where
    another row's min-p is too near to call."""
    x = torch.tensor([[0.0, math.log(0.5), -9.0], [1.0, 3.0, 3.0]], dtype=torch.float64)
    t = {"min_p": torch.tensor([0.5, 0.0]), "top_p": torch.tensor([0.1, 0.1])}
    must, may = decided(x, t)
    assert bool((must != may).any())  # the first row's second token
    assert must.tolist() == [[True, False, False], [False, True, False]]
    logits = x.float()[1:]
    kept = liger_aot.load("top_k_top_p_mask")(logits, top_p=t["top_p"][1:]) > -math.inf
    assert kept.tolist() == [[False, True, False]]
