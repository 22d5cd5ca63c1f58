"""This machine: its processor, where we keep things between starts, and in which form our own code runs on it."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from duodecoding import tree

CACHE_VARIABLE = "DUO_CACHE"


def cache_folder() -> Path:
    """$DUO_CACHE, else the system's place for such things."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "duodecoding"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "duodecoding"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "duodecoding"


def compiled() -> bool:
    """Does what runs between two passes run as C (scripts/compile.py), not as Python?"""
    return not str(tree.__file__).endswith(".py")


def cpu(*fields: str) -> str:
    """The first of these fields that the system tells of its processor ("model name", "flags"), else what Python knows."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(fields)), platform.processor())


def available_memory() -> int | None:
    """Bytes that programs could still get, file caches counted in. None: the system does not say."""
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
