"""The recipes of CONTRIBUTING.md, followed to the letter in a copy of the tree: its files, its commands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from liger_aot.runtime.manifest import Pack
from liger_aot_build.binary import inspect
from liger_aot_build.build import Tree, make_plans
from liger_aot_build.paths import CACHE, ROOT
from liger_aot_build.plan import Plan
from tests.liger_aot_build.test_wheel import copy_tree

pytestmark = pytest.mark.slow
BLOCK = re.compile(r"^```(?P<language>\w+) ?(?P<path>\S*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def follow(section: str, tree: Path) -> str:
    """Do in ``tree`` what the section says: write its files, run its commands; what they print."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert text.count(f"\n## {section}\n") == 1
    body = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("TRITON_INTERPRET", None)
    output = []
    for block in BLOCK.finditer(body):
        if block["path"]:
            (tree / block["path"]).write_text(block["text"])
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block["text"]],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{block['text']}\n{done.stdout}\n{done.stderr}"
        output.append(done.stdout)
    return "".join(output)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the tree with its tests, the Makefile, and a .venv that is this one."""
    copy = copy_tree(tmp_path / "liger-aot", CACHE)
    for folder in ("tests", "benchmarks"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "results"))
    shutil.copy(ROOT / "Makefile", copy)
    shutil.copytree(ROOT / ".ci", copy / ".ci")
    python = copy / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    for built in (".builds", ".ready"):
        (copy / ".venv" / built).touch()
    for launcher in (ROOT / "python" / "liger_aot").glob("_launch*.so"):
        shutil.copy(launcher, copy / "python" / "liger_aot")
    return copy


def plans_of(tree: Path, arch: str) -> list[Plan]:
    return make_plans(arch, tree=Tree(tree / "arch_profiles", tree / "csrc_triton"))[1]


def test_add_an_architecture(tree: Path) -> None:
    output = follow("Add an architecture", tree)
    plans = {plan.op: plan for plan in plans_of(tree, "sm86")}
    assert f"sm86: {len(plans['column_sums'].variants)} binaries" in output
    pack = Pack(tree / "build" / "packs" / "sm86")
    assert (pack.arch, pack.backend, pack.serves) == ("sm86", "cuda", ("8.6",))
    assert pack.ops == ("column_sums",)
    for variant in pack.op("column_sums").variants:
        assert inspect(pack.op("column_sums").variant(variant).read()).arch == "sm_86"
    assert (tree / "tests" / "golden" / "plan_sm86.txt").read_text() in output


def test_add_an_op(tree: Path) -> None:
    output = follow("Add an op", tree)
    assert re.search(r"\b13 passed", output) or "1 passed, 12 skipped" in output
    for arch in ("sm80", "sm90", "gfx90a", "gfx942"):
        assert Pack(tree / "build" / "packs" / arch).ops == ("scale",)
        golden = (tree / "tests" / "golden" / f"plan_{arch}.txt").read_text()
        assert f"{arch} scale: 6 binaries" in golden


def test_change_an_attention_kernel(tree: Path) -> None:
    output = follow("Change an attention kernel", tree)
    assert 'max_n = 1024, head_dim = 128, mask = "causal", form = "warp_specialized"' in output
    assert "n <= 1024: warp_specialized-block_n64" in output
    assert re.search(r"\b8 passed", output)
