"""How long a message takes one way between engine and draft worker, over the local socket and over TCP on this machine.

    python benchmarks/latency.py

A worker process echoes pings; half of a round trip is one way. The goal is under 100 microseconds. Asleep: both sides wait in the
kernel to be woken up; awake: they look again and again, as they do beside a GPU. In turns, for machines have better and worse
minutes; at once and after a pause of milliseconds, as between two commits.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import common

from duodecoding.backends import BESIDE_GPU
from duodecoding.wire import Close, Commit, Connection, Nodes, Ping, Pong, ToMain, encode, main_side, worker_side

GOAL = 100.0  # microseconds
TURNS, PAUSE = 5, 0.005  # seconds


def echo(sock: socket.socket, awake: float) -> None:
    """The worker: answers pings, waiting for each as the real one does."""
    connection = worker_side(sock)
    while True:
        connection.wait(None, awake=awake)
        for message in connection.receive():
            if isinstance(message, Close):
                return
            if isinstance(message, Ping):
                connection.send(Pong(message.n))


def one_way(connection: Connection[ToMain], count: int, awake: float, pause: float) -> list[float]:
    """Microseconds, one for each round trip. `pause`: seconds before each, in which this side works."""
    found = []
    for n in range(count):
        end = time.perf_counter() + pause
        while time.perf_counter() < end:
            pass
        start = time.perf_counter()
        connection.send(Ping(n))
        while not connection.receive():
            connection.wait(None, awake=awake)
        found.append((time.perf_counter() - start) / 2 * 1e6)
    return found


def in_a_process(sock: socket.socket, awake: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--echo", str(sock.fileno()), "--awake", str(awake)]
    return subprocess.Popen(command, pass_fds=[sock.fileno()])


def pair(kind: str) -> tuple[socket.socket, socket.socket]:
    if kind == "local socket":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


def measure(kind: str, count: int, awake: float, pause: float) -> list[float]:
    ours, theirs = pair(kind)
    with theirs:
        process = in_a_process(theirs, awake)
    connection = main_side(ours)
    one_way(connection, count // 10, awake, 0.0)  # warm
    found = one_way(connection, count, awake, pause)
    connection.send(Close())
    process.wait()
    connection.close()
    return found


def in_turns(kind: str, count: int, pause: float) -> dict[str, dict[str, float]]:
    found: dict[str, list[float]] = {"asleep": [], "awake": []}
    for _ in range(TURNS):
        for how in found:
            found[how] += measure(kind, count // TURNS, BESIDE_GPU if how == "awake" else 0.0, pause)
    return {how: common.spread(times, 1) | {"p99": round(sorted(times)[int(0.99 * len(times))], 1)} for how, times in found.items()}


def coding(repeats: int = 10_000) -> dict[str, float]:
    """Microseconds to encode and decode the messages of a round."""
    step = Nodes(1, [(key, key - 4, 12_345, 0.123) for key in range(100, 108)], 2, 0.001, 400, 1.0, [101, 105])
    commit = Commit(1, [7, 8, 9])
    found = {}
    for name, message, side in (("nodes", step, main_side), ("commit", commit, worker_side)):
        a, b = socket.socketpair()
        with a, b:
            connection = side(a)
            frame = encode(message)
            start = time.perf_counter()
            for _ in range(repeats):
                encode(message)
                connection._inbox += frame
                connection._frames()
            found[name] = round((time.perf_counter() - start) / repeats * 1e6, 2)
    return found


def main() -> None:
    parser = common.arguments(__doc__ or "")
    parser.add_argument("--count", type=int, default=5000, help="round trips")
    parser.add_argument("--echo", type=int, default=-1, help="be the worker on this file descriptor")
    parser.add_argument("--awake", type=float, default=0.0, help="seconds that it looks for the next ping before it sleeps")
    args = parser.parse_args()
    if args.echo >= 0:
        echo(socket.socket(fileno=args.echo), args.awake)
        return
    kinds = ("local socket", "TCP on this machine")
    found = {kind: in_turns(kind, args.count, 0.0) for kind in kinds}
    found |= {f"{kind}, after {PAUSE * 1e3:g} ms": in_turns(kind, args.count // 10, PAUSE) for kind in kinds}
    results = {
        "one way, microseconds": found,
        "goal, microseconds": GOAL,
        "goal met by the median": all(spread["median"] < GOAL for both in found.values() for spread in both.values()),
        "encode and decode, microseconds": coding(),
    }
    common.write("latency", {"round trips": args.count}, results)


if __name__ == "__main__":
    main()
