"""Messages between engine and worker: what is sent arrives, and anything else is one `WireError`."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import parameters

from duodecoding import SamplingParams, wire
from duodecoding.costs import CostCurve
from duodecoding.drafters.growth import BestFirst, Chains
from duodecoding.tree import Proposal, TokenTree
from duodecoding.types import Source
from duodecoding.wire import Close, Commit, Failed, Hello, Nodes, Open, Ping, Pong, Ready, WireError, encode, main_side, worker_side

NUMBERS = st.integers(-(2**63), 2**64 - 1)
FLOATS = st.floats(allow_nan=False)
TOKENS = st.lists(NUMBERS, max_size=40)
CURVES = st.dictionaries(st.integers(0, 64), st.floats(1e-6, 10.0), min_size=1, max_size=6)
GROWTHS = st.builds(wire.GrowBestFirst, NUMBERS, st.none() | CURVES, NUMBERS, FLOATS) | st.builds(
    wire.GrowChains, FLOATS, CURVES, NUMBERS
)
TO_WORKER: st.SearchStrategy[wire.ToWorker] = st.one_of(
    st.builds(Hello, NUMBERS, st.text(), NUMBERS),
    st.builds(Open, NUMBERS, TOKENS, parameters(), GROWTHS, NUMBERS, st.booleans()),
    st.builds(Commit, NUMBERS, TOKENS, st.booleans()),
    st.builds(Ping, NUMBERS),
    st.builds(Close),
)
TO_MAIN: st.SearchStrategy[wire.ToMain] = st.one_of(
    st.builds(Ready, NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    st.builds(
        Nodes,
        NUMBERS,
        st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, FLOATS), max_size=20),
        NUMBERS,
        FLOATS,
        NUMBERS,
        FLOATS,
        TOKENS,
        st.booleans(),
    ),
    st.builds(Pong, NUMBERS),
    st.builds(Failed, st.text()),
)


def nodes(*found: wire.WireNode, seconds: float = 0.1) -> Nodes:
    return Nodes(1, list(found), 1, seconds, 3, 0.0)


Side = Callable[[socket.socket], "wire.Connection[wire.ToMain] | wire.Connection[wire.ToWorker]"]


def arrive(data: bytes, side: Side = main_side, cuts: list[int] | None = None, *, end: bool = True) -> list[wire.Message]:
    """What a connection makes of these bytes, arriving in pieces. Ends with the error that it must end with."""
    ours, theirs = socket.socketpair()
    got: list[wire.Message] = []
    with ours, theirs:
        connection = side(ours)
        for a, b in zip([0, *(cuts or [])], [*(cuts or []), len(data)], strict=True):
            theirs.sendall(data[a:b])
            got += connection.receive()
        if end:
            theirs.shutdown(socket.SHUT_WR)
            got += connection.receive()
    return got


@given(st.lists(TO_WORKER, max_size=6), st.randoms())
def test_engine_to_worker(messages: list[wire.ToWorker], chance: random.Random) -> None:
    data = b"".join(map(encode, messages))
    cuts = sorted(chance.randrange(len(data) + 1) for _ in range(4))
    assert arrive(data, worker_side, cuts, end=False) == messages


@given(st.lists(TO_MAIN, max_size=6), st.randoms())
def test_worker_to_engine(messages: list[wire.ToMain], chance: random.Random) -> None:
    data = b"".join(map(encode, messages))
    cuts = sorted(chance.randrange(len(data) + 1) for _ in range(4))
    assert arrive(data, main_side, cuts, end=False) == messages


@given(st.binary(max_size=200), st.sampled_from([main_side, worker_side]))
def test_any_bytes_end_in_one_error(data: bytes, side: Side) -> None:
    with pytest.raises(WireError):
        arrive(data, side)


@given(st.binary(max_size=200), st.sampled_from([main_side, worker_side]))
def test_any_payload_is_a_message_or_an_error(data: bytes, side: Side) -> None:
    with pytest.raises(WireError):
        arrive(struct.pack("<I", len(data)) + data, side)


@given(TO_MAIN | TO_WORKER, st.data())
def test_a_flipped_bit_is_a_message_or_an_error(message: wire.Message, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << bit % 8
    side = main_side if isinstance(message, wire.ToMain) else worker_side
    with pytest.raises(WireError):
        arrive(bytes(frame), side)


@given(TO_MAIN, st.data())
def test_a_truncated_message_is_an_error(message: wire.ToMain, data: st.DataObject) -> None:
    frame = encode(message)
    with pytest.raises(WireError, match="middle of a message"):
        arrive(frame[: data.draw(st.integers(1, len(frame) - 1))])


@pytest.mark.parametrize(
    "payload",
    [
        ["ping", 1],  # the other direction's
        ["nobody", 1],
        ["pong"],
        ["pong", 1, 2],
        ["pong", "1"],
        ["pong", 1.5],
        ["pong", None],
        {"type": "pong", "n": 1},
        ["nodes", 1, [(1, 0, 5, "p")], 1, 0.1, 3, 0.0, [], False],
        ["nodes", 1, [(1, 0, 5)], 1, 0.1, 3, 0.0, [], False],
        ["nodes", 1, [(1, 0.5, 5, 0.5)], 1, 0.1, 3, 0.0, [], False],
        ["nodes", 1, [(1, None, 5, 0.5)], 1, 0.1, 3, 0.0, [], False],
        ["nodes", 1, [(1, 0, 5, 0.5)], 1, 0.1, 3, 0.0, [], 1],
        [],
        0,
        None,
    ],
)
def test_only_the_records_are_messages(payload: object) -> None:
    data = msgspec.msgpack.encode(payload)
    with pytest.raises(WireError, match="not a message"):
        arrive(struct.pack("<I", len(data)) + data, end=False)


def test_parameters_are_checked_on_arrival() -> None:
    good = encode(Open(1, [1], SamplingParams(temperature=0.5), wire.GrowBestFirst(1)))
    bad = good.replace(struct.pack(">d", 0.5), struct.pack(">d", -0.5))
    with pytest.raises(WireError, match="temperature"):
        arrive(bad, worker_side, end=False)


def test_an_oversize_message_is_refused_by_its_length() -> None:
    with pytest.raises(WireError, match=str(wire.MAX_FRAME + 1)):
        arrive(struct.pack("<I", wire.MAX_FRAME + 1), end=False)
    with pytest.raises(WireError, match="too long"):
        encode(Failed("x" * wire.MAX_FRAME))


def test_messages_before_a_fault_are_handed_out() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = main_side(ours)
        theirs.sendall(encode(Pong(1)) + encode(Pong(2)) + b"\xff\xff\xff\xff")
        assert connection.receive() == [Pong(1), Pong(2)]
        for _ in range(2):
            with pytest.raises(WireError):
                connection.receive()
        assert connection.wait(None)  # does not hang


def test_a_peer_that_does_not_read_is_an_error_and_not_a_hang() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = main_side(ours)
        big = Commit(1, list(range(10**6)))
        for _ in range(wire.MAX_UNSENT // len(encode(big))):
            connection.send(big)
        assert not connection.wait(0.0)
        with pytest.raises(WireError, match="does not read"):
            _send_often(connection, big)


def _send_often(connection: wire.Connection[wire.ToMain], message: wire.Message) -> None:
    for _ in range(8):
        connection.send(message)


def test_what_did_not_fit_at_once_is_sent_later() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender, receiver = main_side(ours), worker_side(theirs)
        messages = [Commit(1, list(range(200_000))), Commit(2, [5]), Close()]
        for message in messages:
            sender.send(message)
        got: list[wire.ToWorker] = []
        while len(got) < len(messages):
            sender.wait(0.001)
            got += receiver.receive()
        assert got == messages


def test_the_end_of_the_other_side_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        connection = main_side(ours)
        theirs.close()
        assert connection.wait(None)
        with pytest.raises(WireError, match="closed"):
            connection.receive()
        with pytest.raises(WireError):
            _send_often(connection, Close())


def test_waiting_ends_with_its_time() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = main_side(ours)
        assert not connection.wait(0.001)
        assert connection.receive() == []
        theirs.sendall(encode(Pong(3)))
        assert connection.wait(None)
        assert connection.receive() == [Pong(3)]


@pytest.mark.parametrize(("timeout", "slept"), [(2.0, [1.0]), (0.5, []), (None, [None])])
def test_who_is_awake_sleeps_only_for_what_is_left(
    timeout: float | None, slept: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, asked = 100.0, list[float | None]()

    def poll(fd: int, *, writing: bool, timeout: float | None) -> bool:
        nonlocal now
        asked.append(timeout)
        now += timeout or 0.25
        return timeout is None  # a message comes while it sleeps

    monkeypatch.setattr(wire, "_poll", poll)
    monkeypatch.setattr(wire, "time", SimpleNamespace(monotonic=lambda: now))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert main_side(ours).wait(timeout, awake=1.0) is (timeout is None)
    assert asked == [0.0] * (2 if timeout == 0.5 else 4) + slept


def test_a_closed_connection_says_so() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        connection = main_side(ours)
        connection.close()
        with pytest.raises(WireError):
            connection.receive()
        with pytest.raises(WireError):
            connection.send(Close())


def test_file_descriptors_beyond_what_select_can_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SELECT_LIMIT", 0)
    test_waiting_ends_with_its_time()
    test_what_did_not_fit_at_once_is_sent_later()


@given(GROWTHS)
def test_a_growth_is_built_or_refused(plan: wire.GrowthPlan) -> None:
    try:
        growth = wire.build_growth(plan)
    except WireError:
        return
    assert isinstance(growth, Chains if isinstance(plan, wire.GrowChains) else BestFirst)


def test_a_described_growth_is_the_growth() -> None:
    curve = {1: 0.001, 2: 0.0011, 4: 0.004}
    here, there = BestFirst(4, curve=CostCurve(curve), floor=0.01), wire.build_growth(wire.GrowBestFirst(4, curve, floor=0.01))
    tree = TokenTree([1, 2, 3])
    tree.root.expanded = True
    for token, p in enumerate([0.5, 0.3, 0.1, 0.005]):
        tree.add(Proposal(token + 1, -2, token, p, Source.MODEL))
    assert there.leaves(tree, 9) == here.leaves(tree, 9)
    assert there.branching == here.branching


@pytest.mark.parametrize(
    "message",
    [
        nodes((1, 0, 5, float("nan"))),
        nodes((1, 0, 5, -0.1)),
        nodes((1, 0, 5, 1.1)),
        nodes((1, 0, -1, 0.5)),
        nodes((1, 0, 24, 0.5)),
        nodes((0, 0, 5, 0.5)),
        nodes((-4, 0, 5, 0.5)),
        nodes((1 << 40, 0, 5, 0.5)),
        nodes((2, 2, 5, 0.5)),
        nodes((2, 3, 5, 0.5)),
        nodes(seconds=float("nan")),
        nodes(seconds=-1.0),
        nodes(seconds=float("inf")),
        msgspec.structs.replace(nodes(), sent=float("nan")),
        msgspec.structs.replace(nodes(), width=-1),
        msgspec.structs.replace(nodes(), root=-1),
    ],
)
def test_values_that_make_no_sense(message: Nodes) -> None:
    with pytest.raises(WireError, match="nonsense"):
        wire.check_nodes(message, vocabulary=24, first_key=1, end_key=1 << 40)


def test_values_that_do() -> None:
    wire.check_nodes(nodes((1, 0, 5, 0.0), (2, -7, 23, 1.0), (3, 1, 0, 0.5)), vocabulary=24, first_key=1, end_key=1 << 40)


def test_parameters_survive() -> None:
    params = replace(SamplingParams(), stop=("a", "b"), logit_bias={3: 1.5})
    (got,) = arrive(encode(Open(1, [1], params, wire.GrowBestFirst(1))), worker_side, end=False)
    assert isinstance(got, Open)
    assert got.params == params
