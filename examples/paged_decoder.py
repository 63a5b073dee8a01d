"""A paged, continuously batching decoder for Llama and Qwen3, made of liger-aot's ops and matrix products.

Requests of any length share the keys' and values' cache by pages. A step reads new requests' prompts, in chunks, and
advances the sequences that already answer, all in one batch of packed tokens; a step in which nothing but answers
grow is a CUDA graph, one for each batch size. Tokens are chosen on the GPU; the host looks at a step's tokens while
the next one runs. ``examples/serve.py`` runs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
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
            if batch.longest == 1:
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
    starts: Tensor  # (sequences + 1,) int32, where each one's tokens begin
    lengths: Tensor  # (sequences,) int32, with this step's tokens
    pages: Tensor  # (sequences, most pages) int32
    last: Tensor  # (sequences,) int64, each one's last token in ``tokens``
    longest: int  # a bound on the tokens of one sequence


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
        # By row: tables, and what the next step starts from. A last row takes what padding writes.
        self.table = torch.zeros((rows + 1, -(-most // PAGE)), dtype=torch.int32, device=device)
        self.next_token = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.length = torch.zeros(rows + 1, dtype=torch.int32, device=device)  # tokens in the cache
        self.temperature = torch.zeros(rows + 1, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self.top_p = torch.ones(rows + 1, dtype=torch.float32, device=device)
        self.seed = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.sizes = [2**i for i in range(rows.bit_length()) if 2**i < rows] + [rows]
        self.graphs: dict[int, tuple[Any, Tensor, Tensor]] = {}
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
            self.length[row], self.seed[row] = 0, request.seed
            self.temperature[row], self.top_k[row], self.top_p[row] = (
                request.temperature, request.top_k, request.top_p
            )  # fmt: skip
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
        rows = [r.row for r in grown] + [r.row for r, _ in parts]
        counts = [1] * len(grown) + [count for _, count in parts]
        lengths = [len(r.prompt) + r.sent for r in grown] + [r.read + count for r, count in parts]
        tokens = [t for r, count in parts for t in r.prompt[r.read : r.read + count]]
        at = torch.tensor(rows).to(self.device, non_blocking=True)
        of = torch.tensor(rows).repeat_interleave(torch.tensor(counts))
        positions = torch.cat([torch.arange(n - c, n) for n, c in zip(lengths, counts, strict=True)])
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        of, positions, starts = (x.to(self.device, non_blocking=True) for x in (of, positions, starts))
        read = torch.tensor(tokens, dtype=torch.int64).to(self.device, non_blocking=True)
        ends = torch.tensor(lengths, dtype=torch.int32).to(self.device, non_blocking=True)
        batch = Batch(
            tokens=torch.cat((self.next_token[at[: len(grown)]], read)), positions=positions,
            slots=self.table[of, positions // PAGE].long() * PAGE + positions % PAGE, starts=starts, lengths=ends,
            pages=self.table[at], last=(starts[1:] - 1).long(), longest=max(counts),
        )  # fmt: skip
        chosen = self._choose(self.decoder(batch, self.cache), at, ends)
        self.length[at] = ends
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
        size = next(s for s in self.sizes if s >= len(self.decoding))
        rows = torch.tensor([r.row for r in self.decoding] + [self.padding] * (size - len(self.decoding)))
        requests: list[Request | None] = list(self.decoding)
        if self.device.type != "cuda":
            return self._launched(self._decode(rows), requests)
        if size not in self.graphs:
            self._capture(size)
        graph, at, chosen = self.graphs[size]
        at.copy_(rows, non_blocking=True)
        graph.replay()
        return self._launched(chosen, requests)

    def _decode(self, at: Tensor) -> Tensor:
        """All of a decoding step that the GPU does: no host number is in it but the batch's size."""
        size, real = at.shape[0], at != self.padding
        positions = self.length[at].long()
        pages = self.table[at]
        page = pages.gather(1, (positions // PAGE)[:, None])[:, 0].long()
        slots = torch.where(real, page * PAGE + positions % PAGE, PADDING)
        lengths = torch.where(real, positions + 1, 0).int()
        starts = torch.arange(size + 1, dtype=torch.int32, device=self.device)
        last = torch.arange(size, device=self.device)
        batch = Batch(self.next_token[at], positions, slots, starts, lengths, pages, last, 1)
        chosen = self._choose(self.decoder(batch, self.cache), at, lengths)
        self.length.index_copy_(0, at, lengths)
        self.next_token.index_copy_(0, at, chosen)
        return chosen

    def _choose(self, logits: Tensor, at: Tensor, lengths: Tensor) -> Tensor:
        """A token for each sequence. What a seed gives depends on the place in its own sequence alone."""
        chosen: Tensor = self.decoder.ops["sample"](
            logits, self.seed[at], lengths, temperature=self.temperature[at], top_k=self.top_k[at],
            top_p=self.top_p[at],
        )  # fmt: skip
        return chosen

    def capture(self) -> None:
        """The graphs of all batch sizes, before the first request."""
        for size in self.sizes:
            self._capture(size)

    def _capture(self, size: int) -> None:
        at = torch.full((size,), self.padding, dtype=torch.int64, device=self.device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._decode(at)  # loads what it launches; padding alone changes nothing
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            chosen = self._decode(at)
        self.pool = self.pool or graph.pool()  # one after the other they need no memory of their own
        self.graphs[size] = graph, at, chosen

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
