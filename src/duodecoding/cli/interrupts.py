"""Ctrl-C and SIGTERM while the program is inside a long call of a C library.

Python runs its signal handlers only between bytecodes, so not before such a call returns. The signal's number is therefore also
written to a socket, by C code, and a thread that reads it there acts at once.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def exit_code(number: int) -> int:
    """What a shell reports for a process ended by this signal."""
    return 128 + number


class Interrupts:
    """In its block the first signal calls `stop` (in another thread); the second ends the process, after `restore`."""

    def __init__(self, stop: Callable[[], None], restore: Callable[[], None]) -> None:
        self._stop, self._restore = stop, restore
        self.signal: int | None = None  # the one that came

    def __enter__(self) -> Self:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._handlers = {number: signal.signal(number, _ignore) for number in SIGNALS}
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="interrupts", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._writer.close()
        self._thread.join()
        self._reader.close()

    def _watch(self) -> None:
        while data := self._reader.recv(16):
            for number in data:
                if number in SIGNALS:
                    self._arrived(number)

    def _arrived(self, number: int) -> None:
        if self.signal is not None:
            self._restore()
            os._exit(exit_code(number))
        self.signal = number
        self._stop()


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """The thread acts. This handler is here so that the signal does not end the process."""
