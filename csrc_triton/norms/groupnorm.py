"""GroupNorm: y = (x - mean) / sqrt(var + eps) * weight + bias, with the statistics of each group of channels of each
image.

Two layouts, each read and written in place. Channels first: a group is one run of channels * spatial elements.
Channels last: it is ``spatial`` rows of ``channels`` elements; a program takes several groups that lie beside each
other, so that what it reads of a row is long enough (``groupnorm_last``).

Where there are fewer groups than the GPU holds programs, or a group is too long to be found in cache when it is read
the second time, a team of ``split`` programs shares it: each finds the moments of its part and hands them to the others
(``exchange``), in the same launch. Teams walk over the groups, and the launch is cooperative. Parts are along the
spatial dimensions, of TILES tiles if that takes no more than SPLIT programs; TILES is for the host alone, as the
longest group of a program where SPLIT is 1. There is no exchange on AMD.

On Hopper a program copies groups that its registers can hold to shared memory ahead of their use (``ring``), and teams
hold channels-last images in it, of which they read each once (``held``). What teams that read twice hand over in WORDS
is marked with ``launch``, a number that no launch before had: so nobody need zero them (0.02 of the copy).

Statistics are fp32 and never a difference of large sums (``moments``). STATS[n_units, 2] holds mean and
1 / sqrt(var + eps). Weight and bias are of x's dtype or fp32 (``norm_vectors``): that is asked once, ahead of loops.

Wu and He, Group Normalization (2018).
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from csrc_triton.norms.groupnorm_held import walk_images
from csrc_triton.norms.groupnorm_held_gradients import walk_image_gradients
from csrc_triton.norms.groupnorm_last import finish_last, part_moments, part_sums, scale_last
from csrc_triton.norms.groupnorm_parts import team_moments, team_sums, walk_gradients, walk_groups, whole_of
from csrc_triton.norms.groupnorm_ring import walk_gradients_ring, walk_ring

HELD = ["SPLIT", "LINES", "FOLD", "SLOTS", "AHEAD", "GROUPS", "MEMBERS", "PARTS", "TALKERS", "REGISTERS"]

DECLARATION = {
    "op": "groupnorm",
    "uses": ["column_sums"],
    "kernels": {
        "groupnorm_forward": {
            "arguments": {
                "Y": "*dtype", "X": "*dtype", "W": "*dtype", "B": "*dtype", "STATS": "*fp32", "WORDS": "*i64",
                "launch": "i32", "n_units": "i32", "groups": "i32", "channels": "i32", "spatial": "i32",
                "size": "i64", "length": "i64", "split": "i32", "eps": "fp32", "w_kind": "i32", "b_kind": "i32",
                "store_stats": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["Y", "X", "spatial", "size", "length"],
            "forms": {
                "whole": {
                    "function": "forward_whole",
                    "constants": ["BLOCK"],
                    "covers": "BLOCK",
                    "requires": {"aligned": [True]},
                },
                "first": {
                    "function": "forward_first",
                    "constants": ["SPLIT", "BLOCK", "BLOCKS", "TILES"],
                    "defaults": {"SPLIT": 1, "BLOCKS": 0, "TILES": 0},
                    "covers": "BLOCKS * BLOCK",
                    "any_length": "BLOCKS",
                    "cooperative": "SPLIT",
                    "requires": {"aligned": [True]},
                },
                "ring": {
                    "language": "gluon",
                    "function": "forward_ring",
                    "constants": ["PIECES", "BLOCK", "STAGES", "TILES"],
                    "defaults": {"TILES": 0},
                    "covers": "PIECES * BLOCK",
                    "requires": {"dtype": ["bf16", "fp16"], "aligned": [True]},
                },
                "any": {
                    "function": "forward_any",
                    "constants": ["SPLIT", "BLOCK", "TILES"],
                    "defaults": {"SPLIT": 1, "TILES": 0},
                    "cooperative": "SPLIT",
                },
            },
        },
        "groupnorm_forward_last": {
            "arguments": {
                "Y": "*dtype", "X": "*dtype", "W": "*dtype", "B": "*dtype", "STATS": "*fp32", "WORDS": "*i64",
                "launch": "i32", "n_units": "i32", "units": "i32", "groups": "i32", "channels": "i32",
                "width": "i32", "n_cols": "i32", "spatial": "i32", "length": "i32", "split": "i32", "eps": "fp32",
                "w_kind": "i32", "b_kind": "i32", "store_stats": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["Y", "X", "W", "B", "width", "n_cols"],
            "forms": {
                "held": {
                    "language": "gluon",
                    "function": "forward_last_held",
                    "constants": HELD,
                    "defaults": {"FOLD": 1},
                    "cooperative": "SPLIT",
                    "requires": {"dtype": ["bf16", "fp16"], "aligned": [True]},
                },
                "last": {
                    "function": "forward_last",
                    "constants": ["SPLIT", "ROWS", "BLOCK", "GROUPS", "TILES"],
                    "defaults": {"SPLIT": 1, "TILES": 0},
                    "cooperative": "SPLIT",
                },
            },
        },
        "groupnorm_backward": {
            "arguments": {
                "DX": "*dtype", "DY": "*dtype", "X": "*dtype", "W": "*dtype", "STATS": "*fp32",
                "PARTIALS": "*fp32", "WORDS": "*i64", "launch": "i32", "n_units": "i32", "groups": "i32",
                "channels": "i32", "spatial": "i32", "length": "i32", "split": "i32", "columns": "i32",
                "db_column": "i32", "w_kind": "i32", "store_dx": "i32", "store_dw": "i32", "store_db": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["DX", "DY", "X", "spatial", "length"],
            "forms": {
                "first": {
                    "function": "backward_first",
                    "constants": ["SPLIT", "ROWS", "BLOCK", "TILES"],
                    "defaults": {"SPLIT": 1, "TILES": 0},
                    "cooperative": "SPLIT",
                    "requires": {"aligned": [True]},
                },
                "ring": {
                    "language": "gluon",
                    "function": "backward_ring",
                    "constants": ["PIECES", "ROWS", "BLOCK", "STAGES", "TILES"],
                    "defaults": {"TILES": 0},
                    "covers": "BLOCK",
                    "requires": {"dtype": ["bf16", "fp16"], "aligned": [True]},
                    "may_spill": "some registers, once a group, for one that need not be read twice",
                },
                "any": {
                    "function": "backward_any",
                    "constants": ["SPLIT", "ROWS", "BLOCK", "TILES"],
                    "defaults": {"SPLIT": 1, "TILES": 0},
                    "cooperative": "SPLIT",
                },
            },
        },
        "groupnorm_backward_last": {
            "arguments": {
                "DX": "*dtype", "DY": "*dtype", "X": "*dtype", "W": "*dtype", "STATS": "*fp32",
                "PARTIALS": "*fp32", "WORDS": "*i64", "launch": "i32", "n_units": "i32", "units": "i32",
                "groups": "i32", "channels": "i32", "width": "i32", "n_cols": "i32", "spatial": "i32", "length": "i32",
                "split": "i32", "columns": "i32", "db_column": "i32", "w_kind": "i32", "store_dx": "i32",
                "store_dw": "i32", "store_db": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["DX", "DY", "X", "W", "PARTIALS", "width", "n_cols", "columns", "db_column"],
            "forms": {
                "held": {
                    "language": "gluon",
                    "function": "backward_last_held",
                    "constants": HELD,
                    "defaults": {"FOLD": 1},
                    "cooperative": "SPLIT",
                    "requires": {"dtype": ["bf16", "fp16"], "aligned": [True]},
                },
                "last": {
                    "function": "backward_last",
                    "constants": ["SPLIT", "ROWS", "BLOCK", "GROUPS", "TILES"],
                    "defaults": {"SPLIT": 1, "TILES": 0},
                    "cooperative": "SPLIT",
                },
            },
        },
    },
}  # fmt: skip


@triton.jit
def forward_whole(
    Y, X, W, B, STATS, WORDS, launch, n_units, groups, channels, spatial, size, length, split, eps, w_kind, b_kind,
    store_stats,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A short group a program, one run of ``size`` elements held in registers."""
    whole_of(Y, X, W, B, STATS, groups, channels, spatial, size, eps, w_kind, b_kind, store_stats, BLOCK)


@triton.jit
def forward_first(
    Y, X, W, B, STATS, WORDS, launch, n_units, groups, channels, spatial, size, length, split, eps, w_kind, b_kind,
    store_stats,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Groups that are one run of ``size`` elements, in parts of ``length``, each read twice; what one load brings is of
    one channel."""
    fold: tl.constexpr = 128 // X.dtype.element_ty.primitive_bitwidth
    walk_groups(
        Y, X, W, B, STATS, WORDS, launch, n_units, groups, channels, spatial, size, length, split, eps, w_kind, b_kind,
        store_stats, SPLIT, BLOCK, BLOCKS, fold,
    )  # fmt: skip


@gluon.jit
def forward_ring(
    Y, X, W, B, STATS, WORDS, launch, n_units, groups, channels, spatial, size, length, split, eps, w_kind, b_kind,
    store_stats,
    PIECES: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """Persistent programs, a group a step, held in shared memory: see ``groupnorm_ring``."""
    walk_ring(
        Y, X, W, B, STATS, n_units, groups, channels, spatial, size, eps, w_kind, b_kind, store_stats, PIECES,
        BLOCK // 8, STAGES,
    )  # fmt: skip


@triton.jit
def forward_any(
    Y, X, W, B, STATS, WORDS, launch, n_units, groups, channels, spatial, size, length, split, eps, w_kind, b_kind,
    store_stats,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """``forward_first`` with a channel for every element."""
    walk_groups(
        Y, X, W, B, STATS, WORDS, launch, n_units, groups, channels, spatial, size, length, split, eps, w_kind, b_kind,
        store_stats, SPLIT, BLOCK, 0, 1,
    )  # fmt: skip


@triton.jit
def forward_unit(
    unit, Y, X, W, B, STATS, WORDS, launch, n_units, units, groups, channels, width, n_cols, spatial, length, split,
    eps, w_kind, b_kind, store_stats,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """A program's part of a unit."""
    part = tl.program_id(0) % split
    group = tl.arange(0, GROUPS)
    start = part * length
    count = tl.minimum(length, spatial - start)
    image = unit // units
    column = unit % units * width
    at = (tl.cast(image, tl.int64) * spatial + start) * n_cols + column
    mean, deviation = part_moments(X + at, width, channels, n_cols, count, ROWS, BLOCK, GROUPS)
    if SPLIT > 1:
        mean, deviation = team_moments(
            WORDS, launch, unit, mean, deviation, part, split, length, spatial, channels, SPLIT, GROUPS
        )
    rstd = tl.rsqrt(deviation / (spatial.to(tl.float32) * channels) + eps)
    stats = STATS + (image * groups + column // channels + group) * 2
    live = (group * channels < width) & (store_stats != 0) & (part == 0)
    tl.store(stats, mean, mask=live)
    tl.store(stats + 1, rstd, mask=live)
    scale_last(
        Y + at, X + at, W, B, column, mean, rstd, width, channels, n_cols, count, w_kind, b_kind,
        ROWS, BLOCK, GROUPS,
    )  # fmt: skip


@triton.jit
def forward_last(
    Y, X, W, B, STATS, WORDS, launch, n_units, units, groups, channels, width, n_cols, spatial, length, split, eps,
    w_kind, b_kind, store_stats,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """``units`` an image, each of the groups of ``width`` columns, in parts of ``length`` places."""
    if SPLIT > 1:
        for unit in range(tl.program_id(0) // split, n_units, tl.num_programs(0) // split):
            forward_unit(
                unit, Y, X, W, B, STATS, WORDS, launch, n_units, units, groups, channels, width, n_cols, spatial,
                length, split, eps, w_kind, b_kind, store_stats, SPLIT, ROWS, BLOCK, GROUPS,
            )  # fmt: skip
    else:
        forward_unit(
            tl.program_id(0), Y, X, W, B, STATS, WORDS, launch, n_units, units, groups, channels, width, n_cols,
            spatial, length, split, eps, w_kind, b_kind, store_stats, SPLIT, ROWS, BLOCK, GROUPS,
        )  # fmt: skip


@gluon.jit
def forward_last_held(
    Y, X, W, B, STATS, WORDS, launch, n_units, units, groups, channels, width, n_cols, spatial, length, split, eps,
    w_kind, b_kind, store_stats,
    SPLIT: gl.constexpr, LINES: gl.constexpr, FOLD: gl.constexpr, SLOTS: gl.constexpr, AHEAD: gl.constexpr,
    GROUPS: gl.constexpr, MEMBERS: gl.constexpr, PARTS: gl.constexpr, TALKERS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Units are images, of whose parts programs hold one each in shared memory: see ``groupnorm_held``."""
    walk_images(
        Y, X, W, B, STATS, WORDS, n_units, groups, channels, n_cols, spatial, length, split, eps, w_kind, b_kind,
        store_stats, PARTS, GROUPS, MEMBERS, LINES, FOLD, SLOTS, AHEAD, TALKERS, REGISTERS,
    )  # fmt: skip


@triton.jit
def backward_first(
    DX, DY, X, W, STATS, PARTIALS, WORDS, launch, n_units, groups, channels, spatial, length, split, columns, db_column,
    w_kind, store_dx, store_dw, store_db,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Groups of channels that are runs of ``spatial`` elements, in parts of ``length`` of every channel; tiles are ROWS
    channels by BLOCK. PARTIALS[images * split, columns] gets each channel's sums over a part."""
    fold: tl.constexpr = 128 // X.dtype.element_ty.primitive_bitwidth
    walk_gradients(
        DX, DY, X, W, STATS, PARTIALS, WORDS, launch, n_units, groups, channels, spatial, length, split, columns,
        db_column, w_kind, store_dx, store_dw, store_db, SPLIT, ROWS, BLOCK, fold,
    )  # fmt: skip


@gluon.jit
def backward_ring(
    DX, DY, X, W, STATS, PARTIALS, WORDS, launch, n_units, groups, channels, spatial, length, split, columns, db_column,
    w_kind, store_dx, store_dw, store_db,
    PIECES: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """``forward_ring`` for the gradients, of groups of at most PIECES * ROWS channels."""
    walk_gradients_ring(
        DX, DY, X, W, STATS, PARTIALS, n_units, groups, channels, spatial, columns, db_column, w_kind, store_dx,
        store_dw, store_db, PIECES, ROWS, BLOCK, STAGES,
    )  # fmt: skip


@triton.jit
def backward_any(
    DX, DY, X, W, STATS, PARTIALS, WORDS, launch, n_units, groups, channels, spatial, length, split, columns, db_column,
    w_kind, store_dx, store_dw, store_db,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """``backward_first`` for elements that are loaded one by one."""
    walk_gradients(
        DX, DY, X, W, STATS, PARTIALS, WORDS, launch, n_units, groups, channels, spatial, length, split, columns,
        db_column, w_kind, store_dx, store_dw, store_db, SPLIT, ROWS, BLOCK, 1,
    )  # fmt: skip


@triton.jit
def backward_unit(
    unit, DX, DY, X, W, STATS, PARTIALS, WORDS, launch, n_units, units, groups, channels, width, n_cols, spatial,
    length, split, columns, db_column, w_kind, store_dx, store_dw, store_db,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """A program's part of a unit."""
    part = tl.program_id(0) % split
    group = tl.arange(0, GROUPS)
    start = part * length
    count = tl.minimum(length, spatial - start)
    n = spatial.to(tl.float32) * channels
    image = unit // units
    column = unit % units * width
    at = (tl.cast(image, tl.int64) * spatial + start) * n_cols + column
    stats = STATS + (image * groups + column // channels + group) * 2
    live = group * channels < width
    mean = tl.load(stats, mask=live, other=0.0)
    rstd = tl.load(stats + 1, mask=live, other=0.0)
    along, offset = part_sums(
        X + at, DY + at, W, column, PARTIALS + (image * split + part).to(tl.int64) * columns + column, mean, rstd,
        width, channels, n_cols, count, db_column, w_kind, store_dw, store_db, ROWS, BLOCK, GROUPS,
    )  # fmt: skip
    if SPLIT > 1:
        along, offset = team_sums(WORDS, launch, unit, along, offset, part, split, SPLIT, GROUPS)
    if store_dx != 0:
        finish_last(
            DX + at, X + at, DY + at, W, column, mean, rstd, along / n, offset / n, width, channels, n_cols, count,
            w_kind, ROWS, BLOCK, GROUPS,
        )  # fmt: skip


@triton.jit
def backward_last(
    DX, DY, X, W, STATS, PARTIALS, WORDS, launch, n_units, units, groups, channels, width, n_cols, spatial, length,
    split, columns, db_column, w_kind, store_dx, store_dw, store_db,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Units and parts as in ``forward_last``, partials as in ``backward_first``."""
    if SPLIT > 1:
        for unit in range(tl.program_id(0) // split, n_units, tl.num_programs(0) // split):
            backward_unit(
                unit, DX, DY, X, W, STATS, PARTIALS, WORDS, launch, n_units, units, groups, channels, width, n_cols,
                spatial, length, split, columns, db_column, w_kind, store_dx, store_dw, store_db, SPLIT,
                ROWS, BLOCK, GROUPS,
            )  # fmt: skip
    else:
        backward_unit(
            tl.program_id(0), DX, DY, X, W, STATS, PARTIALS, WORDS, launch, n_units, units, groups, channels, width,
            n_cols, spatial, length, split, columns, db_column, w_kind, store_dx, store_dw, store_db, SPLIT,
            ROWS, BLOCK, GROUPS,
        )  # fmt: skip


@gluon.jit
def backward_last_held(
    DX, DY, X, W, STATS, PARTIALS, WORDS, launch, n_units, units, groups, channels, width, n_cols, spatial, length,
    split, columns, db_column, w_kind, store_dx, store_dw, store_db,
    SPLIT: gl.constexpr, LINES: gl.constexpr, FOLD: gl.constexpr, SLOTS: gl.constexpr, AHEAD: gl.constexpr,
    GROUPS: gl.constexpr, MEMBERS: gl.constexpr, PARTS: gl.constexpr, TALKERS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """``forward_last_held`` for the gradients, with a row of PARTIALS a program: see ``groupnorm_held_gradients``."""
    walk_image_gradients(
        DX, DY, X, W, STATS, PARTIALS, WORDS, n_units, groups, channels, n_cols, spatial, length, split, columns,
        db_column, w_kind, store_dx, store_dw, store_db, PARTS, GROUPS, MEMBERS, LINES, FOLD, SLOTS, AHEAD, TALKERS,
        REGISTERS,
    )  # fmt: skip
