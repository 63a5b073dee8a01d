"""Generalised Jensen-Shannon divergence of log-probabilities, summed, and its gradient by x.

The kinds: ``forward``, beta is 0: KL(P || Q); ``reverse``, beta is 1: KL(Q || P); ``mixed``, between. The loss is
always summed up: ``each`` is 0.
"""

from csrc_triton.losses.divergence import (  # noqa: F401 (forms name functions)
    BACKWARD,
    BOTH,
    FORWARD,
    JENSEN_SHANNON,
    backward,
    both,
    forward,
)

DECLARATION = {
    "op": "jsd",
    "uses": ["divergence_sums"],
    "kernels": {
        "jsd_forward": {**FORWARD, **JENSEN_SHANNON},
        "jsd_both": {**BOTH, **JENSEN_SHANNON},
        "jsd_backward": {**BACKWARD, **JENSEN_SHANNON},
    },
}
