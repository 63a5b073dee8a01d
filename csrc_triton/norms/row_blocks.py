"""A row in blocks whose loads are all under way before the first value is used."""

import triton
import triton.language as tl


@triton.jit
def load_blocks(X, n_cols, block, BLOCKS: tl.constexpr):
    """Zeros behind the row. What is kept in the caches is read again."""
    xs = ()
    for i in tl.static_range(BLOCKS):
        cols = i * block.shape[0] + block
        xs += (tl.load(X + cols, mask=cols < n_cols, other=0.0, eviction_policy="evict_last"),)
    tl.debug_barrier()  # or the compiler takes the loads down to where they are used
    return xs
