"""What `run`, `chat` and the demo share: loading an engine, and saying an answer that can be stopped."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from duodecoding.cli.interrupts import Interrupts, exit_code
from duodecoding.cli.terminal import Terminal
from duodecoding.types import EngineConfig, Result

if TYPE_CHECKING:
    from duodecoding.cli.served import ServedLLM, ServedStream
    from duodecoding.llm import LLM
    from duodecoding.stream import Stream


@contextmanager
def leaving(terminal: Terminal) -> Iterator[None]:
    """In its block a signal ends the process at once: there is nothing to keep."""

    def leave() -> None:
        terminal.quiet()
        os._exit(exit_code(interrupts.signal or 0))

    with Interrupts(leave, terminal.quiet) as interrupts:
        yield


@contextmanager
def engine(config: EngineConfig, terminal: Terminal) -> Iterator[LLM]:
    """A loaded engine."""
    with leaving(terminal), terminal.busy(f"loading {config.model}"):
        from duodecoding.llm import LLM

        llm = LLM.from_config(config, progress=terminal.progress)
    with llm:
        yield llm


def answer(
    terminal: Terminal,
    llm: LLM | ServedLLM,
    start: Callable[[], Stream | ServedStream],
    *,
    silent: bool = False,
    show_draft: bool = False,
) -> tuple[Result, int]:
    """Say an answer as it comes. Returns it with the exit code: 0, or that of the signal which cut it short."""
    with Interrupts(llm.abort, terminal.quiet) as interrupts, terminal.busy("reading the prompt"):
        stream = start()
        if interrupts.signal is not None:  # it came when there was nothing to abort yet
            llm.abort()
        with closing(stream):
            for count, token in enumerate(stream, start=1):
                terminal.progress(f"answering, {count} tokens")
                terminal.say(token, show_draft=show_draft, silent=silent)
        terminal.end_line(interrupted=interrupts.signal is not None)
    return stream.result, exit_code(interrupts.signal) if interrupts.signal is not None else 0
