"""Kullback-Leibler divergence of log-probabilities x from y, summed or element by element, and its gradient by x.

y holds probabilities (the kind of that name) or log-probabilities (``forward``).
"""

from csrc_triton.losses.divergence import (  # noqa: F401 (forms name functions)
    BACKWARD,
    BOTH,
    FORWARD,
    backward,
    both,
    forward,
)

KINDS = {
    "axes": {"dtype": ["bf16", "fp16", "fp32"], "kind": ["probabilities", "forward"]},
    "gives": {"kind": {"probabilities": {"KIND": 0}, "forward": {"KIND": 1}}},
}
DECLARATION = {
    "op": "kl_div",
    "uses": ["divergence_sums"],
    "kernels": {
        "kl_div_forward": {**FORWARD, **KINDS},
        "kl_div_both": {**BOTH, **KINDS},
        "kl_div_backward": {**BACKWARD, **KINDS},
    },
}
