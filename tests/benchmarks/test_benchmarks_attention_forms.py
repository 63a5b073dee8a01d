"""The forms of attention that are measured beside each other, on the CPU: what they cost and that they run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from benchmarks import steps
from benchmarks.attention import attention
from benchmarks.attention.attention import FORMS, GROUP, flops, providers, uneven
from tests.benchmarks.test_benchmarks import ENVIRONMENT


@pytest.mark.parametrize("length", [512, 2048, 8192, 16384])
def test_uneven_sequences_cost_what_even_ones_do(length: int) -> None:
    lengths = uneven(length)
    even = flops([length] * (16384 // length), 16, 128, True, False)
    assert len(set(lengths)) == 2
    assert flops(lengths, 16, 128, True, False) == pytest.approx(even, rel=2e-3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backward", [False, True])
def test_forms_run(form: str, backward: bool) -> None:
    runs, cost = providers(form, 256, 32, True, backward, device="cpu", tokens=64)
    found = runs["liger_aot"]()
    assert cost > 0 and len(found) == (3 if backward else 1)
    heads = 8 // GROUP if form == "gqa" else 8
    shapes = [t.shape[-2:] for t in found]
    assert shapes == [(8, 256), (heads, 256), (heads, 256)][: len(found)]
    assert all(torch.isfinite(t).all() for t in found)


@pytest.mark.parametrize("forms", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_results_lie_in_the_gpu_s_folder(
    forms: bool, backward: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = dataclasses.replace(ENVIRONMENT, gpu="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(steps, "observe", lambda *_, **__: where)
    monkeypatch.setattr(steps, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(attention, "measure", lambda *_: {"liger_aot": 1.0})
    arguments = ["--dims", "64", "--lengths", "512"]
    arguments += ["--backward"] * backward + ["--forms"] * forms
    assert (
        attention.main(arguments) == 0 and attention.main([*arguments, "--out", str(tmp_path / "own")]) == 0
    )
    names = {
        (False, False): "attention_forward", (False, True): "attention_backward",
        (True, False): "attention_forms", (True, True): "attention_forms_backward",
    }  # fmt: skip
    for folder in (tmp_path / "results" / "h100" / "steps", tmp_path / "own"):
        (found,) = folder.iterdir()
        assert found.name == f"{names[forms, backward]}.json"
        content = json.loads(found.read_text())
        assert list(content) == ["environment", "tokens", "dtype", "backward" if backward else "forward"]
        rows = content["backward" if backward else "forward"]
        assert [row["causal"] for row in rows] == [False, True]


@pytest.mark.parametrize("forms", [("dense",), FORMS])
def test_what_is_measured(
    forms: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By provider, by form where there are several; a peer that fails is left out, one that differs ends the run."""

    def made(form: str, *_: object) -> object:
        one = torch.ones(3)
        return {
            "liger_aot": lambda: (one,),
            "cudnn": no_case,
            "flash_attention_2": lambda: (one * factor,),
        }, 1e9

    def no_case() -> tuple[torch.Tensor, ...]:
        raise RuntimeError("no such case\nat all")

    factor = 1.001
    monkeypatch.setattr(attention, "providers", made)
    monkeypatch.setattr(attention, "milliseconds", lambda run, count: 2.0)
    found = attention.measure(forms, 256, 512, True, False, ("cudnn", "flash_attention_2"), 2)
    several = len(forms) > 1
    kinds = [f"{form} " for form in forms] if several else [""]
    assert found == {f"{kind}{name}": 0.5 for kind in kinds for name in ("liger_aot", "flash_attention_2")}
    assert "cudnn: no such case\n" in capsys.readouterr().err
    factor = 1.5
    with pytest.raises(SystemExit, match="ours and flash_attention_2 differ"):
        attention.measure(forms, 256, 512, True, False, ("flash_attention_2",), 2)
