"""One fp32 value a program, handed to neighbour programs through global memory.

Value and mark travel in one 64-bit word, so that no ordering between two stores is needed. The words must be zero
when the kernel starts, or have other marks than this launch's. Waiting for a neighbour is only safe when it is sure to
run: the launch must be cooperative, which makes the driver keep all programs of the grid resident or refuse the launch.
PTX only.
"""

import triton
import triton.language as tl


@triton.jit
def post(pointer, value, mark=1):
    """Publish ``value`` at ``pointer`` (int64), marked with a positive int32."""
    tl.store(pointer, (value.to(tl.uint32, bitcast=True).to(tl.int64) << 32) | mark)


@triton.jit
def poll(pointers):
    """Read words without waiting. Inline, because the software pipeliner would prefetch an ordinary load, volatile or
    not, rows too early."""
    return tl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.u64 $0, [$1];",
        "=l,l",
        [pointers.to(tl.int64)],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def missing(words):
    """True while any of ``words`` was not posted."""
    return tl.min(words & 0xFFFFFFFF, 0) == 0


@triton.jit
def total(words, lane, count: tl.constexpr):
    """Sum of the first ``count`` posted values, in the order of the programs: the same in every program."""
    values = ((words >> 32) & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
    return tl.sum(tl.where(lane < count, values, 0.0), 0)


@triton.jit
def both(a, b):
    """Two fp32 values in one word."""
    return (a.to(tl.uint32, bitcast=True).to(tl.int64) << 32) | b.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def each(words):
    """The two fp32 values of ``both``."""
    first = ((words >> 32) & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
    return first, (words & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def post_both(pointers, a, b, mask):
    """Publish two fp32 values in one word, the first with its last bit set, so that no word is 0."""
    tl.store(pointers, both(a, b) | (1 << 32), mask=mask)


@triton.jit
def posted(pointers, PACK: tl.constexpr):
    """Words that ``post_both`` publishes, once they are there. A thread waits for PACK of its own at a time, and for no
    other thread."""
    if PACK == 4:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred %missing;
            again:
            ld.relaxed.gpu.global.u64 $0, [$4];
            ld.relaxed.gpu.global.u64 $1, [$5];
            ld.relaxed.gpu.global.u64 $2, [$6];
            ld.relaxed.gpu.global.u64 $3, [$7];
            setp.eq.u64 %missing, $0, 0;
            setp.eq.or.u64 %missing, $1, 0, %missing;
            setp.eq.or.u64 %missing, $2, 0, %missing;
            setp.eq.or.u64 %missing, $3, 0, %missing;
            @%missing bra again;
            }""",
            "=&l,=&l,=&l,=&l,l,l,l,l", [pointers.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=4,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred %missing;
            again:
            ld.relaxed.gpu.global.u64 $0, [$1];
            setp.eq.u64 %missing, $0, 0;
            @%missing bra again;
            }""",
            "=&l,l", [pointers.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def arrive(counter, programs):
    """Come to a barrier of all the programs of a cooperative launch: what a program wrote before is seen by all others
    once they have waited. ``counter`` (int32) is 0 when it is first used, and the barrier leaves it as the next one
    needs it: each flips its sign, to which one program adds what makes the others' ones up to 2^31."""
    one = tl.where(tl.program_id(0) == 0, 0x80000000 - (programs.to(tl.int64) - 1), 1).to(tl.int32)
    return tl.atomic_add(counter, one, sem="acq_rel", scope="gpu")


@triton.jit
def arrived(counter, before):
    """Whether all have come since ``arrive`` returned ``before``."""
    now = tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.u32 $0, [$1];",
        "=r,l",
        [counter.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    return (now ^ before) < 0
