"""The OpenAPI document: which paths there are, what they take and every answer they can give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from duodecoding.server.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

Schema = dict[str, Any]

ERRORS = {
    400: "the request is wrong",
    401: "the API key is missing or wrong",
    404: "no such model",
    405: "not this method",
    408: "the body did not come in time",
    413: "the body is too large",
    429: "the queue is full; see Retry-After",
    500: "the engine failed",
    503: "the model is being loaded, the answer took too long, or the server is shutting down",
}


def _record(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


TEXT, WHOLE, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
ANYTHING: Schema = {"type": "object"}
NULLABLE_TEXT = {"type": ["string", "null"]}


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


ERROR = _record(error=_record(message=TEXT, type=TEXT, param=NULLABLE_TEXT, code=NULLABLE_TEXT))
MODEL = _record(id=TEXT, object=TEXT, created=WHOLE, owned_by=TEXT)
FINISH = {"enum": ["stop", "length"]}
LOGPROBS = {"type": ["object", "null"]}
HEAD = {"id": TEXT, "object": TEXT, "created": WHOLE, "model": TEXT, "system_fingerprint": TEXT}
USAGE = _record(prompt_tokens=WHOLE, completion_tokens=WHOLE, total_tokens=WHOLE, prompt_tokens_details=ANYTHING)
TIMINGS = _record(
    cache_n=WHOLE,
    prompt_n=WHOLE,
    prompt_ms=NUMBER,
    prompt_per_token_ms=NUMBER,
    prompt_per_second=NUMBER,
    predicted_n=WHOLE,
    predicted_ms=NUMBER,
    predicted_per_token_ms=NUMBER,
    predicted_per_second=NUMBER,
    draft_n=WHOLE,
    draft_n_accepted=WHOLE,
)


def _answer(**content: Schema) -> Schema:
    choice = _record(index=WHOLE, finish_reason=FINISH, logprobs=LOGPROBS, **content)
    return _record(**HEAD, choices=_list(choice), usage=USAGE, timings=TIMINGS)


@dataclass(frozen=True)
class Operation:
    name: str  # of the method that serves it
    summary: str
    answer: Schema
    asks: type | None = None
    errors: tuple[int, ...] = (401, 405, 500, 503)
    streams: bool = False
    media: str = "application/json"
    path: Mapping[str, str] = field(default_factory=dict)  # parameters, with an example each


ASKING = (400, 401, 405, 408, 413, 500, 503)
ANSWERING = (*ASKING, 404, 429)
CHAT_ANSWER = _answer(message=_record(role=TEXT, content=TEXT, refusal={"type": "null"}))
INFO = _record(
    version=TEXT,
    model=TEXT,
    draft=NULLABLE_TEXT,
    mode=TEXT,
    modes=_list(TEXT),
    speculation=TEXT,
    context=WHOLE,
    defaults=ANYTHING,
)

PATHS: dict[str, dict[str, Operation]] = {
    "/v1/chat/completions": {"post": Operation("chat", "Answer a chat", CHAT_ANSWER, ChatRequest, ANSWERING, streams=True)},
    "/v1/completions": {
        "post": Operation("completions", "Continue a text", _answer(text=TEXT), CompletionRequest, ANSWERING, streams=True)
    },
    "/v1/models": {"get": Operation("models", "What is served", _record(object=TEXT, data=_list(MODEL)))},
    "/v1/models/{model:path}": {
        "get": Operation("model", "One model", MODEL, errors=(401, 404, 405, 500, 503), path={"model": "its id"})
    },
    "/tokenize": {"post": Operation("tokenize", "Text to token ids", _record(tokens=_list(WHOLE)), TokenizeRequest, ASKING)},
    "/detokenize": {"post": Operation("detokenize", "Token ids to text", _record(content=TEXT), DetokenizeRequest, ASKING)},
    "/duo/info": {"get": Operation("info", "The engine behind this server", INFO)},
    "/health": {"get": Operation("health", "Is the model loaded?", _record(status=TEXT), errors=(405, 500, 503))},
    "/metrics": {"get": Operation("metrics_text", "For Prometheus", TEXT, errors=(401, 405, 500), media="text/plain")},
    "/version": {"get": Operation("version", "Of the software", _record(version=TEXT), errors=(401, 405, 500))},
}


def document(version: str) -> Schema:
    requests = [operation.asks for methods in PATHS.values() for operation in methods.values() if operation.asks is not None]
    references, components = msgspec.json.schema_components(requests, ref_template="#/components/schemas/{name}")
    asks = dict(zip(requests, references, strict=True))
    paths = {
        path.replace(":path", ""): {method: _described(operation, asks) for method, operation in methods.items()}
        for path, methods in PATHS.items()
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "DuoDecoding", "version": version},
        "paths": paths,
        "components": {"schemas": {**components, "Error": ERROR}, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


def _described(operation: Operation, asks: Mapping[type, Schema]) -> Schema:
    content: Schema = {operation.media: {"schema": operation.answer}}
    if operation.streams:
        content["text/event-stream"] = {"schema": _record(data=TEXT)}  # of each event: a JSON object, at the end [DONE]
    error = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    described: Schema = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": {
            "200": {"description": "done", "content": content},
            **{str(status): {"description": ERRORS[status], **error} for status in operation.errors},
        },
    }
    if operation.asks is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": asks[operation.asks]}}}
    if operation.path:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "description": text, "schema": {"type": "string", "minLength": 1}}
            for name, text in operation.path.items()
        ]
    return described
