"""explain, list, doctor and verify, without a GPU."""

from __future__ import annotations

import itertools
import json
import os
import sys
from base64 import urlsafe_b64encode
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import liger_aot
from liger_aot.cli import main
from liger_aot.errors import (
    ArgumentError,
    ArgumentTypeError,
    PackDamaged,
    PackNotFound,
    UnknownOp,
)
from liger_aot.explanation import Choice, table
from liger_aot.runtime import packs
from liger_aot.runtime.dispatch import DTYPE_NAMES, KernelOn, Loaded
from liger_aot.runtime.grid import with_split_rows
from liger_aot.runtime.manifest import OpManifest
from liger_aot.runtime.packs import pack_of
from liger_aot.verify import Fault, verify
from liger_aot_build.stored import compressed
from tests.harness.pack_edits import ARCHS, command, count_binaries, edit, flip, replace_binaries

pytest_plugins = ("tests.harness.pack_fixtures",)

DTYPE_KEYS = [("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp16"), ("fp16", "fp32"), ("fp32", "fp32")]


# ---- explain ----


def entry(pack: Path, kernel: str, key: str, n: int, rows: int) -> tuple[str, dict[str, Any]]:
    """The variant that the pack's own text gives, read from the first entry on, those for few rows first."""
    document = json.loads((pack / "rmsnorm.json").read_bytes())
    for bound, most, name in document["kernels"][kernel].get("few", {}).get(key, ()):
        if rows <= most and (bound is None or n <= bound):
            return name, document["variants"][name]
    for bound, name in document["kernels"][kernel]["tables"][key]:
        if bound is None or n <= bound:
            return name, document["variants"][name]
    raise AssertionError(f"{kernel}: no entry holds {n}")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("x", "weight"), DTYPE_KEYS)
def test_explain_says_what_the_pack_says(built: Path, arch: str, x: str, weight: str) -> None:
    sizes = (1, 16, 128, 144, 1024, 1025, 4096, 4097, 8192, 65536, 65552, 1 << 20)
    for n, rows in itertools.product(sizes, (3, 1 << 20)):
        choices = liger_aot.explain("rmsnorm", arch=arch, shape=(rows, n), dtype=x, dtypes={"weight": weight})
        forward, backward = [c.kernel for c in choices]
        if forward == "rmsnorm_split":  # a few long rows, which several programs share, where the pack has it
            assert rows == 3 and n > 8192
            choices = choices[1:]
        else:
            assert forward == "rmsnorm_forward"
        assert backward == "rmsnorm_backward"
        key = f"{x}/{weight}/{'generic' if n % 16 else 'aligned'}"
        for choice in choices:
            name, facts = entry(built / arch, choice.kernel, key, n, rows)
            assert (choice.op, choice.arch, choice.variant) == ("rmsnorm", arch, name)
            for field in (
                "num_warps",
                "threads",
                "registers",
                "shared",
                "local_bytes",
                "resident",
                "numbers",
            ):
                assert getattr(choice, field) == facts[field], field
            assert key in choice.why and f"n = {n} " in choice.why and facts["row"] in choice.why


def unloaded(manifest: OpManifest) -> Callable[[str], Loaded]:
    """Binaries as the dispatch wants them, without a device to load them onto."""
    launchable: Any = SimpleNamespace(launch=None)
    return lambda name: Loaded(manifest.variant(name), launchable)


@pytest.mark.parametrize("arch", ARCHS)
def test_explain_agrees_with_the_dispatch(built: Path, arch: str) -> None:
    for name in liger_aot.ops():
        op = liger_aot.load(name)
        manifest = pack_of(arch).op(name)
        dispatch = {kernel: KernelOn(kernel, manifest, unloaded(manifest)) for kernel in manifest.kernels}
        bounds = {b for k in manifest.kernels.values() for t in k.tables.values() for b, _ in t if b}
        sizes = {size for b in bounds for size in (b - 16, b - 1, b, b + 1, b + 16) if size > 0}
        # an op's own dtype is the first axis that is one; others are a table's, a weight's or a cache's
        shorts = list(DTYPE_NAMES.values())
        keys = [key.split("/") for k in manifest.kernels.values() for key in k.tables]
        own = {next((part for part in key if part in shorts), "") for key in keys}
        dtypes = [dtype for dtype, short in DTYPE_NAMES.items() if short in own]
        for dtype in dtypes:
            for n in (1, *sorted(sizes)):
                # the number of keys chooses attention's variants, of each head dimension
                of_keys = name.startswith("flash_attention")
                for shape in [(n, 1, dim) for dim in (64, 128, 256)] if of_keys else [(2, n)]:
                    problems = [
                        p
                        for p in op.problems(shape, dtype)
                        if p.kernel in dispatch and dispatch[p.kernel].serves((*p.axes, p.aligned))
                    ]
                    assert problems, f"no kernel of {name} itself"
                    choices = liger_aot.explain(name, arch=arch, shape=shape, dtype=dtype)
                    chosen = []
                    for p in problems:
                        kernel, key = dispatch[p.kernel], (*p.axes, p.aligned)
                        if p.rows is None:
                            loaded = kernel(key, p.n)
                        else:
                            on: Any = SimpleNamespace(kernels=dispatch)
                            loaded = with_split_rows(on, p.kernel, p.split or "", key, p.n, p.rows)
                        chosen.append(loaded.variant.name)
                    assert [c.variant for c in choices if c.kernel in dispatch] == chosen


def test_explain_covers_every_installed_architecture(built: Path) -> None:
    choices = liger_aot.explain("column_sums", shape=(528, 8192), dtype=torch.bfloat16)
    assert [c.arch for c in choices] == list(ARCHS)
    assert len(set(choices)) == len(ARCHS), "choices are values: they can be in a set"


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_dtypes_have_their_usual_names(built: Path, dtype: Any) -> None:
    (choice,) = liger_aot.explain("column_sums", arch="sm90", shape=(4, 64), dtype=dtype)
    assert "bf16/aligned" in choice.why


def test_bounds_in_words(built: Path) -> None:
    def why(n: int) -> str:
        choice, _ = liger_aot.explain("softmax", arch="sm80", shape=(4, n), dtype="fp32")
        return choice.why

    document = json.loads((built / "sm80" / "softmax.json").read_bytes())
    table = document["kernels"]["softmax_forward"]["tables"]["fp32/aligned"]
    (first, held), (last, _), (_, rest) = table[0], table[-2], table[-1]
    rows = {name: document["variants"][name]["row"] for name in (held, rest)}
    assert f"is held by the bound {first} (1 to {first}): {rows[held]}" in why(first)
    assert f"is past the last bound, {last}: {rows[rest]}" in why(last + 16)


def test_warp_groups_are_those_of_the_profile(copies: Callable[..., Path]) -> None:
    path = copies("sm90") / "sm90" / "column_sums.json"

    def give(document: Any) -> None:
        for variant in document["variants"].values():
            variant["numbers"]["warp_groups"] = 3

    (choice,) = liger_aot.explain("column_sums", shape=(4, 64), dtype="fp32")
    assert choice.warp_groups is None
    edit(path, give)
    liger_aot.runtime.packs.installed.cache_clear()
    (choice,) = liger_aot.explain("column_sums", shape=(4, 64), dtype="fp32")
    assert choice.warp_groups == 3
    cells = dict(zip(*(line.split()[:11] for line in table([choice]).splitlines()), strict=True))
    assert (cells["groups"], cells["warps"]) == ("3", str(choice.num_warps))


def test_the_table_holds_every_fact() -> None:
    choice = Choice(
        op="o",
        kernel="k",
        arch="sm80",
        variant="k-tile-bf16-aligned-rows4-warps8",
        num_warps=8,
        warp_groups=None,
        threads=256,
        registers=77,
        shared=1056,
        local_bytes=16,
        resident=3,
        numbers={"rows": 4},
        why="For a reason.",
    )
    head, row = table([choice]).splitlines()
    assert head.split()[:3] == ["arch", "kernel", "form"]
    assert row.split() == ["sm80", "k", "tile", "8", "-", "256", "77", "1056", "16", "3", "rows", "4"]
    assert str(choice) == "sm80 k: k-tile-bf16-aligned-rows4-warps8. For a reason."


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"name": "rmsnrom"}, UnknownOp, "no op 'rmsnrom': there are .*column_sums"),
        ({"arch": "sm70"}, PackNotFound, "no pack 'sm70' is installed: installed are gfx90a"),
        ({"dtype": "int8"}, ArgumentTypeError, "no op is built for dtype 'int8'; there are bf16, fp16, fp32"),
        ({"dtype": torch.float64}, ArgumentTypeError, "no op is built for dtype torch.float64"),
        ({"dtype": None}, ArgumentTypeError, "no op is built for dtype None"),
        ({"dtypes": {"weight": "fp64"}}, ArgumentTypeError, "no op is built for dtype 'fp64'"),
        (
            {"dtypes": {"weight": "fp16"}},
            ArgumentTypeError,
            "is not built for bf16/fp16/aligned; it is for bf16",
        ),
        ({"dtypes": {"wieght": "fp32"}}, ArgumentError, "no argument 'wieght'; there are: weight"),
        ({"shape": ()}, ArgumentError, "sizes of 1 or more"),
        ({"shape": (4, 0)}, ArgumentError, "an empty tensor launches nothing"),
        ({"shape": (4, -1)}, ArgumentError, "sizes of 1 or more"),
        ({"shape": 4096}, ArgumentTypeError, "a sequence of integers, got 4096"),
        ({"shape": "4096"}, ArgumentTypeError, "a sequence of integers, got '4096'"),
        ({"shape": (4.0, 64)}, ArgumentTypeError, "a sequence of integers"),
        ({"shape": (True, 64)}, ArgumentTypeError, "a sequence of integers"),
    ],
)
def test_what_explain_refuses(
    built: Path, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {"name": "rmsnorm", "shape": (8, 4096), "dtype": "bf16", **change}
    with pytest.raises(error, match=message.replace("(", r"\(")):
        liger_aot.explain(arguments.pop("name"), **arguments)


def test_explain_without_packs(tmp_path: Path, install: Callable[..., None]) -> None:
    install(tmp_path)
    with pytest.raises(PackNotFound, match=f"carries rmsnorm: none is installed in .*{tmp_path.name}"):
        liger_aot.explain("rmsnorm", shape=(8, 64), dtype="bf16")


def test_explain_of_a_pack_without_the_op(copies: Callable[..., Path]) -> None:
    edit(copies("sm80", "sm90") / "sm80" / "manifest.json", lambda m: m["ops"].pop("rmsnorm"))
    assert {c.arch for c in liger_aot.explain("rmsnorm", shape=(8, 64), dtype="bf16")} == {"sm90"}
    with pytest.raises(PackNotFound, match=r"pack sm80 carries no rmsnorm; it has .*column_sums"):
        liger_aot.explain("rmsnorm", arch="sm80", shape=(8, 64), dtype="bf16")


def test_no_module_takes_a_public_name() -> None:
    """Importing a submodule sets it as the package's attribute, over a function of that name."""
    liger_aot.load("rmsnorm")
    assert "liger_aot.ops" in sys.modules and "liger_aot.explanation" in sys.modules
    for name in liger_aot.__all__:
        value = getattr(liger_aot, name)
        assert isinstance(value, str) or callable(value) or name == "nn", name
    with pytest.raises(AttributeError, match="has no attribute 'explane'"):
        liger_aot.explane  # type: ignore[attr-defined]  # noqa: B018


# ---- verify ----


def test_verify_finds_nothing_wrong_with_what_was_built(built: Path) -> None:
    assert verify().faults == ()


def test_verify_goes_on_after_every_fault(copies: Callable[..., Path]) -> None:
    root = copies(*ARCHS)
    sm80, sm90, gfx90a = root / "sm80", root / "sm90", root / "gfx90a"
    manifest = packs.open_pack(sm80).op("rmsnorm")
    blobs = sorted((manifest.variant(name).blob for name in manifest.variants), key=lambda b: b.offset)
    flip(manifest.binaries, blobs[-2].offset)
    flip(manifest.binaries, blobs[-3].offset + blobs[-3].length - 1)
    manifest.binaries.write_bytes(manifest.binaries.read_bytes()[:-1])
    (sm80 / "extra.bin").write_bytes(b"")
    (sm80 / "rmsnorm").mkdir()
    (sm80 / "rmsnorm" / "extra.cubin").write_bytes(b"")
    (sm80 / "column_sums.json").unlink()
    (sm80 / "column_sums.json.orig").write_bytes(b"{}")
    flip(sm90 / "rmsnorm.json", 5000)
    (gfx90a / "manifest.json").unlink()
    edit(root / "gfx942" / "manifest.json", lambda m: m.update(version="0.0.9"))
    found = [(str(f.path.relative_to(root)), f.problem) for f in verify().faults]
    faults = {path: problem for path, problem in found if path != "sm80/rmsnorm.bin"}
    in_binaries = [problem for path, problem in found if path == "sm80/rmsnorm.bin"]
    assert len(found) == len(faults) + len(in_binaries), "one fault for each other file"
    damaged = [f"{blob.name}: sha256 is " for blob in blobs[-3:-1]]
    cut_short = f"cut short: it ends at byte {blobs[-1].offset + blobs[-1].length - 1}"
    for start in (*damaged, cut_short):
        (one,) = (problem for problem in in_binaries if problem.startswith(start))
        in_binaries.remove(one)
    assert in_binaries == [], "each fault once"
    assert next(iter(faults)) == "gfx90a/manifest.json", "in order of the packs' names"
    assert faults.pop("gfx90a/manifest.json") == "No such file or directory"
    assert "is of version 0.0.9, liger-aot of" in faults.pop("gfx942")
    assert faults.pop("sm80/column_sums.json") == "No such file or directory"
    assert faults.pop("sm80/column_sums.json.orig") == "not in the manifest"
    assert faults.pop("sm80/rmsnorm/extra.cubin") == "not in the manifest"
    assert faults.pop("sm80/extra.bin") == "not in the manifest"
    assert faults.pop("sm90/rmsnorm.json").startswith("sha256 is ")
    assert faults == {}, "what a damaged manifest names is not called extra"


def test_verify_finds_bytes_that_are_in_no_binary_or_in_two(copies: Callable[..., Path]) -> None:
    sm80 = copies("sm80") / "sm80"
    path = sm80 / "column_sums.bin"
    whole = path.read_bytes()
    variants = json.loads((sm80 / "column_sums.json").read_bytes())["variants"].values()
    ends = sorted(variant["offset"] + variant["length"] for variant in variants)

    def problems() -> list[str]:
        return [fault.problem for fault in verify().faults if fault.path == path]

    path.write_bytes(whole + b"more")
    assert problems() == [f"bytes from {len(whole)} on are in no binary"]

    def move(document: Any) -> None:
        for variant in document["variants"].values():
            variant["offset"] += 3 * (variant["offset"] >= ends[0])

    path.write_bytes(whole[: ends[0]] + b"gap" + whole[ends[0] :])
    edit(sm80 / "column_sums.json", move)
    assert problems() == [f"bytes {ends[0]} to {ends[0] + 3} are in no binary"]

    def share(document: Any) -> None:
        first = next(v for v in document["variants"].values() if v["offset"] == 0)
        bases = {v["base"] for v in document["variants"].values()}
        other = next(v for name, v in document["variants"].items() if v is not first and name not in bases)
        other.update({key: first[key] for key in ("offset", "length", "sha256", "base")})

    edit(sm80 / "column_sums.json", share)
    assert f"bytes 0 to {ends[0]} are in two binaries" in problems()


def test_verify_of_an_op_without_binaries(copies: Callable[..., Path]) -> None:
    """A manifest that lists none has no error of its own, but the file is missed."""
    sm80 = copies("sm80") / "sm80"
    (sm80 / "column_sums.bin").unlink()
    edit(sm80 / "column_sums.json", lambda document: document.update(kernels={}, variants={}))
    assert [str(fault) for fault in verify().faults] == [
        f"{sm80 / 'column_sums.bin'}: No such file or directory"
    ]


def record(site: Path, name: str, *folders: Path) -> Path:
    """A wheel's RECORD of what lies in these folders, as pip leaves it."""
    lines = []
    for path in sorted(path for folder in folders for path in folder.rglob("*") if path.is_file()):
        digest = urlsafe_b64encode(sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
        lines.append(f"{path.relative_to(site)},sha256={digest},{path.stat().st_size}\n")
    about = site / f"{name}-{liger_aot.__version__}.dist-info"
    about.mkdir()
    (about / "RECORD").write_text("".join((*lines, f"{about.name}/RECORD,,\n")))
    return about / "RECORD"


def test_verify_compares_with_the_record_of_the_wheel(copies: Callable[..., Path]) -> None:
    """A pack that was changed together with the manifest that vouches for it; files that are in no RECORD."""
    root = copies("sm80", "sm90")
    site, sm80, sm90 = root.parent, root / "sm80", root / "sm90"
    assert {sm80, sm90} <= verify().unrecorded.keys() and verify().faults == ()
    told = record(site, "liger_aot_sm80", sm80)
    report = verify()
    assert report.faults == () and sm80 not in report.unrecorded
    assert report.unrecorded[sm90] == len(list(sm90.iterdir()))
    for pack in (sm80, sm90):  # other binaries, for which all hashes of the pack are made to fit
        names = packs.open_pack(pack).op("column_sums").variants
        replace_binaries(pack, "column_sums", dict.fromkeys(names, compressed(b"\x7fELF of somebody else")))
    report = verify()
    changed = [sm80 / name for name in ("column_sums.bin", "column_sums.json", "manifest.json")]
    assert sorted(fault.path for fault in report.faults) == changed
    assert all(
        "its wheel's RECORD says sha256=" in fault.problem or "larger than" in fault.problem
        for fault in report.faults
    )
    assert sm90 in report.unrecorded, "nothing vouches for it but itself: that is said"
    told.write_text(told.read_text().replace(f"{sm80.relative_to(site)}/dyt.bin", "elsewhere"))
    (fault,) = (fault for fault in verify().faults if fault.path == sm80 / "dyt.bin")
    assert fault.problem == "in no wheel's RECORD"
    assert Fault(site / "elsewhere", "No such file or directory") not in verify().faults, "it is in no pack"


def test_verify_of_a_record_that_cannot_be_read(copies: Callable[..., Path]) -> None:
    sm80 = copies("sm80") / "sm80"
    told = record(sm80.parents[1], "liger_aot_sm80", sm80)
    told.unlink()
    os.mkfifo(told)  # reading it would wait for ever
    assert verify().faults == (Fault(told, "not a regular file"),)


def test_verify_command_names_what_no_record_covers(
    copies: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    sm80 = copies("sm80") / "sm80"
    assert main(["verify"]) == 0
    files = len(list(sm80.iterdir()))
    said = f"{sm80}: no wheel's RECORD covers its {files} files, which vouch for themselves"
    assert said in capsys.readouterr().out
    record(sm80.parents[1], "liger_aot_sm80", sm80)
    assert main(["verify"]) == 0
    assert str(sm80) not in capsys.readouterr().out


# ---- the command ----


def test_list(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    head, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["op", *ARCHS]
    for op, *counts in rows:
        assert counts == [str(count_binaries(built / arch, op)) for arch in ARCHS]
    assert [row[0] for row in rows] == list(liger_aot.ops())


def test_list_of_packs_that_are_partly_damaged(
    copies: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    root = copies("gfx942", "sm80", "sm90")
    flip(root / "sm80" / "rmsnorm.json", 9)
    (root / "sm90" / "manifest.json").write_bytes(b"")
    edit(root / "gfx942" / "manifest.json", lambda m: m["ops"].pop("rmsnorm"))
    assert main(["list"]) == 1
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0].split() == ["op", "gfx942", "sm80"]
    assert ["rmsnorm", "-", "damaged"] in [line.split() for line in printed.out.splitlines()]
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert "sm90/manifest.json: not JSON" in printed.err and "and 1 more" in printed.err


def test_list_and_verify_without_packs(
    tmp_path: Path, install: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path)
    assert main(["list"]) == 0
    assert "No binaries: none is installed in LIGER_AOT_PACKS=" in capsys.readouterr().out
    assert main(["verify"]) == 1
    assert capsys.readouterr().err.startswith("error: nothing to verify: none is installed")


def test_explain_command(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", "rmsnorm", "--shape", "8192,4096", "--dtype", "bf16"]
    assert main([*arguments, "--arch", "sm90", "--dtypes", "weight=fp32"]) == 0
    out = capsys.readouterr().out
    choices = liger_aot.explain(
        "rmsnorm", arch="sm90", shape=(8192, 4096), dtype="bf16", dtypes={"weight": "fp32"}
    )
    assert out.splitlines() == [*table(choices).splitlines(), *map(str, choices)]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert all(f"\n{arch} " in out for arch in ARCHS), "no architecture named: all of them"


def test_explain_command_names_what_it_leaves_out(
    copies: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (copies("sm80", "sm90") / "sm80" / "manifest.json").write_bytes(b"[]")
    arguments = ["explain", "rmsnorm", "--shape", "8192,4096", "--dtype", "bf16"]
    assert main(arguments) == 0
    assert "left out: " in capsys.readouterr().err
    with pytest.raises(PackDamaged, match="the file is not an object"):
        liger_aot.explain("rmsnorm", arch="sm80", shape=(8, 64), dtype="bf16")


def test_verify_command(copies: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    root = copies("sm80", "sm90")
    assert main(["verify"]) == 0
    assert capsys.readouterr().out.endswith("\nas they were built: sm80, sm90\n")
    flip(root / "sm80" / "rmsnorm.json", 9)
    assert main(["verify"]) == 1
    printed = capsys.readouterr()
    assert "rmsnorm.json: sha256 is" in printed.out and printed.err.startswith("error: 1 files are not as")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND; see liger-aot --help"),
        (["lst"], "invalid choice: 'lst'"),
        (["explain", "rmsnorm", "--dtype", "bf16"], "required: --shape; see liger-aot explain --help"),
        (["explain", "rmsnorm", "--shape", "8x", "--dtype", "bf16"], "'8x' is no list of sizes such as 8192,4096"),
        (["explain", "rmsnorm", "--shape", "8,", "--dtype", "bf16"], "'8,' is no list of sizes"),
        (["explain", "rmsnorm", "--shape", "8,0", "--dtype", "bf16"], "an empty tensor launches nothing"),
        (["explain", "nothing", "--shape", "8", "--dtype", "bf16"], "no op 'nothing': there are"),
        (["explain", "rmsnorm", "--shape", "8", "--dtype", "int8"], "no op is built for dtype 'int8'"),
        (["explain", "rmsnorm", "--shape", "8", "--dtype", "bf16", "--dtypes", "w"], "'w' is no list such as"),
        (["explain", "rmsnorm", "--shape", "8", "--dtype", "bf16", "--arch", "sm1"], "no pack 'sm1' is installed"),
    ],
)  # fmt: skip
def test_errors_are_one_line(
    built: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("error: ") and message in printed.err


@pytest.mark.parametrize(
    "arguments", [["--help"], ["list", "--help"], ["explain", "--help"], ["doctor", "--help"]]
)
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: liger-aot") and "  -h, --help" in out


def test_the_module_is_the_command(built: Path) -> None:
    done = command("--version")
    assert (done.returncode, done.stdout) == (0, f"liger-aot {liger_aot.__version__}\n")
    done = command("list", "and more")
    assert done.returncode == 1 and done.stderr.startswith("error: unrecognized arguments: and more")
