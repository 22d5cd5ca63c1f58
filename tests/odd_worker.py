"""A draft worker process for tests: the real one, with a scripted draft instead of a file, or with random delays in every step.

Takes the options of `duodecoding.worker`, and before them one JSON object: {"scripted": {...} or null, "delay": seconds}.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from duodecoding import backends, worker
from duodecoding.backends import scripted
from duodecoding.backends.base import Draft, Leaf, Pair, QuickDraft
from duodecoding.sampling import Row
from duodecoding.types import EngineConfig, SamplingParams


class SlowDraft:
    """Another draft that now and then takes its time."""

    def __init__(self, draft: Draft, delay: float, seed: int = 0) -> None:
        self._draft, self._delay, self._random = draft, delay, random.Random(seed)
        self.vocabulary, self.context, self.token_ids = draft.vocabulary, draft.context, draft.token_ids
        self.room = draft.room
        self.open, self.commit, self.close, self.stop_on = draft.open, draft.commit, draft.close, draft.stop_on

    def _dawdle(self) -> None:
        if self._random.random() < 0.5:
            time.sleep(self._random.random() * self._delay)

    def read(self) -> bool:
        self._dawdle()
        return self._draft.read()

    def expand(self, leaves: Sequence[Leaf]) -> list[Row]:
        self._dawdle()
        rows = [row.copy() for row in self._draft.expand(leaves)]
        self._dawdle()
        return rows


class SlowQuickDraft(SlowDraft):
    """The same of one that finds its guesses itself."""

    def __init__(self, draft: QuickDraft, delay: float) -> None:
        super().__init__(draft, delay)
        self._quick, self.most_leaves, self.hottest = draft, draft.most_leaves, draft.hottest

    def guess(self, leaves: Sequence[Leaf], k: int, floors: Sequence[float], params: SamplingParams) -> list[list[Pair]]:
        self._dawdle()
        found = self._quick.guess(leaves, k, floors, params)
        self._dawdle()
        return found


def slow(draft: Draft, delay: float) -> Draft:
    return SlowQuickDraft(draft, delay) if isinstance(draft, QuickDraft) else SlowDraft(draft, delay)


def scripted_draft(seed: int = 0, size: int = 24, memory: int = 2, share: float = 0.3, context: int = 64) -> Draft:
    """The draft of `worlds.World` with the same values."""
    mine, other = (scripted.random_script(size, s, memory=memory) for s in (seed, seed + 1))
    script = scripted.disagreeing(mine, other, share, seed)
    return scripted.ScriptedDraft(scripted.ScriptedVocabulary(size), script, context=context)


def main(argv: Sequence[str]) -> int:
    odd: dict[str, Any] = json.loads(argv[0])
    load = backends.load_draft

    def load_draft(path: Path, config: EngineConfig) -> Draft:
        draft = scripted_draft(**odd["scripted"]) if odd["scripted"] is not None else load(path, config)
        return slow(draft, odd["delay"]) if odd["delay"] else draft

    backends.load_draft = load_draft
    return worker.main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
