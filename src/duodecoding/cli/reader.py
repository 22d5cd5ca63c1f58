"""Where the chat's lines come from: an editor with history on a terminal, plain lines otherwise."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from duodecoding.cli.run import decode_stdin

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent


class Reader(Protocol):
    def read(self) -> str:
        """The next message. EOFError: there is none. KeyboardInterrupt: the line was given up."""
        ...


def open_reader() -> Reader:
    return Editor() if sys.stdin.isatty() and sys.stdout.isatty() else Lines()


class Lines:
    """One message a line; a line that ends in a backslash goes on in the next."""

    def read(self) -> str:
        parts: list[str] = []
        while True:
            line = decode_stdin(sys.stdin.buffer.readline())
            if not line and not parts:
                raise EOFError
            text = line.removesuffix("\n").removesuffix("\r")
            parts.append(text.removesuffix("\\"))
            if not line or not text.endswith("\\"):
                return "\n".join(parts)


class Editor:
    """prompt_toolkit: Enter sends, Alt+Enter or a backslash before Enter begins a new line, the history is kept in a file."""

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.formatted_text import FormattedText

        self._session: PromptSession[str] = PromptSession(
            message=FormattedText([("bold", "› ")]),
            history=_history(data_dir() / "history"),
            key_bindings=_keys(),
            multiline=True,
            prompt_continuation="  ",
        )

    def read(self) -> str:
        return self._session.prompt()


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\":
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history(path: Path) -> History:
    """A file that only its owner can read. Where none can be written the history lasts as long as the chat."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


def data_dir() -> Path:
    """Where this platform keeps the data of an application."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "duodecoding"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "duodecoding"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "duodecoding"
