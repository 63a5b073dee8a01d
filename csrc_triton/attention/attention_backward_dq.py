"""How attention's backward by warp groups adds to dQ. See ``attention_backward_groups``."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SLAB_BYTES = gl.constexpr(2048)  # eight columns of 64 rows of dQ in float32


# One statement adds all of a thread's values, a vector of four for each slab; operands are the results (which inline
# assembly must have), then as many pointers as values, all the same, then the values.
@gluon.constexpr_function
def reduction(values):
    pointer, first = values // 4, values // 4 + values
    vectors = (
        (SLAB_BYTES.value * j, ", ".join(f"${first + 4 * j + e}" for e in range(4)))
        for j in range(values // 4)
    )
    return " ".join(
        f"red.relaxed.gpu.global.add.v4.f32 [${pointer}+{at}], {{{four}}};" for at, four in vectors
    )


@gluon.constexpr_function
def reduction_operands(values):
    return ",".join(["=r"] * (values // 4) + ["l"] * values + ["f"] * values)


@gluon.jit
def add_dq(to, dq):
    """Add [64, N] of dQ to float32 at ``to``, where tiles of 64 rows lie in the order of accumulators: slabs of eight
    columns, in each the 4 values of a thread of the group beside each other (``finish`` undoes it). A warp adds 512
    bytes side by side, with no trip through shared memory."""
    layout: gl.constexpr = dq.type.layout
    values: gl.constexpr = dq.shape[1] // 2  # a thread's
    c = gl.arange(0, dq.shape[1], gl.SliceLayout(0, layout))
    r = gl.arange(0, 64, gl.SliceLayout(1, layout))
    thread = gl.expand_dims((r // 16) * 32 + (r % 8) * 4, 1) + gl.expand_dims((c % 8) // 2, 0)
    gl.inline_asm_elementwise(
        reduction(values),
        reduction_operands(values),
        [(to + thread * 4).to(gl.int64), dq],
        dtype=gl.int8,
        is_pure=False,
        pack=values,
    )
