"""The same answers in virtual time, with the costs measured in the same run: what each mode should have given, and the limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from duodecoding import backends
from duodecoding.backends.base import Draft, Vocabulary
from duodecoding.bench.journal import Journal
from duodecoding.bench.metrics import Answer, by_task, first_tokens, own_work
from duodecoding.bench.order import first_of
from duodecoding.bench.run import Plan, files
from duodecoding.bench.simulate import Setup, Study, chat_tokens, setups
from duodecoding.costs import CostCurve, from_record
from duodecoding.prompts import Prompt
from duodecoding.text import difference
from duodecoding.types import Mode, SamplingParams
from duodecoding.virtual import FREE, Recording, Tally

Progress = Callable[[str, float], None]  # what is being done, share done


def add_virtual(journal: Journal, plan: Plan, per_task: int, progress: Progress) -> None:
    """Note in the journal what virtual time says about the first questions of each task, or why it says nothing."""
    draft_file = files(plan.config)[1]
    asked = first_of(plan.questions, per_task)
    if any("speedup" in note for note in journal.of("virtual")):
        return
    if draft_file is None:
        journal.note("virtual", left_out="there is no draft model, and guesses without one cost nothing")
    elif not journal.of("profile") or not journal.answers:
        journal.note("virtual", left_out="the run ended before costs were measured")
    elif per_task:
        vocabulary = backends.read_vocabulary(files(plan.config)[0])
        draft = backends.load_draft(draft_file, plan.config, exact=True)
        try:
            journal.note("virtual", **virtual(journal, asked, plan.params, vocabulary, draft, progress))
        finally:
            draft.close()


def virtual(
    journal: Journal, questions: Sequence[Prompt], params: SamplingParams, vocabulary: Vocabulary, draft: Draft, progress: Progress
) -> dict[str, Any]:
    """Speed-ups over `off` by mode and for the free-draft limit, on first turns that `off` has answered."""
    costs = from_record(journal.of("profile")[-1], where=str(journal.path))
    costs = replace(costs, host=CostCurve(own_work(journal.answers)), prompts=first_tokens(journal.answers) or costs.prompts)
    plain = {a.question: a for a in journal.answers if a.who == Mode.OFF and a.turn == 0 and a.repeat == 0}
    asked = [question for question in questions if (question.task, question.id) in plain]
    recordings = [_recording(question, plain[question.task, question.id], params, vocabulary) for question in asked]
    differs = difference(vocabulary, draft.vocabulary, target_name="target", draft_name="draft")
    study = Study(recordings, draft, True, vocabulary.size, bridge=vocabulary if differs else None)
    speeds: dict[str, dict[str, float]] = {}
    rows = [*journal.settings["modes"], FREE]
    for done, name in enumerate(rows):
        progress(f"virtual time: {name}", done / len(rows))
        speeds[name] = _speeds(study.replay(_setup(name, journal), costs))
    plain_speeds = speeds[Mode.OFF]
    found = {
        name: {task: of_mode[task] / plain_speeds[task] for task in of_mode if task != "mean"} for name, of_mode in speeds.items()
    }
    means = {name: sum(of_mode.values()) / len(of_mode) for name, of_mode in found.items()}  # of ratios, as for measured ones
    return {
        "questions": [f"{question.task} {question.id}" for question in asked],
        "speedup": {name: of_mode | {"mean": means[name]} for name, of_mode in found.items()},
    }


def _recording(question: Prompt, answer: Answer, params: SamplingParams, vocabulary: Vocabulary) -> Recording:
    return Recording(question.task, tuple(chat_tokens(vocabulary, question.turns[0])), tuple(answer.tokens), params)


def _setup(name: str, journal: Journal) -> Setup:
    """As in the run: the settings that were found or given."""
    chosen = {note["mode"]: note["chosen"] for note in journal.of("tuned")} | dict(journal.settings["chosen"])
    usual = setups(name)[0]
    return replace(usual, config=replace(usual.config, **_settings(journal, name, chosen)))


def _settings(journal: Journal, name: str, chosen: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    if name in chosen:
        return dict(chosen[name])
    if name == Mode.DUO and any(a.turn_seconds for a in journal.answers if a.who == name):
        return {"turns": "on"}
    if name in (Mode.CHAIN, Mode.SERIAL):
        return {key: journal.settings["settings"][key] for key in ("draft_length", "draft_width")}
    return {}


def _speeds(tallies: Mapping[str, Sequence[Tally]]) -> dict[str, float]:
    return by_task({(task, str(i)): t.tokens / t.seconds for task, found in tallies.items() for i, t in enumerate(found)})
