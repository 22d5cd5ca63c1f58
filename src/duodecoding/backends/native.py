"""The compiled part of our own draft engine: `native.c`, built for this very processor when it is first wanted, and its calls.

A compiler is all it takes, and a few seconds once. Without one drafts run on llama.cpp, several times slower.
"""

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
from functools import cache
from importlib.resources import files
from pathlib import Path

from duodecoding import machine
from duodecoding.errors import BackendMissing

FLAGS = (
    *("-std=gnu11", "-O3", "-fPIC", "-shared", "-pthread", "-Wno-psabi"),
    # Not -ffast-math: linked into a library, it changes how the whole process rounds the smallest numbers.
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"),
)
COMPILERS = ("cc", "gcc", "clang")
BUILD_SECONDS = 120


class Sampling(ctypes.Structure):
    """How tokens are chosen, for `duo_guess`."""

    _fields_ = (
        ("temperature", ctypes.c_float),
        ("top_p", ctypes.c_float),
        ("min_p", ctypes.c_float),
        ("top_k", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
    )


@cache
def library() -> ctypes.CDLL:
    """For this processor. Raises BackendMissing with the reason where it cannot be had."""
    return load(build())


def fast_library() -> ctypes.CDLL:
    """The same, where it is faster than llama.cpp. Raises BackendMissing elsewhere."""
    found = library()
    if not found.duo_is_fast():
        why, fix = "this processor has neither AVX2 nor AVX-512", "--draft-engine native takes it all the same."
        raise BackendMissing("llama.cpp drafts faster here than our own engine", why, fix)
    return found


def load(path: Path) -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise _missing(f"{path} cannot be loaded ({error})") from error
    pointer, number = ctypes.c_void_p, ctypes.c_int
    loaded.duo_new.restype = pointer
    loaded.duo_new.argtypes = [pointer, ctypes.c_float, pointer]
    loaded.duo_free.restype = None
    loaded.duo_free.argtypes = [pointer]
    loaded.duo_norms.argtypes = [pointer, number, pointer, pointer]
    loaded.duo_matrix.argtypes = [pointer, number, number, number, pointer, number, number]
    loaded.duo_embeddings.restype = None
    loaded.duo_embeddings.argtypes = [pointer, number, pointer]
    loaded.duo_start.argtypes = [pointer, number, number]
    loaded.duo_stop_on.restype = None
    loaded.duo_stop_on.argtypes = [pointer, pointer]
    loaded.duo_step.argtypes = [pointer, number, number, number, *[pointer] * 7]
    loaded.duo_keep.restype = None
    loaded.duo_keep.argtypes = [pointer, number, pointer, number]
    loaded.duo_guess.argtypes = [pointer, pointer, number, *[pointer] * 5]
    return loaded


def build(tuning: Sequence[str] = ()) -> Path:
    """The library, from the cache where it was built before. `tuning`: flags that name another processor than this one."""
    compiler = _compiler()
    source = files("duodecoding.backends").joinpath("native.c").read_bytes()
    command = [*compiler, *FLAGS, *(tuning or _tuning())]
    # What `native` means here counts, too: a folder may be shared by different machines.
    name = hashlib.sha256(source + "\0".join([*command, machine.cpu("flags", "Features")]).encode()).hexdigest()[:16]
    place = machine.cache_folder() / "native" / f"draft-{name}.so"
    if not place.exists():
        _compile(command, source, place)
    return place


def _compile(command: list[str], source: bytes, place: Path) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as folder:
            code, made = Path(folder) / "native.c", Path(folder) / "draft.so"
            code.write_bytes(source)
            work = [*command, str(code), "-o", str(made), "-lm"]
            done = subprocess.run(work, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
            if done.returncode:
                lines = done.stderr.strip().splitlines()
                raise _missing(next((line for line in lines if "error" in line), f"{command[0]} ended with {done.returncode}"))
            os.replace(made, place)  # whoever builds at the same time writes the same
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _missing(str(error)) from error


def _compiler() -> list[str]:
    chosen = shlex.split(os.environ.get("CC", ""))
    for candidate in (chosen, *([name] for name in COMPILERS)):
        if candidate and shutil.which(candidate[0]):
            return candidate
    raise _missing("there is no C compiler (cc, gcc or clang)")


def _tuning() -> list[str]:
    return ["-mcpu=native"] if platform.machine() in {"aarch64", "arm64"} else ["-march=native"]


def _missing(why: str) -> BackendMissing:
    fix = "Install a C compiler, or use llama.cpp: --draft-engine llamacpp"
    return BackendMissing("our own draft engine cannot be built", why, fix)
