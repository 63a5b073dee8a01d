"""The stages of `make test`: all of them run, and the last lines say how each ended."""

from __future__ import annotations

import subprocess
import sys

from liger_aot_build.paths import ROOT


def stages(*arguments: str) -> tuple[int, list[str]]:
    command = [sys.executable, str(ROOT / ".ci" / "stages"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()


def test_a_stage_that_fails_hides_no_other() -> None:
    status, lines = stages(
        "one=echo '3 passed, 1 skipped in 0.10s'",
        "two=echo '== 1 failed, 2 passed, 1 error in 0.20s =='; exit 1",
        "three=echo '4 passed in 0.30s'",
    )
    assert status == 1 and lines[-1] == "9 passed, 2 failed, 1 skipped"
    assert lines[-2] == "failed: two"
    assert [line.split()[:2] for line in lines[-5:-2]] == [
        ["one", "passed"],
        ["two", "FAILED"],
        ["three", "passed"],
    ]


def test_a_stage_that_counts_nothing() -> None:
    status, lines = stages("tool=echo done", "broken=exit 3", "after=echo '1 passed in 0.1s'")
    assert status == 1 and lines[-1] == "1 passed, 1 failed, 0 skipped" and "FAILED (3)" in lines[-4]
    assert stages("tool=true")[0] == 0


def test_a_failure_in_a_pipe_is_a_failure() -> None:
    assert stages("pipe=false | cat")[0] == 1
