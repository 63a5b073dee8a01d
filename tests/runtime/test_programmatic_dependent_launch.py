"""Launches that follow: blocks may start before the kernel before them has ended (programmatic dependent launch)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from liger_aot.ops.norms.column_sums import launch
from liger_aot.runtime.dispatch import Runtimes
from tests.harness.pack_edits import edit
from tests.harness.stand_in import PACKAGE, StandIn, build_stand_in, compile_c
from tests.runtime.test_launcher import SCRATCH, load

pytest_plugins = (
    "tests.harness.launcher_fixtures",
    "tests.harness.pack_fixtures",
    "tests.harness.stand_in_gpu",
)


def test_a_kernel_that_follows(driver: Any, stand_in: StandIn) -> None:
    kernel = load(driver, "pi", pdl=True, threads=64, shared=96 * 1024)
    kernel.launch(1, 0x5000, 4, 3, 2, 64, -5)
    load(driver, "p").launch(0, 0, 1, 1, 1, 64)
    launch, other = stand_in.launches()
    assert kernel.pdl and launch.pdl == (driver.backend == "cuda")
    assert (launch.grid, launch.block, launch.shared) == ((4, 3, 2), (64, 1, 1), 96 * 1024)
    assert (launch.device, launch.stream) == (1, 0x5000) and launch.unpack("pi") == (64, -5, *SCRATCH)
    assert not launch.cooperative and not other.pdl
    with pytest.raises(ValueError, match="cooperative and pdl are both true"):
        load(driver, "p", cooperative=True, pdl=True)


@pytest.mark.parametrize(("version", "pdl"), [(12020, False), (12030, True)])
def test_launches_that_follow_where_graphs_hold_them(
    native: Any, tmp_path: Path, version: int, pdl: bool
) -> None:
    stand_in = StandIn(build_stand_in(tmp_path, version=version))
    load(native.Driver("cuda", stand_in.path), "p", pdl=True).launch(0, 0, 1, 1, 1, 64)
    (launch,) = stand_in.launches()
    assert launch.pdl == pdl and launch.unpack("p") == (64, *SCRATCH)


@pytest.mark.parametrize("pdl", [True, False, None])
def test_what_a_manifest_says_reaches_the_driver(
    stand_in_gpu: Path, stand_in: StandIn, pdl: bool | None
) -> None:
    """Manifests of before say nothing."""
    said = {} if pdl is None else {"pdl": pdl}
    edit(stand_in_gpu / "column_sums.json", lambda d: [v.update(said) for v in d["variants"].values()])
    launch(Runtimes("column_sums").on(0), torch.empty(64), torch.ones(4, 64), 4, 64)
    assert [one.pdl for one in stand_in.launches()] == [bool(pdl)]


def test_the_layout_of_a_launch_is_that_of_cuda_h(tmp_path: Path) -> None:
    """What cuda.c says of CUlaunchConfig and its attributes against the header, where there is one."""
    header = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include" / "cuda.h"
    if not header.exists():
        pytest.skip(f"no {header}")
    source = (PACKAGE / "_native" / "cuda.c").read_text()
    ours = source[source.index("/* CUlaunchAttribute and") : source.index("_Static_assert")]
    pairs = {"LaunchAttribute": "CUlaunchAttribute", "LaunchConfiguration": "CUlaunchConfig"}
    members = {
        "LaunchAttribute": {"id": "id", "value": "value"},
        "LaunchConfiguration": {
            "grid": "gridDimX", "block": "blockDimX", "shared": "sharedMemBytes", "stream": "hStream",
            "attributes": "attrs", "attribute_count": "numAttrs",
        },
    }  # fmt: skip
    checks = [f"sizeof({a}) == sizeof({b})" for a, b in pairs.items()]
    checks += [
        f"offsetof({a}, {one}) == offsetof({b}, {other})"
        for a, b in pairs.items()
        for one, other in members[a].items()
    ]
    checks.append("CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION == 6")
    file = tmp_path / "layout.c"
    asserts = "".join(f'_Static_assert({check}, "layout");\n' for check in checks)
    file.write_text(f"#include <stddef.h>\n#include <stdint.h>\n#include <cuda.h>\n{ours}{asserts}")
    compile_c([file], tmp_path / "layout.so", f"-I{header.parent}")
