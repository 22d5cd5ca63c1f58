"""What clients hear: answers in OpenAI's shapes, whole or in pieces, with llama-server's timings and our own extension."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from msgspec import UnsetType

from duodecoding.backends.base import Vocabulary
from duodecoding.server.engines import Finished, Job, Part
from duodecoding.server.requests import Answering, ChatRequest
from duodecoding.trace import Event
from duodecoding.types import Result, Stats, Token

LEAST_LOGPROB = -9999.0  # JSON has no minus infinity
Record = dict[str, Any]


def timings(stats: Stats) -> Record:
    """As llama-server tells them. The prompt's time ends with the first token."""
    prompt_ms, predicted_ms = 1e3 * stats.ttft_seconds, 1e3 * (stats.seconds - stats.ttft_seconds)
    prompt, predicted = stats.prompt_tokens - stats.reused_tokens, stats.new_tokens
    return {
        "cache_n": stats.reused_tokens,
        "prompt_n": prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _over(prompt_ms, prompt),
        "prompt_per_second": _over(1e3 * prompt, prompt_ms),
        "predicted_n": predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _over(predicted_ms, predicted),
        "predicted_per_second": _over(1e3 * predicted, predicted_ms),
        "draft_n": stats.verified,
        "draft_n_accepted": stats.accepted,
    }


def _over(a: float, b: float) -> float:
    return a / b if b > 0 else 0.0


def usage(stats: Stats) -> Record:
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.new_tokens,
        "total_tokens": stats.prompt_tokens + stats.new_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.reused_tokens},
    }


class Writer:
    """One answer, in the shape that its request asked for."""

    def __init__(self, request: Answering, job: Job, model: str, fingerprint: str, vocabulary: Vocabulary) -> None:
        self._chat = isinstance(request, ChatRequest)
        self._duo = None if isinstance(request.duo, UnsetType) else request.duo
        self._usage = request.stream_options is not None and request.stream_options.include_usage
        self._logprobs = Logprobs(vocabulary, chat=self._chat) if request.likeliest is not None else None
        self._arrived, self._begun = job.arrived, False
        self._parts: list[Part] = []
        kind = ("chat.completion" if self._chat else "text_completion") + (".chunk" if self._chat and request.stream else "")
        self._head: Record = {
            "id": ("chatcmpl-" if self._chat else "cmpl-") + uuid.uuid4().hex,
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    # -- in pieces

    def piece(self, part: Part) -> Record | None:
        """A chunk; None: nothing to tell yet."""
        text = "".join(token.text for token in part.tokens)
        told = self._told(part.tokens, part.spans)
        if not text and not told:
            return None
        return self._chunk(text, None, part.tokens) | told

    def last(self, news: Finished) -> list[Record]:
        """The end: how it ended, and what it cost if that was asked for."""
        stats = news.result.stats
        told = self._told([], news.spans) | {"timings": timings(stats)}
        if self._duo is not None:
            told["duo"] = told.get("duo", {}) | _account(news.result)
        end = self._chunk("", news.result.finish_reason, []) | told
        return [end, self._head | {"choices": [], "usage": usage(stats)}] if self._usage else [end]

    def _chunk(self, text: str, finish: str | None, tokens: Sequence[Token]) -> Record:
        choice: Record = {"index": 0, "finish_reason": finish, "logprobs": self._logprobs.of(tokens) if self._logprobs else None}
        if self._chat:
            choice["delta"] = {"content": text} if text or finish is None else {}
            if not self._begun:
                choice["delta"] |= {"role": "assistant"}
        else:
            choice["text"] = text
        self._begun = True
        return self._head | {"choices": [choice]} | ({"usage": None} if self._usage else {})

    def _told(self, tokens: Sequence[Token], spans: Sequence[Event]) -> Record:
        found: Record = {}
        if self._duo is not None and self._duo.tokens and tokens:
            found["tokens"] = [_token(token) for token in tokens]
        if self._duo is not None and self._duo.timeline and spans:
            found["spans"] = [self._span(event) for event in spans]
        return {"duo": found} if found else {}

    def _span(self, event: Event) -> Record:
        start, end = event.begin - self._arrived, event.end - self._arrived
        return {"lane": str(event.lane), "did": str(event.name), "start": start, "end": end, **event.args}

    # -- whole

    def keep(self, part: Part) -> None:
        self._parts.append(part)

    def whole(self, news: Finished) -> Record:
        result, spans = news.result, [span for part in self._parts for span in part.spans] + news.spans
        choice: Record = {
            "index": 0,
            "finish_reason": result.finish_reason,
            "logprobs": self._logprobs.of(result.tokens) if self._logprobs else None,
        }
        if self._chat:
            choice["message"] = {"role": "assistant", "content": result.text, "refusal": None}
        else:
            choice["text"] = result.text
        record = self._head | {"choices": [choice], "usage": usage(result.stats), "timings": timings(result.stats)}
        if self._duo is not None:
            record["duo"] = self._told(result.tokens, spans).get("duo", {}) | _account(result)
        return record


def _token(token: Token) -> Record:
    return {
        "id": token.id,
        "text": token.text,
        "source": str(token.source),
        "logprob": max(token.logprob, LEAST_LOGPROB),
        "round": token.round,
    }


def _account(result: Result) -> Record:
    return {"stats": asdict(result.stats), "mode": str(result.mode), "speculation": result.speculation}


class Logprobs:
    """Probabilities in OpenAI's two shapes. A token without text waits for the text it is part of: an end has none."""

    def __init__(self, vocabulary: Vocabulary, *, chat: bool) -> None:
        self._piece, self._chat = vocabulary.piece, chat
        self._waiting: list[Token] = []
        self._offset = 0

    def of(self, tokens: Sequence[Token]) -> Record:
        ready: list[Token] = []
        for token in tokens:
            self._waiting.append(token)
            if token.text:
                ready += self._waiting
                self._waiting = []
        return {"content": [self._entry(token) for token in ready], "refusal": None} if self._chat else self._columns(ready)

    def _named(self, id: int, logprob: float) -> Record:
        piece = self._piece(id)
        return {"token": piece.decode("utf-8", "replace"), "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(piece)}

    def _entry(self, token: Token) -> Record:
        return self._named(token.id, token.logprob) | {"top_logprobs": [self._named(*top) for top in token.top]}

    def _columns(self, tokens: Sequence[Token]) -> Record:
        entries, offsets = [self._entry(token) for token in tokens], []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token.text)
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries],
            "text_offset": offsets,
        }
