"""A small Llama that answers: time to the first token and tokens per second, with nothing compiled where it runs.

    python examples/first_token.py               # Transformers, liger-aot and, where it is installed, Liger
    python examples/first_token.py --provider liger-aot

Liger compiles with Triton. Needs torch, transformers and liger-aot. Ours attends with liger-aot too, the others as
Transformers does, which is by torch's scaled_dot_product_attention. Weights are random, from a config; each provider
runs in a process of its own, so that its first token pays for all that it has to load or compile.
``examples/fresh_environment.py`` makes an environment without Triton; with PATH empty of compilers and a HOME that
can't be written, ours runs as anywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

PROVIDERS = {
    "transformers": "transformers",
    "liger-aot": "liger_aot",
    "liger": "liger_kernel",
}  # what each needs


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a small Llama's answers.")
    parser.add_argument(
        "--provider", choices=PROVIDERS, help="one alone, in this process: its figures as JSON"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--tokens", type=int, default=64, help="to generate")
    options = parser.parse_args()
    if options.provider:
        print(json.dumps(serve(options)))
        return
    home = Path.home()
    print(f"Triton:     {'installed' if find_spec('triton') else 'not installed'}")
    print(f"C compiler: {which('cc') or which('gcc') or 'none on PATH'}")
    print(f"HOME:       {home} ({'can' if os.access(home, os.W_OK) else 'can not'} be written)\n")
    print(f"{'':14}{'first token':>14}{'then':>16}{'in a CUDA graph':>20}")
    for provider, package in PROVIDERS.items():
        if find_spec(package) is None:
            print(f"{provider:14}{package} is not installed")
            continue
        done = subprocess.run(
            [sys.executable, __file__, "--provider", provider, *sys.argv[1:]], capture_output=True, text=True
        )
        if done.returncode:
            print(f"{provider:14}{done.stderr.strip().splitlines()[-1]}")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        graph = f"{found['graph']:.0f} tokens/s" if found["graph"] else "no GPU"
        print(f"{provider:14}{found['first']:>12.2f} s{found['eager']:>8.0f} tokens/s{graph:>20}")
    print(
        "\nfirst token: from before the imports, but torch's, to the first token; the model is made in between"
    )


def serve(options: argparse.Namespace) -> dict[str, float | None]:
    """Seconds to the first token; tokens per second, and in a CUDA graph."""
    import torch

    start = time.perf_counter()
    model = make(options.provider, options.layers, options.hidden)
    device = next(model.parameters()).device
    prompt = torch.arange(3, 3 + options.prompt, device=device).unsqueeze(0)
    with torch.inference_mode():
        answer = Answer(model, options.prompt + options.tokens + 1)  # one step more before the capture
        token = answer.begin(prompt)
        int(token)  # on a GPU: wait for it
        first = time.perf_counter() - start
        eager, tokens = rate(answer.step, options.tokens - 1)
        graph = None
        if device.type == "cuda":
            step = answer.captured()
            answer.begin(prompt)
            graph, same = rate(step, options.tokens - 1)
            if tokens != same:
                raise SystemExit("error: the graph gives other tokens")
    return {"first": first, "eager": eager, "graph": graph}


def make(provider: str, layers: int, hidden: int) -> Any:
    """A Llama with random weights, bf16 on a GPU, float32 on the CPU."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if provider == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    gpu = torch.cuda.is_available()
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(hidden // 256, 1),
        vocab_size=32000,
        dtype=torch.bfloat16 if gpu else torch.float32,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if gpu else "cpu"):
        model = LlamaForCausalLM._from_config(config).eval()
    if provider == "liger-aot":
        import liger_aot

        liger_aot.apply(model, attention=True)
        if gpu:
            for op in ("rmsnorm", "rope", "swiglu", "flash_attention", "flash_decoding"):
                liger_aot.load(op).preload()  # before a graph is captured
    return model


class Answer:
    """Greedy decoding with a cache of fixed size."""

    def __init__(self, model: Any, length: int) -> None:
        import torch
        from transformers import StaticCache

        self.model = model
        self.cache = StaticCache(config=model.config, max_cache_len=length)
        device = next(model.parameters()).device
        self.token = torch.zeros((1, 1), dtype=torch.int64, device=device)
        self.position = torch.zeros((1, 1), dtype=torch.int64, device=device)

    def begin(self, prompt: Any) -> Any:
        """Read the prompt; the first token."""
        self.cache.reset()
        logits = self.model(prompt, past_key_values=self.cache, logits_to_keep=1).logits
        self.position.fill_(prompt.shape[1])
        return self.token.copy_(logits[:, -1].argmax(-1, keepdim=True))

    def step(self) -> Any:
        """The next token, where the last one was."""
        logits = self.model(self.token, past_key_values=self.cache, position_ids=self.position).logits
        self.position.add_(1)
        return self.token.copy_(logits[:, -1].argmax(-1, keepdim=True))

    def captured(self) -> Callable[[], Any]:
        """``step`` as a CUDA graph. What it did to the cache is undone by ``begin``."""
        import torch

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()

        def replay() -> Any:
            graph.replay()
            return self.token

        return replay


def rate(step: Callable[[], Any], times: int) -> tuple[float, list[int]]:
    """Tokens per second, and the tokens."""
    start = time.perf_counter()
    made = [step().clone() for _ in range(times)]
    tokens = [int(t) for t in made]  # waits for the GPU
    return times / (time.perf_counter() - start), tokens


if __name__ == "__main__":
    main()
