"""The PTX of another architecture's attention, decoding, caches, sampling and 8-bit results on the GPU that is here.
The other ops run through their own tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from liger_aot.ops.attention.flash_attention import FlashAttention
from liger_aot.ops.attention.flash_attention_paged import FlashAttentionPaged
from liger_aot.ops.attention.flash_attention_varlen import FlashAttentionVarlen
from liger_aot.ops.decoding.flash_decoding import FlashDecoding
from liger_aot.ops.op import Op
from liger_aot.ops.quantization._codes import E4M3, INT8
from liger_aot.ops.registry import module
from liger_aot_build.profile import read_profile
from tests.conftest import built_pack
from tests.harness.op_gpu_tests import PTX_ARCH, lowered_from_ptx, needs_ptx
from tests.ops.attention import attention_cases, attention_gradients, paged_cases, varlen_cases
from tests.ops.cache import cache_cases
from tests.ops.decoding import decoding_cases, merge_cases
from tests.ops.quantization import quantization_cases
from tests.ops.sampling import sampling_cases

pytestmark = [
    pytest.mark.gpu,
    needs_ptx,
    pytest.mark.usefixtures("poisoned"),
]
OUT = E4M3 if PTX_ARCH and read_profile(PTX_ARCH).arch.fp8 == "fp8e4nv" else INT8


def check_sampling(
    op: Any, problem: sampling_cases.Problem, _: Mapping[str, float], *, seed: int, device: str
) -> None:
    """To the bit, whatever an architecture's tolerance."""
    sampling_cases.check(op, problem, seed=seed, device=device)


RUNS: Mapping[str, tuple[type[Op], Callable[..., None], tuple[Any, ...]]] = {
    "attention": (FlashAttention, attention_cases.check, attention_cases.SMALL),
    "gradients": (
        FlashAttention,
        attention_gradients.check_gradients,
        tuple(attention_gradients.SMALL_GRADIENTS),
    ),
    "packed": (FlashAttentionVarlen, varlen_cases.check, varlen_cases.SMALL),
    "paged": (FlashAttentionPaged, paged_cases.check, paged_cases.SMALL),
    "decoding": (
        FlashDecoding,
        decoding_cases.check,
        (*decoding_cases.SMALL, *decoding_cases.MORE_BINARIES),
    ),
    "merging": (module("merge_attention_states").OP, merge_cases.check, merge_cases.SMALL),
    **{
        name: (module(name).OP, cache_cases.check, tuple(cache_cases.small(name))) for name in cache_cases.OPS
    },
    **{
        name: (module(name).OP, quantization_cases.check, tuple(quantization_cases.small(name, OUT)))
        for name in quantization_cases.OPS
    },
    **{
        name: (module(name).OP, check_sampling, tuple(sampling_cases.small(name)))
        for name in sampling_cases.OPS
    },
}


@pytest.mark.parametrize(
    ("run", "seed"), [(run, i) for run, (*_, cases) in RUNS.items() for i in range(len(cases))]
)
def test_cases(run: str, seed: int) -> None:
    op_class, check, cases = RUNS[run]
    allowed = dict(built_pack(PTX_ARCH).tolerance)
    check(lowered_from_ptx(op_class), cases[seed], allowed, seed=seed, device="cuda")
