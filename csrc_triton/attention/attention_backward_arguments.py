"""What the kernels of attention's backward take, for their declaration: literals, which planning reads unimported."""

DTYPE = {"dtype": ["bf16", "fp16"]}

READ = {"Q": "*dtype", "K": "*dtype", "V": "*dtype", "DY": "*dtype", "LSE2": "*fp32", "DELTA": "*fp32"}
STRIDES = {
    "q_batch": "i64",
    "q_head": "i32",
    "q_row": "i32",
    "k_batch": "i64",
    "k_head": "i32",
    "k_row": "i32",
    "v_batch": "i64",
    "v_head": "i32",
    "v_row": "i32",
    "dy_batch": "i64",
    "dy_head": "i32",
    "dy_row": "i32",
}
SIZES = {
    "scale": "fp32",
    "cap": "fp32",
    "gradient_scale": "fp32",
    "tiles_a_head": "i32",
    "section": "i32",
    "heads": "i32",
    "ratio": "i32",
    "dim": "i32",
    "padded": "i32",
    "len_q": "i32",
    "len_k": "i32",
    "right": "i32",
    "left": "i32",
}
READ_ALIGNED = [
    "Q", "K", "V", "DY", "LSE2", "DELTA", "q_batch", "q_head", "q_row", "k_batch", "k_head", "k_row", "v_batch",
    "v_head", "v_row", "dy_batch", "dy_head", "dy_row", "dim", "padded",
]  # fmt: skip

ROWS = {
    "always_aligned": True,
    "arguments": {
        "LSE2": "*fp32",
        "DELTA": "*fp32",
        "Y": "*dtype",
        "DY": "*dtype",
        "LSE": "*fp32",
        "DLSE": "*fp32",
        "y_batch": "i64",
        "y_head": "i32",
        "y_row": "i32",
        "dy_batch": "i64",
        "dy_head": "i32",
        "dy_row": "i32",
        "tiles_a_head": "i32",
        "heads": "i32",
        "dim": "i32",
        "len_q": "i32",
        "padded": "i32",
    },
    "axes": DTYPE,
    "aligned": [
        "LSE2", "DELTA", "Y", "DY", "y_batch", "y_head", "y_row", "dy_batch", "dy_head", "dy_row", "dim", "padded",
    ],
    "forms": {"tiles": {"function": "row_sums", "constants": ["BLOCK_M", "D1"]}},
}  # fmt: skip

KEYS = {
    "always_aligned": True,
    "matrix": True,
    "arguments": {
        "DK": "*dtype",
        "DV": "*dtype",
        **READ,
        "dk_batch": "i64",
        "dk_head": "i32",
        "dk_row": "i32",
        **STRIDES,
        **SIZES,
    },
    "axes": DTYPE,
    "aligned": ["DK", "DV", "dk_batch", "dk_head", "dk_row", *READ_ALIGNED],
}
QUERIES = {
    "always_aligned": True,
    "matrix": True,
    "arguments": {
        "DQ": "*dtype",
        **READ,
        "dq_batch": "i64",
        "dq_head": "i32",
        "dq_row": "i32",
        **STRIDES,
        **SIZES,
    },
    "axes": DTYPE,
    "aligned": ["DQ", "dq_batch", "dq_head", "dq_row", *READ_ALIGNED],
}
TILES_CONSTANTS = ["BLOCK_M", "BLOCK_N", "D1", "D2", "STAGES", "CAP"]

SINKS = {
    "always_aligned": True,
    "arguments": {
        "DSINKS": "*fp32",
        "SINKS": "*fp32",
        "LSE2": "*fp32",
        "DELTA": "*fp32",
        "batch": "i32",
        "heads": "i32",
        "padded": "i32",
    },
    "axes": {},
    "aligned": ["LSE2", "DELTA", "padded"],
    "forms": {"row": {"function": "sink_sums", "constants": ["BLOCK"]}},
}

GROUPS_ARGUMENTS = {
    "Q": "dtype[1, 1, BLOCK_M, BOX]",
    "K": "dtype[1, 1, 64, BOX]",
    "V": "dtype[1, 1, 64, BOX]",
    "DY": "dtype[1, 1, BLOCK_M, BOX]",
    "DK": "dtype[1, 1, 64, BOX]",
    "DV": "dtype[1, 1, 64, BOX]",
    "LSE2": "fp32[1, 1, 1, BLOCK_M]",
    "DELTA": "fp32[1, 1, 1, BLOCK_M]",
    "DQ32": "*fp32",
    "scale": "fp32",
    "tiles_a_head": "i32",
    "kv_heads": "i32",
    "ratio": "i32",
    "padded": "i32",
    "len_q": "i32",
    "len_k": "i32",
    "right": "i32",
}
# A kernel for each head dimension, so that a profile may name some and leave the others to the tiles.
GROUPS = {
    "language": "gluon",
    "optional": True,
    "always_aligned": True,
    "matrix": True,
    "arguments": GROUPS_ARGUMENTS,
    "axes": DTYPE,
    "host": ["fillings"],
    "aligned": [],
}
GROUPS_CONSTANTS = [
    "BLOCK_M", "BLOCK_N", "D1", "D2", "BOX", "Q_STAGES", "DY_STAGES", "AHEAD", "WARP_GROUPS", "REGISTERS", "BOUNDED",
]  # fmt: skip
ROLES_CONSTANTS = [
    "BLOCK_M", "BLOCK_N", "D1", "D2", "BOX", "Q_STAGES", "DY_STAGES", "WARP_GROUPS", "REGISTERS", "DQ_REGISTERS",
    "BOUNDED",
]  # fmt: skip
BY_GROUPS = {"function": "backward_groups", "constants": GROUPS_CONSTANTS}
ROLES = {"function": "backward_roles", "constants": ROLES_CONSTANTS}
SECTION = {"section": "i32"}
TURNS = {"TURNS": "*i32", **SECTION}
CAUSAL = {**GROUPS, "arguments": {**GROUPS_ARGUMENTS, **SECTION}}  # with a bound, blocks of keys differ
IN_ORDER = {**GROUPS, "arguments": {**GROUPS_ARGUMENTS, **TURNS}}
D64 = {"BLOCK_N": 128, "D1": 64, "D2": 0, "BOX": 64}
D96 = {"BLOCK_N": 128, "D1": 64, "D2": 32, "BOX": 32}
D128 = {"BLOCK_N": 128, "D1": 128, "D2": 0, "BOX": 64}
D192 = {"BLOCK_N": 64, "D1": 128, "D2": 64, "BOX": 64}
D256 = {"BLOCK_N": 64, "D1": 128, "D2": 128, "BOX": 64}

ROLES_KERNELS = {
    "flash_attention_backward_groups_192": {
        **GROUPS, "forms": {"roles": {**ROLES, "defaults": {**D192, "BOUNDED": 0}}},
    },
    "flash_attention_backward_groups_192_ordered": {
        **IN_ORDER, "forms": {"roles": {**ROLES, "defaults": {**D192, "BOUNDED": 0}}},
    },
    "flash_attention_backward_groups_192_causal": {
        **CAUSAL, "forms": {"roles": {**ROLES, "defaults": {**D192, "BOUNDED": 1}}},
    },
    "flash_attention_backward_groups_192_causal_ordered": {
        **IN_ORDER, "forms": {"roles": {**ROLES, "defaults": {**D192, "BOUNDED": 1}}},
    },
    "flash_attention_backward_groups_256": {
        **GROUPS, "forms": {"roles": {**ROLES, "defaults": {**D256, "BOUNDED": 0}}},
    },
    "flash_attention_backward_groups_256_ordered": {
        **IN_ORDER, "forms": {"roles": {**ROLES, "defaults": {**D256, "BOUNDED": 0}}},
    },
    "flash_attention_backward_groups_256_causal": {
        **CAUSAL, "forms": {"roles": {**ROLES, "defaults": {**D256, "BOUNDED": 1}}},
    },
    "flash_attention_backward_groups_256_causal_ordered": {
        **IN_ORDER, "forms": {"roles": {**ROLES, "defaults": {**D256, "BOUNDED": 1}}},
    },
}  # fmt: skip

# With a left bound, too; and with a soft cap, where it does not spill: heads of 64 and 128 would.
LOCAL_ARGUMENTS = {**GROUPS_ARGUMENTS, "left": "i32"}
LOCAL = {**GROUPS, "arguments": {**LOCAL_ARGUMENTS, **SECTION}}
LOCAL_IN_ORDER = {**GROUPS, "arguments": {**LOCAL_ARGUMENTS, **TURNS}}
CAPPED_ARGUMENTS = {**LOCAL_ARGUMENTS, "cap": "fp32"}
CAPPED = {**GROUPS, "arguments": {**CAPPED_ARGUMENTS, **SECTION}}
CAPPED_IN_ORDER = {**GROUPS, "arguments": {**CAPPED_ARGUMENTS, **TURNS}}
LOCAL_KERNELS = {
    "flash_attention_backward_groups_64_local": {
        **LOCAL, "forms": {"groups": {**BY_GROUPS, "defaults": {**D64, "BOUNDED": 2}}},
    },
    "flash_attention_backward_groups_64_local_ordered": {
        **LOCAL_IN_ORDER, "forms": {"groups": {**BY_GROUPS, "defaults": {**D64, "BOUNDED": 2}}},
    },
    "flash_attention_backward_groups_96_local": {
        **LOCAL, "forms": {"groups": {**BY_GROUPS, "defaults": {**D96, "BOUNDED": 2}}},
    },
    "flash_attention_backward_groups_96_local_ordered": {
        **LOCAL_IN_ORDER, "forms": {"groups": {**BY_GROUPS, "defaults": {**D96, "BOUNDED": 2}}},
    },
    "flash_attention_backward_groups_128_local": {
        **LOCAL, "forms": {"groups": {**BY_GROUPS, "defaults": {**D128, "BOUNDED": 2}}},
    },
    "flash_attention_backward_groups_128_local_ordered": {
        **LOCAL_IN_ORDER, "forms": {"groups": {**BY_GROUPS, "defaults": {**D128, "BOUNDED": 2}}},
    },
    "flash_attention_backward_groups_192_local": {
        **LOCAL, "forms": {"roles": {**ROLES, "defaults": {**D192, "BOUNDED": 2}}},
    },
    "flash_attention_backward_groups_192_local_ordered": {
        **LOCAL_IN_ORDER, "forms": {"roles": {**ROLES, "defaults": {**D192, "BOUNDED": 2}}},
    },
    "flash_attention_backward_groups_256_local": {
        **LOCAL, "forms": {"roles": {**ROLES, "defaults": {**D256, "BOUNDED": 2}}},
    },
    "flash_attention_backward_groups_256_local_ordered": {
        **LOCAL_IN_ORDER, "forms": {"roles": {**ROLES, "defaults": {**D256, "BOUNDED": 2}}},
    },
    "flash_attention_backward_groups_256_capped": {
        **CAPPED, "forms": {"roles": {**ROLES, "defaults": {**D256, "BOUNDED": 3}}},
    },
    "flash_attention_backward_groups_256_capped_ordered": {
        **CAPPED_IN_ORDER, "forms": {"roles": {**ROLES, "defaults": {**D256, "BOUNDED": 3}}},
    },
}  # fmt: skip

FINISH = {
    "optional": True,
    "always_aligned": True,
    "arguments": {
        "DQ": "*dtype",
        "DQ32": "*fp32",
        "dq_batch": "i64",
        "dq_head": "i32",
        "dq_row": "i32",
        "scale": "fp32",
        "tiles_a_head": "i32",
        "heads": "i32",
        "pieces": "i32",
        "dim": "i32",
        "len_q": "i32",
    },
    "axes": DTYPE,
    "aligned": ["DQ", "DQ32", "dq_batch", "dq_head", "dq_row", "dim"],
    "forms": {"tiles": {"function": "finish", "constants": ["WIDTH"]}},
}
