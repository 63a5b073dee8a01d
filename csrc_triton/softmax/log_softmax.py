"""Log-softmax over rows: y = x - max - log(sum of exp(x - max)), and its backward."""

from csrc_triton.softmax.softmax_backward import (  # noqa: F401 (forms name functions)
    BACKWARD_ALIGNED,
    BACKWARD_ARGUMENTS,
    LONG_REPACKED,
    ROW_REPACKED,
    TILE,
    backward_blocks,
    backward_long,
    backward_row,
    backward_tile,
)
from csrc_triton.softmax.softmax_forward import (  # noqa: F401 (forms name functions)
    DTYPES,
    FORWARD_ALIGNED,
    FORWARD_ARGUMENTS,
    FORWARD_FORMS,
    forward_blocks,
    forward_long,
    forward_pipeline,
    forward_row,
    forward_tile,
)

DECLARATION = {
    "op": "log_softmax",
    "kernels": {
        "log_softmax_forward": {
            "arguments": FORWARD_ARGUMENTS,
            "axes": DTYPES,
            "aligned": FORWARD_ALIGNED,
            "forms": FORWARD_FORMS,
        },
        "log_softmax_backward": {
            "arguments": BACKWARD_ARGUMENTS,
            "axes": DTYPES,
            "aligned": BACKWARD_ALIGNED,
            "forms": {
                "tile": TILE,
                "row": ROW_REPACKED,
                "blocks": {
                    "function": "backward_blocks",
                    "constants": ["BLOCK", "BLOCKS"],
                    "covers": "BLOCKS * BLOCK",
                },
                "long": LONG_REPACKED,
            },
        },
    },
}
