"""What measures attention's candidates, without a GPU: processes that hang, checks that notice, who wins."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import liger_aot
from benchmarks.attention import attention_candidates, attention_trial, attention_trial_windows
from build_tools.paths import PROFILES
from tests.harness.tolerances import REFERENCE
from tests.ops.attention.attention_cases import Problem

WORKER = """
import json, sys, time
for job in json.loads(sys.stdin.read()):
    if job["does"] == "hang":
        time.sleep(3600)
    if job["does"] == "die":
        sys.exit(1)
    print(json.dumps({"wrong": "", "fatal": job["does"] == "fail"}), flush=True)
"""


def test_a_process_that_hangs_is_killed() -> None:
    """With the rest of its kernel; the others' jobs go on, none twice."""
    does = {"a": "work hang work", "b": "work die", "c": "fail work", "d": "work work"}
    jobs = [{"kernel": k, "does": d, "at": i} for k, v in does.items() for i, d in enumerate(v.split())]
    answers = list(attention_trial.supervised([sys.executable, "-c", WORKER], jobs, limit=3.0, start=60.0))
    assert [(j["kernel"], j["at"]) for j, _ in answers] == [
        ("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 0), ("d", 0), ("d", 1),
    ]  # fmt: skip
    assert [bool(a.get("fatal")) for _, a in answers] == [False, True, False, True, True, False, False]
    assert answers[1][1]["wrong"] == "no answer in 3 s" and "ended" in answers[3][1]["wrong"]


@pytest.mark.parametrize(
    "kernel",
    [
        "flash_attention_backward_groups_96",
        "flash_attention_backward_groups_64_causal",
        "flash_attention_backward_groups_128_causal_ordered",
        "flash_attention_backward_groups_64_local",
        "flash_attention_backward_groups_256_local_ordered",
        "flash_attention_backward_groups_256_capped",
    ],
)
def test_cases_are_the_kernels(kernel: str) -> None:
    """Each case of a kernel is one that the host would give it."""
    from liger_aot.ops.attention._backward import groups_kernel
    from liger_aot.ops.attention._operands import Settings, bounded, shape_of

    on: Any = SimpleNamespace(kernels={kernel}, tensor_map=object())
    for problem in attention_trial.cases(kernel):
        q, k = (torch.empty(s, device="meta") for s in shapes(problem))
        settings = bounded(shape_of(q, k, problem.layout), Settings(*problem.settings()))
        dim, needed = -(-problem.dim // 16) * 16, (True, True, True, False)
        assert groups_kernel(on, dim, settings, needed, kernel.endswith("_ordered")) == kernel, problem


def shapes(p: Problem) -> list[tuple[int, ...]]:
    order = (lambda n, h: (n, h)) if p.layout == "bshd" else (lambda n, h: (h, n))
    sizes = ((p.len_q, p.heads), (p.len_k, p.kv_heads))
    return [(p.batch, *order(n, h), p.dim) for n, h in sizes]


@pytest.mark.parametrize("wrong", ["", "scale", "vary", "launched", "nan", "order", "apart"])
@pytest.mark.parametrize("in_order", [False, True])
def test_checks_notice(wrong: str, in_order: bool) -> None:
    """The reference passes; gradients that are off, vary or are not written, and another kernel do not. In order dq may
    not vary by a bit, and all are near those of any order."""
    backward = liger_aot.load("flash_attention_backward")
    calls: list[int] = []

    def op(*arguments: Any, **keywords: Any) -> tuple[Any, ...]:
        calls.append(1)
        dq, dk, dv, dsinks = backward(*arguments, **keywords)
        if wrong == "scale":
            dq = dq * 1.05
        if wrong == "vary" and len(calls) == 2:
            dk = dk * 1.01
        assert keywords["deterministic"] == (in_order and len(calls) < 3)
        if wrong == "order" and len(calls) == 2:
            dq = dq.clone()
            dq.view(torch.int16).view(-1)[5] += 1
        if wrong == "apart" and len(calls) == 3:
            dv = dv * 1.05
        if wrong == "nan":
            dv[0, -1] = torch.nan
        return dq, dk, dv, dsinks

    kernel = f"flash_attention_backward_groups_64_causal{'_ordered' if in_order else ''}"
    on = SimpleNamespace(_loaded={f"{'another' if wrong == 'launched' else kernel}-groups": None})
    problem = Problem(1, 2, 1, 30, 40, 64, causal=True, sinks=True)
    found = attention_trial.check(op, backward, on, kernel, problem, REFERENCE, 1, "cpu")
    assert bool(found["wrong"]) == (bool(wrong) and (in_order or wrong not in ("order", "apart"))), found
    assert {
        "": "",
        "scale": "errors",
        "vary": "from run to run",
        "launched": "were launched",
        "nan": "errors",
        "order": "dq differs from run to run" if in_order else "",
        "apart": "gradients of any order differ" if in_order else "",
    }[wrong] in found["wrong"]


def test_winners() -> None:
    """By the mean over long lengths, where it is faster than the tiles; what was refused does not win."""
    name = "flash_attention_backward_groups_"
    made = [("64", 0, None), ("64", 1, None), ("64_causal", 0, None), ("64_ordered", 0, None)]
    made += [("96", 0, "wrong"), ("128", 0, None)]
    entries = [
        {
            "direction": "backward",
            "pack": pack,
            "kernel": name + kernel,
            "dim": int(kernel.split("_")[0]),
            "row": {"form": "groups", "number": pack},
            "refused": refused,
        }
        for kernel, pack, refused in made
    ]

    def line(dim: int, causal: bool, length: int, **tflops: float) -> dict[str, Any]:
        found = {key.lstrip("p").replace("_", " "): value for key, value in tflops.items()}
        return {"direction": "backward", "dim": dim, "causal": causal, "length": length, "tflops": found}

    lines = [
        line(64, False, 512, p0=900, p1=1, tiles=100),
        line(64, False, 2048, p0=120, p1=150, tiles=100),
        line(64, False, 8192, p0=120, p1=150, p0_ordered=110, tiles=100),
        line(64, True, 8192, p0=90, tiles=100),
        line(96, False, 8192, tiles=100),
        {"direction": "backward", "dim": 128, "causal": False, "length": 2048, "wrong": "no answer"},
        line(128, False, 8192, p0=200, tiles=100),
    ]
    chosen, reached = attention_candidates.winners(entries, lines)
    assert reached == {name + "64": 1.5, name + "128": 2.0, name + "64_ordered": 1.1}
    assert chosen[name + "64"][0][1]["number"] == 1


def test_the_packed_forwards_kernels_win_by_their_own_calls() -> None:
    name = "flash_attention_varlen_forward_groups_64"
    kernels = {"varlen": name, "varlen_full": f"{name}_full", "varlen_backward": name.replace("for", "back")}
    entries = [
        {"direction": d, "pack": n, "kernel": kernel, "dim": 64, "row": {"number": n}, "refused": None}
        for d, kernel in kernels.items()
        for n in range(2)
    ]
    lines = [
        {"direction": direction, "dim": 64, "causal": causal, "length": 8192, "tflops": tflops}
        for direction in kernels
        for causal, tflops in (
            (False, {"0": 400, "1": 200, "tiles": 100}),
            (True, {"0": 100, "1": 300, "tiles": 100}),
        )
    ]
    chosen, reached = attention_candidates.winners(entries, lines)
    assert reached == dict(zip(kernels.values(), (3.0, 4.0, round(6**0.5, 3)), strict=True))
    assert [chosen[k][0][1]["number"] for k in kernels.values()] == [1, 0, 1]


def test_a_windows_kernel_wins_by_both_windows() -> None:
    name = "flash_attention_backward_groups_64_local"
    entries = [
        {"direction": "local", "pack": n, "kernel": name, "dim": 64, "row": {"number": n}, "refused": None}
        for n in range(2)
    ]
    lines = [
        {"direction": "local", "dim": 64, "causal": True, "window": w, "length": 8192, "tflops": tflops}
        for w, tflops in (
            (1024, {"0": 400, "1": 200, "tiles": 100}),
            (4096, {"0": 100, "1": 300, "tiles": 100}),
            (None, {"0": 900, "1": 1, "tiles": 100}),
        )
    ]
    chosen, reached = attention_candidates.winners(entries, lines)
    assert chosen[name][0][1] == {"number": 1} and reached == {name: round(6**0.5, 3)}


@pytest.mark.parametrize("length", [2048, 8192])
@pytest.mark.parametrize("window", [0, 1024])
def test_pairs(length: int, window: int) -> None:
    assert attention_trial_windows.pairs(length, window) == sum(min(r, window) + 1 for r in range(length))


def test_a_profile_without_windows_keeps_the_rest() -> None:
    profile = (PROFILES / "sm90.toml").read_text()
    assert "_local]" in profile and "_capped]" in profile
    bare = attention_candidates.without(attention_candidates.without(profile, "local"), "capped")
    assert set(re.findall(r"groups_\d+_(?:local|capped)", bare)) == set()
    local, capped = (
        attention_candidates.tables("sm90", attention_candidates.candidates("sm90", d)[0], "a test")
        for d in ("local", "capped")
    )
    assert attention_candidates.without(bare + local + capped, "capped") == bare + local
    assert attention_candidates.without(bare + local, "local") == bare


def test_a_candidate_replaces_its_row_alone(tmp_path: Any) -> None:
    from build_tools.build import Tree, make_plans

    chosen = attention_candidates.candidates("sm90", "forward")[2]
    attention_candidates._write_profile("sm90", "forward", tmp_path, chosen)
    _, (now,) = make_plans("sm90", ("flash_attention",))
    _, (new,) = make_plans("sm90", ("flash_attention",), Tree(profiles=tmp_path))
    for kernel, plan in new.kernels.items():
        for (bound, name), (was_bound, was) in zip(
            plan.tables["bf16/aligned"], now.kernels[kernel].tables["bf16/aligned"], strict=True
        ):
            rows = {problem.max_n: row for problem, row in chosen.get(kernel, ())}
            assert bound == was_bound and (name == was) == (bound not in rows)
