"""Draft and target in turns: what a round is charged with, on a clock that the test moves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from worlds import World

from duodecoding import LLM, SamplingParams, between, llm, realtime
from duodecoding.core import DuoCore
from duodecoding.costs import CostCurve
from duodecoding.errors import UsageError
from duodecoding.model_files import size_of
from duodecoding.pace import Pace, guessed_costs
from duodecoding.trace import Did, Lane
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
    monkeypatch.setattr(between, "time", clock)
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


FREE = World(drafts=("lookup", "recycling"))


def engine(clock: Clock, monkeypatch: pytest.MonkeyPatch, world: World = FREE) -> LLM:
    llm = world.llm(EngineConfig(mode=Mode.DUO))
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


# Mode duo with a draft model between the passes


STEP = 0.05  # seconds of a draft step


def between_engine(clock: Clock, monkeypatch: pytest.MonkeyPatch, world: World, step: float = STEP) -> LLM:
    llm = engine(clock, monkeypatch, world)
    model = llm.drafters.model
    assert model is not None
    expand = model.draft.expand

    def slowly(leaves: Sequence[Any]) -> Any:
        clock.now += step
        return expand(leaves)

    monkeypatch.setattr(model.draft, "expand", slowly)
    llm._pace = Pace(verify={16: CostCurve({1: PASS, 8: 1.2 * PASS, 64: 8 * PASS})}, draft=CostCurve({1: step, 4: 1.1 * step}))
    return llm


@pytest.mark.sources
def test_as_many_draft_steps_as_pay(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    for step, fewest, most in ((0.01, 2.0, 9.0), (0.9 * PASS, 0.0, 1.0)):
        world = World(share=0.1, drafts=("model", "lookup"))
        llm = between_engine(clock, monkeypatch, world, step)
        stream = llm.stream([0, 5, 7], params)
        result = stream.run()
        assert result.token_ids == world.plain(params).token_ids
        steps = stream.timeline.of(Lane.DRAFT, Did.STEP)
        assert fewest <= len(steps) / result.stats.rounds <= most, step
    assert result.stats.seconds < 40 * PASS * 1.1, "a draft that costs as much as a pass is left alone"


@pytest.mark.sources
def test_what_drafting_takes_is_charged_to_rounds_and_not_to_our_own_work(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = between_engine(clock, monkeypatch, World(share=0.1, drafts=("model", "lookup")))
    own = llm._pace.costs.host
    assert own is not None
    before, rounds = dict(own.points), list[float]()
    monkeypatch.setattr(DuoCore, "round_took", lambda self, tokens, seconds: rounds.append(seconds))
    stream = llm.stream([0, 5, 7], SamplingParams(max_tokens=40, ignore_eos=True))
    result = stream.run()
    drafted = sum(step.seconds for step in stream.timeline.of(Lane.DRAFT, Did.STEP))
    assert drafted > 5 * STEP
    assert result.stats.draft_busy_seconds == pytest.approx(drafted)
    assert sum(rounds) == pytest.approx(PASS * len(rounds) + drafted)
    assert all(after <= before[n] for n, after in own.points.items())


@pytest.mark.sources
def test_the_draft_reads_after_the_first_token_and_only_while_it_is_wanted(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = between_engine(clock, monkeypatch, World(share=0.1, drafts=("model", "lookup")))
    model, pace = llm.drafters.model, llm._pace
    assert model is not None
    opened: list[int] = []
    really = model.open
    monkeypatch.setattr(model, "open", lambda *given: (opened.append(passes()), really(*given)))

    def passes() -> int:
        return len(llm.target.passes)  # type: ignore[attr-defined]

    params = SamplingParams(max_tokens=40, ignore_eos=True)
    llm.generate([0, 5, 7], params)
    assert opened == [1]
    pace.switch.on, pace.switch._pause_left = False, 10
    before = passes()
    stream = llm.stream([0, 5, 7], params)
    result = stream.run()
    assert len(opened) == 2
    assert opened[1] - before >= 8, "paused for ten rounds"
    assert result.token_ids == World(share=0.1).plain(params).token_ids
    assert stream.timeline.of(Lane.DRAFT, Did.STEP)


@pytest.mark.sources
def test_a_token_that_the_draft_does_not_know_ends_its_part(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(share=0.1, drafts=("model", "lookup"))
    llm = between_engine(clock, monkeypatch, world)
    model = llm.drafters.model
    assert model is not None
    monkeypatch.setattr(model, "can_read", lambda tokens, position: position < 20)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    stream = llm.stream([0, 5, 7], params)
    result = stream.run()
    assert result.token_ids == world.plain(params).token_ids
    told = model._tree.position
    assert 3 <= told < 20
    assert len(stream.timeline.of(Lane.DRAFT, Did.PROMPT)) == 1


# Who takes turns


def rule(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cores: int, share: float, **settings: Any) -> tuple[str, str]:
    """What becomes of `turns`, and what is said of it."""
    target, draft = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    target.write_bytes(b"x" * 1000)
    draft.write_bytes(b"x" * round(1000 * share))
    monkeypatch.setattr(llm, "_cores", lambda: cores)
    config, note = llm._with_turns(EngineConfig(**settings), target, draft)
    return config.turns, note


def test_a_small_draft_takes_turns_where_there_are_few_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert rule(monkeypatch, tmp_path, 2, 0.1) == ("on", llm.IN_TURN)
    assert rule(monkeypatch, tmp_path, 2, 0.3) == ("off", llm.TOO_FEW)
    assert rule(monkeypatch, tmp_path, 8, 0.1) == ("off", "")
    assert rule(monkeypatch, tmp_path, 2, 0.1, mode=Mode.LOCKSTEP) == ("off", llm.TOO_FEW)
    assert rule(monkeypatch, tmp_path, 2, 0.1, gpu_layers=-1) == ("off", "")
    assert rule(monkeypatch, tmp_path, 2, 0.1, threads_draft=1) == ("off", "")
    assert rule(monkeypatch, tmp_path, 8, 0.9, turns="on") == ("on", llm.IN_TURN)
    assert rule(monkeypatch, tmp_path, 2, 0.1, turns="off") == ("off", "")
    assert rule(monkeypatch, tmp_path, 2, 0.1, mode=Mode.SERIAL) == ("auto", "")


def test_parts_of_a_file_count_together(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        (tmp_path / f"big-0000{number}-of-00003.gguf").write_bytes(b"x" * 100)
    (tmp_path / "other.gguf").write_bytes(b"x" * 7)
    assert size_of(tmp_path / "big-00001-of-00003.gguf") == 300
    assert size_of(tmp_path / "other.gguf") == 7
    assert size_of(tmp_path) == 307


@pytest.mark.parametrize(
    ("settings", "why"), [({"mode": Mode.SERIAL}, "has its own order"), ({"draft_at": "localhost:1"}, "while the target does")]
)
def test_turns_that_cannot_be_taken_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        llm._with_turns(EngineConfig(turns="on", **settings), Path("a"), None)


def test_a_real_pair_in_turns(model_path: Path) -> None:
    """Whose draft reads, drafts, copies and recycles in one process; the answer is that of plain decoding. With prices at which
    drafting always pays: what it takes here depends on who else is busy."""
    always = replace(guessed_costs(on_gpu=False), verify={512: CostCurve({1: 1.0, 64: 1.01})}, draft=CostCurve({1: 1e-5, 16: 2e-5}))
    params = SamplingParams(max_tokens=48, temperature=0.8, seed=3)
    prompt = "The three largest rivers of Europe are"
    with LLM(str(model_path), draft="none", mode=Mode.OFF, ctx_size=512) as plain:
        expected = plain.generate(prompt, params)
    with LLM(str(model_path), draft="smollm2-draft", turns="on", ctx_size=512) as duo:
        duo.use_costs(always)
        assert duo.drafters.remote is None
        assert duo.in_turn
        assert duo.modes == (Mode.OFF, Mode.CHAIN, Mode.SERIAL, Mode.DUO)
        assert "take turns" in duo.speculation
        stream = duo.stream(prompt, params)
        assert stream.run().token_ids == expected.token_ids
        assert stream.timeline.of(Lane.DRAFT, Did.STEP)
        assert stream.result.stats.accepted_by_source.get("model", 0) > 0
