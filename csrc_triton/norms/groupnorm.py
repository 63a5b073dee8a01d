"""GroupNorm: y = (x - mean) / sqrt(var + eps) * weight + bias, with the statistics of each group of channels of each
image.

Two layouts, each read and written in place. Channels first: a group is one run of channels * spatial elements. Channels
last: it is ``spatial`` rows of ``channels`` elements; a CTA takes several groups that lie beside each other, so that
what it reads of a row is long enough. Forms that read twice are in ``groupnorm_two_pass``, forms that read once, on
Hopper, in ``groupnorm_pipeline``.

Of the arguments, ``channels`` are those of a group, ``n_cols`` those of an image. A unit is what a CTA, or ``n_splits``
of them, process together: a group; of channels-last images ``width`` columns, ``units`` an image; or a whole image.
STATS[groups of all images, 2] holds mean and 1 / sqrt(var + eps). Weight and bias are of x's dtype or fp32
(``norm_vectors``): that is asked once, ahead of loops.

Wu and He, Group Normalization (2018).
"""

from csrc_triton.norms.groupnorm_pipeline import (  # noqa: F401  named by DECLARATION
    backward_channels_last_pipeline,
    backward_pipeline,
    forward_channels_last_pipeline,
    forward_pipeline,
)
from csrc_triton.norms.groupnorm_two_pass import (  # noqa: F401  named by DECLARATION
    backward_channels_last,
    backward_two_pass,
    forward_channels_last,
    forward_in_registers,
    forward_two_pass,
)

# ``max_elements``: of a group, for one CTA; longer groups are split, and all where there are too few for the GPU.
# ``exchange_elements``: what a CTA reads in the time of an exchange.
HOST = ["max_elements", "exchange_elements"]
# What a CTA reads in the time of an exchange, of reading the words of SPLITS_PER_READ more splits, and of reducing the
# sums of a part; of one image or two, the longest part for which the pipeline is the faster form.
PIPELINE_HOST = ["exchange_kb", "read_kb", "reduce_kb", "kb_for_one_cta"]
PIPELINE = {
    "language": "gluon",
    "constants": [
        "MAX_SPLITS", "LINES", "BLOCKS", "STAGES", "PREFETCH", "GROUPS", "LINES_PER_GROUP", "SPLITS_PER_READ",
        "EXCHANGE_WARPS", "REGISTERS",
    ],
    "defaults": {"BLOCKS": 1},
    "cooperative": "MAX_SPLITS",
    "requires": {"dtype": ["bf16", "fp16"], "aligned": [True]},
}  # fmt: skip
TWO_PASS = {"defaults": {"MAX_SPLITS": 1}, "cooperative": "MAX_SPLITS"}

DECLARATION = {
    "op": "groupnorm",
    "uses": ["column_sums"],
    "kernels": {
        "groupnorm_forward": {
            "arguments": {
                "Y": "*dtype", "X": "*dtype", "W": "*dtype", "B": "*dtype", "STATS": "*fp32", "WORKSPACE": "*i64",
                "launch": "i32", "n_units": "i32", "groups": "i32", "channels": "i32", "spatial": "i32",
                "size": "i64", "length": "i64", "n_splits": "i32", "eps": "fp32", "w_kind": "i32", "b_kind": "i32",
                "store_stats": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["Y", "X", "spatial", "size", "length"],
            "host": HOST,
            "forms": {
                "in_registers": {
                    "function": "forward_in_registers",
                    "constants": ["BLOCK"],
                    "covers": "BLOCK",
                    "requires": {"aligned": [True]},
                },
                "two_pass": {
                    "function": "forward_two_pass",
                    "constants": ["MAX_SPLITS", "BLOCK", "BLOCKS", "UNALIGNED"],
                    "defaults": {"MAX_SPLITS": 1, "BLOCKS": 0, "UNALIGNED": False},
                    "covers": "BLOCKS * BLOCK",
                    "any_length": "BLOCKS",
                    "cooperative": "MAX_SPLITS",
                },
                "pipeline": {
                    "language": "gluon",
                    "function": "forward_pipeline",
                    "constants": ["BLOCKS", "BLOCK", "STAGES"],
                    "covers": "BLOCKS * BLOCK",
                    "requires": {"dtype": ["bf16", "fp16"], "aligned": [True]},
                },
            },
        },
        "groupnorm_forward_channels_last": {
            "arguments": {
                "Y": "*dtype", "X": "*dtype", "W": "*dtype", "B": "*dtype", "STATS": "*fp32", "WORKSPACE": "*i64",
                "launch": "i32", "n_units": "i32", "units": "i32", "groups": "i32", "channels": "i32",
                "width": "i32", "n_cols": "i32", "spatial": "i32", "length": "i32", "n_splits": "i32", "eps": "fp32",
                "w_kind": "i32", "b_kind": "i32", "store_stats": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["Y", "X", "W", "B", "width", "n_cols"],
            "host": [*HOST, *PIPELINE_HOST],
            "forms": {
                "pipeline": {"function": "forward_channels_last_pipeline", **PIPELINE},
                "two_pass": {
                    "function": "forward_channels_last",
                    "constants": ["MAX_SPLITS", "ROWS", "BLOCK", "GROUPS"],
                    **TWO_PASS,
                },
            },
        },
        "groupnorm_backward": {
            "arguments": {
                "DX": "*dtype", "DY": "*dtype", "X": "*dtype", "W": "*dtype", "STATS": "*fp32",
                "PARTIALS": "*fp32", "WORKSPACE": "*i64", "launch": "i32", "n_units": "i32", "groups": "i32",
                "channels": "i32", "spatial": "i32", "length": "i32", "n_splits": "i32", "columns": "i32",
                "db_column": "i32", "w_kind": "i32", "store_dx": "i32", "store_dw": "i32", "store_db": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["DX", "DY", "X", "spatial", "length"],
            "host": HOST,
            "forms": {
                "two_pass": {
                    "function": "backward_two_pass",
                    "constants": ["MAX_SPLITS", "ROWS", "BLOCK", "UNALIGNED"],
                    "defaults": {"MAX_SPLITS": 1, "UNALIGNED": False},
                    "cooperative": "MAX_SPLITS",
                },
                "pipeline": {
                    "language": "gluon",
                    "function": "backward_pipeline",
                    "constants": ["BLOCKS", "ROWS", "BLOCK", "STAGES"],
                    "covers": "BLOCK",
                    "requires": {"dtype": ["bf16", "fp16"], "aligned": [True]},
                    "may_spill": "some registers, once a group, for one that need not be read twice",
                },
            },
        },
        "groupnorm_backward_channels_last": {
            "arguments": {
                "DX": "*dtype", "DY": "*dtype", "X": "*dtype", "W": "*dtype", "STATS": "*fp32",
                "PARTIALS": "*fp32", "WORKSPACE": "*i64", "launch": "i32", "n_units": "i32", "units": "i32",
                "groups": "i32", "channels": "i32", "width": "i32", "n_cols": "i32", "spatial": "i32", "length": "i32",
                "n_splits": "i32", "columns": "i32", "db_column": "i32", "w_kind": "i32", "store_dx": "i32",
                "store_dw": "i32", "store_db": "i32",
            },
            "axes": {"dtype": ["bf16", "fp16", "fp32"]},
            "aligned": ["DX", "DY", "X", "W", "PARTIALS", "width", "n_cols", "columns", "db_column"],
            "host": [*HOST, *PIPELINE_HOST],
            "forms": {
                "pipeline": {"function": "backward_channels_last_pipeline", **PIPELINE},
                "two_pass": {
                    "function": "backward_channels_last",
                    "constants": ["MAX_SPLITS", "ROWS", "BLOCK", "GROUPS"],
                    **TWO_PASS,
                },
            },
        },
    },
}  # fmt: skip
