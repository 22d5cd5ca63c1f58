"""The server as a process: listening before the model is loaded, hanging up on the idle, and leaving in good order."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from duodecoding.errors import DuoError
from duodecoding.llm import LLM
from duodecoding.server.app import Service
from duodecoding.server.engines import Engines
from duodecoding.server.requests import ApiError
from duodecoding.types import SamplingParams, ServerConfig

GRACE_SECONDS = 5.0  # for running streams after the first signal
FLUSH_SECONDS = 0.5  # for what was said to reach the clients
HEADER_SECONDS = 30.0  # for a client to say what it wants
KEEP_ALIVE_SECONDS = 75


class Protocol(H11Protocol):
    """HTTP with errors in our shape, and without patience for clients that never finish their headers."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unwatch()

    def _watch(self) -> None:
        """Between requests uvicorn itself hangs up; in the middle of headers we do."""
        if self.conn.their_state is not h11.IDLE:
            self._unwatch()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def send_400_response(self, msg: str) -> None:
        body = ApiError(400, msg).body
        headers = [(b"content-type", b"application/json"), (b"connection", b"close"), (b"content-length", str(len(body)).encode())]
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class Server(uvicorn.Server):
    """The first signal lets streams run for a while, the second ends them. Either way the process ends in peace."""

    def __init__(self, config: uvicorn.Config, engines: Engines) -> None:
        super().__init__(config)
        self._engines = engines
        self._loop: asyncio.AbstractEventLoop | None = None
        self.on_listening: Callable[[], None] = lambda: None
        engines.on_error = self._give_up

    def _give_up(self) -> None:
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's signature
        if self.should_exit and self._loop is not None:
            self.force_exit = True
            self._loop.call_soon_threadsafe(self._hurry)
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._engines.start()
        self.on_listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engines.close()
        timer = asyncio.get_running_loop().call_later(GRACE_SECONDS, self._hurry)
        await super().shutdown(sockets)
        timer.cancel()
        self._engines.stop()

    def _hurry(self) -> None:
        self._engines.stop()
        for connection in list(self.server_state.connections):
            asyncio.get_running_loop().call_later(FLUSH_SECONDS, connection.transport.abort)


def listen(config: ServerConfig) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        return socket.create_server((config.host, config.port), family=family, backlog=2048)
    except OSError as error:
        where = f"cannot listen at {config.host}:{config.port}"
        raise DuoError(where, error.strerror or str(error), "Choose another --host or --port.") from error


def make_server(load: Callable[[], LLM], config: ServerConfig, defaults: SamplingParams) -> tuple[Server, Engines]:
    engines = Engines(load, parallel=config.parallel, max_queue=config.max_queue)
    settings = uvicorn.Config(
        Service(engines, config, defaults).app(),
        http=Protocol,
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )
    return Server(settings, engines), engines


def serve(
    load: Callable[[], LLM],
    config: ServerConfig,
    defaults: SamplingParams,
    sock: socket.socket,
    listening: Callable[[], None] = lambda: None,
) -> None:
    """Answer until a signal comes. The error that kept the model from loading is raised here."""
    server, engines = make_server(load, config, defaults)
    server.on_listening = listening
    server.run(sockets=[sock])
    if not engines.end() and engines.error is None:
        # An engine is inside a long call of a library and cannot be asked to leave. A worker leaves when we are gone.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    if engines.error is not None:
        raise engines.error
