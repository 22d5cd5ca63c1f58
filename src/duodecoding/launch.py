"""How a draft worker comes to be: a process on this machine, or a connection to one elsewhere; and how it ends."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from duodecoding.errors import UsageError
from duodecoding.types import EngineConfig
from duodecoding.wire import Close, Connection, ToMain, WireError, main_side

EXIT_SECONDS = 0.5  # to leave by itself when asked to
LAST_MOMENT = 0.05  # seconds


@dataclass(slots=True)
class Peer:
    """A worker that was started or connected to."""

    connection: Connection[ToMain]
    process: subprocess.Popen[bytes] | None = None
    stderr: IO[bytes] | None = None
    flag: mmap.mmap | None = None  # shared memory: not 0 breaks off the running draft step

    def end(self, *, gently: bool) -> str:
        """No such process afterwards, dead or alive. Returns the last thing it said on stderr."""
        if gently:
            with contextlib.suppress(WireError):
                self.connection.send(Close())
        self.connection.close()
        if self.flag is not None:
            self.flag.close()
        if self.process is None:
            return ""
        if gently:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(EXIT_SECONDS)
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process stuck in the kernel must not hold up the answer
            self.process.wait(5.0)
        return self._last_words()

    def exit_code(self) -> int | None:
        """Of a process that ended, or is about to: its socket closes a moment before it is gone."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(LAST_MOMENT) if self.process is not None else None
        return None

    def _last_words(self) -> str:
        if self.stderr is None:
            return ""
        with self.stderr:
            self.stderr.seek(max(0, self.stderr.seek(0, os.SEEK_END) - 4096))
            lines = self.stderr.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else ""


Launch = Callable[[], Peer]  # must not block


def spawn(path: Path, config: EngineConfig, *, cores: Sequence[int] = (), nice: int = 0, bridge: Path | None = None) -> Launch:
    """A launcher of worker processes on this machine. `bridge`: the target, if its vocabulary is not the draft's."""
    options = {
        "--draft": str(path),
        "--ctx-size": str(config.ctx_size),
        "--threads": str(config.threads_draft or config.threads),
        "--engine": config.draft_engine,
        "--cores": ",".join(map(str, cores)),
        "--nice": str(nice),
    } | ({"--bridge": str(bridge)} if bridge is not None else {})
    given = [f"{name}={value}" for name, value in options.items()] + (["--beside-gpu"] if config.gpu_layers != 0 else [])
    # -P: a numpy.py in the current directory is not what the worker should import.
    return process([sys.executable, "-P", "-m", "duodecoding.worker", *given])


def process(command: Sequence[str]) -> Launch:
    """A launcher of any program that takes the worker's `--fd`, `--flag-fd`, `--parent` and `--die-with-parent`."""

    def launch() -> Peer:
        ours, theirs = socket.socketpair()
        shared, flag = _shared_memory()
        own = [f"--fd={theirs.fileno()}", f"--flag-fd={shared.fileno()}", f"--parent={os.getpid()}"]
        # The kernel ends a child with its parent already when the thread ends that started it, so only the main one asks.
        if threading.current_thread() is threading.main_thread():
            own.append("--die-with-parent")
        with contextlib.ExitStack() as undo, theirs, shared:
            undo.callback(ours.close)
            undo.callback(flag.close)
            stderr = undo.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                [*command, *own],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=[theirs.fileno(), shared.fileno()],
                process_group=0,  # Ctrl-C in a terminal goes to the engine alone
            )
            undo.pop_all()
        return Peer(main_side(ours), process, stderr, flag)

    return launch


def _shared_memory() -> tuple[IO[bytes], mmap.mmap]:
    """A page that a child can map too."""
    file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - the caller closes it
    file.truncate(mmap.PAGESIZE)
    return file, mmap.mmap(file.fileno(), mmap.PAGESIZE)


def connect(at: str) -> Launch:
    """A launcher of connections to a draft server. `at`: HOST:PORT, looked up once, now."""
    host, _, port = at.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"no draft server at {at!r}", "that is not HOST:PORT", "Give what duo draft-server printed.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(f"no draft server at {at!r}", str(error), "Give what duo draft-server printed.") from error

    def launch() -> Peer:
        sock = socket.socket(family, kind, protocol)
        connection = main_side(sock)  # from here on it does not block
        sock.connect_ex(address)
        return Peer(connection)

    return launch
