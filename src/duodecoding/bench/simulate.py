"""Every mode in virtual time: what a pair would do on a machine that is known by its cost curves.

The target answers each prompt once, in mode `off`. Every mode then replays those answers on each profile, as one session: what
a drafter has learnt and the off-switch live on from prompt to prompt. Guesses of the draft are remembered by path, so that the
first mode pays for its models and the others hardly do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from duodecoding import backends, models
from duodecoding.backends.base import Draft, Target, Vocabulary
from duodecoding.costs import CostCurve, Profile
from duodecoding.drafters.bridge import BridgeDrafter
from duodecoding.drafters.growth import BestFirst, Growth, LikeliestPath
from duodecoding.drafters.lookup import LookupDrafter
from duodecoding.drafters.model import ModelDrafter
from duodecoding.drafters.recycling import RecyclingDrafter
from duodecoding.drafting import Drafters
from duodecoding.errors import UsageError
from duodecoding.llm import LLM
from duodecoding.planner import Calibration, Switch, Uncalibrated
from duodecoding.prompts import Prompt
from duodecoding.text import check_pair, render_chat
from duodecoding.types import FREE_DRAFTS, EngineConfig, Mode, SamplingParams
from duodecoding.virtual import FREE, Memory, RecordedDrafter, Recording, Simulation, Tally

Progress = Callable[[str, float], None]  # what is being done, share done
Tallies = Mapping[str, Sequence[Tally]]  # by task

PEARL = "pearl"  # lockstep with one chain
MODES = (*(str(mode) for mode in Mode), FREE)
EXTRA_MODES = (PEARL,)
NO_COST = CostCurve({1: 1e-12})
FREE_STEPS, FREE_WIDTH = 64, 16  # more than a pass can use
CHAIN_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10)
SERIAL_SHAPES = tuple((steps, width) for steps in (2, 3, 4, 5, 6, 8) for width in (2, 4))
LOCKSTEP_CHAINS = 4
DUO = EngineConfig(mode=Mode.DUO)  # as shipped


@dataclass(frozen=True, slots=True)
class Setup:
    """A mode with its settings, and what was taken out of it."""

    config: EngineConfig
    shown: Mapping[str, int] = field(default_factory=dict)  # settings that the report names
    lookup: bool = False  # guesses from text already seen, beside the draft model
    recycling: bool = False  # and from what was said before
    free: bool = False  # drafting costs nothing
    waits: bool = True
    calibrates: bool = True
    hedges: bool = True

    def growth(self) -> Growth | None:
        """None: the mode's own."""
        if not self.hedges:
            return LikeliestPath(branching=self.config.branching)
        if self.free:
            return BestFirst(FREE_WIDTH, branching=self.config.branching, cover=self.config.max_nodes)
        return None


def setups(mode: str) -> list[Setup]:
    """The settings among which a mode's best is searched. The published modes draft with the model alone, as published."""
    chain = EngineConfig(mode=Mode.CHAIN)
    serial = EngineConfig(mode=Mode.SERIAL, max_nodes=DUO.max_nodes)
    lockstep = EngineConfig(mode=Mode.LOCKSTEP, draft_length=6, max_nodes=DUO.max_nodes)
    known = {
        str(Mode.OFF): [Setup(EngineConfig(mode=Mode.OFF))],
        str(Mode.CHAIN): [Setup(replace(chain, draft_length=n), {"draft_length": n}) for n in CHAIN_LENGTHS],
        str(Mode.SERIAL): [
            Setup(replace(serial, draft_length=steps, draft_width=width), {"draft_length": steps, "draft_width": width})
            for steps, width in SERIAL_SHAPES
        ],
        str(Mode.LOCKSTEP): [Setup(replace(lockstep, draft_width=LOCKSTEP_CHAINS), {"draft_width": LOCKSTEP_CHAINS})],
        PEARL: [Setup(replace(lockstep, draft_width=1), {"draft_width": 1})],
        str(Mode.DUO): [Setup(DUO, {"draft_width": DUO.draft_width}, lookup=True, recycling=True)],
        FREE: [Setup(replace(DUO, mode=Mode.SERIAL, draft_length=FREE_STEPS), lookup=True, recycling=True, free=True)],
    }
    if mode not in known:
        raise UsageError(f"unknown mode {mode!r}", f"the modes are {', '.join(known)}")
    return known[mode]


def ablations() -> dict[str, list[Setup]]:
    """Mode duo with one part taken out at a time."""
    duo = setups(Mode.DUO)[0]
    return {
        "duo, no waiting": [replace(duo, waits=False)],
        "duo, no calibration": [replace(duo, calibrates=False)],
        "duo, width 1": [replace(duo, config=replace(DUO, draft_width=1), shown={"draft_width": 1})],
        "duo, no hedging": [replace(duo, hedges=False)],
        "duo, no lookup": [replace(duo, lookup=False)],
        "duo, no recycling": [replace(duo, recycling=False)],
        "duo, model only": [replace(duo, lookup=False, recycling=False)],
    }


# What was said


def record(
    target: Target, prompts: Mapping[str, Sequence[Prompt]], params: SamplingParams, progress: Progress
) -> tuple[list[Recording], list[str]]:
    """The target's answers to the first turns, and the ids of prompts too long for its context."""
    llm = LLM.of(target, Drafters(), EngineConfig(mode=Mode.OFF))
    recordings: list[Recording] = []
    skipped: list[str] = []
    every = [prompt for of_task in prompts.values() for prompt in of_task]
    for done, prompt in enumerate(every):
        progress(f"the target answers: {prompt.task}", done / len(every))
        ids = chat_tokens(target.vocabulary, prompt.turns[0])
        if len(ids) + params.max_tokens > target.context:
            skipped.append(f"{prompt.task} {prompt.id}")
            continue
        recordings.append(Recording(prompt.task, tuple(ids), tuple(llm.generate(ids, params).token_ids), params))
    if not recordings:
        raise UsageError("every prompt is too long", f"the context has {target.context} tokens", "Raise --ctx-size.")
    return recordings, skipped


def chat_tokens(vocabulary: Vocabulary, *texts: str) -> list[int]:
    """What a user says, and what was answered before it in turn, as the model's chat template puts it."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    chat = render_chat(vocabulary.chat_template, messages, bos=vocabulary.bos_text, eos=vocabulary.eos_text)
    has_bos = bool(vocabulary.bos_text) and chat.startswith(vocabulary.bos_text)
    return vocabulary.tokenize(chat, special=True, bos=not has_bos)


# What it would have cost


@dataclass(slots=True)
class Study:
    """Recorded answers and who guesses them. `draft` None: in every mode the free guesses alone, or nobody."""

    recordings: Sequence[Recording]
    draft: Draft | None
    lookup: bool  # False: no free guesses in any mode
    vocabulary: int  # the target's
    recycling: bool = True  # beside lookup
    memories: list[Memory] = field(default_factory=list)
    bridge: Vocabulary | None = None  # the target's, where it is not the draft's

    def __post_init__(self) -> None:
        self.memories = [{} for _ in self.recordings]

    def replay(
        self, setup: Setup, profile: Profile, progress: Callable[[float], None] = lambda share: None
    ) -> dict[str, list[Tally]]:
        """All answers in one session."""
        found: dict[str, list[Tally]] = {}
        for done, simulation in enumerate(self.simulations(setup, profile)):
            progress(done / len(self.recordings))
            found.setdefault(simulation.recording.task, []).append(simulation.run())
        return found

    def simulations(self, setup: Setup, profile: Profile) -> Iterator[Simulation]:
        """The answers of a session, to be run in this order."""
        calibration = Calibration() if setup.calibrates else Uncalibrated()
        switch, free_switch, free = Switch(), Switch(), self._free(setup)
        if setup.free:
            profile = replace(profile.with_draft(NO_COST), latency=0.0, draft_prompt=0.0)
        for recording, memory in zip(self.recordings, self.memories, strict=True):
            drafter = None
            if self.draft is not None and setup.config.mode is not Mode.OFF:
                drafter = self._drafter(self.draft, recording, memory)
                drafter.calibration = calibration
            yield Simulation(
                recording,
                profile,
                setup.config,
                drafter=drafter,
                free=free,
                switch=switch,
                free_switch=free_switch,
                growth=setup.growth(),
                waits=setup.waits,
            )

    def _drafter(self, draft: Draft, recording: Recording, memory: Memory) -> ModelDrafter:
        if self.bridge is not None:
            return BridgeDrafter(draft, self.bridge)
        return RecordedDrafter(draft, recording, memory, vocab_limit=self.vocabulary)

    def _free(self, setup: Setup) -> Drafters:
        """Who guesses without a model, through a whole session."""
        alone = self.draft is None
        lookup = LookupDrafter() if self.lookup and (setup.lookup or alone) else None
        recycles = self.lookup and self.recycling and (setup.recycling or alone)
        recycling = RecyclingDrafter(noisy=self.bridge is None) if recycles else None
        records = [*([lookup.record] if lookup else []), *(recycling.records if recycling else [])]
        for record in records if not setup.calibrates else []:
            record.freeze()
        return Drafters(lookup=lookup, recycling=recycling)


def speedup(tallies: Tallies, plain: Tallies) -> dict[str, float]:
    """By task: mean seconds per token of plain decoding over those of a mode, prompts included; then the mean over tasks.

    Every answer counts the same, however long it is.
    """
    found = {task: _pace(plain[task]) / _pace(tallies[task]) for task in tallies}
    return found | {"mean": sum(found.values()) / len(found)}


def _pace(tallies: Sequence[Tally]) -> float:
    return sum(tally.seconds / tally.tokens for tally in tallies)


def summary(setup: Setup, tallies: Tallies, plain: Tallies) -> dict[str, Any]:
    """A mode in numbers. Idle shares are of all the time that the answers took."""
    every = [tally for of_task in tallies.values() for tally in of_task]
    seconds = sum(tally.seconds for tally in every)
    drafted = sum(tally.draft_busy for tally in every)
    reading = sum(tally.draft_reading for tally in every)
    return {
        "speedup": {name: round(value, 4) for name, value in speedup(tallies, plain).items()},
        "tokens_per_round": round(sum(tally.tokens for tally in every) / sum(tally.rounds for tally in every), 4),
        "target_idle": round(max(0.0, 1 - sum(tally.target_busy for tally in every) / seconds), 4),
        "draft_idle": round(max(0.0, 1 - (drafted + reading) / seconds), 4),
        "hidden_draft_share": round(sum(tally.hidden for tally in every) / drafted, 4) if drafted else 0.0,
        "ttft_seconds": round(sum(tally.first_token for tally in every) / len(every), 6),
        "settings": dict(setup.shown),
    }


def simulate(study: Study, profile: Profile, modes: Sequence[str], progress: Progress, *, ablate: bool = False) -> dict[str, Any]:
    """Every mode at its best settings on one profile."""
    rows = {mode: setups(mode) for mode in modes if mode != FREE} | (ablations() if ablate else {})
    rows |= {mode: setups(mode) for mode in modes if mode == FREE}  # last: what all of them are measured against
    plain = study.replay(setups(Mode.OFF)[0], profile)
    total, done = sum(len(candidates) for candidates in rows.values()), 0
    found: dict[str, Any] = {}
    for name, candidates in rows.items():
        results = []
        for setup in candidates:

            def tell(share: float, name: str = name, done: int = done) -> None:
                progress(f"{profile.name}: {name}", (done + share) / total)

            results.append(summary(setup, study.replay(setup, profile, tell), plain))
            done += 1
        found[name] = max(results, key=lambda result: float(result["speedup"]["mean"]))
    return {"profile": profile.name, "measured": profile.measured, "modes": found}


# Models


def draft_name(config: EngineConfig) -> str:
    """A model's name, "lookup", "free" or "none"."""
    return (models.default_draft(config.model) or "free") if config.draft == "auto" else config.draft


def load_study(
    config: EngineConfig, prompts: Mapping[str, Sequence[Prompt]], params: SamplingParams, progress: Progress
) -> tuple[Study, list[str]]:
    """Let the target answer, then load the draft that will guess. Also returns which prompts were too long.

    Both run on llama.cpp if nothing else is asked for: tables stay what they are, whichever engine is faster."""
    file = models.resolve(config.model, offline=config.offline)
    name = draft_name(config)
    draft = models.resolve(name, offline=config.offline) if name not in (*FREE_DRAFTS, "none") else None
    progress(f"loading {file.name}", 0.0)
    target = backends.load_target(file.path, replace(config, backend="llamacpp") if config.backend == "auto" else config)
    try:
        if draft is not None:
            check_pair(target.vocabulary, backends.read_vocabulary(draft.path), target_name=file.name, draft_name=draft.name)
        recordings, skipped = record(target, prompts, params, progress)
        size = target.vocabulary.size
    finally:
        target.close()
    guesses = backends.load_draft(draft.path, config, exact=True) if draft is not None else None
    return Study(recordings, guesses, name != "none", size, recycling=name != "lookup"), skipped
