"""A small call of each op that one process can run: its tensors by name, and how it is called with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import liger_aot

Named = dict[str, Tensor]


class SmallCall(NamedTuple):
    """One call.

    Attributes:
        tensors: the tensor arguments by their names.
        call: the outputs, from the op and its tensors.
        graded: the arguments that get a gradient.
        inplace: a call that writes arguments or what else is given, by name: (op, tensors, names of those written).
    """

    tensors: Named
    call: Callable[[Any, Named], Any]
    graded: tuple[str, ...]

    def outputs(self, op: Any, tensors: Named | None = None) -> tuple[Tensor, ...]:
        found = self.call(op, self.tensors if tensors is None else tensors)
        found = (found,) if isinstance(found, Tensor) else found
        return tuple(y for y in found if y is not None)


def _call(*positional: str, **settings: Any) -> Callable[[Any, Named], Any]:
    """By position as far as named here, the rest by keyword."""

    def call(op: Any, t: Named) -> Any:
        rest = {k: v for k, v in t.items() if k not in positional}
        return op(*(t[name] for name in positional), **rest, **settings)

    return call


def _fresh(t: Tensor) -> Tensor:
    """A copy that may be overwritten; what has no memory to copy is refused as it is."""
    if not t.is_nested and (t._is_zerotensor() or (t.layout == torch.strided and _freed(t))):
        return t
    return t.clone()


def _freed(t: Tensor) -> bool:
    try:
        return bool(t.numel()) and not t.untyped_storage().size()
    except (RuntimeError, NotImplementedError):  # a wrapper: of a transform, or quantised
        return False


def _in_place(*written: str, **settings: Any) -> Callable[[Any, Named], Any]:
    """By keyword, with copies of what is written, so that every call is the same."""

    def call(op: Any, t: Named) -> Any:
        return op(**{k: _fresh(v) if k in written else v for k, v in t.items()}, **settings)

    return call


def small_calls(n: int = 16) -> dict[str, SmallCall]:
    """By op; the numbers are the same each time."""
    generator = torch.Generator().manual_seed(7)

    def r(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def heads(*shape: int) -> Tensor:
        return r(*shape).half()

    labels = torch.tensor([1, 3, -100, 5])
    logs = r(4, n).log_softmax(-1)
    teacher = r(4, n).log_softmax(-1)
    cos, sin = r(5, n), r(5, n)
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    made = {
        "rmsnorm": ({"x": r(4, n), "weight": r(n)}, _call("x", "weight"), ("x", "weight")),
        "fused_add_rmsnorm": (
            {"x": r(4, n), "residual": r(4, n), "weight": r(n)},
            _call("x", "residual", "weight"),
            ("x", "residual", "weight"),
        ),
        "layernorm": (
            {"x": r(4, n), "weight": r(n), "bias": r(n)},
            _call("x", "weight", "bias"),
            ("x", "weight", "bias"),
        ),
        "groupnorm": (
            {"x": r(2, 4, n), "weight": r(4), "bias": r(4)},
            lambda op, t: op(t["x"], 2, t["weight"], t["bias"]),
            ("x", "weight", "bias"),
        ),
        "modulated_rmsnorm": (
            {"x": r(2, 3, n), "scale": r(2, n), "shift": r(2, n), "weight": r(n)},
            _call("x", "scale", "shift", "weight"),
            ("x", "scale", "shift", "weight"),
        ),
        "poly_norm": (
            {"x": r(4, n), "weight": r(3), "bias": r(1)},
            _call("x", "weight", "bias"),
            ("x", "weight", "bias"),
        ),
        "dyt": (
            {"x": r(4, n), "alpha": r(1), "weight": r(n), "bias": r(n)},
            _call("x", "alpha", "weight", "bias"),
            ("x", "alpha", "weight", "bias"),
        ),
        "mhc_pre": ({"x": r(3, 4, n), "h_pre": r(3, 4)}, _call("x", "h_pre"), ("x", "h_pre")),
        "mhc_post": (
            {"x": r(3, 4, n), "f": r(3, n), "h_post": r(3, 4), "h_res": r(3, 4, 4)},
            _call("x", "f", "h_post", "h_res"),
            ("x", "f", "h_post", "h_res"),
        ),
        "mhc_coefficients": (
            {
                "x": r(3, 2, n),
                "phi": r(2 * n, 8) / n,
                "bias": r(8),
                "alpha_pre": r(1),
                "alpha_post": r(1),
                "alpha_res": r(1),
            },
            _call("x", "phi", "bias", "alpha_pre", "alpha_post", "alpha_res", iterations=3),
            ("x", "phi", "bias", "alpha_pre", "alpha_post", "alpha_res"),
        ),
        "attention_residuals": (
            {"v": r(3, 4, n), "query": r(n), "norm": r(n)},
            _call("v", "query", "norm"),
            ("v", "query", "norm"),
        ),
        "swiglu": ({"gate": r(4, n), "up": r(4, n)}, _call("gate", "up"), ("gate", "up")),
        "geglu": ({"gate": r(4, n), "up": r(4, n)}, _call("gate", "up"), ("gate", "up")),
        "relu_squared": ({"x": r(4, n)}, _call("x"), ("x",)),
        "quantize": ({"x": heads(4, n)}, _call("x", dtype=torch.int8), ()),
        "rmsnorm_quantize": (
            {"x": heads(4, n), "weight": heads(n)},
            _call("x", "weight", dtype=torch.int8),
            (),
        ),
        "fused_add_rmsnorm_quantize": (
            {"x": heads(4, n), "residual": heads(4, n), "weight": heads(n)},
            _call("x", "residual", "weight", dtype=torch.int8),
            (),
        ),
        "layernorm_quantize": (
            {"x": heads(4, n), "weight": heads(n), "bias": heads(n)},
            _call("x", "weight", "bias", dtype=torch.int8),
            (),
        ),
        "swiglu_quantize": (
            {"gate": heads(4, n), "up": heads(4, n)},
            _call("gate", "up", dtype=torch.int8, limit=2.0),
            (),
        ),
        "geglu_quantize": ({"gate": heads(4, n), "up": heads(4, n)}, _call("gate", "up", dtype=torch.int8), ()),
        "top_k_top_p_mask": (
            {"logits": r(4, n), "top_k": torch.tensor([3, 0, 5, 1]), "top_p": torch.tensor([0.9, 0.5, 0.7, 1.0])},
            _call("logits", "top_k", "top_p"),
            (),
        ),
        "sample": (
            {
                "logits": r(4, n),
                "seeds": torch.arange(4),
                "positions": torch.arange(4),
                "temperature": torch.tensor([0.0, 0.7, 1.0, 2.0]),
                "top_k": torch.tensor([3, 0, 5, 1]),
            },
            _call("logits", "seeds", "positions"),
            (),
        ),
        "rejection_sample": (
            {
                "target_probs": r(4, n).softmax(-1),
                "draft_token_ids": labels.clamp(min=0),
                "cu_num_draft_tokens": torch.tensor([1, 4], dtype=torch.int32),
                "bonus_token_ids": torch.tensor([7, 8]),
                "seeds": torch.arange(2),
                "positions": torch.arange(2),
                "draft_probs": r(4, n).softmax(-1),
            },
            _call(
                *("target_probs", "draft_token_ids", "cu_num_draft_tokens", "bonus_token_ids", "seeds", "positions"),
                max_spec_len=3,
            ),
            (),
        ),
        "softmax": ({"x": r(4, n)}, _call("x", temperature=0.7), ("x",)),
        "log_softmax": ({"x": r(4, n)}, _call("x"), ("x",)),
        "sparsemax": ({"x": r(4, n)}, _call("x"), ("x",)),
        "embedding": (
            {"indices": torch.tensor([[0, 2], [5, 2]]), "weight": r(6, n)},
            _call("indices", "weight"),
            ("weight",),
        ),
        "fused_moe": (
            {
                "x": r(4, n),
                "gate_up_weight": r(3, 12, n),
                "down_weight": r(3, n, 6),
                "topk_indices": torch.tensor([[0, 2], [2, 1], [0, 1], [1, 0]]),
                "topk_weights": r(4, 2).abs(),
            },
            _call("x", "gate_up_weight", "down_weight", "topk_indices", "topk_weights"),
            ("x", "gate_up_weight", "down_weight", "topk_weights"),
        ),
        "rope": (
            {"q": r(2, 3, 5, n), "k": r(2, 1, 5, n), "cos": cos, "sin": sin},
            _call("q", "k", "cos", "sin"),
            ("q", "k"),
        ),
        "rope_multimodal": (
            {"q": r(2, 3, 5, n), "k": r(2, 1, 5, n), "cos": r(3, 2, 5, n), "sin": r(3, 2, 5, n)},
            lambda op, t: op(t["q"], t["k"], t["cos"], t["sin"], (n // 2 - 4, 2, 2)),
            ("q", "k"),
        ),
        "rope_llama4": (
            {"q": r(2, 5, 3, n), "k": r(2, 5, 1, n), "freqs_cis": r(5, n // 2, 2)},
            _call("q", "k", "freqs_cis"),
            ("q", "k"),
        ),
        "cross_entropy": (
            {"logits": r(4, n), "target": labels, "weight": r(n).abs()},
            _call("logits", "target", "weight", label_smoothing=0.1, lse_square_scale=0.01, softcap=5.0),
            ("logits",),
        ),
        "fused_linear_cross_entropy": (
            {"input": r(4, 8), "weight": r(n, 8), "target": labels, "bias": r(n)},
            _call("input", "weight", "target", "bias", use_token_scaling=True, softcap=5.0),
            ("input", "weight", "bias"),
        ),
        "fused_linear_jsd": (
            {
                "student_input": r(4, 8),
                "student_weight": r(n, 8),
                "teacher_input": r(4, 6),
                "teacher_weight": r(n, 6),
                "shift_labels": labels,
                "student_bias": r(n),
            },
            _call("student_input", "student_weight", "teacher_input", "teacher_weight", "shift_labels", "student_bias"),
            ("student_input", "student_weight", "student_bias"),
        ),
        "fused_linear_log_probs": (
            {"input": r(4, 8), "weight": r(n, 8), "target": labels, "bias": r(n)},
            _call("input", "weight", "target", "bias", temperature=0.8, return_entropy=True, return_lse=True),
            ("input", "weight", "bias"),
        ),
        "kl_div": ({"input": logs, "target": teacher.exp()}, _call("input", "target"), ("input",)),
        "jsd": (
            {"input": logs, "target": teacher, "shift_labels": labels},
            _call("input", "target", "shift_labels", beta=0.3),
            ("input",),
        ),
        "tvd": (
            {"p": logs.exp(), "q": teacher.exp(), "shift_labels": labels},
            _call("p", "q", "shift_labels"),
            ("p",),
        ),
        "selective_log_softmax": (
            {"logits": r(4, n), "index": labels.clamp(min=0)},
            _call("logits", "index", temperature=0.8),
            ("logits",),
        ),
        "cross_entropy_tvd": (
            {"student_logits": r(4, n), "teacher_logits": r(4, n), "target": labels},
            _call("student_logits", "teacher_logits", "target"),
            ("student_logits",),
        ),
        "fused_linear_kl_div": (
            {"input": r(4, 8), "weight": r(n, 8), "target": teacher.exp(), "shift_labels": labels},
            _call("input", "weight", "target", "shift_labels", temperature=2.0),
            ("input", "weight"),
        ),
        "fused_linear_distillation_loss": (
            {
                "student_input": r(4, 8),
                "student_weight": r(n, 8),
                "teacher_input": r(4, 6),
                "teacher_weight": r(n, 6),
                "target": labels,
                "student_bias": r(n),
            },
            lambda op, t: op(**t, beta=0.3).loss,
            ("student_input", "student_weight", "student_bias"),
        ),
        "fused_linear_preference_loss": (
            {
                "input": r(2, 4, 8),
                "weight": r(n, 8),
                "target": torch.stack((labels, labels)),
                "bias": r(n),
                "ref_input": r(2, 4, 6),
                "ref_weight": r(n, 6),
            },
            lambda op, t: op(**t, nll_weight=0.5).loss,
            ("input", "weight", "bias"),
        ),
        "fused_linear_grpo_loss": (
            {
                "input": r(2, 4, 8),
                "weight": r(n, 8),
                "completion_ids": torch.stack((labels, labels)).clamp(min=0),
                "advantages": torch.tensor([1.0, -0.5]),
                "bias": r(n),
            },
            lambda op, t: op(**t, temperature=1.5).loss,
            ("input", "weight", "bias"),
        ),
        "policy_loss": (
            {
                "logp": r(3, n) / 4,
                "old_logp": r(3, n) / 4,
                "ref_logp": r(3, n) / 4,
                "advantages": r(3),
                "sampling_ratio": r(3, n).exp(),
            },
            lambda op, t: op(
                **t, loss_type="grpo", beta=0.1, importance_sampling_level="sequence", use_bias_correction_kl=True
            )[0],
            ("logp",),
        ),
        "neighborhood_attention": (
            {"q": r(2, 5, n), "k": r(2, 5, n), "v": r(2, 5, n)},
            _call("q", "k", "v", reach=2, dilation=2),
            ("q", "k", "v"),
        ),
        "flash_attention": (
            {"q": heads(1, 6, 2, n), "k": heads(1, 7, 1, n), "v": heads(1, 7, 1, n), "sinks": r(2)},
            _call("q", "k", "v", causal=True, softcap=5.0, return_lse=True),
            ("q", "k", "v", "sinks"),
        ),
        "flash_attention_varlen": (
            {
                "q": heads(5, 2, n),
                "k": heads(5, 1, n),
                "v": heads(5, 1, n),
                "cu_seqlens_q": starts,
                "cu_seqlens_k": starts,
                "sinks": r(2),
            },
            lambda op, t: op(
                *(t[k] for k in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")),
                3,
                3,
                sinks=t["sinks"],
                causal=True,
                return_lse=True,
            ),
            ("q", "k", "v", "sinks"),
        ),
        "flash_attention_paged": (
            {
                "q": heads(5, 2, n),
                "k_cache": heads(3, 16, 1, n),
                "v_cache": heads(3, 16, 1, n),
                "cu_seqlens_q": starts,
                "seqused_k": torch.tensor([4, 19], dtype=torch.int32),
                "block_table": torch.tensor([[2, 0], [1, 2]], dtype=torch.int32),
                "sinks": r(2),
            },
            lambda op, t: op(
                *(t[k] for k in ("q", "k_cache", "v_cache", "cu_seqlens_q", "seqused_k", "block_table")),
                3,
                sinks=t["sinks"],
                return_lse=True,
            ),
            (),
        ),
        "flash_decoding": (
            {
                "q": heads(2, 1, 2, n),
                "k_cache": heads(2, 9, 1, n),
                "v_cache": heads(2, 9, 1, n),
                "cache_seqlens": torch.tensor([4, 9], dtype=torch.int32),
                "sinks": r(2),
            },
            _call("q", "k_cache", "v_cache", return_lse=True),
            (),
        ),
        "merge_attention_states": (
            {"out_a": r(3, 2, n), "lse_a": r(2, 3), "out_b": r(3, 2, n), "lse_b": r(2, 3)},
            _call("out_a", "lse_a", "out_b", "lse_b", return_lse=True),
            (),
        ),
        "write_kv_cache": (
            {
                "key": heads(3, 1, n),
                "value": heads(3, 1, n),
                "key_cache": heads(2, 4, 1, n),
                "value_cache": heads(2, 4, 1, n),
                "slot_mapping": torch.tensor([5, -1, 0]),
            },
            _in_place("key_cache", "value_cache"),
            (),
        ),
        "qk_norm_rope": (
            {
                "qkv": heads(3, 4 * n),
                "q_weight": heads(n),
                "k_weight": heads(n),
                "cos_sin_cache": r(6, n),
                "position_ids": torch.tensor([5, 0, 3]),
            },
            _in_place("qkv", num_heads_q=2, num_heads_k=1, num_heads_v=1),
            (),
        ),
    }  # fmt: skip
    return {name: SmallCall(*call) for name, call in made.items()}


def other_calls() -> dict[str, tuple[Named, dict[str, Any]]]:
    """Of the ops that ``small_calls`` leaves out and one process can run: tensors and settings, all by keyword."""
    found: dict[str, tuple[Named, dict[str, Any]]] = {
        "column_sums": ({"partials": torch.ones(4, 16)}, {}),
        "divergence_sums": ({"partials": torch.ones(4)}, {}),
        "grpo_loss": (
            {
                "logits": torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(7)),
                "old_logp": torch.zeros(3, 4),
                "ref_logp": torch.zeros(3, 4),
                "completion_ids": torch.ones(3, 4, dtype=torch.int64),
                "advantages": torch.ones(3),
                "sampling_ratio": torch.ones(3, 4),
            },
            {},
        ),
    }
    for forward, settings in (
        ("flash_attention", {}),
        ("flash_attention_varlen", {"max_seqlen_q": 3, "max_seqlen_k": 3}),
    ):
        tensors = dict(small_calls()[forward].tensors)
        o, lse = liger_aot.load(forward)(**tensors, **settings, return_lse=True)
        grads = {"do": torch.ones_like(o), "dlse": torch.ones_like(lse)}
        found[f"{forward}_backward"] = {**tensors, "o": o, "lse": lse, **grads}, settings
    return found


def parallel_calls(n: int = 16) -> dict[str, tuple[Named, dict[str, Any]]]:
    """Of the ops that run in a torch.distributed group, as ``other_calls``: for a rank that has all columns."""
    generator = torch.Generator().manual_seed(9)
    target = torch.tensor([1, 3, -100, 5])
    x, weight = torch.randn(4, n, generator=generator), torch.randn(n, n, generator=generator)
    return {
        "vocab_parallel_cross_entropy": ({"logits": x, "target": target}, {}),
        "vocab_parallel_linear_cross_entropy": ({"input": x, "weight": weight, "target": target}, {}),
    }
