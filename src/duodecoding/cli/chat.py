"""`duo chat`: a conversation. Its messages are kept, so the engine finds the earlier turns in its cache."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from duodecoding.cli.flags import (
    FLAT,
    NO_CHAT_FLAGS,
    NO_ENGINE_FLAGS,
    NO_SAMPLING_FLAGS,
    ChatFlags,
    ChatOptions,
    EngineFlags,
    SamplingFlags,
    read_bias,
    settings,
)
from duodecoding.cli.interrupts import exit_code
from duodecoding.cli.reader import Reader, open_reader
from duodecoding.cli.run import check_text
from duodecoding.errors import DuoError, UsageError
from duodecoding.types import EngineConfig, SamplingParams

if TYPE_CHECKING:
    from duodecoding.cli.served import ServedLLM
    from duodecoding.cli.terminal import Terminal
    from duodecoding.llm import LLM

COMMANDS = {
    "/help": "this list",
    "/clear": "forget the conversation",
    "/set KEY VALUE": "change a setting of the answer, as in /set temperature 0.7",
    "/show": "the settings and how much of the context is used",
    "/exit": "leave",
}
KEYS = {
    "Enter": "send",
    "Alt+Enter, or \\ and Enter": "new line",
    "Ctrl-C": "stop the answer, or clear the line",
    "Ctrl-D": "leave",
}


def chat(
    *,
    options: Annotated[ChatFlags, FLAT] = NO_CHAT_FLAGS,
    sampling: Annotated[SamplingFlags, FLAT] = NO_SAMPLING_FLAGS,
    engine_flags: Annotated[EngineFlags, FLAT] = NO_ENGINE_FLAGS,
) -> int:
    """Talk with a model. /help says what can be typed."""
    from duodecoding.cli.session import engine
    from duodecoding.cli.terminal import Terminal

    chosen = settings(ChatOptions, options)
    params = settings(SamplingParams, sampling)
    config = settings(EngineConfig, engine_flags)
    check_text(chosen.system, "the system message")
    terminal = Terminal()
    with _served(chosen, config, terminal) if chosen.url else engine(config, terminal) as llm:
        return Chat(llm, terminal, params, chosen).loop(open_reader())


def _served(options: ChatOptions, config: EngineConfig, terminal: Terminal) -> ServedLLM:
    from duodecoding.cli.served import ServedLLM

    plain = EngineConfig()
    moot = [name for name in _names(EngineConfig) if getattr(config, name) != getattr(plain, name)]
    if moot:
        terminal.warn(f"The server decides about {', '.join(moot)}.")
    return ServedLLM(options.url, options.api_key)


class Chat:
    def __init__(self, llm: LLM | ServedLLM, terminal: Terminal, params: SamplingParams, options: ChatOptions) -> None:
        self.llm, self.terminal = llm, terminal
        self.params, self.system, self.show_draft = params, options.system, options.show_draft
        self.turns: list[dict[str, str]] = []
        self.used = 0  # tokens of the context after the last answer
        self._interactive = sys.stdin.isatty()

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}, *self.turns] if self.system else self.turns

    def loop(self, reader: Reader) -> int:
        """Read and answer until the input ends. Returns the exit code."""
        if self._interactive:
            self._greet()
        while True:
            try:
                line = reader.read()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                continue
            if line.strip() == "/exit":
                return 0
            code = self.handle(line)
            if code and not (self._interactive and code == exit_code(signal.SIGINT)):
                return code

    def handle(self, line: str) -> int:
        """One line: nothing, a command or a message. A mistake in it is told, and the chat goes on."""
        try:
            if line.lstrip().startswith("/"):
                self.command(line.split())
            elif line.strip():
                return self.turn(line)
        except DuoError as error:
            if not self._interactive:
                raise
            self.terminal.warn(str(error))
        return 0

    def turn(self, text: str) -> int:
        from duodecoding.cli.session import answer

        self.turns.append({"role": "user", "content": check_text(text, "the message")})
        said = ""
        try:
            result, code = answer(
                self.terminal, self.llm, lambda: self.llm.stream_chat(self.messages, self.params), show_draft=self.show_draft
            )
            said = result.text
        finally:
            # Without an answer the question is taken back, so that the roles keep taking turns.
            if said:
                self.turns.append({"role": "assistant", "content": said})
            else:
                self.turns.pop()
        self.used = result.stats.prompt_tokens + result.stats.new_tokens
        self.terminal.stats(result)
        self.terminal.gap()
        return code

    def command(self, words: list[str]) -> None:
        match words:
            case ["/help"]:
                self.terminal.pairs(COMMANDS | KEYS)
            case ["/clear"]:
                self.turns.clear()
                self.used = 0
                self.terminal.note("The conversation is forgotten.")
            case ["/set", key, *value] if value:
                self._set(key.replace("-", "_"), " ".join(value))
            case ["/set", *_]:
                raise UsageError("/set needs a name and a value", fix="For instance: /set temperature 0.7")
            case ["/show"]:
                self._show()
            case _:
                raise UsageError(f"unknown command {words[0]}", fix=f"There are {', '.join(name.split()[0] for name in COMMANDS)}.")

    def _set(self, key: str, value: str) -> None:
        if key == "system":
            self.system = value
        elif key == "show_draft":
            self.show_draft = _parse(key, bool, value)
        elif key in _names(SamplingParams):
            self.params = replace(self.params, **{key: _parse(key, get_type_hints(SamplingParams)[key], value)})
        elif key in _names(EngineConfig):
            raise UsageError(f"{key} is fixed while the model is loaded", fix="Start again with another flag.")
        else:
            raise UsageError(f"no setting is called {key!r}", fix="/show lists them.")
        self.terminal.note(f"{key} = {value}")

    def _show(self) -> None:
        params = {name: _shown(getattr(self.params, name)) for name in _names(SamplingParams)}
        self.terminal.pairs(
            {
                "model": self.llm.model_name,
                "draft": self.llm.draft_name or "none",
                "mode": str(self.llm.config.mode),
                "speculation": self.llm.speculation,
                "context": f"{self.used} of {self.llm.context} tokens used",
                "system": self.system or "none",
                "show_draft": _shown(self.show_draft),
            }
            | params
        )

    def _greet(self) -> None:
        draft = f" with {self.llm.draft_name}" if self.llm.draft_name else ""
        self.terminal.note(f"{self.llm.model_name}{draft} · speculation {self.llm.speculation} · /help for help, Ctrl-D to leave")
        if self.show_draft:
            self.terminal.legend()


def _names(record: type) -> list[str]:
    return [f.name for f in fields(record)]


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Mapping):
        return " ".join(f"{token}={bias:g}" for token, bias in value.items()) or "none"
    if isinstance(value, tuple):
        return " ".join(repr(item) for item in value) or "none"
    return str(value)


def _parse(key: str, hint: Any, value: str) -> Any:
    """A value typed after /set, as the field wants it."""
    if hint is bool:
        if value not in ("on", "off"):
            raise UsageError(f"{key} is {value!r}", "it must be on or off")
        return value == "on"
    if hint in (int, float):
        try:
            return hint(value)
        except ValueError:
            raise UsageError(f"{key} is {value!r}", f"it must be {'a whole number' if hint is int else 'a number'}") from None
    if hint is str:
        return "" if value == "none" else value
    if value == "none":
        return hint.__origin__() if hint == tuple[str, ...] else {}
    return (value.encode().decode("unicode_escape"),) if hint == tuple[str, ...] else read_bias(key, tuple(value.split()))
