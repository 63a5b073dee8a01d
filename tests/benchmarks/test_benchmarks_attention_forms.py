"""The forms of attention that are measured beside each other, on the CPU: what they cost and that they run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks.attention import attention, attention_forms
from benchmarks.attention.attention_forms import FORMS, GROUP, flops, providers, uneven
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


@pytest.mark.parametrize("module", [attention, attention_forms])
@pytest.mark.parametrize("backward", [False, True])
def test_results_lie_in_the_gpu_s_folder(
    module: ModuleType, backward: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = dataclasses.replace(ENVIRONMENT, gpu="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(attention, "observe", lambda *_, **__: where)
    monkeypatch.setattr(attention, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(module, "measure", lambda *_: {"liger_aot": 1.0})
    arguments = ["--dims", "64", "--lengths", "512", *(["--backward"] if backward else [])]
    assert module.main(arguments) == 0 and module.main([*arguments, "--out", str(tmp_path / "own")]) == 0
    stem = module.__name__.rpartition(".")[2]
    name = {("attention", False): "attention_forward", ("attention_forms", False): "attention_forms"}
    file = f"{name.get((stem, backward), f'{stem}_backward')}.json"
    for folder in (tmp_path / "results" / "h100" / "steps", tmp_path / "own"):
        (found,) = folder.iterdir()
        assert found.name == file
        rows = json.loads(found.read_text())["backward" if backward else "forward"]
        assert [row["causal"] for row in rows] == [False, True]


def test_results_of_several_packs_need_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        attention.main(["--packs", "two=a,three=b"])
    assert "--packs needs --out" in capsys.readouterr().err
