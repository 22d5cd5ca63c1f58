"""What a draft is worth for a target: do they fit, how often does it guess right, what does it cost here, how fast would they be.

The target answers each prompt once, greedily. Every draft then reads those answers as they are and is asked at each token
for its guess (teacher forcing), and replays a few of them in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from duodecoding import backends, measure, models
from duodecoding.backends.base import Draft, Target
from duodecoding.backends.llamacpp import physical_cores
from duodecoding.bench.simulate import Study, record, setups, speedup
from duodecoding.costs import CostCurve, Profile
from duodecoding.drafters.bridge import BridgeDrafter
from duodecoding.drafters.growth import BestFirst
from duodecoding.llm import FEWEST_CORES, share_threads
from duodecoding.model_files import ModelFile
from duodecoding.prompts import Prompt
from duodecoding.text import difference
from duodecoding.types import EngineConfig, Mode, SamplingParams
from duodecoding.virtual import Recording

Progress = Callable[[str, float], None]  # what is being done, share done

HERE = "here"
TOPS = (1, 2, 4)  # guesses among which the target's token may be
NODES = (1, 2, 4, 8, 16, 32, 64)  # tokens in a pass that are measured
CONTEXT, REPEATS = 256, 3
WORTH_IT = 1.05  # a speed-up below this is nothing to speak of


@dataclass(frozen=True, slots=True)
class Worth:
    """What was found out about one draft."""

    draft: str
    differs: str = ""  # how its vocabulary differs from the target's: it guesses through text
    agreement: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # task -> "top1", "top2", "top4" -> share
    costs: Profile | None = None  # here
    speedups: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # profile -> task and "mean" -> speed-up
    turns: bool = False  # too few cores here for both at once
    threads: int = 0
    steps: float = 1.0  # of the draft for each token of the target

    @property
    def verdict(self) -> str:
        """In one sentence."""
        means = {name: by_task["mean"] for name, by_task in self.speedups.items()}
        parts = [f"{mean:.2f}× {'on this machine' if name == HERE else f'on {name}'}" for name, mean in means.items()]
        if HERE in means:
            how = ", taking turns" if self.turns else ""
            parts[0] += f" ({self.threads} draft thread{'s' if self.threads > 1 else ''}{how})"
            parts.append(_exceptions(self.speedups[HERE]))
        overall = sum(shares["top1"] for shares in self.agreement.values()) / max(1, len(self.agreement))
        through = f"through text ({self.steps:.1f} draft steps a token), " if self.differs else ""
        return "; ".join([f"{through}right {overall:.0%} of the time", *(part for part in parts if part)])

    def record(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "draft": self.draft,
            "compatible": not self.differs,
            "agreement": {task: {top: round(share, 4) for top, share in tops.items()} for task, tops in self.agreement.items()},
            "predicted": {name: round(by_task["mean"], 4) for name, by_task in self.speedups.items()},
        }


def _exceptions(by_task: Mapping[str, float]) -> str:
    poor = [task for task, speed in by_task.items() if task != "mean" and speed < WORTH_IT]
    if len(poor) == len(by_task) - 1:
        return "not worth it here"
    return f"not worth it here for {', '.join(poor)}" if poor else ""


# Agreement


Ranks = Callable[[Recording], list[int]]  # the place of each of an answer's tokens among the draft's guesses, 0 the best


def agreement(ranks: Ranks, recordings: Sequence[Recording], progress: Callable[[float], None]) -> dict[str, dict[str, float]]:
    """By task: how often the target's token is the draft's first guess, among its first two, its first four."""
    places: dict[str, list[int]] = {}
    for done, recording in enumerate(recordings):
        progress(done / len(recordings))
        places.setdefault(recording.task, []).extend(ranks(recording))
    return {
        task: {f"top{top}": sum(place < top for place in found) / len(found) for top in TOPS}
        for task, found in places.items()
        if found
    }


def ranks(draft: Draft, recording: Recording) -> list[int]:
    """With the target's vocabulary: all tokens in one go, as far as the draft's context goes."""
    text = [*recording.prompt, *recording.answer][: draft.context]
    at, found = len(recording.prompt), list[int]()
    if len(text) <= at:
        return found
    for rows in draft.score(text[:-1], at - 1):
        said = np.array(text[at : at + len(rows)])
        ids = np.arange(rows.shape[1]) if draft.token_ids is None else draft.token_ids
        place = np.searchsorted(ids, said).clip(max=len(ids) - 1)
        better = (rows > rows[np.arange(len(rows)), place][:, None]).sum(axis=1)
        found += np.where(ids[place] == said, better, len(ids)).tolist()  # a token it does not know comes last
        at += len(rows)
    return found


def bridged_ranks(drafter: BridgeDrafter, recording: Recording) -> list[int]:
    """Through text: token by token, with the guesses that a tree would get."""
    found = []
    drafter.open(recording.prompt, recording.params, BestFirst(1, branching=max(TOPS)))
    for token in recording.answer:
        tokens = drafter.next_tokens()
        found.append(tokens.index(token) if token in tokens else len(tokens) + max(TOPS))
        drafter.commit([token])
    return found


# All of it


def pairs(
    config: EngineConfig,
    drafts: Sequence[str],
    prompts: Mapping[str, Sequence[Prompt]],
    params: SamplingParams,
    profiles: Sequence[Profile],
    replayed: int,
    progress: Progress,
) -> tuple[list[Worth], list[str]]:
    """Every draft beside the target `config.model`. `replayed`: answers of each task that are replayed in virtual time. Also
    returns which prompts were too long."""
    file = models.resolve(config.model, offline=config.offline)
    files = [models.resolve(name, offline=config.offline) for name in drafts]
    differences = [_difference(file, draft) for draft in files]
    progress(f"loading {file.name}", 0.0)
    target = backends.load_target(file.path, config)
    try:
        recordings, skipped = record(target, prompts, params, progress)
        judge = _Judge(config, file, target, recordings, profiles, replayed, progress)
        return [judge(draft, differs) for draft, differs in zip(files, differences, strict=True)], skipped
    finally:
        target.close()


def _difference(target: ModelFile, draft: ModelFile) -> str:
    mine, theirs = backends.read_vocabulary(target.path), backends.read_vocabulary(draft.path)
    return difference(mine, theirs, target_name=target.name, draft_name=draft.name)


@dataclass(slots=True)
class _Judge:
    config: EngineConfig
    file: ModelFile
    target: Target
    recordings: Sequence[Recording]
    profiles: Sequence[Profile]
    replayed: int
    progress: Progress

    def __call__(self, file: ModelFile, differs: str) -> Worth:
        draft = backends.load_draft(file.path, self.config)
        try:
            agreed, steps = self._agreement(file, draft, through_text=bool(differs))
            costs = self._costs(file, draft)
        finally:
            draft.close()
        cores = physical_cores()
        turns = not backends.on_gpu(self.file.path, self.config) and cores < FEWEST_CORES
        threads = self.config.threads_draft or self.config.threads or cores
        worth = Worth(file.name, differs, agreed, replace(costs, name=HERE), {}, turns, threads, steps)
        return replace(worth, speedups=self._replay(file, worth)) if self.replayed else worth

    def _agreement(self, file: ModelFile, draft: Draft, *, through_text: bool) -> tuple[dict[str, dict[str, float]], float]:
        """By task, and the draft's steps for each token."""

        def tell(share: float) -> None:
            self.progress(f"{file.name} guesses", share)

        if not through_text:
            return agreement(partial(ranks, draft), self.recordings, tell), 1.0
        drafter = BridgeDrafter(draft, self.target.vocabulary)
        found = agreement(partial(bridged_ranks, drafter), self.recordings, tell)
        return found, drafter.steps / sum(len(recording.answer) for recording in self.recordings)

    def _costs(self, file: ModelFile, draft: Draft) -> Profile:
        """What `duo profile` kept of this pair, else a short measurement."""
        facts = measure.facts(share_threads(self.config), self.file.path, file.path, engine=self.target.engine)
        stored = measure.load(measure.key(facts))

        def tell(what: str, share: float) -> None:
            self.progress(f"{file.name}: {what}", share)

        return stored or measure.measure(self.target, draft, nodes=NODES, contexts=(CONTEXT,), repeats=REPEATS, progress=tell)

    def _replay(self, file: ModelFile, worth: Worth) -> dict[str, dict[str, float]]:
        """The pair in virtual time, here and elsewhere."""
        assert worth.costs is not None
        draft = backends.load_draft(file.path, self.config, exact=True)
        some = [r for task in dict.fromkeys(r.task for r in self.recordings) for r in self._of(task)[: self.replayed]]
        vocabulary = self.target.vocabulary
        study = Study(some, draft, lookup=True, vocabulary=vocabulary.size, bridge=vocabulary if worth.differs else None)
        found = {}
        try:
            for profile in (worth.costs, *self.profiles):
                setup = setups(Mode.DUO)[0]
                if worth.turns and profile is worth.costs:
                    setup = replace(setup, config=replace(setup.config, turns="on"))
                steps = CostCurve({w: s * worth.steps for w, s in profile.draft.points.items()})

                def tell(share: float, name: str = profile.name) -> None:
                    self.progress(f"{file.name} in virtual time, {name}", share)

                plain = study.replay(setups(Mode.OFF)[0], profile)
                found[profile.name] = speedup(study.replay(setup, profile.with_draft(steps), tell), plain)
        finally:
            draft.close()
        return found

    def _of(self, task: str) -> list[Recording]:
        return [recording for recording in self.recordings if recording.task == task]
