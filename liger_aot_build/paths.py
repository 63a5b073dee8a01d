"""Where things lie in a source tree; of an installed package, profiles alone."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_SHIPPED = Path(__file__).resolve().parent / "arch_profiles"  # in a wheel: setup.py puts them there
PROFILES = _SHIPPED if _SHIPPED.is_dir() else ROOT / "arch_profiles"
KERNELS = ROOT / "csrc_triton"
PACKS = ROOT / "build" / "packs"
CACHE = ROOT / "build" / "cache"
