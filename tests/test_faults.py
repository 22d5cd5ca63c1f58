"""The worker dies, stalls, speaks nonsense or never comes: every answer is complete and the same, and nobody is left behind."""

from __future__ import annotations

import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from workers import PATIENCE, Script, SlowTarget, acted, ended, engine, eventually, exists, in_process, in_thread, says, worker_of
from worlds import World

from duodecoding import LLM, SamplingParams
from duodecoding.drafting import Drafters
from duodecoding.launch import Launch, connect, process, spawn
from duodecoding.remote import MAX_FAILURES, RemoteDrafter
from duodecoding.types import EngineConfig, Mode, Result
from duodecoding.wire import VERSION, Commit, Failed, GrowBestFirst, Nodes, Pong, Ready, encode

WORLD = World(context=400, draft_context=400)
PARAMS = SamplingParams(max_tokens=120, temperature=0.8, seed=3, ignore_eos=True)
PLAIN = World(context=400).plain(PARAMS).token_ids
DUO, LOCKSTEP = EngineConfig(mode=Mode.DUO), EngineConfig(mode=Mode.LOCKSTEP)


def answer(llm: LLM, during: Callable[[int], None] = lambda i: None) -> Result:
    """An answer that must be right. `during` is called before each of its tokens is taken."""
    stream = llm.stream(list(WORLD.prompt), PARAMS)
    for i, _ in enumerate(stream):
        during(i)
    assert stream.result.token_ids == PLAIN
    assert stream.result.finish_reason == "length"
    return stream.result


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "duodecoding.draft"]


def node(key: int = 1, parent: int = -2, token: int = 5, p: float = 0.5) -> Nodes:
    return Nodes(1, [(key, parent, token, p)], 1, 0.001, 2, 0.0)


BAD: dict[str, Launch] = {
    "garbage": says(os.urandom(64).replace(b"\0", b"x")),
    "an endless message": says(b"\xff\xff\xff\x7f" + b"x" * 1000),
    "half a message": says(encode(node())[:-3], stay=False),
    "the end": says(stay=False),
    "the other side's message": says(encode(Commit(1, [4]))),
    "a second greeting": says(Ready(VERSION, 24, 64, 1)),
    "a failure of its own": says(Failed("I have had enough")),
    "a probability that is none": says(node(p=float("nan"))),
    "a probability above 1": says(node(p=1.5)),
    "a token that does not exist": says(node(token=24)),
    "a negative token": says(node(token=-1)),
    "a parent that comes later": says(node(key=3, parent=4)),
    "an answer nobody asked for": says(Nodes(7, [], 0, 0.0, 2, 0.0)),
    "a negative time": says(Nodes(1, [], 1, -1.0, 2, 0.0)),
}


@pytest.mark.parametrize("mode", [DUO, LOCKSTEP], ids=["duo", "lockstep"])
@pytest.mark.parametrize("bad", BAD)
def test_a_worker_that_speaks_nonsense(bad: str, mode: EngineConfig, caplog: pytest.LogCaptureFixture) -> None:
    with engine(SlowTarget(WORLD.target(), 0.002), BAD[bad], mode) as llm:
        result = answer(llm)
        assert result.stats.draft_faults == 1
        assert len(warnings(caplog)) == 1
        assert "goes on without it" in warnings(caplog)[0]
        assert not worker_of(llm).alive


def test_a_worker_whose_guesses_are_all_wrong_is_not_at_fault() -> None:
    wrong = [Nodes(1, [(key, -2, (key * 7) % 24, 0.9)], 1, 0.001, 2, 0.0) for key in range(1, 40)]
    with engine(SlowTarget(WORLD.target(), 0.002), says(Pong(5), *wrong), DUO) as llm:
        assert answer(llm).stats.draft_faults == 0


@pytest.mark.parametrize("greeting", [Ready(VERSION + 1, 24, 64, 1), Ready(VERSION, 0, 0, 1), Nodes(1, [], 0, 0.0, 2, 0.0)])
def test_a_greeting_that_is_none(greeting: Ready | Nodes, caplog: pytest.LogCaptureFixture) -> None:
    def act(theirs) -> None:
        theirs.sendall(encode(greeting))
        theirs.recv(1 << 16)

    with engine(WORLD.target(), acted(act), DUO, ready=False) as llm:
        assert not worker_of(llm).wait_ready(PATIENCE)
        answer(llm)
        assert len(warnings(caplog)) == worker_of(llm).faults >= 1


def test_a_worker_that_never_speaks_never_holds_up_an_answer() -> None:
    silent = threading.Event()
    with engine(WORLD.target(), acted(lambda theirs: bool(silent.wait(PATIENCE)) or None), DUO, ready=False) as llm:
        result = answer(llm)
        assert result.stats.draft_faults == 0
        assert result.stats.wait_seconds == 0
        assert result.speculation == "off: the draft worker was not ready"
    silent.set()


@pytest.mark.parametrize("mode", [DUO, LOCKSTEP], ids=["duo", "lockstep"])
def test_a_worker_that_falls_silent_is_given_up_after_a_while(mode: EngineConfig, caplog: pytest.LogCaptureFixture) -> None:
    with engine(SlowTarget(WORLD.target(), 0.004), says(node()), mode, stall_seconds=0.02) as llm:
        assert answer(llm).stats.draft_faults == 1
        assert "said nothing" in warnings(caplog)[0]


def test_a_worker_that_does_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duodecoding.wire.MAX_UNSENT", 200)
    monkeypatch.setattr("socket.socket.send", _refuse_after_hello())
    with engine(WORLD.target(), says(), DUO) as llm:
        assert answer(llm).stats.draft_faults == 1
        assert "does not read" in worker_of(llm).last_error


def _refuse_after_hello() -> Callable[..., int]:
    real, calls = socket.socket.send, [0]

    def send(self: socket.socket, data: bytes) -> int:
        calls[0] += 1
        if calls[0] > 2:
            raise BlockingIOError(11, "would block")
        return real(self, data)

    return send


@pytest.mark.parametrize("mode", [DUO, LOCKSTEP], ids=["duo", "lockstep"])
def test_a_worker_killed_at_random_moments(mode: EngineConfig, caplog: pytest.LogCaptureFixture) -> None:
    chance = random.Random(5)
    with engine(SlowTarget(WORLD.target(), 0.002), in_process(WORLD), mode) as llm:
        remote = worker_of(llm)
        for kill in range(4):
            at, pid = chance.randrange(60), remote.pid
            assert pid is not None

            def during(i: int, at: int = at, pid: int = pid) -> None:
                if i == at:
                    os.kill(pid, signal.SIGKILL)
                    assert eventually(lambda: ended(pid))

            result = answer(llm, during)
            assert result.stats.draft_faults == 1
            assert not Path(f"/proc/{pid}").exists()  # reaped too
            assert len(warnings(caplog)) == kill + 1
            assert "signal 9" in warnings(caplog)[-1]
            assert answer(llm).stats.draft_restarts == 1  # at once, in the background
            assert remote.wait_ready(PATIENCE)
            before = remote.steps
            assert answer(llm).stats.draft_faults == 0
            assert remote.steps > before  # it is back


def test_a_worker_killed_between_answers_is_back_for_the_next() -> None:
    with engine(WORLD.target(), in_process(WORLD), DUO) as llm:
        remote = worker_of(llm)
        first = remote.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        assert eventually(lambda: ended(first))
        result = answer(llm)
        assert (result.stats.draft_faults, result.stats.draft_restarts) == (1, 1)
        assert remote.wait_ready(PATIENCE)
        assert remote.pid != first


@pytest.mark.parametrize("mode", [DUO, LOCKSTEP], ids=["duo", "lockstep"])
def test_a_worker_that_is_stopped_for_a_while_catches_up(mode: EngineConfig) -> None:
    with engine(SlowTarget(WORLD.target(), 0.002), in_process(WORLD), mode) as llm:
        pid, remote = worker_of(llm).pid, worker_of(llm)
        assert pid is not None
        steps = [0, 0]

        def during(i: int) -> None:
            if i == 20:
                os.kill(pid, signal.SIGSTOP)
            if i == 60:
                steps[0] = remote.steps
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.05)

        result = answer(llm, during)
        steps[1] = remote.steps
        assert result.stats.draft_faults == 0
        assert steps[1] > steps[0]
        assert answer(llm).stats.draft_faults == 0


def failing(reason: str) -> Launch:
    def act(theirs) -> None:
        theirs.recv(1 << 16)
        theirs.sendall(encode(Failed(reason)))

    return acted(act)


def test_it_gives_up_after_failing_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    with engine(WORLD.target(), failing("no such luck"), DUO, ready=False, backoff=(0.0,)) as llm:
        remote = worker_of(llm)
        for _ in range(MAX_FAILURES + 3):
            remote.wait_ready(PATIENCE)
            answer(llm)
        assert remote.given_up
        assert remote.faults == MAX_FAILURES == len(warnings(caplog))
        assert llm.speculation == "off: the draft worker failed 5 times: no such luck"
        assert llm.generate(list(WORLD.prompt), PARAMS).speculation == llm.speculation
        assert caplog.records[-1].levelno == logging.ERROR


def test_it_is_not_started_again_before_its_time() -> None:
    now = [1000.0]
    remote = RemoteDrafter(failing("no"), 24, clock=lambda: now[0])
    starts = []
    for wait in (0.0, 0.0, 0.4, 0.2, 1.9, 0.2, 7.9, 0.2):
        now[0] += wait
        remote.open([1, 2], PARAMS, GrowBestFirst(2))
        remote.wait_ready(PATIENCE)
        starts.append(remote.starts)
    assert starts == [1, 2, 2, 3, 3, 4, 4, 5]
    assert remote.given_up


def drafted_for(llm: LLM) -> None:
    """Answers without a fault until the worker took part in one: an answer can be over before the worker has begun."""
    for _ in range(200):
        assert answer(llm).stats.draft_faults == 0
        latest = worker_of(llm)._answer
        if latest is not None and latest.growing:
            return
    raise AssertionError("the worker never took part")


def test_an_answer_without_a_fault_makes_up_for_those_before() -> None:
    with engine(WORLD.target(), lambda: in_thread(WORLD.draft())(), DUO) as llm:  # noqa: PLW0108 - a new draft each time
        for _ in range(MAX_FAILURES + 1):
            drafted_for(llm)
            peer = worker_of(llm)._peer
            assert peer is not None
            peer.connection._socket.shutdown(socket.SHUT_RDWR)
            stats = answer(llm).stats
            assert (stats.draft_faults, stats.draft_restarts) == (1, 1)
            assert worker_of(llm).wait_ready(PATIENCE)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["/no/such/program"], "could not be started"),
        ([sys.executable, "-c", "raise SystemExit('not today')"], "not today"),
        ([sys.executable, "-c", "import os; os.abort()"], "signal 6"),
    ],
)
def test_a_worker_that_never_starts(command: list[str], said: str) -> None:
    with engine(WORLD.target(), process(command), DUO, ready=False) as llm:
        assert not worker_of(llm).wait_ready(PATIENCE)
        assert said in worker_of(llm).last_error
        answer(llm)


def test_a_draft_file_that_vanished(tmp_path: Path) -> None:
    gone = tmp_path / "draft.gguf"
    with engine(WORLD.target(), spawn(gone, EngineConfig(threads=1)), DUO, ready=False) as llm:
        assert not worker_of(llm).wait_ready(PATIENCE)
        assert "cannot load" in worker_of(llm).last_error
        answer(llm)


def test_nobody_listens_there() -> None:
    remote = RemoteDrafter(connect("127.0.0.1:9"), WORLD.size)
    llm = LLM.of(WORLD.target(), Drafters(remote=remote), DUO)
    for _ in range(3):
        result = answer(llm)
    assert remote.faults >= 1
    assert result.speculation.startswith("off: the draft worker")
    llm.close()


# Nobody is left behind

ENDS = {
    "killed": "remote.start(); remote.wait_ready(60); print(remote.pid, flush=True); time.sleep(600)",
    "killed while the worker starts": "remote.start(); print(remote.pid, flush=True); time.sleep(600)",
    "killed while the worker is stopped": (
        "remote.start(); remote.wait_ready(60); os.kill(remote.pid, signal.SIGSTOP); print(remote.pid, flush=True); time.sleep(600)"
    ),
    "ends without closing": "remote.start(); remote.wait_ready(60); print(remote.pid, flush=True); os._exit(3)",
    "ends in an exception": "remote.start(); remote.wait_ready(60); print(remote.pid, flush=True); raise ValueError('oops')",
    "closes": "remote.start(); remote.wait_ready(60); print(remote.pid, flush=True); remote.close()",
    "killed with a child of its own that lives on": (
        "remote.start(); remote.wait_ready(60); print(remote.pid, flush=True)\n"
        "if os.fork() == 0: os.close(1); time.sleep(10); os._exit(0)\n"
        "time.sleep(600)"
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_no_worker_outlives_its_engine(end: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", Script(ENDS[end]).source], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        if "killed" in end:
            assert exists(worker)
            parent.kill()
        parent.wait(PATIENCE)
    assert eventually(lambda: not exists(worker))


def test_a_worker_outlives_the_thread_that_started_it() -> None:
    remote = RemoteDrafter(in_process(WORLD), WORLD.size)
    starter = threading.Thread(target=remote.start)
    starter.start()
    starter.join()
    llm = LLM.of(WORLD.target(), Drafters(remote=remote), DUO)
    try:
        assert remote.wait_ready(PATIENCE)
        for _ in range(3):
            answer(llm)
        assert remote.faults == 0
    finally:
        llm.close()


def test_ctrl_c_is_not_for_the_worker() -> None:
    with engine(WORLD.target(), in_process(WORLD), DUO) as llm:
        pid = worker_of(llm).pid
        assert pid is not None
        assert os.getpgid(pid) != os.getpgrp()
        os.kill(pid, signal.SIGINT)
        assert answer(llm).stats.draft_faults == 0
        os.kill(pid, signal.SIGTERM)
        assert eventually(lambda: not exists(pid))
