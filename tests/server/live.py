"""Servers for tests: real ones on a free port, around models without weights that speak bytes."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from duodecoding import LLM, SamplingParams
from duodecoding.backends import scripted
from duodecoding.backends.base import Conversation
from duodecoding.core import Choose
from duodecoding.drafters.lookup import LookupDrafter
from duodecoding.drafters.model import ModelDrafter
from duodecoding.drafting import Drafters
from duodecoding.sampling import Row
from duodecoding.server.engines import Engines
from duodecoding.server.run import Server, listen, make_server
from duodecoding.tree import PassNode
from duodecoding.types import EngineConfig, Mode, ServerConfig

PATIENCE = 60.0  # seconds; how long a test waits for what must happen some time
DEFAULTS = SamplingParams(max_tokens=32)


class Bytes(scripted.ScriptedVocabulary):
    """Every byte is a token: any text can be said, and no text is hard to read."""

    chat_template = "{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}"

    def __init__(self) -> None:
        super().__init__(258)
        self._pieces = [b"", b"", *(bytes([byte]) for byte in range(256))]

    def tokenize(self, text: str, *, special: bool, bos: bool) -> list[int]:
        return [*([scripted.BEGIN] if bos else []), *(byte + 2 for byte in text.encode())]


def babble(seed: int = 0, end: float = -2.0) -> scripted.Script:
    """Small letters in an order of its own; `end`: the logit of an end."""
    letters = scripted.random_script(258, seed, memory=2)

    def script(history: scripted.History) -> Row:
        row = letters(history) - 30
        row[[byte + 2 for byte in b"abcdefghij .,"]] += 30
        row[scripted.END] = end
        return row.astype(np.float32)

    return script


class Slow:
    """A target whose passes take their time, or fail."""

    def __init__(self, target: scripted.ScriptedTarget, delay: float, fails_at: int | None = None) -> None:
        self._target, self._delay, self._fails_at = target, delay, fails_at
        self.vocabulary, self.context, self.weights_bytes = target.vocabulary, target.context, 0
        self.open, self.abort, self.close = target.open, target.abort, target.close
        self.done, self.finish = target.done, target.finish
        self.overlaps, self.pass_sizes = False, ()
        self.passes = 0

    def verify(self, work: Sequence[tuple[Conversation, Sequence[PassNode]]]) -> list[Choose]:
        self.passes += 1
        if self.passes == self._fails_at:
            raise ZeroDivisionError("a secret of the inside")
        time.sleep(self._delay)
        return self._target.verify(work)


def speaker(
    mode: Mode = Mode.DUO, *, delay: float = 0.0, context: int = 512, end: float = -2.0, fails_at: int | None = None
) -> LLM:
    """An engine that babbles; with a draft model where the mode takes turns."""
    target = scripted.ScriptedTarget(Bytes(), babble(end=end), context=context)
    script = scripted.disagreeing(babble(end=end), babble(1, end), 0.3)
    draft = ModelDrafter(scripted.ScriptedDraft(Bytes(), script, context=context), vocab_limit=258)
    drafters = Drafters(model=draft if mode in (Mode.CHAIN, Mode.SERIAL) else None, lookup=LookupDrafter())
    slow = Slow(target, delay, fails_at) if delay or fails_at else target
    return LLM.of(slow, drafters, EngineConfig(mode=mode))


@dataclass
class Live:
    url: str
    server: Server
    engines: Engines

    def ask(self, path: str, body: object = None, *, headers: dict[str, str] | None = None, method: str = "") -> tuple[int, Any]:
        """Status and decoded JSON of one request."""
        status, data, _ = self.raw(path, body, headers=headers, method=method)
        return status, json.loads(data)

    def raw(
        self, path: str, body: object = None, *, headers: dict[str, str] | None = None, method: str = ""
    ) -> tuple[int, bytes, dict[str, str]]:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **(headers or {})})
        if method:
            request.method = method
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                return response.status, response.read(), dict(response.headers)
        except urllib.error.HTTPError as error:
            return error.code, error.read(), dict(error.headers)

    def chat(self, text: str, **fields: Any) -> tuple[int, Any]:
        return self.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})

    def events(self, path: str, body: dict[str, Any]) -> list[str]:
        """The data of each event of a stream."""
        _, data, _ = self.raw(path, body | {"stream": True})
        return [event.removeprefix("data: ") for event in data.decode().split("\n\n") if event.startswith("data: ")]


@contextlib.contextmanager
def live(
    load: Callable[[], LLM] = speaker, *, wait: bool = True, defaults: SamplingParams = DEFAULTS, **config: Any
) -> Iterator[Live]:
    settings = ServerConfig(port=0, **config)
    sock = listen(settings)
    server, engines = make_server(load, settings, defaults)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    port = sock.getsockname()[1]
    thread.start()
    running = Live(f"http://127.0.0.1:{port}", server, engines)
    try:
        if wait:
            eventually(lambda: engines.ready)
        yield running
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert engines.end()


def eventually(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)
