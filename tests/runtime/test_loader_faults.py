"""Packs whose files are damaged, unreadable, of another version, or say what cannot be: all is refused by name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import liger_aot
from liger_aot import explanation
from liger_aot.errors import LigerAOTError, NotBuilt, PackDamaged, PackNotFound, PackTooNew
from liger_aot.ops.op import Problem
from liger_aot.runtime import packs
from liger_aot.runtime.dispatch import KernelOn, Loaded
from liger_aot.runtime.manifest import FORMAT, LARGEST_FILE, LARGEST_JSON, Pack
from liger_aot.runtime.packs import Device, pack_for, pack_of
from liger_aot_build.stored import compressed
from tests.harness.drivers import Launchable
from tests.harness.pack_edits import believe, cut, edit, flip, read_all, replace_binaries
from tests.harness.planned_packs import compiled_pack

pytest_plugins = ("tests.harness.pack_fixtures",)

H200 = Device("cuda", "9.0", "NVIDIA H200")
A100 = Device("cuda", "8.0", "NVIDIA A100")
A10 = Device("cuda", "8.6", "NVIDIA A10")
NOBODY = 65534


# ---- Damage, by the file it is in ----


def empty(path: Path) -> None:
    path.write_bytes(b"")


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_fifo(path: Path) -> None:
    """Opening it would wait for a writer, for ever."""
    path.unlink()
    os.mkfifo(path)


def as_device(path: Path) -> None:
    """What it holds never ends."""
    path.unlink()
    path.symlink_to("/dev/zero")


def too_large(path: Path) -> None:
    os.truncate(path, LARGEST_JSON + 1)


DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (lambda path: flip(path, 0), "sha256 is|not JSON"),
    (lambda path: flip(path, path.stat().st_size // 2), "sha256 is"),
    (lambda path: flip(path, -1), "sha256 is"),
    (cut, "sha256 is|not JSON|cut short: it ends at byte"),
    (empty, "sha256 is|not JSON|cut short: it ends at byte 0"),
    (Path.unlink, "No such file or directory"),
    (as_folder, "Is a directory"),
    (as_fifo, "not a regular file"),
    (as_device, "not a regular file"),
]
TOO_LARGE = (too_large, f"larger than {LARGEST_JSON} bytes")


@pytest.mark.parametrize(
    ("part", "damage", "message"),
    [
        *(("column_sums.json", *one) for one in (*DAMAGE, TOO_LARGE)),
        *(("column_sums.bin", *one) for one in DAMAGE),
    ],
)
def test_damage_is_found_where_it_is(
    sm80: Path, part: str, damage: Callable[[Path], None], message: str
) -> None:
    path = sm80 / part
    damage(path)
    pack = pack_of("sm80")
    with pytest.raises(PackDamaged, match=message) as caught:
        read_all(pack)
    assert caught.value.path == path and str(path) in str(caught.value)
    assert "Reinstall" in str(caught.value) and "\n" not in str(caught.value)
    manifest = pack.op("rmsnorm")
    assert all(manifest.variant(name).read() for name in manifest.variants), "the pack's other op goes on"


@pytest.mark.parametrize(("damage", "message"), [*(d for d in DAMAGE if d[1] != "sha256 is"), TOO_LARGE])
def test_a_damaged_manifest(sm80: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(sm80 / "manifest.json")
    for device in (A100, A10):
        with pytest.raises(PackDamaged, match=message) as caught:
            pack_for(device)
        assert caught.value.path == sm80 / "manifest.json"
    with pytest.raises(PackDamaged, match=message):
        pack_of("sm80")
    with pytest.raises(PackNotFound, match=r"installed are sm80 \(unusable: liger-aot verify says why\)"):
        pack_for(H200)


@pytest.mark.parametrize("step", [37, pytest.param(1, marks=pytest.mark.slow)])
def test_no_flipped_bit_of_a_manifest_brings_another_binary(sm80: Path, step: int) -> None:
    """No hash is over manifest.json itself: what is read by it is the same binaries, or an error."""

    def hashes(pack: Pack, op: str) -> list[str]:
        manifest = pack.op(op)
        return [manifest.variant(name).blob.sha256 for name in manifest.variants]

    path = sm80 / "manifest.json"
    # A bit of another op's is no matter.
    edit(path, lambda m: m.update(ops={"column_sums": m["ops"]["column_sums"]}))
    whole = path.read_bytes()
    expected = hashes(Pack(sm80), "column_sums")
    refused = 0
    for bit in range(0, 8 * len(whole), step):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            assert hashes(packs.open_pack(sm80), "column_sums") == expected
        except LigerAOTError:
            refused += 1
    assert refused * step > 4 * len(whole)


def test_an_unreadable_file_is_named(sm80: Path) -> None:
    """Mode 000, read by a user who is not root."""
    for path in (sm80 / "column_sums.bin", sm80 / "column_sums.json", sm80 / "manifest.json", sm80):
        mode = path.stat().st_mode
        path.chmod(0)
        said = as_nobody(sm80.parent, lambda: read_all(packs.open_pack(Path("sm80"))))
        path.chmod(mode)
        expected = path.relative_to(sm80.parent) if path != sm80 else Path("sm80/manifest.json")
        assert said.startswith(f"PackDamaged: {expected}: Permission denied. Reinstall")
    assert as_nobody(sm80.parent, lambda: read_all(packs.open_pack(Path("sm80")))) == "no error"


def as_nobody(folder: Path, action: Callable[[], object]) -> str:
    """The error of ``action``, run in ``folder`` by a user to whom file modes apply."""
    reading, writing = os.pipe()
    folder.chmod(0o755)
    child = os.fork()
    if child == 0:
        said = "no error"
        try:
            os.chdir(folder)  # what is above it need not be open to that user
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            action()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


# ---- Formats, versions and names ----


@pytest.mark.parametrize("part", ["manifest.json", "column_sums.json"])
@pytest.mark.parametrize(
    ("found", "error", "message"),
    [
        (FORMAT + 1, PackTooNew, f"format {FORMAT + 1}, this liger-aot reads up to {FORMAT}. Upgrade"),
        (FORMAT - 1, PackDamaged, f"format {FORMAT - 1}, this loader reads {FORMAT}"),
        ("1", PackDamaged, "format is '1', expected int"),
        (1.0, PackDamaged, "format is 1.0, expected int"),
        (True, PackDamaged, "format is True, expected int"),
        (None, PackDamaged, "format is None, expected int"),
        (-1, PackDamaged, "format is -1"),
        (10**400, PackDamaged, r"format is 10+\.\.\.0+"),
    ],
)  # fmt: skip
def test_formats(sm80: Path, part: str, found: Any, error: type[Exception], message: str) -> None:
    edit(sm80 / part, lambda document: document.update(format=found))
    with pytest.raises(error, match=message):
        pack_for(A100).op("column_sums")


def test_a_newer_format_is_told_before_what_else_is_strange(sm80: Path) -> None:
    (sm80 / "manifest.json").write_text(json.dumps({"format": FORMAT + 1, "architecture": ["sm80"]}))
    with pytest.raises(PackTooNew, match="Upgrade"):
        pack_for(A100)


@pytest.mark.parametrize("part", ["manifest.json", "column_sums.json"])
def test_what_is_too_large_is_not_read(sm80: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """64 MB of JSON take ten seconds and a gigabyte and a half."""
    sizes: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, at: (sizes.append(size), pread(file, size, at))[1])
    assert read_all(packs.open_pack(sm80)) and (sm80 / part).stat().st_size in sizes
    sizes.clear()
    too_large(sm80 / part)
    with pytest.raises(PackDamaged, match="larger than"):
        packs.open_pack(sm80).op("column_sums")
    assert max(sizes, default=0) < LARGEST_JSON


def test_a_pack_in_another_ones_folder(sm80: Path) -> None:
    """Two folders of one architecture: which of them is used would be chance."""
    sm80.rename(sm80.parent / "sm86")
    with pytest.raises(PackDamaged, match="arch is 'sm80', its folder is 'sm86'"):
        packs.open_pack(sm80.parent / "sm86")


def test_another_version(sm80: Path) -> None:
    edit(sm80 / "manifest.json", lambda m: m.update(version="0.0.9"))
    message = rf'is of version 0\.0\.9, liger-aot of .*"liger-aot\[sm80\]=={liger_aot.__version__}"'
    for attempt in (lambda: pack_for(A100), lambda: pack_for(A10), lambda: pack_of("sm80")):
        with pytest.raises(PackNotFound, match=message):
            attempt()


OUTSIDE = [
    "../x",
    "/etc/passwd",
    "a/b",
    "..",
    ".",
    "",
    ".hidden",
    "a\0b",
    "a\\b",
    "a b",
    "a\n",
    "\ud800",
    "x..y",
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_cannot_leave_the_pack(sm80: Path, name: str) -> None:
    """In every place that a path is made from, and in the names of binaries and architectures, which are printed."""
    original = (sm80 / "manifest.json").read_bytes()
    changes: list[Callable[[Any], Any]] = [
        lambda m: m["ops"].update({name: m["ops"]["column_sums"]}),
        lambda m: m.update(arch=name),
    ]
    for change in changes:
        edit(sm80 / "manifest.json", change)
        with pytest.raises(PackDamaged, match="unsafe name"):
            Pack(sm80)
        (sm80 / "manifest.json").write_bytes(original)

    def rename(document: Any) -> None:
        (kernel,) = document["kernels"].values()
        kernel["tables"]["bf16/aligned"] = [[None, name]]
        document["variants"][name] = next(iter(document["variants"].values()))

    edit(sm80 / "column_sums.json", rename)
    manifest = Pack(sm80).op("column_sums")
    with pytest.raises(PackDamaged, match="unsafe name"):
        manifest.variant(name)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("symbol", "a\0b", "symbol is"),
        ("symbol", "", "symbol is"),
        ("threads", 0, "threads is 0, a block has 1 to 1024"),
        ("threads", 2048, "threads is 2048"),
        ("threads", "128", "threads is '128', expected int"),
        ("shared", -1, "shared is -1"),
        ("shared", 1 << 31, "shared is 2147483648"),
        ("shared", 1e3, "shared is 1000.0, expected int"),
        ("cooperative", 0, "cooperative is 0, expected bool"),
        ("pdl", 1, "pdl is 1, expected bool"),
        ("pdl", None, "pdl is None, expected bool"),
        ("contiguous", 1, "contiguous is 1, expected bool"),
        ("numbers", [], "numbers is not an object"),
        ("numbers", {"block": "32"}, "block is '32', expected int"),
        ("sha256", None, "sha256 is None, expected str"),
        ("sha256", "0" * 64, "the manifest says '0000"),
        ("offset", None, "offset is None, expected int"),
        ("offset", -1, "offset is -1"),
        ("offset", 1 << 31, "offset is 2147483648"),
        ("offset", (1 << 31) - 1, "cut short: it ends at byte"),
        ("offset", 1, "sha256 is"),
        ("length", "4", "length is '4', expected int"),
        ("length", -1, "length is -1"),
        ("length", LARGEST_FILE + 1, f"a binary has at most {LARGEST_FILE} bytes"),
        ("length", LARGEST_FILE, "cut short: it ends at byte"),
        ("length", 0, "sha256 is"),
    ],
)
def test_facts_of_a_binary_that_cannot_be(sm80: Path, field: str, value: Any, message: str) -> None:
    edit(sm80 / "column_sums.json", lambda d: [v.update({field: value}) for v in d["variants"].values()])
    manifest = pack_for(A100).op("column_sums")
    with pytest.raises(PackDamaged, match=message):
        manifest.variant(manifest.variants[0]).read()


def test_a_binary_is_launched_in_one_way(sm80: Path) -> None:
    both = {"cooperative": True, "pdl": True}
    edit(sm80 / "column_sums.json", lambda d: [v.update(both) for v in d["variants"].values()])
    manifest = pack_for(A100).op("column_sums")
    with pytest.raises(PackDamaged, match=r"cooperative and .*pdl are both true"):
        manifest.variant(manifest.variants[0])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("signature", "ppiq", "signature is 'ppiq' for 4 arguments"),
        ("signature", "ppi", "signature is 'ppi' for 4 arguments"),
        ("arguments", ["a", 1], "arguments is"),
        ("axes", "out", "axes is 'out', expected a list of strings"),
        ("axes", [], "'bf16/aligned' is no key for axes"),
        ("tables", {"bf-16/aligned": []}, "'bf-16/aligned' is no key"),
        ("tables", {"bf16/sometimes": []}, "'bf16/sometimes' is no key"),
        ("tables", {"bf16/aligned": []}, "bf16/aligned is not a list of entries"),
        ("tables", {"bf16/aligned": [[None, []]]}, "is no entry"),
        ("tables", {"bf16/aligned": [[None, "missing"]]}, "is no entry"),
        ("tables", {"bf16/aligned": [[None, "V"], [None, "V"]]}, "bounds do not rise"),
        ("tables", {"bf16/aligned": [[8, "V"], [8, "V"], [None, "V"]]}, "bounds do not rise"),
        ("tables", {"bf16/aligned": [[8, "V"]]}, "no entry for n past 8"),
        (
            "limited",
            {"bf16/aligned": {"table": [], "why": "w"}},
            "'bf16/aligned' is a key of its tables, too",
        ),
        ("limited", {"bf16/sometimes": {"table": [], "why": "w"}}, "'bf16/sometimes' is no key"),
        ("limited", {"i8/aligned": {"table": []}}, "why is None, expected str"),
        ("limited", {"i8/aligned": {"table": {}, "why": "w"}}, "table is not a list of entries"),
        ("limited", {"i8/aligned": {"table": [[8, "missing"]], "why": "w"}}, "is no entry"),
        ("few", {"bf16/sometimes": []}, "'bf16/sometimes' is no key of its tables"),
        ("few", {"bf16/aligned": {}}, "few.bf16/aligned is not a list of entries"),
        ("few", {"bf16/aligned": [[8, "V"]]}, "is no entry"),
        ("few", {"bf16/aligned": [[8, 8, "missing"]]}, "is no entry"),
        ("few", {"bf16/aligned": [[None, None, "V"]]}, "has a bound that is none"),
        ("few", {"bf16/aligned": [[0, 8, "V"]]}, "has a bound that is none"),
    ],
)
def test_dispatch_tables_that_cannot_be(sm80: Path, field: str, value: Any, message: str) -> None:
    def change(document: Any) -> None:
        name = next(iter(document["variants"]))
        document["kernels"]["column_sums"][field] = json.loads(
            json.dumps(value).replace('"V"', json.dumps(name))
        )

    edit(sm80 / "column_sums.json", change)
    with pytest.raises(PackDamaged, match=message):
        pack_for(A100).op("column_sums")


def test_what_an_architecture_does_without(sm80: Path) -> None:
    """Past its last bound, or altogether, a key of "limited" says why; what its table holds is dispatched."""

    def change(document: Any) -> None:
        kernel, name = document["kernels"]["column_sums"], next(iter(document["variants"]))
        kernel["tables"].pop("bf16/aligned")
        kernel["tables"].pop("fp16/aligned")
        kernel["limited"] = {
            "bf16/aligned": {"table": [[64, name]], "why": "use a sum"},
            "fp16/aligned": {"table": [], "why": "use a sum"},
        }

    edit(sm80 / "column_sums.json", change)
    manifest = pack_for(A100).op("column_sums")
    kernel = KernelOn("column_sums", manifest, lambda name: Loaded(manifest.variant(name), Launchable(print)))
    assert kernel((torch.bfloat16, True), 64).variant.name in manifest.variants
    with pytest.raises(
        NotBuilt, match=r"not built for bf16/aligned past n = 64 on this architecture: use a sum"
    ):
        kernel((torch.bfloat16, True), 65)
    with pytest.raises(
        NotBuilt, match=r"column_sums is not built for fp16/aligned on this architecture: use a"
    ):
        kernel((torch.float16, True), 1)
    assert kernel((torch.float32, True), 1 << 20).variant.name in manifest.variants
    told = manifest.kernels["column_sums"]
    fits, does_not = (Problem("column_sums", (torch.bfloat16,), True, n) for n in (64, 65))
    assert explanation._held("sm80", told, "bf16/aligned", fits)[1] == "is held by the bound 64 (1 to 64)"
    with pytest.raises(NotBuilt, match=r"past n = 64 on this architecture: use a sum"):
        explanation._held("sm80", told, "bf16/aligned", does_not)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe{\0}\0", "not JSON"),  # UTF-16 is not what is written
        (b"[" * 100_000, "not JSON"),
        (b"9" * 5000, "not JSON"),
        (b"[]", "the file is not an object"),
        (b"{}", "format is None"),
        (b'{"format": %d, "format": %d}' % (FORMAT, FORMAT), "'format' stands twice in an object"),
        (b'{"kernels": {"a": 1, "b": 2, "a": 1}}', "'a' stands twice in an object"),
        (b'{"format": %d} {}' % FORMAT, "not JSON: Extra data"),
        (b'{"format": %d}\0' % FORMAT, "not JSON: Extra data"),
        (b'{"format": NaN}', "NaN is no number of JSON"),
        (b'{"format": %d}' % FORMAT, "variants is not an object"),
    ],
)
def test_text_that_is_no_manifest(sm80: Path, text: bytes, message: str) -> None:
    """The hash fits, and is not believed for that."""
    (sm80 / "column_sums.json").write_bytes(text)
    believe(sm80 / "column_sums.json")
    with pytest.raises(PackDamaged, match=message):
        pack_for(A100).op("column_sums")


def test_a_binary_with_a_base_is_read_against_it(tmp_path: Path) -> None:
    """Whole, it reads; where its base is another's, damaged, not there or has a base itself, the error names a file."""
    sm80 = Path(shutil.copytree(compiled_pack("sm80", "swiglu").folder, tmp_path / "sm80"))
    manifest = Pack(sm80).op("swiglu")
    name = next(n for n in manifest.variants if manifest.variant(n).base)
    variant = manifest.variant(name)
    base = variant.base
    assert base is not None and variant.read()[:4] == b"\x7fELF"
    bases = {manifest.variant(n).base for n in manifest.variants} - {None}
    assert len(bases) > 1
    for other in (*(bases - {base}), variant.blob):
        with pytest.raises(PackDamaged, match="not a zlib stream"):
            variant._replace(base=other).read()
    with pytest.raises(PackDamaged, match="not a zlib stream"):
        variant._replace(base=None).read()
    flip(base.path, base.offset + 40)
    with pytest.raises(PackDamaged, match=f"{base.name}: sha256 is") as caught:
        variant.read()
    assert caught.value.path == base.path == sm80 / "swiglu.bin"


def test_a_binary_is_read_alone(sm80: Path) -> None:
    """Neither damage elsewhere in its op's file matters, nor how long that file is."""
    manifest = Pack(sm80).op("rmsnorm")
    path, whole = manifest.binaries, manifest.binaries.read_bytes()
    variants = [manifest.variant(name) for name in manifest.variants]
    against = next(v for v in variants if v.base is not None)
    for variant in (next(v for v in variants if v.base is None), against):
        image, data = variant.read(), bytearray(len(whole))
        for blob in {variant.blob, variant.base} - {None}:
            place = slice(blob.offset, blob.offset + blob.length)
            data[place] = whole[place]
        path.write_bytes(data)
        os.truncate(path, 1 << 40)  # of which the disk holds nothing
        assert variant.read() == image
        path.write_bytes(whole)


def test_bytes_after_a_binary_are_refused(sm80: Path) -> None:
    name = min(Pack(sm80).op("column_sums").variants)
    image = Pack(sm80).op("column_sums").variant(name).read()
    replace_binaries(sm80, "column_sums", {name: compressed(image)})
    assert Pack(sm80).op("column_sums").variant(name).read() == image
    replace_binaries(sm80, "column_sums", {name: compressed(image) + b"more"})
    with pytest.raises(PackDamaged, match=f"{name}: 4 bytes follow the zlib stream"):
        Pack(sm80).op("column_sums").variant(name).read()
