"""Total variation distance of probabilities, summed or element by element, and its gradient by x."""

from csrc_triton.losses.divergence import (  # noqa: F401 (forms name functions)
    BACKWARD,
    BOTH,
    FORWARD,
    backward,
    both,
    forward,
)

KINDS = {
    "axes": {"dtype": ["bf16", "fp16", "fp32"], "kind": ["total_variation"]},
    "gives": {"kind": {"total_variation": {"KIND": 4}}},
}
DECLARATION = {
    "op": "tvd",
    "uses": ["divergence_sums"],
    "kernels": {
        "tvd_forward": {**FORWARD, **KINDS},
        "tvd_both": {**BOTH, **KINDS},
        "tvd_backward": {**BACKWARD, **KINDS},
    },
}
