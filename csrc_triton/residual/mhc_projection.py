"""mHC's product of a token's streams and phi for NVIDIA GPUs (Gluon): each element of x passes through the registers of
one thread, which needs it both for the product and for the sum of squares.

The product is z^T = phi^T x^T by mma.sync of 16 x 8 x 16: the tokens are the columns, so no two warps read the same x.
The order in which columns of x are added up is free. A thread copies 16 bytes of a token at a time, eight columns, and
takes two of them as the pair that one instruction wants: of 64 columns, place j * 16 + h * 8 + lane * 2 + b of the sum
is column h * 32 + lane * 8 + j * 2 + b. Then x needs no exchange between threads, and phi's rows are copied in that
order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from csrc_triton.common.bf16x2 import bf16_parts
from csrc_triton.common.pipeline import copy_tile, next_stage

STEP = gl.constexpr(64)  # columns a step
PHI_COLUMNS = gl.constexpr(32)  # of phi's tile, of which a product of 4 streams has 24


@gluon.constexpr_function
def line_layout(warps):
    """Of a tile of [lines, 8]: 16 bytes a thread, neighbours by neighbours."""
    return gl.BlockedLayout([1, 8], [32, 1], [warps, 1], [1, 0])


@gluon.constexpr_function
def phi_layout(dtype, warps):
    """Of phi's tile [STEP, PHI_COLUMNS]: 16 bytes a thread."""
    vector = 128 // dtype.primitive_bitwidth
    return gl.BlockedLayout([1, vector], [vector, 32 // vector], [warps, 1], [1, 0])


@gluon.constexpr_function
def phi_shared(dtype):
    """Of the same in shared memory: read along its rows, by eight threads at once."""
    wide = dtype.primitive_bitwidth == 32
    return gl.SwizzledSharedLayout(4, 1, 8, [1, 0]) if wide else gl.SwizzledSharedLayout(8, 2, 4, [1, 0])


@gluon.jit
def multiply(phi, x, z):
    """z + phi @ x; a phi in float32 as three parts in bfloat16."""
    if phi.dtype == gl.float32:
        high, middle, low = bf16_parts(phi)
        return ampere.mma_v2(high, x, ampere.mma_v2(middle, x, ampere.mma_v2(low, x, z)))
    else:
        return ampere.mma_v2(phi, x, z)


@gluon.constexpr_function
def product_layout(warps):
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, warps], instr_shape=[16, 8])


@gluon.jit
def copy_step(x_buffer, phi_buffer, stage, X, PHI, first, n_cols, x_cols, in_tokens, phi_rows, in_width):
    """Start to copy x and phi of the columns from ``first`` on, as one group; zeros past the last."""
    copy_tile(x_buffer, stage, X + first, in_tokens & (first + x_cols < n_cols))
    copy_tile(phi_buffer, stage, PHI + first * 24, in_width & (first + phi_rows < n_cols))
    async_copy.commit_group()


@gluon.jit
def project_pipeline(
    Z, X, PHI, n_tokens, n_cols, parts, ROWS: gl.constexpr, STAGES: gl.constexpr, WIDTH: gl.constexpr
):
    """ROWS tokens a program, every ``parts``-th STEP of their columns; STAGES - 1 copies in flight."""
    WARPS: gl.constexpr = gl.num_warps()
    GROUPS: gl.constexpr = ROWS // (8 * WARPS)  # of 8 tokens a warp
    LINES: gl.constexpr = ROWS * STEP // 8
    lines: gl.constexpr = line_layout(WARPS)
    rows: gl.constexpr = phi_layout(PHI.dtype.element_ty, WARPS)
    result: gl.constexpr = product_layout(WARPS)
    program = gl.program_id(0)
    part = program % parts
    first_token = (program // parts).to(gl.int64) * ROWS

    # A line is 8 columns of a token, by group of tokens, half of the step, warp, token and lane.
    line = gl.arange(0, LINES, layout=gl.SliceLayout(1, lines))[:, None]
    token = line // (64 * WARPS) * (8 * WARPS) + line // 4 % (8 * WARPS)
    x_cols = line // (32 * WARPS) % 2 * 32 + line % 4 * 8
    eight = gl.arange(0, 8, layout=gl.SliceLayout(0, lines))[None, :]
    X += (first_token + token) * n_cols + x_cols + eight
    in_tokens = (first_token + token < n_tokens) & (eight < 8)
    row = gl.arange(0, STEP, layout=gl.SliceLayout(1, rows))[:, None]
    phi_rows = row // 8 % 2 * 32 + row // 2 % 4 * 8 + row // 16 * 2 + row % 2
    column = gl.arange(0, PHI_COLUMNS, layout=gl.SliceLayout(0, rows))[None, :]
    PHI += phi_rows * 24 + column
    in_width = column < 24

    x_shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    x_buffer = gl.allocate_shared_memory(X.dtype.element_ty, [STAGES, LINES, 8], x_shared)
    phi_dtype: gl.constexpr = PHI.dtype.element_ty
    phi_buffer = gl.allocate_shared_memory(phi_dtype, [STAGES, STEP, PHI_COLUMNS], phi_shared(phi_dtype))
    step = parts * STEP
    copied = part * STEP
    for i in gl.static_range(STAGES - 1):
        copy_step(x_buffer, phi_buffer, i, X, PHI, copied, n_cols, x_cols, in_tokens, phi_rows, in_width)
        copied += step
    z = gl.zeros([PHI_COLUMNS, ROWS], gl.float32, result)
    squares = gl.zeros([LINES], gl.float32, gl.SliceLayout(1, lines))
    stage = 0
    to_stage = STAGES - 1
    for _ in range(part * STEP, n_cols, step):
        async_copy.wait_group(STAGES - 2)
        gl.thread_barrier()  # phi is here for all, and all are done with the stage before
        copy_step(
            x_buffer, phi_buffer, to_stage, X, PHI, copied, n_cols, x_cols, in_tokens, phi_rows, in_width
        )
        copied += step
        x = x_buffer.index(stage).load(lines)
        phi = phi_buffer.index(stage).permute([1, 0]).load(gl.DotOperandLayout(0, result, 2))
        stage = next_stage(stage, STAGES)
        to_stage = next_stage(to_stage, STAGES)
        wide = x.to(gl.float32)
        squares += gl.sum(wide * wide, 1)
        pairs = gl.reshape(x, [GROUPS, 2, WARPS, 8, 4, 4, 2])
        operand = gl.reshape(gl.permute(pairs, [5, 1, 4, 6, 0, 2, 3]), [STEP, ROWS])
        z = multiply(phi, gl.convert_layout(operand, gl.DotOperandLayout(1, result, 2)), z)
    async_copy.wait_group(0)

    at = gl.arange(0, PHI_COLUMNS, layout=gl.SliceLayout(1, result))[:, None]
    tokens = first_token + gl.arange(0, ROWS, layout=gl.SliceLayout(0, result))[None, :]
    row_at = Z + (part * n_tokens + tokens) * WIDTH
    gl.store(row_at + at, z, mask=(tokens < n_tokens) & (at < 24))
    by_lane = gl.reshape(squares, [GROUPS, 2, WARPS * 8, 4])
    sums = gl.reshape(gl.sum(gl.sum(by_lane, 3), 1), [ROWS])
    sums = gl.convert_layout(sums, gl.SliceLayout(0, result))[None, :]
    gl.store(row_at + at, sums.to(gl.float32) + gl.zeros_like(z), mask=(tokens < n_tokens) & (at == 24))


@gluon.constexpr_function
def own_layout(rows, cols, warps):
    """Of a tile of tokens and columns: the tokens where the matrix instruction has its rows, 8 neighbouring columns a
    thread."""
    registers = [[0, 1], [0, 2], [0, 4], [8, 0]]
    registers += [[0, 1 << i] for i in range(5, 16) if 1 << i < cols]
    registers += [[1 << i, 0] for i in range(4, 16) if 16 * warps <= 1 << i < rows]
    by_warp = [[1 << i, 0] for i in range(4, 16) if 1 << i < 16 * warps]
    return gl.DistributedLinearLayout(
        registers, [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], by_warp, [], [rows, cols]
    )


@gluon.constexpr_function
def copy_layout(cols, warps):
    """Of a tile that is copied: whole rows of it by neighbouring threads."""
    return gl.BlockedLayout([1, 8], [256 // cols, cols // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def by_tokens(warps):
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1], instr_shape=[16, 8])


@gluon.jit
def copy_tokens(
    x_buffer, dz_buffer, stage, X, DZ, first, n_tokens, n_cols, x_rows, in_cols, dz_rows, in_width
):
    """Start to copy x and dz of the tokens from ``first`` on, as one group; zeros past the last."""
    copy_tile(x_buffer, stage, X + first * n_cols, in_cols & (first + x_rows < n_tokens))
    copy_tile(dz_buffer, stage, DZ + first * PHI_COLUMNS, in_width & (first + dz_rows < n_tokens))
    async_copy.commit_group()


@gluon.jit
def project_backward_pipeline(
    DX, PARTIALS, DZ, FACTOR, X, PHI, n_tokens, n_cols, blocks, store_dx, store_dphi,
    ROWS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Persistent programs: ``blocks`` side by side have the columns, the groups of them ROWS tokens a step; STAGES - 1
    copies in flight. x is read twice from shared memory, for dphi with pairs of tokens in a register.

    dx = dz phi^T + factor * x: phi's columns are taken in an order in which the product leaves each thread 8
    neighbouring columns of a token, as it reads x and stores dx."""
    WARPS: gl.constexpr = gl.num_warps()
    copied_x: gl.constexpr = copy_layout(BLOCK, WARPS)
    copied_dz: gl.constexpr = copy_layout(PHI_COLUMNS, WARPS)
    own: gl.constexpr = own_layout(ROWS, BLOCK, WARPS)
    of_dx: gl.constexpr = by_tokens(WARPS)
    of_dphi: gl.constexpr = product_layout(WARPS)
    program = gl.program_id(0)
    group = (program // blocks).to(gl.int64)
    first_col = program % blocks * BLOCK
    step = (gl.num_programs(0) // blocks).to(gl.int64) * ROWS

    m = gl.arange(0, PHI_COLUMNS, layout=gl.SliceLayout(1, copied_x))[:, None]
    place = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, copied_x))[None, :]
    col = first_col + place // 32 * 32 + place // 2 % 4 * 8 + place // 8 % 4 * 2 + place % 2
    phi = gl.load(PHI + col * 24 + m, mask=(m < 24) & (col < n_cols), other=0.0)
    phi = gl.convert_layout(phi, gl.DotOperandLayout(1, of_dx, 2))

    x_rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, copied_x))[:, None]
    x_cols = first_col + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, copied_x))[None, :]
    X += x_rows.to(gl.int64) * n_cols + x_cols
    dz_rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, copied_dz))[:, None]
    column = gl.arange(0, PHI_COLUMNS, layout=gl.SliceLayout(0, copied_dz))[None, :]
    DZ += dz_rows * PHI_COLUMNS + column
    in_cols, in_width = x_cols < n_cols, column < 24
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, own))
    cols = first_col + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, own))
    DX += rows[:, None].to(gl.int64) * n_cols + cols[None, :]
    stored = (cols < n_cols)[None, :] & (store_dx != 0)

    x_shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    dz_shared: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    x_buffer = gl.allocate_shared_memory(X.dtype.element_ty, [STAGES, ROWS, BLOCK], x_shared)
    dz_buffer = gl.allocate_shared_memory(DZ.dtype.element_ty, [STAGES, ROWS, PHI_COLUMNS], dz_shared)
    first = group * ROWS
    copied = first
    for i in gl.static_range(STAGES - 1):
        copy_tokens(
            x_buffer, dz_buffer, i, X, DZ, copied, n_tokens, n_cols, x_rows, in_cols, dz_rows, in_width
        )
        copied += step
    dphi = gl.zeros([PHI_COLUMNS, BLOCK], gl.float32, of_dphi)
    stage = 0
    to_stage = STAGES - 1
    for token in range(first, n_tokens, step):
        factor = gl.load(FACTOR + token + rows, mask=token + rows < n_tokens, other=0.0)
        async_copy.wait_group(STAGES - 2)
        gl.thread_barrier()  # the copies are here for all, and all are done with the stage before
        copy_tokens(
            x_buffer, dz_buffer, to_stage, X, DZ, copied, n_tokens, n_cols, x_rows, in_cols, dz_rows, in_width
        )
        copied += step
        dz = dz_buffer.index(stage).load(gl.DotOperandLayout(0, of_dx, 2))
        dx = ampere.mma_v2(dz, phi, gl.zeros([ROWS, BLOCK], gl.float32, of_dx))
        dx = gl.permute(gl.reshape(dx, [ROWS, BLOCK // 32, 4, 4, 2]), [0, 1, 3, 2, 4])
        dx = gl.convert_layout(gl.reshape(dx, [ROWS, BLOCK]), own)
        x = x_buffer.index(stage).load(own).to(gl.float32)
        dx = (dx + factor[:, None] * x).to(DX.dtype.element_ty)
        gl.store(DX + token * n_cols, dx, mask=stored & (token + rows < n_tokens)[:, None])
        turned = dz_buffer.index(stage).permute([1, 0]).load(gl.DotOperandLayout(0, of_dphi, 2))
        dphi = ampere.mma_v2(turned, x_buffer.index(stage).load(gl.DotOperandLayout(1, of_dphi, 2)), dphi)
        stage = next_stage(stage, STAGES)
        to_stage = next_stage(to_stage, STAGES)
    async_copy.wait_group(0)

    m = gl.arange(0, PHI_COLUMNS, layout=gl.SliceLayout(1, of_dphi))[:, None]
    col = first_col + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, of_dphi))[None, :]
    out = PARTIALS + group * n_cols * 24 + col * 24 + m
    gl.store(out, dphi, mask=(m < 24) & (col < n_cols) & (store_dphi != 0))
