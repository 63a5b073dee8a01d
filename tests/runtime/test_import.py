"""What importing and loading bring along: no Triton, no build tools, nothing written, nothing started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import liger_aot

WRITES = """
import os, sys
seen = []
def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        flags = arguments[2] if isinstance(arguments[2], int) else 0
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and str(arguments[0]) != os.devnull:
            seen.append(f"{event} {arguments[0]}")
    elif event in STARTED:
        seen.append(f"{event} {arguments[:1]}")
STARTED = {
    "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod",
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect", "tempfile.mkstemp",
    "tempfile.mkdtemp",
}
"""


def run(code: str, folder: Path) -> Any:
    """What ``code`` prints as JSON, in a fresh process with ``folder`` as its home and working folder."""
    environment = {
        **os.environ,
        "HOME": str(folder),
        "PYTHONPATH": str(Path(liger_aot.__file__).parents[1]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "LIGER_AOT_PACKS": os.environ.get(
            "LIGER_AOT_PACKS", str(Path(__file__).parents[2] / "build" / "packs")
        ),
    }
    folder.chmod(0o555)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True
    )
    folder.chmod(0o755)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_loading_an_op_imports_and_writes_nothing_of_the_build(tmp_path: Path) -> None:
    """Triton comes with some builds of torch and is imported by parts of it: neither is to be our doing."""
    found = run(
        WRITES
        + """
import json
import torch
before = set(sys.modules)
sys.addaudithook(hook)
import liger_aot
rmsnorm = liger_aot.load("rmsnorm")
x = torch.ones(4, 64, requires_grad=True)
rmsnorm(x, torch.ones(64)).sum().backward()
rmsnorm.preload("cpu")
liger_aot.explain("rmsnorm", shape=(4, 64), dtype="bf16") if liger_aot.archs() else None
print(json.dumps({"new": sorted(set(sys.modules) - before), "all": sorted(sys.modules), "seen": seen}))
""",
        tmp_path,
    )
    foreign = {"triton", "setuptools", "pkg_resources", "liger_aot_build", "csrc_triton", "numpy"}
    assert not foreign & {name.partition(".")[0] for name in found["new"]}
    assert "importlib.metadata" not in found["new"] and "triton" not in found["all"]
    assert found["seen"] == [] and list(tmp_path.iterdir()) == []


def test_the_audit_sees_what_is_written(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    found = run(
        WRITES
        + """
import json, subprocess
sys.addaudithook(hook)
open("inner/file", "w").close()
os.mkdir("inner/folder")
subprocess.run(["true"])
print(json.dumps(seen))
""",
        tmp_path,
    )
    assert [line.split()[0] for line in found[:3]] == ["open", "os.mkdir", "subprocess.Popen"]


def test_the_inspection_needs_no_torch(tmp_path: Path) -> None:
    """``import liger_aot``, the list of ops and the check of the packs are quick."""
    new = run(
        """
import json, sys
before = set(sys.modules)
import liger_aot
liger_aot.ops(), liger_aot.archs()
from liger_aot.verify import verify
verify()
print(json.dumps(sorted(set(sys.modules) - before)))
""",
        tmp_path,
    )
    assert not {"torch", "numpy", "importlib.metadata", "argparse", "asyncio", "subprocess"} & set(new)


def test_an_op_brings_little_after_the_first(tmp_path: Path) -> None:
    """What makes a load slow: modules that are not ours, files that are not their code, work at import. Source is
    counted in bytes and work in calls of functions; the most that an op takes is half of either bound."""
    found = run(
        """
import json, os, sys
import torch, liger_aot
first, *others = sorted(liger_aot.ops(), key=lambda name: name != "rmsnorm")
liger_aot.load(first)
opened, calls, found = [], 0, {}

def hook(event, arguments):
    if event in ("open", "os.listdir", "os.scandir", "ctypes.dlopen", "subprocess.Popen", "socket.connect"):
        opened.append(str(arguments[0]))

def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")

sys.addaudithook(hook)
for name in others:
    before, calls = set(sys.modules), 0
    opened.clear()
    sys.setprofile(count)
    liger_aot.load(name)
    sys.setprofile(None)
    new = {m: sys.modules[m].__file__ for m in sys.modules if m not in before}
    code = {f for m in new for f in (new[m], sys.modules[m].__spec__.cached)}
    code |= set(map(os.path.dirname, code))  # listed
    found[name] = {
        "new": sorted(new), "source": sum(map(os.path.getsize, new.values())), "calls": calls,
        "foreign": sorted(set(opened) - code),
    }
print(json.dumps(found))
""",
        tmp_path,
    )
    assert len(found) > 20
    for name, of in found.items():
        assert all(m.startswith("liger_aot.") for m in of["new"]), f"{name} imports {of['new']}"
        assert not of["foreign"], f"{name} opens {of['foreign']}"
        assert of["source"] <= 96 << 10, f"{name} imports {of['source']} bytes of source: {of['new']}"
        # A class of settings takes some 400: losses of linear layers also have those of the op that they use.
        assert of["calls"] <= 4000, f"{name} calls {of['calls']} functions"
