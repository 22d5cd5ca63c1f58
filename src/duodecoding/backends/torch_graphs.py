"""CUDA graphs, where there is room for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

WARM_PASSES = 2  # before a capture: kernels are compiled, libraries set themselves up
GRAPH = 64 << 20  # bytes that a graph takes for itself, and by which what it asks for is rounded up

T = TypeVar("T")


class Peak:
    """The most memory that torch had in use, in bytes. A capture has to begin torch's own count anew."""

    def __init__(self) -> None:
        self._before = 0

    def __call__(self) -> int:
        return max(self._before, int(torch.cuda.max_memory_allocated()))

    def count_anew(self, device: torch.device) -> None:
        """Torch's own count: what it was is kept in mind."""
        self._before = max(self._before, int(torch.cuda.max_memory_allocated(device)))
        torch.cuda.reset_peak_memory_stats(device)

    def forget(self) -> None:
        self._before = 0
        torch.cuda.reset_peak_memory_stats()


peak = Peak()


def capture(work: Callable[[], T], device: torch.device, stream: Any, pool: Any = None) -> tuple[Any, T]:
    """A graph of the work, which is done a few times before, and where its result will be.

    Memory that runs out in the middle of a capture is lost: torch gives nothing back from then on. So it is asked for before.
    """
    here = torch.cuda.current_stream(device)
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        peak.count_anew(device)
        before = torch.cuda.memory_allocated(device)
        for _ in range(WARM_PASSES):
            work()
        stream.synchronize()
        demand(torch.cuda.max_memory_allocated(device) - before + GRAPH, device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            result = work()
    here.wait_stream(stream)
    return graph, result


def demand(size: int, device: torch.device) -> None:
    """So many bytes must be free on the GPU, not only within what torch keeps for passes without a graph."""
    if torch.cuda.mem_get_info(device)[0] < size:
        torch.cuda.empty_cache()
    if torch.cuda.mem_get_info(device)[0] < size:
        raise torch.OutOfMemoryError(f"Tried to allocate {size / 2**20:.0f} MiB for a graph")
