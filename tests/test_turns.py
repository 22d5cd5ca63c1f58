"""Draft and target in turns: what a round is charged with, on a clock that the test moves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from worlds import World

from duodecoding import LLM, SamplingParams, realtime
from duodecoding.core import DuoCore
from duodecoding.costs import CostCurve
from duodecoding.pace import Pace
from duodecoding.types import EngineConfig, Mode

PASS, LOOK, READER = 1.0, 0.1, 50.0  # seconds
EXACTLY = 1e-6


class Clock:
    """Stands in for the module `time`."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(realtime, "time", clock)
    return clock


def looked_for(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> list[bool]:
    """Looking takes its time. By round but the first: was there a look for it?"""
    found: list[bool] = []
    guess = realtime.guess_for_free

    def slowly(core: DuoCore, *args: Any) -> None:
        found.append(core.looking)
        guess(core, *args)
        clock.now += LOOK if found[-1] else 0.0

    monkeypatch.setattr(realtime, "guess_for_free", slowly)
    return found


def engine(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> LLM:
    llm = World(drafts=("lookup", "recycling")).llm(EngineConfig(mode=Mode.DUO))
    verify = llm.target.verify

    def slowly(work: Sequence[Any]) -> Any:
        clock.now += PASS
        return verify(work)

    monkeypatch.setattr(llm.target, "verify", slowly)
    llm._pace = Pace(verify={16: CostCurve({1: PASS, 8: PASS, 64: 8 * PASS})})
    return llm


@pytest.mark.sources
def test_a_round_is_charged_with_the_look_for_it_and_not_with_the_reader(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = looked_for(monkeypatch, clock)
    told: list[float] = []
    monkeypatch.setattr(DuoCore, "looked", lambda self, tokens, seconds: told.append(seconds))
    llm = engine(clock, monkeypatch)
    own = llm._pace.costs.host
    assert own is not None
    before = dict(own.points)
    for _ in llm.stream([0, 5, 7], SamplingParams(max_tokens=40, ignore_eos=True)):
        clock.now += READER
    assert sum(looks) > 3
    assert told == [pytest.approx(PASS + LOOK, rel=EXACTLY)] * sum(looks)
    assert all(after <= before[n] for n, after in own.points.items()), "looking is no part of a pass"


@pytest.mark.sources
def test_all_plain_passes_tell_their_price_where_nothing_was_looked_for(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in eight at least, so a machine that becomes slower is noticed."""
    llm = engine(clock, monkeypatch)
    monkeypatch.setattr(DuoCore, "looking", property(lambda self: False))
    prices: list[float] = []
    monkeypatch.setattr(Pace, "target_pass", lambda self, tokens, seconds, context, *, alone: prices.append(seconds))
    result = llm.generate([0, 5, 7], SamplingParams(max_tokens=40, ignore_eos=True))
    assert result.stats.rounds == 40
    assert prices == [pytest.approx(PASS, rel=EXACTLY)] * (40 // realtime.PLAIN_TOLD)
