"""What stands in the place of a model's forwards: each function here takes what it replaces and returns its stand-in.

The stand-ins read the modules' own attributes when they are called: parameters may be moved, cast, sharded or
replaced after a model was patched. A norm whose weight is then no plain tensor runs as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from liger_aot.models.fitting import fitting
from liger_aot.ops.op import PLAIN, PLAIN_OR_NONE
from liger_aot.ops.registry import load

Forward = Callable[..., Any]
Make = Callable[[Forward], Forward]

# Names of the attributes that the stand-ins read: ``resolve`` asks for them before anything is changed.
READS: dict[Any, tuple[str, ...]] = {}


def rms_norm(*, eps: str, offset: float = 0.0, casting_mode: str = "llama") -> Make:
    """Of an RMSNorm whose epsilon is its attribute ``eps``; ``offset`` and ``casting_mode`` are the op's."""

    def make(plain: Forward) -> Forward:
        op = load("rmsnorm")

        def forward(self: Any, x: Tensor) -> Any:
            weight = self.weight
            if type(weight) not in PLAIN:
                return plain(self, x)
            return op(x, fitting(weight, x), eps=getattr(self, eps), offset=offset, casting_mode=casting_mode)

        return forward

    READS[make] = ("weight", eps)
    return make


def layer_norm(plain: Forward) -> Forward:
    """Of torch.nn.LayerNorm, over its last dimension."""
    op = load("layernorm")

    def forward(self: Any, input: Tensor) -> Any:
        if len(self.normalized_shape) != 1 or type(self.weight) not in PLAIN_OR_NONE:
            return plain(self, input)
        return op(input, fitting(self.weight, input), fitting(self.bias, input), eps=self.eps)

    return forward


def layer_norm_1p(plain: Forward) -> Forward:
    """Of Nemotron's LayerNorm, whose weight is stored less one. Under autocast its input is cast, as Nemotron does."""
    op = load("layernorm")

    def forward(self: Any, input: Tensor) -> Any:
        if type(self.weight) not in PLAIN:
            return plain(self, input)
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
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


def gated_mlp(plain: Forward) -> Forward:
    """Of an MLP with projections of its own for gate and up."""
    known = gates()

    def forward(self: Any, x: Tensor) -> Any:
        gated = known.get(type(self.act_fn))
        if gated is None:
            return plain(self, x)
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))

    return forward


def packed_mlp(plain: Forward) -> Forward:
    """Of an MLP whose projection gives gate and up in one tensor: it is read in place."""
    known = gates()

    def forward(self: Any, hidden_states: Tensor) -> Any:
        gated = known.get(type(self.activation_fn))
        if gated is None:
            return plain(self, hidden_states)
        return self.down_proj(gated(self.gate_up_proj(hidden_states)))

    return forward


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


READS |= {
    layer_norm: ("weight", "bias", "eps", "normalized_shape"),
    layer_norm_1p: ("weight", "bias", "eps"),
    gated_mlp: ("act_fn", "gate_proj", "up_proj", "down_proj"),
    packed_mlp: ("activation_fn", "gate_up_proj", "down_proj"),
    plain_mlp: ("act_fn", "up_proj", "down_proj"),
    expert_gate: ("act_fn",),
}

# Which activations a stand-in knows, by the attribute that holds the module's own.
ACTIVATIONS: dict[Any, tuple[str, Callable[[], dict[type, Forward]]]] = {
    gated_mlp: ("act_fn", gates),
    packed_mlp: ("activation_fn", gates),
    plain_mlp: ("act_fn", ungated),
    expert_gate: ("act_fn", gates),
}


def rotary(*, interleaved: bool) -> Make:
    """Of ``apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)``, also where only the first columns are rotated."""

    def make(plain: Forward) -> Forward:
        op = load("rope")

        def apply_rotary_pos_emb(
            q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
        ) -> tuple[Tensor, Tensor]:
            turned: tuple[Tensor, Tensor] = op(
                q,
                k,
                fitting(cos, q),
                fitting(sin, q),
                rotary_dim=cos.shape[-1],
                interleaved=interleaved,
                layout="bhsd" if unsqueeze_dim == 1 else "bshd",
            )
            return turned

        return apply_rotary_pos_emb

    return make


def vision_rotary(plain: Forward) -> Forward:
    """Of ``apply_rotary_pos_emb_vision(q, k, cos, sin)``: q and k (patches, heads, head dimension)."""
    op = load("rope")

    def apply_rotary_pos_emb_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = op(q.unsqueeze(0), k.unsqueeze(0), fitting(cos, q), fitting(sin, q), layout="bshd")
        return q.squeeze(0), k.squeeze(0)

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
