"""The draft worker: the protocol it keeps, and answers that are the same with it."""

from __future__ import annotations

import gc
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workers import PATIENCE, Eager, SlowTarget, acted, engine, eventually, in_process, in_thread, slow, worker_of
from worlds import World, configs, parameters, said, worlds

from duodecoding import LLM, SamplingParams, session, worker
from duodecoding.backends import scripted
from duodecoding.backends.base import Conversation, Target
from duodecoding.backends.llamacpp_target import LlamaTarget
from duodecoding.cli.main import main as cli
from duodecoding.core import Choose
from duodecoding.drafters.growth import BestFirst
from duodecoding.drafters.model import ModelDrafter
from duodecoding.drafting import Drafters
from duodecoding.errors import Interrupted, UsageError
from duodecoding.launch import Peer, connect
from duodecoding.pace import Pace, guessed_costs
from duodecoding.planner import Switch
from duodecoding.remote import RemoteDrafter
from duodecoding.tree import PassNode
from duodecoding.types import EngineConfig, Mode, Source
from duodecoding.wire import (
    VERSION,
    Close,
    Commit,
    Connection,
    Failed,
    GrowBestFirst,
    GrowChains,
    Hello,
    Message,
    Nodes,
    Open,
    Ping,
    Pong,
    Ready,
    ToMain,
    ToWorker,
    WireError,
    encode,
    main_side,
    worker_side,
)

WORLD = World(context=200, draft_context=200)
PARAMS = SamplingParams(max_tokens=60, ignore_eos=True)
BOTH = [Mode.LOCKSTEP, Mode.DUO]


class Client:
    """An engine's end of a worker that runs in a thread."""

    def __init__(self, draft: scripted.ScriptedDraft, secret: str = "") -> None:
        ours, theirs = socket.socketpair()
        self.connection: Connection[ToMain] = main_side(ours)
        self._waiting: list[ToMain] = []
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, args=(theirs, draft, secret), daemon=True)
        self._thread.start()

    def _serve(self, theirs: socket.socket, draft: scripted.ScriptedDraft, secret: str) -> None:
        with theirs:
            try:
                session.Session(worker_side(theirs), draft).run(secret)
            except WireError as error:
                self.error = error

    def greet(self, version: int = VERSION, secret: str = "", vocabulary: int = 24) -> ToMain:
        self.connection.send(Hello(version, secret, vocabulary))
        return self.next()

    def next(self) -> ToMain:
        while not self._waiting:
            assert self.connection.wait(PATIENCE)
            self._waiting += self.connection.receive()
        return self._waiting.pop(0)

    def steps(self, root: int) -> list[Nodes]:
        """All that is drafted until the worker says that it is done with this root."""
        found: list[Nodes] = []
        while True:
            message = self.next()
            assert isinstance(message, Nodes)
            found.append(message)
            if message.done and message.root == root:
                return found

    def end(self) -> None:
        self.connection.close()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client(WORLD.draft())
    assert client.greet() == Ready(VERSION, 24, 200, os.getpid())
    yield client
    client.end()


CHAIN = GrowChains(0.005, {1: 0.001, 4: 0.002}, 3)  # a few steps, then done


def open_answer(client: Client, number: int = 1, growth: GrowChains | GrowBestFirst = CHAIN, first_key: int = 1) -> None:
    client.connection.send(Open(number, list(WORLD.prompt), PARAMS, growth, first_key))


def test_every_step_is_one_message_and_the_last_says_so(client: Client) -> None:
    open_answer(client)
    steps = client.steps(root=2)
    assert steps[0].width == 0  # the prompt was read
    assert len(steps) > 3
    assert all(step.answer == 1 and step.root == 2 for step in steps)
    assert [step.done for step in steps] == [False] * (len(steps) - 1) + [True]
    known = {0, -2}
    for step in steps:
        assert all(parent in known for _, parent, _, _ in step.nodes)
        known |= {key for key, _, _, _ in step.nodes}


def test_keys_begin_where_they_are_told_to(client: Client) -> None:
    open_answer(client, first_key=500)
    keys = [key for step in client.steps(root=2) for key, _, _, _ in step.nodes]
    assert keys == list(range(500, 500 + len(keys)))


def test_a_commit_reroots(client: Client) -> None:
    open_answer(client)
    first = client.steps(root=2)
    right = max((node for step in first for node in step.nodes if node[1] == -2), key=lambda node: node[3])
    client.connection.send(Commit(1, [right[2]]))
    below = client.steps(root=3)
    assert any(step.nodes for step in below)
    client.connection.send(Commit(1, [9, 9]))  # nobody guessed that: the root is bare
    bare = client.steps(root=5)
    assert next(step for step in bare if step.nodes).nodes[0][1] == -5
    assert bare[0].expanding == [-5]


def test_commits_in_a_row_are_one(client: Client) -> None:
    """Nothing is drafted below a token that was overtaken: the draft checks every step against its own idea of the path."""
    open_answer(client)
    client.steps(root=2)
    ours = client.connection
    ours._outbox += b"".join(map(encode, [Commit(1, [7]), Commit(1, [8]), Commit(1, [3, 4])]))
    ours.send(Ping(1))
    assert client.next() == Pong(1)
    assert {step.root for step in client.steps(root=6)} == {6}


def test_messages_about_another_answer_are_ignored(client: Client) -> None:
    open_answer(client, number=1)
    client.steps(root=2)
    open_answer(client, number=2)
    client.connection.send(Commit(1, [5, 5, 5]))
    assert {step.answer for step in client.steps(root=2)} == {2}
    client.connection.send(Commit(3, [5]))
    client.connection.send(Ping(8))
    assert client.next() == Pong(8)


def test_a_worker_that_is_told_to_rest_rests_and_comes_back(client: Client) -> None:
    client.connection.send(Open(1, list(WORLD.prompt), PARAMS, CHAIN, grow=False))
    assert [step.nodes for step in client.steps(root=2)] == [[]]
    client.connection.send(Commit(1, [4], grow=False))
    assert [step.nodes for step in client.steps(root=3)] == [[]]
    client.connection.send(Commit(1, [4], grow=True))
    assert any(step.nodes for step in client.steps(root=4))


def test_nothing_is_guessed_outside_the_targets_vocabulary() -> None:
    client = Client(World(draft_padding=40, context=200, draft_context=200).draft())
    client.greet(vocabulary=24)
    open_answer(client)
    tokens = [token for step in client.steps(root=2) for _, _, token, _ in step.nodes]
    assert tokens
    assert max(tokens) < 24
    client.end()


def test_a_token_that_the_draft_does_not_have_ends_its_part(client: Client) -> None:
    open_answer(client)
    client.steps(root=2)
    client.connection.send(Commit(1, [24]))
    assert [step.nodes for step in client.steps(root=3)] == [[]]
    client.connection.send(Commit(1, [4]))
    assert [step.nodes for step in client.steps(root=4)] == [[]]
    open_answer(client, number=2)
    assert any(step.nodes for step in client.steps(root=2))


def test_a_prompt_as_long_as_the_drafts_context(client: Client) -> None:
    client.connection.send(Open(1, [3] * 230, PARAMS, CHAIN))
    assert [step.nodes for step in client.steps(root=229)] == [[]]


def test_a_tree_without_bound_stops_growing(client: Client) -> None:
    open_answer(client, growth=GrowBestFirst(4))
    assert sum(step.width for step in client.steps(root=2)) == 96


@pytest.mark.parametrize(
    ("version", "secret", "what"), [(VERSION + 1, "s", "version"), (VERSION, "wrong", "secret"), (VERSION, "", "secret")]
)
def test_a_handshake_that_fails(version: int, secret: str, what: str) -> None:
    client = Client(WORLD.draft(), secret="s")
    refusal = client.greet(version, secret)
    assert isinstance(refusal, Failed)
    assert what in refusal.what
    client.end()


def test_no_hello_no_service() -> None:
    client = Client(WORLD.draft())
    client.connection.send(Ping(1))
    client._thread.join(PATIENCE)
    assert client.error is not None
    assert "before hello" in str(client.error)


@pytest.mark.parametrize(
    "bad",
    [
        Open(1, [], PARAMS, CHAIN),
        Open(1, [1], PARAMS, CHAIN, 0),
        Open(1, [1], PARAMS, CHAIN, unread=1),
        Open(1, [1], PARAMS, GrowBestFirst(0)),
    ],
)
def test_an_answer_that_makes_no_sense_ends_the_connection(client: Client, bad: Open) -> None:
    client.connection.send(bad)
    with pytest.raises(WireError):
        client.next()


def test_close_ends_it(client: Client) -> None:
    client.connection.send(Close())
    client._thread.join(PATIENCE)
    assert not client._thread.is_alive()


# Answers


@settings(max_examples=60)
@given(worlds(), parameters(), configs(BOTH), st.booleans())
def test_the_answer_is_that_of_plain_decoding(world: World, params: SamplingParams, config: EngineConfig, ready: bool) -> None:
    with engine(world.target(), in_thread(world.draft()), config, free=world.drafters().free, ready=ready) as llm:
        result = llm.generate(list(world.prompt), params)
        assert said(result) == said(world.plain(params))
        assert result.stats.draft_faults == 0


@settings(max_examples=15)
@given(worlds(), parameters(), configs(BOTH), st.integers(0, 99))
def test_so_it_is_with_delays_on_both_sides(world: World, params: SamplingParams, config: EngineConfig, seed: int) -> None:
    target, draft = slow(world, 0.003, seed)
    with engine(target, in_thread(draft), config) as llm:
        assert said(llm.generate(list(world.prompt), params)) == said(world.plain(params))


@pytest.mark.parametrize("mode", BOTH)
def test_the_workers_guesses_are_used(mode: Mode) -> None:
    world = World(share=0.0, context=200, draft_context=200)  # a perfect draft
    target, _ = slow(world, 0.004, 1)
    config = EngineConfig(mode=mode, draft_length=4, draft_width=2)
    with engine(target, in_thread(world.draft()), config) as llm:
        for _ in range(3):
            result = llm.generate(list(world.prompt), PARAMS)
            assert said(result) == said(world.plain(PARAMS))
    assert result.stats.accepted_by_source.get(Source.MODEL, 0) > 10
    assert result.stats.draft_busy_seconds > 0


def test_one_answer_after_the_other_and_some_cut_short() -> None:
    chance = random.Random(4)
    plain = World(context=200).plain(PARAMS)
    with engine(WORLD.target(), in_thread(WORLD.draft()), EngineConfig(mode=Mode.DUO)) as llm:
        for _ in range(30):
            stream = llm.stream(list(WORLD.prompt), PARAMS)
            tokens = [next(stream).id for _ in range(chance.randrange(1, 40))]
            stream.close()
            assert tokens == plain.token_ids[: len(tokens)]
        assert worker_of(llm).faults == 0


def test_a_worker_that_comes_late_joins_the_running_answer() -> None:
    come, draft = threading.Event(), WORLD.draft()

    def act(theirs: socket.socket) -> None:
        come.wait(PATIENCE)
        session.Session(worker_side(theirs), draft).run()

    with engine(WORLD.target(), acted(act), EngineConfig(mode=Mode.DUO), ready=False) as llm:
        stream = llm.stream(list(WORLD.prompt), PARAMS)
        tokens = [next(stream).id for _ in range(5)]
        assert draft.steps == []
        come.set()
        assert worker_of(llm).wait_ready(PATIENCE)
        assert eventually(lambda: len(draft.steps) > 0)
        tokens += [token.id for token in stream]
        assert tokens == World(context=200).plain(PARAMS).token_ids
        assert worker_of(llm).steps > 0


class SlowReader(scripted.ScriptedDraft):
    """A draft that does not get through the prompt before it is allowed to."""

    def __init__(self) -> None:
        other = WORLD.draft()
        super().__init__(other.vocabulary, other._script, context=other.context)
        self.opened, self.allowed = threading.Event(), threading.Event()

    def open(self, prompt: Sequence[int], unread: int = 0) -> None:
        super().open(prompt, unread)
        self.opened.set()

    def read(self) -> bool:
        assert self.allowed.wait(PATIENCE)
        return False


@pytest.mark.parametrize("mode", BOTH)
def test_the_target_never_waits_for_the_drafts_prompt(mode: Mode) -> None:
    draft = SlowReader()
    with engine(WORLD.target(), in_thread(draft), EngineConfig(mode=mode)) as llm:
        result = llm.generate(list(WORLD.prompt), PARAMS)
        assert result.token_ids == World(context=200).plain(PARAMS).token_ids
        assert (result.stats.drafted, result.stats.wait_seconds < 0.01) == (0, True)
        draft.allowed.set()


@pytest.mark.parametrize("mode", BOTH)
def test_the_draft_reads_the_prompt_while_the_target_does(mode: Mode) -> None:
    draft = SlowReader()
    draft.allowed.set()

    class Patient(SlowTarget):
        """Its first pass takes until the draft has begun with the prompt."""

        def finish(self) -> None:
            assert draft.opened.wait(PATIENCE)

    with engine(Patient(WORLD.target(), 0.0), in_thread(draft), EngineConfig(mode=mode)) as llm:
        assert llm.generate(list(WORLD.prompt), PARAMS).token_ids == World(context=200).plain(PARAMS).token_ids


class Beside(SlowTarget):
    """Its passes run beside the engine and end when they are waited for. Notes what happens."""

    def __init__(self, target: Target) -> None:
        super().__init__(target, 0.0)
        self.notes: list[str] = []

    def open(self, prompt: Sequence[int], params: SamplingParams) -> Conversation:
        conversation = super().open(prompt, params)
        self.overlaps = True
        return conversation

    def verify(self, work: Sequence[tuple[Conversation, Sequence[PassNode]]]) -> list[Choose]:
        self.notes.append("begins")
        return super().verify(work)

    def finish(self) -> None:
        self.notes.append("ends")


def test_a_worker_that_has_nothing_to_do_is_told_before_the_target() -> None:
    """Its guesses are waited for. Behind lockstep's barrier that is after every round."""
    launch = in_thread(WORLD.draft())

    class Settling:
        def __init__(self, conversation: Conversation) -> None:
            self._conversation = conversation

        def __getattr__(self, name: str) -> object:
            return getattr(self._conversation, name)

        def commit(self, tokens: Sequence[int]) -> None:
            target.notes.append(f"settles {len(tokens)}")
            self._conversation.commit(tokens)

    class Settled(Beside):
        def open(self, prompt: Sequence[int], params: SamplingParams) -> Conversation:
            return Settling(super().open(prompt, params))  # type: ignore[return-value]

        def verify(self, work: Sequence[tuple[Conversation, Sequence[PassNode]]]) -> list[Choose]:
            self.notes.append("begins")
            return self._target.verify([(conversation._conversation, nodes) for conversation, nodes in work])  # type: ignore[attr-defined]

    def overheard() -> Peer:
        peer = launch()
        send = peer.connection.send

        def say(message: Message) -> None:
            if isinstance(message, Commit) and message.tokens:
                target.notes.append(f"tells {len(message.tokens)}")
            send(message)

        peer.connection.send = say  # type: ignore[method-assign]
        return peer

    target = Settled(WORLD.target())
    with engine(target, overheard, EngineConfig(mode=Mode.LOCKSTEP)) as llm:
        result = llm.generate(list(WORLD.prompt), PARAMS)
    rounds = [note.split() for note in target.notes if note.startswith(("tells", "settles"))]
    assert [what for what, _ in rounds] == ["tells", "settles"] * result.stats.rounds
    assert all(told[1] == settled[1] for told, settled in zip(rounds[::2], rounds[1::2], strict=True))


def test_a_worker_without_work_looks_for_a_message_before_it_sleeps() -> None:
    ours, theirs = socket.socketpair()
    waits: list[float] = []

    class Idle(Connection[ToWorker]):
        """Nothing comes for two turns, then the engine hangs up."""

        def wait(self, timeout: float | None, *, awake: float = 0.0) -> bool:
            if self.busy:
                return super().wait(timeout, awake=awake)
            waits.append(awake)
            if len(waits) == 3:
                ours.close()
            return len(waits) == 3

        busy = True

        def send(self, message: Message) -> None:
            super().send(message)
            self.busy = not (isinstance(message, Nodes) and message.done)

    with theirs:
        main_side(ours).send(Hello(VERSION, "", 24))
        main_side(ours).send(Open(1, list(WORLD.prompt), PARAMS, CHAIN, 1))
        with pytest.raises(WireError):
            session.Session(Idle(theirs, worker_side(theirs)._decoder), WORLD.draft(), awake=0.25).run()
    assert waits == [0.25, 0.0, 0.0]


@pytest.mark.parametrize("mode", BOTH)
def test_the_first_token_goes_out_at_once_and_others_while_the_next_pass_runs(mode: Mode) -> None:
    target = Beside(WORLD.target())
    with engine(target, in_thread(WORLD.draft()), EngineConfig(mode=mode)) as llm:
        stream, told = llm.stream(list(WORLD.prompt), PARAMS), []
        for tokens in stream.rounds():
            target.notes.append("tokens")
            told += [token.id for token in tokens]
    assert told == World(context=200).plain(PARAMS).token_ids
    assert target.notes[:4] == ["begins", "ends", "tokens", "begins"]
    rest, passes = target.notes[3:-1], target.notes.count("begins") - 1
    waits = rest.count("tokens") == passes - 1 and target.notes[-2:] == ["ends", "tokens"]
    assert waits, "every round's tokens go out, the last after its pass"
    ends = [i for i, note in enumerate(rest) if note == "ends"]
    assert all("tokens" in rest[a:b] for a, b in pairwise(ends)), "no round's tokens are kept back for longer than one pass"


def test_no_garbage_is_looked_for_while_the_target_waits_for_us() -> None:
    """From the end of a pass to the beginning of the next; whoever reads the answer finds Python as it was."""

    class Watched(Beside):
        def verify(self, work: Sequence[tuple[Conversation, Sequence[PassNode]]]) -> list[Choose]:
            self.notes.append(f"collects {gc.isenabled()}")
            return super().verify(work)

    target = Watched(WORLD.target())
    with engine(target, in_thread(WORLD.draft()), EngineConfig(mode=Mode.DUO)) as llm:
        stream = llm.stream(list(WORLD.prompt), PARAMS)
        assert all(gc.isenabled() for _ in stream.rounds())
        begun = [note for note in target.notes if note.startswith("collects")]
        assert begun == ["collects True"] + ["collects False"] * (len(begun) - 1)
        assert len(begun) > 3
        assert gc.isenabled()
        stream = llm.stream(list(WORLD.prompt), PARAMS)
        for _ in zip(range(2), stream.rounds(), strict=False):
            pass
        stream.close()
        assert gc.isenabled()
        gc.disable()
        try:
            assert not any(gc.isenabled() for _ in llm.stream(list(WORLD.prompt), PARAMS).rounds())
        finally:
            gc.enable()


def test_a_pass_that_is_over_is_not_listened_beside() -> None:
    """However long passes are thought to take."""
    target = Beside(WORLD.target())
    with engine(target, in_thread(WORLD.draft()), EngineConfig(mode=Mode.DUO)) as llm:
        llm._pace = Eager()
        llm._pace.costs.verify[512].scale(1e6)
        assert llm.generate(list(WORLD.prompt), PARAMS).token_ids == World(context=200).plain(PARAMS).token_ids


def test_what_passes_take_is_learnt_where_their_end_was_seen() -> None:
    class Waited(Beside):
        def done(self) -> bool:
            return False

    with engine(Waited(WORLD.target()), in_thread(WORLD.draft()), EngineConfig(mode=Mode.DUO)) as llm:
        llm._pace = Pace(guessed_costs(on_gpu=True))
        before = llm._pace.costs.verify_cost(1, 50)
        llm.generate(list(WORLD.prompt), PARAMS)
        assert llm._pace.costs.verify_cost(1, 50) != before


def test_a_slow_reader_of_the_answer_is_not_taken_for_a_slow_target() -> None:
    target = Beside(WORLD.target())
    with engine(target, in_thread(WORLD.draft()), EngineConfig(mode=Mode.DUO)) as llm:
        llm._pace = Pace(guessed_costs(on_gpu=True))
        before = llm._pace.costs.verify_cost(1, 50)
        for _ in llm.stream(list(WORLD.prompt), PARAMS).rounds():
            time.sleep(0.015)
        assert llm._pace.costs.verify_cost(1, 50) <= before
        assert llm._pace.switch.pauses == 0


def test_drafting_that_does_not_pay_is_paused_and_tried_again() -> None:
    """The core's switch reaches the worker: it rests, then gets back to work in the same answer."""
    switch = Switch(limit=-9.0, probe_limit=-9.0, shortest_pause=6, longest_pause=6)  # nothing ever pays
    target, draft = SlowTarget(WORLD.target(), 0.006), WORLD.draft()
    with engine(target, in_thread(draft), EngineConfig(mode=Mode.DUO)) as llm:
        llm._pace.switch = switch
        result = llm.generate(list(WORLD.prompt), PARAMS)
        assert result.token_ids == World(context=200).plain(PARAMS).token_ids
        assert switch.pauses > 2
        assert worker_of(llm).faults == 0
        assert len(draft.steps) > 2


def test_a_step_about_dead_leaves_is_broken_off_and_forgotten(client: Client) -> None:
    """Through shared memory: the draft notices within its step. Here the flag is up before the step begins."""
    flag = mmap.mmap(-1, mmap.PAGESIZE)
    draft = WORLD.draft()
    draft.stop_on(flag)
    drafter = ModelDrafter(draft)
    drafter.open(WORLD.prompt, PARAMS, BestFirst(2))
    grown = drafter.grow(drafter.next_leaves())
    flag[0] = 1
    leaves = drafter.next_leaves()
    with pytest.raises(Interrupted):
        drafter.grow(leaves)
    flag[0] = 0
    assert drafter.next_leaves() == leaves
    more = drafter.grow(leaves)
    assert {proposal.parent for proposal in more} <= {proposal.key for proposal in grown}


# Processes and machines


def test_a_worker_process_serves_and_leaves() -> None:
    with engine(WORLD.target(), in_process(WORLD), EngineConfig(mode=Mode.DUO)) as llm:
        pid = worker_of(llm).pid
        assert said(llm.generate(list(WORLD.prompt), PARAMS)) == said(World(context=200).plain(PARAMS))
        assert worker_of(llm).alive
    assert pid is not None
    assert not Path(f"/proc/{pid}").exists()  # and was waited for


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> str:
    """A draft server with a secret, in a thread."""
    monkeypatch.setattr("duodecoding.backends.load_draft", lambda path, config: WORLD.draft())
    where: list[str] = []
    ready = threading.Event()

    def tell(host: str, port: int) -> None:
        where.append(f"{host}:{port}")
        ready.set()

    serve = threading.Thread(
        target=worker.serve, args=(Path("draft"), EngineConfig()), kwargs={"secret": "s3cret", "ready": tell}, daemon=True
    )
    serve.start()
    assert ready.wait(PATIENCE)
    return where[0]


def remote_llm(at: str, secret: str) -> LLM:
    remote = RemoteDrafter(connect(at), WORLD.size, secret=secret)
    remote.start()
    return LLM.of(SlowTarget(WORLD.target(), 0.004), Drafters(remote=remote), EngineConfig(mode=Mode.DUO))


def test_a_draft_on_another_machine(server: str) -> None:
    plain = World(context=200).plain(PARAMS)
    for _ in range(3):  # one client after the other
        with remote_llm(server, "s3cret") as llm:
            assert worker_of(llm).wait_ready(PATIENCE)
            assert llm.generate(list(WORLD.prompt), PARAMS).token_ids == plain.token_ids
            assert worker_of(llm).steps > 0


def test_a_wrong_secret_is_refused_and_the_next_client_served(server: str) -> None:
    with remote_llm(server, "guess") as llm:
        assert not worker_of(llm).wait_ready(PATIENCE)
        assert "secret is wrong" in worker_of(llm).last_error
        assert llm.generate(list(WORLD.prompt), PARAMS).token_ids == World(context=200).plain(PARAMS).token_ids
    test_a_draft_on_another_machine(server)


def test_a_second_client_waits_for_the_first_to_vanish(server: str) -> None:
    first = remote_llm(server, "s3cret")
    assert worker_of(first).wait_ready(PATIENCE)
    with remote_llm(server, "s3cret") as second:
        plain = World(context=200).plain(PARAMS)
        assert second.generate(list(WORLD.prompt), PARAMS).token_ids == plain.token_ids  # without a draft, then
        assert not worker_of(second).alive
        peer = worker_of(first)._peer
        assert peer is not None
        peer.connection.close()  # without a word
        assert worker_of(second).wait_ready(PATIENCE)
        assert second.generate(list(WORLD.prompt), PARAMS).token_ids == plain.token_ids


def test_a_server_for_everyone_needs_a_secret() -> None:
    with pytest.raises(UsageError, match="secret"):
        worker.serve(Path("draft"), EngineConfig(), host="0.0.0.0")


@pytest.mark.parametrize("flags", [["--host=0.0.0.0"], ["--port=70000"], ["--host=no.such.host.invalid", "--secret=s"]])
def test_the_command_refuses_what_cannot_be(flags: list[str], model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["draft-server", str(model_path), *flags]) == 2
    assert "duo: error: " in capsys.readouterr().err


def test_engine_and_server_find_each_other(real_target: LlamaTarget, model_path: Path) -> None:
    """The command, in a process of its own, and an engine that uses it."""
    command = [sys.executable, "-m", "duodecoding.cli.main", "draft-server", str(model_path), "--port=0", "--threads=1"]
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # tests started in the background ignore it
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, preexec_fn=listen) as server:  # noqa: PLW1509
        assert server.stdout is not None
        remote = RemoteDrafter(connect(server.stdout.readline().strip()), real_target.vocabulary.size)
        remote.start()
        assert remote.wait_ready(PATIENCE)
        llm = LLM.of(real_target, Drafters(remote=remote), EngineConfig(mode=Mode.DUO))
        plain = LLM.of(real_target, Drafters(), EngineConfig(mode=Mode.OFF))
        params = SamplingParams(max_tokens=24)
        assert llm.generate("Once upon", params).token_ids == plain.generate("Once upon", params).token_ids
        assert remote.faults == 0
        remote.close()
        server.send_signal(signal.SIGINT)
        assert server.wait(PATIENCE) == 130


@pytest.mark.parametrize("at", ["nowhere", "host:port", ":", "127.0.0.1:99999999"])
def test_an_address_that_is_none(at: str) -> None:
    with pytest.raises(UsageError, match="draft server"):
        connect(at)


def test_the_worker_is_quiet_about_a_gone_parent() -> None:
    """Started by nobody that lives: it leaves at once, without a word."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "duodecoding.worker",
                f"--fd={theirs.fileno()}",
                "--flag-fd=0",
                "--parent=1",
                "--draft=none",
                "--ctx-size=64",
            ],
            pass_fds=[theirs.fileno()],
            capture_output=True,
            timeout=PATIENCE,
            check=False,
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
