"""Serve a Llama or a Qwen3 with liger-aot: continuous batching, a paged cache, CUDA graphs, and nothing compiled.

    python examples/serve.py                                        # a small model
    python examples/serve.py --model llama3-8b --sequences 1,8,32,128,256
    python examples/serve.py --model llama3-8b --fp8 --sampled
    python examples/serve.py --model llama3-8b --beside transformers

Weights are random; requests of mixed lengths arrive over time. Printed for each number of sequences at once: tokens
per second, time to the first token, time per token after it, and of a step in which every sequence grows by a token,
what is not matrix products. ``examples/paged_decoder.py`` is the server. Needs torch, transformers (for the model's
class and weights) and liger-aot.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("LIGER_AOT_JIT", "error")  # nothing may compile

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from paged_decoder import PAGE, Decoder, Engine, Linear, Request

LLAMA3_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0,
}  # fmt: skip
QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "rope_theta": 1000000.0,
}  # fmt: skip
SMALL = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000, "initializer_range": 0.04,
}  # fmt: skip
MODELS = {
    "small": {"model_type": "llama", **SMALL},
    "small-qwen3": {"model_type": "qwen3", **SMALL},
    "llama3-8b": LLAMA3_8B,
    "qwen3-8b": QWEN3_8B,
}
LONGEST = 2048  # tokens of a prompt and its answer
CHUNK = 2048  # prompt tokens a step


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a model with random weights.")
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--sequences", default="1,8", help="at most so many at once: one run for each number")
    parser.add_argument("--requests", type=int, help="a run's (default: 4 for each sequence)")
    parser.add_argument("--prompt", default="16,64", help="tokens of a prompt: fewest,most")
    parser.add_argument("--answer", default="8,32", help="tokens of an answer: fewest,most")
    parser.add_argument(
        "--gap", type=float, default=0.0, help="mean seconds between arrivals (default: each user asks again)"
    )
    parser.add_argument("--chunk", type=int, default=CHUNK, help="prompt tokens a step")
    parser.add_argument("--fp8", action="store_true", help="matrix products in fp8")
    parser.add_argument("--sampled", action="store_true", help="temperature 0.8, top-k 50, top-p 0.95")
    parser.add_argument("--beside", choices=("transformers",), help="also serve the same requests with this")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    model, found = make(options.model), []
    decoder = Decoder(model, options.fp8)
    print(f"{'sequences':>9}{'':14}{'tokens/s':>10}{'first token':>14}{'next tokens':>14}{'not matmul':>12}")
    for rows in map(int, options.sequences.split(",")):
        prompt, answer = (tuple(map(int, text.split(","))) for text in (options.prompt, options.answer))
        load = Load(rows, options.requests or 4 * rows, prompt, answer, options.gap, options.sampled)
        found.append({"server": "liger-aot", "sequences": rows, **serve(decoder, load, options.chunk)})
        if model.device.type == "cuda":
            step = step_times(decoder, rows, load.most * 3 // 4)
            found[-1]["share"] = 1 - step["products"] / step["whole"]
        show(found[-1])
        if options.beside:
            found.append({"server": options.beside, "sequences": rows, **with_transformers(model, load)})
            show(found[-1])
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def show(figures: dict[str, Any]) -> None:
    share = figures.get("share")
    print(
        f"{figures['sequences']:>9}  {figures['server']:12}{figures['rate']:>10.0f}{figures['first'] * 1e3:>11.1f} ms"
        f"{figures['next'] * 1e3:>11.2f} ms{'' if share is None else f'{share:12.1%}'}"
    )


def make(name: str) -> Any:
    """The model with random weights: bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(MODELS[name])
    config = AutoConfig.for_model(
        settings.pop("model_type"), max_position_embeddings=LONGEST, dtype=torch.bfloat16, **settings
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


@dataclass(frozen=True)
class Load:
    """What is asked of a server: ``requests`` of as many tokens as are drawn, at most ``rows`` at once.

    With a gap they arrive at random, so many seconds apart in the mean. Without one, each of ``rows`` users asks again
    as soon as the last answer is there.
    """

    rows: int
    requests: int
    prompt: tuple[int, int]  # tokens: fewest, most
    answer: tuple[int, int]
    gap: float = 0.0
    sampled: bool = False

    def drawn(self, vocabulary: int) -> list[tuple[float, Request]]:
        """Requests, and when they arrive: seconds from the start."""
        draw, at, found = random.Random(0), 0.0, []
        for seed in range(self.requests):
            tokens = [draw.randrange(vocabulary) for _ in range(draw.randint(*self.prompt))]
            how = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "seed": seed} if self.sampled else {}
            found.append((at, Request(tokens, draw.randint(*self.answer), **how)))
            at += draw.expovariate(1 / self.gap) if self.gap else 0.0
        return found

    @property
    def most(self) -> int:
        """Tokens of a sequence."""
        return self.prompt[1] + self.answer[1]


class Arrivals:
    """Requests on their way to a server."""

    def __init__(self, load: Load, vocabulary: int) -> None:
        self.waiting = load.drawn(vocabulary)[::-1]
        self.load = load
        self.seen: list[tuple[float, Request]] = []
        self.start = time.perf_counter()

    def due(self, under_way: int) -> Iterator[Request]:
        """Those that users have sent by now, where so many have no answer yet."""
        while self.waiting:
            now = time.perf_counter()
            if self.load.gap:
                if self.start + self.waiting[-1][0] > now:
                    return
                now = self.start + self.waiting[-1][0]
            elif under_way >= self.load.rows:
                return
            under_way += 1
            request = self.waiting.pop()[1]
            self.seen.append((now, request))
            yield request

    def figures(self) -> dict[str, float]:
        """Tokens a second; medians of the seconds to the first token, and of those from each to the next."""
        end = max(r.seconds[-1] for _, r in self.seen)
        return {
            "rate": sum(len(r.tokens) for _, r in self.seen) / (end - self.start),
            "first": statistics.median(r.seconds[0] - at for at, r in self.seen),
            "next": statistics.median(
                (r.seconds[-1] - r.seconds[0]) / max(len(r.tokens) - 1, 1) for _, r in self.seen
            ),
        }


def serve(decoder: Decoder, load: Load, chunk: int = CHUNK) -> dict[str, float]:
    """What the requests met with."""
    with torch.inference_mode():
        engine = Engine(
            decoder,
            pages=load.rows * -(-load.most // PAGE),
            rows=load.rows,
            most=load.most,
            chunk=chunk,
            clock=time.perf_counter,
        )
        if engine.device.type == "cuda":
            engine.capture_all(load.sampled)
        how = {"temperature": 1.0, "top_k": 5, "top_p": 0.9} if load.sampled else {}
        for length in (1, load.prompt[1]):  # every binary is loaded, prompts' too
            for _ in range(min(load.rows, -(-chunk // length))):
                engine.add(Request([1] * length, 2, **how))
            engine.run()
        arrivals = Arrivals(load, decoder.embedding.shape[0])
        while arrivals.waiting or engine.busy:
            for request in arrivals.due(load.rows - len(engine.rows) + len(engine.waiting)):
                engine.add(request)
            engine.step()
        return arrivals.figures()


def step_times(decoder: Decoder, rows: int, length: int) -> dict[str, float]:
    """Milliseconds of a greedy step of ``rows`` sequences of ``length`` tokens ("whole"), and of its matrix products
    and its attention alone, each as a graph."""
    each = -(-length // PAGE)
    with torch.inference_mode():
        engine = Engine(
            decoder, pages=rows * each, rows=rows, most=each * PAGE, chunk=CHUNK, clock=time.perf_counter
        )
        engine.cache.normal_()
        engine.table[:rows] = torch.arange(rows * each).view(rows, each)
        engine.capture(rows, False)
        step, at, last = engine.graphs[rows, False], torch.arange(rows), length - 1
        slots = (at * each + last // PAGE) * PAGE + last % PAGE
        others = [torch.full((rows,), value) for value in (last, length, 0, 0)]
        step.integers.copy_(torch.stack([at, slots, *others]))
        linears = [m for layer in decoder.layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        linears.append(decoder.head)
        inputs = [_input(m, rows, decoder) for m in linears]
        lengths = torch.full((rows,), length, dtype=torch.int32, device=engine.device)
        q = engine.cache.new_empty(rows, 1, decoder.heads, decoder.dim).normal_()

        def multiply() -> None:
            for linear, x in zip(linears, inputs, strict=True):
                linear(x)

        def attend() -> None:
            for keys, values in engine.cache:
                decoder.ops["flash_decoding"](
                    q, keys, values, cache_seqlens=lengths, block_table=engine.table[:rows]
                )

        graphs = {"whole": step.graph, "products": _graph(multiply), "attention": _graph(attend)}
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(9):
            for name, graph in graphs.items():
                times[name].append(_milliseconds(graph.replay))
    return {name: statistics.median(found) for name, found in times.items()}


def _graph(work: Callable[[], Any]) -> Any:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def _input(linear: Linear, rows: int, decoder: Decoder) -> Any:
    x = torch.randn((rows, linear.weight.shape[1]), dtype=torch.bfloat16, device=linear.weight.device)
    return decoder.ops["quantize"](x) if linear.fp8 else x


def _milliseconds(work: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def with_transformers(
    model: Any, load: Load, attention: str = "sdpa", graphs: bool = True
) -> dict[str, float]:
    """The same requests through Transformers' continuous batching, greedy. Its cache has as many pages as ours."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    page = 256
    model.set_attn_implementation(attention)
    manager = model.init_continuous_batching(
        GenerationConfig(max_new_tokens=load.answer[1], do_sample=False, eos_token_id=-1),
        ContinuousBatchingConfig(
            use_cuda_graph=graphs, max_requests_per_batch=load.rows, block_size=page,
            num_blocks=load.rows * -(-load.most // page) + 8, max_batch_tokens=CHUNK, allow_block_sharing=False,
            max_blocks_per_request=-(-load.most // page) + 1,
        ),
    )  # fmt: skip
    manager.warmup()
    manager.start()
    by_name: dict[str, Request] = {}
    try:
        for _ in range(2):  # graphs are captured as their sizes come: the second time they are there
            arrivals, under_way = Arrivals(load, model.config.vocab_size), 0
            while arrivals.waiting or under_way:
                for request in arrivals.due(under_way):
                    under_way += 1
                    name = manager.add_request(
                        list(request.prompt), max_new_tokens=request.most, streaming=True, eos_token_id=-1
                    )
                    by_name[name] = request
                result = manager.get_result(timeout=0.01)
                if result is None:
                    if not manager.is_running():
                        raise RuntimeError("Transformers' manager ended")
                    continue
                if result.error:
                    raise RuntimeError(result.error)
                request, now = by_name[result.request_id], time.perf_counter()
                new = result.generated_tokens[len(request.tokens) :]
                request.tokens += new
                request.seconds += [now] * len(new)
                under_way -= bool(result.is_finished())
    finally:
        manager.stop(block=True)
    return arrivals.figures()


if __name__ == "__main__":
    main()
