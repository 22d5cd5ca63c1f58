"""The server under load, under bad input, and against the engine alone.

    python benchmarks/server.py --load 60 --clients 32 [--draft PATH.gguf --kill-worker]
    python benchmarks/server.py --fuzz 10000
    python benchmarks/server.py --overhead

Load: every finished answer must equal its solo run, nothing but 429 may be refused, memory must stay flat; `--kill-worker` ends the
draft worker with SIGKILL again and again. Overhead: the same engine, asked directly and through the server by a client in another
process, in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import common

HEADERS = {"Content-Type": "application/json"}
CHAT = "/v1/chat/completions"
QUESTIONS = [
    "Why is the sky blue?",
    "Write a short poem about a mill.",
    "Count from one to twenty.",
    "What is 17 times 23? Think step by step.",
    "Repeat: red green blue red green blue red green blue.",
    "Name the planets.",
    "Say hello in five languages.",
    "How does a bicycle stay upright?",
]
GOALS = {"first token, ms": 5.0, "each token, ms": 0.3}


def question(number: int, **more: Any) -> dict[str, Any]:
    """One of a fixed number of requests; half of them sample."""
    text = QUESTIONS[number % len(QUESTIONS)]
    settings = {"temperature": 0.8 * (number % 2), "seed": number, "max_tokens": 24 + 8 * (number % 3)}
    return {"messages": [{"role": "user", "content": text}], **settings, **more}


def ask(netloc: str, body: dict[str, Any], on_event: Callable[[float], None] = lambda when: None) -> tuple[int, str]:
    """Status, and the text of the answer, streamed or whole."""
    with contextlib.closing(http.client.HTTPConnection(netloc, timeout=300)) as connection:
        connection.request("POST", CHAT, json.dumps(body), HEADERS)
        response = connection.getresponse()
        if response.status == 200 and body.get("stream"):
            return read_stream(response, on_event)
        answer = json.loads(response.read())
        return response.status, answer["choices"][0]["message"]["content"] if response.status == 200 else str(answer)


def read_stream(response: http.client.HTTPResponse, on_event: Callable[[float], None]) -> tuple[int, str]:
    text = ""
    for line in response:
        if line.startswith(b"data: [DONE]"):
            return 200, text
        if line.startswith(b"data: {"):
            on_event(time.perf_counter())
            event = json.loads(line[6:])
            if "error" in event:
                return 500, str(event)
            text += "".join(choice["delta"].get("content", "") for choice in event["choices"])
    return 0, "the stream had no end"


@contextlib.contextmanager
def serving(args: argparse.Namespace, context: int = 1024) -> Iterator[tuple[int, str]]:
    """A server process: its pid and where it listens."""
    sizes = ["--ctx-size", str(context), "--max-queue", str(args.max_queue)]
    settings = ["--model", args.model, "--threads", str(args.threads), *sizes]
    command = [sys.executable, "-m", "duodecoding.cli.main", "serve", "--port", "0", *settings, "--draft", args.draft]
    process = subprocess.Popen([*command, *args.more.split()], stdout=subprocess.PIPE)
    assert process.stdout is not None
    netloc = urlsplit(process.stdout.readline().decode().strip()).netloc
    try:
        while get(netloc, "/health")[0] != 200:
            time.sleep(0.1)
        yield process.pid, netloc
    finally:
        process.send_signal(signal.SIGINT)
        print(f"server ended with {process.wait(60)}", file=sys.stderr)


def get(netloc: str, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(netloc, timeout=60)
    connection.request("GET", path)
    response = connection.getresponse()
    found = response.status, response.read()
    connection.close()
    return found


def children(pid: int) -> list[int]:
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


# Load


@dataclass
class Load:
    """Clients that ask again and again, and what came of it."""

    netloc: str
    seconds: float
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[Any] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    kills: int = 0

    def run(self, pid: int, clients: int, *, kill: bool) -> None:
        self.alone = {number: ask(self.netloc, question(number, duo={"mode": "off"}))[1] for number in range(2 * len(QUESTIONS))}
        self.memory.append(resident_mb(pid))
        self.end = time.monotonic() + self.seconds
        threads = [threading.Thread(target=self.client, args=(seed,)) for seed in range(clients)]
        for thread in threads:
            thread.start()
        while time.monotonic() < self.end:
            time.sleep(1.0)
            self.memory.append(resident_mb(pid))
            if kill and len(self.memory) % 4 == 0:
                self.kill(children(pid))
        for thread in threads:
            thread.join()

    def kill(self, workers: list[int]) -> None:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
            self.kills += 1

    def client(self, seed: int) -> None:
        chance = random.Random(seed)
        while time.monotonic() < self.end:
            number = chance.randrange(len(self.alone))
            status, text = ask(self.netloc, question(number, stream=chance.random() < 0.5))
            self.statuses[str(status)] += 1
            if status == 429:
                time.sleep(0.2)
            elif (status, text) != (200, self.alone[number]):
                self.wrong.append((number, status, text))

    def results(self) -> dict[str, Any]:
        third, mean = len(self.memory) // 3, "duo:time_to_first_token_seconds_"
        lines = get(self.netloc, "/metrics")[1].decode().splitlines()
        metrics = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[:1] != "#")}
        return {
            "answers by status": dict(self.statuses),
            "errors, and answers that differ from their solo run": len(self.wrong),
            "some of those": self.wrong[:5],
            "memory of the server, most, MB": {
                "before": self.memory[0],
                "second third": max(self.memory[third : 2 * third]),
                "last third": max(self.memory[2 * third :]),
            },
            "workers killed": self.kills,
            "workers started again": metrics["duo:draft_restarts_total"],
            "time to first token, mean, s": round(metrics[mean + "sum"] / metrics[mean + "count"], 3),
        }


def load(args: argparse.Namespace) -> None:
    with serving(args) as (pid, netloc):
        under_load = Load(netloc, args.load)
        under_load.run(pid, args.clients, kill=args.kill_worker)
        results = under_load.results()
    settings = {"seconds": args.load, "clients": args.clients, "model": args.model, "draft": Path(args.draft).name}
    common.write("server_kill" if args.kill_worker else "server_load", settings | {"max_queue": args.max_queue}, results)


# Bad input


def fuzz(args: argparse.Namespace) -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "server"))
    from bad_input import bad_requests

    with serving(args, context=256) as (pid, netloc):  # a tenth of the requests are good ones, and run to the end of it
        statuses, bad, memory = Counter[str](), list[Any](), [resident_mb(pid)]
        slow = [half_a_request(netloc) for _ in range(50)]
        connection = http.client.HTTPConnection(netloc, timeout=120)
        for number, (method, path, body, headers) in enumerate(bad_requests(args.fuzz)):
            large = b" " * (50 << 20) if number % 1000 == 999 else body
            connection.request(method, path, large, {name: value.encode("latin-1") for name, value in headers.items()})
            response = connection.getresponse()
            data = response.read()
            statuses[str(response.status)] += 1
            shaped = response.status < 400 or method == "HEAD" or set(json.loads(data)) == {"error"}
            if response.status >= 500 or response.status == 422 or not shaped:
                bad.append((response.status, method, path, body[:200].decode("latin-1"), data[:200].decode("latin-1")))
            if number % max(1, args.fuzz // 20) == 0:
                memory.append(resident_mb(pid))
        for sock in slow:
            sock.close()
        status, _ = ask(netloc, question(0))
        results = {
            "answers by status": dict(sorted(statuses.items())),
            "5xx, 422 or another shape": bad[:10],
            "count of those": len(bad),
            "memory of the server on the way, MB": [round(mb) for mb in memory],
            "a good request afterwards": status,
        }
    common.write("server_fuzz", {"requests": args.fuzz, "model": args.model}, results)


def half_a_request(netloc: str) -> socket.socket:
    host, _, port = netloc.rpartition(":")
    sock = socket.create_connection((host, int(port)))
    sock.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{{".encode())
    return sock


# Overhead


def client_process(netloc: str) -> None:
    """Reads a request a line from stdin; answers with seconds to the first event and from there to the last."""
    for line in sys.stdin:
        times: list[float] = []
        start = time.perf_counter()
        ask(netloc, json.loads(line), times.append)
        print(json.dumps([times[0] - start, times[-2] - times[0]]), flush=True)  # the last event brings no token


def overhead(args: argparse.Namespace) -> None:
    from duodecoding import LLM, SamplingParams
    from duodecoding.server.run import listen, make_server
    from duodecoding.types import ServerConfig

    results: dict[str, Any] = {}
    engines: dict[str, Callable[[], LLM]] = {
        args.model: lambda: LLM(args.model, mode="off", ctx_size=1024, threads=args.threads),
        "passes of 2 ms": lambda: sleeper(0.002),
    }
    for name, make in engines.items():
        llm, config = make(), ServerConfig(port=0)
        sock = listen(config)
        server, _ = make_server(lambda llm=llm: llm, config, SamplingParams())
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        results[name] = in_turns(llm, f"127.0.0.1:{sock.getsockname()[1]}", args)
        server.should_exit = True
        thread.join()
    best = results["passes of 2 ms"]
    results |= {"goals, ms": GOALS, "goals met by the median, passes of 2 ms": {k: best[k]["median"] < v for k, v in GOALS.items()}}
    common.write("server_overhead", {"model": args.model, "tokens": args.tokens, "turns": args.turns, "mode": "off"}, results)


def sleeper(seconds: float) -> Any:
    """An engine whose passes do nothing but take their time: what the server adds is not lost in a real model's noise."""
    import numpy as np

    from duodecoding import LLM, EngineConfig
    from duodecoding.backends import scripted
    from duodecoding.drafting import Drafters

    class Sleeper(scripted.ScriptedTarget):
        def verify(self, work: Any) -> Any:
            time.sleep(seconds)
            return super().verify(work)

    row = np.zeros(32, np.float32)
    row[2] = 9.0  # always the same letter
    return LLM.of(Sleeper(scripted.ScriptedVocabulary(), lambda history: row, context=1024), Drafters(), EngineConfig(mode="off"))


def in_turns(llm: Any, netloc: str, args: argparse.Namespace) -> dict[str, Any]:
    from duodecoding import SamplingParams

    messages = [{"role": "user", "content": "abc abc"}]
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    body = json.dumps({"messages": messages, "max_tokens": args.tokens, "ignore_eos": True, "stream": True})
    command = [sys.executable, __file__, "--client", netloc]
    client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert client.stdin is not None
    assert client.stdout is not None
    first: list[tuple[float, float]] = []  # directly, through the server
    each: list[tuple[float, float]] = []
    work: list[tuple[float, float]] = []  # of this process: a busy machine stretches time, not this
    while get(netloc, "/health")[0] != 200:
        time.sleep(0.05)
    for turn in itertools.count():
        start, cpu = time.perf_counter(), time.process_time()
        times = [time.perf_counter() for _ in llm.stream_chat(messages, params)]
        between = time.process_time()
        client.stdin.write(body + "\n")
        client.stdin.flush()
        served = json.loads(client.stdout.readline())
        if turn > 0:  # the first reads the prompt and warms up
            first.append((times[0] - start, served[0]))
            each.append(((times[-1] - times[0]) / (args.tokens - 1), served[1] / (args.tokens - 1)))
            work.append(((between - cpu) / args.tokens, (time.process_time() - between) / args.tokens))
        if turn == args.turns:
            break
    client.stdin.close()
    client.wait()
    return {
        name: common.spread([1e3 * (served - direct) for direct, served in pairs])
        | {"engine alone": round(1e3 * statistics.median(direct for direct, _ in pairs), 4)}
        | {"ratio": common.spread([served / direct for direct, served in pairs])}
        for name, pairs in (("first token, ms", first), ("each token, ms", each), ("CPU for each token, ms", work))
    }


def main() -> None:
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--load", type=float, default=0.0, help="seconds")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--max-queue", type=int, default=64)
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--kill-worker", action="store_true")
    parser.add_argument("--fuzz", type=int, default=0, help="requests")
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, for --overhead")
    parser.add_argument("--turns", type=int, default=20, help="for --overhead")
    parser.add_argument("--more", default="", help="more flags for duo serve")
    parser.add_argument("--client", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        client_process(args.client)
    if args.load:
        load(args)
    if args.fuzz:
        fuzz(args)
    if args.overhead:
        overhead(args)


if __name__ == "__main__":
    main()
