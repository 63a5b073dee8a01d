"""Other projects' kernels, from packs of AMD binaries that the emulator executes: results against plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.triton_packs import executed_projects
from tests.triton_packs.executed_projects import ARCHS, PROJECTS


def _or_skip(project: str) -> None:
    if lacks := PROJECTS[project].lacks:
        pytest.skip(f"{lacks} is not installed: pip install it to run {PROJECTS[project].title}'s kernels")


def test_some_of_liger(tmp_path: Path) -> None:
    _or_skip("liger")
    report = executed_projects.run(tmp_path, "liger", "gfx942", "Softmax,SiLUMul")
    assert not report.wrong and not report.raw["missed"]
    assert report.executed == report.recorded
    assert {name.rpartition(":")[2] for name in report.executed} == {
        "_softmax_single_block_backward_kernel",
        "_softmax_single_block_forward_kernel",
        "_swiglu_backward_kernel",
        "_swiglu_forward_kernel",
    }


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("project", PROJECTS)
def test_all_that_the_page_says(project: str, arch: str, tmp_path: Path) -> None:
    """docs/triton-packs-executed.md"""
    _or_skip(project)
    report = executed_projects.run(tmp_path, project, arch)
    assert not report.wrong
    assert report.table() == executed_projects.read()[project, arch]


def test_the_page_is_as_it_is_written() -> None:
    assert executed_projects.page(executed_projects.read()) == executed_projects.PAGE.read_text()
