"""Preference losses of a linear layer: the kernels are cross_entropy's, and what is the losses' own is a few numbers a
sequence, in torch."""

DECLARATION = {
    "op": "fused_linear_preference_loss",
    "uses": ["cross_entropy", "fused_linear_cross_entropy"],
    "kernels": {},
}
