"""The benchmark itself: every mode and peer answers the same questions, in turns, in one process.

What makes it fair: a question goes to all before the next, and who is first rotates, so that a busy moment of the machine hits
everybody; every answer starts cold, in the target's memory and in the draft's; a repeat is a session of its own, because drafters
learn from what they have said. All modes share one target (on a CPU with a draft model beside it: one for each number of
threads). Each has a draft of its own: in this process where the two take turns, in a worker where they do not. Two modes that do
not have a worker can answer in turns, a round each: then nothing that takes longer than a round sets them apart.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from duodecoding import backends, measure, models
from duodecoding.backends.base import Target, Vocabulary
from duodecoding.bench.engines import Engine, SharedTarget, answer_in_turns, configured, crossed, gap, peak_memory, sweep
from duodecoding.bench.journal import Journal
from duodecoding.bench.metrics import Answer, Difference, by_question, compare
from duodecoding.bench.order import expected, first_of, schedule, spare_questions, time_left, together
from duodecoding.bench.peers import PEERS, Contender, Ground, Said
from duodecoding.bench.simulate import chat_tokens, draft_name, setups
from duodecoding.costs import Profile, from_record, to_record
from duodecoding.errors import DuoError
from duodecoding.llm import LLM, LoadTarget
from duodecoding.prompts import Prompt
from duodecoding.stream import OVERLAPPING
from duodecoding.trace import Timeline
from duodecoding.types import FREE_DRAFTS, EngineConfig, Mode, SamplingParams

Progress = Callable[[str, float], None]  # what is being done, share done

TUNED = (Mode.CHAIN, Mode.SERIAL)  # whose settings are searched
IN_TURNS = (Mode.OFF, Mode.DUO)
TUNE_TOKENS, WARM_TOKENS = 64, 24
READY_SECONDS = 120.0
NO_MODEL = (*FREE_DRAFTS, "none")  # drafts that are no model
NODES, CONTEXTS, REPEATS = (1, 2, 4, 8, 16, 32, 64), (128, 1024), 3  # of the measured costs


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked, of whom, and how often."""

    config: EngineConfig
    questions: Sequence[Prompt]
    params: SamplingParams
    modes: Sequence[Mode] = tuple(Mode)  # `off` takes part in any case
    peers: Sequence[str] = ()
    repeats: int = 1
    tune: int = 0  # questions to find the best settings of chain and serial with; 0: they stay as they are
    peer_per_task: int = 0  # questions of each task that peers get; 0: all
    settings: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # of modes, found elsewhere
    mode_per_task: Mapping[str, int] = field(default_factory=dict)  # questions of each task that some modes get, the others get all
    once: frozenset[str] = frozenset()  # modes that have one session, however many the others have
    in_turns: bool = False  # off and duo answer in turns, a round each, if nobody drafts beside them

    def per_task(self, mode: Mode) -> int:
        """Questions of each task that a mode gets; 0: all."""
        return self.mode_per_task.get(mode, 0)

    @property
    def all_modes(self) -> list[Mode]:
        return list(dict.fromkeys((Mode.OFF, *self.modes)))


class Run:
    """A plan under way. `stop` may be called from another thread; what is in the journal by then stays."""

    def __init__(
        self, plan: Plan, journal: Journal, progress: Progress, *, load: LoadTarget | None = None, deadline: float = math.inf
    ) -> None:
        """`load`: where the target comes from instead of its file. `deadline`: nothing begins after it (monotonic clock)."""
        self.plan, self.journal, self._progress, self._deadline = plan, journal, progress, deadline
        self.target_file, self.draft_file = files(plan.config)
        self._load = SharedTarget(load, apart=IN_TURNS if plan.in_turns else ())
        self._current: Sequence[Contender] = ()
        self._traces: list[tuple[float, Timeline]] = []  # of duo: tokens per round, what happened
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True
        for contender in self._current:
            contender.abort()

    @property
    def over(self) -> bool:
        return self.stopped or time.monotonic() >= self._deadline

    @property
    def complete(self) -> bool:
        """Is there nothing left to ask?"""
        modes = [(str(mode), self.plan.per_task(mode)) for mode in self.plan.all_modes]
        peers = [(name, self.plan.peer_per_task) for name in self._peers()]
        return not any(self._left(*who, repeat) for who in modes + peers for repeat in range(self.plan.repeats))

    def go(self) -> None:
        """Ask everything that is not in the journal yet."""
        if self.complete:
            return
        with ExitStack() as undo:
            engines = self._engines(undo)
            self._learn_costs(engines)
            self._tune(engines)
            plain = engines[Mode.OFF].llm
            if plain.config.gpu_layers != 0:
                sweep(plain.target, self.plan.params, NODES)
            rivals = self._rivals(undo, plain.target)
            for repeat in range(self.plan.repeats):
                engines = self._anew(engines, undo) if repeat else engines
                self._play([*engines.values(), *rivals], plain.vocabulary, repeat)
            self.journal.note("memory", **peak_memory(list(engines.values())))
            self._explain(plain)

    def _peers(self) -> list[str]:
        gone = {note["peer"] for note in self.journal.of("skipped")}
        return [name for name in self.plan.peers if name not in gone]

    # Getting ready

    def _engines(self, undo: ExitStack) -> dict[Mode, Engine]:
        """An engine for each mode, warm, with what is known of costs and settings."""
        tuned = {note["mode"]: note["chosen"] for note in self.journal.of("tuned")}
        found: dict[Mode, Engine] = {}
        for mode in self.plan.all_modes:
            self._progress(f"loading for mode {mode}", 0.0)
            settings = self.plan.settings.get(mode) or tuned.get(mode)
            llm = LLM.from_config(configured(self.plan.config, mode, settings), load_target=self._load)
            undo.callback(llm.close)
            found[mode] = Engine(llm, self.plan.per_task(mode))
            if llm.drafters.remote is not None:
                llm.drafters.remote.wait_ready(READY_SECONDS)
            self._warm(found[mode], llm.vocabulary)
        self._use_costs(found)
        return found

    def _anew(self, engines: Mapping[Mode, Engine], undo: ExitStack) -> dict[Mode, Engine]:
        for engine in engines.values():
            engine.llm.drafters.close()  # the target is shared, and stays
        return self._engines(undo)

    def _warm(self, contender: Contender, vocabulary: Vocabulary) -> None:
        question = spare_questions(self.plan.questions)[0]
        self._ask(
            [contender], replace(question, turns=question.turns[:1]), replace(self.plan.params, max_tokens=WARM_TOKENS), vocabulary
        )

    def _use_costs(self, engines: Mapping[Mode, Engine]) -> Profile | None:
        """Let all plan with the costs in the journal, if there are any."""
        known = self.journal.of("profile")
        costs = from_record(known[-1], where=str(self.journal.path)) if known else None
        for mode, engine in engines.items():
            if costs is not None and mode is not Mode.OFF:
                engine.llm.use_costs(costs)
        return costs

    def _learn_costs(self, engines: Mapping[Mode, Engine]) -> None:
        """Measure what passes and draft steps cost here: for the planner, and to compare with virtual time."""
        if self.journal.of("profile") or self.draft_file is None or self.over:
            return
        llm = next((e.llm for e in engines.values() if e.llm.config.mode in OVERLAPPING), engines[Mode.OFF].llm)
        about = f"{self.target_file.stem} and {self.draft_file.stem}, measured at the start of a benchmark"
        draft = backends.load_draft(self.draft_file, llm.config)
        try:
            costs = measure.measure(
                llm.target, draft, about=about, nodes=NODES, contexts=CONTEXTS, repeats=REPEATS, params=self.plan.params,
                progress=self._progress,
            )  # fmt: skip
        finally:
            draft.close()
        self.journal.note("profile", **to_record(costs))
        self._use_costs(engines)

    def _tune(self, engines: dict[Mode, Engine]) -> None:
        """Chain and serial at their best, found on questions that are not measured."""
        known = {note["mode"] for note in self.journal.of("tuned")} | set(self.plan.settings)
        for mode in TUNED:
            if self.plan.tune and mode in engines and mode not in known:
                engines[mode] = self._tuned(engines[mode].llm, mode)

    def _tuned(self, base: LLM, mode: Mode) -> Engine:
        choices = {"×".join(map(str, setup.shown.values())): dict(setup.shown) for setup in setups(mode)}
        tried = {name: Engine(base.with_settings(**settings)) for name, settings in choices.items()}
        questions = spare_questions(self.plan.questions)[: self.plan.tune]
        params = replace(self.plan.params, max_tokens=min(TUNE_TOKENS, self.plan.params.max_tokens))
        said: dict[str, list[Answer]] = defaultdict(list)
        for done, question in enumerate(questions):
            for name, engine in tried.items():
                self._progress(f"the best settings of {mode}: {name}", done / len(questions))
                said[name] += (None if self.over else self._ask([engine], question, params, base.vocabulary)) or []
        speeds = {name: sum(by_question(found).values()) / len(questions) for name, found in said.items() if found}
        if self.over or not speeds:
            return Engine(base, self.plan.per_task(mode))
        best = max(speeds, key=lambda name: speeds[name])
        tried[best].per_task = self.plan.per_task(mode)
        asked = [f"{question.task} {question.id}" for question in questions]
        self.journal.note("tuned", mode=str(mode), chosen=choices[best], tokens_per_second=speeds, questions=asked)
        return tried[best]

    def _rivals(self, undo: ExitStack, target: Target) -> list[Contender]:
        ground = Ground(target, self.target_file, self.draft_file, self.plan.config, self.plan.peer_per_task)
        found: list[Contender] = []
        for name in self._peers():
            if self.over or not any(self._left(name, ground.per_task, repeat) for repeat in range(self.plan.repeats)):
                continue
            self._progress(f"preparing {name}", 0.0)
            try:
                peer = PEERS[name](ground)
                undo.callback(peer.close)
                self._warm(peer, target.vocabulary)
                found.append(peer)
            except Exception as error:  # whatever somebody else's program raises must not end the benchmark
                self._skip(name, error)
        return found

    def _skip(self, name: str, error: Exception) -> None:
        why = error.why if isinstance(error, DuoError) and error.why else f"{type(error).__name__}: {error}"
        self.journal.note("skipped", peer=name, why=why.partition("\n")[0])

    # Asking

    def _left(self, name: str, per_task: int, repeat: int) -> list[Prompt]:
        """Questions that have no answer yet."""
        if repeat and name in self.plan.once:
            return []
        done = {a.question for a in self.journal.answers if a.who == name and a.repeat == repeat}
        return [question for question in first_of(self.plan.questions, per_task) if (question.task, question.id) not in done]

    def _play(self, contenders: Sequence[Contender], vocabulary: Vocabulary, repeat: int) -> None:
        left = {c.name: set(self._left(c.name, c.per_task, repeat)) for c in contenders}
        jobs = [(c, q) for c, q in schedule(contenders, self.plan.questions, repeat) if q in left[c.name]]
        spent: dict[str, list[float]] = defaultdict(list)
        in_turns = self._in_turns(contenders)
        other_way = crossed(in_turns) if in_turns else []
        groups = together(jobs, in_turns)
        for done, (asked, question) in enumerate(groups):
            across = len(asked) > 1 and (self.plan.questions.index(question) + repeat) % 2
            some: Sequence[Contender] = other_way if across else in_turns if len(asked) > 1 else asked
            if self.over:
                return
            if not isinstance(some[0], Engine) and some[0].name not in self._peers():
                continue  # it has failed meanwhile
            rest = time_left(expected(spent, [_names(who) for who, _ in groups[done:]]))
            self._progress(f"{_names(some)}: {question.task}{rest}", done / len(groups))
            start = time.monotonic()
            try:
                self.journal.add(self._ask(some, question, self.plan.params, vocabulary, repeat))
            except Exception as error:
                if isinstance(some[0], Engine):
                    raise
                self._skip(some[0].name, error)
            spent[_names(some)].append(time.monotonic() - start)
            for contender in some:
                if contender.name == Mode.DUO:
                    self._keep_trace(contender)

    def _in_turns(self, contenders: Sequence[Contender]) -> list[Engine]:
        """Those that answer in turns; none, if one of them drafts beside its target or has not got one of its own."""
        some = [c for c in contenders if isinstance(c, Engine) and c.name in IN_TURNS and c.llm.drafters.remote is None]
        apart = len({id(engine.llm.target) for engine in some}) == len(some) == 2
        return some if self.plan.in_turns and apart else []

    def _ask(
        self, contenders: Sequence[Contender], question: Prompt, params: SamplingParams, vocabulary: Vocabulary, repeat: int = 0
    ) -> list[Answer]:
        """All turns of a question, each with the answers before it; empty: it was stopped."""
        said: list[Answer] = []
        texts: list[list[str]] = [[] for _ in contenders]
        self._current = contenders
        for turn, text in enumerate(question.turns):
            prompts = [chat_tokens(vocabulary, *before, text) for before in texts]
            found = _answers(contenders, prompts, params) if not self.stopped else []
            if self.stopped:
                return []
            for contender, prompt, before, answer in zip(contenders, prompts, texts, found, strict=True):
                said.append(Answer(contender.name, question.task, question.id, turn, repeat, len(prompt), **answer))
                before += [text, text_of(vocabulary, answer["tokens"])]
        return said

    def _keep_trace(self, contender: Contender) -> None:
        last = next((answer for answer in reversed(self.journal.answers) if answer.who == contender.name), None)
        if isinstance(contender, Engine) and last is not None:
            self._traces.append((len(last.tokens) / max(1, last.rounds), contender.timeline))

    @property
    def trace(self) -> Timeline | None:
        """Of the duo answer with the median number of tokens per round in this session."""
        ordered = sorted(self._traces, key=lambda pair: pair[0])
        return ordered[len(ordered) // 2][1] if ordered else None

    # Afterwards

    def _explain(self, plain: LLM) -> None:
        """The gap of the two best logits at every first difference of a mode."""
        known = {tuple(note[name] for name in ("who", "task", "id", "turn", "repeat")) for note in self.journal.of("gap")}
        baseline = [a for a in self.journal.answers if a.who == Mode.OFF]
        for mode in self.plan.all_modes:
            for difference in compare([a for a in self.journal.answers if a.who == mode], baseline)[1]:
                if (difference.who, *difference.place) not in known and not self.stopped:
                    self.journal.note("gap", **asdict(self._explained(plain, difference, baseline)))

    def _explained(self, plain: LLM, difference: Difference, baseline: Sequence[Answer]) -> Difference:
        task, id, turn, repeat = difference.place
        question = next(q for q in self.plan.questions if (q.task, q.id) == (task, id))
        said = {a.turn: a.tokens for a in baseline if (a.task, a.id, a.repeat) == (task, id, repeat)}
        texts = [question.turns[0]]
        for before in range(turn):
            texts += [text_of(plain.vocabulary, said[before]), question.turns[before + 1]]
        prefix = chat_tokens(plain.vocabulary, *texts) + said[turn][: difference.at]
        value, best = gap(plain.target, prefix, self.plan.params)
        return replace(difference, gap=value, two_best={difference.expected, difference.found} == set(best))


def _answers(contenders: Sequence[Contender], prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Said]:
    """One of each. Several are engines that can answer in turns."""
    if len(contenders) == 1:
        return [contenders[0].answer(prompts[0], params)]
    return answer_in_turns([c for c in contenders if isinstance(c, Engine)], prompts, params)


def _names(contenders: Sequence[Contender]) -> str:
    return " and ".join(contender.name for contender in contenders)


def files(config: EngineConfig) -> tuple[Path, Path | None]:
    """Of the target, and of the draft model if there is one."""
    target, name = models.resolve(config.model, offline=config.offline), draft_name(config)
    return target.path, None if name in NO_MODEL else models.resolve(name, offline=config.offline).path


def text_of(vocabulary: Vocabulary, tokens: Sequence[int]) -> str:
    return b"".join(vocabulary.piece(token) for token in tokens if token not in vocabulary.end_tokens).decode("utf-8", "replace")


def _gpu(target: Path, config: EngineConfig) -> str:
    if not backends.uses_torch(target, config) or not backends.on_gpu(target, config):
        return ""
    import torch

    return str(torch.cuda.get_device_name())


def facts(plan: Plan) -> dict[str, Any]:
    """All that answers and times depend on: two runs may share a journal only if these are the same."""
    private = ("model", "draft", "offline", "draft_secret", "lookup_store")  # names of files are told by what is in them
    target, draft = files(plan.config)
    return {
        **measure.facts(plan.config, target, draft, device=_gpu(target, plan.config)),
        "settings": {name: value for name, value in asdict(plan.config).items() if name not in private},
        "draft_name": Path(draft_name(plan.config)).name,
        "modes": [str(mode) for mode in plan.all_modes],
        "peers": list(plan.peers),
        "peer_per_task": plan.peer_per_task,
        **({"mode_per_task": dict(plan.mode_per_task)} if plan.mode_per_task else {}),
        **({"in_turns": True} if plan.in_turns else {}),
        "questions": [f"{question.task} {question.id}" for question in plan.questions],
        "sampling": asdict(plan.params),
        "repeats": plan.repeats,
        "tune": plan.tune,
        "chosen": {mode: dict(settings) for mode, settings in plan.settings.items()},
    }
