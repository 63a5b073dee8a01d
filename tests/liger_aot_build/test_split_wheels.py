"""Split wheels as a stranger installs them, from a folder: some architectures, upgrades, mixed versions, removal.

The host wheel comes from ``python -m liger_aot_build wheel --split``, the device wheels that are installed from the
packs that are built already. The next version is the same tree with another number.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
from base64 import urlsafe_b64encode
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

from liger_aot_build.build import project_version
from liger_aot_build.device_wheel import write_device_wheel
from liger_aot_build.errors import BuildError
from liger_aot_build.paths import CACHE
from liger_aot_build.profile import profile_names
from liger_aot_build.release import SUMS, write_records
from liger_aot_build.variants import write_variants
from tests.harness.pack_edits import edit
from tests.harness.planned_packs import compiled_pack
from tests.liger_aot_build.wheel_builds import Environment, copy_tree, run_wheel

pytestmark = pytest.mark.slow
NOW, NEXT = project_version(), "99.0.0"
ARCH = "gfx942"  # what --split builds here, with two ops: whole packs are test_wheel.py's
OPS = ("column_sums", "swiglu")  # of the packs that are installed
SPLIT = ("--split", "--arch", ARCH, "--kernel", "rmsnorm,column_sums", "--quiet", "--out")


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``--split`` writes."""
    tree = copy_tree(tmp_path_factory.mktemp("split") / "liger-aot", CACHE)
    run_wheel(tree, *SPLIT, tree / "dist")
    return tree / "dist"


@pytest.fixture(scope="module")
def index(split: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all wheels of this version, and the next version's host wheel and sm90."""
    folder = tmp_path_factory.mktemp("index")
    shutil.copy(host(split), folder)
    for arch in profile_names():
        write_device_wheel(compiled_pack(arch, *OPS).folder, folder)
    tree = copy_tree(tmp_path_factory.mktemp("next") / "liger-aot")
    version = tree / "python" / "liger_aot" / "_version.py"
    version.write_text(version.read_text().replace(NOW, NEXT))
    run_wheel(tree, "--split", "--arch", "none", "--out", tree / "dist")
    shutil.copy(next((tree / "dist").glob("*.whl")), folder)
    pack = shutil.copytree(compiled_pack("sm90", *OPS).folder, tree / "pack")
    edit(pack / "manifest.json", lambda m: m.update(version=NEXT))
    write_device_wheel(pack, folder)
    return folder


def host(folder: Path) -> Path:
    (wheel,) = folder.glob(f"liger_aot-{NOW}-*.whl")
    return wheel


def texts(wheel: Path, part: str) -> str:
    with ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(f".dist-info/{part}"))
        return archive.read(name).decode()


# ---- What is built ----


def test_what_split_builds(split: Path) -> None:
    names = {path.name for path in split.iterdir()} - {host(split).name}
    device = f"liger_aot_{ARCH}-{NOW}-py3-none-any.whl"
    assert names == {device, SUMS, f"liger_aot-{NOW}.cdx.json"}
    assert host(split).name.startswith(f"liger_aot-{NOW}-cp310-abi3-")


def test_the_extras_are_the_profiles(split: Path) -> None:
    metadata = Parser().parsestr(texts(host(split), "METADATA"))
    assert set(metadata.get_all("Provides-Extra", [])) == {*profile_names(), "all"}
    pins = {arch: f"liger-aot-{arch}=={NOW}" for arch in profile_names()}
    expected = {f'{pin}; extra == "{extra}"' for arch, pin in pins.items() for extra in (arch, "all")}
    assert set(metadata.get_all("Requires-Dist", [])) == {"torch>=2.6", *expected}


@pytest.mark.parametrize("arch", profile_names())
def test_a_device_wheel_holds_its_pack_and_nothing_else(index: Path, arch: str) -> None:
    wheel = index / f"liger_aot_{arch}-{NOW}-py3-none-any.whl"
    pack = compiled_pack(arch, *OPS).folder
    with ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    record = [line.split(",") for line in texts(wheel, "RECORD").splitlines()]
    assert [name for name, _, _ in record] == list(files)
    for name, digest, size in record[:-1]:
        found = urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
        assert (digest, int(size)) == (f"sha256={found}", len(files[name]))
    prefix = f"liger_aot_packs/{arch}/"
    held = {name.removeprefix(prefix): data for name, data in files.items() if name.startswith(prefix)}
    note = files.pop(f"liger_aot_packs/{arch}.txt").decode()
    assert note.startswith(f"The folder {arch} holds the binaries")
    assert held == {str(p.relative_to(pack)): p.read_bytes() for p in pack.rglob("*") if p.is_file()}
    about = f"liger_aot_{arch}-{NOW}.dist-info"
    parts = ("licenses/LICENSE", "METADATA", "WHEEL", "RECORD")
    assert set(files) - {prefix + name for name in held} == {f"{about}/{part}" for part in parts}
    metadata = Parser().parsestr(texts(wheel, "METADATA"))
    assert (metadata["Name"], metadata["Version"]) == (f"liger-aot-{arch}", NOW)
    assert metadata["Requires-Dist"] is None, "which host it needs, the loader checks"


def test_the_same_bytes_in_another_folder_under_another_umask(split: Path, tmp_path: Path) -> None:
    """Compiled from nothing."""
    before = os.umask(0o077)
    try:
        tree = copy_tree(tmp_path / "elsewhere" / "liger-aot")
        for path in tree.rglob("*"):
            if not path.is_symlink() and path.is_file():
                path.chmod(0o700)
        run_wheel(tree, *SPLIT, tree / "dist")
    finally:
        os.umask(before)
    again = {path.name: path.read_bytes() for path in (tree / "dist").iterdir()}
    once = {path.name: path.read_bytes() for path in split.iterdir()}
    assert [name for name in {*once, *again} if once.get(name) != again.get(name)] == []


# ---- Checksums and the bill of materials ----


def test_checksums(split: Path) -> None:
    lines = [line.split("  ") for line in (split / SUMS).read_text().splitlines()]
    assert {name for _, name in lines} == {path.name for path in split.iterdir()} - {SUMS}
    for digest, name in lines:
        assert hashlib.sha256((split / name).read_bytes()).hexdigest() == digest


def test_bill_of_materials(split: Path) -> None:
    bill = json.loads((split / f"liger_aot-{NOW}.cdx.json").read_bytes())
    components = {c["bom-ref"]: c for c in bill["components"]}
    wheels = {path.name: path for path in split.glob("*.whl")}
    assert set(components) == {*wheels, "pkg:pypi/torch", "pkg:pypi/triton@3.6.0"}
    for name, path in wheels.items():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert components[name]["hashes"] == [{"alg": "SHA-256", "content": digest}]
        assert components[name]["version"] == NOW
    assert components["pkg:pypi/triton@3.6.0"]["scope"] == "excluded", "it isn't there where it runs"
    needs = {d["ref"]: d.get("dependsOn", []) for d in bill["dependencies"]}
    assert needs[host(split).name] == ["pkg:pypi/torch"] and set(needs["liger-aot"]) == set(wheels)


def test_the_bill_is_valid(split: Path) -> None:
    """By CycloneDX's own library, where it is installed: dependency group "wheels"."""
    validation = pytest.importorskip("cyclonedx.validation.json")
    schema = pytest.importorskip("cyclonedx.schema")
    validator = validation.JsonStrictValidator(schema.SchemaVersion.V1_6)
    text = (split / f"liger_aot-{NOW}.cdx.json").read_text()
    assert validator.validate_str(text) is None
    assert validator.validate_str(text.replace('"SHA-256"', '"SHA-255"')) is not None


def test_records_of_wheels_that_do_not_belong_together(index: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=f"holds wheels of versions {NOW}, {NEXT}: use an empty folder"):
        write_records(index)
    with pytest.raises(BuildError, match="there is no wheel in"):
        write_records(tmp_path)


# ---- Wheel variants ----


def test_variants(index: Path, tmp_path: Path) -> None:
    """Each is the host wheel with one pack; what it is for is said in it and in the index, in the draft's words."""
    packs = [compiled_pack(arch, *OPS).folder for arch in profile_names()]
    *wheels, listed = write_variants(host(index), packs, tmp_path)
    stem = host(index).name.removesuffix(".whl")
    assert [path.name for path in wheels] == [f"{stem}-{label}.whl" for label in (*profile_names(), "null")]
    variants = json.loads(listed.read_bytes())["variants"]
    assert listed.name == f"liger_aot-{NOW}-variants.json" and variants["null"] == {}
    assert variants["sm90"] == {"nvidia": {"sm_arch": ["90_real"]}}
    assert variants["gfx942"] == {"amd": {"gfx_arch": ["gfx942"]}}
    with ZipFile(host(index)) as archive:
        own = {n: archive.read(n) for n in archive.namelist() if not n.endswith(("/", "/RECORD"))}
    for path in wheels:
        label = path.name.removesuffix(".whl").rpartition("-")[2]
        said = json.loads(texts(path, "variant.json"))["variants"]
        assert said == {label: variants[label]}
        with ZipFile(path) as archive:
            names = {
                n
                for n in archive.namelist()
                if not n.endswith((".dist-info/RECORD", ".dist-info/variant.json"))
            }
            assert all(archive.read(n) == data for n, data in own.items())
        folders = {name.split("/")[1] for name in names - set(own)}
        assert folders == (set() if label == "null" else {label, f"{label}.txt"})
        record = {line.split(",")[0] for line in texts(path, "RECORD").splitlines()}
        assert names < record


# ---- Installed ----

LOADS = """
import liger_aot, torch
from liger_aot.runtime.packs import Device, pack_for, pack_of
for arch in liger_aot.archs():
    pack = pack_of(arch)
    assert pack_for(Device(pack.backend, pack.serves[0], "a GPU")).arch == arch
    assert {"column_sums", "swiglu"} <= set(pack.ops)
    for op in pack.ops:
        manifest = pack.op(op)
        assert manifest.variant(manifest.variants[0]).read()[:4] == b"\\x7fELF"
x = torch.randn(3, 64)
weight = torch.ones(64)
wanted = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
torch.testing.assert_close(liger_aot.load("rmsnorm")(x, weight, eps=1e-6), wanted)
print(liger_aot.__version__, *liger_aot.archs())
"""
ASKS = """
from liger_aot.runtime.packs import Device, pack_for
pack_for(Device("cuda", "9.0", "NVIDIA H200"))
"""


@pytest.mark.parametrize("archs", [("gfx942",), ("sm80", "sm90"), tuple(profile_names())])
def test_install_and_uninstall(index: Path, tmp_path: Path, archs: tuple[str, ...]) -> None:
    extras = "all" if len(archs) == len(profile_names()) else ",".join(archs)
    environment = Environment(tmp_path / "environment", index)
    environment.pip("install", f"liger-aot[{extras}]=={NOW}")
    assert environment.installed() == {"liger-aot": NOW, **{f"liger-aot-{arch}": NOW for arch in archs}}
    assert environment.run("python", "-c", LOADS).split() == [NOW, *archs]
    assert all(arch in environment.run("liger-aot", "verify") for arch in archs)
    environment.pip("check")
    first, *others = archs
    environment.pip("uninstall", f"liger-aot-{first}")
    assert environment.run("python", "-c", LOADS).split() == [NOW, *others], "the others stay whole"
    environment.run("liger-aot", "verify", exit_code=0 if others else 1)  # nothing to verify is a failure
    environment.pip("uninstall", "liger-aot", *(f"liger-aot-{arch}" for arch in others))
    assert environment.files() == environment.fresh


@pytest.fixture(scope="module")
def environment(index: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("environment") / "environment", index)


def state(environment: Environment) -> list[str]:
    return environment.run("python", "-c", LOADS).split()


def follow(environment: Environment, said: str) -> None:
    """Do what an error says: the last pip install that it names."""
    command = re.findall(r'pip install --no-index --find-links FOLDER ("[^"]+")', said)[-1]
    environment.pip("install", *shlex.split(command))


def test_upgrade_and_downgrade(environment: Environment) -> None:
    environment.pip("install", f"liger-aot[sm90]=={NOW}")
    assert state(environment) == [NOW, "sm90"]
    environment.pip("install", "--upgrade", "liger-aot[sm90]")
    assert state(environment) == [NEXT, "sm90"]
    environment.pip("install", f"liger-aot[sm90]=={NOW}")
    assert state(environment) == [NOW, "sm90"]
    environment.run("liger-aot", "verify")


@pytest.mark.parametrize(
    ("mixing", "version"), [(f"liger-aot=={NEXT}", NEXT), (f"liger-aot-sm90=={NEXT}", NOW)]
)
def test_mixed_versions(environment: Environment, mixing: str, version: str) -> None:
    """Either half newer than the other: the error names both and what to install, which then is enough."""
    environment.pip("install", f"liger-aot[sm90]=={NOW}")
    environment.pip("install", mixing)
    other = NOW if version == NEXT else NEXT
    said = environment.run("python", "-c", ASKS, exit_code=1)
    assert f"PackNotFound: {environment.folder}" in said
    assert f"pack sm90 is of version {other}, liger-aot of {version}" in said
    assert f"version {other}" in environment.run("liger-aot", "verify", exit_code=1)
    follow(environment, said)
    assert state(environment) == [version, "sm90"]


def test_the_host_wheel_alone(environment: Environment) -> None:
    """The CPU works; for a GPU the error says what to install, which then is enough."""
    environment.pip("install", f"liger-aot[sm90]=={NOW}")
    environment.pip("uninstall", "liger-aot-sm90")
    assert state(environment) == [NOW]
    said = environment.run("python", "-c", ASKS, exit_code=1)
    assert "no installed pack serves NVIDIA H200 (compute capability 9.0): none is installed" in said
    follow(environment, said)
    assert state(environment) == [NOW, "sm90"]


def test_nothing_is_left_in_the_end(environment: Environment) -> None:
    environment.pip("uninstall", "liger-aot", "liger-aot-sm90")
    assert environment.files() == environment.fresh
