"""The server's paths: OpenAI's API, what operators ask for, and the page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from duodecoding import __version__
from duodecoding.errors import DuoError
from duodecoding.llm import LLM
from duodecoding.server import openapi
from duodecoding.server.engines import Engines, Job
from duodecoding.server.gate import CLIENT, Gate, read_body
from duodecoding.server.metrics import Metrics
from duodecoding.server.reply import Reply, encode
from duodecoding.server.requests import (
    COPIED,
    Answering,
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    as_api_error,
    check_model,
    checked_params,
    parse,
)
from duodecoding.server.shapes import Writer
from duodecoding.text import Detokenizer
from duodecoding.types import SamplingParams, ServerConfig

T = TypeVar("T")

INLINE_BYTES = 1 << 14  # a longer text is made into tokens beside the event loop
DEFAULTS = ("max_tokens", *COPIED)  # of a request, where it says nothing; told to clients
FINGERPRINT = f"duo-{__version__}"
PAGE_HEADERS = {
    "Content-Security-Policy": "script-src 'unsafe-inline'; style-src 'unsafe-inline'; default-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Service:
    """The application's state, and its paths as methods."""

    def __init__(self, engines: Engines, config: ServerConfig, defaults: SamplingParams) -> None:
        self._engines, self._config, self._defaults = engines, config, defaults
        self._started = int(time.time())
        self._one_at_a_time = asyncio.Lock()  # tokenizers need not be safe to share
        self.metrics = Metrics(running=lambda: engines.running, waiting=lambda: len(engines.queue))

    def app(self) -> ASGIApp:
        app = FastAPI(
            title="DuoDecoding", version=__version__, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
        )
        app.add_exception_handler(ApiError, self._on_error)
        app.add_exception_handler(HTTPException, self._on_http_error)
        app.add_exception_handler(Exception, self._on_fault)
        for path, methods in openapi.PATHS.items():
            for method, operation in methods.items():
                app.add_route(path, getattr(self, operation.name), methods=[method.upper()])
        app.add_route("/openapi.json", self._openapi, methods=["GET"])
        app.add_route("/", self._page, methods=["GET"])
        return Gate(app, self._config)

    # -- answers

    async def chat(self, request: Request) -> Reply:
        asked = parse(await self._body(request), ChatRequest)
        llm = self._llm_for(asked)
        messages = [message.plain() for message in asked.messages]
        size = sum(len(message["content"]) for message in messages)
        prompt = await self._engine_work(lambda: llm.chat_tokens(messages), size, "messages")
        return await self._reply(request, asked, llm, prompt, "messages")

    async def completions(self, request: Request) -> Reply:
        asked = parse(await self._body(request), CompletionRequest)
        llm = self._llm_for(asked)
        prompt = asked.text_or_ids()
        if isinstance(prompt, str):
            text = prompt
            prompt = await self._engine_work(lambda: llm.vocabulary.tokenize(text, special=True, bos=True), len(text), "prompt")
        return await self._reply(request, asked, llm, prompt, "prompt")

    def _llm_for(self, asked: Answering) -> LLM:
        llm = self._engines.llm
        check_model(asked.model, self._names(llm))
        return llm

    async def _reply(self, request: Request, asked: Answering, llm: LLM, prompt: list[int], param: str) -> Reply:
        params = checked_params(asked, self._defaults)
        foreign = [token for token in params.logit_bias if token >= llm.vocabulary.size]
        if foreign:
            raise ApiError(400, f"logit_bias has token id {foreign[0]}, ids end at {llm.vocabulary.size - 1}", param="logit_bias")
        await self._engine_work(lambda: llm.check_prompt(prompt), 0, param)
        if params.json_schema:
            await self._engine_work(lambda: llm.constraint(params), INLINE_BYTES, "response_format")
        mode = asked.duo.mode if asked.duo else None
        if mode is not None and mode not in llm.modes:
            raise ApiError(400, f"the mode {mode} needs another draft; this server can do {', '.join(llm.modes)}", param="duo.mode")
        job = Job(request.scope[CLIENT], prompt, params, mode)
        writer = Writer(asked, job, self._names(llm)[0], FINGERPRINT, llm.vocabulary)
        self._engines.submit(job)
        return Reply(job, writer, self._engines, self.metrics, stream=asked.stream, timeout=self._config.request_timeout)

    async def _engine_work(self, work: Callable[[], T], size: int, param: str) -> T:
        """Something of the engine that a client's text may be unfit for."""
        try:
            if size < INLINE_BYTES:
                return work()
            async with self._one_at_a_time:
                return await asyncio.to_thread(work)
        except DuoError as error:
            raise as_api_error(error, param) from error

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, self._config.max_body_mb << 20)

    # -- what is served

    def _names(self, llm: LLM) -> list[str]:
        return [self._config.alias, llm.model_name] if self._config.alias else [llm.model_name]

    async def models(self, _request: Request) -> Response:
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        check_model(request.path_params["model"], self._names(self._engines.llm))
        return _json(self._model())

    def _model(self) -> dict[str, Any]:
        name = self._names(self._engines.llm)[0]
        return {"id": name, "object": "model", "created": self._started, "owned_by": "duodecoding"}

    async def tokenize(self, request: Request) -> Response:
        asked = parse(await self._body(request), TokenizeRequest)
        vocabulary = self._engines.llm.vocabulary

        def work() -> list[int]:
            return vocabulary.tokenize(asked.content, special=asked.parse_special, bos=asked.add_special)

        tokens = await self._engine_work(work, len(asked.content), "content")
        return _json({"tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        asked = parse(await self._body(request), DetokenizeRequest)
        vocabulary = self._engines.llm.vocabulary
        if asked.tokens and max(asked.tokens) >= vocabulary.size:
            raise ApiError(400, f"token id {max(asked.tokens)} is outside the vocabulary of {vocabulary.size}", param="tokens")
        text = Detokenizer(vocabulary.piece)
        return _json({"content": "".join(map(text.feed, asked.tokens)) + text.flush()})

    async def info(self, _request: Request) -> Response:
        llm = self._engines.llm
        return _json(
            {
                "version": __version__,
                "model": self._names(llm)[0],
                "draft": llm.draft_name,
                "mode": str(llm.config.mode),
                "modes": [str(mode) for mode in llm.modes],
                "speculation": llm.speculation,
                "context": llm.context,
                "defaults": {name: getattr(self._defaults, name) for name in DEFAULTS},
            }
        )

    # -- for operators

    async def health(self, _request: Request) -> Response:
        _ = self._engines.llm  # says why not
        return _json({"status": "ok"})

    async def metrics_text(self, _request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, _request: Request) -> Response:
        return _json({"version": __version__})

    async def _openapi(self, _request: Request) -> Response:
        return _json(openapi.document(__version__))

    async def _page(self, _request: Request) -> Response:
        page = files("duodecoding.server") / "page.html"
        if not page.is_file():
            raise HTTPException(404)
        return Response(page.read_bytes(), media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)

    # -- errors

    async def _on_error(self, _request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        self.metrics.error(error.status)
        return Response(error.body, error.status, error.headers, "application/json")

    async def _on_http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = {404: "there is no such path", 405: "this path does not take that method"}.get(error.status_code, error.detail)
        said = ApiError(error.status_code, f"{what}: {request.method} {request.scope['path'][:200]}")
        said.headers.update(error.headers or {})
        return await self._on_error(request, said)

    async def _on_fault(self, request: Request, _error: Exception) -> Response:
        return await self._on_error(request, ApiError(500, "the server failed; its log says how"))


def _json(record: object) -> Response:
    return Response(encode(record), media_type="application/json")
