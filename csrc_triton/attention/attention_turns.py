"""Which tile of which head a program has, of kernels with a program a tile."""

import triton
import triton.language as tl


@triton.jit
def in_turns(tiles_a_head, section):
    """(head of all batches, tile of it): ``section`` heads at a time take turns to start their next tile. Where tiles
    differ and a head's longest come first, no long one starts late then."""
    program = tl.program_id(0)
    before = program // (section * tiles_a_head) * section  # heads in sections before
    width = tl.minimum(section, tl.num_programs(0) // tiles_a_head - before)
    number = (program - before * tiles_a_head) // width
    return program - before * tiles_a_head - number * width + before, number
