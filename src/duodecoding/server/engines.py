"""Who answers when: a fair queue in front of engines, each of which owns an `LLM` in a thread of its own.

Everything here but `Engine.run` happens on the event loop's thread, so that nothing but an engine's current job needs a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from duodecoding.errors import DuoError
from duodecoding.llm import LLM
from duodecoding.server.requests import ApiError, as_api_error
from duodecoding.stream import Stream
from duodecoding.trace import Event
from duodecoding.types import Mode, Result, SamplingParams, Token

log = logging.getLogger("duodecoding.server")

RETRY_SECONDS = 2  # what a client that is turned away is told to wait
LEAVE_SECONDS = 10.0  # for an engine to come to its end
BUSY = f"every place in the queue is taken; try again in {RETRY_SECONDS} s"
CLOSING = "the server is shutting down"


@dataclass(slots=True)
class Part:
    """What one round brought."""

    tokens: list[Token]
    spans: list[Event]


@dataclass(slots=True)
class Finished:
    result: Result
    spans: list[Event]


@dataclass(slots=True)
class Failed:
    error: ApiError


News = Part | Finished | Failed


@dataclass(slots=True, eq=False)
class Job:
    """One request for an answer, and what has come of it so far."""

    client: str
    prompt: list[int]
    params: SamplingParams
    mode: Mode | None = None
    arrived: float = field(default_factory=time.perf_counter)
    cancelled: bool = False  # nobody wants the answer any more
    over: bool = False
    _news: list[News] = field(default_factory=list)
    _waiter: asyncio.Future[None] | None = None

    def tell(self, news: News) -> None:
        if not self.over:
            self._news.append(news)
            self.over = not isinstance(news, Part)
            self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def unread(self) -> bool:
        return bool(self._news)

    async def news(self, timeout: float) -> list[News]:
        """What has come since the last time; waits for it, but not longer than `timeout` seconds."""
        if not self._news and not self.cancelled:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout, self.wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        news, self._news = self._news, []
        return news


class FairQueue:
    """Clients take turns; each client's own requests keep their order."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[Job]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, job: Job) -> None:
        self._lines.setdefault(job.client, deque()).append(job)
        self._size += 1

    def pop(self) -> Job:
        client, line = next(iter(self._lines.items()))
        job = line.popleft()
        self._size -= 1
        if line:
            self._lines.move_to_end(client)
        else:
            del self._lines[client]
        return job

    def remove(self, job: Job) -> bool:
        line = self._lines.get(job.client, deque())
        with contextlib.suppress(ValueError):
            line.remove(job)
            self._size -= 1
            if not line:
                del self._lines[job.client]
            return True
        return False


class Engine(threading.Thread):
    """Loads an `LLM`, then gives one answer after another."""

    def __init__(self, owner: Engines, load: Callable[[], LLM], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(name="engine", daemon=True)
        self._owner, self._load, self._loop = owner, load, loop
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: tuple[Job, LLM] | None = None
        self.llm: LLM | None = None
        self._modes: dict[Mode, LLM] = {}  # the same models, in modes that requests asked for
        self.last_client = ""

    def _post(self, call: Callable[..., None], *arguments: object) -> None:
        """Have it called on the event loop's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            self._loop.call_soon_threadsafe(call, *arguments)

    def run(self) -> None:
        try:
            self.llm = llm = self._load()
        except Exception as error:
            self._post(self._owner.not_loaded, error)
            return
        self._post(self._owner.free, self)
        with llm:
            while (job := self._jobs.get()) is not None:
                self._answer(llm, job)
                self._post(self._owner.free, self)

    def _answer(self, llm: LLM, job: Job) -> None:
        stream = None
        try:
            llm = self._in_mode(llm, job.mode)
            with self._lock:
                self._running = job, llm
            stream = llm.stream(job.prompt, job.params)
            self._speak(job, stream)
        except DuoError as error:
            self._post(job.tell, Failed(as_api_error(error)))
        except Exception:
            log.exception("an answer failed")
            self._post(job.tell, Failed(ApiError(500, "the engine failed; the log of the server says how")))
        finally:
            with self._lock:
                self._running = None
            if stream is not None:
                stream.close()

    def _in_mode(self, llm: LLM, mode: Mode | None) -> LLM:
        if mode in (None, llm.config.mode):
            return llm
        if mode not in self._modes:
            self._modes[mode] = llm.with_settings(mode=mode)
        return self._modes[mode]

    def _speak(self, job: Job, stream: Stream) -> None:
        if job.cancelled:  # before there was anything to abort
            return
        events, told = stream.timeline.events, 0
        for tokens in stream.rounds():
            self._post(job.tell, Part(tokens, events[told:]))
            told = len(events)
        self._post(job.tell, Finished(stream.result, events[told:]))

    def give(self, job: Job) -> None:
        self.last_client = job.client
        self._jobs.put(job)

    def abort(self, job: Job | None = None) -> None:
        """Stop this job, or any, at the next round."""
        with self._lock:
            if self._running is not None and job in (None, self._running[0]):
                self._running[1].abort()

    def end(self) -> None:
        """After the running answer, which is stopped."""
        self._jobs.put(None)
        self.abort()


class Engines:
    """All engines and the queue in front of them."""

    def __init__(self, load: Callable[[], LLM], *, parallel: int = 1, max_queue: int = 64) -> None:
        self._load, self._parallel, self._max_queue = load, parallel, max_queue
        self.queue = FairQueue()
        self.error: Exception | None = None  # why they could not be loaded
        self.on_error: Callable[[], None] = lambda: None
        self._all: list[Engine] = []
        self._loaded: set[Engine] = set()
        self._idle: list[Engine] = []
        self._jobs: dict[Engine, Job] = {}
        self._closing = False

    def start(self) -> None:
        """Begin to load. Call it on the event loop."""
        loop = asyncio.get_running_loop()
        self._all = [Engine(self, self._load, loop) for _ in range(self._parallel)]
        for engine in self._all:
            engine.start()

    @property
    def ready(self) -> bool:
        return len(self._loaded) == self._parallel and not self._closing

    @property
    def running(self) -> int:
        return len(self._jobs)

    @property
    def llm(self) -> LLM:
        """One of them, to ask about the models."""
        if self._closing:
            raise ApiError(503, CLOSING, code="shutting_down")
        llm = self._all[0].llm if self._all else None
        if not self.ready or llm is None:
            raise ApiError(503, "the model is being loaded", code="loading", retry=RETRY_SECONDS)
        return llm

    def submit(self, job: Job) -> None:
        if self._closing:
            raise ApiError(503, CLOSING, code="shutting_down")
        if not self._idle and len(self.queue) >= self._max_queue:
            raise ApiError(429, BUSY, code="queue_full", retry=RETRY_SECONDS)
        self.queue.push(job)
        self._dispatch()

    def cancel(self, job: Job, error: ApiError | None = None) -> None:
        """Nobody waits for this answer any more, or only for `error`."""
        if job.over:
            return
        if error is not None:
            job.tell(Failed(error))
        job.over = job.cancelled = True
        job.wake()
        if self.queue.remove(job):
            return
        for engine, running in self._jobs.items():
            if running is job:
                engine.abort(job)

    def close(self) -> None:
        """No new requests."""
        self._closing = True

    def stop(self) -> None:
        """End every answer, with an error to those who wait."""
        self._closing = True
        waiting = [self.queue.pop() for _ in range(len(self.queue))]
        for job in [*waiting, *self._jobs.values()]:
            self.cancel(job, ApiError(503, CLOSING, code="shutting_down"))

    def end(self) -> bool:
        """Wait for the threads. False: one is stuck in a long call."""
        for engine in self._all:
            engine.end()
        end = time.monotonic() + LEAVE_SECONDS
        for engine in self._loaded:
            engine.join(max(0.0, end - time.monotonic()))
        return not any(engine.is_alive() for engine in self._all)

    def _dispatch(self) -> None:
        while self._idle and len(self.queue):
            job = self.queue.pop()
            # The engine that this client had last holds the beginning of its conversation.
            engine = next((engine for engine in self._idle if engine.last_client == job.client), self._idle[0])
            self._idle.remove(engine)
            self._jobs[engine] = job
            engine.give(job)

    # -- what engines report

    def free(self, engine: Engine) -> None:
        self._loaded.add(engine)
        self._jobs.pop(engine, None)
        self._idle.append(engine)
        self._dispatch()

    def not_loaded(self, error: Exception) -> None:
        self.error = self.error or error
        self.on_error()
