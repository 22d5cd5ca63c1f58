"""Requests that nobody should send, made up by a seeded generator. Also used by `benchmarks/server.py --fuzz`."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/tokenize",
    "/detokenize",
    "/v1/models/x",
    "/",
    "/health",
    "/metrics",
    "/%00",
    "/v1/../x",
)
ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    10**40,
    -0.0,
    1e308,
    -1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\x00",
    "\U0001f600" * 50,
    "a" * 70_000,
    [],
    [[]],
    [None],
    {},
    {"": {}},
    [1, "a", None],
    {"type": "text"},
    [{"role": "user", "content": None}],
    [{"role": "user"}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
)
FIELDS = [
    *("messages", "prompt", "content", "tokens", "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k"),
    *("min_p", "seed", "stop", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs"),
    *("top_logprobs", "stream", "stream_options", "response_format", "duo", "n", "user", "tools", "functions", "best_of", "echo"),
    *("suffix", "add_special", "ignore_eos", "unknown_field", "__proto__"),
]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/tokenize": {"content": "hello"},
    "/detokenize": {"tokens": [99]},
}
SCHEMAS = (
    {},
    {"type": "object"},
    {"type": "wings"},
    {"not": {}},
    {"$ref": "#"},
    {"$ref": "http://x/y"},
    {"pattern": "(((a+)+)+)+$", "type": "string"},
)


def deep(depth: int, opening: bytes, closing: bytes) -> bytes:
    return opening * depth + b"1" + closing * depth


def body(random: random.Random, path: str) -> bytes:
    """Good fields with some odd ones, or bytes that are hardly JSON at all."""
    kind = random.randrange(10)
    if kind == 0:
        return random.randbytes(random.randrange(200))
    if kind == 1:
        return deep(random.choice([10, 500, 20_000]), *random.choice([(b"[", b"]"), (b'{"messages":', b"}"), (b'{"a":[', b"]}")]))
    fields: dict[str, Any] = dict(GOOD.get(path, {}))
    for _ in range(random.randrange(4)):
        fields[random.choice(FIELDS)] = random.choice(ODD_VALUES)
    if kind == 2:
        schema = random.choice(SCHEMAS)
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    data = json.dumps(fields).encode()
    if kind == 3 and data:
        place = random.randrange(len(data))
        return data[:place] + random.choice([b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\x00", b""]) + data[place + 1 :]
    return data[: random.randrange(len(data) + 1)] if kind == 4 else data


def bad_requests(count: int, seed: int = 0) -> Iterator[tuple[str, str, bytes, dict[str, str]]]:
    """Method, path, body and headers of each."""
    chance = random.Random(seed)
    for _ in range(count):
        path = chance.choice(PATHS[:2]) if chance.random() < 0.7 else chance.choice(PATHS)
        method = "POST" if chance.random() < 0.9 else chance.choice(["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
        headers = {"Content-Type": "application/json"}
        if chance.random() < 0.05:
            headers["Content-Type"] = chance.choice(["", "text/plain", "multipart/form-data", "application/json; charset=utf-16"])
        if chance.random() < 0.05:
            headers["Authorization"] = chance.choice(["", "Bearer", "Bearer \xff", "Basic eDp5", "Bearer " + "k" * 5000])
        yield method, path, body(chance, path), headers
