"""Virtual time: real models, real tokens, an imagined clock.

The same core, planner and drafter as in real time, under a discrete-event driver: a target pass costs `verify(n)`, a draft step
`draft_step(w)`, both from a hardware profile. The target's answer does not depend on mode or timing (docs/design.md), so it is
generated once and then replayed; the draft's guesses depend on the tokens before them alone, so they are computed once per path.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path

from duodecoding.backends.base import Draft, Leaf
from duodecoding.between import LEAST_READ, READING_PASSES
from duodecoding.core import Choose, DuoCore, Verify, Wait, walk
from duodecoding.costs import CostCurve, Profile, from_record
from duodecoding.drafters.growth import BestFirst, Chains, Growth
from duodecoding.drafters.model import ModelDrafter
from duodecoding.drafting import LEAF_FLOOR, Drafters, guess_for_free, model_guessed, recycle
from duodecoding.errors import UsageError
from duodecoding.planner import DraftClock, Outlook, Switch, tokens_unread
from duodecoding.sampling import Choice, Guess, Sampler
from duodecoding.trace import Did, Lane, Timeline
from duodecoding.tree import ROOT, Node, PassNode, Proposal
from duodecoding.types import EngineConfig, Mode, SamplingParams

BRANCHING = 8  # guesses recorded per path
ROOM = 256  # nodes kept expanded: as many as by our own engine, whose speed profiles have
INTERRUPT = 5e-5  # seconds to break off a draft step
WAIT_SLACK = 1.5  # of the expected time, then go
FREE = "free"  # the limit: same draft, drafting costs nothing


def profile_names() -> list[str]:
    return sorted(
        p.name.removesuffix(".json") for p in resources.files("duodecoding.profiles").iterdir() if p.name.endswith(".json")
    )


def load_profile(name: str) -> Profile:
    """A shipped profile by name, or a JSON file by path."""
    shipped = resources.files("duodecoding.profiles") / f"{name}.json"
    path = shipped if shipped.is_file() else Path(name)
    if not path.is_file():
        raise UsageError(f"no profile {name!r}", f"there are {', '.join(profile_names())}", "Or give a file made by `duo profile`.")
    try:
        return from_record(json.loads(path.read_text("utf-8")), where=name)
    except json.JSONDecodeError as error:
        raise UsageError(f"{name} is not a profile", str(error)) from error


@dataclass(frozen=True, slots=True)
class Recording:
    """One answer of the target, to be replayed."""

    task: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    params: SamplingParams

    def choose(self, position: int, guesses: Sequence[PassNode]) -> Choose:
        """The target in a pass whose root is at `position`. Right along the accepted path, the only place it is asked."""
        depth = [0] * len(guesses)
        for i, guess in enumerate(guesses):
            depth[i] = 1 if guess.parent == ROOT else depth[guess.parent] + 1
        first = position + 1 - len(self.prompt)
        return lambda i: Choice(self.answer[first + (0 if i == ROOT else depth[i])], 0.0)


Memory = dict[tuple[int, ...], list[Guess]]  # of one recording: tokens left out, tokens of its text to follow, others -> guesses


class RecordedDrafter(ModelDrafter):
    """A drafter that asks its model once per path and remembers, across modes and profiles.

    The model reads each path as plain text, never as a part of a tree. That takes longer, but where a token lies in a KV cache
    moves its logits a little, and what is remembered must not depend on who asked first.
    """

    def __init__(self, draft: Draft, recording: Recording, memory: Memory, *, vocab_limit: int = 0) -> None:
        super().__init__(draft, vocab_limit=vocab_limit)
        self._recording, self._memory, self._room = recording, memory, ROOM
        self._text = [*recording.prompt, *recording.answer]

    def _start(self, _prompt: Sequence[int], unread: int) -> None:
        self._unread = unread

    def _guesses(self, leaves: Sequence[Node], _floors: Sequence[float]) -> list[list[Guess]]:
        places = [self._place(node) for node in leaves]
        for place in sorted(set(places) - self._memory.keys()):  # neighbours one after the other share most of the cache
            self._memory[place] = self._read(place)
        return [self._memory[place] for place in places]

    def _place(self, node: Node) -> tuple[int, ...]:
        """A path's name in the memory: where the model begins, how far it follows the recorded text, then its own tokens."""
        path = node.path(self._tree.root)
        begin = len(self._tree.tokens)  # committed, so they are those of the recording
        same = next((i for i, token in enumerate(path) if self._text[begin + i : begin + i + 1] != [token]), len(path))
        return (self._unread, begin + same, *path[same:])

    def _read(self, place: tuple[int, ...]) -> list[Guess]:
        text = [*self._text[: place[1]], *place[2:]]
        self._draft.open(text, place[0])
        row = self._draft.expand([Leaf(1, None, text[-1], len(text) - 1)])[0]
        sampler = Sampler(self._recording.params, self._recording.prompt, self._draft.vocabulary.size)
        sampler.commit(text[len(self._recording.prompt) :])
        guesses = sampler.guesses(row, len(text), BRANCHING, ids=self._draft.token_ids)
        return [guess for guess in guesses if guess.token < self._vocab_limit]

    def _forget(self, tokens: Sequence[int], path: Sequence[int], alive: Sequence[int]) -> None:
        pass


@dataclass(slots=True)
class Tally:
    """What one simulated answer cost."""

    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0
    target_busy: float = 0.0
    draft_busy: float = 0.0  # steps
    draft_reading: float = 0.0  # its prompt
    hidden: float = 0.0  # draft steps under a target pass
    wait: float = 0.0
    first_token: float = 0.0


class DraftActor:
    """The draft worker on the imagined clock. Commits reach it between steps, a message's latency after they were sent."""

    def __init__(self, drafter: ModelDrafter, profile: Profile, ready: float, unread: int = 0) -> None:
        """`unread`: tokens at the prompt's beginning that it has left out."""
        self._drafter, self._profile, self._unread = drafter, profile, unread
        self._now = ready  # when it can begin its next step
        self._commits: deque[tuple[float, Sequence[int], bool]] = deque()
        self._growing = True
        self._running: list[Node] = []  # leaves of the step under way
        self._arrivals: deque[tuple[float, list[Proposal], list[int]]] = deque()  # at the target's side: when, guesses, begun
        self.spans: list[tuple[float, float, int]] = []  # begin, end, leaves of each step

    def commit(self, now: float, tokens: Sequence[int], *, grow: bool, interrupt: Sequence[int]) -> None:
        """`interrupt`: leaves that the target's side knows to be dead; a step on exactly these is broken off."""
        heard = now + self._profile.latency
        self._commits.append((heard, tokens, grow))
        if interrupt and list(interrupt) == [leaf.key for leaf in self._running] and self._now > heard:
            begin, _, width = self.spans.pop()
            self._now = max(begin, heard) + INTERRUPT
            self.spans.append((begin, self._now, width))
            self._running = []

    def advance(self, until: float) -> None:
        """End and begin every step that does so by `until`."""
        while self._now <= until:
            grown = self._drafter.grow(self._running) if self._running else []
            while self._commits and self._commits[0][0] <= self._now:
                _, tokens, self._growing = self._commits.popleft()
                self._drafter.commit(tokens)
            self._running = self._drafter.next_leaves() if self._growing else []
            if grown or self._running:
                self._arrivals.append((self._now + self._profile.latency, grown, [leaf.key for leaf in self._running]))
            if self._running:
                begin, self._now = self._now, self._now + self._cost()
                self.spans.append((begin, self._now, len(self._running)))
            elif self._commits:
                self._now = self._commits[0][0]
            else:
                return  # idle; a commit will give it a time to go on from

    def _cost(self) -> float:
        return self._profile.draft_cost(len(self._running), self._running[0].position - self._unread)

    def arrived(self, now: float) -> list[tuple[float, list[Proposal], list[int]]]:
        found = []
        while self._arrivals and self._arrivals[0][0] <= now:
            found.append(self._arrivals.popleft())
        return found

    def next_arrival(self, until: float) -> float | None:
        """When the next guesses come, if that is by `until`."""
        self.advance(until)
        return self._arrivals[0][0] if self._arrivals and self._arrivals[0][0] <= until else None


@dataclass(slots=True)
class Simulation:
    """One answer in one mode on one profile."""

    recording: Recording
    profile: Profile
    config: EngineConfig
    drafter: ModelDrafter | None = None
    free: Drafters = field(default_factory=Drafters)  # that need no model
    switch: Switch = field(default_factory=Switch)
    free_switch: Switch = field(default_factory=Switch)
    now: float = 0.0
    tally: Tally = field(default_factory=Tally)
    passes: list[tuple[float, float, int]] = field(default_factory=list)  # begin, end, tokens
    growth: Growth | None = None  # instead of the mode's own (serial, duo)
    waits: bool = True  # False: never for guesses
    timeline: Timeline = field(default_factory=Timeline)

    def run(self) -> Tally:
        recording = self.recording
        core = DuoCore(
            recording.prompt,
            replace(recording.params, max_tokens=len(recording.answer), ignore_eos=True, stop=()),
            self.config,
            context=1 << 30,
            drafts=self.drafter is not None,
            costs=self.profile,
            switch=self.switch,
            free_switch=self.free_switch,
        )
        self.now = self.tally.target_busy = self.profile.prompt_cost(len(recording.prompt))
        self.timeline.span(Lane.TARGET, Did.PROMPT, 0.0, self.now, tokens=len(recording.prompt))
        if core.uses_drafts:
            self.free.open(recording.prompt, recording.params, BestFirst())
        drivers = {Mode.DUO: self._duo, Mode.LOCKSTEP: self._lockstep}
        drivers.get(self.config.mode, self._turns)(core)
        self.tally.seconds, self.tally.tokens, self.tally.rounds = self.now, len(core.answer), core.rounds
        self.tally.draft_reading = min(self.now, self._draft_ready)
        self.timeline.span(Lane.DRAFT, Did.PROMPT, 0.0, self.tally.draft_reading, tokens=len(recording.prompt))
        if [committed.token for committed in core.answer] != list(recording.answer):
            raise AssertionError("the simulated answer differs from the recorded one")
        return self.tally

    @property
    def _draft_ready(self) -> float:
        """When the draft has read the prompt, beside the target."""
        reads = self.drafter is not None and self.config.mode is not Mode.OFF
        return (len(self.recording.prompt) - self._unread) * self.profile.draft_prompt if reads else 0.0

    @property
    def _unread(self) -> int:
        prompt, costs = len(self.recording.prompt), self.profile
        limits = {"passes": READING_PASSES, "least": LEAST_READ} if self._in_turn else {}
        return tokens_unread(prompt, costs.verify_cost(1, prompt), costs.draft_prompt, **limits)

    @property
    def _in_turn(self) -> bool:
        return self.config.mode is Mode.DUO and self.config.turns == "on"

    @property
    def _draft_curve(self) -> CostCurve:
        """What steps cost at the beginning of the answer: growth is told once."""
        return CostCurve(self.profile.draft_at(len(self.recording.prompt) - self._unread))

    def _pass(self, core: DuoCore, work: Verify) -> None:
        """The clock moves on by a pass."""
        cost = self.profile.verify_cost(1 + len(work.nodes), core.tree.position)
        self.passes.append((self.now, self.now + cost, 1 + len(work.nodes)))
        self.now += cost
        self.tally.target_busy += cost
        self.tally.first_token = self.tally.first_token or self.now
        if self.profile.host is not None:
            self.now += self.profile.host(1 + len(work.nodes))

    def _commit(self, core: DuoCore, work: Verify) -> list[int]:
        """The pass's verdict enters the answer."""
        choose = self.recording.choose(core.tree.position, work.guesses)
        gained = [committed.token for committed in core.verdict_arrived(work, walk(work.guesses, choose))]
        begin, end, _ = self.passes[-1]
        self.timeline.span(Lane.TARGET, Did.PASS, begin, end, nodes=len(work.nodes), gained=len(gained))
        self.timeline.mark(Lane.TARGET, Did.COMMIT, end, gained=len(gained))
        if core.uses_drafts:
            self.free.commit(gained)
        return gained

    def _open(self, growth: Growth) -> ModelDrafter | None:
        if self.drafter is not None:
            self.drafter.open(self.recording.prompt, self.recording.params, growth, self._unread)
        return self.drafter

    def _turns(self, core: DuoCore) -> None:
        chain = self.config.mode is Mode.CHAIN
        tree = self.growth or BestFirst(self.config.draft_width, branching=self.config.branching)
        drafter = self._open(BestFirst(1, branching=1) if chain else tree)
        self.now += self._draft_ready  # one after the other, here too
        while (work := core.step()) is not None:
            if isinstance(work, Verify):
                begin = self.now
                self._pass(core, work)
                gained = self._commit(core, work)
                core.round_took(len(gained), self.now - begin)
                guess_for_free(core, self.free)
                if drafter is not None and core.uses_drafts:
                    drafter.commit(gained)
                continue
            leaves = drafter.next_leaves() if drafter is not None else []
            if drafter is None or not leaves:
                core.draft_exhausted()
                continue
            self.now += self._step(self.now, leaves, in_turn=True)
            model_guessed(core, self.free, drafter.grow(leaves))

    def _step(self, begin: float, leaves: Sequence[Node], *, in_turn: bool = False) -> float:
        """What a draft step costs, noted."""
        cost = self.profile.draft_cost(len(leaves), leaves[0].position - self._unread, in_turn=in_turn)
        self.tally.draft_busy += cost
        self.timeline.span(Lane.DRAFT, Did.STEP, begin, begin + cost, leaves=len(leaves))
        return cost

    def _lockstep(self, core: DuoCore) -> None:
        """Both at once with a barrier: a round takes as long as the slower side."""
        profile = self.profile
        budget = profile.verify_cost(1 + self.config.draft_length, len(self.recording.prompt))
        drafter = self._open(Chains(budget, self._draft_curve, most=self.config.draft_width))
        while isinstance(work := core.step(), Verify):
            begin = self.now
            drafted, cost = self._chains(drafter) if drafter is not None and begin >= self._draft_ready else ([], 0.0)
            self._pass(core, work)
            ended, own = self.passes[-1][1], self.now - self.passes[-1][1]
            gained = self._commit(core, work)
            core.nodes_arrived(drafted)
            guess_for_free(core, self.free)
            self.tally.hidden += min(cost, ended - begin)
            if drafter is not None:
                drafted_by = begin + cost + 2 * profile.latency  # it hears of the last round, and its guesses are heard
                self.now = max(ended, drafted_by) + own
                drafter.commit(gained)

    def _chains(self, drafter: ModelDrafter) -> tuple[list[Proposal], float]:
        drafted: list[Proposal] = []
        cost = 0.0
        while leaves := drafter.next_leaves():
            cost += self._step(self.now + cost, leaves)
            drafted += drafter.grow(leaves)
        return drafted, cost

    def _duo(self, core: DuoCore) -> None:
        profile, config = self.profile, self.config
        curve = profile.draft_in_turn if self._in_turn else self._draft_curve
        best = BestFirst(config.draft_width, curve=curve, branching=config.branching, floor=LEAF_FLOOR)
        if self.drafter is None:
            return self._turns(core)
        if self._in_turn:
            return self._between(core, self.drafter, self.growth or best)
        drafter = self._open(self.growth or best)
        assert drafter is not None
        unread = self._unread
        draft = DraftActor(drafter, profile, self._draft_ready, unread)
        clock = DraftClock(lambda leaves: profile.draft_cost(leaves, core.tree.position - unread), profile.latency)
        ended = self.now
        while (work := core.step(clock.outlook(self.now) if self.waits else None)) is not None:
            if isinstance(work, Wait):
                self._wait(draft, clock, work.seconds)
                self._listen(core, draft, clock)
                recycle(core, self.free)
            elif isinstance(work, Verify):
                self._pass(core, work)
                draft.advance(self.now)
                self._listen(core, draft, clock)
                gained = self._commit(core, work)
                dead = clock.expanding if core.all_dead(clock.expanding) else ()
                draft.commit(self.now, gained, grow=core.drafting, interrupt=dead)
                clock.committed(self.now, interrupted=bool(dead))
                core.round_took(len(gained), self.now - ended)
                ended = self.now
                self._listen(core, draft, clock)
                guess_for_free(core, self.free)
        self._count_hidden(draft)
        return None

    def _between(self, core: DuoCore, drafter: ModelDrafter, growth: Growth) -> None:
        """Mode duo where draft and target take turns: as many steps as pay. The draft reads the prompt after the first token."""
        profile, opened, began = self.profile, False, self.now
        while True:
            leaves = drafter.next_leaves() if opened and core.drafting and self.waits else []
            context = core.tree.position - self._unread
            takes = profile.draft_cost(len(leaves), context, in_turn=True) if leaves else 0.0
            work = core.step(Outlook(takes, tuple(leaf.key for leaf in leaves), takes) if leaves else None)
            if isinstance(work, Wait):
                self.now += self._step(self.now, leaves, in_turn=True)
                model_guessed(core, self.free, drafter.grow(leaves))
            elif isinstance(work, Verify):
                self._pass(core, work)
                gained = self._commit(core, work)
                core.round_took(len(gained), self.now - began)
                if not opened:
                    self._open(growth)
                    opened, self.now = True, self.now + self._draft_ready
                drafter.commit(gained)
                began = self.now
                guess_for_free(core, self.free)
            else:
                return

    def _listen(self, core: DuoCore, draft: DraftActor, clock: DraftClock) -> None:
        for when, proposals, expanding in draft.arrived(self.now):
            model_guessed(core, self.free, proposals)
            clock.began(when, expanding)

    def _wait(self, draft: DraftActor, clock: DraftClock, seconds: float) -> None:
        until = self.now + WAIT_SLACK * seconds + self.profile.latency
        when = draft.next_arrival(until)
        if when is None:
            clock.silent()
        begin, self.now = self.now, until if when is None else max(when, self.now)
        self.tally.wait += self.now - begin
        self.timeline.span(Lane.TARGET, Did.WAIT, begin, self.now)

    def _count_hidden(self, draft: DraftActor) -> None:
        """Draft time up to the end of the answer, and how much of it lay under a target pass."""
        for begin, end, width in draft.spans:
            if begin < self.now:
                self.timeline.span(Lane.DRAFT, Did.STEP, begin, min(end, self.now), leaves=width)
        spans = [(step.begin, step.end) for step in self.timeline.of(Lane.DRAFT, Did.STEP)]
        self.tally.draft_busy = sum(end - begin for begin, end in spans)
        i = 0
        for begin, end in spans:
            while i > 0 and self.passes[i][0] > begin:
                i -= 1
            while i < len(self.passes) and self.passes[i][0] < end:
                self.tally.hidden += max(0.0, min(end, self.passes[i][1]) - max(begin, self.passes[i][0]))
                i += 1
            i = max(0, i - 1)
