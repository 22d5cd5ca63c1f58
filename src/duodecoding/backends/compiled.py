"""C next to our Python, built for this very processor when it is first wanted. A compiler is all it takes, and a few seconds."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from duodecoding import machine

FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-pthread", "-Wno-psabi", "-fno-math-errno", "-fno-trapping-math")
# Not -ffast-math: linked into a library, it changes how the whole process rounds the smallest numbers.
LOOSE = ("-fno-signed-zeros", "-fassociative-math")
# Every number is rounded where the source says so: what is computed in two places of a program is the same.
EXACT = ("-ffp-contract=off",)
COMPILERS = ("cc", "gcc", "clang")
BUILD_SECONDS = 120


class NotBuilt(Exception):
    """There is no library, and why."""


def load(path: Path, *, brief: bool = False) -> ctypes.CDLL:
    """`brief`: its calls take microseconds, and are over before another thread of Python could have had its turn."""
    try:
        return ctypes.PyDLL(str(path)) if brief else ctypes.CDLL(str(path))
    except OSError as error:
        raise NotBuilt(f"{path} cannot be loaded ({error})") from error


def build(source: str, tuning: Sequence[str] = (), *, exact: bool = False) -> Path:
    """The library of this file, from the cache where it was built before. `tuning`: flags that name another processor than this.
    `exact`: sums stay as they are written."""
    code = files("duodecoding.backends").joinpath(source).read_bytes()
    command = [*compiler(), *FLAGS, *(EXACT if exact else LOOSE), *(tuning or _tuning())]
    # What `native` means here counts, too: a folder may be shared by different machines.
    name = hashlib.sha256(code + "\0".join([*command, machine.cpu("flags", "Features")]).encode()).hexdigest()[:16]
    place = machine.cache_folder() / "native" / f"{Path(source).stem}-{name}.so"
    if not place.exists():
        _compile(command, source, code, place)
    return place


def _compile(command: list[str], source: str, code: bytes, place: Path) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as folder:
            copy, made = Path(folder) / source, Path(folder) / "made.so"
            copy.write_bytes(code)
            work = [*command, str(copy), "-o", str(made), "-lm"]
            done = subprocess.run(work, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
            if done.returncode:
                lines = done.stderr.strip().splitlines()
                raise NotBuilt(next((line for line in lines if "error" in line), f"{command[0]} ended with {done.returncode}"))
            os.replace(made, place)  # whoever builds at the same time writes the same
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotBuilt(str(error)) from error


def compiler() -> list[str]:
    """Its command."""
    chosen = shlex.split(os.environ.get("CC", ""))
    for candidate in (chosen, *([name] for name in COMPILERS)):
        if candidate and shutil.which(candidate[0]):
            return candidate
    raise NotBuilt("there is no C compiler (cc, gcc or clang)")


def _tuning() -> list[str]:
    return ["-mcpu=native"] if platform.machine() in {"aarch64", "arm64"} else ["-march=native"]
