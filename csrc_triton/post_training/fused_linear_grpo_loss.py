"""Policy gradient losses of a linear layer: the kernels are cross_entropy's, and what is the losses' own is a few
numbers a token, in torch."""

DECLARATION = {
    "op": "fused_linear_grpo_loss",
    "uses": ["cross_entropy", "fused_linear_cross_entropy"],
    "kernels": {},
}
