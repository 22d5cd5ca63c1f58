"""Draft workers of all kinds for tests: in a thread, in a process, and some that misbehave."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from odd_worker import SlowDraft
from worlds import World

from duodecoding import LLM
from duodecoding.backends.base import Conversation, Draft, Target
from duodecoding.core import Choose
from duodecoding.drafting import Drafters
from duodecoding.launch import Launch, Peer, process
from duodecoding.pace import Pace, guessed_costs
from duodecoding.remote import BACKOFF, STALL_SECONDS, RemoteDrafter
from duodecoding.session import Session
from duodecoding.tree import PassNode
from duodecoding.types import EngineConfig, SamplingParams
from duodecoding.wire import VERSION, Message, Ready, WireError, encode, main_side, worker_side

ODD_WORKER = Path(__file__).with_name("odd_worker.py")
PATIENCE = 60.0  # seconds; how long a test waits for what must happen some time


class SlowTarget:
    """Another target whose passes now and then take their time; in every other answer while the engine goes on."""

    overlaps, weights_bytes, pass_sizes = False, 0, ()

    def __init__(self, target: Target, delay: float, seed: int = 0) -> None:
        self._target, self._delay, self._random = target, delay, random.Random(seed)
        self.vocabulary, self.context = target.vocabulary, target.context
        self.abort, self.close = target.abort, target.close
        self._ends = 0.0

    def open(self, prompt: Sequence[int], params: SamplingParams) -> Conversation:
        self.overlaps = not self.overlaps
        return self._target.open(prompt, params)

    def verify(self, work: Sequence[tuple[Conversation, Sequence[PassNode]]]) -> list[Choose]:
        slow = self._random.random() < 0.5
        self._ends = time.monotonic() + (self._random.random() * self._delay if slow else 0.0)
        if not self.overlaps:
            self.finish()
        return self._target.verify(work)

    def done(self) -> bool:
        return time.monotonic() >= self._ends

    def finish(self) -> None:
        time.sleep(max(0.0, self._ends - time.monotonic()))


class Eager(Pace):
    """Takes the target for slow and speculation for worth it, whatever the clock says: more guesses in more passes."""

    def __init__(self) -> None:
        costs = guessed_costs(on_gpu=True)
        costs.verify[512].scale(20.0)
        super().__init__(costs)
        self.switch.limit = math.inf

    def target_pass(self, tokens: int, seconds: float, context: int, *, alone: bool) -> None:
        pass


def in_thread(draft: Draft) -> Launch:
    """A worker in this process: the same loop over a socket pair."""
    return acted(lambda theirs: Session(worker_side(theirs), draft).run())


def acted(act: Callable[[socket.socket], None]) -> Launch:
    """A thread at the other end of the socket that does as it likes."""

    def launch() -> Peer:
        ours, theirs = socket.socketpair()

        def run() -> None:
            with theirs, contextlib.suppress(WireError, OSError):  # the engine may hang up
                act(theirs)

        threading.Thread(target=run, daemon=True).start()
        return Peer(main_side(ours))

    return launch


def says(*frames: bytes | Message, stay: bool = True) -> Launch:
    """A worker that greets properly, waits for the first answer, then sends these whatever it is told."""

    def act(theirs: socket.socket) -> None:
        theirs.recv(1 << 16)
        theirs.sendall(encode(Ready(VERSION, 24, 64, 1)))
        theirs.recv(1 << 16)
        for frame in frames:
            theirs.sendall(frame if isinstance(frame, bytes) else encode(frame))
        while stay and theirs.recv(1 << 16):
            pass

    return acted(act)


def in_process(world: World, delay: float = 0.0) -> Launch:
    """A worker process with the world's scripted draft."""
    scripted = {
        "seed": world.seed,
        "size": world.size,
        "memory": world.memory,
        "share": world.share,
        "context": world.draft_context,
    }
    return _odd(scripted, delay, Path("none"), EngineConfig())


def in_slow_process(path: Path, config: EngineConfig, delay: float) -> Launch:
    """A worker process with a real draft and random delays."""
    return _odd(None, delay, path, config)


def _odd(scripted: dict[str, float] | None, delay: float, path: Path, config: EngineConfig) -> Launch:
    odd = json.dumps({"scripted": scripted, "delay": delay})
    return process([sys.executable, str(ODD_WORKER), odd, f"--draft={path}", f"--ctx-size={config.ctx_size}", "--threads=1"])


@contextlib.contextmanager
def engine(
    target: Target,
    launch: Launch,
    config: EngineConfig,
    *,
    free: Drafters | None = None,
    ready: bool = True,
    stall_seconds: float = STALL_SECONDS,
    backoff: Sequence[float] = BACKOFF,
) -> Iterator[LLM]:
    """An engine with a worker, which has started unless `ready` is False. It drafts whether that pays or not."""
    remote = RemoteDrafter(launch, target.vocabulary.size, stall_seconds=stall_seconds, backoff=backoff)
    remote.start()
    llm = LLM.of(target, replace(free or Drafters(), remote=remote), config)
    llm._pace = Eager()
    try:
        if ready:
            assert remote.wait_ready(PATIENCE), remote.last_error
        yield llm
    finally:
        remote.close()  # the target may belong to others


def worker_of(llm: LLM) -> RemoteDrafter:
    remote = llm._drafters.remote
    assert remote is not None
    return remote


def slow(world: World, delay: float, seed: int) -> tuple[SlowTarget, SlowDraft]:
    return SlowTarget(world.target(), delay, seed), SlowDraft(world.draft(), delay, seed + 1)


def exists(pid: int) -> bool:
    """Is there such a process, and not only its remains?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def ended(child: int) -> bool:
    """Is a child of this process over, with all its threads? If nobody has waited for it, it is left to be waited for."""
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def eventually(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE
    while not holds() and time.monotonic() < end:
        time.sleep(0.005)
    return holds()


def resident(pid: int = 0) -> int:
    """Bytes of memory that a process holds."""
    pages = int(Path(f"/proc/{pid or os.getpid()}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Script:
    """A program that makes an engine with a scripted worker process, prints the worker's id, and does `then`."""

    then: str

    @property
    def source(self) -> str:
        return f"""
import sys, time, os, signal, threading
sys.path.insert(0, {str(Path(__file__).parent)!r})
from workers import *
from worlds import World
world = World(**{asdict(World())!r})
remote = RemoteDrafter(in_process(world), world.size)
{self.then}
"""
