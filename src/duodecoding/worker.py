"""The draft process: owns the draft model, grows its own view of the tree, and sends every step's guesses.

It serves one engine at a time, over an inherited socket (`python -m duodecoding.worker`) or over TCP (`serve`). Messages are
handled between draft steps: a commit re-roots the tree and drops dead branches before anything more is drafted.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import hmac
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from duodecoding import backends
from duodecoding.backends.base import Draft, Vocabulary
from duodecoding.drafters.bridge import BridgeDrafter
from duodecoding.drafters.model import ModelDrafter
from duodecoding.errors import DuoError, Interrupted, UsageError
from duodecoding.tree import Node, Proposal
from duodecoding.types import EngineConfig
from duodecoding.wire import (
    VERSION,
    Close,
    Commit,
    Connection,
    Failed,
    Hello,
    Nodes,
    Open,
    Ping,
    Pong,
    Ready,
    ToWorker,
    WireError,
    WireNode,
    build_growth,
    worker_side,
)

HANDSHAKE_SECONDS = 10.0  # a stranger who says nothing does not keep others waiting for longer
LOOK_UP_SECONDS = 2.0  # how often an idle worker makes sure that its parent lives
LOCAL = ("127.0.0.1", "localhost", "::1")
PR_SET_PDEATHSIG = 1
ELSEWHERE = -1  # `gpu_layers` of a target that does not want this CPU
YOUNG = 20_000  # objects that are made before Python looks for garbage: a step makes hundreds, all of which are in use


class Session:
    """One engine's use of a draft model."""

    def __init__(
        self,
        connection: Connection[ToWorker],
        draft: Draft,
        *,
        flag: mmap.mmap | None = None,
        alone: Callable[[], bool] = lambda: False,
        bridge: Vocabulary | None = None,
    ) -> None:
        """`flag`: shared memory through which the engine breaks off a step. `alone`: is there nobody left to draft for, though
        the connection is open? `bridge`: the target's vocabulary, where it is not the draft's."""
        self._connection, self._draft, self._flag, self._alone = connection, draft, flag, alone
        self._bridge = bridge
        if flag is not None:
            draft.stop_on(flag)
        self._answer: int | None = None
        self._root = 0  # position of the last committed token
        self._grow = self._reading = self._told = False
        self._grown: list[Proposal] = []  # by the last step, not sent yet
        self._width = 0  # of that step
        self._since = 0.0  # when what the next message reports began

    def run(self, secret: str = "") -> None:
        """Serve until the engine closes or vanishes."""
        hello, *early = self._first_messages()
        if not isinstance(hello, Hello):
            raise WireError("the other side speaks nonsense", f"{type(hello).__name__} before hello")
        if hello.version != VERSION:
            return self._refuse(f"the draft worker speaks version {VERSION} of the protocol, the engine {hello.version}")
        if not hmac.compare_digest(hello.secret.encode(), secret.encode()):
            return self._refuse("the secret is wrong")
        self._drafter = self._make_drafter(hello.vocabulary)
        self._connection.send(Ready(VERSION, self._draft.vocabulary.size, self._draft.context, os.getpid()))
        more = self._handle(early)
        while more:
            idle = not self._step()
            more = self._handle(self._messages(wait=idle))
        return None

    def _make_drafter(self, vocabulary: int) -> ModelDrafter:
        if self._bridge is not None:
            return BridgeDrafter(self._draft, self._bridge)
        return ModelDrafter(self._draft, vocab_limit=min(vocabulary, self._draft.vocabulary.size))

    def _first_messages(self) -> list[ToWorker]:
        end = time.monotonic() + HANDSHAKE_SECONDS
        while (left := end - time.monotonic()) > 0:
            if self._connection.wait(left) and (messages := self._connection.receive()):
                return messages
        raise WireError("the other side said nothing", f"for {HANDSHAKE_SECONDS:.0f} s")

    def _refuse(self, why: str) -> None:
        self._connection.send(Failed(why))

    def _messages(self, *, wait: bool) -> list[ToWorker]:
        while wait and not self._connection.wait(LOOK_UP_SECONDS):
            if self._alone():
                return [Close()]
        return self._connection.receive()

    def _handle(self, messages: Sequence[ToWorker]) -> bool:
        """Take in all that came. Commits in a row are one commit, so nothing is drafted between them. False: it is over."""
        opened: Open | None = None
        tokens: list[int] = []
        grow = self._grow
        for message in messages:
            if isinstance(message, Close):
                return False
            if isinstance(message, Ping):
                self._connection.send(Pong(message.n))
            elif isinstance(message, Open):
                opened, tokens, grow = message, [], message.grow
            elif isinstance(message, Commit) and message.answer == (opened.answer if opened else self._answer):
                tokens += message.tokens
                grow = message.grow
        if opened is not None:
            self._open(opened)
        if tokens:
            self._commit(tokens)
        if grow and not self._grow:
            self._reading = True  # what was committed meanwhile has to be read in pieces, like a prompt
        self._grow = grow
        return True

    def _open(self, message: Open) -> None:
        if not 0 <= message.unread < len(message.prompt) or message.first_key < 1:
            raise WireError("the other side speaks nonsense", "an empty prompt, nothing of it to read or a key below 1")
        self._answer, self._root = message.answer, len(message.prompt) - 1
        self._strange = self._has_strange(message.prompt)
        self._reading, self._told, self._grown, self._width = True, False, [], 0
        if not self._strange:
            self._drafter.open(message.prompt, message.params, build_growth(message.growth), message.unread)
            self._drafter.number_from(message.first_key)

    def _commit(self, tokens: Sequence[int]) -> None:
        self._root += len(tokens)
        self._strange = self._strange or self._has_strange(tokens)
        self._told = False
        if not self._strange:
            self._drafter.commit(tokens)

    def _has_strange(self, tokens: Sequence[int]) -> bool:
        """Tokens that this draft does not have; there is no drafting behind one."""
        return min(tokens) < 0 or max(tokens) >= (self._bridge or self._draft.vocabulary).size

    def _step(self) -> bool:
        """Read a chunk or draft a step. False: there is nothing to do until a message comes."""
        if self._answer is None:
            return False
        if not self._grow or self._strange or self._root >= self._draft.context - 1:
            return self._begin([])
        if self._flag is not None:
            self._flag[0] = 0  # meant for an earlier step
        try:
            return self._read() if self._reading else self._begin(self._drafter.next_leaves())
        except Interrupted:
            return True  # the commit that came with it says how to go on

    def _read(self) -> bool:
        self._since = time.monotonic()
        self._reading = self._drafter.read()
        self._tell([], done=False, read=True)
        return True

    def _begin(self, leaves: Sequence[Node]) -> bool:
        """Send the last step's guesses with word of the next step, and do that."""
        if leaves or self._grown or not self._told:
            self._tell([leaf.key for leaf in leaves], done=not leaves)
        self._told = not leaves
        if leaves:
            self._grown = self._drafter.grow(leaves)
            self._width = len(leaves)
        return bool(leaves)

    def _tell(self, expanding: list[int], *, done: bool, read: bool = False) -> None:
        """A step takes from one message to the next: with the choice of its leaves, and what came meanwhile."""
        nodes: list[WireNode] = [proposal[:4] for proposal in self._grown]
        assert self._answer is not None
        now = time.monotonic()
        seconds = now - self._since if self._width or read else 0.0
        self._connection.send(Nodes(self._answer, nodes, self._width, seconds, self._root, now, expanding, done))
        self._grown, self._width, self._since = [], 0, now


def serve(
    path: Path,
    config: EngineConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    secret: str = "",
    ready: Callable[[str, int], None] = lambda host, port: None,
) -> None:
    """Draft for engines on other machines, one after the other, for ever. `ready` is told where it listens (port 0: any)."""
    if host not in LOCAL and not secret:
        raise UsageError(
            f"a draft server on {host} without a secret", "anyone who can reach it could use it", "Give --secret, or use 127.0.0.1."
        )
    draft = backends.load_draft(path, replace(config, gpu_layers=ELSEWHERE))  # wherever the target is, it is not here
    try:
        with _listen(host, port) as listener:
            ready(*listener.getsockname()[:2])
            while True:
                _serve_one(listener.accept()[0], draft, secret)
    finally:
        draft.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=4)
    except (OSError, OverflowError) as error:
        raise UsageError(f"cannot listen on {host}:{port}", str(error)) from error


def _serve_one(client: socket.socket, draft: Draft, secret: str) -> None:
    _notice_silence(client)
    connection = worker_side(client)
    try:
        Session(connection, draft).run(secret)
    except WireError:
        pass  # this client is gone; the next one is welcome
    except DuoError as error:
        with contextlib.suppress(WireError):
            connection.send(Failed(str(error)))
    finally:
        connection.close()


def _notice_silence(client: socket.socket) -> None:
    """A machine that vanished without a word frees the server within half a minute."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, name):
            client.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def main(argv: Sequence[str] | None = None) -> int:
    """The process that an engine starts for itself."""
    parser = argparse.ArgumentParser("duodecoding.worker")
    parser.add_argument("--fd", type=int, required=True, help="inherited end of a socket pair")
    parser.add_argument("--flag-fd", type=int, required=True, help="inherited shared memory, to break off a draft step")
    parser.add_argument("--parent", type=int, required=True, help="process id of the engine")
    parser.add_argument("--draft", type=Path, required=True, help="GGUF file")
    parser.add_argument("--bridge", type=Path, help="the target, whose vocabulary is not the draft's")
    parser.add_argument("--ctx-size", type=int, required=True)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--engine", default="auto", choices=["auto", "native", "llamacpp"])
    parser.add_argument("--beside-gpu", action="store_true", help="the target does not want these cores: threads stay awake")
    parser.add_argument("--cores", default="", help="comma-separated; empty: any")
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("--die-with-parent", action="store_true", help="ask the kernel for it (only from a thread that lives on)")
    options = parser.parse_args(argv)
    _settle(options)
    connection = worker_side(socket.socket(fileno=options.fd))
    try:
        gpu = ELSEWHERE if options.beside_gpu else 0
        config = EngineConfig(ctx_size=options.ctx_size, threads=options.threads, draft_engine=options.engine, gpu_layers=gpu)
        draft = backends.load_draft(options.draft, config)
        flag = mmap.mmap(options.flag_fd, mmap.PAGESIZE)
        bridge = backends.read_vocabulary(options.bridge) if options.bridge else None
        Session(connection, draft, flag=flag, alone=lambda: os.getppid() != options.parent, bridge=bridge).run()
    except WireError:
        return 0  # the engine is gone
    except DuoError as error:
        with contextlib.suppress(WireError):
            connection.send(Failed(str(error)))
        return 1
    finally:
        connection.close()
    return 0


def _settle(options: argparse.Namespace) -> None:
    """Signals, cores and priority of this process, before anything slow."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine, which decides what becomes of us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if options.die_with_parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != options.parent:
        sys.exit(0)
    if options.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(core) for core in options.cores.split(",")})
    if options.nice:
        os.nice(options.nice)
    gc.set_threshold(YOUNG)


if __name__ == "__main__":
    sys.exit(main())
