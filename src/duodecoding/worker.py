"""The draft process: owns the draft model and serves one engine at a time, over an inherited socket (`python -m
duodecoding.worker`) or over TCP (`serve`).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import mmap
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from duodecoding import backends
from duodecoding.backends.base import Draft
from duodecoding.errors import DuoError, UsageError
from duodecoding.session import Session
from duodecoding.types import EngineConfig
from duodecoding.wire import Failed, WireError, worker_side

LOCAL = ("127.0.0.1", "localhost", "::1")
PR_SET_PDEATHSIG = 1
ELSEWHERE = -1  # `gpu_layers` of a target that does not want this CPU
YOUNG = 20_000  # objects that are made before Python looks for garbage: a step makes hundreds, all of which are in use


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
        Session(connection, draft, awake=backends.BESIDE_GPU).run(secret)  # the target is not on this CPU
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
        awake = backends.BESIDE_GPU if options.beside_gpu else 0.0
        Session(connection, draft, flag=flag, alone=lambda: os.getppid() != options.parent, bridge=bridge, awake=awake).run()
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
