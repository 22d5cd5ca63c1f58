"""What this machine has: versions, cores, memory, devices. Facts as plain values; nothing is drawn here."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from duodecoding.types import SamplingParams

if TYPE_CHECKING:
    from duodecoding.backends.base import Target

PACKAGES = ("duodecoding", "llama-cpp-python", "numpy", "huggingface_hub", "torch", "transformers")


def versions() -> dict[str, str | None]:
    """Version by package; None where it is not installed."""
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        if package != "duodecoding":
            return None
        from duodecoding import __version__

        return __version__  # run from a source tree


def cores() -> dict[str, int]:
    """`physical`: those this process may use, hyper-threads counted once. `allowed`: logical ones it may use."""
    from duodecoding.backends.llamacpp import physical_cores

    logical = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    return {"physical": physical_cores(), "logical": logical, "allowed": allowed}


def own_code() -> str:
    """How the engine's own modules run: "compiled" or "interpreted"."""
    from duodecoding import machine

    return "compiled" if machine.compiled() else "interpreted"


def own_engine() -> dict[str, str]:
    """Who runs models in GGUF files on this CPU: "native", or "llamacpp" and `why`."""
    from duodecoding.backends import native
    from duodecoding.errors import BackendMissing

    try:
        native.fast_library()
        native.fast_library(exact=True)
    except BackendMissing as error:
        return {"engine": "llamacpp", "why": error.why}
    return {"engine": "native", "why": ""}


def memory() -> dict[str, int | None]:
    """Bytes. `limit`: what this process's control group allows, if it is bounded."""
    from duodecoding import machine

    facts = machine.memory()
    total = facts.get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"total_bytes": total, "available_bytes": facts.get("MemAvailable"), "limit_bytes": machine.control_group_limit()}


def devices() -> dict[str, Any]:
    """Whether llama.cpp was built for a GPU, and which CUDA devices torch sees (None: torch is not installed)."""
    from duodecoding.backends.llamacpp import supports_gpu

    return {"llama_cpp_gpu_offload": supports_gpu(), "cuda": _cuda_devices()}


def _cuda_devices() -> list[dict[str, Any]] | None:
    if find_spec("torch") is None:
        return None
    import torch

    found = []
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        found.append({"name": torch.cuda.get_device_name(i), "total_bytes": total, "free_bytes": free})
    return found


def bandwidth(threads: int) -> dict[str, float | None]:
    """Bytes a second that a copy reads and writes, in main memory and on the first GPU that torch sees."""
    from duodecoding import measure

    gpu = measure.gpu_bandwidth()
    return {"cpu": measure.cpu_bandwidth(threads), "gpu": gpu[1] if gpu else None}


def pass_seconds(target: Target, sizes: Sequence[int], repeats: int = 7) -> dict[int, float]:
    """What a target pass over n tokens takes here, by n: the median of a few, taken in turn."""
    from duodecoding.tree import PassNode

    guess, other = target.vocabulary.tokenize("one two", special=False, bos=False)[:2]
    conversation = target.open([other] * 32, SamplingParams())
    times: dict[int, list[float]] = {n: [] for n in sizes}
    for n in [1, *sizes, *list(sizes) * repeats]:
        start = time.perf_counter()
        target.verify([(conversation, [PassNode(i, guess) for i in range(-1, n - 2)])])
        target.finish()
        times.setdefault(n, []).append(time.perf_counter() - start)
        conversation.commit([other])
    return {n: statistics.median(times[n][-repeats:]) for n in sizes}


def outlook(cores: int, gpu: bool, own_engine: bool = False) -> str:
    """What speculation can do here, in one sentence that promises nothing it cannot keep."""
    if gpu:
        return "On a GPU a pass over many guesses costs little more than one token: with a good draft expect a real gain."
    where = f"Target and draft share {cores} core{'s' if cores > 1 else ''} and no GPU"
    if own_engine:
        return f"{where}; our own engine checks a few guesses for little more than one token: expect a gain where many are right."
    if cores <= 4:
        return f"{where}, so guesses are dear to check: expect a gain where the answer repeats its prompt, little elsewhere."
    return f"{where}: expect a gain where most guesses are right (edits, code, a well-matched draft), little elsewhere."
