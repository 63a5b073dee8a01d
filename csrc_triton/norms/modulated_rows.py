"""What the kernels of the modulated RMSNorm share: bodies that two kernels have, a program's rows, loads, sums
in memory."""

import triton
import triton.language as tl

from csrc_triton.norms.norm_vectors import load_vector, store_as
from csrc_triton.norms.row_blocks import load_blocks


@triton.jit
def modulated(x, rstd, m, shift, round_first, dtype: tl.constexpr):
    """y in ``dtype`` from x in fp32 and m, the weight times 1 + scale. A select, not a branch: loads must be free to
    move past it."""
    y = x * rstd
    y = tl.where(round_first != 0, y.to(dtype).to(tl.float32), y)
    return (y * m + shift).to(dtype)


@triton.jit
def group_of_program(rows_per_group):
    """The group of a program that has one row. No grid has 2^31 programs: the quotient is one of int32, for a third of
    the instructions of an int64 one."""
    return (tl.program_id(0) // rows_per_group.to(tl.int32)).to(tl.int64)


@triton.jit
def modulate(
    Y, X, SCALE, SHIFT, W, scale_start, shift_start, blocks, n_cols, rstd, offset, scale_kind, shift_kind, weight_kind,
    round_first,
    BLOCK: tl.constexpr, WIDE: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """The second read of a row. Not WEIGHTED: there is no weight, and it costs nothing."""
    for i in range(blocks):
        cols = (blocks - 1 - i) * BLOCK + tl.arange(0, BLOCK)
        mask = cols < n_cols
        x = tl.load(X + cols, mask=mask, eviction_policy="evict_first").to(tl.float32)
        m = 1.0 + load_vector(SCALE, cols, mask, scale_kind, scale_start, WIDE)
        shift = load_vector(SHIFT, cols, mask, shift_kind, shift_start, WIDE)
        if WEIGHTED:
            m *= load_vector(W, cols, mask, weight_kind, 0, WIDE) + offset
        y = modulated(x, rstd, m, shift, round_first, X.dtype.element_ty)
        tl.store(Y + cols, y, mask=mask, eviction_policy="evict_first")


@triton.jit
def walk_row(
    Y, X, SCALE, SHIFT, W, RSTD, y_stride, x_stride, scale_stride, shift_stride, n_cols, rows_per_group, eps, offset,
    scale_kind, shift_kind, weight_kind, round_first, store_rstd,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A program's row of any length, read twice, the second time from the cache and last block first."""
    row = tl.program_id(0).to(tl.int64)
    group = group_of_program(rows_per_group)
    X += row * x_stride
    Y += row * y_stride
    block = tl.arange(0, BLOCK)
    if BLOCKS > 0:
        blocks = BLOCKS
    else:
        blocks = tl.cdiv(n_cols, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for i in range(blocks):
        cols = i * BLOCK + block
        x = tl.load(X + cols, mask=cols < n_cols, other=0.0, eviction_policy="evict_last").to(tl.float32)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, 0) / n_cols + eps)
    if store_rstd != 0:
        tl.store(RSTD + row, rstd)
    scale_start = group * scale_stride
    shift_start = group * shift_stride
    if WIDE or weight_kind != 0:
        modulate(
            Y, X, SCALE, SHIFT, W, scale_start, shift_start, blocks, n_cols, rstd, offset, scale_kind, shift_kind,
            weight_kind, round_first, BLOCK, WIDE, True,
        )  # fmt: skip
    else:
        modulate(
            Y, X, SCALE, SHIFT, W, scale_start, shift_start, blocks, n_cols, rstd, offset, scale_kind, shift_kind,
            weight_kind, round_first, BLOCK, WIDE, False,
        )  # fmt: skip


@triton.jit
def hold_row(
    Y, X, SCALE, SHIFT, W, RSTD, y_stride, x_stride, scale_stride, shift_stride, n_cols, rows_per_group, eps, offset,
    scale_kind, shift_kind, weight_kind, round_first, store_rstd,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """A program's row, read twice, the second time from the first-level cache. All its loads are under way before the
    first value is used."""
    row = tl.program_id(0).to(tl.int64)
    group = group_of_program(rows_per_group)
    X += row * x_stride
    Y += row * y_stride
    SCALE += group * scale_stride
    SHIFT += group * shift_stride
    block = tl.arange(0, BLOCK)
    xs = load_blocks(X, n_cols, block, BLOCKS)
    squares = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(BLOCKS):
        x = xs[i].to(tl.float32)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, 0) / n_cols + eps)
    if store_rstd != 0:
        tl.store(RSTD + row, rstd)
    if weight_kind != 0:  # fewer blocks together: registers are those of both branches
        for i in tl.static_range(BLOCKS):
            modulate_together(
                Y + i * BLOCK, X + i * BLOCK, SCALE + i * BLOCK, SHIFT + i * BLOCK, W + i * BLOCK, block,
                n_cols - i * BLOCK, rstd, offset, scale_kind, shift_kind, round_first, BLOCK, 1, True,
            )  # fmt: skip
    else:
        for i in tl.static_range(0, BLOCKS, TOGETHER):
            modulate_together(
                Y + i * BLOCK, X + i * BLOCK, SCALE + i * BLOCK, SHIFT + i * BLOCK, W, block,
                n_cols - i * BLOCK, rstd, offset, scale_kind, shift_kind, round_first, BLOCK,
                TOGETHER if i + TOGETHER < BLOCKS else BLOCKS - i, False,
            )  # fmt: skip


@triton.jit
def modulate_together(
    Y, X, SCALE, SHIFT, W, block, n_cols, rstd, offset, scale_kind, shift_kind, round_first,
    BLOCK: tl.constexpr, COUNT: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Blocks of the second read whose loads are under way together."""
    xs, scales, shifts, ws = (), (), (), ()
    for i in tl.static_range(COUNT):
        cols = i * BLOCK + block
        xs += (tl.load(X + cols, mask=cols < n_cols, other=0.0, eviction_policy="evict_first"),)
    for i in tl.static_range(COUNT):
        cols = i * BLOCK + block
        mask = cols < n_cols
        scales += (tl.load(SCALE + cols, mask=mask & (scale_kind != 0), other=0.0),)
        shifts += (tl.load(SHIFT + cols, mask=mask & (shift_kind != 0), other=0.0),)
        if WEIGHTED:
            ws += (tl.load(W + cols, mask=mask, other=0.0),)
    for i in tl.static_range(COUNT):
        cols = i * BLOCK + block
        m = 1.0 + scales[i].to(tl.float32)
        if WEIGHTED:
            m *= ws[i].to(tl.float32) + offset
        shift = shifts[i].to(tl.float32)
        y = modulated(xs[i].to(tl.float32), rstd, m, shift, round_first, X.dtype.element_ty)
        tl.store(Y + cols, y, mask=cols < n_cols, eviction_policy="evict_first")


@triton.jit
def run_of(rows_per_group, rows_per_part, parts):
    """A program's group, the first row of its part of it, and the first row after that."""
    group = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    first = group * rows_per_group + part * rows_per_part
    return group, first, tl.minimum(first + rows_per_part, (group + 1) * rows_per_group)


@triton.jit
def factors(
    SCALE, W, cols, mask, scale_kind, weight_kind, offset, row_start, start=0, WIDE: tl.constexpr = True
):
    """1 + scale and offset + weight of the columns from ``start`` on; the row of scale begins at ``row_start``."""
    m = 1.0 + load_vector(SCALE, cols, mask, scale_kind, row_start + start, WIDE)
    return m, load_vector(W, cols, mask, weight_kind, start, WIDE) + offset


@triton.jit
def load_two(X_at, DY_at, start, mask, EVICT: tl.constexpr):
    """x and dy in fp32."""
    x = tl.load(X_at + start, mask=mask, other=0.0, eviction_policy=EVICT)
    dy = tl.load(DY_at + start, mask=mask, other=0.0, eviction_policy=EVICT)
    return x.to(tl.float32), dy.to(tl.float32)


@triton.jit
def add_to(SUMS, value, mask, is_first):
    """Add to a row of sums in memory that this program alone writes; the first time it is not read."""
    before = tl.load(SUMS, mask=mask & (is_first == 0), other=0.0)
    tl.store(SUMS, before + value, mask=mask)


@triton.jit
def walk_part(
    DX, DY, X, SCALE, W, RSTD, NORMAL, PLAIN, dx_stride, dy_stride, x_stride, scale_stride, n_cols, rows_per_group,
    rows_per_part, parts, offset, scale_kind, weight_kind, store_dx, store_normal, store_plain,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A part of a group, rows of any length, ROWS a step, read twice; the sums are added to in memory."""
    program = tl.program_id(0).to(tl.int64)
    group, first, last = run_of(rows_per_group, rows_per_part, parts)
    scale_start = group * scale_stride
    NORMAL += program * n_cols
    PLAIN += program * n_cols
    block = tl.arange(0, BLOCK)
    for step in range(first, last, ROWS):
        rows = step + tl.arange(0, ROWS)
        in_rows = (rows < last)[:, None]
        X_at = X + rows[:, None] * x_stride + block[None, :]
        DY_at = DY + rows[:, None] * dy_stride + block[None, :]
        DX_at = DX + rows[:, None] * dx_stride + block[None, :]
        rstd = tl.load(RSTD + rows, mask=rows < last, other=0.0)[:, None]
        dot = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, n_cols, BLOCK):
            in_row = block < n_cols - start
            m, w = factors(SCALE, W, block, in_row, scale_kind, weight_kind, offset, scale_start, start)
            x, dy = load_two(X_at, DY_at, start, in_rows & in_row[None, :], "evict_last")
            dot += x * ((m * w)[None, :] * dy)
        c = (tl.sum(dot, 1) / n_cols)[:, None] * rstd * rstd * rstd
        for start in range(0, n_cols, BLOCK):
            in_row = block < n_cols - start
            mask = in_rows & in_row[None, :]
            m, w = factors(SCALE, W, block, in_row, scale_kind, weight_kind, offset, scale_start, start)
            x, dy = load_two(X_at, DY_at, start, mask, "evict_first")
            a = dy * rstd
            dx = (m * w)[None, :] * a - x * c
            tl.store(DX_at + start, dx.to(DX.dtype.element_ty), mask=mask & (store_dx != 0))
            add_to(NORMAL + start + block, tl.sum(a * x, 0), in_row & (store_normal != 0), step == first)
            add_to(PLAIN + start + block, tl.sum(dy, 0), in_row & (store_plain != 0), step == first)
        tl.debug_barrier()  # the next step reads the sums, perhaps in other threads


@triton.jit
def walk_tokens(
    DX, DSCALE, DSHIFT, DY, X, SCALE, W, RSTD, PARTIALS, dx_stride, dy_stride, x_stride, scale_stride, n_rows, n_cols,
    offset, scale_kind, weight_kind, store_dx, dscale_kind, dshift_kind, store_partials,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Persistent programs, rows of any length, each a group of its own, read twice; a program's row of partials of dw
    is added to in memory."""
    program = tl.program_id(0).to(tl.int64)
    PARTIALS += program * n_cols
    block = tl.arange(0, BLOCK)
    if BLOCKS > 0:
        blocks = BLOCKS
    else:
        blocks = tl.cdiv(n_cols, BLOCK)
    for row in range(program, n_rows, tl.num_programs(0)):
        X_at = X + row * x_stride + block
        DY_at = DY + row * dy_stride + block
        rstd = tl.load(RSTD + row)
        dot = tl.zeros([BLOCK], tl.float32)
        for i in range(blocks):
            start = i * BLOCK
            mask = block < n_cols - start
            x, dy = load_two(X_at, DY_at, start, mask, "evict_last")
            m, w = factors(
                SCALE, W, block, mask, scale_kind, weight_kind, offset, row * scale_stride, start, WIDE
            )
            dot += x * (m * w * dy)
        c = tl.sum(dot, 0) / n_cols * rstd * rstd * rstd
        for i in range(blocks):
            start = i * BLOCK
            mask = block < n_cols - start
            x, dy = load_two(X_at, DY_at, start, mask, "evict_first")
            m, w = factors(
                SCALE, W, block, mask, scale_kind, weight_kind, offset, row * scale_stride, start, WIDE
            )
            a = dy * rstd
            dx = (m * w * a - x * c).to(DX.dtype.element_ty)
            tl.store(DX + row * dx_stride + start + block, dx, mask=mask & (store_dx != 0))
            store_as(DSCALE, block, a * x * w, mask, dscale_kind, row * n_cols + start, WIDE)
            store_as(DSHIFT, block, dy, mask, dshift_kind, row * n_cols + start, WIDE)
            add_to(PARTIALS + start + block, a * x * m, mask & (store_partials != 0), row == program)
        tl.debug_barrier()  # the next step reads the partials, perhaps in other threads


@triton.jit
def add_up(
    FROM, SCALE, first, last, cols, in_row, n_cols, parts, scale_stride, scale_kind,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """The sum over rows of FROM, each times its group's 1 + scale if SCALED, PARTS rows a step."""
    total = tl.zeros([PARTS, BLOCK], tl.float32)
    for step in range(first, last, PARTS):
        rows = (step + tl.arange(0, PARTS))[:, None]
        mask = (rows < last) & in_row[None, :]
        value = tl.load(FROM + rows.to(tl.int64) * n_cols + cols[None, :], mask=mask, other=0.0)
        if SCALED:
            scale_at = (rows // parts).to(tl.int64) * scale_stride + cols[None, :]
            value *= 1.0 + load_vector(SCALE, scale_at, mask, scale_kind)
        total += value
    return tl.sum(total, 0)


@triton.jit
def job_of(job, groups, parts, dscale_kind, dshift_kind):
    """What the second level's ``job``-th row is: its group, its first part and the first after it, and whether it is of
    dscale, dshift or dw. dw is the sum over the parts of all groups."""
    dscale_jobs = tl.where(dscale_kind != 0, groups, 0)
    dshift_jobs = tl.where(dshift_kind != 0, groups, 0)
    is_dscale = job < dscale_jobs
    is_dw = job >= dscale_jobs + dshift_jobs
    is_dshift = (is_dscale | is_dw) == 0
    group = tl.where(is_dw, 0, tl.where(is_dscale, job, job - dscale_jobs))
    first = group * parts
    last = tl.where(is_dw, groups * parts, first + parts)
    return group, first, last, is_dscale, is_dshift, is_dw
