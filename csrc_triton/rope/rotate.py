"""What the rotary ops share: which rows a CTA rotates, and the rotation of a block of columns.

A row is one head of one token. Rows are counted through three dimensions (batch, sequence and heads) in the order in
which they lie in memory, slow, mid and fast: neighbouring CTAs touch neighbouring memory whatever the layout, and no
lane idles whatever the number of heads. The rows of q come first, those of k follow. Strides and numbers of columns
come in bytes: 16 bytes are what a vector needs, whatever the dtype.

A pair (a, b) becomes (a cos - b sin, b cos + a sin), in fp32. Its gradient is the same with the sine negated.
"""

import triton
import triton.language as tl
from triton.language.core import _aggregate as aggregate

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


@aggregate
class Rows:
    """The rows of q or of k: the sizes of the two inner dimensions with their inverses (``divide``), and strides."""

    OUT: tl.tensor
    X: tl.tensor
    rows: tl.tensor
    mid: tl.tensor
    mid_inverse: tl.tensor
    mid_shift: tl.tensor
    fast: tl.tensor
    fast_inverse: tl.tensor
    fast_shift: tl.tensor
    out_slow_stride: tl.tensor
    out_mid_stride: tl.tensor
    out_fast_stride: tl.tensor
    slow_stride: tl.tensor
    mid_stride: tl.tensor
    fast_stride: tl.tensor

    @triton.constexpr_function
    def __init__(self, OUT, X, rows, mid, fast, out_strides, strides):
        self.OUT, self.X, self.rows = OUT, X, rows
        self.mid, self.mid_inverse, self.mid_shift = mid
        self.fast, self.fast_inverse, self.fast_shift = fast
        self.out_slow_stride, self.out_mid_stride, self.out_fast_stride = out_strides
        self.slow_stride, self.mid_stride, self.fast_stride = strides


@aggregate
class Block:
    """A CTA's rows."""

    out: tl.tensor
    x: tl.tensor
    out_at: tl.tensor  # elements from out to each row
    x_at: tl.tensor
    inside: tl.tensor  # whether there is such a row
    index: tl.tensor  # of each row's token

    @triton.constexpr_function
    def __init__(self, out, x, out_at, x_at, inside, index):
        self.out, self.x, self.out_at, self.x_at = out, x, out_at, x_at
        self.inside, self.index = inside, index


@triton.jit
def divide(number, inverse, shift):
    """number // divisor for 0 <= number < 2^31, by the divisor's rounded-up inverse times 2^shift: a division takes
    three times as many instructions, and a CTA rotates little.

    Granlund and Montgomery, Division by Invariant Integers using Multiplication (1994).
    """
    return ((tl.cast(number, tl.int64) * inverse) >> shift).to(tl.int32)


@triton.jit
def elements(n_bytes, POINTER):
    """Bytes in elements of what a pointer points to."""
    return n_bytes // (POINTER.dtype.element_ty.primitive_bitwidth // 8)


@triton.jit
def row_offsets(slow, mid, fast, slow_stride, mid_stride, fast_stride):
    """Bytes from a tensor's start to each row."""
    return slow.to(tl.int64) * slow_stride + mid.to(tl.int64) * mid_stride + fast.to(tl.int64) * fast_stride


@triton.jit
def block_of(q, k, q_programs, index_slow, index_mid, index_fast, ROWS: tl.constexpr):
    """This CTA's rows."""
    program = tl.program_id(0)
    is_q = program < q_programs
    # Scalars are chosen, not branches taken: a pointer out of a branch loses what is known of its alignment.
    out = tl.where(is_q, q.OUT, k.OUT)
    x = tl.where(is_q, q.X, k.X)
    row = tl.where(is_q, program, program - q_programs) * ROWS + tl.arange(0, ROWS)
    rest = divide(
        row, tl.where(is_q, q.fast_inverse, k.fast_inverse), tl.where(is_q, q.fast_shift, k.fast_shift)
    )
    slow = divide(
        rest, tl.where(is_q, q.mid_inverse, k.mid_inverse), tl.where(is_q, q.mid_shift, k.mid_shift)
    )
    mid = rest - slow * tl.where(is_q, q.mid, k.mid)
    fast = row - rest * tl.where(is_q, q.fast, k.fast)
    out_at = row_offsets(
        slow, mid, fast,
        tl.where(is_q, q.out_slow_stride, k.out_slow_stride),
        tl.where(is_q, q.out_mid_stride, k.out_mid_stride),
        tl.where(is_q, q.out_fast_stride, k.out_fast_stride),
    )  # fmt: skip
    x_at = row_offsets(
        slow, mid, fast,
        tl.where(is_q, q.slow_stride, k.slow_stride),
        tl.where(is_q, q.mid_stride, k.mid_stride),
        tl.where(is_q, q.fast_stride, k.fast_stride),
    )  # fmt: skip
    index = slow * index_slow + mid * index_mid + fast * index_fast
    return Block(
        out, x, elements(out_at, out), elements(x_at, x), row < tl.where(is_q, q.rows, k.rows), index
    )


@triton.jit
def rotate_halves(
    b, COS, SIN, cos_at, sin_at, half, sign, known, first, cos_plane, sin_plane, section_1, section_2,
    BLOCK: tl.constexpr, SECTIONS: tl.constexpr,
):  # fmt: skip
    """Columns from ``first`` on of the first half with those of the second.

    Args:
        known: whether the tables have the row, too; if not, it becomes NaN.
        section_1, section_2: columns from which on the tables' second and third planes count, with SECTIONS.
    """
    dtype: tl.constexpr = b.out.dtype.element_ty
    cols = first + tl.arange(0, BLOCK)
    mask = b.inside[:, None] & (cols < half)[None, :]
    table_mask = known[:, None] & (cols < half)[None, :]
    cos_cols = cols
    sin_cols = cols
    if SECTIONS:
        plane = tl.where(cols < section_1, 0, tl.where(cols < section_2, 1, 2)).to(tl.int64)
        cos_cols = cols + plane * cos_plane
        sin_cols = cols + plane * sin_plane
    x = tl.load(b.x + b.x_at[:, None] + cols[None, :], mask=mask).to(tl.float32)
    y = tl.load(b.x + (b.x_at + half)[:, None] + cols[None, :], mask=mask).to(tl.float32)
    cos = tl.load(COS + cos_at[:, None] + cos_cols[None, :], mask=table_mask, other=float("nan"))
    sin = tl.load(SIN + sin_at[:, None] + sin_cols[None, :], mask=table_mask, other=float("nan"))
    cos = cos.to(tl.float32)
    sin = sin.to(tl.float32) * sign
    tl.store(b.out + b.out_at[:, None] + cols[None, :], (x * cos - y * sin).to(dtype), mask=mask)
    tl.store(b.out + (b.out_at + half)[:, None] + cols[None, :], (y * cos + x * sin).to(dtype), mask=mask)


@triton.jit
def rotate_interleaved(
    b, COS, SIN, cos_at, sin_at, width, sign, known, first, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Columns from ``first`` on, each even one with the odd one after it."""
    half_cols = first // 2 + tl.arange(0, BLOCK // 2)
    table_mask = known[:, None] & (half_cols < width // 2)[None, :]
    cos = tl.load(COS + cos_at[:, None] + half_cols[None, :], mask=table_mask, other=float("nan"))
    sin = tl.load(SIN + sin_at[:, None] + half_cols[None, :], mask=table_mask, other=float("nan"))
    rotate_neighbours(b, cos, sin, width, sign, first, ROWS, BLOCK)


@triton.jit
def rotate_complex(b, TABLE, table_at, width, sign, first, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """As ``rotate_interleaved``, with a table whose cosines and sines are interleaved, too."""
    cols = first + tl.arange(0, BLOCK)
    mask = b.inside[:, None] & (cols < width)[None, :]
    table = tl.load(TABLE + table_at[:, None] + cols[None, :], mask=mask)
    cos, sin = tl.split(table.reshape(ROWS, BLOCK // 2, 2))
    rotate_neighbours(b, cos, sin, width, sign, first, ROWS, BLOCK)


@triton.jit
def rotate_neighbours(b, cos, sin, width, sign, first, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    dtype: tl.constexpr = b.out.dtype.element_ty
    cols = first + tl.arange(0, BLOCK)
    mask = b.inside[:, None] & (cols < width)[None, :]
    x, y = tl.split(tl.load(b.x + b.x_at[:, None] + cols[None, :], mask=mask).reshape(ROWS, BLOCK // 2, 2))
    x = x.to(tl.float32)
    y = y.to(tl.float32)
    cos = cos.to(tl.float32)
    sin = sin.to(tl.float32) * sign
    z = tl.join((x * cos - y * sin).to(dtype), (y * cos + x * sin).to(dtype)).reshape(ROWS, BLOCK)
    tl.store(b.out + b.out_at[:, None] + cols[None, :], z, mask=mask)


@triton.jit
def copy_columns(b, first, end, BLOCK: tl.constexpr):
    """Columns from ``first`` to ``end``, which are not rotated, as they are."""
    for start in range(first, end, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = b.inside[:, None] & (cols < end)[None, :]
        x = tl.load(b.x + b.x_at[:, None] + cols[None, :], mask=mask)
        tl.store(b.out + b.out_at[:, None] + cols[None, :], x, mask=mask)
