"""Softmax over rows: y = exp(x / T - max) / sum, and its backward."""

from csrc_triton.common.pipeline import ROW_PIPELINE, WHOLE_ROW_PIPELINE
from csrc_triton.softmax.softmax_backward import (  # noqa: F401 (forms name functions)
    BACKWARD_ALIGNED,
    BACKWARD_ARGUMENTS,
    LONG,
    ROW_REPACKED,
    TILE,
    backward_long,
    backward_pipeline,
    backward_row,
    backward_tile,
)
from csrc_triton.softmax.softmax_few_rows import (  # noqa: F401 (forms name functions)
    IN_REGISTERS,
    SPLIT,
    SPLIT_ARGUMENTS,
    forward_in_registers,
    forward_split,
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
    "op": "softmax",
    "kernels": {
        "softmax_forward": {
            "arguments": {**FORWARD_ARGUMENTS, "scale": "fp32"},
            "axes": DTYPES,
            "aligned": FORWARD_ALIGNED,
            "forms": {
                **FORWARD_FORMS,
                "in_registers": IN_REGISTERS,
                "pipeline": {
                    **WHOLE_ROW_PIPELINE,
                    "function": "forward_pipeline",
                    "constants": ["BLOCK", "STAGES", "PREFETCH", "IN_REGISTERS", "WHOLE", "INTERLEAVE"],
                    "defaults": {"WHOLE": True, "INTERLEAVE": 1},
                    "any_length": "WHOLE",
                },
            },
        },
        "softmax_split": {
            "arguments": SPLIT_ARGUMENTS,
            "axes": DTYPES,
            "aligned": FORWARD_ALIGNED,
            "optional": True,
            "host": ["from_n", "up_to_rows"],
            "forms": {"split": SPLIT},
        },
        "softmax_backward": {
            "arguments": {**BACKWARD_ARGUMENTS, "scale": "fp32"},
            "axes": DTYPES,
            "aligned": BACKWARD_ALIGNED,
            "forms": {
                "tile": TILE,
                "row": ROW_REPACKED,
                "long": LONG,
                "pipeline": {**ROW_PIPELINE, "function": "backward_pipeline"},
            },
        },
    },
}
