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
from collections.abc import Callable
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a model with random weights.")
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--sequences", default="1,8", help="at most so many at once: one run for each number")
    parser.add_argument("--requests", type=int, help="a run's (default: 4 for each sequence)")
    parser.add_argument("--prompt", default="16,64", help="tokens of a prompt: fewest,most")
    parser.add_argument("--answer", default="8,32", help="tokens of an answer: fewest,most")
    parser.add_argument(
        "--gap", type=float, default=0.0, help="mean seconds between arrivals (default: all at once)"
    )
    parser.add_argument("--chunk", type=int, default=2048, help="prompt tokens a step")
    parser.add_argument("--fp8", action="store_true", help="matrix products in fp8")
    parser.add_argument("--sampled", action="store_true", help="temperature 0.8, top-k 50, top-p 0.95")
    parser.add_argument("--beside", choices=("transformers",), help="also serve the same requests with this")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    model, found = make(options.model), []
    decoder = Decoder(model, options.fp8)
    print(f"{'sequences':>9}{'':14}{'tokens/s':>10}{'first token':>14}{'next tokens':>14}{'not matmul':>12}")
    for rows in map(int, options.sequences.split(",")):
        requests = workload(options, rows, model.config.vocab_size)
        figures = serve(decoder, requests, rows, options)
        found.append({"server": "liger-aot", "sequences": rows, **figures})
        show(found[-1])
        if options.beside:
            found.append(
                {"server": options.beside, "sequences": rows, **with_transformers(model, requests, rows)}
            )
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


def workload(options: argparse.Namespace, rows: int, vocabulary: int) -> list[tuple[float, Request]]:
    """Requests and when they arrive, in seconds from the start."""
    draw, at, requests = random.Random(0), 0.0, []
    prompt, answer = (tuple(map(int, o.split(","))) for o in (options.prompt, options.answer))
    for seed in range(options.requests or 4 * rows):
        tokens = [draw.randrange(vocabulary) for _ in range(draw.randint(*prompt))]
        settings = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "seed": seed} if options.sampled else {}
        requests.append((at, Request(tokens, draw.randint(*answer), **settings)))
        at += draw.expovariate(1 / options.gap) if options.gap else 0.0
    return requests


def serve(
    decoder: Decoder, arrivals: list[tuple[float, Request]], rows: int, options: argparse.Namespace
) -> dict[str, float | None]:
    """What the requests met with."""
    most = max(len(r.prompt) + r.most for _, r in arrivals)
    with torch.inference_mode():
        engine = Engine(
            decoder,
            pages=rows * -(-most // PAGE),
            rows=rows,
            most=most,
            chunk=options.chunk,
            clock=time.perf_counter,
        )
        warm = Request([1, 2, 3], 2)
        engine.add(warm)
        engine.run()  # every binary is loaded
        if engine.device.type == "cuda":
            engine.capture()
            torch.cuda.synchronize()
        start, waiting = time.perf_counter(), list(arrivals)
        while waiting or engine.busy:
            now = time.perf_counter() - start
            while waiting and waiting[0][0] <= now:
                engine.add(waiting.pop(0)[1])
            engine.step()
        share = step_share(engine, rows) if engine.device.type == "cuda" else None
    return {**figures_of(arrivals, start), "share": share}


def figures_of(arrivals: list[tuple[float, Request]], start: float) -> dict[str, float]:
    end = max(r.seconds[-1] for _, r in arrivals)
    return {
        "rate": sum(len(r.tokens) for _, r in arrivals) / (end - start),
        "first": statistics.median(r.seconds[0] - start - at for at, r in arrivals),
        "next": statistics.median(
            (r.seconds[-1] - r.seconds[0]) / max(len(r.tokens) - 1, 1) for _, r in arrivals
        ),
    }


def step_share(engine: Engine, rows: int) -> float:
    """Of a step of ``rows`` sequences in mid-answer, what is not matrix products: its graph beside a graph of them."""
    engine.length.fill_(int(engine.table.shape[1] * PAGE * 3 // 4))
    engine.length[-1] = 0
    graph, at, _ = engine.graphs[rows]
    at.copy_(torch.arange(rows))
    decoder, products = engine.decoder, torch.cuda.CUDAGraph()
    linears = [m for layer in decoder.layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    inputs = [_input(m, rows, decoder) for m in [*linears, decoder.head]]

    def multiply() -> None:
        for linear, x in zip([*linears, decoder.head], inputs, strict=True):
            linear(x)

    multiply()
    torch.cuda.synchronize()
    with torch.cuda.graph(products):
        multiply()
    whole, alone = [], []
    for _ in range(9):
        engine.length[:rows] = int(engine.table.shape[1] * PAGE * 3 // 4)
        whole.append(_milliseconds(graph.replay))
        alone.append(_milliseconds(products.replay))
    return 1 - statistics.median(alone) / statistics.median(whole)


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


def with_transformers(model: Any, arrivals: list[tuple[float, Request]], rows: int) -> dict[str, float]:
    """The same requests through Transformers' continuous batching, greedy."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    answered = [(at, Request(r.prompt, r.most)) for at, r in arrivals]
    by_name = {}
    manager = model.init_continuous_batching(
        GenerationConfig(max_new_tokens=max(r.most for _, r in answered), do_sample=False),
        ContinuousBatchingConfig(use_cuda_graph=True, max_requests_per_batch=rows),
    )
    manager.start()
    start, waiting, left = time.perf_counter(), list(answered), len(answered)
    try:
        while left:
            now = time.perf_counter() - start
            while waiting and waiting[0][0] <= now:
                request = waiting.pop(0)[1]
                name = manager.add_request(
                    list(request.prompt), max_new_tokens=request.most, streaming=True, eos_token_id=-1
                )
                by_name[name] = request
            result = manager.get_result(timeout=0.01)
            if result is None:
                continue
            if result.error:
                raise SystemExit(f"error: Transformers: {result.error}")
            request, now = by_name[result.request_id], time.perf_counter()
            new = result.generated_tokens[len(request.tokens) :]
            request.tokens += new
            request.seconds += [now] * len(new)
            left -= bool(result.is_finished())
    finally:
        manager.stop(block=True)
    return figures_of(answered, start)


if __name__ == "__main__":
    main()
