"""What every request passes first: who may ask (API keys), from which web pages (CORS), and how much (body limits)."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Sequence
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from duodecoding.server.reply import send_error
from duodecoding.server.requests import ApiError
from duodecoding.types import ServerConfig

PUBLIC = frozenset({"/", "/health"})
BODY_SECONDS = 30.0  # for a client to send what it announced
LINGER_SECONDS = 5.0  # for which a body that is known to be too large is taken in and thrown away
DRAIN = 16  # times the limit that is still taken in and thrown away: a client that is cut off while it sends never reads why
CLIENT = "duo.client"  # in the scope: whose turn in the queue it is


class Gate:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._keys = [_digest(key) for key in config.api_key]
        self._origins = frozenset(config.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        origin = self._allowed_origin(headers)
        if origin:
            send = _with_headers(send, [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"origin")])
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                return await _preflight(send, headers)
        key = self._key(headers)
        if key is None and scope["path"] not in PUBLIC:
            error = ApiError(401, "the API key is missing or wrong; send it as Authorization: Bearer KEY", code="invalid_api_key")
            error.headers["WWW-Authenticate"] = "Bearer"
            return await send_error(send, error)
        scope[CLIENT] = f"{key}@{scope['client'][0] if scope.get('client') else ''}"
        return await self._app(scope, receive, send)

    def _key(self, headers: Headers) -> int | None:
        """Which key was sent; None: none that fits. Takes the same time however much of it is right."""
        kind, _, given = headers.get("authorization", "").partition(" ")
        digest = _digest(given.strip() if kind.lower() == "bearer" else "")
        right = [hmac.compare_digest(digest, key) for key in self._keys]
        return (right.index(True) if True in right else None) if right else 0

    def _allowed_origin(self, headers: Headers) -> str:
        origin = headers.get("origin", "")
        return origin if origin and ("*" in self._origins or origin in self._origins) else ""


def _digest(key: str) -> bytes:
    # Equal lengths: the comparison says nothing about the length of the right key.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _with_headers(send: Send, more: Sequence[tuple[bytes, bytes]]) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *more]
        await send(message)

    return sending


async def _preflight(send: Send, headers: Headers) -> None:
    asked = headers.get("access-control-request-headers", "authorization, content-type")
    allowed = [
        (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
        (b"access-control-allow-headers", asked.encode("latin-1")),
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": allowed})
    await send({"type": "http.response.body", "body": b""})


async def read_body(request: Request, limit: int) -> bytes:
    """The body, never more than `limit` bytes of it and never for long. Its rest is thrown away unseen."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(400, f"the content type is {kind[:100]!r}; send Content-Type: application/json")
    too_large = ApiError(413, f"the body is larger than the {limit} bytes allowed", code="body_too_large")
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > limit:
        with suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(LINGER_SECONDS):
                await _at_most(request, limit, too_large)
        raise too_large
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _at_most(request, limit, too_large)
    except TimeoutError as error:
        late = ApiError(408, f"the body did not come within {BODY_SECONDS:g} s", code="request_timeout")
        late.headers["Connection"] = "close"
        raise late from error
    except ClientDisconnect as error:
        raise ApiError(400, "the client left before its request was complete") from error


async def _at_most(request: Request, limit: int, otherwise: ApiError) -> bytes:
    body, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > DRAIN * limit:
            break
        if size <= limit:
            body += chunk
    if size > limit:
        raise otherwise
    return bytes(body)
