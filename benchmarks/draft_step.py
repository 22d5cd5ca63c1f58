"""What a draft step costs, all of ours included: choosing leaves, the model, its best guesses, bookkeeping. By width, in turns.

    python benchmarks/draft_step.py [DRAFT.gguf ...] [--engines native llamacpp] [--threads 12] [--widths 1 2 4 8 16] [--rounds 6]
    python benchmarks/draft_step.py --engines native native:haswell   # as a processor without AVX-512 would run it

Every draft on every engine takes a turn in each round, so that a busy machine disturbs all alike. Milliseconds a step; a prompt
of 1,000 tokens in microseconds a token.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import common

import duodecoding
from duodecoding import backends
from duodecoding.backends import native
from duodecoding.backends.base import Draft
from duodecoding.backends.llamacpp import physical_cores
from duodecoding.backends.native_draft import NativeDraft
from duodecoding.drafters.growth import BestFirst
from duodecoding.drafters.model import ModelDrafter
from duodecoding.types import EngineConfig, SamplingParams

EMBEDDED = Path(duodecoding.__file__).parent / "drafts" / "smollm2-draft.gguf"
TEXT = "The river rose slowly through the night, and by the morning the lower fields were under water. "
CONTEXTS = (200, 1000)
GREEDY = SamplingParams()
STEPS = 6  # of a tree before something is committed


def steps(drafter: ModelDrafter, prompt: list[int], width: int, seconds: float, params: SamplingParams = GREEDY) -> list[float]:
    """Times of steps that expand exactly `width` leaves, on trees that grow for six steps and are committed."""
    times: list[float] = []
    drafter.open(prompt, params, BestFirst(width, branching=8))
    while drafter.read():
        pass
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        best = None
        for _ in range(STEPS):
            start = time.perf_counter()
            leaves = drafter.next_leaves()
            if not leaves:
                break
            grown = drafter.grow(leaves)
            took = time.perf_counter() - start
            best = best or (grown[0].token if grown else None)
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


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafts", type=Path, nargs="*", default=[EMBEDDED])
    parser.add_argument(
        "--engines", nargs="+", default=["native", "llamacpp"], help="native, native:PROCESSOR (gcc's name) or llamacpp"
    )
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=0.1, help="of each width in a round")
    parser.add_argument("--name", default="draft_step")
    return parser.parse_args()


def load(path: Path, engine: str, threads: int) -> Draft:
    kind, _, processor = engine.partition(":")
    if processor:
        library = native.load(native.build([f"-march={processor}"]))
        return NativeDraft(path, context=EngineConfig().ctx_size, threads=threads, library=library)
    return backends.load_draft(path, EngineConfig(threads=threads, draft_engine=kind))  # type: ignore[arg-type]


def turn_of(name: str, draft: Draft, options: argparse.Namespace) -> dict[str, list[float]]:
    """Times by what was measured."""
    drafter = ModelDrafter(draft)
    ids = draft.vocabulary.tokenize(TEXT * 60, special=False, bos=True)
    found = {f"{name}, prompt, us a token": [1e6 * prompt_speed(drafter, ids[:1000])]}
    for context in CONTEXTS:
        for width in options.widths:
            some = steps(drafter, ids[:context], width, options.seconds, SamplingParams(temperature=options.temperature))
            found[f"{name}, context {context}, {width} leaves, ms"] = [1e3 * seconds for seconds in some]
    return found


def main() -> None:
    options = arguments()
    loaded: dict[str, Draft] = {
        f"{path.stem}, {engine}": load(path, engine, options.threads) for path in options.drafts for engine in options.engines
    }
    times: dict[str, list[float]] = defaultdict(list)
    for turn in range(options.rounds + 1):
        for name, draft in loaded.items():
            some = turn_of(name, draft, options)
            for what in some if turn else ():  # the first one warms up
                times[what] += some[what]
    for draft in loaded.values():
        draft.close()
    settings: dict[str, Any] = {"threads": options.threads, "cpus": os.cpu_count(), "branching": 8, "rounds": options.rounds}
    settings |= {"temperature": options.temperature}
    common.write(options.name, settings, {what: common.spread(values) for what, values in times.items() if len(values) > 1})


if __name__ == "__main__":
    main()
