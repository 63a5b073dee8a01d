"""docs/pack-format.md: the code on it reads every binary as the loader does, and it names every field there is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from liger_aot.runtime import manifest
from liger_aot.runtime.dispatch import CODE_NAMES, DTYPE_NAMES, KernelOn
from liger_aot_build import pack as writer
from liger_aot_build.paths import ROOT
from liger_aot_build.stored import WINDOW
from tests.conftest import built_pack
from tests.harness.pack_edits import ARCHS
from tests.harness.planned_packs import compiled_pack

PAGE = (ROOT / "docs" / "pack-format.md").read_text()


def json_of(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_bytes()))


@pytest.fixture(scope="module")
def reader() -> dict[str, Any]:
    """What the page's code defines: it imports nothing but the standard library."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    found: dict[str, Any] = {}
    exec(code, found)
    return found


@pytest.mark.parametrize("arch", ARCHS)
def test_the_code_on_the_page_reads_every_binary(arch: str, reader: dict[str, Any]) -> None:
    pack = compiled_pack(arch, "column_sums", "swiglu")
    for name in pack.ops:
        op, document = pack.op(name), reader["read_op"](pack.folder, name)
        assert sorted(document["variants"]) == sorted(op.variants)
        for variant in op.variants:
            image = reader["read_binary"](pack.folder, document, variant)
            assert image[:4] == b"\x7fELF" and image == op.variant(variant).read(), variant


def test_the_code_on_the_page_chooses_as_dispatch_does(reader: dict[str, Any]) -> None:
    pack = built_pack("sm90")
    document, op = reader["read_op"](pack.folder, "rmsnorm"), pack.op("rmsnorm")
    dtypes = {short: dtype for dtype, short in DTYPE_NAMES.items()}
    chosen: list[str] = []

    def load(name: str) -> Any:
        chosen.append(name)

    for kernel, body in document["kernels"].items():
        for key, table in body["tables"].items():
            *axes, alignment = key.split("/")
            aligned = alignment == "aligned"
            for n in {1, 1 << 31, *(bound + more for bound, _ in table if bound for more in (0, 1))}:
                KernelOn(kernel, op, load)((*(dtypes[a] for a in axes), aligned), n)
                assert reader["choose"](document, kernel, axes, aligned, n) == chosen[-1]
    few = {name for b in document["kernels"].values() for of in b.get("few", {}).values() for *_, name in of}
    assert set(chosen) == set(op.variants) - few


def test_the_code_on_the_page_knows_few_rows(reader: dict[str, Any]) -> None:
    pack = built_pack("sm90")
    document, op = reader["read_op"](pack.folder, "rmsnorm_quantize"), pack.op("rmsnorm_quantize")
    dtypes = {short: dtype for dtype, short in {**DTYPE_NAMES, **CODE_NAMES}.items()}
    chosen: list[str] = []

    def load(name: str) -> Any:
        chosen.append(name)
        return name

    (kernel, body), *_ = document["kernels"].items()
    assert body["few"]
    for key, few in body["few"].items():
        *axes, alignment = key.split("/")
        values = (*(dtypes.get(a, a) for a in axes), alignment == "aligned")
        on = KernelOn(kernel, op, load)
        for n in {16, *(bound + more for bound, _, _ in few for more in (0, 16))}:
            for rows in {1, *(most + more for _, most, _ in few for more in (0, 1)), 1 << 20}:
                found = on.for_rows(values, n, rows)
                assert found is on.for_rows(values, n, rows), "as the first time"
                assert found == reader["choose"](document, kernel, axes, alignment == "aligned", n, rows)
            assert on(values, n) == reader["choose"](document, kernel, axes, alignment == "aligned", n)
    assert set(chosen) > {name for few in body["few"].values() for _, _, name in few}


@pytest.mark.parametrize("arch", ARCHS)
def test_the_page_names_every_field(arch: str) -> None:
    pack = built_pack(arch)
    tables = re.findall(r"^\| ([^|]*) \|", PAGE, re.MULTILINE)
    told = {field for cell in tables for field in re.findall(r"`(\w+)`", cell)}
    assert told >= set(json_of(pack.path))
    entry = re.search(r"^\| `ops` \|(.*)\|$", PAGE, re.MULTILINE)
    assert entry is not None
    for name, facts in json_of(pack.path)["ops"].items():
        assert set(facts) == set(re.findall(r"`(\w+)`", entry[1]))
        document = json_of(pack.folder / f"{name}.json")
        assert told >= set(document)
        for body in (*document["kernels"].values(), *document["variants"].values()):
            assert told >= set(body), name
        maps = [one for variant in document["variants"].values() for one in variant["maps"].values()]
        assert all(set(one) == {"box", "swizzle"} for one in maps)


def test_the_page_gives_the_numbers_of_the_code() -> None:
    assert f"Version {manifest.FORMAT}." in PAGE and manifest.FORMAT == writer.FORMAT
    assert f"the first {manifest.WINDOW} bytes" in PAGE and manifest.WINDOW == WINDOW
    assert f"{manifest.LARGEST_JSON >> 20} MiB for a JSON file; {manifest.LARGEST_FILE >> 20} MiB for" in PAGE
    assert f"at most {manifest.LONGEST_NAME} of the characters" in PAGE
    assert f"1 to {manifest.MOST_THREADS}" in PAGE and f"{manifest.MOST_ARGUMENTS} arguments" in PAGE


def test_every_byte_is_in_one_binary() -> None:
    for arch in ARCHS:
        pack = manifest.Pack(built_pack(arch).folder)
        for name in pack.ops:
            op, end = pack.op(name), 0
            for blob in sorted((op.variant(v).blob for v in op.variants), key=lambda blob: blob.offset):
                assert blob.offset == end, f"{arch} {blob.name}"
                end = blob.end
            assert op.binaries.stat().st_size == end
