"""What declarations say of their forms ``ring``, beside the function's name."""

# Of row_ring's walks.
ROW_RING = {
    "language": "gluon",
    "constants": ["BLOCK", "SLOTS", "AHEAD", "KEPT", "WHOLE", "TURNS"],
    "defaults": {"WHOLE": True, "TURNS": 1},
    "covers": "SLOTS * BLOCK + KEPT * BLOCK",
    "any_length": "WHOLE",
    "requires": {"aligned": [True]},
}
# Of norm_ring's.
NORM_RING = {
    "language": "gluon",
    "constants": ["PIECES", "BLOCK", "STAGES"],
    "covers": "2 * PIECES * BLOCK",
    "requires": {"dtype": ["bf16", "fp16"], "aligned": [True]},
    "may_spill": "a tenth of the registers, once a row, for a row that no other program shares",
}
