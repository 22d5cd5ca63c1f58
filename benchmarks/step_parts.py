"""Where the time of a draft step goes: llama.cpp's own work, and each part of ours around it. In microseconds.

    python benchmarks/step_parts.py [DRAFT.gguf] [--widths 1,2,4,8] [--seconds 4] [--threads 1] [--name step_parts]

A worker's session drafts as it would for an engine: every four steps the target commits one to four tokens along the draft's
likeliest path, and sometimes one that nobody guessed. The widths take turns, so that a busy machine disturbs all alike. Steps of
full width are reported by part; `bare` is the step after a miss, which reads what was committed; `commit` is what a commit takes.
"""

from __future__ import annotations

import argparse
import random
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

import duodecoding
from duodecoding import backends
from duodecoding.backends import llamacpp
from duodecoding.session import Session
from duodecoding.types import EngineConfig, SamplingParams
from duodecoding.wire import GrowBestFirst, Open, main_side, worker_side

EMBEDDED = Path(duodecoding.__file__).parent / "drafts" / "smollm2-draft.gguf"
TEXT = "The river rose slowly through the night, and by the morning the lower fields were under water. "
CONTEXT, ROUNDS, STEPS, MISSES = 200, 24, 4, 0.2
VOCABULARY = 49_152

Parts = dict[str, float]  # seconds


class Watch:
    """Adds up the time spent in functions, by name, since it was last read."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = defaultdict(float)

    def on(self, owner: Any, attribute: str, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, attribute)
        clock, spent = time.perf_counter, self._spent

        def timed(*args: Any, **options: Any) -> Any:
            start = clock()
            try:
                return inner(*args, **options)
            finally:
                spent[name] += clock() - start

        setattr(owner, attribute, timed)

    def read(self) -> defaultdict[str, float]:
        spent = defaultdict(float, self._spent)
        self._spent.clear()
        return spent


class Bench:
    """A session whose engine is this class."""

    def __init__(self, draft: backends.base.Draft, params: SamplingParams) -> None:
        ours, theirs = socket.socketpair()
        self._engine, self._params, self._draft = main_side(ours), params, draft
        self._session = Session(worker_side(theirs), draft)
        self._session._drafter = self._drafter = self._session._make_drafter(VOCABULARY)
        self._watch = Watch()
        for owner, attribute in (
            (self._session, "_tell"),
            (self._drafter, "next_leaves"),
            (self._drafter, "grow"),
            (self._drafter, "_guesses"),
            (self._drafter, "_forget"),
            (draft, "expand"),
        ):
            self._watch.on(owner, attribute, attribute)
        self._random, self._answer = random.Random(1), 0
        self._prompt = draft.vocabulary.tokenize(TEXT * 60, special=False, bos=True)[:CONTEXT]
        self.steps: dict[int, list[Parts]] = defaultdict(list)
        self.bare: dict[int, list[Parts]] = defaultdict(list)
        self.commits: dict[int, list[Parts]] = defaultdict(list)

    def answer(self, width: int) -> None:
        """Draft through one answer, for the record of that width."""
        self._answer += 1
        self._engine.send(Open(self._answer, self._prompt, self._params, GrowBestFirst(width, None, 8, 0.0)))
        self._turn()
        while self._session._reading:
            self._turn()
        for _ in range(ROUNDS):
            for _ in range(STEPS):
                self._step(width)
            self._commit(width)

    def _turn(self) -> float:
        """What `Session.run` does in its loop, and how long that took."""
        start = time.perf_counter()
        self._session._handle(self._session._messages(wait=False))
        self._session._step()
        took = time.perf_counter() - start
        self._engine.receive()
        return took

    def _step(self, width: int) -> None:
        bare = not self._drafter._tree.root.expanded
        self._watch.read()
        total = self._turn()
        spent, wide = self._watch.read(), self._session._width
        parts = {
            "choose leaves": spent["next_leaves"],
            "sequences, batch": spent["expand"] - spent["llama_decode"],
            "llama_decode": spent["llama_decode"],
            "logits to guesses": spent["_guesses"] - spent["expand"],
            "tree": spent["grow"] - spent["_guesses"],
            "encode, send": spent["_tell"],
            "loop, receive": total - spent["next_leaves"] - spent["grow"] - spent["_tell"],
            "all": total,
        }
        if bare:
            self.bare[width].append(parts)
        elif wide == width:
            self.steps[width].append(parts)

    def _commit(self, width: int) -> None:
        tree = self._drafter._tree
        path = [node.token for node in tree.likeliest_path(self._random.randint(1, 4))]
        tokens = path if path and self._random.random() > MISSES else [*path[:-1], self._stranger()]
        self._watch.read()
        start = time.perf_counter()
        self._session._commit(tokens)
        total = time.perf_counter() - start
        sequences = self._watch.read()["_forget"]
        self.commits[width].append({"sequences": sequences, "tree, judging": total - sequences, "all": total})

    def _stranger(self) -> int:
        """A token that the draft can read and does not expect."""
        known = self._draft.token_ids
        return int(known[self._random.randrange(1000, 16_000)] if known is not None else self._random.randrange(1000, 16_000))


def summary(rows: list[Parts]) -> dict[str, dict[str, float]]:
    """Microseconds of each part: the median, and the least, which no other process disturbed."""
    return {
        part: {
            "median": round(1e6 * statistics.median(row[part] for row in rows), 1),
            "least": round(1e6 * min(row[part] for row in rows), 1),
        }
        for part in rows[0]
    }


def watched_decode(watch: Watch) -> None:
    watch.on(llamacpp.C, "llama_decode", "llama_decode")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", type=Path, nargs="?", default=EMBEDDED)
    parser.add_argument("--widths", default="1,2,4,8")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each width")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--name", default="step_parts")
    options = parser.parse_args()
    widths = [int(width) for width in options.widths.split(",")]
    draft = backends.load_draft(options.draft, EngineConfig(threads=options.threads, draft_engine="llamacpp"))
    bench = Bench(draft, SamplingParams(temperature=options.temperature))
    watched_decode(bench._watch)
    end = time.perf_counter() + options.seconds * len(widths)
    while time.perf_counter() < end:
        for width in widths:
            bench.answer(width)
    results = {
        f"width {width}": {
            "step": summary(bench.steps[width]),
            "bare": summary(bench.bare[width]),
            "commit": summary(bench.commits[width]),
        }
        for width in widths
    }
    settings = {key: value.name if isinstance(value, Path) else value for key, value in vars(options).items()}
    common.write(options.name, settings, results)
    draft.close()


if __name__ == "__main__":
    main()
