"""A consumer group's way through its tiles that starts a tile's first scores before it puts out the tile before. See
``attention_groups`` and ``attention_consumer``."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from csrc_triton.attention_consumer import attend, put_all, sum_up
from csrc_triton.attention_consumer import consume as consume_each
from csrc_triton.attention_groups import (
    CAUSAL,
    FULL,
    announced,
    key_number,
    pass_turn,
    scores,
    skip,
    skip_values,
    take_turn,
    value_number,
)


@gluon.jit
def group_start(t, b, work, g: gl.constexpr, z):
    """The number of the first block that group g's rows of tile t see, whose own first block is the b-th."""
    if z.MASK != FULL:
        tile, _, _ = work.tile(gl.minimum(t, work.tiles - 1), z)
        row = tile * (64 * z.GROUPS)
        _, tile_last = work.blocks(row, row + 64 * z.GROUPS, z)
        _, last = work.blocks(row + g * 64, row + g * 64 + 64, z)
        b = gl.where(t < work.tiles, b + tile_last - last, b)
    return b


@gluon.jit
def first_scores(t, b, i, work, q, k, g: gl.constexpr, z):
    """Group g's first scores of tile t, the i-th, whose blocks are the b-th and later, under way, and their block's
    number; keys that the group does not need pass. Behind the last tile they are of whatever lies in memory."""
    start = group_start(t, b, work, g, z)
    for j in range(b, start):
        mbarrier.wait(k.full.index(j % z.STAGES), (j // z.STAGES) & 1)
        take_turn(g, z)
        pass_turn(g, z)
        mbarrier.arrive(k.free.index(j % z.STAGES), count=1)
    at = key_number(start, True, z)
    if t < work.tiles:
        mbarrier.wait(q.full.index(g), i & 1)
        mbarrier.wait(k.full.index(at % z.STAGES), (at // z.STAGES) & 1)
    take_turn(g, z)
    s = scores(q, g, k, at % z.STAGES, z, start)
    pass_turn(g, z)
    return s, start


@gluon.jit
def free_keys(b, k, z):
    mbarrier.arrive(k.free.index(key_number(b, True, z) % z.STAGES), count=1)


@gluon.jit
def consume_ahead(z, work, q, k, v, board, buffer, Y, LSE, lse_stride, SINKS, scale, cap, g: gl.constexpr):
    """As ``consume_each``: a tile's output leaves while the next one's first scores run. No product is under way where
    ways part or meet: ptxas would serialise all."""
    # a group passes over keys while it keeps values from the producer
    gl.static_assert(
        z.MASK <= CAUSAL and (z.MASK == FULL or (z.GROUPS - 1) * 64 <= (z.STAGES - 1) * z.BLOCK_N)
    )
    if g == z.GROUPS - 1:
        pass_turn(g, z)  # the first group starts
    rows = gl.arange(0, 64, z.ROW)
    panels: gl.constexpr = 2 if z.D2 > 0 else 1
    b = 0
    i = 0
    t = announced(0, board)
    s, start = first_scores(t, b, i, work, q, k, g, z)
    s = warpgroup_mma_wait(0, deps=(s,))
    free_keys(start, k, z)
    while t < work.tiles:
        tile, batch, head = work.tile(t, z)
        row = (tile * z.GROUPS + g) * 64
        first, last = work.blocks(row, row + 64, z)
        end = start + last - first
        for j in range(b, start):
            skip_values(j, v, z)
        if row < work.len_q:
            acc, acc2, m, sums = attend(row, first, last, start, q, k, v, work, scale, cap, i, g, z, s)
            t = announced(i + 1, board)
            s, start = first_scores(t, end, i + 1, work, q, k, g, z)
            by = sum_up(m, sums, True, rows, row, batch, head, work, LSE, lse_stride, SINKS, z)
            if z.D2 > 0:
                acc, acc2 = warpgroup_mma_wait(panels, deps=(acc, acc2))
            else:
                acc = warpgroup_mma_wait(panels, deps=(acc,))
            mbarrier.arrive(v.free.index(value_number(end - 1, True, z) % z.STAGES), count=1)
            put_all(acc, acc2, by, buffer, Y, batch, head, row, z)
            s = warpgroup_mma_wait(0, deps=(s,))
        else:
            mbarrier.arrive(q.free.index(g), count=1)
            skip_values(start, v, z)
            skip(last - first - 1, start + 1, k, v, g, z)
            t = announced(i + 1, board)
            s, start = first_scores(t, end, i + 1, work, q, k, g, z)
            s = warpgroup_mma_wait(0, deps=(s,))
        free_keys(start, k, z)
        b = end
        i += 1
    tma.store_wait(0)


@gluon.jit
def consume(z, work, q, k, v, board, buffer, Y, LSE, lse_stride, SINKS, scale, cap, g: gl.constexpr):
    """Consumer group g: rows 64 g to 64 g + 63 of each tile."""
    if z.AHEAD:
        consume_ahead(z, work, q, k, v, board, buffer, Y, LSE, lse_stride, SINKS, scale, cap, g)
    else:
        consume_each(z, work, q, k, v, board, buffer, Y, LSE, lse_stride, SINKS, scale, cap, g)
