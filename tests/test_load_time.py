"""How long ``load`` takes: a process that has loaded one op pays little for the next."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MOST_MS = 2.0
SCRIPT = """
import json, time
import torch, liger_aot
from liger_aot import ops
first, *others = sorted(ops(), key=lambda name: name != "rmsnorm")
liger_aot.load(first)
took = {}
for name in others:
    start = time.perf_counter()
    liger_aot.load(name)
    took[name] = (time.perf_counter() - start) * 1e3
print(json.dumps(took))
"""


@pytest.mark.alone
@pytest.mark.slow
def test_every_op_loads_fast_after_the_first(tmp_path: Path) -> None:
    """The least of up to 30 processes, as this machine may be busy. The first writes the byte code, as pip does."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", SCRIPT]
    best: dict[str, float] = {}
    for _ in range(30):
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        for name, ms in json.loads(done.stdout.splitlines()[-1]).items():
            best[name] = min(ms, best.get(name, ms))
        if max(best.values()) <= MOST_MS:
            return
    pytest.fail(f"slower than {MOST_MS} ms: { {name: ms for name, ms in best.items() if ms > MOST_MS} }")
