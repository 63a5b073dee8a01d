"""Continuous batching with ``attn_implementation="liger_aot"``: Transformers' ``generate_batch``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import liger_aot
from liger_aot.models import attention, paged
from tests.models.transformers_cases import tiny, transformers

PROMPTS = (5, 9, 17)
NEW = 8


def asked() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 110, (n,), generator=generator).tolist() for n in PROMPTS]


def answers(model: Any, **config: Any) -> list[list[int]]:
    if not next(model.parameters()).is_cuda:
        pytest.importorskip("psutil", reason="continuous batching on a CPU needs psutil: pip install psutil")
    options = transformers.GenerationConfig(
        max_new_tokens=NEW, do_sample=False, eos_token_id=119, pad_token_id=0
    )
    given = {"num_blocks": 16, "block_size": 16, "max_batch_tokens": 64} | config
    batching = transformers.ContinuousBatchingConfig(**given)
    found = model.generate_batch(
        asked(), generation_config=options, continuous_batching_config=batching, progress_bar=False
    )
    return [output.generated_tokens for output in found.values()]


def one_by_one(name: str) -> list[list[int]]:
    model = tiny(name, attn_implementation="eager", eos_token_id=119).eval()
    options = {"max_new_tokens": NEW, "do_sample": False}
    return [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in asked()]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("llama", "varlen"),
        ("llama", "block table"),  # Transformers has none where a layer has a window
        *(pytest.param(name, "varlen", marks=SLOW) for name in ("mistral", "gemma2", "gpt_oss")),
    ],
)
def test_as_one_by_one(name: str, steps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in parts too: of 24 tokens that a batch may have. Block tables are for GPUs alone: here their steps run
    the references."""
    from transformers.generation.continuous_batching import initialization

    calls = {"varlen": 0, "decoding": 0}
    ops = attention.Ops.installed()

    def counted(which: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[which] += 1
            return getattr(ops, which)(*args, **kwargs)

        return call

    liger_aot.register_attention()
    transformers.AttentionInterface.register(
        paged.PAGED, paged.paged_attention_by(counted("varlen"), counted("decoding"))
    )
    more: dict[str, Any] = {"max_batch_tokens": 24}
    if steps == "block table":
        monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *_: None)
        more["max_blocks_per_request"] = 4
    model = tiny(name, eos_token_id=119).eval()
    model.set_attn_implementation(attention.NAME)
    try:
        assert answers(model, **more) == one_by_one(name)
    finally:
        liger_aot.register_attention()
    assert calls["varlen"] and bool(calls["decoding"]) == (steps == "block table")
    assert model.config._attn_implementation == attention.NAME


class Cache:
    """What the step with a block table reads of Transformers' cache: two layers, one of them within a window."""

    block_size = 16
    layer_index_to_group_indices = ((0, 0), (1, 0))
    sliding_windows = (1, 8)

    def __init__(self) -> None:
        shape = (5 * 16, 2, 16)  # the last page is nobody's
        self.key_cache, self.value_cache = [torch.randn(shape)], [torch.randn(shape)]


def test_a_batch_that_is_filled_up() -> None:
    """Sequences without keys, as a CUDA graph's batch has them, write to the last page alone."""
    torch.manual_seed(0)
    liger_aot.register_attention()
    forward = transformers.AttentionInterface._global_mapping[paged.PAGED]
    cache = Cache()
    before = [t.clone() for t in (cache.key_cache[0], cache.value_cache[0])]
    q, k, v = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16)
    starts = torch.tensor([0, 18, 18, 18], dtype=torch.int32)
    tables = torch.tensor([[[2, 0], [-1, -1], [-1, -1]]] * 2, dtype=torch.int32)
    for index in range(2):
        module = type("Layer", (), {"layer_idx": index})
        o, _ = forward(
            module, q, k, v, None, cache=cache, cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_seqlen_q=1,
            max_seqlen_k=1, read_index=[], write_index=[], block_table=tables,
        )  # fmt: skip
        keys, values = (torch.cat((t[32:48], t[:1], new[0, :, :1].transpose(0, 1))) for t, new in
                        zip(before, (k, v), strict=True))  # fmt: skip
        if index:
            keys, values = keys[-8:], values[-8:]
        want = torch.nn.functional.scaled_dot_product_attention(
            q[:, :, :1], *(t.transpose(0, 1)[None] for t in (keys, values)), enable_gqa=True
        )
        torch.testing.assert_close(o[0, 0], want[0, :, 0])
        assert not o[0, 1:].any()
    for t, old, new in zip((cache.key_cache[0], cache.value_cache[0]), before, (k, v), strict=True):
        assert torch.equal(t[1], new[0, :, 0])
        changed = (t != old).flatten(1).any(1).nonzero().flatten().tolist()
        assert changed[0] == 1 and all(at >= 64 for at in changed[1:])


def test_a_layer_that_comes_again_is_of_another_step() -> None:
    """Where tensors of a step are written over, as a CUDA graph's are."""
    table = torch.tensor([[[0, 1]]], dtype=torch.int32)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    given = (0, 16, 64)
    first = [paged._step(starts, table, given[0], layer, *given[1:]) for layer in (0, 1)]
    assert first[0] is first[1] and first[0][2].tolist() == [2]
    starts[1], table[0, 0, 1] = 18, 2
    again = paged._step(starts, table, given[0], 0, *given[1:])
    assert again[0].tolist() == [18] and again[2].tolist() == [33]


def test_other_names_are_as_before() -> None:
    from transformers.generation.continuous_batching import initialization

    liger_aot.register_attention()
    liger_aot.register_attention()  # wraps once
    asks = initialization.is_flash_attention_requested
    assert asks(requested_attention_implementation=attention.NAME)
    assert asks(requested_attention_implementation="flash_attention_2")
    assert not asks(requested_attention_implementation="sdpa")
    assert not hasattr(asks.__wrapped__, "__wrapped__")
    assert all(map(callable, initialization.lazy_import_paged_flash_attention(paged.PAGED)))


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_on_a_gpu(graphs: bool) -> None:
    """Block tables and CUDA graphs: each token is one that float32 finds as good as the best, but for rounding."""
    sizes = {"hidden_size": 256, "head_dim": 64, "eos_token_id": 119}
    exact = tiny("llama", attn_implementation="eager", **sizes).cuda().eval()
    model = copy.deepcopy(exact).bfloat16()
    liger_aot.register_attention()
    model.set_attn_implementation(attention.NAME)
    found = answers(model, use_cuda_graph=graphs, max_blocks_per_request=4)
    assert all(found)
    for prompt, text in zip(asked(), found, strict=True):
        ids = torch.tensor([prompt + text], device="cuda")
        with torch.no_grad():
            logits = exact(ids).logits[0, len(prompt) - 1 : -1]
        taken = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        assert ((logits.amax(1) - taken) / logits.std(1)).max() < 0.1
