"""A paged, continuously batching decoder for Llama and Qwen3, made of liger-aot's ops and matrix products.

Requests of any length share the keys' and values' cache by pages. A step reads new requests' prompts, in chunks, and
advances the sequences that already answer, all in one batch of packed tokens; a step in which nothing but answers
grow is a CUDA graph, one for each batch size. Tokens are chosen on the GPU; the host looks at a step's tokens while
the next one runs. ``examples/serve.py`` runs it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import liger_aot

PAGE = 64  # tokens a page
PADDING = -1  # the slot of a token that is none: a graph's batch is larger than what is left to do


@dataclass(eq=False)
class Request:
    """A prompt and how its answer is chosen; ``tokens`` grows as it is answered."""

    prompt: Sequence[int]
    most: int  # tokens to answer with
    temperature: float = 0.0  # 0: the most likely token
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    seed: int = 0
    stop: int | None = None  # the token that ends the answer
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # when each token was there, by the engine's clock
    read: int = 0  # tokens of the prompt that are in the cache, or on their way
    pages: list[int] = field(default_factory=list)
    row: int = -1  # its row of the tables on the GPU
    sent: int = 0  # tokens whose steps were launched

    @property
    def done(self) -> bool:
        return len(self.tokens) >= self.most or (self.stop is not None and self.stop in self.tokens[-1:])


class Linear:
    """x @ weight^T. In fp8 by ``torch._scaled_mm``: a scale for each token and for each output."""

    def __init__(self, weight: Tensor, bias: Tensor | None, fp8: bool) -> None:
        self.bias, self.fp8 = bias, fp8
        if fp8:
            self.weight, scales = liger_aot.load("quantize")(weight)
            self.scales = scales.reshape(1, -1)
        else:
            self.weight = weight

    def __call__(self, x: Any) -> Tensor:
        """Of a tensor or, in fp8, of codes and scales."""
        if not self.fp8:
            return torch.nn.functional.linear(x, self.weight, self.bias)
        codes, scales = x
        y: Tensor = torch._scaled_mm(
            codes, self.weight.t(), scales, self.scales, bias=self.bias, out_dtype=torch.bfloat16
        )
        return y


@dataclass
class Layer:
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    before_attention: Tensor  # the norms' weights
    before_mlp: Tensor
    q_norm: Tensor | None  # Qwen3's norms of each head
    k_norm: Tensor | None


class Decoder:
    """The model: weights of a Transformers ``LlamaForCausalLM`` or ``Qwen3ForCausalLM``, packed."""

    def __init__(self, model: Any, fp8: bool = False) -> None:
        config = model.config
        if config.model_type not in ("llama", "qwen3"):
            raise ValueError(f"model is {config.model_type!r}: only llama and qwen3 are known here")
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.eps, self.fp8 = config.rms_norm_eps, fp8
        base = model.model
        self.embedding, self.norm = base.embed_tokens.weight.detach(), base.norm.weight.detach()
        self.head = Linear(model.lm_head.weight.detach(), None, False)  # fp8 would cost the logits' digits
        self.layers = [self._layer(layer) for layer in base.layers]
        positions = torch.arange(config.max_position_embeddings, device=self.embedding.device)
        cos, sin = base.rotary_emb(self.embedding[:1, None], positions[None])
        half = self.dim // 2
        self.cos_sin = torch.cat((cos[0, :, :half], sin[0, :, :half]), -1).contiguous()
        self.ops = {
            name: liger_aot.load(name)
            for name in (
                "rmsnorm", "fused_add_rmsnorm", "swiglu", "qk_norm_rope", "flash_attention_paged", "flash_decoding",
                "sample",
                *(("rmsnorm_quantize", "fused_add_rmsnorm_quantize", "swiglu_quantize", "quantize") if fp8 else ()),
            )
        }  # fmt: skip

    def _layer(self, layer: Any) -> Layer:
        def linear(*parts: Any) -> Linear:
            weight = torch.cat([p.weight.detach() for p in parts])
            bias = torch.cat([p.bias.detach() for p in parts]) if parts[0].bias is not None else None
            return Linear(weight, bias, self.fp8)

        attention, mlp = layer.self_attn, layer.mlp
        return Layer(
            linear(attention.q_proj, attention.k_proj, attention.v_proj),
            linear(attention.o_proj),
            linear(mlp.gate_proj, mlp.up_proj),
            linear(mlp.down_proj),
            layer.input_layernorm.weight.detach(),
            layer.post_attention_layernorm.weight.detach(),
            attention.q_norm.weight.detach() if hasattr(attention, "q_norm") else None,
            attention.k_norm.weight.detach() if hasattr(attention, "k_norm") else None,
        )

    def new_cache(self, pages: int) -> Tensor:
        """Keys and values of all layers: (layers, 2, pages, PAGE, kv_heads, dim)."""
        shape = (len(self.layers), 2, pages, PAGE, self.kv_heads, self.dim)
        return torch.zeros(shape, dtype=self.embedding.dtype, device=self.embedding.device)

    def __call__(self, batch: Batch, cache: Tensor) -> Tensor:
        """The logits of each sequence's last token, (sequences, vocabulary); keys and values go into the cache."""
        ops, eps = self.ops, self.eps
        residual = self.embedding[batch.tokens]
        x: Any = self._norm(residual, self.layers[0].before_attention)
        following = [layer.before_attention for layer in self.layers[1:]] + [None]
        for layer, (keys, values), next_norm in zip(self.layers, cache, following, strict=True):
            q = self._rotated(layer, layer.qkv(x), keys, values, batch)
            if batch.starts is None:
                attended = ops["flash_decoding"](
                    q[:, None], keys, values, cache_seqlens=batch.lengths, block_table=batch.pages
                )[:, 0]
            else:
                attended = ops["flash_attention_paged"](
                    q, keys, values, batch.starts, batch.lengths, batch.pages, batch.longest
                )
            x = layer.out(self._codes(attended.flatten(-2)))
            x, residual = self._add_norm(x, residual, layer.before_mlp)
            x = layer.down(ops["swiglu_quantize" if self.fp8 else "swiglu"](layer.gate_up(x)))
            if next_norm is not None:
                x, residual = self._add_norm(x, residual, next_norm)
        if batch.last is not None:
            x, residual = x.index_select(0, batch.last), residual.index_select(0, batch.last)
        x, _ = ops["fused_add_rmsnorm"](x, residual, self.norm, eps=eps, inplace=True)
        return self.head(x)

    def _rotated(self, layer: Layer, qkv: Tensor, keys: Tensor, values: Tensor, batch: Batch) -> Tensor:
        """The queries, (tokens, heads, dim); the new keys and values are in the cache."""
        counts = self.heads, self.kv_heads, self.kv_heads
        self.ops["qk_norm_rope"](
            qkv, layer.q_norm, layer.k_norm, self.cos_sin, batch.positions, eps=self.eps,
            num_heads_q=self.heads, num_heads_k=self.kv_heads, num_heads_v=self.kv_heads, key_cache=keys,
            value_cache=values, slot_mapping=batch.slots,
        )  # fmt: skip
        q: Tensor = qkv.unflatten(-1, (-1, self.dim)).split(counts, 1)[0]
        return q

    def _codes(self, x: Tensor) -> Any:
        return self.ops["quantize"](x) if self.fp8 else x

    def _norm(self, x: Tensor, weight: Tensor) -> Any:
        return self.ops["rmsnorm_quantize" if self.fp8 else "rmsnorm"](x, weight, eps=self.eps)

    def _add_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Any, Tensor]:
        name = "fused_add_rmsnorm_quantize" if self.fp8 else "fused_add_rmsnorm"
        *y, residual = self.ops[name](x, residual, weight, eps=self.eps, inplace=True)
        return (tuple(y) if self.fp8 else y[0]), residual


@dataclass
class Batch:
    """What a step reads, on the GPU: packed tokens of some sequences."""

    tokens: Tensor  # (tokens,) int64
    positions: Tensor  # (tokens,) int64, in their sequences
    slots: Tensor  # (tokens,) int64, where keys and values go: page * PAGE + place; PADDING: nowhere
    lengths: Tensor  # (sequences,) int32, with this step's tokens
    pages: Tensor  # (sequences, most pages) int32
    # Where sequences may have more tokens than one:
    starts: Tensor | None = None  # (sequences + 1,) int32, where each one's tokens begin
    last: Tensor | None = None  # (sequences,) int64, each one's last token in ``tokens``
    longest: int = 1  # a bound on the tokens of one sequence


@dataclass
class Chosen:
    """How a step chooses a token for each sequence, on the GPU. What a seed gives depends on the place in its own
    sequence alone."""

    seeds: Tensor  # (sequences,) int64
    places: Tensor  # (sequences,) int64
    temperature: Tensor  # (sequences,) float32
    top_k: Tensor | None = None  # (sequences,) int64; None where all are greedy
    top_p: Tensor | None = None  # (sequences,) float32


@dataclass
class Step:
    """A decoding step as a graph: what it reads, which is written before each replay, and what it leaves."""

    graph: Any
    integers: Tensor
    floats: Tensor
    chosen: Tensor


class Engine:
    """Takes requests at any time and answers them all.

    ``pages`` pages of PAGE tokens; at most ``rows`` sequences at once, of at most ``most`` tokens; ``chunk`` prompt
    tokens a step. A request's pages are set aside when it starts, so that none has to wait half-way.
    """

    def __init__(
        self, decoder: Decoder, *, pages: int, rows: int, most: int, chunk: int, clock: Callable[[], float]
    ) -> None:
        self.decoder, self.chunk, self.clock = decoder, chunk, clock
        self.cache = decoder.new_cache(pages)
        self.device = device = self.cache.device
        self.free, self.rows = list(range(pages)), list(range(rows))[::-1]
        self.most, self.waiting = most, deque[Request]()
        self.prefilling, self.decoding = list[Request](), list[Request]()
        self.flight: tuple[Any, Tensor, list[Request | None]] | None = None
        # By row: its pages, and the token that its next step reads. A last row takes what padding writes.
        self.table = torch.zeros((rows + 1, -(-most // PAGE)), dtype=torch.int32, device=device)
        self.next_token = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.greedy = torch.zeros(rows, dtype=torch.float32, device=device)  # temperatures
        self.sizes = [2**i for i in range(rows.bit_length()) if 2**i < rows] + [rows]
        self.graphs: dict[tuple[int, bool], Step] = {}
        self.padding, self.pool = rows, None

    def add(self, request: Request) -> None:
        """Queue a request."""
        most = len(request.prompt) + request.most
        if not request.prompt or request.most < 1 or most > self.most or -(-most // PAGE) > self._pages():
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens and an answer of {request.most}: each must have one, and "
                f"both together at most {min(self.most, self._pages() * PAGE)}"
            )
        self.waiting.append(request)

    def _pages(self) -> int:
        return int(self.cache.shape[2])

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.prefilling or self.decoding or self.flight)

    def step(self) -> None:
        """Launch a step, if there is one to do, and take in the tokens of the step before."""
        self._admit()
        launched = None
        if self.prefilling:
            launched = self._mixed_step()
        elif self.decoding:
            launched = self._decode_step()
        before, self.flight = self.flight, launched
        if before is not None:
            self._take_in(before)

    def run(self) -> None:
        """Until nothing is left to do."""
        while self.busy:
            self.step()

    def _admit(self) -> None:
        while self.waiting and self.rows:
            request = self.waiting[0]
            need = -(-(len(request.prompt) + request.most) // PAGE)
            if need > len(self.free):
                return
            self.waiting.popleft()
            request.pages = [self.free.pop() for _ in range(need)]
            request.row = row = self.rows.pop()
            self.table[row, :need] = torch.tensor(request.pages, dtype=torch.int32).to(
                self.device, non_blocking=True
            )
            self.prefilling.append(request)

    def _mixed_step(self) -> Any:
        """The next chunk of prompts, and one token more of each answer."""
        left, parts = self.chunk, list[tuple[Request, int]]()
        for request in self.prefilling:
            if left == 0:
                break
            count = min(left, len(request.prompt) - request.read)
            parts.append((request, count))
            left -= count
        grown = list(self.decoding)
        steps = [(r, _length(r), 1) for r in grown] + [(r, r.read + count, count) for r, count in parts]
        integers, floats = (t.to(self.device, non_blocking=True) for t in _numbers(steps))
        counts = [count for *_, count in steps]
        packed = [
            [t for r, count in parts for t in r.prompt[r.read : r.read + count]],
            [slot for r, n, count in steps for slot in _slots(r, n - count, n)],
            [position for _, n, count in steps for position in range(n - count, n)],
            list(itertools.accumulate(counts, initial=0)),
        ]
        flat = torch.tensor([n for part in packed for n in part]).to(self.device, non_blocking=True)
        read, slots, positions, starts = flat.split([len(part) for part in packed])
        at = integers[0]
        batch = Batch(
            torch.cat((self.next_token[at[: len(grown)]], read)), positions, slots, integers[3].int(),
            self.table[at], starts.int(), starts[1:] - 1, max(counts),
        )  # fmt: skip
        how = self._how(integers, floats, any(r.temperature for r, *_ in steps))
        chosen = self._choose(batch, how)
        self.next_token[at] = chosen
        whole = []
        for request, count in parts:
            request.read += count
            whole.append(request if request.read == len(request.prompt) else None)
        for ready in whole:
            if ready is not None:
                self.prefilling.remove(ready)
                self.decoding.append(ready)
        return self._launched(chosen, [*grown, *whole])

    def _decode_step(self) -> Any:
        """One token more of each answer."""
        requests: list[Request | None] = list(self.decoding)
        size = next(s for s in self.sizes if s >= len(requests))
        sampled = any(r.temperature for r in self.decoding)
        numbers = _numbers([(r, _length(r), 1) for r in self.decoding], size, self.padding)
        if self.device.type != "cuda":
            return self._launched(self._decode(*numbers, sampled), requests)
        if (size, sampled) not in self.graphs:
            self.capture(size, sampled)
        step = self.graphs[size, sampled]
        step.integers.copy_(numbers[0], non_blocking=True)
        if sampled:
            step.floats.copy_(numbers[1], non_blocking=True)
        step.graph.replay()
        return self._launched(step.chosen, requests)

    def _decode(self, integers: Tensor, floats: Tensor, sampled: bool) -> Tensor:
        """All of a decoding step that the GPU does: no host number is in it but the batch's size."""
        at, slots, positions, lengths = integers[:4]
        batch = Batch(
            self.next_token.index_select(0, at),
            positions,
            slots,
            lengths.int(),
            self.table.index_select(0, at),
        )
        chosen = self._choose(batch, self._how(integers, floats, sampled))
        self.next_token.index_copy_(0, at, chosen)
        return chosen

    def _how(self, integers: Tensor, floats: Tensor, sampled: bool) -> Chosen:
        lengths, seeds, top_k = integers[3:]
        if sampled:
            return Chosen(seeds, lengths, floats[0], top_k, floats[1])
        return Chosen(seeds, lengths, self.greedy[: seeds.shape[0]])

    def _choose(self, batch: Batch, how: Chosen) -> Tensor:
        """A token for each sequence."""
        chosen: Tensor = self.decoder.ops["sample"](
            self.decoder(batch, self.cache), how.seeds, how.places, temperature=how.temperature, top_k=how.top_k,
            top_p=how.top_p,
        )  # fmt: skip
        return chosen

    def capture_all(self, sampled: bool) -> None:
        """The graphs of all batch sizes in which some sequence is sampled, or none, before the first request."""
        for size in reversed(self.sizes):  # the largest one's memory is then there for the others
            self.capture(size, sampled)

    def capture(self, size: int, sampled: bool) -> None:
        """The graph of a decoding step of so many sequences."""
        integers, floats = (t.to(self.device) for t in _numbers([], size, self.padding))
        self.decoder.ops["flash_decoding"].preload(self.device)  # its counters, else made anew in each replay
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._decode(integers, floats, sampled)  # loads what it launches; padding alone changes nothing
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            chosen = self._decode(integers, floats, sampled)
        self.pool = self.pool or graph.pool()  # one after the other they need no memory of their own
        self.graphs[size, sampled] = Step(graph, integers, floats, chosen)

    def _launched(
        self, chosen: Tensor, requests: list[Request | None]
    ) -> tuple[Any, Tensor, list[Request | None]]:
        """The step's tokens on their way to the host; answers that are as long as they may be are not grown again."""
        for request in requests:
            if request is not None:
                request.sent += 1
        self.decoding = [r for r in self.decoding if r.sent < r.most]
        if self.device.type != "cuda":
            return None, chosen.clone(), requests
        host = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=True)
        host.copy_(chosen, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return event, host, requests

    def _take_in(self, flight: tuple[Any, Tensor, list[Request | None]]) -> None:
        event, host, requests = flight
        if event is not None:
            event.synchronize()
        now = self.clock()
        for token, request in zip(host.tolist(), requests, strict=False):
            if request is None or request.done:
                continue  # a prompt's earlier chunk; the step that was under way when the answer stopped
            request.tokens.append(token)
            request.seconds.append(now)
            if request.done:
                self._release(request)

    def _release(self, request: Request) -> None:
        """Its pages and row are free: a step under way still writes to them, but none reads them before they are
        written again."""
        if request in self.decoding:
            self.decoding.remove(request)
        self.free += request.pages
        self.rows.append(request.row)
        request.pages = []


def _length(request: Request) -> int:
    """Of an answering sequence, in the cache after its next step."""
    return len(request.prompt) + request.sent


def _slots(request: Request, first: int, end: int) -> Iterator[int]:
    """Where keys and values of these positions go."""
    return (request.pages[p // PAGE] * PAGE + p % PAGE for p in range(first, end))


def _numbers(
    steps: Sequence[tuple[Request, int, int]], size: int = 0, padding: int = 0
) -> tuple[Tensor, Tensor]:
    """What a step reads of each sequence, on the host: its row, its last token's slot and position, its length, seed
    and top-k, (6, sequences) int64; temperature and top-p, (2, sequences) float32."""
    missing = max(size - len(steps), 0)
    columns = [(r.row, *_slots(r, n - 1, n), n - 1, n, r.seed, r.top_k) for r, n, _ in steps] + [
        (padding, PADDING, 0, 0, 0, 0)
    ] * missing
    floats = [(r.temperature, r.top_p) for r, *_ in steps] + [(0.0, 1.0)] * missing
    return torch.tensor(columns).t().contiguous(), torch.tensor(floats).t().contiguous()
