"""RoPE as Llama 4 writes it: neighbouring columns are complex numbers, multiplied by those of a table.

The backward multiplies by their conjugates: ``sign`` -1.

Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding (2021).
"""

import triton
import triton.language as tl

from csrc_triton.rope.rotate import (
    ALIGNED,
    FORM,
    ROWS_OF_BOTH,
    TENSORS,
    Rows,
    block_of,
    elements,
    rotate_complex,
)

DECLARATION = {
    "op": "rope_llama4",
    "kernels": {
        "rope_llama4": {
            "arguments": {
                **TENSORS,
                "TABLE": "*fp32",
                **ROWS_OF_BOTH,
                "table_stride": "i64",
                "row_bytes": "i32",
                "sign": "fp32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": [*ALIGNED, "TABLE", "table_stride", "row_bytes"],
            "forms": {"rows": {"function": "rope_llama4", **FORM}},
        }
    },
}


@triton.jit
def rope_llama4(
    Q_OUT, K_OUT, Q, K, TABLE,
    q_rows, q_mid, q_mid_inverse, q_mid_shift, q_fast, q_fast_inverse, q_fast_shift,
    q_out_slow_stride, q_out_mid_stride, q_out_fast_stride, q_slow_stride, q_mid_stride, q_fast_stride,
    k_rows, k_mid, k_mid_inverse, k_mid_shift, k_fast, k_fast_inverse, k_fast_shift,
    k_out_slow_stride, k_out_mid_stride, k_out_fast_stride, k_slow_stride, k_mid_stride, k_fast_stride,
    q_programs, index_slow, index_mid, index_fast,
    table_stride, row_bytes, sign,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    q = Rows(
        Q_OUT, Q, q_rows, (q_mid, q_mid_inverse, q_mid_shift), (q_fast, q_fast_inverse, q_fast_shift),
        (q_out_slow_stride, q_out_mid_stride, q_out_fast_stride), (q_slow_stride, q_mid_stride, q_fast_stride),
    )  # fmt: skip
    k = Rows(
        K_OUT, K, k_rows, (k_mid, k_mid_inverse, k_mid_shift), (k_fast, k_fast_inverse, k_fast_shift),
        (k_out_slow_stride, k_out_mid_stride, k_out_fast_stride), (k_slow_stride, k_mid_stride, k_fast_stride),
    )  # fmt: skip
    b = block_of(q, k, q_programs, index_slow, index_mid, index_fast, ROWS)
    table_at = elements(b.index.to(tl.int64) * table_stride, TABLE)
    width = elements(row_bytes, b.x)
    if BLOCKS:
        for block in tl.static_range(BLOCKS):
            rotate_complex(b, TABLE, table_at, width, sign, block * BLOCK, ROWS, BLOCK)
    else:
        for first in range(0, width, BLOCK):
            rotate_complex(b, TABLE, table_at, width, sign, first, ROWS, BLOCK)
