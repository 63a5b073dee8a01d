"""Sums over the rows of a cross entropy, in a fixed order: one program, or several and one that adds theirs.

Five sums: of the losses less their z-losses, of the z-losses, of the weights of the targets not ignored, of their
count, of those predicted right.
"""

import triton
import triton.language as tl

from csrc_triton.losses.cross_entropy_rows import target_of, weight_of

MEAN = tl.constexpr(64)
WITH_LOSS = tl.constexpr(128)  # LOSS holds losses; their sum or mean goes to LOSS_SUM
WITH_Z = tl.constexpr(256)  # PARTS' third row holds the z-losses; to Z_SUM
WITH_HITS = tl.constexpr(512)  # PREDICTED is compared with T; to ACCURACY
FIELDS = tl.constexpr(8)  # of a row of PARTIALS


@triton.jit
def add_rows(
    LOSS_SUM, Z_SUM, ACCURACY, TOTALS, PARTIALS, LOSS, PARTS, PREDICTED, T, W, ignore_index, n_rows, chunk, words,
    vocabulary, flags, BLOCK: tl.constexpr,
):  # fmt: skip
    """``chunk`` rows a program, BLOCK at a time."""
    program = tl.program_id(0).to(tl.int64)
    end = tl.minimum(program * chunk + chunk, n_rows)
    losses = tl.zeros([BLOCK], tl.float32)
    zs = tl.zeros([BLOCK], tl.float32)
    weights = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    hits = tl.zeros([BLOCK], tl.int32)
    for first in range(program * chunk, end, BLOCK):
        rows = first + tl.arange(0, BLOCK)
        here = rows < end
        t = target_of(T, rows, here, words)
        taken = here & (t != ignore_index)
        z = tl.load(PARTS + 2 * n_rows + rows, mask=here & ((flags & WITH_Z) != 0), other=0.0)
        losses += tl.load(LOSS + rows, mask=here & ((flags & WITH_LOSS) != 0), other=0.0) - z
        zs += z
        w = weight_of(W, t, taken & (t >= 0) & (t < vocabulary), flags)
        weights += tl.where(taken, w, 0.0)
        count += taken.to(tl.int32)
        hit = tl.load(PREDICTED + rows, mask=taken & ((flags & WITH_HITS) != 0), other=-1)
        hits += (taken & (hit == t)).to(tl.int32)
    loss, z, weight = tl.sum(losses, 0), tl.sum(zs, 0), tl.sum(weights, 0)
    counted, right = tl.sum(count, 0).to(tl.float32), tl.sum(hits, 0).to(tl.float32)
    if tl.num_programs(0) == 1:
        give(LOSS_SUM, Z_SUM, ACCURACY, TOTALS, loss, z, weight, counted, right, flags)
    else:
        to = PARTIALS + program * FIELDS
        tl.store(to, loss)
        tl.store(to + 1, z)
        tl.store(to + 2, weight)
        tl.store(to + 3, counted)
        tl.store(to + 4, right)


@triton.jit
def finish_totals(LOSS_SUM, Z_SUM, ACCURACY, TOTALS, PARTIALS, parts, flags, BLOCK: tl.constexpr):
    """The sums of PARTIALS[parts, FIELDS]."""
    part, field = tl.arange(0, BLOCK), tl.arange(0, FIELDS)
    sums = tl.zeros([BLOCK, FIELDS], tl.float32)
    for first in range(0, parts, BLOCK):
        rows = (first + part)[:, None]
        mask = (rows < parts) & (field < 5)[None, :]
        sums += tl.load(PARTIALS + rows * FIELDS + field[None, :], mask=mask, other=0.0)
    total = tl.sum(sums, 0)
    loss = tl.sum(tl.where(field == 0, total, 0.0), 0)
    z = tl.sum(tl.where(field == 1, total, 0.0), 0)
    weight = tl.sum(tl.where(field == 2, total, 0.0), 0)
    counted = tl.sum(tl.where(field == 3, total, 0.0), 0)
    right = tl.sum(tl.where(field == 4, total, 0.0), 0)
    give(LOSS_SUM, Z_SUM, ACCURACY, TOTALS, loss, z, weight, counted, right, flags)


@triton.jit
def give(LOSS_SUM, Z_SUM, ACCURACY, TOTALS, loss, z, weight, counted, right, flags):
    """The results. With nothing to divide by they are NaN, as torch's."""
    tl.store(TOTALS, weight)
    tl.store(TOTALS + 1, counted)
    if (flags & MEAN) != 0:
        loss /= weight
        z /= counted
    tl.store(LOSS_SUM, tl.where((flags & WITH_Z) != 0, loss + z, loss), mask=(flags & WITH_LOSS) != 0)
    tl.store(Z_SUM, z, mask=(flags & WITH_Z) != 0)
    tl.store(ACCURACY, right / counted, mask=(flags & WITH_HITS) != 0)
