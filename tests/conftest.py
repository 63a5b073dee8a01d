"""Which drivers this process can run the op tests on, and the packs they run.

A process started with TRITON_INTERPRET=1 runs the interpreter's tests and nothing else: Triton decides at import.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import SystemRandom

import pytest
import torch

from benchmarks import workload
from liger_aot.runtime import device_errors
from liger_aot.runtime.manifest import Pack
from tests.harness.planned_packs import planned_pack

UNTIL = "LIGER_AOT_UNTIL"  # the time (time.time) from which on tests are left out, not started
FIRST = "LIGER_AOT_FIRST"  # words: files with one of them in their name come first
LEFT_OUT = "left out: the time for the tests is up"
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(2)
    seed_of_run()


def pytest_report_header(config: pytest.Config) -> str:
    return f"random cases: LIGER_AOT_SEED={seed_of_run()}"


def seed_of_run() -> int:
    """Of random cases: LIGER_AOT_SEED, a number or "new"; 1 by default: what fails then is a change's doing."""
    seed = os.environ.setdefault("LIGER_AOT_SEED", "1")
    if seed == "new":  # kept for the processes that this one starts
        os.environ["LIGER_AOT_SEED"] = seed = str(SystemRandom().randrange(1 << 24))
    return int(seed)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    keep = [item for item in items if (item.get_closest_marker("interpreter") is not None) == INTERPRETING]
    if len(keep) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in keep])
    items[:] = keep
    if words := os.environ.get(FIRST, "").split():
        items.sort(key=lambda item: not any(word in item.path.name for word in words))
    for item in items:
        if item.get_closest_marker("gpu") and (reason := no_gpu()):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > float(os.environ.get(UNTIL, "inf")):
        pytest.skip(LEFT_OUT)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests recorded as their "summary"; it comes from xdist's workers too, unlike what they print."""
    left = [r for r in terminalreporter.stats.get("skipped", ()) if LEFT_OUT in str(r.longrepr)]
    if left:
        files = Counter(report.nodeid.partition("::")[0].removeprefix("tests/") for report in left)
        terminalreporter.write_line(
            f"{len(left)} tests left out, for want of time: "
            + ", ".join(f"{file} ({count})" for file, count in sorted(files.items()))
        )
    passed_and_failed = (r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, ()))
    for line in sorted(
        v for report in passed_and_failed for k, v in report.user_properties if k == "summary"
    ):
        terminalreporter.write_line(line)


def no_gpu() -> str | None:
    """Why the GPU tests can't run here, or None."""
    if not torch.cuda.is_available():
        return "no GPU here"
    from liger_aot.errors import LigerAOTError
    from liger_aot.runtime.devices import gpu
    from liger_aot.runtime.packs import pack_for

    try:
        pack_for(gpu(0).device)
    except LigerAOTError as error:
        return str(error)
    return None


def built_pack(arch: str) -> Pack:
    """The pack of ``arch`` under LIGER_AOT_PACKS; unset, the one that this tree would be built into, whose binaries are
    compiled when they are asked for (not on the interpreter, which needs none)."""
    if (packs := os.environ.get("LIGER_AOT_PACKS")) is None:
        return planned_pack(arch, compiles=not INTERPRETING)
    if not (Path(packs) / arch / "manifest.json").is_file():
        pytest.skip(f"no pack of {arch} under LIGER_AOT_PACKS={packs}")
    return Pack(Path(packs) / arch)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """torch's generators start alike in each test, whatever ran in the process before."""
    torch.manual_seed(1)


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    """What a kernel reported out of range is for its test to meet: the op's next call may be another test's."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    left = {op: word.cell.value for op, word in device_errors._words.items() if word.cell.value}
    for op in left:
        device_errors._words[op].cell.value = 0
    assert not left


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that torch.empty returns holds NaN, so that what is never written shows."""
    with workload.poisoned():
        yield
