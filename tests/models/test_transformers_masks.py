"""``attn_implementation="liger_aot"`` with padded and packed rows, against Transformers' own masks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import liger_aot
from liger_aot.errors import ArgumentError
from liger_aot.models import attention, masks
from tests.models.transformers_cases import tiny, transformers

# Plain; a sliding window of 8; a soft cap and windows; sinks and windows; q and k wider than v.
NAMES = ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3"]
FEW_NAMES = ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])]


@pytest.fixture(autouse=True)
def registered() -> None:
    liger_aot.register_attention()


def prompts(rows: int = 3, tokens: int = 17) -> Tensor:
    return torch.randint(3, 110, (rows, tokens), generator=torch.Generator().manual_seed(0))


def padding(side: str, tokens: int = 17) -> Tensor:
    """Of three rows: a few tokens, none, all but one; or, with gaps, some within the second."""
    mask = torch.ones(3, tokens, dtype=torch.long)
    mask[0, :5] = 0
    mask[2, :-1] = 0
    if side == "gaps":
        mask[1, 4:7] = 0
    return mask.flip(1) if side == "right" else mask


def labels_of(ids: Tensor, mask: Tensor) -> Tensor:
    """Of real tokens behind real ones: what padding predicts has no meaning, and no two implementations agree on it."""
    known = mask.bool()
    known[:, 1:] &= mask[:, :-1].bool()
    return ids.masked_fill(~known, -100)


def gradients(model: Any, loss: Tensor) -> list[Tensor]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [g for g in found if g is not None]


def both(name: str, **config: Any) -> tuple[Any, Any]:
    """A model with eager attention, and itself with ours."""
    models = tiny(name, attn_implementation="eager", **config), tiny(name, **config)
    models[1].set_attn_implementation(attention.NAME)
    return models[0].eval(), models[1].eval()


def assert_rounding(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_padded_rows(name: str, side: str) -> None:
    mask, ids = padding(side), prompts()
    labels = labels_of(ids, mask)
    found = []
    for model in both(name):
        out = model(ids, attention_mask=mask, labels=labels)
        assert out.logits.isfinite().all()
        found.append((out.logits[mask.bool()], gradients(model, out.loss)))
    want, got = found
    assert_rounding(got[0], want[0])
    for g, w in zip(got[1], want[1], strict=True):
        assert_rounding(g, w)


def test_rows_with_gaps() -> None:
    """A second turn behind a padded one. A window would count the padding between them."""
    mask, ids = padding("gaps"), prompts()
    want, got = (model(ids, attention_mask=mask).logits[mask.bool()] for model in both("llama"))
    assert_rounding(got, want)
    with pytest.raises(ArgumentError, match="a sliding window over tokens with padding between them"):
        both("mistral")[1](ids, attention_mask=mask)


def test_an_encoder_sees_all_that_is_not_padding() -> None:
    config = transformers.BertConfig(
        vocab_size=120, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config).eval()
    ids = prompts()
    for side in ("left", "right", "gaps"):
        mask = padding(side)
        found = []
        for name in ("eager", attention.NAME):
            model.set_attn_implementation(name)
            found.append(model(ids, attention_mask=mask).last_hidden_state)
        assert_rounding(found[1], found[0])


def test_attention_to_another_models_tokens() -> None:
    config = transformers.BartConfig(
        vocab_size=120, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(config).eval()
    ids, mask = prompts(), padding("right")
    for others in (prompts(3, 6), prompts(3, 1)):
        found = []
        for name in ("eager", attention.NAME):
            model.set_attn_implementation(name)
            found.append(model(input_ids=ids, attention_mask=mask, decoder_input_ids=others).logits)
        assert_rounding(found[1], found[0])


@pytest.mark.parametrize("cache", ["dynamic", "static", "prompt in parts"])
@pytest.mark.parametrize("name", FEW_NAMES)
def test_padded_prompts_generate(name: str, cache: str) -> None:
    """Past windows, where keys of the cache move up."""
    ids = prompts(3, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[2, 0] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": mask}
    eager, ours = both(name)
    want = eager.generate(ids, **options)
    if cache != "dynamic":
        options |= {"cache_implementation": "static", "disable_compile": True}
    if cache == "prompt in parts":
        options["prefill_chunk_size"] = 4
    assert torch.equal(ours.generate(ids, **options), want)


LENGTHS = (5, 1, 11, 7)


@pytest.mark.parametrize("by", ["positions", "cu_seq_lens"])
@pytest.mark.parametrize("name", FEW_NAMES)
def test_packed_rows(name: str, by: str) -> None:
    """As each sequence by itself, gradients too."""
    ids = prompts(1, sum(LENGTHS))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    eager, ours = both(name)
    want = torch.cat([eager(part).logits for part in ids.split(LENGTHS, 1)], 1)
    given: dict[str, Any] = {}
    if by == "cu_seq_lens":  # as TRL's and Transformers' collators make them
        starts = torch.tensor([0, 5, 6, 17, 24], dtype=torch.int32)
        given = {
            "cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 11, "max_length_k": 11,
        }  # fmt: skip
    got = ours(ids, position_ids=positions, use_cache=False, **given).logits
    assert_rounding(got, want)
    directions = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    pairs = zip(
        gradients(ours, (got * directions).sum()), gradients(eager, (want * directions).sum()), strict=True
    )
    for g, w in pairs:
        torch.testing.assert_close(g, w, rtol=1e-4, atol=2e-4)  # sums over 24 tokens and 120 columns


@pytest.mark.parametrize("kwargs", [False, True])
def test_transformers_collator(kwargs: bool) -> None:
    """DataCollatorWithFlattening: a step's loss is that of the padded batch."""
    texts = [part[0].tolist() for part in prompts(1, sum(LENGTHS)).split(LENGTHS, 1)]
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=kwargs)
    flat = collate([{"input_ids": text} for text in texts])
    assert ("cu_seq_lens_q" in flat) == kwargs and "attention_mask" not in flat
    ids, mask = torch.zeros(2, len(texts), max(LENGTHS), dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = torch.tensor(text), 1
    eager, ours = both("llama")
    want = eager(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    assert_rounding(ours(**flat, use_cache=False).loss, want)


def test_packed_rows_of_a_batch() -> None:
    ids = prompts(2, 12)
    positions = torch.stack([torch.cat([torch.arange(n), torch.arange(12 - n)]) for n in (5, 3)])
    eager, ours = both("llama")
    want = eager(ids, position_ids=positions, use_cache=False).logits
    assert_rounding(ours(ids, position_ids=positions, use_cache=False).logits, want)


def test_blocks_that_see_each_other_are_refused() -> None:
    model = tiny("gemma3_text")
    model.set_attn_implementation(attention.NAME)
    embeds = torch.zeros(1, 6, 64)
    blocks = torch.tensor([[-1, 0, 0, 0, -1, -1]])
    with pytest.raises(ArgumentError, match="blocks of tokens that see each other"):
        transformers.masking_utils.create_causal_mask(
            model.config, embeds, attention_mask=None, past_key_values=None, block_sequence_ids=blocks
        )
    with pytest.raises(ArgumentError, match="a mask of the model's own"):
        transformers.masking_utils.create_causal_mask(
            model.config, embeds, attention_mask=None, past_key_values=None,
            or_mask_function=lambda batch, head, q, k: k == 0,
        )  # fmt: skip


def test_chunks_are_refused_once_they_matter() -> None:
    eager, ours = both("llama4_text", attention_chunk_size=8)
    assert_rounding(ours(prompts(2, 8)).logits, eager(prompts(2, 8)).logits)
    with pytest.raises(ArgumentError, match="attention in chunks of 8 tokens to 9 keys"):
        ours(prompts(2, 9))


def test_models_without_flash_attention_are_refused() -> None:
    """DeepSeek V4 lets its queries see more keys than its mask knows of, T5 hands its attention a bias."""
    with pytest.raises(ArgumentError, match="DeepseekV4PreTrainedModel does not support flash attention"):
        both("deepseek_v4")[1](prompts())
    config = transformers.T5Config(vocab_size=120, d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2)
    model = transformers.T5EncoderModel._from_config(config, attn_implementation=attention.NAME)
    with pytest.raises(ArgumentError, match="T5PreTrainedModel does not support flash attention"):
        model(input_ids=prompts())


def test_compiled_with_a_mask_in_one_graph() -> None:
    """Nothing looks at a mask while a model is traced: its rows are put in order instead."""
    model, ids = both("llama")[1], prompts()
    mask = padding("gaps")
    labels = labels_of(ids, mask)
    given = {"input_ids": ids, "attention_mask": mask, "labels": labels, "use_cache": False}
    plain = model(**given)
    want = gradients(model, plain.loss)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(**given)
    assert_rounding(compiled.loss, plain.loss)
    for g, w in zip(gradients(model, compiled.loss), want, strict=True):
        assert_rounding(g, w)


@pytest.mark.slow
def test_compiled_without_one() -> None:
    """Whether positions start again is looked at outside of the graph."""
    model, ids = both("llama")[1], prompts(1, 12)
    packed = torch.cat((torch.arange(5), torch.arange(7)))[None]
    compiled = torch.compile(model, backend="aot_eager")
    for positions in (None, packed):
        given = {"input_ids": ids, "position_ids": positions, "use_cache": False}
        assert_rounding(compiled(**given).logits, model(**given).logits)


def test_float32_from_a_norm_is_computed_in_the_linear_layers_dtype() -> None:
    model = tiny("llama").bfloat16().eval()
    model.set_attn_implementation(attention.NAME)
    layer = model.model.layers[0].self_attn
    q, k = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16)
    half, _ = attention.attention(attention.Ops.installed(), layer, *(t.bfloat16() for t in (q, k, k)), None)
    wide, _ = attention.attention(attention.Ops.installed(), layer, q, k, k, None)
    assert wide.dtype == torch.bfloat16 and torch.equal(wide, half)
    with torch.autocast("cpu", torch.float16):
        other, _ = attention.attention(attention.Ops.installed(), layer, q, k, k, None)
    assert other.dtype == torch.float16


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).detach().square().mean().sqrt())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ["left", "right", "gaps", "packed"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_on_a_gpu(name: str, rows: str) -> None:
    """In bfloat16: logits and gradients are as near to float32 as eager attention's, within what two roundings of
    neighbouring sums differ."""
    if (name, rows) == ("mistral", "gaps") or (name, rows) == ("gemma2", "gaps"):
        with pytest.raises(ArgumentError, match="a sliding window over tokens with padding"):
            both(name)[1](prompts(), attention_mask=padding("gaps"))
        return
    sizes = {"hidden_size": 256, "head_dim": 64, "max_position_embeddings": 1024}
    exact = tiny(name, attn_implementation="eager", **sizes).cuda().eval()
    models = [exact, copy.deepcopy(exact).bfloat16(), copy.deepcopy(exact).bfloat16()]
    models[2].set_attn_implementation(attention.NAME)
    lengths = (300, 1, 129, 200)
    found = []
    for model in models:
        if rows == "packed":
            ids = prompts(1, sum(lengths)).cuda()
            positions = torch.cat([torch.arange(n) for n in lengths])[None].cuda()
            logits = (
                model(ids, position_ids=positions, use_cache=False).logits
                if model is models[2]
                else torch.cat([model(part).logits for part in ids.split(lengths, 1)], 1)
            )
        else:
            ids, mask = prompts(3, 630).cuda(), padding(rows, 630).cuda()
            mask[0] &= mask[0].flip(0) if rows == "gaps" else 1
            logits = model(ids, attention_mask=mask).logits[mask.bool()]
        directions = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).cuda()
        found.append([logits, *gradients(model, (logits * directions).sum())])
    for want, plain, ours in zip(*found, strict=True):
        assert ours.isfinite().all()
        if want.numel() >= 1000:  # of fewer numbers the distances are random themselves
            assert distance(ours, want) <= 1.5 * distance(plain, want)


def test_masks_are_told_apart() -> None:
    starts = torch.tensor([0, 3, 5])
    for longest in (None, 3):
        sequences = masks.Sequences(starts, starts, longest)
        found = masks.Sequences.of_mask(sequences.as_mask())
        assert found is not None and found.max_seqlen == longest and found.cu_seqlens_q.tolist() == [0, 3, 5]
    real = torch.tensor([[False, True, True]])
    order = masks.Order.of(real)
    assert order.tokens.tolist() == [[1, 2, 0]] and order.real.tolist() == [2]
    orders = masks.Orders(order, order)
    assert masks.Orders.of_mask(orders.as_mask(), 3, 3) is not None
    assert masks.Sequences.of_mask(orders.as_mask()) is None
    assert masks.Orders.of_mask(torch.zeros(1, 1, 3, 8, dtype=torch.int64), 3, 3) is None
