"""``examples/first_token.py`` on the CPU, where HOME can't be written and PATH is empty."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="Transformers is not installed: make venv installs it")

from tests.harness.children import ROOT, environment

SMALL = ("--layers", "1", "--hidden", "256", "--prompt", "5", "--tokens", "4")


def serve(home: Path, *arguments: str) -> Any:
    home.chmod(0o555)
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "first_token.py"), *SMALL, *arguments],
        env=environment(HOME=str(home), PATH=""),
        capture_output=True,
        text=True,
    )
    home.chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert list(home.iterdir()) == []
    return done.stdout


@pytest.mark.slow
def test_one_provider(tmp_path: Path) -> None:
    found = json.loads(serve(tmp_path, "--provider", "liger-aot").splitlines()[-1])
    assert found["first"] > 0 and found["eager"] > 0


@pytest.mark.slow
def test_the_table(tmp_path: Path) -> None:
    text = serve(tmp_path)
    assert "C compiler: none on PATH" in text
    rows = {
        line.split()[0]: line for line in text.splitlines() if line.startswith(("transformers", "liger-aot"))
    }
    assert rows.keys() == {"transformers", "liger-aot"} and all("tokens/s" in row for row in rows.values())
