"""Declarations: read from source without importing it, and every mistake is named with its file, kernel and form."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from liger_aot.ops.registry import module
from liger_aot.ops.registry import names as ops
from liger_aot_build.declaration import declared_ops, longest_row, read_declaration, with_used
from liger_aot_build.errors import DeclarationError
from liger_aot_build.literals import literal
from liger_aot_build.paths import KERNELS, ROOT
from tests.liger_aot_build.small_op import DECLARATION, edited, write_op


def test_every_declared_op_has_its_host_side() -> None:
    assert declared_ops() == ops()


@pytest.mark.parametrize("op", declared_ops())
def test_real_declarations(op: str) -> None:
    declaration = read_declaration(op)
    assert (declaration.op, declaration.path.stem) == (op, op)
    assert declaration.path.is_relative_to(KERNELS)
    for kernel in declaration.kernels.values():
        assert len(kernel.signature()) == len(kernel.arguments)
        assert set(kernel.aligned) <= set(kernel.arguments)
        assert all(form.function.isidentifier() and form.constants for form in kernel.forms.values())


@pytest.mark.parametrize("op", declared_ops())
def test_an_op_uses_what_its_host_code_launches(op: str) -> None:
    """What a build of the op alone must bring, so that it works."""
    host = module(op).OP
    assert set(read_declaration(op).uses) == set(host.uses) - {op}


def test_ops_with_those_that_they_launch(tmp_path: Path) -> None:
    assert with_used(["swiglu"]) == ("swiglu",)
    assert with_used(["rmsnorm", "swiglu"]) == ("column_sums", "rmsnorm", "swiglu")
    assert "cross_entropy" in with_used(["vocab_parallel_linear_cross_entropy"])
    folder = write_op(
        tmp_path, edited(DECLARATION, {'"op": "scale",': '"op": "scale",\n    "uses": ["sums"],'})
    )
    with pytest.raises(DeclarationError, match=r"'uses'.: there is no op 'sums'"):
        read_declaration("scale", folder)


def test_fields(tmp_path: Path) -> None:
    kernel = read_declaration("scale", write_op(tmp_path)).kernels["scale"]
    assert kernel.signature() == "ppplif"
    assert kernel.axes == {"dtype": ("bf16", "fp32"), "weight": ("dtype", "fp32")}
    assert list(kernel.forms) == ["tile", "staged", "split", "long"]
    split = kernel.forms["split"]
    assert longest_row(split, {"SPLIT": 4, "BLOCK": 1024}) == 8192
    long = kernel.forms["long"]
    assert longest_row(long, {"BLOCKS": 3, "BLOCK": 64}) == 192
    assert longest_row(long, {"BLOCKS": 0, "BLOCK": 64}) is None
    assert split.requires == {"dtype": ("bf16",), "aligned": (True,)}
    assert split.cooperative == "SPLIT" and split.may_spill is None
    assert kernel.forms["tile"].defaults == {"ROWS": 1}


def test_what_a_declaration_leaves_out(tmp_path: Path) -> None:
    """Parameters whose default is None; those that it has may have one, too."""
    changes = {"by, BLOCK, BLOCKS": "BLOCK, BLOCKS=0, before=None, by=None, after=None"}
    kernel = read_declaration("scale", write_op(tmp_path, edited(DECLARATION, changes))).kernels["scale"]
    assert list(kernel.arguments) == ["Y", "X", "W", "x_stride", "n", "by"]
    assert kernel.forms["long"].constants == ("BLOCK", "BLOCKS")


def test_files_without_a_declaration_are_no_ops(tmp_path: Path) -> None:
    write_op(tmp_path)
    write_op(tmp_path, "def helper(x): ...\n", op="helpers")
    assert declared_ops(tmp_path) == ("scale",)
    for missing in ("helpers", "softmax"):
        with pytest.raises(DeclarationError, match=f"no op '{missing}': there are scale"):
            read_declaration(missing, tmp_path)


def test_reading_imports_neither_triton_nor_torch() -> None:
    code = (
        "import sys; from liger_aot_build.declaration import declared_ops, read_declaration\n"
        "for op in declared_ops(): read_declaration(op)\n"
        "print(sorted({'triton', 'torch', 'csrc_triton'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


KERNEL = "scale.py: kernel scale: "
MISTAKES = {
    "not a literal": ({'"op": "scale"': '"op": str("scale")'}, "scale.py: DECLARATION must be a literal"),
    "a list": ({"DECLARATION = {": "DECLARATION = [{", "\n}\n\n\ndef": "\n}]\n\n\ndef"}, "must be a dict"),
    "another op": (
        {'"op": "scale"': '"op": "scales"'},
        r"DECLARATION\['op'\] is 'scales', the file is named scale",
    ),
    "no kernels": ({'"kernels"': '"kernel"'}, "scale.py: DECLARATION: 'kernels' is missing"),
    "kernels are no dict": (
        {'"kernels": {': '"kernels": 1, "more": {'},
        "scale.py: DECLARATION: kernels must be a dict, found 1",
    ),
    "unknown key": (
        {'"kernels": {': '"version": 1, "kernels": {'},
        "scale.py: DECLARATION: unknown 'version'",
    ),
    "a kernel is no dict": ({'"scale": {': '"bad": 3, "scale": {'}, "kernel bad: expected a dict, found 3"),
    "unknown key of a kernel": ({'"axes"': '"grid": 1, "axes"'}, KERNEL + "unknown 'grid'"),
    "unknown scalar": ({'"n": "i32"': '"n": "i16"'}, KERNEL + "argument n: unknown type 'i16'"),
    "unknown pointee": ({'"X": "*dtype"': '"X": "*type"'}, KERNEL + r"argument X: unknown type '\*type'"),
    "unknown dtype of an axis": (
        {'["bf16", "fp32"]': '["bf16", "fp64"]'},
        KERNEL + "axis dtype: 'fp64' is no dtype and no other axis",
    ),
    "hint on no argument": ({'"aligned": ["Y"': '"aligned": ["Z"'}, KERNEL + "aligned: no argument 'Z'"),
    "no function": (
        {"scale_long(Y": "scale_longer(Y"},
        KERNEL + "form long: there is no function scale_long$",
    ),
    "a function with other arguments": (
        {"x_stride, n, by, SPLIT": "n, x_stride, by, SPLIT"},
        KERNEL
        + "form split: function scale_split takes .*'n', 'x_stride'.* the declaration says .*'x_stride', 'n'",
    ),
    "a function with other constants": (
        {"by, BLOCK, BLOCKS": "by, BLOCKS, BLOCK"},
        KERNEL + r"form long: .* takes .*'BLOCKS', 'BLOCK'\], the declaration says .*'BLOCK', 'BLOCKS'\]",
    ),
    "an argument that a function does not take": (
        {"by, BLOCK, BLOCKS": "BLOCK, BLOCKS, bias=None"},
        KERNEL
        + "form long: function scale_long takes .*'n', 'BLOCK'.* the declaration says .*'n', 'by', 'BLOCK'",
    ),
    "a parameter without a default is left out": (
        {"by, BLOCK, BLOCKS": "by, bias, BLOCK, BLOCKS"},
        KERNEL + "form long: function scale_long takes 'bias', .* its default must be None, it has none",
    ),
    "a parameter with another default is left out": (
        {"by, BLOCK, BLOCKS": "by, BLOCK, BLOCKS, bias=None, power=1"},
        KERNEL + "form long: function scale_long takes 'power', .* its default must be None, found 1",
    ),
    "unknown key of a form": (
        {'"cooperative": "SPLIT"': '"waits": "SPLIT"'},
        KERNEL + "form split: unknown 'waits'",
    ),
    "covers no constant": ({'"2 * SPLIT': '"2 * PARTS'}, "'PARTS' is none of its constants"),
    "covers a call": ({'"2 * SPLIT': '"abs(SPLIT)'}, "covers: 'abs.SPLIT. . BLOCK' is no sum of products"),
    "covers half": ({'"2 * SPLIT': '"0.5 * SPLIT'}, "covers: '0.5 . SPLIT . BLOCK' is no sum of products"),
    "covers nonsense": ({'"2 * SPLIT': '"2 SPLIT'}, "covers: '2 SPLIT . BLOCK' is no sum of products"),
    "covers a list": ({'"2 * SPLIT * BLOCK"': '["BLOCK"]'}, r"covers: \['BLOCK'\] is no sum of products"),
    "lifts by no constant": (
        {'"any_length": "BLOCKS"': '"any_length": "KEEP"'},
        "'KEEP' is none of its constants",
    ),
    "waits by no constant": (
        {'"cooperative": "SPLIT"': '"cooperative": "SPLITS"'},
        KERNEL + "form split: 'SPLITS' is none of its constants",
    ),
    "pdl and waits": (
        {'"cooperative": "SPLIT"': '"cooperative": "SPLIT", "pdl": "SPLIT"'},
        KERNEL + "form split: cooperative and pdl: a kernel is launched in one way",
    ),
    "loads before no wait": (
        {'"cooperative": "SPLIT"': '"cooperative": "SPLIT", "loads_before_wait": 2'},
        KERNEL + "form split: loads_before_wait must be a number, of a form with pdl",
    ),
    "pdl by no constant": (
        {'"cooperative": "SPLIT"': '"pdl": "PDL"'},
        KERNEL + "form split: 'PDL' is none of its constants",
    ),
    "default of no constant": (
        {'{"ROWS": 1}': '{"ROW": 1}'},
        KERNEL + "form tile: 'ROW' is none of its constants",
    ),
    "requires no axis": (
        {'"requires": {"dtype"': '"requires": {"type"'},
        KERNEL + "form split: requires: no axis 'type'",
    ),
    "stages a scalar": (
        {'"staged": ["X", "Y"]': '"staged": ["X", "n"]'},
        KERNEL + "form staged: staged: no pointer 'n'",
    ),
    "staged without stages": (
        {'["BLOCK", "STAGES"]': '["BLOCK"]', "by, BLOCK, STAGES": "by, BLOCK"},
        KERNEL + "form staged: 'STAGES' is none of its constants",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name: str, tmp_path: Path) -> None:
    changes, message = MISTAKES[name]
    write_op(tmp_path, edited(DECLARATION, changes))
    with pytest.raises(DeclarationError, match=message):
        read_declaration("scale", tmp_path)


def test_names_stand_for_literals(tmp_path: Path) -> None:
    """Of the same file and of others, merged into dicts and lists, which take a dict's keys; what can't be read is an
    error that says so."""
    (tmp_path / "shared.py").write_text('ROWS = {"n": 1}\nBOTH = ["a", "b"]\nLOOP = [AGAIN]\nAGAIN = LOOP\n')
    path = tmp_path / "own.py"
    path.write_text(
        "from csrc_triton.shared import BOTH as TWO, ROWS, LOOP, missing\nfrom elsewhere import OTHER\nHALF = -1\n"
        'GOOD = {**ROWS, "m": [*TWO, "c", *ROWS], "of": {"x": ROWS}}\nONE = 1\nDEEP = {"k": GOOD}\n'
        "RING = LOOP\nLOST = missing\nOUT = OTHER\nWRONG = {**TWO}\nFLAT = [*ONE]\nCALL = dict()\n"
    )
    good = {"n": 1, "m": ["a", "b", "c", "n"], "of": {"x": {"n": 1}}}
    assert literal(path, "GOOD", tmp_path) == good and literal(path, "DEEP", tmp_path) == {"k": good}
    assert literal(path, "NOTHING", tmp_path) is None
    for name in ("RING", "LOST", "OUT", "WRONG", "FLAT", "CALL", "HALF"):
        with pytest.raises(DeclarationError, match="must be a literal"):
            literal(path, name, tmp_path)
