"""One engine's use of a draft model: messages in, draft steps between them, every step's guesses out.

Messages are handled between draft steps: a commit re-roots the tree and drops dead branches before anything more is drafted.
"""

from __future__ import annotations

import hmac
import mmap
import os
import time
from collections.abc import Callable, Sequence

from duodecoding.backends.base import Draft, Vocabulary
from duodecoding.drafters.bridge import BridgeDrafter
from duodecoding.drafters.model import ModelDrafter
from duodecoding.errors import Interrupted
from duodecoding.tree import Node, Proposal
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
)

HANDSHAKE_SECONDS = 10.0  # a stranger who says nothing does not keep others waiting for longer
LOOK_UP_SECONDS = 2.0  # how often an idle worker makes sure that its parent lives


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
        awake: float = 0.0,
    ) -> None:
        """`flag`: shared memory through which the engine breaks off a step. `alone`: is there nobody left to draft for, though
        the connection is open? `bridge`: the target's vocabulary, where it is not the draft's. `awake`: seconds without work in
        which a message is looked for again and again."""
        self._connection, self._draft, self._flag, self._alone = connection, draft, flag, alone
        self._bridge, self._awake = bridge, awake
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
        awake = self._awake
        while wait and not self._connection.wait(LOOK_UP_SECONDS, awake=awake):
            if self._alone():
                return [Close()]
            awake = 0.0
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
