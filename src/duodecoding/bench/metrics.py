"""What a benchmark's answers say, in numbers. Pure.

Tokens per second are those of Spec-Bench: new tokens over wall time with the prompt, summed over the turns of a question, then
the mean over questions; a speed-up is the ratio of two such means over the same questions. Intervals come from a bootstrap over
questions.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from duodecoding.costs import CostCurve, fit
from duodecoding.prompts import TASKS
from duodecoding.trace import Did, Lane, Timeline
from duodecoding.types import Mode, Source, Token

RESAMPLES = 1000
COVERED = 0.95  # of the resamples lie in the interval
LONG_PROMPT = 512  # tokens, for the time to the first token
DEEPEST = 16  # of acceptance by depth
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of a mode or a peer. What a peer does not tell is 0. Seconds are wall-clock."""

    who: str
    task: str
    id: str  # of the question
    turn: int
    repeat: int
    prompt_tokens: int
    tokens: list[int]
    finish: str
    seconds: float  # prompt included
    ttft_seconds: float
    reused_tokens: int = 0  # of the prompt; it must be 0 for all, or they are not equally cold
    first_tokens: int = 1  # that came with the first
    rounds: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: dict[str, list[int]] = field(default_factory=dict)  # source -> guesses accepted at depth 1, 2, …
    target_seconds: float = 0.0  # busy
    draft_seconds: float = 0.0  # busy, its prompt included
    pass_seconds: float = 0.0  # of the target after the first token
    wait_seconds: float = 0.0  # of the target, for guesses
    turn_seconds: float = 0.0  # of draft steps that the target stood still for, after the first token
    step_seconds: float = 0.0  # of all draft steps
    hidden_seconds: float = 0.0  # of these, under a target that was busy
    speculation: str = ""
    draft_faults: int = 0

    @property
    def question(self) -> tuple[str, str]:
        return self.task, self.id

    @property
    def place(self) -> tuple[str, str, int, int]:
        """What it is an answer to."""
        return self.task, self.id, self.turn, self.repeat


Answers = Sequence[Answer]


# One answer


def accepted_by_depth(tokens: Sequence[Token], gained: Sequence[int]) -> dict[str, list[int]]:
    """How many guesses of each source became part of the answer at depth 1, 2, … of a round. `gained`: tokens of each round."""
    found: dict[str, list[int]] = {}
    start = 0
    for count in gained:
        for depth, token in enumerate(tokens[start : start + count]):
            if token.source is not Source.TARGET:
                row = found.setdefault(str(token.source), [])
                row += [0] * (depth + 1 - len(row))
                row[depth] += 1
        start += count
    return found


def hidden_seconds(timeline: Timeline) -> float:
    """Time of draft steps that lay under a target at work."""
    busy = [(event.begin, event.end) for event in timeline.of(Lane.TARGET, Did.PASS, Did.PROMPT)]
    steps = [(event.begin, event.end) for event in timeline.of(Lane.DRAFT, Did.STEP)]
    return sum(max(0.0, min(end, e) - max(begin, b)) for begin, end in steps for b, e in busy)


# Speeds


class Estimate(NamedTuple):
    """A number and the interval that a bootstrap gives it; None: too few questions to tell."""

    value: float
    low: float | None = None
    high: float | None = None


def _speed(answers: Answers) -> float:
    return sum(len(a.tokens) for a in answers) / sum(a.seconds for a in answers)


def _decode_speed(answers: Answers) -> float:
    seconds = sum(a.seconds - a.ttft_seconds for a in answers)
    return sum(len(a.tokens) - a.first_tokens for a in answers) / seconds if seconds > 0 else 0.0


def by_question(answers: Answers, speed: Callable[[Answers], float] = _speed) -> dict[tuple[str, str], float]:
    """Tokens per second of each question, all its turns together: the mean of its sessions."""
    sessions: dict[tuple[str, str], dict[int, list[Answer]]] = {}
    for answer in answers:
        sessions.setdefault(answer.question, {}).setdefault(answer.repeat, []).append(answer)
    return {question: statistics.mean(map(speed, sessions[question].values())) for question in sorted(sessions)}


def by_task(speeds: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """The mean over a task's questions, then the mean over tasks."""
    found: dict[str, list[float]] = {}
    for (task, _), value in speeds.items():
        found.setdefault(task, []).append(value)
    means = {task: sum(values) / len(values) for task, values in found.items()}
    return means | {"mean": sum(means.values()) / len(means)}


def speedup(answers: Answers, baseline: Answers, *, seed: int = 0) -> dict[str, Estimate]:
    """By task, then the mean over tasks. Only questions that both have answered count; empty: there are none."""
    mine, theirs = by_question(answers), by_question(baseline)
    pairs: dict[str, list[tuple[float, float]]] = {}
    for question in mine.keys() & theirs.keys():
        pairs.setdefault(question[0], []).append((mine[question], theirs[question]))
    random = np.random.default_rng(seed)
    drawn: dict[str, Numbers] = {}
    found: dict[str, Estimate] = {}
    for task in sorted(pairs, key=lambda task: (TASKS.index(task) if task in TASKS else len(TASKS), task)):
        table = np.array(sorted(pairs[task]))  # (questions, 2)
        means = table.mean(0)
        drawn[task] = _resampled(table, random)
        found[task] = _estimate(float(means[0] / means[1]), drawn[task], len(table))
    if found:
        fewest = min(len(values) for values in pairs.values())
        mean = sum(e.value for e in found.values()) / len(found)
        found["mean"] = _estimate(mean, np.mean(list(drawn.values()), axis=0), fewest)
    return found


def _resampled(table: Numbers, random: np.random.Generator) -> Numbers:
    """Ratios of means over questions drawn with replacement, the same ones on both sides."""
    means = table[random.integers(len(table), size=(RESAMPLES, len(table)))].mean(1)  # (resamples, 2)
    ratios: Numbers = means[:, 0] / means[:, 1]
    return ratios


def _estimate(value: float, drawn: Numbers, questions: int) -> Estimate:
    if questions < 2:  # drawing one question again and again says nothing
        return Estimate(value)
    low, high = np.quantile(drawn, [(1 - COVERED) / 2, (1 + COVERED) / 2])
    return Estimate(value, float(low), float(high))


# Everything about one mode


def summary(answers: Answers, baseline: Answers) -> dict[str, Any]:
    """A mode or peer in numbers; what it does not tell is left out."""
    found: dict[str, Any] = {
        "answers": len(answers),
        "tokens_per_second": by_task(by_question(answers)),
        "decode_tokens_per_second": by_task(by_question(answers, _decode_speed)),
        "speedup": {task: estimate._asdict() for task, estimate in speedup(answers, baseline).items()},
        "ttft_seconds": _first_token(answers, baseline, 0),
        "ttft_seconds_long_prompts": _first_token(answers, baseline, LONG_PROMPT),
    }
    rounds = sum(a.rounds for a in answers)
    return found | _inside(answers, rounds) if rounds else found


def _first_token(answers: Answers, baseline: Answers, shortest: int) -> dict[str, float] | None:
    """Mean time to the first token, and how many times the baseline's that is, for prompts of some length."""
    theirs = {a.place: a.ttft_seconds for a in baseline}
    pairs = [(a.ttft_seconds, theirs[a.place]) for a in answers if a.place in theirs and a.prompt_tokens >= shortest]
    if not pairs:
        return None
    mine, plain = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    return {"seconds": mine, "ratio": mine / plain, "answers": len(pairs)}


def _inside(answers: Answers, rounds: int) -> dict[str, Any]:
    """What only an engine that we look into can tell."""
    tokens, seconds = sum(len(a.tokens) for a in answers), sum(a.seconds for a in answers)
    steps = sum(a.step_seconds for a in answers)
    accepted: dict[str, Counter[int]] = {}
    for a in answers:
        for source, counts in a.accepted.items():
            accepted.setdefault(source, Counter()).update(dict(enumerate(counts, start=1)))
    return {
        "tokens_per_round": tokens / rounds,
        "acceptance_by_depth": [
            sum(counts[depth] for counts in accepted.values()) / rounds for depth in range(1, 1 + _deepest(accepted))
        ],
        "acceptance_by_depth_and_source": {
            source: [counts[depth] / rounds for depth in range(1, 1 + _deepest(accepted))] for source, counts in accepted.items()
        },
        "tokens_by_source": {source: sum(counts.values()) / tokens for source, counts in accepted.items()},
        "verified_accepted": _ratio(sum(sum(counts.values()) for counts in accepted.values()), sum(a.verified for a in answers)),
        "target_idle": max(0.0, 1 - sum(a.target_seconds for a in answers) / seconds),
        "draft_idle": max(0.0, 1 - sum(a.draft_seconds for a in answers) / seconds),
        "hidden_draft_share": _ratio(sum(a.hidden_seconds for a in answers), steps),
        "round_seconds": _round(answers),
        "draft_faults": sum(a.draft_faults for a in answers),
    }


def _deepest(accepted: Mapping[str, Counter[int]]) -> int:
    return min(DEEPEST, max((depth for counts in accepted.values() for depth in counts), default=0))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _round(answers: Answers) -> dict[str, float]:
    """Where the time of a round goes, on the critical path, after the first token."""
    rounds = max(1, sum(a.rounds - 1 for a in answers))
    parts = {
        "target pass": sum(a.pass_seconds for a in answers),
        "drafting in turn": sum(a.turn_seconds for a in answers),
        "waiting for guesses": sum(a.wait_seconds for a in answers),
    }
    whole = sum(a.seconds - a.ttft_seconds for a in answers)
    parts["our own work"] = max(0.0, whole - sum(parts.values()))
    return {name: seconds / rounds for name, seconds in parts.items()}


def own_work(answers: Answers) -> dict[int, float]:
    """Seconds of our own work in a round, by tokens of a pass: a point for each mode."""
    found: dict[int, float] = {}
    for who in sorted({a.who for a in answers if a.rounds > 1}):
        own = [a for a in answers if a.who == who]
        tokens = 1 + sum(a.verified for a in own) / sum(a.rounds for a in own)
        found[round(tokens)] = max(_round(own)["our own work"], 1e-6)
    return found


def first_tokens(answers: Answers) -> CostCurve | None:
    """Seconds to the first token of plain decoding, by tokens of a prompt of which nothing was known; None: nobody asked one."""
    found = [(a.prompt_tokens, a.ttft_seconds) for a in answers if a.who == Mode.OFF and not a.reused_tokens]
    return fit(found) if found else None


# Differences


@dataclass(frozen=True, slots=True)
class Difference:
    """An answer that is not the baseline's."""

    who: str
    task: str
    id: str
    turn: int
    repeat: int
    at: int  # token of the answer
    expected: int | None  # None: the answer had ended there
    found: int | None
    gap: float | None = None  # of the target's two best logits there; None: not computed
    two_best: bool | None = None  # are these two tokens its two best?

    @property
    def place(self) -> tuple[str, str, int, int]:
        return self.task, self.id, self.turn, self.repeat


def compare(answers: Answers, baseline: Answers) -> tuple[int, list[Difference]]:
    """How many answers have a counterpart, and which of them differ. After a first turn that differs the second asks something
    else, so it is not compared."""
    theirs = {a.place: a for a in baseline}
    compared, found = 0, list[Difference]()
    apart: set[tuple[str, str, int]] = set()
    for a in sorted(answers, key=lambda a: a.place):
        other = theirs.get(a.place)
        if other is None or (a.task, a.id, a.repeat) in apart:
            continue
        compared += 1
        if a.tokens != other.tokens:
            apart.add((a.task, a.id, a.repeat))
            found.append(_difference(a, other))
    return compared, found


def _difference(answer: Answer, other: Answer) -> Difference:
    mine, theirs = [*answer.tokens, None], [*other.tokens, None]
    at = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b)
    return Difference(answer.who, *answer.place, at, theirs[at], mine[at])
