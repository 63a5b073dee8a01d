"""What releases the wheels: cibuildwheel's configuration, the checks before an upload, the workflow.

The tools are of the dependency groups "lint" and "wheels"; where one is not installed, its tests skip and say so.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import yaml
from packaging.requirements import Requirement
from setuptools.compat.py310 import tomllib

from liger_aot_build.__main__ import _parser
from liger_aot_build.build import project_version
from liger_aot_build.device_wheel import EPOCH, pack_files, write_device_wheel, write_wheel
from liger_aot_build.paths import ROOT
from liger_aot_build.profile import profile_names
from liger_aot_build.release import SUMS, write_records
from tests.conftest import built_pack
from tests.liger_aot_build.wheel_builds import copy_tree

BESIDE = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
ENVIRONMENT = {**os.environ, "PATH": BESIDE}


def need(*tools: str) -> None:
    if missing := [tool for tool in tools if not shutil.which(tool, path=BESIDE)]:
        pytest.skip(f"no {', '.join(missing)} here: pip install --group lint --group wheels")


def run(*command: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    options: dict[str, Any] = {"cwd": ROOT, "env": ENVIRONMENT, **more}
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def workflow() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    return document


def steps() -> list[dict[str, Any]]:
    return [step for job in workflow()["jobs"].values() for step in job["steps"]]


# ---- cibuildwheel ----


def test_what_cibuildwheel_would_build() -> None:
    """One wheel a machine, for every Python from 3.10 on."""
    need("cibuildwheel")
    asked = ("--print-build-identifiers", "--platform", "linux", "--archs", "x86_64,aarch64")
    done = run("cibuildwheel", *asked)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["cp310-manylinux_x86_64", "cp310-manylinux_aarch64"]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release: the host wheel by cibuildwheel's own commands run here, one device wheel, the records."""
    need("auditwheel", "patchelf", "abi3audit")
    built_pack("sm90")
    settings = pyproject()["tool"]["cibuildwheel"]
    tree = copy_tree(tmp_path_factory.mktemp("native") / "liger-aot")
    built, out = tree / "built", tree / "dist"
    out.mkdir()
    environment = {**ENVIRONMENT, **settings["environment"]}
    front = settings["build-frontend"]
    command = [sys.executable, "-m", front["name"], "wheel", "--no-deps", "-w", built, *front["args"], "."]
    done = run(*command, cwd=tree, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = built.glob("*.whl")
    repair = settings["repair-wheel-command"].format(dest_dir=out, wheel=wheel)
    done = run("bash", "-c", repair, cwd=tree, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    write_device_wheel(built_pack("sm90").folder, out)
    write_records(out)
    return out


@pytest.mark.slow
def test_the_host_wheel_for_aarch64(tmp_path: Path) -> None:
    """Compiled here by zig: the same Python files, a launcher that is as hardened, a tag that indexes take."""
    need("auditwheel", "patchelf", "readelf")
    if not list((ROOT / "build" / "aarch64").glob("ziglang==*")):
        pytest.skip("no zig under build/aarch64: .ci/aarch64 test gets it")
    done = run(ROOT / ".ci" / "aarch64", "wheel", tmp_path)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"liger_aot-{project_version()}-cp310-abi3-manylinux")
    assert wheel.name.endswith("_aarch64.whl")
    with ZipFile(wheel) as archive:
        files = {
            name: archive.read(name) for name in archive.namelist() if re.match("liger_aot/.*[^/]$", name)
        }
    launcher = tmp_path / "_launch.abi3.so"
    launcher.write_bytes(files.pop("liger_aot/_launch.abi3.so"))
    package = ROOT / "python" / "liger_aot"
    assert all((package.parent / name).read_bytes() == data for name, data in files.items())
    assert {p.relative_to(package.parent).as_posix() for p in package.rglob("*.py")} <= files.keys()
    found = run("readelf", "--wide", "--file-header", "--dynamic", "--dyn-syms", launcher).stdout
    assert "AArch64" in found and "BIND_NOW" in found and "__stack_chk_fail" in found
    assert "RUNPATH" not in found and "RPATH" not in found


def test_the_host_wheel_needs_no_triton() -> None:
    """cibuildwheel builds it without isolation: what it installs before is all that the build may need."""
    settings = pyproject()["tool"]["cibuildwheel"]
    assert "--no-build-isolation" in settings["build-frontend"]["args"]
    assert settings["environment"] == {"LIGER_AOT_ARCHS": "none", "SOURCE_DATE_EPOCH": EPOCH}
    code = "import sys, liger_aot_build.wheel; print(sorted({'triton', 'tqdm', 'torch'} & set(sys.modules)))"
    assert run(sys.executable, "-c", code).stdout == "[]\n"


# ---- The checks before an upload ----


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    return run(ROOT / ".ci" / "check-wheels", folder)


@pytest.mark.slow
def test_the_checks(wheels: Path, tmp_path: Path) -> None:
    """twine, check-wheel-contents, auditwheel, abi3audit and the checksums: they pass, and they notice."""
    need("twine", "check-wheel-contents")
    done = check(wheels)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2 and "manylinux_2_" in done.stdout

    damaged = shutil.copytree(wheels, tmp_path / "damaged")
    (device,) = damaged.glob("liger_aot_sm90-*.whl")
    device.write_bytes(device.read_bytes() + b" ")
    done = check(damaged)
    assert done.returncode != 0 and f"{device.name}: FAILED" in done.stdout

    untagged = shutil.copytree(wheels, tmp_path / "untagged")
    (host,) = untagged.glob("liger_aot-*.whl")
    host.rename(untagged / re.sub(r"manylinux[^.]*", "linux_x86_64", host.name))
    write_records(untagged)
    done = check(untagged)
    assert done.returncode != 0 and "linux_x86_64.whl has no manylinux tag" in done.stderr


def test_no_wheel_is_larger_than_15_mb(tmp_path: Path) -> None:
    """The checks of the contents replaced: they would refuse what is no wheel before."""
    tools = tmp_path / "tree" / ".venv" / "bin"
    tools.mkdir(parents=True)
    for name in ("twine", "check-wheel-contents", "auditwheel", "abi3audit"):
        (tools / name).write_text("#!/bin/sh\n")
        (tools / name).chmod(0o755)
    shutil.copytree(ROOT / ".ci", tmp_path / "tree" / ".ci")
    dist = tmp_path / "dist"
    dist.mkdir()
    for size, code in ((15_000_000, 0), (15_000_001, 1)):
        with (dist / "liger_aot_sm90-1-py3-none-any.whl").open("wb") as stream:
            stream.truncate(size)
        (dist / "liger_aot-1-cp310-abi3-manylinux_2_17_x86_64.whl").write_bytes(b"")
        names = sorted(path.name for path in dist.glob("*.whl"))
        (dist / SUMS).write_text(run("sha256sum", *names, cwd=dist).stdout)
        done = run(tmp_path / "tree" / ".ci" / "check-wheels", dist)
        assert done.returncode == code, done.stdout + done.stderr
        assert ("larger than 15 MB" in done.stderr) == bool(code)


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """Two files and their checksums."""
    folder = tmp_path / "release"
    folder.mkdir()
    for name in ("a-1.whl", "b-1.whl"):
        (folder / name).write_text(name)
    sums = run("sha256sum", "a-1.whl", "b-1.whl", cwd=folder).stdout
    (folder / SUMS).write_text(sums)
    return folder


def changed(folder: Path) -> None:
    (folder / "a-1.whl").write_text("other")


def lost(folder: Path) -> None:
    (folder / "a-1.whl").unlink()


def unlisted(folder: Path) -> None:
    (folder / "c-1.whl").write_text("more")


def unlisted_below(folder: Path) -> None:
    (folder / "more").mkdir()


def outside(folder: Path) -> None:
    digest = run("sha256sum", folder / "a-1.whl").stdout.split()[0]
    shutil.copy(folder / "a-1.whl", folder.parent)
    (folder / SUMS).write_text((folder / SUMS).read_text() + f"{digest}  ../a-1.whl\n")


def malformed(folder: Path) -> None:
    (folder / SUMS).write_text((folder / SUMS).read_text() + "no checksum\n")


@pytest.mark.parametrize("damage", [changed, lost, unlisted, unlisted_below, outside, malformed])
def test_the_checksums_are_of_all_files_and_no_other(release: Path, damage: Callable[[Path], None]) -> None:
    check_sums = ROOT / ".ci" / "check-sums"
    assert run(check_sums, release).returncode == 0
    damage(release)
    done = run(check_sums, release)
    assert done.returncode != 0 and done.stdout + done.stderr


# ---- The workflow ----


def test_the_workflow_has_no_secret_and_few_rights() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert "secrets." not in text and "password" not in text
    document = workflow()
    assert document["permissions"] == {"contents": "read"}
    more = {name for name, job in document["jobs"].items() if "permissions" in job}
    assert more == {"publish"}, "only what uploads may write"
    publish = document["jobs"]["publish"]
    assert publish["permissions"]["id-token"] == "write"
    assert publish["if"] == "github.event_name == 'push' && github.ref_type == 'tag'", (
        "not where it is started by hand"
    )


def test_actions_are_named_by_commit() -> None:
    """A tag or branch can be moved to other code. What version a commit is stands beside it, once for each."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    lines = re.findall(r"uses: (.*)", text)
    assert len(lines) == sum("uses" in step for step in steps()) > 10
    for line in lines:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", line), line
    assert len({line.partition("@")[0] for line in lines}) == len(set(lines))


def test_the_workflow_is_linted() -> None:
    """By GitHub's schema, by zizmor's rules for what an attacker could use, and its scripts by shellcheck."""
    need("check-jsonschema", "zizmor", "shellcheck")
    file = ROOT / ".github" / "workflows" / "release.yml"
    scripts = [ROOT / ".ci" / name for name in ("release", "lock", "check-sums", "check-wheels")]
    for command in (
        ("check-jsonschema", "--builtin-schema", "vendor.github-workflows", file),
        ("zizmor", "--offline", "--no-progress", "--persona", "pedantic", file),
        ("shellcheck", *scripts),
    ):
        done = run(*command)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_step_is_one_of_the_script() -> None:
    """So that it can be run here: no command stands in the workflow itself."""
    known = set(re.findall(r"^(\w+)\) # ", (ROOT / ".ci" / "release").read_text(), re.MULTILINE))
    used = []
    for step in steps():
        if "run" in step:
            program, name, *_ = shlex.split(step["run"].replace("${{", "").replace("}}", ""))
            assert program == ".ci/release" and "\n" not in step["run"].strip()
            used.append(name)
    assert sorted(used) == sorted(known), "each once"


def step(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return run(ROOT / ".ci" / "release", *arguments, env={**ENVIRONMENT, **variables})


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[..., list[str]]:
    """``recorded("device", "sm90", "dist")``: the commands that a step runs, where none of them does anything.

    Python's own code is run: what the steps ask of the tree.
    """
    programs, log = tmp_path / "programs", tmp_path / "log"
    programs.mkdir()
    for name in ("python", "liger-aot", "gh"):
        program = programs / name
        own = f'[ "$1" != -c ] || exec {sys.executable} "$@"\n' if name == "python" else ""
        program.write_text(f'#!/bin/sh\n{own}echo "{name} $*" >> {log}\n')
        program.chmod(0o755)

    def commands(*arguments: str | Path) -> list[str]:
        done = step(*arguments, PATH=f"{programs}:{ENVIRONMENT['PATH']}")
        assert done.returncode == 0, done.stderr
        return log.read_text().splitlines()

    return commands


HASHED = "python -m pip install --require-hashes --only-binary :all: -r .ci/requirements/{}.txt"


def test_what_the_steps_install_and_build(recorded: Callable[..., list[str]]) -> None:
    """What an index gives is named by version and hash; our own wheels are looked up in a folder alone."""
    assert recorded("host", "dist") == [HASHED.format("wheels"), "python -m cibuildwheel --output-dir dist"]
    build = "python -m liger_aot_build wheel --device --arch sm90 --quiet --out dist"
    assert recorded("device", "sm90", "dist")[2:] == [HASHED.format("build"), build]
    _parser().parse_args(shlex.split(build)[3:])
    own = f"python -m pip install --no-index --find-links dist liger-aot[all]=={project_version()}"
    asked = [f"liger-aot {command}" for command in ("verify", "list", "doctor")]
    assert recorded("install", "dist")[4:] == [HASHED.format("install"), own, *asked]


def test_what_is_published_is_what_was_checked(
    release: Path, tmp_path: Path, recorded: Callable[..., list[str]]
) -> None:
    records = tmp_path / "records"
    records.mkdir()
    (release / SUMS).rename(records / SUMS)
    bill = records / "liger_aot-1.cdx.json"
    bill.write_text("{}")
    digest = run("sha256sum", bill).stdout.split()[0]
    (records / SUMS).write_text((records / SUMS).read_text() + f"{digest}  {bill.name}\n")
    extra = shutil.copytree(release, tmp_path / "extra")
    unlisted(extra)
    done = step("publishable", extra, records)
    assert done.returncode != 0 and "c-1.whl" in done.stderr
    assert step("publishable", release, records).returncode == 0
    assert sorted(path.name for path in release.iterdir()) == ["a-1.whl", "b-1.whl"], (
        "the wheels alone are uploaded"
    )
    (said,) = recorded("github", "v1", release, records)
    files = [release / "a-1.whl", release / "b-1.whl", records / SUMS, bill]
    assert (
        said == f"gh release create v1 --title v1 --notes-from-tag --verify-tag {' '.join(map(str, files))}"
    )


def test_the_bill_of_every_wheel_names_its_compilers(tmp_path: Path) -> None:
    """Of device wheels, and of a wheel from source with several packs."""
    packs = {arch: built_pack(arch).folder for arch in profile_names()}
    about = f"liger_aot-{project_version()}.dist-info"
    files = {name: data for arch, pack in packs.items() for name, data in pack_files(pack, arch).items()}
    metadata = {"Name": "liger-aot", "Version": project_version(), "License-Expression": "Apache-2.0"}
    files[f"{about}/METADATA"] = "".join(f"{key}: {value}\n" for key, value in metadata.items()).encode()
    write_wheel(
        tmp_path / f"liger_aot-{project_version()}-cp310-abi3-linux_x86_64.whl", files, f"{about}/RECORD"
    )
    for pack in packs.values():
        write_device_wheel(pack, tmp_path)
    _, path = write_records(tmp_path)
    bill = json.loads(path.read_bytes())
    needs = {
        d["ref"]: {on for on in d.get("dependsOn", []) if "torch" not in on} for d in bill["dependencies"]
    }
    triton, ptxas, newer = "pkg:pypi/triton@3.6.0", "pkg:generic/ptxas@12.8", "pkg:generic/ptxas@12.9"
    for wheel in tmp_path.glob("*.whl"):
        parts = wheel.name.split("-")[0].split("_")  # of an architecture's wheel its name is the last one
        compiled = {triton, newer} if parts[-1] in ("sm100", "sm120") else {triton, ptxas}
        if parts[-1].startswith("gfx"):
            compiled = {triton}
        if parts[-1] == "aot":
            compiled = {triton, ptxas, newer}
        assert needs[wheel.name] == compiled, wheel.name
    scopes = {c["bom-ref"]: c.get("scope") for c in bill["components"]}
    assert scopes[triton] == scopes[ptxas] == "excluded", "they aren't there where it runs"
    (source,) = (c for c in bill["components"] if "linux_x86_64" in c["bom-ref"])
    said = {p["name"]: p["value"] for p in source["properties"]}
    assert said["liger-aot:sm90:toolchain:compiler"] == "ptxas 12.8"
    assert {name.split(":")[1] for name in said} == set(packs)


def test_the_records_of_no_wheel(tmp_path: Path) -> None:
    done = run(sys.executable, "-m", "liger_aot_build.release", tmp_path)
    assert "error: there is no wheel in" in done.stderr


def test_a_step_that_there_is_not() -> None:
    done = step("nothing")
    assert done.returncode != 0 and "error: .ci/release has no step 'nothing'" in done.stderr


def test_the_workflow_builds_every_architecture() -> None:
    """Its matrix is what a step prints: run here, all profiles."""
    output = step("archs").stdout
    assert yaml.safe_load(output.removeprefix("archs=")) == list(profile_names())
    assert (
        workflow()["jobs"]["device"]["strategy"]["matrix"]["arch"]
        == "${{ fromJSON(needs.plan.outputs.archs) }}"
    )
    assert workflow()["env"]["SOURCE_DATE_EPOCH"] == EPOCH


def test_the_workflow_refuses_a_tag_of_another_version() -> None:
    for tag, code in ((f"v{project_version()}", 0), ("v0.0.1", 1)):
        assert step("tag", tag).returncode == code


def test_jobs_wait_for_what_they_take() -> None:
    jobs = workflow()["jobs"]
    needed = {name: job.get("needs", []) for name, job in jobs.items()}
    assert needed == {
        "plan": [],
        "host": "plan",
        "device": "plan",
        "records": ["host", "device"],
        "install": "records",
        "publish": "install",
    }
    assert SUMS in str(jobs["records"]["steps"][-1]["with"]["path"])


# ---- What comes from an index ----


@pytest.mark.parametrize("group", ["build", "host", "install", "wheels"])
def test_requirements_are_of_a_version_and_hash(group: str) -> None:
    """Each line of the lock file is, and it holds what the dependency group asks for (else: .ci/lock)."""
    text = (ROOT / ".ci" / "requirements" / f"{group}.txt").read_text().replace("\\\n", "")
    held: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        requirement, *hashes = re.split(r" +--hash=", line)
        name, version = re.fullmatch(r"([\w.-]+)==([\w.+]+)(?: ; .*)?", requirement.strip()).groups()  # type: ignore[union-attr]
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64} *", one) for one in hashes), line
        held.setdefault(name.lower(), []).append(version)
    for asked in map(Requirement, pyproject()["dependency-groups"][group]):
        versions = held[asked.name.lower()]
        assert versions and all(version in asked.specifier for version in versions), f"{asked}: run .ci/lock"


def test_build_requirements_are_those_of_the_build() -> None:
    assert pyproject()["build-system"]["requires"] == pyproject()["dependency-groups"]["build"]
    before = pyproject()["tool"]["cibuildwheel"]["before-build"]
    assert before == "pip install --require-hashes -r {project}/.ci/requirements/host.txt"
