"""What the rotary ops share: which rows a program rotates, and the rotation of a block of columns.

A row is one head of one token. Rows are counted through three dimensions (batch, sequence and heads) in the order in
which they lie in memory, slow, mid and fast: neighbouring programs touch neighbouring memory whatever the layout, and
no lane idles whatever the number of heads. The rows of q come first, those of k follow. Strides and numbers of columns
come in bytes: 16 bytes are what a vector needs, whatever the dtype.

A pair (a, b) becomes (a cos - b sin, b cos + a sin), in fp32. Its gradient is the same with the sine negated.
"""

import triton
import triton.language as tl

# What the declarations share: the rows of q and k as three nested loops, and the rows of the tables.
TENSORS = {"Q_OUT": "*dtype", "K_OUT": "*dtype", "Q": "*dtype", "K": "*dtype"}
Q_STRIDES = {
    "q_out_slow_stride": "i64",
    "q_out_mid_stride": "i64",
    "q_out_fast_stride": "i64",
    "q_slow_stride": "i64",
    "q_mid_stride": "i64",
    "q_fast_stride": "i64",
}
K_STRIDES = {
    "k_out_slow_stride": "i64",
    "k_out_mid_stride": "i64",
    "k_out_fast_stride": "i64",
    "k_slow_stride": "i64",
    "k_mid_stride": "i64",
    "k_fast_stride": "i64",
}
ROWS_OF_BOTH = {
    "q_rows": "i32",
    "q_mid": "i32",
    "q_mid_inverse": "i64",
    "q_mid_shift": "i32",
    "q_fast": "i32",
    "q_fast_inverse": "i64",
    "q_fast_shift": "i32",
    **Q_STRIDES,
    "k_rows": "i32",
    "k_mid": "i32",
    "k_mid_inverse": "i64",
    "k_mid_shift": "i32",
    "k_fast": "i32",
    "k_fast_inverse": "i64",
    "k_fast_shift": "i32",
    **K_STRIDES,
    "q_programs": "i32",
    "index_slow": "i32",
    "index_mid": "i32",
    "index_fast": "i32",
}
ALIGNED = [*TENSORS, *Q_STRIDES, *K_STRIDES]
# A cosine and a sine a pair: all but rope_llama4's.
TABLES = {"COS": "*table", "SIN": "*table"}
TABLE_STRIDES = {"cos_stride": "i64", "sin_stride": "i64"}
COLUMNS = {"half_bytes": "i32", "end_bytes": "i32"}
AXES = {"dtype": ["bf16", "fp16", "fp32"], "table": ["dtype", "fp32"]}
FORM = {
    "constants": ["ROWS", "BLOCK", "BLOCKS"],
    "defaults": {"BLOCKS": 0},
    "covers": "BLOCK * BLOCKS",
    "any_length": "BLOCKS",
}


@triton.jit
def divide(number, inverse, shift):
    """number // divisor for 0 <= number < 2^31, by the divisor's rounded-up inverse times 2^shift: a division takes
    three times as many instructions, and a program rotates little.

    Granlund and Montgomery, Division by Invariant Integers using Multiplication (1994).
    """
    return ((number.to(tl.int64) * inverse) >> shift).to(tl.int32)


@triton.jit
def elements(n_bytes, POINTER):
    """Bytes in elements of what a pointer points to."""
    return n_bytes // (POINTER.dtype.element_ty.primitive_bitwidth // 8)


@triton.jit
def place(slow, mid, fast, slow_stride, mid_stride, fast_stride):
    """Bytes from a tensor's start to each row."""
    return slow.to(tl.int64) * slow_stride + mid.to(tl.int64) * mid_stride + fast.to(tl.int64) * fast_stride


@triton.jit
def rows_of_program(
    Q_OUT, K_OUT, Q, K,
    q_rows, q_mid, q_mid_inverse, q_mid_shift, q_fast, q_fast_inverse, q_fast_shift,
    q_out_slow_stride, q_out_mid_stride, q_out_fast_stride, q_slow_stride, q_mid_stride, q_fast_stride,
    k_rows, k_mid, k_mid_inverse, k_mid_shift, k_fast, k_fast_inverse, k_fast_shift,
    k_out_slow_stride, k_out_mid_stride, k_out_fast_stride, k_slow_stride, k_mid_stride, k_fast_stride,
    q_programs, index_slow, index_mid, index_fast,
    ROWS: tl.constexpr,
):  # fmt: skip
    """This program's rows: (out, x, elements from there to each row of out and of x, whether there is such a row,
    index of each row's token)."""
    program = tl.program_id(0)
    is_q = program < q_programs
    # Scalars are chosen, not branches taken: a pointer out of a branch loses what is known of its alignment.
    out = tl.where(is_q, Q_OUT, K_OUT)
    x = tl.where(is_q, Q, K)
    row = tl.where(is_q, program, program - q_programs) * ROWS + tl.arange(0, ROWS)
    rest = divide(
        row, tl.where(is_q, q_fast_inverse, k_fast_inverse), tl.where(is_q, q_fast_shift, k_fast_shift)
    )
    slow = divide(
        rest, tl.where(is_q, q_mid_inverse, k_mid_inverse), tl.where(is_q, q_mid_shift, k_mid_shift)
    )
    mid = rest - slow * tl.where(is_q, q_mid, k_mid)
    fast = row - rest * tl.where(is_q, q_fast, k_fast)
    out_at = place(
        slow, mid, fast,
        tl.where(is_q, q_out_slow_stride, k_out_slow_stride),
        tl.where(is_q, q_out_mid_stride, k_out_mid_stride),
        tl.where(is_q, q_out_fast_stride, k_out_fast_stride),
    )  # fmt: skip
    x_at = place(
        slow, mid, fast,
        tl.where(is_q, q_slow_stride, k_slow_stride),
        tl.where(is_q, q_mid_stride, k_mid_stride),
        tl.where(is_q, q_fast_stride, k_fast_stride),
    )  # fmt: skip
    index = slow * index_slow + mid * index_mid + fast * index_fast
    return out, x, elements(out_at, out), elements(x_at, x), row < tl.where(is_q, q_rows, k_rows), index


@triton.jit
def rotate_halves(
    OUT, X, COS, SIN, out_at, x_at, cos_at, sin_at, half, sign, inside, known, first,
    cos_plane, sin_plane, section_1, section_2,
    BLOCK: tl.constexpr, SECTIONS: tl.constexpr,
):  # fmt: skip
    """Columns from ``first`` on of the first half with those of the second.

    Args:
        inside: whether there is such a row.
        known: whether the tables have it, too; if not, it becomes NaN.
        section_1, section_2: columns from which on the tables' second and third planes count, with SECTIONS.
    """
    dtype: tl.constexpr = OUT.dtype.element_ty
    cols = first + tl.arange(0, BLOCK)
    mask = inside[:, None] & (cols < half)[None, :]
    table_mask = known[:, None] & (cols < half)[None, :]
    cos_cols = cols
    sin_cols = cols
    if SECTIONS:
        plane = tl.where(cols < section_1, 0, tl.where(cols < section_2, 1, 2)).to(tl.int64)
        cos_cols = cols + plane * cos_plane
        sin_cols = cols + plane * sin_plane
    a = tl.load(X + x_at[:, None] + cols[None, :], mask=mask).to(tl.float32)
    b = tl.load(X + (x_at + half)[:, None] + cols[None, :], mask=mask).to(tl.float32)
    cos = tl.load(COS + cos_at[:, None] + cos_cols[None, :], mask=table_mask, other=float("nan"))
    sin = tl.load(SIN + sin_at[:, None] + sin_cols[None, :], mask=table_mask, other=float("nan"))
    cos = cos.to(tl.float32)
    sin = sin.to(tl.float32) * sign
    tl.store(OUT + out_at[:, None] + cols[None, :], (a * cos - b * sin).to(dtype), mask=mask)
    tl.store(OUT + (out_at + half)[:, None] + cols[None, :], (b * cos + a * sin).to(dtype), mask=mask)


@triton.jit
def rotate_pairs(
    OUT, X, COS, SIN, out_at, x_at, cos_at, sin_at, width, sign, inside, known, first,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Columns from ``first`` on, each even one with the odd one after it."""
    half_cols = first // 2 + tl.arange(0, BLOCK // 2)
    table_mask = known[:, None] & (half_cols < width // 2)[None, :]
    cos = tl.load(COS + cos_at[:, None] + half_cols[None, :], mask=table_mask, other=float("nan"))
    sin = tl.load(SIN + sin_at[:, None] + half_cols[None, :], mask=table_mask, other=float("nan"))
    _rotate_pairs(OUT, X, cos, sin, out_at, x_at, width, sign, inside, first, ROWS, BLOCK)


@triton.jit
def rotate_complex(
    OUT, X, TABLE, out_at, x_at, table_at, width, sign, inside, first,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As ``rotate_pairs``, with a table whose cosines and sines lie as the pairs do."""
    cols = first + tl.arange(0, BLOCK)
    mask = inside[:, None] & (cols < width)[None, :]
    table = tl.load(TABLE + table_at[:, None] + cols[None, :], mask=mask)
    cos, sin = tl.split(table.reshape(ROWS, BLOCK // 2, 2))
    _rotate_pairs(OUT, X, cos, sin, out_at, x_at, width, sign, inside, first, ROWS, BLOCK)


@triton.jit
def _rotate_pairs(
    OUT, X, cos, sin, out_at, x_at, width, sign, inside, first, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    dtype: tl.constexpr = OUT.dtype.element_ty
    cols = first + tl.arange(0, BLOCK)
    mask = inside[:, None] & (cols < width)[None, :]
    a, b = tl.split(tl.load(X + x_at[:, None] + cols[None, :], mask=mask).reshape(ROWS, BLOCK // 2, 2))
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    cos = cos.to(tl.float32)
    sin = sin.to(tl.float32) * sign
    y = tl.join((a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)).reshape(ROWS, BLOCK)
    tl.store(OUT + out_at[:, None] + cols[None, :], y, mask=mask)


@triton.jit
def copy_columns(OUT, X, out_at, x_at, first, end, inside, BLOCK: tl.constexpr):
    """Columns from ``first`` to ``end``, which are not rotated, as they are."""
    for start in range(first, end, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = inside[:, None] & (cols < end)[None, :]
        x = tl.load(X + x_at[:, None] + cols[None, :], mask=mask)
        tl.store(OUT + out_at[:, None] + cols[None, :], x, mask=mask)
