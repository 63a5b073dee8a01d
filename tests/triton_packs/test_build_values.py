"""Values as JSON: the same for equal ones, others for different ones, and nothing run that a file names."""

from __future__ import annotations

import enum
import json
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from liger_aot.triton.values import NotData, decode, encode, plain

Pair = namedtuple("Pair", ["first", "second"])


class Kind(enum.Enum):
    A = 1


@dataclass(frozen=True)
class Layout:
    order: tuple[int, ...]


def own_class(module: str, qualname: str) -> Any:
    assert module == __name__
    return globals().get(qualname)


@pytest.mark.parametrize(
    "value",
    [
        None, True, False, 0, 1, -7, 2**63, "a", "", 0.5, -0.0, float("inf"), 1e-300, (), (1, (2.0, None)),
        [1, "b"], Pair(1, "x"), Kind.A, Layout((1, 0)), torch.bfloat16,
    ],
    ids=repr,
)  # fmt: skip
def test_a_value_comes_back(value: Any) -> None:
    text = json.dumps(encode(value))
    back = decode(json.loads(text), find_class=own_class)
    assert back == value and type(back).__name__ == type(value).__name__
    assert plain(encode(value))


def test_values_that_python_takes_for_equal_differ() -> None:
    """1, True and 1.0 make other binaries."""
    texts = [json.dumps(encode(value)) for value in (1, True, 1.0, "1", (1,), [1], 0.0, -0.0)]
    assert len(set(texts)) == len(texts)


def test_not_a_number_is_one_value() -> None:
    assert encode(float("nan")) == encode(float("-nan")) == {"float": "nan"}


def test_values_of_triton() -> None:
    import triton.language as tl

    for value in (tl.float16, tl.constexpr(3), tl.constexpr(0.5)):
        assert decode(encode(value)) == value and type(decode(encode(value))) is type(value)


@pytest.mark.parametrize(
    "value",
    [object(), {1: 2}, b"bytes", {"a"}, lambda: None, torch.zeros(2)],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_data_is_refused(value: Any) -> None:
    with pytest.raises(NotData):
        encode(value)


def test_values_within_values_have_an_end() -> None:
    value: Any = ()
    for _ in range(40):
        value = (value,)
    with pytest.raises(NotData, match="too deep"):
        encode(value)


@pytest.mark.parametrize(
    "data",
    [
        {"float": 1}, {"float": "x"}, {"unknown": 1}, {"tuple": 3}, {"tuple": [], "list": []}, [1], {}, 1.5,
        {"torch": "load"}, {"torch": "__import__"}, {"namedtuple": ["a b", [], []]}, {"dtype": "nothing"},
        {"namedtuple": ["Pair", ["x"], [1, 2]]}, {"function": ["os", "system", "x"]},
        {"enum": ["os:environ", "PATH"]}, {"dataclass": ["subprocess:Popen", [["args", "true"]]]},
    ],
    ids=str,
)  # fmt: skip
def test_data_that_is_no_value_is_refused(data: Any) -> None:
    """A recording may come from strangers: what it names is not called unless it is a dataclass or an enumeration."""
    from importlib import import_module

    def find_class(module: str, qualname: str) -> Any:
        return getattr(import_module(module), qualname)

    with pytest.raises(NotData):
        decode(data, find_class=find_class)


def test_options_that_a_call_gave() -> None:
    """Also where they are a backend's defaults, which other backends' need not be; and where the process sets them."""
    from triton import knobs

    from liger_aot.triton.seams import given_options
    from tests.triton_packs.project.kernels import add

    added = {"debug": False, "instrumentation_mode": ""}  # by Triton itself
    said = {"num_warps": 4, "num_stages": 3, "maxnreg": None, "X": 1, "BLOCK": 64}
    assert given_options(add, said | added) == {"num_warps": 4, "num_stages": 3}
    assert given_options(add, {"debug": True}) == {"debug": True}
    with knobs.language.scope():
        knobs.language.default_fp_fusion = False
        knobs.language.fp32_default = "ieee"
        found = given_options(add, {"num_warps": 4})
        assert found == {"num_warps": 4, "enable_fp_fusion": False, "knob_fp32_default": "ieee"}
        assert given_options(add, {"enable_fp_fusion": True})["enable_fp_fusion"] is True
