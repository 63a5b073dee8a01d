"""What releases the wheels: cibuildwheel's configuration, the checks before an upload, the workflow.

The tools are of the dependency group "wheels"; where one is not installed, its tests skip and say so.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from setuptools.compat.py310 import tomllib

from build_tools.__main__ import _parser
from build_tools.build import project_version
from build_tools.device_wheel import EPOCH, write_device_wheel
from build_tools.paths import ROOT
from build_tools.profile import profile_names
from build_tools.release import SUMS, write_records
from tests.conftest import built_pack
from tests.wheel_builds import copy_tree

BESIDE = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
ENVIRONMENT = {**os.environ, "PATH": BESIDE}


def need(*tools: str) -> None:
    if missing := [tool for tool in tools if not shutil.which(tool, path=BESIDE)]:
        pytest.skip(f"no {', '.join(missing)} here: pip install --group wheels")


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


def test_the_host_wheel_needs_no_triton() -> None:
    """cibuildwheel builds it without isolation: what it installs before is all that the build may need."""
    settings = pyproject()["tool"]["cibuildwheel"]
    assert "--no-build-isolation" in settings["build-frontend"]["args"]
    assert settings["environment"] == {"LIGER_AOT_ARCHS": "none", "SOURCE_DATE_EPOCH": EPOCH}
    code = "import sys, build_tools.wheel; print(sorted({'triton', 'tqdm', 'torch'} & set(sys.modules)))"
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


# ---- The workflow ----


def test_the_workflow_has_no_secret_and_few_rights() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert "secrets." not in text and "password" not in text
    document = workflow()
    assert document["permissions"] == {"contents": "read"}
    more = {name for name, job in document["jobs"].items() if "permissions" in job}
    assert more == {"publish"}, "only what uploads may write"
    publish = document["jobs"]["publish"]
    assert publish["permissions"]["id-token"] == "write" and "tag" in publish["if"]


def test_the_workflow_runs_commands_that_there_are(tmp_path: Path) -> None:
    """Every command of this tree that it runs, by the parser or the file that would take it."""
    seen = set()
    for step in steps():
        for line in step.get("run", "").splitlines():
            if line.startswith("python -m build_tools wheel"):
                _parser().parse_args(shlex.split(line.replace("${{ matrix.arch }}", "sm90"))[3:])
                seen.add("wheel")
            elif line.startswith("python -m build_tools.release"):
                done = run(sys.executable, *line.split()[1:-1], tmp_path)
                assert "error: there is no wheel in" in done.stderr
                seen.add("release")
            elif line.startswith(".ci/"):
                assert os.access(ROOT / line.split()[0], os.X_OK)
                seen.add("check")
            elif group := re.search(r"--group (\w+)", line):
                assert group[1] in pyproject()["dependency-groups"]
                seen.add(group[1])
    assert seen == {"wheel", "release", "check", "build", "wheels"}


def test_the_workflow_builds_every_architecture() -> None:
    """Its matrix is what a step prints: run here, all profiles."""
    (step,) = (s for s in steps() if s.get("id") == "archs")
    output = run("bash", "-c", step["run"], env={**ENVIRONMENT, "GITHUB_OUTPUT": "/dev/stdout"}).stdout
    assert yaml.safe_load(output.removeprefix("archs=")) == list(profile_names())
    assert (
        workflow()["jobs"]["device"]["strategy"]["matrix"]["arch"]
        == "${{ fromJSON(needs.plan.outputs.archs) }}"
    )
    assert workflow()["env"]["SOURCE_DATE_EPOCH"] == EPOCH


def test_the_workflow_refuses_a_tag_of_another_version() -> None:
    (step,) = (s for s in steps() if s.get("name") == "The tag is the version")
    for tag, code in ((f"v{project_version()}", 0), ("v0.0.1", 1)):
        assert run("bash", "-c", step["run"], env={**ENVIRONMENT, "GITHUB_REF_NAME": tag}).returncode == code


def test_jobs_wait_for_what_they_take() -> None:
    jobs = workflow()["jobs"]
    needed = {name: job.get("needs", []) for name, job in jobs.items()}
    assert needed == {
        "plan": [],
        "host": [],
        "device": "plan",
        "records": ["host", "device"],
        "install": "records",
        "publish": "install",
    }
    assert SUMS in str(jobs["records"]["steps"][-1]["with"]["path"])
