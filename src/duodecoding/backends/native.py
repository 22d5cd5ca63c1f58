"""The compiled part of our own engine, `native.c`, and its calls. Without a compiler llama.cpp takes its place, and is slower."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from duodecoding.backends import compiled
from duodecoding.backends.compiled import NotBuilt
from duodecoding.errors import BackendMissing


class Sampling(ctypes.Structure):
    """How tokens are chosen."""

    _fields_ = (
        ("temperature", ctypes.c_float),
        ("top_p", ctypes.c_float),
        ("min_p", ctypes.c_float),
        ("top_k", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
    )


class Guesses(ctypes.Structure):
    """What is wanted of the outputs of a step beside their logits: their likeliest tokens."""

    _fields_ = (
        ("how", Sampling),
        ("k", ctypes.c_int32),
        ("names", ctypes.c_void_p),
        ("floors", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("shares", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
    )


@cache
def library(*, exact: bool = False) -> ctypes.CDLL:
    """For this processor. `exact`: for a target. Raises BackendMissing with the reason where it cannot be had."""
    return load(build(exact=exact))


def fast_library(*, exact: bool = False) -> ctypes.CDLL:
    """The same, where it is faster than llama.cpp. Raises BackendMissing elsewhere."""
    found = library(exact=exact)
    if not found.duo_is_fast():
        why, fix = "this processor has neither AVX2 nor AVX-512", f"{_option(exact)} native takes it all the same."
        raise BackendMissing("llama.cpp is faster here than our own engine", why, fix)
    return found


def _option(exact: bool) -> str:
    return "--backend" if exact else "--draft-engine"


def load(path: Path) -> ctypes.CDLL:
    loaded = _open(path)
    pointer, number = ctypes.c_void_p, ctypes.c_int
    loaded.duo_new.restype = pointer
    loaded.duo_new.argtypes = [pointer, ctypes.c_float, pointer]
    loaded.duo_free.restype = None
    loaded.duo_free.argtypes = [pointer]
    loaded.duo_norms.argtypes = [pointer, number, pointer, pointer]
    loaded.duo_extras.argtypes = [pointer, number, pointer, pointer, pointer]
    loaded.duo_matrix.argtypes = [pointer, number, number, number, pointer, number, number]
    loaded.duo_embeddings.restype = None
    loaded.duo_embeddings.argtypes = [pointer, number, pointer]
    loaded.duo_start.argtypes = [pointer, number, number]
    loaded.duo_stop_on.restype = None
    loaded.duo_stop_on.argtypes = [pointer, pointer]
    loaded.duo_step.argtypes = [pointer, number, number, number, *[pointer] * 8]
    loaded.duo_save.restype = ctypes.c_size_t
    loaded.duo_save.argtypes = [pointer, number, pointer]
    loaded.duo_restore.restype = None
    loaded.duo_restore.argtypes = [pointer, number, pointer]
    loaded.duo_keep.restype = None
    loaded.duo_keep.argtypes = [pointer, number, pointer, number]
    return loaded


def build(tuning: Sequence[str] = (), *, exact: bool = False) -> Path:
    """The library, from the cache where it was built before. `tuning`: flags that name another processor than this one."""
    try:
        return compiled.build("native.c", tuning, exact=exact)
    except NotBuilt as error:
        raise _missing(error) from error


def _open(path: Path) -> ctypes.CDLL:
    try:
        return compiled.load(path)
    except NotBuilt as error:
        raise _missing(error) from error


def _missing(why: NotBuilt) -> BackendMissing:
    fix = "Install a C compiler, or use llama.cpp: --backend llamacpp --draft-engine llamacpp"
    return BackendMissing("our own engine cannot be built", str(why), fix)
