"""Losses of 200 training steps, liger-aot against Transformers: `python -m benchmarks.models.loss_curves`.

A small Llama learns a corpus with a structure: each token is followed by one of four, by odds that depend on it. A seed
draws the weights and the order of the corpus. What two seeds differ by with Transformers alone is the noise that the
difference of liger-aot to Transformers, at one seed, has to lie within.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.models.models import Shape, adopted, config_of, made
from benchmarks.providers import MODEL_LABELS, OURS
from benchmarks.steps import Command

PROVIDERS = ("transformers", OURS)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LAST = 20  # steps whose mean is the final loss
SUCCESSORS = 4
ODDS = (0.6, 0.25, 0.1, 0.05)
SMALL = Shape(
    "llama",
    "of this benchmark",
    {
        "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
)  # fmt: skip


@dataclass(frozen=True)
class Curve:
    provider: str
    dtype: str
    seed: int
    losses: list[float]

    @property
    def final(self) -> float:
        return statistics.fmean(self.losses[-LAST:])


@dataclass(frozen=True)
class Verdict:
    """Final losses of one dtype.

    Attributes:
        differences: ours less Transformers', a seed each.
        noise: the sample standard deviation of Transformers' over the seeds.
        within: whether the largest difference is no more than that.
    """

    dtype: str
    differences: list[float]
    noise: float
    within: bool


def corpus(vocabulary: int, sequences: int, tokens: int) -> Tensor:
    """(sequences, tokens) int64, the same every time, whatever the seeds."""
    random = torch.Generator().manual_seed(1)
    followers = torch.randint(vocabulary, (vocabulary, SUCCESSORS), generator=random)
    choices = torch.multinomial(torch.tensor(ODDS), sequences * tokens, True, generator=random)
    text = torch.empty(sequences, tokens, dtype=torch.int64)
    now = torch.randint(vocabulary, (sequences,), generator=random)
    for i, choice in enumerate(choices.view(tokens, sequences)):
        text[:, i] = now
        now = followers[now, choice]
    return text


def trained(
    provider: str,
    dtype: str,
    seed: int,
    shape: Shape,
    text: Tensor,
    steps: int,
    batch: int,
    device: torch.device,
) -> Curve:
    """AdamW, so many steps."""
    model = adopted(provider, shape.family, made(config_of(shape), device, DTYPES[dtype], seed)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    order = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        ids = text[torch.randint(len(text), (batch,), generator=order)].to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return Curve(provider, dtype, seed, [float(loss) for loss in losses])


def verdict(dtype: str, curves: Sequence[Curve]) -> Verdict:
    """Of at least two seeds with each provider."""
    final = {(c.provider, c.seed): c.final for c in curves if c.dtype == dtype}
    seeds = sorted({seed for _, seed in final})
    plain = [final["transformers", seed] for seed in seeds]
    differences = [final[OURS, seed] - before for seed, before in zip(seeds, plain, strict=True)]
    noise = statistics.stdev(plain)
    return Verdict(dtype, differences, noise, max(map(abs, differences)) <= noise)


def line(v: Verdict) -> str:
    largest = max(map(abs, v.differences))
    said = "within" if v.within else "NOT WITHIN"
    return f"{v.dtype:9s} largest difference of final losses {largest:.2e}, noise of seeds {v.noise:.2e}: {said} it"


def main(arguments: Sequence[str]) -> int:
    command = Command("benchmarks.models.loss_curves", __doc__, on_cpu=True)
    add = command.parser.add_argument
    add("--steps", type=int, default=200, help="(default: %(default)s)")
    add("--seeds", type=int, default=4, help="(default: %(default)s)")
    add("--batch", type=int, default=16, help="sequences (default: %(default)s)")
    add("--tokens", type=int, default=256, help="of a sequence (default: %(default)s)")
    add("--layers", type=int, default=4, help="(default: %(default)s)")
    options = command.read(arguments)
    if options.seeds < 2 or options.steps < LAST:
        command.parser.error(
            f"seeds must be 2 or more and steps {LAST} or more, got {options.seeds} and {options.steps}"
        )
    file, device = command.file("loss_curves"), command.device
    shape = dataclasses.replace(SMALL, config={**SMALL.config, "num_hidden_layers": options.layers})
    text = corpus(SMALL.config["vocab_size"], 64 * options.batch, options.tokens)
    curves: list[Curve] = []
    verdicts: list[Verdict] = []
    for dtype in DTYPES:
        for seed in range(options.seeds):
            for provider in PROVIDERS:
                curve = trained(provider, dtype, seed, shape, text, options.steps, options.batch, device)
                print(
                    f"{dtype} seed {seed} {MODEL_LABELS[provider]}: {curve.losses[0]:.4f} to {curve.final:.4f}",
                    flush=True,
                )
                curves.append(curve)
        verdicts.append(verdict(dtype, curves))
        file.keep(benchmark="loss_curves", curves=curves, verdicts=verdicts)
    file.finish("\n".join(map(line, verdicts)))
    return int(not all(v.within for v in verdicts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
