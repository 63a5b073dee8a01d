"""A small op and its profile, for the tests of the build steps: real hardware numbers, launch tables of the tests' own.

Planning reads declarations without importing them, so the device functions have no bodies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from liger_aot_build.paths import PROFILES

OP = "scale"
DECLARATION = """
DECLARATION = {
    "op": "scale",
    "kernels": {
        "scale": {
            "arguments": {"Y": "*dtype", "X": "*dtype", "W": "*weight", "x_stride": "i64", "n": "i32", "by": "fp32"},
            "axes": {"dtype": ["bf16", "fp32"], "weight": ["dtype", "fp32"]},
            "aligned": ["Y", "X", "n"],
            "forms": {
                "tile": {
                    "function": "scale_tile",
                    "constants": ["ROWS", "BLOCK"],
                    "defaults": {"ROWS": 1},
                    "covers": "BLOCK",
                },
                "staged": {
                    "function": "scale_staged",
                    "constants": ["BLOCK", "STAGES"],
                    "covers": "BLOCK",
                    "staged": ["X", "Y"],
                },
                "split": {
                    "function": "scale_split",
                    "constants": ["SPLIT", "BLOCK"],
                    "covers": "2 * SPLIT * BLOCK",
                    "requires": {"dtype": ["bf16"], "aligned": [True]},
                    "cooperative": "SPLIT",
                },
                "long": {
                    "function": "scale_long",
                    "constants": ["BLOCK", "BLOCKS"],
                    "defaults": {"BLOCKS": 0},
                    "covers": "BLOCKS * BLOCK",
                    "any_length": "BLOCKS",
                },
            },
        }
    },
}


def scale_tile(Y, X, W, x_stride, n, by, ROWS, BLOCK): ...
def scale_staged(Y, X, W, x_stride, n, by, BLOCK, STAGES): ...
def scale_split(Y, X, W, x_stride, n, by, SPLIT, BLOCK): ...
def scale_long(Y, X, W, x_stride, n, by, BLOCK, BLOCKS): ...
"""
TABLE = """
[kernel.scale]
provenance = "made up for a test"
rows = [
  { max_n = 512, form = "tile", rows = 2, block = 512, num_warps = 4 },
  { max_n = 2048, form = "staged", block = 2048, stages = 2, num_warps = 8, programs_per_multiprocessor = 2 },
  { max_n = 8192, form = "split", split = 4, block = 1024, num_warps = 4, programs_per_multiprocessor = 4 },
  { form = "long", block = 1024, num_warps = 8 },
]
"""


def edited(text: str, changes: Mapping[str, str]) -> str:
    """``text`` with each key, which must stand in it, replaced by its value."""
    for old, new in changes.items():
        assert old in text, f"{old!r} does not stand in the text that the test edits"
        text = text.replace(old, new, 1)
    return text


def hardware(arch: str) -> str:
    """What ``arch_profiles/<arch>.toml`` says before its launch tables; one that extends another, whole."""
    text = (PROFILES / f"{arch}.toml").read_text()
    text = text.partition("[kernel.")[0]
    if (extends := re.search(r'^extends = "(\w+)"$', text, re.MULTILINE)) is None:
        return text
    whole = hardware(extends[1])
    for key, value in re.findall(r"^(\w+) = (.*)$", text[text.index("[arch]") :], re.MULTILINE):
        whole, found = re.subn(rf"^{key} = .*$", f"{key} = {value}", whole, count=1, flags=re.MULTILINE)
        assert found, key
    return whole


def write_profile(folder: Path, arch: str, text: str) -> Path:
    """Write ``<folder>/<arch>.toml``; the folder, for ``read_profile``."""
    folder.mkdir(exist_ok=True)
    (folder / f"{arch}.toml").write_text(text)
    return folder


def write_op(folder: Path, text: str = DECLARATION, op: str = OP) -> Path:
    """Write ``<folder>/<op>.py``; the folder, for ``read_declaration``."""
    folder.mkdir(exist_ok=True)
    (folder / f"{op}.py").write_text(text)
    return folder
