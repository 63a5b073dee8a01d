"""``attn_implementation="liger_aot"``: what reaches the op, by a stand-in for it, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError, UnknownOp
from liger_aot.models import attention
from tests.models.transformers_cases import assert_close, batch, step, tiny, transformers


class StandIn:
    """The ops by their references, which keep what they were given."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []  # of flash_attention
        self.sequences: list[tuple[list[int], list[int]]] = []  # of flash_attention_varlen: cu_seqlens
        self.decoded: list[tuple[int, list[int]]] = []  # tokens, and the lengths of their sequences

    def register(self) -> None:
        ops = attention.Ops(self.attend, self.attend_to_sequences, self.decode)
        transformers.AttentionInterface.register(attention.NAME, attention.attention_by(ops))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Any:
        self.calls.append({"shape": tuple(q.shape), **settings})
        assert settings["layout"] == "bshd"
        return liger_aot.load("flash_attention")(q, k, v, **settings)

    def attend_to_sequences(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts_q: Tensor,
        starts_k: Tensor,
        *others: int,
        **settings: Any,
    ) -> Any:
        self.sequences.append((starts_q.tolist(), starts_k.tolist()))
        varlen = liger_aot.load("flash_attention_varlen")
        return varlen(q, k, v, starts_q, starts_k, *others, **settings)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, *, cache_seqlens: Tensor, **settings: Any) -> Any:
        self.decoded.append((q.shape[1], cache_seqlens.tolist()))
        return liger_aot.load("flash_decoding")(q, k, v, cache_seqlens=cache_seqlens, **settings)


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    op = StandIn()
    liger_aot.register_attention()
    op.register()
    yield op
    liger_aot.register_attention()


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "qwen3", "qwen2_vl"])
def test_as_eager(name: str, stand_in: StandIn) -> None:
    inputs = batch(name)
    want = step(tiny(name, attn_implementation="eager"), inputs)
    model = tiny(name)
    model.set_attn_implementation(attention.NAME)
    assert_close(step(model, inputs), want)
    # In a step a layer attends twice, without labels and with them; a vision tower once more each time and image.
    assert len(stand_in.calls) == 2 * (4 if name == "qwen2_vl" else 2)
    text = [call for call in stand_in.calls if call["causal"]]
    assert len(text) == 4 and all(call["shape"][2] == 4 for call in text)  # heads third, as the op has them
    if name == "mistral":
        assert all(call["window"] == (7, None) for call in text)  # 8 keys, the query's own among them
    if name == "gemma2":
        assert {call["softcap"] for call in text} == {50.0} and len({call["window"] for call in text}) == 2


@pytest.mark.skipif("flash_attention" not in liger_aot.ops(), reason="this build has no flash_attention")
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_the_op_itself(name: str) -> None:
    """In bfloat16, as near to float32 as eager attention is."""
    model, ids = tiny(name, attn_implementation="eager").bfloat16().eval(), batch(name)["input_ids"]
    with torch.no_grad():
        exact = copy.deepcopy(model).float()(ids).logits
        plain = model(ids).logits
        liger_aot.register_attention()
        model.set_attn_implementation(attention.NAME)
        ours = model(ids).logits
    distances = [(t.float() - exact).square().mean().sqrt() for t in (ours, plain)]
    assert distances[0] <= 1.2 * distances[1]


def test_generates_with_a_growing_cache(stand_in: StandIn) -> None:
    prompt = batch("llama")["input_ids"][:, :6]
    options = {"max_new_tokens": 5, "do_sample": False}
    want = tiny("llama").eval().generate(prompt, **options)
    model = tiny("llama").eval()
    model.set_attn_implementation(attention.NAME)
    assert torch.equal(model.generate(prompt, **options), want)
    assert [call["shape"][1] for call in stand_in.calls] == [6, 6, 1, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_generates_with_a_static_cache(name: str, stand_in: StandIn) -> None:
    """Also beyond a window, where keys of the cache move up."""
    prompt = batch(name)["input_ids"][:, :6]
    options = {"max_new_tokens": 8, "do_sample": False}
    want = tiny(name).eval().generate(prompt, **options)
    model = tiny(name).eval()
    model.set_attn_implementation(attention.NAME)
    got = model.generate(prompt, cache_implementation="static", disable_compile=True, **options)
    assert torch.equal(got, want)
    assert {call["shape"][1] for call in stand_in.calls} <= {6, 1}
    # Two layers: the prompt by flash_attention, then two sequences with a key more each time.
    if name == "llama":
        assert [call["shape"][1] for call in stand_in.calls] == [6, 6]
        assert stand_in.decoded == [(1, [n, n]) for n in range(7, 14) for _ in range(2)]


def test_a_cache_that_is_reset_and_a_prompt_in_parts(stand_in: StandIn) -> None:
    model, ids = tiny("llama", attn_implementation="eager").eval(), batch("llama")["input_ids"]
    with torch.no_grad():
        want = model(ids).logits
        model.set_attn_implementation(attention.NAME)
        cache = transformers.StaticCache(config=model.config, max_cache_len=24)
        first = model(ids, past_key_values=cache).logits
        cache.reset()
        parts = [model(part, past_key_values=cache).logits for part in ids.split(6, 1)]
    torch.testing.assert_close(first, want)
    torch.testing.assert_close(torch.cat(parts, 1), want)
    assert stand_in.decoded == [(t, [n, n]) for t, n in ((6, 6), (6, 12), (5, 17)) for _ in range(2)]


def test_a_gradient_through_a_static_cache_is_refused() -> None:
    liger_aot.register_attention()
    model, ids = tiny("llama").train(), batch("llama")["input_ids"]
    model.set_attn_implementation(attention.NAME)
    cache = transformers.StaticCache(config=model.config, max_cache_len=24)
    with torch.no_grad():
        model(ids[:, :6], past_key_values=cache)
    with pytest.raises(ArgumentError, match="decoding has none"):
        model(ids[:, 6:], past_key_values=cache)


def test_apply_sets_it_and_restore_takes_it_back(stand_in: StandIn) -> None:
    model, inputs = tiny("llama"), batch("llama")
    plain = step(model, inputs)
    liger_aot.apply(model, attention=True)
    stand_in.register()  # the op itself is registered by apply
    assert model.config._attn_implementation == attention.NAME
    assert_close(step(model, inputs), plain)
    assert stand_in.calls
    liger_aot.restore(model)
    assert model.config._attn_implementation == "sdpa"


def test_what_needs_a_mask_is_refused() -> None:
    liger_aot.register_attention()
    model, ids = tiny("llama").eval(), batch("llama")["input_ids"]
    model.set_attn_implementation(attention.NAME)
    with pytest.raises(
        ArgumentError, match=r"attention_mask must be None or of \(batch, tokens\), got \(2, 1, 17, 17\)"
    ):
        model(ids, attention_mask=torch.zeros(2, 1, 17, 17))
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ArgumentError, match=r"dropout must be 0, got 0\.1"):
        model(ids)


def test_a_build_without_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "names", lambda: ())
    liger_aot.register_attention()
    model = tiny("llama")
    model.set_attn_implementation(attention.NAME)
    with pytest.raises(UnknownOp, match=r"needs the op flash_attention, which this liger-aot does not have"):
        model(batch("llama")["input_ids"])
    monkeypatch.undo()
    liger_aot.register_attention()


def test_the_interfaces_name_is_known_from_the_start() -> None:
    liger_aot.register_attention()
    model = tiny("llama", attn_implementation=attention.NAME)
    assert model.config._attn_implementation == attention.NAME
