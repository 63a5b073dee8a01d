"""Axes of integers, bools and words: which variants there are, what each of them takes, how a call finds it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from liger_aot.errors import ArgumentTypeError, PackDamaged
from liger_aot.runtime.dispatch import KernelOn, Loaded, key_text
from liger_aot.runtime.manifest import Pack
from liger_aot_build.declaration import read_declaration
from liger_aot_build.errors import DeclarationError, ProfileError
from liger_aot_build.plan import Plan, plan
from liger_aot_build.profile import read_profile
from tests.harness.pack_edits import edit
from tests.harness.planned_packs import write_planned
from tests.liger_aot_build.small_op import edited, hardware, write_op, write_profile

DECLARATION = """
DECLARATION = {
    "op": "attend",
    "kernels": {
        "attend": {
            "arguments": {"Y": "*dtype", "X": "dtype[1, ROWS, 64]", "n": "i32", "left": "i32", "SEMAPHORE": "*i32"},
            "axes": {
                "dtype": ["bf16", "fp16"],
                "head_dim": [64, 128],
                "mask": ["full", "causal", "local"],
                "ordered": [False, True],
            },
            "excluded": [{"mask": ["local"], "head_dim": [128]}],
            "only_with": {"left": {"mask": ["local"]}, "SEMAPHORE": {"ordered": [True]}},
            "gives": {"head_dim": {64: {"ROWS": 128}, 128: {"ROWS": 64}}},
            "host": ["waves"],
            "aligned": ["Y", "left"],
            "always_aligned": True,
            "forms": {
                "tile": {"function": "attend", "constants": ["HEAD_DIM", "ROWS", "BLOCK", "ORDERED"]},
                "wide": {
                    "function": "attend",
                    "constants": ["HEAD_DIM", "ROWS", "BLOCK", "ORDERED"],
                    "requires": {"head_dim": [128]},
                },
            },
        }
    },
}


def attend(Y, X, n, HEAD_DIM, ROWS, BLOCK, ORDERED, left=None, SEMAPHORE=None): ...
"""
TABLE = """
[kernel.attend]
provenance = "made up for a test"
rows = [
  { form = "wide", head_dim = 128, mask = ["full", "causal"], block = 16, num_warps = 4 },
  { max_n = 100, form = "tile", head_dim = 64, ordered = true, block = 32, num_warps = 4, waves = 2 },
  { form = "tile", block = 64, num_warps = 8, waves = 3 },
]
"""
KERNEL = "attend.py: kernel attend: "


def planned(
    folder: Path, declaration: dict[str, str] | None = None, table: dict[str, str] | None = None
) -> Plan:
    folder.mkdir(exist_ok=True)
    ops = write_op(folder / "kernels", edited(DECLARATION, declaration or {}), "attend")
    profiles = write_profile(folder / "profiles", "sm90", hardware("sm90") + edited(TABLE, table or {}))
    return plan(read_declaration("attend", ops), read_profile("sm90", profiles))


def packed(folder: Path) -> Pack:
    return write_planned(folder / "packs" / "sm90", read_profile("sm90"), [planned(folder)])


def test_variants(tmp_path: Path) -> None:
    """The product of the axes but for what is excluded; a row is for the values that it names."""
    kernel = planned(tmp_path).kernels["attend"]
    assert len(kernel.tables) == 2 * (3 + 2) * 2
    assert not any("128/local" in key for key in kernel.tables)
    wide = ((None, "attend-wide-bf16-128-causal-ordered-aligned-block16-warps4"),)
    assert kernel.tables["bf16/128/causal/true/aligned"] == wide
    assert kernel.tables["fp16/64/local/true/aligned"] == (
        (100, "attend-tile-fp16-64-local-ordered-aligned-block32-warps4-waves2"),
        (None, "attend-tile-fp16-64-local-ordered-aligned-block64-warps8-waves3"),
    )
    assert len(kernel.tables["fp16/64/local/false/aligned"]) == 1


def test_what_a_variant_takes(tmp_path: Path) -> None:
    """Arguments that only some have, constants that the axes decide, numbers for the host."""
    kernel = planned(tmp_path).kernels["attend"]
    local = kernel.variants["attend-tile-bf16-64-local-aligned-block64-warps8-waves3"]
    assert local.arguments == {"Y": "*bf16", "X": "tensordesc<bf16[1, 128, 64]>", "n": "i32", "left": "i32"}
    assert local.hinted == ("Y", "left") and local.host == {"waves": 3}
    assert local.constants == {"HEAD_DIM": 64, "ROWS": 128, "BLOCK": 64, "ORDERED": False}
    ordered = kernel.variants["attend-wide-bf16-128-causal-ordered-aligned-block16-warps4"]
    assert list(ordered.arguments) == ["Y", "X", "n", "SEMAPHORE"] and ordered.hinted == ("Y",)
    assert ordered.constants == {"HEAD_DIM": 128, "ROWS": 64, "BLOCK": 16, "ORDERED": True}


def test_an_optional_kernel_may_lack_values(tmp_path: Path) -> None:
    """What no row is for is not built; a kernel that must be there is an error."""
    without = {TABLE[TABLE.index("  { max_n") :].rpartition("]")[0]: ""}
    with pytest.raises(ProfileError, match="no row holds bf16/64/full/false/aligned past n = 0"):
        planned(tmp_path / "needed", table=without)
    changes = {'"always_aligned"': '"optional": True, "always_aligned"'}
    kernel = planned(tmp_path / "optional", changes, without).kernels["attend"]
    assert {key.split("/")[1] for key in kernel.tables} == {"128"}


def test_dispatch_by_values(tmp_path: Path) -> None:
    """A call's key holds torch dtypes, integers, words and bools; a variant says which arguments it takes."""
    found = packed(tmp_path).op("attend")
    loads: list[str] = []

    def load(name: str) -> Loaded:
        loads.append(name)
        return Loaded(found.variant(name), NOTHING)

    dispatch = KernelOn("attend", found, load)
    local = dispatch((torch.bfloat16, 64, "local", False, True), 7).variant
    assert loads == [local.name] == ["attend-tile-bf16-64-local-aligned-block64-warps8-waves3"]
    assert local.arguments == ("Y", "X", "n", "left") and local.signature == "p3ii"
    assert local.numbers["waves"] == 3 and set(local.maps) == {"X"}
    full = dispatch((torch.float16, 64, "full", True, True), 101).variant
    assert full.arguments == ("Y", "X", "n", "SEMAPHORE") and full.signature == "p3ip"
    for missing in ((torch.bfloat16, 128, "local", False, True), (torch.bfloat16, 96, "full", False, True)):
        assert not dispatch.serves(missing)
        with pytest.raises(
            ArgumentTypeError, match=f"attend is not built for {key_text(missing)}; it is for bf16/128/"
        ):
            dispatch(missing, 1)


@pytest.mark.parametrize(
    ("value", "message"),
    [(["n", "out"], "lacks names 'out', which attend does not take"), ("n", "expected a list of strings")],
)
def test_a_manifest_that_leaves_out_what_is_not_there(tmp_path: Path, value: object, message: str) -> None:
    pack = packed(tmp_path)
    name = pack.op("attend").variants[0]
    edit(pack.folder / "attend.json", lambda document: document["variants"][name].update(lacks=value))
    with pytest.raises(PackDamaged, match=message):
        Pack(pack.folder).op("attend").variant(name)


class _Nothing:
    def launch(self, *arguments: object) -> None: ...

    def prepare(self, device: int, /) -> None: ...


NOTHING = _Nothing()
MISTAKES = {
    "a negative integer": ({"[64, 128]": "[64, -1]"}, "-1"),
    "integers and words": (
        {"[64, 128]": '[64, "wide"]'},
        r"axis head_dim: values must be distinct and of one kind",
    ),
    "a value twice": ({"[64, 128]": "[64, 64]"}, r"axis head_dim: values must be distinct and of one kind"),
    "no word": (
        {'"causal", "local"': '"causal", "lo-cal"'},
        "axis mask: 'lo-cal' is no dtype, word, bool or integer",
    ),
    "a word of keys": (
        {'"causal", "local"': '"causal", "aligned"'},
        "axis mask: 'aligned' is no dtype, word",
    ),
    "a fraction": ({"[64, 128]": "[0.5]"}, "axis head_dim: 0.5 is no dtype, word, bool or integer"),
    "excludes no axis": ({'[{"mask"': '[{"masks"'}, KERNEL + "excluded: no axis 'masks'"),
    "excludes no value": (
        {'"head_dim": [128]}],': '"head_dim": [96]}],'},
        "excluded: axis head_dim has no value 96",
    ),
    "only with no argument": ({'{"left": {"mask"': '{"right": {"mask"'}, "only_with: no argument 'right'"),
    "only with no value": (
        {'{"left": {"mask": ["local"]}': '{"left": {"mask": ["none"]}'},
        "axis mask has no value 'none'",
    ),
    "an argument of some without a default": (
        {"left=None": "left"},
        "takes 'left', which some variants do not have",
    ),
    "gives for no axis": (
        {'"gives": {"head_dim"': '"gives": {"dim"'},
        "gives: dim has values not at all, found 64, 128",
    ),
    "gives not for each": ({", 128: {": ", 96: {"}, "gives: head_dim has values 64, 128, found 64, 96"),
    "a pointer to no dtype": ({'"Y": "*dtype"': '"Y": "*mask"'}, r"argument Y: unknown type '\*mask'"),
    "requires no value": (
        {'"requires": {"head_dim": [128]}': '"requires": {"head_dim": [256]}'},
        "has no value 256",
    ),
}
ROWS = {
    "no such value": ({"head_dim = 128": "head_dim = 96"}, "row 1: head_dim: 96 is not one of 64, 128"),
    "no such word": (
        {'"full", "causal"': '"full", "casual"'},
        "row 1: mask: 'casual' is not one of full, causal, local",
    ),
    "decided by an axis": (
        {"block = 64": "block = 64, rows = 64"},
        "row 3: 'rows' is decided by an axis, not by the row",
    ),
    "no number of the host": ({"waves = 3": "wave = 3"}, "row 3: unknown key 'wave' for form 'tile'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_a_declaration(name: str, tmp_path: Path) -> None:
    changes, message = MISTAKES[name]
    with pytest.raises(DeclarationError, match=message):
        planned(tmp_path, changes)


@pytest.mark.parametrize("name", ROWS)
def test_mistakes_of_a_row(name: str, tmp_path: Path) -> None:
    changes, message = ROWS[name]
    with pytest.raises(ProfileError, match=message):
        planned(tmp_path, table=changes)


def test_an_imported_function(tmp_path: Path) -> None:
    """A kernel's function may stand in another file of the folder, and is checked there."""
    function = DECLARATION[DECLARATION.index("def attend") :]
    elsewhere = {"\nDECLARATION = {": "from csrc_triton.shared import attend\nDECLARATION = {", function: ""}
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "shared.py").write_text(function)
    assert planned(tmp_path, elsewhere).variants
    (tmp_path / "other" / "kernels").mkdir(parents=True)
    (tmp_path / "other" / "kernels" / "shared.py").write_text("def attend(Y, X): ...\n")
    with pytest.raises(DeclarationError, match=r"function attend takes \['Y', 'X'\], the declaration says"):
        planned(tmp_path / "other", elsewhere)
