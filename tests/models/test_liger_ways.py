"""Liger's ``*_forward`` and ``*_backward`` on our ops: against the function with autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("liger_kernel", reason="liger-kernel is not installed: make venv installs it")

from liger_aot.liger.functions import COVERED
from tests.models.liger_cases import angles, labels, ours
from tests.models.test_liger_functions import outputs


def _pair_rms_norm(x: Tensor, w: Tensor) -> Any:
    y, flat, rstd, block, warps, mode = ours("rms_norm_forward")(x, w, 1e-6, 1.0, "gemma", None)
    assert flat.shape == (x.numel() // 24, 24) and (block, warps, mode) == (32, 4, 1)
    return y, lambda dy: ours("rms_norm_backward")(dy, flat, w, rstd, 1.0, mode, block, warps, True, None)


def _pair_fused_add(x: Tensor, r: Tensor, w: Tensor) -> Any:
    y, s, *rest = ours("fused_add_rms_norm_forward")(x, r, w, 1e-6, 0.0, "llama")
    rstd, block, warps, stages, mode = rest

    def back(dy: Tensor, ds: Tensor) -> Any:
        given = (dy, ds, s, w, rstd, 0.0, mode, block, warps, stages, True)
        return ours("fused_add_rms_norm_backward")(*given)

    return (y, s), back


def _pair_modulated(x: Tensor, w: Tensor, scale: Tensor, shift: Tensor) -> Any:
    y, rstd, block, warps, mode, each = ours("modulated_rms_norm_forward")(
        x, w, scale, shift, 1e-6, 0.0, "llama"
    )
    assert each == 3
    return y, lambda dy: ours("modulated_rms_norm_backward")(
        dy, x.view(-1, 24), w, scale, shift, rstd, 0.0, mode, block, warps, each, True
    )


def _pair_layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Any:
    y, flat, mean, rstd, *_ = ours("layer_norm_forward")(x, w, b, 1e-5)
    return y, lambda dy: ours("layer_norm_backward")(dy, flat, w, b, mean, rstd)


def _pair_group_norm(x: Tensor, w: Tensor, b: Tensor) -> Any:
    y, kept, mean, rstd, block = ours("group_norm_forward")(x, 12, 3, w, b, 1e-5)
    assert mean.shape == (2, 3) and block == 128
    return y, lambda dy: ours("group_norm_backward")(dy, kept, w, b, mean, rstd, 12, 3)


def _pair_poly_norm(x: Tensor, w: Tensor, b: Tensor) -> Any:
    y, flat, rstd, block, warps = ours("poly_norm_forward")(x, w, b, 1e-6)

    def back(dy: Tensor) -> Any:
        dx, dw, db = ours("poly_norm_backward")(dy, flat, w, rstd, block, warps, True)
        assert db.shape == ()
        return dx, dw, db.view(1)

    return y, back


def _pair_swiglu(a: Tensor, b: Tensor) -> Any:
    a2, b2, c = ours("swiglu_forward")(a, b, 0.5)
    return c, lambda dc: ours("swiglu_backward")(a2, b2, dc, 0.5)


def _pair_geglu(a: Tensor, b: Tensor) -> Any:
    a2, b2, c = ours("geglu_forward")(a, b)
    return c, lambda dc: ours("geglu_backward")(a2, b2, dc)


def _pair_relu_squared(x: Tensor) -> Any:
    return ours("relu_squared_forward")(x), lambda dy: (ours("relu_squared_backward")(x, dy),)


def _pair_rope(q: Tensor, k: Tensor) -> Any:
    torch.manual_seed(9)
    cos, sin = angles(5, 16)
    q, k, c, s = ours("rope_forward")(q, k, cos, sin)
    assert c.shape == (1, 5, 16)
    return (q, k), lambda dq, dk: ours("rope_backward")(dq, dk, c, s)


def _pair_cross_entropy(x: Tensor) -> Any:
    torch.manual_seed(9)
    t, logits = labels(9, 31), x.clone()
    loss, *nothing, left = ours("cross_entropy_forward")(
        logits.requires_grad_(), t, None, -100, 0.0, 0.1, "mean", None, False
    )
    assert nothing == [None] * 3 and left.data_ptr() == logits.data_ptr()
    return loss, lambda g: (ours("cross_entropy_backward")(left, g),)


def _pair_linear_cross_entropy(x: Tensor, w: Tensor, b: Tensor) -> Any:
    torch.manual_seed(9)
    x, w, b = (t.requires_grad_() for t in (x, w, b))
    loss, *nothing, dx, dw, db = ours("fused_linear_cross_entropy_forward")(x, w, labels(9, 31), None, b)
    assert nothing == [None] * 3 and not loss.requires_grad
    return loss, lambda g: ours("fused_linear_cross_entropy_backward")(g, dx, dw, db)


def _pair_jsd(x: Tensor) -> Any:
    torch.manual_seed(9)
    loss, dx = ours("jsd_forward")(x, torch.randn(9, 31).log_softmax(-1), labels(9, 31), 0.5, -100, True)
    return loss, lambda g: (ours("jsd_backward")(dx, g),)


def _pair_linear_jsd(x: Tensor, w: Tensor) -> Any:
    torch.manual_seed(9)
    teacher = torch.randn(9, 8), torch.randn(31, 8)
    loss, *found = ours("fused_linear_jsd_forward")(
        x, w.requires_grad_(), *teacher, None, 0.5, -100, False, 1.0
    )
    return loss, lambda g: ours("fused_linear_jsd_backward")(g, *found)


def _pair_linear_kl_div(x: Tensor, w: Tensor) -> Any:
    torch.manual_seed(9)
    target = torch.randn(9, 31).softmax(-1)
    loss, *found = ours("fused_linear_kl_div_forward")(
        x, w.requires_grad_(), target, None, "batchmean", -100, False, 1.0, 1e-10
    )
    return loss, lambda g: ours("fused_linear_kl_div_backward")(g, *found)


def _pair_ce_tvd(x: Tensor) -> Any:
    torch.manual_seed(9)
    teacher, t = torch.randn(9, 31), labels(9, 31)
    ce, tvd, *sums = ours("fused_ce_tvd_forward")(x, teacher, t, -100)
    torch.testing.assert_close(sums[0][t != -100], x.logsumexp(-1)[t != -100])
    return (ce, tvd), lambda a, b: (ours("fused_ce_tvd_backward")(a, b, x, teacher, t, *sums, -100),)


def _ce_tvd(x: Tensor) -> Any:
    torch.manual_seed(9)
    return ours("LigerFusedCETVDFunction").apply(x, torch.randn(9, 31), labels(9, 31))


def _rope(q: Tensor, k: Tensor) -> Any:
    torch.manual_seed(9)
    return ours("LigerRopeFunction").apply(q, k, *angles(5, 16))


def _seeded(name: str, *arguments: Callable[[], Any]) -> Callable[..., Any]:
    def call(*inputs: Tensor) -> Any:
        torch.manual_seed(9)
        made = [a() for a in arguments]
        found = ours(name).apply(*inputs[: 2 if name.startswith("LigerFusedLinear") else 1], *made)
        return found[0] if isinstance(found, tuple) else found

    return call


def _linear_ce(x: Tensor, w: Tensor, b: Tensor) -> Any:
    torch.manual_seed(9)
    return ours("LigerFusedLinearCrossEntropyFunction").apply(x, w, labels(9, 31), b)[0]


def _pair_attn_res(v: Tensor, query: Tensor, norm: Tensor) -> Any:
    h, stacked, alpha, rstd = ours("attn_res_forward")(list(v), query, norm)

    def backward(dh: Tensor) -> Any:
        dv, dquery, dnorm = ours("attn_res_backward")(dh, stacked, query, norm, alpha, rstd)
        return dv.view(v.shape), dquery, dnorm

    return h, backward


PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "rms_norm": (
        _pair_rms_norm,
        lambda x, w: ours("LigerRMSNormFunction").apply(x, w, 1e-6, 1.0, "gemma"),
        ((2, 5, 24), (24,)),
    ),
    "fused_add_rms_norm": (
        _pair_fused_add,
        lambda x, r, w: ours("LigerFusedAddRMSNormFunction").apply(x, r, w, 1e-6),
        ((2, 5, 24), (2, 5, 24), (24,)),
    ),
    "modulated_rms_norm": (
        _pair_modulated,
        lambda x, w, s, t: ours("LigerModulatedRMSNormFunction").apply(x, w, s, t, 1e-6),
        ((2, 3, 24), (24,), (2, 24), (2, 24)),
    ),
    "layer_norm": (
        _pair_layer_norm,
        lambda x, w, b: ours("LigerLayerNormFunction").apply(x, w, b, 1e-5),
        ((2, 5, 24), (24,), (24,)),
    ),
    "group_norm": (
        _pair_group_norm,
        lambda x, w, b: ours("LigerGroupNormFunction").apply(x, w, b, 12, 3, 1e-5),
        ((2, 12, 4, 5), (12,), (12,)),
    ),
    "poly_norm": (
        _pair_poly_norm,
        lambda x, w, b: ours("LigerPolyNormFunction").apply(x, w, b),
        ((2, 5, 24), (3,), (1,)),
    ),
    "swiglu": (
        _pair_swiglu,
        lambda a, b: ours("LigerSiLUMulFunction").apply(a, b, 0.5),
        ((2, 5, 24), (2, 5, 24)),
    ),
    "geglu": (_pair_geglu, lambda a, b: ours("LigerGELUMulFunction").apply(a, b), ((2, 5, 24), (2, 5, 24))),
    "relu_squared": (_pair_relu_squared, lambda x: ours("LigerReLUSquaredFunction").apply(x), ((2, 5, 24),)),
    "rope": (_pair_rope, _rope, ((2, 4, 5, 16), (2, 2, 5, 16))),
    "cross_entropy": (
        _pair_cross_entropy,
        _seeded(
            "LigerCrossEntropyFunction",
            lambda: labels(9, 31),
            lambda: None,
            lambda: -100,
            lambda: 0.0,
            lambda: 0.1,
        ),
        ((9, 31),),
    ),
    "fused_linear_cross_entropy": (_pair_linear_cross_entropy, _linear_ce, ((9, 16), (31, 16), (31,))),
    "attn_res": (
        _pair_attn_res,
        lambda v, query, norm: ours("LigerAttnResFunction").apply(v, query, norm, 1e-6),
        ((3, 2, 5, 24), (24,), (24,)),
    ),
    "jsd": (
        _pair_jsd,
        _seeded("LigerJSDFunction", lambda: torch.randn(9, 31).log_softmax(-1), lambda: labels(9, 31)),
        ((9, 31),),
    ),
    "fused_linear_kl_div": (
        _pair_linear_kl_div,
        _seeded("LigerFusedLinearKLDivFunction", lambda: torch.randn(9, 31).softmax(-1)),
        ((9, 16), (31, 16)),
    ),
    "fused_ce_tvd": (
        _pair_ce_tvd,
        _ce_tvd,
        ((9, 31),),
    ),
    "fused_linear_jsd": (
        _pair_linear_jsd,
        _seeded("LigerFusedLinearJSDFunction", lambda: torch.randn(9, 8), lambda: torch.randn(31, 8)),
        ((9, 16), (31, 16)),
    ),
}


def test_every_pair_has_a_case() -> None:
    assert {f"{name}_{way}" for name in PAIRS for way in ("forward", "backward")} == {
        name for name in COVERED if name.endswith(("_forward", "_backward"))
    }


@pytest.mark.parametrize("name", PAIRS)
def test_forwards_and_backwards(name: str) -> None:
    pair, function, shapes = PAIRS[name]
    torch.manual_seed(0)
    tensors = [torch.randn(shape) for shape in shapes]
    leaves = [t.clone().requires_grad_() for t in tensors]
    want = function(*leaves)
    got, backward = pair(*(t.clone() for t in tensors))
    made = outputs(got)
    for a, b in zip(made, outputs(want), strict=True):
        torch.testing.assert_close(a, b.detach())
    grads = [torch.randn_like(t) for t in made]
    wanted = torch.autograd.grad(outputs(want), leaves, grads)
    found = [g for g in backward(*grads) if g is not None]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
