"""Reading tensors through torch's DLPack exchange API, against what torch says in Python."""

from __future__ import annotations

import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from liger_aot.runtime import layout
from tests.harness.stand_in import import_launcher

pytest_plugins = ("tests.harness.launcher_fixtures",)

pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="torch before 2.10 has no DLPack exchange API",
)

CPU = 1


@pytest.fixture(scope="module")
def tensor_rows(native: Any) -> Any:
    return native.tensor_rows


@pytest.mark.parametrize(
    ("dtype", "code", "bits"),
    [
        (torch.float32, 2, 32),
        (torch.float64, 2, 64),
        (torch.float16, 2, 16),
        (torch.bfloat16, 4, 16),
        (torch.int32, 0, 32),
        (torch.int64, 0, 64),
        (torch.uint8, 1, 8),
        (torch.bool, 6, 8),
    ],
)
def test_what_a_tensor_is(tensor_rows: Any, dtype: torch.dtype, code: int, bits: int) -> None:
    x = torch.zeros(6, 10, dtype=dtype)[2:]
    assert tensor_rows(x) == (x.data_ptr(), CPU, 0, code, bits, 4, 10, 10)


def base() -> torch.Tensor:
    return torch.zeros(4, 6, 8, 10)


@pytest.mark.parametrize(
    ("tensor", "stride"),
    [
        (base(), 10),
        (base()[..., :7], 10),
        (base()[:, :, ::2], 20),
        (base()[:, :, 3], 80),
        (base()[:, 3], None),
        (base()[1, 2, 3], 10),
        (base()[1, 2, 3, :0], 0),
        (base().transpose(0, 1), None),
        (base().transpose(2, 3), None),
        (base()[..., ::2], None),
        (base()[..., 3:4], 10),
        (base()[..., 3], None),
        (base()[:, :1, 2:3], 480),
        (base()[1:2, :, 2:3], 80),
        (base()[:1, :1, :1], 10),
        (base().transpose(0, 1)[:, :1], 10),
        (base().transpose(0, 1)[:, :1, ::2], 20),
        (base().transpose(0, 1)[:, :1, :7], None),
        (base()[:0], 10),
        (base()[:, :0, ::3, ::2], 5),
        (base()[..., :0], 0),
        (base().transpose(0, 1)[..., :0], 0),
        (torch.zeros(10).expand(4, 6, 10), 0),
        (torch.zeros(4, 1, 10).expand(4, 6, 10), None),
        (torch.zeros(1, 10).expand(1, 10), 10),
        (torch.zeros(4, 1).expand(4, 8), None),
        (torch.zeros(12, 5).as_strided((3, 4, 5), (4, 1, 1)), 1),
        (torch.tensor(1.0), None),
    ],
    ids=lambda value: str((tuple(value.shape), value.stride())) if isinstance(value, torch.Tensor) else None,
)
def test_rows(tensor_rows: Any, tensor: torch.Tensor, stride: int | None) -> None:
    result = tensor_rows(tensor)
    if stride is None:
        assert result is None
        return
    *_, rows, columns, row_stride = result
    assert (rows, columns) == (prod(tensor.shape[:-1]), tensor.shape[-1])
    assert row_stride == (stride if rows > 1 else columns)


def test_permuted_and_sliced_views(tensor_rows: Any) -> None:
    """Every element of `x` holds its own offset: a view's values tell whether it is rows, and which."""
    x = torch.arange(3 * 4 * 5 * 6).reshape(3, 4, 5, 6)
    slices = [slice(None), slice(1, 2), slice(None, None, 2), slice(0, 0)]
    results = {True: 0, False: 0}
    for order in ((0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3), (3, 0, 1, 2), (0, 1, 3, 2)):
        for cut in range(4**4):
            view = x.permute(order)[tuple(slices[cut // 4**axis % 4] for axis in range(4))]
            rows, columns = prod(view.shape[:-1]), view.shape[-1]
            offsets = view.reshape(rows, columns)
            steps = offsets[:, :1].diff(dim=0).unique()
            are_rows = view.numel() == 0 or (bool((offsets.diff(dim=1) == 1).all()) and len(steps) <= 1)
            result = tensor_rows(view)
            assert (result is not None) == are_rows
            results[are_rows] += 1
            if are_rows and view.numel() > 0:
                stride = int(steps[0]) if rows > 1 else columns
                assert result == (view.data_ptr(), CPU, 0, 0, 64, rows, columns, stride)
    assert min(results.values()) > 200


def test_parameters_and_gradients(tensor_rows: Any) -> None:
    x = torch.zeros(3, 5, requires_grad=True)
    parameter = torch.nn.Parameter(torch.zeros(7, 9))
    assert tensor_rows(x)[5:] == (3, 5, 5)
    assert tensor_rows(parameter)[0] == parameter.data_ptr() and tensor_rows(parameter)[5:] == (7, 9, 9)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "other",
    [
        3,
        None,
        [[1.0]],
        torch.zeros(2, 3).as_subclass(Subclass),
        torch.zeros(2, 3, device="meta"),
        torch.zeros(2, 3).to_sparse(),
        torch._to_functional_tensor(torch.zeros(2, 3)),
    ],
    ids=["int", "None", "list", "subclass", "meta", "sparse", "functional"],
)
def test_what_has_no_plain_storage_is_left_to_the_caller(tensor_rows: Any, other: Any) -> None:
    assert tensor_rows(other) is None


def test_inside_vmap(tensor_rows: Any) -> None:
    seen: list[Any] = []
    torch.func.vmap(lambda row: seen.append(tensor_rows(row)) or row)(torch.zeros(2, 3))
    assert seen == [None]


def left_behind() -> torch.Tensor:
    """A tensor of a transform that has ended."""
    seen: list[torch.Tensor] = []
    torch.func.grad(lambda x: seen.append(x * 2) or x.sum())(torch.zeros(2, 3))
    return seen[0]


PLAIN = {
    "None": None,
    "tensor": torch.zeros(2, 3),
    "parameter": torch.nn.Parameter(torch.zeros(2, 3)),
    "requires a gradient": torch.zeros(2, 3, requires_grad=True),
    "frozen": torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False),
    "scalar": torch.zeros(()),
    "transposed": torch.zeros(2, 3).t(),
    "no element": torch.zeros(2, 0),
    "integers": torch.zeros(2, dtype=torch.int64),
    "imaginary part": torch.zeros(2, 3, dtype=torch.complex64).imag,
}
INDIRECT = {
    "int": 3,
    "list": [1.0],
    "subclass": torch.zeros(2, 3).as_subclass(Subclass),
    "meta": torch.zeros(2, 3, device="meta"),
    "sparse": torch.zeros(2, 3).to_sparse(),
    "functional": torch._to_functional_tensor(torch.zeros(2, 3)),
    "left behind": left_behind(),
    "negated": torch.zeros(2, 3, dtype=torch.complex64).conj().imag,
    "negated rows of one": torch.zeros(2, 1, dtype=torch.complex64).conj().imag,
    "negated scalar": torch.zeros((), dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("traits", ["native", "python"])
@pytest.mark.parametrize("name", [*PLAIN, *INDIRECT])
def test_traits(native: Any, name: str, traits: str) -> None:
    look = native.traits if traits == "native" else layout.python_traits
    value = (PLAIN | INDIRECT)[name]
    wanted = layout.INDIRECT if name in INDIRECT else int(bool(getattr(value, "requires_grad", False)))
    for others in ((), (None,), (torch.ones(2), None)):
        assert look((*others, value)) == look((value, *others)) == wanted
    assert look((value, torch.ones(2, requires_grad=True))) == max(wanted, layout.NEEDS_GRADIENT)


@pytest.mark.parametrize("traits", ["native", "python"])
def test_traits_of_settings(native: Any, traits: str) -> None:
    """The very objects, not what is equal to them."""
    look = native.traits if traits == "native" else layout.python_traits
    x, grown = torch.ones(2), torch.ones(2, requires_grad=True)
    settings = (1.0, "mean", 1 << 40)
    for known, other in (
        (settings, False),
        ((*settings,), False),
        (settings[:2], True),
        ((True, *settings[1:]), True),
        ((float("1"), *settings[1:]), True),
        ((), True),
    ):
        for tensors, wanted in (((x, None), 0), ((x, grown), layout.NEEDS_GRADIENT)):
            assert look(tensors, settings, known) == wanted + other * layout.OTHER_SETTINGS
        assert look((x.to_sparse(),), settings, known) == layout.INDIRECT


def test_rows_of_what_is_negated(tensor_rows: Any) -> None:
    for name, value in INDIRECT.items():
        if "negated" in name:
            assert tensor_rows(value) is None and layout.python_rows(value) is None
            assert tensor_rows(value.resolve_neg().reshape(1, -1)) is not None


def test_traits_takes_a_tuple(native: Any) -> None:
    assert native.traits(()) == 0
    for wrong in (([torch.zeros(2)],), ((), ()), ((), [], ()), ((), (), [])):
        with pytest.raises(TypeError, match="tuple"):
            native.traits(*wrong)
    x = torch.zeros(2, 3)
    tensors = (x, None, torch.zeros(2, 1, dtype=torch.complex64).conj().imag, 3)
    references, blocks = sys.getrefcount(x), sys.getallocatedblocks()
    for _ in range(1000):
        native.traits(tensors)
    assert sys.getrefcount(x) == references and sys.getallocatedblocks() - blocks < 100


def varied() -> list[Any]:
    """Values of which no two lie alike."""
    x = torch.zeros(4, 6, 8)
    views = [x, x[:2], x[:, :3], x.transpose(0, 1), x.flatten(), x.flatten(1), x[:0], x[0, 0, 0], x[:, :0]]
    types = [x.half(), x.bfloat16(), x.double(), x.long(), torch.complex(x, x)]
    return [None, *views, *types, x.expand(2, 4, 6, 8), x[::2], torch.zeros(6, 4, 8)]


def test_layouts_tell_tensors_apart(native: Any) -> None:
    values = varied()
    keys = [native.layouts((value,))[0] for value in values]
    keys += [native.layouts((a, b))[0] for a in values for b in values]
    assert len(set(keys)) == len(keys) and all(type(key) is bytes for key in keys)


def test_layouts_are_those_of_the_memory(native: Any) -> None:
    for value in varied()[1:]:
        copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        key, at, none = native.layouts((value, None))
        assert native.layouts((copy, None)) == (key, copy.data_ptr(), 0)
        assert none == 0 and (at == value.data_ptr() or not value.numel())
    x = torch.zeros(3, 4)
    assert native.layouts((torch.nn.Parameter(x), x))[1:] == (x.data_ptr(), x.data_ptr())
    assert native.layouts(()) == (b"",)


def test_layouts_without_the_exchange_api() -> None:
    values = varied()
    keys = [layout.python_layouts((value, None)) for value in values]
    assert len({key for key, *_ in keys}) == len(keys)
    assert [at for _, *at in keys] == [[0 if v is None else v.data_ptr(), 0] for v in values]
    assert layout.layouts_of((torch.zeros(2, device="meta"),))[1:] == (0,)


@pytest.mark.parametrize("name", INDIRECT)
def test_layouts_of_what_has_no_memory(native: Any, name: str) -> None:
    assert native.layouts((torch.zeros(2), INDIRECT[name], None)) is None


def test_layouts_of_too_many(native: Any) -> None:
    x = torch.zeros(2, 3)
    assert len(native.layouts((x,) * 36)) == 37  # 7 words each
    assert native.layouts((x,) * 37) is None and native.layouts((None,) * 257) is None
    with pytest.raises(TypeError, match="tuple"):
        native.layouts(x)
    tensors = (x, None, 3)
    references, blocks = sys.getrefcount(x), sys.getallocatedblocks()
    for _ in range(1000):
        native.layouts(tensors)
        native.layouts(tensors[:2])
    assert sys.getrefcount(x) == references and sys.getallocatedblocks() - blocks < 100


def test_torch_may_come_after_the_launcher(launcher_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor_rows = import_launcher(launcher_path).tensor_rows
    x = torch.zeros(2, 3)
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "torch")
        assert tensor_rows(x) is None
    assert tensor_rows(x) == (x.data_ptr(), CPU, 0, 2, 32, 2, 3, 3)


def test_it_leaves_nothing(tensor_rows: Any) -> None:
    x = torch.zeros(4, 8, 4096)
    tensor_rows(x)
    references, blocks = sys.getrefcount(x), sys.getallocatedblocks()
    for _ in range(10_000):
        tensor_rows(x)
    assert sys.getrefcount(x) == references and sys.getallocatedblocks() - blocks < 100
