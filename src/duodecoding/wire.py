"""What the engine and a draft worker say to each other, as typed records over a socket.

A frame is a length (4 bytes, little-endian) and that many bytes of msgpack. Nothing is ever unpickled; a frame that is too long,
cut short or not exactly one of the records below ends the connection with one `WireError`. Nothing here blocks for long: what the
peer does not take at once waits in a bounded buffer.
"""

from __future__ import annotations

import contextlib
import errno
import math
import select
import socket
import struct
import time
from typing import Generic, TypeVar

import msgspec

from duodecoding.costs import CostCurve
from duodecoding.drafters.growth import BestFirst, Chains, Growth
from duodecoding.errors import DuoError
from duodecoding.types import SamplingParams

VERSION = 2
MAX_FRAME = 8 << 20  # bytes of one message
MAX_UNSENT = 2 * MAX_FRAME  # bytes that wait for a peer who does not read
MAX_READS = 64  # of the socket in a row, so that a peer who never stops cannot hold us
HEADER = struct.Struct("<I")
WOULD_BLOCK = {errno.EAGAIN, errno.EWOULDBLOCK, errno.EINPROGRESS, errno.ENOTCONN}  # the last two: still connecting
SELECT_LIMIT = 1024  # file descriptors that select() can watch


class WireError(DuoError):
    """The other side is gone, does not read, or does not speak this protocol."""


class _Record(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One kind of message: its name, then its fields in order."""


class GrowBestFirst(_Record, frozen=True, tag="best-first"):
    """`drafters.growth.BestFirst`. `curve`: seconds by leaves per step."""

    width: int
    curve: dict[int, float] | None = None
    branching: int = 4
    floor: float = 0.0


class GrowChains(_Record, frozen=True, tag="chains"):
    """`drafters.growth.Chains`."""

    budget: float
    curve: dict[int, float]
    most: int = 4


GrowthPlan = GrowBestFirst | GrowChains


class Hello(_Record, frozen=True, tag="hello"):
    version: int
    secret: str
    vocabulary: int  # of the target: ids beyond it are not worth guessing


class Open(_Record, frozen=True, tag="open"):
    """Begin to draft after `prompt`. Everything about an answer with another number is void from here on."""

    answer: int
    prompt: list[int]
    params: SamplingParams
    growth: GrowthPlan
    first_key: int = 1  # of the guesses; they count up from here
    grow: bool = True  # at once, or only when a commit says so
    unread: int = 0  # tokens at the prompt's beginning to leave out


class Commit(_Record, frozen=True, tag="commit"):
    """The target said `tokens`. `grow`: go on drafting below them."""

    answer: int
    tokens: list[int]
    grow: bool = True


class Ping(_Record, frozen=True, tag="ping"):
    n: int


class Close(_Record, frozen=True, tag="close"):
    pass


class Ready(_Record, frozen=True, tag="ready"):
    version: int
    vocabulary: int
    context: int
    pid: int


WireNode = tuple[int, int, int, float]  # key, parent, token, p


class Nodes(_Record, frozen=True, tag="nodes"):
    """A draft step has ended and the next begins, or a chunk of the prompt was read (no nodes, nothing expanding)."""

    answer: int
    nodes: list[WireNode]
    width: int  # leaves expanded
    seconds: float  # that it took
    root: int  # position of the last committed token that the draft knows of
    sent: float  # on the worker's clock
    expanding: list[int] = []  # leaves of the step that begins
    done: bool = False  # none does: nothing more to draft until a commit


class Pong(_Record, frozen=True, tag="pong"):
    n: int


class Failed(_Record, frozen=True, tag="failed"):
    what: str


ToWorker = Hello | Open | Commit | Ping | Close
ToMain = Ready | Nodes | Pong | Failed
Message = ToWorker | ToMain
In = TypeVar("In", ToWorker, ToMain)

_encoder = msgspec.msgpack.Encoder()
_for_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_for_main: msgspec.msgpack.Decoder[ToMain] = msgspec.msgpack.Decoder(ToMain)


def build_growth(plan: GrowthPlan) -> Growth:
    """The policy that a message describes. A description that makes no sense is the sender's fault."""
    try:
        return _build_growth(plan)
    except DuoError as error:
        raise WireError("the growth makes no sense", str(error)) from error


def _build_growth(plan: GrowthPlan) -> Growth:
    if isinstance(plan, GrowChains):
        _demand(plan.budget > 0 and plan.most >= 1, f"chains of {plan.most} in {plan.budget} s")
        return Chains(plan.budget, CostCurve(plan.curve), most=plan.most)
    _demand(plan.width >= 1 and plan.branching >= 1 and 0 <= plan.floor <= 1, f"{plan}")
    curve = CostCurve(plan.curve) if plan.curve is not None else None
    return BestFirst(plan.width, curve=curve, branching=plan.branching, floor=plan.floor)


def check_nodes(message: Nodes, *, vocabulary: int, first_key: int, end_key: int) -> None:
    """Guesses that can enter a tree. The types were right already; these are the values."""
    _demand(math.isfinite(message.seconds) and message.seconds >= 0, f"a step of {message.seconds} s")
    _demand(math.isfinite(message.sent), f"sent at {message.sent}")
    _demand(message.width >= 0 and message.root >= 0, f"{message.width} leaves at {message.root}")
    for key, parent, token, p in message.nodes:
        named = first_key <= key < end_key and (parent <= 0 or first_key <= parent < key)
        if not (named and 0 <= token < vocabulary and 0 <= p <= 1):  # NaN fails too
            raise WireError("the other side speaks nonsense", f"a guess of token {token}, {key} below {parent}, p {p}")


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise WireError("the other side speaks nonsense", what)


def encode(message: Message) -> bytes:
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME:
        raise WireError("a message is too long", f"{len(payload)} of at most {MAX_FRAME} bytes")
    return HEADER.pack(len(payload)) + payload


class Connection(Generic[In]):
    """Messages over a socket, in both directions, without blocking. Any fault raises `WireError`, from then on always."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[In]) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._decoder: msgspec.msgpack.Decoder[In] = decoder
        self._inbox, self._outbox = bytearray(), bytearray()
        self._ended: str | None = None  # why nothing more will come

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Hand over a message; what the socket does not take now goes out with later calls."""
        frame = encode(message)
        if len(self._outbox) + len(frame) > MAX_UNSENT:
            raise WireError("the other side does not read", f"{len(self._outbox)} bytes wait for it")
        self._outbox += frame
        self.flush()

    def flush(self) -> bool:
        """Send what waits. True: nothing waits any more."""
        try:
            while self._outbox:
                del self._outbox[: self._socket.send(self._outbox)]
        except OSError as error:
            if error.errno not in WOULD_BLOCK:
                raise WireError("the connection broke", str(error)) from error
        return not self._outbox

    def receive(self) -> list[In]:
        """All messages that are here. A fault is raised once those before it have been handed out."""
        messages: list[In] = []
        for _ in range(MAX_READS):
            if self._ended is not None or not self._fill():
                break
            messages += self._frames()
        if self._ended is not None and not messages:
            raise WireError("the connection ended", self._ended)
        return messages

    def _fill(self) -> bool:
        """Read what is there, once. False: nothing is."""
        try:
            data = self._socket.recv(1 << 18)
        except OSError as error:
            if error.errno not in WOULD_BLOCK:
                self._ended = str(error)
            return False
        self._inbox += data
        if not data:
            self._ended = "in the middle of a message" if self._inbox else "the other side closed it"
        return bool(data)

    def _frames(self) -> list[In]:
        messages: list[In] = []
        start = 0
        while self._ended is None and len(self._inbox) - start >= HEADER.size:
            (length,) = HEADER.unpack_from(self._inbox, start)
            if length > MAX_FRAME:
                self._ended = f"a message of {length} bytes"
                break
            end = start + HEADER.size + length
            if len(self._inbox) < end:
                break
            try:
                messages.append(self._decoder.decode(bytes(self._inbox[start + HEADER.size : end])))
            except (msgspec.MsgspecError, DuoError, ValueError, OverflowError, RecursionError, MemoryError) as error:
                self._ended = f"not a message: {error}"
            start = end
        del self._inbox[:start]
        return messages

    def wait(self, timeout: float | None, *, awake: float = 0.0) -> bool:
        """Until something can be received, or `timeout` seconds have passed. Goes on sending meanwhile. `awake`: looks again and
        again for so many seconds, and sleeps only then: who has to be woken up hears of a message several times as late."""
        now = time.monotonic()
        sleeps, end = now + awake, math.inf if timeout is None else now + timeout
        while self._ended is None:
            left = max(0.0, end - now) if now >= sleeps else 0.0
            if _poll(self.fileno(), writing=not self.flush(), timeout=None if left == math.inf else left):
                break
            now = time.monotonic()
            if now >= end:
                return False
        return True

    def close(self) -> None:
        with contextlib.suppress(WireError):
            self.flush()
        self._socket.close()
        self._ended = self._ended or "closed here"


def _poll(fd: int, *, writing: bool, timeout: float | None) -> bool:
    """Is there something to read? Waits for that, or for room to write if `writing`."""
    if fd < 0:
        raise WireError("the connection is closed")
    if fd < SELECT_LIMIT:  # its timeout is exact to the microsecond; poll() knows milliseconds only
        readable, _, _ = select.select([fd], [fd] if writing else [], [], timeout)
        return bool(readable)
    poller = select.poll()
    poller.register(fd, select.POLLIN | (select.POLLOUT if writing else 0))
    events = poller.poll(None if timeout is None else math.ceil(timeout * 1000))
    return any(event & ~select.POLLOUT for _, event in events)


def main_side(sock: socket.socket) -> Connection[ToMain]:
    return Connection(sock, _for_main)


def worker_side(sock: socket.socket) -> Connection[ToWorker]:
    return Connection(sock, _for_worker)
