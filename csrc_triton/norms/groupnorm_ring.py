"""GroupNorm over groups that one program holds (Gluon, Hopper); see ``groupnorm.forward_ring``.

A group is one run of 16-bit elements. It is copied to shared memory ahead of its use and held in registers then, two
elements each; the copies of the next STAGES groups are under way meanwhile. So memory is read once, and 16 warps keep a
multiprocessor busy: groups can be shared out evenly, where programs of one group each need another round for the last
few. What is copied together, 16 bytes, is of one channel.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from csrc_triton.common.bf16x2 import even, odd, pack
from csrc_triton.common.pipeline import add_two, copy_tile, vector_layout
from csrc_triton.norms.groupnorm_parts import reciprocal
from csrc_triton.norms.norm_vectors import load_vector


@gluon.jit
def copy_group(xs, stage, X, at, size, there, PIECES: gl.constexpr, LINES: gl.constexpr):
    """Start to copy a group; zeros if it is not there."""
    for i in gl.static_range(PIECES):
        mask = (at < size - i * LINES * 4) & there
        copy_tile(xs[i], stage, X + i * LINES * 4, mask)
    async_copy.commit_group()


@gluon.jit
def walk_ring(
    Y, X, W, B, STATS, n_units, groups, channels, spatial, size, eps, w_kind, b_kind, store_stats,
    PIECES: gl.constexpr, LINES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Groups program_id, program_id + programs, ...; PIECES blocks of LINES lines of four pairs hold one."""
    dtype: gl.constexpr = X.dtype.element_ty
    pairs: gl.constexpr = gl.pointer_type(gl.int32)
    layout: gl.constexpr = vector_layout(gl.num_warps())
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    line = gl.arange(0, LINES, layout=gl.SliceLayout(1, layout))
    at = line[:, None] * 4 + gl.arange(0, 4, layout=gl.SliceLayout(0, layout))[None, :]
    X = X.to(pairs, bitcast=True) + at
    Y = Y.to(pairs, bitcast=True) + at
    n = size.to(gl.int32)
    half = n // 2
    part = 1.0 / n
    magic = reciprocal(spatial)
    step = gl.num_programs(0)
    zero = n_units >> 31  # unknown to the compiler: fp32 copies of what is kept would be kept, too
    xs = ()
    for _ in gl.static_range(PIECES):
        xs += (gl.allocate_shared_memory(gl.int32, [STAGES, LINES, 4], shared),)
    first = gl.program_id(0)
    for i in gl.static_range(STAGES):
        unit = first + i * step
        copy_group(xs, i, X + gl.cast(unit, gl.int64) * half, at, half, unit < n_units, PIECES, LINES)
    slot = 0
    for unit in range(first, n_units, step):
        async_copy.wait_group(STAGES - 1)
        kept = ()
        for i in gl.static_range(PIECES):
            kept += (xs[i].index(slot).load(layout),)
        later = unit + STAGES * step
        copy_group(xs, slot, X + gl.cast(later, gl.int64) * half, at, half, later < n_units, PIECES, LINES)
        slot = gl.where(slot < STAGES - 1, slot + 1, 0)
        sums = gl.zeros([LINES, 4], gl.float32, layout)
        for i in gl.static_range(PIECES):
            sums += even(kept[i], dtype) + odd(kept[i], dtype)
        mean = gl.sum(gl.sum(sums, 1), 0) * part
        squares = gl.zeros([LINES, 4], gl.float32, layout)
        for i in gl.static_range(PIECES):
            inside = at < half - i * LINES * 4
            x = kept[i] ^ zero
            low = gl.where(inside, even(x, dtype) - mean, 0.0)
            high = gl.where(inside, odd(x, dtype) - mean, 0.0)
            squares += low * low
            squares += high * high
        rstd = gl.rsqrt(gl.sum(gl.sum(squares, 1), 0) * part + eps)
        if store_stats != 0:
            gl.store(STATS + unit * 2, mean)
            gl.store(STATS + unit * 2 + 1, rstd)
        first_channel = unit % groups * channels
        out = Y + gl.cast(unit, gl.int64) * half
        for i in gl.static_range(PIECES):
            place = (i * LINES + line) * 8
            channel = first_channel + gl.umulhi(place.to(gl.uint32), magic).to(gl.int32)
            live = place < n
            w = gl.where(w_kind == 0, 1.0, load_vector(W, channel, live, w_kind)) * rstd
            b = load_vector(B, channel, live, b_kind) - mean * w
            x = kept[i] ^ (zero * 2)
            low = even(x, dtype) * w[:, None] + b[:, None]
            high = odd(x, dtype) * w[:, None] + b[:, None]
            gl.store(out + i * LINES * 4, pack(low, high, dtype), mask=at < half - i * LINES * 4)
    async_copy.wait_group(0)


@gluon.constexpr_function
def channels_layout(pairs, warps):
    """The layout of a block of rows of ``pairs`` pairs: four neighbours a thread, the warps along a row first."""
    along = max(1, min(warps, pairs // 128))
    return gl.BlockedLayout([1, 4], [1, 32], [warps // along, along], [1, 0])


@gluon.jit
def copy_channels(xs, dys, stage, X, DY, mask, row, channels, half, PIECES: gl.constexpr, ROWS: gl.constexpr):
    """Start to copy x and dy of a group; zeros past its last channel."""
    for i in gl.static_range(PIECES):
        live = mask & (row < channels - i * ROWS)[:, None]
        copy_tile(xs[i], stage, X + i * ROWS * half, live)
        copy_tile(dys[i], stage, DY + i * ROWS * half, live)
    async_copy.commit_group()


@gluon.jit
def walk_gradients_ring(
    DX, DY, X, W, STATS, PARTIALS, n_units, groups, channels, spatial, columns, db_column, w_kind, store_dx, store_dw,
    store_db,
    PIECES: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Groups as in ``walk_ring``, in PIECES blocks of ROWS channels of at most BLOCK elements."""
    dtype: gl.constexpr = X.dtype.element_ty
    pairs: gl.constexpr = gl.pointer_type(gl.int32)
    layout: gl.constexpr = channels_layout(BLOCK // 2, gl.num_warps())
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    half = spatial // 2
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    pair = gl.arange(0, BLOCK // 2, layout=gl.SliceLayout(0, layout))
    in_row = (pair < half)[None, :]
    at = row[:, None] * half + pair[None, :]
    X = X.to(pairs, bitcast=True) + at
    DY = DY.to(pairs, bitcast=True) + at
    DX = DX.to(pairs, bitcast=True) + at
    size = gl.cast(channels, gl.int64) * half
    part = 1.0 / (spatial.to(gl.float32) * channels)
    step = gl.num_programs(0)
    zero = n_units >> 31  # unknown to the compiler: fp32 copies of what is kept would be kept, too
    xs, dys = (), ()
    for _ in gl.static_range(PIECES):
        xs += (gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, BLOCK // 2], shared),)
        dys += (gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, BLOCK // 2], shared),)
    first = gl.program_id(0)
    for i in gl.static_range(STAGES):
        unit = first + i * step
        live = in_row & (unit < n_units)
        copy_channels(xs, dys, i, X + unit * size, DY + unit * size, live, row, channels, half, PIECES, ROWS)
    slot = 0
    mean = gl.load(STATS + first * 2)
    rstd = gl.load(STATS + first * 2 + 1)
    for unit in range(first, n_units, step):
        next_unit = gl.minimum(unit + step, n_units - 1)
        next_mean = gl.load(STATS + next_unit * 2)
        next_rstd = gl.load(STATS + next_unit * 2 + 1)
        async_copy.wait_group(STAGES - 1)
        kept_x, kept_dy = (), ()
        for i in gl.static_range(PIECES):
            kept_x += (xs[i].index(slot).load(layout),)
            kept_dy += (dys[i].index(slot).load(layout),)
        later = unit + STAGES * step
        live = in_row & (later < n_units)
        copy_channels(
            xs, dys, slot, X + later * size, DY + later * size, live, row, channels, half, PIECES, ROWS
        )
        slot = gl.where(slot < STAGES - 1, slot + 1, 0)
        first_channel = unit % groups * channels
        sums = PARTIALS + gl.cast(unit // groups, gl.int64) * columns + first_channel
        alongs = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
        offsets = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
        ws = ()
        for i in gl.static_range(PIECES):
            channel = i * ROWS + row
            in_rows = channel < channels
            low = even(kept_dy[i], dtype)
            high = odd(kept_dy[i], dtype)
            dots = low * (even(kept_x[i], dtype) - mean) + high * (odd(kept_x[i], dtype) - mean)
            dw, db = gl.reduce((dots, low + high), 1, add_two)
            dw *= rstd
            gl.store(sums + channel, dw, mask=in_rows & (store_dw != 0))
            gl.store(sums + db_column + channel, db, mask=in_rows & (store_db != 0))
            w = gl.where(w_kind == 0, 1.0, load_vector(W, first_channel + channel, in_rows, w_kind))
            alongs += w * dw
            offsets += w * db
            ws += (w * rstd,)
        along, offset = gl.reduce((alongs, offsets), 0, add_two)
        slope = along * part * rstd * rstd
        level = offset * part * rstd - mean * slope
        out = DX + unit * size
        for i in gl.static_range(PIECES):
            w = ws[i][:, None]
            x, dy = kept_x[i] ^ zero, kept_dy[i] ^ zero
            low = w * even(dy, dtype) - (even(x, dtype) * slope + level)
            high = w * odd(dy, dtype) - (odd(x, dtype) * slope + level)
            mask = in_row & (row < channels - i * ROWS)[:, None] & (store_dx != 0)
            gl.store(out + i * ROWS * half, pack(low, high, dtype), mask=mask)
        mean, rstd = next_mean, next_rstd
    async_copy.wait_group(0)
