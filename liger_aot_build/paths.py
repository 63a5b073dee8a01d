"""Where things lie in a source tree."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROFILES = ROOT / "arch_profiles"
KERNELS = ROOT / "csrc_triton"
PACKS = ROOT / "build" / "packs"
CACHE = ROOT / "build" / "cache"
