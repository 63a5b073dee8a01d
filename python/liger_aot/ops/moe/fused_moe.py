"""Mixture of experts with SwiGLU: routed tokens through their experts' projections, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_aot.errors import ArgumentError, ArgumentTypeError
from liger_aot.ops.differentiable import DifferentiableOp, Tensors
from liger_aot.ops.moe._products import Tokens, products
from liger_aot.ops.moe._routing import LARGEST_TILE, WORDS, Sizes
from liger_aot.ops.op import Problem, as_rows, check_same_device, check_tensor
from liger_aot.runtime.dispatch import DTYPE_NAMES, Runtimes
from liger_aot.runtime.layout import rows_of


class FusedMoE(DifferentiableOp):
    """``fused_moe(x, gate_up_weight, down_weight, topk_indices, topk_weights) -> Tensor``: for each token the sum over
    its k experts e of topk_weight * (silu(x gate_e^T) * (x up_e^T)) down_e^T.

    Differentiable in all but the indices; works under torch.compile and, after ``preload``, in CUDA graphs. CPU tensors
    take the plain-torch reference, which computes every expert for all tokens.

    Nothing waits for the device, and nothing is timed: launch numbers are chosen by the pairs an expert has on average.
    Memory, beside the result: forward (pairs + padding) x (inner + hidden) elements; kept for the backward: pairs x
    2 inner elements, the gate and up projections; the padding is less than one tile (16 to 128 rows) an expert.
    Products are summed in float32; activations and an expert's result are rounded to x's dtype before the next product
    and the sum over experts: in float16 an activation or an expert's result past 65504 is infinite, however small its
    share of y is. Deterministic: no gradient is added by atomics.

    On gfx90a, whose float16 matrix instructions read subnormal numbers as zeros, float16 factors below 2^-14 count as
    zeros, in the backward gradients among them: scale the loss, or use bfloat16.

    Args:
        x: (tokens, hidden) bfloat16, float16 or float32. Rows may have any stride; other layouts are copied.
        gate_up_weight: (experts, 2 inner, hidden) of x's dtype, an expert's gate projection first.
        down_weight: (experts, hidden, inner) of x's dtype.
        topk_indices: (tokens, k) int32 or int64, the experts of each token. One outside of [0, experts) adds nothing
            and gives no gradient: in expert parallelism it is another rank's.
        topk_weights: (tokens, k) bfloat16, float16 or float32.

    Returns:
        a contiguous tensor (tokens, hidden) of x's dtype.

    Raises:
        ArgumentTypeError: an argument is not a tensor or of another dtype.
        ArgumentError: shapes, dtypes or devices do not fit together; 2^31 pairs or more.
        PackNotFound: no installed pack serves the GPU.

    Source:
        Shazeer et al., Outrageously Large Neural Networks (2017); Jiang et al., Mixtral of Experts (2024).
    """

    name = "fused_moe"
    uses = ("column_sums",)
    tensors = ("x", "gate_up_weight", "down_weight", "topk_indices", "topk_weights")
    results = 2  # and the gate and up projections of each pair, interleaved

    def __init__(self, runtimes: Mapping[str, Runtimes] | None = None) -> None:
        super().__init__(runtimes)
        self._column_sums = self._runtimes["column_sums"]

    def __call__(
        self,
        x: Tensor,
        gate_up_weight: Tensor,
        down_weight: Tensor,
        topk_indices: Tensor,
        topk_weights: Tensor,
    ) -> Tensor:
        y: Tensor = self.differentiable((x, gate_up_weight, down_weight, topk_indices, topk_weights))
        return y

    def check(self, tensors: Tensors, settings: tuple[Any, ...]) -> None:
        x, gate_up, down, indices, weights = tensors
        check_tensor(self.name, "x", x)
        if x.dim() != 2:
            raise ArgumentError(f"fused_moe: x must be of shape (tokens, hidden), got {tuple(x.shape)}")
        for name, t in (("gate_up_weight", gate_up), ("down_weight", down), ("topk_weights", weights)):
            check_tensor(self.name, name, t)
        if not isinstance(indices, Tensor):
            raise ArgumentTypeError(
                f"fused_moe: topk_indices must be a torch.Tensor, got {type(indices).__name__}"
            )
        if indices.dtype not in WORDS:
            raise ArgumentTypeError(f"fused_moe: topk_indices must be int32 or int64, got {indices.dtype}")
        for name, t in zip(self.tensors[1:], tensors[1:], strict=True):
            check_same_device(self.name, name, t, "x", x)
        for name, t in (("gate_up_weight", gate_up), ("down_weight", down)):
            if t.dtype != x.dtype:
                raise ArgumentTypeError(f"fused_moe: {name} must be of x's dtype {x.dtype}, got {t.dtype}")
        tokens, hidden = x.shape
        if gate_up.dim() != 3 or gate_up.shape[1] % 2 or gate_up.shape[2] != hidden:
            raise ArgumentError(
                f"fused_moe: gate_up_weight must be of shape (experts, 2 inner, {hidden}), x's last dimension; got "
                f"{tuple(gate_up.shape)}"
            )
        experts, inner = gate_up.shape[0], gate_up.shape[1] // 2
        if down.shape != (experts, hidden, inner):
            raise ArgumentError(
                f"fused_moe: down_weight must be of shape {(experts, hidden, inner)}, as gate_up_weight "
                f"{tuple(gate_up.shape)} asks; got {tuple(down.shape)}"
            )
        if indices.dim() != 2 or indices.shape[0] != tokens:
            raise ArgumentError(
                f"fused_moe: topk_indices must be of shape ({tokens}, k), as x {tuple(x.shape)} asks; got "
                f"{tuple(indices.shape)}"
            )
        if weights.shape != indices.shape:
            raise ArgumentError(
                f"fused_moe: topk_weights must be of topk_indices' shape {tuple(indices.shape)}, got "
                f"{tuple(weights.shape)}"
            )
        if indices.numel() + experts * LARGEST_TILE >= 1 << 31:
            raise ArgumentError(
                f"fused_moe: topk_indices of shape {tuple(indices.shape)}, with padding, are 2^31 pairs or more"
            )

    def run_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        x, gate_up, down, indices, weights = tensors
        in_x = rows_of(x)
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        sizes = _sizes(tensors)
        if on is None or in_x is None or sizes is None:
            return self.prepare_forward(tensors, settings, keep, out)
        places = in_x[0] | in_x[7] | gate_up.data_ptr() | down.data_ptr()
        aligned = not (places | sizes.hidden | sizes.inner) & 15
        made = products(on, x, sizes, indices, aligned)
        pre = x.new_empty((sizes.pairs, 2 * sizes.inner)) if keep else None
        act = made.up(Tokens(in_x[0], in_x[7]), gate_up, pre)
        return made.combine(made.down(act, down), weights.contiguous().float()), pre

    def prepare_forward(
        self, tensors: Tensors, settings: tuple[Any, ...], keep: bool, out: Sequence[Tensor] | None
    ) -> Tensors:
        self.check(tensors, settings)
        if self.on_reference(tensors):
            return super().prepare_forward(tensors, settings, keep, out)
        return self.run_forward(self._ready(tensors), settings, keep, out)

    def _ready(self, tensors: Tensors) -> Tensors:
        x, *others = tensors
        return as_rows(self.name, "x", x), *(t.resolve_neg().contiguous() for t in others)

    def on_reference(self, tensors: Tensors) -> bool:
        return super().on_reference(tensors) or not all(t.numel() for t in tensors)

    def saved(self, tensors: Tensors, results: Tensors) -> Tensors:
        return *tensors, results[1]

    def run_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        (dy,), (x, gate_up, down, indices, weights, pre) = grads, saved
        in_x, in_dy = rows_of(x), rows_of(dy)
        on = None if in_x is None else self._own.find(in_x[1], in_x[2])
        sizes = _sizes(saved[:5])
        if on is None or in_x is None or in_dy is None or sizes is None or not any(needed):
            return self.prepare_backward(grads, saved, settings, needed)
        places = (
            in_x[0] | in_x[7] | in_dy[0] | in_dy[7] | gate_up.data_ptr() | down.data_ptr() | pre.data_ptr()
        )
        made = products(on, x, sizes, indices, not (places | sizes.hidden | sizes.inner) & 15)
        rows, grad = Tokens(in_x[0], in_x[7]), Tokens(in_dy[0], in_dy[7])
        dpre, act, partials = made.down_backward(grad, down, pre, weights.contiguous().float())
        dx = dgate_up = ddown = dweights = None
        if needed[4]:
            dweights = self._sums(partials, weights)
        if needed[2]:
            ddown = made.down_weight_backward(grad, act)
        del act, partials
        if needed[1]:
            dgate_up = made.gate_up_weight_backward(rows, dpre)
        if needed[0]:
            dx = made.combine(made.up_backward(dpre, gate_up), None)
        return dx, dgate_up, ddown, None, dweights

    def prepare_backward(
        self, grads: Tensors, saved: Tensors, settings: tuple[Any, ...], needed: Sequence[bool]
    ) -> Tensors:
        if not any(needed) or self.on_reference(saved[:5]):
            return super().prepare_backward(grads, saved, settings, needed)
        (dy,) = grads
        dy = dy if rows_of(dy) is not None else dy.contiguous()
        return self.run_backward((dy,), (*self._ready(saved[:5]), saved[5]), settings, needed)

    def _sums(self, partials: Tensor, like: Tensor) -> Tensor:
        """The column sums, in the dtype and shape of ``like``."""
        sums = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        device = partials.get_device()
        on = self._column_sums.find(*rows_of(partials)[1:3]) or self._column_sums.on(device)  # type: ignore[index]
        parts, n = partials.shape
        loaded = on.kernels["column_sums"]((like.dtype, not n & 15), n)
        loaded.launch(
            on.device, on.stream(on.device), -(-n // loaded.block), 1, 1,
            sums.data_ptr(), partials.data_ptr(), parts, n,
        )  # fmt: skip
        return sums

    @staticmethod
    def reference(
        x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        tokens, w = x.to(wide), weights.to(wide)
        y = tokens.new_zeros(x.shape)
        pre = tokens.new_zeros((*indices.shape, gate_up.shape[1]))
        for expert in range(gate_up.shape[0]):
            chosen, both, share = _through(tokens, gate_up[expert].to(wide), indices, w, expert)
            act = _swiglu(both)
            y = y + share.unsqueeze(-1) * (act @ down[expert].to(wide).t())
            pre = torch.where(chosen.unsqueeze(-1), _interleave(both).unsqueeze(1), pre)
        return y.to(x.dtype), pre.flatten(0, 1).to(x.dtype)

    @staticmethod
    def reference_backward(grads: Tensors, saved: Tensors) -> Tensors:
        (dy,), (x, gate_up, down, indices, weights, _) = grads, saved
        wide = torch.promote_types(x.dtype, torch.float32)
        tokens, w, dy = x.to(wide), weights.to(wide), dy.to(wide)
        dx, dweights = tokens.new_zeros(x.shape), w.new_zeros(w.shape)
        dgate_up, ddown = [], []
        for expert in range(gate_up.shape[0]):
            first, second = gate_up[expert].to(wide), down[expert].to(wide)
            chosen, both, share = _through(tokens, first, indices, w, expert)
            masked = torch.where(chosen.any(-1, keepdim=True), dy, 0)
            gate, up = both.chunk(2, -1)
            sigmoid = torch.sigmoid(gate)
            silu = gate * sigmoid
            dact = masked @ second
            dweights = torch.where(chosen, (dact * (silu * up)).sum(-1, keepdim=True), dweights)
            dact = dact * share.unsqueeze(-1)
            dboth = torch.cat((dact * up * (silu * (1 - sigmoid) + sigmoid), dact * silu), -1)
            dx = dx + dboth @ first
            dgate_up.append(dboth.t() @ tokens)
            ddown.append(masked.t() @ (silu * up * share.unsqueeze(-1)))
        return (
            dx.to(x.dtype),
            torch.stack(dgate_up).to(x.dtype) if dgate_up else torch.zeros_like(gate_up),
            torch.stack(ddown).to(x.dtype) if ddown else torch.zeros_like(down),
            None,
            dweights.to(weights.dtype),
        )

    def problems(
        self, shape: Sequence[int], dtype: torch.dtype, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> tuple[Problem, ...]:
        """``shape`` is (pairs an expert, hidden): with all sizes multiples of 16."""
        rows, _ = shape
        n = max(1, rows)
        return (
            *(Problem(f"fused_moe_{step}", (), True, n) for step in ("count", "scan", "place")),
            *(Problem(f"fused_moe_{step}", (dtype,), True, n) for step in STEPS),
            *(Problem("fused_moe_weight_backward", (dtype, which), True, n) for which in (False, True)),
        )


STEPS = ("up", "down", "combine", "down_backward", "up_backward")


def _sizes(tensors: Tensors) -> Sizes | None:
    """The sizes of a call whose arguments the kernels can read; None says nothing."""
    x, gate_up, down, indices, weights = tensors
    if not all(isinstance(t, Tensor) for t in tensors) or x.dim() != 2 or gate_up.dim() != 3:
        return None
    (tokens, hidden), (experts, both, depth), device = x.shape, gate_up.shape, x.device
    sizes = Sizes(tokens, hidden, experts, both >> 1, indices.shape[-1] if indices.dim() == 2 else 0)
    fits = (
        depth == hidden
        and not both & 1
        and down.shape == (experts, hidden, sizes.inner)
        and indices.shape == (tokens, sizes.top_k)
        and weights.shape == indices.shape
        and gate_up.dtype == down.dtype == x.dtype
        and indices.dtype in WORDS
        and weights.dtype in DTYPE_NAMES
        and gate_up.device == down.device == indices.device == weights.device == device
        and gate_up.is_contiguous()
        and down.is_contiguous()
        and indices.is_contiguous()
        and sizes.pairs + experts * LARGEST_TILE < 1 << 31
        and min(sizes) > 0
    )
    return sizes if fits else None


def _through(
    x: Tensor, gate_up: Tensor, indices: Tensor, weights: Tensor, expert: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of one expert: whether a token chose it, (tokens, k); gate and up of all tokens, zero of those that did not; and
    the routing weight that each gives it."""
    chosen = indices == expert
    both = torch.where(chosen.any(-1, keepdim=True), x @ gate_up.t(), 0)
    return chosen, both, torch.where(chosen, weights, 0).sum(-1)


def _swiglu(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def _interleave(both: Tensor) -> Tensor:
    return torch.stack(both.chunk(2, -1), -1).flatten(-2)


OP = FusedMoE
