"""Decoding on this machine's GPU: `python -m benchmarks.decoding.decoding`.

What bounds it is reading the keys and values once, so figures are their bytes a second, beside a copy's (bytes read and
written) in the same rounds. Caches are full, or of mixed lengths; each call reads another set of them where the L2
cache could hold one. The peers are torch's scaled_dot_product_attention over the same contiguous cache, where it is
full. Before it is timed, a provider's result is compared with fp64, for some sequences and heads.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import measure
from benchmarks.measure import copy_calls
from benchmarks.providers import COPY, first_line
from benchmarks.steps import Command
from benchmarks.workload import TOLERANCE, relative_error, rotated_sets

LARGEST_COPY = 4 << 30  # bytes: the bandwidth of a copy does not change any more
OTHER_MEMORY = 2 << 30  # bytes: the driver's, and results
CHECKED = ((0, 0), (-1, -1))  # sequences and heads of keys


@dataclass(frozen=True)
class Point:
    """``cached`` keys in each of ``batch`` sequences, bf16; ``page`` 0 is a contiguous cache. With ``shortest`` lengths
    are from there to ``cached``, in steps of one size and no order."""

    batch: int
    cached: int
    page: int = 0
    dim: int = 128
    heads: int = 64
    kv_heads: int = 8
    tokens: int = 1
    shortest: int = 0

    @property
    def lengths(self) -> list[int]:
        if not self.shortest:
            return [self.cached] * self.batch
        step = (self.cached - self.shortest) / (self.batch - 1)
        found = [round(self.shortest + i * step) for i in range(self.batch)]
        return random.Random(0).sample(found, self.batch)

    @property
    def bytes(self) -> int:
        return 2 * 2 * sum(self.lengths) * self.kv_heads * self.dim


POINTS = (
    *(Point(batch, cached) for batch in (1, 8, 32, 128) for cached in (8192, 32768, 131072)),
    *(Point(*size, page) for size in ((1, 131072), (32, 32768), (128, 8192)) for page in (16, 64, 256)),
    *(Point(*size, tokens=4) for size in ((1, 131072), (32, 32768))),
    *(Point(*size, page=64, tokens=4) for size in ((1, 131072), (32, 32768))),
    *(Point(32, 32768, dim=dim) for dim in (64, 96, 192, 256)),
    Point(32, 32768, kv_heads=64),  # no head of keys is shared
    *(Point(batch, 8192, page, heads=32, shortest=128) for batch in (32, 64) for page in (0, 16, 64)),
)  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor | None  # None: a contiguous cache is full
    table: Tensor | None


@dataclass(frozen=True)
class Result:
    point: Point
    provider: str
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    gigabytes_per_second: float | None = None
    of_copy: float | None = None
    error: float | None = None
    failed: str | None = None


Run = Callable[[Inputs], Tensor]


def drawn(point: Point, device: torch.device, seed: int, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Random tensors; the pages of a sequence lie in random places."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype).normal_(generator=generator)

    pages = point.batch * point.cached // point.page if point.page else point.batch
    shape = (pages, point.page or point.cached, point.kv_heads, point.dim)
    table = None
    if point.page:
        order = torch.randperm(pages, device=device, generator=generator)
        table = order.to(torch.int32).view(point.batch, -1)
    lengths = None
    if point.page or point.shortest:
        lengths = torch.tensor(point.lengths, dtype=torch.int32, device=device)
    q = normal(point.batch, point.tokens, point.heads, point.dim)
    return Inputs(q, normal(*shape), normal(*shape), lengths, table)


def ours() -> Run:
    import liger_aot

    op = liger_aot.load("flash_decoding")
    run: Run = lambda i: op(i.q, i.k, i.v, cache_seqlens=i.lengths, block_table=i.table)  # noqa: E731
    return run


def sdpa(backend: SDPBackend | None) -> Run:
    def run(i: Inputs) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (i.q, i.k, i.v))
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

    return run


PROVIDERS: dict[str, Callable[[], Run]] = {
    "liger_aot": ours,
    "torch": lambda: sdpa(None),
    "flash_attention_2": lambda: sdpa(SDPBackend.FLASH_ATTENTION),
    "cudnn": lambda: sdpa(SDPBackend.CUDNN_ATTENTION),
}


def offers(provider: str, point: Point) -> bool:
    """SDPA takes no block table and no lengths, and its causal mask is aligned at the first key."""
    return provider == "liger_aot" or not (point.page or point.tokens > 1 or point.shortest)


def error(point: Point, inputs: Inputs, result: Tensor) -> float:
    """The largest of ‖result - exact‖ / ‖exact‖ in fp64 over what is checked."""
    return max(relative_error(checked(point, result, *at), exact(point, inputs, *at)) for at in CHECKED)


def checked(point: Point, result: Tensor, sequence: int, head: int) -> Tensor:
    """A result's part of one sequence and head of keys."""
    ratio, head = point.heads // point.kv_heads, head % point.kv_heads
    return result[sequence][None, :, head * ratio : (head + 1) * ratio]


def exact(point: Point, inputs: Inputs, sequence: int, head: int) -> Tensor:
    """That part in fp64."""
    from liger_aot.ops.decoding.flash_decoding import FlashDecoding

    length = point.lengths[sequence]
    k, v = (_cache_of(t, sequence, head, inputs.table)[:, :length].double() for t in (inputs.k, inputs.v))
    q = checked(point, inputs.q, sequence, head).double()
    found: Tensor
    found, _ = FlashDecoding.reference(q, k, v, None, None, None, None, None, point.dim**-0.5, -1, 0, 0.0, 0)
    return found


def _cache_of(cache: Tensor, batch: int, head: int, table: Tensor | None) -> Tensor:
    """(1, keys, 1, dim) of one sequence and head."""
    own = cache[batch] if table is None else cache[table[batch].long()].flatten(0, 1)
    return own[None, :, head, None]


def prepared(point: Point, name: str, sets: Sequence[Inputs]) -> tuple[list[measure.Call], float] | str:
    """A provider's calls and its error; or how it failed: a peer that cannot do a point is a result."""
    try:
        run = PROVIDERS[name]()
        found = error(point, sets[0], run(sets[0]))
        if not found < TOLERANCE[torch.bfloat16]:
            raise ArithmeticError(f"error against fp64 {found}")
    except Exception as problem:
        return f"{type(problem).__name__}: {first_line(problem)}"
    return [call_of(run, inputs) for inputs in sets], found


def call_of(run: Run, inputs: Inputs) -> measure.Call:
    return measure.Call(lambda: run(inputs))


def at(point: Point, names: Sequence[str], device: torch.device, rounds: int, min_ms: float) -> list[Result]:
    """All providers in turn, with the copy."""
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    sets = [drawn(point, device, seed) for seed in range(rotated_sets(point.bytes, l2))]
    copied = min(point.bytes, LARGEST_COPY)
    calls = {COPY: copy_calls(copied, device, rotated_sets(copied, l2), 0)}
    made, errors = [], {}
    for name in (name for name in names if offers(name, point)):
        ready = prepared(point, name, sets)
        if isinstance(ready, str):
            made.append(Result(point, name, failed=ready))
        else:
            calls[name], errors[name] = ready
    samples = measure.time_interleaved(calls, rounds=rounds, min_ms=min_ms)
    timings = {name: measure.summarize(times) for name, times in samples.items()}
    copy = measure.gigabytes_per_second(copied, timings[COPY].median_ms)
    for name, timing in timings.items():
        rate = measure.gigabytes_per_second(copied if name == COPY else point.bytes, timing.median_ms)
        times = (timing.median_ms, timing.p20_ms, timing.p80_ms)
        made.append(Result(point, name, *times, rate, rate / copy, errors.get(name)))
    return made


def largest_cache(device: torch.device) -> float:
    """Bytes: there are two caches, two sets of the copy's tensors, and OTHER_MEMORY."""
    return (torch.cuda.get_device_properties(device).total_memory - OTHER_MEMORY) / 2 - LARGEST_COPY


def line(r: Result) -> str:
    if r.failed:
        return f"  {r.provider:18s} failed: {r.failed}"
    off = "" if r.error is None else f"  error {r.error:.1e}"
    rate = f"{r.gigabytes_per_second:6.0f} GB/s  {r.of_copy:5.3f} of the copy"
    return f"  {r.provider:18s} {r.median_ms:9.4f} ms {rate}{off}"


def main(arguments: Sequence[str]) -> int:
    command = Command("benchmarks.decoding.decoding", __doc__, PROVIDERS)
    add = command.parser.add_argument
    add("--rounds", type=int, default=3, help="of all providers in turn")
    add("--min-ms", type=float, default=10.0, help="device time of a provider in a round")
    add(
        "--most-gigabytes",
        type=float,
        help="points of larger caches are left out (default: those that this GPU's memory does not hold twice)",
    )
    options = command.read(arguments)
    most = largest_cache(command.device) if options.most_gigabytes is None else options.most_gigabytes * 1e9
    return command.measure(
        "flash_decoding_points",
        [point for point in POINTS if point.bytes <= most],
        lambda p: at(p, options.providers, command.device, options.rounds, options.min_ms),
        lambda point, found: "\n".join((str(point), *map(line, found))),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
