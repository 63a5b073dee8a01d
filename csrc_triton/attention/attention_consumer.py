"""A consumer group's way through its tiles, and the kernel that starts all groups. See ``attention_groups``."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from csrc_triton.attention.attention_groups import (
    FULL,
    LOCAL,
    add_values,
    key_number,
    pass_turn,
    scaled,
    scores,
    skip,
    step,
    take_turn,
    value_number,
    wait_values,
    whole_blocks,
)
from csrc_triton.attention.attention_producer import announced
from csrc_triton.attention.attention_softmax import here, masked, pack, row_parts, soft_cap


@gluon.jit
def put(values, buffer, Y, batch, head, row, column: gl.constexpr, z):
    """[64, N] of the output, on its way to memory through a group's buffer."""
    width: gl.constexpr = values.shape[1]
    tma.store_wait(0)  # what went through the buffer before has left it
    piece = buffer._reinterpret(Y.dtype, [1, 1, 64, width], Y.layout)
    piece.reshape([64, width]).store(values)
    fence_async_shared()
    for c in gl.static_range(width // z.BOX):
        part = piece.slice(c * z.BOX, z.BOX, dim=3)
        tma.async_copy_shared_to_global(Y, [batch, head, row, column + c * z.BOX], part)


@gluon.jit
def put_all(acc, acc2, by, buffer, Y, batch, head, row, z):
    """The output's rows, scaled: in pieces of at most 128 columns."""
    out = scaled(acc, by).to(Y.dtype)
    if z.D1 == 256:
        left, right = gl.split(out.reshape([64, 2, 128]).permute((0, 2, 1)))
        put(left, buffer, Y, batch, head, row, 0, z)
        put(right, buffer, Y, batch, head, row, 128, z)
    else:
        put(out, buffer, Y, batch, head, row, 0, z)
    if z.D2 > 0:
        put(scaled(acc2, by).to(Y.dtype), buffer, Y, batch, head, row, z.D1, z)


@gluon.jit
def attend(row, first, last, b, q, k, v, work, scale, cap, i, g: gl.constexpr, z):
    """Walk blocks last - 1 down to first, the b-th and later of the ring, for rows ``row`` to ``row`` + 63.

    Gives the sums of P V, of the last product still under way, and each row's largest score and parts of its sum.
    """
    rows = here(gl.arange(0, 64, z.ROW)) + row
    # the first key that each row sees, the one behind the last, and the blocks that all rows see whole
    low = rows
    high = gl.full([64], 0, gl.int32, z.ROW) + work.keys(row, z)
    whole = whole_blocks(work.keys(row, z), z)
    if z.MASK != FULL:
        high = gl.minimum(rows + work.right, work.len_k)
        whole = gl.minimum(whole, whole_blocks(gl.maximum(row + work.right, 0), z))
    whole = gl.minimum(whole, last - 1)
    lower = first
    if z.MASK == LOCAL:
        low = rows + work.left
        whole = gl.maximum(whole, first)
        lower = whole_blocks(gl.maximum(row + 63 + work.left + z.BLOCK_N - 1, 0), z)
        lower = gl.minimum(gl.maximum(lower, first), whole)
    bounds = (low, high)

    at = key_number(b, True, z)
    slot = at % z.STAGES
    mbarrier.wait(q.full.index(g), i & 1)
    mbarrier.wait(k.full.index(slot), (at // z.STAGES) & 1)
    take_turn(g, z)
    s = scores(q, g, k, slot, z)
    pass_turn(g, z)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k.free.index(slot), count=1)
    if z.MASK == LOCAL:
        s = soft_cap(s, cap)
    if z.MASK != FULL:
        s = masked(s, (last - 1) * z.BLOCK_N, bounds, z.MASK == LOCAL)
    elif last != whole_blocks(work.keys(row, z), z):
        s = masked(s, (last - 1) * z.BLOCK_N, bounds, False)
    m = gl.maximum(gl.max(s, 1) * scale, -1.0e30)  # finite: a row that sees no key gives no NaN
    e = gl.exp2(s * scale - gl.expand_dims(m, 1))
    sums = row_parts(e)
    p = pack(e, v.first.dtype)
    acc = gl.zeros([64, z.D1], gl.float32, z.O1)
    acc2 = gl.zeros([64, z.D2 if z.D2 > 0 else 16], gl.float32, z.O2)
    if z.MASK != FULL:
        for j in range(last - 1 - whole):
            p, acc, acc2, m, sums = step(
                b + 1 + j,
                (last - 2 - j) * z.BLOCK_N,
                q,
                k,
                v,
                bounds,
                scale,
                cap,
                p,
                acc,
                acc2,
                m,
                sums,
                True,
                g,
                z,
            )
    end = b + last - first
    for j in range(end - (whole - first), end - (lower - first)):
        p, acc, acc2, m, sums = step(j, 0, q, k, v, bounds, scale, cap, p, acc, acc2, m, sums, False, g, z)
    if z.MASK == LOCAL:
        for j in range(end - (lower - first), end):
            key = (first + end - 1 - j) * z.BLOCK_N
            p, acc, acc2, m, sums = step(
                j, key, q, k, v, bounds, scale, cap, p, acc, acc2, m, sums, True, g, z
            )
    mbarrier.arrive(q.free.index(g), count=1)
    at = value_number(end - 1, True, z)
    slot = at % z.STAGES
    mbarrier.wait(v.full.index(slot), (at // z.STAGES) & 1)
    acc, acc2 = add_values(p, v, slot, acc, acc2, z)
    return acc, acc2, m, sums


@aggregate
class Place:
    """Where the rows of a tile go: row r to Y's (batch, head, r + past) and LSE's r + lse."""

    tile: gl.tensor  # its number in its head
    batch: gl.tensor
    head: gl.tensor
    past: gl.tensor
    lse: gl.tensor
    rows: gl.tensor  # how many there are
    has_sink: gl.tensor  # without it sinks don't count

    @gluon.constexpr_function
    def __init__(self, tile, batch, head, past, lse, rows, has_sink):
        self.tile, self.batch, self.head, self.past, self.lse = tile, batch, head, past, lse
        self.rows, self.has_sink = rows, has_sink

    @gluon.jit
    def found(self):
        return self


@gluon.jit
def consume_tile(tile, place, b, i, q, k, v, work, buffer, Y, LSE, SINKS, scale, cap, g: gl.constexpr, z):
    """Group g's 64 rows of a tile, whose blocks are the b-th and later of the ring; gives the number of the block
    behind them. ``place`` finds where they go."""
    row = (tile * z.GROUPS + g) * 64
    tile_first, tile_last = work.blocks(tile * (64 * z.GROUPS), (tile + 1) * (64 * z.GROUPS), z)
    b_next = b + tile_last - tile_first
    if row < work.len_q:
        first, last = work.blocks(row, row + 64, z)
        skip(tile_last - last, b, k, v, g, z)
        acc, acc2, m, sums = attend(
            row, first, last, b + tile_last - last, q, k, v, work, scale, cap, i, g, z
        )
        total = gl.convert_layout(gl.sum(sums, 1), z.ROW)
        to = place.found()
        row = (to.tile * z.GROUPS + g) * 64
        # a sink is a key without a value; none is a score of minus infinity
        seen = (SINKS.to(gl.int64) != 0) & to.has_sink
        sink = gl.load(SINKS + to.head, mask=seen, other=float("-inf")) * 1.4426950408889634
        new_m = gl.maximum(m, sink)
        by = gl.exp2(m - new_m)
        total = total * by + gl.exp2(sink - new_m)
        rows = here(gl.arange(0, 64, z.ROW))
        gl.store(
            LSE + (to.lse + row) + rows,
            (new_m + gl.log2(total)) * 0.6931471805599453,
            mask=rows < to.rows - row,
        )
        by = gl.where(total > 0, by / total, 0.0)
        acc, acc2 = wait_values(acc, acc2, z)
        spent = value_number(b + tile_last - first - 1, True, z) % z.STAGES
        mbarrier.arrive(v.free.index(spent), count=1)
        put_all(acc, acc2, by, buffer, Y, to.batch, to.head, row + to.past, z)
        skip(first - tile_first, b_next - (first - tile_first), k, v, g, z)
    else:
        mbarrier.wait(q.full.index(g), i & 1)
        mbarrier.arrive(q.free.index(g), count=1)
        skip(tile_last - tile_first, b, k, v, g, z)
    return b_next


@gluon.jit
def consume(z, work, q, k, v, board, buffer, Y, LSE, lse_stride, SINKS, scale, cap, g: gl.constexpr):
    """Consumer group g: rows 64 g to 64 g + 63 of each tile."""
    if g == z.GROUPS - 1:
        pass_turn(g, z)  # the first group starts
    b = 0
    i = 0
    t, tile, batch, head = announced(0, board, z)
    while t < work.tiles:
        if not z.TOLD:
            tile, batch, head = work.tile(t, z)
        lse = (batch * work.heads + head).to(gl.int64) * lse_stride
        place = Place(tile, batch, head, batch * 0, lse, work.len_q, batch >= 0)
        b = consume_tile(tile, place, b, i, q, k, v, work, buffer, Y, LSE, SINKS, scale, cap, g, z)
        i += 1
        t, tile, batch, head = announced(i, board, z)
    tma.store_wait(0)
