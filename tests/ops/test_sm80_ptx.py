"""The PTX of sm80's attention, decoding and 8-bit results on the GPU that is here. The other ops' runs through their
own tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from liger_aot.ops.attention.flash_attention import FlashAttention
from liger_aot.ops.attention.flash_attention_paged import FlashAttentionPaged
from liger_aot.ops.attention.flash_attention_varlen import FlashAttentionVarlen
from liger_aot.ops.decoding.flash_decoding import FlashDecoding
from liger_aot.ops.op import Op
from liger_aot.ops.quantization._codes import INT8
from liger_aot.ops.registry import module
from tests.conftest import built_pack
from tests.harness.op_gpu_tests import SM80_PTX, lowered_from_ptx
from tests.ops.attention import attention_cases, attention_gradients, paged_cases, varlen_cases
from tests.ops.decoding import decoding_cases
from tests.ops.quantization import quantization_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not SM80_PTX, reason="LIGER_AOT_SM80_PTX names no folder of PTX"),
    pytest.mark.usefixtures("poisoned"),
]
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
    **{
        name: (module(name).OP, quantization_cases.check, tuple(quantization_cases.small(name, INT8)))
        for name in quantization_cases.OPS
    },
}


@pytest.mark.parametrize(
    ("run", "seed"), [(run, i) for run, (*_, cases) in RUNS.items() for i in range(len(cases))]
)
def test_cases(run: str, seed: int) -> None:
    op_class, check, cases = RUNS[run]
    pack = built_pack("sm80")
    check(lowered_from_ptx(op_class, pack), cases[seed], dict(pack.tolerance), seed=seed, device="cuda")
