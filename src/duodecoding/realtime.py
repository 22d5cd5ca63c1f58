"""Drivers with a real clock: the core says what to do, the models here do it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from duodecoding.backends.base import Conversation, Target
from duodecoding.core import Committed, DuoCore, Expand, Verify, walk
from duodecoding.drafters.growth import BestFirst, Growth
from duodecoding.drafters.lookup import LookupDrafter
from duodecoding.drafters.model import ModelDrafter
from duodecoding.types import EngineConfig, Mode, RoundStats, SamplingParams


@dataclass(slots=True)
class Meter:
    """Where the time of one answer went."""

    started: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    ended: float | None = None
    target_busy: float = 0.0
    draft_busy: float = 0.0
    rounds: list[RoundStats] = field(default_factory=list)

    def finish(self) -> None:
        self.ended = time.perf_counter()

    @property
    def seconds(self) -> float:
        return (self.ended if self.ended is not None else time.perf_counter()) - self.started


@dataclass(slots=True)
class Drafters:
    """Who guesses. Any part may be missing."""

    model: ModelDrafter | None = None
    lookup: LookupDrafter | None = None

    def open(self, prompt: Sequence[int], params: SamplingParams, growth: Growth) -> None:
        if self.model is not None:
            self.model.open(prompt, params, growth)
        if self.lookup is not None:
            self.lookup.open(prompt)

    def commit(self, tokens: Sequence[int]) -> None:
        if self.model is not None:
            self.model.commit(tokens)
        if self.lookup is not None:
            self.lookup.commit(tokens)

    def close(self) -> None:
        if self.model is not None:
            self.model.close()


def growth_of(config: EngineConfig) -> Growth:
    """How the draft grows the tree in this mode."""
    if config.mode is Mode.CHAIN:
        return BestFirst(width=1, branching=1)
    return BestFirst(width=config.draft_width)


def take_turns(
    core: DuoCore, target: Target, conversation: Conversation, drafters: Drafters, meter: Meter
) -> Iterator[list[Committed]]:
    """Draft, verify, draft, verify: one processor at a time. Yields the tokens of each round."""
    guess_for_free(core, drafters)
    while (work := core.step()) is not None:
        if isinstance(work, Expand):
            draft_step(core, drafters, meter)
            continue
        gained = target_round(core, target, conversation, work, meter)
        yield gained
        if core.finish_reason is None and core.uses_drafts:
            drafters.commit([committed.token for committed in gained])
            guess_for_free(core, drafters)


def guess_for_free(core: DuoCore, drafters: Drafters) -> None:
    if core.uses_drafts and drafters.lookup is not None:
        core.nodes_arrived(drafters.lookup.guess())


def draft_step(core: DuoCore, drafters: Drafters, meter: Meter) -> None:
    start = time.perf_counter()
    model = drafters.model
    leaves = model.next_leaves() if model is not None else []
    grown = model.grow(leaves) if model is not None and leaves else []
    meter.draft_busy += time.perf_counter() - start
    if grown:
        core.nodes_arrived(grown)
    else:
        core.draft_exhausted()


def target_round(core: DuoCore, target: Target, conversation: Conversation, work: Verify, meter: Meter) -> list[Committed]:
    start = time.perf_counter()
    choose = target.verify([(conversation, work.guesses)])[0]
    gained = core.verdict_arrived(work, walk(work.guesses, choose))
    conversation.commit([committed.token for committed in gained])
    now = time.perf_counter()
    meter.target_busy += now - start
    if meter.first_token is None:
        meter.first_token = now
    accepted = sum(1 for committed in gained if committed.source != "target")
    meter.rounds.append(RoundStats(len(work.nodes), accepted, now - start))
    return gained
