"""How long a message takes one way between engine and draft worker, over the local socket and over TCP on this machine.

    python benchmarks/latency.py

A worker process echoes pings; half of a round trip is one way. The goal is under 100 microseconds.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import common

from duodecoding.wire import Close, Commit, Connection, Nodes, Ping, Pong, ToMain, encode, main_side, worker_side

GOAL = 100.0  # microseconds


def echo(sock: socket.socket) -> None:
    """The worker: answers pings, waiting for each as the real one does."""
    connection = worker_side(sock)
    while True:
        connection.wait(None)
        for message in connection.receive():
            if isinstance(message, Close):
                return
            if isinstance(message, Ping):
                connection.send(Pong(message.n))


def one_way(connection: Connection[ToMain], count: int) -> list[float]:
    """Microseconds, one for each round trip."""
    found = []
    for n in range(count):
        start = time.perf_counter()
        connection.send(Ping(n))
        while not connection.receive():
            connection.wait(None)
        found.append((time.perf_counter() - start) / 2 * 1e6)
    return found


def in_a_process(sock: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, "--echo", str(sock.fileno())], pass_fds=[sock.fileno()])


def pair(kind: str) -> tuple[socket.socket, socket.socket]:
    if kind == "local socket":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


def measure(kind: str, count: int) -> dict[str, float]:
    ours, theirs = pair(kind)
    with theirs:
        process = in_a_process(theirs)
    connection = main_side(ours)
    one_way(connection, count // 10)  # warm
    found = sorted(one_way(connection, count))
    connection.send(Close())
    process.wait()
    connection.close()
    return common.spread(found, 1) | {"p99": round(found[int(0.99 * len(found))], 1)}


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
    args = parser.parse_args()
    if args.echo >= 0:
        echo(socket.socket(fileno=args.echo))
        return
    found = {kind: measure(kind, args.count) for kind in ("local socket", "TCP on this machine")}
    results = {
        "one way, microseconds": found,
        "goal, microseconds": GOAL,
        "goal met by the median": all(spread["median"] < GOAL for spread in found.values()),
        "encode and decode, microseconds": coding(),
    }
    common.write("latency", {"round trips": args.count}, results)


if __name__ == "__main__":
    main()
