"""The benchmark: numbers by hand, order, journal, whole runs with scripted models, peers, and one run with real models."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from workers import in_thread
from worlds import World

import duodecoding
from duodecoding.backends import scripted
from duodecoding.bench import engines, journal, limit, metrics, order, peers, report, simulate
from duodecoding.bench import run as bench_run
from duodecoding.bench.engines import Engine, forget, gap
from duodecoding.bench.journal import Journal
from duodecoding.bench.metrics import Answer
from duodecoding.bench.peers import Ground
from duodecoding.bench.run import Plan, Run
from duodecoding.cli.main import main
from duodecoding.core import Choose
from duodecoding.costs import to_record
from duodecoding.drafting import Drafters
from duodecoding.errors import BackendMissing, UsageError
from duodecoding.llm import LLM
from duodecoding.prompts import Prompt
from duodecoding.sampling import Choice
from duodecoding.trace import Did, Lane, Timeline
from duodecoding.tree import PassNode
from duodecoding.types import EngineConfig, Mode, SamplingParams, Source, Token
from duodecoding.virtual import load_profile

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import h200

WORLD = World(size=10, context=512, draft_context=512, share=0.3, memory=2)  # tokens that are whole characters
QUESTIONS = [
    Prompt("1", "chat", ("abc", "bca")),
    Prompt("2", "chat", ("a b c", "bb")),
    Prompt("1", "qa", ("cab",)),
    Prompt("2", "qa", ("ab ab",)),
]
SPARE = [Prompt("9", "chat", ("ccc",)), Prompt("9", "qa", ("ac",))]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


def answer(who: str, id: str = "1", tokens: int = 10, seconds: float = 1.0, **more: Any) -> Answer:
    values: dict[str, Any] = {"task": "qa", "turn": 0, "repeat": 0, "prompt_tokens": 5, "finish": "length", "ttft_seconds": 0.1}
    values |= {"tokens": list(range(tokens))} | more
    return Answer(who=who, id=id, seconds=seconds, **values)


# Numbers


def test_tokens_per_second_as_spec_bench_counts_them():
    said = [
        answer("off", "1", 10, 1.0),
        answer("off", "1", 30, 1.0, turn=1),  # 40 tokens in 2 s: 20
        answer("off", "2", 10, 0.25),  # 40
        answer("off", "7", 6, 0.5, task="rag"),  # 12
    ]
    speeds = metrics.by_question(said)
    assert speeds == {("qa", "1"): 20.0, ("qa", "2"): 40.0, ("rag", "7"): 12.0}
    assert metrics.by_task(speeds) == {"qa": 30.0, "rag": 12.0, "mean": 21.0}


def test_of_several_sessions_the_mean_counts():
    said = [answer("off", "1", 10, seconds, repeat=repeat) for repeat, seconds in enumerate((1.0, 2.0, 0.5))]
    assert metrics.by_question(said) == {("qa", "1"): pytest.approx((10 + 5 + 20) / 3)}


def test_decoding_alone_leaves_out_the_prompt_and_what_came_with_the_first_token():
    said = [answer("off", tokens=11, seconds=1.5, ttft_seconds=0.5, first_tokens=1), answer("off", "2", 13, 1.0, first_tokens=4)]
    found = metrics.summary(said, said)["decode_tokens_per_second"]
    assert found["qa"] == pytest.approx((10 / 1.0 + 9 / 0.9) / 2)


def test_a_speedup_is_a_ratio_of_means_over_the_same_questions():
    plain = [answer("off", "1", 10, 1.0), answer("off", "2", 10, 0.5), answer("off", "3", 10, 1.0)]
    fast = [answer("duo", "1", 10, 0.25), answer("duo", "2", 10, 0.5)]
    found = metrics.speedup(fast, plain)
    assert found["qa"].value == pytest.approx((40 + 20) / (10 + 20))
    assert found["mean"].value == found["qa"].value
    low, high = found["qa"].low, found["qa"].high
    assert low is not None
    assert high is not None
    assert 1.0 <= low <= found["qa"].value <= high <= 4.0  # the two questions' own speed-ups
    assert metrics.speedup(fast, []) == {}


def test_one_question_has_no_interval_and_tasks_count_alike():
    plain = [answer("off", "1"), answer("off", "2"), answer("off", "1", task="rag")]
    fast = [answer("duo", "1", seconds=0.5), answer("duo", "2", seconds=0.5), answer("duo", "1", seconds=0.25, task="rag")]
    found = metrics.speedup(fast, plain)
    assert (found["rag"].value, found["rag"].low) == (pytest.approx(4.0), None)
    assert found["qa"].low == pytest.approx(2.0)
    assert (found["mean"].value, found["mean"].low) == (pytest.approx(3.0), None)


def test_intervals_are_seeded_and_cover_the_truth():
    random = np.random.default_rng(5)
    covered = 0
    for _ in range(120):
        plain = [answer("off", str(i), 100, float(s)) for i, s in enumerate(1 / random.uniform(80, 120, 25))]
        ratios = random.uniform(1.0, 3.0, 25)
        fast = [answer("duo", a.id, 100, a.seconds / r) for a, r in zip(plain, ratios, strict=True)]
        found = metrics.speedup(fast, plain)["qa"]
        assert found == metrics.speedup(fast, plain)["qa"]
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 2.0 <= found.high
    assert 100 <= covered <= 120  # 95 % of 120 are 114


def tokens_of(*sources: Source) -> list[Token]:
    return [Token(i, "", source, 0.0) for i, source in enumerate(sources)]


def test_acceptance_by_depth_and_source():
    model, lookup, own = Source.MODEL, Source.LOOKUP, Source.TARGET
    said = tokens_of(own, model, model, own, lookup, model, own, model)
    assert metrics.accepted_by_depth(said, [1, 3, 3, 1]) == {"model": [2, 2], "lookup": [1]}  # the last: the answer ended there


def test_hidden_draft_time():
    timeline = Timeline()
    timeline.span(Lane.TARGET, Did.PROMPT, 0.0, 1.0)
    timeline.span(Lane.TARGET, Did.WAIT, 1.0, 1.5)
    timeline.span(Lane.TARGET, Did.PASS, 1.5, 2.5)
    timeline.span(Lane.DRAFT, Did.STEP, 0.5, 1.25)  # half a second hidden
    timeline.span(Lane.DRAFT, Did.STEP, 1.25, 2.0)  # half a second
    timeline.span(Lane.DRAFT, Did.STEP, 2.25, 4.0)  # a quarter
    assert metrics.hidden_seconds(timeline) == pytest.approx(1.25)


def test_a_mode_in_numbers():
    one = answer(
        "duo", tokens=12, seconds=2.0, ttft_seconds=0.5, first_tokens=2, rounds=5, verified=20, prompt_tokens=600,
        accepted={"model": [3, 1], "lookup": [1, 1, 1]}, target_seconds=1.5, draft_seconds=1.0, pass_seconds=0.8, wait_seconds=0.2,
        step_seconds=0.9, hidden_seconds=0.6,
    )  # fmt: skip
    plain = [answer("off", tokens=12, seconds=4.0, ttft_seconds=0.4, prompt_tokens=600)]
    found = metrics.summary([one], plain)
    assert found["speedup"]["qa"]["value"] == pytest.approx(2.0)
    assert found["tokens_per_round"] == pytest.approx(12 / 5)
    assert found["acceptance_by_depth"] == pytest.approx([4 / 5, 2 / 5, 1 / 5])
    assert found["acceptance_by_depth_and_source"]["model"] == pytest.approx([3 / 5, 1 / 5, 0])
    assert found["tokens_by_source"] == pytest.approx({"model": 4 / 12, "lookup": 3 / 12})
    assert found["verified_accepted"] == pytest.approx(7 / 20)
    assert (found["target_idle"], found["draft_idle"]) == (pytest.approx(0.25), pytest.approx(0.5))
    assert found["hidden_draft_share"] == pytest.approx(0.6 / 0.9)
    assert found["round_seconds"] == pytest.approx(
        {"target pass": 0.2, "drafting in turn": 0.0, "waiting for guesses": 0.05, "our own work": 0.125}
    )
    assert found["ttft_seconds"] == pytest.approx({"seconds": 0.5, "ratio": 1.25, "answers": 1})
    assert found["ttft_seconds_long_prompts"]["ratio"] == pytest.approx(1.25)
    assert "tokens_per_round" not in metrics.summary(plain, plain)  # it told nothing about rounds


def test_differences_name_the_place():
    plain = [answer("off", "1"), answer("off", "1", turn=1), answer("off", "2"), answer("off", "3")]
    other = [
        replace(answer("duo", "1"), tokens=[0, 1, 9, 3]),
        answer("duo", "1", turn=1),  # another question than off was asked by then
        replace(answer("duo", "2"), tokens=list(range(7))),
        answer("duo", "3"),
        answer("duo", "4"),  # nothing to compare with
    ]
    compared, found = metrics.compare(other, plain)
    assert compared == 3
    assert [(d.id, d.turn, d.at, d.expected, d.found) for d in found] == [("1", 0, 2, 2, 9), ("2", 0, 7, 7, None)]


# Order


def contenders(*names: str) -> list[Any]:
    return [SimpleNamespace(name=name, per_task=int(name == "slow")) for name in names]


def test_everybody_gets_a_question_before_the_next_and_the_first_one_rotates():
    jobs = [(c.name, q.task, q.id) for c, q in order.schedule(contenders("off", "duo", "slow"), QUESTIONS, 0)]
    assert [name for name, *_ in jobs] == ["off", "duo", "slow", "duo", "slow", "off", "off", "duo", "off", "duo"]
    assert [place for _, *place in jobs][::3] == [["chat", "1"], ["qa", "1"], ["chat", "2"], ["qa", "2"]]  # tasks in turn
    again = [c.name for c, _ in order.schedule(contenders("off", "duo"), QUESTIONS, 1)]
    assert again == ["duo", "off", "off", "duo", "duo", "off", "off", "duo"]


def test_two_that_answer_in_turns_are_asked_when_the_first_of_them_is():
    everybody = contenders("off", "duo", "slow")
    jobs = list(order.schedule(everybody, QUESTIONS, 0))
    groups = order.together([job for job in jobs if (job[0].name, job[1].id, job[1].task) != ("off", "2", "qa")], everybody[:2])
    found = [([c.name for c in some], q.task, q.id) for some, q in groups]
    assert found == [
        (["off", "duo"], "chat", "1"),
        (["slow"], "chat", "1"),
        (["duo", "off"], "qa", "1"),
        (["slow"], "qa", "1"),
        (["off", "duo"], "chat", "2"),
        (["duo"], "qa", "2"),  # it has this one's answer of the other already
    ]
    assert order.together(jobs, []) == [([contender], question) for contender, question in jobs]


def test_questions_for_tuning_are_the_packages_own_and_not_measured():
    own = order.spare_questions([])
    assert len({question.task for question in own[:7]}) == 7
    measured = own[:20]
    spare = order.spare_questions(measured)
    assert not {q.turns for q in spare[:20]} & {q.turns for q in measured}
    assert set(spare) == set(own)


def test_questions_that_do_not_fit():
    vocabulary = scripted.ScriptedVocabulary(WORLD.size)
    fits, left_out = order.fitting([*QUESTIONS, Prompt("3", "qa", ("a" * 80,))], vocabulary, 64, 24)
    assert (fits, left_out) == (QUESTIONS, ["qa 3"])


def test_the_time_left_goes_by_who_is_asked():
    assert order.expected({}, ["off"]) is None
    assert order.expected({"off": [1.0, 3.0], "duo": [1.0]}, ["off", "duo", "new"]) == pytest.approx(2 + 1 + 5 / 3)
    assert order.time_left(125.0) == ", 2:05 left"


# Journal


def test_a_journal_goes_on_with_what_is_there(tmp_path):
    first = Journal(tmp_path, {"modes": ["off"], "n": 1})
    first.add([answer("off"), answer("off", turn=1)])
    first.note("tuned", mode="chain", chosen={"draft_length": 2})
    first.close()
    with first.path.open("ab") as file:
        file.write(b'{"kind": "answers", "answers": [{"who": "off", "id": "2"')  # killed while writing
    second = Journal(tmp_path, {"modes": ("off",), "n": 1})
    assert second.answers == first.answers
    assert second.of("tuned") == [{"mode": "chain", "chosen": {"draft_length": 2}}]
    second.add([answer("off", "3")])
    second.add([])
    second.close()
    third = Journal(tmp_path, {"modes": ["off"], "n": 1})
    assert [a.id for a in third.answers] == ["1", "1", "3"]
    third.close()


def test_a_journal_of_other_settings_is_refused(tmp_path):
    Journal(tmp_path, {"model": "a", "repeats": 2}).close()
    with pytest.raises(UsageError, match=r"repeats was 2, now 3\. Choose another --out"):
        Journal(tmp_path, {"model": "a", "repeats": 3})


def test_questions_and_peers_may_be_added_later(tmp_path):
    for questions in (["qa 1"], ["qa 1", "qa 2"]):
        notes = Journal(tmp_path, {"model": "a", "questions": questions})
        notes.note("session", commit="abc")
        notes.close()
    assert (tmp_path / journal.NAME).read_text().count('"kind": "settings"') == 2
    assert len(notes.of("session")) == 2
    with pytest.raises(UsageError, match="model was 'a', now 'b'"):
        Journal(tmp_path, {"model": "b", "questions": questions})


@pytest.mark.parametrize("line", [b"hello\n", b'{"kind": "settings"}\n', b'{"a": 1}\n', b"[]\n"])
def test_a_file_that_is_no_journal(line, tmp_path):
    (tmp_path / journal.NAME).write_bytes(line)
    with pytest.raises(UsageError, match="is not a benchmark's"):
        Journal(tmp_path, {})


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write to"):
        Journal(tmp_path / "file", {})


# Whole runs with scripted models


@pytest.fixture
def pair(monkeypatch, tmp_path) -> EngineConfig:
    """A pair of files that stand for the world's models."""
    for name in ("target", "draft"):
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF" + bytes(100))
    monkeypatch.setenv("DUO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("duodecoding.backends.load_target", lambda path, config, progress: WORLD.target())
    monkeypatch.setattr("duodecoding.backends.read_vocabulary", lambda path: WORLD.draft().vocabulary)
    monkeypatch.setattr("duodecoding.backends.load_draft", lambda path, config, exact=False: WORLD.draft())
    monkeypatch.setattr("duodecoding.launch.spawn", lambda path, config, **more: in_thread(WORLD.draft()))
    monkeypatch.setattr(bench_run, "spare_questions", lambda measured: SPARE)
    return EngineConfig(
        model=str(tmp_path / "target.gguf"), draft=str(tmp_path / "draft.gguf"), ctx_size=512, threads=1, threads_draft=1
    )


def silent(what: str, share: float) -> None:
    pass


def played(plan: Plan, folder: Path, **more: Any) -> Run:
    run = Run(plan, Journal(folder, bench_run.facts(plan)), silent, **more)
    run.go()
    run.journal.close()
    return run


def test_every_mode_answers_every_question_alike(pair, tmp_path):
    run = played(Plan(pair, QUESTIONS, PARAMS), tmp_path / "out")
    said = run.journal.answers
    assert Counter(a.who for a in said) == {str(mode): 6 for mode in Mode}
    found = report.results(run.journal, {})
    assert found["equality"] == {str(mode): {"compared": 6, "equal": 6} for mode in Mode if mode is not Mode.OFF}
    assert {a.reused_tokens for a in said} == {0}
    assert all(0 < a.ttft_seconds < a.seconds and a.rounds > 0 for a in said)
    assert all(found["modes"][mode]["acceptance_by_depth"] for mode in ("chain", "serial"))
    seconds = [a for a in said if a.task == "chat" and a.id == "1"]
    assert {a.turn: a.prompt_tokens for a in seconds}[1] > {a.turn: a.prompt_tokens for a in seconds}[0] + 3  # with the answer
    assert run.complete
    assert [a.who for a in said if a.turn == 0][:10] == [*map(str, Mode), "chain", "serial", "lockstep", "duo", "off"]


def test_an_answer_starts_cold_in_target_and_draft(pair):
    """The worker included: of two openings that come together it would heed the second only."""
    opened: list[tuple[str, list[int]]] = []

    class Noting(scripted.ScriptedDraft):
        def open(self, prompt: Any, unread: int = 0) -> None:
            opened.append(("draft", list(prompt)))
            super().open(prompt, unread)

    draft = Noting(WORLD.draft().vocabulary, scripted.random_script(WORLD.size), context=512)
    for mode in (Mode.SERIAL, Mode.DUO):
        opened.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("duodecoding.backends.load_draft", lambda path, config, exact=False: draft)
            patch.setattr("duodecoding.launch.spawn", lambda path, config, **more: in_thread(draft))
            engine = Engine(LLM.from_config(replace(pair, mode=mode)))
        if engine.llm.drafters.remote is not None:
            assert engine.llm.drafters.remote.wait_ready(30.0)
        prompt = [0, 5, 7, 8, 9, 4]
        for _ in range(3):
            assert engine.answer(prompt, PARAMS)["reused_tokens"] == 0
        found = [p for _, p in opened]
        if mode is Mode.SERIAL:
            assert found == [[1], prompt] * 3
        # A worker may be too late for whole answers, but what it opens it opens cold.
        assert found[0] == [1]
        assert all(before == [1] for before, now in pairwise([[], *found]) if now == prompt)
        assert engine.llm.generate(prompt, PARAMS).stats.reused_tokens > 0  # what happens without
        forget(engine.llm)
        assert engine.llm.generate(prompt, PARAMS).stats.reused_tokens == 0
        engine.close()


def test_two_modes_in_turns(pair, tmp_path):
    """A round each, whoever has said least; the same answers, and the time of each is its own."""
    passes: list[int] = []

    class Noting(scripted.ScriptedTarget):
        def verify(self, work: Any) -> Any:
            passes.append(id(self))
            time.sleep(0.002)
            return super().verify(work)

    with pytest.MonkeyPatch.context() as patch:
        new = lambda path, config, progress=None: Noting(WORLD.target().vocabulary, WORLD.target()._script, context=512)  # noqa: E731
        patch.setattr("duodecoding.backends.load_target", new)
        free = replace(pair, draft="free")
        both = [Engine(LLM.from_config(replace(free, mode=mode))) for mode in (Mode.OFF, Mode.DUO)]
        passes.clear()
        prompt = [0, 5, 7, 8, 9, 4]
        start = time.perf_counter()
        off, duo = engines.answer_in_turns(both, [prompt, prompt], PARAMS)
        whole, line = time.perf_counter() - start, both[0].timeline
        assert off["tokens"] == duo["tokens"] == both[0].answer(prompt, PARAMS)["tokens"]
        assert len(set(passes[:2])) == 2, "the first pass of each comes before the second of any"
        assert off["seconds"] + duo["seconds"] < whole
        assert (off["rounds"] - 1) * 0.002 <= off["pass_seconds"] <= off["seconds"]  # the first one reads the prompt
        assert line.end - line.begin <= off["seconds"], "it knows nothing of the other one's time"
        passes.clear()
        stopper = pytest.MonkeyPatch()
        stopper.setattr(time, "sleep", lambda seconds: both[0].abort())  # in its first pass
        assert len(engines.answer_in_turns(both, [prompt, prompt], PARAMS)) == 1
        stopper.undo()
        assert len(set(passes)) == 1, "nobody goes on once one was stopped"
        run = played(Plan(free, QUESTIONS, PARAMS, modes=[Mode.DUO, Mode.CHAIN], repeats=2, in_turns=True), tmp_path / "out")
    said = run.journal.answers
    assert Counter(a.who for a in said) == {"off": 12, "chain": 12, "duo": 12}
    assert run.complete
    assert report.results(run.journal, {})["equality"]["duo"] == {"compared": 12, "equal": 12}
    order_of_answers = [(a.who, a.task, a.id, a.turn) for a in said if a.who != "chain"]
    assert all(a[1:] == b[1:] and a[0] != b[0] for a, b in zip(order_of_answers[::2], order_of_answers[1::2], strict=True))


def test_a_run_goes_on_where_it_was_stopped(pair, tmp_path):
    plan = Plan(pair, QUESTIONS, PARAMS, modes=[Mode.SERIAL])
    count = 0

    def stop_after_three(what: str, share: float) -> None:
        nonlocal count
        count += ":" in what
        if count == 4 and not run.stopped:  # from another thread, as a signal would
            stopper = threading.Thread(target=run.stop)
            stopper.start()
            stopper.join()

    run = Run(plan, Journal(tmp_path / "out", bench_run.facts(plan)), stop_after_three)
    run.go()
    run.journal.close()
    assert len({(a.who, a.task, a.id) for a in run.journal.answers}) == 3
    assert all(a.finish == "length" for a in run.journal.answers)
    assert not run.complete
    before = list(run.journal.answers)
    again = played(plan, tmp_path / "out")
    assert again.journal.answers[: len(before)] == before
    assert len(again.journal.answers) == 12
    assert again.complete
    third = Run(
        plan, Journal(tmp_path / "out", bench_run.facts(plan)), silent, load=lambda *_: pytest.fail("nothing is left to do")
    )
    third.go()


def test_nothing_begins_after_the_deadline(pair, tmp_path):
    run = played(Plan(pair, QUESTIONS, PARAMS, modes=[]), tmp_path / "out", deadline=0.0)
    assert run.journal.answers == []


class Cheat(scripted.ScriptedTarget):
    """Says another token wherever guesses are in the pass."""

    def verify(self, work: Any) -> list[Choose]:
        (choose,) = super().verify(work)
        nodes: list[PassNode] = list(work[0][1])

        def lying(i: int) -> Choice:
            choice = choose(i)
            if nodes and len(work[0][0].tokens) > 20:
                return Choice((choice.token + 1) % self.vocabulary.size, choice.logprob)
            return choice

        return [lying]


def test_a_target_that_cheats_in_one_mode_is_found_out(pair, tmp_path, monkeypatch):
    script = scripted.random_script(WORLD.size, memory=2)
    monkeypatch.setattr(
        "duodecoding.backends.load_target",
        lambda path, config, progress: Cheat(scripted.ScriptedVocabulary(WORLD.size), script, context=512, strict=False),
    )
    run = played(Plan(pair, QUESTIONS, PARAMS, modes=[Mode.CHAIN]), tmp_path / "out")
    found = report.results(run.journal, {})
    assert found["equality"]["chain"]["equal"] < found["equality"]["chain"]["compared"]
    first = found["differences"][0]
    plain = next(a for a in run.journal.answers if a.who == "off" and a.place == (first["task"], first["id"], first["turn"], 0))
    assert first["expected"] == plain.tokens[first["at"]]
    assert first["found"] == (first["expected"] + 1) % WORLD.size
    assert first["gap"] > 0
    text = report.markdown(found, [])
    assert f"| `chain` | {first['task']} {first['id']} |" in text


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_gap_at_a_place_is_that_of_the_two_best_logits(temperature):
    target, history = WORLD.target(), [0, 5, 7, 9]
    params = SamplingParams(temperature=temperature, seed=3)
    value, (best, second) = gap(target, history, params)
    row = scripted.random_script(WORLD.size, WORLD.seed, memory=WORLD.memory)(tuple(history)).astype(np.float64)
    if temperature:
        row = row + temperature * engines.gumbel(3, 4, np.arange(WORLD.size))
    ranked = np.argsort(-row)
    assert (best, second) == tuple(ranked[:2])
    assert value == pytest.approx(row[ranked[0]] - row[ranked[1]], abs=1e-4)


def test_the_yardsticks_at_their_best(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_run, "by_question", lambda answers: {("qa", "9"): speeds(answers)})

    def speeds(answers: list[Answer]) -> float:
        return -abs(max(sum(a.verified for a in answers) / sum(a.rounds for a in answers), 1) - 3)  # three guesses a round is best

    plan = Plan(pair, QUESTIONS, PARAMS, modes=[Mode.CHAIN, Mode.DUO], tune=2)
    run = played(plan, tmp_path / "out")
    (note,) = run.journal.of("tuned")
    assert note["mode"] == "chain"
    assert list(note["tokens_per_second"]) == [str(length) for length in simulate.CHAIN_LENGTHS]
    assert note["chosen"]["draft_length"] == 3
    assert note["questions"] == ["chat 9", "qa 9"]
    chains = [a for a in run.journal.answers if a.who == "chain"]
    assert 2 < sum(a.verified for a in chains) / sum(a.rounds for a in chains) <= 3
    given = played(replace(plan, tune=0, settings={"chain": {"draft_length": 1}}), tmp_path / "other")
    assert sum(a.verified for a in given.journal.answers if a.who == "chain") <= sum(
        a.rounds for a in given.journal.answers if a.who == "chain"
    )


def test_a_repeat_is_a_session_of_its_own(pair, tmp_path, monkeypatch):
    made: list[Any] = []
    original = LLM.from_config.__func__

    def noting(cls: Any, config: EngineConfig, **more: Any) -> Any:
        llm = original(cls, config, **more)
        made.append(llm)
        return llm

    monkeypatch.setattr(bench_run.LLM, "from_config", classmethod(noting))
    run = played(Plan(pair, QUESTIONS, PARAMS, modes=[Mode.SERIAL], repeats=2), tmp_path / "out")
    assert Counter((a.who, a.repeat) for a in run.journal.answers) == {(w, r): 6 for w in ("off", "serial") for r in (0, 1)}
    assert len(made) == 4
    assert made[1].drafters.model is not made[3].drafters.model
    assert len({id(llm.target) for llm in made}) == 1  # one target for all


def test_a_mode_may_have_one_session_only(pair, tmp_path):
    plan = Plan(pair, QUESTIONS, PARAMS, modes=[Mode.SERIAL], repeats=3, mode_per_task={"serial": 1}, once=frozenset({"serial"}))
    run = played(plan, tmp_path / "out")
    tasks = len({question.task for question in QUESTIONS})
    asked = Counter((a.who, a.repeat) for a in run.journal.answers if a.turn == 0)
    assert asked == {("off", r): len(QUESTIONS) for r in range(3)} | {("serial", 0): tasks}
    assert run.complete


def test_a_target_has_the_threads_that_a_mode_gives_it(pair):
    loaded: list[int] = []

    def load(path: Path, config: EngineConfig, progress: Any) -> Any:
        loaded.append(config.threads)
        return WORLD.target()

    shared = engines.SharedTarget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("duodecoding.backends.load_target", load)
        path = Path(pair.model)
        off = shared(path, replace(pair, threads=0), silent)
        assert shared(path, replace(pair, threads=0), silent) is off
        assert shared(path, replace(pair, threads=3), silent) is not off
    assert loaded == [0, 3]


# Virtual time


def test_virtual_time_beside_the_measured(pair, tmp_path):
    plan = Plan(pair, QUESTIONS, PARAMS, modes=[Mode.CHAIN, Mode.DUO])
    run = played(plan, tmp_path / "out")
    profile = {**to_record(load_profile("h200-7b"))}
    run.journal.notes = [note for note in run.journal.notes if note["kind"] != "profile"] + [{"kind": "profile", **profile}]
    draft = WORLD.draft()
    found = limit.virtual(run.journal, QUESTIONS[:3], PARAMS, draft.vocabulary, draft, silent)
    assert found["questions"] == ["chat 1", "chat 2", "qa 1"]
    assert list(found["speedup"]) == ["off", "chain", "duo", "free"]
    assert found["speedup"]["off"] == pytest.approx({"chat": 1.0, "qa": 1.0, "mean": 1.0})
    assert found["speedup"]["free"]["mean"] >= found["speedup"]["chain"]["mean"]
    read = metrics.first_tokens(run.journal.answers)
    assert read is not None
    plain = [a for a in run.journal.answers if a.who == "off" and not a.reused_tokens]
    assert plain
    assert set(read.points) == {a.prompt_tokens for a in plain}
    assert max(read.points.values()) <= max(a.ttft_seconds for a in plain)
    assert metrics.first_tokens([]) is None
    run.journal.notes.append({"kind": "virtual", **found})
    shares = report.results(run.journal, {})["virtual"]
    assert shares["share_of_limit"]["duo"] == pytest.approx(shares["measured"]["duo"] / found["speedup"]["free"]["mean"])
    assert "## Virtual time" in report.markdown(report.results(run.journal, {}), [])


def test_why_there_is_no_limit(pair, tmp_path):
    plan = Plan(replace(pair, draft="lookup"), QUESTIONS, PARAMS, modes=[])
    notes = Journal(tmp_path / "out", {})
    limit.add_virtual(notes, plan, 1, silent)
    assert "there is no draft model" in notes.of("virtual")[0]["left_out"]
    notes.close()


# Peers


def plain_engine(target: Any) -> LLM:
    return LLM.of(target, Drafters(), EngineConfig(mode=Mode.OFF))


class Parrot:
    """A peer that knows the answer of `off`, until it does not."""

    name, per_task = "parrot", 1

    def __init__(self, ground: Ground, fails_at: int = 1 << 30) -> None:
        self._target, self._left = ground.target, fails_at

    def answer(self, prompt: Any, params: SamplingParams) -> dict[str, Any]:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("out of seeds\nin the middle")
        llm = plain_engine(self._target)
        return {"tokens": llm.generate(prompt, params).token_ids, "finish": "length", "seconds": 2.0, "ttft_seconds": 0.5}

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_peers_take_part_or_are_skipped_by_name(pair, tmp_path, monkeypatch):
    def missing(ground: Ground) -> Any:
        raise BackendMissing("dodo is left out", "it is extinct")

    monkeypatch.setitem(peers.PEERS, "parrot", Parrot)
    monkeypatch.setitem(peers.PEERS, "dodo", missing)
    plan = Plan(pair, QUESTIONS, PARAMS, modes=[Mode.DUO], peers=["dodo", "parrot"], peer_per_task=1)
    run = played(plan, tmp_path / "out")
    found = report.results(run.journal, {})
    assert found["skipped"] == {"dodo": "it is extinct"}
    assert [(a.task, a.id, a.turn) for a in run.journal.answers if a.who == "parrot"] == [
        ("chat", "1", 0),
        ("chat", "1", 1),
        ("qa", "1", 0),
    ]
    assert found["equality"]["parrot"] == {"compared": 3, "equal": 3}
    assert set(found["duo_over"]) == {"off", "parrot"}
    assert "`dodo` did not take part: it is extinct" in report.markdown(found, [])
    assert run.complete


def test_a_peer_that_fails_on_the_way_is_dropped_and_named(pair, tmp_path, monkeypatch):
    monkeypatch.setitem(peers.PEERS, "parrot", lambda ground: Parrot(ground, fails_at=2))
    plan = Plan(pair, QUESTIONS, PARAMS, modes=[], peers=["parrot"])
    run = played(plan, tmp_path / "out")
    assert run.journal.of("skipped") == [{"peer": "parrot", "why": "RuntimeError: out of seeds"}]
    assert Counter(a.who for a in run.journal.answers) == {"off": 6}
    assert run.complete


def test_transformers_that_is_not_installed(pair, monkeypatch):
    monkeypatch.setattr("duodecoding.bench.peers.transformers.find_spec", lambda name: None if name == "torch" else object())
    for name in ("transformers", "transformers-assisted"):
        with pytest.raises(BackendMissing, match=f"{name} is left out: torch is not installed"):
            peers.PEERS[name](Ground(WORLD.target(), Path(pair.model), None, pair))


def test_no_llama_server_on_the_path(pair, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BackendMissing, match="llama-server is left out: it is not on the PATH"):
        peers.PEERS["llama-server"](Ground(WORLD.target(), Path(pair.model), None, pair))


SERVER = """#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def reply(self, body):
        data = json.dumps(body).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(data))); self.end_headers(); self.wfile.write(data)
    def do_GET(self): self.reply({{"status": "ok"}})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = asked["prompt"][:asked["n_predict"]]
        self.reply({{"tokens": said, "stop_type": "eos", "timings": {{"prompt_ms": 5.0, "draft_n": 7 * ("-md" in arguments)}}}})
if "broken" in arguments["-m"]: sys.exit("no such model")
HTTPServer(("127.0.0.1", int(arguments["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def llama_server(tmp_path, monkeypatch) -> None:
    program = tmp_path / "bin" / "llama-server"
    program.parent.mkdir()
    program.write_text(SERVER.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


def test_llama_server(pair, llama_server):
    peer = peers.PEERS["llama-server"](Ground(WORLD.target(), Path(pair.model), Path(pair.draft), pair))
    try:
        found = peer.answer([5, 6, 7], SamplingParams(max_tokens=2))
        assert found["tokens"] == [5, 6, 1]  # the end of text, as everybody else counts it
        assert (found["finish"], found["ttft_seconds"], found["drafted"]) == ("stop", 0.005, 7)
        assert found["seconds"] > 0
    finally:
        peer.close()


def test_a_llama_server_that_does_not_start(pair, llama_server, tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    with pytest.raises(BackendMissing, match="it ended with 1: no such model"):
        peers.PEERS["llama-server"](Ground(WORLD.target(), broken, None, pair))


# transformers, where torch is installed


@pytest.fixture(scope="module")
def tiny() -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed: make torch installs it")
    pytest.importorskip("transformers", reason="transformers is not installed: make torch installs it")
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    from duodecoding.backends.torch_slots import ATTENTION, attention

    torch.set_num_threads(1)
    torch.manual_seed(0)
    AttentionInterface.register(ATTENTION, attention)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, initializer_range=0.5, attention_bias=True, attn_implementation=ATTENTION,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def torch_ground(model: Any) -> Ground:
    from duodecoding.backends.torch import TorchTarget

    target = TorchTarget(model, scripted.ScriptedVocabulary(64), context=256, rows=16)
    return Ground(target, Path("model"), None, EngineConfig())


def test_transformers_on_the_same_weights_says_the_same(tiny):
    ground = torch_ground(tiny)
    params = SamplingParams(max_tokens=20)
    llm = plain_engine(ground.target)
    expected = llm.generate([5, 6, 7, 8, 5, 6], params).token_ids
    for name in ("transformers", "transformers-lookup"):
        peer = peers.PEERS[name](ground)
        found = peer.answer([5, 6, 7, 8, 5, 6], params)
        assert found["tokens"] == expected
        assert 0 < found["ttft_seconds"] < found["seconds"]
        assert found["first_tokens"] >= 1
        sampled = peer.answer([5, 6, 7], replace(params, temperature=0.8))
        assert 0 < len(sampled["tokens"]) <= 20
        peer.close()


def test_a_draft_with_some_of_the_tokens_assists(tiny):
    import copy

    import numpy as np
    from transformers import LlamaForCausalLM

    from duodecoding.backends.trim import Trim
    from duodecoding.bench.peers.transformers import TransformersPeer, twin, untrimmed

    model, config = twin(tiny), copy.deepcopy(tiny.config)
    config.vocab_size, config._attn_implementation = 40, "sdpa"
    small = LlamaForCausalLM(config).eval()
    ids = np.arange(0, 64, 2)[:32].tolist() + list(range(49, 64, 2))
    trim = Trim(np.array(sorted(ids)), np.arange(64) % 40, "")
    told = small(_torch_ids([[int(trim.stand_ins[token]) for token in (5, 6, 7)]])).logits[0, -1]
    draft = untrimmed(small, trim)
    whole = draft(_torch_ids([[5, 6, 7]])).logits[0, -1]
    assert whole[trim.token_ids.tolist()].tolist() == told.tolist()
    assert sorted(set(range(64)) - set(whole.isinf().nonzero().flatten().tolist())) == trim.token_ids.tolist()
    plain = TransformersPeer("transformers", model, [], 1, {}).answer([5, 6, 7, 8], SamplingParams(max_tokens=20))
    assisted = TransformersPeer("assisted", model, [], 1, {"assistant_model": draft}).answer(
        [5, 6, 7, 8], SamplingParams(max_tokens=20)
    )
    assert assisted["tokens"] == plain["tokens"]


def test_the_embedded_draft_says_the_same_to_transformers(tiny):
    """Its file has joint tensors and some of the tokens, neither of which transformers knows."""
    pytest.importorskip("gguf", reason="gguf is not installed: make torch installs it")
    from duodecoding.backends import load_draft
    from duodecoding.bench.peers.transformers import read_gguf
    from duodecoding.drafters.growth import BestFirst
    from duodecoding.drafters.model import ModelDrafter

    path, prompt = Path(duodecoding.__file__).parent / "drafts" / "smollm2-draft.gguf", [504, 3575, 282, 4649, 314]
    drafter = ModelDrafter(load_draft(path, EngineConfig(threads=1)))
    drafter.open(prompt, SamplingParams(), BestFirst(width=1, branching=1))
    guesses = [proposal.token for _ in range(3) for proposal in drafter.grow(drafter.next_leaves())]
    drafter.close()
    draft = read_gguf(path, tiny.device, tiny.dtype)
    for guess in guesses:
        assert draft(_torch_ids([prompt])).logits[0, -1].argmax() == guess
        prompt.append(guess)


def _torch_ids(ids: list[list[int]]) -> Any:
    import torch

    return torch.tensor(ids)


def test_what_cannot_be_done_with_a_torch_model_here(tiny, monkeypatch):
    ground = torch_ground(tiny)
    with pytest.raises(BackendMissing, match="transformers compiles on a GPU only"):
        peers.PEERS["transformers-compiled"](ground)
    with pytest.raises(BackendMissing, match="there is no draft model"):
        peers.PEERS["transformers-assisted"](ground)
    monkeypatch.setattr("duodecoding.bench.peers.llama_server.shutil.which", lambda name: name)
    with pytest.raises(BackendMissing, match="the target is not run from a GGUF file"):
        peers.PEERS["llama-server"](ground)


def test_a_plain_model_on_the_memory_of_a_changed_one(tiny):
    """What our GPU backend makes of a model is undone without a copy."""
    import copy

    import torch

    from duodecoding.backends.torch_fast import Fast
    from duodecoding.backends.torch_slots import CacheShape, Slots
    from duodecoding.bench.peers.transformers import twin

    model = copy.deepcopy(tiny)
    slots = Slots(CacheShape.of(model.config), 32, torch.device("cpu"), torch.float32)
    Fast(model, slots, compile=False, kernels=False)
    plain = twin(model)
    assert {type(module).__name__ for module in plain.modules()} == {type(module).__name__ for module in tiny.modules()}
    ids = torch.tensor([[5, 6, 7, 8]])
    reference = copy.deepcopy(tiny)
    reference.set_attn_implementation("sdpa")
    with torch.no_grad():
        assert torch.allclose(plain(ids).logits, reference(ids).logits, atol=1e-5)
    joint = model.model.layers[0].self_attn.q_proj.joint.weight
    assert plain.model.layers[0].self_attn.q_proj.weight.data_ptr() == joint.data_ptr()


# The script for the GPU machine


def test_steps_for_the_gpu_machine(pair, tmp_path, monkeypatch, capsys):
    """With scripted models in place of the rig: all steps, then a second call that has nothing to do, then --finish."""
    monkeypatch.setitem(sys.modules, "h200_verify", SimpleNamespace(machine=lambda: {"gpu": "imagined"}))
    monkeypatch.setattr(h200, "read_vocabulary", lambda path: WORLD.draft().vocabulary)
    monkeypatch.setattr(h200.Rig, "_build", lambda self: WORLD.target())
    monkeypatch.setattr("duodecoding.llm.OVERLAPPING", ())  # no worker that would be given cores
    monkeypatch.setattr("duodecoding.cli.bench_plots.find_spec", lambda name: None)  # nor matplotlib
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for question in QUESTIONS:
        with (tasks / f"{question.task}.jsonl").open("a") as file:
            file.write(json.dumps({"question_id": question.id, "turns": question.turns}) + "\n")
    call = [
        "--target",
        pair.model,
        "--draft",
        pair.draft,
        "--tasks",
        str(tasks),
        "--out",
        str(tmp_path / "out"),
        "--max-tokens",
        "16",
    ]
    call += ["--shapes", "7b", "--modes", "off", "chain", "--chain", "2", "3", "--serial", "2x2", "--per-task", "1"]
    h200.steps(h200.arguments(call))
    said = capsys.readouterr().out
    assert "7b-greedy: about" in said
    assert "7b-t0.8: complete" in said
    for name, length in (("7b-greedy", 2), ("7b-t0.8", 3)):
        found = json.loads((tmp_path / "out" / name / "results.json").read_text())
        assert found["settings"]["chosen"] == {"chain": {"draft_length": length}, "serial": {"draft_length": 2, "draft_width": 2}}
        assert found["shape"] == "7b"
        assert found["machine"]["gpu"] == "imagined"
        assert found["commit"]
        assert found["equality"]["chain"] == {"compared": 3, "equal": 3}
    monkeypatch.setattr(h200.Rig, "_build", lambda self: pytest.fail("everything is there"))
    h200.steps(h200.arguments(call))
    h200.finish(h200.arguments([*call, "--finish", "--virtual", "1"]))
    found = json.loads((tmp_path / "out" / "7b-greedy" / "results.json").read_text())
    assert found["virtual"]["share_of_limit"]["chain"] > 0
    h200.steps(h200.arguments([*call, "--shapes", "13b", "--budget-seconds", "1"]))
    assert "13b-greedy: no time left to begin it" in capsys.readouterr().out


# The command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--modes", "off,warp"], "unknown mode 'warp'"),
        (["--modes", ","], "--modes is empty"),
        (["--peers", "dodo"], "unknown peer 'dodo'"),
        (["--per-task", "0"], "--per-task is 0"),
        (["--repeat", "0"], "--repeat is 0"),
        (["--tasks", "/no/such/folder"], "cannot read prompts"),
        (["--ctx-size", "16"], "every question is too long"),
        (["--max-tokens", "0"], "max_tokens is 0"),
    ],
)
def test_errors_are_one_line(arguments, said, tmp_path, capsys):
    assert main(["bench", "--out", str(tmp_path / "out"), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_first_look_ends_in_time(pair, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("duodecoding.cli.bench.QUICK_SECONDS", 0.0)
    monkeypatch.setattr("duodecoding.backends.engine_of", lambda path, config: "native")  # the file is empty
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "qa.jsonl").write_text('{"question_id": 1, "turns": ["abc"]}')
    assert main(["bench", "--quick", "--tasks", str(tasks), "-m", pair.model, "-d", "free", "--out", str(tmp_path / "out")]) == 0
    assert "nothing was measured" in (said := capsys.readouterr().err)
    assert "not all questions were asked" in said


def interrupted(*_args: Any) -> None:
    raise KeyboardInterrupt


def test_a_small_run_from_end_to_end(tmp_path, capsys, monkeypatch):
    """Two questions to real models; then the same command again, and one with other settings."""
    monkeypatch.setattr(bench_run, "NODES", (1, 2, 4))
    monkeypatch.setattr(bench_run, "REPEATS", 1)
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "qa.jsonl").write_text(
        '{"question_id": 1, "turns": ["Name a colour."]}\n{"question_id": 2, "turns": ["What is two and two?"]}\n'
    )
    out = tmp_path / "out"
    call = ["bench", "--tasks", str(tasks), "--out", str(out), "--max-tokens", "16", "--ctx-size", "1024", "-d", "smollm2-135m"]
    call += ["--threads", "1", "--threads-draft", "1", "--modes", "chain,duo", "--virtual", "0"]
    assert main(call) == 0
    table = capsys.readouterr().out
    assert [line.split()[0] for line in table.splitlines() if line.split()[:1] in (["off"], ["chain"], ["duo"])] == [
        "off",
        "chain",
        "duo",
    ]
    found = json.loads((out / "results.json").read_text())
    assert found["equality"] == {mode: {"compared": 2, "equal": 2} for mode in ("chain", "duo")}
    assert {"commit", "machine", "settings", "virtual", "memory"} <= set(found)
    assert found["memory"]["engine_bytes"] > 50_000_000
    assert len(found["answers"]) == 6
    pictures = [name for name in report.PICTURES if (out / name).stat().st_size > 10_000]
    assert pictures == list(report.PICTURES)
    text = (out / "report.md").read_text()
    assert all(f"({name})" in text for name in pictures)
    before = (out / journal.NAME).read_bytes()
    assert main(call) == 0  # nothing is left to ask
    assert (out / journal.NAME).read_bytes().count(b'"answers"') == before.count(b'"answers"')
    (out / "report.md").unlink()
    monkeypatch.setattr(limit, "add_virtual", interrupted)
    assert main(call) == 130  # by Ctrl-C, after the last answer
    assert "goes on from here" in capsys.readouterr().err
    assert (out / "report.md").read_text().splitlines()[4:] == text.splitlines()[4:]  # above is the time of the session
    assert main([*call, "--seed", "1"]) == 2
    assert "was made with other settings: sampling was" in capsys.readouterr().err
