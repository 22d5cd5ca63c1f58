"""A server (`duo serve`) in the place of an engine of one's own, for `duo chat --url`."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from duodecoding.errors import DuoError, UsageError
from duodecoding.types import EngineConfig, FinishReason, Mode, Result, SamplingParams, Source, Stats, Token

CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 60.0  # a server says at least something every few seconds


class ServedLLM:
    """What `Chat` needs of an `LLM`, from another process."""

    def __init__(self, url: str, api_key: str = "") -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"no server at {url!r}", "that is not an address", "Give what duo serve printed: http://HOST:PORT")
        self._url, self._parts = url, parts
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {api_key}"} if api_key else {})}
        self._stream: ServedStream | None = None
        _, response = self.request("GET", "/duo/info")
        info = json.loads(response.read())
        self.model_name, self.draft_name = str(info["model"]), info["draft"]
        self.config = EngineConfig(mode=Mode(info["mode"]))
        self.speculation, self.context = str(info["speculation"]), int(info["context"])

    def request(self, method: str, path: str, body: object = None) -> tuple[socket.socket, http.client.HTTPResponse]:
        """A response that is no error, and the socket it comes from."""
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
            connection.sock.settimeout(SILENCE_SECONDS)
            sock = connection.sock
            connection.request(method, self._base + path, json.dumps(body) if body is not None else None, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise DuoError(f"cannot reach {self._url}", _words(error), "Is duo serve running there?") from error
        if response.status != 200:
            raise DuoError(f"{self._url} refused", _message(response))
        return sock, response

    def stream_chat(self, messages: Sequence[Mapping[str, str]], params: SamplingParams) -> ServedStream:
        asked = {"messages": list(messages), **_fields(params), "stream": True, "duo": {"tokens": True}}
        self._stream = ServedStream(*self.request("POST", "/v1/chat/completions", asked), self.config.mode)
        return self._stream

    def abort(self) -> None:
        if self._stream is not None:
            self._stream.hang_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.abort()


class ServedStream:
    """Iterate over its tokens; `result` once it has ended."""

    def __init__(self, sock: socket.socket, response: http.client.HTTPResponse, mode: Mode) -> None:
        self._socket, self._response, self._mode = sock, response, mode
        self._tokens: list[Token] = []
        self._left = False
        self._finish: FinishReason = "cancelled"
        self._account: Mapping[str, Any] = {}

    def __iter__(self) -> Iterator[Token]:
        try:
            for line in self._response:
                if line.startswith(b"data: {"):
                    yield from self._read(json.loads(line[6:]))
        except (OSError, http.client.HTTPException, ValueError) as error:
            if not self._left:
                raise DuoError("the server went away", _words(error)) from error
        if not self._account and not self._left:
            raise DuoError("the server went away", "the answer has no end")

    def _read(self, chunk: Mapping[str, Any]) -> Iterator[Token]:
        if "error" in chunk:
            raise DuoError("the server failed", str(chunk["error"]["message"]))
        duo = chunk.get("duo", {})
        if "stats" in duo:
            self._account, self._finish = duo, chunk["choices"][0]["finish_reason"]
        for token in duo.get("tokens", ()):
            self._tokens.append(Token(token["id"], token["text"], Source(token["source"]), token["logprob"], token["round"]))
            yield self._tokens[-1]

    def hang_up(self) -> None:
        """The server notices and stops."""
        self._left = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._response.close()
        self._socket.close()

    @property
    def result(self) -> Result:
        said, account = tuple(self._tokens), self._account
        mode, speculation = Mode(account.get("mode", self._mode)), str(account.get("speculation", "unknown"))
        return Result("".join(token.text for token in said), said, self._finish, mode, speculation, self._stats())

    def _stats(self) -> Stats:
        """The server's; of a broken-off answer nothing is known but its tokens."""
        known = {field.name: 0.0 if field.type == "float" else 0 for field in fields(Stats)}
        told = self._account.get("stats") or {"new_tokens": len(self._tokens), "accepted_by_source": {}}
        return Stats(**{name: told.get(name, nothing) for name, nothing in known.items()})


def _fields(params: SamplingParams) -> dict[str, Any]:
    """The parameters as the API calls them."""
    asked = {f.name: getattr(params, f.name) for f in fields(params) if f.name not in ("json_schema", "top_logprobs")}
    if params.json_schema:
        schema = {"name": "answer", "schema": json.loads(params.json_schema)}
        asked["response_format"] = {"type": "json_schema", "json_schema": schema}
    return asked


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _message(response: http.client.HTTPResponse) -> str:
    try:
        return str(json.loads(response.read())["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"HTTP status {response.status}; it may not be a server of duo"
