"""Who is asked what, and when: the order that makes a benchmark fair. Pure, but for reading the package's own prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from duodecoding import prompts
from duodecoding.backends.base import Vocabulary
from duodecoding.bench.peers import Contender
from duodecoding.bench.simulate import chat_tokens
from duodecoding.prompts import Prompt


def first_of(questions: Sequence[Prompt], per_task: int = 0) -> list[Prompt]:
    """The first questions of each task (0: all), one of each task in turn: a run that ends early has asked all tasks alike."""
    ranked: list[tuple[int, int, Prompt]] = []
    seen: dict[str, int] = defaultdict(int)
    for place, question in enumerate(questions):
        ranked.append((seen[question.task], place, question))
        seen[question.task] += 1
    return [question for rank, _, question in sorted(ranked, key=lambda r: r[:2]) if not per_task or rank < per_task]


def schedule(contenders: Sequence[Contender], questions: Sequence[Prompt], repeat: int) -> Iterator[tuple[Contender, Prompt]]:
    """A question goes to everybody before the next; another one is first each time."""
    asked = {c.name: set(first_of(questions, c.per_task)) for c in contenders}
    for number, question in enumerate(first_of(questions)):
        start = (number + repeat) % len(contenders)
        for contender in (*contenders[start:], *contenders[:start]):
            if question in asked[contender.name]:
                yield contender, question


def together(jobs: Sequence[tuple[Contender, Prompt]], some: Sequence[Contender]) -> list[tuple[list[Contender], Prompt]]:
    """The same jobs, but `some` answer a question that all of them are asked at the same time: when the first of them is."""
    asked: dict[Prompt, list[Contender]] = defaultdict(list)
    for contender, question in jobs:
        if contender in some:
            asked[question].append(contender)
    groups: list[tuple[list[Contender], Prompt]] = []
    for contender, question in jobs:
        if contender not in some or len(asked[question]) < len(some):
            groups.append(([contender], question))
        elif contender is asked[question][0]:
            groups.append((asked[question], question))
    return groups


def spare_questions(measured: Sequence[Prompt]) -> list[Prompt]:
    """The package's own questions, from the end of each task; those that are measured come last."""
    taken = {question.turns for question in measured}
    own = [question for of_task in prompts.load().values() for question in reversed(of_task)]
    return sorted(first_of(own), key=lambda question: question.turns in taken)


def fitting(questions: Sequence[Prompt], vocabulary: Vocabulary, context: int, max_tokens: int) -> tuple[list[Prompt], list[str]]:
    """Questions that fit into the context with all their turns, and the names of those that do not."""
    need = {q: sum(len(chat_tokens(vocabulary, turn)) + max_tokens for turn in q.turns) for q in questions}
    return [q for q in questions if need[q] <= context], [f"{q.task} {q.id}" for q in questions if need[q] > context]


def expected(spent: Mapping[str, Sequence[float]], names: Sequence[str]) -> float | None:
    """Seconds that a question to each of `names` will take, by what theirs took so far. None: nothing is known yet."""
    known = [seconds for times in spent.values() for seconds in times]
    if not known:
        return None
    mean = {name: sum(times) / len(times) for name, times in spent.items() if times}
    return sum(mean.get(name, sum(known) / len(known)) for name in names)


def time_left(seconds: float | None) -> str:
    return "" if seconds is None else f", {int(seconds) // 60}:{int(seconds) % 60:02d} left"
