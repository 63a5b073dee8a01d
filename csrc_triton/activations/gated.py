"""What SwiGLU and GeGLU declare: y from gate and up, and the gradients of both. GeGLU adds an argument."""

FORWARD_ARGUMENTS = {
    "Y": "*dtype",
    "GATE": "*dtype",
    "UP": "*dtype",
    "y_stride": "i64",
    "gate_stride": "i64",
    "up_stride": "i64",
    "n": "i64",
    "blocks": "i32",
}
FORWARD = {
    "axes": {"dtype": ["bf16", "fp16", "fp32"]},
    "aligned": ["Y", "GATE", "UP", "y_stride", "gate_stride", "up_stride", "n"],
    "forms": {
        "flat": {
            "function": "forward",
            "constants": ["BLOCK", "PDL"],
            "defaults": {"PDL": 0},
            "pdl": "PDL",
        }
    },
}
BACKWARD_ARGUMENTS = {
    "DGATE": "*dtype",
    "DUP": "*dtype",
    "DY": "*dtype",
    "GATE": "*dtype",
    "UP": "*dtype",
    "dgate_stride": "i64",
    "dup_stride": "i64",
    "dy_stride": "i64",
    "gate_stride": "i64",
    "up_stride": "i64",
    "n": "i64",
    "blocks": "i32",
    "store_dgate": "i32",
    "store_dup": "i32",
}
BACKWARD = {
    "axes": {"dtype": ["bf16", "fp16", "fp32"]},
    "aligned": [
        "DGATE",
        "DUP",
        "DY",
        "GATE",
        "UP",
        "dgate_stride",
        "dup_stride",
        "dy_stride",
        "gate_stride",
        "up_stride",
        "n",
    ],
    "forms": {"flat": {"function": "backward", "constants": ["BLOCK"]}},
}
