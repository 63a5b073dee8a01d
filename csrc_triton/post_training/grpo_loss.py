"""GRPO's loss from logits: its kernels are those of the ops that it is made of."""

DECLARATION = {
    "op": "grpo_loss",
    "uses": ["selective_log_softmax", "policy_loss"],
    "kernels": {},
}
