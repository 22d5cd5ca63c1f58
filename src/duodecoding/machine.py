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


def memory() -> dict[str, int]:
    """Bytes by the system's own names ("MemTotal", "MemAvailable"), as far as it tells."""
    info = Path("/proc/meminfo")
    lines = (line.split() for line in (info.read_text().splitlines() if info.exists() else []))
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) >= 2}


def control_group_limit() -> int | None:
    """Bytes that this process's control group allows. None: they are not bounded."""
    path = Path("/sys/fs/cgroup/memory.max")
    text = path.read_text().strip() if path.exists() else "max"
    return int(text) if text.isdigit() else None


def most_memory() -> int | None:
    """Bytes that this process could have if it were alone: always the same. None: the system does not say."""
    known = [found for found in (memory().get("MemTotal"), control_group_limit()) if found]
    return min(known) if known else None
