"""``examples/serve.py`` and ``examples/paged_decoder.py`` on the CPU: their answers beside Transformers' logits."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="Transformers is not installed: make venv installs it")

from examples.paged_decoder import PAGE, Batch, Decoder, Engine, Request
from examples.serve import make
from tests.harness.children import ROOT, environment

E4M3 = torch.float8_e4m3fn


@pytest.fixture(scope="module", params=["small", "small-qwen3"])
def model(request: pytest.FixtureRequest) -> Any:
    return make(request.param)


def engine_of(model: Any, *, fp8: bool = False, pages: int = 8, rows: int = 3, chunk: int = 7) -> Engine:
    ticks = itertools.count()
    return Engine(
        Decoder(model, fp8),
        pages=pages,
        rows=rows,
        most=3 * PAGE,
        chunk=chunk,
        clock=lambda: float(next(ticks)),
    )


def prompts(count: int, vocabulary: int, seed: int = 0) -> Iterator[list[int]]:
    """Of 1 token, of a page and a little more, and of what lies between."""
    g = torch.Generator().manual_seed(seed)
    for i in range(count):
        length = (1, PAGE + 3, 9, 20)[i % 4]
        yield torch.randint(vocabulary, (length,), generator=g).tolist()


def answered(engine: Engine, requests: list[Request]) -> None:
    """A request more arrives every second step."""
    waiting = list(requests)
    with torch.inference_mode():
        while waiting or engine.busy:
            if waiting:
                engine.add(waiting.pop(0))
                engine.step()
            engine.step()
    assert sorted(engine.free) == list(range(8)) and sorted(engine.rows) == [0, 1, 2]
    assert not engine.prefilling and not engine.decoding
    for r in requests:
        assert len(r.tokens) == len(r.seconds) and r.seconds == sorted(r.seconds)


def in_fp8(model: Any) -> Any:
    """The model with its layers' matrix products on fp8 codes: a scale a token, and one an output."""

    def coded(x: Tensor) -> Tensor:
        scale = (x.float().abs().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
        return (x.float() / scale).to(E4M3).to(x.dtype) * scale.to(x.dtype)

    model = deepcopy(model)
    for linear in (m for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear)):
        linear.weight.data = coded(linear.weight.data)
        linear.register_forward_pre_hook(lambda _, inputs: (coded(inputs[0]),))
    return model


def check_greedy(model: Any, requests: list[Request]) -> None:
    """Each token is the one with the greatest logit, where the next one's is further off than twice what Transformers'
    own bfloat16 logits are from float64's."""
    exact = deepcopy(model).double()
    decided = 0
    for r in requests:
        ids = torch.tensor([list(r.prompt) + r.tokens[:-1]])
        with torch.no_grad():
            logits = exact(ids).logits[0, len(r.prompt) - 1 :]
            error = (model(ids).logits[0, len(r.prompt) - 1 :].double() - logits).abs().amax(-1)
        top = logits.topk(2)
        clear = top.values[:, 0] - top.values[:, 1] > 4 * error
        chosen = torch.tensor(r.tokens)
        assert torch.equal(chosen[clear], top.indices[:, 0][clear]), r
        behind = top.values[:, 0] - logits.gather(1, chosen[:, None])[:, 0]
        assert bool((behind <= 4 * error).all()), r
        decided += int(clear.sum())
    assert decided > sum(len(r.tokens) for r in requests) / 3  # else little was checked


def test_greedy_answers(model: Any) -> None:
    requests = [Request(p, 1 + 3 * i) for i, p in enumerate(prompts(5, model.config.vocab_size))]
    answered(engine_of(model), requests)
    assert [len(r.tokens) for r in requests] == [r.most for r in requests]
    check_greedy(model, requests)


def test_fp8_logits(model: Any) -> None:
    """They are as far from float64's of the same 8-bit products as those of Transformers in bfloat16 are: codes jump
    where a rounding before them differs, for which there is the factor."""
    tokens = torch.arange(PAGE - 20)
    count, coded = tokens.shape[0], in_fp8(model)
    decoder = Decoder(model, fp8=True)
    lengths, pages, starts = (torch.tensor(x, dtype=torch.int32) for x in ([count], [[1]], [0, count]))
    batch = Batch(
        tokens, tokens, PAGE + tokens, lengths, pages, starts, torch.tensor([count - 1]), count
    )  # fmt: skip
    with torch.inference_mode():
        found = decoder(batch, decoder.new_cache(2))[0].double()
        exact = deepcopy(coded).double()(tokens[None]).logits[0, -1]
        theirs = coded(tokens[None]).logits[0, -1].double()
    assert float((found - exact).norm()) <= 1.5 * float((theirs - exact).norm())


def test_sampled_answers(model: Any) -> None:
    """The same seed gives the same answer, another one another; no token outside of the top k."""
    vocabulary = model.config.vocab_size

    def sampled(first_seed: int) -> list[Request]:
        requests = [
            Request(p, 12, temperature=1.5, top_k=5, top_p=0.99, seed=first_seed + i)
            for i, p in enumerate(prompts(4, vocabulary))
        ]
        answered(engine_of(model), requests)
        return requests

    first, again, others = sampled(0), sampled(0), sampled(100)
    assert [r.tokens for r in first] == [r.tokens for r in again] != [r.tokens for r in others]
    exact = deepcopy(model).double()
    for r in first + others:
        ids = torch.tensor([list(r.prompt) + r.tokens[:-1]])
        with torch.no_grad():
            logits = exact(ids).logits[0, len(r.prompt) - 1 :]
            error = (model(ids).logits[0, len(r.prompt) - 1 :].double() - logits).abs().amax(-1)
        fifth = logits.topk(5).values[:, -1]
        assert bool((logits.gather(1, torch.tensor(r.tokens)[:, None])[:, 0] >= fifth - 4 * error).all())


def test_a_stop_token_ends_an_answer(model: Any) -> None:
    (prompt,) = prompts(1, model.config.vocab_size, 3)
    free, stopped = Request(prompt, 8), Request(prompt, 8)
    answered(engine_of(model), [free])
    stopped.stop = free.tokens[3]
    answered(engine_of(model), [stopped])
    assert stopped.tokens == free.tokens[: free.tokens.index(stopped.stop) + 1]


def test_requests_that_never_fit(model: Any) -> None:
    engine = engine_of(model)
    for prompt, most in (([], 1), ([1], 0), ([1] * (3 * PAGE), 1)):
        with pytest.raises(ValueError, match="each must have one, and both together at most 192"):
            engine.add(Request(prompt, most))
    assert not engine.busy


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "examples" / "serve.py"), "--sequences", "1,2", "--requests", "3",
            "--gap", "0.01", "--sampled", "--json", str(figures),
        ],
        env=environment(HOME=str(tmp_path), PATH=""), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    assert [f["sequences"] for f in found] == [1, 2] and all(f["rate"] > 0 and f["first"] > 0 for f in found)
