"""Random calls with wrong arguments: one error, in the arguments' words, alike on the CPU and on the way to a GPU.

LIGER_AOT_SEED=new draws others. Without a GPU nothing is launched: the way to one ends at a driver that records.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError, ArgumentTypeError
from tests.conftest import built_pack, seed_of_run
from tests.harness.choices import Choices, RandomChoices
from tests.harness.drivers import bound_op
from tests.harness.process_groups import in_group
from tests.harness.recording import RecordingDriver
from tests.harness.small_calls import Named, other_calls, parallel_calls, small_calls

PARALLEL = parallel_calls()  # those that need a group of processes, here of one
OTHERS = {**other_calls(), **PARALLEL}
OPS = sorted([*small_calls(), *other_calls()])
# What small_calls hands over inside of its calls.
REQUIRED: dict[str, dict[str, Any]] = {
    "groupnorm": {"num_groups": 2},
    "neighborhood_attention": {"reach": 2},
    "rejection_sample": {"max_spec_len": 3},
    "rope_multimodal": {"mrope_section": (12, 2, 2)},
    "flash_attention_varlen": {"max_seqlen_q": 3, "max_seqlen_k": 3},
    "qk_norm_rope": {"num_heads_q": 2, "num_heads_k": 1, "num_heads_v": 1},
    "flash_attention_paged": {"max_seqlen_q": 3},
    **{n: {"dtype": torch.float8_e4m3fnuz, "ue8m0": False} for n in OPS if n.endswith("quantize")},
}
NAN, INF = float("nan"), float("inf")
NO_NUMBERS = (True, "1", [1.0], (1,), 1j, torch.tensor(1.0), np.float32(1), {})
BAD: dict[str, tuple[Any, ...]] = {
    "float": (*NO_NUMBERS, NAN, INF, -INF, 1e39, -1e39, 10**400),
    "int": (*NO_NUMBERS, 1.0, NAN, np.int64(1), 1 << 63, -(1 << 70)),
    "bool": (0, 1, 1.0, "yes", "", [], [True], torch.tensor(True), np.bool_(True)),
    "str": (1, True, "", "no such", "MEAN", ["mean"], b"mean", torch.tensor(1)),
    "dtype": ("float32", np.float32, torch.int16, 1, float),
    "window": (1, "ab", (1,), (1, 2, 3), (1.5, None), (-2, 0), (None, True), ["1", None], torch.ones(3)),
    "ProcessGroup": (1, "tp", object(), ("tp",)),
    "section": (1, (1,), (1, 2), (1.0, 2, 2), "abc", (True, 2, 2), (-1, 8, 9), None, torch.ones(2)),
}
# Numbers that their op does not take, though others do.
OUT_OF_RANGE: dict[str, tuple[Any, ...]] = {
    "eps": (-1, -1e-9),
    "temperature": (0, 0.0, -1.0),
    "label_smoothing": (-0.1, 1.1, 2),
    "beta": (-0.1, 1.5),
    "jsd_beta": (-0.1, 1.5),
    "softcap": (-1.0, -30),
    "scale": (0, 0.0, -1.0),
    "num_groups": (0, -2),
    "splits": (0, -1, 1 << 20),
    "chunk_bytes": (0, -1),
    "rotary_dim": (0, -2, 3),
    "tokens_per_group": (0, -1),
    "max_seqlen_q": (-1,),
    "max_seqlen_k": (-1,),
    "max_spec_len": (0, -1, 1025),
    "logprobs": (-1, 17, 1025),
    "padding_idx": (6, -7, 1 << 40),
    "delta": (-0.1,),
    "max_completion_length": (0, -1),
    "sapo_temperature_pos": (0, -1.0),
    "sapo_temperature_neg": (0, -1.0),
    "group_size": (0, -64, 96, 256),
    "limit": (0, -1.0),
    "num_heads_q": (0, -2, 3),
    "num_heads_k": (0, -1, 2),
    "num_heads_v": (0, -1, 2),
}
FREE = {
    ("policy_loss", "beta"),
    ("fused_linear_preference_loss", "beta"),
    ("fused_linear_grpo_loss", "beta"),
}  # arguments whose names others restrict


@cache
def _ops(name: str) -> tuple[Any, Any]:
    """(the reference's, the way to a GPU)"""
    op = liger_aot.load(name)
    return op, bound_op(type(op), built_pack("gfx942"), RecordingDriver)


def _tensors(name: str) -> Named:
    return OTHERS[name][0] if name in OTHERS else small_calls()[name].tensors


def _outputs(name: str, op: Any, tensors: Named | None = None) -> tuple[Any, ...]:
    """Of a right call."""
    tensors = _tensors(name) if tensors is None else tensors
    if name not in OTHERS:
        return small_calls()[name].outputs(op, tensors)
    found = op(**tensors, **OTHERS[name][1])
    return tuple(y for y in found if y is not None) if isinstance(found, tuple) else (found,)


def _parameters(name: str) -> list[inspect.Parameter]:
    """The named ones: grpo_loss hands the rest to policy_loss."""
    found = inspect.signature(liger_aot.load(name).__call__).parameters.values()
    return [p for p in found if p.kind is not p.VAR_KEYWORD]


def _freed(t: Tensor) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def _bad_tensors(t: Tensor) -> tuple[Any, ...]:
    """What can't stand in t's place, whatever the argument."""
    wrong = (torch.int16, torch.complex128, torch.float64, torch.bool)
    dtypes = wrong if t.is_floating_point() else (*wrong, torch.float32, torch.float16)
    return (
        *(t.to(dtype) for dtype in dtypes),
        *(t.tolist(), t.numpy(), "tensor", 1.0, True, object()),
        *(t.to_sparse(), _freed(t), torch._efficientzerotensor(t.shape, dtype=t.dtype)),
        *((t.to_mkldnn(),) if t.dtype == torch.float32 else ()),
        torch.nested.nested_tensor([t, t]),
    )


def _kind(parameter: inspect.Parameter) -> tuple[str, bool]:
    """(a key of BAD or "Tensor", whether None is allowed), of an annotation."""
    said = str(parameter.annotation).replace(" ", "")
    optional = "None" in said
    if parameter.name == "window":
        return "window", True
    if parameter.name == "mrope_section":
        return "section", False
    for kind in ("Tensor", "ProcessGroup", "dtype", "float", "bool", "int", "str"):
        if kind in said:
            return kind, optional
    raise AssertionError(f"{parameter.name}: {said}")


class Bad:
    """An op's wrong arguments: for each public parameter, values that can't be right."""

    def __init__(self, name: str) -> None:
        self.name = name
        settings = OTHERS[name][1] if name in OTHERS else REQUIRED.get(name, {})
        self.good: dict[str, Any] = {**_tensors(name), **settings}
        self.values: dict[str, tuple[Any, ...]] = {}
        for parameter in _parameters(name):
            kind, optional = _kind(parameter)
            if kind == "Tensor":
                values = _bad_tensors(self.good.get(parameter.name, self._like(parameter.name)))
            else:
                free = (name, parameter.name) in FREE
                values = (*BAD[kind], *(() if free else OUT_OF_RANGE.get(parameter.name, ())))
            self.values[parameter.name] = values if optional else (*values, None)

    def _like(self, argument: str) -> Tensor:
        """In the place of a tensor that the small call leaves out."""
        integers = ("position_ids", "block_table", "slot_mapping")
        return torch.ones(2, 3, dtype=torch.int32) if argument in integers else torch.ones(4, 16)

    def draw(self, choices: Choices) -> dict[str, Any]:
        """One wrong argument, sometimes two."""
        names = list(self.values)
        wrong = {}
        for _ in range(1 + (choices.number(0, 3) == 3)):
            argument = choices.one(names)
            wrong[argument] = choices.one(self.values[argument])
        return wrong


def _outcome(op: Any, arguments: dict[str, Any]) -> Any:
    try:
        return op(**arguments)
    except Exception as error:
        return error


def _said(value: Any) -> str:
    """Not a tensor's numbers: some have no memory that could be read."""
    return f"<{value.dtype}, {value.layout}>" if isinstance(value, Tensor) else repr(value)[:60]


def _check(bad: Bad, wrong: dict[str, Any]) -> None:
    found = [_outcome(op, {**bad.good, **wrong}) for op in _ops(bad.name)]
    said = f"{bad.name}({', '.join(f'{k}={_said(v)}' for k, v in wrong.items())})"
    for way, error in zip(("reference", "to a GPU"), found, strict=True):
        assert isinstance(error, (ArgumentError, ArgumentTypeError)), f"{said}, {way}: {error!r}"
        text = str(error)
        assert text.startswith(f"{bad.name}: "), f"{said}, {way}: {text}"
        assert any(k in text for k in wrong), f"{said}, {way}: {text}"
    assert type(found[0]) is type(found[1]) and str(found[0]) == str(found[1]), f"{said}: {found}"


def _choices(name: str) -> Choices:
    return RandomChoices(seed_of_run() * 1000 + [*OPS, *PARALLEL].index(name))


def _check_some(name: str, count: int) -> None:
    bad = Bad(name)
    choices = _choices(name)
    outputs = _outputs(name, _ops(name)[0])
    for _ in range(count):
        _check(bad, bad.draw(choices))
    after = _outputs(name, _ops(name)[0])
    assert all(torch.equal(a, b) for a, b in zip(outputs, after, strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPS)
def test_some_bad_calls(name: str) -> None:
    _check_some(name, 25)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPS)
def test_many_bad_calls(name: str) -> None:
    _check_some(name, 1000)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPS)
def test_what_equals_a_right_setting(name: str) -> None:
    """True is no 1.0 and 0 no False, also where the right one was given before."""
    _check_equal_settings(name)


def _check_equal_settings(name: str) -> None:
    bad = Bad(name)
    for parameter in _parameters(name):
        kind, _ = _kind(parameter)
        default = parameter.default
        if kind == "bool":
            for value in (0, 1, 0.0, np.bool_(False)):
                _outputs(name, _ops(name)[0])
                _check(bad, {parameter.name: value})
        elif kind in ("int", "float") and type(default) in (int, float) and default in (0, 1):
            _outputs(name, _ops(name)[0])
            _check(bad, {parameter.name: bool(default)})


def check_in_a_group(rank: int, device: torch.device, count: int) -> None:
    """A process of a group: its ops' bad calls."""
    for name in PARALLEL:
        if device.type == "cuda":
            _check_on_gpu(name)
        else:
            _check_some(name, count)
            _check_equal_settings(name)


def test_some_bad_calls_in_a_group() -> None:
    in_group(check_in_a_group, 1, 25)


@pytest.mark.slow
def test_many_bad_calls_in_a_group() -> None:
    in_group(check_in_a_group, 1, 1000)


@pytest.mark.gpu
def test_bad_calls_in_a_group_on_a_gpu() -> None:
    in_group(check_in_a_group, 1, 200, device="cuda")


def _on_gpu(value: Any) -> Any:
    """What ``value`` is where the tensors of a call are on a GPU. A setting's tensor may stay: it is wrong anywhere."""
    if not isinstance(value, Tensor) or not value.dim():
        return value
    if value._is_zerotensor():
        return torch._efficientzerotensor(value.shape, dtype=value.dtype, device="cuda")
    if value.layout == torch.strided and not value.is_nested and not value.untyped_storage().size():
        return _freed(torch.ones(value.shape, dtype=value.dtype, device="cuda"))
    return value if value.is_mkldnn else value.cuda()  # torch has no such layout on a GPU


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", OPS)
def test_meta_tensors(name: str, device: str) -> None:
    """All of them: results of the same shapes, dtypes and strides, with no memory. One of several: an error."""
    op = liger_aot.load(name)
    tensors = {k: t.to(device) for k, t in _tensors(name).items()}
    found = _outputs(name, op, {k: t.to("meta") for k, t in tensors.items()})
    for y, wanted in zip(found, _outputs(name, op, tensors), strict=True):
        assert (y.device.type, y.shape, y.dtype) == ("meta", wanted.shape, wanted.dtype)
        assert y.stride() == wanted.stride()
    for argument, t in tensors.items():
        if len(tensors) > 1:
            with pytest.raises(ArgumentError, match=rf"^{name}: .*\b{argument}\b.* meta"):
                _outputs(name, op, {**tensors, argument: t.to("meta")})


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPS)
def test_bad_calls_on_a_gpu(name: str) -> None:
    """With tensors on a GPU: the CPU's errors, word for word but for the device. Afterwards the op is right."""
    _check_on_gpu(name)


def _check_on_gpu(name: str) -> None:
    bad, op = Bad(name), liger_aot.load(name)
    choices = _choices(name)
    good = {k: _on_gpu(v) for k, v in bad.good.items()}
    there = {k: t.cuda() for k, t in _tensors(name).items()}
    outputs = _outputs(name, op, there)
    for _ in range(200):
        wrong = bad.draw(choices)
        if any(isinstance(v, Tensor) and v.is_mkldnn for v in wrong.values()):
            continue
        moved = {k: _on_gpu(v) for k, v in wrong.items()}
        here, found = _outcome(op, {**bad.good, **wrong}), _outcome(op, {**good, **moved})
        said = f"{name}({', '.join(f'{k}={_said(v)}' for k, v in moved.items())})"
        assert type(found) is type(here), f"{said}: {found!r}, on the CPU {here!r}"
        # a tensor's own device, or one that is named
        text = str(found).replace(", device='cuda:0'", "").replace("cuda:0", "cpu")
        assert text == str(here), f"{said}: {found}"
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(outputs, _outputs(name, op, there), strict=True))
