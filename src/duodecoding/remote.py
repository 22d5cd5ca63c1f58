"""The engine's end of a draft worker: have it started, talk to it, and live without it.

Nothing here waits for the worker longer than it is told to. Whatever goes wrong (it died, stalled, speaks nonsense, never
started) is logged once and counted; the answer goes on without drafts, and the next answer starts the worker again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from duodecoding.drafters.lookup import KEYS_FROM
from duodecoding.launch import Launch, Peer
from duodecoding.types import SamplingParams
from duodecoding.wire import (
    VERSION,
    Commit,
    Failed,
    GrowthPlan,
    Hello,
    Nodes,
    Open,
    Pong,
    Ready,
    ToMain,
    WireError,
    check_nodes,
)

log = logging.getLogger("duodecoding.draft")

START_SECONDS = 120.0  # to load the model and say so
STALL_SECONDS = 30.0  # of silence from a worker that owes an answer
PATIENT_SECONDS = 60.0  # a worker that lived this long did not fail "in a row" with the one before it
BACKOFF = (0.0, 0.5, 2.0, 8.0)  # seconds before it is started again
MAX_FAILURES = 5  # in a row, then give up


class State(Enum):
    DOWN = "down"
    STARTING = "starting"
    READY = "ready"
    GIVEN_UP = "given up"


@dataclass(slots=True)
class _Answer:
    """What the worker has to know to join in, from the first token or in the middle."""

    prompt: list[int]
    params: SamplingParams
    growth: GrowthPlan
    unread: int = 0
    committed: list[int] = field(default_factory=list)
    grow: bool = True
    number: int = 0  # of the last `Open`; 0: not opened yet
    growing: bool = False  # the prompt is read: guesses may be waited for
    done: bool = False  # nothing to come until a commit
    root: int = 0  # what the worker has seen of the answer when it last spoke
    faults: int = 0


class RemoteDrafter:
    """A draft worker as the engine sees it. Never raises for what the worker does."""

    def __init__(
        self,
        launch: Launch,
        vocabulary: int,
        *,
        secret: str = "",
        stall_seconds: float = STALL_SECONDS,
        backoff: Sequence[float] = BACKOFF,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`vocabulary`: the target's size."""
        self._launch, self._vocabulary, self._secret = launch, vocabulary, secret
        self._stall_seconds, self._backoff, self._clock = stall_seconds, backoff, clock
        self._state = State.DOWN
        self._peer: Peer | None = None
        self._answer: _Answer | None = None
        self._openings = 0
        self._first_key, self._next_key = 1, 1
        self._failures = 0  # in a row
        self._retry_at = self._started_at = self._owes_since = 0.0
        self._owes = False  # it has been sent something that it must react to
        self._clock_offset = math.inf  # our clock minus its own, plus the fastest message's time
        self.draft_context = 0
        self.busy_seconds = 0.0
        self.steps = self.faults = self.starts = 0
        self.last_error = ""

    # -- what the engine asks for

    def start(self) -> None:
        """Begin to start the worker, if it is down and due. Returns at once."""
        if self._state is State.DOWN and self._clock() >= self._retry_at:
            try:
                self._peer = self._launch()
                self._state, self._started_at = State.STARTING, self._clock()
                self.starts += 1
                self._peer.connection.send(Hello(VERSION, self._secret, self._vocabulary))
            except (OSError, WireError) as error:
                self._fail(f"it could not be started: {error}")

    def open(
        self, prompt: Sequence[int], params: SamplingParams, growth: GrowthPlan, *, unread: int = 0, grow: bool = True
    ) -> None:
        """A new answer. If the worker is not there yet it joins later. `unread`: tokens at the prompt's beginning that it leaves
        out. `grow`: draft at once."""
        if self._answer is not None and self._answer.growing and not self._answer.faults:
            self._failures = 0  # it went through a whole answer
        self._answer, self._owes = None, False
        for _ in range(2):  # has it come up, or died, since the last answer? The end comes behind the last messages
            self.poll()
        self.start()
        self._answer = _Answer(list(prompt), params, growth, unread, grow=grow)
        self._join()

    def commit(self, tokens: Sequence[int], *, grow: bool = True, interrupt: bool = False) -> None:
        """The answer gained `tokens`. `grow`: drafting goes on. `interrupt`: the running step is about dead leaves."""
        answer = self._answer
        if answer is None:
            return
        answer.committed += tokens
        answer.grow = grow
        if self._state is State.READY and answer.number:
            answer.done = False
            self._send(Commit(answer.number, list(tokens), grow))
            if interrupt:
                self._interrupt()

    def poll(self, timeout: float = 0.0, *, awake: bool = False) -> list[Nodes]:
        """What has come for the running answer, waiting up to `timeout` seconds for the first of it, asleep or awake."""
        end = self._clock() + timeout
        while self._peer is not None:
            found = self._take(self._peer)
            left = end - self._clock()
            if found or left <= 0 or self._peer is None:
                return found
            self._wait(self._peer, left, left if awake else 0.0)
        return []

    def pause(self) -> None:
        """The answer is over: nothing more has to be drafted for it."""
        answer = self._answer
        if answer is not None and answer.number and self.alive:
            answer.grow = False
            self._send(Commit(answer.number, [], grow=False))
            self._owes = False

    def wait_ready(self, timeout: float) -> bool:
        """Give a starting worker time. The engine itself never does."""
        end = self._clock() + timeout
        while self._state is State.STARTING and (left := end - self._clock()) > 0:
            self.poll(min(left, 0.1))
        return self.alive

    def close(self) -> None:
        if self._peer is not None:
            self._peer.end(gently=True)
        self._peer, self._answer, self._state = None, None, State.GIVEN_UP
        self.last_error = self.last_error or "closed"

    # -- what the engine wants to know

    @property
    def alive(self) -> bool:
        return self._state is State.READY

    @property
    def given_up(self) -> bool:
        return self._state is State.GIVEN_UP

    @property
    def restarts(self) -> int:
        return max(0, self.starts - 1)

    @property
    def pid(self) -> int | None:
        """Of a worker process on this machine."""
        return self._peer.process.pid if self._peer is not None and self._peer.process is not None else None

    @property
    def interruptible(self) -> bool:
        return self._peer is not None and self._peer.flag is not None

    @property
    def growing(self) -> bool:
        """Are guesses on their way? Not while it is absent, reads the prompt, was told to rest or has nothing left to guess."""
        return self.keeps_up and self._answer is not None and not self._answer.done

    @property
    def keeps_up(self) -> bool:
        """Has it read the prompt, and is it not told to rest?"""
        answer = self._answer
        return self.alive and answer is not None and answer.growing and answer.grow

    @property
    def at_rest(self) -> bool:
        """Is it surely not computing?"""
        answer = self._answer
        if self._state in (State.DOWN, State.GIVEN_UP) or answer is None:
            return True
        return self.alive and (answer.done or not answer.grow or not answer.number)

    def when(self, nodes: Nodes) -> float:
        """When the message came, on this process's monotonic clock, however late it was read."""
        return nodes.sent + self._clock_offset

    def done_at(self, root: int) -> bool:
        """Has it said that there is nothing more to draft below the committed token at position `root`?"""
        answer = self._answer
        return answer is not None and answer.done and answer.root >= root

    # -- the conversation

    def _send(self, message: Open | Commit) -> None:
        if self._peer is None:
            return
        if not self._owes:
            self._owes, self._owes_since = True, self._clock()
        try:
            self._peer.connection.send(message)
        except WireError as error:
            self._fail(str(error))

    def _interrupt(self) -> None:
        # The commit is on its way: whatever step this breaks off, the next one knows of it.
        if self._peer is not None and self._peer.flag is not None:
            self._peer.flag[0] = 1

    def _wait(self, peer: Peer, seconds: float, awake: float) -> None:
        try:
            peer.connection.wait(seconds, awake=awake)
        except WireError as error:
            self._fail(str(error))

    def _join(self) -> None:
        """Tell a ready worker about the answer as it stands."""
        answer = self._answer
        if answer is None or answer.number or answer.faults or self._state is not State.READY:
            return
        self._openings += 1
        self._first_key = self._next_key
        answer.number = self._openings
        self._send(Open(answer.number, answer.prompt, answer.params, answer.growth, self._first_key, answer.grow, answer.unread))
        if answer.committed:
            self._send(Commit(answer.number, list(answer.committed), answer.grow))

    def _take(self, peer: Peer) -> list[Nodes]:
        try:
            messages = peer.connection.receive()
            found = [nodes for message in messages if (nodes := self._understand(message)) is not None]
        except WireError as error:
            self._fail(str(error))
            return []
        if messages:
            self._owes_since = self._clock()
        else:
            self._check_silence()
        return found

    def _understand(self, message: ToMain) -> Nodes | None:
        if isinstance(message, Failed):
            raise WireError(message.what)
        if isinstance(message, Ready):
            self._greet(message)
        elif isinstance(message, Nodes):
            return self._judge(message)
        elif not isinstance(message, Pong):
            raise WireError("the other side speaks nonsense", f"{type(message).__name__}")
        return None

    def _greet(self, message: Ready) -> None:
        if message.version != VERSION:
            raise WireError("the draft worker speaks another version of the protocol", f"{message.version}, not {VERSION}")
        if self._state is not State.STARTING or message.context < 1 or message.vocabulary < 1:
            raise WireError("the other side speaks nonsense", f"{message}")
        self._state, self._owes, self._clock_offset = State.READY, False, math.inf
        self.draft_context = message.context
        self._join()

    def _judge(self, message: Nodes) -> Nodes | None:
        """A step's guesses, if they are for the running answer and make sense."""
        answer = self._answer
        if not 0 < message.answer <= self._openings:
            raise WireError("the other side speaks nonsense", f"answer {message.answer} of {self._openings}")
        if answer is None or message.answer != answer.number:
            return None
        check_nodes(message, vocabulary=self._vocabulary, first_key=self._first_key, end_key=KEYS_FROM)
        self._next_key = max([self._next_key, *(node[0] + 1 for node in message.nodes)])
        self._clock_offset = min(self._clock_offset, self._clock() - message.sent)
        self.busy_seconds += message.seconds
        self.steps += message.width > 0
        answer.growing = answer.growing or message.width > 0 or message.done or bool(message.expanding)
        answer.root = message.root
        answer.done = message.done and message.root >= len(answer.prompt) + len(answer.committed) - 1  # not of before a commit
        self._owes = not answer.done
        return message

    # -- faults

    def _check_silence(self) -> None:
        now = self._clock()
        if self._state is State.STARTING and now - self._started_at > START_SECONDS:
            self._fail(f"it was not ready after {START_SECONDS:.0f} s")
        elif self._state is State.READY and self._owes and now - self._owes_since > self._stall_seconds:
            self._fail(f"it said nothing for {self._stall_seconds:.0f} s")

    def _fail(self, why: str) -> None:
        """It is of no use for this answer. End it, say so once, and let the next answer start it again."""
        now = self._clock()
        if self._state is State.READY and now - self._started_at > PATIENT_SECONDS:
            self._failures = 0
        reason = self._failed_for(why)
        self._peer, self._owes = None, False
        self.last_error, self.faults, self._failures = reason, self.faults + 1, self._failures + 1
        if self._answer is not None:
            self._answer.faults += 1
        if self._failures >= MAX_FAILURES:
            self._state = State.GIVEN_UP
            log.error("the draft worker failed %d times in a row and stays off: %s", self._failures, reason)
            return
        self._state = State.DOWN
        self._retry_at = now + self._backoff[min(self._failures, len(self._backoff)) - 1]
        log.warning("the draft worker failed, the answer goes on without it: %s", reason)

    def _failed_for(self, why: str) -> str:
        """The best reason there is: its own, how its process ended, or what we saw."""
        peer = self._peer
        if peer is None:
            return why
        with contextlib.suppress(WireError):
            own = [message.what for message in peer.connection.receive() if isinstance(message, Failed)]
            why = own[0] if own else why
        died = peer.exit_code()
        words = peer.end(gently=False)
        if died is not None and died < 0:
            why = f"it was ended by signal {-died}"
        return f"{why} ({words})" if words else why
