"""What stands in the place of a model's forwards: each function here takes what it replaces and returns its stand-in.

The stand-ins read the modules' own attributes when they are called: parameters may be moved, cast, sharded or
replaced after a model was patched. A norm whose weight is then no plain tensor runs as it was, unless all ranks have
all of it and rows are sharded (``by_shards``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from liger_aot.models.fitting import fitting
from liger_aot.models.shards import by_shards
from liger_aot.ops.op import PLAIN, PLAIN_OR_NONE, autocast_dtype
from liger_aot.ops.registry import load

Forward = Callable[..., Any]
Make = Callable[[Forward], Forward]

# Names of the attributes that the stand-ins read: ``resolve`` asks for them before anything is changed.
READS: dict[Any, tuple[str, ...]] = {}

# Which activations a stand-in knows, by the attribute that holds the module's own.
ACTIVATIONS: dict[Any, tuple[str, Callable[[], dict[type, Forward]]]] = {}


def rms_norm(*, eps: str, offset: float = 0.0, casting_mode: str = "llama", weight: bool = True) -> Make:
    """Of an RMSNorm whose epsilon is its attribute ``eps``; ``offset`` and ``casting_mode`` are the op's. Without
    ``weight`` its modules have none."""

    def make(plain: Forward) -> Forward:
        op = load("rmsnorm")

        def forward(self: Any, x: Tensor) -> Any:
            weight = getattr(self, "weight", None)  # Gemma 4 has norms of one class with and without

            def normed(x: Tensor, weight: Tensor | None) -> Any:
                return op(
                    x, fitting(weight, x), eps=getattr(self, eps), offset=offset, casting_mode=casting_mode
                )

            if type(weight) in PLAIN_OR_NONE:
                return normed(x, weight)
            y = by_shards(normed, x, weight)
            return plain(self, x) if y is None else y

        return forward

    READS[make] = ("weight", eps) if weight else (eps,)
    return make


def gated_rms_norm(plain: Forward) -> Forward:
    """Of an RMSNorm times silu(gate), with the gate as its second argument. Another activation runs as before."""
    norm, swiglu = load("rmsnorm"), load("swiglu")

    def forward(self: Any, hidden_states: Tensor, gate: Tensor) -> Any:
        if type(self.weight) not in PLAIN or self.activation != "silu":
            return plain(self, hidden_states, gate)
        normed = norm(hidden_states, fitting(self.weight, hidden_states), eps=self.variance_epsilon)
        return swiglu(gate.to(normed.dtype), normed)

    return forward


def layer_norm(plain: Forward) -> Forward:
    """Of torch.nn.LayerNorm, over its last dimension."""
    op = load("layernorm")

    def forward(self: Any, input: Tensor) -> Any:
        if len(self.normalized_shape) != 1:
            return plain(self, input)

        def normed(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Any:
            return op(x, fitting(weight, x), fitting(bias, x), eps=self.eps)

        if type(self.weight) in PLAIN_OR_NONE:
            return normed(input, self.weight, self.bias)
        y = by_shards(normed, input, self.weight, self.bias)
        return plain(self, input) if y is None else y

    return forward


def layer_norm_1p(plain: Forward) -> Forward:
    """Of Nemotron's LayerNorm, whose weight is stored less one. Under autocast its input is cast, as Nemotron does."""
    op = load("layernorm")

    def forward(self: Any, input: Tensor) -> Any:
        if type(self.weight) not in PLAIN:
            return plain(self, input)
        if (dtype := autocast_dtype(input)) is not None:
            input = input.to(dtype)
        return op(input, fitting(self.weight + 1.0, input), fitting(self.bias, input), eps=self.eps)

    return forward


@lru_cache(maxsize=1)
def gates() -> dict[type, Forward]:
    """Activation class -> activation(gate) * up, or of one tensor that holds both."""
    from torch.nn import SiLU
    from transformers import activations

    swiglu, geglu = load("swiglu"), load("geglu")

    def exact_geglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
        y: Tensor = geglu(gate, up, approximate="none")
        return y

    return {
        SiLU: swiglu,
        activations.SiLUActivation: swiglu,
        activations.GELUTanh: geglu,
        activations.NewGELUActivation: geglu,
        activations.GELUActivation: exact_geglu,
    }


@lru_cache(maxsize=1)
def ungated() -> dict[type, Forward]:
    """Activation class -> the op."""
    from transformers import activations

    return {activations.ReLUSquaredActivation: load("relu_squared")}


def gated_mlp(*, activation: str = "act_fn") -> Make:
    """Of an MLP with projections of its own for gate and up. ``activation`` is the attribute that holds it."""

    def make(plain: Forward) -> Forward:
        known = gates()

        def forward(self: Any, x: Tensor) -> Any:
            gated = known.get(type(getattr(self, activation)))
            if gated is None:
                return plain(self, x)
            return self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))

        return forward

    READS[make] = (activation, "gate_proj", "up_proj", "down_proj")
    ACTIVATIONS[make] = activation, gates
    return make


def scaled_mlp(plain: Forward) -> Forward:
    """Of Falcon H1's MLP, whose gate and result are multiplied by numbers."""
    known = gates()

    def forward(self: Any, x: Tensor) -> Any:
        gated = known.get(type(self.act_fn))
        if gated is None:
            return plain(self, x)
        gate = self.gate_proj(x) * self.gate_multiplier
        return self.down_proj(gated(gate, self.up_proj(x))) * self.down_multiplier

    return forward


def limited_mlp(plain: Forward) -> Forward:
    """Of DeepSeek V4's MLP, whose gate and up are clamped."""
    known = gates()

    def forward(self: Any, x: Tensor) -> Any:
        gated = known.get(type(self.act_fn))
        if gated is None:
            return plain(self, x)
        gate = self.gate_proj(x).clamp(max=self.limit)
        return self.down_proj(gated(gate, self.up_proj(x).clamp(min=-self.limit, max=self.limit)))

    return forward


def packed_mlp(
    *, activation: str = "activation_fn", into: str = "gate_up_proj", out_of: str = "down_proj"
) -> Make:
    """Of an MLP whose projection ``into`` gives gate and up in one tensor: it is read in place."""

    def make(plain: Forward) -> Forward:
        known = gates()

        def forward(self: Any, hidden_states: Tensor) -> Any:
            gated = known.get(type(getattr(self, activation)))
            if gated is None:
                return plain(self, hidden_states)
            return getattr(self, out_of)(gated(getattr(self, into)(hidden_states)))

        return forward

    READS[make] = (activation, into, out_of)
    ACTIVATIONS[make] = activation, gates
    return make


def plain_mlp(plain: Forward) -> Forward:
    """Of an MLP without a gate."""
    known = ungated()

    def forward(self: Any, x: Tensor) -> Any:
        activation = known.get(type(self.act_fn))
        if activation is None:
            return plain(self, x)
        return self.down_proj(activation(self.up_proj(x)))

    return forward


def expert_gate(plain: Forward) -> Forward:
    """Of the experts' gating, on (tokens, 2n) whose halves are gate and up: they are read in place."""
    known = gates()

    def _apply_gate(self: Any, gate_up_out: Tensor) -> Any:
        gated = known.get(type(self.act_fn))
        if gated is None or not getattr(self, "is_concatenated", True):
            return plain(self, gate_up_out)
        return gated(gate_up_out)

    return _apply_gate


def is_silu(activation: Any) -> bool:
    return gates().get(type(activation)) is load("swiglu")


def gates_as_usual(experts: type) -> bool:
    """Whether a class of experts multiplies act(gate) by up and does no more: by Transformers' own method, or by
    ``expert_gate``, which replaces only that."""
    from transformers.integrations.moe import _default_apply_gate

    gate: Any = getattr(experts, "_apply_gate", None)
    replaced = getattr(gate, "__module__", "") == __name__ and gate.__qualname__.startswith("expert_gate.")
    return replaced or gate is _default_apply_gate


def limited_expert_gate(plain: Forward) -> Forward:
    """Of DeepSeek V4's experts, whose gate and up are clamped."""
    known = gates()

    def _apply_gate(self: Any, gate_up: Tensor) -> Any:
        gated = known.get(type(self.act_fn))
        if gated is None:
            return plain(self, gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return gated(gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit))

    return _apply_gate


def llama4_experts(plain: Forward) -> Forward:
    """Of Llama 4's experts, each on the same number of tokens: gate and up are read in place."""
    known = gates()

    def forward(self: Any, hidden_states: Tensor) -> Any:
        gated = known.get(type(self.act_fn))
        if gated is None:
            return plain(self, hidden_states)
        by_expert = hidden_states.view(self.gate_up_proj.shape[0], -1, self.hidden_size)
        return torch.bmm(gated(torch.bmm(by_expert, self.gate_up_proj)), self.down_proj).view(
            -1, self.hidden_size
        )

    return forward


READS |= {
    layer_norm: ("weight", "bias", "eps", "normalized_shape"),
    layer_norm_1p: ("weight", "bias", "eps"),
    gated_rms_norm: ("weight", "variance_epsilon", "activation"),
    scaled_mlp: ("act_fn", "gate_proj", "up_proj", "down_proj", "gate_multiplier", "down_multiplier"),
    limited_mlp: ("act_fn", "gate_proj", "up_proj", "down_proj", "limit"),
    plain_mlp: ("act_fn", "up_proj", "down_proj"),
    expert_gate: ("act_fn",),
    limited_expert_gate: ("act_fn", "limit"),
    llama4_experts: ("act_fn", "gate_up_proj", "down_proj", "hidden_size"),
}

ACTIVATIONS |= {
    scaled_mlp: ("act_fn", gates),
    limited_mlp: ("act_fn", gates),
    plain_mlp: ("act_fn", ungated),
    expert_gate: ("act_fn", gates),
    limited_expert_gate: ("act_fn", gates),
    llama4_experts: ("act_fn", gates),
}


def rotary(*, interleaved: bool, tables: str = "halves") -> Make:
    """Of ``apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)``, also where only the first columns are rotated.

    Args:
        interleaved: neighbouring columns are rotated together.
        tables: what their columns are. "halves": each angle in both halves; "neighbours": each twice in a row; "once".
    """

    def make(plain: Forward) -> Forward:
        op = load("rope")

        def apply_rotary_pos_emb(
            q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
        ) -> tuple[Tensor, Tensor]:
            width = cos.shape[-1] * (2 if tables == "once" else 1)
            if tables == "neighbours":
                cos, sin = cos[..., ::2], sin[..., ::2]
            turned: tuple[Tensor, Tensor] = op(
                q,
                k,
                fitting(cos, q),
                fitting(sin, q),
                rotary_dim=width,
                interleaved=interleaved,
                layout=_layout(unsqueeze_dim),
            )
            return turned

        return apply_rotary_pos_emb

    return make


def _layout(unsqueeze_dim: int) -> str:
    """Tables of (sequence, columns) get their heads' dimension at 0."""
    return "bshd" if unsqueeze_dim == 2 else "bhsd"


def rotary_of_one(plain: Forward) -> Forward:
    """Of Gemma 4's ``apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=1)``."""
    op = load("rope")

    def apply_rotary_pos_emb(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
        turned: Tensor
        turned, _ = op(x, None, fitting(cos, x), fitting(sin, x), layout=_layout(unsqueeze_dim))
        return turned

    return apply_rotary_pos_emb


def rotary_of_the_last(plain: Forward) -> Forward:
    """Of DeepSeek V4's ``apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=1)``, which rotates neighbouring columns among
    the last ones of every head: of tables with a column for each pair."""
    op = load("rope")

    def apply_rotary_pos_emb(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
        width = 2 * cos.shape[-1]
        turned, _ = op(
            x[..., -width:],
            None,
            fitting(cos, x),
            fitting(sin, x),
            rotary_dim=width,
            interleaved=True,
            layout=_layout(unsqueeze_dim),
        )
        return torch.cat([x[..., :-width], turned], dim=-1)

    return apply_rotary_pos_emb


def rotary_to_halves(plain: Forward) -> Forward:
    """Of DeepSeek V3's ``apply_rotary_pos_emb_interleave``, whose pairs are neighbours before and halves apart
    afterwards: they are put apart first, which is one copy."""
    op = load("rope")

    def apply_rotary_pos_emb_interleave(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        q, k = (t.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for t in (q, k))
        turned: tuple[Tensor, Tensor] = op(
            q, k, fitting(cos, q), fitting(sin, q), layout=_layout(unsqueeze_dim)
        )
        return turned

    return apply_rotary_pos_emb_interleave


def complex_rotary(*, layout: str) -> Make:
    """Of ``apply_rotary_emb(xq, xk, freqs_cis)``: q and k (batch, sequence, heads, head dimension) with layout "bshd",
    (batch, heads, sequence, head dimension) with "bhsd"."""

    def make(plain: Forward) -> Forward:
        op = load("rope_llama4")

        def apply_rotary_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
            if layout == "bshd":
                xq, xk = op(xq, xk, freqs_cis)
                return xq, xk
            xq, xk = op(xq.transpose(1, 2), xk.transpose(1, 2), freqs_cis)
            return xq.transpose(1, 2), xk.transpose(1, 2)

        return apply_rotary_emb

    return make


def complex_vision_rotary(plain: Forward) -> Forward:
    """Of Llama 4's ``vision_apply_rotary_emb(query, key, freqs_ci)``: q and k (images, patches, heads, head
    dimension)."""
    op = load("rope_llama4")

    def vision_apply_rotary_emb(query: Tensor, key: Tensor, freqs_ci: Tensor) -> tuple[Tensor, Tensor]:
        angles = freqs_ci.reshape(query.shape[1], query.shape[-1] // 2).to(query.device)
        turned: tuple[Tensor, Tensor] = op(query, key, angles)
        return turned

    return vision_apply_rotary_emb


def vision_rotary(plain: Forward) -> Forward:
    """Of ``apply_rotary_pos_emb_vision(q, k, cos, sin)``: q and k (patches, heads, head dimension), with or without a
    batch before."""
    op = load("rope")

    def apply_rotary_pos_emb_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos_sin = fitting(cos, q), fitting(sin, q)
        turned: tuple[Tensor, Tensor]
        if q.dim() == 4:
            turned = op(q, k, *cos_sin, layout="bshd")
            return turned
        turned = op(q.unsqueeze(0), k.unsqueeze(0), *cos_sin, layout="bshd")
        return turned[0].squeeze(0), turned[1].squeeze(0)

    return apply_rotary_pos_emb_vision


def packed_attention(plain: Forward) -> Forward:
    """Of an attention that cuts query, key and value out of one projection's result, as Phi-3's: ``plain`` runs, on
    pieces that are taken apart at once.

    Each cut would make a gradient as large as the whole, of zeros but for its piece, and these would be added: the
    pieces' gradients are put side by side instead. And the values, which attention keeps for the backward, would keep
    the queries' and keys' memory with them: they are copied, which is half of what they save.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not torch.is_grad_enabled():
            return plain(self, *args, **kwargs)
        return plain(_Divided(self), *args, **kwargs)

    return forward


READS[packed_attention] = ("config", "head_dim", "num_key_value_heads", "qkv_proj")


class _Divided:
    """Stands for an attention while its forward runs."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def qkv_proj(self, x: Tensor) -> _Pieces:
        of = self._module
        queries, keys = (n * of.head_dim for n in (of.config.num_attention_heads, of.num_key_value_heads))
        return _Pieces(of.qkv_proj(x), (queries, keys, keys))


class _Pieces:
    """A tensor that knows some cuts along its last dimension: ``pieces[..., first:last]`` gives the piece where it is
    one of them; all else is asked of the tensor."""

    def __init__(self, packed: Tensor, sizes: tuple[int, int, int]) -> None:
        q, k, v = packed.split(sizes, -1)
        self._packed, end_q, end_k = packed, sizes[0], sizes[0] + sizes[1]
        self._pieces = {(0, end_q): q, (end_q, end_k): k, (end_k, packed.shape[-1]): v.contiguous()}

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, tuple) and len(at) == 2 and at[0] is ... and isinstance(at[1], slice):
            first, last, step = at[1].indices(self._packed.shape[-1])
            if step == 1 and (first, last) in self._pieces:
                return self._pieces[first, last]
        return self._packed[at]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._packed, name)
