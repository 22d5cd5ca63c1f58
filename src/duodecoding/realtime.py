"""Drivers with a real clock: the core says what to do, the models do it.

Two loops with the same helpers: `take_turns` with a draft in this process, `overlap` with one in a worker beside the target.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from duodecoding.backends.base import Conversation, Target
from duodecoding.between import Between
from duodecoding.core import Choose, Committed, DuoCore, Verify, Wait, places, walk
from duodecoding.drafters.recycling import FEW_VISITS, VISITS
from duodecoding.drafting import Drafters, guess_for_free, model_guessed, recycle
from duodecoding.pace import Pace
from duodecoding.planner import DraftClock, Outlook
from duodecoding.remote import RemoteDrafter
from duodecoding.trace import Did, Lane, Timeline
from duodecoding.tree import Proposal
from duodecoding.types import Source
from duodecoding.wire import Nodes

WAIT_SLACK = 1.5  # of the time that guesses were expected in, then go on without
WAIT_LEAST = 0.0005  # seconds; a sleeping process needs some to wake up
LISTEN = 0.98  # of a pass, less the time that a message takes; then only its end is waited for
MESSAGE = 0.0003  # seconds
GLANCE = 0.0002  # seconds between two looks whether a pass has ended
AWAKE = 0.001  # seconds before a pass ends, in which we do not sleep: who wakes up is slow
REHEARSAL = 0.0002  # seconds that a pass must last for the choice of the next one to be rehearsed
PLAIN_TOLD = 8  # rounds: in turns, of plain passes one in so many is learnt from; the others say the same
BARRIER_SLACK = 4.0  # lockstep: of the target's pass, and at least:
BARRIER_LEAST = 0.25  # seconds


@dataclass(slots=True)
class Meter:
    """Where the time of one answer went."""

    started: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    ended: float | None = None
    target_busy: float = 0.0
    draft_busy: float = 0.0
    waited: float = 0.0  # the target, for guesses
    rounds: int = 0
    pass_began: float = 0.0
    pass_ended: float = 0.0
    timeline: Timeline = field(default_factory=Timeline)

    def finish(self) -> None:
        self.ended = time.perf_counter()

    @property
    def seconds(self) -> float:
        return (self.ended if self.ended is not None else time.perf_counter()) - self.started


def take_turns(
    core: DuoCore,
    target: Target,
    conversation: Conversation,
    drafters: Drafters,
    meter: Meter,
    pace: Pace,
    between: Between | None = None,
) -> Iterator[list[Committed]]:
    """Draft, verify, draft, verify: one processor at a time. Yields the tokens of each round. `between`: a draft that makes as many
    steps as pay, not as many as the mode says; `drafters` are those without a model then."""
    untold: list[int] = []  # committed, not said to the drafters yet
    began, looking = time.perf_counter(), 0.0  # this round; seconds of it in which guesses were looked for that no model makes
    drafting = 0.0  # seconds of it that `between` took
    while (work := core.step(between.outlook() if between is not None else None)) is not None:
        if isinstance(work, Wait) and between is not None:
            drafting += between.step()
            continue
        if not isinstance(work, Verify):
            draft_step(core, drafters, meter)
            continue
        root = core.tree.position
        choose = begin_pass(target, conversation, work, meter)
        seconds = end_pass(target, meter)
        gained = core.verdict_arrived(work, walk(work.guesses, choose))
        settle(conversation, work, gained, meter)
        if core.uses_drafts and meter.rounds > 1:  # the first pass read the prompt
            whole = time.perf_counter() - began
            turn = Turn(len(work.nodes), len(gained), root, seconds, whole, looking, drafting, drafted=drafters.model is not None)
            learn_from_turn(core, pace, turn)
        meter.draft_busy += drafting
        yield gained
        if between is not None and core.finish_reason is None:
            between.start()
            between.commit([committed.token for committed in gained])
        began, looking, drafting = time.perf_counter(), 0.0, 0.0
        if core.finish_reason is None and core.uses_drafts:
            untold += [committed.token for committed in gained]
            if drafters.model is not None or core.looking:
                drafters.commit(untold)
                untold = []
                guess_for_free(core, drafters)
                drafts = drafters.model is not None or (between is not None and core.drafting)
                looking = 0.0 if drafts else time.perf_counter() - began
    if untold:
        drafters.commit(untold)


class Turn(NamedTuple):
    """A round of taking turns."""

    guesses: int
    gained: int
    context: int
    pass_seconds: float
    seconds: float  # of the whole round
    looking: float  # of these, for guesses that no model makes
    drafting: float  # of these, for guesses between two passes
    drafted: bool  # a draft model had a part in it that was not timed


def learn_from_turn(core: DuoCore, pace: Pace, turn: Turn) -> None:
    if turn.guesses or not core.guessing or core.rounds % PLAIN_TOLD == 0:
        pace.target_pass(1 + turn.guesses, turn.pass_seconds, turn.context, alone=True)
        if not turn.drafted:
            pace.between(1 + turn.guesses, turn.seconds - turn.pass_seconds - turn.looking - turn.drafting)
        core.round_took(turn.gained, turn.seconds)
    if turn.looking:
        core.looked(turn.gained, turn.seconds)


def draft_step(core: DuoCore, drafters: Drafters, meter: Meter) -> None:
    start = time.perf_counter()
    model = drafters.model
    leaves = model.next_leaves() if model is not None else []
    grown = model.grow(leaves) if model is not None and leaves else []
    now = time.perf_counter()
    meter.draft_busy += now - start
    if leaves:
        meter.timeline.span(Lane.DRAFT, Did.STEP, start, now, leaves=len(leaves))
    if grown:
        model_guessed(core, drafters, grown)
    else:
        core.draft_exhausted()


def begin_pass(target: Target, conversation: Conversation, work: Verify, meter: Meter) -> Choose:
    meter.pass_began = time.perf_counter()
    return target.verify([(conversation, work.guesses)])[0]


def end_pass(target: Target, meter: Meter) -> float:
    """Wait for the pass. Seconds that it took."""
    target.finish()
    meter.pass_ended = time.perf_counter()
    seconds = meter.pass_ended - meter.pass_began
    meter.target_busy += seconds
    meter.rounds += 1
    return seconds


def settle(conversation: Conversation, work: Verify, gained: Sequence[Committed], meter: Meter) -> None:
    """What the answer gained, to the target; and when."""
    conversation.commit([committed.token for committed in gained])
    now, began, ended = time.perf_counter(), meter.pass_began, meter.pass_ended
    if meter.first_token is None:
        meter.first_token = now
    if meter.rounds > 1:
        meter.timeline.span(Lane.TARGET, Did.PASS, began, ended, nodes=1 + len(work.nodes), gained=len(gained))
    else:
        meter.timeline.span(Lane.TARGET, Did.PROMPT, began, ended, tokens=len(conversation.tokens) - len(gained))
    meter.timeline.mark(Lane.TARGET, Did.COMMIT, now, gained=len(gained))
    meter.target_busy += now - ended


class Lesson(NamedTuple):
    """What there is to learn from a round."""

    guesses: int
    gained: int
    pass_seconds: float
    seconds: float  # of the whole round
    between: float  # our own work in it
    context: int
    alone: bool  # the draft was at rest
    verified: bool  # a pass over guesses, not over the prompt
    judged: bool  # it says something about the worth of drafting


class Overlap:
    """One answer with the draft in its worker: its guesses go into the core, what the target said goes out to it."""

    def __init__(
        self,
        core: DuoCore,
        target: Target,
        conversation: Conversation,
        remote: RemoteDrafter,
        free: Drafters,
        meter: Meter,
        pace: Pace,
        *,
        lockstep: bool,
        unread: int = 0,
    ) -> None:
        """`unread`: tokens at the prompt's beginning that the draft leaves out."""
        self._unread = unread
        self._core, self._target, self._conversation, self._lockstep = core, target, conversation, lockstep
        self._remote, self._free = remote, free
        self._meter, self._pace = meter, pace
        self._clock = DraftClock(lambda leaves: pace.costs.draft_cost(leaves, self._draft_context), pace.costs.latency)
        self._began = 0.0  # the running draft step, as far as we know
        self._quiet = False  # waited for in vain; not again before it speaks
        self._ended = time.perf_counter()  # the last round
        self._waited_before = 0.0  # by the end of the last round
        self._untold: list[int] = []  # committed, not said to the worker yet
        self._unlearned: list[int] = []  # the same, by whoever guesses from what was said before
        self._lesson: Lesson | None = None
        self._heard: list[tuple[float, Nodes, list[Proposal]]] = []  # from the worker, and when: in the tree, not learnt from yet
        self._collects = target.overlaps and gc.isenabled()

    def rounds(self, start_drafting: Callable[[], None]) -> Iterator[list[Committed]]:
        """The tokens of each round. Both models read the prompt at the same time. However it ends, the worker is left at rest."""
        try:
            if not self._target.overlaps:
                start_drafting()
            yield from self._rounds(start_drafting)
        finally:
            self._hurry(False)
            self._learn_from_guesses()
            self._remote.pause()

    def _hurry(self, on: bool) -> None:
        """Between two passes a GPU waits for us: Python looks for garbage while it works. That is a third of our time."""
        if self._collects:
            (gc.disable if on else gc.enable)()

    def _rounds(self, start_drafting: Callable[[], None]) -> Iterator[list[Committed]]:
        """Where passes run by themselves, a round's tokens go out while the next one runs; the first token goes out at once."""
        gained: list[Committed] = []  # not handed out yet
        while (work := self._core.step(self._outlook())) is not None:
            if isinstance(work, Verify):
                choose = begin_pass(self._target, self._conversation, work, self._meter)
                self._hurry(False)
                if self._target.overlaps and not self._meter.rounds:
                    start_drafting()
                self._tell()
                self._remember()
                if gained:
                    yield gained
                gained = self._round(work, choose, in_time=self._beside(work))
            if gained and (isinstance(work, Wait) or self._meter.rounds == 1 or not self._target.overlaps):
                start = time.perf_counter()
                self._hurry(False)  # whoever reads may keep us for ever
                yield gained
                self._hurry(True)
                gained, self._ended = [], self._ended + time.perf_counter() - start  # the reader's time is not the round's
            if isinstance(work, Wait):
                self._tell()
                self._remember()
                self._wait(work.seconds)
                recycle(self._core, self._free)
            else:
                hasty = self._target.overlaps
                guess_for_free(self._core, self._free, FEW_VISITS if hasty else VISITS, in_haste=hasty)
        self._hurry(False)
        self._remember()
        if gained:
            yield gained
        self._learn()

    def _beside(self, work: Verify) -> bool:
        """While the pass runs: learn from the last round, and take guesses that come. False: whoever reads the answer kept us for
        longer than that, and nobody saw the pass end. A pass that ends early must be seen to: to listen for as long as passes took
        would make it come true."""
        if not self._target.overlaps:
            return True
        in_time = not self._target.done()
        self._learn()
        self._core.look_ahead()
        expected = self._pace.costs.verify_cost(1 + len(work.nodes), self._core.tree.position)
        end = self._meter.pass_began + max(LISTEN * expected - MESSAGE, expected / 2)
        while (left := end - time.perf_counter()) > 0 and not self._target.done():
            if self._take(min(left, GLANCE) if left > AWAKE else 0.0):
                self._learn_from_guesses()
                recycle(self._core, self._free)
        if self._meter.pass_began + expected - time.perf_counter() > REHEARSAL and not self._target.done():
            self._core.step(self._outlook())  # for nothing: code that has not run for milliseconds takes several times as long
        return in_time

    def _round(self, work: Verify, choose: Choose, *, in_time: bool) -> list[Committed]:
        core, meter = self._core, self._meter
        context, alone = core.tree.position, self._remote.at_rest
        where = places(work.guesses)  # while the pass runs
        self._hurry(True)
        seconds = end_pass(self._target, meter)
        if self._lockstep:
            self._take()
        if self._lockstep and meter.rounds > 1:  # the first token waits for nobody
            self._barrier(context, seconds)
        gained = core.verdict_arrived(work, walk(work.guesses, choose, where))
        self._commit([committed.token for committed in gained])
        settle(self._conversation, work, gained, meter)
        self._take()
        began, self._ended = self._ended, time.perf_counter()
        if in_time:
            worth = self._remote.keeps_up or not core.drafting  # a round without a draft says nothing about its worth
            read = meter.rounds > 1  # the first pass read the prompt
            whole, waited = self._ended - began, meter.waited - self._waited_before
            between = whole - waited - seconds
            self._lesson = Lesson(len(work.nodes), len(gained), seconds, whole, between, context, alone, read, worth)
        self._waited_before = meter.waited
        if not self._target.overlaps:
            self._learn()
        return gained

    def _learn(self) -> None:
        """From the last round: what draft steps and passes cost, and whether drafting pays."""
        self._learn_from_guesses()
        lesson, self._lesson = self._lesson, None
        if lesson is None:
            return
        if lesson.verified:
            self._pace.target_pass(1 + lesson.guesses, lesson.pass_seconds, lesson.context, alone=lesson.alone)
            self._pace.between(1 + lesson.guesses, lesson.between)
        if lesson.judged:
            self._core.round_took(lesson.gained, lesson.seconds)

    def _commit(self, tokens: list[int]) -> None:
        """Tell a worker at once, before anybody else, if it has nothing useful to do (as always behind lockstep's barrier): what it
        says is waited for. Else when the next pass has begun."""
        core, now = self._core, time.monotonic()
        dead = self._remote.interruptible and core.all_dead(self._clock.expanding)
        self._untold += tokens
        at_once = dead or self._lockstep or not self._target.overlaps or not self._remote.growing
        if at_once or core.finish_reason is not None:
            self._tell(interrupt=dead)
        if dead:
            self._note_unfinished(now)
        self._clock.committed(now, interrupted=dead)
        self._unlearned += tokens
        if self._free.lookup is not None:
            self._free.lookup.commit(tokens)

    def _tell(self, *, interrupt: bool = False) -> None:
        """What was committed, to the worker."""
        tokens, self._untold = self._untold, []
        if tokens:
            self._remote.commit(tokens, grow=self._core.drafting and self._core.finish_reason is None, interrupt=interrupt)

    def _remember(self) -> None:
        """What was committed, for the next time that it could follow. That has time until a pass runs; the first time it is the
        prompt."""
        tokens, self._unlearned = self._unlearned, []
        if tokens and self._free.recycling is not None:
            self._free.recycling.commit(tokens)
        if self._free.lookup is not None and self._target.overlaps:
            self._free.lookup.read()

    def _take(self, timeout: float = 0.0, *, awake: bool = False) -> bool:
        """Guesses that came, into the tree. False: the worker said nothing."""
        messages = self._remote.poll(timeout, awake=awake)
        for message in messages:
            self._quiet = False
            self._meter.draft_busy += message.seconds
            self._began = self._remote.when(message)
            if message.width > 0:
                guesses = proposals(message)
                self._core.nodes_arrived(guesses)
                self._heard.append((self._began, message, guesses))
            self._clock.began(self._began, message.expanding)
        if not self._target.overlaps:
            self._learn_from_guesses()
        return bool(messages)

    def _learn_from_guesses(self) -> None:
        """What a draft step costs and what follows what. While a pass runs, if it runs by itself: a GPU does not wait for it."""
        heard, self._heard = self._heard, []
        for ended, message, guesses in heard:
            self._pace.draft_step(message.width, message.seconds, self._draft_context)
            if self._free.recycling is not None:
                self._free.recycling.arrived(self._core.tree, guesses)
            self._meter.timeline.span(Lane.DRAFT, Did.STEP, ended - message.seconds, ended, leaves=message.width)

    def _note_unfinished(self, now: float) -> None:
        taken = now - self._began
        self._pace.draft_step_unfinished(len(self._clock.expanding), taken, self._draft_context)

    @property
    def _draft_context(self) -> int:
        return self._core.tree.position - self._unread

    def _outlook(self) -> Outlook | None:
        return self._clock.outlook(time.monotonic()) if self._remote.growing and not self._quiet else None

    def _wait(self, seconds: float) -> None:
        start = time.monotonic()
        self._quiet = not self._take(WAIT_SLACK * seconds + WAIT_LEAST, awake=self._target.overlaps)  # a GPU waits with us
        if self._quiet:
            self._note_unfinished(time.monotonic())
        self._waited(start)

    def _waited(self, start: float) -> None:
        now = time.monotonic()
        self._meter.waited += now - start
        self._meter.timeline.span(Lane.TARGET, Did.WAIT, start, now)

    def _barrier(self, root: int, seconds: float) -> None:
        """Lockstep: until it has drafted its budget below the token at `root`, which the target's pass was about."""
        start = time.monotonic()
        end = start + max(BARRIER_LEAST, BARRIER_SLACK * seconds)
        while self._remote.keeps_up and not self._quiet and not self._remote.done_at(root):
            left = end - time.monotonic()
            self._quiet = left <= 0 or not self._take(left, awake=self._target.overlaps)
        self._waited(start)


def proposals(message: Nodes) -> list[Proposal]:
    return [Proposal(key, parent, token, p, Source.MODEL) for key, parent, token, p in message.nodes]
