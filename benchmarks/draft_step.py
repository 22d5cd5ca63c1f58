"""What a draft step costs, all of ours included: choosing leaves, llama.cpp, top-k, bookkeeping; by width and threads.

python benchmarks/draft_step.py DRAFT.gguf [--threads 2,4] [--widths 1,2,4,8,16]
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from common import spread, write

from duodecoding.backends.llamacpp import LlamaModel, physical_cores
from duodecoding.backends.llamacpp_draft import LlamaDraft
from duodecoding.drafters.growth import BestFirst
from duodecoding.drafters.model import ModelDrafter
from duodecoding.types import SamplingParams

TEXT = "The river rose slowly through the night, and by the morning the lower fields were under water. "


def steps(drafter: ModelDrafter, prompt: list[int], width: int, seconds: float) -> list[float]:
    """Times of steps that expand exactly `width` leaves, on trees that grow for six steps and are committed."""
    times: list[float] = []
    drafter.open(prompt, SamplingParams(), BestFirst(width, branching=8))
    while drafter.read():
        pass
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        best = None
        for _ in range(6):
            start = time.perf_counter()
            leaves = drafter.next_leaves()
            if not leaves:
                break
            grown = drafter.grow(leaves)
            took = time.perf_counter() - start
            best = best or grown[0].token
            if len(leaves) == width:
                times.append(took)
        drafter.commit([best if best is not None else 0])
    return times


def prompt_speed(drafter: ModelDrafter, prompt: list[int]) -> float:
    """Seconds per prompt token."""
    drafter.open(prompt[:1], SamplingParams(), BestFirst(1))
    drafter.open(prompt, SamplingParams(), BestFirst(1))
    start = time.perf_counter()
    while drafter.read():
        pass
    return (time.perf_counter() - start) / len(prompt)


def main() -> None:
    path = Path(sys.argv[1])
    option = dict(zip(sys.argv[2::2], sys.argv[3::2], strict=True))
    threads = [int(n) for n in option.get("--threads", str(physical_cores())).split(",")]
    widths = [int(n) for n in option.get("--widths", "1,2,4,8,16").split(",")]
    results = {}
    for count in threads:
        draft = LlamaDraft(LlamaModel(path), context=4096, threads=count)
        drafter = ModelDrafter(draft)
        ids = draft.vocabulary.tokenize(TEXT * 60, special=False, bos=True)
        for context in (200, 1000):
            row = {str(w): spread([1e3 * t for t in steps(drafter, ids[:context], w, 1.2)]) for w in widths}
            results[f"{count} threads, context {context}"] = row
            print(count, "threads, context", context, {w: row[w]["median"] for w in row}, "ms a step", flush=True)
        results[f"{count} threads, prompt"] = {"seconds_per_token": prompt_speed(drafter, ids[:1000])}
        draft.close()
    name = option.get("--name", "draft_step")
    print(write(name, {"draft": path.name, "cpus": os.cpu_count(), "branching": 8}, results))


if __name__ == "__main__":
    main()
