"""RoPE: halves and pairs, tables by rows and by position, every layout, on every driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.rope._rotary import Rotary
from liger_aot.ops.rope.rope import RoPE
from tests.conftest import built_pack
from tests.harness.drivers import EmulatorDriver, InterpreterDriver, bound_op
from tests.harness.op_tests import BF16, FP16, FP32, Case, Draw, Exact, OpTests
from tests.ops.rope.rotary_cases import by_complex_numbers, magnitudes, q_and_k

X = torch.ones(2, 3, 5, 8)
COS = torch.ones(5, 8)
IDS = torch.zeros(2, 5, dtype=torch.int64)
POSITIONS = 11  # of a table that position ids look up


class TestRoPE(OpTests):
    """A case's shape is q's; ``k`` heads of k (default 2), ``rotary`` columns are rotated (default all)."""

    op_class = RoPE
    names = ("q_out", "k_out")
    frozen = ("cos", "sin")
    in_place: ClassVar[Mapping[str, str]] = {"q_out": "q", "k_out": "k"}
    defaults: ClassVar[Mapping[str, Any]] = {"rotary_dim": None, "interleaved": False, "layout": "bhsd"}
    cases = (
        Case((2, 4, 5, 128), BF16),
        Case((1, 3, 7, 64), FP16, cos=FP32),
        Case((3, 5, 4, 96), FP32, k=1, batched=True),
        Case((2, 6, 3, 80), BF16, k=6, cos=FP32),
        Case((1, 2, 3, 256), BF16),
        Case((1, 1, 2, 600), FP16, k=1),
        Case((2, 2, 3, 2), FP32),
        Case((2, 3, 4, 6), BF16, batched=True),
        Case((1, 3, 4, 64), BF16, shift=1),
        Case((2, 3, 4, 64), BF16, gap=16),
        Case((2, 3, 4, 40), FP32, gap=3),
        Case((2, 5, 4, 128), BF16, layout="bshd", batched=True),
        Case((2, 5, 4, 128), BF16, transposed=True, batched=True),
        Case((2, 4, 5, 128), FP16, rotary=64, wide=0),
        Case((2, 4, 5, 80), BF16, rotary=20, rotary_dim=20, half=True),
        Case((2, 4, 5, 128), BF16, rotary_dim=128, half=True, cos=FP32),
        Case((2, 4, 5, 64), BF16, ids=torch.int64),
        Case((2, 4, 5, 64), FP16, ids=torch.int32, shared_ids=True, layout="bshd", k=3),
        Case((2, 4, 5, 128), BF16, interleaved=True),
        Case((2, 4, 5, 64), FP16, interleaved=True, cos=FP32, layout="bshd"),
        Case((1, 3, 4, 192), FP32, interleaved=True, transposed=True),
        Case((2, 3, 4, 90), BF16, interleaved=True, rotary=34, batched=True, k=1),
        Case((2, 3, 4, 128), FP16, interleaved=True, ids=torch.int64, rotary=64),
        Case((1, 2, 3, 520), BF16, interleaved=True),
        Case((1, 2, 3, 64), FP32, interleaved=True, shift=1, gap=1),
        Case((5, 1, 1, 64), BF16, k=1, batched=True),
    )
    empty = (Case((0, 2, 3, 8), BF16), Case((2, 2, 0, 8), FP32), Case((2, 0, 3, 8), FP16, interleaved=True))
    large = (
        Case((4, 32, 4096, 128), FP32, k=8, cos=FP32),
        Case((4, 32, 4096, 128), FP16, k=8, transposed=True),
        *(
            Case((2, 8192, 32, n), BF16, k=8, layout="bshd", interleaved=interleaved)
            for n in (64, 80, 128, 256)
            for interleaved in (False, True)
        ),
    )
    beyond = (
        Case(((1 << 31) // (512 * 32 * 128) + 64, 512, 32, 128), BF16, k=8, layout="bshd"),
        Case(((1 << 31) // (512 * 32 * 128) + 64, 32, 512, 128), BF16, k=8, interleaved=True),
    )
    bad: ClassVar[Mapping[str, Any]] = {
        "three dimensions": (
            (X[0], X[0], COS, COS),
            {},
            ArgumentError,
            r"q must be \(batch, heads, sequence",
        ),
        "k's head dimension": (
            (X, X[..., :6], COS, COS),
            {},
            ArgumentError,
            r"k must be as q.*\(2, 3, 5, 6\)",
        ),
        "k's sequence": ((X, X[:, :, :4], COS, COS), {}, ArgumentError, "k must be as q"),
        "k's heads as the sequence": ((X, X, COS, COS), {"layout": "bshd"}, ArgumentError, "cos must be"),
        "k's dtype": ((X, X.half(), COS, COS), {}, ArgumentError, "k must be as q.*torch.float16"),
        "odd heads": ((X[..., :7], X[..., :7], COS, COS), {}, ArgumentError, "head dimension.*even, got 7"),
        "odd rotary": ((X, X, COS[:, :5], COS[:, :5]), {}, ArgumentError, "cos.*even.*got 5"),
        "odd rotary_dim": ((X, X, COS, COS), {"rotary_dim": 3}, ArgumentError, "rotary_dim must be even"),
        "rotary_dim too large": ((X, X, COS, COS), {"rotary_dim": 10}, ArgumentError, "rotary_dim.*got 10"),
        "rotary_dim of no int": ((X, X, COS, COS), {"rotary_dim": 8.0}, ArgumentTypeError, "rotary_dim.*8.0"),
        "table's width": ((X, X, COS[:, :6], COS[:, :6]), {"rotary_dim": 8}, ArgumentError, "cos must have"),
        "table too wide": ((X, X, torch.ones(5, 10), torch.ones(5, 10)), {}, ArgumentError, "got 10"),
        "table's rows": ((X, X, COS[:4], COS[:4]), {}, ArgumentError, r"cos must be.*got \(4, 8\)"),
        "table's batch": ((X, X, COS.expand(3, 5, 8), COS.expand(3, 5, 8)), {}, ArgumentError, "cos must be"),
        "sin's shape": ((X, X, COS, COS[:4]), {}, ArgumentError, r"sin must be of cos's shape.*\(4, 8\)"),
        "sin's dtype": ((X.half(), X.half(), COS, COS.half()), {}, ArgumentError, "sin must be of cos's"),
        "table's dtype": ((X, X, COS.half(), COS.half()), {}, ArgumentError, "cos must be of q's dtype"),
        "a layout": ((X, X, COS, COS), {"layout": "sbhd"}, ArgumentError, "layout must be one of bhsd, bshd"),
        "ids' shape": (
            (X, X, COS, COS),
            {"position_ids": IDS[:, :4]},
            ArgumentError,
            r"position_ids.*\(2, 4\)",
        ),
        "ids' batch": ((X, X, COS, COS), {"position_ids": IDS.repeat(2, 1)}, ArgumentError, "position_ids"),
        "ids below": (
            (X, X, COS, COS),
            {"position_ids": IDS - 1},
            ArgumentError,
            "position_ids hold -1 to -1",
        ),
        "ids above": ((X, X, COS, COS), {"position_ids": IDS + 5}, ArgumentError, "hold 5 to 5.*5 rows"),
        "a table per sequence with ids": (
            (X, X, COS.expand(2, 5, 8), COS.expand(2, 5, 8)),
            {"position_ids": IDS},
            ArgumentError,
            "with position_ids, cos must be",
        ),
        "a gradient of cos": ((X, X, COS.clone().requires_grad_(), COS), {}, ArgumentError, "cos requires"),
        "a gradient of sin": ((X, X, COS, COS.clone().requires_grad_()), {}, ArgumentError, "sin requires"),
        "integers": ((X.int(), X.int(), COS, COS), {}, ArgumentTypeError, "q must be bfloat16.*got int32"),
    }

    dimensions = (4, 4)

    def fit(self, case: Case, choose: Callable[[Sequence[Any]], Any]) -> Case:
        """An even head dimension of the longest that is built for; tables of some columns, whole or half."""
        n = 2 * -(-min(case.shape[-1], 600) // 2)
        rotary = min(n, case.get("rotary", n))
        return case.but(
            shape=(*case.shape[:-1], n), rotary=rotary, rotary_dim=rotary if case.get("half") else None
        )

    def tensors(self, case: Case, draw: Draw) -> Tensors:
        layout = case.get("layout", "bhsd")
        batch, sequence, n = case.shape[0], case.shape[2 if layout == "bhsd" else 1], case.shape[3]
        q, k = q_and_k(case, draw, layout)
        ids = None
        rows: tuple[int, ...] = (batch, sequence) if case.get("batched") else (sequence,)
        if case.get("ids"):
            rows = (POSITIONS,)
            of_ids = (1, sequence) if case.get("shared_ids") else (batch, sequence)
            ids = draw.integers(POSITIONS, *of_ids).to(case.get("ids"))
        half = case.get("rotary", n) // 2
        angles = draw.uniform(-3.2, 3.2, *rows, half)
        tables = (t.to(case.get("cos", case.dtype)) for t in (angles.cos(), angles.sin()))
        cos, sin = (t if case.get("half") else torch.cat((t, t), -1) for t in tables)
        return q, k, cos, sin, ids

    def call(self, op: DifferentiableOp, tensors: Tensors, settings: tuple[Any, ...], **more: Any) -> Any:
        named = dict(zip(self.setting_names(), settings, strict=True))
        return op(*tensors[:4], position_ids=tensors[4], **named, **more)  # type: ignore[operator]

    def call_in_place(self, op: DifferentiableOp, tensors: Tensors, settings: tuple[Any, ...]) -> Any:
        return self.call(op, tensors, settings, inplace=True)

    def table_case(
        self, kernel: str, dtypes: Mapping[str, torch.dtype], n: int, aligned: bool, rows: int
    ) -> Case:
        interleaved = dtypes["interleaved"] == "true"
        width = max(2, n // 2 * 2) if interleaved else 2 * n
        # A program may take a whole token: of 512 on, of 28 heads that lie next to each other.
        whole = rows >= 512
        return Case(
            (1, rows, 28, width) if whole else (1, 3, rows, width),
            dtypes["dtype"],
            shift=int(not aligned),
            cos=dtypes["table"],
            interleaved=interleaved,
            layout="bshd" if whole else "bhsd",
        )

    def formula(
        self,
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        ids: Tensor | None,
        rotary_dim: int | None,
        interleaved: bool,
        layout: str,
    ) -> tuple[Tensor, Tensor]:
        half = (rotary_dim or cos.shape[-1]) // 2
        cos, sin = (t[..., :half] if ids is None else t[ids.long(), :half] for t in (cos, sin))
        cos, sin = (t.unsqueeze(-3 if layout == "bhsd" else -2) for t in (cos, sin))
        return by_complex_numbers(q, cos, sin, interleaved), by_complex_numbers(k, cos, sin, interleaved)

    def limits(self, exact: Exact) -> Mapping[str, Mapping[str, Any]]:
        cos, sin, ids = (exact.inputs[name] for name in ("cos", "sin", "position_ids"))
        settings = exact.settings.values()

        def rotated(x: Tensor, sign: int) -> Tensor:
            return RoPE.reference(x, x, cos.abs(), sign * sin.abs(), ids, *settings)[0]

        return magnitudes(exact, rotated)


def op_and_tensors(case: Case) -> tuple[Any, Tensors, dict[str, Any]]:
    tests = TestRoPE()
    tensors, settings, _ = tests.draw(case, 0, "cpu")
    named = dict(zip(tests.setting_names(), settings, strict=True))
    return liger_aot.load("rope"), tensors, {**named, "position_ids": tensors[4]}


@pytest.mark.parametrize("case", TestRoPE.cases, ids=str)
def test_without_k(case: Case) -> None:
    op, (q, k, cos, sin, _), named = op_and_tensors(case)
    wanted, _ = op(q, k, cos, sin, **named)
    got, none = op(q, None, cos, sin, **named)
    assert none is None and torch.equal(got, wanted) and got.stride() == wanted.stride()
    assert torch.equal(op(q.clone(), None, cos, sin, **named, inplace=True)[0], wanted)


def test_gradient_without_k() -> None:
    op, (q, k, cos, sin, _), named = op_and_tensors(TestRoPE.cases[0])
    q.requires_grad_()
    (both,) = torch.autograd.grad(op(q, k, cos, sin, **named)[0].sum(), q)
    (alone,) = torch.autograd.grad(op(q, None, cos, sin, **named)[0].sum(), q)
    assert torch.equal(alone, both)


def test_compiled_results_lie_as_eager_ones() -> None:
    """What follows the op in a graph is traced with its fake results' strides."""
    op, (q, k, cos, sin, _), named = op_and_tensors(Case((2, 5, 4, 16), FP32, transposed=True))

    def merged(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = op(q, k, cos, sin, **named)
        return q.flatten(1, 2), k

    torch.compiler.reset()
    compiled = torch.compile(merged, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(compiled(q, k), merged(q, k), strict=True):
        assert torch.equal(got, wanted) and got.stride() == wanted.stride()


def test_hugging_face_call() -> None:
    """cos and sin repeated in halves, q and k as transposed views: the model's own formula."""
    op, (q, k, cos, sin, _), named = op_and_tensors(Case((2, 5, 4, 64), FP32, transposed=True, batched=True))
    for got, x in zip(op(q, k, cos, sin, **named), (q, k), strict=True):
        first, second = x.chunk(2, -1)
        wanted = x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)
        torch.testing.assert_close(got, wanted)
        assert got.stride() == x.stride()


# ---- what only binaries do ----------------------------------------------------------------------------------


def by_token(monkeypatch: pytest.MonkeyPatch, persistent: bool = False) -> tuple[Rotary, set[str]]:
    """The op on sm90's kernels, where a program takes a whole token however few there are or, persistent, walks them
    with one other, and the forms it took."""
    op = bound_op(RoPE, built_pack("sm90"), InterpreterDriver)
    assert isinstance(op, Rotary)
    kernel, taken = op._own.bound[-1].kernels["rope"], set()

    def is_taken(name: str) -> bool:
        return "-tokens-" in name and ("-persistent1-" in name) == persistent

    few = {key: [entry for entry in rows if is_taken(entry[2])] for key, rows in kernel._few.items()}
    monkeypatch.setattr(kernel, "_few", few)
    load = kernel._load

    def noted(name: str) -> Any:
        loaded = load(name)
        launch = loaded.launch

        def launched(device: int, stream: int, programs: int, *arguments: Any) -> None:
            taken.add(name.split("-")[1])
            launch(device, stream, 2 if loaded.persistent else programs, *arguments)

        loaded.launch = launched
        return loaded

    monkeypatch.setattr(kernel, "_load", noted)
    return op, taken


@pytest.mark.interpreter
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        Case((2, 3, 28, 128), BF16, layout="bshd", batched=True),
        Case((2, 67, 3, 128), BF16, k=35, transposed=True, cos=FP32),
        Case((1, 3, 33, 96), BF16, k=1, layout="bshd", gap=16),
        Case((2, 2, 28, 64), BF16, layout="bshd", ids=torch.int64),
        Case((2, 2, 28, 64), BF16, layout="bshd", ids=torch.int32, shared_ids=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("persistent", [False, True])
def test_whole_tokens(
    monkeypatch: pytest.MonkeyPatch, poisoned: None, case: Case, inplace: bool, persistent: bool
) -> None:
    op, taken = by_token(monkeypatch, persistent)
    _, (q, k, cos, sin, _), named = op_and_tensors(case)
    wanted = RoPE()(q, k, cos, sin, **named)
    q, k = q.detach().clone(memory_format=torch.preserve_format), k.detach().clone()
    with torch.no_grad():
        got = op(q, k, cos, sin, **named, inplace=inplace)  # type: ignore[operator]
    for y, expected in zip(got, wanted, strict=True):
        torch.testing.assert_close(y, expected)
    assert taken == {"tokens"}


@pytest.mark.interpreter
def test_whole_tokens_partly_rotated(monkeypatch: pytest.MonkeyPatch, poisoned: None) -> None:
    """In place alone: else the other columns are copied. Ids out of range give NaN."""
    op, taken = by_token(monkeypatch)
    q, cos = torch.randn(1, 3, 28, 128).bfloat16(), torch.randn(4, 64).bfloat16()
    ids = torch.tensor([[3, 4, -1]])
    wanted, _ = RoPE()(q[:, :1], None, cos, cos, position_ids=ids[:, :1], layout="bshd")
    for inplace in (False, True):
        x = q.clone()
        with torch.no_grad():
            y, _ = op(x, None, cos, cos, position_ids=ids, layout="bshd", inplace=inplace)  # type: ignore[operator]
        torch.testing.assert_close(y[:, :1], wanted)
        assert y[:, 1:, :, :64].isnan().all() and torch.equal(y[..., 64:], q[..., 64:])
        assert taken == ({"rows", "tokens"} if inplace else {"rows"})


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "case", [Case((1, 2, 27, 64), BF16, layout="bshd"), Case((1, 28, 3, 64), BF16)], ids=str
)
def test_no_whole_tokens(monkeypatch: pytest.MonkeyPatch, poisoned: None, case: Case) -> None:
    """Of fewer heads, and where tokens, not heads, lie next to each other."""
    op, taken = by_token(monkeypatch)
    _, (q, k, cos, sin, _), named = op_and_tensors(case)
    for y, wanted in zip(op(q, k, cos, sin, **named), RoPE()(q, k, cos, sin, **named), strict=True):  # type: ignore[operator]
        torch.testing.assert_close(y, wanted)
    assert taken == {"rows"}


@pytest.fixture(
    params=[
        pytest.param("interpreter", marks=pytest.mark.interpreter),
        "emulator",
    ]
)
def bound(request: pytest.FixtureRequest, poisoned: None) -> Rotary:
    """The op on gfx942's kernels."""
    driver = InterpreterDriver if request.param == "interpreter" else EmulatorDriver
    op = bound_op(RoPE, built_pack("gfx942"), driver)
    assert isinstance(op, Rotary)
    return op


def planned(op: Rotary) -> set[Any]:
    return set(op._own.bound[-1].plans)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_ids_out_of_range_give_nan(bound: Any, dtype: torch.dtype) -> None:
    """And nothing is read there: the table is the end of its memory."""
    q, k = torch.randn(1, 2, 6, 24), torch.randn(1, 1, 6, 24)
    cos, sin = torch.randn(4, 16), torch.randn(4, 16)
    ids = torch.tensor([[0, 4, 3, -1, 2**31 - 1, 1]], dtype=dtype)
    if dtype == torch.int64:
        ids[0, 4] = 2**32 + 1  # its low word would be in range
    inside = torch.tensor([True, False, True, False, False, True])
    for x, y in zip((q, k), bound(q, k, cos, sin, position_ids=ids), strict=True):
        assert y[:, :, ~inside, :16].isnan().all()
        wanted = RoPE.reference(
            x[:, :, inside], x[:, :, inside], cos, sin, ids[:, inside], None, False, "bhsd"
        )
        torch.testing.assert_close(y[:, :, inside], wanted[0])
        assert torch.equal(y[..., 16:], x[..., 16:])


def test_results_lie_as_arguments(bound: Any) -> None:
    """Views of one packed projection: read in place, results without the gaps in the same order."""
    packed = torch.randn(2, 5, (3 + 1 + 1) * 16)
    q, k, _ = (t.unflatten(-1, (-1, 16)).transpose(1, 2) for t in packed.split((48, 16, 16), -1))
    cos, sin = torch.randn(5, 16), torch.randn(5, 16)
    for y, wanted, x in zip(
        bound(q, k, cos, sin), RoPE()(q.contiguous(), k.contiguous(), cos, sin), (q, k), strict=True
    ):
        torch.testing.assert_close(y, wanted)
        assert y.stride() == torch.empty_like(x).stride() and y.transpose(1, 2).is_contiguous()


def test_in_place_in_a_packed_projection(bound: Any) -> None:
    packed = torch.randn(2, 5, (3 + 1 + 1) * 16)
    before = packed.clone()
    q, k, _ = (t.unflatten(-1, (-1, 16)).transpose(1, 2) for t in packed.split((48, 16, 16), -1))
    cos, sin = torch.randn(5, 16), torch.randn(5, 16)
    wanted = RoPE()(q, k, cos, sin)
    with torch.no_grad():
        got = bound(q, k, cos, sin, inplace=True)
    assert got[0] is q and got[1] is k
    for y, expected in zip(got, wanted, strict=True):
        torch.testing.assert_close(y, expected)
    assert torch.equal(packed[..., 64:], before[..., 64:])


def test_plans_are_kept(bound: Any) -> None:
    """The same shapes and strides at another address: nothing is worked out again."""
    arguments = [torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8), torch.randn(3, 8), torch.randn(3, 8)]
    bound(*arguments)
    known = planned(bound)
    assert len(known) == 1
    bound(*(t.clone() for t in arguments))
    assert planned(bound) == known
    bound(*arguments, interleaved=True)
    assert len(planned(bound)) == 2


@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        ("q twice", "k overlaps q"),
        ("shifted", "k overlaps q"),
        ("cos", "cos overlaps q or k"),
        ("sin", "sin overlaps q or k"),
        ("expanded", "q has strides.*share memory"),
        ("strided", "k has strides.*last dimension must be contiguous"),
    ],
)
def test_in_place_refusals(bound: Any, what: str, pattern: str) -> None:
    memory = torch.randn(400)
    q, k = memory[:64].view(1, 2, 4, 8), memory[64:128].view(1, 2, 4, 8)
    cos, sin = memory[200:232].view(4, 8), memory[232:264].view(4, 8)
    if what == "q twice":
        k = q
    elif what == "shifted":
        k = memory[8:72].view(1, 2, 4, 8)
    elif what == "cos":
        cos = memory[120:152].view(4, 8)
    elif what == "sin":
        sin = memory[:32].view(4, 8)
    elif what == "expanded":
        q = q[:, :1].expand(1, 2, 4, 8)
    else:
        k = k.transpose(-1, -2).contiguous().transpose(-1, -2)
    before = memory.clone()
    with torch.no_grad(), pytest.raises(ArgumentError, match=pattern):
        bound(q, k, cos, sin, inplace=True)
    assert torch.equal(memory, before)


def test_inverses_divide() -> None:
    from liger_aot.ops.rope._rotary import _inverse

    for divisor in (1, 2, 3, 5, 7, 28, 64, 641, 8191, 65537, 2**30 - 1, 2**30, 2**31 - 1):
        multiplier, shift = _inverse(divisor)
        assert 0 <= multiplier < 2**32
        for n in {
            0,
            1,
            divisor - 1,
            divisor,
            2 * divisor - 1,
            2**31 - 1,
            (2**31 - 1) // divisor * divisor - 1,
        }:
            if 0 <= n < 2**31:
                assert n * multiplier >> shift == n // divisor
