"""The inner loop of warp-specialised attention (Gluon, Hopper): wgmma of Q K^T and P V, masks, the online softmax."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from csrc_triton.attention.tile_scheduler import LOCAL

SELECT_LT = gl.constexpr("{ .reg .pred p; setp.lt.s32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p; }")
SELECT_GE = gl.constexpr("{ .reg .pred p; setp.ge.s32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p; }")


@gluon.jit
def no_hoist(x):
    """x, computed here. The compiler would compute what depends on the thread index alone before the warps specialise,
    where it takes a register in every partition, also in those with few."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32, False, 1)


@gluon.jit
def relative_bound(bound, s):
    """``bound`` of each row of scores ``s``, relative to the thread's first key of a block. A thread's keys are
    8 a + 2 b + c with one b, so it compares one bound with constants 8 a + c, which take no registers in the loop."""
    OF: gl.constexpr = s.reshape([s.shape[0], s.shape[1] // 8, 4, 2]).type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, OF)))
    b = no_hoist(2 * gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, OF)))))
    bound = gl.convert_layout(bound, ROW, assert_trivial=True)
    bound = gl.expand_dims(gl.expand_dims(gl.expand_dims(bound, 1), 2), 3)
    return bound - gl.expand_dims(gl.expand_dims(gl.expand_dims(b, 0), 1), 3)


@gluon.jit
def mask_scores(s, key, bounds, LEFT: gl.constexpr):
    """Scores ``s`` of the block from ``key`` on, -inf where a row does not see a key. ``bounds`` are each row's first
    visible key, used with LEFT alone, and the one after its last. In assembly: LLVM packs all predicates into words
    first, which takes four times the instructions."""
    first, last = bounds
    parts = s.reshape([s.shape[0], s.shape[1] // 8, 4, 2])
    OF: gl.constexpr = parts.type.layout
    a = 8 * gl.arange(0, s.shape[1] // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, OF))))
    c = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, OF))))
    own = gl.expand_dims(gl.expand_dims(gl.expand_dims(a, 0), 2), 3)
    own += gl.expand_dims(gl.expand_dims(gl.expand_dims(c, 0), 1), 2)
    last = relative_bound(last, s) - key
    parts = gl.inline_asm_elementwise(SELECT_LT, "=f,f,r,r", [parts, own, last], gl.float32, True, 1)
    if LEFT:
        first = relative_bound(first, s) - key
        parts = gl.inline_asm_elementwise(SELECT_GE, "=f,f,r,r", [parts, own, first], gl.float32, True, 1)
    return gl.convert_layout(parts.reshape(s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def soft_cap(s, inner):
    """tanh(s * inner), or s where inner is 0."""
    if inner != 0.0:
        s = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [s * inner], gl.float32, True, 1)
    return s


@gluon.jit
def to_x2(e, dtype: gl.constexpr):
    """[M, N] of fp32 rounded to bf16x2 or f16x2: [M, N / 2] of int32. The compiler gives each value of a 16-bit tensor
    that a loop carries a register of its own."""
    low, high = gl.split(e.reshape([e.shape[0], e.shape[1] // 2, 2]))
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, True, 1
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, True, 1
        )


@gluon.jit
def from_x2(x, dtype: gl.constexpr, layout: gl.constexpr, N: gl.constexpr):
    """The values of ``to_x2`` as an operand of wgmma; no value moves between threads."""
    low = x.to(gl.int16).to(dtype, bitcast=True)
    high = (x >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.convert_layout(gl.join(low, high).reshape([x.shape[0], N]), layout, assert_trivial=True)


@gluon.jit
def partial_row_sums(e):
    """Each thread's sum of a row, [M, 4]: the four threads of a row are reduced once, after the loop."""
    return gl.sum(gl.sum(e.reshape([e.shape[0], e.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def scale_rows(acc, by):
    return acc * gl.expand_dims(gl.convert_layout(by, gl.SliceLayout(1, acc.type.layout)), 1)


@gluon.jit
def k_index(b, FIRST: gl.constexpr, z):
    """The position of block b's K in its pipeline; FIRST: the block is its tile's first. With SHARED_PIPELINE K and V
    are in one pipeline in the order of use: each block's K before the V of the block before. Three stages then do what
    takes four otherwise, so that blocks of keys can be longer."""
    n = b
    if z.SHARED_PIPELINE:
        n = 2 * b if FIRST else 2 * b - 1
    return n


@gluon.jit
def v_index(b, LAST: gl.constexpr, z):
    """The position of block b's V in its pipeline; LAST: the block is its tile's last."""
    n = b
    if z.SHARED_PIPELINE:
        n = 2 * b + 1 if LAST else 2 * b + 2
    return n


# Named barriers 8 to 10 order the warp groups: 128 threads wait, 128 arrive. Triton uses 0 to 4.
WAIT0, WAIT1, WAIT2 = (gl.constexpr(f"bar.sync {8 + g}, 256; mov.b32 $0, $1;") for g in range(3))
ARRIVE0, ARRIVE1, ARRIVE2 = (gl.constexpr(f"bar.arrive {8 + g}, 256; mov.b32 $0, $1;") for g in range(3))


@gluon.jit
def named_barrier(assembly: gl.constexpr):
    x = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))  # one element, once a thread
    gl.inline_asm_elementwise(assembly, "=r,r", [x], gl.int32, False, 1)


@gluon.jit
def ping_pong_wait(g: gl.constexpr, z):
    """Wait until the warp group before this one has issued its products, so that its softmax overlaps with ours."""
    if z.PING_PONG:
        if g == 0:
            named_barrier(WAIT0)
        elif g == 1:
            named_barrier(WAIT1)
        else:
            named_barrier(WAIT2)


@gluon.jit
def ping_pong_arrive(g: gl.constexpr, z):
    if z.PING_PONG:
        if g == z.WARP_GROUPS - 1:
            named_barrier(ARRIVE0)
        elif g == 0:
            named_barrier(ARRIVE1)
        else:
            named_barrier(ARRIVE2)


@gluon.jit
def skip_blocks(count, b, k, v, g: gl.constexpr, z):
    """Release blocks b to b + count - 1, which only other warp groups need."""
    for j in range(b, b + count):
        at = k_index(j, True, z)  # with SHARED_PIPELINE whole tiles are skipped: all stages in turn
        mbarrier.wait(k.full.index(at % z.STAGES), (at // z.STAGES) & 1)
        ping_pong_wait(g, z)
        ping_pong_arrive(g, z)
        mbarrier.arrive(k.empty.index(at % z.STAGES), count=1)
        at = v_index(j, True, z)
        mbarrier.wait(v.full.index(at % z.STAGES), (at // z.STAGES) & 1)
        mbarrier.arrive(v.empty.index(at % z.STAGES), count=1)


@gluon.jit
def issue_qk(q, g: gl.constexpr, k, stage, z):
    """Issue Q K^T of a block."""
    at = g
    if z.SHARED_PIPELINE or z.D1 == 256:
        at += stage >> 30  # 0, but not to the compiler: it would keep the descriptors of Q in registers
    a = q.first.index(at).reshape([64, z.D1])
    keys = k.first.index(stage).reshape([z.BLOCK_N, z.D1]).permute((1, 0))
    zeros = gl.zeros([64, z.BLOCK_N], gl.float32, z.S)
    s = warpgroup_mma(a, keys, zeros, use_acc=False, is_async=True)
    if z.D2 > 0:
        a = q.second.index(at).reshape([64, z.D2])
        keys = k.second.index(stage).reshape([z.BLOCK_N, z.D2]).permute((1, 0))
        s = warpgroup_mma(a, keys, s, is_async=True)
    return s


@gluon.jit
def issue_pv(p, v, stage, acc, acc2, z):
    """Issue acc + P V of a block."""
    p = from_x2(p, v.first.dtype, z.P, z.BLOCK_N)
    acc = warpgroup_mma(p, v.first.index(stage).reshape([z.BLOCK_N, z.D1]), acc, is_async=True)
    if z.D2 > 0:
        acc2 = warpgroup_mma(p, v.second.index(stage).reshape([z.BLOCK_N, z.D2]), acc2, is_async=True)
    return acc, acc2


@gluon.jit
def wait_pv(acc, acc2, z):
    if z.D2 > 0:
        acc, acc2 = warpgroup_mma_wait(0, deps=(acc, acc2))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    return acc, acc2


@gluon.jit
def step(
    b, key, q, k, v, bounds, scale, cap, p, acc, acc2, m, sums, MASKED: gl.constexpr, g: gl.constexpr, z
):
    """Scores and softmax of block b, which overlap with P V of block b - 1."""
    at_k = k_index(b, False, z)
    at_v = v_index(b - 1, False, z)
    stage = at_k % z.STAGES
    before = at_v % z.STAGES
    mbarrier.wait(k.full.index(stage), (at_k // z.STAGES) & 1)
    ping_pong_wait(g, z)
    s = issue_qk(q, g, k, stage, z)
    mbarrier.wait(v.full.index(before), (at_v // z.STAGES) & 1)
    acc, acc2 = issue_pv(p, v, before, acc, acc2, z)
    ping_pong_arrive(g, z)
    s = warpgroup_mma_wait(2 if z.D2 > 0 else 1, deps=(s,))
    mbarrier.arrive(k.empty.index(stage), count=1)
    if z.MASK == LOCAL:
        s = soft_cap(s, cap)
    if MASKED:
        s = mask_scores(s, key, bounds, z.MASK == LOCAL)
    new_m = gl.maximum(m, gl.max(s, 1) * scale)
    e = gl.exp2(s * scale - gl.expand_dims(new_m, 1))
    alpha = gl.exp2(m - new_m)
    sums = scale_rows(sums, alpha) + partial_row_sums(e)
    acc, acc2 = wait_pv(acc, acc2, z)
    mbarrier.arrive(v.empty.index(before), count=1)
    p = to_x2(e, v.first.dtype)
    acc = scale_rows(acc, alpha)
    if z.D2 > 0:
        acc2 = scale_rows(acc2, alpha)
    return p, acc, acc2, new_m, sums
