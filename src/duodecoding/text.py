"""Between token ids and what a person reads: detokenising a stream, stop strings, chat templates, vocabulary check of a pair."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, NoReturn

from duodecoding.backends.trim import vocabulary_hash
from duodecoding.errors import UsageError, VocabularyMismatch

if TYPE_CHECKING:
    from jinja2 import Template

    from duodecoding.backends.base import Vocabulary

# Ids that one of two files may have more than the other: files are padded to round sizes. llama.cpp tolerates as many.
MAX_PADDING = 128

_RAW = "Use --raw to send the prompt as it is."


class Detokenizer:
    """Tokens in, text out. A token may end inside a character, so text comes only when it is complete."""

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The text that is certain after this token. Bytes that can be no character become U+FFFD."""
        return self._decoder.decode(self._piece(token))

    def flush(self) -> str:
        """The end: what was waiting for its other half will not get it."""
        return self._decoder.decode(b"", True)


class StopStrings:
    """Cuts a stream of text at the stop string that begins first. No part of a stop string that came is ever emitted."""

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or any(not stop for stop in stops):
            raise UsageError(f"stop is {stops!r}", "it must be a list of non-empty strings")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that is safe to emit now, and whether a stop string came."""
        if not self._stops:
            return text, False
        if self.stopped:
            return "", True
        self._held += text
        found, possible = self._first_stop(), self._first_beginning()
        # A longer stop string may be under way that began before the one that is complete: which of them cuts is not known yet.
        self.stopped = found < len(self._held) and found <= possible
        safe = min(found, possible)
        emitted, self._held = self._held[:safe], "" if self.stopped else self._held[safe:]
        return emitted, self.stopped

    def flush(self) -> str:
        """The end: what was held back. `stopped` says afterwards whether a stop string was in it."""
        found = self._first_stop()
        self.stopped = self.stopped or found < len(self._held)
        rest, self._held = self._held[:found], ""
        return rest

    def _first_stop(self) -> int:
        """Where the first complete stop string begins; the end if there is none."""
        starts = (self._held.find(stop) for stop in self._stops)
        return min((start for start in starts if start >= 0), default=len(self._held))

    def _first_beginning(self) -> int:
        """Where a suffix begins that could grow into a stop string; the end if there is none."""
        end = len(self._held)
        longest = max(map(len, self._stops), default=1)
        for start in range(max(0, end - longest + 1), end):
            suffix = self._held[start:]
            if any(len(suffix) < len(stop) and stop.startswith(suffix) for stop in self._stops):
                return start
        return end


def render_chat(
    template: str | None,
    messages: Sequence[Mapping[str, str]],
    *,
    bos: str,
    eos: str,
    add_generation_prompt: bool = True,
    model: str = "",
) -> str:
    """The prompt that a model's own chat template makes of a conversation."""
    if template is None:
        raise UsageError(f"{model or 'this model'} has no chat template", "it was not made for chat", _RAW)
    checked = _check_messages(messages)
    owner = f"the chat template of {model}" if model else "the chat template"
    from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

    try:
        # Templates test `tools is not none` without asking whether it is defined.
        return _compile(template).render(
            messages=checked,
            bos_token=bos,
            eos_token=eos,
            add_generation_prompt=add_generation_prompt,
            tools=None,
            documents=None,
        )
    except TemplateSyntaxError as error:
        raise UsageError(f"{owner} has a syntax error", f"line {error.lineno}: {error.message}", _RAW) from error
    except SecurityError as error:
        raise UsageError(f"{owner} tried something that templates may not do", str(error), _RAW) from error
    except TemplateError as error:
        raise UsageError(f"{owner} does not take these messages", str(error), _RAW) from error
    except Exception as error:  # a template is a program in somebody's file: it can raise anything
        raise UsageError(f"{owner} failed", f"{type(error).__name__}: {error}", _RAW) from error


def _check_messages(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise UsageError(f"messages is a {type(messages).__name__}", "it must be a list of messages")
    if not messages:
        raise UsageError("there are no messages", fix='Give at least one, such as {"role": "user", "content": "Hello"}.')
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping):
            raise UsageError(f"message {number} is a {type(message).__name__}", "it must have a role and a content")
        for key in ("role", "content"):
            if key not in message:
                raise UsageError(f"message {number} has no {key}")
            if not isinstance(message[key], str):
                raise UsageError(f"the {key} of message {number} is {message[key]!r}", "it must be a string")
        if not message["role"]:
            raise UsageError(f"the role of message {number} is empty", "it must be system, user or assistant")
    return [dict(message) for message in messages]


@lru_cache(maxsize=16)
def _compile(template: str) -> Template:
    # jinja2 takes longer to load than everything else here, and a plain completion does not need it.
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's words for training; in a prompt it is only its content."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment.from_string(template)


def _to_json(
    value: object,
    indent: int | str | None = None,
    ensure_ascii: bool = False,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON for a model to read; jinja2's own filter escapes it for HTML."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)


def check_pair(target: Vocabulary, draft: Vocabulary, *, target_name: str, draft_name: str) -> None:
    """Every id that both have must mean the same text. A few surplus ids are padding, which nobody guesses."""
    pair = f"{draft_name} cannot draft for {target_name}"
    fix = "Take a draft with the target's tokenizer, or --draft lookup, which needs no model."
    whole = getattr(draft, "trimmed_from", "")  # of a GGUF draft that knows a part of its target's vocabulary
    if whole and whole != vocabulary_hash(target.texts()):
        raise VocabularyMismatch(pair, "its vocabulary is a part of another model's", fix)
    if whole:
        return
    if abs(target.size - draft.size) > MAX_PADDING:
        why = f"their vocabularies differ in size: {draft.size} tokens in the draft, {target.size} in the target"
        raise VocabularyMismatch(pair, why, fix)
    both = list(zip(target.texts(), draft.texts(), strict=False))
    different = [id for id, (mine, theirs) in enumerate(both) if mine != theirs]
    if different:
        id = different[0]
        mine, theirs = both[id]
        example = f"{id} is {theirs!r} in the draft, {mine!r} in the target"
        raise VocabularyMismatch(pair, f"{len(different)} of {len(both)} token ids mean different text; the first, {example}", fix)


def difference(target: Vocabulary, draft: Vocabulary, *, target_name: str, draft_name: str) -> str:
    """Why a draft has to guess through text; empty if it shares the target's vocabulary."""
    try:
        check_pair(target, draft, target_name=target_name, draft_name=draft_name)
    except VocabularyMismatch as error:
        return error.why
    return ""
