"""Masks of tokens, of any dtype that frameworks keep them in: read as they are, not converted by a launch before."""

import triton
import triton.language as tl


@triton.jit
def token_counts(MASK, at, kind, here):
    """Whether MASK[at] is not zero; False where ``here`` is. ``kind``: 0 where there is no mask and all count, the
    bytes of an integer (1, 4 or 8), -4 of a float32, whose sign does not count."""
    if kind == 0:
        counts = here
    elif kind == 1:
        BYTES = MASK.to(tl.pointer_type(tl.int8), bitcast=True)
        counts = here & (tl.load(BYTES + at, mask=here, other=0) != 0)
    elif kind == 8:
        low = tl.load(MASK + at * 2, mask=here, other=0)
        high = tl.load(MASK + at * 2 + 1, mask=here, other=0)
        counts = here & ((low | high) != 0)
    else:
        word = tl.load(MASK + at, mask=here, other=0)
        word = tl.where(kind < 0, word & 0x7FFFFFFF, word)
        counts = here & (word != 0)
    return counts
