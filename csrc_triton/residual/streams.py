"""What the kernels of hyper-connections share: tokens of several streams, and sums that cross a program together.

Stream s of token t is row t * STREAMS + s of a tensor.
"""

import triton
import triton.language as tl


@triton.jit
def load_streams(X, row, stride, cols, mask, STREAMS: tl.constexpr):
    """The streams' blocks of columns as they are stored, all loads before the first use; ``row`` is of stream 0."""
    found = ()
    for s in tl.static_range(STREAMS):
        found += (tl.load(X + (row + s) * stride + cols, mask=mask, other=0.0),)
    return found


@triton.jit
def stacked(parts, LEN: tl.constexpr):
    """LEN tensors [N] as one [N, LEN], LEN a power of two. What a thread holds it keeps."""
    if LEN == 1:
        return tl.expand_dims(parts[0], 1)
    else:
        evens, odds = (), ()
        for i in tl.static_range(LEN // 2):
            evens += (parts[2 * i],)
            odds += (parts[2 * i + 1],)
        pairs = tl.join(stacked(evens, LEN // 2), stacked(odds, LEN // 2))
        return tl.reshape(pairs, [parts[0].shape[0], LEN])


@triton.jit
def sums_by_eight(values):
    """[N] to [N / 8]: neighbours, which a thread holds, added."""
    return tl.sum(tl.reshape(values, [values.shape[0] // 8, 8]), 1)
