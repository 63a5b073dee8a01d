"""fp32 values exchanged by the programs of a cooperative launch, through global memory.

One 64-bit word carries an fp32 value and, in its low half, a tag or a second value, so that no ordering between two
stores is needed. The low half of a posted word is never 0. Words must be zero when the kernel starts, or the tag must
be one that no earlier launch used. Waiting is safe only in a cooperative launch: the driver then keeps all programs of
the grid resident, or refuses the launch. PTX only.
"""

import triton
import triton.language as tl


@triton.jit
def pack_word(high, low):
    """Two fp32 values as one word."""
    return (high.to(tl.uint32, bitcast=True).to(tl.int64) << 32) | low.to(tl.uint32, bitcast=True).to(
        tl.int64
    )


@triton.jit
def high_value(words):
    return ((words >> 32) & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def low_value(words):
    return (words & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def unpack_word(words):
    """The two values of ``pack_word``."""
    return high_value(words), low_value(words)


@triton.jit
def post(pointer, value, tag=1):
    """Publish ``value`` at ``pointer`` (int64), with a positive int32 as its tag."""
    tl.store(pointer, (value.to(tl.uint32, bitcast=True).to(tl.int64) << 32) | tag)


@triton.jit
def post_two(pointer, high, low, mask=None):
    """Publish two values in one word. A ``low`` of 0 is published as -0."""
    bits = low.to(tl.int32, bitcast=True)
    bits = tl.where(bits == 0, -2147483648, bits).to(tl.uint32, bitcast=True).to(tl.int64)
    tl.store(pointer, (high.to(tl.uint32, bitcast=True).to(tl.int64) << 32) | bits, mask=mask)


@triton.jit
def poll(pointers):
    """Read words without waiting. Inline PTX, because the software pipeliner would prefetch an ordinary load, volatile
    or not, rows too early."""
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
    """Whether any of ``words``, which were zero when the kernel started, is not posted yet."""
    return tl.min((words.to(tl.int32) != 0).to(tl.int32), 0) == 0


@triton.jit
def wait_for_words(pointers, PACK: tl.constexpr):
    """Words that ``post_two`` publishes, once they are there. A thread waits for PACK of its own words at a time, and
    for no other thread."""
    if PACK == 4:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred %missing;
            retry:
            ld.relaxed.gpu.global.u64 $0, [$4];
            ld.relaxed.gpu.global.u64 $1, [$5];
            ld.relaxed.gpu.global.u64 $2, [$6];
            ld.relaxed.gpu.global.u64 $3, [$7];
            setp.eq.u64 %missing, $0, 0;
            setp.eq.or.u64 %missing, $1, 0, %missing;
            setp.eq.or.u64 %missing, $2, 0, %missing;
            setp.eq.or.u64 %missing, $3, 0, %missing;
            @%missing bra retry;
            }""",
            "=&l,=&l,=&l,=&l,l,l,l,l", [pointers.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=4,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred %missing;
            retry:
            ld.relaxed.gpu.global.u64 $0, [$1];
            setp.eq.u64 %missing, $0, 0;
            @%missing bra retry;
            }""",
            "=&l,l", [pointers.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def sum_high(words, lane, split):
    """Sum of the high values of the first ``split`` words, in the order of the programs: the same in each program."""
    return tl.sum(tl.where(lane < split, high_value(words), 0.0), 0)


@triton.jit
def sum_low(words, lane, split):
    """Sum of the low values of the first ``split`` words, as ``sum_high``."""
    return tl.sum(tl.where(lane < split, low_value(words), 0.0), 0)


@triton.jit
def barrier_arrive(counter, programs):
    """Arrive at a barrier of all programs of a cooperative launch: what a program wrote before it is visible to all
    others once they have waited. ``counter`` (int32) is 0 before its first use, and each barrier leaves it as the next
    one needs it: a barrier flips the sign, since program 0 adds what makes the others' ones up to 2^31."""
    one = tl.where(tl.program_id(0) == 0, 0x80000000 - (programs.to(tl.int64) - 1), 1).to(tl.int32)
    return tl.atomic_add(counter, one, sem="acq_rel", scope="gpu")


@triton.jit
def barrier_passed(counter, before):
    """Whether all programs have arrived since ``barrier_arrive`` returned ``before``."""
    now = tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.u32 $0, [$1];",
        "=r,l",
        [counter.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    return (now ^ before) < 0
