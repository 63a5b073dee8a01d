"""Where a run is made: the GPU, the driver, versions, the commit and the command."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks.records import Environment

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"  # a folder for each GPU


def observe(
    device: torch.device, *, command: str, commit: str | None, absent: Mapping[str, str]
) -> Environment:
    """The environment of a run on `device`; on the CPU, where a benchmark is tried, as far as there is one. `commit` is
    for a copy of the tree without its history."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return Environment(
        gpu="CPU" if gpu is None else gpu.name,
        multiprocessors=0 if gpu is None else gpu.multi_processor_count,
        l2_bytes=0 if gpu is None else gpu.L2_cache_size,
        driver="none" if gpu is None else _driver(),
        cuda=str(torch.version.cuda),
        python=platform.python_version(),
        torch=torch.__version__,
        triton=_version("triton"),
        liger_kernel=_version("liger-kernel"),
        quack=_version("quack-kernels"),
        liger_aot=_version("liger-aot"),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        commit=commit or _commit(),
        command=command,
        absent=dict(absent),
    )


def folder_name(gpu: str) -> str:
    """A GPU's name as a folder of results, without the vendor and the memory: "NVIDIA H100 80GB HBM3" is "h100"."""
    words = re.split(r"[^a-z0-9]+", gpu.strip().lower())
    return "-".join(w for w in words if w and not re.fullmatch(r"nvidia|amd|\d+gb|hbm\d*e?", w))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = _output(query).splitlines()
    return lines[0].strip() if lines else "unknown"


def _commit() -> str:
    head = _output(["git", "rev-parse", "HEAD"])
    if not head:
        return "unknown"
    return head + ("-dirty" if _output(["git", "status", "--porcelain", "--untracked-files=no"]) else "")


def _output(command: list[str]) -> str:
    """What a command prints, or nothing where it fails or is not there."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
