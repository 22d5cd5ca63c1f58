"""An answer on its way to a client: as one JSON object or as server-sent events, for as long as the client listens."""

from __future__ import annotations

import asyncio
import time

import msgspec
from starlette.types import Receive, Scope, Send

from duodecoding.server.engines import Engines, Failed, Finished, Job, News, Part
from duodecoding.server.metrics import Metrics
from duodecoding.server.requests import ApiError
from duodecoding.server.shapes import Writer

PING_SECONDS = 5.0  # of silence, then a comment keeps proxies and clients from giving up
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
JSON = [(b"content-type", b"application/json")]
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]

encode = msgspec.json.Encoder().encode


def event(record: object) -> bytes:
    return b"data: " + encode(record) + b"\n\n"


async def send_error(send: Send, error: ApiError) -> None:
    headers = [*JSON, *((name.lower().encode(), value.encode()) for name, value in error.headers.items())]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": error.body})


class Reply:
    """An ASGI response. However it ends, the job does not go on without it."""

    def __init__(self, job: Job, writer: Writer, engines: Engines, metrics: Metrics, *, stream: bool, timeout: float) -> None:
        self._job, self._writer, self._engines, self._metrics = job, writer, engines, metrics
        self._streams, self._timeout = stream, timeout
        self._last = job.arrived  # when something came
        self._first = True

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.ensure_future(self._until_left(receive))
        late = ApiError(503, f"the answer took longer than the {self._timeout:g} s allowed", code="timeout")
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._timeout, self._engines.cancel, self._job, late) if self._timeout else None
        try:
            await (self._stream(send) if self._streams else self._whole(send))
        finally:
            watcher.cancel()
            if timer is not None:
                timer.cancel()
            self._engines.cancel(self._job)

    async def _until_left(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._engines.cancel(self._job)

    async def _whole(self, send: Send) -> None:
        while not self._job.cancelled or self._job.unread:
            for news in await self._job.news(PING_SECONDS):
                self._count(news)
                if isinstance(news, Failed):
                    return await send_error(send, news.error)
                if isinstance(news, Finished):
                    await send({"type": "http.response.start", "status": 200, "headers": JSON})
                    return await send({"type": "http.response.body", "body": encode(self._writer.whole(news))})
                self._writer.keep(news)
        return None

    async def _stream(self, send: Send) -> None:
        started = False
        while not self._job.cancelled or self._job.unread:
            news = await self._job.news(PING_SECONDS)
            if not started:
                if news and isinstance(news[0], Failed):  # there is still time for a status of its own
                    self._count(news[0])
                    return await send_error(send, news[0].error)
                if self._job.cancelled:
                    return None
                await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
                started = True
            body = b"".join(map(self._events, news)) if news else PING
            over = bool(news) and not isinstance(news[-1], Part)
            if body or over:
                await send({"type": "http.response.body", "body": body, "more_body": not over})
            if over:
                return None
        return None

    def _events(self, news: News) -> bytes:
        self._count(news)
        if isinstance(news, Failed):
            return event({"error": news.error.record})
        if isinstance(news, Finished):
            return b"".join(map(event, self._writer.last(news))) + DONE
        record = self._writer.piece(news)
        return event(record) if record is not None else b""

    def _count(self, news: News) -> None:
        if isinstance(news, Failed):
            self._metrics.error(news.error.status)
        elif isinstance(news, Finished):
            self._metrics.finished(news.result)
        else:
            now = time.perf_counter()
            self._metrics.part(news.tokens, news.spans, now - self._last, first=self._first)
            self._last, self._first = now, False
